"""What has no link to tell says so in words, and what is no material for one is refused in one line."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from perturbkv.analyses.correlation.correlation import Correlation, correlation
from perturbkv.analyses.measures import OWN_TEXT
from perturbkv.analyses.verdicts import FEW
from perturbkv.display import Table
from perturbkv.errors import ConfigError, PerturbkvError, TraceError
from perturbkv.selection.grid import configuration
from perturbkv.trace import Trace
from tests.support.linked import answered, methods
from tests.support.traces import sample_trace, text, trace

MOVED = np.random.default_rng(0).lognormal(size=(6, 3))
MIXED = np.array([[1, 0, 0], [0, 1, 1], [1, 1, 0], [0, 0, 1], [1, 0, 1], [0, 1, 0]], dtype=float)


def made(scores: Any = MIXED, full: Any = (1,) * 6, **more: Any) -> Trace:
    return answered(methods(3), scores, full, {"propagated": MOVED}, **more)


def unknown(result: Correlation) -> list[str]:
    """Why what the result would claim cannot be said."""
    return [claim.missing for claim in result.claims() if all(np.isnan(case.value) for case in claim.cases)]


RANKS, AREAS = "no two methods of a prompt score differently", "no answer is lost"


@pytest.mark.parametrize(
    ("scores", "full", "reasons", "silence", "shown"),
    [
        (MIXED, np.zeros(6),
         ["the full cache answers none of 6 prompts (score > 0), so there is nothing that eviction can lose"],
         "the full cache answers no prompt", False),
        (np.ones((6, 3)), np.ones(6), [RANKS, AREAS], f"{AREAS}; {RANKS}", False),
        (np.zeros((6, 3)), np.ones(6), [RANKS, "every answer is lost"], f"every answer is lost; {RANKS}", False),
        (0.6 + MIXED / 4, np.ones(6), [AREAS], AREAS, True),
        (MIXED / 4, np.ones(6), ["every answer is lost"], "every answer is lost", True),
        (np.repeat([[1, 0], [1, 0], [0, 1]], 3, axis=1).reshape(6, 3), np.ones(6),
         [RANKS, "no prompt has lost and kept answers"], f"no prompt has lost and kept answers; {RANKS}", False),
    ],
    ids=["none answered", "all right", "all lost", "all kept, graded", "all lost, graded", "alike within prompts"],
)  # fmt: skip
def test_what_there_is_nothing_to_tell_of_is_told(
    scores: Any, full: Any, reasons: list[str], silence: str, shown: bool
) -> None:
    result = correlation(made(scores, full))
    assert unknown(result) == reasons
    assert all(f"cannot be said: {reason}" in result.conclusion() for reason in reasons)
    assert result.settings[0].undecided_reason == silence
    told = " ".join(repr(result).split())
    assert silence in told
    assert "nan" not in told.lower()
    assert any(isinstance(part, Table) for part in result.details()) == shown
    json.dumps(result.to_dict(), allow_nan=False)
    for width in (84, 174):
        result.plot(width)


def test_methods_that_perturb_alike_have_no_ranks_whatever_they_score() -> None:
    result = correlation(
        answered(methods(3), MIXED, np.ones(6), {"propagated": np.ones((6, 3)), "lost": np.full((6, 3), 0.5)})
    )
    assert unknown(result) == ["no two methods of a prompt perturb differently"]
    assert result.settings[0].strength("propagated").auc.value == 0.5


def test_fewer_than_five_prompts_have_ranges_and_are_called_too_few() -> None:
    result = correlation(answered(methods(3), MIXED[:3], np.ones(3), {"propagated": MOVED[:3]}))
    assert {case.verdict for claim in result.claims() for case in claim.cases} == {FEW}
    interval = result.settings[0].strength("propagated").rho.interval
    assert interval is not None
    assert interval.kind == "range"


def test_a_single_prompt_of_its_data_set_has_no_others_to_hold_the_names_against() -> None:
    parts = [answered(methods(3), MIXED[[place]], [1], {"propagated": MOVED[[place]]}, dataset=name)
             for place, name in enumerate("ab")]  # fmt: skip
    result = correlation(parts)
    assert result.overall[0].strength("propagated").rho.prompts == 2
    assert result.overall[0].identity_baselines("propagated").rho.beyond.prompts == 0
    assert {*unknown(result)} == {"no data set has two such prompts"}
    json.dumps(result.to_dict(), allow_nan=False)


def test_measures_that_tie_for_the_lowest_are_named_together_and_few_methods_are_told() -> None:
    found = correlation(made())
    assert "lowest ρ, by looking: isolated L1, propagated L1, θ, θ̂ and 1 − S alike, 0.14 [" in str(found.details())
    assert found.caveats() == ["3 methods have only 6 orders, in which measures easily agree."]
    draw = np.random.default_rng(1)
    moved = draw.lognormal(size=(6, 5))
    scores = 1 / (1 + moved.argsort(axis=1).argsort(axis=1))
    alone = {"isolated": moved, **dict.fromkeys(("propagated", "theta", "lost"), draw.lognormal(size=(6, 5)))}
    found = correlation(answered(methods(5), scores, np.ones(6), alone))
    assert "lowest ρ, by looking: isolated L1, −1.00" in str(found.details())
    assert found.caveats() == []


def test_a_screen_leads_with_what_one_reads_and_shows_the_rest_where_it_is_asked_for() -> None:
    trace = answered([*methods(3), *methods(3, 128)], np.tile(MIXED, (1, 2)), np.ones(6),
                     {"propagated": np.tile(MOVED, (1, 2))})  # fmt: skip
    found = correlation(trace)
    assert [line.name for line in found.lines()] == list(OWN_TEXT.predictors.values())
    assert len(repr(found).splitlines()) < 30
    titles = " ".join(part.title for part in found.details() if isinstance(part, Table))
    for name in ("propagated L1, by budget", "controls", "each against 1 − S", "circular", "how often"):
        assert name in titles


def test_a_budget_of_two_methods_is_named_and_not_ranked() -> None:
    configs = [*methods(3), *methods(2, 128)]
    result = correlation(
        answered(configs, np.tile(MIXED, (1, 2))[:, :5], np.ones(6), {"propagated": np.tile(MOVED, (1, 2))[:, :5]})
    )
    assert ([one.name for one in result.settings], result.too_few) == (["64"], ("128",))
    assert len(result.caveats()) == 2


FILE = {"file_sha256": "0f"}


def copied(name: str, **more: Any) -> Trace:
    """The trace of `made` of a.jsonl, as if the file had another name."""
    trace = made(dataset="a.jsonl", **more)
    return dataclasses.replace(trace, run=dataclasses.replace(trace.run, dataset=name))


def with_text(trace: Trace, said: str) -> Trace:
    """The trace as if it had stored its prompts' text."""
    rows = [text(f"{said} {place}") for place in range(len(trace.sample_ids))]
    stored: dict[str, Any] = {
        "prompt_count": np.array([len(one["prompt_token"]) for one in rows]),
        "prompt_offset": np.cumsum([0, *(len(one["prompt_token"]) for one in rows)])[:-1],
        "prompt_token": np.concatenate([one["prompt_token"] + len(said) + place for place, one in enumerate(rows)]),
    }
    return dataclasses.replace(trace, arrays={**trace.arrays, **stored})


