"""A model's shapes, modules and measured layers, as the measurements need them.

`loading` loads models; `proof` finds by running a model what its attention is.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, cast

import torch
from jaxtyping import Float
from torch import Tensor, nn

from perturbkv.configs.layer_types import format_layers, measured_layers, sliding_window
from perturbkv.configs.resources import Shape
from perturbkv.devices import dtype_name
from perturbkv.errors import ModelError
from perturbkv.models import attention_facts, projection, proof
from perturbkv.models.attention_facts import Facts, LayerFacts, RefusedError
from perturbkv.models.interface import text_config
from perturbkv.models.proof.proven_twin import check_twin
from perturbkv.models.stored_weights import WeightStorage
from perturbkv.theory import Softmax


@dataclass(frozen=True)
class OpenArguments:
    """The arguments of `loading.open_model` by which another process opens the same model; `revision` is a commit."""

    name: str
    seed: int
    revision: str


@dataclass(frozen=True, eq=False, repr=False)
class Adapter:
    """A loaded model with the shapes and modules that measurements need.

    Attributes:
        model: the causal language model, in eval mode.
        tokenizer: its tokenizer.
        name: the name that the user gave.
        revision: version of the weights.
        random_weights: whether the weights are random.
        stored: storage of its weights.
        open_arguments: how another process opens it; None for a user's model.
    """

    model: Any
    tokenizer: Any
    name: str
    revision: str = ""
    random_weights: bool = False
    stored: WeightStorage = WeightStorage("unknown")
    open_arguments: OpenArguments | None = None

    def __post_init__(self) -> None:
        found, told = self.layer_indices, measured_layers(self.config)
        if found != told:
            raise ModelError(
                f"the configuration of model '{self.name}' says that layers {format_layers(told)} see the whole "
                f"prompt, and its code lets layers {format_layers(found)}; an eviction study would misread it"
            )
        try:
            check_twin(self.model)
        except RefusedError as refusal:
            raise ModelError(refusal.message(self.name)) from refusal

    def __repr__(self) -> str:
        dtype = dtype_name(self.dtype)
        layers = f"{len(self.every_layer)} layers" + (f" ({len(self.layers)} measured)" if self.is_mixed else "")
        return f"{self.name}: {layers} × {self.heads} heads, {dtype} on {self.device}"

    @property
    def weights(self) -> str:
        """The weights' storage type and the dtype of computation, such as `Q4_1 → float32`."""
        return self.stored.as_run(dtype_name(self.dtype))

    @cached_property
    def facts(self) -> Facts:
        """The facts of its attention, found by running it. Raises ModelError where the formulas are not of it."""
        try:
            return proof.prove(self.model)
        except RefusedError as refusal:
            raise ModelError(refusal.message(self.name)) from refusal

    @property
    def config(self) -> Any:
        """Transformers' configuration of the model's decoder."""
        return text_config(self.model)

    @property
    def base(self) -> nn.Module:
        """The decoder without the output layer: the module of the layers, which every forward pass calls."""
        return cast("nn.Module", self.model.get_submodule(self.facts.path.rpartition(".")[0]))

    @cached_property
    def every_layer(self) -> Sequence[Any]:
        """All decoder layers, including those that are not measured."""
        return list(self.model.get_submodule(self.facts.path))

    @cached_property
    def every_attention(self) -> Mapping[int, Any]:
        """Layer index -> its attention module, of the decoder layers that have one."""
        return {
            index: self.every_layer[index].get_submodule(facts.attention)
            for index, facts in enumerate(self.facts.layers)
            if facts.attends
        }

    @cached_property
    def layer_indices(self) -> tuple[int, ...]:
        """The measured layers' indices among all layers; a trace's `layer` axis has measured layers only."""
        return attention_facts.measured_layers(self.facts.layers)

    @cached_property
    def measured_index(self) -> Mapping[int, int]:
        """Number of a decoder layer -> its index among the measured layers, of these alone."""
        return {number: index for index, number in enumerate(self.layer_indices)}

    @cached_property
    def owners(self) -> tuple[int, ...]:
        """For each measured layer the measured layer whose cache its attention reads, itself or an earlier one."""
        return tuple(self.layer_indices.index(self.facts.holder(index)) for index in self.layer_indices)

    @property
    def holders(self) -> range:
        """The measured layers that fill a cache, by which kept sets are chosen; those that read theirs come after."""
        return range(max(self.owners) + 1)

    @property
    def shares_caches(self) -> bool:
        """True if measured layers read the cache of another one."""
        return len(self.holders) < len(self.layers)

    @property
    def is_mixed(self) -> bool:
        """True if layers with full attention are measured, and others, of windows, states or no memory, are not."""
        return len(self.layer_indices) < len(self.facts.layers)

    @property
    def is_recurrent(self) -> bool:
        """True if some layers have a recurrent state, alone or beside attention."""
        return any(facts.state for facts in self.facts.layers)

    @cached_property
    def layers(self) -> Sequence[Any]:
        """The measured layers: full-attention layers, or all layers of a model with a single layer type."""
        return [self.every_layer[index] for index in self.layer_indices]

    @cached_property
    def attentions(self) -> Sequence[Any]:
        """The attention module of each measured layer."""
        return [self.every_attention[index] for index in self.layer_indices]

    @cached_property
    def projections(self) -> Sequence[Any]:
        """The output projection of each measured layer: the linear map that receives its heads' outputs."""
        return [
            attention.get_submodule(self.layer_facts(layer).projection)
            for layer, attention in enumerate(self.attentions)
        ]

    def layer_facts(self, layer: int) -> LayerFacts:
        """Return what the attention of a measured layer is."""
        return self.facts.layers[self.layer_indices[layer]]

    def has_gate(self, layer: int) -> bool:
        """Return whether a gate stands between a measured layer's attention and its output projection."""
        return self.layer_facts(layer).has_gate

    @cached_property
    def has_gates(self) -> bool:
        """True if any measured layer has a gate."""
        return any(self.has_gate(layer) for layer in range(len(self.layers)))

    @property
    def holds_latents(self) -> bool:
        """True if the cache holds a latent of each token, of which a layer makes the keys and values."""
        return bool(self.layer_facts(0).latent)

    @property
    def rotary(self) -> Any:
        """The rotary embedding, a module that returns the cosines and sines of positions; None without rotations.

        None too where keys are rotated in another way than by pairs half the rotary width apart.
        """
        path = self.facts.rotary.path
        return self.model.get_submodule(path) if path else None

    @property
    def rotary_kind(self) -> tuple[str, ...]:
        """Extra arguments of `rotary`: the measured layers' type in models that require it, else none."""
        return self.facts.rotary.arguments

    @property
    def frequencies(self) -> Float[Tensor, " frequency"]:
        """Rotary frequencies of the measured layers, (frequency,), in radians per position."""
        return cast("Tensor", getattr(self.rotary, "_".join([*self.rotary_kind, "inv_freq"])))

    @property
    def heads(self) -> int:
        """H, number of query heads."""
        return self.layer_facts(0).heads

    @property
    def kv_heads(self) -> int:
        """H_kv, number of key/value heads."""
        return self.layer_facts(0).kv_heads

    @property
    def d_key(self) -> int:
        """Number of components of a head's queries and keys."""
        return self.layer_facts(0).d_key

    @property
    def d_value(self) -> int:
        """Number of components of a head's values, and so of its output."""
        return self.layer_facts(0).d_value

    @property
    def d_model(self) -> int:
        """Model width."""
        return int(self.config.hidden_size)

    @cached_property
    def shape(self) -> Shape:
        """The model's sizes from which the memory of weights and caches is computed."""
        weights_bytes = self.stored.nbytes or self.parameters * self.dtype.itemsize
        told = Shape.from_config(self.config, self.dtype.itemsize, weights_bytes)
        own = ((index, facts) for index, facts in enumerate(self.facts.layers) if facts.owner is None)
        sliding = [facts for index, facts in own if facts.attends and index not in self.layer_indices]
        return replace(
            told,
            layers=len(self.holders),
            readers=len(self.layers) - len(self.holders),
            unmeasured=len(self.facts.layers) - len(self.layers),
            heads=self.heads,
            kv_heads=self.kv_heads,
            d_key=self.d_key,
            d_value=self.d_value,
            sliding=len(sliding),
            sliding_width=sum(facts.kv_heads * (facts.d_key + facts.d_value) for facts in sliding),
            window=max((facts.window or 0 for facts in sliding), default=0),
            state=sum(facts.state for facts in self.facts.layers),
            latent=self.layer_facts(0).latent,
        )

    @property
    def parameters(self) -> int:
        """Number of its weights."""
        return sum(weight.numel() for weight in self.model.parameters())

    @property
    def positions(self) -> int:
        """Longest supported sequence, in tokens."""
        return int(self.config.max_position_embeddings)

    @property
    def device(self) -> torch.device:
        """Device of the first weights."""
        return cast("torch.device", next(self.model.parameters()).device)

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of the weights."""
        return cast("torch.dtype", next(self.model.parameters()).dtype)

    def layer_of(self, attention: nn.Module) -> int:
        """Return the index, among the measured layers, of the layer with a given attention module."""
        return next(index for index, module in enumerate(self.attentions) if module is attention)

    def cache_layer(self, cache: Any, layer: int) -> Any:
        """Return the cache-layer object that a measured layer reads in a transformers cache, one of all layers."""
        return cache.layers[self.layer_indices[self.owners[layer]]]

    def check_plain_layers(self, feature: str) -> None:
        """Raise ModelError for unmeasured layers, states or shared caches, which `feature` does not support."""
        obstacles = {"recurrent states": self.is_recurrent, "layers that see a part of it": self.is_mixed,
                     "layers that read another's cache": self.shares_caches}  # fmt: skip
        if obstacle := next((words for words, applies in obstacles.items() if applies), ""):
            raise ModelError(
                f"{feature} expects layers that all see the whole prompt and nothing else; model '{self.name}' has "
                f"{obstacle}"
            )

    def check_own_caches(self, feature: str) -> None:
        """Raise ModelError for a model with measured layers that read another's cache, unsupported by `feature`."""
        if self.shares_caches:
            first = len(self.holders)
            reader, owner = (self.layer_indices[layer] for layer in (first, self.owners[first]))
            raise ModelError(
                f"{feature} expects layers that each fill a cache of their own; in model '{self.name}' layer {reader} "
                f"reads the entries of layer {owner}"
            )

    def check_no_latents(self, feature: str) -> None:
        """Raise ModelError for a model whose cache holds latents, which `feature` does not read."""
        if self.holds_latents:
            raise ModelError(
                f"{feature} expects a cache of the keys and values that attention reads; that of model '{self.name}' "
                "holds a latent of each token"
            )

    def output_projection(self, layer: int) -> Float[Tensor, "d_model head_d_value"]:
        """Return a layer's output projection, dequantised; columns h·d_value … (h+1)·d_value are W_O^h transposed."""
        return projection.read(self.projections[layer], self.heads * self.d_value, self.dtype)

    def sinks(self, layer: int) -> Float[Tensor, " head"] | None:
        """Return every head's sink logit in a layer, (head,); None for a model without sinks."""
        name = self.layer_facts(layer).sinks
        return self.attentions[layer].get_parameter(name).detach().flatten() if name else None

    def scale(self, layer: int) -> float:
        """Return the factor on the logits before the softmax."""
        return self.layer_facts(layer).scale

    def softmax(self, layer: int) -> Softmax:
        """Return how a layer's logits become attention weights."""
        return Softmax(self.scale(layer), self.layer_facts(layer).cap, self.sinks(layer))


