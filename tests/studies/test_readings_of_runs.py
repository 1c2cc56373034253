"""Studies of finished runs: the tables of their summaries, and what a trace holds beside them."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from tests.support.folders import model_folder
from tests.support.scripts import STUDIES, functions, perturbkv, study, tables

SMALL = ["--budget", 40, "--window", 8, "--format", "png"]
GRID = ["--lengths", "300,340", "--depths", "0.5", "--haystack", "noise", "--max-new-tokens", 2, "--steps", 1]
SIDES = ["--compare", "snapkv:attention,snapkv:two-stage"]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return model_folder(tmp_path_factory.mktemp("models") / "tiny", positions=512)


@pytest.fixture(scope="module")
def longbench(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """LongBench's multi_news, as small as it can be."""
    folder = tmp_path_factory.mktemp("longbench")
    rows = [
        {"_id": f"n{place}", "input": "", "context": f"{place} The river is wide and slow. " * 6, "answers": ["slow"]}
        for place in range(8)
    ]
    (folder / "multi_news.jsonl").write_text("\n".join(map(json.dumps, rows)))
    return folder


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, model: Path, longbench: Path) -> Path:
    """A run of two samples as `make tables` begins."""
    folder = tmp_path_factory.mktemp("runs")
    perturbkv("bound-tightness", *news(model, longbench), "-o", folder)
    return folder


def news(model: Path, longbench: Path) -> list[object]:
    dataset = ["--dataset", "multi_news", "--data-dir", longbench, "--samples", 2, "--max-tokens", 200]
    return ["--model", model, *dataset, *SMALL]


@pytest.fixture(scope="module")
def analysed(folder: Path, model: Path, longbench: Path) -> Path:
    """What the other commands of `make tables` leave, too."""
    trace, more = folder / "trace.h5", ["--format", "png"]
    perturbkv("assumption", trace, *more)
    perturbkv("layers", trace, "--per-sample", "--budgets", *more)
    perturbkv("heads", trace, *more)
    perturbkv("ablation", *news(model, longbench), "-o", folder / "ablation")
    perturbkv("horizon", *news(model, longbench), "--steps", 3, "-o", folder / "horizon")
    return folder


@pytest.mark.slow
def test_tables_shows_every_analysis(analysed: Path, tmp_path: Path) -> None:
    summaries = (analysed / part / "summary.json" for part in (".", "ablation", "horizon"))
    said = study("tables", *summaries, "-o", tmp_path)
    analyses = (
        "heads",
        "bound-tightness, two-stage",
        "rank agreement",
        "assumption",
        "layers",
        "budgets",
        "ablation, ",
    )
    for title in (*analyses, "horizon, "):
        assert f"\n{title}" in said


def picks(bound: str, share: float, first: str, gain: float | None = None, samples: int = 8) -> dict[str, Any]:
    """One row of a summary's `concordance`, of `first` and two-stage."""
    ends = {"low": share - 0.01, "high": share + 0.01, "kind": "interval"}
    gains = None if gain is None else {"low": gain - 0.02, "high": gain + 0.02, "kind": "interval"}
    return {
        "bound": bound, "first": first, "second": "two-stage", "same_stage1": first == "two-stage-uniform",
        "share": share, "interval": ends, "gain": gain, "gain_interval": gains, "values": 100, "samples": samples,
    }  # fmt: skip


def orders(samples: int = 8) -> dict[str, Any]:
    """A summary's `rank_agreement` of one budget."""
    rank = {"selections": list("abcd"), "mean": 0.5, "interval": None, "values": 120, "samples": 9}
    return {
        "setting": {"budget": 0.1},
        "rank_correlations": [{"bound": bound, **rank} for bound in ("θ", "1 − S")],
        "concordance": [
            picks("θ", 0.9, "attention", 0.0), picks("1 − S", 0.9, "attention"),
            picks("θ", 0.85, "two-stage-uniform", 0.06, samples), picks("θ̂", 0.83, "two-stage-uniform", 0.04, samples),
            picks("1 − S", 0.79, "two-stage-uniform", None, samples),
        ],
    }  # fmt: skip


def test_tables_show_the_bound_of_a_stage_1_only_where_stage_1_is_one_and_its_paired_difference() -> None:
    _, heads, rows = functions("tables", STUDIES)["_agreement_table"]({"rank_agreement": [orders(), orders(samples=4)]})
    assert heads == ["budget", "", "θ", "θ̂", "1 − S", "θ̂ less 1 − S, points", "n"]
    assert rows[:3] == [
        ["0.1", "ρ, four selections", "0.50", "–", "0.50", "–", "120 in 9"],
        ["", "against attention", "90 % [89, 91]", "–", "90 % [89, 91]", "–", "100 in 8"],
        ["", "against ν ≡ 1", "85 % [84, 86]", "83 % [82, 84]", "79 % [78, 80]", "4.0 [2.0, 6.0]", "100 in 8"],
    ]
    assert rows[5] == ["", "against ν ≡ 1", "–", "–", "–", "–", "100 in 4"]


