"""What becomes of a prompt's tokens, against kept sets and losses that were written by hand."""

from __future__ import annotations

import dataclasses
import doctest
import importlib
from typing import Any

import numpy as np
import pytest
from matplotlib.figure import Figure
from rich.cells import cell_len

import perturbkv as pk
from perturbkv.analyses.tokens import tokens
from perturbkv.display import Table, as_text
from perturbkv.errors import ConfigError, PerturbkvError, TraceError
from perturbkv.schema import TEXT
from perturbkv.trace import FailedSample, SampleTrace
from tests.support.artists import words as words_on
from tests.support.prompts import PIECES, made, sample
from tests.support.traces import kept as codes_of
from tests.support.traces import run_config


def test_every_token_has_the_fate_that_the_kept_sets_give_it() -> None:
    found = pk.tokens(made(), "p0", 0, 0)
    fates = ["baseline", "both", "neither", "treatment", "treatment", "neither", "baseline", "both", "question"]
    assert list(found.fates) == fates
    told = found.to_dict()
    assert [one["text"] for one in told["tokens"]] == list(PIECES)
    assert [one["id"] for one in told["tokens"]] == list(range(100, 109))
    assert told["counts"] == {"baseline": 2, "both": 2, "neither": 2, "treatment": 2, "question": 1}
    assert found.to_frame("tokens").fate.tolist() == fates


def test_losses_are_shares_of_c_and_say_what_the_other_does() -> None:
    told = pk.tokens(made(), "p0", 0, 0).to_dict()
    assert told["baseline_losses"] == [
        {"position": 4, "output": 3.0, "share": 0.5, "kept_by_other": True},
        {"position": 3, "output": 0.5, "share": 0.5 / 6, "kept_by_other": True},
    ]
    assert [one["kept_by_other"] for one in told["treatment_losses"]] == [True, False]


def test_the_head_whose_output_the_treatment_changes_most_is_shown_first() -> None:
    """Relative to its output: 0.4 → 0.2 of the first head, 0.5 → 0.5 of the second."""
    found = pk.tokens(made())
    assert (found.shown.layer, found.shown.head, found.chosen) == (0, 0, "model")
    assert [(one.head, one.baseline, one.treatment) for one in found.heads] == [(0, 0.4, 0.2), (1, 0.5, 0.5)]
    assert (found.shown.both, found.shown.baseline_only, found.shown.treatment_only) == (2, 2, 2)
    louder = sample(
        output_norm=np.array([[[1000.0, 2.0]]]), perturbation_isolated=np.array([[[[4.0, 1.0]]], [[[2.0, 0.9]]]])
    )
    assert pk.tokens(made(louder)).shown.head == 1


def test_a_layers_summary_is_of_its_heads_alone() -> None:
    found = pk.tokens(made(), layer=0)
    assert (found.chosen, found.shown.name) == ("layer", "0-0")
    asked = pk.tokens(made(), layer=0, head=1)
    assert (asked.heads, asked.chosen) == ((), "")
    assert (asked.shown.both, asked.shown.baseline_only, asked.shown.treatment_only) == (4, 0, 0)
    assert asked.conclusion() != found.conclusion()


def test_the_conclusion_counts_and_says_how_far_the_output_moves() -> None:
    assert pk.tokens(made()).conclusion() == (
        "two-stage keeps 2 of the 4 tokens that attention keeps, and 2 others; the head's output moves by 20 % of "
        "its norm, with attention by 40 % (head 0-0 of 'p0', which changes most of all; isolated, b = 64)."
    )


def test_text_without_colours_is_marked_and_nothing_in_it_is_markup() -> None:
    shown = repr(pk.tokens(made(), "p0", 0, 0))
    assert "[-The-] [=cat=]·{+é [red]+}↵\n↵\n [-sat-][=.=]\n── the question, which is not compressed ──\n Who?" in shown
    assert "[=both keep 2=]  [-attention alone 2-]  {+two-stage alone 2+}  both evict 2" in shown


def test_a_part_of_a_character_is_a_dot_where_its_fate_is_another() -> None:
    assert "·{+é" in repr(pk.tokens(made(), "p0", 0, 0))
    same = sample(pieces=("The", " cat", " x", "", "é", " y", " sat", ".", " Who?"))
    assert "{+é+}" in repr(pk.tokens(made(same), "p0", 0, 0))


