"""What the toolkit knows of a model: its shapes, and where its attention and its measured layers are.

`loading` brings models in; `families` says which ones an eviction study reads correctly.
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
from perturbkv.errors import ModelError
from perturbkv.models import projection
from perturbkv.models.families import FAMILIES, Family, check_family, check_layers
from perturbkv.models.stored_weights import Stored


@dataclass(frozen=True)
class Opened:
    """What `models.loading.open_model` takes to open the same model; a hub's `revision` is the commit."""

    name: str
    seed: int
    revision: str


@dataclass(frozen=True, eq=False, repr=False)
class Adapter:
    """A loaded model with the shapes and modules that measurements need.

    Attributes:
        model: the causal language model, in eval mode.
        tokenizer: its tokenizer.
        name: as the user named it; `revision` pins the weights.
        random_weights: True where the weights were drawn at random.
        stored: how its weights are stored.
        opened: how another process opens it; None where it was given, not opened.
    """

    model: Any
    tokenizer: Any
    name: str
    revision: str = ""
    random_weights: bool = False
    stored: Stored = Stored("unknown")
    opened: Opened | None = None

    def __post_init__(self) -> None:
        check_family(self.model.config, self.name)
        check_layers(self.model.config, self.name)

    def __repr__(self) -> str:
        dtype = str(self.dtype).removeprefix("torch.")
        layers = f"{len(self.every_layer)} layers" + (f" ({len(self.layers)} measured)" if self.is_mixed else "")
        return f"{self.name}: {layers} × {self.heads} heads, {dtype} on {self.device}"

    @property
    def weights(self) -> str:
        """The type in which weights are stored → the type that the model computes with."""
        return self.stored.as_run(str(self.dtype).removeprefix("torch."))

    @property
    def family(self) -> Family:
        """Its family, and what is special about it."""
        return FAMILIES[self.config.model_type]

    @property
    def config(self) -> Any:
        """Transformers' configuration of the model."""
        return self.model.config

    @cached_property
    def every_layer(self) -> Sequence[Any]:
        """The decoder layers, those that are not measured among them."""
        return list(self.model.model.layers)

    @cached_property
    def layer_indices(self) -> tuple[int, ...]:
        """Of each measured layer, which of all it is; a layer's place among them is what a trace's axis counts."""
        return layer_types.measured(self.config)

    @property
    def is_mixed(self) -> bool:
        """Whether some layers are not measured, because they hold a sliding window of their own."""
        return layer_types.is_mixed(self.config)

    @cached_property
    def layers(self) -> Sequence[Any]:
        """The measured layers: those whose attention sees the whole prompt, or all of a model of one kind."""
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
        """The module that gives cosines and sines for positions; of a kind of layers, where it takes a `layer_type`."""
        return self.model.model.rotary_emb

    @cached_property
    def rotary_kind(self) -> tuple[str, ...]:
        """What the rotary module is asked for beside positions: the kind of the measured layers, where they differ."""
        by_kind = "layer_type" in signature(type(self.rotary).forward).parameters
        return (self.config.layer_types[self.layer_indices[0]],) if by_kind else ()

    @property
    def frequencies(self) -> Float[Tensor, " frequency"]:
        """Of the measured layers' rotations, in radians per position."""
        return cast("Tensor", getattr(self.rotary, "_".join([*self.rotary_kind, "inv_freq"])))

    @property
    def heads(self) -> int:
        """H, query heads."""
        return int(self.config.num_attention_heads)

    @property
    def kv_heads(self) -> int:
        """H_kv, key/value heads."""
        return int(self.config.num_key_value_heads)

    @property
    def d_head(self) -> int:
        """Head size."""
        return int(self.attentions[0].head_dim)

    @property
    def d_model(self) -> int:
        """Model width."""
        return int(self.config.hidden_size)

    @cached_property
    def shape(self) -> Shape:
        """What the model's memory depends on."""
        floats = sum(weight.numel() for weight in self.model.parameters()) * self.dtype.itemsize
        return Shape.of(self.config, self.dtype.itemsize, self.stored.nbytes or floats)

    @property
    def positions(self) -> int:
        """Longest sequence the model was made for."""
        return int(self.config.max_position_embeddings)

    @property
    def device(self) -> torch.device:
        """Where the first layer lives."""
        return cast("torch.device", next(self.model.parameters()).device)

    @property
    def dtype(self) -> torch.dtype:
        """Of the weights."""
        return cast("torch.dtype", next(self.model.parameters()).dtype)

    def layer_of(self, attention: nn.Module) -> int:
        """The place among the measured layers of the one that an attention module belongs to."""
        return next(index for index, module in enumerate(self.attentions) if module is attention)

    def held(self, cache: Any, layer: int) -> Any:
        """What a cache of all layers holds of a measured one."""
        return cache.layers[self.layer_indices[layer]]

    def output_projection(self, layer: int) -> Float[Tensor, "d_model head_d_head"]:
        """`o_proj.weight` of a layer as numbers: its columns h·d_h … (h+1)·d_h are W_O^h transposed."""
        return projection.read(self.attentions[layer].o_proj, self.heads * self.d_head, self.dtype)

    def sinks(self, layer: int) -> Float[Tensor, " head"] | None:
        """Logits that are in every softmax of a layer's heads, of entries without a value; None in most families."""
        found = self.attentions[layer].sinks if self.family.sinks else None
        return None if found is None else cast("Tensor", found.detach())

    def scale(self, layer: int) -> float:
        """Factor on the logits before the softmax."""
        return float(self.attentions[layer].scaling)


