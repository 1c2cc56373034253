"""Perturbation over the decode steps: its growth in each head, and how long one selection's advantage lasts.

Both runs decode the full run's tokens. The error grows with what evicted entries lack in later tokens' keys and values,
and shrinks with the evicted entries' share of a growing cache. Steps end where a sample's text ends: a step is over the
samples that have it, growth over each sample's own first and last third.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import isnan
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from perturbkv.analyses import text
from perturbkv.analyses.columns import Line, column, record, table
from perturbkv.analyses.conclusions import Case, Claim, compare_sides
from perturbkv.analyses.horizon.compressions import places_text
from perturbkv.analyses.horizon.growth import (
    ANALYSIS,
    DRAFTED,
    FLOORS,
    STEP,
    Advantage,
    ConfigHorizon,
    Curve,
    advantages,
    config_horizon,
    relative_perturbation,
    steps_of,
    variable_by_step,
)
from perturbkv.analyses.identity import RunIdentity, identity
from perturbkv.analyses.json_values import config_columns
from perturbkv.analyses.measurements import Floats, Measurements
from perturbkv.analyses.result import Result
from perturbkv.analyses.sides import choose_sides, side_indices
from perturbkv.analyses.text import factor, sample_note
from perturbkv.analyses.verdicts import LESS, MORE
from perturbkv.display import Part, plural
from perturbkv.trace import Trace

if TYPE_CHECKING:
    from perturbkv.captions import CaptionedFigure

_LISTED = 6
"""Largest number of heads that are named as growing most."""


@record
class Horizon(
    Result,
    section="horizon",
    rows="steps",
    shown=("cache_share", "first", "growth", "head_counts", "first_ratio", "last_ratio"),
):
    """Perturbation of the requested configurations over the decode steps.

    Attributes:
        identity: of the run.
    """

    identity: RunIdentity
    steps: int = column("decode steps of the longest text")
    samples_at_step: NDArray[np.int64] = column("samples whose text reaches it", dims=STEP)
    samples_with_growth: int = column("samples of three steps or more, of which growth is known")
    samples_too_short_for_growth: int = column("samples of fewer than three steps")
    noise_floor: Floats = column("propagated, with everything kept, over Σ ‖o_h‖₁", dims=STEP)
    configs: tuple[ConfigHorizon, ...] = column(
        "one per configuration: in the order of the sides, then by α and budget"
    )
    advantages: tuple[Advantage, ...] = column(
        "each later side against the first, where the trace holds both alike in everything else"
    )

    def claims(self) -> Sequence[Claim]:
        """Return whether a selection's advantage lasts, and whether the error grows."""
        cases = [one.cases(self.identity.name_of(one.treatment)) for one in self.advantages]
        first = compare_sides(self.advantages, [one for one, _ in cases], where=" in the first third")
        last = compare_sides(self.advantages, [one for _, one in cases], where=" in the last third")
        curves = [(name, config.curves["propagated"]) for name, config in self._with_names(self.configs)]
        growth = [Case.number(name, curve.growth, curve.growth_interval, factor, 1) for name, curve in curves]
        where, rounding = " from the first third to the last", "it is within rounding"
        grows = Claim(
            "the error",
            "",
            growth,
            {MORE: "grows", LESS: "shrinks"},
            where=where,
            noun="configuration",
            missing=rounding,
        )
        return [*(claim for both in zip(first, last, strict=True) for claim in both), grows]

    def scope(self) -> Sequence[str]:
        """Return what the claims are of."""
        return [
            "propagated, all heads",
            f"up to {plural(self.steps, 'decode step')}",
            sample_note(self.samples_with_growth),
        ]

    def title(self) -> str:
        """Return the table's title: the quantity, the number of steps and the shared choices."""
        return f"propagated Σ L / Σ ‖o_h‖₁ over {self.steps} decode steps: {self.identity.shared}"

    def lines(self) -> Sequence[Line]:
        """Return a line per configuration."""
        by_treatment = {advantage.treatment: advantage for advantage in self.advantages}
        return [
            Line(name, list(filter(None, (config, config.curves["propagated"], by_treatment.get(config.config)))))
            for name, config in self._with_names(self.configs)
        ]

    def body(self) -> list[Part]:
        """Return the table, and a second one where caches are compressed again."""
        lines = [Line(name, (one.compressions,)) for name, one in self._with_names(self.configs) if one.compressions]
        title = f"caches compressed again {self.identity.compressed_again}"
        names = ("times", "most_held", "jump", "between", "added", "gone")
        return [*super().body(), *([table(title, lines, names, self.FIRST)] if lines else [])]

    def interval_note(self) -> str:
        """Return the note on n and intervals."""
        return text.intervals_note(self.samples_with_growth)

    def caveats(self) -> Sequence[str]:
        """Return notes on samples that lack steps, on dashes in the table, and on tests without power."""
        counts, short = self.samples_at_step, self.samples_too_short_for_growth
        ends = f"Texts end: step 0 is of {plural(int(counts[0]), 'sample')}, the last step of {counts[-1]}"
        left_out = f"; {short} of fewer than 3 steps have no growth" if short else ""
        never = [
            name for name, one in self._with_names(self.configs) if one.compressions and not one.compressions.times
        ]
        dash = any(isnan(config.curves["propagated"].growth) for config in self.configs)
        return [
            *([f"{ends}{left_out}."] if counts[0] != counts[-1] or short else []),
            *([f"Never compressed after the first step, as texts end before: {', '.join(never)}."] if never else []),
            *(["A dash: within two noise floors."] if dash else []),
            *self.configs[0].curves["propagated"].sign_flips.power_caveat(),
        ]

    def details(self) -> Sequence[Part]:
        """Return a table of both kinds of perturbation, the heads that grow most, and the noise floor."""
        lines = [
            Line(name if curve.kind == "propagated" else "", (curve,))
            for name, config in self._with_names(self.configs)
            for curve in config.all_curves
        ]
        return [
            table(
                "Σ L / Σ ‖o_h‖₁ over all heads, by kind of perturbation",
                lines,
                ("kind", "first", "last", "growth", "head_counts"),
                "configuration",
            ),
            "Heads that grow most, as layer-head ×factor (propagated, beyond chance):",
            *(
                f"  {name}: {self._fastest_heads(config.curves['propagated'])}"
                for name, config in self._with_names(self.configs)
            ),
            "Growth: each sample's last third of its steps over its first.",
            *(line for name, config in self._with_names(self.configs) for line in self._gone_lines(name, config)),
            *self._draft_parts(),
            f"Noise floor: {float(self.noise_floor.max()):.1e} of Σ ‖o_h‖₁ (propagated, the largest step's).",
        ]

    def records(self) -> list[dict[str, Any]]:
        """Return a row per configuration and step: relative L1, KL in nat, shares of equal and of taken tokens."""
        return [
            {
                **config_columns(config.config),
                "step": step,
                "samples": int(count),
                **{kind: float(curve.relative[step]) for kind, curve in config.curves.items()},
                "kl": float(config.kl[step]),
                "top1": float(config.top1[step]),
                "draft_taken": float(config.draft.by_step[step]) if config.draft else None,
                "noise_floor": float(self.noise_floor[step]),
                **({} if config.compressions is None else {"held": float(config.compressions.held[step])}),
            }
            for config in self.configs
            for step, count in enumerate(self.samples_at_step)
        ]

    def plot_heads(self, width_mm: float | None = None, style: str = "screen") -> CaptionedFigure:
        """Return a figure of each head's growth as maps of layer × head."""
        return self._draw("Horizon.plot_heads", width_mm, style)

    def plot_steps(self, width_mm: float | None = None, style: str = "screen") -> CaptionedFigure:
        """Return a figure of the whole text at a glance: steps across, layers down, compressions marked."""
        return self._draw("Horizon.plot_steps", width_mm, style)

    def _draft_parts(self) -> list[Part]:
        """Return the table of what the full cache takes of each draft, with notes, where the trace tells."""
        drafts = [Line(name, (config.draft,)) for name, config in self._with_names(self.configs) if config.draft]
        if not drafts:
            return []
        short = int(self.samples_at_step[0] - (self.samples_at_step[DRAFTED - 1] if self.steps >= DRAFTED else 0))
        ended = f"Without {DRAFTED} drafted tokens in a row: {plural(short, 'sample')} of fewer than {DRAFTED} steps."
        return [
            table(
                "an evicted cache drafts, the full cache verifies by rejection sampling",
                drafts,
                ("taken", "in_a_row", "per_verification"),
                self.FIRST,
            ),
            (
                "Draft taken: Σ min(p, q) of the full and the evicted next-token distribution, the probability that "
                "rejection sampling takes a token drawn from q; in a row: steps counted as independent given the "
                "text. Under greedy decoding a token is taken where both would pick the same one."
            ),
            *([ended] if short else []),
        ]

    def _gone_lines(self, name: str, config: ConfigHorizon) -> list[str]:
        """Return where the entries stood that went, and the heads that attend most to what is gone, as text."""
        found = config.compressions
        if found is None:
            return []
        most = sorted(((float(share), index) for index, share in np.ndenumerate(found.gone_by_head)), reverse=True)
        heads = (f"{self.identity.layer(index[0])}-{index[1]} {text.percent(share)}" for share, index in most[:_LISTED])
        return [
            f"{name}: entries that went: {places_text(found.went_by_place)}; of Σ A ν at a compression: "
            f"{places_text(found.went_output_by_place)}; attention on what is gone: "
            f"{places_text(found.gone_by_place)}, most in heads {' '.join(heads)}."
        ]

    def _fastest_heads(self, curve: Curve) -> str:
        """Return the heads whose perturbation grows beyond chance as text, the fastest first: '3-1 ×4.2 0-2 ×3.9'."""
        grows = (curve.head_verdict == 1) & (curve.head_growth > 0)  # a sum over samples may be noise where most grow
        ranked = sorted(
            ((float(curve.head_growth[index]), index) for index in zip(*grows.nonzero(), strict=True)), reverse=True
        )
        shown = (f"{self.identity.layer(layer)}-{head} ×{growth:.1f}" for growth, (layer, head) in ranked[:_LISTED])
        return " ".join(shown) or "none"


