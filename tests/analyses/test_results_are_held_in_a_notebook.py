"""The results of comparing heads, layers, samples and budgets: as sequences, text, HTML, frames and figures."""

from __future__ import annotations

import dataclasses
import doctest
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from matplotlib.figure import Figure

import perturbkv as pk
from perturbkv.analyses.result import Result
from perturbkv.configs.choice import Choice
from perturbkv.configs.eviction import EvictionConfig
from perturbkv.display import as_text
from perturbkv.errors import ConfigError, TraceError, UnknownNameError
from tests.figures.test_odd_data_give_a_figure import made
from tests.support.artists import words
from tests.support.measured import hand_made
from tests.support.traces import sample_trace, trace

QUESTIONS: tuple[Callable[..., Any], ...] = (pk.compare_heads, pk.layer_drift, pk.last_layer, pk.budget_curves)
NAMES = ("two-stage", "two-stage-uniform")


@pytest.mark.parametrize("samples", [1, 4, 8])
@pytest.mark.parametrize("question", QUESTIONS)
def test_a_result_fits_80_columns_and_begins_with_its_conclusion(question: Callable[..., Any], samples: int) -> None:
    for sides in ("two-stage", NAMES):
        result = question(made(samples=samples, layers=12), treatments=sides)
        text = repr(result)
        assert max(map(len, text.splitlines())) <= 80
        assert " ".join(text.split()).startswith(" ".join(result.conclusion().split()))
        assert len(result.table().columns) <= 7
        assert "what the columns mean" in as_text(result.explain())


def test_html_escapes_names() -> None:
    plugin = Choice("<i>mine</i>.py:Peak", {}, frozenset())
    configs = [EvictionConfig(64, policy, name) for policy in (plugin, "snapkv") for name in ("attention", "two-stage")]
    found = hand_made(configs, {"perturbation_isolated": np.ones((5, 4, 1, 1))})
    html = pk.compare_heads(found, "attention", "two-stage")._repr_html_()
    assert "&lt;i&gt;mine&lt;/i&gt;.py:Peak" in html.replace("<br>", "")
    assert "<i>" not in html


def test_a_result_says_of_which_run_it_is() -> None:
    found = dataclasses.replace(made(samples=5, failed=1), run=dataclasses.replace(made(5).run, random_weights=True))
    for question in QUESTIONS:
        for text in (repr(question(found)), question(found)._repr_html_()):
            assert "RANDOM WEIGHTS · m · d · 5 samples · 1 failed" in " ".join(text.split())


def test_heads_of_a_frame_add_up_to_the_numbers_of_the_document() -> None:
    result = pk.compare_heads(made(samples=5, sigma_stage1=0.4), treatments=NAMES)
    frame = result.to_frame("heads")
    assert len(frame) == 4 * 2 * 2 * 2  # pairs × kinds × layers × heads
    pairs = frame.groupby(["treatment", "kind"], sort=False)
    for document in result.to_dict()["comparisons"]:
        for kind in ("isolated", "propagated"):
            rows, told = pairs.get_group((document["treatment"]["label"], kind)), document[kind]
            assert set(rows["baseline"]) == {document["baseline"]["label"]}
            assert set(rows["budget"]) == {document["treatment"]["budget"]}
            assert rows["baseline_mean"].mean() == pytest.approx(told["baseline_mean"])
            assert rows["treatment_mean"].mean() == pytest.approx(told["treatment_mean"])
            assert rows["treatment_mean"].sum() / rows["baseline_mean"].sum() == pytest.approx(told["sum_ratio"])
            counts = [int((rows["verdict"] == sign).sum()) for sign in (1, 0, -1)]
            assert counts == [told["improved"], told["tied"], told["worsened"]]
            assert int((rows["significant"] == 1).sum()) == told["sign_flips"]["above"]
            assert int((rows["p"] <= 0.05).sum()) == told["sign_flips"]["uncorrected"]
            assert int(rows["flagged"].sum()) == len(document["flagged_heads"]) == 4


def test_a_frame_is_the_table_as_it_is_shown() -> None:
    result = pk.compare_heads(made(samples=5), treatments=NAMES)
    frame, table = result.to_frame(), result.table()
    assert len(frame) == len(table.rows) == 8
    for row, pair in zip(frame.itertuples(), [pair for pair in result for _ in range(2)], strict=True):
        kind = getattr(pair, row.name)
        ends = kind.sum_ratio_interval
        assert (row.baseline, row.config, row.n) == (pair.baseline.label(), pair.treatment.label(), 5)
        assert (row.sum_ratio, row.sum_ratio_low, row.sum_ratio_high) == (kind.sum_ratio, ends.low, ends.high)
    with pytest.raises(ConfigError, match="expected rows of HeadComparisons to be '' or 'heads', got 'layers'"):
        result.to_frame("layers")


