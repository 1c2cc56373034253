"""Where a result that is of no trace is left: figures and one JSON file under its name, and the numbers on stdout."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from perturbkv.cli import console
from perturbkv.cli.figure_options import FigureOptions
from perturbkv.cli.saving import free, free_figures, save_figure
from perturbkv.errors import ConfigError
from perturbkv.storage.atomic_files import write_whole
from perturbkv.storage.output import WAIT_ALONE, Lock
from perturbkv.user_files import FileKind

if TYPE_CHECKING:
    from perturbkv.analyses.result import Result

_KIND = FileKind("results of ours", ConfigError)


@dataclass(frozen=True)
class Leaving:
    """A result's place.

    Attributes:
        name: of the analysis, and of its files.
        folder: where they go.
        look: how figures come out.
        overwrite: whether files of somebody else are replaced.
        as_json: whether the numbers go to stdout instead of tables.
    """

    name: str
    folder: Path
    look: FigureOptions
    overwrite: bool
    as_json: bool

    @property
    def path(self) -> Path:
        """The JSON file."""
        return self.folder / f"{self.name}.json"

    def check_free(self) -> None:
        """What an earlier call left there may be replaced.

        Raises OutputError where nothing can be written, ConfigError for a file that is none of ours.
        """
        free_figures(self.folder, [self.name], self.look.formats, self.overwrite)
        free(self.path, self.overwrite or self._is_ours())

    @contextmanager
    def held(self) -> Iterator[None]:
        """Hold the place while the block makes what goes there. Raises as `check_free`."""
        self.check_free()
        with Lock(self.path, advice=WAIT_ALONE):
            yield

    def leave(self, result: Result, about: Mapping[str, Any]) -> None:
        """Figures and JSON as files, `about` before the result's own numbers; and the numbers on stdout."""
        drawn, formats = result.plot(self.look.width_mm), self.look.formats
        figures = save_figure(drawn, result.identity, self.folder / self.name, formats, self.overwrite)
        document = {"analysis": self.name, **about, **result.to_dict(), "figures": figures}
        write_whole(self.path, lambda stream: stream.write(console.as_json(document).encode()))
        if self.as_json:
            console.print_json(document)
            return
        console.result(result, result.identity.lines()[0])
        console.say(f"written to {self.folder}")

    def _is_ours(self) -> bool:
        if not self.path.is_file():
            return False
        try:
            found = _KIND.read_json(self.path)
        except ConfigError:
            return False
        return isinstance(found, dict) and found.get("analysis") == self.name
