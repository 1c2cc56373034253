"""Models with sinks, sliding or chunked layers, or recurrent states: evicted layers are audited, others held whole."""

from __future__ import annotations

import functools
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import DynamicCache

import perturbkv as pk
from perturbkv.analyses.audit.audit import Audit
from perturbkv.auditing import audit_eviction, reference
from perturbkv.auditing.forward_passes import make_situation
from perturbkv.configs.audit_settings import AuditSettings
from perturbkv.errors import ConfigError, ModelError
from perturbkv.models import recurrent_states
from perturbkv.models.adapter import Adapter
from perturbkv.selection.external_eviction import PRESS, Eviction
from tests.audit import planted
from tests.support.hybrids import hybrid_adapter
from tests.support.models import tiny_adapter, token_ids

_LINEAR = {"linear_num_value_heads": 4, "linear_num_key_heads": 2, "linear_key_head_dim": 8, "linear_value_head_dim": 8}
_SHAPES: dict[str, dict[str, Any]] = {
    "cohere2": {"layer_types": ["sliding_attention", "full_attention"] * 2, "sliding_window": 12},
    "llama4_text": {"layer_types": ["chunked_attention", "full_attention"] * 2, "attention_chunk_size": 16,
                    "no_rope_layers": [1, 0, 1, 0], "moe_layers": [], "intermediate_size_mlp": 48,
                    "num_local_experts": 2},
    "qwen3_next": {"layer_types": ["linear_attention", "full_attention"] * 2, "mlp_only_layers": [0, 1, 2, 3],
                   "num_experts": 4, **_LINEAR},
}  # fmt: skip
WINDOWS = ("gemma2", "gemma3_text", "gpt_oss", "cohere2", "llama4_text")
"""Every second layer has a window or chunk; those that see everything have a soft cap, sinks, or no rotations."""
STATES = ("lfm2", "qwen3_next", "nemotron_h", "falcon_h1") if recurrent_states.LAYER else ()
NO_ROTATIONS = ("nemotron_h",)


@functools.cache
def model(family: str) -> Adapter:
    if family in WINDOWS and family not in _SHAPES:
        return tiny_adapter(family)
    return hybrid_adapter(family, **_SHAPES.get(family, {}))


def audited(family: str, eviction: Any, **more: Any) -> Audit:
    asked = {"steps": 2, "losses": False, "plain_use": False, "progress": False, "situations": ["single"], **more}
    return pk.audit(model(family), pk.Prompt("p", token_ids(60), 0), eviction, **asked)


class Evictions:
    """Evictions of a model's measured layers, right ones and wrong ones."""

    def __init__(self, family: str) -> None:
        self.measured = model(family).layer_indices
        layers = range(len(model(family).every_layer))
        self.other = [index for index in layers if index not in self.measured]

    def read(self, model: Any, input_ids: Tensor, attention_mask: Tensor, part: int = 1000) -> DynamicCache:
        cache, places = DynamicCache(config=model.config), (attention_mask.cumsum(dim=-1) - 1).clamp(min=0)
        for start in range(0, input_ids.shape[1], part):
            columns = slice(start, start + part)
            model(input_ids=input_ids[:, columns], attention_mask=attention_mask[:, : start + part],
                  position_ids=places[:, columns], past_key_values=cache)  # fmt: skip
        return cache

    def gathered(self, cache: Any, attention_mask: Tensor) -> Any:
        planted.gathered(SimpleNamespace(layers=[cache.layers[index] for index in self.measured]), attention_mask)
        return cache

    def right(self, model: Any, input_ids: Tensor, attention_mask: Tensor) -> Any:
        return self.gathered(self.read(model, input_ids, attention_mask), attention_mask)

    def in_parts(self, model: Any, input_ids: Tensor, attention_mask: Tensor) -> Any:
        return self.gathered(self.read(model, input_ids, attention_mask, 16), attention_mask)

    def counts_padding(self, model: Any, input_ids: Tensor, attention_mask: Tensor) -> Any:
        cache = DynamicCache(config=model.config)
        model(input_ids=input_ids, attention_mask=attention_mask, past_key_values=cache)
        return self.gathered(cache, attention_mask)

    def rounded(self, model: Any, input_ids: Tensor, attention_mask: Tensor) -> Any:
        cache = self.right(model, input_ids, attention_mask)
        for layer in map(cache.layers.__getitem__, self.measured):
            layer.keys, layer.values = (part.bfloat16().float() for part in (layer.keys, layer.values))
        return cache

    def one_late(self, model: Any, input_ids: Tensor, attention_mask: Tensor) -> Any:
        """Values of the last measured layer are those of the entries before their keys'."""
        cache = self.read(model, input_ids, attention_mask)
        layer = cache.layers[self.measured[-1]]
        layer.values = layer.values.roll(1, dims=2)
        return self.gathered(cache, attention_mask)

    def cut(self, model: Any, input_ids: Tensor, attention_mask: Tensor) -> Any:
        """The window of the last layer that is not measured is evicted, too."""
        cache = self.right(model, input_ids, attention_mask)
        layer = cache.layers[self.other[-1]]
        layer.keys, layer.values = layer.keys[:, :, -3:], layer.values[:, :, -3:]
        return cache

    def of_others(self, model: Any, input_ids: Tensor, attention_mask: Tensor) -> Any:
        """That window is as long as it should be, and lacks the newest entry."""
        cache = self.right(model, input_ids, attention_mask)
        layer = cache.layers[self.other[-1]]
        layer.keys, layer.values = layer.keys.roll(1, dims=2), layer.values.roll(1, dims=2)
        return cache

    def state(self, model: Any, input_ids: Tensor, attention_mask: Tensor) -> Any:
        """The last state is a hundredth larger."""
        cache = self.right(model, input_ids, attention_mask)
        layer = [layer for layer in cache.layers if recurrent_states.size(layer)][-1]
        layer.conv_states = {place: 1.01 * state for place, state in layer.conv_states.items()}
        return cache


