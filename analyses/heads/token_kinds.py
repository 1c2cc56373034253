"""Heads compared by kind of the decoded token: special, formatting, number, name or word (METHOD: kinds of tokens)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import nan

import numpy as np

from perturbkv.analyses import columns, text
from perturbkv.analyses.columns import Line, Record, column, interval, record
from perturbkv.analyses.conclusions import Case
from perturbkv.analyses.heads.head_comparison import (
    ANALYSIS,
    EQUAL_SETS,
    HeadComparison,
    perturbation_and_floor,
    select_sides,
    sum_ratio,
)
from perturbkv.analyses.measurements import Measurements
from perturbkv.analyses.names import PairRecord, pair_names, pairs_of
from perturbkv.analyses.stats.intervals import OptionalInterval
from perturbkv.analyses.verdicts import LESS, MORE, UNDECIDED, Mask, verdicts
from perturbkv.configs.eviction import EvictionConfig
from perturbkv.display import Table
from perturbkv.escaping import escape_line
from perturbkv.schema import TEXT, TOKEN_KINDS
from perturbkv.storage.trace.texts import token_texts
from perturbkv.trace import Trace, sample_arrays

_DECIDED = (LESS, MORE)
KINDS_NOTE = (
    "By kind: means over a sample's steps that decode such a token; without it: propagated, at all its other steps."
)


@record
class TokenKind(PairRecord, Record, section="kind of token"):
    """A pair of configurations compared at the decode steps of one kind of token: a sample's number is their mean."""

    baseline: EvictionConfig = column("what is compared with")
    treatment: EvictionConfig = column("what is compared")
    kind: str = column("special, formatting, number, name or word")
    samples: int = column("samples that decode such a token", heading="#samples")
    steps: int = column("decode steps that do, of all samples", heading="#steps")
    isolated_ratio: float = column(
        "isolated, treatment over baseline, summed over heads and samples", heading="#isolated"
    )
    isolated_ratio_interval: OptionalInterval = interval()
    propagated_ratio: float = column("the same, propagated", heading="#propagated")
    propagated_ratio_interval: OptionalInterval = interval()
    rest_ratio: float = column("propagated, of the steps of all other tokens; NaN without any", heading="#without\nit")
    rest_ratio_interval: OptionalInterval = interval()
    differs: bool = column("whether the propagated difference is decided, with the opposite sign of that at all steps")
    makes_sign: bool = column(
        "whether the sign of the difference at all steps, or that it is undecided, comes from this kind alone"
    )

    def remarks(self) -> list[str]:
        """Return in words how the kind differs from all steps, and what these are without it; empty for neither."""
        own = text.relative_difference(self.propagated_ratio, self.propagated_ratio_interval)
        rest = text.relative_difference(self.rest_ratio, self.rest_ratio_interval)
        told = {f"{self.kind} tokens {own}": self.differs, f"without {self.kind} tokens {rest}": self.makes_sign}
        return [words for words, is_so in told.items() if is_so]


def compare_token_kinds(measured: Measurements, comparisons: Sequence[HeadComparison]) -> tuple[TokenKind, ...]:
    """Return each comparison by kind of the decoded token, in the order of `TOKEN_KINDS`; empty where none is known.

    `measured` is what the comparisons were made from.
    """
    if "token_kind" not in measured:
        return ()

    def select(*kinds: str) -> Measurements:
        return Measurements(measured.trace, measured.analysis, measured.step, kinds=kinds)

    numbers = np.unique(measured.trace.get("token_kind", measured.analysis)[measured.counted])
    known = [kind for number, kind in enumerate(TOKEN_KINDS) if number and number in numbers]
    parts = {kind: (select(kind), select(*(other for other in TOKEN_KINDS if other != kind))) for kind in known}
    found = []
    for pair in comparisons:
        sides = measured.index(pair.baseline), measured.index(pair.treatment)
        same = {
            name: dict(zip(measured.sample_ids, equal(measured.trace, *sides), strict=True))
            for name, equal in EQUAL_SETS.items()
        }
        found += [_compare(pair, kind, *both, same) for kind, both in parts.items()]
    return tuple(found)


EqualSets = Mapping[str, Mapping[str, Mask]]
"""Isolated or propagated -> sample id -> (layer, head) True where kept sets imply equal perturbations."""


