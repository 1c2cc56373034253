"""Traces of two selections over several budgets with given numbers, for tests of what compares budgets."""

from __future__ import annotations

from typing import Any

import numpy as np

from perturbkv.configs.entry_counts import Budget
from perturbkv.selection.grid import configuration
from perturbkv.trace import SampleTrace, Trace
from tests.support.traces import sample_trace, trace

BUDGETS = (0.1, 0.2, 0.4, 0.6, 0.8)
SELECTIONS = ("attention", "two-stage")
TOKENS, TOKEN_BYTES = 500, 96


def swept(
    kl: Any = None,
    moved: Any = None,
    score: Any = None,
    same: Any = None,
    *,
    full: float = 1.0,
    budgets: tuple[float, ...] = BUDGETS,
    selections: tuple[str, ...] = SELECTIONS,
    **run: Any,
) -> Trace:
    """A trace of (sample, selection, budget) KL, relative L1 or score; `same`: (sample, selection, budget, step)."""
    shapes = [np.shape(given) for given in (kl, moved, score, same) if given is not None]
    count, steps = shapes[0][0], 1 if same is None else np.shape(same)[-1]
    configs = tuple(configuration(budget, selection=one) for one in selections for budget in budgets)
    held = np.array([share(config.budget) for config in configs])
    samples = []
    for place in range(count):
        arrays: dict[str, Any] = dict(sample_trace(f"s{place}", configs=len(configs), steps=steps, seed=place).arrays)
        arrays |= {"prompt_tokens": np.asarray(TOKENS), "held_share": held}
        padding = 7
        arrays["cache_bytes"] = np.asarray(round(held.sum() * TOKENS * TOKEN_BYTES) + padding)
        arrays["cache_padding_bytes"] = np.asarray(padding)
        if kl is not None:
            arrays["logit_kl"] = np.repeat(np.reshape(kl[place], (-1, 1)), steps, axis=1)
            arrays["logit_kl_noise_floor"] = np.full(steps, 1e-9)
        if moved is not None:  # all heads alike
            relative = np.reshape(moved[place], (-1, 1, 1, 1))
            arrays["output_norm"] = np.full_like(arrays["output_norm"], 3.0)
            arrays["perturbation_propagated"] = np.broadcast_to(3.0 * relative, arrays["perturbation_propagated"].shape)
        if score is not None:
            arrays |= {"score": np.reshape(score[place], -1).astype(float), "score_full": np.asarray(full)}
        if same is not None:
            arrays["top1_agreement"] = np.reshape(same[place], (len(configs), steps)).astype(np.uint8)
        samples.append(SampleTrace(f"s{place}", arrays))
    return trace(*samples, configs=configs, **run)


def share(budget: Budget) -> float:
    """Of the prompt."""
    return float(budget.value) if isinstance(budget.value, float) else budget.value / TOKENS
