"""`text`: decode steps read the full run's own text, an accepted answer or a given text; log p of its tokens."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import perturbkv as pk
from perturbkv.configs.run import RunConfig
from perturbkv.datasets.encode import Prompt, encode
from perturbkv.datasets.sample import Sample
from perturbkv.errors import DatasetError, ModelError, TraceError, UnknownNameError
from perturbkv.trace import SampleTrace
from tests.oracle import theory
from tests.oracle.sample import QUESTION, Reference
from tests.pipeline.test_a_traced_sample_equals_the_oracle import STEPS, check_log_p
from tests.support.models import exact_adapter, tiny_adapter, token_ids
from tests.support.oracle_cases import CONFIGS
from tests.support.resolved import trace_sample
from tests.support.traces import trace

IDS = token_ids(36, seed=1)
TEXT = token_ids(STEPS + 1, seed=8)
SCENARIOS = ("regular", "context-only")


def traced(text: tuple[int, ...], scenario: str, steps: int = STEPS) -> tuple[Any, RunConfig]:
    run = RunConfig("m", "d", CONFIGS["pair"]("kv"), steps=steps, scenario=scenario, text="given")
    prompt = Prompt("s", IDS, 0, question_tokens=QUESTION, text_tokens=text)
    return trace_sample(exact_adapter("llama", 4, 2), prompt, run), run


@pytest.mark.parametrize("scenario", SCENARIOS)
def test_log_p_of_a_given_text(scenario: str) -> None:
    sample, run = traced(TEXT, scenario)
    reference = Reference(exact_adapter("llama", 4, 2).model, IDS, run, text=TEXT)
    assert sample.arrays["token_id"].tolist() == list(TEXT[:STEPS])
    check_log_p(sample, reference)


@pytest.mark.parametrize("scenario", SCENARIOS)
def test_perplexity_is_a_loop_over_the_texts_tokens(scenario: str) -> None:
    """Of each token that a step gives, and in context-only of the first, from a cache with masked entries."""
    texts = [token_ids(STEPS + 1, seed=seed) for seed in (8, 9)]
    (one, run), (other, _) = (traced(text, scenario) for text in texts)
    options = {"configs": run.configs, "scenario": scenario, "text": "given"}
    result = pk.perplexity(trace(one, SampleTrace("other", other.arrays), **options))
    adapter, logs = exact_adapter("llama", 4, 2), []
    first = 0 if scenario == "context-only" else 1
    for text in texts:
        reference = Reference(adapter.model, IDS, run, text=text)
        begins = [reference.prompt[-1], *(reference.decoded(one)[len(IDS) - reference.n - 1] for one in run.configs)]
        runs = [reference.full, *(reference.evicted(config) for config in run.configs)]
        logs.append([
            sum(theory.log_probability(step.logits, token)
                for step, token in zip([begin, *steps][first:], text[first:], strict=False)) / (len(text) - first)
            for begin, steps in zip(begins, runs, strict=True)
        ])  # fmt: skip
    full, *evicted = (math.exp(-sum(each) / len(texts)) for each in zip(*logs, strict=True))
    assert result.tokens == (STEPS + 1 - first,) * 2
    assert result.full == pytest.approx(full, rel=1e-6)
    assert [one.perplexity for one in result.configs] == pytest.approx(evicted, rel=1e-6)
    assert [one.ratio for one in result.configs] == pytest.approx([one / full for one in evicted], rel=1e-6)


@pytest.mark.parametrize(("length", "measured"), [(1, 1), (2, 1), (3, 2), (9, 4)])
def test_a_text_of_k_tokens_has_k_less_1_steps(length: int, measured: int) -> None:
    """At least one, whose next token may be missing, and never more than `steps`."""
    text = token_ids(length, seed=2)
    arrays = traced(text, "regular", steps=4)[0].arrays
    following = list(text[1 : measured + 1])
    assert int(arrays["steps_measured"]) == measured
    assert arrays["token_id"].tolist() == list(text[:measured]) + [-1] * (4 - measured)
    assert arrays["next_token_id"].tolist() == following + [-1] * (4 - len(following))
    known = np.arange(4) < len(following)
    for log_p in (arrays["text_logp_full"], *arrays["text_logp"]):
        assert (np.isfinite(log_p) == known).all()


def test_an_own_text_that_is_given_measures_the_same() -> None:
    """Every number of a run along its own text, bit for bit."""
    adapter, run = tiny_adapter(), RunConfig("m", "d", CONFIGS["pair"]("kv"), steps=3)
    own = trace_sample(adapter, Prompt("s", IDS, 0), run).arrays
    text = (*own["token_id"].tolist(), int(own["next_token_id"][-1]))
    given = RunConfig("m", "d", run.configs, steps=3, text="given")
    again = trace_sample(adapter, Prompt("s", IDS, 0, text_tokens=text), given).arrays
    assert (own.keys() - again.keys(), again.keys() - own.keys()) == (set(), {"text_tokens"})
    assert int(again["text_tokens"]) == len(text)
    for name, array in own.items():
        np.testing.assert_array_equal(array, again[name], err_msg=name)


class Words:
    """A tokenizer of words with the space before them, and of single line breaks; two line breaks are one token."""

    chat_template = ""

    def __init__(self) -> None:
        self.known: dict[str, int] = {}

    def __call__(self, text: str, add_special_tokens: bool = True) -> dict[str, list[int]]:
        pieces = re.findall(r"\n\n$|\n| ?[^ \n]+| ", text)
        return {"input_ids": [self.known.setdefault(piece, len(self.known)) for piece in pieces]}

    def words(self, ids: Any) -> list[str]:
        return [list(self.known)[token] for token in ids]


@pytest.mark.parametrize(
    ("prompt", "prefix", "answer", "expected"),
    [
        ("How many? The number is", "", "17 of them", [" 17", " of", " them"]),
        ("How many?", "The number is", "17", [" 17"]),
        ("How many?\n", "", "17", ["17"]),
        ("How many?", "", "\n17", ["\n", "17"]),
        ("How many?\n\n", "", "17", ["17"]),  # with the text the two line breaks would be two tokens
        ("How many?", "", "", []),
    ],
)
def test_an_answer_is_encoded_as_it_would_be_written(
    prompt: str, prefix: str, answer: str, expected: list[str]
) -> None:
    tokenizer: Any = Words()
    sample = Sample("s", prompt, answers=(answer, "else"), answer_prefix=prefix, text=answer)
    made = encode(sample, tokenizer, chat_template=False, max_tokens=None)
    assert tokenizer.words(made.answer_tokens) == tokenizer.words(made.text_tokens) == expected


def test_rows_and_python_give_a_text(tmp_path: Path) -> None:
    model, data = tiny_adapter(), tmp_path / "rows.jsonl"
    rows = [{"prompt": "Paris is in", "text": "France."}, {"context": "Paris is", "input": "in", "text": " France."}]
    data.write_text("\n".join(map(json.dumps, rows)))
    read = pk.load_prompts(str(data), model, chat_template=False)
    made = pk.Prompt.from_text("Paris is in", model, continuation="France.", chat_template=False)
    assert {tuple(one.text_tokens) for one in (*read, made)} == {
        tuple(model.tokenizer(" France.", add_special_tokens=False)["input_ids"])
    }


@pytest.mark.parametrize(
    ("text", "fields", "error", "said"),
    [
        ("answer", {"answers": ("17",)}, DatasetError, "expected an accepted answer.* for --text answer, got none"),
        ("given", {}, DatasetError, "expected a text.* for --text given, got none or an empty one in sample 's'"),
        ("given", {"text_tokens": (5, 10**6)}, ModelError, "expected token ids below"),
        ("given", {"text_tokens": token_ids(500)}, DatasetError, "with 480 decode steps more than the model's 512"),
        ("mine", {}, UnknownNameError, "unknown text 'mine'"),
    ],
)
def test_a_text_that_cannot_be_read_is_refused(text: str, fields: Any, error: Any, said: str) -> None:
    with pytest.raises(error, match=said):
        settings = pk.Settings(steps=480, text=text)
        pk.measure(tiny_adapter(), Prompt("s", IDS, 0, **fields), pk.grid(24, window=8), settings=settings)


def test_a_text_of_one_token_has_no_perplexity(tmp_path: Path) -> None:
    """It is left out, and counted; where no text has more, that is one line."""
    texts = {"one": token_ids(1), "two": token_ids(2), "three": token_ids(3)}
    prompts = [Prompt(name, IDS, 0, text_tokens=text) for name, text in texts.items()]
    settings = pk.Settings(steps=2, text="given")
    measured = pk.measure(tiny_adapter(), prompts, pk.grid(24, window=8), settings=settings, progress=False)
    result = pk.perplexity(measured)
    assert (result.samples, result.tokens, result.left_out) == (("two", "three"), (1, 2), 1)
    said = "Perplexity leaves out 1 sample whose text is one token, which the prefill gives."
    limited = pk.safe_budget(measured, max_perplexity=1.5)
    assert result.caveats()[0] == limited.caveats()[0] == said
    assert (limited.left_out, limited.scope()[-1]) == (1, "n = 3 samples, of perplexity 2")
    (tested,) = limited[0].verdicts[0].budgets
    config, total = measured.run.configs.index(tested.config), 0.0
    for sample, tokens in ((1, 1), (2, 2)):
        full, evicted = (measured.arrays[name][sample] for name in ("text_logp_full", "text_logp"))
        total += np.exp(sum(float(full[step]) - float(evicted[config, step]) for step in range(tokens)) / tokens)
    assert (tested.mean, tested.bound) == (pytest.approx(total / 2), np.inf)
    assert limited[0].state == "too few samples"
    alone = pk.measure(tiny_adapter(), prompts[:1], pk.grid(24, window=8), settings=settings, progress=False)
    for asked in (pk.perplexity, lambda it: pk.safe_budget(it, max_perplexity=1.5)):
        with pytest.raises(TraceError, match="needs a text of two tokens or more, got none"):
            asked(alone)
