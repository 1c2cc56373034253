"""Fitted and merged caches against the best kept sets of the same bytes that a search finds, on a sample of heads.

`compaction.py` holds its caches against `hindsight`, which ranks entries. Here entries are exchanged: how much more
does a cache move than the best set of as many bytes, at the first step, whose query the search knows and the cache does
not? All is isolated L1 in float64.

*Shared* sets are what a cache of the study can be: one for each key/value head, whose loss is the sum over the query
heads that read it. From the largest A ν of the query, and from the largest mean attention of the window, whose keys
fits keep, each kept entry in turn is exchanged for the evicted one that lowers the sum most, until none does; the
better end is the best set found. *Own* sets are those of `pk.search_kept_sets`, as many entries for each query head
apart: a key/value head that holds its query heads' sets takes up to so many times the bytes.

A set that was found is a set, so that the best there is loses at most as much: what is *worse* than the set found is
worse than the best there is, what is *better* than it is that of the found one alone. How far both ends of a head lie
apart is told; how far from the best there is nothing here proves (`regret.py` does, on prefixes of 64 tokens).

## How it is decided

Written before anything but `needle` prompts of 400 tokens was measured. Prompts, window and seed are those of
`compaction.py`, shares 5 and 20 % of the bytes. Of each prompt `pk.search_kept_sets` draws 6 query heads of all layers;
the key/value heads that they read are the sample, each once. A prompt's number is the mean over these of log L(cache) −
log L(best shared set found), a geometric mean of ratios. `matching` is *better* where the whole 95 % interval over
prompts lies below a ratio of 1, *worse* where above, else *undecided*; that it is better than the best kept set *holds*
where it is better at both shares, is *reversed* where it is worse at both, and *depends* otherwise. The other caches,
ratios of summed L, and own sets are shown and decide nothing. Heads whose best set loses nothing but rounding are left
out and counted.

    python studies/compaction_best.py --dataset multi_news --data-dir LONGBENCH --samples 12 --max-tokens 700
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import common
import numpy as np
import torch
from common import Floats, estimate, number_text, side_of
from compaction import METHODS, WINDOW, WORDS, compacted, geometric_interval, mean_attention, queries_of, read
from numpy.typing import NDArray
from scipy.spatial.distance import cdist
from torch import Tensor
from transformers import DynamicCache

import perturbkv as pk

SHARES = ("0.05", "0.2")
HEADS, SECONDS = 6, 600.0
"""Query heads of a prompt, and the most seconds of the search of each."""
CACHES = ("matching", "matching-values", "merge", "merge-count")
"""Caches of `compaction.py` that are fitted or merged by the window's queries."""
STARTS = ("hindsight", "attention-unpooled")
"""Sets from which entries are exchanged, of a key/value head and of a query head alike."""
LEAST_GAIN = 1e-12
"""Relative gain of an exchange below which it is rounding."""
ROUNDING = 1e-9
"""Share of the caches' largest L below which the best set's is rounding."""
Kept = NDArray[np.bool_]


@dataclass(frozen=True, eq=False)
class Readers:
    """The query heads that read one key/value head, at the first step: weights (head, entry), 𝒱 (head, entry, d)."""

    weights: Floats
    projected: Floats

    @cached_property
    def outputs(self) -> Floats:
        """(head, d) outputs with the full cache."""
        return np.asarray(np.einsum("he,hed->hd", self.weights, self.projected))

    @cached_property
    def contributions(self) -> Floats:
        """(head, entry, d) what a kept entry adds to S L's vector, A (o − 𝒱): L = ‖Σ N A (o − 𝒱)‖₁ / Σ N A."""
        return np.asarray(self.weights[..., None] * (self.outputs[:, None] - self.projected))

    def loss(self, kept: Kept) -> float:
        """Return the sum of L over the heads of a kept set."""
        moved = np.abs(self.contributions[:, kept].sum(axis=1)).sum(axis=-1)
        return float((moved / self.weights[:, kept].sum(axis=-1)).sum())

    def losses_after(self, kept: Kept, leaving: int) -> Floats:
        """Return (entry,) the sum of L after an entry was exchanged for each other one; infinite for kept ones."""
        rest = kept.copy()
        rest[leaving] = False
        losses = np.zeros(len(kept))
        for weights, contributions in zip(self.weights, self.contributions, strict=True):
            distances = cdist(-contributions[rest].sum(axis=0)[None], contributions, "cityblock")[0]
            losses += distances / (weights[rest].sum() + weights)
        losses[kept] = np.inf
        return losses


