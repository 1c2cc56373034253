"""TriAttention (Mao et al., 2026, https://arxiv.org/abs/2604.04921; code: WeianMao/triattention): usual queries.

Queries before rotation lie around a centre of their head, whatever the text. With c the centre, the mean of a model's
queries before rotation, and m_f = E ‖q_f‖ for each pair f of rotary components, the score of an entry is

    s_j = mean over t of (R(n + t) c) · k_j + Σ_f (m_f − ‖c_f‖) σ ‖k_jf‖,  t = 1, 2, 4, … `farthest`,

k_j the cached, rotated key: Σ_f σ² ‖c_f‖ ‖k_f‖ cos((n + t − j) ω_f + φ_f) in the paper's words, and how far queries
stray from their centre. σ is the factor that cosine and sine carry (YaRN's). A row per query head; a kept set of
several takes the largest of theirs, with `normalise` after each row was given mean 0 and deviation 1 over the entries
before the window. `farthest` = 65536 and `normalise` are as released. Components that are not rotary have no
distance and no length beside the mean.

Centres come from a file that `studies/triattention.py` makes of a model and prompts, `{"layer-head": {"mean": [d_key],
"size": [rotary pairs]}}`. Without one they are those of the prompt's own queries, and a cache is compressed once,
at its end; with a file also while it is decoded from, n then being the number of tokens read. A score may be below 0.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import torch
from jaxtyping import Float
from torch import Tensor

from perturbkv.configs.option import is_number, option
from perturbkv.errors import ConfigError
from perturbkv.scoring.layer_view import LayerView, Rotation
from perturbkv.scoring.score import Score
from perturbkv.theory import WORK
from perturbkv.user_files import FileKind

_FILE = FileKind("query centres as JSON", ConfigError, hint="studies/triattention.py makes them")
Centre = tuple[tuple[float, ...], tuple[float, ...]]
"""A query head's mean query before rotation, and its mean length in each rotary pair."""


@dataclass(frozen=True)
class TriAttention(Score):
    """Logit of the head's mean query, averaged over later positions, and of what queries have beside their mean."""

    name: ClassVar[str] = "triattention"
    summary: ClassVar[str] = "what the head's mean query gives a key from later positions, by calibrated centres"
    paper: ClassVar[str] = "https://arxiv.org/abs/2604.04921"
    needs: ClassVar[tuple[str, ...]] = ("keys", "unrotated", "rotations")
    signed: ClassVar[bool] = True
    whole_layer: ClassVar[bool] = True
    reduces: ClassVar[str] = "max"
    farthest: int = option(
        65_536, "positions ahead of the prompt up to which 1, 2, 4, … are averaged", low=1, high=2**20
    )
    normalise: bool = option(True, "whether each head's scores are normalised before a group's largest is taken")
    file: str = option("", "JSON of the model's query centres; without it those of the prompt's own queries", path=True)

    def __post_init__(self) -> None:
        if self.file:
            read_centres(self.file)

    @property
    def needs_prompt(self) -> bool:
        """True without a file of centres: those are then of the prompt's own queries."""
        return not self.file

    def score(self, layer: LayerView) -> Float[Tensor, "rows prefix"]:
        """Return the mean logit of the centre from later positions, and of what queries stray, per query head."""
        ahead = [1 << power for power in range(self.farthest.bit_length())]
        rotations = [layer.rotations(range(layer.position + t, layer.position + t + 1)) for t in ahead]
        cosine, sine = (torch.cat([getattr(one, part) for one in rotations]) for part in ("cosine", "sine"))
        keys = layer.keys[:, : layer.prefix]
        keys = keys.to(torch.promote_types(keys.dtype, torch.float32))
        rotary, half = cosine.shape[-1], cosine.shape[-1] // 2
        mean, size = self._centres(layer, half)
        turned = mean @ Rotation(cosine, sine).mean(keys.shape[-1]).T
        stretch = torch.hypot(cosine[0, :half].to(WORK), sine[0, :half].to(WORK))
        strayed = (size - torch.hypot(mean[:, :half], mean[:, half:rotary])) * stretch
        lengths = torch.hypot(keys[..., :half], keys[..., half:rotary])
        found = _by_group(turned, keys) + _by_group(strayed, lengths)
        if self.normalise and layer.prefix:
            deviation = found.std(dim=-1, keepdim=True, correction=0).clamp(min=1e-6)
            found = (found - found.mean(dim=-1, keepdim=True)) / deviation
        return found

    def _centres(self, layer: LayerView, half: int) -> tuple[Float[Tensor, "head d_key"], Float[Tensor, "head pair"]]:
        """Return the mean query of each head before rotation, and its mean length in each rotary pair.

        Raises ConfigError for a file of another model.
        """
        if not self.file:
            queries = layer.unrotated
            lengths = torch.hypot(queries[..., :half], queries[..., half : 2 * half])
            return queries.mean(dim=1, dtype=WORK), lengths.mean(dim=1, dtype=WORK)
        centres = read_centres(self.file)
        names = [f"{layer.layer}-{head}" for head in range(layer.heads)]
        d_key = layer.keys.shape[-1]
        if len(centres) != layer.layers * layer.heads or any(
            name not in centres or (len(centres[name][0]), len(centres[name][1])) != (d_key, half) for name in names
        ):
            raise ConfigError(
                f"expected query centres of {layer.layers} layers × {layer.heads} heads in {self.file}, each of "
                f"{d_key} components and {half} rotary pairs, got {len(centres)} of another model; make this model's: "
                "studies/triattention.py"
            )
        of_heads = [[centres[name][part] for name in names] for part in range(2)]
        mean, size = (torch.tensor(rows, dtype=WORK).to(layer.keys.device) for rows in of_heads)
        return mean, size


def _by_group(
    rows: Float[Tensor, "head component"], columns: Float[Tensor, "kv_head key component"]
) -> Float[Tensor, "head key"]:
    """Return the products of each query head's row with the columns of its key/value head."""
    grouped = rows.to(columns.dtype).view(len(columns), -1, rows.shape[-1])
    return (grouped @ columns.mT).flatten(0, 1).to(WORK)


def read_centres(path: str) -> Mapping[str, Centre]:
    """Return "layer-head" -> centre of the query heads in a file. Raises ConfigError for any other content."""
    _FILE.check(Path(path))
    stamp = Path(path).stat()
    return _read(path, (stamp.st_mtime_ns, stamp.st_size))


@functools.cache
def _read(path: str, stamp: tuple[int, int]) -> Mapping[str, Centre]:
    """Return the centres in a file, read anew when `stamp`, the file's time and size, changes."""
    document = _FILE.read_json(Path(path))
    if not isinstance(document, dict) or not document or not all(map(_is_centre, document.values())):
        raise _FILE.refusal(Path(path), 'JSON that is not {"layer-head": {"mean": [numbers], "size": [numbers]}}')
    return {name: (tuple(each["mean"]), tuple(each["size"])) for name, each in document.items()}


def _is_centre(value: Any) -> bool:
    """Return whether a JSON value is the centre of a head: two lists of finite numbers."""
    return (
        isinstance(value, dict)
        and value.keys() == {"mean", "size"}
        and all(isinstance(part, list) and part and all(map(is_number, part)) for part in value.values())
    )
