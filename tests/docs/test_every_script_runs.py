"""Every script under docs/ runs on a small trace of a tiny model and says what its page needs."""

from __future__ import annotations

import json
import re
import runpy
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.support.folders import model_folder
from tests.support.scripts import DOCS, SCRIPTS, functions, perturbkv, script

BY_OTHERS = {
    "code_sizes.py",
    "coverage.py",
    *(
        f"paper{part}.py"
        for part in ("", "_answers", "_bounds", "_cost", "_heads", "_open", "_read", "_steps", "_verdicts")
    ),
    "raggedness.py",
    "reference_pages.py",
    "report_pictures.py",
    "specification.py",
    "specification_claims.py",
    "second_model.py",
    "second_prompts.py",
    "sizes.py",
    "template_window.py",
    "vendor.py",
}
"""Scripts that have a test of their own."""
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
    """What the commands of `make tables` leave, of two samples."""
    folder = tmp_path_factory.mktemp("runs")
    news = ["--model", model, "--dataset", "multi_news", "--data-dir", longbench, "--samples", 2, *SMALL]
    perturbkv("bound-tightness", *news, "--max-tokens", 200, "-o", folder)
    trace, more = folder / "trace.h5", ["--format", "png"]
    perturbkv("assumption", trace, *more)
    perturbkv("layers", trace, "--per-sample", "--budgets", *more)
    perturbkv("heads", trace, *more)
    perturbkv("ablation", *news, "--max-tokens", 200, "-o", folder / "ablation")
    perturbkv("horizon", *news, "--max-tokens", 200, "--steps", 3, "-o", folder / "horizon")
    return folder


def test_every_script_has_a_test_here() -> None:
    tested = Path(__file__).read_text()
    names = {path.name for path in SCRIPTS.glob("*.py")} - BY_OTHERS
    assert {name for name in names if f'script("{name.removesuffix(".py")}"' not in tested} == set()


def test_the_json_reference_is_what_results_declare() -> None:
    page = (DOCS / "reference" / "json.md").read_text()
    assert runpy.run_path(str(SCRIPTS / "json_reference.py"))["page"](page) == page  # script("json_reference")


def test_cost_shows_the_rows_and_where_the_sweeps_spend_their_seconds() -> None:
    said = script("cost", DOCS / "bench" / "cpu.json")
    assert "| `sweep-24` |" in said
    assert "sweep-24: " in said


def test_plan_calculates_the_table_of_its_page() -> None:
    said = script("plan", DOCS / "bench")
    assert said.splitlines()[:2] == ["| what | who | how much | how long |", "|---|---|---|---|"]
    assert said.strip() in (DOCS / "how-to" / "cluster.md").read_text()


def test_rare_losses_shows_every_population_and_how_it_is_covered() -> None:
    head, line, *rows = script("rare_losses", 200).splitlines()
    assert head.count("|") == line.count("|") == 7
    assert "| 10 % lose Beta(1, 3) | " in "\n".join(rows)
    assert {row.count(" ×") >= 5 and row.count(" → ") == 5 for row in rows} == {True}


def test_equivalence_shows_what_verdicts_err_and_what_n_is_told() -> None:
    verdicts, told = script("equivalence", 200).split("\n\n")
    rows = verdicts.splitlines()
    assert {row.count("|") for row in rows} == {6}
    assert len(rows) == 12
    assert rows[2].startswith("| 0.02 | ")
    assert {row.count("|") for row in told.strip().splitlines()} == {6}
    assert len(told.strip().splitlines()) == 6


def test_rare_prompts_shows_every_population_with_both_ratios_and_their_worst_and_median() -> None:
    head, line, *rows = script("rare_prompts", 40).splitlines()
    assert head.count("|") == line.count("|") == 10
    cells = [[cell.strip() for cell in row.strip("|").split("|")] for row in rows]
    assert [row[0] for row in cells][0::14] == ["none", "median of these"]
    assert len(cells) == 1 + 12 + 2
    shares = np.array([[float(cell.removesuffix(" %")) for cell in row[3:]] for row in cells])
    assert (shares[0] > 85).all()  # where no prompt is rare
    np.testing.assert_allclose(shares[-2], shares[1:13].min(axis=0))
    np.testing.assert_allclose(shares[-1], np.median(shares[1:13], axis=0), atol=1)


