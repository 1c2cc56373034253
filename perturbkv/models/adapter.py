"""A model's shapes, modules and measured layers, as the measurements need them.

`loading` loads models; `families` lists those that an eviction study reads correctly.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from inspect import signature
from typing import Any, cast

import torch
from jaxtyping import Float
from torch import Tensor, nn

from perturbkv.configs import layer_types
from perturbkv.configs.layer_types import sliding_window
from perturbkv.configs.resources import Shape
from perturbkv.devices import dtype_name
from perturbkv.errors import ModelError
from perturbkv.models import projection
from perturbkv.models.families import FAMILIES, Family, check_family, check_layers
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
        check_family(self.model.config, self.name)
        check_layers(self.model.config, self.name)

    def __repr__(self) -> str:
        dtype = dtype_name(self.dtype)
        layers = f"{len(self.every_layer)} layers" + (f" ({len(self.layers)} measured)" if self.is_mixed else "")
        return f"{self.name}: {layers} × {self.heads} heads, {dtype} on {self.device}"

    @property
    def weights(self) -> str:
        """The weights' storage type and the dtype of computation, such as `Q4_1 → float32`."""
        return self.stored.as_run(dtype_name(self.dtype))

    @property
    def family(self) -> Family:
        """The model's family and its particularities."""
        return FAMILIES[self.config.model_type]

    @property
    def config(self) -> Any:
        """Transformers' configuration of the model."""
        return self.model.config

    @cached_property
    def every_layer(self) -> Sequence[Any]:
        """All decoder layers, including those that are not measured."""
        return list(self.model.model.layers)

    @cached_property
    def layer_indices(self) -> tuple[int, ...]:
        """The measured layers' indices among all layers; a trace's `layer` axis has measured layers only."""
        return layer_types.measured_layers(self.config)

    @property
    def is_mixed(self) -> bool:
        """True if some layers have sliding-window attention, and so are not measured, and others full attention."""
        return layer_types.is_mixed(self.config)

    @cached_property
    def layers(self) -> Sequence[Any]:
        """The measured layers: full-attention layers, or all layers of a model with a single layer type."""
        return [self.every_layer[index] for index in self.layer_indices]

    @cached_property
    def attentions(self) -> Sequence[Any]:
        """The attention module of each measured layer."""
        return [layer.self_attn for layer in self.layers]

    @property
    def final_norm(self) -> nn.Module:
        """The norm after the last layer."""
        return cast("nn.Module", self.model.model.norm)

    @property
    def rotary(self) -> Any:
        """The rotary embedding: a module that returns the cosines and sines of positions."""
        return self.model.model.rotary_emb

    @cached_property
    def rotary_kind(self) -> tuple[str, ...]:
        """Extra arguments of `rotary`: the measured layers' type in models that require it, else none."""
        takes_type = "layer_type" in signature(type(self.rotary).forward).parameters
        return (self.config.layer_types[self.layer_indices[0]],) if takes_type else ()

    @property
    def frequencies(self) -> Float[Tensor, " frequency"]:
        """Rotary frequencies of the measured layers, (frequency,), in radians per position."""
        return cast("Tensor", getattr(self.rotary, "_".join([*self.rotary_kind, "inv_freq"])))

    @property
    def heads(self) -> int:
        """H, number of query heads."""
        return int(self.config.num_attention_heads)

    @property
    def kv_heads(self) -> int:
        """H_kv, number of key/value heads."""
        return int(self.config.num_key_value_heads)

    @property
    def d_key(self) -> int:
        """Number of components of a head's queries and keys."""
        return int(self.attentions[0].head_dim)

    @property
    def d_value(self) -> int:
        """Number of components of a head's values, and so of its output."""
        return int(self.attentions[0].head_dim)

    @property
    def d_model(self) -> int:
        """Model width."""
        return int(self.config.hidden_size)

    @cached_property
    def shape(self) -> Shape:
        """The model's sizes from which the memory of weights and caches is computed."""
        float_bytes = sum(weight.numel() for weight in self.model.parameters()) * self.dtype.itemsize
        return Shape.from_config(self.config, self.dtype.itemsize, self.stored.nbytes or float_bytes)

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
        """Return the cache-layer object of a measured layer in a transformers cache, which covers all layers."""
        return cache.layers[self.layer_indices[layer]]

    def output_projection(self, layer: int) -> Float[Tensor, "d_model head_d_value"]:
        """Return a layer's output projection, dequantised; columns h·d_value … (h+1)·d_value are W_O^h transposed."""
        return projection.read(self.attentions[layer].o_proj, self.heads * self.d_value, self.dtype)

    def sinks(self, layer: int) -> Float[Tensor, " head"] | None:
        """Return every head's sink logit in a layer, (head,); None for a family without sinks."""
        logits = self.attentions[layer].sinks if self.family.sinks else None
        return None if logits is None else cast("Tensor", logits.detach())

    def scale(self, layer: int) -> float:
        """Return the factor on the logits before the softmax."""
        return float(self.attentions[layer].scaling)

    def softmax(self, layer: int) -> Softmax:
        """Return how a layer's logits become attention weights."""
        return Softmax(self.scale(layer), sinks=self.sinks(layer))


def check_projections(model: Adapter) -> None:
    """Raise ModelError for an output projection that is no matrix, or for sinks in a family without sinks."""
    for layer, attention in zip(model.layer_indices, model.attentions, strict=True):
        if hasattr(attention, "sinks") and not model.family.sinks:
            raise ModelError(
                f"layer {layer} of model '{model.name}' has a sink in its softmax; an eviction study would misread it"
            )
        try:
            projection.check(attention.o_proj, model.heads * model.d_value, model.dtype)
        except projection.NoMatrixError as error:
            raise ModelError(
                f"o_proj of layer {layer} of model '{model.name}', a {projection.describe(attention.o_proj)}, {error}; "
                "use weights that are quantised alone (weight-only), or the model unquantised"
            ) from error


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
