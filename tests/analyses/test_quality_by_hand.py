"""Scores of several data sets against float loops; which traces belong together; kinds, averages, small data sets."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from scipy import stats

from perturbkv.analyses.quality.quality import Quality, quality
from perturbkv.analyses.stats.intervals import OptionalInterval
from perturbkv.analyses.verdicts import LESS, MORE, UNDECIDED
from perturbkv.configs.task_kinds import KINDS, kind_of
from perturbkv.display import Table
from perturbkv.errors import TraceError
from perturbkv.trace import Trace
from tests.support.graded import CONFIGS, graded
from tests.support.measured import config

QASPER = ([0.5, 0.25, 1.0, 0.0, 0.75, 0.5], [
    [0.5, 0.5, 0.0], [0.0, 0.25, 0.25], [0.75, 1.0, 0.0], [0.0, 0.0, 0.0], [0.5, 1.0, 0.25], [0.25, 0.5, 0.5],
])  # fmt: skip
NEWS = ([0.3, 0.2, 0.4, 0.35, 0.25], [
    [0.2, 0.3, 0.1], [0.2, 0.1, 0.1], [0.3, 0.35, 0.2], [0.3, 0.3, 0.1], [0.15, 0.2, 0.05],
])  # fmt: skip
MUSIQUE = ([1.0, 0.0], [[0.5, 1.0, 0.0], [0.0, 0.0, 0.5]])


def three(**more: Any) -> list[Trace]:
    return [
        graded("multi_news", *NEWS, held=[0.1, 0.1, 0.3], **more),
        graded("qasper", *QASPER, held=[0.2, 0.2, 0.3], failures={"lost": "NaN"}, **more),
    ]


def interval(values: list[float]) -> tuple[float, float]:
    """Mean minus and plus Student's t times the standard error, 3/8 n degrees of freedom, on the plain scale."""
    n, mean = len(values), sum(values) / len(values)
    error = math.sqrt(sum((value - mean) ** 2 for value in values) / (n - 1) / n)
    reach = stats.t.ppf(0.975, min(3 / 8 * n, n - 1)) * error
    return mean - reach, mean + reach


def of_differences(values: list[float]) -> tuple[float, float]:
    """The same; where half of them are 0, ends that do not leave out 0 reach for rarer ones (METHOD: Intervals)."""
    low, high = interval(values)
    n, mean = len(values), sum(values) / len(values)
    if 2 * sum(value == 0 for value in values) < n:
        return low, high
    rest = 1 - 0.025 ** (1 / n)
    farther = [rest * (mean - min(values)) if low <= 0 else 0, rest * (max(values) - mean) if high >= 0 else 0]
    return max(-1.0, low - farther[0]), min(1.0, high + farther[1])


def joined(parts: list[list[float]], least: float, most: float) -> tuple[float, float]:
    """The mean of means, minus and plus the root of the sum of squares of each one's own distances, over how many."""
    means = [sum(part) / len(part) for part in parts]
    ends = [[max(least, low), min(most, high)] for low, high in map(interval, parts)]
    middle, count = sum(means) / len(means), len(means)
    below = math.sqrt(sum((mean - low) ** 2 for mean, (low, _) in zip(means, ends, strict=True))) / count
    above = math.sqrt(sum((high - mean) ** 2 for mean, (_, high) in zip(means, ends, strict=True))) / count
    return middle - below, middle + above


def ends(interval: OptionalInterval) -> tuple[float, float]:
    assert interval is not None
    assert interval.kind == "interval"
    return interval.low, interval.high


def of(rows: Any, place: int) -> list[float]:
    return [row[place] for row in rows]


