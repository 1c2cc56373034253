"""One budget, granularity and protection: its comparisons, orders and correlations in every distance."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from perturbkv.analyses.columns import Line, Record, column, derived, record
from perturbkv.analyses.identity import RunIdentity, identity
from perturbkv.analyses.json_values import setting_object
from perturbkv.analyses.measurements import Measurements
from perturbkv.analyses.pairing import (
    LEAST_CONFIGS,
    Pair,
    Sides,
    check_sides,
    comparable_groups,
    configs_of,
    matches,
    pairs,
    short_names,
)
from perturbkv.analyses.questions.measures.measure_orders import (
    ANALYSIS,
    EachPrompt,
    LossCorrelation,
    Order,
    Row,
    correlate_each_prompt,
    correlations,
    head_sums,
    orders,
    row,
)
from perturbkv.analyses.verdicts import DISTANCES
from perturbkv.configs.choice import Choice
from perturbkv.configs.eviction import EvictionConfig
from perturbkv.configs.selections import L1
from perturbkv.errors import TraceError
from perturbkv.schema import VARIABLES
from perturbkv.trace import Trace

TREATMENTS = (
    "two-stage", "two-stage(norm=l2)", "attention-unpooled", "hindsight", "hindsight(norm=l2)", "random",
)  # fmt: skip
"""Treatments that are compared with the baseline by default."""
_NEEDED = tuple(
    f"{name}{distance.suffix}"
    for distance in DISTANCES.values()
    for name in ("perturbation_isolated", "perturbation_propagated", "noise_floor", "noise_floor_isolated")
) + ("output_norm_l2",)


@record
class Setting(Record):
    """Configurations that share budget, granularity, precision and protection, so that they may be compared.

    Attributes:
        name: the budget as the user gave it, and what else distinguishes it from other settings.
        configs: all of the trace's.
        each: each prompt's values of `links`.
        identity: of the run.
    """

    SECTION = "measures setting"

    name: str
    configs: tuple[EvictionConfig, ...]
    rows: tuple[Row, ...] = column("each treatment against its baseline", key="comparisons")
    norms: tuple[Row, ...] = column("each selection by L2 norms against the same by L1 norms")
    orders: tuple[Order, ...] = column(
        "of all configurations by isolated and by propagated perturbation; empty for fewer than three"
    )
    links: tuple[LossCorrelation, ...] = column("how each measure goes with what is lost; empty likewise")
    each: EachPrompt
    identity: RunIdentity

    @derived(key="setting")
    def choices(self) -> dict[str, Any]:
        """Choices that all configurations share; others and the label are absent."""
        return setting_object(self.configs)

    def config_name(self, config: EvictionConfig) -> str:
        """Return what distinguishes a configuration from all others of the setting."""
        return _name_among(config, self.configs)

    def side(self, config: EvictionConfig) -> str:
        """Return what distinguishes one side of a comparison from all other sides."""
        return _name_among(config, list(dict.fromkeys(configs_of(_pairs([*self.rows, *self.norms])))))

    def baseline_name(self) -> str:
        """Return the baseline of the rows in words."""
        names = list(dict.fromkeys(self.side(row.baseline) for row in self.rows))
        return names[0] if len(names) == 1 else "its baseline"

    def lines(self) -> Sequence[Line]:
        """Return a line per treatment, propagated, then those of selections by L2 norms."""
        rows = [Line(self.side(row.treatment), (row.ratios("propagated"),)) for row in self.rows]
        norms = [Line(self.side(row.baseline), (row.ratios("propagated"),)) for row in self.norms]
        return [*rows, *([Line("by L2 over by L1 norms:", ()), *norms] if norms else [])]


def _pairs(rows: Sequence[Row]) -> list[Pair]:
    return [(one.baseline, one.treatment) for one in rows]


def _name_among(config: EvictionConfig, among: Sequence[EvictionConfig]) -> str:
    return short_names(among)[among.index(config)] or config.selection.name


def settings(trace: Trace, baseline: str, treatments: Sides | None, step: int) -> tuple[Setting, ...]:
    """Return every setting of the trace in which something is compared.

    Raises TraceError where a side is missing or the trace lacks a distance, and as `head_comparison.summarise`.
    """
    _check_distances(trace)
    chosen, measured = _compared(trace, baseline, treatments), Measurements(trace, ANALYSIS, step)
    sums, results = head_sums(measured), []
    for name, indices in comparable_groups(trace.run.configs).items():
        configs = [trace.run.configs[index] for index in indices]
        own, norms = [pair for pair in chosen if pair[0] in configs], _by_norm(configs)
        if not own:
            continue
        ranked = len(indices) >= LEAST_CONFIGS
        each = correlate_each_prompt(trace, measured, sums, indices) if ranked else {}
        results.append(
            Setting(
                name=name,
                configs=tuple(configs),
                rows=tuple(row(trace, pair, step) for pair in own),
                norms=tuple(row(trace, pair, step) for pair in norms),
                orders=orders(sums, indices, configs) if ranked else (),
                links=correlations(each),
                each=each,
                identity=identity(trace, configs, step),
            )
        )
    return tuple(results)


def _compared(trace: Trace, baseline: str, treatments: Sides | None) -> list[Pair]:
    """Return every treatment with its baseline, each pair once; by default those of `TREATMENTS` that are there."""
    sides = check_sides(trace, baseline, TREATMENTS if treatments is None else treatments)
    there = [side for side in sides if treatments is not None or any(matches(one, side) for one in trace.run.configs)]
    if not there:
        msg = f"{ANALYSIS} compares {', '.join(TREATMENTS)} with {baseline}; got a trace of none of them: name its own"
        raise TraceError(msg)
    return list(dict.fromkeys(pair for side in there for pair in pairs(trace.run, baseline, side)))


def _by_norm(configs: Sequence[EvictionConfig]) -> list[Pair]:
    """Return the pairs of the same selection by L1 and by L2 norms."""
    chosen = []
    for config in configs:
        usual = config.selection.defaults
        selection = Choice(config.selection.name, {**config.selection.options, "norm": L1}, usual and usual | {"norm"})
        first = dataclasses.replace(config, selection=selection)
        if config.euclidean and first in configs:
            chosen.append((configs[configs.index(first)], config))
    return chosen


def _check_distances(trace: Trace) -> None:
    """Raise TraceError for a trace without L2 and cosine distances."""
    missing = [name for name in _NEEDED if VARIABLES[name].optional and name not in trace.arrays]
    if missing:
        msg = (
            f"{ANALYSIS} needs L2 and cosine distances, and {trace.source or 'this trace'} lacks {missing[0]}"
            f"{f' and {len(missing) - 1} more' if len(missing) > 1 else ''}; record them: perturbkv question "
            f"{ANALYSIS} --model {trace.run.model} --dataset {trace.run.dataset}"
        )
        raise TraceError(msg)
