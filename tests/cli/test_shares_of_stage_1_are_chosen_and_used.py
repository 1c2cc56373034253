"""`perturbkv question alpha` from the prompts to the files, and the files in other commands."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import perturbkv as pk
from tests.support.asked import refused

Run = Callable[..., Any]
GRID = ["--alpha", 0, "--alpha", 0.5, "--alpha", 1]


@pytest.fixture
def six(tiny: list[object]) -> list[object]:
    return [*tiny[:4], "--samples", 6, *tiny[6:], "--format", "png"]


@pytest.mark.slow
def test_choices_are_composed_as_they_are_measured_and_their_files_are_taken(perturbkv: Run, six: list[object]) -> None:
    ran = perturbkv("question", "alpha", *six, *GRID, "--folds", 3, "-o", "out")
    assert ran.code == 0, ran.err
    left = ["alpha-fold-1.h5", "alpha-fold-2.h5", "alpha-fold-3.h5", "alpha-global.json", "alpha-head.json",
            "alpha-layer.json", "alpha.png", "summary.json", "trace.h5"]  # fmt: skip
    assert sorted(path.name for path in Path("out").iterdir()) == left
    told = json.loads(Path("out/summary.json").read_text())["analyses"]["alpha"]
    assert 0 <= told["measured"]["composed_off"] < 1e-4
    assert (told["measured"]["samples"], len(told["folds"])) == (6, 3)
    held = json.loads(Path("out/alpha-head.json").read_text())
    assert held["about"]["made_by"].endswith("alpha") and "flatters" in held["about"]["note"]
    assert {"by": held["by"], "alpha": held["alpha"], "layers": held["layers"]} == told["chosen"]["head"]

    used = "attention,two-stage(alpha=out/alpha-head.json)"
    ran = perturbkv("heads", *six, "--compare", used, "-o", "used")
    assert ran.code == 0, ran.err
    Path("out/alpha-head.json").unlink()
    trace = pk.read_trace("used/trace.h5")
    assert trace.run.labels()[1].startswith("snapkv:two-stage(alpha=alpha-head.json@")
    again = perturbkv("heads", "used/trace.h5", "--compare", used, "-o", "again", "--format", "png")
    assert again.code == 0 and again.out.splitlines()[:3] == ran.out.splitlines()[:3]
    swept = pk.read_trace("out/trace.h5")
    moved = swept.sel(selection="two-stage").get("perturbation_isolated", "test")[:, :, 0]
    alphas = swept.sel(selection="two-stage").to_frame().selection_alpha.unique().tolist()
    places = np.array([[alphas.index(share) for share in row] for row in held["alpha"]])
    composed = np.take_along_axis(moved, places[None, None], axis=1)[:, 0]
    np.testing.assert_allclose(trace.get("perturbation_isolated", "test")[:, 1, 0], composed, rtol=1e-4)


def said(ran: Any) -> str:
    """Its screen, white space as single blanks."""
    return " ".join(ran.out.split())


@pytest.mark.slow
def test_a_run_goes_on_and_a_finished_trace_has_its_folds_beside_it(perturbkv: Run, six: list[object]) -> None:
    asked = [*six, *GRID, "--granularity", "kv", "--folds", 2]
    plain = perturbkv("question", "alpha", *asked, "--no-kl", "-o", "out")
    assert plain.code == 0 and "KL of α" not in said(plain)
    assert not list(Path("out").glob("alpha-fold-*"))
    whole = perturbkv("question", "alpha", *asked, "-o", "out", "--overwrite")
    assert whole.code == 0 and "6 of 6" in whole.err
    stamps = {path: path.stat().st_mtime_ns for path in Path("out").glob("*.h5")}
    beside = perturbkv("question", "alpha", "out/trace.h5", "--folds", 2, "--format", "png")
    assert beside.code == 0, beside.err
    assert beside.out.splitlines()[:20] == whole.out.splitlines()[:20] and "KL of α" in said(beside)
    other = perturbkv("question", "alpha", "out/trace.h5", "--folds", 3, "-o", "other", "--format", "png")
    assert other.code == 0 and "KL of α" not in said(other) and "other folds" in " ".join(other.err.split())
    assert {path: path.stat().st_mtime_ns for path in Path("out").glob("*.h5")} == stamps
    more = [*asked[:4], "--samples", 5, *asked[6:]]
    fewer = perturbkv("question", "alpha", *more, "-o", "fewer", "--json")
    assert fewer.code == 0 and fewer.json()["measured"]["samples"] == 5


@pytest.mark.slow
def test_adaptive_budgets_do_not_depend_on_alpha_and_are_composed_too(perturbkv: Run, six: list[object]) -> None:
    ran = perturbkv("question", "alpha", *six, *GRID, "--policy", "adakv", "--granularity", "kv", "--json", "-o", "out")
    assert ran.code == 0, ran.err
    assert ran.json()["measured"]["composed_off"] < 1e-4 and ran.json()["heads_per_kept_set"] == 2


def test_files_of_others_stay(perturbkv: Run, six: list[object]) -> None:
    Path("out").mkdir()
    for name, kind in (("alpha-head.json", "shares of stage 1 as JSON"), ("alpha-fold-1.h5", "a fold's trace")):
        mine = Path("out") / name
        mine.write_text('{"by": "global", "alpha": 0.5}')
        refused(
            perturbkv("question", "alpha", *six, *GRID, "-o", "out"),
            f"expected {kind} at out/{name}, got another file; --overwrite replaces it",
        )
        mine.unlink()
    assert not list(Path("out").iterdir())


def test_a_dry_run_says_that_samples_are_run_again(perturbkv: Run, six: list[object]) -> None:
    ran = perturbkv("question", "alpha", *six, "--dry-run")
    assert ran.code == 0 and "once more" in " ".join(ran.err.split())
    assert "two-stage(alpha=0.1)" in ran.out
    assert "once more" not in perturbkv("question", "alpha", *six, "--dry-run", "--no-kl").err


@pytest.mark.slow
def test_workers_and_resumed_runs_need_no_file(perturbkv: Run, six: list[object]) -> None:
    Path("a.json").write_text(json.dumps({"by": "head", "alpha": [[0, 0.5, 1, 0.25]] * 2, "layers": [0, 1]}))
    asked = ["--selection", "two-stage(alpha=a.json)", "--selection", "attention"]
    first = perturbkv("trace", *six[:-2], *asked, "-o", "one.h5")
    ran = perturbkv("trace", *six[:-2], *asked, "--engine", "workers", "--workers", 2, "-o", "two.h5")
    assert (first.code, ran.code) == (0, 0), ran.err
    one, two = (pk.read_trace(path) for path in ("one.h5", "two.h5"))
    np.testing.assert_array_equal(one.arrays["kept_code"], two.arrays["kept_code"])
    np.testing.assert_array_equal(one.arrays["stage1_count"], two.arrays["stage1_count"])
    assert len(np.unique(one.arrays["stage1_count"][:, 0])) == 4


@pytest.mark.parametrize("granularity", ["query", "kv"])
def test_answers_whose_cache_is_compressed_again_take_a_table(
    perturbkv: Run, tiny: list[object], granularity: str
) -> None:
    """Of equal shares what the number gives, of others something else."""
    equal, other = [[0.75] * 4] * 2, [[0, 0.5, 1, 0.25], [1, 1, 0, 0.9]]
    for name, rows in (("equal", equal), ("other", other)):
        Path(f"{name}.json").write_text(json.dumps({"by": "head", "alpha": rows, "layers": [0, 1]}))
    names = ["0.75", "equal.json", "other.json"]
    asked = ["--max-new-tokens", 12, "--compress-every", 28, "--granularity", granularity, "-o", "out"]
    chosen = [part for name in names for part in ("--selection", f"two-stage(alpha={name})")]
    ran = perturbkv("generate", *tiny, *chosen, *asked)
    assert ran.code == 0, ran.err
    rows = [json.loads(line) for line in Path("out/generation.jsonl").read_text().splitlines()]
    answers = [[one["tokens"] for one in row["evicted"].values()] for row in rows if "evicted" in row]
    assert len(answers) == 2 and all(number == table for number, table, _ in answers)
    assert any(number != table for number, _, table in answers)
