"""How a LongBench row becomes a prompt: our own words per kind of task, recorded in every trace."""

from __future__ import annotations

from collections.abc import Iterable

from perturbkv.datasets.registry import known

_PLAIN = ("", "\n\n{input}")
_WORDING = {
    "single-document QA": (
        "Below is a document. A question about it follows.\n\n",
        "\n\nQuestion: {input}\nGive the answer in a few words, taken from the document.\nAnswer:",
    ),
    "multi-document QA": (
        "Below are several passages. A question that they answer together follows.\n\n",
        "\n\nQuestion: {input}\nGive the answer in a few words and nothing else.\nAnswer:",
    ),
    "summarisation": (
        "Read the following text, then sum it up.\n\n",
        "\n\n{input}\nSum up the text above in one page.\nSummary:",
    ),
    "few-shot": ("Here are examples of a task. Do the last one in the same manner.\n\n", "\n\n{input}"),
    "synthetic": ("Read the paragraphs carefully; a question on all of them follows.\n\n", "\n\n{input}\nAnswer:"),
    "code": ("Continue this code with its next line.\n\n", "{input}"),
}


def kind_of(dataset: str) -> str:
    """LongBench's kind of task; empty for a name that is not LongBench's."""
    return next((info.kind for info in known() if info.name == dataset), "")


def around(dataset: str) -> tuple[str, str]:
    """What stands before the context, and after it with `{input}` for the question."""
    return _WORDING.get(kind_of(dataset), _PLAIN)


def record(kinds: Iterable[str]) -> dict[str, list[str]]:
    """The wording that was used, for the trace."""
    return {kind: list(_WORDING[kind]) for kind in sorted(kinds) if kind in _WORDING}
