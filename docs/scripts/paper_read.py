"""What a row of paper.md reads: documents and traces that its step left, and numbers with their interval and n."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from tables import number, percent

from perturbkv.analyses.heads.head_comparison import HeadComparison
from perturbkv.analyses.heads.heads import compare_heads
from perturbkv.analyses.json_values import json_value
from perturbkv.analyses.measurements import Measurements
from perturbkv.analyses.stats import intervals
from perturbkv.storage.trace.trace_file import read_trace

Document = dict[str, Any]


@dataclass(frozen=True)
class Told:
    """A finding: in words with interval and n, and what that is for the claim, or for an open question."""

    text: str
    verdict: str


@dataclass(frozen=True)
class Row:
    """One claim.

    Attributes:
        place: where the paper says so.
        claim: what it says, or asks.
        rule: by which a verdict is reached, of paper_verdicts.py.
        step: whose folders tell, separated by commas; empty where none does.
        told: from the folder of all steps to what it tells.
        settles: the commands of docs/scripts/paper_cost.py that would settle it on a large model, separated by commas.
    """

    place: str
    claim: str
    rule: str
    step: str
    told: Callable[[Path], Told]
    settles: str

    @property
    def steps(self) -> list[str]:
        """Return the names of the steps."""
        return self.step.split(", ") if self.step else []


def analysis(output: Path, step: str, name: str) -> Document:
    """Return what a step's summary holds of an analysis."""
    found: Document = document(output, step, "summary.json")["analyses"][name]
    return found


def document(output: Path, step: str, file: str) -> Document:
    """Return the content of a JSON file that a step left."""
    found: Document = json.loads((output / step / file).read_text())
    return found


def trace(output: Path, path: str) -> Measurements:
    """Return what a step's trace measured at the first decoding token, of complete samples."""
    return Measurements(read_trace(output / path), "paper")


def indices(measured: Measurements) -> dict[tuple[str, str, Any], int]:
    """Return (policy, selection as it is written, budget) -> index of the configuration."""
    documents = [config.to_document() for config in measured.trace.run.configs]
    keys = [(policy_of(one), str(one["selection"]), one["budget"]) for one in documents]
    return {key: index for index, key in enumerate(keys)}


def comparisons(
    output: Path, step: str, baseline: str, treatment: str = "two-stage", policy: str = "snapkv"
) -> list[Document]:
    """Return a policy's comparisons of two selections, one per budget, with shares in which a tie counts half."""
    found = compare_heads(read_trace(output / step / "trace.h5"), baseline, treatment)
    return [_compared(one) for one in found if one.treatment.policy.name == policy]


def _compared(one: HeadComparison) -> Document:
    kinds = {kind.name: even_share(kind.differences) for kind in (one.isolated, one.propagated)}
    told: Document = json_value(one)
    return told | {name: told[name] | found for name, found in kinds.items()}


def even_share(differences: NDArray[np.float64]) -> Document:
    """Return the share of a prompt's heads that are better, with its interval; (sample, layer, head), ties 0.

    A tie counts half, so that equal kept sets are even.
    """
    each = ((np.sign(differences) + 1) / 2).reshape(len(differences), -1)
    interval = intervals.of_mean(each.mean(axis=1), intervals.share_kind(each.shape[1]))
    return {"share": float(each.mean()), "share_interval": json_value(interval), "even": float((each == 0.5).mean())}


def share(one: Document, kind: str = "propagated") -> str:
    """Return '52 % [47, 57] of the heads of a prompt': averaged over prompts, where a tie counts half."""
    return f"{percent(one[kind]['share'], one[kind]['share_interval'])} of the heads of a prompt{_even(one[kind])}"


def _even(kind: Document) -> str:
    return f" ({percent(kind['even'])} tied)" if kind["even"] >= 0.005 else ""


def means(one: Document, kind: str = "propagated") -> str:
    """Return '171 of 270 heads by their means (3 tied)': the paper's estimator, which no interval is known to cover."""
    tied = one[kind]["tied"]
    return f"{one[kind]['improved']} of {one['heads']} heads by their means" + (f" ({tied} tied)" if tied else "")


def ratio(one: Document, kind: str = "propagated") -> str:
    """Return 'Σ × 0.84 [0.74, 0.95]'."""
    return f"Σ × {number(one[kind]['sum_ratio'], one[kind]['sum_ratio_interval'])}"


def value(one: Document, name: str, digits: int = 2) -> str:
    """Return a number of a document with the interval beside it."""
    return number(one[name], one[f"{name}_interval"], digits)


def estimate(one: Document, digits: int = 2) -> str:
    """Return a document's `value` with its `interval` as text."""
    return number(one["value"], one["interval"], digits)


def samples(output: Path, step: str) -> int:
    """Return how many samples a step's trace holds."""
    found = document(output, step, "summary.json")
    return int(found["run"]["samples"]) - len(found["failed"])


def policy_of(config: Document) -> str:
    """Return a configuration's policy, without its options."""
    return str(config["policy"]).partition("(")[0]


def listed(cells: Iterable[str]) -> str:
    """Return 'a; b; c'."""
    return "; ".join(cells)
