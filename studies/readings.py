"""The numbers that pages add to their tables: what a trace holds beside its comparisons.

`python studies/readings.py TRACE.h5 [LONGBENCH]` reads a trace of `perturbkv heads` or `bound-tightness`, for
docs/results/one_model.md: retained mass and runs of kept neighbours per configuration, what L and θ are made of, what
the treatment does in the first layer, and single heads that decide. With LongBench's folder also how widely ν and the
window's attention vary, for which the trace's model reads its prompts once more. `python studies/readings.py TRACE.h5
--token LAYER HEAD POSITION` is for docs/results/second_model.md: what one token is to one head.

The spread takes the layers of a prefill, which no trace holds: its imports are no public names.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import common
import numpy as np
from common import Table

import perturbkv as pk
from perturbkv.pipeline.sample.prefill import prefill
from perturbkv.selection.resolved_config import ResolvedRun

SINKS = 4
"""First entries left out of the spread: their attention and their values are unlike all others."""


def stored_variable(trace: pk.Trace, name: str) -> Any:
    """Return a variable of all samples as it is stored."""
    return trace.arrays[name]


def runs_of_neighbours(trace: pk.Trace, config: int) -> float:
    """Return the mean number of unbroken runs among the kept prefix entries of a head."""
    window, counts = trace.run.configs[config].window, []
    for sample, layer, head in np.ndindex(*np.delete(stored_variable(trace, "kept_count").shape, 1)):
        kept = trace.kept(sample, config, layer, head)[:-window]
        counts.append(1 + int((np.diff(kept) > 1).sum()))
    return float(np.mean(counts))


def configuration_table(trace: pk.Trace) -> Table:
    """Return retained mass and runs of neighbours of every configuration."""
    mass = stored_variable(trace, "retained_mass")[:, :, 0].mean(axis=(0, 2, 3))
    rows = [[label, f"{mass[place]:.3f}", f"{runs_of_neighbours(trace, place):.0f}"]
            for place, label in enumerate(trace.run.labels())]  # fmt: skip
    return "configurations", ["", "retained mass", "runs of neighbours"], rows


def first_layer_table(trace: pk.Trace) -> Table:
    """Return the second configuration against the first in the first layer: L, θ and the residual stream's drift."""
    perturbation, theta, sigma = (
        stored_variable(trace, name)[:, :2, 0, 0].mean(axis=0)
        for name in ("perturbation_isolated", "theta", "sigma_stage1")
    )
    drift = stored_variable(trace, "hidden_drift_l1")[:, :2, 0, trace.layers[0]]
    looseness, drifts = theta / perturbation, drift[:, 1] / drift[:, 0]
    rows = [
        ["L", f"× {perturbation[1].sum() / perturbation[0].sum():.2f}"],
        ["drift", f"× {drifts.min():.2f} to {drifts.max():.2f}"],
        ["θ lower", f"in {int((theta[1] < theta[0]).sum())} of {theta.shape[1]} heads"],
        ["θ / L of the baseline", f"{looseness[0].min():.1f} to {looseness[0].max():.1f}"],
        ["σ ≤ 0.5", f"in {int((sigma[1] <= common.EVIDENCE).sum())} heads"],
    ]
    return "first layer, the second configuration against the first", ["", ""], rows


def decomposition_table(trace: pk.Trace) -> Table:
    """Return what L = (1 − S) D and θ = (1 − S) N consist of.

    D is the distance of what went from what stayed, N the sum of their mean norms. Sums over the first layer's heads,
    and over those of all other layers, mean over samples.
    """
    mass, perturbation, theta = (
        stored_variable(trace, name)[:, :, 0] for name in ("retained_mass", "perturbation_isolated", "theta")
    )
    rows = []
    for place, label in enumerate(trace.run.labels()):
        for name, layers in (("first layer", slice(0, 1)), ("others", slice(1, None))):
            lost = 1 - mass[:, place, layers]
            distance, norms = (array[:, place, layers] / lost for array in (perturbation, theta))
            total = perturbation[:, place, layers].sum(axis=(1, 2)).mean()
            numbers = f"{lost.mean():.2f}", f"{distance.mean():.1f}", f"{norms.mean():.0f}", f"{total:.1f}"
            rows.append([label, name, *numbers])
    return "what L and θ consist of", ["", "layers", "1 − S", "D", "N", "ΣL"], rows


