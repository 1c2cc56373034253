"""Which α perturbs least: one for all heads, per layer or per head; chosen on some samples, judged on others.

One selection at many α: what each head loses by itself at each, from which any choice of α is composed.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from perturbkv.analyses.heads.head_comparison import with_floor
from perturbkv.analyses.identity import RunIdentity, identity
from perturbkv.analyses.measurements import Floats, at_step, sets_per_layer, values
from perturbkv.analyses.pairing import order, pairs
from perturbkv.configs.alpha_table import GLOBAL, HEAD, LAYER, AlphaTable
from perturbkv.configs.eviction import EvictionConfig
from perturbkv.errors import ConfigError, TraceError
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


PAPER_ROLE = "paper"
USUAL_FOLDS, _LEAVE_ONE_OUT_BELOW = 4, 8
Places = NDArray[np.intp]
Chosen = Mapping[str, Places]
"""`global`, `layer` or `head` -> (layer, head) which α of the sweep each query head takes."""


@dataclass(frozen=True, eq=False)
class Fold:
    """Samples that are judged together, by what was chosen on all others.

    Attributes:
        number: from 1.
        judged: (sample,) True for those that are judged.
        samples: their names.
        chosen: on the others.
        configs: role -> what is measured of the judged ones: `attention`, `paper`, then each choice.
    """

    number: int
    judged: NDArray[np.bool_]
    samples: tuple[str, ...]
    chosen: Chosen
    configs: Mapping[str, EvictionConfig]

    @property
    def distinct(self) -> tuple[EvictionConfig, ...]:
        """The configurations, each once: the choice for all heads may be the paper's α."""
        return tuple(dict.fromkeys(self.configs.values()))

    def is_in(self, trace: Trace) -> bool:
        """Whether a trace is of these samples alone, and holds all of the configurations."""
        return set(trace.sample_ids) == set(self.samples) and {*self.distinct} <= {*trace.run.configs}


def levels(found: Sweep) -> tuple[str, ...]:
    """What may be chosen: one α for all, per layer, per head where a layer has several kept sets."""
    alone = found.group == found.moved.shape[-1]
    return (GLOBAL, LAYER) if alone else (GLOBAL, LAYER, HEAD)


def folds(found: Sweep, count: int | None = None) -> tuple[Fold, ...]:
    """Sample i is judged in fold i mod K; K is 4, and of fewer than eight samples leave-one-out.

    Raises ConfigError for fewer folds than two, or more than samples.
    """
    samples = len(found.samples)
    wanted = count if count is not None else (samples if samples < _LEAVE_ONE_OUT_BELOW else USUAL_FOLDS)
    if not 2 <= wanted <= samples:
        msg = f"expected 2 to {samples} folds of {samples} samples, got {wanted}"
        raise ConfigError(msg)
    return tuple(_fold(found, number, np.arange(samples) % wanted == number) for number in range(wanted))


def check_folds(count: int | None, samples: int) -> None:
    """Raise ConfigError where so many samples cannot be chosen on and judged, or not in so many folds."""
    if samples < LEAST_SAMPLES:
        msg = f"{ANALYSIS} chooses on some samples and judges on others: it needs 4 of them, got {samples}"
        raise ConfigError(msg)
    if count is not None and not 2 <= count <= samples:
        msg = f"expected 2 to {samples} folds of {samples} samples, got --folds {count}"
        raise ConfigError(msg)


def choose(found: Sweep, trained: NDArray[np.bool_]) -> Chosen:
    """What has the least Σ isolated L1 over the samples that are `trained` on; ties go to the α nearest the paper's."""
    loss = by_set(found.moved[trained].sum(axis=0), found.group)
    summed = {GLOBAL: loss.sum(axis=(1, 2), keepdims=True), LAYER: loss.sum(axis=2, keepdims=True), HEAD: loss}
    near = np.lexsort((found.alphas, np.abs(found.alphas - found.alphas[found.paper])))
    shape = found.moved.shape[2:]
    return {
        by: np.broadcast_to(np.repeat(near[summed[by][near].argmin(axis=0)], _repeated(by, found), axis=1), shape)
        for by in levels(found)
    }


def _repeated(by: str, found: Sweep) -> int:
    """How many neighbouring heads one choice of a row stands for."""
    return found.group if by == HEAD else found.moved.shape[-1]


def composed(found: Sweep, places: Places) -> Floats:
    """(sample, layer, head) isolated L1 where each head has an α of its own: its set depends on that alone."""
    return np.asarray(np.take_along_axis(found.moved, places[None, None], axis=1)[:, 0])


def judged(found: Sweep, parts: tuple[Fold, ...], by: str) -> Floats:
    """(sample, layer, head) the same of what was chosen on other samples."""
    every = np.empty_like(found.baseline_moved)
    for part in parts:
        every[part.judged] = composed(found, part.chosen[by])[part.judged]
    return every


def tables(found: Sweep, chosen: Chosen, stem: str = "alpha") -> dict[str, AlphaTable]:
    """The choices as files hold them."""
    return dict(_tables(found, chosen, stem))


def _tables(found: Sweep, chosen: Chosen, stem: str) -> Iterator[tuple[str, AlphaTable]]:
    for by, places in chosen.items():
        shares = found.alphas[places]
        rows = {GLOBAL: shares[:1, :1], LAYER: shares[:, :1], HEAD: shares}[by]
        yield by, AlphaTable(f"{stem}-{by}.json", by, tuple(map(tuple, rows.tolist())), found.layers)


def _fold(found: Sweep, place: int, held: NDArray[np.bool_]) -> Fold:
    chosen = choose(found, ~held)
    paper = found.configs[found.paper]
    made = tables(found, {by: places for by, places in chosen.items() if by != GLOBAL}, f"alpha-fold-{place + 1}")
    return Fold(
        number=place + 1,
        judged=held,
        samples=tuple(name for name, one in zip(found.samples, held, strict=True) if one),
        chosen=chosen,
        configs={
            BASELINE: found.baseline,
            PAPER_ROLE: paper,
            GLOBAL: found.configs[int(chosen[GLOBAL][0, 0])],
            **{by: with_alpha(paper, table) for by, table in made.items()},
        },
    )


def with_alpha(config: EvictionConfig, alpha: AlphaTable) -> EvictionConfig:
    """The configuration with a table in place of its α."""
    told = config.selection
    usual = frozenset(told.usual or ()) - {"alpha"}
    return replace(config, selection=replace(told, options={**told.options, "alpha": alpha}, usual=usual))


def unstable(found: Sweep, parts: tuple[Fold, ...], by: str) -> float:
    """The share of layers, or of kept sets, whose choice is not the same in all folds."""
    each = np.stack([part.chosen[by] for part in parts])[..., :: _repeated(by, found)]
    return float((each != each[:1]).any(axis=0).mean())