def test_a_data_sets_score_is_its_samples_mean_with_students_interval() -> None:
    news = quality(three()).datasets[1]
    assert (news.name, news.kind, news.samples) == ("multi_news", "summarisation", 5)
    assert news.full == pytest.approx(sum(NEWS[0]) / 5)
    assert ends(news.full_interval) == pytest.approx(interval(NEWS[0]))
    for place in range(3):
        assert news.methods[place].score == pytest.approx(sum(of(NEWS[1], place)) / 5)
        low, high = interval(of(NEWS[1], place))
        assert ends(news.methods[place].score_interval) == (pytest.approx(max(0, low)), pytest.approx(high))


def test_differences_are_paired_sample_by_sample() -> None:
    result = quality(three())
    for column, (full, rows) in zip(result.datasets, (QASPER, NEWS), strict=True):
        for place, lost in enumerate(one.minus_full for one in column.methods):
            pairs = list(zip(of(rows, place), full, strict=True))
            differences = [evicted - whole for evicted, whole in pairs]
            assert lost.difference == pytest.approx(sum(differences) / len(full))
            assert ends(lost.difference_interval) == pytest.approx(of_differences(differences))
            counts = [sum(sign(one) for one in pairs) for sign in (_better, _equal, _worse)]
            assert [lost.wins, lost.ties, lost.losses] == counts
        (gain,) = column.gains
        assert gain.difference == pytest.approx(
            sum(row[1] - row[0] for row in rows) / len(full)
        )  # two-stage − attention
        assert ends(gain.difference_interval) == pytest.approx(interval([row[1] - row[0] for row in rows]))
        assert gain.wins + gain.ties + gain.losses == len(full)


def _better(pair: tuple[float, float]) -> bool:
    return pair[0] > pair[1]


def _equal(pair: tuple[float, float]) -> bool:
    return pair[0] == pair[1]


def _worse(pair: tuple[float, float]) -> bool:
    return pair[0] < pair[1]


def test_the_average_counts_every_data_set_once_and_its_interval_each_by_itself() -> None:
    average = quality(three()).average
    assert (average.name, average.samples) == ("average", 11)
    for place in range(3):
        parts = [of(QASPER[1], place), of(NEWS[1], place)]
        assert average.methods[place].score == pytest.approx((sum(parts[0]) / 6 + sum(parts[1]) / 5) / 2)
        assert ends(average.methods[place].score_interval) == pytest.approx(joined(parts, 0, 1))
    gains = [[row[1] - row[0] for row in rows] for rows in (QASPER[1], NEWS[1])]
    assert ends(average.gains[0].difference_interval) == pytest.approx(joined(gains, -1, 1))
    assert [one.cache_share for one in average.methods] == pytest.approx([0.15, 0.15, 0.3])


def test_kinds_come_in_the_order_of_tables_each_the_mean_of_its_data_sets() -> None:
    result = quality([*three(), graded("narrativeqa", *MUSIQUE), graded("x/own.jsonl", *NEWS)])
    assert [one.name for one in result.kinds] == ["single-document QA", "summarisation", "others"]
    assert [one.name for one in result.datasets] == ["qasper", "narrativeqa", "multi_news", "own"]
    single = result.kinds[0]
    assert [task.name for task in single.tasks] == ["qasper", "narrativeqa"]
    assert single.full == pytest.approx((3 / 6 + 1 / 2) / 2)


def test_known_data_sets_have_a_kind_and_others_are_others() -> None:
    known = {
        "trec": "few-shot", "ruler:vt": "multi-hop tracing", "ruler:niah_multivalue": "retrieval",
        "ruler:qa_squad": "question answering", "needle": "needle",
    }  # fmt: skip
    assert {name: kind_of(name) for name in known} == known
    assert {kind_of(name) for name in ("vt", "ruler:trec", "nobody", "trec.jsonl")} == {"others"}
    assert len(set(KINDS)) == len(KINDS)
    worded = graded("data/some.jsonl", *NEWS, dataset_options={"wording": {"trec": {}}})
    assert quality(worded).datasets[0].kind == "few-shot"
    both = graded("data/some.jsonl", *NEWS, dataset_options={"wording": {"trec": {}, "lcc": {}}})
    assert quality(both).datasets[0].kind == "others"