@pytest.mark.parametrize(
    "name", ["right", *(pytest.param(one, marks=pytest.mark.slow) for one in ("in_parts", "counts_padding"))]
)
@pytest.mark.parametrize("family", [*WINDOWS, *STATES])
def test_a_right_eviction_is_exact(family: str, name: str) -> None:
    result = audited(family, getattr(Evictions(family), name), situations=["single", "block", "batch"])
    assert (result.verdict, result.faults) == ("exact", ()), result.conclusion()
    (kept,) = {len(run.entries.kept) for run in result.runs if run.entries}
    assert kept == 2


@pytest.mark.parametrize("family", ["gemma2", "gpt_oss", "cohere2", *STATES[:1], *NO_ROTATIONS])
def test_what_is_rounded_is_told_and_decodes_rightly_where_it_may(family: str) -> None:
    found = audited(family, Evictions(family).rounded)
    assert found.runs[0].entries is not None
    first = found.runs[0].entries.altered[0]
    assert (found.verdict, first.kind, first.what) == ("lossy", "rounded", "keys rounded to bfloat16")
    allowed = audited(family, Evictions(family).rounded, allow=["lossy"])
    assert (allowed.verdict, allowed.exit_code) == ("lossy", 0), allowed.conclusion()


@pytest.mark.parametrize("family", [*WINDOWS, *STATES])
def test_a_fault_of_an_evicted_layer_has_the_layers_number_in_the_model(family: str) -> None:
    first = audited(family, Evictions(family).one_late).faults[0]
    assert (first.kind, first.layer, first.head, first.step) == ("mismatch", model(family).layer_indices[-1], 0, 0)
    assert first.floors > 1000


@pytest.mark.parametrize("family", [*WINDOWS, *(family for family in STATES if family not in NO_ROTATIONS)])
def test_new_tokens_that_stand_too_early_are_found(family: str) -> None:
    def evict(model: Any, input_ids: Tensor, attention_mask: Tensor) -> Any:
        cache = Evictions(family).right(model, input_ids, attention_mask)
        cache.tokens = attention_mask.sum(dim=-1)
        return cache

    evict.decode = planted.decode_early  # type: ignore[attr-defined]
    first = audited(family, evict).faults[0]
    assert (first.kind, first.layer) == ("positions", model(family).layer_indices[0])
    assert first.what == "new tokens stand 1 position too early"
    assert first.floors > 1000


@pytest.mark.parametrize(
    ("name", "words"),
    [("cut", r"keys of its window are \(2, 3, 8\), not \(2, 1[15], 8\) as the plain model's"),
     ("of_others", "keys of its window differ by .* of their norm from the plain model's")],
)  # fmt: skip
@pytest.mark.parametrize("family", WINDOWS)
def test_a_window_that_was_changed_is_named(family: str, name: str, words: str) -> None:
    result = audited(family, getattr(Evictions(family), name), situations=["single", "batch"])
    first = result.faults[0]
    assert (result.exit_code, first.kind, first.layer) == (1, "unmeasured", 2)
    assert re.fullmatch(words, first.what)
    assert f"layer 2, step 0: {first.what} (p, single" in result.conclusion()
    assert {(fault.situation, fault.row) for fault in result.faults} == {("single", 0), ("batch", 0), ("batch", 1)}


@pytest.mark.parametrize("family", STATES)
def test_a_state_that_was_changed_is_named_and_no_entry(family: str) -> None:
    result = audited(family, Evictions(family).state)
    first, number = result.faults[0], {"nemotron_h": 0, "falcon_h1": 1}.get(family, 2)
    assert (first.kind, first.layer, first.head) == ("unmeasured", number, -1)
    assert first.what == "numbers of its recurrent state 0 differ by 0.01 of their norm from the plain model's"
    assert all(not run.entries.altered for run in result.runs if run.entries)


@pytest.mark.parametrize("family", STATES)
def test_padding_in_a_part_of_its_own_is_in_no_state(family: str) -> None:
    """A part of one token counts as no padding to transformers: floors would be as large as states."""
    batch = make_situation("batch", torch.tensor(token_ids(60)), torch.tensor([1]), 1)
    with torch.inference_mode():
        found = reference.prompt_entries(model(family), batch)
    assert float(found.floors.max()) < 1e-4


