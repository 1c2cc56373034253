"""A press of kvpress as an eviction that is audited: exact alone, and what a left-padded batch makes of it."""

from __future__ import annotations

import pytest

import perturbkv as pk
from perturbkv.analyses.audit.audit import Audit
from tests.support.models import tiny_adapter, token_ids

TOKENS, KEPT = 80, 24


def audited(press: str, *situations: str) -> Audit:
    model = tiny_adapter(layers=3, d_head=32)
    return pk.audit(
        model, pk.Prompt("p", token_ids(TOKENS), 0), press, budget=KEPT, situations=situations, steps=2, losses=False,
        progress=False,
    )  # fmt: skip


@pytest.mark.parametrize("press", ["SnapKVPress(window_size=8)", "KnormPress", "StreamingLLMPress"])
def test_a_press_that_removes_entries_is_exact_and_keeps_its_budget(press: str) -> None:
    result = audited(f"kvpress:{press}", "single", "block")
    assert (result.verdict, result.kind) == ("exact", "press")
    for run in result.runs:
        assert run.entries is not None
        assert {len(one) for layer in run.entries.kept_sets for one in layer} == {KEPT}


def test_a_press_that_only_masks_is_held_against_what_it_does_not_mask() -> None:
    result = audited("kvpress:AdaKVPress(SnapKVPress(window_size=8))", "single")
    (run,) = result.runs
    assert run.entries is not None
    counts = [[len(one) for one in layer] for layer in run.entries.kept_sets]
    assert all(sum(layer) == 2 * KEPT for layer in counts)
    assert any(layer[0] != layer[1] for layer in counts)
    assert result.verdict == "exact", result.conclusion()


def test_a_press_that_knows_no_padding_keeps_some() -> None:
    result = audited("kvpress:StreamingLLMPress", "batch")
    assert [(fault.row, fault.what) for fault in result.faults] == [(1, "4 entries of padding attended to")]


def test_a_press_needs_a_budget_and_only_a_press_takes_one() -> None:
    model, prompt = tiny_adapter(), pk.Prompt("p", token_ids(40), 0)
    with pytest.raises(pk.PerturbkvError, match="expected a budget for the press kvpress:KnormPress"):
        pk.audit(model, prompt, "kvpress:KnormPress", progress=False)
    with pytest.raises(pk.PerturbkvError, match="unknown press 'SnapPress'"):
        pk.audit(model, prompt, "kvpress:SnapPress", budget=8, progress=False)
