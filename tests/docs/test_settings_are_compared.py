"""docs/scripts/specification.py: a row for every setting, the estimators that it names, and verdicts by the rules."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import perturbkv as pk
from tests.support.folders import model_folder
from tests.support.scripts import functions

MODELS, DATA_SETS = 4, 3


@pytest.fixture(scope="module")
def spec() -> dict[str, Any]:
    return functions("specification")


@pytest.fixture(scope="module")
def trace(tmp_path_factory: pytest.TempPathFactory, spec: dict[str, Any]) -> pk.Trace:
    model = pk.load_model(model_folder(tmp_path_factory.mktemp("models") / "tiny", positions=512), device="cpu")
    prompts = pk.load_prompts("needle", model, samples=5, lengths=(300,), chat_template=False)
    configs = [config for made in spec["by_preset"]().values() for config in made]
    return pk.measure(model, prompts, configs, progress=False)


def test_every_run_that_can_be_had_is_asked_for(spec: dict[str, Any]) -> None:
    found = spec["runs"]()
    assert len(found) == len(set(found)) == (2 * MODELS - 1) * DATA_SETS
    assert not any(template for model, template, _ in found if model in spec["WITHOUT_TEMPLATE"])


def test_every_setting_of_a_run_has_every_comparison(spec: dict[str, Any], trace: pk.Trace) -> None:
    found = list(spec["rows"](trace, "tiny", False, "needle"))
    settings = {tuple(row[name] for name in spec["SETTINGS"]) for row in found}
    assert len(settings) == 10
    assert len(found) == 10 * len(spec["COMPARISONS"])
    assert {(row["preset"], row["granularity"]) for row in found}.isdisjoint(spec["CONTRADICTING"])
    for row in found:
        assert row["n"] == 5
        assert row["low"] <= row["value"] <= row["high"] or np.isnan(row["low"])


def test_heads_by_means_are_those_of_the_mean_over_prompts(spec: dict[str, Any], trace: pk.Trace) -> None:
    rows = spec["rows"](trace, "tiny", False, "needle")
    by_hand = [row["value"] for row in rows if row["comparison"].startswith("heads by means")]
    lost = {kind: trace.arrays[f"perturbation_{kind}"][:, :, 0].astype(float) for kind in ("isolated", "propagated")}
    expected = []
    for kind in ("isolated", "propagated"):
        for pair in pk.compare_heads(trace, "attention", "two-stage"):
            first, second = (
                lost[kind][:, trace.run.configs.index(side)].reshape(5, -1) for side in (pair.baseline, pair.treatment)
            )
            ties = getattr(pair, kind).differences.reshape(5, -1) == 0
            expected.append(float((np.where(ties, 0, first - second).mean(axis=0) > 0).mean()))
    assert by_hand == pytest.approx(expected)


def test_an_interval_on_one_side_of_even_decides(spec: dict[str, Any]) -> None:
    share, total = spec["COMPARISONS"]["heads by means, isolated"], spec["COMPARISONS"]["sum, isolated"]
    assert [share.verdict(*ends) for ends in ((0.51, 0.6), (0.4, 0.49), (0.4, 0.6))] == ["holds", "turned", "undecided"]
    assert [total.verdict(*ends) for ends in ((0.5, 0.9), (1.1, 1.2), (0.9, 1.1))] == ["holds", "turned", "undecided"]
    assert share.verdict(float("nan"), float("nan")) == "undecided"


def test_rows_are_kept_counted_and_drawn(
    spec: dict[str, Any], trace: pk.Trace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = spec["read"].__globals__
    monkeypatch.setitem(own, "ROWS", tmp_path / "rows.csv")
    found = list(spec["rows"](trace, "tiny", False, "needle"))
    spec["add"](found)
    spec["add"]([{**row, "model": "other"} for row in found])
    read = spec["read"]()
    assert len(read) == 2 * len(found)
    assert read[0]["model"] == "tiny"
    assert float(read[0]["value"]) == pytest.approx(found[0]["value"], rel=1e-3)
    lines = list(spec["tally"](read))
    assert len(lines) == len(spec["COMPARISONS"])
    assert all(sum(map(int, line.strip("| ").split(" | ")[3:])) == 20 for line in lines)
    spec["draw"](read, tmp_path / "picture.png")
    assert (tmp_path / "picture.png").stat().st_size > 10_000
