"""A judge that is not ours: what it is asked, what it may say, what is kept, and what its answers come to."""

from __future__ import annotations

import json
import os
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from scipy import stats

import perturbkv as pk
from perturbkv.analyses.quality.divergence_point import AT_START
from perturbkv.analyses.quality.judge import bounded_interval
from perturbkv.analyses.stats import intervals
from perturbkv.analyses.stats.intervals import StatisticKind
from perturbkv.errors import ConfigError, PluginError
from perturbkv.storage.judgements import Judge, pair_questions, single_questions
from tests.support.answers import CONFIGS, row, written
from tests.support.judges import planted_judge

ANSWERS = written(
    row("a", [1, 2, 3], [[1, 2], [1, 2, 3]]),
    row("b", [1, 2], [[1, 2, 3, 4], [1]]),
    row("c", [5], [[6], [5, 6]]),
    row("d", [5, 6], [[6], [5, 7]]),
    row("e", [5, 6, 7], [[6], [5, 6]]),
)
CHARACTERS = {3: 8, 2: 5, 1: 2, 4: 11}  # 'w1 w2 w3'


def characters(sample: str, place: int | None) -> int:
    """Of the full cache's answer, or of one configuration's."""
    (found,) = (one for one in ANSWERS.rows if one["sample"] == sample)
    made = found["full"] if place is None else found["evicted"][CONFIGS[place].label()]
    return CHARACTERS[len(made["tokens"])]


def asked(name: str, **more: Any) -> Any:
    return pk.judge(ANSWERS, planted_judge(name), progress=False, **more)


def test_scores_come_to_means_and_drops_whatever_their_order() -> None:
    found = asked("length")
    assert found.full.scores.tolist() == [characters(sample, None) for sample in "abcde"]
    for place, one in enumerate(found.configs):
        own = [characters(sample, place) for sample in "abcde"]
        assert one.scores.tolist() == own
        assert one.drop.tolist() == (found.full.scores - own).tolist()
        assert one.mean_interval is not None
        assert one.mean_interval.low < np.mean(own) < one.mean_interval.high
        assert one.mean_drop_interval is not None
    assert found.records()[0]["comment"] == "8 long"
    assert len(found.records()) == 15
    assert "Scores given: 2 to 11" in found.notes()


def test_scores_that_are_all_alike_have_no_interval_without_a_scale_and_one_with_it() -> None:
    bare, told = asked("ten"), asked("ten", scale=(1, 10))
    unseen = 1 - 0.025 ** (1 / 5)
    for cache in (bare.full, *bare.configs):
        assert (cache.mean_interval, cache.mean_drop_interval) == (None, None)
    assert told.full.mean_interval == intervals.Interval(pytest.approx(10 - 9 * unseen), 10.0)
    assert told.configs[0].mean_drop_interval == intervals.Interval(
        pytest.approx(-9 * unseen), pytest.approx(9 * unseen)
    )
    assert [len(one.caveats()) for one in (bare, told)] == [2, 1]
    assert "[10.00, 10.00]" not in repr(bare)
    assert "all alike" not in repr(told).lower()
    assert bare.to_dict()["full"]["mean_interval"] is None
    assert bare.conclusion() == (
        "Whether the judge scores answers from evicted caches lower is undecided in both configurations: full cache "
        "10.0, drop 0.00 (n = 5 samples)."
    )


def test_the_interval_of_a_judge_without_a_scale_covers_where_there_is_one() -> None:
    source, draws, told, held = np.random.default_rng(0), 400, 0, 0
    judge = Judge(("true",))
    for _ in range(draws):
        given = np.where(source.random((3, 8)) < 0.95, 10.0, 3.0)
        limits = (given.min(), given.max())
        found = bounded_interval(given[0], StatisticKind(3 / 8, limits=limits), judge)
        if found is not None:
            told, held = told + 1, held + (found.low - 1e-9 <= 0.95 * 10 + 0.05 * 3 <= found.high + 1e-9)
    assert told > 50
    assert held / told >= 0.92


def test_a_compressed_cache_is_said_to_hold_so_much_at_the_start() -> None:
    again = written(*ANSWERS.rows, compress_every=300)
    single = pk.judge(again, planted_judge("length"), progress=False)
    pairs = pk.judge(again, planted_judge("longer"), pairwise=True, progress=False)
    for found in (single, pairs):
        assert AT_START in found.caveats()
        assert "As the answers began; above 300 entries caches were compressed again." in str(found.details()[-1])
        assert all("at the start" in name.get_text() for name in found.plot().axes[0].get_yticklabels())
    assert AT_START not in asked("length").caveats()


