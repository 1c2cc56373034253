"""Choices of α that perturb least: for all heads, per layer or per head; made on some samples, judged on others.

One selection is measured at many α. A head's isolated loss depends on its own α alone, so the loss of any choice is put
together from these measurements.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from perturbkv.analyses.columns import Record, column, derived, record
from perturbkv.analyses.heads.head_comparison import perturbation_and_floor
from perturbkv.analyses.identity import RunIdentity, identity
from perturbkv.analyses.measurements import Floats, Measurements, sets_per_layer
from perturbkv.analyses.pairing import budget_order, pairs
from perturbkv.configs.alpha_table import GLOBAL, HEAD, LAYER, AlphaTable
from perturbkv.configs.eviction import EvictionConfig
from perturbkv.configs.selections import shares_heads, shares_layers
from perturbkv.errors import ConfigError, TraceError
from perturbkv.trace import Trace

ANALYSIS = "alpha"
BASELINE, SELECTION = "attention", "two-stage"
PAPER = 0.25
"""The paper's α (section 4.2)."""
LEAST_SAMPLES = 4


@dataclass(frozen=True, eq=False)
class Sweep:
    """The measurements of one selection at every α of a trace.

    Attributes:
        baseline: `attention`, which has no α.
        configs: the selection at each α, ascending; one of them the paper's.
        samples: names of the complete samples.
        loss: (sample, α, layer, head) isolated L1.
        baseline_loss: (sample, layer, head) the baseline's.
        floor, norm: (sample, layer, head) noise floor of L1, and ‖o_h‖₁.
        heads_per_set: query heads that share a kept set, so that they have one α.
        layers: the decoder layers that were measured.
        identity: of the run.
    """

    baseline: EvictionConfig
    configs: tuple[EvictionConfig, ...]
    samples: tuple[str, ...]
    loss: Floats
    baseline_loss: Floats
    floor: Floats
    norm: Floats
    heads_per_set: int
    layers: tuple[int, ...]
    identity: RunIdentity

    @property
    def alphas(self) -> Floats:
        """(α,) the values of α, ascending."""
        return np.array([config.mean_alpha for config in self.configs])

    @property
    def paper_index(self) -> int:
        """The index of the paper's α along the axis `α`."""
        return int(np.argmin(np.abs(self.alphas - PAPER)))


def sweep(trace: Trace) -> Sweep:
    """Return the sweep over α of a trace, at its first decode step.

    Raises TraceError where it holds no baseline, fewer than two α, not the paper's, or several settings; fewer than
    four complete samples; budgets that change with α, as then a head's set does not depend on its own α alone.
    """
    measured = Measurements(trace, ANALYSIS)
    run = measured.trace
    baseline, configs = _swept_configs(run)
    indices = [measured.index(config) for config in configs]
    loss, floor = perturbation_and_floor(measured, "isolated", "l1")
    if measured.samples < LEAST_SAMPLES:
        raise TraceError(
            f"{ANALYSIS} chooses on some samples and judges on others: it needs 4 complete ones, got {measured.samples}"
        )
    _check_budgets(measured["kept_count"][:, indices], configs[0])
    named = identity(run, [baseline, *configs])
    return Sweep(
        baseline=baseline,
        configs=tuple(configs),
        samples=measured.sample_ids,
        loss=loss[:, indices],
        baseline_loss=loss[:, measured.index(baseline)],
        floor=floor,
        norm=measured["output_norm"],
        heads_per_set=_heads_per_set(run, configs[0], loss.shape[-1]),
        layers=tuple(map(named.layer, range(loss.shape[2]))),
        identity=named,
    )


def _swept_configs(trace: Trace) -> tuple[EvictionConfig, list[EvictionConfig]]:
    """Return the baseline, and the selection at every α.

    Raises TraceError for one α alone, for several settings, and for kept sets that layers share.
    """
    chosen = pairs(trace.run, BASELINE, f"{SELECTION}(alpha={PAPER})")
    if len(chosen) > 1:
        labels = "; ".join(paper.label() for _, paper in chosen)
        raise TraceError(
            f"{ANALYSIS} looks at one policy, budget, granularity and correction, got {labels}; "
            f"make a trace with perturbkv question {ANALYSIS}, or take one of them with trace.sel in Python"
        )
    ((baseline, paper),) = chosen
    if shares_layers(baseline.granularity):
        raise TraceError(
            f"{ANALYSIS} chooses per layer, and granularity '{baseline.granularity.name}' has one set for all layers; "
            "choose query, kv or layer"
        )
    same = sorted((one for one in trace.run.configs if _differs_in_alpha(one, paper)), key=budget_order)
    if len(same) < 2:
        raise TraceError(f"{ANALYSIS} needs {SELECTION} at several alpha, got {same[0].label()} alone")
    return baseline, same


