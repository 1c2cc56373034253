"""KNorm and Expected Attention keep what the presses of kvpress 0.5.5 keep, entry by entry.

Those presses have no window. Ours always stays, so the press is told the same: its last `WINDOW` scores are the
largest. Prompts have 512 or 1024 tokens, so that a compression ratio is its budget exactly.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from kvpress import AdaKVPress, ExpectedAttentionPress, KnormPress
from torch import Tensor

from perturbkv.configs.resources import Resources
from perturbkv.datasets.needle import sentences
from perturbkv.models.adapter import Adapter
from perturbkv.models.loading import ByteTokenizer, load_model
from perturbkv.selection.grid import configuration
from tests.kvpress.test_kept_sets_equal_kvpress import keys, press_keeps, tiny, we_keep
from tests.support.models import tiny_model, token_ids
from tests.support.resolved import asked, prefill

WINDOW = 4
OPTIONS: dict[str, dict[str, Any]] = {
    "defaults": {},
    "near future": {"n_future": 7},
    "no covariance": {"use_covariance": False},
    "no value norm": {"use_vnorm": False},
    "epsilon": {"epsilon": 0.02},
    "more sinks": {"sinks": 9},
}
THEIRS = {"n_future": "n_future_positions", "sinks": "n_sink"}


class WindowStays:
    """A press whose most recent entries have the largest scores."""

    def score(self, *args: Any, **kwargs: Any) -> Tensor:
        found = super().score(*args, **kwargs)  # type: ignore[misc]
        found[..., -WINDOW:] = found.max() + 1
        return found


class Knorm(WindowStays, KnormPress):
    pass


class Expected(WindowStays, ExpectedAttentionPress):
    pass


def theirs(options: dict[str, Any]) -> dict[str, Any]:
    return {THEIRS.get(name, name): value for name, value in options.items()}


def written(name: str, options: dict[str, Any]) -> str:
    return f"{name}({', '.join(f'{key}={str(value).lower()}' for key, value in options.items())})" if options else name


def family(name: str, **more: Any) -> Adapter:
    model = tiny_model(name, 6, 2, layers=3, d_head=16, positions=1100, **more)
    return Adapter(model, ByteTokenizer(), name, "", True)


def assert_equal(
    adapter: Adapter, press: Any, choice: str, tokens: int, budget: int, ids: Sequence[int] = ()
) -> Tensor:
    ids = ids or token_ids(tokens, seed=tokens)
    chosen = configuration(
        budget, policy=choice, selection="attention", granularity="kv", window=WINDOW, preset="kvpress"
    )
    (ours,) = we_keep(adapter, [chosen], ids)
    kept = torch.stack(press_keeps(adapter, press, ids, keys(adapter, ids)))
    assert torch.equal(torch.stack(ours), kept), f"{int((torch.stack(ours) != kept).sum())} entries differ"
    assert int(kept.sum()) == len(adapter.layers) * adapter.kv_heads * budget
    return kept


@pytest.mark.parametrize("heads", [(4, 4), (6, 2)], ids=["MHA", "GQA"])
@pytest.mark.parametrize(("tokens", "budget"), [(512, 96), (1024, 600)])
def test_knorm_keeps_the_same(tokens: int, budget: int, heads: tuple[int, int]) -> None:
    """No token comes twice: in the first layer its keys would differ in rounding alone."""
    model = tiny_model("llama", *heads, layers=3, d_head=16, positions=1100, vocab=1100)
    adapter = Adapter(model, ByteTokenizer(), "tiny", "", True)
    ids = torch.randperm(1100, generator=torch.Generator().manual_seed(1))[:tokens].tolist()
    assert_equal(adapter, Knorm(1 - budget / tokens), "knorm", tokens, budget, ids)


@pytest.mark.parametrize("heads", [(4, 4), (6, 2)], ids=["MHA", "GQA"])
@pytest.mark.parametrize(("tokens", "budget"), [(512, 96), (1024, 600)])
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_expected_attention_keeps_the_same(
    options: dict[str, Any], tokens: int, budget: int, heads: tuple[int, int]
) -> None:
    press = Expected(1 - budget / tokens, **theirs(options))
    kept = assert_equal(tiny(*heads), press, written("expected-attention", options), tokens, budget)
    assert kept[..., : options.get("sinks", 4)].all()


@pytest.mark.parametrize("name", ["llama", "qwen3", "phi3"])
def test_expected_attention_of_every_family_keeps_the_same(name: str) -> None:
    assert_equal(family(name), Expected(1 - 128 / 512), "expected-attention", 512, 128)


def test_expected_attention_with_yarn_keeps_the_same() -> None:
    yarn = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 128}
    adapter = family("llama", rope_parameters=yarn)
    assert_equal(adapter, Expected(1 - 128 / 512), "expected-attention", 512, 128)


def test_the_guarantee_with_expected_attention_keeps_the_same() -> None:
    press = AdaKVPress(Expected(1 - 128 / 512))
    adapter, ids = tiny(6, 2), token_ids(512, seed=512)
    chosen = configuration(
        128, policy="adakv(by=expected-attention, safeguard=guaranteed)", selection="attention", granularity="kv",
        window=WINDOW, preset="kvpress",
    )  # fmt: skip
    (ours,) = we_keep(adapter, [chosen], ids)
    kept = torch.stack(press_keeps(adapter, press, ids, keys(adapter, ids)))
    assert torch.equal(torch.stack(ours), kept)
    assert len(set(kept.sum(dim=-1).flatten().tolist())) > 1


def test_expected_attentions_scores_are_kvpress_up_to_rounding() -> None:
    adapter, ids, found = tiny(6, 2), token_ids(512, seed=512), []

    class Watched(ExpectedAttentionPress):
        def score(self, *args: Any, **kwargs: Any) -> Tensor:
            found.append(super().score(*args, **kwargs))
            return found[-1]

    keys(adapter, ids, Watched(0.5))
    chosen = configuration(128, policy="expected-attention", selection="attention", granularity="kv", window=WINDOW)
    ours = prefill(adapter, ids, [chosen], Resources(), "s").statistics.scored[asked(chosen)]
    for theirs_, layer in zip(found, ours, strict=True):
        mean = layer.view(2, 3, -1).mean(dim=1)[:, 4:]
        torch.testing.assert_close(mean.float(), theirs_[0, :, 4:-WINDOW], rtol=2e-4, atol=1e-12)


def test_other_options_do_not_keep_what_kvpress_keeps() -> None:
    for choice in ("expected-attention(use_vnorm=false)", "expected-attention(n_future=1)", "knorm"):
        with pytest.raises(AssertionError, match="entries differ"):
            assert_equal(tiny(6, 2), Expected(1 - 128 / 512), choice, 512, 128)


@pytest.mark.real_model
def test_on_the_embedded_model_expected_attention_keeps_the_same() -> None:
    adapter = load_model("smollm2-135m-q4_1", device="cpu", dtype="float32")
    ids = adapter.tokenizer(" ".join(sentences()[:200]), add_special_tokens=False)["input_ids"][:512]
    assert_equal(adapter, Expected(1 - 384 / 512), "expected-attention", 512, 384, ids)