def test_the_papers_row_on_the_bounds_is_decided_by_the_paired_difference(monkeypatch: pytest.MonkeyPatch) -> None:
    page = functions("paper_heads", STUDIES)
    found = {"rank_agreement": [orders()]}
    monkeypatch.setitem(page["_bound_order"].__globals__, "analysis", lambda *_: found)
    said = page["_bound_order"](Path("nowhere"))
    assert said.verdict == "supports"
    assert said.text.endswith("b = 0.1: 4.0 [2.0, 6.0] points (83 % against 79 %)")
    found["rank_agreement"][0]["concordance"][3]["gain_interval"]["low"] = -0.01
    assert page["_bound_order"](Path("nowhere")).verdict == "undecided"


def test_tables_of_curves_that_lack_a_budget_leave_its_cells_out(tmp_path: Path) -> None:
    def curve(name: str, sizes: list[float]) -> dict[str, Any]:
        numbers = {what: [100 * size for size in sizes] for what in ("drift", "kl", "top1")}
        none = dict.fromkeys(numbers)
        return {"name": name, "budgets": sizes, "kept": sizes, "held": sizes, "medians": numbers, "intervals": none}

    drift = {
        "treatment": {"selection": "two-stage"}, "baseline": {"budget": 64}, "ratio": [1.0], "ratio_interval": None,
        "baseline_median_drift": [1.0], "treatment_median_drift": [1.0],
    }  # fmt: skip
    curves = [curve("a", [0.1, 0.4]), curve("b", [0.2, 0.4, 0.8])]
    (tmp_path / "s.json").write_text(json.dumps({"analyses": {"layers": {"drifts": [drift],
                                                                         "budgets": {"curves": curves}}}}))  # fmt: skip
    lines = study("tables", tmp_path / "s.json", "-o", tmp_path).splitlines()
    rows = [line.strip("| ").split(" | ") for line in lines if line.startswith("| 0.")]
    assert [row[0] for row in rows] == ["0.1", "0.2", "0.4", "0.8"]
    assert [(row[1], row[5]) for row in rows] == [("0.10", "–"), ("–", "0.20"), ("0.40", "0.40"), ("–", "0.80")]
    assert {len(row) for row in rows} == {9}


def test_readings_shows_every_part_and_reads_the_prompts_again(folder: Path, longbench: Path, tmp_path: Path) -> None:
    found = tables(study("readings", folder / "trace.h5", longbench, "-o", tmp_path))
    assert "retained mass" in found["configurations"][0]
    assert len(found["what L and θ consist of"]) == 2 * len(found["configurations"]) - 1
    (first,) = (rows for title, rows in found.items() if title.startswith("first layer"))
    assert first[1][1].startswith("× ")
    assert [row[0] for row in found["coefficient of variation over samples"][1:]] == ["ν", "window attention"]


@pytest.mark.slow
def test_model_sanity_tells_weights_loss_answer_and_prompt(
    tmp_path_factory: pytest.TempPathFactory, tmp_path: Path
) -> None:
    folder = model_folder(tmp_path_factory.mktemp("models") / "long", positions=1200)
    said = study("model_sanity", folder, "-o", tmp_path)
    assert f"{folder}: float32 (" in said
    assert re.search(r"loss \d\.\d\d nats per token", said)
    assert re.search(r"\d+ not found: ", said)
    assert "A magic number is hidden" in said.rpartition("  prompt ")[2]


@pytest.mark.slow
def test_needle_reads_the_four_runs(model: Path, tmp_path: Path) -> None:
    for part, more in {".": [], "context": ["--scenario", "context-only"], "pooled": [], "kernel": []}.items():
        perturbkv("needle", "--model", model, *GRID, *SMALL, *SIDES, *more, "-o", tmp_path / part)
    said = study("needle", tmp_path, "-o", tmp_path / "out")
    assert said.count("| full cache |") == 4
    assert said.count("tokens of the number that a head keeps") == 3


@pytest.mark.slow
def test_ties_pairs_the_traces_of_each_dataset(model: Path, longbench: Path, tmp_path: Path) -> None:
    names = []
    for dtype in ("bfloat16", "float32"):
        for dataset, more in {"needle": ["--length", 300], "multi_news": ["--data-dir", longbench]}.items():
            names.append(tmp_path / f"{dataset}-{dtype}.h5")
            shared = ["--model", model, "--dataset", dataset, "--samples", 2, *SMALL[:4]]
            perturbkv("trace", *shared, *more, "--dtype", dtype, "-o", names[-1])
    ((_, *rows),) = tables(study("ties", *names, "-o", tmp_path / "out")).values()
    assert {(row[0], row[1]) for row in rows} == {("needle", "bfloat16"), ("multi_news", "bfloat16")}
    assert {row[2] for row in rows} >= {"isolated L1", "propagated L1"}