def _differs_in_alpha(config: EvictionConfig, paper: EvictionConfig) -> bool:
    """Return whether a configuration differs from the paper's only in α, with one α for all heads."""
    if config.selection.name != SELECTION or isinstance(config.alpha, AlphaTable):
        return False
    chosen = replace(config.selection, options={**config.selection.options, "alpha": paper.alpha})
    return replace(config, selection=chosen) == paper


def _check_budgets(kept: Floats, config: EvictionConfig) -> None:
    """Raise TraceError where (sample, α, layer, head) counts change with α."""
    if (kept != kept[:, :1]).any():
        raise TraceError(
            f"policy '{config.policy.name}' gives heads other budgets at another alpha, so that what a head keeps "
            f"depends on all heads' alpha; {ANALYSIS} needs budgets that do not, such as snapkv's"
        )


def _heads_per_set(trace: Trace, config: EvictionConfig, heads: int) -> int:
    """Return the number of query heads that share a kept set."""
    if config.granularity.name == "query":
        return 1
    if shares_heads(config.granularity):
        return heads
    return heads // sets_per_layer(trace, trace.config_index(config.label()))


PAPER_ROLE = "paper"
USUAL_FOLDS, _LEAVE_ONE_OUT_BELOW = 4, 8
Indices = NDArray[np.intp]
Chosen = Mapping[str, Indices]
"""Level of choice (`global`, `layer`, `head`) -> (layer, head) index along α that each query head takes."""


@record
class ChosenShares(Record):
    """A choice of α at one level, as JSON holds it."""

    SECTION: ClassVar[str] = "alpha table"

    by: str = column("global, layer or head")
    alpha: Any = column("a number, (layer) or (layer, head) shares of stage 1")
    layers: tuple[int, ...] = column("decoder layers of the rows")


def shares_for_json(shares: Mapping[str, AlphaTable]) -> dict[str, ChosenShares]:
    """Return the chosen α per level, as records for JSON."""
    return {by: ChosenShares(by, table.to_document()["alpha"], table.layers) for by, table in shares.items()}


@record
class Fold(Record):
    """Samples on which choices of α are judged that were made on all other samples.

    Attributes:
        number: from 1.
        judged: (sample,) True for the fold's samples, which are judged.
        chosen: the choices made on the other samples.
        shares: these choices as tables, which files hold.
        configs: role -> configuration of the judged samples: `attention`, `paper`, then each choice.
    """

    SECTION: ClassVar[str] = "alpha fold"

    number: int
    judged: NDArray[np.bool_]
    samples: tuple[str, ...] = column("names of the samples that are judged")
    chosen: Chosen
    shares: Mapping[str, AlphaTable]
    configs: Mapping[str, EvictionConfig]

    @derived(key="chosen")
    def chosen_shares(self) -> dict[str, ChosenShares]:
        """Choices made on the other samples, by global, layer and head."""
        return shares_for_json(self.shares)

    @property
    def distinct(self) -> tuple[EvictionConfig, ...]:
        """The fold's configurations without duplicates, such as a global choice equal to the paper's α."""
        return tuple(dict.fromkeys(self.configs.values()))

    def fits(self, trace: Trace) -> bool:
        """Return whether a trace has exactly the fold's samples, and at least its configurations."""
        return set(trace.sample_ids) == set(self.samples) and {*self.distinct} <= {*trace.run.configs}


def choice_levels(sweep: Sweep) -> tuple[str, ...]:
    """Return the levels at which α is chosen: global, layer, and head if a layer has several kept sets."""
    one_set = sweep.heads_per_set == sweep.loss.shape[-1]
    return (GLOBAL, LAYER) if one_set else (GLOBAL, LAYER, HEAD)


def folds(sweep: Sweep, count: int | None = None) -> tuple[Fold, ...]:
    """Return K folds: sample i is judged in fold i mod K; K is 4, and of fewer than eight samples leave-one-out.

    Raises ConfigError for fewer folds than two, or more than samples.
    """
    samples = len(sweep.samples)
    number = count if count is not None else (samples if samples < _LEAVE_ONE_OUT_BELOW else USUAL_FOLDS)
    if not 2 <= number <= samples:
        raise ConfigError(f"expected 2 to {samples} folds of {samples} samples, got {number}")
    return tuple(_fold(sweep, index, np.arange(samples) % number == index) for index in range(number))


