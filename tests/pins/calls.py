"""Public calls whose options moved into objects, written for this checkout and for an earlier commit."""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from typing import Any

import perturbkv as pk

_SETTINGS = ("steps", "scenario", "cache", "generate", "head_scores", "text", "kept")
_QUESTION = ("by",)


def measure(*measured: Any, **options: Any) -> Any:
    """`pk.measure` with every option by its name."""
    if not hasattr(pk, "Settings"):
        return pk.measure(*measured, **options)
    settings = {name: options.pop(name) for name in _SETTINGS if name in options}
    settings |= {"save": ("outputs",)} if options.pop("save_outputs", False) else {}
    if "shard" in options:
        options["shard"] = pk.Shard.parse(options["shard"], options.pop("shard_by", "samples"))
    return pk.measure(*measured, settings=pk.Settings(**settings), **options)


def patching(*measured: Any, **options: Any) -> Any:
    """`pk.patching`, or the earlier commit's `pk.swap`, with every option by its name."""
    if not hasattr(pk, "PatchingConfig"):
        return (pk.patching if hasattr(pk, "patching") else pk.swap)(*measured, **options)
    settings = {name: options.pop(name) for name in _SETTINGS if name in options}
    question = {name: options.pop(name) for name in _QUESTION if name in options}
    objects = {"settings": pk.Settings(**settings), "question": pk.PatchingConfig(**question)}
    return pk.patching(*measured, **objects, **options)


_GROUPS = {
    "question": ("alpha", "measures", "regret", "split", "stability"),
    "list": ("models", "datasets", "policies"),
    "doctor": ("selfcheck", "bench"),
}
_RENAMED = {
    "swap": ("question", "patching"),
    "link": ("correlation",),
    "restriction": ("ablation", "--restrictions"),
    "savings": ("budget", "--savings"),
    "bytes": ("budget", "--bytes"),
    "cliff": ("budget", "--cliff"),
    "info": ("list",),
    "divergence": ("quality", "--divergence"),
    "judge": ("quality",),
    "head-scores": ("trace",),
}


def command(arguments: Sequence[str]) -> list[str]:
    """Return a command line in the words of this checkout; an earlier commit's stays as it is."""
    if importlib.util.find_spec("perturbkv.cli.command_line") is None or not arguments:
        return list(arguments)
    name, rest = arguments[0], list(arguments[1:])
    if name == "judge":
        rest = ["--judge" if word == "--command" else word for word in rest]
    elif name == "head-scores":
        rest = ["--head-scores" if word == "-o" else word for word in rest]
    elif name == "quality":
        rest = [word for word in rest if word != "--trace"]
    elif name == "link":
        rest = [word for word in rest if word != "--all"]
    for group, names in _GROUPS.items():
        if name in names:
            return [group, name, *rest]
    return [*_RENAMED.get(name, (name,)), *rest]
