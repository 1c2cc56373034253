"""A judge's scores and preferences: their numbers by hand, what is kept, and what a judge may not say."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from scipy import stats

from tests.support.answers import row, written
from tests.support.judges import planted_judge
from tests.support.scripts import study

ANSWERS = written(
    row("a", [1, 2, 3], [[1, 2], [1, 2, 3]]),
    row("b", [1, 2], [[1, 2, 3, 4], [1]]),
    row("c", [5], [[6], [5, 6]]),
    row("d", [5, 6], [[6], [5, 7]]),
    row("e", [5, 6, 7], [[6], [5, 6]]),
)
Asked = Callable[..., str]
CHARACTERS = {3: 8, 2: 5, 1: 2, 4: 11}  # 'w1 w2 w3'


@pytest.fixture
def answers(tmp_path: Path) -> Path:
    path = tmp_path / "generation.jsonl"
    lines = [{"run": json.loads(ANSWERS.run.to_json())}, *ANSWERS.rows]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


@pytest.fixture
def asked(answers: Path) -> Asked:
    """What the study says of these answers."""

    def run(judge: str, *more: object, code: int = 0) -> str:
        return study("judge", answers, "--command", judge, "-o", answers.parent / "out", *more, code=code)

    return run


def document(answers: Path) -> dict[str, Any]:
    return dict(json.loads((answers.parent / "out" / "judge.json").read_text()))


def test_scores_come_to_means_and_drops(answers: Path, asked: Asked) -> None:
    asked(planted_judge("length"), "--scale", "0", "12")
    full, *evicted = document(answers)["caches"]
    own = [CHARACTERS[len(one["full"]["tokens"])] for one in ANSWERS.rows]
    assert full["scores"] == own
    for cache, label in zip(evicted, ANSWERS.run.labels(), strict=True):
        scores = [CHARACTERS[len(one["evicted"][label]["tokens"])] for one in ANSWERS.rows]
        assert (cache["config"], cache["scores"], cache["cache_share"]) == (label, scores, 0.5)
        assert cache["mean_drop"] == pytest.approx(np.mean(own) - np.mean(scores))
        assert 0 <= cache["mean_interval"]["low"] < np.mean(scores) < cache["mean_interval"]["high"] <= 12
        assert cache["mean_drop_interval"]["low"] < cache["mean_drop"] < cache["mean_drop_interval"]["high"]


def test_equal_scores_have_an_interval_on_a_scale_alone(answers: Path, asked: Asked) -> None:
    asked(planted_judge("ten"), "--scale", "1", "10")
    unseen = 1 - 0.025 ** (1 / 5)  # the share that five samples without it leave possible
    assert document(answers)["caches"][0]["mean_interval"]["low"] == pytest.approx(10 - 9 * unseen)
    asked(planted_judge("ten"), "-o", answers.parent / "bare")
    assert json.loads((answers.parent / "bare" / "judge.json").read_text())["caches"][1]["mean_interval"] is None


def test_pairs_are_won_tied_and_lost_with_exact_intervals(answers: Path, asked: Asked) -> None:
    assert "undecided" in asked(planted_judge("longer"), "--pairwise")
    first, second = document(answers)["caches"]
    assert first["outcomes"] == ["loss", "win", "tie", "loss", "loss"]
    assert second["outcomes"] == ["tie", "loss", "win", "tie", "loss"]
    ends = stats.beta.ppf(0.025, 3, 3), stats.beta.ppf(0.975, 4, 2)
    assert (first["share_intervals"]["loss"]["low"], first["share_intervals"]["loss"]["high"]) == pytest.approx(ends)
    assert first["lost"] == 0.75
    assert document(answers)["decided_pairs"] == 7


def test_a_failed_judge_loses_nothing_and_is_asked_only_what_is_missing(asked: Asked, tmp_path: Path) -> None:
    judge, log = tmp_path / "judge.py", tmp_path / "log"
    judge.write_text(
        "import json, pathlib, sys\n"
        f"log = pathlib.Path({str(log)!r})\n"
        "asked = [json.loads(line) for line in sys.stdin]\n"
        "first = not log.exists()\n"
        "log.open('a').write(f'{len(asked)}\\n')\n"
        "for one in asked[: len(asked) // 2 if first else None]:\n"
        "    print(json.dumps({'id': one['id'], 'score': len(one['answer'])}), flush=True)\n"
        "sys.exit(int(first))\n"
    )
    command = f"{sys.executable} {judge}"
    assert "got exit code 1 and 8 questions without a reply" in asked(command, code=2)
    asked(command)
    asked(command)
    assert log.read_text().split() == ["15", "8"]
    assert "another judge" in asked(planted_judge("ten"), code=2)


@pytest.mark.parametrize(
    ("judge", "told"),
    [
        ("twice", "`id` of an open question"),
        ("unknown", "`id` of an open question"),
        ("prose", "`id` of an open question"),
        ("unnumbered", "a `score` from -inf to inf, of sample"),
        ("unfinite", "a `score` from"),
        ("huge", "a `score` from"),
        ("few", "1 questions without a reply"),
    ],
)
def test_what_a_judge_may_not_say_is_one_line(asked: Asked, judge: str, told: str) -> None:
    said = asked(planted_judge(judge), code=2)
    assert told in said
    assert said.count("\n") == 1
