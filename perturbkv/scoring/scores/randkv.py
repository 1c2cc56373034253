"""RandKV (https://arxiv.org/abs/2609.03430; package randkv 0.1.0): of what a model generated, any entries stay.

Made for a cache that is compressed while a model decodes: `randkv(keep=prompt)`. The prompt stays whole, the latest
entries stay (the window; randkv's `buffer_size`, 64, is `--window 64`), and of the entries between as many as the
budget leaves, drawn for each key/value head by itself. `prompt` is how many entries the prompt has, which `keep=prompt`
says by itself; with `prompt=0` all entries before the window are drawn from. A budget of b entries is randkv's `budget`
and `buffer_size` together.

The draws are randkv's, of the request `sample` and eviction 0 (the id of a sample that is compressed while decoding
holds the number of generated tokens), so that both keep the same entries. Where randkv takes k of more than about
3k + 21 entries, or up to 5 of more than 21, Python's `sample` draws in another way: the law is the same, every set of k
as likely as any other, but not the set. `random` has this law too, behind `--protect-first` entries, and numbers of its
own.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from random import Random
from typing import ClassVar

import torch
from jaxtyping import Float
from torch import Tensor

from perturbkv.configs.option import option
from perturbkv.scoring.layer_view import LayerView
from perturbkv.scoring.score import Score
from perturbkv.theory import WORK


@dataclass(frozen=True)
class RandKV(Score):
    """Place in a random order of the entries behind the prompt, per key/value head."""

    name: ClassVar[str] = "randkv"
    summary: ClassVar[str] = "any entries, drawn by head; with keep=prompt any of what was generated"
    paper: ClassVar[str] = "https://arxiv.org/abs/2609.03430"
    needs: ClassVar[tuple[str, ...]] = ()
    by_place: ClassVar[tuple[str, ...]] = ("prompt",)
    whole_layer: ClassVar[bool] = True
    prompt: int = option(0, "first entries that stay: as many as the prompt has")
    seed: int = option(0, "of the random numbers")

    @property
    def first_entries(self) -> int:
        """Number of first entries (the prompt's) that are always kept."""
        return self.prompt

    def score(self, layer: LayerView) -> Float[Tensor, "rows prefix"]:
        """Return the share of entries drawn no earlier than the entry, per key/value head; 0 for the prompt."""
        scores = torch.zeros(layer.kv_heads, layer.prefix, dtype=WORK)
        count = max(0, layer.prefix - self.prompt)
        for head in range(layer.kv_heads):
            drawn = self._generator(layer, head).sample(range(count), count)
            scores[head, [self.prompt + place for place in drawn]] = torch.arange(count, 0, -1, dtype=WORK) / count
        return scores

    def _generator(self, layer: LayerView, head: int) -> Random:
        """Return the generator of random numbers of a key/value head, seeded as randkv's of eviction 0."""
        words = (str(self.seed), "str", layer.sample, "0", str(layer.layer), str(head))
        digest = hashlib.blake2b("\x1f".join(words).encode(), digest_size=16).digest()
        return Random(int.from_bytes(digest, "big"))
