"""Answers by hand, as a file of `perturbkv generate` holds them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from perturbkv.configs.eviction import EvictionConfig
from perturbkv.configs.run import RunConfig
from perturbkv.selection.grid import configuration
from perturbkv.storage.answers_file import WrittenAnswers

CONFIGS = tuple(configuration(64, selection=name) for name in ("attention", "two-stage"))


def said(tokens: Sequence[int], text: str | None = None, held: float = 0.5) -> dict[str, Any]:
    """An answer of numbered words."""
    words = " ".join(f"w{token}" for token in tokens) if text is None else text
    return {"tokens": list(tokens), "text": words, "score": None, "held_share": held}


def row(
    name: str,
    full: Sequence[int],
    evicted: Sequence[Sequence[int]],
    kl: Sequence[Sequence[float]] = (),
    configs: Sequence[EvictionConfig] = CONFIGS,
) -> dict[str, Any]:
    """A sample's line; with `kl`, a row of it per configuration, the same next token wherever it is below 1."""
    labels = [config.label() for config in configs]
    caches = {label: {"kl": list(one), "top1": [value < 1 for value in one]}
              for label, one in zip(labels, kl, strict=False)}  # fmt: skip
    return {
        "sample": name,
        "prompt_tokens": 200,
        "prompt": f"prompt of {name}",
        "question": f"question of {name}",
        "answers": [],
        "metric": None,
        "full": said(full),
        "evicted": {label: said(tokens) for label, tokens in zip(labels, evicted, strict=True)},
        "compressions": [],
        "divergence": {"noise_floor": [1e-9] * len(full), "caches": caches} if kl else None,
    }


def written(
    *rows: Mapping[str, Any], configs: Sequence[EvictionConfig] = CONFIGS, compress_over: int = 0, **more: Any
) -> WrittenAnswers:
    about = {"samples": len(rows), "generate": 64, "compress_over": compress_over}
    run = RunConfig("a model", "chats.jsonl", tuple(configs), **about)  # type: ignore[arg-type]
    return WrittenAnswers(run, tuple(map(dict, rows)), **more)
