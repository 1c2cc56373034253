"""What would settle a claim on a model of 8 billion parameters, and its cost, from `python -m benchmarks`.

Arithmetic comes from the models' shapes. This machine's rate is measured: a plain prefill of the embedded model
(docs/bench/cpu.json), as is what a sweep and its answers take over plain use. A GPU's is assumed, as plan.py's.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from plan import FLOPS, USED

BANDWIDTH, READ = 3.35e12, 0.5
"""Bytes per second of one H100 by its specification, and the share of it that decoding is assumed to use."""
_HOUR, _BYTES = 3_600, 2
Measured = dict[str, Any]


@dataclass(frozen=True)
class Shape:
    """A model's numbers in the matrices that every token passes, its layers, and all heads' width."""

    weights: float
    layers: int
    width: int

    def prefill(self, tokens: float) -> float:
        """Return the floating-point operations: two a weight and token, and causal attention's two products."""
        return 2 * self.weights * tokens + 2 * tokens**2 * self.width * self.layers


EMBEDDED = Shape(106.2e6, 30, 576)
LLAMA = Shape(6.98e9, 32, 4096)
QWEN = Shape(31.2e9, 64, 5120)
LONG = tuple(range(8_000, 128_001, 8_000))


@dataclass(frozen=True)
class Settling:
    """A command on a large model.

    Attributes:
        name: as rows of the page refer to it.
        command: what to type.
        lengths: tokens of the prompts; `samples` of each.
        rows: caches that each decoded token passes.
        answer: tokens that are decoded.
        runs: plain prefills of each prompt beside the sweep's own.
        searched: seconds of this machine's processors at most, whatever the model.
        shape: of the model.
    """

    name: str
    command: str
    lengths: tuple[int, ...]
    samples: int
    rows: int
    answer: int = 1
    runs: float = 0
    searched: float = 0
    shape: Shape = LLAMA

    @property
    def prompts(self) -> int:
        """Return how many there are in all."""
        return self.samples * len(self.lengths)

    def operations(self, sweep: float) -> float:
        """Return the operations of all prefills, a sweep's at its price, and of what is decoded."""
        prefills = (sweep + self.runs) * self.samples * sum(map(self.shape.prefill, self.lengths))
        return prefills + 2 * self.shape.weights * self.prompts * self.rows * self.answer

    def read(self) -> float:
        """Return the bytes of weights that decoding reads: once for all rows of a token."""
        return _BYTES * self.shape.weights * self.prompts * self.answer


def table(bench: Path) -> Iterator[tuple[str, ...]]:
    """Yield a row for each: name, command, prompts, operations, time of one H100 and of this machine."""
    rows = {row["name"]: row for row in json.loads(bench.read_text())["rows"]}
    sweep = rows["sweep-24"]["value"]
    assert sweep is not None
    yield ("", "command", "prompts", "PFLOP", "one H100, assumed", "two cores, as measured")
    for one in SETTLING:
        work = one.operations(sweep)
        gpu = work / (FLOPS * USED) + one.read() / (BANDWIDTH * READ) + one.searched
        cores = work / rate(rows) + one.searched
        prompts = f"{one.prompts:,} of {_tokens(one.lengths)} tokens"
        answers = f", {one.answer} decoded with {one.rows} caches"
        yield one.name, f"`{one.command}`", prompts + answers, f"{work / 1e15:,.1f}", _time(gpu), _time(cores)


def rate(rows: Measured) -> float:
    """Return this machine's operations per second in a plain prefill of 4,096 tokens."""
    return EMBEDDED.prefill(4096) / statistics.median(rows["sweep-24"]["details"]["base_seconds"])


def _tokens(lengths: tuple[int, ...]) -> str:
    return f"{lengths[0]:,}" if len(lengths) == 1 else f"{lengths[0]:,} to {lengths[-1]:,}"


def _time(seconds: float) -> str:
    if seconds < _HOUR:
        return f"{max(1.0, seconds / 60):.0f} min"
    hours = seconds / _HOUR
    return f"{hours:.0f} h" if hours < 100 else f"{hours / 24:,.0f} days"


_QASPER = "-m llama-3.1-8b -d qasper --samples 200"
_SYSTEMS = "snapkv:attention,snapkv:two-stage,pyramidkv:attention,…"
SETTLING = (
    Settling("heads", f"heads {_QASPER} --policy snapkv --policy adakv -b 128 -b 0.1 …", (3_619,), 200, 24),
    Settling("swap", "patching -m llama-3.1-8b -d qasper --samples 32", (3_619,), 32, 600),
    Settling(
        "regret", "studies/regret.py --model llama-3.1-8b --dataset qasper", (3_619,), 8, 7, searched=8 * (64 + 8) * 60
    ),
    Settling(
        "alpha", "studies/alpha.py --model llama-3.1-8b --dataset qasper --samples 200", (3_619,), 200, 24, runs=1.2
    ),
    Settling("sparse", f"heads {_QASPER} --compare 'quest:attention,quest:two-stage(alpha=0)'", (3_619,), 200, 4),
    Settling("link", f"correlation {_QASPER} --max-new-tokens 64", (3_619,), 200, 24, answer=64),
    Settling("needle", "needle -m llama-3.1-8b --lengths 8000,…,128000 --depths 0,0.1,…,1", LONG, 11, 6, answer=12),
    Settling("chats", "generate -m llama-3.1-8b -d chats.jsonl -b 64 --compress-every 256", (36,), 805, 3, answer=567),
    Settling("tables", f"quality -m llama-3.1-8b -d DATASETS --compare {_SYSTEMS}", (6_711,), 3_750, 28, answer=128),
    Settling("larger", "quality -m qwen2.5-32b -d DATASETS …", (6_711,), 3_750, 9, answer=128, shape=QWEN),
)