def test_where_all_answers_are_the_same_nobody_is_asked_and_that_is_said() -> None:
    alike = written(*(row(name, [1, 2], [[1, 2], [1, 2]]) for name in "abc"))
    found = pk.judge(alike, planted_judge("first"), pairwise=True, progress=False)
    assert found.conclusion() == (
        "All answers from evicted caches are the full cache's: the judge was asked nothing (n = 3 samples)."
    )
    assert "6 pairs of the same text" in found.notes()
    few = written(*(row(name, [1, 2], [[1, 2], [3]]) for name in "abc"))
    said = pk.judge(few, planted_judge("first"), pairwise=True, progress=False).conclusion()
    assert "ranges" not in said  # exact intervals
    assert said.endswith("(n = 3 samples).")


def test_pairs_are_won_tied_and_lost_with_exact_intervals() -> None:
    found = asked("longer", pairwise=True)
    first, second = found.configs
    assert first.outcomes == ("loss", "win", "tie", "loss", "loss")
    assert second.outcomes == ("tie", "loss", "win", "tie", "loss")
    assert first.shares == {"win": 0.2, "tie": 0.2, "loss": 0.6}
    interval = first.intervals["loss"]
    assert (interval.low, interval.high) == pytest.approx((stats.beta.ppf(0.025, 3, 3), stats.beta.ppf(0.975, 4, 2)))
    assert first.lost == 0.75
    assert found.pairs == 7


def test_a_judge_who_takes_what_stands_first_is_told_by_name_and_wins_for_nobody() -> None:
    many = written(*(row(f"s{place}", [1], [[2], [3]]) for place in range(100)))
    found = pk.judge(many, planted_judge("first"), pairwise=True, progress=False)
    assert (found.first, found.pairs) == (1.0, 200)
    assert "The answer shown first won 100 % of 200 decided pairs" in found.notes()
    for one in found.configs:
        assert 0.35 < one.shares["win"] < 0.65
    other = pk.judge(many, planted_judge("first"), pairwise=True, seed=1, progress=False)
    assert other.configs[0].outcomes != found.configs[0].outcomes
    assert found.configs[0].outcomes != found.configs[1].outcomes


def test_no_question_tells_which_cache_wrote_an_answer() -> None:
    label = CONFIGS[0].label()
    for question in (*single_questions(ANSWERS), *pair_questions(ANSWERS, 0)):
        assert label not in question.line()
        assert "attention" not in question.line()
        told = json.loads(question.line())
        assert (told["prompt"], told["question"]) == (f"prompt of {question.sample}", f"question of {question.sample}")
    ids = [question.id for question in (*single_questions(ANSWERS), *pair_questions(ANSWERS, 0))]
    assert max(Counter(ids).values()) == 1
    sides = Counter(question.full_is for question in pair_questions(ANSWERS, 0))
    assert set(sides) == {"a", "b"}
    for question in pair_questions(ANSWERS, 0):
        (found,) = (one for one in ANSWERS.rows if one["sample"] == question.sample)
        assert question.fields[question.full_is] == found["full"]["text"]


def test_the_same_text_is_a_tie_of_which_nobody_is_asked(tmp_path: Path) -> None:
    log = tmp_path / "log"
    found = pk.judge(ANSWERS, f"{planted_judge('longer')} '{log}'", pairwise=True, progress=False)
    assert found.configs[1].outcomes[0] == "tie"
    assert len(log.read_text().splitlines()) == 9


