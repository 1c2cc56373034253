"""Layouts of the tensors that engines keep keys and values in, written as axes: `kv block token head dim`.

The axes are the block, the token inside it, the key/value head, the component (`dim`), and `kv`, which holds keys
first where both are in one tensor. Axes in parentheses are one dimension of the tensor; where all are, it may have any
shape. `|` separates a layout of keys from another one of values. Where blocks hold one token, there is no axis `token`.
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Shaped
from torch import Tensor

from perturbkv.errors import ConfigError

KV, BLOCK, TOKEN, HEAD, DIM = "kv", "block", "token", "head", "dim"
_AXES = (KV, BLOCK, TOKEN, HEAD, DIM)
_GROUP = re.compile(r"\(([^()]*)\)|(\S+)")

NAMED: Mapping[str, str] = {
    "vllm": "block head token (kv dim)",
    "vllm-nhd": "block token head (kv dim)",
    "vllm-cpu": "(block head kv dim token) | (block head kv token dim)",
    "flash-attn": "kv block token head dim",
    "flashinfer": "block kv token head dim",
    "flashinfer-hnd": "block kv head token dim",
    "tensorrt-llm": "block kv token head dim",
    "lmcache": "block kv token (head dim)",
    "sglang": "block head dim",
}
"""Name of an engine's layout -> its axes."""

Groups = tuple[tuple[str, ...], ...]
"""Per dimension of a tensor, the axes that it is made of."""


Sizes = Mapping[str, int]
"""Axis other than `block` -> its size."""


@dataclass(frozen=True)
class Layout:
    """A layout: dimensions of the tensor of keys and of that of values, which may be one tensor.

    Example:
        >>> str(Layout.parse("block  kv (head token dim)"))
        'block kv (head token dim)'
    """

    keys: Groups
    values: Groups

    @classmethod
    def parse(cls, text: str) -> Layout:
        """Return the layout of a text: axes, or a name of `NAMED`. Raises ConfigError for any other text."""
        parts = [_parse_groups(part, text) for part in NAMED.get(text, text).split("|")]
        if len(parts) > 2 or len({KV in sum(part, ()) for part in parts}) > 1:
            raise ConfigError(
                f"expected a layout of keys and, after |, of values, both with {KV} or none, got '{text}'"
            )
        return cls(parts[0], parts[-1])

    @property
    def in_one_tensor(self) -> bool:
        """True if keys and values are in one tensor."""
        return KV in sum(self.keys, ())

    def __str__(self) -> str:
        keys, values = (_format(groups) for groups in (self.keys, self.values))
        return keys if keys == values else f"{keys} | {values}"

    def split(
        self, tensors: Sequence[Tensor], sizes: Sizes
    ) -> tuple[Shaped[Tensor, "block token head dim"], Shaped[Tensor, "block token head dim"]]:
        """Return keys and values, as views where possible, of one tensor of both or of a tensor of each.

        Raises ConfigError where a tensor's shape does not fit the layout.
        """
        if self.in_one_tensor:
            return arrange(tensors[0], self.keys, sizes)[0], arrange(tensors[0], self.values, sizes)[1]
        return arrange(tensors[0], self.keys, sizes), arrange(tensors[1], self.values, sizes)


def _parse_groups(text: str, whole: str) -> Groups:
    """Return the dimensions that a text writes. Raises ConfigError for unknown, missing and repeated axes.

    The text is all or a part of the layout `whole`, which messages name.
    """
    groups = tuple(
        tuple((inside or axis).split()) for inside, axis in (found.groups() for found in _GROUP.finditer(text))
    )
    axes = sum(groups, ())
    unknown = [axis for axis in axes if axis not in _AXES]
    missing = [axis for axis in (BLOCK, HEAD, DIM) if axis not in axes]
    if unknown or missing or len(set(axes)) < len(axes) or not all(groups):
        what = f"unknown: {unknown[0]}" if unknown else f"no {missing[0]}" if missing else "an axis twice, or none"
        axes_text = f"the axes {', '.join(_AXES)}, with spaces between them"
        raise ConfigError(f"expected a layout of {axes_text}, or one of {', '.join(NAMED)}, got '{whole}' ({what})")
    return groups