def horizon(trace: Trace, compare: str | Sequence[str] | None = None) -> Horizon:
    """Follow the perturbation over the decode steps: its growth, and whether one selection's advantage lasts.

    Curves are Σ L1 / Σ ‖o_h‖₁ over all heads, (step,), propagated and isolated (METHOD: the quantities), teacher-forced
    on the full run's own text; growth is the last third of a sample's steps over its first.

    Args:
        trace: what was measured, over three decode steps or more.
        compare: selections, policies, or `policy:selection`; the others are compared with the first. None: attention
            and two-stage, or all that a trace without two-stage has.

    Raises ConfigError where no text has three decode steps, TraceError where a side is not there, or the trace has no
    complete sample or not what is needed.

    Example, of a `trace` of 3 decode steps:
        >>> import perturbkv as pk
        >>> pk.horizon(trace).configs[0].curves["propagated"].relative.shape
        (3,)
    """
    if compare is None:
        first, others = choose_sides(trace, None, None)
        compare = (first, *others)
    sides = [compare] if isinstance(compare, str) else list(compare)
    measured = Measurements(trace, ANALYSIS, by_step=True)
    steps = steps_of(measured.trace)
    indices = list(dict.fromkeys(index for side in sides for index in side_indices(trace.run, side)))
    norm = variable_by_step(measured, "output_norm", steps)
    floors = {kind: variable_by_step(measured, name, steps) for kind, name in FLOORS.items()}
    return Horizon(
        identity=identity(trace, [trace.run.configs[index] for index in indices]),
        steps=steps.measured.shape[1],
        samples_at_step=steps.measured.sum(axis=0),
        samples_with_growth=int(steps.long_enough.sum()),
        samples_too_short_for_growth=int((~steps.long_enough).sum()),
        noise_floor=relative_perturbation(floors["propagated"], norm),
        configs=tuple(config_horizon(measured, index, norm, floors, steps) for index in indices),
        advantages=advantages(measured, sides, steps),
    )