def exchanged(readers: Readers, start: Kept, free: Kept) -> float:
    """Return a set's loss after exchanges of kept `free` entries that lower it, until none does."""
    kept, best, places = start.copy(), readers.loss(start), np.flatnonzero(start & free).tolist()
    turn = unchanged = 0
    while unchanged < len(places):
        slot = turn % len(places)
        losses = readers.losses_after(kept, places[slot])
        entering = int(np.argmin(losses))
        turn, unchanged = turn + 1, unchanged + 1
        if losses[entering] < best * (1 - LEAST_GAIN):
            kept[places[slot]], kept[entering] = False, True
            places[slot], unchanged, best = entering, 0, readers.loss(kept)
    return best


@dataclass(frozen=True)
class FirstStep:
    """A prompt's first step from the full cache: queries (head, 1, d) and the cache's layers, the step's entry last."""

    model: Any
    queries: Sequence[Tensor]
    layers: Sequence[Any]

    @classmethod
    def read(cls, model: Any, input_ids: Tensor) -> FirstStep:
        """Read the prompt and decode the model's own choice."""
        cache = DynamicCache()
        token = model(input_ids, None, None, cache, logits_to_keep=1).logits[:, -1:].argmax(dim=-1)
        with queries_of(model) as queries:
            model(token, None, None, cache, logits_to_keep=1)
        return cls(model, queries, cache.layers)

    @property
    def grouped(self) -> int:
        """Query heads that read one key/value head."""
        return len(self.queries[0]) // int(self.layers[0].keys.shape[1])

    def attended(
        self, layer: int, kv_head: int, keys: Tensor, values: Tensor, bias: Tensor | None = None
    ) -> tuple[Floats, Floats]:
        """Return weights (head, entry) and 𝒱 (head, entry, d) of a key/value head's readers over given entries."""
        attention, heads = self.model.model.layers[layer].self_attn, slice(kv_head * self.grouped, None)
        queries = self.queries[layer][heads][: self.grouped, 0].double()
        logits = queries @ keys.double().T * float(attention.scaling)
        weights = (logits if bias is None else logits + bias.double()).softmax(dim=-1)
        slices = attention.o_proj.weight.double().T.view(-1, values.shape[-1], attention.o_proj.weight.shape[0])
        return weights.numpy(), (values.double() @ slices[heads][: self.grouped]).numpy()

    def readers(self, layer: int, kv_head: int) -> Readers:
        """Return the readers of a key/value head of the full cache."""
        full = self.layers[layer]
        return Readers(*self.attended(layer, kv_head, full.keys[0, kv_head], full.values[0, kv_head]))

    def losses_of(self, own: Sequence[Any], layer: int, kv_head: int, outputs: Floats) -> Floats:
        """Return (head,) L of a key/value head's readers over keys, values and biases that stand for the prompt's."""
        full, (own_keys, own_values, bias) = self.layers[layer], own
        keys, values = (
            torch.cat([one[kv_head], every[0, kv_head, -1:].double()])
            for one, every in ((own_keys, full.keys), (own_values, full.values))
        )
        bias = None if bias is None else torch.nn.functional.pad(bias[kv_head], (0, 1))
        weights, projected = self.attended(layer, kv_head, keys, values, bias)
        return np.asarray(np.abs(np.einsum("he,hed->hd", weights, projected) - outputs).sum(axis=-1))


