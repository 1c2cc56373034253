"""studies/answers*.py: which caches are measured, pairs by hand, and verdicts by the rules."""

from __future__ import annotations

import json
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
import pytest

import perturbkv as pk
from tests.support.folders import model_folder
from tests.support.scripts import DOCS, STUDIES, functions

RULES = (DOCS / "results" / "rules.md").read_text()


@pytest.fixture(scope="module")
def answers() -> dict[str, Any]:
    return functions("answers", STUDIES)


@pytest.fixture(scope="module")
def tables() -> dict[str, Any]:
    return functions("answers_tables", STUDIES)


def cells(found: dict[tuple[str, float, int], list[int]], full: list[int], digits: int = 7) -> list[dict[str, str]]:
    """Rows of a run: (method, budget, kernel) -> what its cache finds, prompt by prompt."""
    return [
        {"model": "m", "digits": str(digits), "sample": str(index), "method": method, "budget": str(budget),
         "kernel": str(kernel), "full": str(whole), "found": str(one),
         "moved_first": "2", "moved": str(1 + index), "heads_less": "0.5"}
        for (method, budget, kernel), each in found.items()
        for index, (whole, one) in enumerate(zip(full, each, strict=True))
    ]  # fmt: skip


def row(area: tuple[float, float], beyond: tuple[float, float], prompts: int = 40) -> dict[str, str]:
    ends = {"area_low": area[0], "area_high": area[1], "beyond_low": beyond[0], "beyond_high": beyond[1]}
    return {"measure": "isolated", "prompts": str(prompts), **{name: str(end) for name, end in ends.items()}}


def test_every_run_has_the_caches_of_the_rules(answers: dict[str, Any]) -> None:
    found = {run.name: run.configs() for run in answers["runs"]()}
    sizes = {name: len({config.label() for config in configs.values()}) for name, configs in found.items()}
    compared, crossed = 6 * 3, 2 * 3
    for name in (answers["QWEN"], answers["SMOLLM2"]):
        assert sizes[f"{name}-7"] == compared + crossed - 2  # a kernel of 7 is in both
        assert sizes[f"{name}-3"] == sizes[f"{name}-15"] == crossed
    assert sizes[f"{answers['LARGER']}-7"] == 6 and len(found) == 7
    for configs in found.values():
        assert {(config.window, config.granularity.name, config.protect_first) for config in configs.values()} == {
            (32, "kv", 0)
        }
    assert f"seed {answers['SEED']}," in RULES and f"{answers['LENGTH']} tokens" in RULES


def test_a_kernel_pools_both_stages(answers: dict[str, Any]) -> None:
    configs = answers["runs"]()[0].configs()
    for method in answers["POOLED"]:
        wide = configs[method, 0.2, 21].flat()
        assert wide["policy_kernel"] == 21
        assert wide.get("selection_score", "pooled") == "pooled"


def test_numbers_have_their_digits_and_are_each_prompt_s_own(answers: dict[str, Any]) -> None:
    for digits in answers["DIGITS"]:
        drawn = [answers["with_digits"](str(index), digits) for index in range(50)]
        assert all(re.fullmatch(rf"[1-9]\d{{{digits - 1}}}", number) for number in drawn)
        assert len(set(drawn)) > 45


def test_pairs_are_of_prompts_that_the_full_cache_answers(tables: dict[str, Any]) -> None:
    full = [1] * 10 + [0] * 5
    snapkv = [1, 1, 0, 0, 0, 0, 0, 0, 0, 0] + [0] * 5
    later = [0, 1, 1, 1, 1, 1, 1, 1, 1, 1] + [1] * 5
    made = cells({("SnapKV", 0.2, 7): snapkv, ("AdaKV", 0.2, 7): later, ("random", 0.2, 7): snapkv}, full)
    (run,) = tables["outcomes"](made)
    assert (run.prompts, run.answered) == (15, 10)
    pairs = {pair.second[0]: pair for pair in tables["method_pairs"]([run])}
    assert (pairs["AdaKV"].more, pairs["AdaKV"].fewer) == (8, 1)
    assert pairs["AdaKV"].p == pytest.approx(2 * (1 + 9) / 2**9)  # binomial, 9 prompts, at most 1
    assert pairs["random"].p == 1
    assert not any(pair.decided for pair in pairs.values())  # the smaller of two has to be at most 0.025


