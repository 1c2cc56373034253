"""Measurements of mixtures of two configurations' kept sets, and their file, from which a killed command resumes."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self, cast

import numpy as np
from numpy.typing import NDArray

from perturbkv.configs.patching import Mixture
from perturbkv.configs.run import RunConfig
from perturbkv.storage.json_lines import SampleLines

PER_STEP = ("drift", "final_drift", "kl", "top1", "propagated")
"""Values of each decode step: L1 drift after the last measured layer and after the final norm, KL(full ‖ evicted) in
nat, whether the most probable token is the full run's, Σ over heads of the propagated L1 perturbation."""
Heads = list[list[list[float]]]
"""A value per (step, layer, head), the heads being query heads."""


@dataclass(frozen=True)
class PatchingRow:
    """The measurements of one mixture.

    Attributes:
        mixture: which configuration's kept set each head has.
        held: cache share: entries of its cache over those of the full cache.
        values: each of `PER_STEP`, per step.
        score: score of its answer, 0 to 1; NaN where no answer was generated.
        heads: propagated L1 perturbation; None where heads were not measured.
    """

    mixture: Mixture
    held: float
    values: Mapping[str, tuple[float, ...]]
    score: float = math.nan
    heads: Heads | None = None


@dataclass(frozen=True)
class PatchingBatch:
    """Mixtures of one sample that were decoded in one batch.

    Attributes:
        sample: the sample's id.
        rows: one per mixture.
        floors: each of `PER_STEP`, per step, of the batch's row that keeps everything (noise floor).
        full_score: score of the full cache's answer; NaN where no answer was generated.
        head_floors, head_norms: noise floor and L1 norm of o_h per head, where any row has `heads`.
    """

    sample: str
    rows: tuple[PatchingRow, ...]
    floors: Mapping[str, tuple[float, ...]]
    full_score: float = math.nan
    head_floors: Heads | None = None
    head_norms: Heads | None = None

    def record(self) -> dict[str, Any]:
        """Return the batch as a line's JSON object, with null for NaN and unrounded numbers."""
        rows = [
            {"mixture": str(row.mixture), **_json_fields(row, "held", "values", "score", "heads")} for row in self.rows
        ]
        return {
            "sample": self.sample,
            "rows": rows,
            **_json_fields(self, "floors", "full_score", "head_floors", "head_norms"),
        }

    @classmethod
    def from_record(cls, record: Mapping[str, Any], kept_heads: int) -> Self:
        """Return the batch in a JSON object written by `PatchingBatch.record`.

        Raises KeyError, TypeError or ValueError for any other object.
        """
        rows = tuple(
            PatchingRow(
                Mixture.parse(row["mixture"], kept_heads), float(row["held"]), _parse_values(row["values"]),
                _parse_score(row["score"]), row["heads"],
            )
            for row in record["rows"]
        )  # fmt: skip
        heads = (record["head_floors"], record["head_norms"])
        return cls(
            str(record["sample"]), rows, _parse_values(record["floors"]), _parse_score(record["full_score"]), *heads
        )


def _json_fields(instance: Any, *names: str) -> dict[str, Any]:
    """Return name -> value of the named attributes for JSON, with None for NaN."""
    values = {name: getattr(instance, name) for name in names}
    return {name: None if isinstance(value, float) and math.isnan(value) else value for name, value in values.items()}


def _parse_score(value: Any) -> float:
    """Return a JSON score as a float, NaN for null."""
    return math.nan if value is None else float(value)


def _parse_values(document: Mapping[str, Any]) -> dict[str, tuple[float, ...]]:
    """Return name -> tuple of one number per step, for the quantities `PER_STEP`."""
    return {name: tuple(map(float, document[name])) for name in PER_STEP}


FILE = "swap.jsonl"


def patching_header(run: RunConfig, kept_heads: int) -> dict[str, Any]:
    """Return what the first line of a file of measurements says: the run, and the number of kept sets per layer."""
    return {"swap": {"run": json.loads(run.to_json()), "kept_heads": kept_heads}}


class PatchingStore:
    """The measurements of every prompt: those of earlier calls, and each new batch as soon as it is measured.

    Args:
        run: a run of two configurations.
        kept_heads: number of kept sets per layer.
        lines: the lines of its file, opened with `patching_header`; None: measurements are kept in memory alone.

    Attributes:
        rows: sample -> mixture -> its measurements.
        batches: sample -> its batches, in order.
        same: sample -> (layer, kept_head) True where both configurations keep the same entries.
        failures: sample -> why it cannot be measured.
    """

    def __init__(self, run: RunConfig, kept_heads: int, lines: SampleLines | None = None) -> None:
        self.run = run
        self.kept_heads = kept_heads
        self.lines: SampleLines = lines or SampleLines([])
        self.rows: dict[str, dict[Mixture, PatchingRow]] = {}
        self.batches: dict[str, list[PatchingBatch]] = {}
        self.same: dict[str, NDArray[np.bool_]] = {}
        self.failures: dict[str, str] = {}
        for document in self.lines.rows:
            if "failed" in document:
                self.failures[document["sample"]] = document["failed"]
            else:
                batch = PatchingBatch.from_record(document, kept_heads)
                self._add_batch(batch, np.asarray(document["same"], dtype=bool))

    def add(self, batch: PatchingBatch, same: NDArray[np.bool_]) -> None:
        """Add a batch, and append it to the file; `same` (layer, kept_head): True for equal kept sets of both sides."""
        self.lines.add({**batch.record(), "same": same.tolist()})
        self._add_batch(batch, same)

    def add_failure(self, sample: str, reason: str) -> None:
        """Record, in the file too, the reason why a prompt cannot be measured."""
        self.lines.add({"sample": sample, "failed": reason})
        self.failures[sample] = reason

    def missing_mixtures(self, sample: str, mixtures: Sequence[Mixture], by_head: frozenset[Mixture]) -> list[Mixture]:
        """Return the unmeasured mixtures of a prompt, without duplicates, in order; none for a failed prompt.

        Those in `by_head` also count as missing where they were measured without values per head.
        """
        if sample in self.failures:
            return []
        rows = self.rows.get(sample, {})
        return [
            mixture
            for mixture in dict.fromkeys(mixtures)
            if mixture not in rows or (mixture in by_head and rows[mixture].heads is None)
        ]

    def largest_over_batches(self, sample: str, name: str) -> Heads:
        """Return the maximum over a prompt's batches of the field `name`: `head_floors` or `head_norms`.

        Batches without it are left out; at least one must have it.
        """
        measured = [getattr(batch, name) for batch in self.batches[sample] if getattr(batch, name) is not None]
        return cast("Heads", np.max(measured, axis=0).tolist())

    def _add_batch(self, batch: PatchingBatch, same: NDArray[np.bool_]) -> None:
        """Store a batch in memory; a mixture's row with values per head replaces a row without."""
        self.same[batch.sample] = same
        self.batches.setdefault(batch.sample, []).append(batch)
        rows = self.rows.setdefault(batch.sample, {})
        rows |= {row.mixture: row for row in batch.rows if row.heads is not None or row.mixture not in rows}
