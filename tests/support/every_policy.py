"""A run over all policies, which every way to measure it has to give alike."""

from __future__ import annotations

import logging
import sys
from pathlib import Path
from typing import Any

import perturbkv as pk
from perturbkv.configs.cache_contents import SPARSE_PREFILL, WITHOUT_EVICTION
from perturbkv.models.adapter import Adapter
from perturbkv.selection.policies import registry


def of_every_policy() -> list[pk.EvictionConfig]:
    """Each with its own score, where it has one, and some with two stages; none that neither steps nor answers."""
    names = [name for name in registry.names() if WITHOUT_EVICTION.get(name) is not SPARSE_PREFILL]
    known = [(name, registry.policy_class(name).selections) for name in names]
    own = [(name, "attention" if "attention" in selections else selections[0]) for name, selections in known]
    chosen = [*own, ("snapkv", "two-stage"), ("adakv", "two-stage"), ("pyramidkv", "two-stage")]
    return [one for name, selection in chosen for one in pk.grid(40, policy=name, selection=selection, window=8)]


def head_scores(model: Adapter) -> list[list[float]]:
    """For the policies that want them: head k has 1 + k."""
    return [[1.0 + head for head in range(model.heads)]] * len(model.layers)


def measured(folder: str | Path, data: str | Path, own: str, path: Path, **engine: Any) -> None:
    """A trace of all of them and of an `own` one, two steps and three tokens of answer each."""
    model = pk.load_model(str(folder))
    prompts, scores = pk.load_prompts(str(data), model), head_scores(model)
    configs = [*of_every_policy(), *pk.grid(24, policy=own, selection="attention", window=8)]
    settings = pk.Settings(steps=2, generate=3, head_scores=scores)
    pk.measure(model, prompts, configs, settings=settings, path=path, workers=pk.Workers(**engine), progress=False)


if __name__ == "__main__":
    _folder, _data, _own, _path, _workers, _address = sys.argv[1:]
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    measured(_folder, _data, _own, Path(_path), engine="ray", workers=int(_workers), ray_address=_address)
