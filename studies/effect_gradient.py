"""Does the mean of both runs' gradients tell lost answers better than the full run's? For docs/results/answers.md.

`python studies/effect_gradient.py measure` measures effects by the mean gradient on the first prompts of the answers'
study, whose traces it reads (`answers.py measure` leaves them), and writes docs/answers/effect-gradient.csv: per
prompt, budget and form of the effect, in which share of the pairs of a lost and a kept answer the lost one has the
larger. `python studies/effect_gradient.py` prints the table. The rules stand in docs/results/rules.md, which was
written first.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from answers import BUDGETS, QWEN, ROWS, RUNS, SMOLLM2, STEPS, Run, runs
from common import Table, main, to_json, write_tables
from specification import model, write_rows
from tables import percent, points

import perturbkv as pk

PROMPTS, FILE = 60, ROWS / "effect-gradient.csv"
FORMS, GRADIENTS = ("signed", "size"), ("full", "mean")
COLUMNS = ("model", "budget", "form", "sample", "pairs", *GRADIENTS)


def measure(run: Run) -> pk.Trace:
    """Return the trace of a run's first prompts and compared methods, its effects by the mean of both gradients."""
    prompts = pk.load_prompts(str(RUNS / f"{run.name}.jsonl"), model(run.model), samples=PROMPTS)
    settings = pk.Settings(steps=STEPS, text="answer", save=("effect",), effect_gradient="mean")
    configs = list(compared(run).values())
    return pk.measure(model(run.model), prompts, configs, settings=settings, path=RUNS / f"{run.name}-mean.h5")


def compared(run: Run) -> dict[tuple[str, float, int], pk.EvictionConfig]:
    """Return the configurations that compare methods, without the smallest budget, at which nothing is found."""
    every = run.configs()
    return {key: config for key, config in every.items() if key[1] != BUDGETS[0] and key[2] == 7}


def effects(trace: pk.Trace, config: pk.EvictionConfig, sample: str) -> dict[str, float]:
    """Return form -> a prompt's isolated effect under a configuration, summed over steps and heads: a loss, in nat."""
    own = trace.arrays["effect_isolated"][trace.sample_ids.index(sample), trace.config_index(config.label())]
    return {"signed": -float(np.nansum(own, dtype=float)), "size": float(np.nansum(np.abs(own), dtype=float))}


def rows(run: Run, full: pk.Trace, mean: pk.Trace) -> Iterator[dict[str, Any]]:
    """Yield a row per prompt that decides at a budget, and form: lost above kept by either gradient, ties half.

    Only prompts count that the full cache answers.
    """
    for budget, sample in product(sorted({key[1] for key in compared(run)}), mean.sample_ids):
        own = [config for key, config in compared(run).items() if key[1] == budget]
        place = full.sample_ids.index(sample)
        found = np.array([full.arrays["score"][place, full.config_index(one.label())] > 0 for one in own])
        if not full.arrays["score_full"][place] or found.all() or not found.any():
            continue
        told = [[effects(trace, one, sample) for one in own] for trace in (full, mean)]
        for form in FORMS:
            sides = [np.array([one[form] for one in by_gradient]) for by_gradient in told]
            shares = [float((np.sign(side[~found][:, None] - side[found]) / 2 + 0.5).mean()) for side in sides]
            yield {"model": run.model, "budget": budget, "form": form, "sample": sample,
                   "pairs": int((~found).sum() * found.sum()), **dict(zip(GRADIENTS, shares, strict=True))}  # fmt: skip


def table(found: pd.DataFrame) -> Table:
    """Return the table: shares by either gradient, and their paired difference over prompts, in points."""
    lines = []
    for (name, budget, form), own in found.groupby(["model", "budget", "form"], sort=False):
        full, mean = (own[gradient].to_numpy() for gradient in GRADIENTS)
        interval = to_json(pk.stats.intervals.of_mean(mean - full, pk.stats.intervals.DIFFERENCE))
        lines.append([name, f"{budget:g}", form, str(len(own)), percent(full.mean()), percent(mean.mean()),
                      points((mean - full).mean(), interval)])  # fmt: skip
    heads = ["model", "b / n", "effect", "deciding prompts", "full run's", "mean of both", "mean − full, points"]
    return "lost answers with the larger effect, by gradient", heads, lines


def study(asked: argparse.Namespace) -> None:
    """Measure both models, or print what was measured."""
    if asked.work == "measure":
        measured = []
        for run in runs():
            if run.digits == 7 and run.model in (SMOLLM2, QWEN):
                measured += list(rows(run, pk.read_trace(RUNS / f"{run.name}.h5"), measure(run)))
        write_rows(FILE, COLUMNS, measured)
    else:
        write_tables(asked, [table(pd.read_csv(FILE))])


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("work", choices=("measure", "tell"), nargs="?", default="tell")
    parser.add_argument("--output", "-o", type=Path, help="folder of the JSON document")
    main(study, parser)
