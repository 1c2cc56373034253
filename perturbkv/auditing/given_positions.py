"""A file of kept positions against the masked reference: its logits alone are compared, nothing else is there."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from jaxtyping import Int
from torch import Tensor

from perturbkv.audit_trace import Audited, Decoded, Entries
from perturbkv.auditing import reference
from perturbkv.auditing.observing import Seen
from perturbkv.auditing.positions_file import KeptFile
from perturbkv.auditing.situations import Situation
from perturbkv.cache.foreign import Layers
from perturbkv.datasets.encode import Prompt
from perturbkv.errors import ConfigError
from perturbkv.models.adapter import Adapter


def prompt_of(file: KeptFile, prompts: Sequence[Prompt]) -> Prompt:
    """The file's own prompt, or the only one that was given. Raises ConfigError where it is not clear which."""
    if file.token_ids:
        return Prompt("file", file.token_ids, 0)
    if len(prompts) != 1:
        msg = (
            f"expected one prompt for {file.name}, which holds no token_ids, got {len(prompts)}; give --samples 1, or "
            "put token_ids into the file"
        )
        raise ConfigError(msg)
    return prompts[0]


def audited(adapter: Adapter, ids: Int[Tensor, " token"], file: KeptFile, sample: str) -> Audited:
    """What the file keeps, and how far its logits lie from the masked reference's.

    Raises UnreadableError where the positions cannot be of this model and prompt.
    """
    sizes = (adapter.kv_heads, adapter.heads)
    file.check(len(adapter.layers), sizes, len(ids), int(adapter.config.vocab_size))
    steps = 0 if file.logits is None else len(file.logits)
    decoded = _decoded(adapter, ids, file, steps) if steps else None
    return Audited(
        sample, "single", 0, len(ids), 0, (1,) * steps, entries=_entries(file, len(adapter.layers)), decoded=decoded
    )


def _entries(file: KeptFile, layers: int) -> Entries:
    """Positions alone: nothing of the entries themselves is known."""
    shape = (layers, len(file.kept[0]))
    none, zero = np.zeros(shape, dtype=np.int64), np.zeros(shape)
    return Entries(
        kept=file.kept, padded=none, strangers=none, duplicates=none, unordered=none > 0, key_distance=zero,
        value_distance=zero, key_floor=np.zeros(layers), value_floor=np.zeros(layers),
        altered=tuple(("",) * shape[1] for _ in range(layers)),
    )  # fmt: skip


def _decoded(adapter: Adapter, ids: Int[Tensor, " token"], file: KeptFile, steps: int) -> Decoded:
    """Logits against the reference's; heads and layers were not seen."""
    tokens = torch.tensor(file.tokens[:steps], device=adapter.device) if file.tokens else None
    fed = reference.greedy(adapter, ids, steps) if tokens is None else tokens
    single = Situation("single", ids.unsqueeze(0), torch.ones_like(ids).unsqueeze(0), torch.split(fed, 1))
    full = reference.read(adapter, single)
    seen = list(reference.decode(adapter, full, single, _masks(file, single, full)))
    floors = reference.floors(adapter, full, single)
    theirs = [torch.as_tensor(row, device=adapter.device) for row in file.logits] if file.logits is not None else []
    return Decoded(
        head=np.full((steps, len(full), adapter.heads), np.nan), head_floor=floors.head.numpy(),
        hidden=np.full((steps, len(full)), np.nan), hidden_floor=floors.hidden.numpy(),
        logits=np.array([_apart(own, one) for own, one in zip(theirs, seen, strict=True)]),
        logits_floor=float(floors.logits),
        agrees=np.array([
            bool(own.argmax() == one.logits[0, -1].argmax()) for own, one in zip(theirs, seen, strict=True)
        ]),
        behind=np.zeros(steps),
    )  # fmt: skip


def _apart(own: Tensor, seen: Seen) -> float:
    return float(reference.logits_apart(own.unsqueeze(0), seen.logits[0]))


def _masks(file: KeptFile, single: Situation, full: Layers) -> list[list[Tensor]]:
    """Per pass and layer (1, kept_head, entry): the file's positions, and what was decoded since."""
    found = []
    for step in range(len(single.chunks)):
        layers = []
        for sets, (keys, _) in zip(file.kept, full, strict=True):
            mask = torch.zeros(1, len(sets), keys.shape[2] + step, dtype=torch.bool, device=keys.device)
            mask[..., keys.shape[2] :] = True
            for row, places in zip(mask[0], sets, strict=True):
                row[torch.from_numpy(places).to(keys.device)] = True
            layers.append(mask)
        found.append(layers)
    return found