def test_answers_that_came_are_kept_and_the_same_call_goes_on(tmp_path: Path) -> None:
    path, log = tmp_path / "judgements.jsonl", tmp_path / "log"
    judge = tmp_path / "judge.py"
    planted = planted_judge("half").split("'")[3]
    judge.write_text(
        f"import json, sys; from pathlib import Path; sys.path.insert(0, {str(Path(planted).parent)!r})\n"
        f"import judges; asked = list(map(json.loads, sys.stdin))\n"
        f"Path({str(log)!r}).open('a').write(f'{{len(asked)}} ')\n"
        f"judges.write(judges.half(asked) if len(asked) == 15 else judges.length(asked))\n"
    )
    command = f"'{sys.executable}' '{judge}'"
    with pytest.raises(PluginError, match=r"ends with exit code 0, got 1: no credit left\\x1b\[2J"):
        pk.judge(ANSWERS, command, path=path, progress=False)
    assert len(path.read_text().splitlines()) == 1 + 7
    path.write_text(path.read_text() + '{"sample": "unfini')
    found = pk.judge(ANSWERS, command, path=path, progress=False)
    assert log.read_text() == "15 8 "
    assert found.to_dict()["full"] == asked("length").to_dict()["full"]
    pk.judge(ANSWERS, command, path=path, progress=False)
    assert log.read_text() == "15 8 "  # nothing is left to ask
    with pytest.raises(ConfigError, match="got one of another judge, or of another way to ask it; give --overwrite"):
        pk.judge(ANSWERS, command, path=path, scale=(0, 20), progress=False)
    other = written(row("a", [1], [[2], [3]]))
    with pytest.raises(ConfigError, match="got one of other answers"):
        pk.judge(other, command, path=path, progress=False)
    assert pk.judge(other, command, path=path, overwrite=True, progress=False).samples == ("a",)


@pytest.mark.parametrize(
    ("name", "more", "told"),
    [
        ("few", {}, r"an answer to each of 15 questions, got none to 1, such as sample 'a' \(full cache\)"),
        ("twice", {}, "each once, got '[0-9a-f]+' .given already, of sample 'a' .full cache.."),
        ("unknown", {}, 'each once, got "nobody\'s" .unknown.'),
        ("prose", {}, "lines from the judge that are JSON objects, got 'I think it is good.'"),
        ("silent", {"time_limit": 2}, "said nothing for 2 seconds; raise --time-limit"),
        ("unnumbered", {}, r"of sample 'a' \(full cache\), a `score` that is a number, got 'good'"),
        ("unfinite", {}, "lines from the judge that are JSON objects"),
        ("huge", {}, "a `score` that is a number, got 1000"),
        ("length", {"scale": (0, 5)}, "a `score` from 0 to 5, got"),
        ("undecided", {"pairwise": True}, "a `winner` of a, b or tie, got 'both'"),
        ("endless", {}, "lines of at most 1,048,576 bytes"),
        ("nosuchjudge", {}, "exit code 0, got 1: KeyError: 'nosuchjudge'"),
    ],
)
def test_a_judge_that_errs_is_told_in_one_line(name: str, more: dict[str, Any], told: str) -> None:
    with pytest.raises(PluginError, match=told) as refused:
        asked(name, **more)
    assert "\n" not in str(refused.value)
    assert len(str(refused.value)) < 400


def test_a_judge_that_was_refused_is_over() -> None:
    with pytest.raises(PluginError, match=r"got '\d+' .unknown.") as refused:
        asked("lingering")
    process = int(str(refused.value).partition("got '")[2].partition("'")[0])
    with pytest.raises(ProcessLookupError):
        os.kill(process, 0)


def test_a_file_that_is_no_program_names_the_option(tmp_path: Path) -> None:
    path = tmp_path / "judge"
    path.write_bytes(b"\0")
    path.chmod(0o755)
    with pytest.raises(PluginError, match="a judge that can be started, got .*; check --judge$"):
        pk.judge(ANSWERS, str(path), progress=False)


@pytest.mark.parametrize(
    ("command", "more", "error", "told"),
    [
        ("", {}, ConfigError, "got an empty one"),
        ("judge 'it", {}, ConfigError, "No closing quotation"),
        ("/no/such/judge", {}, ConfigError, "a judge that can be started, got '/no/such/judge', which is no program"),
        ("true; rm -rf x", {}, ConfigError, "got 'true;', which is no program"),  # no shell reads it
        ("true", {"time_limit": 0}, ConfigError, "seconds above 0, got 0"),
        ("true", {"time_limit": 1e300}, ConfigError, "must be at most 10,000,000"),
        ("true", {"scale": (0, float("inf"))}, ConfigError, "must be a finite number"),
        ("true", {"scale": (3, 1)}, ConfigError, "the least and the largest score"),
    ],
)
def test_what_cannot_be_asked_is_refused(command: str, more: dict[str, Any], error: type[Exception], told: str) -> None:
    with pytest.raises(error, match=told):
        pk.judge(ANSWERS, command, progress=False, **more)
