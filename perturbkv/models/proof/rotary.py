"""Whose rotations keys and queries have, found by reading a text at other positions."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from perturbkv.models.attention_facts import Rotary
from perturbkv.models.interface import (
    AttentionFunction,
    implementation,
    intercept,
    text_config,
)
from perturbkv.models.proof.calls import ERRORS, read_tokens


def find_rotary(model: Any, ids: Tensor, attentions: Sequence[nn.Module]) -> Rotary:
    """Return the module whose rotations all given attentions' keys and queries have; without a path where none has.

    A text that is read further back has keys and queries which are equal when they are rotated back.
    """
    paths = {name.rpartition(".")[0] for name, _ in model.named_buffers() if name.endswith("inv_freq")}
    limit = getattr(text_config(model), "max_position_embeddings", None) or 0
    shift = min(100, limit - ids.shape[1])
    if len(paths) != 1 or shift < 1 or "position_ids" not in inspect.signature(model.forward).parameters:
        return Rotary()
    path = paths.pop()
    near, far = (_rotated(model, path, ids, begin, attentions) for begin in (0, shift))
    bound = 20 * ERRORS[model.dtype]
    for arguments in [given for given in near.rotations if given in far.rotations and near.fits(given)]:
        pairs = zip(near.rotated_back(arguments), far.rotated_back(arguments), strict=True)
        if all(float((one - other).norm()) <= bound * float(one.norm()) for one, other in pairs):
            return Rotary(path, arguments)
    return Rotary()


@dataclass
class _Rotated:
    """Queries and keys (batch, head, token, d_key) of a text, and the rotations that a rotary module gave for it.

    `rotations` maps the module's further arguments to cosines and sines (batch, token, rotary).
    """

    vectors: list[Tensor] = field(default_factory=list)
    rotations: dict[tuple[str, ...], tuple[Tensor, Tensor]] = field(default_factory=dict)

    def add(self, module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        """Record the output of a rotary module that is a pair of tensors: a forward hook."""
        if isinstance(output, tuple) and len(output) == 2:
            texts = [value for value in (*args, *kwargs.values()) if isinstance(value, str)]
            self.rotations[tuple(texts)] = output

    def pairs(self, arguments: tuple[str, ...]) -> int:
        """Return the number of pairs of components that are rotated."""
        cosine = self.rotations[arguments][0]
        twice = torch.equal(*cosine.chunk(2, dim=-1))  # most modules give each pair's angle twice
        return int(cosine.shape[-1]) // (2 if twice else 1)

    def fits(self, arguments: tuple[str, ...]) -> bool:
        """Return whether all vectors have as many components as are rotated."""
        return all(vectors.shape[-1] >= 2 * self.pairs(arguments) for vectors in self.vectors)

    def rotated_back(self, arguments: tuple[str, ...]) -> Iterator[Tensor]:
        """Yield all vectors rotated back, pairs half the rotary width apart, in float64."""
        cosine, sine = (part.double().unsqueeze(1) for part in self.rotations[arguments])
        pairs = self.pairs(arguments)
        size = 2 * pairs
        for vectors in self.vectors:
            one, other = vectors[..., :size].double().chunk(2, dim=-1)
            cos, sin = (part[..., :pairs].to(vectors.device) for part in (cosine, sine))
            yield torch.cat([one * cos + other * sin, other * cos - one * sin, vectors[..., size:].double()], dim=-1)


def _rotated(model: Any, path: str, ids: Tensor, begin: int, attentions: Sequence[nn.Module]) -> _Rotated:
    """Read a text whose first token has the position `begin`; return what its attentions were given."""
    found = _Rotated()

    def attend(stock: AttentionFunction, module: nn.Module, args: Any, kwargs: Any) -> Any:
        found.vectors += args[:2]
        return stock(module, *args, **kwargs)

    hook = model.get_submodule(path).register_forward_hook(found.add, with_kwargs=True)
    try:
        with intercept(implementation(model), attentions, attend):
            read_tokens(
                model, ids, position_ids=torch.arange(begin, begin + ids.shape[1], device=ids.device).unsqueeze(0)
            )
    finally:
        hook.remove()
    return found
