"""Shared parts of studies: what two sides perturb, names of configurations, tables, and plain logarithmic axes."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from matplotlib.figure import Figure

import perturbkv as pk
from tests.support.scripts import STUDIES, functions, tables
from tests.support.traces import run_config, sample_trace, trace

COMMON = functions("common", STUDIES)


def test_equal_kept_sets_perturb_alike_and_propagated_only_above_equal_layers() -> None:
    made = trace(*(sample_trace(f"s{place}", seed=place) for place in range(3)))
    same = made.same_kept(0, 1)
    for kind in ("isolated", "propagated"):
        first, second = COMMON["perturbation_of"](made, kind, 0, 1)
        values = made.arrays[f"perturbation_{kind}"][:, :, 0].astype(float)
        for sample, layer, head in np.ndindex(same.shape):
            alike = bool(same[sample, layer, head])
            if kind == "propagated":
                alike = alike and bool(same[sample, :layer].all())
            assert first[sample, layer, head] == values[sample, 0, layer, head]
            assert second[sample, layer, head] == values[sample, 0 if alike else 1, layer, head]


def test_names_leave_out_what_all_share() -> None:
    configs = pk.grid([64, 0.1], selection=["attention", "two-stage"])
    assert COMMON["short_names"](configs) == ["attention b=64", "two-stage b=64", "attention b=0.1", "two-stage b=0.1"]
    assert COMMON["short_names"](configs[:1]) == ["attention"]
    assert COMMON["setting_name"](configs[0], "alpha", "pool") == "b=64 w=32 query"
    document = {"label": configs[1].label(), **configs[1].to_document()}
    assert COMMON["configuration"](document) == configs[1]
    assert run_config().configs


def test_tables_are_printed_and_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    made = [("first", ["a", "b"], [["1", "2"], ["", "4"]]), ("second", ["c"], [["5"]])]
    COMMON["write_tables"](argparse.Namespace(output=tmp_path, written=[]), iter(made))
    assert tables(capsys.readouterr().out) == {"first": [["a", "b"], ["1", "2"], ["", "4"]], "second": [["c"], ["5"]]}
    (path,) = tmp_path.iterdir()
    assert [one["rows"] for one in json.loads(path.read_text())["tables"]] == [rows for _, _, rows in made]


@pytest.mark.parametrize("ends", [(0.9, 1.15), (0.3, 2.5), (0.004, 30), (2e-6, 0.5), (1, 5e4)])
def test_a_logarithmic_axis_has_a_few_plain_numbers(ends: tuple[float, float]) -> None:
    axes: Any = Figure().subplots()
    axes.plot(ends, [0, 1])
    COMMON["plain_log"](axes, "x")
    low, high = axes.get_xlim()
    ticks = [tick for tick in axes.xaxis.get_majorticklocs() if low <= tick <= high]
    assert 3 <= len(ticks) <= 9
    texts = [axes.xaxis.get_major_formatter()(tick, 0) for tick in ticks]
    assert len({*texts}) == len(texts)
    assert [_value(text) for text in texts] == pytest.approx(ticks)


def _value(text: str) -> float:
    """The number that a tick shows, without an e: 4,000, 0.05, 10⁻⁶ or 2×10⁻⁵."""
    assert "e" not in text
    digits = text.translate(str.maketrans("⁻⁰¹²³⁴⁵⁶⁷⁸⁹", "-0123456789", ","))
    times, raised, power = digits.rpartition("10-")
    return float(f"{times.removesuffix('×') or 1}e-{power}") if raised and "⁻" in text else float(digits)
