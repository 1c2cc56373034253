"""What the caches of a needle run wrote can be read from its trace without a tokenizer."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from perturbkv.schema import ANSWER_TEXT, TEXT
from perturbkv.storage.trace.trace_file import describe, read_trace
from perturbkv.trace import Trace

Run = Callable[..., Any]
PROMPTS = ["--lengths", "300,340", "--depths", "0,1", "--haystack", "noise", "--max-new-tokens", 5]
NEEDLE = [*PROMPTS, "--steps", 1, "--compare", "snapkv:attention,snapkv:two-stage", "--json"]

GENERATE = ["--dataset", "needle", "--samples", 4, "--policy", "snapkv", "--selection", "attention", "--selection",
            "two-stage"]  # fmt: skip


@pytest.fixture
def small(model: Path) -> list[object]:
    return ["--model", model, "--budget", 40, "--window", 8]


def answers(trace: Trace) -> dict[str, list[str]]:
    """Sample -> the full cache's answer and every evicted one's."""
    rows = zip(trace.sample_ids, trace.arrays["answer_full"].tolist(), trace.arrays["answer"].tolist(), strict=True)
    return {name: [full, *evicted] for name, full, evicted in rows}


@pytest.mark.slow
def test_its_answers_are_the_tokenizers_and_those_that_generate_writes(
    perturbkv: Run, small: list[object], model: Path
) -> None:
    ran = perturbkv("needle", *small, *NEEDLE, "-o", "out")
    assert ran.code == 0, ran.err
    trace, tokenizer = read_trace(Path("out/trace.h5")), AutoTokenizer.from_pretrained(model)
    found = answers(trace)
    for place, name in enumerate(trace.sample_ids):
        rows = [trace.arrays["generated_full"][place], *trace.arrays["generated"][place]]
        tokens = [[token for token in row.tolist() if token >= 0] for row in rows]  # type: ignore[union-attr]
        shown = [tokenizer.decode(row, skip_special_tokens=True).replace("\0", "\u2400") for row in tokens]
        assert found[name] == shown
    generated = perturbkv("generate", *small, *PROMPTS, *GENERATE, "-o", "answers", "--json")
    assert generated.code == 0, generated.err
    written = [json.loads(line) for line in Path("answers/generation.jsonl").read_text().splitlines()[1:]]
    assert [row["sample"] for row in written] == list(trace.sample_ids)
    for row in written:
        texts = [row["full"]["text"], *(one["text"] for one in row["evicted"].values())]
        assert [text.replace("\0", "\u2400") for text in texts] == found[row["sample"]]
    expected = [json.loads(str(text)) for text in trace.arrays["expected_answers"]]
    assert expected == [row["answers"] for row in written]
    assert all(len(one) == 1 and one[0].isdigit() for one in expected)


@pytest.mark.slow
def test_no_text_leaves_answers_out_and_the_same_command_adds_them(perturbkv: Run, small: list[object]) -> None:
    path = Path("out/trace.h5")
    perturbkv("needle", *small, *NEEDLE, "-o", "whole")
    assert perturbkv("needle", *small, *NEEDLE, "--no-text", "-o", "out").code == 0
    without = read_trace(path)
    assert set(without.arrays).isdisjoint((*TEXT, *ANSWER_TEXT))
    assert perturbkv("list", path, "--json").json()["with_answers"] == []
    perturbkv("needle", *small, *NEEDLE, "-o", "out")
    assert answers(read_trace(path)) == answers(read_trace(Path("whole/trace.h5")))
    assert describe(path).with_answers == without.sample_ids
    assert perturbkv("list", path, "--json").json()["with_answers"] == list(without.sample_ids)
