"""RULER's tasks as lm-eval 0.4.13 describes them: which function makes one, how long an answer is, what grades it.

Its `tasks/ruler/*.yaml` are read as files, each with the one that it includes.

RULER's metrics by lm-eval's own functions: the share of the accepted answers that stand in the text, in any case.
"""

from __future__ import annotations

import functools
import importlib.metadata
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from perturbkv.configs.task_kinds import RULER_PREFIX
from perturbkv.datasets import wording
from perturbkv.datasets.external_code import run_file
from perturbkv.errors import DatasetError

INSTALL = 'pip install "perturbkv[ruler]"'
CONTEXT = "{context}"
_FETCHING = ("lm_eval", "datasets", "requests", "tqdm")
_OTHERWISE = (
    OSError, SyntaxError, ImportError, LookupError, TypeError, ValueError, AttributeError, AssertionError,
)  # fmt: skip
METRICS = {"process_results": "string_match_all", "process_results_part": "string_match_part"}
"""lm-eval's function that grades -> the metric that it calls."""


@dataclass(frozen=True)
class Task:
    """How RULER asks and grades.

    Attributes:
        name: with `ruler:` before it.
        maker: file and function that make its rows: `vt_utils`, `get_vt_dataset`.
        template: of a prompt and mostly its answer's beginning, with `{context}` in it.
        grader: the function of `common_utils` that grades an answer.
        generation_length: tokens of an answer at most.
        until: texts before which an answer ends.
        delimiter: between prompt and answer's beginning, where no chat template stands between them.
        version: of lm-eval.
    """

    name: str
    maker: tuple[str, str]
    template: str
    grader: str
    generation_length: int
    until: tuple[str, ...]
    delimiter: str
    version: str

    @property
    def metric(self) -> str:
        """The metric's own name."""
        return METRICS[self.grader]

    @property
    def question_begins(self) -> str:
        """What the template goes on with behind the context, up to the first word's end: the question begins there."""
        found = re.match(r"\s*\S+", self.template.partition(CONTEXT)[2])
        return found[0] if found else ""

    def record(self) -> dict[str, Any]:
        """What was used, for the trace."""
        return {
            "from": f"lm-eval {self.version}",
            "template": self.template,
            "generation_length": self.generation_length,
            "metric": self.metric,
            "until": list(self.until),
            "chat_template": True,
        }


def folder() -> Path:
    """lm-eval's folder of RULER, found without importing it. Raises DatasetError where lm-eval is missing."""
    return wording.lm_eval_folder("RULER's tasks come from lm-eval", "ruler", INSTALL)


def read(name: str) -> Task:
    """One of RULER's tasks. Raises DatasetError where lm-eval or a package is missing, or is another than ours."""
    where = folder()
    with explained(name):
        found = _merged(where / f"{name.removeprefix(RULER_PREFIX)}.yaml")
        file, function = str(found["custom_dataset"]).split(".")
        answer = found["generation_kwargs"]
        made = Task(
            name,
            (file, function),
            _template(where / f"{file}.py"),
            str(found["process_results"]).removeprefix("common_utils."),
            int(answer["max_gen_toks"]),
            tuple(answer["until"]),
            str(found["target_delimiter"]),
            importlib.metadata.version("lm_eval"),
        )
        _check(made)
    return made


@contextmanager
def explained(name: str, source: Callable[[], Path | None] = lambda: None) -> Iterator[None]:
    """Whatever lm-eval's files raise becomes a DatasetError; `source` names a file of data that they have read."""
    try:
        yield
    except ModuleNotFoundError as error:
        msg = f"RULER's tasks need {error.name or 'packages'}, which is not installed; {INSTALL}"
        raise DatasetError(msg) from None
    except _OTHERWISE as error:
        version, said = importlib.metadata.version("lm_eval"), " ".join(str(error).split())[:120]
        path = source()
        origin, do = (f" from {path}", f"bring the whole file, or {INSTALL}") if path else ("", INSTALL)
        got = f"lm-eval {version} ({type(error).__name__}: {said})"
        msg = f"expected '{name}' as lm-eval 0.4.13 makes it{origin}, got {got}; {do}"
        raise DatasetError(msg) from None


def _check(task: Task) -> None:
    """Raise KeyError for a grader that we do not know, ValueError for a template that does not ask behind a context."""
    _ = task.metric
    if not task.question_begins:
        msg = f"no question behind {CONTEXT} in its template"
        raise ValueError(msg)


def _template(path: Path) -> str:
    """Of the rest of lm-eval and of what fetches data, the file gets nothing."""
    return str(run_file(path, lambda name: _Nothing() if name.split(".")[0] in _FETCHING else None)["TEMPLATE"])


class _Nothing:
    """A module all of whose names are None."""

    def __getattr__(self, name: str) -> None:
        return None


def _merged(path: Path) -> dict[str, Any]:
    """A YAML file over the one that it includes."""
    found = dict(wording.parsed(path))
    included = found.pop("include", None)
    return {**_merged(path.parent / str(included)), **found} if included else found


_LENGTH = 4096
"""lm-eval files a score under its prompt's length; any will do."""


def grader(task: str) -> tuple[str, Callable[[str, Sequence[str]], float]]:
    """The metric's name, and what gives text of an answer and accepted answers their score, 0 to 1.

    Raises DatasetError where lm-eval is missing or is another than ours.
    """
    worded = read(task)
    function = _functions()[worded.grader]

    def grade(text: str, answers: Sequence[str]) -> float:
        for end in worded.until:
            text = text.split(end)[0]
        row = {"outputs": list(answers), "max_length": _LENGTH}
        return float(function(row, [text])[str(_LENGTH)])

    return worded.metric, grade


@functools.cache
def _functions() -> dict[str, Any]:
    """lm-eval's functions, without transformers' tokenizers, which they do not need."""
    unused = SimpleNamespace(AutoTokenizer=None)
    return run_file(folder() / "common_utils.py", lambda name: unused if name == "transformers" else None)