def test_too_few_answers_decide_nothing(tables: dict[str, Any]) -> None:
    nine, none = [1] * 9, [0] * 9
    (run,) = tables["outcomes"](cells({("SnapKV", 0.2, 7): none, ("AdaKV", 0.2, 7): nine}, nine))
    (pair,) = tables["method_pairs"]([run])
    assert pair.p < 0.01 and not pair.decided
    ten = [1] * 10
    (run,) = tables["outcomes"](cells({("SnapKV", 0.2, 7): [0] * 10, ("AdaKV", 0.2, 7): ten}, ten))
    assert tables["method_pairs"]([run])[0].decided


def test_ratios_are_over_snapkv_s_of_the_budget(tables: dict[str, Any]) -> None:
    made = cells({("SnapKV", 0.2, 7): [1, 1], ("AdaKV", 0.2, 7): [0, 1]}, [1, 1])
    for row in made[2:]:
        row["moved"] = "6"
    (run,) = tables["outcomes"](made)
    assert tables["moved_ratio"](run, ("AdaKV", 0.2, 7), 1)[0] == pytest.approx(12 / 3)
    assert tables["moved_ratio"](run, ("AdaKV", 0.2, 7), 0)[0] == 1


def test_a_budget_at_an_end_is_named(tables: dict[str, Any]) -> None:
    low, high = [0] * 40, [1] * 40
    (run,) = tables["outcomes"](
        cells({("SnapKV", 0.1, 7): low, ("random", 0.1, 7): low, ("SnapKV", 0.4, 7): high}, high)
    )
    assert tables["at_end"](run, 0.1) and tables["at_end"](run, 0.4)
    (run,) = tables["outcomes"](cells({("SnapKV", 0.1, 7): low, ("random", 0.1, 7): [1] * 3 + low[3:]}, high))
    assert not tables["at_end"](run, 0.1)


@pytest.mark.parametrize(
    ("found", "told"),
    [
        (row((0.6, 0.8), (0.02, 0.3)), "foretells"),
        (row((0.6, 0.8), (-0.01, 0.3)), "undecided"),
        (row((0.6, 0.8), (-0.05, 0.09)), "no more than names"),
        (row((0.2, 0.4), (-0.3, -0.1)), "reversed"),
        (row((0.6, 0.8), (0.02, 0.3), prompts=9), "too few"),
        (row((np.nan, np.nan), (np.nan, np.nan)), "undecided"),
    ],
)
def test_a_measure_s_verdict_follows_the_rules(tables: dict[str, Any], found: dict[str, str], told: str) -> None:
    assert tables["verdict_of"](found) == told
    assert tables["verdict_of"]({**found, "measure": "kl"}) == "–"


@pytest.mark.parametrize(
    ("verdicts", "told"),
    [
        (["foretells"] * 3 + ["undecided"], "supported"),
        (["foretells"] * 3 + ["reversed"], "undecided"),
        (["foretells"] * 2 + ["undecided"], "undecided"),
        (["no more than names"] * 2 + ["undecided"], "contradicted"),
        (["no more than names", "reversed"], "undecided"),
        (["reversed"] * 2, "contradicted"),
        ([], "undecided"),
    ],
)
def test_a_measure_s_verdict_over_settings_follows_the_rules(
    tables: dict[str, Any], verdicts: list[str], told: str
) -> None:
    assert tables["overall"](verdicts) == told


def test_a_difference_is_general_in_two_models_and_the_opposite_in_none(tables: dict[str, Any]) -> None:
    one, same, other = (SimpleNamespace(run=SimpleNamespace(model=name)) for name in ("a", "a", "b"))
    assert tables["in_general"]([one, other], []) == "more in general"
    assert tables["in_general"]([], [one, other]) == "fewer in general"
    assert tables["in_general"]([one, same], []) == "not general"
    assert tables["in_general"]([one, other], [same]) == "not general"


def test_a_kernel_s_verdict_asks_both_lengths(tables: dict[str, Any]) -> None:
    def pair(digits: int, narrow: int, wide: int, more: int, fewer: int, decided: bool) -> Any:
        run = SimpleNamespace(digits=digits)
        return SimpleNamespace(run=run, first=("SnapKV", 0.2, narrow), second=("SnapKV", 0.2, wide), more=more,
                               fewer=fewer, decided=decided)  # fmt: skip

    short, long = pair(7, 1, 7, 9, 0, True), pair(15, 7, 21, 9, 0, True)
    unasked = pair(3, 1, 7, 0, 9, True)
    assert tables["kernel_verdict"]([short, long, unasked]) == "holds"
    assert tables["kernel_verdict"]([short, pair(15, 7, 21, 3, 0, False)]) == "undecided"
    assert tables["kernel_verdict"]([short]) == "undecided"
    assert tables["kernel_verdict"]([short, pair(15, 7, 21, 0, 9, True)]) == "contradicted"


