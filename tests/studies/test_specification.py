"""studies/specification*.py: a row for every setting, the estimators that it names, and verdicts by the rules."""

from __future__ import annotations

import itertools
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import perturbkv as pk
from perturbkv.schema import TOKEN_KINDS
from tests.support.folders import model_folder
from tests.support.scripts import STUDIES, functions

MODELS, DATA_SETS = 4, 3


@pytest.fixture(scope="module")
def spec() -> dict[str, Any]:
    return functions("specification", STUDIES)


@pytest.fixture(scope="module")
def counts() -> dict[str, Any]:
    return functions("specification_counts", STUDIES)


@pytest.fixture(scope="module")
def claims() -> dict[str, Any]:
    return functions("specification_claims", STUDIES)


@pytest.fixture(scope="module")
def trace(tmp_path_factory: pytest.TempPathFactory, spec: dict[str, Any]) -> pk.Trace:
    model = pk.load_model(model_folder(tmp_path_factory.mktemp("models") / "tiny", positions=512), device="cpu")
    prompts = pk.load_prompts("needle", model, samples=5, lengths=(300,), chat_template=False)
    configs = list(spec["Run"]("tiny", False, "needle").configs())
    return pk.measure(model, prompts, configs, settings=pk.Settings(steps=2), progress=False)


def test_every_run_that_can_be_had_is_asked_for(spec: dict[str, Any]) -> None:
    found = spec["runs"]()
    confirming = [run for name in spec["CONFIRMING"] for run in spec["runs"](name)]
    assert len(found) == 2 * (2 * MODELS - 1) * DATA_SETS
    assert len(confirming) == (2 * MODELS - 1) + 2 * 2 * 2
    assert len({run.name for run in found + confirming}) == len(found) + len(confirming)
    assert not any(run.template for run in found if run.model in spec["WITHOUT_TEMPLATE"])


