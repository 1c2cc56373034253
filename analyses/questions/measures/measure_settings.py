"""One budget, granularity and protection: its comparisons, orders and links in every distance."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from perturbkv.analyses.identity import RunIdentity, identity
from perturbkv.analyses.json_values import setting_object
from perturbkv.analyses.measurements import at_step
from perturbkv.analyses.pairing import (
    LEAST_CONFIGS,
    Pair,
    Sides,
    checked,
    configs_of,
    matches,
    pairs,
    ranked_together,
    short_names,
)
from perturbkv.analyses.questions.measures.measure_orders import (
    EachPrompt,
    Linked,
    Order,
    Row,
    each_prompt,
    linked,
    orders,
    row,
    sums,
)
from perturbkv.analyses.stats.arithmetic import plain
from perturbkv.analyses.verdicts import DISTANCES
from perturbkv.configs.choice import Choice
from perturbkv.configs.eviction import EvictionConfig
from perturbkv.configs.selections import L1
from perturbkv.errors import TraceError
from perturbkv.schema import VARIABLES
from perturbkv.trace import Trace

ANALYSIS = "measures"
TREATMENTS = (
    "two-stage", "two-stage(norm=l2)", "attention-unpooled", "hindsight", "hindsight(norm=l2)", "random",
)  # fmt: skip
"""What is compared with the baseline where nobody says otherwise."""
_NEEDED = tuple(
    f"{name}{distance.suffix}"
    for distance in DISTANCES.values()
    for name in ("perturbation_isolated", "perturbation_propagated", "noise_floor", "noise_floor_isolated")
) + ("output_norm_l2",)


@dataclass(frozen=True)
class Setting:
    """Configurations that may be held against each other.

    Attributes:
        name: the budget as the user gave it, and what else tells it from other settings.
        configs: all of the trace's.
        rows: each treatment against its baseline.
        norms: each selection by L2 norms against the same by L1 norms.
        orders: of all configurations, one per kind; empty for fewer than three.
        links: what each measure tells of what is lost; empty likewise.
        each: of `links` what every prompt says.
        identity: of the run.
    """

    name: str
    configs: tuple[EvictionConfig, ...]
    rows: tuple[Row, ...]
    norms: tuple[Row, ...]
    orders: tuple[Order, ...]
    links: tuple[Linked, ...]
    each: EachPrompt
    identity: RunIdentity

    def named(self, config: EvictionConfig) -> str:
        """What tells a configuration from all others of the setting."""
        return _named(config, self.configs)

    def side(self, config: EvictionConfig) -> str:
        """What tells one side of a comparison from all other sides."""
        return _named(config, list(dict.fromkeys(configs_of(_pairs([*self.rows, *self.norms])))))

    def to_dict(self) -> dict[str, Any]:
        """Everything a reader needs, as JSON-able numbers."""
        found: dict[str, Any] = plain(
            {
                "setting": setting_object(self.configs),
                "comparisons": [one.to_dict() for one in self.rows],
                "norms": [one.to_dict() for one in self.norms],
                "orders": [one.to_dict() for one in self.orders],
                "links": self.links,
            }
        )
        return found


def _pairs(rows: Sequence[Row]) -> list[Pair]:
    return [(one.baseline, one.treatment) for one in rows]


def _named(config: EvictionConfig, among: Sequence[EvictionConfig]) -> str:
    return short_names(among)[among.index(config)] or config.selection.name


def settings(trace: Trace, baseline: str, treatments: Sides | None, step: int) -> tuple[Setting, ...]:
    """One entry per setting of the trace in which something is compared.

    Raises TraceError where a side is missing or the trace lacks a distance, and as `head_comparison.summarise`.
    """
    _check_recorded(trace)
    found, moved = _compared(trace, baseline, treatments), sums(at_step(trace, ANALYSIS, step), step)
    made = []
    for name, places in ranked_together(trace.run.configs).items():
        configs = [trace.run.configs[place] for place in places]
        own, norms = [pair for pair in found if pair[0] in configs], _by_norm(configs)
        if not own:
            continue
        ranked = len(places) >= LEAST_CONFIGS
        each = each_prompt(trace, moved, places, step) if ranked else {}
        made.append(
            Setting(
                name=name,
                configs=tuple(configs),
                rows=tuple(row(trace, pair, step) for pair in own),
                norms=tuple(row(trace, pair, step) for pair in norms),
                orders=orders(moved, places, configs) if ranked else (),
                links=linked(each),
                each=each,
                identity=identity(trace, configs, step),
            )
        )
    return tuple(made)


def _compared(trace: Trace, baseline: str, treatments: Sides | None) -> list[Pair]:
    """Every treatment with its baseline, each pair once; by default those of `TREATMENTS` that the trace holds."""
    named = checked(trace, baseline, TREATMENTS if treatments is None else treatments)
    held = [side for side in named if treatments is not None or any(matches(one, side) for one in trace.run.configs)]
    if not held:
        msg = f"{ANALYSIS} compares {', '.join(TREATMENTS)} with {baseline}; got a trace of none of them: name its own"
        raise TraceError(msg)
    return list(dict.fromkeys(pair for side in held for pair in pairs(trace.run, baseline, side)))


def _by_norm(configs: Sequence[EvictionConfig]) -> list[Pair]:
    """Every selection by L2 norms behind the same one by L1 norms, where both are there."""
    found = []
    for config in configs:
        usual = config.selection.usual
        other = Choice(config.selection.name, {**config.selection.options, "norm": L1}, usual and usual | {"norm"})
        first = dataclasses.replace(config, selection=other)
        if config.euclidean and first in configs:
            found.append((configs[configs.index(first)], config))
    return found


def _check_recorded(trace: Trace) -> None:
    """Raise TraceError for a trace of before L2 and cosine distances were recorded."""
    missing = [name for name in _NEEDED if VARIABLES[name].optional and name not in trace.arrays]
    if missing:
        msg = (
            f"{ANALYSIS} needs L2 and cosine distances, and {trace.source or 'this trace'} lacks {missing[0]}"
            f"{f' and {len(missing) - 1} more' if len(missing) > 1 else ''}; record them: perturbkv {ANALYSIS} "
            f"--model {trace.run.model} --dataset {trace.run.dataset}"
        )
        raise TraceError(msg)
