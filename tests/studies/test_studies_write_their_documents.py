"""A study as it is run: from a trace's file to tables, a JSON document and a picture; bad input is one line."""

from __future__ import annotations

import json
import runpy
import sys
from pathlib import Path

import numpy as np
import pytest

import perturbkv as pk
from tests.studies import test_alpha, test_split, test_stability
from tests.support.folders import model_folder

STUDIES = Path(__file__).resolve().parents[2] / "studies"
TRACES = {
    "alpha": lambda: [test_alpha.trace_of(test_alpha.planted())],
    "split": lambda: [test_split.made()],
    "stability": lambda: [
        test_stability.made(np.random.default_rng(seed).lognormal(size=(5, 3, 4)), seed=seed) for seed in (0, 1)
    ],
}


def run(study: str, *words: object, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", [f"{STUDIES / study}.py", *map(str, words)])
    runpy.run_path(sys.argv[0], run_name="__main__")


@pytest.mark.parametrize("study", TRACES)
def test_a_trace_s_file_becomes_a_document_and_a_picture(
    study: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    paths = [made.save(tmp_path / f"{place}.h5") for place, made in enumerate(TRACES[study]())]
    run(study, *paths, "-o", tmp_path / "out", monkeypatch=monkeypatch)
    document = json.loads((tmp_path / "out" / f"{study}.json").read_text())
    assert (tmp_path / "out" / f"{study}.png").stat().st_size > 10_000
    said = capsys.readouterr().out
    assert "nan" not in said and "wrote" in said.splitlines()[-1]
    assert document.keys() >= {"alpha": {"rows", "chosen"}, "split": {"spreads", "contests"}}.get(study, {"members"})
    if study == "alpha":
        (config,) = pk.grid(128, selection=f"two-stage(alpha={tmp_path / 'out' / 'alpha-head.json'})")
        assert [list(row) for row in config.alpha.shares] == document["chosen"]["head"]["alpha"]


@pytest.mark.parametrize("study", TRACES)
def test_a_trace_without_what_is_asked_is_one_line(
    study: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    lacking = test_stability.made(np.ones((5, 2, 2))).sel(selection="attention").save(tmp_path / "lacking.h5")
    more = ["--compare", "attention,two-stage"] if study == "split" else []
    with pytest.raises(SystemExit) as ended:
        run(study, lacking, *more, "-o", tmp_path / "out", monkeypatch=monkeypatch)
    assert ended.value.code == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("error: expected ")


@pytest.mark.slow
def test_what_is_composed_is_what_is_measured_and_a_run_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Six prompts of a tiny model, in three folds; the same again measures nothing anew."""
    rows = [{"id": f"p{i}", "prompt": f"{i} " + "The quick brown fox jumps over the lazy dog. " * 4} for i in range(6)]
    data, out = tmp_path / "prompts.jsonl", tmp_path / "out"
    data.write_text("\n".join(map(json.dumps, rows)))
    model = model_folder(tmp_path / "tiny", positions=512)
    asked = ["--model", model, "--dataset", data, "--samples", 6, "--budget", 64, "--alpha", 0, "--alpha", 1,
             "--folds", 3, "-o", out]  # fmt: skip
    run("alpha", *asked, monkeypatch=monkeypatch)
    document, stamps = (
        json.loads((out / "alpha.json").read_text()),
        {path: path.stat().st_mtime_ns for path in out.glob("*.h5")},
    )
    assert document["measured"]["composed_off"] < 1e-4
    assert (document["measured"]["samples"], len(document["folds"])) == (6, 3)
    run("alpha", *asked, monkeypatch=monkeypatch)
    run("alpha", out / "trace.h5", "--folds", 3, "-o", tmp_path / "again", monkeypatch=monkeypatch)
    assert {path: path.stat().st_mtime_ns for path in out.glob("*.h5")} == stamps
    again = json.loads((tmp_path / "again" / "alpha.json").read_text())
    assert again["measured"] == document["measured"] and again["rows"] == document["rows"]
