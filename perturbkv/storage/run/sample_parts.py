"""Merging parts of a sample, each with other eviction configurations, into one sample.

A run that gets more configurations prefills again and measures the new ones alone. Variables with a `config` axis are
concatenated; those that describe the full cache are the same run measured twice.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray

from perturbkv import kept_codec
from perturbkv.errors import TraceError
from perturbkv.schema import APART, DIGEST, KEPT, PREFILLS, SUMS, VARIABLES
from perturbkv.trace import SampleTrace

Arrays = Mapping[str, NDArray[Any]]
Shapes = dict[str, tuple[int, ...]]

FULL_RUN = (
    *("prompt_tokens", "question_tokens", "cut_tokens"),
    *("token_id", "next_token_id", "text_tokens", "steps_measured", "score_full"),
)
"""Variables that identify a full-cache run: where they differ between parts, the parts are not comparable."""

_FLOORS = tuple(name for name in VARIABLES if "noise_floor" in name)
_FILLED = (*KEPT, DIGEST, *PREFILLS, *APART, "own_entries")
"""Variables that are filled in for a part without them where another part of the sample has them."""


class Part(Protocol):
    """A stored part of a sample, which has some of its configurations."""

    @property
    def labels(self) -> tuple[str, ...]:
        """Labels of the configurations along the part's `config` axis."""


AnyPart = TypeVar("AnyPart", bound=Part)


def disjoint_parts(parts: Sequence[AnyPart]) -> list[AnyPart]:
    """Return a subset of a sample's parts, in order, in which no configuration occurs twice, so that it can be joined.

    `parts` lists older parts before newer ones. A larger part is preferred to a smaller, a newer to an older: bytes of
    caches and noise floors belong to a part as a whole, so that a part cannot be split.
    """
    chosen: list[AnyPart] = []
    labels: set[str] = set()
    for part in sorted(reversed(parts), key=lambda part: len(part.labels), reverse=True):
        if labels.isdisjoint(part.labels):
            chosen.append(part)
            labels.update(part.labels)
    return [part for part in parts if part in chosen]


def join_parts(parts: Sequence[tuple[SampleTrace, Sequence[str]]], labels: Sequence[str]) -> SampleTrace:
    """Join the parts of a sample into one with its configurations in the order of `labels`.

    Each part comes with the labels along its `config` axis. Noise floors are the maximum over the parts: differences
    below count as rounding, so the maximum is conservative, of those parts that have one. Bytes of caches
    are added. Every other variable without a `config` axis is the first part's. A variable that some part lacks is left
    out, except kept positions and prefill times, which stay where any part has them.

    Raises TraceError where the parts do not hold each of `labels` once, or their full-cache runs differ.
    """
    samples = with_common_variables([sample for sample, _ in parts])
    stored = [label for _, part_labels in parts for label in part_labels]
    lengths = [(sample.sizes()["config"], len(part_labels)) for sample, part_labels in parts]
    if sorted(stored) != sorted(labels) or any(length != count for length, count in lengths):
        raise TraceError(
            f"expected every one of {len(labels)} configurations once in the parts of a sample, got {len(stored)}"
        )
    check_same_run(samples[0].sample_id, [sample.arrays for sample in samples])
    order = np.array([stored.index(label) for label in labels])
    names = [name for name in samples[0].arrays if all(name in sample.arrays for sample in samples)]
    arrays = {name: _merge_variable(name, [sample.arrays[name] for sample in samples], order) for name in names}
    codes = _merge_codes(samples, order) if "kept_code" in arrays else {}
    return SampleTrace(samples[0].sample_id, arrays | codes)


def single_complete_part(
    parts: Sequence[tuple[SampleTrace, Sequence[str]]], labels: Sequence[str]
) -> SampleTrace | None:
    """Return the only part if it has all of `labels` in order and no unused bytes of codes; else None."""
    (sample, stored), *others = parts
    if others or list(stored) != list(labels):
        return None
    return sample if code_bytes(sample.arrays) == len(sample.arrays.get("kept_code", ())) else None


def with_common_variables(samples: Sequence[SampleTrace]) -> list[SampleTrace]:
    """Return a sample's parts with optional variables added, so that all parts have the same variables.

    Where some have kept positions or digests, the others get empty ones or their own digests; where some have prefill
    times, the others get NaN; where some do more than evict, the others' whole perturbation is that of eviction alone.
    """
    present = {name for sample in samples for name in _FILLED if name in sample.arrays}
    return [
        sample
        if present <= sample.arrays.keys()
        else replace(sample, arrays={**_missing_arrays(sample.arrays, present), **sample.arrays})
        for sample in samples
    ]


def kept_digests(arrays: Arrays) -> NDArray[Any]:
    """Return a digest of each head's kept positions; 0 if the positions are not stored."""
    if "kept_code" not in arrays:
        return np.zeros_like(arrays["kept_count"])
    offset, length, count = (arrays[name] for name in ("kept_offset", "kept_length", "kept_count"))
    return kept_codec.digests(arrays["kept_code"], offset, length, count)


def _missing_arrays(arrays: Arrays, names: set[str]) -> Arrays:
    """Return fill values of the named variables, for a part without them."""
    zeros = np.zeros_like(arrays["kept_count"])
    empty = dict(zip(KEPT, (zeros, zeros, np.zeros(0, dtype=np.uint8)), strict=True))
    empty |= {"own_entries": np.zeros(len(zeros), dtype=np.uint8)}
    empty |= {"prefill_seconds": np.full(len(zeros), np.nan), "prefill_seconds_full": np.array(np.nan)}
    whole = arrays["perturbation_isolated"]
    empty |= dict(zip(APART, (whole, np.zeros_like(whole)), strict=True))
    return {name: kept_digests(arrays) if name == DIGEST else empty[name] for name in names}