@pytest.mark.parametrize("other", [False, True])
def test_data_sets_with_and_without_a_chat_template_go_together(other: bool) -> None:
    """LongBench's few-shot and code sets go without one, whatever the model."""
    both = [made(dataset="qasper"), with_text(made(dataset="trec", chat_template=other), "x")]
    assert [part.dataset for part in correlation(both).parts] == ["qasper", "trec"]


def ungraded() -> Trace:
    return made(np.where(np.arange(6)[:, None] < 2, np.nan, MIXED), np.where(np.arange(6) < 2, np.nan, 1.0))


def of_others(trace: Trace) -> Trace:
    """The trace as if it had measured another method in place of the last."""
    configs = (*trace.run.configs[:2], configuration(64, selection="value"))
    return dataclasses.replace(trace, run=dataclasses.replace(trace.run, configs=configs))


REFUSED: dict[str, tuple[Callable[[], Any], str]] = {
    "no trace": (lambda: correlation([]), "needs at least one trace"),
    "no answers": (
        lambda: correlation(trace(sample_trace())),
        "correlation needs graded answers, made.h5 has none; make a trace that has them: perturbkv quality --model m",
    ),
    "no grades": (lambda: correlation(ungraded()), "correlation needs graded answers, got none in 2 of 6 samples"),
    "two methods": (
        lambda: correlation(answered(methods(2), MIXED[:, :2], np.ones(6), {"propagated": MOVED[:, :2]})),
        "correlation needs at least 3 methods of one budget to rank, got 2 of b=64; measure more",
    ),
    "two methods chosen": (lambda: correlation(made(), only=["attention", "random"]), "got 2 of b=64"),
    "a method that is not there": (
        lambda: correlation(made(), only=["attention", "adakv", "random"]),
        "expected adakv among the trace's methods, got a trace of snapkv:attention, snapkv:two-stage, snapkv:random",
    ),
    "the same prompts twice": (
        lambda: correlation([made(), made()]), "expected every prompt once, got sample 'd0' of d"
    ),
    "the same file under another name": (
        lambda: correlation([made(dataset="a.jsonl", dataset_options=FILE), copied("b/a.jsonl", dataset_options=FILE)]),
        "got sample 'a.jsonl0' of a.jsonl in made.h5 and sample 'a.jsonl0' of b/a.jsonl in made.h5, the same; leave",
    ),
    "the same data set under another metric": (
        lambda: correlation(
            [made(dataset_options={"metrics": ["f1"]}), made(dataset_options={"metrics": ["rouge-l"]})]
        ),
        "expected every prompt once, got sample 'd0' of d in made.h5 and sample 'd0' of d in made.h5",
    ),
    "the same text in another file": (
        lambda: correlation([made(), with_text(made(dataset="e"), "here 1"), with_text(made(dataset="f"), "here 1")]),
        "expected every prompt once, got sample 'e0' of e in made.h5 and sample 'f0' of f in made.h5",
    ),
    "a data set with a chat template and without": (
        lambda: correlation([made(), made(seed=1, chat_template=False)]),
        "expected traces of one chat template, got True in"
    ),
    "another model": (
        lambda: correlation([made(), made(dataset="e", model="other")]),
        "expected traces of one model, got m in made.h5 and other in made.h5; give them singly",
    ),
    "another scenario": (lambda: correlation([made(), made(dataset="e", scenario="context-only")]), "of one scenario"),
    "another method": (
        lambda: correlation([made(), of_others(made(dataset="e"))]),
        "expected the same configurations in every trace, got 'snapkv:random b=64",
    ),
    "bins": (lambda: correlation(made(), bins=1), "at least 2 bins of a calibration curve, got 1"),
    "lost": (
        lambda: correlation(made(), lost=0), "share above 0 and at most 1 of the full cache's score, got 0 as lost"
    ),
    "right": (
        lambda: correlation(made(), right=float("nan")), "from 0 to below 1, above which the full cache is right"
    ),
}  # fmt: skip


@pytest.mark.parametrize(("ask", "said"), REFUSED.values(), ids=REFUSED)
def test_what_is_no_material_is_refused_in_one_line(ask: Callable[[], Any], said: str) -> None:
    with pytest.raises(PerturbkvError) as error:
        ask()
    assert isinstance(error.value, TraceError | ConfigError)
    assert said in str(error.value)
    assert "\n" not in str(error.value)
