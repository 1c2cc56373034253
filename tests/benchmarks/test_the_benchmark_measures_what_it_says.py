from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from benchmarks import rows, suite, work
from benchmarks.__main__ import main
from benchmarks.subprocesses import _EXACT_PEAK, run_process
from perturbkv.cli.console import SCHEMA
from perturbkv.errors import ConfigError, PerturbkvError
from perturbkv.selfcheck.rows import Report, Row
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
def test_growth_leaves_the_prefills_own_time_out() -> None:
    found = work.time_growth(lengths=[140, 300], repeats=2, count=2, **MODEL)["seconds"]
    assert set(found) == {"140", "300"}
    assert all(second > 0 for spent in found.values() for second in spent)


@pytest.mark.slow
@pytest.mark.usefixtures("tiny")
def test_writing_times_the_journal_and_the_file() -> None:
    found = work.time_writing(tokens=150, count=2, repeats=2, **MODEL)
    assert {name: len(spent) for name, spent in found.items()} == {"run": 2, "journal": 2, "file": 2}
    assert all(second > 0 for spent in found.values() for second in spent)


@pytest.mark.usefixtures("tiny")
def test_peaks_count_the_process_and_generating_counts_its_cache() -> None:
    assert work.peaks(tokens=150, count=0, **MODEL)["peak"] > 50 * 2**20
    full, evicted = (work.generation_memory(tokens=300, evicted=evicted, **MODEL) for evicted in (False, True))
    adapter = tiny_adapter()
    entry = len(adapter.layers) * (adapter.d_key + adapter.d_value) * 4
    assert full["cache"] == entry * adapter.kv_heads * 300
    assert evicted["cache"] == entry * adapter.heads * 128


@pytest.mark.slow
@pytest.mark.usefixtures("tiny")
def test_scoring_takes_answers_of_one_length_in_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[Any] = []
    original = work.trace_sample
    monkeypatch.setattr(work, "trace_sample", lambda *given: made.append(original(*given)) or made[-1])
    found = work.time_scoring(tokens=400, answer=5, repeats=2, **MODEL)
    assert {name: len(spent) for name, spent in found["seconds"].items()} == {"plain": 2, "scored": 2}
    assert found["batches"] >= 1
    assert 0 < found["phases"]["answers"] < found["seconds"]["scored"][-1]
    for sample in made:
        assert sample.arrays["generated"].shape == (12, 5)
        assert (sample.arrays["generated"] >= 0).all()
        assert not np.isnan(sample.arrays["score"]).any()