def check_same_run(sample_id: str, parts: Sequence[Arrays]) -> None:
    """Raise TraceError if the parts' full-cache runs differ in the prompt or in the decoded tokens."""
    for name in FULL_RUN:
        values = [part[name] for part in parts if name in part]
        if any(not np.array_equal(value, values[0], equal_nan=True) for value in values):
            raise TraceError(
                f"expected the full-cache run of '{sample_id}' to be the one measured before, got another {name}, as "
                "from another machine, library or version of perturbkv; use another --output to measure all anew"
            )


def merged_shapes(parts: Sequence[Shapes]) -> Shapes:
    """Return variable name -> shape of the joined sample, from the shapes of its parts."""
    present = {name for part in parts for name in _FILLED if name in part}
    parts = [{**{name: _missing_shape(name, part) for name in present}, **part} for part in parts]
    first, *others = parts
    shapes = {name: shape for name, shape in first.items() if all(name in other for other in others)}
    for name, shape in shapes.items():
        if VARIABLES[name].dims[:1] in (("config",), ("kept_byte",)):
            shapes[name] = (shape[0] + sum(other[name][0] for other in others), *shape[1:])
    return shapes


def _missing_shape(name: str, part: Shapes) -> tuple[int, ...]:
    """Return the shape of the fill values of a variable, for a part without it."""
    shapes = {"kept_code": (0,), "prefill_seconds": part["kept_count"][:1], "prefill_seconds_full": ()}
    shapes["own_entries"] = part["kept_count"][:1]
    shapes |= dict.fromkeys(APART, part["perturbation_isolated"])
    return shapes.get(name, part["kept_count"])


def code_bytes(arrays: Arrays) -> int:
    """Return the bytes of a part's codes of kept positions, shared codes counted once; 0 without codes."""
    if "kept_length" not in arrays:
        return 0
    first, _ = distinct_codes(arrays["kept_offset"], arrays["kept_length"])
    return int(arrays["kept_length"].reshape(-1)[first].sum())


def _merge_variable(name: str, values: Sequence[NDArray[Any]], order: NDArray[Any]) -> NDArray[Any]:
    """Return a variable of the joined sample from its arrays in the parts; `order` sorts their configurations."""
    if VARIABLES[name].dims[:1] == ("config",):
        return np.asarray(np.concatenate(values)[order])
    if name in _FLOORS:
        return np.asarray(np.fmax.reduce(values))
    if name in SUMS:
        return np.asarray(np.add.reduce(values))
    if name == "prefill_seconds_full":  # of the first part that has one
        return np.asarray(next((value for value in values if not np.isnan(value)), values[0]))
    return np.asarray(values[0])


def _merge_codes(samples: Sequence[SampleTrace], order: NDArray[Any]) -> dict[str, NDArray[Any]]:
    """Return the joined codes of kept positions and their offsets, by variable name; heads go on sharing codes.

    `order` indexes the configurations of all parts; codes are sorted by (config, layer, head).
    """
    codes = [sample.arrays["kept_code"] for sample in samples]
    starts = np.cumsum([0, *map(len, codes)])[:-1]
    shifted = [sample.arrays["kept_offset"] + start for sample, start in zip(samples, starts, strict=True)]
    offsets = np.concatenate(shifted)[order]
    lengths = np.concatenate([sample.arrays["kept_length"] for sample in samples])[order]
    first, number = distinct_codes(offsets, lengths)
    begins, sizes = offsets.reshape(-1)[first], lengths.reshape(-1)[first]
    all_codes = _concatenate(codes)
    merged = _concatenate([all_codes[begin:end] for begin, end in _covering_slices(begins, sizes)])
    return {"kept_offset": (np.cumsum(sizes) - sizes)[number].reshape(offsets.shape), "kept_code": merged}


def _concatenate(rows: Sequence[NDArray[Any]]) -> NDArray[Any]:
    """Return the rows concatenated; a single row, which may be large, is not copied."""
    return rows[0] if len(rows) == 1 else np.concatenate(rows)


def distinct_codes(offsets: NDArray[Any], lengths: NDArray[Any]) -> tuple[NDArray[Any], NDArray[Any]]:
    """Return the first index of each distinct code, in order of occurrence, and the number of the code per head.

    Both offset and length are compared, as an empty code starts where the next one does.
    """
    pairs = offsets.reshape(-1).astype(np.int64) * (int(lengths.max()) + 1) + lengths.reshape(-1)  # a number per pair
    _, first, number = np.unique(pairs, return_index=True, return_inverse=True)
    order = np.argsort(first)
    rank = np.empty_like(order)
    rank[order] = np.arange(len(order))
    return first[order], rank[number.reshape(-1)]


def _covering_slices(starts: NDArray[Any], lengths: NDArray[Any]) -> list[tuple[int, int]]:
    """Return the fewest (start, stop) slices that cover the codes in order, so that few large blocks are copied."""
    breaks = np.flatnonzero(starts[1:] != (starts + lengths)[:-1]) + 1
    begin, end = np.array([0, *breaks]), np.array([*breaks, len(starts)]) - 1
    return list(zip(starts[begin].tolist(), (starts + lengths)[end].tolist(), strict=True))