def check_folds(count: int | None, samples: int) -> None:
    """Raise ConfigError for fewer than four samples, or for a number of folds outside 2 to `samples`."""
    if samples < LEAST_SAMPLES:
        raise ConfigError(f"{ANALYSIS} chooses on some samples and judges on others: it needs 4 of them, got {samples}")
    if count is not None and not 2 <= count <= samples:
        raise ConfigError(f"expected 2 to {samples} folds of {samples} samples, got --folds {count}")


def choose(sweep: Sweep, trained: NDArray[np.bool_]) -> Chosen:
    """Return level -> (layer, head) α indices of least Σ isolated L1 over `trained` samples; ties: near the paper's."""
    by_head = sweep.loss[trained].sum(axis=0)
    loss = by_head.reshape(*by_head.shape[:-1], -1, sweep.heads_per_set).sum(axis=-1)  # (α, layer, kept set)
    summed = {GLOBAL: loss.sum(axis=(1, 2), keepdims=True), LAYER: loss.sum(axis=2, keepdims=True), HEAD: loss}
    near = np.lexsort((sweep.alphas, np.abs(sweep.alphas - sweep.alphas[sweep.paper_index])))
    shape = sweep.loss.shape[2:]
    return {
        level: np.broadcast_to(
            np.repeat(near[summed[level][near].argmin(axis=0)], _heads_per_choice(level, sweep), axis=1), shape
        )
        for level in choice_levels(sweep)
    }


def _heads_per_choice(level: str, sweep: Sweep) -> int:
    """Return the number of a layer's heads with a common α: those of a kept set at level `head`, else all."""
    return sweep.heads_per_set if level == HEAD else sweep.loss.shape[-1]


def compose(sweep: Sweep, indices: Indices) -> Floats:
    """Return (sample, layer, head) isolated L1 where each head takes the α at its (layer, head) index."""
    return np.asarray(np.take_along_axis(sweep.loss, indices[None, None], axis=1)[:, 0])


def judged_loss(sweep: Sweep, folds: tuple[Fold, ...], level: str) -> Floats:
    """Return each sample's isolated L1, (sample, layer, head), at the α chosen on the other folds at `level`."""
    every = np.empty_like(sweep.baseline_loss)
    for fold in folds:
        every[fold.judged] = compose(sweep, fold.chosen[level])[fold.judged]
    return every


def tables(sweep: Sweep, chosen: Chosen, stem: str = "alpha") -> dict[str, AlphaTable]:
    """Return level -> table of the chosen α; the tables are named `{stem}-{level}.json`."""
    result = {}
    for level, indices in chosen.items():
        shares = sweep.alphas[indices]
        rows = {GLOBAL: shares[:1, :1], LAYER: shares[:, :1], HEAD: shares}[level]
        result[level] = AlphaTable(f"{stem}-{level}.json", level, tuple(map(tuple, rows.tolist())), sweep.layers)
    return result


def _fold(sweep: Sweep, index: int, judged: NDArray[np.bool_]) -> Fold:
    """Return a fold: the `judged` samples, and the choices of α made on the other samples."""
    chosen, paper = choose(sweep, ~judged), sweep.configs[sweep.paper_index]
    shares = tables(sweep, chosen, f"alpha-fold-{index + 1}")
    return Fold(
        number=index + 1,
        judged=judged,
        samples=tuple(name for name, inside in zip(sweep.samples, judged, strict=True) if inside),
        chosen=chosen,
        shares=shares,
        configs={
            BASELINE: sweep.baseline,
            PAPER_ROLE: paper,
            GLOBAL: sweep.configs[int(chosen[GLOBAL][0, 0])],
            **{level: _with_alpha_table(paper, table) for level, table in shares.items() if level != GLOBAL},
        },
    )


def _with_alpha_table(config: EvictionConfig, alpha: AlphaTable) -> EvictionConfig:
    """Return the configuration with a table in place of its α."""
    selection = config.selection
    usual = frozenset(selection.defaults or ()) - {"alpha"}
    return replace(config, selection=replace(selection, options={**selection.options, "alpha": alpha}, defaults=usual))


def unstable_share(sweep: Sweep, folds: tuple[Fold, ...], level: str) -> float:
    """Return the share of layers (at level `head`: of kept sets) with different chosen α in different folds."""
    chosen = np.stack([fold.chosen[level] for fold in folds])[..., :: _heads_per_choice(level, sweep)]
    return float((chosen != chosen[:1]).any(axis=0).mean())
