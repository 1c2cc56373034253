"""The query centres that `triattention(file=…)` reads, of a model and prompts.

`python studies/triattention.py --model MODEL --dataset DATA -o FOLDER` reads each prompt once and writes
FOLDER/centres.json, `{"layer-head": {"mean": […], "size": […]}}`: of each query head the mean query before rotation,
over all tokens of all prompts, and the mean length of queries in each pair of rotary components. It prints how far
centres tell queries: ‖mean‖ over the mean length, pair by pair, as a mean over pairs, heads and layers; 1 where all
queries are one.

Queries before rotation take the layers of a prefill, which no trace holds: its imports are no public names.
"""

from __future__ import annotations

import argparse
import json
from typing import Any

import common
import numpy as np
import torch

import perturbkv as pk
from perturbkv.pipeline.sample.prefill import Statistics, prefill
from perturbkv.scoring.layer_view import LayerView
from perturbkv.selection.resolved_config import ResolvedRun

WINDOW = 8
"""Any, as no score is used."""


class QuerySums:
    """A visitor of prefills that adds up each head's queries before rotation, and their lengths in each rotary pair."""

    needs_full_cache = False

    def __init__(self) -> None:
        self.tokens = 0
        self.sums: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

    def visit(self, statistics: Statistics, view: LayerView) -> None:
        """Add the queries of a layer."""
        half = view.rotations(range(1)).cosine.shape[-1] // 2
        queries = view.unrotated.double()
        lengths = torch.hypot(queries[..., :half], queries[..., half : 2 * half])
        own = (queries.sum(dim=1).cpu(), lengths.sum(dim=1).cpu())
        before = self.sums.get(view.layer)
        self.sums[view.layer] = own if before is None else (before[0] + own[0], before[1] + own[1])
        self.tokens += view.entries if view.layer == 0 else 0

    def centres(self) -> dict[str, dict[str, list[float]]]:
        """Return "layer-head" -> the head's mean query, and its mean length in each rotary pair."""
        return {
            f"{layer}-{head}": {"mean": (mean / self.tokens).tolist(), "size": (size / self.tokens).tolist()}
            for layer, sums in sorted(self.sums.items())
            for head, (mean, size) in enumerate(zip(*sums, strict=True))
        }


def concentration(centres: dict[str, dict[str, list[float]]]) -> float:
    """Return ‖mean‖ over the mean length in a rotary pair, as a mean over pairs and heads."""
    shares = []
    for centre in centres.values():
        mean, size = np.array(centre["mean"]), np.array(centre["size"])
        shares.append(np.hypot(mean[: len(size)], mean[len(size) : 2 * len(size)]) / size)
    return float(np.mean(shares))


def study(asked: argparse.Namespace) -> None:
    """Read every prompt, write the centres, and print what they are of."""
    model = common.load_model(asked)
    prompts = common.prompts(asked, model)
    configs = pk.grid(1.0, policy="triattention", selection="attention", window=WINDOW)  # for queries before rotation
    run, sums = ResolvedRun.from_run(pk.RunConfig(asked.model, asked.dataset, configs)), QuerySums()
    for prompt in prompts:
        prefill(model, prompt, run, pk.Resources(), visitor=sums)
    centres: dict[str, Any] = sums.centres()
    path = asked.output / "centres.json"
    path.write_text(json.dumps(centres) + "\n")
    print(
        f"{path}: {len(centres)} heads of {asked.model}, {len(prompts)} prompts, {sums.tokens:,} tokens; ‖mean query‖ "
        f"is {concentration(centres):.2f} of the mean length in a rotary pair"
    )


if __name__ == "__main__":
    common.main(study, common.options(__doc__ or "", "none", "nothing"))