def test_hidden_characters_are_shown() -> None:
    odd = ("The", " cat", "\x1b[31m", "\u202e", "\t", "\0", " sat", "日本" * 30, " Who?")
    shown = repr(pk.tokens(made(sample(pieces=odd)), "p0", 0, 0))
    assert "\x1b" not in shown
    assert "\u202e" not in shown
    for sign in ("␛[31m", "<U+202E>", "⇥", "␀"):
        assert sign in shown
    assert all(cell_len(line) <= 80 for line in shown.splitlines())


def test_where_the_prompt_was_cut_is_said() -> None:
    """The first half stays: of nine tokens five stand before the cut."""
    found = pk.tokens(made(sample(cut_tokens=np.asarray(70))), "p0", 0, 0)
    assert "[red]+}\n── 70 tokens cut out here ──\n↵\n" in repr(found)
    assert found.to_dict()["cut_after"] == 5


def long(count: int = 400, differs: tuple[int, ...] = (100, 300)) -> SampleTrace:
    """Attention keeps some of the first ones, two-stage of these all but those that differ."""
    kept = np.arange(0, count, 2, dtype=np.int32)
    other = kept[~np.isin(kept, differs)]
    rows, places = np.concatenate([kept, other]), np.array([[[0, 0]], [[len(kept), len(kept)]]])
    counts = np.array([[[len(kept)] * 2], [[len(other)] * 2]])
    pieces = tuple(f" w{place}" for place in range(count))
    told = {"kept_count": counts, "prompt_tokens": np.asarray(count)}
    return sample("long", pieces, 0, **told, **codes_of(told, places, rows))


def test_a_long_prompt_is_folded_around_what_differs() -> None:
    shown = as_text(pk.tokens(made(long()), "long", 0, 0).body())
    assert "── 92 tokens: 46 both keep, 46 both evict ──" in shown
    assert "── 183 tokens: 91 both keep, 92 both evict ──" in shown
    assert "── 91 tokens: 45 both keep, 46 both evict ──" in shown
    assert "[-w100-]" in shown
    assert "[-w300-]" in shown
    assert "w50" not in shown
    whole = as_text(pk.tokens(made(long()), "long", 0, 0, everything=True).body())
    assert "──" not in "".join(line for line in whole.splitlines() if "tokens" in line)
    assert all(f"w{place}" in whole for place in range(400))


@pytest.mark.parametrize("differing", [[], [0], [399], [5, 200, 215, 399], list(range(400))])
def test_folding_shows_what_differs_and_loses_no_token(differing: list[int]) -> None:
    parts = tokens.shown_parts([place in differing for place in range(400)])
    assert [first for first, _, _ in parts[1:]] == [end for _, end, _ in parts[:-1]]
    assert (parts[0][0], parts[-1][1]) == (0, 400)
    seen = [place for first, end, shown in parts if shown for place in range(first, end)]
    assert set(differing) <= set(seen)
    assert all(end - first >= 16 for first, end, shown in parts if not shown)


def test_folding_is_bounded() -> None:
    parts = tokens.shown_parts([place % 20 == 0 for place in range(30_000)])
    assert sum(end - first for first, end, shown in parts if shown) <= tokens.MOST
    assert parts[-1][2] is False


def test_the_first_complete_sample_with_text_is_taken() -> None:
    bare = SampleTrace("bare", {name: array for name, array in sample("bare").arrays.items() if name not in TEXT})
    trace = pk.Trace.from_samples(run_config(3), [FailedSample("broken", "it broke"), bare, sample("third")], {})
    assert pk.tokens(trace).prompt.sample == "third"
    with pytest.raises(TraceError, match="expected the text of 'bare' in this trace, got a trace without it") as raised:
        pk.tokens(trace, "bare")
    assert "pk.measure with prompts=True and another path measures it with its text" in str(raised.value)
    with pytest.raises(TraceError, match=r"complete samples \(third\), got 'broken', which failed: it broke"):
        pk.tokens(trace, "broken")


