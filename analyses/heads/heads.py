"""Head by head, one baseline against one or several treatments: the result that a notebook holds (paper, figure 2).

How comparisons of heads are told: in a sentence, in tables, in the notes beneath them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from math import isnan
from typing import Any, overload

import numpy as np

from perturbkv.analyses import text
from perturbkv.analyses.heads.head_comparison import HeadComparison, HeadKind, summarise
from perturbkv.analyses.identity import RunIdentity, identity
from perturbkv.analyses.pairing import (
    Sides,
    checked,
    choices,
    common,
    counted,
    folded,
    pair_columns,
    pairs,
    short_names,
    side_names,
)
from perturbkv.analyses.result import Result, Sequenced
from perturbkv.analyses.text import ALIKE, FEW, LESS, MORE, UNDECIDED, Outcome, capital
from perturbkv.analyses.verdicts import DISTANCES
from perturbkv.configs.eviction import EvictionConfig
from perturbkv.display import Table
from perturbkv.errors import ConfigError
from perturbkv.trace import Trace

_PAIR = ["treatment", "#heads\n+ / = / −", "#beyond\nchance\n+ / −", "#share\nbetter", "#Σ over\nbaseline's",
         "#median\nhead's", "#half\nof Σ in"]  # fmt: skip
_PAIRS = ["treatment", "#held /\nfull", "", "#share\nbetter", "#Σ over\nbaseline's", "#beyond\nchance\n+ / −"]
_LETTERS = 20
"""Of a name in a table's first column."""


def conclusion(pairs: Sequence[HeadComparison]) -> str:
    """What to conclude of one pair or of many: propagated first, and what isolated says beside it."""
    return _of_pair(pairs[0]) if len(pairs) == 1 else _of_pairs(pairs)


def tables(pairs: Sequence[HeadComparison]) -> list[Table | str]:
    """Of one pair a table per kind, and what chance would give; of many one table, a row per pair and kind."""
    return _pair_tables(pairs[0]) if len(pairs) == 1 else _pairs_table(pairs)


def notes(pairs: Sequence[HeadComparison]) -> str:
    """A line each on intervals, ties, chance, columns, caches and the noise floor."""
    first, single = pairs[0].propagated, len(pairs) == 1
    lines = [
        text.about_intervals(pairs[0].identity.samples),
        "+ / = / −: heads whose mean over samples is better, tied, worse than the baseline's." if single else "",
        text.ABOUT_TIES,
        f"Beyond chance: {text.about_power(first.decided)}",
        "Share better: mean over samples of each sample's share of heads. Σ: of all heads"
        + ("; half of Σ in: the share of heads that carries half of the baseline's." if single else "."),
        "σ ≤ 0.5: heads that are no evidence for Theorem 3." if single else "",
        "Isolated (isol.): each layer cut on its own; propagated (prop.): earlier layers' errors included.",
        text.ABOUT_HELD,
        _prefills(pairs),
        text.about_floor(first.floor_relative_median),
    ]
    return "\n".join(filter(None, lines))


def _prefills(pairs: Sequence[HeadComparison]) -> str:
    """What prefills of their own took, beside the full one; empty where there are none."""
    sides = [
        side
        for pair in pairs
        for side in zip((pair.baseline, pair.treatment), pair.held, pair.prefill_seconds, strict=False)
    ]
    lined = {config: (share, seconds) for config, share, seconds in sides if not isnan(seconds)}
    if not lined:
        return ""
    names = [name or config.label() for name, config in zip(short_names(tuple(lined)), lined, strict=True)]
    told = [f"{name} {seconds:.2f} s ({text.percent(share)} looked at)"
            for name, (share, seconds) in zip(names, lined.values(), strict=True)]  # fmt: skip
    full = f"the full one {pairs[0].prefill_seconds[2]:.2f} s"
    return f"Prefill, mean over samples, masks dense: {', '.join(told)}; {full}."


