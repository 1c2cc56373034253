"""One selection at many α: what each head loses by itself at each, from which any choice of α is composed."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from perturbkv.analyses.heads.head_comparison import with_floor
from perturbkv.analyses.identity import RunIdentity, identity
from perturbkv.analyses.measurements import Floats, at_step, sets_per_layer, values
from perturbkv.analyses.pairing import order, pairs
from perturbkv.configs.alpha_table import AlphaTable
from perturbkv.configs.eviction import EvictionConfig
from perturbkv.errors import TraceError
from perturbkv.trace import Trace

ANALYSIS = "alpha"
BASELINE, SELECTION = "attention", "two-stage"
PAPER = 0.25
"""The paper's α (section 4.2)."""
LEAST_SAMPLES = 4


@dataclass(frozen=True, eq=False)
class Sweep:
    """A trace's selection at every α.

    Attributes:
        baseline: `attention`, which knows no α.
        configs: the selection at each α, ascending; one of them the paper's.
        samples: names of the complete samples.
        moved: (sample, α, layer, head) isolated L1.
        baseline_moved: (sample, layer, head) the baseline's.
        floor, norm: (sample, layer, head) noise floor of L1, and ‖o_h‖₁.
        group: query heads that share a kept set, so that they have one α.
        layers: the decoder layers that were measured.
        identity: of the run.
    """

    baseline: EvictionConfig
    configs: tuple[EvictionConfig, ...]
    samples: tuple[str, ...]
    moved: Floats
    baseline_moved: Floats
    floor: Floats
    norm: Floats
    group: int
    layers: tuple[int, ...]
    identity: RunIdentity

    @property
    def alphas(self) -> Floats:
        """(α,) ascending."""
        return np.array([config.mean_alpha for config in self.configs])

    @property
    def paper(self) -> int:
        """The place of the paper's α."""
        return int(np.argmin(np.abs(self.alphas - PAPER)))


def sweep(trace: Trace) -> Sweep:
    """The sweep of a trace, at its first decode step.

    Raises TraceError where it holds no baseline, fewer than two α, not the paper's, or several settings; fewer than
    four complete samples; budgets that change with α, as then a head's set does not depend on its own α alone.
    """
    held = at_step(trace, ANALYSIS, 0)
    baseline, configs = _configs(held)
    places = [held.config_index(config.label()) for config in configs]
    found, floor = with_floor(held, "isolated", "l1", 0)
    samples = tuple(name for name, whole in zip(held.sample_ids, held.ok, strict=True) if whole)
    if len(samples) < LEAST_SAMPLES:
        msg = f"{ANALYSIS} chooses on some samples and judges on others: it needs 4 complete ones, got {len(samples)}"
        raise TraceError(msg)
    _check_budgets(values(held, "kept_count", ANALYSIS)[:, places], configs[0])
    named = identity(held, [baseline, *configs])
    return Sweep(
        baseline=baseline,
        configs=tuple(configs),
        samples=samples,
        moved=found[:, places],
        baseline_moved=found[:, held.config_index(baseline.label())],
        floor=floor,
        norm=values(held, "output_norm", ANALYSIS, 0),
        group=_group(held, configs[0], found.shape[-1]),
        layers=tuple(map(named.layer, range(found.shape[2]))),
        identity=named,
    )


def _configs(trace: Trace) -> tuple[EvictionConfig, list[EvictionConfig]]:
    found = pairs(trace.run, BASELINE, f"{SELECTION}(alpha={PAPER})")
    if len(found) > 1:
        told = "; ".join(paper.label() for _, paper in found)
        msg = (
            f"{ANALYSIS} looks at one policy, budget, granularity and correction, got {told}; "
            f"make a trace with perturbkv {ANALYSIS}, or take one of them with trace.sel in Python"
        )
        raise TraceError(msg)
    ((baseline, paper),) = found
    alike = sorted((one for one in trace.run.configs if _differs_in_alpha(one, paper)), key=order)
    if len(alike) < 2:
        msg = f"{ANALYSIS} needs {SELECTION} at several alpha, got {alike[0].label()} alone"
        raise TraceError(msg)
    return baseline, alike


def _differs_in_alpha(config: EvictionConfig, paper: EvictionConfig) -> bool:
    """Whether a configuration is the paper's at any one α."""
    if config.selection.name != SELECTION or isinstance(config.alpha, AlphaTable):
        return False
    chosen = replace(config.selection, options={**config.selection.options, "alpha": paper.alpha})
    return replace(config, selection=chosen) == paper


def _check_budgets(kept: Floats, config: EvictionConfig) -> None:
    """Raise TraceError where (sample, α, layer, head) counts change with α."""
    if (kept != kept[:, :1]).any():
        msg = (
            f"policy '{config.policy.name}' gives heads other budgets at another alpha, so that what a head keeps "
            f"depends on all heads' alpha; {ANALYSIS} needs budgets that do not, such as snapkv's"
        )
        raise TraceError(msg)


def _group(trace: Trace, config: EvictionConfig, heads: int) -> int:
    """Query heads of each kept set."""
    if config.granularity.name == "query":
        return 1
    if config.granularity.name == "layer":
        return heads
    return heads // sets_per_layer(trace, trace.config_index(config.label()))


def by_set(moved: Floats, group: int) -> Floats:
    """(…, set) sums over the heads that share a kept set, of (…, head)."""
    return np.asarray(moved.reshape(*moved.shape[:-1], -1, group).sum(axis=-1))
