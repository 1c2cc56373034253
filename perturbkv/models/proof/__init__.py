"""What a decoder's attention is, found by running it.

A short random text is read by the loaded model under hooks. Each layer must call transformers' attention interface
once, with keywords that are known here; what the call returns must equal the softmax attention that METHOD's formulas
are of; its mask must be one of positions alone; random tensors in the output's place must arrive unchanged at one
linear map, or times a gate that depends neither on them nor on cached entries; nothing may be remembered outside the
cache, and reading in two parts must equal reading at once. A layer without attention keeps a recurrent state in the
cache, or nothing. What holds is a fact that the adapter reads; the first thing that does not is a `RefusedError`, with
the layer and the check. No name of a model decides anything.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from transformers import DynamicCache

from perturbkv.errors import ModelError
from perturbkv.models import recurrent_states
from perturbkv.models.attention_facts import Facts, LayerFacts, RefusedError, measured_layers
from perturbkv.models.interface import implementation, plain_kernel
from perturbkv.models.proof.calls import observe, probe_text, read_tokens
from perturbkv.models.proof.evicted import check_evicted
from perturbkv.models.proof.layers import layer_stack, read_layer
from perturbkv.models.proof.parts import check_reading, check_streams
from perturbkv.models.proof.projections import check_matrix, find_projections
from perturbkv.models.proof.rotary import find_rotary

_FAILURES = (ModelError, RuntimeError, ValueError, TypeError, KeyError, IndexError, AttributeError, AssertionError)
"""Exceptions of models that cannot read a text with a cache of transformers."""


@contextmanager
def _explain_failures() -> Iterator[None]:
    """Turn what a model raises while it reads a short text into a RefusedError."""
    try:
        yield
    except _FAILURES as error:
        told = f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
        raise RefusedError("run", f"cannot read a short text ({told}){recurrent_states.version_note()}") from error


@_explain_failures()
@torch.no_grad()
def prove(model: Any) -> Facts:
    """Return the facts of a loaded causal language model in eval mode. Raises RefusedError."""
    if getattr(model.config, "is_encoder_decoder", False):
        raise RefusedError("interface", "is an encoder with a decoder, whose cross-attention is not measured")
    kernel, ids = implementation(model), probe_text(model)
    by_kernel = read_tokens(model, ids, DynamicCache(config=model.config))
    with plain_kernel(kernel):
        calls, masks, cache = observe(model, ids)
        path, attentions = layer_stack(model, calls, cache)
        modules = {index: call.module for index, (_, call) in attentions.items()}
        read = {index: read_layer(index, call, masks, cache, name) for index, (name, call) in attentions.items()}
        receivers = find_projections(model, ids, modules, model.get_submodule(path))
        layers = tuple(
            replace(read[index], projection=receivers[index].path, has_gate=receivers[index].has_gate)
            if index in read
            else LayerFacts.without_attention(recurrent_states.size(cached))
            for index, cached in enumerate(cache.layers)
        )
        measured = measured_layers(layers)
        _check_measured(layers, measured)
        check_reading(model, ids, layers, {index: call for index, (_, call) in attentions.items()}, by_kernel)
        check_streams(model, ids, path)
        for index in measured:
            check_matrix(modules[index], layers[index], index, model.dtype, receivers[index])
        facts = Facts(path, layers, find_rotary(model, ids, [modules[index] for index in measured]))
        check_evicted(model, facts)
        return facts


def _check_measured(layers: Sequence[LayerFacts], measured: Sequence[int]) -> None:
    """Raise RefusedError unless measured layers have the same heads, as a trace has one axis for them.

    Each layer must also see what its cache's owner sees, and of the measured ones those that read another's come last.
    """
    own = [layers[index] for index in measured]
    shapes = {(layer.heads, layer.kv_heads, layer.d_key, layer.d_value, layer.latent) for layer in own}
    if len(shapes) > 1:
        raise RefusedError("heads", f"has measured layers of {len(shapes)} shapes, in heads or widths, and not of one")
    for index, layer in enumerate(layers):
        if layer.owner is not None:
            owner = layers[layer.owner]
            if (layer.kind, layer.window, layer.kv_heads) != (owner.kind, owner.window, owner.kv_heads):
                raise RefusedError(
                    "cache", f"reads the entries of layer {layer.owner}, and does not see those that it sees", index
                )
    readers = [index for index in measured if layers[index].owner is not None]
    for index in measured:
        if readers and index > readers[0] and index not in readers:
            raise RefusedError("cache", f"fills a cache after layer {readers[0]}, which reads another's", index)