def _of_pair(pair: HeadComparison) -> str:
    baseline, treatment = side_names(pair.baseline, pair.treatment)
    found, single = _outcome(pair, "propagated"), f"whether {treatment} moves the output less or more than {baseline}"
    opening = {
        LESS: f"{treatment} moves the output less than {baseline}: the propagated sum falls to",
        MORE: f"{treatment} moves the output more than {baseline}: the propagated sum rises to",
        ALIKE: f"{treatment} and {baseline} differ in no head beyond rounding: the propagated sum is",
        UNDECIDED: f"it is not decided {single}: the propagated sum is",
        FEW: f"{text.too_few(pair.identity.samples)} {single}: the propagated sum is",
    }[found.verdict]
    where = [counted(pair.identity.samples, "sample"), f"budget {pair.baseline.budget}", *_looked_at(pair)]
    told = f"{capital(opening, treatment)} {found.shown} of {baseline}'s{_heads(pair, found)}"
    return f"{told} ({', '.join(where)}). {_beside(pair, found)}"


def _looked_at(pair: HeadComparison) -> list[str]:
    """The distance and the step, where they are not the usual ones."""
    distance = [] if pair.distance == "l1" else [str(DISTANCES[pair.distance])]
    return distance + ([f"step {pair.step}"] if pair.step else [])


def _outcome(pair: HeadComparison, kind: str, name: str = "") -> Outcome:
    found: HeadKind = getattr(pair, kind)
    tied = found.tied_count == found.verdict.size
    return text.by_ratio(name, found.sum_ratio, found.sum_ratio_interval, tied, pair.identity.samples)


def _heads(pair: HeadComparison, total: Outcome) -> str:
    """The share of heads beside the sum, and whether it says otherwise."""
    kind = pair.propagated
    share = text.by_share("", kind.better_share, kind.better_share_interval, pair.identity.samples)
    if total.verdict in (LESS, MORE) and share.verdict == UNDECIDED:
        return f", though whether most heads move it less is not decided: {share.shown}"
    word = {(LESS, LESS): "though only", (MORE, MORE): "though"}.get((total.verdict, share.verdict), "and")
    return f", {word} {share.shown} of the heads move it less"


def _beside(pair: HeadComparison, propagated: Outcome) -> str:
    """What the isolated perturbation says: the same, or not."""
    own, kind = _outcome(pair, "isolated"), pair.isolated
    share = text.percent(kind.better_share, kind.better_share_interval)
    numbers_too = f"{own.shown} of the sum, {share} of the heads"
    if own.verdict == FEW:
        return f"Isolated, each layer cut on its own: {numbers_too}."
    word = {UNDECIDED: "not decided", ALIKE: "no difference beyond rounding"}.get(own.verdict, own.verdict)
    if own.verdict == propagated.verdict:
        same = f"{word} either" if own.verdict == UNDECIDED else f"{word} too"
        return f"Isolated, each layer cut on its own, {same}: {numbers_too}."
    return f"But isolated, each layer cut on its own, {word}: {numbers_too}."


def _of_pairs(pairs: Sequence[HeadComparison]) -> str:
    both = [side_names(pair.baseline, pair.treatment) for pair in pairs]
    baselines, treatments = (list(dict.fromkeys(names[place] for names in both)) for place in (0, 1))
    baseline = baselines[0] if len(baselines) == 1 else "its baseline"
    treatment = treatments[0] if len(treatments) == 1 else "the treatment"
    names, samples = _names(pairs, both), pairs[0].identity.samples
    propagated, isolated = (
        [_outcome(pair, kind, name) for pair, name in zip(pairs, names, strict=True)]
        for kind in ("propagated", "isolated")
    )
    words = {LESS: f"less than {baseline}", MORE: "more"}
    main = text.conclusion_of_many(propagated, f"{treatment} moves the output", words, samples)
    few = any(one.verdict == FEW for one in isolated)
    counts = "" if few else f"{text.tally_outcomes(isolated, {LESS: LESS, MORE: MORE})}, "
    at = "".join(f", {words}" for words in _looked_at(pairs[0]))
    return (
        f"{capital(main, *treatments)}: the propagated sum over {baseline}'s goes "
        f"{text.outcome_extremes(propagated)}{at}. Isolated, each layer cut on its own: "
        f"{counts}{text.outcome_extremes(isolated)}."
    )