def check_sliding_window(config: Any, tokens: int, sample: str, name: str, after: int = 1) -> None:
    """Raise ModelError if the sliding window is shorter than `tokens`, the prompt plus `after` later tokens."""
    window = sliding_window(config)
    if window is not None and tokens > window:
        instead = f"--max-tokens {window - after} or less" if window - after >= 2 else "a model without one"
        raise ModelError(
            f"model '{name}' attends to a sliding window of {window} entries, fewer than the {tokens} of sample "
            f"'{sample}'; use {instead}"
        )


def check_long_rotations(config: Any, cached: int, tokens: int, sample: str, name: str, after: int) -> None:
    """Raise ModelError if LongRoPE changes its factors between `cached` tokens and all `tokens` of a sample.

    Keys cached with one set of factors would meet queries with the other; transformers recomputes such a text.
    """
    rotations = getattr(config, "rope_parameters", None) or {}
    switch = rotations.get("original_max_position_embeddings")
    if rotations.get("rope_type") == "longrope" and switch is not None and cached <= switch < tokens:
        raise ModelError(
            f"sample '{sample}' is read to {cached} tokens and goes on to {tokens}, and model '{name}' rotates "
            f"otherwise above {switch} (LongRoPE); use --max-tokens {max(1, switch - after)} or less, or a longer "
            "prompt"
        )
