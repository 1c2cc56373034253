"""Configurations in one flat list, for references that know nothing of who owns which option."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from perturbkv.configs.eviction import EvictionConfig

_DEFAULTS: dict[str, Any] = {
    "alpha": 0.25, "split": "prefix", "score": "accumulated", "epsilon": 0.0, "pool": "max", "kernel": 7,
    "reduce": "mean", "product": "product-of-means", "sinks": 4, "seed": 0, "floor": 0.2, "safeguard": "mixture",
    "line": "prefix", "recent": 0.5, "history": 400, "positions": "kept",
    "block": 1, "block_score": "sum", "bits": 16, "group": 32, "by_layer": "", "fill": 0,
    "norm": "l1", "mass": "oracle", "page": 16,
    "vertical": 0.5, "last": 64, "first": 4, "sums": "all", "window_queries": "all",
}  # fmt: skip
"""METHOD's, where nobody says otherwise."""
_BETAS = {"pyramidkv": 20.0, "headkv": 1.01}
_UNPOOLED = ("h2o", "scissorhands", "tova", "random")


def flat(config: EvictionConfig) -> Any:
    """An object with every choice and option of a configuration, those that are not told at METHOD's defaults."""
    told = {"pool": "none"} if config.policy.name in _UNPOOLED else {}
    for choice in (config.policy, config.selection, config.granularity, config.precision, config.correction):
        told |= {name: value for name, value in choice.options.items() if name != "seed" or choice is config.selection}
    names = {"policy": config.policy.name, "selection": config.selection.name, "granularity": config.granularity.name}
    told |= {"mass": "none"} if config.correction.name == "none" else {}
    own = {name: getattr(config, name) for name in ("budget", "window", "protect_first", "protect_recent")}
    return SimpleNamespace(**{**_DEFAULTS, "beta": _BETAS.get(config.policy.name), **told, **names, **own})
