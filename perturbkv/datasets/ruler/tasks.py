"""RULER's tasks as lm-eval 0.4.13 defines them: the function of their rows, answer length, and metric.

The files `tasks/ruler/*.yaml` are read with the files that they include.
"""

from __future__ import annotations

import importlib.metadata
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from perturbkv.configs.task_kinds import RULER_PREFIX
from perturbkv.datasets import wording
from perturbkv.datasets.external_code import run_file
from perturbkv.errors import DatasetError, install_extra

INSTALL = install_extra("ruler")
CONTEXT = "{context}"
_DOWNLOADING = ("lm_eval", "datasets", "requests", "tqdm")
_FILE_ERRORS = (
    OSError, SyntaxError, ImportError, LookupError, TypeError, ValueError, AttributeError, AssertionError,
)  # fmt: skip
METRICS = {"process_results": "string_match_all", "process_results_part": "string_match_part"}
"""lm-eval's grading function -> the metric that it calls."""


@dataclass(frozen=True)
class Task:
    """Prompt and metric of a RULER task.

    Attributes:
        name: name, with `ruler:` before it.
        maker: file and function that make its rows: `vt_utils`, `get_vt_dataset`.
        template: the prompt and mostly the beginning of its answer, with `{context}` in it.
        metric: name of its metric, `string_match_all` or `string_match_part`.
        generation_length: longest answer in tokens.
        until: texts before which an answer ends.
        delimiter: text between prompt and answer's beginning, where no chat template separates them.
        version: version of lm-eval.
    """

    name: str
    maker: tuple[str, str]
    template: str
    metric: str
    generation_length: int
    until: tuple[str, ...]
    delimiter: str
    version: str

    @property
    def question_start(self) -> str:
        """The beginning of the question: the template's text after the context, through its first word."""
        match = re.match(r"\s*\S+", self.template.partition(CONTEXT)[2])
        return match[0] if match else ""

    def record(self) -> dict[str, Any]:
        """Return the task's wording as JSON for the trace."""
        return {
            "from": f"lm-eval {self.version}",
            "template": self.template,
            "generation_length": self.generation_length,
            "metric": self.metric,
            "until": list(self.until),
            "chat_template": True,
        }


def folder() -> Path:
    """Return lm-eval's folder of RULER, found without importing lm-eval. Raises DatasetError if it is missing."""
    return wording.lm_eval_folder("RULER's tasks come from lm-eval", "ruler", INSTALL)


def read(name: str) -> Task:
    """Return a RULER task from lm-eval's files. Raises DatasetError if files or packages are missing or unknown."""
    files = folder()
    with explain_errors(name):
        document = _read_merged(files / f"{name.removeprefix(RULER_PREFIX)}.yaml")
        file, function = str(document["custom_dataset"]).split(".")
        answer = document["generation_kwargs"]
        code = run_file(
            files / f"{file}.py", lambda name: _EmptyModule() if name.split(".")[0] in _DOWNLOADING else None
        )
        task = Task(
            name,
            (file, function),
            str(code["TEMPLATE"]),
            METRICS[str(document["process_results"]).removeprefix("common_utils.")],
            int(answer["max_gen_toks"]),
            tuple(answer["until"]),
            str(document["target_delimiter"]),
            importlib.metadata.version("lm_eval"),
        )
        if not task.question_start:
            raise ValueError(f"no question behind {CONTEXT} in its template")
    return task


@contextmanager
def explain_errors(name: str, source: Callable[[], Path | None] = lambda: None) -> Iterator[None]:
    """Turn any exception of lm-eval's files in the block into a DatasetError about the task `name`.

    `source` returns the path of the data file that they have read; None: none.
    """
    try:
        yield
    except ModuleNotFoundError as error:
        raise DatasetError(
            f"RULER's tasks need {error.name or 'packages'}, which is not installed; {INSTALL}"
        ) from None
    except _FILE_ERRORS as error:
        version, message = importlib.metadata.version("lm_eval"), " ".join(str(error).split())[:120]
        path = source()
        origin, do = (f" from {path}", f"bring the whole file, or {INSTALL}") if path else ("", INSTALL)
        got = f"lm-eval {version} ({type(error).__name__}: {message})"
        raise DatasetError(f"expected '{name}' as lm-eval 0.4.13 makes it{origin}, got {got}; {do}") from None


class _EmptyModule:
    """A substitute for a module, each of whose attributes is None."""

    def __getattr__(self, name: str) -> None:
        return None


def _read_merged(path: Path) -> dict[str, Any]:
    """Return a YAML file's document, merged over the document of the file that it includes."""
    document = dict(wording.read_yaml(path))
    included = document.pop("include", None)
    return {**_read_merged(path.parent / str(included)), **document} if included else document
