"""What a row of docs/paper.md says: a number with its interval and n, and whether that supports the claim."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tables import Ends, number, percent, selection

SUPPORTS, CONTRADICTS, UNDECIDED, OPEN = "supports", "contradicts", "undecided", "not measured"
Document = dict[str, Any]


@dataclass(frozen=True)
class Told:
    """What was found: in words with interval and n, and what that is for the claim, or for an open question."""

    text: str
    verdict: str


@dataclass(frozen=True)
class Row:
    """One claim.

    Attributes:
        place: where the paper says so.
        claim: what it says, or asks.
        step: whose folder tells; empty where none does.
        told: from the folder of all steps to what it tells.
        settles: the commands of docs/scripts/paper_cost.py that would settle it on a large model, separated by commas.
    """

    place: str
    claim: str
    step: str
    told: Callable[[Path], Told]
    settles: str


def analysis(output: Path, step: str, name: str) -> Document:
    """What a step's summary holds of an analysis."""
    found: Document = document(output, step, "summary.json")["analyses"][name]
    return found


def document(output: Path, step: str, file: str) -> Document:
    """A JSON file that a step left."""
    found: Document = json.loads((output / step / file).read_text())
    return found


def verdict(interval: Ends, at: float, wanted: int) -> str:
    """Whether an interval lies on the wanted side of a number: 1 above it, −1 below it."""
    if interval is None or interval["kind"] == "range":
        return UNDECIDED
    side = int(interval["low"] > at) - int(interval["high"] < at)
    return SUPPORTS if side == wanted else CONTRADICTS if side else UNDECIDED


def lower(first: Ends, second: Ends) -> str:
    """Whether the first number lies below the second, by the interval of each: as long as they overlap, undecided."""
    if first is None or second is None or "range" in (first["kind"], second["kind"]):
        return UNDECIDED
    if first["high"] < second["low"]:
        return SUPPORTS
    return CONTRADICTS if second["high"] < first["low"] else UNDECIDED


def joined(verdicts: Iterable[str]) -> str:
    """One verdict of several cases: theirs where all agree, else how many say what; of none undecided."""
    found = Counter(verdicts)
    if len(found) <= 1:
        return next(iter(found), UNDECIDED)
    return ", ".join(f"{one} {found[one]}" for one in (SUPPORTS, CONTRADICTS, UNDECIDED) if found[one])


def pairs(found: Document, treatment: str, policy: str = "snapkv", key: str = "comparisons") -> Iterator[Document]:
    """The comparisons of a policy's treatment with attention."""
    for one in found[key]:
        if (selection(one["treatment"]), policy_of(one["treatment"])) == (treatment, policy):
            yield one


def pair(found: Document, treatment: str, policy: str = "snapkv") -> Document:
    """The only one of them."""
    (only,) = pairs(found, treatment, policy)
    return only


def share(one: Document, kind: str = "propagated") -> str:
    """'52 % [47, 57] of the heads'."""
    return f"{percent(one[kind]['better_share'], one[kind]['better_share_interval'])} of the heads"


def means(one: Document, kind: str = "propagated") -> str:
    """'171 of 270, 3 tied'."""
    tied = one[kind]["tied"]
    return f"{one[kind]['improved']} of {one['heads']}" + (f", {tied} tied" if tied else "")


def ratio(one: Document, kind: str = "propagated") -> str:
    """'Σ × 0.84 [0.74, 0.95]'."""
    return f"Σ × {number(one[kind]['sum_ratio'], one[kind]['sum_ratio_interval'])}"


def value(one: Document, name: str, digits: int = 2) -> str:
    """A number of a document with the interval beside it."""
    return number(one[name], one[f"{name}_interval"], digits)


def estimate(one: Document, digits: int = 2) -> str:
    """The same of a document that is one number: `value` and `interval`."""
    return number(one["value"], one["interval"], digits)


def samples(output: Path, step: str) -> int:
    """How many samples a step's trace holds."""
    found = document(output, step, "summary.json")
    return int(found["run"]["samples"]) - len(found["failed"])


def policy_of(config: Document) -> str:
    """A configuration's policy, without its options."""
    return str(config["policy"]).partition("(")[0]


def listed(cells: Iterable[str]) -> str:
    """'a; b; c'."""
    return "; ".join(cells)
