"""Heads by kind of the decoded token, by a plain loop over samples and steps; what is said where kinds differ."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from matplotlib.figure import Figure

import perturbkv as pk
from perturbkv.analyses.stats import intervals
from perturbkv.display import as_text
from perturbkv.schema import TOKEN_KINDS
from perturbkv.trace import SampleTrace, Trace
from tests.support.artists import overlapping
from tests.support.screens import run
from tests.support.traces import rekept, sample_trace, text, trace, write
from tests.support.undrawn import undrawn

UNKNOWN, SPECIAL, FORMATTING, NUMBER, NAME, WORD = range(len(TOKEN_KINDS))
KINDS = [[FORMATTING, WORD, WORD, NUMBER], [WORD, WORD, SPECIAL, 0], [NUMBER, NUMBER, WORD, WORD],
         [FORMATTING, 0, 0, 0], [WORD, NUMBER, WORD, UNKNOWN], [WORD, FORMATTING, NUMBER, WORD]]  # fmt: skip
COUNTS, STEPS = [4, 3, 4, 1, 4, 4], 4
EQUAL = 2
"""The sample in which both configurations keep the same entries."""


def made(**more: Any) -> Trace:
    """Six samples of random numbers with these kinds; texts end after COUNTS steps."""
    samples = []
    for place, (kinds, count) in enumerate(zip(KINDS, COUNTS, strict=True)):
        arrays = dict(sample_trace(f"s{place}", steps=STEPS, seed=place).arrays)
        arrays |= {"token_kind": np.array(kinds, dtype=np.uint8), "steps_measured": np.asarray(count)}
        arrays |= {"evicted": np.ones(2, dtype=np.uint8)}
        if place == EQUAL:
            rekept(arrays, lambda where, positions: [0, 1, 2])
        samples.append(SampleTrace(f"s{place}", arrays))
    return trace(*samples, steps=STEPS, **more)


def by_hand(found: Trace, kind: str, steps_of: Any) -> tuple[float, list[float], list[float], int]:
    """Σ treatment / Σ baseline, both sums of each sample that has such a step, and the number of these steps."""
    sums: list[list[float]] = [[], []]
    total = 0
    for sample in range(len(KINDS)):
        steps = [step for step in range(COUNTS[sample]) if steps_of(KINDS[sample][step])]
        if not steps:
            continue
        total += len(steps)
        for side in range(2):
            values = found.arrays[f"perturbation_{kind}"][sample, 0 if sample == EQUAL else side]
            summed = 0.0
            for layer, head in np.ndindex(2, 2):
                summed += sum(float(values[step, layer, head]) for step in steps) / len(steps)
            sums[side].append(summed)
    return sum(sums[1]) / sum(sums[0]), *sums, total


def test_ratios_by_kind_are_those_of_a_plain_loop() -> None:
    found = made()
    compared = pk.compare_heads(found).token_kinds
    assert [one.kind for one in compared] == ["special", "formatting", "number", "word"]
    for one in compared:
        number = TOKEN_KINDS.index(one.kind)
        for kind in ("isolated", "propagated"):
            ratio, first, second, steps = by_hand(found, kind, lambda stored, number=number: stored == number)
            assert getattr(one, f"{kind}_ratio") == pytest.approx(ratio, rel=1e-12)
            assert getattr(one, f"{kind}_ratio_interval") == intervals.of_ratio(np.array(second), np.array(first))
            assert (one.samples, one.steps) == (len(first), steps)
        ratio, first, second, _ = by_hand(found, "propagated", lambda stored, number=number: stored != number)
        assert one.rest_ratio == pytest.approx(ratio, rel=1e-12)


def test_a_step_is_compared_by_the_kind_of_its_own_token() -> None:
    by_kind = {one.kind: one for one in pk.compare_heads(made(), step=1).token_kinds}
    assert {kind: (one.samples, one.steps) for kind, one in by_kind.items()} == {
        "formatting": (1, 1), "number": (2, 2), "word": (2, 2),
    }  # fmt: skip


def test_where_all_tokens_are_of_one_kind_it_has_the_ratio_of_all_steps() -> None:
    found = made()
    found.arrays["token_kind"][:] = WORD  # type: ignore[index]
    result = pk.compare_heads(found)
    (one,) = result.token_kinds
    whole = result[0].propagated
    assert (one.propagated_ratio, one.propagated_ratio_interval) == (whole.sum_ratio, whole.sum_ratio_interval)
    assert np.isnan(one.rest_ratio) and not one.remarks()


def test_a_trace_without_kinds_has_no_table() -> None:
    found = made()
    del found.arrays["token_kind"]  # type: ignore[attr-defined]
    result = pk.compare_heads(found)
    assert result.token_kinds == () and "kind of decoded token" not in as_text(result.explain())


def planted(formatting: float, word: float, samples: int = 8) -> Trace:
    """One line break and three words a sample; the treatment perturbs so many times as much, up to one in a hundred."""
    made = []
    for place in range(samples):
        arrays = dict(sample_trace(f"s{place}", steps=4, seed=place).arrays)
        draw = np.random.default_rng(place)
        factors = np.array([formatting, word, word, word])[:, None, None] * draw.uniform(0.99, 1.01, (4, 2, 2))
        for kind in ("isolated", "propagated"):
            arrays[f"perturbation_{kind}"] = np.stack([np.ones((4, 2, 2)), factors])
        arrays |= {name: np.full((4, 2, 2), 1e-6) for name in ("noise_floor", "noise_floor_isolated")}
        arrays |= {"token_kind": np.array([FORMATTING, WORD, WORD, WORD], dtype=np.uint8)}
        arrays |= {"evicted": np.ones(2, dtype=np.uint8), "token_id": np.array([9, 9 + place, 2, 3])}
        made.append(SampleTrace(f"s{place}", {**arrays, **text("on\n\ntwo.  ")}))
    return trace(*made, steps=4)


def remarks(found: Trace) -> list[str]:
    return [words for one in pk.compare_heads(found).token_kinds for words in one.remarks()]


def test_a_kind_that_makes_the_sign_is_said() -> None:
    """3 and three times 0.6 are 4.8 of 4: more by the line break alone."""
    result = pk.compare_heads(planted(3, 0.6))
    assert result[0].propagated.sum_verdict == "more"
    first, second = remarks(planted(3, 0.6))
    assert first.startswith("without formatting tokens 40 % [") and first.endswith("less")
    assert second.startswith("word tokens 40 % [") and second.endswith("less")
    assert f"Kinds of tokens differ: {first}; {second}." in result.notes().splitlines()


def test_kinds_of_one_sign_are_not_said() -> None:
    assert remarks(planted(0.9, 0.6)) == []
    assert remarks(planted(3, 0.6, samples=4)) == []  # too few to decide


def test_a_kind_that_leaves_the_whole_undecided_is_said() -> None:
    found = planted(1, 0.6)
    moved = found.arrays["perturbation_propagated"]
    for place in range(8):  # a line break that is of either sign
        moved[place, 1, 0] = 4 if place % 2 else 0.1  # type: ignore[index]
    result = pk.compare_heads(found)
    assert result[0].propagated.sum_verdict == "undecided"
    (said,) = remarks(found)
    assert said.startswith("without formatting tokens 40 % [")


def test_of_several_comparisons_those_where_kinds_differ_are_counted() -> None:
    found, other = planted(3, 0.6), planted(0.9, 0.6)
    result = pk.compare_heads(found)
    both = type(result)(
        result.members + pk.compare_heads(other).members, result.identity, token_kinds=result.token_kinds
    )
    assert "Kinds of tokens differ in sign in 1 of 2 cases: formatting and word." in both.notes()
    assert both[:1].token_kinds == result.token_kinds


@pytest.mark.parametrize(
    ("token", "kind", "expected"),
    [
        (9, FORMATTING, "a line break"),
        (15, FORMATTING, "a space"),
        (7, WORD, "'on'"),
        (5, FORMATTING, "the same formatting token"),
        (5, 0, "token 5"),
    ],
)
def test_a_first_token_that_all_texts_share_is_said(token: int, kind: int, expected: str) -> None:
    """The prompt's tokens are two characters each, 7 and 9 the first ones."""
    found = planted(1, 1)
    found.arrays["token_id"][:, 0], found.arrays["token_kind"][:, 0] = token, kind  # type: ignore[index]
    said = f"the first token of all 8 texts is {expected}"
    assert pk.compare_heads(found).first_token == said
    assert pk.compare_heads(found).identity.first_step.endswith(f"; {said}).")
    assert pk.compare_heads(found, step=0).conclusion().endswith(f"; {said}).")
    assert said not in pk.compare_heads(found, step=1).conclusion()


