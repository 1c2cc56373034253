"""Choices of α that perturb least: for all heads, per layer or per head; made on some samples, judged on others.

One selection is measured at many α: isolated, a head's loss depends on its own α alone, so that any choice is composed.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from perturbkv.analyses.columns import Record, column, derived, record
from perturbkv.analyses.heads.head_comparison import perturbation_and_floor
from perturbkv.analyses.identity import RunIdentity, identity
from perturbkv.analyses.measurements import Floats, Measurements, sets_per_layer
from perturbkv.analyses.pairing import budget_order, pairs
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
    """The measurements of one selection at every α of a trace.

    Attributes:
        baseline: `attention`, which has no α.
        configs: the selection at each α, ascending; one of them the paper's.
        samples: names of the complete samples.
        loss: (sample, α, layer, head) isolated L1.
        baseline_loss: (sample, layer, head) the baseline's.
        floor, norm: (sample, layer, head) noise floor of L1, and ‖o_h‖₁.
        group: query heads that share a kept set, so that they have one α.
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
    group: int
    layers: tuple[int, ...]
    identity: RunIdentity

    @property
    def alphas(self) -> Floats:
        """(α,) ascending."""
        return np.array([config.mean_alpha for config in self.configs])

    @property
    def paper(self) -> int:
        """The index of the paper's α."""
        return int(np.argmin(np.abs(self.alphas - PAPER)))


def sweep(trace: Trace) -> Sweep:
    """Return the sweep of a trace, at its first decode step.

    Raises TraceError where it holds no baseline, fewer than two α, not the paper's, or several settings; fewer than
    four complete samples; budgets that change with α, as then a head's set does not depend on its own α alone.
    """
    measured = Measurements(trace, ANALYSIS)
    run = measured.trace
    baseline, configs = _configs(run)
    indices = [measured.index(config) for config in configs]
    loss, floor = perturbation_and_floor(measured, "isolated", "l1")
    samples = tuple(name for name, whole in zip(run.sample_ids, run.ok, strict=True) if whole)
    if len(samples) < LEAST_SAMPLES:
        msg = f"{ANALYSIS} chooses on some samples and judges on others: it needs 4 complete ones, got {len(samples)}"
        raise TraceError(msg)
    _check_budgets(measured["kept_count"][:, indices], configs[0])
    named = identity(run, [baseline, *configs])
    return Sweep(
        baseline=baseline,
        configs=tuple(configs),
        samples=samples,
        loss=loss[:, indices],
        baseline_loss=loss[:, measured.index(baseline)],
        floor=floor,
        norm=measured["output_norm"],
        group=_heads_per_set(run, configs[0], loss.shape[-1]),
        layers=tuple(map(named.layer, range(loss.shape[2]))),
        identity=named,
    )


def _configs(trace: Trace) -> tuple[EvictionConfig, list[EvictionConfig]]:
    chosen = pairs(trace.run, BASELINE, f"{SELECTION}(alpha={PAPER})")
    if len(chosen) > 1:
        labels = "; ".join(paper.label() for _, paper in chosen)
        msg = (
            f"{ANALYSIS} looks at one policy, budget, granularity and correction, got {labels}; "
            f"make a trace with perturbkv question {ANALYSIS}, or take one of them with trace.sel in Python"
        )
        raise TraceError(msg)
    ((baseline, paper),) = chosen
    same = sorted((one for one in trace.run.configs if _differs_in_alpha(one, paper)), key=budget_order)
    if len(same) < 2:
        msg = f"{ANALYSIS} needs {SELECTION} at several alpha, got {same[0].label()} alone"
        raise TraceError(msg)
    return baseline, same


def _differs_in_alpha(config: EvictionConfig, paper: EvictionConfig) -> bool:
    """Return whether a configuration differs from the paper's in nothing but α, the same for all heads."""
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


def _heads_per_set(trace: Trace, config: EvictionConfig, heads: int) -> int:
    """Return the number of query heads of each kept set."""
    if config.granularity.name == "query":
        return 1
    if config.granularity.name == "layer":
        return heads
    return heads // sets_per_layer(trace, trace.config_index(config.label()))


def set_sums(loss: Floats, group: int) -> Floats:
    """Return (…, set) sums over the heads that share a kept set, of (…, head)."""
    return np.asarray(loss.reshape(*loss.shape[:-1], -1, group).sum(axis=-1))


PAPER_ROLE = "paper"
USUAL_FOLDS, _LEAVE_ONE_OUT_BELOW = 4, 8
Indices = NDArray[np.intp]
Chosen = Mapping[str, Indices]
"""`global`, `layer` or `head` -> (layer, head) index of the α of the sweep that each query head takes."""


@record
class ChosenShares(Record):
    """A choice of α as JSON holds it."""

    SECTION = "alpha table"

    by: str = column("global, layer or head")
    alpha: Any = column("a number, (layer) or (layer, head) shares of stage 1")
    layers: tuple[int, ...] = column("decoder layers of the rows")


def shares_for_json(shares: Mapping[str, AlphaTable]) -> dict[str, ChosenShares]:
    """Return the tables of a choice as JSON has them."""
    return {by: ChosenShares(by, table.to_document()["alpha"], table.layers) for by, table in shares.items()}


