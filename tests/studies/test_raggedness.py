"""studies/raggedness.py: a row for every setting and number, verdicts by the rules, and the page's tables."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import perturbkv as pk
from tests.support.folders import model_folder
from tests.support.scripts import DOCS, STUDIES, functions


@pytest.fixture(scope="module")
def ragged() -> dict[str, Any]:
    return functions("raggedness", STUDIES)


@pytest.fixture(scope="module")
def trace(tmp_path_factory: pytest.TempPathFactory, ragged: dict[str, Any]) -> pk.Trace:
    model = pk.load_model(model_folder(tmp_path_factory.mktemp("models") / "tiny", positions=1024), device="cpu")
    prompts = pk.load_prompts("needle", model, samples=5, lengths=(700,), chat_template=False)
    configs = [config for made in ragged["configs"]().values() for config in made.values()]
    return pk.measure(model, prompts, configs, settings=pk.Settings(steps=1), progress=False)


def row(value: float, low: float, high: float, comparison: str = "layer", number: str = "propagated") -> dict[str, str]:
    ends = {"value": str(value), "low": str(low), "high": str(high)}
    return {"comparison": comparison, "number": number, **ends}


def test_every_run_of_the_rules_is_asked_for(ragged: dict[str, Any]) -> None:
    found = ragged["runs"]()
    assert len({run.name for run in found}) == len(found) == 14
    assert len(found) * len(ragged["configs"]()) == 56


@pytest.mark.slow
def test_every_setting_has_every_number_at_one_cache_share(ragged: dict[str, Any], trace: pk.Trace) -> None:
    found = list(ragged["rows"](trace, ragged["Run"]("tiny", False, "needle")))
    titles = {**ragged["COMPARISONS"], **ragged["SHOWN"]}
    assert len(found) == 4 * len(titles) * 3
    for each in found:
        assert each["low"] <= each["value"] <= each["high"]
        assert each["cache_share"] == pytest.approx(each["budget"], abs=0.01)
    chosen = ragged["configs"]()[0.2, "two-stage"]
    kl = [trace.arrays["logit_kl"][:, trace.config_index(chosen[name].label()), 0] for name in ("head", "model")]
    told = [each["value"] for each in found if each["comparison"] == "model over head" and each["number"] == "KL"]
    assert told[3] == pytest.approx(np.median(kl[1] - kl[0]))


def test_verdicts_follow_the_rules(ragged: dict[str, Any]) -> None:
    verdict, within, sentence = (ragged[name] for name in ("verdict_of", "within_margin", "overall_verdict"))
    assert [verdict(row(1.2, *ends)) for ends in ((1.1, 1.3), (0.9, 1.5), (0.7, 0.9))] == [
        "holds", "undecided", "reversed",
    ]  # fmt: skip
    assert verdict(row(1.2, 1.1, 1.3, "allocation")) == "reversed"
    assert verdict(row(0.2, 0.1, 0.3, number="KL")) == "holds"
    assert verdict(row(-0.2, -0.3, -0.1, "union, model", "KL")) == "holds"
    assert verdict(row(1, float("nan"), float("nan"))) == "undecided"
    assert within(row(1, 0.96, 1.05)) and not within(row(1, 0.94, 1.0)) and not within(row(1, 0.96, 1.0, number="KL"))
    more, less, open_ = row(2, 1.5, 3), row(0.5, 0.3, 0.9), row(1, 0.5, 2)
    assert sentence([more] * 16 + [open_] * 4) == "supported"
    assert sentence([more] * 18 + [less] * 2) == "undecided"
    assert sentence([less] * 16 + [open_] * 4) == "contradicted"
    assert sentence([more] * 15 + [open_] * 5) == "undecided"


@pytest.mark.slow
def test_the_page_holds_the_scripts_tables_and_names_what_was_not_measured(
    ragged: dict[str, Any], tmp_path: Path
) -> None:
    page, found = (
        (DOCS / "results" / "raggedness.md").read_text(),
        ragged["read_rows"](run.rows for run in ragged["runs"]()),
    )
    for table in ("verdicts_table", "levels_table", "settings_table"):
        _, heads, rows = ragged[table](found)
        assert [row for row in (heads, *rows) if f"| {' | '.join(row)} |" not in page] == []
    for run in ragged["runs"]():
        assert run.rows.exists() or f"`{run.model}` was not measured" in page, run.name
    ragged["draw"](found, tmp_path / "r.png")
    assert (tmp_path / "r.png").stat().st_size > 0