def _names(pairs: Sequence[HeadComparison], both: Sequence[tuple[str, str]]) -> list[str]:
    """What tells each pair from the others: its sides where they are not all the same, and its setting."""
    several = [len({names[place] for names in both}) > 1 for place in (0, 1)]
    found = []
    crossing = any(pair.baseline.policy.name != pair.treatment.policy.name for pair in pairs)
    settings = text.settings([pair.baseline for pair in pairs], *(["policy"] if crossing else []))
    for (first, second), words in zip(both, settings, strict=True):
        own = f"{first} → {second}" if several[0] else second if several[1] else ""
        found.append(" ".join(filter(None, (own and f"with {own}", words))))
    return found


def _pair_tables(pair: HeadComparison) -> list[Table | str]:
    found: list[Table | str] = [f"baseline {pair.baseline.label()}"]
    for kind in ("isolated", "propagated"):
        title = f"{kind} perturbation, {DISTANCES[pair.distance]}"
        found.append(Table(title, _PAIR, [[_treatment(pair), *_row(getattr(pair, kind))]]))
        found.append(f"  {_name(pair)}: {text.about_flips(getattr(pair, kind).decided)}\n")
    return found


def _pairs_table(pairs: Sequence[HeadComparison]) -> list[Table | str]:
    """A row per pair and kind; JSON holds the rest."""
    shared = common([side for pair in pairs for side in (pair.baseline, pair.treatment)])
    baselines = ", ".join(dict.fromkeys(side_names(pair.baseline, pair.treatment)[0] for pair in pairs))
    rows = []
    for pair, words in zip(pairs, short_names([pair.baseline for pair in pairs], "selection"), strict=True):
        rows.append([folded(_name(pair), _LETTERS), text.held(pair.held[1]), "isol.", *_short_row(pair.isolated)])
        rows.append([folded(words, _LETTERS), "", "prop.", *_short_row(pair.propagated)])
    title = f"isolated and propagated perturbation, {DISTANCES[pairs[0].distance]}"
    return [f"baseline {baselines} · {shared}", Table(title, _PAIRS, rows)]


def _short_row(kind: HeadKind) -> list[str]:
    return [
        text.percent(kind.better_share, kind.better_share_interval),
        text.decimal(kind.sum_ratio, kind.sum_ratio_interval),
        f"{kind.decided.better}/{kind.decided.worse}",
    ]


def _row(kind: HeadKind) -> list[str]:
    return [
        text.verdicts(kind.verdict),
        f"{kind.decided.better}/{kind.decided.worse}",
        text.percent(kind.better_share, kind.better_share_interval, "\n"),
        text.decimal(kind.sum_ratio, kind.sum_ratio_interval, apart="\n"),
        text.decimal(kind.median_ratio, kind.median_ratio_interval, apart="\n"),
        text.percent(kind.half_share),
    ]


def _name(pair: HeadComparison) -> str:
    """The treatment in as few words as tell it from its baseline."""
    (baseline, _), (policy, selection) = choices(pair.baseline, pair.treatment)
    return selection if policy == baseline else f"{policy}:{selection}"


def _treatment(pair: HeadComparison) -> str:
    """The treatment, what both caches hold, and how many of its heads are flagged."""
    held = " → ".join(text.held(share) for share in pair.held)
    return "\n".join([folded(_name(pair), _LETTERS), f"held {held}", f"σ ≤ 0.5: {int(pair.flagged.sum())}"])