def single_heads_table(trace: pk.Trace) -> Table:
    """Return S and L where attention and two-stage differ most at the smallest budget, each way round."""
    selections = [config.selection.name for config in trace.run.configs]
    sides = [selections.index(name) for name in ("attention", "two-stage")]
    mass, perturbation = (
        stored_variable(trace, name)[:, sides, 0].mean(axis=0) for name in ("retained_mass", "perturbation_isolated")
    )
    difference, rows = perturbation[0] - perturbation[1], []
    for flat in [*np.argsort(difference.ravel())[:2], *np.argsort(-difference.ravel())[:2]]:
        layer, head = np.unravel_index(flat, difference.shape)
        kept, lost = mass[:, layer, head], perturbation[:, layer, head]
        both = f"{kept[0]:.2f} and {kept[1]:.2f}", f"{lost[0]:.0f} and {lost[1]:.0f}"
        rows.append([f"layer {layer}, head {head}", *both])
    return f"single heads, {trace.run.labels()[sides[0]]} and two-stage", ["", "S", "L"], rows


def spread_table(trace: pk.Trace, data_dir: Path) -> Table:
    """Return the coefficient of variation over a head's entries: median over heads, then the range over samples."""
    run, model = ResolvedRun.from_run(trace.run), pk.load_model(trace.run.model)
    found: dict[str, list[float]] = {"ν": [], "window attention": []}
    voting = run.configs[0].requests[0]
    prompts = pk.load_prompts(
        run.dataset, model, samples=run.samples, seed=run.seed, data_dir=data_dir, chat_template=run.chat_template,
        max_tokens=run.max_tokens,
    )  # fmt: skip
    for prompt in prompts:
        seen = prefill(model, prompt, run, pk.Resources()).statistics
        for name, layers in (("ν", next(iter(seen.norms.values()))), ("window attention", seen.scored[voting])):
            per_head = [layer[:, SINKS:].std(dim=1) / layer[:, SINKS:].mean(dim=1) for layer in layers]
            found[name].append(float(np.median(np.concatenate(per_head))))
    rows = [[name, f"{min(values):.2f} to {max(values):.2f}"] for name, values in found.items()]
    return "coefficient of variation over samples", ["", ""], rows


def token_table(trace: pk.Trace, layer: int, head: int, position: int) -> Table:
    """Return in how many samples a head keeps the token at a position, and its mean L with it and without it.

    `layer` is the number of the decoder layer, whichever were measured.
    """
    place = trace.layers.index(layer)
    rows = []
    for config, label in enumerate(trace.run.labels()):
        lost = stored_variable(trace, "perturbation_isolated")[:, config, 0, place, head]
        keeps = np.array([position in trace.kept(sample, config, place, head) for sample in range(len(lost))])
        means = (f"{lost[some].mean():.1f}" if some.any() else "–" for some in (keeps, ~keeps))
        rows.append([label, f"{keeps.sum()} of {len(keeps)}", *means])
    return f"token {position} in head {layer}-{head}", ["", "kept in", "L with it", "without it"], rows


def tables(asked: argparse.Namespace) -> Iterator[Table]:
    """Yield the tables of a trace, or that of one token."""
    trace = pk.read_trace(asked.trace)
    if asked.token:
        yield token_table(trace, *asked.token)
        return
    for made in (configuration_table, decomposition_table, first_layer_table, single_heads_table):
        yield made(trace)
    if asked.longbench:
        yield spread_table(trace, asked.longbench)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("trace", type=Path)
    parser.add_argument("longbench", type=Path, nargs="?", help="LongBench's folder, to read the prompts once more")
    parser.add_argument("--token", type=int, nargs=3, metavar=("LAYER", "HEAD", "POSITION"))
    parser.add_argument("--output", "-o", type=Path, help="folder of the JSON document")
    common.main(lambda asked: common.write_tables(asked, tables(asked)), parser)