def test_first_tokens_that_differ_or_of_one_text_are_not_said() -> None:
    found = planted(1, 1)
    assert pk.compare_heads(found.sel(sample="s0")).first_token == ""
    assert pk.compare_heads(found.sel(sample=["s0", "s1"])).first_token.startswith("the first token of both texts")
    found.arrays["token_id"][0, 0] = 1  # type: ignore[index]
    assert pk.compare_heads(found).first_token == ""


def kinds_panel(figure: Figure) -> list[int]:
    """The index of the figure's panel of kinds of tokens, where it has one."""
    return [place for place, axes in enumerate(figure.axes) if "kind of decoded" in axes.get_title(loc="left")]


@pytest.mark.parametrize("width", [84, 174])
def test_the_figure_has_a_panel_of_kinds_where_they_differ(width: int) -> None:
    result = pk.compare_heads(planted(3, 0.6))
    figure = result.plot(width)
    (panel,) = kinds_panel(figure)
    labels = [label.get_text() for label in figure.axes[panel].get_yticklabels()]
    assert labels == ["all tokens", "formatting (n = 8)", "word (n = 8)"]
    for kind in ("isolated", "propagated"):
        whole = getattr(result[0], kind)
        expected = [(whole.sum_ratio, whole.sum_ratio_interval)]
        expected += [(getattr(one, f"{kind}_ratio"), getattr(one, f"{kind}_ratio_interval"))
                     for one in result.token_kinds]  # fmt: skip
        drawn = [one for one in figure.axes[panel].containers if one.lines[0].get_gid() == kind]
        for bars, (ratio, interval) in zip(drawn, expected, strict=True):
            point, _, (ends,) = bars.lines
            assert point.get_xdata()[0] == pytest.approx(ratio)
            assert ends.get_segments()[0][:, 0] == pytest.approx([interval.low, interval.high])
    assert not overlapping(figure)
    assert kinds_panel(pk.compare_heads(planted(0.9, 0.6)).plot(width)) == []


def test_screen_json_and_frame_have_the_kinds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    found = planted(3, 0.6)
    write(Path("t.h5"), *(found.sample(name) for name in found.sample_ids), steps=4)
    with undrawn():
        ran = run("heads", "t.h5", "-o", "out", "--explain")
        document = run("heads", "t.h5", "-o", "again", "--json").json()
    assert max(map(len, ran.out.splitlines())) <= 80
    for said in (
        "Kinds of tokens differ: without formatting tokens 40 % [",
        "by kind of decoded token",
        "a line break",
    ):
        assert said in " ".join(ran.out.split())
    keys = ("kind", "samples", "steps", "makes_sign", "differs")
    rows = [tuple(one[key] for key in keys) for one in document["token_kinds"]]
    assert rows == [("formatting", 8, 8, True, False), ("word", 8, 24, False, True)]
    assert document["token_kinds"][1]["propagated_ratio"] == pytest.approx(0.6, rel=0.02)
    assert document["first_token"] == "the first token of all 8 texts is a line break"
