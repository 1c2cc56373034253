"""What the toolkit knows of a model: its family, its shapes, and where its attention and layers are.

`loading` brings models in; this file says which ones an eviction study reads correctly.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, cast

import torch
from jaxtyping import Float
from torch import Tensor, nn

from perturbkv.configs.resources import Shape
from perturbkv.errors import ModelError
from perturbkv.models import projection
from perturbkv.models.stored_weights import Stored

FAMILIES = {"llama": "Llama", "mistral": "Mistral", "qwen2": "Qwen2", "qwen3": "Qwen3", "phi3": "Phi-3"}
"""transformers' model_type -> family. All five hold their attention at `model.layers[i].self_attn.o_proj`."""

_SOFT_CAPS = ("attn_logit_softcapping", "attn_logit_softcap", "logit_softcap")


@dataclass(frozen=True, eq=False, repr=False)
class Adapter:
    """A loaded model with the shapes and modules that measurements need.

    Attributes:
        model: the causal language model, in eval mode.
        tokenizer: its tokenizer.
        name: as the user named it; `revision` pins the weights.
        random_weights: True where the weights were drawn at random.
        stored: how its weights are stored.
    """

    model: Any
    tokenizer: Any
    name: str
    revision: str = ""
    random_weights: bool = False
    stored: Stored = Stored("unknown")

    def __post_init__(self) -> None:
        check_family(self.model.config, self.name)

    def __repr__(self) -> str:
        dtype = str(self.dtype).removeprefix("torch.")
        return f"{self.name}: {len(self.layers)} layers × {self.heads} heads, {dtype} on {self.device}"

    @property
    def weights(self) -> str:
        """The type in which weights are stored → the type that the model computes with."""
        return self.stored.as_run(str(self.dtype).removeprefix("torch."))

    @property
    def config(self) -> Any:
        """Transformers' configuration of the model."""
        return self.model.config

    @cached_property
    def layers(self) -> Sequence[Any]:
        """The decoder layers."""
        return list(self.model.model.layers)

    @cached_property
    def attentions(self) -> Sequence[Any]:
        """The attention module of each layer."""
        return [layer.self_attn for layer in self.layers]

    @property
    def final_norm(self) -> nn.Module:
        """The norm after the last layer."""
        return cast("nn.Module", self.model.model.norm)

    @property
    def rotary(self) -> Any:
        """The module that gives cosines and sines for positions; `inv_freq` holds the frequencies."""
        return self.model.model.rotary_emb

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
        return Shape.of(self.config, self.dtype.itemsize, sum(weight.numel() for weight in self.model.parameters()))

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
        """Index of the layer that an attention module belongs to."""
        return next(index for index, module in enumerate(self.attentions) if module is attention)

    def output_projection(self, layer: int) -> Float[Tensor, "d_model head_d_head"]:
        """`o_proj.weight` of a layer as numbers: its columns h·d_h … (h+1)·d_h are W_O^h transposed."""
        return projection.read(self.attentions[layer].o_proj, self.heads * self.d_head, self.dtype)

    def scale(self, layer: int) -> float:
        """Factor on the logits before the softmax."""
        return float(self.attentions[layer].scaling)


def check_family(config: Any, name: str) -> None:
    """Raise ModelError unless the model is of a supported family with plain softmax attention."""
    if config.model_type not in FAMILIES:
        msg = f"model '{name}' is of the family '{config.model_type}'; supported: {', '.join(FAMILIES.values())}"
        raise ModelError(msg)
    capped = [cap for cap in _SOFT_CAPS if getattr(config, cap, None)]
    if capped:
        msg = f"model '{name}' soft-caps its attention ({capped[0]}); an eviction study would misread it"
        raise ModelError(msg)
    if getattr(config, "attention_sink", None) or getattr(config, "sinks", None):
        msg = f"model '{name}' has attention sinks beside its entries; an eviction study would misread it"
        raise ModelError(msg)


def check_projections(model: Adapter) -> None:
    """Raise ModelError where a layer projects its heads by something else than a matrix W_O."""
    for layer, attention in enumerate(model.attentions):
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


def sliding_window(config: Any) -> int | None:
    """The window some layer really uses; None where every layer sees all entries."""
    window = getattr(config, "sliding_window", None)
    layer_types = getattr(config, "layer_types", None)
    if layer_types is not None and "sliding_attention" not in layer_types:
        return None
    if not getattr(config, "use_sliding_window", True):
        return None
    return int(window) if window is not None else None
