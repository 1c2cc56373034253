"""LongBench's wording: prompt, generation length and metric of each dataset, read from the installed lm-eval.

lm-eval (https://github.com/EleutherAI/lm-evaluation-harness) has them in `tasks/longbench/*.yaml`. They are read as
files: importing that package would take a second, with imports that nothing here needs.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from perturbkv.errors import DatasetError, install_extra

INSTALL = install_extra("longbench")
CONTEXT = "{{context}}"
WITHOUT_CHAT = ("trec", "triviaqa", "samsum", "lsht", "lcc", "repobench-p")
"""Few-shot and code datasets, whose prompts LongBench's own `pred.py` uses without a chat template."""


@dataclass(frozen=True)
class Wording:
    """Prompt and metric of a LongBench dataset.

    Attributes:
        dataset: its LongBench name.
        template: the prompt, in Jinja: `{{context}}` once, and mostly `{{question}}`.
        generation_length: longest answer in tokens.
        function: name of the function of lm-eval's `metrics.py` that grades an answer.
        until: texts before which an answer ends.
        version: version of lm-eval.
    """

    dataset: str
    template: str
    generation_length: int
    function: str
    until: tuple[str, ...]
    version: str

    @property
    def metric(self) -> str:
        """The metric's short name: `qa_f1` for the function `get_qa_f1_with_score`."""
        return self.function.removeprefix("get_").removesuffix("_with_score")

    @property
    def has_question(self) -> bool:
        """True if the prompt has a placeholder for a row's question."""
        return "question" in self.template

    def surrounding_text(self, question: str) -> tuple[str, str]:
        """Return the prompt's text before and after the context, with the question inserted verbatim."""
        before, after = self.template.split(CONTEXT)
        return _render(before, question), _render(after, question)

    def record(self) -> dict[str, Any]:
        """Return the wording as JSON for the trace."""
        return {
            "from": f"lm-eval {self.version}",
            "template": self.template,
            "generation_length": self.generation_length,
            "metric": self.function,
            "until": list(self.until),
            "chat_template": self.dataset not in WITHOUT_CHAT,
        }


def read(dataset: str) -> Wording:
    """Return the wording of a LongBench dataset from lm-eval's files.

    Raises DatasetError where lm-eval is missing or of an unknown version.
    """
    folder = lm_eval_folder(f"dataset '{dataset}' takes its wording from lm-eval")
    version = importlib.metadata.version("lm_eval")
    try:
        document = read_yaml(folder / f"{dataset}.yaml")
        wording = Wording(
            dataset,
            str(document["doc_to_text"]),
            int(document["generation_kwargs"]["max_gen_toks"]),
            str(document["process_results"]).removeprefix("metrics."),
            tuple(document["generation_kwargs"]["until"]),
            version,
        )
    except (OSError, KeyError, TypeError, ValueError) as error:
        raise DatasetError(
            f"expected {dataset}.yaml as lm-eval 0.4.13 has it, got that of lm-eval {version} ({error}); {INSTALL}"
        ) from None
    if wording.template.count(CONTEXT) != 1:
        raise DatasetError(
            f"expected {CONTEXT} once in {dataset}.yaml of lm-eval {version}, got '{wording.template}'; {INSTALL}"
        )
    return wording


def cut_answer(text: str, until: Sequence[str]) -> str:
    """Return an answer up to the first of the texts `until`, at which it ends."""
    for end in until:
        text = text.split(end)[0]
    return text


def lm_eval_folder(need: str, benchmark: str = "longbench", install: str = INSTALL) -> Path:
    """Return lm-eval's folder of a benchmark, without importing lm-eval.

    Raises DatasetError where lm-eval is not installed: `need`, a clause that ends in "lm-eval", begins its message, and
    the command `install` ends it.
    """
    spec = importlib.util.find_spec("lm_eval")
    if spec is None or not spec.submodule_search_locations:
        raise DatasetError(f"{need}, which is not installed; {install}")
    return Path(spec.submodule_search_locations[0]) / "tasks" / benchmark


def read_yaml(path: Path) -> Any:
    """Return the document of a YAML file of lm-eval, with `!function` tags as names. Raises ValueError if invalid."""
    import yaml

    loader = type("Loader", (yaml.SafeLoader,), {})
    loader.add_constructor("!function", lambda loader, node: loader.construct_scalar(node))  # type: ignore[attr-defined]
    try:
        return yaml.load(path.read_text(encoding="utf-8"), Loader=loader)  # a SafeLoader
    except yaml.YAMLError as error:
        raise ValueError(f"{path} is no YAML") from error


def _render(template: str, question: str) -> str:
    """Return a Jinja template's text as lm-eval renders it: a trailing newline stays, undefined names are errors."""
    import jinja2

    environment = jinja2.Environment(undefined=jinja2.StrictUndefined, keep_trailing_newline=True)
    return environment.from_string(template).render(question=question)
