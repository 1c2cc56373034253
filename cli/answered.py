"""What commands share that look at a finished file of answers: where results go, and how they are left there."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from typer import Argument, Option

from perturbkv.analyses.objects import run_object
from perturbkv.cli import console
from perturbkv.cli.figure_options import FigureOptions
from perturbkv.cli.options import JsonOption
from perturbkv.cli.saving import free, free_figures, save_figure
from perturbkv.errors import ConfigError
from perturbkv.reading import FileKind
from perturbkv.storage.files import write_whole
from perturbkv.storage.lock import WAIT_ALONE, Lock

_REQUIRED: Any = ...
"""What Typer asks for: a field behind others with defaults needs one of its own."""
_KIND = FileKind("results of ours", ConfigError)

if TYPE_CHECKING:
    from perturbkv.analyses.result import Result
    from perturbkv.storage.answers_file import WrittenAnswers


@dataclass(frozen=True)
class AnswerOptions(FigureOptions):
    """Which answers, and where what is found of them goes."""

    file: Annotated[Path, Argument(help="generation.jsonl of perturbkv generate", show_default=False)] = _REQUIRED
    output: Annotated[
        Path | None, Option("--output", "-o", metavar="PATH", help="Folder", show_default="the file's")
    ] = None
    overwrite: Annotated[bool, Option("--overwrite", help="Replace what is there of the same name")] = False
    as_json: JsonOption = False
    typed: frozenset[str] = frozenset()

    @property
    def folder(self) -> Path:
        """Where results go."""
        return self.output or self.file.parent


@contextmanager
def left(name: str, folder: Path, formats: Sequence[str], overwrite: bool) -> Iterator[None]:
    """Hold the place of `name`.json and its figures in a folder while the block makes them.

    What an earlier call left there is replaced. Raises OutputError where nothing can be written, ConfigError for a file
    that is none of ours.
    """
    path = folder / f"{name}.json"
    free_figures(folder, [name], formats, overwrite)
    ours = path.is_file() and _is_ours(path, name)
    with Lock(free(path, overwrite or ours), advice=WAIT_ALONE):
        yield


def _is_ours(path: Path, name: str) -> bool:
    try:
        found = _KIND.read_json(path)
    except ConfigError:
        return False
    return isinstance(found, dict) and found.get("analysis") == name


def leave(name: str, result: Result, answers: WrittenAnswers, asked: AnswerOptions) -> None:
    """Figures and `name`.json as files; the numbers on stdout."""
    figures = save_figure(
        result.plot(asked.width_mm), result.identity, asked.folder / name, asked.formats, asked.overwrite
    )
    document = _document(name, result, answers) | {"figures": figures}
    write_whole(asked.folder / f"{name}.json", lambda stream: stream.write(console.as_json(document).encode()))
    if asked.as_json:
        console.print_json(document)
        return
    console.result(result, result.identity.lines()[0])
    console.say(f"written to {asked.folder}")


def _document(name: str, result: Result, answers: WrittenAnswers) -> dict[str, Any]:
    about = {"analysis": name, "answers": answers.source, "answers_digest": answers.digest}
    return {**about, "run": run_object(answers.run), **result.to_dict()}