def check_projections(model: Adapter) -> None:
    """Raise ModelError where a layer projects its heads by something else than a matrix W_O.

    And where it has a sink in its softmax that its family is not known for.
    """
    for layer, attention in zip(model.layer_indices, model.attentions, strict=True):
        if hasattr(attention, "sinks") and not model.family.sinks:
            msg = f"layer {layer} of model '{model.name}' has a sink in its softmax; an eviction study would misread it"
            raise ModelError(msg)
        try:
            projection.check(attention.o_proj, model.heads * model.d_head, model.dtype)
        except projection.NoMatrixError as error:
            msg = (
                f"o_proj of layer {layer} of model '{model.name}', a {projection.kind(attention.o_proj)}, {error}; use "
                "weights that are quantised alone (weight-only), or the model unquantised"
            )
            raise ModelError(msg) from error


def check_sliding_window(config: Any, tokens: int, sample: str, name: str, after: int = 1) -> None:
    """Raise ModelError where a sliding window hides some of `tokens` entries, the last `after` of them no prompt's."""
    window = sliding_window(config)
    if window is not None and tokens > window:
        instead = f"--max-tokens {window - after} or less" if window - after >= 2 else "a model without one"
        msg = (
            f"model '{name}' attends to a sliding window of {window} entries, fewer than the {tokens} of sample "
            f"'{sample}'; use {instead}"
        )
        raise ModelError(msg)


def check_long_rotations(config: Any, read: int, tokens: int, sample: str, name: str, after: int) -> None:
    """Raise ModelError where LongRoPE's factors change behind the `read` tokens that a cache is made of.

    Keys that were cached with one set of factors would be asked with the other; transformers reads such a text anew.
    """
    rotations = getattr(config, "rope_parameters", None) or {}
    switch = rotations.get("original_max_position_embeddings")
    if rotations.get("rope_type") == "longrope" and switch is not None and read <= switch < tokens:
        msg = (
            f"sample '{sample}' is read to {read} tokens and goes on to {tokens}, and model '{name}' rotates otherwise "
            f"above {switch} (LongRoPE); use --max-tokens {max(1, switch - after)} or less, or a longer prompt"
        )
        raise ModelError(msg)