def test_layers_of_a_frame_are_those_of_the_document() -> None:
    result = pk.layer_drift(made(samples=5), treatments=NAMES)
    rows = result.to_frame("layers").groupby("treatment", sort=False)
    for document in result.to_dict()["drifts"]:
        own = rows.get_group(document["treatment"]["label"])
        for name in ("baseline_drift", "treatment_drift", "ratio", "verdict", "noise_floor"):
            np.testing.assert_allclose(own[name], document[name])
        np.testing.assert_allclose(own["treatment_drift"] / own["baseline_drift"], document["ratio"])


def test_samples_of_a_frame_give_the_share_of_the_document() -> None:
    result = pk.last_layer(made(samples=5))
    rows = result.to_frame("samples").groupby("treatment", sort=False)
    for document in result.to_dict()["per_sample"]:
        own = rows.get_group(document["treatment"]["label"])
        assert (own["verdict"] == 1).mean() == pytest.approx(document["improved_share"])
        assert own["treatment_drift"].sum() / own["baseline_drift"].sum() == pytest.approx(document["mean_ratio"])
        assert own["sample"].tolist() == document["sample_ids"]


def test_curves_of_a_frame_are_those_of_the_document() -> None:
    result = pk.budget_curves(made(samples=5))
    rows = result.to_frame().groupby("curve", sort=False)
    for document in result.to_dict()["curves"]:
        own = rows.get_group(document["name"])
        assert own["budget"].tolist() == document["budgets"]
        for name in ("drift", "kl", "top1"):
            np.testing.assert_allclose(own[name], document["medians"][name])


def test_pairs_are_a_sequence_whose_slices_draw_themselves() -> None:
    result = pk.compare_heads(made(), treatments=NAMES)
    assert len(result) == 4 == len(list(result))
    assert (result[0].treatment.selection.name, result[0].treatment.budget.value) == ("two-stage", 64)
    single = result[1:2]
    assert single.identity.configs == (result[1].baseline, result[1].treatment)
    assert "isolated: " in words(single.plot())  # the scatter of one pair
    assert "cache share" in words(result.plot(84))
    assert len(result.plot().axes) > len(single.plot().axes)
    with pytest.raises(ConfigError, match="at least one comparison"):
        _ = result[9:]


@pytest.mark.parametrize("question", [pk.layer_drift, pk.last_layer])
def test_a_series_draws_itself_and_several_say_which_to_draw(question: Callable[..., Any]) -> None:
    one, several = question(made()), question(made(), treatments=NAMES)
    assert (len(one), len(several), len(one[0])) == (1, 2, 2)
    assert words(one.plot()) == words(one[0].plot())
    assert isinstance(several[1].plot(84), Figure)
    with pytest.raises(ConfigError, match=r"expected one series to draw, got 2; .* result\[0\]\.plot\(\)"):
        several.plot()
    assert isinstance(pk.budget_curves(made()).plot(), Figure)


def test_a_pair_is_one_line_without_its_arrays() -> None:
    found = made(samples=5)
    for pair in (pk.compare_heads(found)[0], pk.layer_drift(found)[0][0], pk.last_layer(found)[0][0]):
        labels = f"{pair.baseline.label()} → {pair.treatment.label()}"
        assert repr(pair) == f"<{type(pair).__name__}: {labels}>"


def test_notes_of_several_series_stand_once() -> None:
    several = pk.layer_drift(made(samples=5), treatments=NAMES)
    assert several.notes() == several[0].notes()
    assert "\n" not in several.conclusion()


@pytest.mark.parametrize("question", QUESTIONS)
@pytest.mark.parametrize(
    ("asked", "error", "said"),
    [
        ({"trace": "trace.h5"}, TraceError, "expected a trace, as pk.read_trace or pk.measure give it; got str"),
        ({"treatments": []}, ConfigError, "got none"),
        ({"treatments": ["two-stage", "two-stage"]}, ConfigError, "twice"),
        ({"treatments": [3]}, ConfigError, "got int"),
        ({"baseline": 3}, ConfigError, "got int"),
        ({"treatments": "value"}, TraceError, "'value'"),
        ({"step": 4}, ConfigError, "expected a step from 0 to 0, got 4"),
        ({"distance": "l3"}, UnknownNameError, "unknown distance 'l3'"),
    ],
)
def test_a_wrong_question_is_one_line(
    question: Callable[..., Any], asked: dict[str, Any], error: type[Exception], said: str
) -> None:
    with pytest.raises(error, match=said) as found:
        question(**{"trace": made(), **asked})
    assert "\n" not in str(found.value)


@pytest.mark.parametrize(
    "question", [pk.compare_heads, pk.layer_drift, pk.budget_curves], ids=lambda question: question.__name__
)
def test_the_examples_in_docstrings_run(question: Callable[..., Any]) -> None:
    small = sample_trace()
    small.arrays["prompt_tokens"] = np.asarray(500)  # type: ignore[index]
    ran = doctest.testmod(sys.modules[question.__module__], extraglobs={"trace": trace(small)})
    assert ran.attempted > 0
    assert ran.failed == 0


def test_importing_the_package_loads_no_numpy() -> None:
    code = "import sys, perturbkv; sys.exit('numpy' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_results_are_results() -> None:
    assert all(isinstance(question(made()), Result) for question in QUESTIONS)
