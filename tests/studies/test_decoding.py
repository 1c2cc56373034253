"""The study of decode-time eviction: its prompts, grading, ratios and verdicts, and what it leaves out."""

from __future__ import annotations

import math
import re
from typing import Any

import numpy as np
import pytest
from scipy.stats import binom

import perturbkv as pk
from tests.support.scripts import STUDIES, functions

own, tasks = functions("decoding", STUDIES), functions("decoding_tasks", STUDIES)
METHODS, KEPT = own["METHODS"], own["KEPT"]


def rows(
    prompts: int = 6, factor: float = 2.0, spread: float = 0.0, kind: str = "code", **more: Any
) -> list[dict[str, Any]]:
    """Random is `factor` times as bad as every score, in some prompts more; prompt p's level is p + 1."""
    made = []
    for place in range(prompts):
        for method in own["configurations"](200, 0):
            random = method.removesuffix(KEPT) == "random"
            level = (place + 1) * (factor * math.exp(spread * (-1) ** place) if random else 1.0)
            made.append({
                "kind": kind, "prompt": f"{kind} {place}", "method": method, "steps": 300 + place, "compressions": 2,
                "propagated": level, "kl": level / 10, "perplexity": level, "added": 0.1, "gone": 0.2, "held": 190.0,
                **more,
            })  # fmt: skip
    return made


def answers(lost: float, prompts: int = 6, looping: int = 0) -> list[dict[str, Any]]:
    """Answers to needle prompts: random loses a share of the lines, and `looping` of its answers loop."""
    return [
        {"kind": "needle", "prompt": f"p{place}", "method": method, "tokens": 500, "ended": True,
         "loops": method == f"random{KEPT}" and place < looping,
         "lines": 1 - lost * (0.9 + 0.04 * place) * (method == f"random{KEPT}"),
         "resumed": 1 - lost * (0.4 + 0.04 * place) * (method == f"random{KEPT}")}
        for place in range(prompts) for method in (own["FULL"], *own["configurations"](200, 0))
    ]  # fmt: skip


def test_ratios_are_geometric_means_over_prompts() -> None:
    found = own["compare"](rows(spread=0.1), f"random{KEPT}", f"snapkv{KEPT}")
    logs = [math.log(2) + 0.1 * (-1) ** place for place in range(6)]
    assert found["n"] == 6
    for number in own["NUMBERS"]:
        assert found[number] == pytest.approx(math.exp(np.mean(logs)))
        assert found[f"{number}_interval"].low < found[number] < found[f"{number}_interval"].high


@pytest.mark.parametrize(("factor", "verdict"), [(1.0, "enough"), (1.5, "not enough"), (1.08, "enough")])
def test_random_is_enough_where_it_is_worse_by_less_than_the_margin(factor: float, verdict: str) -> None:
    found = own["compare"](rows(factor=factor, spread=0.001), f"random{KEPT}", f"tova{KEPT}")
    assert own["verdict"](found["kl_interval"], 1, own["MARGIN"]) == verdict


def test_few_prompts_and_wide_intervals_decide_nothing() -> None:
    few = own["compare"](rows(prompts=3), f"random{KEPT}", f"tova{KEPT}")
    assert own["verdict"](few["kl_interval"], 1, own["MARGIN"]) == "undecided"
    assert own["verdict"](None, 1, own["MARGIN"]) == "undecided"
    wide = own["compare"](rows(factor=1.05, spread=0.5), f"random{KEPT}", f"tova{KEPT}")
    assert own["verdict"](wide["kl_interval"], 1, own["MARGIN"]) == "undecided"


def test_texts_that_no_compression_reaches_are_left_out_and_counted() -> None:
    early = [{**row, "prompt": "early", "compressions": 0, "kl": 0.0} for row in rows(1)]
    found = list(own["number_tables"]([*rows(), *early, *rows(5, factor=3.0, kind="needle")]))
    assert "1 prompts left out" in found[0][0]
    assert [line[:3] for line in found[1][2]][::4] == [
        ["copying", "snapkv", "5"], ["code", "snapkv", "6"], ["all", "snapkv", "11"],
    ]  # fmt: skip
    assert all("2.00" in line[3] for line in found[1][2] if line[0] == "code")
    assert [line[:2] for line in found[2][2] if line[0] == "code"] == [["code", "snapkv"], ["code", "random"]]
    assert {line[0] for table in own["number_tables"](rows()) for line in table[2]} == {"code"}
    with pytest.raises(pk.PerturbkvError, match="got none"):
        own["reached"](early)


def test_methods_that_hold_unequal_numbers_of_entries_are_refused() -> None:
    uneven = [{**row, "held": 191.0} if row["method"] == "random" else row for row in rows()]
    with pytest.raises(pk.PerturbkvError, match="equal numbers of held entries, got 190 to 191"):
        own["reached"](uneven)


def test_methods_are_seven_and_hold_the_same() -> None:
    found = own["configurations"](200, 0)
    assert len(found) == 7
    assert {config.budget.value for config in found.values()} == {200}
    assert {config.window for config in found.values()} == {own["WINDOW"]}
    assert sum("keep=prompt" in config.label() for config in found.values()) == len(METHODS)