@pytest.mark.slow
def test_what_rare_prompts_hold_is_what_very_many_of_them_show() -> None:
    tool = functions("rare_prompts")
    for heads in (50, 5):
        population = tool["Population"](10, 1.6, heads)
        top, bottom, source = np.zeros(50), np.zeros(50), np.random.default_rng(2)
        for _ in range(40):
            baseline, treatment = population.draw(source, 50, 100)
            top, bottom = top + treatment.sum(axis=(0, 1)), bottom + baseline.sum(axis=(0, 1))
        truth = tool["ratios"](*population.sums())
        assert top.sum() / bottom.sum() == pytest.approx(float(truth[0]), rel=0.02)
        assert sorted(top / bottom)[24:26] == pytest.approx([float(truth[1])] * 2, rel=0.04)


@pytest.mark.slow
def test_tables_shows_every_analysis(folder: Path) -> None:
    said = script("tables", *(folder / part / "summary.json" for part in (".", "ablation", "horizon")))
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
    _, heads, rows = functions("tables")["_agreement"]({"rank_agreement": [orders(), orders(samples=4)]})
    assert heads == ["budget", "", "θ", "θ̂", "1 − S", "θ̂ less 1 − S, points", "n"]
    assert rows[:3] == [
        ["0.1", "ρ, four selections", "0.50", "–", "0.50", "–", "120 in 9"],
        ["", "against attention", "90 % [89, 91]", "–", "90 % [89, 91]", "–", "100 in 8"],
        ["", "against ν ≡ 1", "85 % [84, 86]", "83 % [82, 84]", "79 % [78, 80]", "4.0 [2.0, 6.0]", "100 in 8"],
    ]
    assert rows[5] == ["", "against ν ≡ 1", "–", "–", "–", "–", "100 in 4"]


def test_the_papers_row_on_the_bounds_is_decided_by_the_paired_difference(monkeypatch: pytest.MonkeyPatch) -> None:
    page = functions("paper_bounds")
    found = {"rank_agreement": [orders()]}
    monkeypatch.setitem(page["_orders"].__globals__, "analysis", lambda *_: found)
    said = page["_orders"](Path("nowhere"))
    assert said.verdict == "supports"
    assert said.text.endswith("b = 0.1: 4.0 [2.0, 6.0] points (83 % against 79 %)")
    found["rank_agreement"][0]["concordance"][3]["gain_interval"]["low"] = -0.01
    assert page["_orders"](Path("nowhere")).verdict == "undecided"


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
    lines = script("tables", tmp_path / "s.json").splitlines()
    rows = [line.strip("| ").split(" | ") for line in lines if line.startswith("| 0.")]
    assert [row[0] for row in rows] == ["0.1", "0.2", "0.4", "0.8"]
    assert [(row[1], row[5]) for row in rows] == [("0.10", "–"), ("–", "0.20"), ("0.40", "0.40"), ("–", "0.80")]
    assert {len(row) for row in rows} == {9}


def test_readings_shows_every_part_and_reads_the_prompts_again(folder: Path, longbench: Path) -> None:
    said = script("readings", folder / "trace.h5", longbench)
    assert "retained mass" in said
    assert "first layer: L × " in said
    assert "coefficient of variation of ν: " in said
    assert "coefficient of variation of window attention: " in said


def test_model_sanity_tells_weights_loss_answer_and_prompt(
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    folder = model_folder(tmp_path_factory.mktemp("models") / "long", positions=1200)
    said = script("model_sanity", folder)
    assert f"{folder}: float32 (" in said
    assert re.search(r"loss \d\.\d\d nats per token", said)
    assert re.search(r"\d+ not found: ", said)
    assert "A magic number is hidden" in said.rpartition("prompt ")[2]


@pytest.mark.slow
def test_needle_reads_the_four_runs(model: Path, tmp_path: Path) -> None:
    for part, more in {".": [], "context": ["--scenario", "context-only"], "pooled": [], "kernel": []}.items():
        perturbkv("needle", "--model", model, *GRID, *SMALL, *SIDES, *more, "-o", tmp_path / part)
    said = script("needle", tmp_path)
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
    said = script("ties", *names)
    rows = [line.split(" | ") for line in said.splitlines()[2:]]
    assert {(row[0], row[1]) for row in rows} == {("| needle", "bfloat16"), ("| multi_news", "bfloat16")}
    assert {row[2] for row in rows} >= {"isolated L1", "propagated L1"}