def test_confirming_prompts_are_of_a_folder_and_a_seed_of_their_own(
    spec: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[tuple[Path, int]] = []

    def refuse(*_: Any, data_dir: Path, seed: int, **__: Any) -> None:
        asked.append((data_dir, seed))
        raise LookupError

    monkeypatch.setattr(pk, "load_model", lambda *_, **__: None)
    monkeypatch.setattr(pk, "load_prompts", refuse)
    for run in (spec["runs"]()[0], *spec["runs"]("confirm2")[:2]):
        with pytest.raises(LookupError):
            spec["measure"](run, tmp_path)
    assert asked == [(tmp_path, 0), (tmp_path / "confirm2", 0), (tmp_path / "confirm2", 41)]


def test_a_context_only_run_has_one_window_and_kvpress_its_own(spec: dict[str, Any]) -> None:
    windows = {
        scenario: {
            (preset, config.window)
            for config, preset in spec["Run"]("tiny", False, "needle", scenario).configs().items()
        }
        for scenario in spec["SCENARIOS"]
    }
    presets = [preset for preset in spec["PRESETS"] if preset != "kvpress"]
    assert windows["context-only"] == {("kvpress", 64), *((preset, 32) for preset in presets)}
    assert windows["regular"] == windows["context-only"] | {(preset, 8) for preset in presets}


@pytest.mark.slow
def test_every_setting_of_a_run_has_every_comparison(spec: dict[str, Any], trace: pk.Trace) -> None:
    found = list(spec["rows"](trace, spec["Run"]("tiny", False, "needle")))
    settings = {tuple(row[name] for name in spec["SETTINGS"]) for row in found}
    assert len(settings) == 11
    assert {(row["preset"], row["granularity"]) for row in found}.isdisjoint(spec["CONTRADICTING"])
    for setting in settings:
        sides = set(spec["PRESETS"][setting[-1]])
        titles = {name for name, one in spec["COMPARISONS"].items() if {one.baseline, one.treatment} <= sides}
        for steps in (1, 2):
            told = [row["comparison"] for row in found if row["steps"] == steps
                    and tuple(row[name] for name in spec["SETTINGS"]) == setting]  # fmt: skip
            assert set(told) == titles
            assert len(told) == len(titles)
    for row in found:
        assert row["n"] == 5
        ties_left_out = row["comparison"] == "last layer, prompts"
        assert row["low"] <= row["value"] <= row["high"] or np.isnan(row["low"]) or ties_left_out


@pytest.mark.parametrize("steps", [1, 2])
def test_shares_are_by_hand_and_ties_count_half(spec: dict[str, Any], trace: pk.Trace, steps: int) -> None:
    found = [row for row in spec["rows"](trace, spec["Run"]("tiny", False, "needle")) if row["steps"] == steps]
    step = 0 if steps == 1 else None
    pairs = list(pk.compare_heads(trace, "attention", "two-stage", step=step))
    for kind in ("isolated", "propagated"):
        lost = trace.arrays[f"perturbation_{kind}"][:, :, :steps].astype(float).mean(axis=2)
        for estimator in ("means", "sample"):
            told = [row["value"] for row in found if row["comparison"] == f"heads by {estimator}, {kind}"]
            expected = []
            for pair in pairs:
                sides = (lost[:, trace.run.configs.index(side)] for side in (pair.baseline, pair.treatment))
                gain = np.subtract(*sides)
                tied = getattr(pair, kind).differences == 0
                if estimator == "means":
                    gain, tied = gain.mean(axis=0), getattr(pair, kind).verdict == 0
                expected.append(float(np.where(tied, 0.5, gain > 0).mean()))
            assert told == pytest.approx(expected)
    drifts = [one for series in pk.last_layer(trace, "attention", "two-stage", step=step) for one in series]
    told = [row["value"] for row in found if row["comparison"] == "last layer, prompts"]
    assert sorted(told) == pytest.approx(sorted(float((one.verdict + 1).mean() / 2) for one in drifts))


def test_equal_kept_sets_are_even_and_undecided(spec: dict[str, Any]) -> None:
    tied = np.zeros((5, 2, 3))
    kind = SimpleNamespace(differences=tied, verdict=tied[0], sum_ratio=1.0, sum_ratio_interval=None)
    pair, drift = SimpleNamespace(isolated=kind), SimpleNamespace(verdict=np.zeros(5, int))
    for title in ("heads by means, isolated", "heads by sample, isolated", "last layer, prompts"):
        comparison = spec["COMPARISONS"][title]
        value, interval = spec["comparison_number"](title, comparison, pair, drift)
        assert value == comparison.even
        assert interval is None or comparison.verdict(interval.low, interval.high) == "undecided"


def test_an_interval_on_one_side_of_even_decides(spec: dict[str, Any]) -> None:
    share, total = spec["COMPARISONS"]["heads by means, isolated"], spec["COMPARISONS"]["sum, isolated"]
    assert [share.verdict(*ends) for ends in ((0.51, 0.6), (0.4, 0.49), (0.4, 0.6))] == [
        "holds",
        "reversed",
        "undecided",
    ]
    assert [total.verdict(*ends) for ends in ((0.5, 0.9), (1.1, 1.2), (0.9, 1.1))] == ["holds", "reversed", "undecided"]
    assert share.verdict(float("nan"), float("nan")) == "undecided"


def test_a_kind_s_numbers_are_those_of_its_steps(spec: dict[str, Any], trace: pk.Trace) -> None:
    run = spec["Run"]("tiny", False, "needle")
    found, kinds = list(spec["kind_rows"](trace, run)), trace.arrays["token_kind"]
    assert {row["preset"] for row in found} == set(spec["PRESETS"])
    pairs = list(pk.compare_heads(trace, *spec["SIDES"]))
    of_last = [row for row in found if row["kind"] == found[-1]["kind"]]
    number = next(place for place, name in enumerate(TOKEN_KINDS) if name == found[-1]["kind"])
    steps = (kinds == number)[:, None, :, None, None]
    for row, pair in zip(of_last, pairs, strict=True):
        sums = [
            np.where(steps, trace.arrays["perturbation_propagated"].astype(float), 0)[:, trace.run.configs.index(one)]
            .sum(axis=(2, 3)) for one in (pair.treatment, pair.baseline)
        ]  # fmt: skip
        of = (kinds == number).sum(axis=1)
        mean = [(one.sum(axis=1)[of > 0] / of[of > 0]).sum() for one in sums]
        assert row["propagated_ratio"] == pytest.approx(mean[0] / mean[1])
        assert (row["samples"], row["tokens"]) == ((of > 0).sum(), of.sum())


@pytest.mark.slow
def test_rows_are_kept_counted_and_drawn(
    spec: dict[str, Any], counts: dict[str, Any], trace: pk.Trace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in (spec["runs"].__globals__, counts["tables"].__globals__["runs"].__globals__):
        monkeypatch.setitem(module, "ROWS", tmp_path / "rows")
    first = spec["runs"]()[0]
    for run in (*spec["runs"]()[:2], spec["Run"](first.model, True, first.dataset, "context-only")):
        spec["write_run"](run, trace.sel(window=[32, 64]) if run.scenario == "context-only" else trace)
    assert sorted(path.suffix for path in (tmp_path / "rows").iterdir()) == [".csv"] * 6
    told = {title: (heads, lines) for title, heads, lines in counts["tables"](2, "")}
    assert list(told) == [
        "comparisons, preset paper, n = 5", "comparisons, later presets, n = 5", "by level, propagated",
        "by level, isolated", "kvpress, regular, n = 5", "kvpress, context-only, n = 5",
        "context-only, preset paper, n = 5", "context-only, later presets, n = 5", "first token against all steps",
        "kinds of tokens",
    ]  # fmt: skip
    for name, settings in (("preset paper", 8), ("later presets", 12)):
        heads, lines = told[f"comparisons, {name}, n = 5"]
        for title, _, count, _, holds, against, _, within, left, _, _, runs in lines:
            if title.startswith("heads by means"):
                assert (count, holds, runs) == (str(settings), "–", "–")
                continue
            of = 4 if (title.split(",")[0], settings) == ("un-pooling", 12) else settings
            assert int(count) == sum(map(int, (holds, against, within, left))) == of
            assert sum(map(int, runs.split(" / "))) == 2
    assert {line[2] for line in told["kvpress, regular, n = 5"][1]} == {"2"}
    levels = {level: cells for level, *cells in told["by level, propagated"][1]}
    assert [cell.split(" of ")[1] for cell in levels["window 8"]] == ["10", "10", "4", "4", "6", "10"]
    assert levels["preset paper-v2"][2] == "–"
    for kind in counts["PANELS"]:
        rows = spec["read_rows"](run.rows for run in spec["runs"]())
        shown = [row for row in rows if row["steps"] == "2" and counts["is_counted"](row)]
        counts["draw"](shown, kind, tmp_path / "picture.png")
        assert (tmp_path / "picture.png").stat().st_size > 10_000


def setting(model: str, window: str, comparison: str, value: float, low: float, high: float) -> dict[str, str]:
    """Return a row of a made-up setting."""
    names = {"model": model, "template": "True", "dataset": "news", "scenario": "regular", "window": window,
             "granularity": "kv", "preset": "paper"}  # fmt: skip
    return {**names, "comparison": comparison, "value": str(value), "low": str(low), "high": str(high)}


def test_settings_and_runs_are_counted_by_the_rules(spec: dict[str, Any], counts: dict[str, Any]) -> None:
    title = "sum, propagated"
    rows = [
        setting("a", "8", title, 0.8, 0.7, 0.9),  # a: two of three hold, none is reversed
        setting("a", "32", title, 0.9, 0.8, 0.99),
        setting("a", "64", title, 0.99, 0.96, 1.02),  # within 5 %
        setting("b", "8", title, 0.8, 0.7, 0.9),  # b: one holds, one is reversed
        setting("b", "32", title, 1.2, 1.1, 1.3),
        setting("c", "8", title, 1.2, 1.1, 1.3),
        setting("c", "32", title, 1.2, 0.9, 1.5),  # c: a half is not most
    ]
    told = counts["count"](rows, spec["COMPARISONS"][title])
    assert (told.settings, told.claimed, told.holds, told.reversed, told.within, told.undecided) == (7, 4, 3, 2, 1, 2)
    assert told.runs == (1, 0, 2)
    assert (told.median, told.half_width, told.small) == (pytest.approx(0.99), pytest.approx(0.1), 0)
    small = counts["count"]([setting("a", "8", title, 0.97, 0.96, 0.98)], spec["COMPARISONS"][title])
    assert (small.holds, small.small, small.within) == (1, 1, 0)
    shares = [setting("a", "8", "heads by sample, isolated", 0.5, 0.46, 0.54)]
    assert counts["count"](shares, spec["COMPARISONS"]["heads by sample, isolated"]).within == 1


def test_verdicts_that_turn_are_counted(counts: dict[str, Any]) -> None:
    title, holds, against, open_ = "sum, propagated", (0.8, 0.7, 0.9), (1.2, 1.1, 1.3), (1, 0.9, 1.1)
    cases = [(holds, holds), (holds, against), (against, holds), (open_, holds), (holds, open_), (open_, open_)]
    first, every = (
        [setting("a", str(place), title, *pair[side]) for place, pair in enumerate(cases)] for side in (0, 1)
    )
    lines = {line[0]: line[1:] for line in counts["turned_table"](first, every)[2]}
    assert lines == {title: ["paper", "6", "1", "2", "1", "1"]}


def test_a_kind_makes_a_decided_sign_where_the_rest_has_another_or_none(counts: dict[str, Any]) -> None:
    title = "sum, propagated"
    ends = {"holds": (0.8, 0.9), "reversed": (1.1, 1.2), "undecided": (0.9, 1.1)}
    cases = [("holds", "holds"), ("holds", "undecided"), ("holds", "reversed"), ("undecided", "holds")]
    whole = [setting("a", str(place), title, 1, *ends[one]) for place, (one, _) in enumerate(cases)]
    kinds = [
        {**row, "kind": "word", "tokens": "9", "propagated_ratio": "1", "rest_ratio": "1",
         "rest_ratio_low": str(ends[rest][0]), "rest_ratio_high": str(ends[rest][1])}
        for row, (_, rest) in zip(whole, cases, strict=True)
    ]  # fmt: skip
    assert counts["kinds_table"](whole, kinds)[2] == [["news", "word", "4", "9", "1.00", "1.00", "3", "1", "1"]]


def test_a_specific_token_stands_in_its_own_prompt_and_in_few_others(claims: dict[str, Any]) -> None:
    prompts = [[1, 2, 3], [1, 2, 4], [1, 5, 6], [1, 5, 7], [1, 8, 9]]
    following = [2, 4, 5, 11, 1]  # in one of four others; in none; in one of four; nowhere; everywhere
    arrays = {
        "prompt_offset": np.cumsum([0, *(len(prompt) for prompt in prompts[:-1])]),
        "prompt_count": np.array([len(prompt) for prompt in prompts]),
        "prompt_token": np.concatenate(prompts),
        "token_id": np.array(following)[:, None],
    }
    assert claims["next_token_is_specific"](SimpleNamespace(arrays=arrays)).tolist() == [True, True, True, False, False]


def test_kinds_of_prompts_are_told_apart_by_permuting_them(claims: dict[str, Any]) -> None:
    kinds = np.array([True] * 4 + [False] * 4)
    apart, alike = np.arange(8.0), np.array([1.0, 4, 6, 7, 2, 3, 5, 8])
    for values in (apart, alike):
        chosen = list(itertools.combinations(range(8), 4))
        means = [values[list(own)].mean() - np.delete(values, own).mean() for own in chosen]
        exact = np.mean(np.abs(means) >= abs(values[kinds].mean() - values[~kinds].mean()) - 1e-9)
        assert claims["permutation_p"](values, kinds) == pytest.approx(exact, abs=0.02)


@pytest.mark.slow
def test_sums_by_the_next_token_are_by_hand(
    spec: dict[str, Any], claims: dict[str, Any], trace: pk.Trace, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    own = claims["next_token_sums"].__globals__
    run = spec["Run"]("tiny", False, "needle")
    monkeypatch.setitem(own, "RUNS", tmp_path)
    monkeypatch.setitem(own, "LEAST", 2)
    monkeypatch.setitem(own, "next_token_is_specific", lambda _: np.array([True, True, False, False, False]))
    trace.save(tmp_path / f"{run.name}.h5")
    found = list(claims["next_token_sums"](run))
    lines = [one.row() for one in found]
    assert len(lines) == 4
    lost = trace.arrays["perturbation_propagated"][:, :, 0].astype(float)
    pairs = [one for one in pk.compare_heads(trace, "attention", "two-stage", step=0)
             if run.configs()[one.treatment] == "paper"]  # fmt: skip
    for (_, _, window, granularity, common, specific, low, high, _), pair in zip(lines, pairs, strict=True):
        assert (window, granularity) == (str(pair.treatment.window), pair.treatment.granularity.name)
        assert (common, specific) == ("3", "2")
        sides = [lost[:, trace.run.configs.index(one)].sum(axis=(1, 2)) for one in (pair.treatment, pair.baseline)]
        ratios = sides[0] / sides[1]
        assert float(low) == pytest.approx(np.prod(ratios[2:]) ** (1 / 3), abs=0.006)
        assert float(high) == pytest.approx(np.prod(ratios[:2]) ** (1 / 2), abs=0.006)


def test_confirming_runs_judge_by_the_rules_shares(claims: dict[str, Any]) -> None:
    """On its side in 80 %, holding in half, against in at most 5 %; refuted if more are against or most not for it."""
    verdict = {
        (20, 16, 10, 1): "confirmed",
        (20, 15, 15, 0): "open",
        (20, 20, 9, 0): "open",
        (20, 16, 10, 2): "refuted",
        (20, 9, 9, 0): "refuted",
        (20, 10, 10, 1): "open",
    }
    for counts, said in verdict.items():
        assert claims["verdict_text"](*counts).endswith(f" of {counts[0]}: {said}")


def test_a_sentence_that_wants_the_opposite_counts_turned_settings(claims: dict[str, Any]) -> None:
    row = {
        "model": claims["SMALL"],
        "dataset": "multi_news",
        "preset": "paper",
        "comparison": "value norms, propagated",
    }
    found = [
        row | {"value": "1.1", "low": "1.05", "high": "1.2"},
        row | {"value": "1.2", "low": "0.9", "high": "1.5"},
        row | {"value": "0.9", "low": "0.8", "high": "0.95"},
        row | {"value": "0.5", "low": "0.4", "high": "0.6", "preset": "paper-v2"},
        row | {"value": "0.5", "low": "0.4", "high": "0.6", "model": "another"},
    ]
    (fifth,) = (one for one in claims["SENTENCES"]["confirm"] if one.text.startswith("5"))
    assert fifth.judged(found)[1:] == ["", "2 / 1 / 1 of 3: refuted"]
    (fourth,) = (one for one in claims["SENTENCES"]["confirm"] if one.text.startswith("4"))
    of_qwen = [one | {"model": claims["QWEN"][0], "comparison": f"value norms, {kind}"}
               for one in found[:3] for kind in claims["BOTH"]]  # fmt: skip
    assert fourth.judged(of_qwen)[1:] == ["1 / 1 / 1 of 3: refuted"] * 2


def test_the_seventh_sentence_counts_settings_whose_specific_tokens_gain_less(
    spec: dict[str, Any], claims: dict[str, Any]
) -> None:
    run = spec["Run"]("tiny", False, "multi_news")
    of = [((0.6, 1.2), 0.01), ((0.6, 0.9), 0.2), ((0.9, 0.6), 0.01), ((0.9, 0.6), 0.2)]
    found = [claims["NextToken"](run, 8, "query", (5, 5), ratios, p) for ratios, p in of]
    assert claims["seventh_row"](found)[2].startswith("2 / 1 / 1 of 4")


@pytest.mark.slow
def test_the_table_of_bounds_is_by_hand(
    spec: dict[str, Any], claims: dict[str, Any], trace: pk.Trace, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    run = spec["Run"]("tiny", False, "needle")
    monkeypatch.setitem(claims["bounds_row"].__globals__, "RUNS", tmp_path)
    trace.save(tmp_path / f"{run.name}.h5")
    monkeypatch.setitem(spec["SAMPLES"], "tiny", 5)
    cells, every = claims["bounds_row"](run, 0)
    assert len(cells) == len(claims["BOUND_HEADS"])
    assert [len(found) for found in every.values()] == [4, 4]
    sides = [
        next(
            index
            for index, config in enumerate(trace.run.configs)
            if run.configs()[config] == "paper"
            and (config.window, config.granularity.name, config.selection.name) == (32, "query", name)
        )
        for name in ("two-stage", "two-stage-uniform")
    ]
    lost, theta, theta_hat, sigma, kept = (
        trace.arrays[name][:, sides].take(0, axis=2).astype(float).reshape(5, 2, -1)
        for name in ("perturbation_isolated", "theta", "theta_hat", "sigma_stage1", "retained_mass")
    )
    evidence = sigma[:, 0] > 0.5
    for cell, bound in zip(cells[4:6], (theta, theta_hat), strict=True):
        assert float(cell) == pytest.approx(1 / np.median((lost / bound)[:, 0][evidence]), abs=0.06)
    both = (sigma > 0.5).all(axis=1)
    shares = []
    for bound in (theta, 1 - kept):
        right: dict[int, list[bool]] = {}
        for sample, head in zip(*np.nonzero(both), strict=True):
            signs = [np.sign(np.diff(side[sample, :, head])[0]) for side in (lost, theta, 1 - kept, theta_hat)]
            if all(signs):
                lower = np.argmin(bound[sample, :, head]) == np.argmin(lost[sample, :, head])
                right.setdefault(sample, []).append(bool(lower))
        shares.append(np.mean([np.mean(found) for found in right.values()]))
    assert [cells[6], cells[7]] == [f"{100 * share:.0f} %" for share in shares]


def test_gains_on_lost_attention_are_counted_by_side(claims: dict[str, Any]) -> None:
    ends = [(0.03, 0.01, 0.05), (0.02, -0.01, 0.05), (-0.02, -0.04, -0.01), (-0.01, -0.03, 0.01)]
    found = [SimpleNamespace(gain=gain, gain_interval=SimpleNamespace(low=low, high=high)) for gain, low, high in ends]
    assert claims["gains_row"]("θ", found) == ["θ", "2 / 1 / 1 of 4"]