def starts(readers: Readers, attention: Floats, entries: int) -> list[Kept]:
    """Return the sets of so many entries of a prompt, and the step's own, that are largest in each way of STARTS."""
    before = readers.weights.shape[1] - 1 - WINDOW
    norms = np.abs(readers.projected).sum(axis=-1)
    found = []
    for scores in ((readers.weights * norms).sum(axis=0)[:before], attention):
        kept = np.arange(readers.weights.shape[1]) >= before
        kept[np.argsort(-scores, kind="stable")[: entries - WINDOW]] = True
        found.append(kept)
    return found


@torch.no_grad()
def search_prompt(model: Any, prompt: Any, drawn: Sequence[Mapping[str, Any]]) -> Iterator[dict[str, Any]]:
    """Yield an object per share and key/value head of the query heads that were drawn: its best set, and all caches.

    `drawn` are the query heads and their own sets, as `pk.search_kept_sets` found them.
    """
    ids = torch.tensor([list(prompt.token_ids)])
    reading, step, n = read(model, ids, False), FirstStep.read(model, ids), ids.shape[1]
    free = np.arange(n + 1) < n - WINDOW
    own: dict[tuple[str, int, int], list[Mapping[str, Any]]] = {}
    for row in drawn:
        own.setdefault((row["budget"], row["layer"], row["head"] // step.grouped), []).append(row)
    for (budget, layer, kv_head), rows in own.items():
        entries, readers = rows[0]["kept"] - 1, step.readers(layer, kv_head)
        keys, values = (full[0, :, :n].double() for full in (step.layers[layer].keys, step.layers[layer].values))
        queries = reading.queries[layer]
        attention = mean_attention(queries @ keys.mT * reading.scale, reading)[kv_head].numpy()
        begun = starts(readers, attention, entries)
        ends = [exchanged(readers, kept, free) for kept in begun]
        caches = {name: compacted(keys, values, queries, reading, entries, METHODS[name]["fits"]) for name in CACHES}
        yield {
            "budget": budget, "layer": layer, "kv_head": kv_head, "entries": entries,
            "held": {name: cache[0].shape[1] for name, cache in caches.items()},
            "starts": dict(zip(STARTS, map(readers.loss, begun), strict=True)),
            "ends": dict(zip(STARTS, ends, strict=True)),
            "caches": {name: step.losses_of(cache, layer, kv_head, readers.outputs).tolist()
                       for name, cache in caches.items()},
            "own": {str(row["head"] % step.grouped): row["best"] for row in rows},
            "settled": all(row["settled"] for row in rows),
        }  # fmt: skip


def search(asked: argparse.Namespace) -> list[Any]:
    """Search what the output folder lacks, and return an object per prompt."""
    model = common.load_model(asked)
    texts = common.prompts(asked, model)
    configs = pk.grid(asked.budget or (["0.2"] if asked.short else SHARES), selection=STARTS, window=WINDOW)
    own, path = asked.output / "searches.jsonl", asked.output / "best.jsonl"
    asked.written += [own, path]
    found = pk.search_kept_sets(model, texts, configs, heads=2 if asked.short else HEADS, proven=0, seconds=SECONDS,
                                seed=asked.seed, path=own)  # fmt: skip
    done = {row["sample"]: row for row in finished(path)} if path.exists() else {}
    for prompt, searched in zip(texts, found.rows, strict=True):
        if (name := searched["sample"]) not in done:
            done[name] = {"sample": name, "heads": list(search_prompt(model.model, prompt, searched["heads"]))}
            with path.open("a") as lines:
                lines.write(json.dumps(common.to_json(done[name])) + "\n")
    return [done[row["sample"]] for row in found.rows]


def finished(path: Path) -> list[Any]:
    """Return the prompts of finished searches. Raises PerturbkvError for a file that holds none."""
    try:
        rows = [json.loads(line) for line in path.read_text().splitlines()]
        return [row for row in rows if row["heads"][0]["ends"] and row["sample"]]
    except (OSError, ValueError, KeyError, TypeError, IndexError):
        raise pk.PerturbkvError(
            f"expected a best.jsonl of finished searches at {path}, got another file or none"
        ) from None


def summary(samples: Sequence[Any], budget: str) -> dict[str, Any]:
    """Return the numbers of a share: each cache's ratio to the best sets, over prompts, and how sure these are."""
    each = [[row for row in sample["heads"] if row["budget"] == budget] for sample in samples]
    lossy = [[row for row in rows if min(row["ends"].values()) > ROUNDING * largest(row)] for rows in each]
    every = [row for rows in lossy for row in rows]
    caches = []
    for name in (*CACHES, *STARTS):
        shared = [[(total(row, name), min(row["ends"].values())) for row in rows] for rows in lossy]
        alone = [[(row["caches"][name][int(head)], best) for row in rows for head, best in row["own"].items()]
                 for rows in lossy] if name in CACHES else None  # fmt: skip
        caches.append({"cache": name, **ratios("shared", shared), **(ratios("own", alone) if alone else {})})
    ends = np.array([list(row["ends"].values()) for row in every])
    return {
        "share": budget, "samples": len(samples), "heads": len(every), "left_out": sum(map(len, each)) - len(every),
        "query_heads": sum(len(row["own"]) for row in every), "settled": all(row["settled"] for row in every),
        "ends_apart_median": float(np.median(ends.max(axis=1) / ends.min(axis=1))),
        "ends_apart_most": float((ends.max(axis=1) / ends.min(axis=1)).max()),
        "caches": caches, "word": WORDS[side_of(caches[0]["shared_interval"], 1)],
    }  # fmt: skip


def total(row: Mapping[str, Any], name: str) -> float:
    """Return the loss of a cache, or of a set that exchanges begin with, summed over a key/value head's readers."""
    return float(row["starts"][name] if name in row["starts"] else sum(row["caches"][name]))


def largest(row: Mapping[str, Any]) -> float:
    """Return the largest loss of a key/value head's caches."""
    return max(total(row, name) for name in row["caches"])


def ratios(name: str, samples: Sequence[Sequence[tuple[float, float]]]) -> dict[str, Any]:
    """Return the geometric mean of ratios (cache, best) over heads, then prompts, and that of ratios of sums."""
    known = [np.array(pairs) for pairs in samples if pairs]
    means = np.array([np.log(pairs[:, 0] / pairs[:, 1]).mean() for pairs in known])
    sums = np.array([np.log(pairs[:, 0].sum() / pairs[:, 1].sum()) for pairs in known])
    every = np.concatenate(known)
    return {
        **estimate(name, (float(np.exp(means.mean())), geometric_interval(means))),
        **estimate(f"{name}_sums", (float(np.exp(sums.mean())), geometric_interval(sums))),
        f"{name}_below": float((every[:, 0] < every[:, 1]).mean()),
    }


def verdict(words: Sequence[str]) -> str:
    """Return what the words of all shares decide."""
    alike = set(words)
    return {"better": "holds", "worse": "reversed"}.get(words[0], "depends") if len(alike) == 1 else "depends"


def table(parts: Sequence[Mapping[str, Any]]) -> Iterator[Sequence[str]]:
    """Return the rows: a cache's ratios at every share."""
    for numbers in zip(*(part["caches"] for part in parts), strict=True):
        for name, told in (("shared", "shared"), ("shared_sums", "shared, of sums"), ("own", "own")):
            if name in numbers[0]:
                yield [numbers[0]["cache"], told, *(number_text(row, name) for row in numbers)]


def study(asked: argparse.Namespace) -> None:
    """Search, or read finished searches; print the tables and write the document."""
    samples = finished(Path(asked.trace[0])) if asked.trace else search(asked)
    parts = [summary(samples, budget) for budget in dict.fromkeys(row["budget"] for row in samples[0]["heads"])]
    heads = ["cache", "best sets", *(f"{100 * float(part['share']):g} %" for part in parts)]
    print(f"\nL over that of the best sets found, n = {len(samples)} prompts\n\n{common.markdown(heads, table(parts))}")
    common.show("Searches", [{name: part[name] for name in part if name != "caches"} for part in parts])
    decided = verdict([part["word"] for part in parts])
    print(f"\nmatching < best kept set: {decided}")
    common.save(asked, {"parts": parts, "verdict": decided})


if __name__ == "__main__":
    common.main(study, common.options(__doc__ or "", about="best.jsonl of finished searches"))