def test_few_samples_give_a_range_and_are_told_by_name() -> None:
    few = quality([*three(), graded("musique", *MUSIQUE)])
    (musique,) = [one for one in few.datasets if one.name == "musique"]
    assert musique.full_interval is not None
    assert (musique.full_interval.low, musique.full_interval.high, musique.full_interval.kind) == (0.0, 1.0, "range")
    assert few.average.full_interval is not None
    assert few.average.full_interval.kind == "range"
    assert "Too few samples for intervals: musique" in few.notes()
    assert "Too few" not in quality(three()).notes()
    one = quality([*three(), graded("musique", [1.0], [[1.0, 0.0, 0.0]])])
    assert one.average.full_interval is None
    assert "None" not in repr(one)


def test_the_best_of_each_budget_is_marked_where_scores_differ() -> None:
    configs = [*CONFIGS[:2], config("attention", 0.4), config("two-stage", 0.4)]
    rows = [[0.1, 0.3, 0.5, 0.5], [0.3, 0.1, 0.5, 0.5], [0.2, 0.3, 0.5, 0.5]]
    column = quality(graded("qasper", [1, 1, 1], rows, configs)).datasets[0]
    assert [one.best for one in column.methods] == [False, True, False, False]
    shown = " ".join(repr(quality(graded("qasper", [1, 1, 1], rows, configs))).split())
    assert shown.count("*23.3") == 1
    assert "*50.0" not in shown


def test_every_record_has_what_its_own_cache_holds() -> None:
    held = np.array([[0.02, 0.1, 0.1], [0.08, 0.1, 0.1], [0.05, 0.1, 0.1], [0.05, 0.1, 0.1], [0.1, 0.1, 0.1]])
    made = graded("multi_news", *NEWS)
    arrays = {**made.arrays, "held_share": held}
    result = quality(replace(made, arrays=arrays))
    own = [row["held"] for row in result.records() if row["config"] == CONFIGS[0].label()]
    assert own == pytest.approx([0.02, 0.08, 0.05, 0.05, 0.1])
    assert [one.cache_share for one in result.average.methods] == pytest.approx([0.06, 0.1, 0.1])


def test_the_first_step_stands_beside_each_score() -> None:
    moved = [[0.1, 0.2, 0.5], [0.3, 0.1, 0.6], [0.2, 0.4, 0.7], [0.5, 0.3, 0.9], [0.4, 0.6, 0.8]]
    kl = [[0.01 * value for value in row] for row in moved]
    result = quality(graded("multi_news", *NEWS, held=[0.1, 0.1, 0.3], moved=moved, kl=kl))
    rows = result.records()
    assert len(rows) == 5 * 4
    assert {row["config"] for row in rows} == {"full cache", *(one.label() for one in CONFIGS)}
    (row,) = [row for row in rows if row["sample"] == "s3" and row["config"] == CONFIGS[1].label()]
    assert row["propagated"] == pytest.approx(0.3)
    assert row["kl"] == pytest.approx(0.003)
    assert (row["score"], row["full"], row["held"], row["kind"]) == (0.3, 0.35, pytest.approx(0.1), "summarisation")
    told = result.to_dict()["datasets"][0]["first_step"]
    assert [one["propagated"] for one in told] == pytest.approx([0.3, 0.3, 0.7])  # medians
    assert [one["kl"] for one in told] == pytest.approx([0.003, 0.003, 0.007])
    assert told[0]["propagated_interval"] is not None


def test_what_json_says_is_what_the_columns_hold() -> None:
    result = quality(three())
    told = json.loads(json.dumps(result.to_dict(), allow_nan=False))
    assert [one["name"] for one in told["datasets"]] == ["qasper", "multi_news"]
    assert [one["failed"] for one in told["datasets"]] == [1, 0]
    assert told["average"]["methods"][2]["score"] == pytest.approx(result.average.methods[2].score)
    assert told["average"]["gains"][0]["treatment"]["selection"] == "two-stage"
    assert told["average"]["gains"][0]["wins"] == result.average.gains[0].wins
    assert told["kinds"][0]["datasets"] == ["qasper"]
    assert told["average"]["full"] == pytest.approx((3 / 6 + 1.5 / 5) / 2)