@dataclass(frozen=True, repr=False)
class HeadComparisons(Sequenced[HeadComparison], Result):
    """Comparisons of two configurations each, head by head; a sequence of them, whose slices are results again.

    `plot` draws of one pair a scatter per kind, a point per head; of several a panel each, propagated.

    Attributes:
        members: the comparisons, those of one baseline together.
        identity: of the run, with every configuration that is compared.
    """

    members: tuple[HeadComparison, ...]
    identity: RunIdentity

    def __post_init__(self) -> None:
        if not self.members:
            msg = "expected at least one comparison, got none; take a slice that holds one"
            raise ConfigError(msg)

    @overload
    def __getitem__(self, place: int) -> HeadComparison: ...

    @overload
    def __getitem__(self, place: slice) -> HeadComparisons: ...

    def __getitem__(self, place: int | slice) -> HeadComparison | HeadComparisons:
        if not isinstance(place, slice):
            return self.members[place]
        held = self.members[place]
        return HeadComparisons(held, replace(self.identity, configs=_shown(held)))

    def conclusion(self) -> str:
        """Whether the treatment moves the attention output less, propagated and isolated, with intervals and n."""
        return conclusion(self.members)

    def tables(self) -> Sequence[Table | str]:
        """Of one pair a table per kind of perturbation; of several one table, two rows each."""
        return tables(self.members)

    def notes(self) -> str:
        """What intervals, ties and columns mean, a line each."""
        return notes(self.members)

    def to_dict(self) -> dict[str, Any]:
        """`comparisons`: one object per pair, as `docs/json.md` says."""
        return {"comparisons": [pair.to_dict() for pair in self.members]}

    def records(self) -> list[dict[str, Any]]:
        """A row per pair × kind × layer × head.

        Means over samples and the noise floor are in the distance's unit; `verdict` is that of the means, `decided`
        that of the corrected tests: 1 less than the baseline, 0 tied or undecided, −1 more; `flagged`: σ ≤ 0.5.
        """
        return [row for pair in self.members for kind in ("isolated", "propagated") for row in _rows(pair, kind)]


def compare_heads(
    trace: Trace,
    baseline: str = "attention",
    treatments: Sides = "two-stage",
    *,
    step: int = 0,
    distance: str = "l1",
) -> HeadComparisons:
    """Which heads does a selection help, and by how much? Perturbation per query head (paper, figure 2; METHOD).

    Every treatment is compared with the baseline wherever the trace holds both with the same budget, α and so on: one
    pair each. Only complete samples that have the step count.

    Args:
        trace: from `measure` or `read_trace`.
        baseline: a selection (`attention`), a policy (`h2o`), or both (`adakv:attention`).
        treatments: likewise, one or several.
        step: which decode step, from 0.
        distance: `l1`, `l2` or `cosine`: between a head's contribution to the attention output with the full cache and
            with the evicted one, each of d_model numbers; L1 and L2 in the output's own unit, cosine from 0 to 2.

    Returns the pairs as one result. Its arrays are (layer, head), means over samples.

    Raises TraceError where the trace has no complete sample or no such pair, or lacks the distance; ConfigError for a
    step that it does not have, and for sides that are no names; UnknownNameError for an unknown distance.

    >>> import perturbkv as pk
    >>> found = pk.compare_heads(trace, "attention", "two-stage")
    >>> len(found), found[0].propagated.verdict.shape  # (layer, head)
    (1, (2, 2))
    >>> shown = found.to_frame().query("kind == 'propagated'")
    >>> shown["verdict"].tolist() == found[0].propagated.verdict.ravel().tolist()
    True
    """
    found = [
        pair for treatment in checked(trace, baseline, treatments) for pair in pairs(trace.run, baseline, treatment)
    ]
    order = list(dict.fromkeys(first for first, _ in found))
    found.sort(key=lambda pair: order.index(pair[0]))
    compared = tuple(summarise(trace, *pair, step=step, distance=distance) for pair in found)
    return HeadComparisons(compared, identity(trace, _shown(compared), step))


def _shown(pairs: Sequence[HeadComparison]) -> tuple[EvictionConfig, ...]:
    """Every configuration once."""
    return tuple(dict.fromkeys(side for pair in pairs for side in (pair.baseline, pair.treatment)))


def _rows(pair: HeadComparison, name: str) -> Iterator[dict[str, Any]]:
    kind = getattr(pair, name)
    about = {**pair_columns(pair.baseline, pair.treatment), "distance": pair.distance, "step": pair.step, "kind": name}
    for here in np.ndindex(kind.verdict.shape):
        yield {
            **about,
            "layer": pair.identity.layer(here[0]),
            "head": here[1],
            "baseline_mean": float(kind.baseline_mean[here]),
            "treatment_mean": float(kind.treatment_mean[here]),
            "noise_floor": float(kind.floor_mean[here]),
            "verdict": int(kind.verdict[here]),
            "decided": int(kind.decided.verdict[here]),
            "p": float(kind.decided.p[here]),
            "flagged": bool(pair.flagged[here]),
        }
