"""A study as it is run: from a trace's file to tables, a JSON document and a picture; bad input is one line."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

import perturbkv as pk
from tests.studies import test_alpha, test_split, test_stability
from tests.support.folders import model_folder
from tests.support.scripts import STUDIES, functions, study

TRACES = {
    "alpha": lambda: [test_alpha.trace_of(test_alpha.planted())],
    "split": lambda: [test_split.made()],
    "stability": lambda: [
        test_stability.made(np.random.default_rng(seed).lognormal(size=(5, 3, 4)), seed=seed) for seed in (0, 1)
    ],
}


@pytest.mark.parametrize("name", TRACES)
def test_a_trace_s_file_becomes_a_document_and_a_picture(name: str, tmp_path: Path) -> None:
    paths = [made.save(tmp_path / f"{place}.h5") for place, made in enumerate(TRACES[name]())]
    said = study(name, *paths, "-o", tmp_path / "out")
    document = json.loads((tmp_path / "out" / f"{name}.json").read_text())
    assert (tmp_path / "out" / f"{name}.png").stat().st_size > 10_000
    assert "nan" not in said
    wrote = said.splitlines()[-1].removeprefix("wrote ").split(", ")
    assert sorted(wrote) == sorted(map(str, (tmp_path / "out").iterdir()))
    assert document.keys() >= {"alpha": {"rows", "chosen"}, "split": {"spreads", "contests"}}.get(name, {"members"})
    if name == "alpha":
        (config,) = pk.grid(128, selection=f"two-stage(alpha={tmp_path / 'out' / 'alpha-head.json'})")
        assert [list(row) for row in config.alpha.shares] == document["chosen"]["head"]["alpha"]


@pytest.mark.parametrize("name", TRACES)
def test_a_trace_without_what_is_asked_is_one_line(name: str, tmp_path: Path) -> None:
    lacking = test_stability.made(np.ones((5, 2, 2))).sel(selection="attention").save(tmp_path / "lacking.h5")
    more = ["--compare", "attention,two-stage"] if name == "split" else []
    (line,) = study(name, lacking, *more, "-o", tmp_path / "out", code=2).splitlines()
    assert line.startswith("error: expected ")


def test_lengths_and_depths_are_repeated_or_listed_with_commas() -> None:
    parser = functions("common", STUDIES)["options"]("")
    asked = parser.parse_args(["--length", "500,1000", "--length", "2000", "--depth", "0,0.5", "--depth", "1"])
    assert (asked.length, asked.depth) == ([500, 1000, 2000], [0, 0.5, 1])


@pytest.mark.slow
def test_what_is_composed_is_what_is_measured_and_a_run_goes_on(tmp_path: Path) -> None:
    """Six prompts of a tiny model, in three folds; the same again measures nothing anew."""
    rows = [{"id": f"p{i}", "prompt": f"{i} " + "The quick brown fox jumps over the lazy dog. " * 4} for i in range(6)]
    data, out = tmp_path / "prompts.jsonl", tmp_path / "out"
    data.write_text("\n".join(map(json.dumps, rows)))
    model = model_folder(tmp_path / "tiny", positions=512)
    asked = ["--model", model, "--dataset", data, "--samples", 6, "--budget", 64, "--alpha", 0, "--alpha", 1,
             "--folds", 3, "-o", out]  # fmt: skip
    study("alpha", *asked)
    document, stamps = (
        json.loads((out / "alpha.json").read_text()),
        {path: path.stat().st_mtime_ns for path in out.glob("*.h5")},
    )
    assert document["measured"]["composed_off"] < 1e-4
    assert (document["measured"]["samples"], len(document["folds"])) == (6, 3)
    study("alpha", *asked)
    study("alpha", out / "trace.h5", "--folds", 3, "-o", tmp_path / "again")
    assert {path: path.stat().st_mtime_ns for path in out.glob("*.h5")} == stamps
    again = json.loads((tmp_path / "again" / "alpha.json").read_text())
    assert again["measured"] == document["measured"] and again["rows"] == document["rows"]
