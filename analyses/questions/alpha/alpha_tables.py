"""The tables of chosen α: what choosing brings, at each α, by layer, and what comes out."""

from __future__ import annotations

import numpy as np

from perturbkv.analyses import text
from perturbkv.analyses.naming import common
from perturbkv.analyses.questions.alpha.alpha_parts import Choices
from perturbkv.analyses.questions.alpha.alpha_rows_part import NAMES, OTHERS, Row
from perturbkv.analyses.questions.alpha.alpha_sweep import PAPER
from perturbkv.analyses.sentences import same
from perturbkv.analyses.stats.intervals import Scalar
from perturbkv.configs.alpha_table import GLOBAL, HEAD, LAYER
from perturbkv.display import Table

_ON = {OTHERS: "other samples", "same": "the same: flatters", "": "–"}
_ROWS = (
    "", "chosen on", f"#Σ over that\nof α = {PAPER}", "#median head\nover it", "#heads\nbetter",
    "#Σ over one\nfor all heads",
)  # fmt: skip
_CURVE = ("α", f"#Σ over that of α = {PAPER}", "#layers\nthat choose it", "#heads\nthat choose it")
_LAYERS = ("layer", "#α of\nthe layer", "#α of its heads: least,\nmedian, largest", "#heads\nat 0", "#heads\nat 1")
_MEASURED = (
    "", "#KL,\nmedian, nat", f"#mean KL over\nthat of α = {PAPER}", "#samples\nlower", "#mean KL over\none for all",
    "#drift", "#propagated\nΣ",
)  # fmt: skip


def of(result: Choices) -> list[Table | str]:
    """All of a result."""
    setting = common(result.sweep.configs, "policy", "selection", "alpha")
    shown: list[Table | str] = [
        Table(f"{setting}: isolated L1 of all heads", _ROWS, list(map(_row, result.rows))),
        _stability(result),
        Table("one α for all heads; who chooses it, on all samples", _CURVE, _curve(result)),
    ]
    if result.measured is not None:
        shown.append(Table("what comes out, chosen on other samples", _MEASURED, _measured(result)))
    return [*shown, Table("what is chosen on all samples, by layer", _LAYERS, _by_layer(result))]


def notes(result: Choices) -> str:
    """What rows and columns mean."""
    folds = f"{len(result.folds)} folds"
    said = (
        f"{text.about_intervals(result.identity.samples)} α is chosen from those of the trace by the least Σ "
        f"isolated L1 over the samples of all folds but one, and judged on that one's ({folds}); intervals hold the "
        "choices fixed. What is chosen on the very samples that it is judged on flatters; the files that are written "
        "hold such a choice, for other samples. Ties go to the α nearest the paper's. "
        f"{text.about_floor(result.rows[0].over_paper.floor_relative_median)}"
    )
    if result.measured is not None:
        said += (
            " Drift after the last layer and propagated Σ: over those of α = 0.25. Every fold's samples were run with "
            "what the others chose; composed and measured isolated L1 differ by at most "
            f"{result.measured.off:.1e} of the head's largest."
        )
    return said


def _row(row: Row) -> list[str]:
    paper, fixed = row.over_paper, row.over_fixed
    return [
        row.name,
        _ON[row.chosen_on],
        _ratio(paper.sum_ratio, paper.sum_ratio_interval),
        _ratio(paper.median_ratio, paper.median_ratio_interval),
        _share(paper.better_share, paper.better_share_interval, paper.sum_ratio, paper.sum_ratio_interval),
        _ratio(fixed.sum_ratio, fixed.sum_ratio_interval, digits=3),
    ]


def _ratio(value: float, interval: Scalar, digits: int = 2) -> str:
    """'1' of what is held against itself."""
    return "1" if same(value, interval) else text.decimal(value, interval, digits, apart="\n")


def _share(share: float, interval: Scalar, ratio: float, band: Scalar) -> str:
    """Nothing of what is held against itself."""
    return "–" if same(ratio, band) else text.percent(share, interval, "\n")


def _stability(result: Choices) -> str:
    """How much of the choice is not the same in all folds."""
    what = {GLOBAL: "of the one for all heads", LAYER: "of the layers", HEAD: "of the kept sets"}
    told = [f"{text.percent(share)} {what[by]}" for by, share in result.unstable.items() if by != GLOBAL]
    fixed = sorted({float(result.sweep.alphas[part.chosen[GLOBAL][0, 0]]) for part in result.folds})
    chosen = " or ".join(f"{alpha:g}" for alpha in fixed)
    return f"the choice differs between folds in {' and '.join(told)}; the one for all heads is {chosen}"


def _curve(result: Choices) -> list[list[str]]:
    return [
        [
            f"{one.alpha:g}",
            "1" if same(one.ratio, one.interval) else text.decimal(one.ratio, one.interval, digits=3),
            text.percent(one.layers),
            "–" if one.heads is None else text.percent(one.heads),
        ]
        for one in result.curve
    ]


def _by_layer(result: Choices) -> list[list[str]]:
    """A row per layer of the finest choice."""
    finest = result.sweep.alphas[result.chosen[result.finest]]
    of_layer = result.sweep.alphas[result.chosen[LAYER][:, 0]]
    return [
        [
            str(layer),
            f"{own:g}",
            ", ".join(f"{end:g}" for end in (shares.min(), np.median(shares), shares.max())),
            text.percent(float((shares == 0).mean())),
            text.percent(float((shares == 1).mean())),
        ]
        for layer, own, shares in zip(result.sweep.layers, of_layer, finest, strict=True)
    ]


def _measured(result: Choices) -> list[list[str]]:
    assert result.measured is not None
    return [
        [
            {NAMES[GLOBAL]: "one for all"}.get(one.name, one.name),
            text.significant(one.kl_median, one.kl_median_interval),
            _ratio(one.kl, one.kl_interval),
            _share(one.kl_lower, one.kl_lower_interval, one.kl, one.kl_interval),
            _ratio(one.kl_over_fixed, one.kl_over_fixed_interval),
            _ratio(one.drift, one.drift_interval),
            _ratio(one.propagated, one.propagated_interval),
        ]
        for one in result.measured.outcomes
    ]
