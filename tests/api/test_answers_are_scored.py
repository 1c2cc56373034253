"""Answers that measure generates: what grades them, what is measured again; and templates of prompts of one's own."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import perturbkv as pk
from perturbkv.configs.resources import Resources
from perturbkv.errors import DatasetError, InterruptedRunError, TraceError, UnknownNameError
from perturbkv.models.adapter import Adapter
from perturbkv.pipeline.run import plan as planning
from perturbkv.pipeline.sample import one_sample
from tests.support.folders import model_folder
from tests.support.notebook import CONFIGS, prompt

TEXT = "The quick brown fox jumps over the lazy dog. " * 3


def rows(path: Path, count: int = 3, **more: Any) -> Path:
    made = [{"id": f"p{place}", "prompt": f"{place} {TEXT}", "answers": ["a b", "é"], **more} for place in range(count)]
    path.write_text("\n".join(map(json.dumps, made)))
    return path


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, int]]:
    """Sample and number of configurations of everything that is measured."""
    found: list[tuple[str, int]] = []
    original = one_sample.trace_sample

    def watched(adapter: Adapter, prompt: pk.Prompt, run: Any, *more: Any) -> Any:
        found.append((prompt.sample_id, len(run.configs)))
        return original(adapter, prompt, run, *more)

    monkeypatch.setattr(one_sample, "trace_sample", watched)
    return found


def scored(model: Adapter, data: Path, configs: Sequence[Any] = CONFIGS, **more: Any) -> pk.Trace:
    prompts = pk.load_prompts(str(data), model, **{name: more.pop(name) for name in ("metric",) if name in more})
    settings = pk.Settings(generate=more.pop("generate", 4))
    return pk.measure(model, prompts, configs, settings=settings, progress=False, **more)


def assert_same_answers(found: pk.Trace, expected: pk.Trace) -> None:
    for name in ("generated_full", "generated", "score_full", "score", "digits_full", "digits"):
        np.testing.assert_array_equal(found.arrays[name], expected.arrays[name], err_msg=name)


def test_answers_are_as_long_as_the_data_set_says_and_graded_by_its_metric(model: Adapter, tmp_path: Path) -> None:
    row = {"context": TEXT, "input": "Who?", "answers": ["a fox"], "dataset": "hotpotqa"}
    (tmp_path / "d.jsonl").write_text(json.dumps(row))
    made = scored(model, tmp_path / "d.jsonl", generate=None)
    assert made.run.generate == 32
    assert made.run.dataset_options["metrics"] == ["qa_f1"]
    assert not np.isnan(made.arrays["score"]).any()
    assert "metrics" not in scored(model, tmp_path / "d.jsonl", generate=0).run.dataset_options


@pytest.mark.parametrize("kinds", [("f1", "exact-match"), ("rouge-l",)])
def test_a_row_names_its_metric_and_the_caller_one_for_all(
    model: Adapter, tmp_path: Path, kinds: tuple[str, ...]
) -> None:
    path = rows(tmp_path / "d.jsonl", 1, metric=kinds[0])
    assert scored(model, path).run.dataset_options["metrics"] == [kinds[0]]
    assert scored(model, path, metric=kinds[-1]).run.dataset_options["metrics"] == [kinds[-1]]
    assert scored(model, rows(path, 1)).run.dataset_options["metrics"] == ["f1"]


@pytest.mark.slow
def test_a_run_that_was_killed_keeps_its_scores_and_grades_the_rest(
    model: Adapter, tmp_path: Path, measured: list[tuple[str, int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    path, data = tmp_path / "t.h5", rows(tmp_path / "d.jsonl")
    watched = one_sample.trace_sample

    def killed(adapter: Adapter, prompt: pk.Prompt, *more: Any) -> Any:
        if prompt.sample_id == "p2":
            raise KeyboardInterrupt
        return watched(adapter, prompt, *more)

    with monkeypatch.context() as patched, pytest.raises(InterruptedRunError, match="2 of 3 samples kept"):
        patched.setattr(one_sample, "trace_sample", killed)
        scored(model, data, path=path)
    found = scored(model, data, path=path)
    assert measured == [("p0", 2), ("p1", 2), ("p2", 2)]
    assert_same_answers(found, scored(model, data))


@pytest.mark.slow
def test_configurations_that_are_added_are_graded_and_no_others_measured(
    model: Adapter, tmp_path: Path, measured: list[tuple[str, int]]
) -> None:
    path, data = tmp_path / "t.h5", rows(tmp_path / "d.jsonl")
    scored(model, data, CONFIGS[:1], path=path)
    more = (*CONFIGS, *pk.grid(40, window=8, policy="adakv"))
    found = scored(model, data, more, path=path)
    assert measured == [(f"p{place}", count) for count in (1, len(more) - 1) for place in range(3)]
    assert_same_answers(found, scored(model, data, more))


@pytest.mark.slow
def test_a_trace_of_another_metric_is_not_gone_on_with(model: Adapter, tmp_path: Path) -> None:
    path, data = tmp_path / "t.h5", rows(tmp_path / "d.jsonl", 1)
    scored(model, data, path=path)
    with pytest.raises(TraceError, match="differs in dataset_options"):
        scored(model, data, path=path, metric="exact-match")
    own = [pk.Prompt.from_text(TEXT, model, answers=["a"], metric=metric) for metric in ("", "rouge-l")]
    pk.measure(model, own[:1], CONFIGS[:1], settings=pk.Settings(generate=2), path=tmp_path / "own.h5", progress=False)
    with pytest.raises(TraceError, match="differs in dataset_options"):
        pk.measure(
            model, own[1:], CONFIGS[:1], settings=pk.Settings(generate=2), path=tmp_path / "own.h5", progress=False
        )


@pytest.mark.parametrize(
    ("call", "said"),
    [
        (lambda model, path: scored(model, rows(path, answers=[])),
         "got none in 3 of 3, such as 'p0'; give `answers`, or use generate"),
        (lambda model, path: pk.measure(model, prompt(model), CONFIGS, settings=pk.Settings(generate=2)),
         "got none in 1 of 1, such as '0'"),
        (lambda model, path: scored(model, rows(path), metric="exact-number"),
         "sample 'p0': the metric exact-number needs answers that are numbers; got the answers 'a b | é'"),
        (lambda model, path: scored(model, rows(path, metric="bleu")),
         "d.jsonl, line 1: unknown metric 'bleu'; known: f1, exact-match, rouge-l, exact-number"),
        (lambda model, path: scored(model, rows(path, metric=3)), "line 1: expected `metric` to be text, got a number"),
    ],
)  # fmt: skip
def test_answers_that_nothing_grades_are_refused_before_anything_runs(
    model: Adapter, tmp_path: Path, measured: list[tuple[str, int]], call: Any, said: str
) -> None:
    with pytest.raises(DatasetError) as found:
        call(model, tmp_path / "d.jsonl")
    assert said in str(found.value)
    assert "\n" not in str(found.value)
    assert measured == []


def test_an_unknown_metric_is_told_with_the_known_ones(model: Adapter, tmp_path: Path) -> None:
    for call in (
        lambda: scored(model, rows(tmp_path / "d.jsonl"), metric="rouge"),
        lambda: pk.Prompt.from_text(TEXT, model, answers=["a"], metric="rouge"),
    ):
        with pytest.raises(UnknownNameError, match="unknown metric 'rouge'; known: rouge-l, "):
            call()


def bound(model: Adapter, path: Path, **more: Any) -> int | None:
    """What evicted caches may take together, of a run that is planned and not begun."""
    seen: list[Resources] = []

    class Planned(Exception):
        pass

    def stop(planned: planning.Plan, *given: Any, **others: Any) -> None:
        seen.append(planned.resources)
        raise Planned

    with pytest.MonkeyPatch.context() as patched, pytest.raises(Planned):
        patched.setattr("perturbkv.api.measuring.run_in_memory", stop)
        scored(model, path, **more)
    return seen[0].max_bytes


def test_a_run_that_generates_decodes_more_caches_at_once_where_memory_is_free(
    model: Adapter, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = rows(tmp_path / "d.jsonl", 1)
    tokens = len(pk.load_prompts(str(data), model)[0].token_ids)
    full = len(model.layers) * model.kv_heads * tokens * (model.d_key + model.d_value) * 4
    whole = sum(weight.numel() for weight in model.model.parameters()) * 4 + full
    monkeypatch.setattr(planning.memory, "free_bytes", lambda device: 10**12)
    assert bound(model, data) == pytest.approx(2 * whole, rel=0.05)
    monkeypatch.setattr(planning.memory, "free_bytes", lambda device: 2 * whole + full)
    assert bound(model, data) == pytest.approx(whole, rel=0.05)
    monkeypatch.setattr(planning.memory, "free_bytes", lambda device: whole // 2)
    assert bound(model, data) is None
    monkeypatch.setattr(planning.memory, "free_bytes", lambda device: 10**12)
    assert bound(model, data, generate=0) is None
    assert bound(model, data, resources=Resources(max_bytes=10**6)) == 10**6


TEMPLATE = "{% for turn in messages %}<{{ turn['role'] }}>{{ turn['content'] }}{% endfor %}<assistant>"
TWO = pk.grid(24, window=8)


@pytest.fixture(scope="module")
def templated(tmp_path_factory: pytest.TempPathFactory) -> Adapter:
    found = pk.load_model(str(model_folder(tmp_path_factory.mktemp("api") / "tiny", positions=512)))
    found.tokenizer.chat_template = TEMPLATE
    return found


@pytest.mark.parametrize(("asked", "told"), [(None, True), (True, True), (False, False)])
def test_what_was_done_is_what_the_trace_tells(
    templated: Adapter, asked: bool | None, told: bool, tmp_path: Path
) -> None:
    mine = pk.Prompt.from_text(TEXT, templated, "Who?", chat_template=asked)
    said = templated.tokenizer.decode(mine.token_ids)
    assert said == (f"<user>{TEXT}\n\nWho?<assistant>" if told else f"{TEXT}\n\nWho?")
    pk.measure(templated, mine, TWO, path=tmp_path / "t.h5", progress=False)
    assert pk.read_trace(tmp_path / "t.h5").run.chat_template is told


def test_some_prompts_of_a_dataset_keep_its_template(templated: Adapter) -> None:
    prompts = pk.load_prompts("needle", templated, samples=2, lengths=[200], haystack="noise")
    assert prompts.chat_template
    found = pk.measure(templated, [prompts[1]], TWO, progress=False)
    assert found.run.dataset == "prompts"
    assert found.run.chat_template


def test_a_trace_that_could_tell_only_half_the_truth_is_refused(templated: Adapter) -> None:
    mine = [pk.Prompt.from_text(TEXT, templated, id=name, chat_template=name == "a") for name in ("b", "a")]
    with pytest.raises(DatasetError, match="got 'a' with it and 'b' without") as found:
        pk.measure(templated, mine, TWO, progress=False)
    assert "\n" not in str(found.value)
