"""What commands share that look at a finished file of answers: its place, where results go, what JSON says of it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from typer import Argument, Option

from perturbkv.analyses.json_values import run_object
from perturbkv.cli.figure_options import FigureOptions
from perturbkv.cli.leaving import Leaving
from perturbkv.cli.options import JsonOption

_REQUIRED: Any = ...
"""What Typer asks for: a field behind others with defaults needs one of its own."""

if TYPE_CHECKING:
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

    def leaving(self, name: str) -> Leaving:
        """Where what an analysis of this name finds is left."""
        return Leaving(name, self.folder, self, self.overwrite, self.as_json)


def about(answers: WrittenAnswers) -> dict[str, Any]:
    """What JSON says of the answers that were looked at."""
    return {"answers": answers.source, "answers_digest": answers.digest, "run": run_object(answers.run)}