def test_configurations_that_a_trace_lacks_are_left_out_by_name() -> None:
    less = graded("qasper", QASPER[0], [row[:2] for row in QASPER[1]], CONFIGS[:2])
    result = quality([graded("multi_news", *NEWS), less])
    assert (result.configs, result.left_out) == (CONFIGS[:2], CONFIGS[2:])
    assert f"Left out, as not all data sets have them (qasper): {CONFIGS[2].label()}." in result.details()
    assert result.lacking == ("qasper",)
    assert result.datasets[1].methods[1].score == pytest.approx(sum(of(NEWS[1], 1)) / 5)


def test_each_table_says_what_the_caches_of_its_own_data_sets_hold() -> None:
    result = quality([*three(), graded("narrativeqa", *MUSIQUE, held=[0.4, 0.4, 0.3])])
    single, *_ = [part for part in result.details() if isinstance(part, Table)]
    assert [row[1] for row in single.rows] == ["1.00", "0.30", "0.30", "0.30"]
    assert [row[1] for row in result.table().rows] == ["1.00", "0.23", "0.23", "0.30"]


def test_configurations_are_found_wherever_a_trace_holds_them() -> None:
    turned = graded("qasper", QASPER[0], [row[::-1] for row in QASPER[1]], CONFIGS[::-1], held=[0.3, 0.2, 0.1])
    straight = graded("qasper", *QASPER, held=[0.1, 0.2, 0.3])
    both = [
        quality([graded("multi_news", *NEWS, held=[0.1] * 3), one]).to_dict()["average"] for one in (turned, straight)
    ]
    assert both[0] == both[1]


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"model": "other"}, "expected traces of one model, got m in multi_news/trace.h5 and other in qasper/trace.h5"),
        ({"scenario": "context-only"}, "one scenario, got regular in multi_news/trace.h5 and context-only"),
        ({"dtype": "bfloat16"}, "one dtype, got float32"),
        ({"revision": "abc"}, "one revision"),
        ({"dataset": "multi_news"}, "different data sets, got multi_news in multi_news/trace.h5 and in qasper/trace"),
    ],
)
def test_traces_that_do_not_belong_together_are_refused_by_name(changed: dict[str, Any], said: str) -> None:
    first, second = three()
    with pytest.raises(TraceError, match=said):
        quality([first, replace(second, run=replace(second.run, **changed))])


def test_a_file_under_another_name_is_refused_and_counts_once() -> None:
    both = [replace(one, run=replace(one.run, dataset_options={"file_sha256": "0f"})) for one in three()]
    with pytest.raises(TraceError, match="every prompt once, got sample 's0' of multi_news in multi_news/trace.h5 and"):
        quality(both)


def test_other_things_that_are_no_graded_traces_are_refused() -> None:
    with pytest.raises(TraceError, match="at least one trace, got none"):
        quality([])
    with pytest.raises(TraceError, match="expected traces, as pk.read_trace"):
        quality("trace.h5")  # type: ignore[arg-type]
    other = graded("qasper", QASPER[0], [row[:1] for row in QASPER[1]], [config("value", 0.2)])
    with pytest.raises(TraceError, match="share a configuration, got 3 configurations in multi_news"):
        quality([graded("multi_news", *NEWS), other])
    blind = graded("multi_news", [math.nan, 1.0], [[0, 0, 0], [0, 0, 0]])
    with pytest.raises(TraceError, match="quality needs graded answers, got none in 1 of 2 samples"):
        quality(blind)


