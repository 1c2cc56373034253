"""A result for each of the library's figures, from made-up traces."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Mapping
from functools import cache
from pathlib import Path
from typing import Any

import torch

import perturbkv as pk
from perturbkv.analyses.audit.dump_verdict import DumpAudit
from perturbkv.analyses.quality.divergence import divergence
from perturbkv.captions import CaptionedFigure
from perturbkv.figures import FIGURES
from perturbkv.trace import Trace
from tests.analyses.test_answers_part_by_hand import ROWS
from tests.audit import dumped, planted
from tests.audit.test_planted_faults_are_told_apart import audited
from tests.figures.test_the_patching_figure_shows_its_numbers import made as patching
from tests.figures.test_the_quality_figure_shows_its_numbers import made as quality
from tests.house.test_no_label_is_parsed import CONFIGS, asked_of
from tests.house.test_no_label_is_parsed import made as measured
from tests.support import prompts
from tests.support.answers import written


@cache
def plain() -> Trace:
    """Two budgets of two selections."""
    return measured([CONFIGS[place] for place in (0, 2, 4, 6)])


def dump_audit() -> DumpAudit:
    """The audit of a dump in 16 bits with a block of zeros in layer 1."""

    def zeros(layer: int, keys: torch.Tensor, values: torch.Tensor, blocks: dict[str, list[int]]) -> None:
        if layer == 1:
            keys[blocks["a"][2]] = values[blocks["a"][2]] = 0

    def in_16_bits(keys: torch.Tensor, values: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"cache": torch.stack([keys, values]).bfloat16()}

    with tempfile.TemporaryDirectory() as folder:
        return dumped.Made(zeros, store=in_16_bits).audited(Path(folder) / "dump")


_RESULTS: Mapping[str, Callable[[], Any]] = {
    "Ablation": lambda: pk.ablation(plain()),
    "Assumption": lambda: pk.assumption(plain()),
    "Audit": lambda: audited("llama", planted.rotated_again),
    "BoundTightness": lambda: pk.bound_tightness(plain()),
    "BudgetCurves": lambda: pk.budget_curves(plain()),
    "Cliffs": lambda: pk.cliff(asked_of("budget --cliff")),
    "Correlation": lambda: pk.correlation(asked_of("correlation")),
    "Divergence": lambda: divergence(written(*ROWS)),
    "DumpAudit": dump_audit,
    "DriftSeries": lambda: pk.layer_drift(plain())[0],
    "EqualBytes": lambda: pk.equal_bytes(asked_of("ablation --bytes")),
    "HeadComparisons": lambda: pk.compare_heads(plain(), "attention", ["two-stage"]),
    "Horizon": lambda: pk.horizon(plain()),
    "MethodRanking": lambda: pk.methods(asked_of("ablation --methods")),
    "Needle": lambda: pk.needle(plain()),
    "Patching": lambda: patching(permutations=8),
    "Perplexity": lambda: pk.perplexity(plain()),
    "Quality": lambda: quality("qasper", "multi_news"),
    "Restriction": lambda: pk.restriction(asked_of("ablation --restrictions")),
    "SafeBudgets": lambda: pk.safe_budget(asked_of("budget"), max_kl=200.0),
    "SampleSeries": lambda: pk.last_layer(plain())[0],
    "Tokens": lambda: pk.tokens(prompts.made(prompts.sample("s0"))),
}
"""Class of a result -> a result of it."""


@cache
def result_of(figure: str) -> Any:
    """The result that a figure, a key of `FIGURES`, is drawn from."""
    return _RESULTS[figure.partition(".")[0]]()


def plot(figure: str, width_mm: float | None = None, style: str = "screen") -> CaptionedFigure:
    """A figure by its key of `FIGURES`, as its result's method draws it."""
    drawn: CaptionedFigure = getattr(result_of(figure), figure.partition(".")[2] or "plot")(width_mm, style)
    return drawn


NAMES = tuple(FIGURES)