@pytest.mark.slow
@pytest.mark.usefixtures("tiny")
def test_steps_are_measured_to_the_last_beside_a_plain_prefill(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[Any] = []
    original = work.trace_sample
    monkeypatch.setattr(work, "trace_sample", lambda *given: made.append(original(*given)) or made[-1])
    found = work.time_steps(tokens=1100, repeats=2, steps=3, **MODEL)
    assert {name: len(spent) for name, spent in found["seconds"].items()} == {"plain": 2, "traced": 2}
    assert 0 < found["phases"]["decode"] < found["seconds"]["traced"][-1]
    for sample in made:
        assert sample.arrays["steps_measured"] == 3
        assert sample.arrays["theta"].shape[:2] == (24, 3)


@pytest.mark.slow
def test_memory_beside_inputs_is_told_apart() -> None:
    """The loop holds at least one head's projections, ours far less; in a process that gives memory back at once."""
    asked = {"entries": 8192, "d_model": 1024, "heads": 8, "kv_heads": 2, **CPU}
    code = f"from benchmarks.work import norms_peak; print([norms_peak(w, **{asked})['extra'] for w in WHICH])"
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
    full, evicted = (run_process("generation_memory", evicted=evicted, **asked) for evicted in (False, True))
    assert full["cache"] == 2 * layers * kv_heads * 1100 * d_head * 4
    assert evicted["cache"] < full["cache"] / 5
    assert full["peak"] - evicted["peak"] >= 0.8 * (full["cache"] - evicted["cache"])


def test_a_failing_process_is_one_line() -> None:
    fails = ("sh", "-c", "printf 'Traceback:\\n\\nModelError: unknown model\\n' >&2; exit 1")
    with pytest.raises(PerturbkvError) as told:
        run_process("peaks", prefix=fails, model="nothing")
    assert str(told.value) == "the benchmark's process 'peaks' failed: ModelError: unknown model"


ANSWERS: dict[str, Callable[..., dict[str, Any]]] = {
    "time_sweeps": lambda counts, **more: {
        "seconds": {"prefill": [10.0, 20.0, 10.0], "prefill and 2 decodes": [11.0, 22.0, 11.0]}
        | {str(count): [11.0 + count / 10, 24.2, 30.0] for count in counts},
        "phases": {str(count): {"prefill": 9.0} for count in counts},
    },
    "time_steps": lambda steps, **more: {
        "seconds": {"traced": [2.0 * steps, 12.0, 15.0], "plain": [10.0, 10.0, 10.0]}, "phases": {"prefill": 9.0}
    },
    "time_decoding": lambda steps, every, **more: {
        "seconds": {"traced": [14.0, 15.0, 16.0], "decoded": [10.0, 10.0, 10.0]}, "phases": {"layers": steps / every}
    },
    "peaks": lambda count, **more: {"peak": 120 if count else 100},
    "time_growth": lambda lengths, **more: {"seconds": {str(lengths[0]): [1.0, 2.0], str(lengths[1]): [4.0, 10.0]}},
    "time_norms": lambda **more: {"seconds": {"ours": [1.0], "loop": [2.0]}, "rate": [5.0], "matmul_rate": 10.0},
    "norms_peak": lambda which, **more: {"extra": 5 if which == "ours" else 100},
    "time_writing": lambda count, **more: {"run": [100.0], "journal": [count / 24], "file": [0.5]},
    "time_kept_coding": lambda samples, prefill, **more: {"seconds": [prefill, prefill + 0.1, 2.0], "finish": samples},
    "time_scoring": lambda tokens, answer, **more: {
        "seconds": {"scored": [6.0, 5.0, 8.0], "plain": [tokens / 750, answer / 32, 2.0]}, "phases": {}, "batches": 1
    },
    "generation_memory": lambda evicted, **more: {"peak": 10 if evicted else 50, "cache": 20 if evicted else 70},
}  # fmt: skip


@pytest.fixture
def answered(monkeypatch: pytest.MonkeyPatch) -> None:
    """Processes whose numbers are known."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)

    def answer(name: str, *, exact_peak: bool = False, **arguments: Any) -> dict[str, Any]:
        return ANSWERS[name](**arguments)

    monkeypatch.setattr(suite, "run_process", answer)
    spent = {"help": {"command": [0.2, 0.6], "import": [0.1, 0.3]}, "figure": {"command": [3.0], "import": [1.0]}}
    monkeypatch.setattr(suite.startup, "startup_seconds", lambda model, repeats: spent)


@pytest.mark.slow
def test_kept_sets_are_coded_while_the_next_prefill_sleeps() -> None:
    found = work.time_kept_coding(samples=4, prefill=0.3, layers=2, sets=3, tokens=4000)
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
        "steps-8": 1.5, "decode-trace": 1.5, "scores-11": pytest.approx(1.21), "presses-24": None,
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
    assert report.unmeasured_rows(*rows.EXCUSES) == []
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
def test_a_row_that_fails_says_why_and_the_others_go_on(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(**more: Any) -> dict[str, Any]:
        raise PerturbkvError("out of memory")

    monkeypatch.setitem(ANSWERS, "peaks", fail)
    path = tmp_path / "bench.json"
    assert main(["--only", "peak-24", "--only", "growth", "--output", str(path)]) == 1
    assert "out of memory" in capsys.readouterr().out
    written = [(row["value"], row["reason"]) for row in json.loads(path.read_text())["rows"]]
    assert written == [(None, "out of memory"), (4.5, "")]


@pytest.mark.slow
@pytest.mark.usefixtures("answered")
def test_a_file_is_what_is_shown_and_another_is_not_replaced(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "deep" / "bench.json"
    asked = ["--only", "peak-24", "--only", "cuda-24", "--output", str(path)]
    assert main(asked) == 0
    shown = capsys.readouterr().out
    assert "1.200" in shown
    assert "needs a CUDA device" in shown
    document = json.loads(path.read_text())
    assert [(row["name"], row["value"]) for row in document["rows"]] == [("peak-24", 1.2), ("cuda-24", None)]
    assert (document["schema"], document["settings"]["repeats"]) == (SCHEMA, 3)
    assert main(asked) == 2
    assert "--overwrite" in capsys.readouterr().err
    assert main([*asked, "--overwrite", "--repeats", "2"]) == 0


def report(path: Path, device: str = "a", **values: float | None) -> str:
    """Write a report with these values; return its path."""
    targets = {target.name: target for target in rows.TARGETS}
    made = tuple(Row(targets[name.replace("_", "-")], value) for name, value in values.items())
    path.write_text(json.dumps(Report({"device": device}, {"tokens": 4096}, made).to_dict()))
    return str(path)


def test_a_row_is_worse_by_more_than_the_tolerance_on_its_own_side(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    old = report(tmp_path / "old", sweep_24=1.0, growth=4.0, generation=0.8, peak_24=None, norms_time=1.0)
    new = report(tmp_path / "new", "b", sweep_24=1.2, growth=4.2, generation=0.6, peak_24=1.0, capture_2=1.0)
    assert main(["compare", old, new]) == 1
    told = capsys.readouterr()
    lines = {line.split()[0]: line for line in told.out.splitlines() if line.split()}
    assert {name for name, line in lines.items() if "(!)" in line} == {"sweep-24", "generation"}
    for name, words in {"sweep-24": "20% worse", "generation": "25% worse", "growth": "5% worse"}.items():
        assert words in lines[name]
    assert all("not in both" in lines[name] for name in ("peak-24", "norms-time", "capture-2"))
    assert "not measured alike: device: a and b" in told.err
    assert main(["compare", old, new, "--tolerance", "0.3"]) == main(["compare", old, old]) == 0


def test_the_stored_files_are_compared_with_themselves(capsys: pytest.CaptureFixture[str]) -> None:
    for path in sorted((Path(__file__).parents[2] / "docs" / "bench").glob("*.json")):
        assert main(["compare", str(path), str(path)]) == 0
        assert "not measured alike" not in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["--only", "speed"], "unknown benchmark row 'speed'; nearest of 22 known: sweep-24"),
        (["scale", "--only", "growth"], "unknown benchmark row 'growth'; known: scale-workers"),
        (["--repeats", "0"], "--repeats must lie between 1 and 1,000, got 0"),
        (["--tokens", "1024"], "--tokens must exceed the largest budget, 1024, got 1024"),
        (["scale", "--samples", "0"], "--samples must lie between 1 and 100,000, got 0"),
        (["scale", "--tokens", "2000"], "--tokens has no effect on scale; leave it out"),
        (["report", "--tokens", "99"], "--tokens must lie between 100 and 100,000, got 99"),
        (["compare", "none.json", "none.json"], "expected a benchmark's JSON at none.json, got "),
        (["compare", __file__, __file__], "expected a benchmark's JSON at "),
    ],
)
def test_bad_input_is_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], words: list[str], told: str
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(words) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"error: {told}")
    assert list(tmp_path.rglob("*.json")) == []


def test_files_are_of_compare_alone() -> None:
    for words in (["compare", "old.json"], ["scale", "old.json"], ["nothing"]):
        with pytest.raises(SystemExit, match="2"):
            main(words)
