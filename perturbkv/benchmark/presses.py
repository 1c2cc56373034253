"""The same 24 configurations by kvpress' presses, a prefill each, and by us, all from one: in turns in one process."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from transformers import DynamicCache

from perturbkv.benchmark.subprocesses import seconds
from perturbkv.models.adapter import Adapter

BUDGETS = (128, 256, 512, 1024)


def press_runs(adapter: Adapter, token_ids: list[int]) -> list[Callable[[], object]]:
    """A prefill under each press: SnapKV's, PyramidKV's and AdaKV's, each also as CriticalKV's, at four budgets."""
    import kvpress

    def kinds(ratio: float) -> list[Any]:
        snapkv, pyramid = kvpress.SnapKVPress(ratio), kvpress.PyramidKVPress(ratio)
        critical = [kvpress.CriticalKVPress(snapkv), kvpress.CriticalKVPress(pyramid)]
        return [snapkv, pyramid, *critical, kvpress.AdaKVPress(snapkv), kvpress.CriticalAdaKVPress(snapkv)]

    ids = torch.tensor([token_ids], device=adapter.device)

    def prefill(press: Any) -> None:
        with torch.inference_mode(), press(adapter.model):
            adapter.model(input_ids=ids, past_key_values=DynamicCache(), use_cache=True, logits_to_keep=1)

    presses = [press for budget in BUDGETS for press in kinds(1 - budget / len(token_ids))]
    return [lambda press=press: prefill(press) for press in presses]  # type: ignore[misc]


def side_by_side(adapter: Adapter, token_ids: list[int], ours: Callable[[], object], repeats: int) -> dict[str, Any]:
    """Seconds of all presses and of ours, `repeats` times in turns."""
    found: dict[str, list[float]] = {"presses": [], "ours": []}
    runs = press_runs(adapter, token_ids)
    for _ in range(repeats):
        found["presses"].append(sum(seconds(run, adapter.device) for run in runs))
        found["ours"].append(seconds(ours, adapter.device))
    return found