def test_lost_lines_and_loops_are_compared_prompt_by_prompt() -> None:
    found = own["compare_answers"](answers(0.5, looping=5), f"random{KEPT}", f"snapkv{KEPT}")
    assert (found["lines_lost"], found["resumed_lost"]) == (pytest.approx(0.5), pytest.approx(0.25))
    assert found["n"] == 6
    assert found["right"][:2] == (0, 6)
    assert found["right"][2] == pytest.approx(2 * binom.cdf(0, 6, 0.5))
    assert found["loops"][:2] == (5, 0)
    assert own["verdict"](found["lines_lost_interval"], 0, own["LINES"]) == "not enough"
    ungraded = own["compare_answers"]([{**row, "lines": None} for row in answers(0.5)], f"random{KEPT}", "random")
    assert math.isnan(ungraded["lines_lost"])
    assert own["lost_text"](ungraded, "lines") == "–"


def test_answers_have_a_line_per_method_and_per_pair() -> None:
    first, second = own["answer_tables"](answers(0.5, looping=2))
    assert ["copying", f"random{KEPT}", "6", "0.50", "0.75", "0", "2", "6", "500"] in first[2]
    assert ["copying", "random", "6", "1.00", "1.00", "6", "0", "6", "500"] in first[2]
    assert len(second[2]) == len(own["COMPARED"])


@pytest.mark.parametrize(("block", "times", "looping"), [(1, 32, True), (1, 31, False), (8, 4, True), (32, 4, True),
                                                        (32, 3, False), (33, 4, False)])  # fmt: skip
def test_a_loop_is_a_short_block_four_times_or_more_at_the_end(block: int, times: int, looping: bool) -> None:
    tokens = [*range(1000, 1100), *list(range(block)) * times]
    assert tasks["loops"](tokens) is looping
    assert not tasks["loops"]([*tokens, 5000])


def test_answers_that_end_are_no_loops() -> None:
    task = tasks["code_task"](0)
    assert tasks["answer_of"](task, [7] * 40, "", 40)["loops"]
    assert not tasks["answer_of"](task, [7] * 40, "", 41)["loops"]
    assert tasks["answer_of"](task, [7] * 40, "", 41)["ended"]


def test_rooms_are_graded_line_by_line() -> None:
    task = tasks["needle_task"](0)
    rest = task.lines[task.given :]
    assert task.share_right("\n".join(rest)) == 1
    assert task.share_right("\n".join(rest[: len(rest) // 2])) == 0.5
    assert task.share_right("") == 0
    rooms = dict(line.split(": ") for line in task.text.splitlines() if ": " in line)
    for number, (line, (name, room)) in enumerate(zip(task.lines, rooms.items(), strict=True), 1):
        assert line == f"{number}. {name} lives in room {room}."


def test_a_turn_is_right_where_it_goes_on_from_the_account_s_turn_before() -> None:
    task = tasks["arithmetic_task"](0)
    numbers = re.findall(r"\d+", task.text)
    totals, adds = [*map(int, numbers[:3])], [*map(int, numbers[3:6])]
    for turn, line in enumerate(task.lines):
        account = turn % 3
        totals[account] += adds[account]
        before = totals[account] - adds[account]
        name = ("Red", "Green", "Blue")[account]
        assert line == f"{turn + 1}. {name}: {before} + {adds[account]} = {totals[account]}"
    rest = task.lines[task.given :]
    assert task.share_right("\n".join(rest)) == task.share_right("\n".join([*rest, *rest[:3]])) == 1
    slipped = list(rest)  # one slip, from which the account's later lines go on
    for turn in range(1, len(rest), 3):
        head, _, before = rest[turn].rpartition(" + ")[0].rpartition(" ")
        added = rest[turn].split(" + ")[1].split(" ")[0]
        slipped[turn] = f"{head} {int(before) + (turn > 1)} + {added} = {int(before) + 1 + int(added)}"
    assert task.share_right("\n".join(slipped)) == pytest.approx(1 - 1 / len(rest))
    assert task.share_right("\n".join(rest[1:])) == pytest.approx(1 - 2 / len(rest))  # nothing to go on from
    assert task.share_right("nothing = here") == 0


def test_a_turn_takes_up_the_account_s_total_whatever_it_makes_of_it() -> None:
    task = tasks["arithmetic_task"](0)
    rest = task.lines[task.given :]
    assert task.share_resumed("\n".join(rest)) == 1
    wrong_sum = [*rest[:-1], re.sub(r"\d+$", "1", rest[-1])]
    assert task.share_right("\n".join(wrong_sum)) == pytest.approx(1 - 1 / len(rest))
    assert task.share_resumed("\n".join(wrong_sum)) == 1
    other_total = [*rest[:-1], re.sub(r"\d+ \+", "1 +", rest[-1])]
    assert task.share_resumed("\n".join(other_total)) == pytest.approx(1 - 1 / len(rest))
    assert task.share_resumed("nothing = here") == 0
    assert tasks["needle_task"](0).share_resumed("") is None


def test_prompts_of_a_kind_differ_and_code_is_not_graded() -> None:
    made = tasks["tasks"](7)
    assert len({task.text for task in made}) == 21
    assert [task.kind for task in made[:3]] == ["needle", "arithmetic", "code"]
    assert tasks["code_task"](0).share_right("anything") is None
    with pytest.raises(pk.PerturbkvError, match="at most 7"):
        tasks["tasks"](8)
