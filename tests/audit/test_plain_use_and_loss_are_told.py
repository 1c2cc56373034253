"""What transformers does with the cache by itself, and what kept sets cost beside controls of the same protection."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import DynamicCache

import perturbkv as pk
from perturbkv.auditing import loss
from perturbkv.auditing import loss as foreign
from tests.audit import planted
from tests.audit.test_planted_faults_are_told_apart import audited, model
from tests.support.models import token_ids


def test_where_plain_calls_put_the_next_token_is_what_the_cache_says() -> None:
    for eviction, position in ((planted.right, planted.KEPT), (DynamicCache, 60), (planted.mask_of_evicted_length, 60)):
        plain = audited("llama", eviction, situations=["single"], plain_use=True).plain_use
        assert plain is not None
        assert (plain.position, plain.expected) == (position, 60)


def test_what_plain_use_gets_wrong_is_in_the_first_line() -> None:
    result = audited("llama", planted.right, situations=["single"], plain_use=True)
    assert (result.verdict, result.exit_code, result.faults) == ("differs", 1, ())
    assert result.conclusion().startswith(
        "differs: without position_ids transformers puts the next token at 20, not 60 (give them, or a decode); "
        "else it loses what its kept sets imply: at most "
    )
    assert 'type="differs"' in result.to_junit()
    allowed = audited("llama", planted.right, situations=["single"], plain_use=True, allow=["plain-use"])
    assert (allowed.verdict, allowed.exit_code) == ("exact", 0)
    broken = audited("llama", planted.rotated_again, situations=["single"], plain_use=True)
    first, _, plain = broken.conclusion().partition("; ")
    assert "keys rotated again" in first
    assert plain == "without position_ids transformers puts the next token at 20, not 60 (give them, or a decode)"


def test_who_decodes_by_himself_is_not_asked_for_plain_use() -> None:
    def own(loaded: Any, input_ids: torch.Tensor, attention_mask: torch.Tensor) -> DynamicCache:
        cache = planted.right(loaded, input_ids, attention_mask)
        cache.tokens = attention_mask.sum(dim=-1, keepdim=True)  # type: ignore[attr-defined]
        return cache

    def decode(loaded: Any, cache: Any, token: torch.Tensor, step: int) -> torch.Tensor:
        places = cache.tokens + step + torch.arange(token.shape[1])
        return loaded(input_ids=token, position_ids=places, past_key_values=cache).logits

    own.decode = decode  # type: ignore[attr-defined]
    result = audited("llama", own, plain_use=True)
    assert (result.verdict, result.plain_use) == ("exact", None)


@pytest.mark.slow
def test_an_eviction_reads_once_per_situation() -> None:
    rows: list[int] = []

    def counted(loaded: Any, input_ids: torch.Tensor, attention_mask: torch.Tensor) -> DynamicCache:
        rows.append(len(input_ids))
        return planted.right(loaded, input_ids, attention_mask)

    quick = audited("llama", counted, situations=["block", "batch"], plain_use=False)
    assert (quick.verdict, quick.plain_use, rows) == ("exact", None, [1, 2])
    rows.clear()
    assert audited("llama", counted, situations=["block", "batch"], plain_use=True).plain_use is not None
    assert rows == [1, 2]


def sets(*places: list[int]) -> loss.Sets:
    return (tuple(np.array(one) for one in places),)


def test_protection_is_what_every_kept_set_holds() -> None:
    assert loss.protected_counts([sets([0, 1, 2, 8, 9], [0, 1, 5, 7, 8, 9])], [10]) == (2, 2)
    assert loss.protected_counts([sets([0, 1, 9]), sets([0, 1, 2, 3])], [10, 4]) == (2, 1)
    assert loss.protected_counts([sets([3, 4])], [10]) == (0, 0)


def test_controls_hold_as_much_and_protect_the_same() -> None:
    result = audited("llama", planted.right, losses=True, situations=["single"])
    own, *controls = result.losses
    assert own.name == "its kept sets"
    assert [one.name for one in controls] == ["attention", "two-stage", "random", "hindsight"]
    for one in result.losses:
        assert one.cache_share == pytest.approx(planted.KEPT / 60)
        assert 0 < one.propagated
        assert 0 < one.kl
    # the last of the entries between is the one before the recent ones, so that 9 stay in every set
    assert (result.protected_first, result.protected_recent) == (4, planted.RECENT + 1)
    for config in result.configs[1:]:
        assert config.protected_counts(planted.KEPT) == (4, planted.RECENT + 1)
        assert config.granularity.name == "kv"
    assert not result.controls_protect_less


def test_the_loss_is_that_of_the_trace_of_these_kept_sets() -> None:
    result = audited("llama", planted.right, losses=True, situations=["single"])
    masks = []
    for _ in range(3):
        mask = torch.zeros(2, 60, dtype=torch.bool)
        for head in range(2):
            mask[head, planted.positions(60, head)] = True
        masks.append(mask)
    config = foreign.external_configuration("mine", planted.KEPT)
    trace = foreign.measure_kept_sets(model("llama"), [pk.Prompt("p", token_ids(60), 0)], [{config: masks}])
    moved, full = trace.arrays["perturbation_isolated"][0, 0, 0], trace.arrays["output_norm"][0, 0]
    assert result.losses[0].isolated == pytest.approx(float(moved.sum() / full.sum()))
    assert result.losses[0].kl == pytest.approx(float(trace.arrays["logit_kl"][0, 0, 0]))


def test_where_all_that_is_kept_is_protected_controls_protect_less() -> None:
    result = audited("llama", planted.Streaming, losses=True, situations=["single"])
    assert (result.protected_first, result.protected_recent) == (4, 8)
    assert result.controls_protect_less
    assert len(result.losses) == 5
    assert result.controls_protect_less


@pytest.mark.slow
def test_sets_per_query_head_have_no_loss_and_say_so() -> None:
    result = audited("llama", planted.per_query_head, losses=True, situations=["single"])
    assert result.losses == ()
    assert "no kept sets per key/value head" in result.lossless
    repeated = audited("llama", planted.repeated, losses=True, situations=["single"])
    assert repeated.losses[0].cache_share == pytest.approx(planted.KEPT / 60)


@pytest.mark.slow
def test_several_prompts_of_other_lengths_are_audited_together(tmp_path: Path) -> None:
    prompts = [pk.Prompt(f"p{tokens}", token_ids(tokens), 0) for tokens in (40, 60)]
    result = pk.audit(model("llama"), prompts, planted.right, steps=2, plain_use=False, progress=False)
    assert result.verdict == "exact"
    assert {run.sample for run in result.runs} == {"p40", "p60"}
    assert result.losses[0].cache_share == pytest.approx((0.5 + 1 / 3) / 2)