def test_keys_move_only_where_no_window_holds_others() -> None:
    for family in ("gemma3_text", "cohere2"):
        with pytest.raises(ConfigError, match=r"expect keys that all are .* use --positions original"):
            audited(family, Evictions(family).right, positions="in-cache")


def test_a_press_is_refused_at_the_door() -> None:
    press = Eviction("kvpress:KnormPress", PRESS, Evictions("gemma2").right)
    with pytest.raises(ModelError, match="press 'KnormPress' expects layers that all see the whole prompt"):
        audit_eviction(model("gemma2"), [pk.Prompt("p", token_ids(60), 0)], press, AuditSettings(), {})


def test_the_loss_the_figure_and_the_rows_are_of_measured_layers() -> None:
    result = audited("gpt_oss", Evictions("gpt_oss").right, losses=True)
    assert len(result.losses) == 5 and not result.lossless
    assert {row["layer"] for row in result.records()} == {1, 3}
    assert (result.layers, result.about["measured_layers"]) == (2, "1 3 of 4")
    figure = result.plot()
    figure.draw_without_rendering()
    for axis in (figure.axes[0].yaxis, figure.axes[1].xaxis):
        assert {label.get_text() for label in axis.get_ticklabels()} - {""} == {"1", "3"}


def test_a_file_counts_evicted_layers_and_its_logits_are_compared(tmp_path: Path) -> None:
    adapter, ids, evictions = model("gpt_oss"), torch.tensor([token_ids(60)]), Evictions("gpt_oss")
    with torch.inference_mode():
        cache = evictions.right(adapter.model, ids, torch.ones_like(ids))
        logits = adapter.model(torch.tensor([[7]]), past_key_values=cache, position_ids=torch.tensor([[60]])).logits[0]
    kept = {f"layer_{layer}_head_{head}": planted.positions(60, head) for layer in range(2) for head in range(2)}
    np.savez(tmp_path / "kept.npz", token_ids=ids[0], tokens=[7], logits=logits, **kept)
    result = audited("gpt_oss", tmp_path / "kept.npz")
    assert result.verdict == "exact", result.conclusion()
    np.savez(tmp_path / "other.npz", token_ids=ids[0], tokens=[7], logits=logits.roll(1), **kept)
    assert audited("gpt_oss", tmp_path / "other.npz").faults[0].kind == "decoding"


@pytest.mark.parametrize("family", ["gemma2", "gpt_oss", "llama4_text"])
def test_padding_that_a_decoding_of_its_own_hides_from_windows_is_hidden_in_the_reference(family: str) -> None:
    """The window is longer than the prompt, so that it holds the padding: a mask hides that, as in `generate`."""
    wide = {} if family == "llama4_text" else {"sliding_window": 300}
    adapter = tiny_adapter(family, **wide) if wide else model(family)

    def masked(model: Any, input_ids: Tensor, attention_mask: Tensor) -> Any:
        cache = Evictions(family).read(model, input_ids, attention_mask)
        cache.mask = attention_mask
        return cache

    def decode(model: Any, cache: Any, token: Tensor, step: int) -> Tensor:
        places = cache.mask.sum(dim=-1, keepdim=True)
        cache.mask = torch.nn.functional.pad(cache.mask, (0, 1), value=1)
        found: Tensor = model(
            input_ids=token.view(-1, 1), attention_mask=cache.mask, position_ids=places, past_key_values=cache
        ).logits
        return found

    def late(model: Any, cache: Any, token: Tensor, step: int) -> Tensor:
        """The padding, and of the second prompt three tokens more."""
        if step == 0:
            cache.mask = cache.mask.clone()
            cache.mask[1, :10] = 0
        return decode(model, cache, token, step)

    for own_decode, verdict in ((decode, "did nothing"), (late, "differs")):
        masked.decode = own_decode  # type: ignore[attr-defined]
        result = pk.audit(adapter, [pk.Prompt("p", token_ids(60), 0)], masked, steps=2, losses=False, plain_use=False,
                          progress=False, situations=["batch"])  # fmt: skip
        assert result.verdict == verdict, result.conclusion()


@pytest.mark.parametrize("family", [family for family in STATES if family in ("lfm2", "qwen3_next")])
def test_a_state_that_is_changed_while_decoding_is_not_told_as_a_rotation(family: str) -> None:
    """The state before the first evicted layer makes its new keys others, at their right positions."""

    def evict(model: Any, input_ids: Tensor, attention_mask: Tensor) -> Any:
        return Evictions(family).right(model, input_ids, attention_mask)

    def decode(model: Any, cache: Any, token: Tensor, step: int) -> Tensor:
        if step == 1:
            cache.layers[0].conv_states = {place: 1.5 * state for place, state in cache.layers[0].conv_states.items()}
        found: Tensor = model(
            input_ids=token.view(-1, 1), past_key_values=cache, position_ids=torch.tensor([[60 + step]])
        ).logits
        return found

    evict.decode = decode  # type: ignore[attr-defined]
    first = audited(family, evict).faults[0]
    assert (first.kind, first.layer, first.step) == ("decoding", 1, 1)