def test_runs_without_the_pair_have_no_gains_and_say_nothing_of_them() -> None:
    alone = quality(graded("qasper", QASPER[0], [row[:1] for row in QASPER[1]], CONFIGS[:1]))
    assert (alone.pairs, alone.average.gains) == ((), ())
    assert (len(alone.table().columns), len(quality(three()).table().columns)) == (4, 6)
    named = quality(three(), treatment="random")
    assert named.average.gains[0].difference < 0
    assert "random" in named.conclusion()


def test_the_conclusion_tells_the_scores_and_how_often_the_treatment_wins() -> None:
    result = quality(three())
    full, evicted, contest = result.claims()
    assert [case.text.partition(" [")[0] for case in full.cases] == ["40.0"]
    assert [case.value for case in evicted.cases] == [one.score for one in result.average.methods]
    assert (contest.subject, contest.baseline) == ("two-stage", "attention")
    assert result.scope() == ["average of 2 data sets", "n = 11 samples"]
    same = quality(graded("qasper", [1, 1, 1], [[0.5, 0.5, 0.5]] * 3)).conclusion()
    assert same == (
        "The full cache scores 100.0 (100.0 … 100.0) of 100; an evicted cache scores 50.0 (50.0 … 50.0); too few "
        "samples to decide whether two-stage scores higher than attention: 0.0 (0.0 … 0.0) points (n = 3 samples: "
        "ranges, too few for intervals)."
    )
    alone = quality(graded("qasper", [1, 1, 1], [[0.5]] * 3, CONFIGS[:1]))
    assert len(alone.claims()) == 2


@pytest.mark.parametrize(("rows", "verdict", "difference"), [
    ([[0.1, 0.6, 0], [0.2, 0.7, 0], [0.1, 0.7, 0]], MORE, "53.3 ["),
    ([[0.6, 0.1, 0], [0.7, 0.2, 0], [0.7, 0.1, 0]], LESS, "−53.3 ["),
])  # fmt: skip
def test_a_gain_or_a_loss_of_six_samples_is_decided(rows: Any, verdict: str, difference: str) -> None:
    (case,) = quality(graded("qasper", [1] * 6, rows * 2)).claims()[-1].cases
    assert case.verdict == verdict
    assert case.text.startswith(difference)


def test_a_full_cache_that_scores_nothing_has_nothing_to_lose() -> None:
    lost = quality(graded("qasper", [0, 0, 0], [[0, 0, 0]] * 3)).conclusion()
    assert lost == (
        "Nothing can be said of evicted caches: the full cache scores 0, so there is nothing that eviction can lose (n "
        "= 3 samples: ranges, too few for intervals)."
    )


def test_a_clear_gain_is_decided() -> None:
    configs = [config(selection, budget) for budget in (0.2, 0.4) for selection in ("attention", "two-stage")]
    rows = [[0.2, 0.6 + step, 0.5, 0.5 + step * (-1) ** place]
            for place, step in enumerate(np.linspace(0, 0.05, 8))]  # fmt: skip
    made: Quality = quality(graded("qasper", [0.9] * 8, rows, configs))
    assert [(case.name, case.verdict) for case in made.claims()[-1].cases] == [("b=0.2", MORE), ("b=0.4", UNDECIDED)]


def test_all_data_sets_stand_in_the_foot_until_they_are_many() -> None:
    names = ["narrativeqa", "qasper", "hotpotqa", "musique", "trec"]
    many = quality([graded(name, *NEWS) for name in names])
    assert many.identity.dataset == "5 data sets"
    assert quality(three()).identity.dataset == "multi_news, qasper"
    assert (many.identity.samples, quality(three()).identity.failed) == (25, 1)


def test_a_saved_trace_says_the_same(tmp_path: Path) -> None:
    from perturbkv.storage.trace.trace_file import read_trace

    made = graded("qasper", *QASPER, held=[0.2, 0.2, 0.3])
    assert quality(read_trace(made.save(tmp_path / "t.h5"))).to_dict() == quality(made).to_dict()