def test_caches_that_answer_other_prompts_are_no_pairs(tables: dict[str, Any]) -> None:
    made = cells({("SnapKV", 0.2, 7): [1, 0], ("AdaKV", 0.2, 7): [0, 1]}, [1, 1])
    made[-1]["sample"] = "another"
    with pytest.raises(pk.PerturbkvError, match="answer other prompts"):
        tables["outcomes"](made)


@pytest.mark.slow
def test_rows_are_what_the_trace_holds(answers: dict[str, Any], tables: dict[str, Any], tmp_path: Path) -> None:
    """A tiny model, whose answers are drawn: a row per prompt and cache, and a number per budget and measure."""
    run = answers["Run"](str(model_folder(tmp_path / "tiny", positions=2048)), 7, 12)
    with mock.patch.dict(answers["write_prompts"].__globals__, LENGTH=1500):  # of bytes
        path = answers["write_prompts"](run, tmp_path / "prompts.jsonl")
    made = [json.loads(line) for line in path.read_text().splitlines()]
    assert all(row["answers"][0] in row["prompt"] and len(row["answers"][0]) == 7 for row in made)
    loaded = answers["model"](run.model)
    settings = pk.Settings(steps=3, generate=2, text="answer", save=("effect",))
    prompts = pk.load_prompts(str(path), loaded, samples=run.prompts)
    trace = pk.measure(loaded, prompts, list(run.configs().values()), settings=settings, progress=False)
    draw = np.random.default_rng(0)
    trace.arrays["score_full"][:] = 1
    trace.arrays["score"][:] = draw.integers(0, 2, trace.arrays["score"].shape)
    rows = list(answers["rows"](trace, run))
    assert len(rows) == 12 * 22
    one = next(row for row in rows if (row["method"], row["budget"], row["kernel"]) == ("AdaKV", 0.4, 7))
    place = [(config.policy.name, str(config.budget)) for config in trace.run.configs].index(("adakv", "0.4"))
    assert (one["found"], one["sample"]) == (trace.arrays["score"][0, place], trace.sample_ids[0])
    told = list(answers["foretelling"](trace, run))
    assert {row["budget"] for row in told} == {"0.1", "0.2", "0.4"}
    assert {row["measure"] for row in told} >= {"isolated", "isolated_first", "effect", "effect_size", "text_loss"}
    assert all(0 <= row["area"] <= 1 for row in told if row["measure"] != "theta_hat")  # no head has σ > ½
    answers["write_rows"](tmp_path / "f.csv", answers["FORETELLING"], told)
    answers["write_rows"](tmp_path / "c.csv", answers["CELLS"], rows)
    read = (tables["read_rows"]([tmp_path / name]) for name in ("c.csv", "f.csv"))
    found = tables["outcomes"](next(read))
    titles = [title for title, _, _ in tables["tables"](found, next(read))]
    assert len(titles) == len(set(titles)) == 2 + 1 + 3 + 1 + 3
    for draw_one in (tables["draw_found"], tables["draw_moved"]):
        draw_one(found).savefig(tmp_path / "picture.png")
        assert (tmp_path / "picture.png").stat().st_size > 10_000
    base = next(row for row in rows if (row["method"], row["budget"], row["kernel"]) == ("SnapKV", 0.4, 7))
    means = np.nanmean(trace.arrays["perturbation_isolated"][0].astype(float), axis=1)
    own = trace.config_index(run.configs()["SnapKV", 0.4, 7].label())
    less, least = (means[place] < means[own]).mean(), (means[place] <= means[own]).mean()
    assert base["heads_less"] == 0.5 and one["heads_less"] == pytest.approx((less + least) / 2)
    loss, norm = trace.arrays["perturbation_isolated"][0, place], trace.arrays["output_norm"][0]
    assert one["moved_first"] == pytest.approx(float(loss[0].sum() / norm[0].sum()), rel=1e-6)
    assert one["moved"] == pytest.approx(float(np.nansum(loss) / np.nansum(norm)), rel=1e-6)
