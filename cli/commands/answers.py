"""One sample of `perturbkv generate`: how its answers are shown beside the expected ones."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from perturbkv.analyses import text as numbers
from perturbkv.analyses.naming import counted, short
from perturbkv.cli import console
from perturbkv.configs.eviction import EvictionConfig
from perturbkv.visible import line

_SHOWN = 400
"""Characters of an answer in a table; the file has all."""


def show(row: Mapping[str, Any], configs: Sequence[EvictionConfig]) -> None:
    """One sample: what was expected, every answer, and how far each compression moved the attention output."""
    console.say(f"\n{line(row['sample'])} · {row['prompt_tokens']:,} tokens", bold=True)
    full, expected, metric = row["full"], row.get("answers"), row.get("metric")
    names = dict(zip(row["evicted"], short(configs), strict=True))
    rows = [("expected", "", "", "", shown(" | ".join(expected)))] if expected else []
    rows.append(("full cache", "", "", _score(full), shown(full["text"])))
    for label, made in row["evicted"].items():
        same = sum(1 for pair in zip(made["tokens"], full["tokens"], strict=False) if pair[0] == pair[1])
        alike = f"{same} of {len(full['tokens'])}"
        rows.append(
            (
                names[label] or "evicted",
                numbers.held(made.get("held_share", math.nan)) + _bytes(made),
                alike,
                _score(made),
                shown(made["text"]),
            )
        )
    columns = ["cache", "#held /\nfull", "#same\ntokens", f"#{metric},\n0 to 1", "answer"]
    if not metric:
        columns, rows = [*columns[:3], columns[4]], [(*one[:3], one[4]) for one in rows]  # type: ignore[misc]
    console.table("", columns, rows)
    for label in row["evicted"]:
        moved = [one["relative"] for one in row["compressions"] if one["config"] == label]
        if moved:
            listed = ", ".join(f"{value:.2f}" for value in moved)
            console.say(f"{names[label] or 'evicted'}: {counted(len(moved), 'compression')}, Σ L / Σ ‖o_h‖₁: {listed}")


def _bytes(made: Mapping[str, Any]) -> str:
    """What a cache of few bits takes of the full one's bytes, on a line of its own."""
    return f"\n{numbers.held(made['bytes_share'])} of bytes" if "bytes_share" in made else ""


def _score(made: Mapping[str, Any]) -> str:
    score = made.get("score")
    return "" if score is None else f"{score:.3f}"


def shown(text: str) -> str:
    """A text in one line, its end left out where it is long."""
    line = " ".join(text.split()) or "(nothing)"
    return line if len(line) <= _SHOWN else f"{line[:_SHOWN]}… ({len(line) - _SHOWN:,} more characters)"
