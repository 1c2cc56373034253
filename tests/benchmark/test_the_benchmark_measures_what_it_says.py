from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

from perturbkv.benchmark import rows, suite, work
from perturbkv.benchmark import work as norms
from perturbkv.benchmark.rows import compare, setting_differences
from perturbkv.benchmark.subprocesses import _EXACT_PEAK, in_process
from perturbkv.cli.console import SCHEMA
from perturbkv.cli.main import app
from perturbkv.errors import ConfigError, PerturbkvError, UnknownNameError
from tests.oracle import theory as naive
from tests.support.folders import model_folder
from tests.support.models import tiny_adapter

CPU = {"dtype": "float32", "device": "cpu"}
MODEL = {"model": "tiny", **CPU}


@pytest.fixture
def tiny(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(work, "load_model", lambda model, dtype, device: tiny_adapter())


@pytest.mark.parametrize("count", [2, 12, 24, 200])
def test_sweeps_hold_as_many_configurations_as_they_are_called_after(count: int) -> None:
    configs = work.configurations(count)
    assert len({config.label() for config in configs}) == count
    if count == 24:
        assert {config.policy.name for config in configs} == {"snapkv", "pyramidkv", "adakv"}
        assert {config.selection.name for config in configs} == {"attention", "two-stage"}
        assert {config.budget.value for config in configs} == {128, 256, 512, 1024}


@pytest.mark.slow
@pytest.mark.usefixtures("tiny")
def test_times_are_taken_in_turns_and_tell_their_phases() -> None:
    found = work.times(tokens=150, repeats=2, counts=[2, 24], **MODEL)
    assert {name: len(spent) for name, spent in found["seconds"].items()} == {
        "prefill": 2, "prefill and 2 decodes": 2, "2": 2, "24": 2
    }  # fmt: skip
    assert set(found["phases"]) == {"2", "24"}
    for count in ("2", "24"):
        spent = found["phases"][count]
        parts = sum(
            spent[name] for name in ("prefill", "reference", "layers", "evict", "decode", "measure", "assembly")
        )
        assert 0 < parts <= found["seconds"][count][-1]
        assert spent["scores"] + spent["norms"] <= spent["prefill"]


@pytest.mark.slow
@pytest.mark.usefixtures("tiny")
def test_growth_leaves_the_prefills_own_time_out() -> None:
    found = work.growth(lengths=[140, 300], repeats=2, count=2, **MODEL)["seconds"]
    assert set(found) == {"140", "300"}
    assert all(second > 0 for spent in found.values() for second in spent)


@pytest.mark.slow
@pytest.mark.usefixtures("tiny")
def test_writing_times_the_journal_and_the_file() -> None:
    found = work.writing(tokens=150, count=2, repeats=2, **MODEL)
    assert {name: len(spent) for name, spent in found.items()} == {"run": 2, "journal": 2, "file": 2}
    assert all(second > 0 for spent in found.values() for second in spent)


@pytest.mark.usefixtures("tiny")
def test_peaks_count_the_process_and_generating_counts_its_cache() -> None:
    assert work.peaks(tokens=150, count=0, **MODEL)["peak"] > 50 * 2**20
    full, evicted = (work.generating(tokens=300, evicted=evicted, **MODEL) for evicted in (False, True))
    adapter = tiny_adapter()
    entry = 2 * len(adapter.layers) * adapter.d_head * 4
    assert full["cache"] == entry * adapter.kv_heads * 300
    assert evicted["cache"] == entry * adapter.heads * 128


@pytest.mark.slow
@pytest.mark.usefixtures("tiny")
def test_scoring_takes_answers_of_one_length_in_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[Any] = []
    original = work.trace_sample
    monkeypatch.setattr(work, "trace_sample", lambda *given: made.append(original(*given)) or made[-1])
    found = work.scoring(tokens=400, answer=5, repeats=2, **MODEL)
    assert {name: len(spent) for name, spent in found["seconds"].items()} == {"plain": 2, "scored": 2}
    assert found["batches"] >= 1
    assert 0 < found["phases"]["answers"] < found["seconds"]["scored"][-1]
    for sample in made:
        assert sample.arrays["generated"].shape == (12, 5)
        assert (sample.arrays["generated"] >= 0).all()
        assert not np.isnan(sample.arrays["score"]).any()


@pytest.mark.slow
@pytest.mark.usefixtures("tiny")
def test_decoding_steps_from_both_caches() -> None:
    found = work.decoding(tokens=60, budget=20, batch=3, steps=2, repeats=2, **MODEL)
    assert {name: len(spent) for name, spent in found.items()} == {"full": 2, "evicted": 2}


def test_the_evicted_cache_of_the_decoding_row_equals_a_full_one_where_all_is_kept() -> None:
    """Both rows decode the same tokens: with everything kept they give the same logits."""
    adapter, made = tiny_adapter(), []
    cache = work._random_cache(adapter, 2, 30)
    compact = work.CompactCache([work._keep_last(adapter, layer.keys, layer.values, 30) for layer in cache.layers])
    ids = torch.tensor([[3], [4]])
    with torch.inference_mode():
        with work.decode_from(adapter, compact):
            made.append(adapter.model(input_ids=ids, past_key_values=compact).logits)
        made.append(adapter.model(input_ids=ids, past_key_values=cache).logits)
    torch.testing.assert_close(*made, rtol=1e-4, atol=1e-5)


def test_the_loop_that_value_norms_are_held_against_computes_them_too() -> None:
    value, w_o = norms._random_layer(entries=9, d_model=24, heads=4, kv_heads=2, **CPU)
    expected = naive.projected_value_norms(value.double().numpy(), w_o.double().numpy(), 4)
    for compute in norms._NORMS.values():
        np.testing.assert_allclose(compute(value, w_o), expected, rtol=1e-5)


@pytest.mark.slow
def test_norms_are_timed_beside_a_matrix_product() -> None:
    found = work.norms(repeats=2, entries=64, d_model=64, heads=4, kv_heads=2, **CPU)
    assert {name: len(spent) for name, spent in found["seconds"].items()} == {"ours": 2, "loop": 2}
    operations = 2 * 64 * 64 * 64
    assert found["rate"] == [pytest.approx(operations / spent) for spent in found["seconds"]["ours"]]
    assert found["matmul_rate"] > 0


@pytest.mark.slow
def test_memory_beside_inputs_is_told_apart() -> None:
    """The loop holds at least one head's projections, ours far less; in a process that gives memory back at once."""
    asked = {"entries": 8192, "d_model": 1024, "heads": 8, "kv_heads": 2, **CPU}
    code = f"from perturbkv.benchmark.work import norms_peak; print([norms_peak(w, **{asked})['extra'] for w in WHICH])"
    command = [sys.executable, "-c", f"WHICH = 'ours', 'loop'; {code}"]
    said = subprocess.run(command, env=os.environ | _EXACT_PEAK, capture_output=True, text=True, check=True).stdout
    ours, loop = json.loads(said)
    assert loop >= 8192 * 1024 * 4
    assert ours < loop / 2


@pytest.mark.slow
def test_generation_from_an_evicted_cache_needs_less_memory(tmp_path: Path) -> None:
    """At 1,100 tokens and b = 128 the peak goes down by at least 80 % of the cache bytes that are saved."""
    layers, kv_heads, d_head = 32, 4, 64
    model = model_folder(tmp_path / "deep", layers=layers, kv_heads=kv_heads, d_head=d_head, positions=2048)
    asked = {"model": str(model), "tokens": 1100, "exact_peak": True, "generated": 4, **CPU}
    full, evicted = (in_process("generating", evicted=evicted, **asked) for evicted in (False, True))
    assert full["cache"] == 2 * layers * kv_heads * 1100 * d_head * 4
    assert evicted["cache"] < full["cache"] / 5
    assert full["peak"] - evicted["peak"] >= 0.8 * (full["cache"] - evicted["cache"])


def test_a_failing_process_is_one_line() -> None:
    fails = ("sh", "-c", "printf 'Traceback:\\n\\nModelError: unknown model\\n' >&2; exit 1")
    with pytest.raises(PerturbkvError) as told:
        in_process("peaks", prefix=fails, model="nothing")
    assert str(told.value) == "the benchmark's process 'peaks' failed: ModelError: unknown model"


ANSWERS: dict[str, Callable[..., dict[str, Any]]] = {
    "times": lambda counts, **more: {
        "seconds": {"prefill": [10.0, 20.0, 10.0], "prefill and 2 decodes": [11.0, 22.0, 11.0]}
        | {str(count): [11.0 + count / 10, 24.2, 30.0] for count in counts},
        "phases": {str(count): {"prefill": 9.0} for count in counts},
    },
    "peaks": lambda count, **more: {"peak": 120 if count else 100},
    "growth": lambda lengths, **more: {"seconds": {str(lengths[0]): [1.0, 2.0], str(lengths[1]): [4.0, 10.0]}},
    "norms": lambda **more: {"seconds": {"ours": [1.0], "loop": [2.0]}, "rate": [5.0], "matmul_rate": 10.0},
    "norms_peak": lambda which, **more: {"extra": 5 if which == "ours" else 100},
    "writing": lambda count, **more: {"run": [100.0], "journal": [count / 24], "file": [0.5]},
    "kept_coding": lambda samples, prefill, **more: {"seconds": [prefill, prefill + 0.1, 2.0], "finish": samples},
    "scoring": lambda tokens, answer, **more: {
        "seconds": {"scored": [6.0, 5.0, 8.0], "plain": [tokens / 750, answer / 32, 2.0]}, "phases": {}, "batches": 1
    },
    "generating": lambda evicted, **more: {"peak": 10 if evicted else 50, "cache": 20 if evicted else 70},
}  # fmt: skip


@pytest.fixture
def answered(monkeypatch: pytest.MonkeyPatch) -> None:
    """Processes whose numbers are known."""
    monkeypatch.setattr(suite.torch.cuda, "is_available", lambda: False)

    def answer(name: str, *, exact_peak: bool = False, **arguments: Any) -> dict[str, Any]:
        return ANSWERS[name](**arguments)

    monkeypatch.setattr(suite, "in_process", answer)
    spent = {"help": {"command": [0.2, 0.6], "import": [0.1, 0.3]}, "figure": {"command": [3.0], "import": [1.0]}}
    monkeypatch.setattr(suite.startup, "startup_seconds", lambda model, repeats: spent)


@pytest.mark.slow
def test_kept_sets_are_coded_while_the_next_prefill_sleeps() -> None:
    found = work.kept_coding(samples=4, prefill=0.3, layers=2, sets=3, tokens=4000)
    assert len(found["seconds"]) == 3
    assert all(0.3 <= spent < 0.6 for spent in found["seconds"])
    assert found["bytes"] > 0


@pytest.mark.slow
@pytest.mark.usefixtures("answered")
def test_every_row_is_a_ratio_of_what_its_processes_found() -> None:
    report = suite.measure(suite.Settings(), rows.TARGETS)
    values = {row.target.name: row.value for row in report.rows}
    assert values == {
        "capture-2": pytest.approx(1.1), "sweep-24": pytest.approx(1.34), "sweep-200": pytest.approx(3.0),
        "scores-11": pytest.approx(1.21), "presses-24": None,
        "peak-24": 1.2, "growth": 4.5, "norms-time": 0.5, "norms-memory": 0.05,
        "writing-24": 0.015, "writing-200": pytest.approx(0.0883, rel=1e-3), "kept-coding": 1.6, "generation": 0.8,
        "quality-12": 3.0, "startup-help": 2.0, "startup-figure": 3.0,
        "triton-time": None, "triton-rate": None, "cuda-24": None, "cuda-decode": None,
    }  # fmt: skip
    verdicts = {row.target.name: row.verdict() for row in report.rows}
    assert verdicts["writing-200"] == "falls short"
    assert verdicts["generation"] == "reached"
    assert verdicts["cuda-24"] == "not measured"
    assert {row.reason for row in report.rows if row.value is None} == {"needs a CUDA device", rows.NO_KVPRESS}
    assert report.failed == []
    assert report.machine["cores"]


@pytest.mark.slow
@pytest.mark.usefixtures("answered")
def test_a_prompt_longer_than_the_models_context_is_refused_before_anything_is_measured() -> None:
    for tokens, names, most in ((5_000, {"growth"}, "4,096"), (10_000, {"peak-24"}, "8,192")):
        targets = [target for target in rows.TARGETS if target.name in names]
        with pytest.raises(ConfigError, match=f"^expected --tokens of at most {most} with model .*, got {tokens:,}, "):
            suite.measure(suite.Settings(tokens=tokens), targets)
    (norms,) = suite.measure(suite.Settings(tokens=10_000), [rows.find_targets(["norms-time"])[0]]).rows
    assert norms.value == 0.5


@pytest.mark.usefixtures("answered")
def test_a_row_that_fails_says_why_and_the_others_go_on(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def fail(**more: Any) -> dict[str, Any]:
        raise PerturbkvError("out of memory")

    monkeypatch.setitem(ANSWERS, "peaks", fail)
    path = tmp_path / "bench.json"
    shown = CliRunner().invoke(app, ["doctor", "bench", "--only", "peak-24", "--only", "growth", "--output", str(path)])
    assert shown.exit_code == 1
    assert "peak-24: out of memory" in shown.stdout
    assert [(row.value, row.reason) for row in rows.read(path).rows] == [(None, "out of memory"), (4.5, "")]


@pytest.mark.slow
@pytest.mark.usefixtures("answered")
def test_the_command_writes_what_it_shows_and_reads_it_again(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "bench.json"
    shown = CliRunner().invoke(
        app, ["doctor", "bench", "--only", "peak-24", "--only", "cuda-24", "--output", str(path)]
    )
    assert shown.exit_code == 0
    assert "1.200" in shown.stdout
    assert "cuda-24: needs a CUDA device" in shown.stdout
    report = rows.read(path)
    assert [(row.target.name, row.value) for row in report.rows] == [("peak-24", 1.2), ("cuda-24", None)]
    assert json.loads(path.read_text()) == {"schema": SCHEMA, **report.to_dict()}


def report(**values: float | None) -> rows.Report:
    targets = {target.name: target for target in rows.TARGETS}
    made = tuple(rows.Row(targets[name.replace("_", "-")], value) for name, value in values.items())
    return rows.Report({"device": "a"}, {"tokens": 4096}, made)


def test_a_row_regresses_where_it_is_worse_by_more_than_the_tolerance() -> None:
    old = report(sweep_24=1.0, growth=4.0, generation=0.8, peak_24=None, norms_time=1.0)
    new = report(sweep_24=1.2, growth=4.2, generation=0.6, peak_24=1.0, capture_2=1.0)
    found = {change.name: change for change in compare(old, new, 0.1)}
    assert {name for name, change in found.items() if change.regressed} == {"sweep-24", "generation"}
    assert found["sweep-24"].worse == pytest.approx(0.2)
    assert found["generation"].worse == pytest.approx(0.25)
    assert found["peak-24"].worse is None
    assert (found["norms-time"].new, found["capture-2"].old) == (None, None)
    assert not any(change.regressed for change in compare(old, new, 0.3))


def test_other_machines_and_settings_are_said() -> None:
    first = report(growth=4.0)
    assert setting_differences(first, first) == []
    other = replace(first, machine={"device": "b"}, settings={"tokens": 512})
    assert setting_differences(first, other) == ["device: a and b", "tokens: 4096 and 512"]


def test_comparing_leaves_with_1_only_where_something_regressed(tmp_path: Path) -> None:
    old, new = tmp_path / "old.json", tmp_path / "new.json"
    old.write_text(json.dumps(report(growth=4.0).to_dict()))
    new.write_text(json.dumps(report(growth=5.0).to_dict()))
    worse = CliRunner().invoke(app, ["doctor", "bench", "compare", str(old), str(new)])
    assert worse.exit_code == 1
    assert "25% worse (!)" in worse.stdout
    assert CliRunner().invoke(app, ["doctor", "bench", "compare", str(new), str(old)]).exit_code == 0
    assert (
        CliRunner().invoke(app, ["doctor", "bench", "compare", str(old), str(new), "--tolerance", "0.3"]).exit_code == 0
    )
    as_json = json.loads(CliRunner().invoke(app, ["doctor", "bench", "compare", str(new), str(old), "--json"]).stdout)
    assert as_json["changes"][0]["worse"] == pytest.approx(-0.2)


def test_what_cannot_be_measured_or_read_is_refused_in_one_line(tmp_path: Path) -> None:
    with pytest.raises(UnknownNameError, match="unknown benchmark row 'sweep'; nearest of 20 known: sweep-24"):
        rows.find_targets(["sweep"])
    for settings in ({"repeats": 0}, {"tokens": 1024}):
        with pytest.raises(ConfigError, match="--repeats must|--tokens must"):
            suite.Settings(**settings)
    with pytest.raises(ConfigError, match="got nothing; make one with perturbkv doctor bench"):
        rows.read(tmp_path / "none.json")
    for text in ("{", "[]", '{"rows": [{}], "machine": {}, "settings": {}}', '{"rows": 3}'):
        (tmp_path / "bad.json").write_text(text)
        with pytest.raises(ConfigError, match="a benchmark's JSON at .*, got (another document|text that is no)"):
            rows.read(tmp_path / "bad.json")
    with pytest.raises(ConfigError, match="--tolerance must be at least 0"):
        compare(report(growth=1.0), report(growth=1.0), -1)