@pytest.mark.parametrize(
    ("asked", "error", "said"),
    [
        ({"sample": "p9"}, TraceError, r"expected one of the trace's samples \(p0\), got 'p9'"),
        ({"layer": 1}, ConfigError, "expected a layer from 0 to 0, got 1"),
        ({"layer": 0, "head": 2}, ConfigError, "expected a head from 0 to 1, got 2"),
        ({"head": 1}, ConfigError, "expected the layer of head 1, got none; give both"),
        ({"treatment": "value"}, TraceError, "'value'"),
        ({"baseline": 3}, ConfigError, "got int"),
    ],
)
def test_a_wrong_question_is_one_line(asked: dict[str, Any], error: type[PerturbkvError], said: str) -> None:
    with pytest.raises(error, match=said) as found:
        pk.tokens(made(), **asked)
    assert "\n" not in str(found.value)


def test_starts_that_leave_the_text_are_refused() -> None:
    wrong = sample(prompt_start=np.array([0, 3, 900, 901, 902, 903, 904, 905, 906], dtype=np.int32))
    with pytest.raises(TraceError, match="expected prompt_start to ascend from 0 within the text of 'p0'"):
        pk.tokens(made(wrong))


def test_without_losses_and_shares_the_fates_are_told_all_the_same() -> None:
    older = {name: array for name, array in sample().arrays.items() if not name.startswith("lost_")}
    del older["weighted_norm"], older["held_share"]
    found = pk.tokens(made(SampleTrace("p0", older)))
    assert found.losses is None
    assert found.to_dict()["baseline_losses"] is None
    assert "is not in this trace" in as_text(found.details())
    assert all(np.isnan(found.cache_shares))
    assert found.to_dict()["held_over_full_baseline"] is None
    assert isinstance(found.plot(), Figure)


def test_missing_places_of_losses_are_left_out() -> None:
    lost, output = np.full((2, 1, 2, 2), -1, dtype=np.int32), np.full((2, 1, 2, 2), np.nan, dtype=np.float32)
    lost[0, 0, 0, 0], output[0, 0, 0, 0] = 4, 3
    found = pk.tokens(made(sample(lost_position=lost, lost_output=output)), "p0", 0, 0)
    assert found.losses is not None
    assert [len(side) for side in found.losses] == [1, 0]
    tables = [part for part in found.details() if isinstance(part, Table)]
    assert [(table.rows[0][0], table.rows[0][3]) for table in tables] == [("4", "50 %")]
    assert "two-stage evicts nothing" in found.details()


def test_a_pair_of_a_budget_is_shown_and_others_are_counted() -> None:
    configs = pk.grid((64, 0.5), selection=["attention", "two-stage"])
    four = {
        name: np.concatenate([array, array]) if array.ndim and array.shape[0] == 2 and name not in TEXT else array
        for name, array in sample().arrays.items()
    }
    trace = pk.Trace.from_samples(run_config(1, configs=configs), [SampleTrace("p0", four)], {})
    assert pk.tokens(trace).other_pairs == 1
    found = pk.tokens(trace.sel(budget=0.5))
    assert (found.baseline.budget.value, found.other_pairs) == (0.5, 0)
    assert "1 more pair of these sides" in pk.tokens(trace).notes()


@pytest.mark.parametrize("width", [84, 174])
def test_it_plots_itself_at_both_widths(width: int) -> None:
    figure = pk.tokens(made(long())).plot(width_mm=width)
    assert figure.get_figwidth() * 25.4 == pytest.approx(width)
    said = words_on(figure)
    assert "attention alone (2)" in [text.get_text() for text in figure.legends[0].get_texts()]
    assert "long, head 0-0, b = 64: attention against two-stage" in said


def test_html_escapes_the_prompt() -> None:
    page = pk.tokens(made(sample(pieces=("<b>", " cat", "", "é", "&", "\n", " sat", ".", " Who?"))))._repr_html_()
    assert "&lt;b&gt;" in page
    assert "<b>" not in page
    assert page.count("<table>") == 1


def test_it_is_of_one_sample() -> None:
    found = pk.tokens(made(sample(), sample("other")))
    assert " · 1 sample · " in found.identity.lines()[0]
    assert dataclasses.replace(found, everything=True).everything


def test_the_example_in_the_docstring_runs() -> None:
    ran = doctest.testmod(importlib.import_module("perturbkv.analyses.tokens.tokens"), extraglobs={"trace": made()})
    assert ran.attempted > 0
    assert ran.failed == 0
