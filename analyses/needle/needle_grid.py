"""What the full cache and each configuration find of the needles, by length and depth (paper, appendix E)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from perturbkv.analyses.measurements import Floats, held_shares, values
from perturbkv.analyses.stats import intervals
from perturbkv.analyses.stats.arithmetic import plain, ratio
from perturbkv.analyses.stats.intervals import Band, Interval, Scalar, share_of
from perturbkv.configs.eviction import EvictionConfig
from perturbkv.errors import TraceError
from perturbkv.trace import Trace

ANALYSIS = "needle"
OUTCOMES = ("score", "digits")
"""Exactly right, and the share of leading digits that are."""


@dataclass(frozen=True)
class Method:
    """One configuration, or the full cache.

    Attributes:
        config: the configuration; None for the full cache.
        found: outcome -> (sample,) what was found, in [0, 1].
        score: share of prompts whose number was found, in [0, 1]; its exact interval.
        digits: mean share of the number's leading digits that are right; its interval, over samples.
        by_depth: (depth,) the score over all lengths, with exact intervals; NaN where no prompt fell.
        digits_by_depth: (depth,) digits over all lengths.
        grid: (depth, length) score per cell; NaN where no prompt fell.
        digits_grid: (depth, length) digits per cell.
        held: entries that the cache holds over those of the full cache; NaN where the trace does not tell.
        kept_entries: mean entries kept per head and layer; the prompt's length for the full cache.
    """

    config: EvictionConfig | None
    found: dict[str, Floats]
    score: float
    score_interval: Scalar
    digits: float
    digits_interval: Scalar
    by_depth: Floats
    by_depth_interval: Band
    digits_by_depth: Floats
    grid: Floats
    digits_grid: Floats
    held: float
    kept_entries: float

    def to_dict(self) -> dict[str, Any]:
        """Everything a reader needs, as JSON-able numbers; not what each sample found."""
        found: dict[str, Any] = plain({name: value for name, value in vars(self).items() if name != "found"})
        return found


def methods(trace: Trace) -> tuple[Method, ...]:
    """The full cache, then every configuration. Raises TraceError for a run that is not of needles with answers."""
    found = {name: _with_full(trace, name) for name in OUTCOMES}
    kept, tokens = values(trace, "kept_count", ANALYSIS), values(trace, "prompt_tokens", ANALYSIS)
    entries = [float(tokens.mean()), *kept.mean(axis=(0, 2, 3)).tolist()]
    shares = [1.0, *held_shares(trace, ANALYSIS).tolist()]
    return tuple(
        _method(trace, config, {name: array[:, place] for name, array in found.items()}, entries[place], shares[place])
        for place, config in enumerate([None, *trace.run.configs])
    )


def _with_full(trace: Trace, name: str) -> Floats:
    """(sample, 1 + config) an outcome, of the full cache first."""
    full, evicted = (values(trace, f"{name}{suffix}", ANALYSIS) for suffix in ("_full", ""))
    return np.concatenate([full[:, None], evicted], axis=1)


def _method(
    trace: Trace, config: EvictionConfig | None, found: dict[str, Floats], entries: float, held: float
) -> Method:
    lengths, depths = grid_of(trace)
    cells, shape = cells_of(trace), (len(depths), len(lengths))
    depth_alone = np.stack([cells[:, 0], np.zeros_like(cells[:, 0])], axis=1)
    return Method(
        config=config,
        found=found,
        score=float(found["score"].mean()),
        score_interval=intervals.of_samples(found["score"] > 0),
        digits=float(found["digits"].mean()),
        digits_interval=intervals.of_mean(found["digits"], share_of(0)),
        by_depth=_grid(found["score"], depth_alone, (len(depths), 1))[:, 0],
        by_depth_interval=_depth_intervals(found["score"], cells[:, 0], len(depths)),
        digits_by_depth=_grid(found["digits"], depth_alone, (len(depths), 1))[:, 0],
        grid=_grid(found["score"], cells, shape),
        digits_grid=_grid(found["digits"], cells, shape),
        held=held,
        kept_entries=entries,
    )


def grid_of(trace: Trace) -> tuple[tuple[int, ...], tuple[float, ...]]:
    """Lengths and depths of a needle run. Raises TraceError for a run of another dataset."""
    options = trace.run.dataset_options
    if trace.run.dataset != "needle" or "lengths" not in options or not trace.run.generate:
        msg = (
            f"{ANALYSIS} needs a trace of needle prompts with generated answers, got one of '{trace.run.dataset}'"
            f"{'' if trace.run.generate else ' without answers'}; make one: perturbkv needle --model {trace.run.model}"
        )
        raise TraceError(msg)
    return tuple(options["lengths"]), tuple(options["depths"])


def cells_of(trace: Trace) -> NDArray[np.int64]:
    """(sample, 2) depth and length of each complete sample, as places in the grid: samples go through it in turns."""
    lengths, depths = grid_of(trace)
    places = np.flatnonzero(trace.ok) % (len(lengths) * len(depths))
    return np.stack([places % len(depths), places // len(depths)], axis=1)


def _depth_intervals(found: Floats, depth: NDArray[np.int64], depths: int) -> Band:
    """Exact intervals of each depth's share; NaN where fewer than two prompts fell, None where nowhere more did."""
    each = [intervals.of_samples(found[depth == place] > 0) for place in range(depths)]
    if not any(each):
        return None
    low, high = ([np.nan if one is None else getattr(one, end) for one in each] for end in ("low", "high"))
    return Interval(np.array(low), np.array(high))


def _grid(found: Floats, cells: NDArray[np.int64], shape: tuple[int, int]) -> Floats:
    total, count = np.zeros(shape), np.zeros(shape)
    np.add.at(total, tuple(cells.T), found)
    np.add.at(count, tuple(cells.T), 1)
    return np.asarray(ratio(total, count))