def _format(groups: Groups) -> str:
    """Return the text of dimensions."""
    return " ".join(group[0] if len(group) == 1 else f"({' '.join(group)})" for group in groups)


def arrange(tensor: Tensor, groups: Groups, sizes: Sizes) -> Shaped[Tensor, "*kv block token head dim"]:
    """Return a tensor with axes kv (if it has it), block, token, head, dim. Raises ConfigError if it does not fit.

    A layout of one dimension fits a tensor of any shape with as many numbers.
    """
    axes = sum(groups, ())
    if len(groups) == 1:
        tensor = tensor.flatten()
    if not fits(tensor.shape, groups, sizes):
        known = ", ".join(f"{axis} {sizes[axis]}" for axis in axes if axis != BLOCK)
        raise ConfigError(
            f"expected a tensor of layout '{_format(groups)}' with {known}, got the shape {tuple(tensor.shape)}"
        )
    blocks = tensor.numel() // math.prod(sizes[axis] for axis in axes if axis != BLOCK)
    whole = tensor.reshape([blocks if axis == BLOCK else sizes[axis] for axis in axes])
    if TOKEN not in axes:
        whole, axes = whole.unsqueeze(-1), (*axes, TOKEN)
    return whole.permute([axes.index(axis) for axis in _AXES if axis in axes])


def fits(shape: Sequence[int], groups: Groups, sizes: Sizes) -> bool:
    """Return whether a tensor's shape fits the dimensions; there may be any number of blocks.

    One dimension fits any shape with as many numbers.
    """
    shape = shape if len(groups) > 1 else (math.prod(shape),)
    if len(shape) != len(groups) or (sizes[TOKEN] != 1 and TOKEN not in sum(groups, ())):
        return False
    for size, group in zip(shape, groups, strict=True):
        expected = math.prod(sizes[axis] for axis in group if axis != BLOCK)
        if size % expected if BLOCK in group else size != expected:
            return False
    return True


def candidates(shape: Sequence[int], sizes: Sizes, in_one_tensor: bool) -> Iterator[Groups]:
    """Yield all dimensions that fit a tensor's shape, then those that fit its numbers as one dimension.

    Of several that read every number as the same component of the same entry, the first is yielded.
    """
    axes = [axis for axis in _AXES if (axis != KV or in_one_tensor) and (axis != TOKEN or sizes[TOKEN] > 1)]
    blank, seen = torch.empty(tuple(shape), device="meta"), set()
    orders = list(itertools.permutations(axes))
    in_shape = (
        tuple(order[first:last] for first, last in itertools.pairwise((0, *cuts, len(order))))
        for order in orders
        for cuts in itertools.combinations(range(1, len(order)), len(shape) - 1)
    )
    for groups in itertools.chain(in_shape, ((order,) for order in orders)):
        if not fits(shape, groups, sizes):
            continue
        view = arrange(blank, groups, sizes)  # without numbers: its strides show the order
        strides = tuple(stride if size > 1 else 0 for stride, size in zip(view.stride(), view.shape, strict=True))
        if (key := (tuple(view.shape), strides)) not in seen:
            seen.add(key)
            yield groups


def reorderings(
    groups: Groups, keys: Shaped[Tensor, "token head dim"], values: Shaped[Tensor, "token head dim"]
) -> Iterator[tuple[str, Tensor, Tensor]]:
    """Yield (axes in words, keys, values (token, head, dim)) of one block, were its numbers written in another order.

    `keys` and `values` are the block as it was read, in the dimensions `groups` of keys.
    """
    names = (TOKEN, HEAD, DIM)
    present = [axis for axis in sum(groups, ()) if axis in names]
    present += [axis for axis in names if axis not in present]
    sizes = dict(zip(names, keys.shape, strict=True))
    to_stored = [names.index(axis) for axis in present]
    for order in itertools.permutations(names):
        if list(order) == present:
            continue
        shape, to_names = [sizes[axis] for axis in order], [order.index(axis) for axis in names]
        both = (part.permute(to_stored).reshape(shape).permute(to_names) for part in (keys, values))
        yield " ".join(order), *both  # type: ignore[misc]