@record
class Fold(Record):
    """Samples on which the choices of all other samples are judged.

    Attributes:
        number: from 1.
        judged: (sample,) True for those that are judged.
        chosen: on the others.
        shares: the same as files hold it.
        configs: role -> the configuration of the judged ones: `attention`, `paper`, then each choice.
    """

    SECTION = "alpha fold"

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
        """The configurations without duplicates: the choice for all heads may be the paper's α."""
        return tuple(dict.fromkeys(self.configs.values()))

    def is_in(self, trace: Trace) -> bool:
        """Return whether a trace is of these samples alone, and holds all of the configurations."""
        return set(trace.sample_ids) == set(self.samples) and {*self.distinct} <= {*trace.run.configs}


def choice_levels(sweep: Sweep) -> tuple[str, ...]:
    """Return the levels of choice: one α for all, per layer, and per head where a layer has several kept sets."""
    alone = sweep.group == sweep.loss.shape[-1]
    return (GLOBAL, LAYER) if alone else (GLOBAL, LAYER, HEAD)


def folds(sweep: Sweep, count: int | None = None) -> tuple[Fold, ...]:
    """Return K folds: sample i is judged in fold i mod K; K is 4, and of fewer than eight samples leave-one-out.

    Raises ConfigError for fewer folds than two, or more than samples.
    """
    samples = len(sweep.samples)
    number = count if count is not None else (samples if samples < _LEAVE_ONE_OUT_BELOW else USUAL_FOLDS)
    if not 2 <= number <= samples:
        msg = f"expected 2 to {samples} folds of {samples} samples, got {number}"
        raise ConfigError(msg)
    return tuple(_fold(sweep, index, np.arange(samples) % number == index) for index in range(number))


def check_folds(count: int | None, samples: int) -> None:
    """Raise ConfigError where there are too few samples to choose and judge, or for that many folds."""
    if samples < LEAST_SAMPLES:
        msg = f"{ANALYSIS} chooses on some samples and judges on others: it needs 4 of them, got {samples}"
        raise ConfigError(msg)
    if count is not None and not 2 <= count <= samples:
        msg = f"expected 2 to {samples} folds of {samples} samples, got --folds {count}"
        raise ConfigError(msg)


def choose(sweep: Sweep, trained: NDArray[np.bool_]) -> Chosen:
    """Return the choices of least Σ isolated L1 over the `trained` samples; ties go to the α nearest the paper's."""
    loss = set_sums(sweep.loss[trained].sum(axis=0), sweep.group)
    summed = {GLOBAL: loss.sum(axis=(1, 2), keepdims=True), LAYER: loss.sum(axis=2, keepdims=True), HEAD: loss}
    near = np.lexsort((sweep.alphas, np.abs(sweep.alphas - sweep.alphas[sweep.paper])))
    shape = sweep.loss.shape[2:]
    return {
        by: np.broadcast_to(
            np.repeat(near[summed[by][near].argmin(axis=0)], _heads_per_choice(by, sweep), axis=1), shape
        )
        for by in choice_levels(sweep)
    }


def _heads_per_choice(by: str, sweep: Sweep) -> int:
    """Return the number of neighbouring heads that one choice of a row stands for."""
    return sweep.group if by == HEAD else sweep.loss.shape[-1]


def compose(sweep: Sweep, indices: Indices) -> Floats:
    """Return (sample, layer, head) isolated L1 of the α at `indices`: a head's set depends on its own α alone."""
    return np.asarray(np.take_along_axis(sweep.loss, indices[None, None], axis=1)[:, 0])


def judged_loss(sweep: Sweep, folds: tuple[Fold, ...], by: str) -> Floats:
    """Return (sample, layer, head) isolated L1 of what was chosen on other samples."""
    every = np.empty_like(sweep.baseline_loss)
    for fold in folds:
        every[fold.judged] = compose(sweep, fold.chosen[by])[fold.judged]
    return every


def tables(sweep: Sweep, chosen: Chosen, stem: str = "alpha") -> dict[str, AlphaTable]:
    """Return the tables of a choice by its level, as files hold them."""
    each = {}
    for by, indices in chosen.items():
        shares = sweep.alphas[indices]
        rows = {GLOBAL: shares[:1, :1], LAYER: shares[:, :1], HEAD: shares}[by]
        each[by] = AlphaTable(f"{stem}-{by}.json", by, tuple(map(tuple, rows.tolist())), sweep.layers)
    return each


def _fold(sweep: Sweep, index: int, own: NDArray[np.bool_]) -> Fold:
    chosen, paper = choose(sweep, ~own), sweep.configs[sweep.paper]
    shares = tables(sweep, chosen, f"alpha-fold-{index + 1}")
    return Fold(
        number=index + 1,
        judged=own,
        samples=tuple(name for name, one in zip(sweep.samples, own, strict=True) if one),
        chosen=chosen,
        shares=shares,
        configs={
            BASELINE: sweep.baseline,
            PAPER_ROLE: paper,
            GLOBAL: sweep.configs[int(chosen[GLOBAL][0, 0])],
            **{by: with_alpha(paper, table) for by, table in shares.items() if by != GLOBAL},
        },
    )


def with_alpha(config: EvictionConfig, alpha: AlphaTable) -> EvictionConfig:
    """Return the configuration with a table in place of its α."""
    selection = config.selection
    usual = frozenset(selection.defaults or ()) - {"alpha"}
    return replace(config, selection=replace(selection, options={**selection.options, "alpha": alpha}, defaults=usual))


def unstable_share(sweep: Sweep, folds: tuple[Fold, ...], by: str) -> float:
    """Return the share of layers, or of kept sets, whose choice differs between folds."""
    each = np.stack([fold.chosen[by] for fold in folds])[..., :: _heads_per_choice(by, sweep)]
    return float((each != each[:1]).any(axis=0).mean())