def _compare(pair: HeadComparison, kind: str, own: Measurements, rest: Measurements, same: EqualSets) -> TokenKind:
    """Return a pair at the steps of one kind, `own`, beside those of all others, `rest`, which may have no sample."""
    isolated, isolated_interval = _sum_ratio(pair, own, "isolated", same["isolated"])
    propagated, propagated_interval = _sum_ratio(pair, own, "propagated", same["propagated"])
    others, others_interval = _sum_ratio(pair, rest, "propagated", same["propagated"])
    whole = pair.propagated.case()
    decided_without = others.verdict in _DECIDED
    unlike = others.verdict in (*_DECIDED, UNDECIDED) and _is_across(whole, others)
    turned_without = whole.verdict in _DECIDED and unlike
    return TokenKind(
        baseline=pair.baseline,
        treatment=pair.treatment,
        kind=kind,
        samples=own.samples,
        steps=int(own.counted.sum()),
        isolated_ratio=isolated.value,
        isolated_ratio_interval=isolated_interval,
        propagated_ratio=propagated.value,
        propagated_ratio_interval=propagated_interval,
        rest_ratio=others.value,
        rest_ratio_interval=others_interval,
        differs=propagated.verdict in _DECIDED and _is_across(propagated, whole),
        makes_sign=decided_without if whole.verdict == UNDECIDED else turned_without,
    )


def _sum_ratio(
    pair: HeadComparison, part: Measurements, name: str, same: Mapping[str, Mask]
) -> tuple[Case, OptionalInterval]:
    """Return treatment over baseline, isolated or propagated by `name`; NaN where no sample has such a step."""
    if not part.samples:
        return Case("", nan, ""), None
    values, floor = perturbation_and_floor(part, name, pair.distance)
    equal = np.stack([same[sample] for sample in part.sample_ids])
    both = select_sides(values, (part.index(pair.baseline), part.index(pair.treatment)), equal)
    ratio, interval = sum_ratio(*both)
    return Case.ratio("", ratio, interval, not verdicts(*both, floor, pair.distance).any()), interval


def _is_across(one: Case, other: Case) -> bool:
    """Return whether two ratios lie on different sides of 1."""
    return (one.value - 1) * (other.value - 1) < 0


def kinds_table(found: Sequence[TokenKind]) -> Table:
    """Return the table by kind of token, pairs one below the other, each named where there are several."""
    pairs = list(dict.fromkeys(pairs_of(found)))
    by_pair = [[one for one in found if (one.baseline, one.treatment) == pair] for pair in pairs]
    lines = []
    for name, kinds in zip(pair_names([one for one, *_ in by_pair]), by_pair, strict=True):
        lines += [Line(name, ())] if len(pairs) > 1 else []
        lines += [Line(one.kind, (one,)) for one in kinds]
    return columns.table(
        "by kind of decoded token: sum over baseline's",
        lines,
        ("samples", "steps", "isolated_ratio", "propagated_ratio", "rest_ratio"),
        "kind",
    )


def kinds_note(found: Sequence[TokenKind], cases: int) -> list[str]:
    """Return the note on kinds with the opposite sign of all steps, or that alone make it, of so many comparisons."""
    turning = [one for one in found if one.remarks()]
    if not turning:
        return []
    if cases == 1:
        return [f"Kinds of tokens differ: {'; '.join(words for one in turning for words in one.remarks())}."]
    kinds = text.join_names(list(dict.fromkeys(one.kind for one in turning)))
    return [f"Kinds of tokens differ in sign in {len({*pairs_of(turning)})} of {cases} cases: {kinds}."]


def shared_first_token(trace: Trace) -> str:
    """Return that the first decoded token is the same in all complete samples, and which; empty where it is not.

    The token's text is what a prompt of the trace shows for it; else its kind is told, or its id.
    """
    tokens = np.asarray(trace.get("token_id", ANALYSIS))[:, 0].tolist()
    if len(tokens) < 2 or len({*tokens}) > 1:
        return ""
    place, names = int(np.argmax(trace.ok)), [name for name in TEXT if name in trace.arrays]
    arrays = sample_arrays(lambda name, at: trace.arrays[name][at], names, place)
    pieces = token_texts(arrays, trace.sample_ids[place])
    shown = dict(zip(arrays["prompt_token"].tolist(), pieces, strict=True)).get(tokens[0], "") if pieces else ""
    kinds = {*trace.get("token_kind", ANALYSIS)[:, 0].tolist()} if "token_kind" in trace.arrays else {0}
    if shown.strip():
        what = f"'{escape_line(shown.strip())}'"
    elif shown:
        what = "a line break" if "\n" in shown else "a space"
    else:
        what = f"the same {TOKEN_KINDS[kinds.pop()]} token" if len(kinds) == 1 and any(kinds) else f"token {tokens[0]}"
    return f"the first token of {'both' if len(tokens) == 2 else f'all {len(tokens)}'} texts is {what}"
