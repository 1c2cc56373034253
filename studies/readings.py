"""The numbers that pages add to their tables, as docs/results/one_model.md.

`python docs/scripts/readings.py TRACE.h5 [LONGBENCH]`, with a trace of `perturbkv heads` or `bound-tightness`:
retained mass and runs of kept neighbours per configuration, what L and θ are made of, what the treatment does in the
first layer, and single heads that decide. With LongBench's folder also how widely ν and the window's attention vary,
for which the trace's model reads its prompts once more.

`python docs/scripts/readings.py TRACE.h5 --token LAYER HEAD POSITION`, for second_model.md: what one token is to
one head.
"""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np

from perturbkv.configs.resources import Resources
from perturbkv.datasets.dataset_registry import DatasetOptions, load
from perturbkv.datasets.encode import encode
from perturbkv.models.loading import load_model
from perturbkv.pipeline.sample.prefill import prefill
from perturbkv.selection.resolved_config import ResolvedRun
from perturbkv.storage.trace.trace_file import read_trace
from perturbkv.trace import Trace

SINKS = 4
"""First entries left out of the spread: their attention and their values are unlike all others."""


def runs_of_neighbours(trace: Trace, config: int) -> float:
    """Return the mean number of unbroken runs among the kept prefix entries of a head."""
    window, counts = trace.run.configs[config].window, []
    for sample, layer, head in np.ndindex(*np.delete(trace.arrays["kept_count"].shape, 1)):
        kept = trace.kept(sample, config, layer, head)[:-window]
        counts.append(1 + int((np.diff(kept) > 1).sum()))
    return float(np.mean(counts))


def configurations(trace: Trace) -> None:
    """Print retained mass and runs of neighbours of every configuration."""
    mass = trace.arrays["retained_mass"][:, :, 0].mean(axis=(0, 2, 3))
    for place, label in enumerate(trace.run.labels()):
        print(f"{label}: retained mass {mass[place]:.3f}, {runs_of_neighbours(trace, place):.0f} runs of neighbours")


def first_layer(trace: Trace) -> None:
    """Print the second configuration against the first: L, θ and the drift of the residual stream."""
    perturbation, theta, sigma = (
        trace.arrays[name][:, :2, 0, 0].mean(axis=0) for name in ("perturbation_isolated", "theta", "sigma_stage1")
    )
    drift = trace.arrays["hidden_drift_l1"][:, :2, 0, 0]
    looseness = theta / perturbation
    print(
        f"first layer: L × {perturbation[1].sum() / perturbation[0].sum():.2f}, drift × "
        f"{(drift[:, 1] / drift[:, 0]).min():.2f} to {(drift[:, 1] / drift[:, 0]).max():.2f}"
    )
    print(
        f"  θ lower in {int((theta[1] < theta[0]).sum())} of {theta.shape[1]} heads, θ / L of the baseline "
        f"{looseness[0].min():.1f} to {looseness[0].max():.1f}, σ ≤ 0.5 in {int((sigma[1] <= 0.5).sum())}"
    )


def decomposition(trace: Trace) -> None:
    """Print what L = (1 − S) D and θ = (1 − S) N consist of.

    D is the distance of what went from what stayed, N the sum of their mean norms. Sums over the first layer's heads,
    and over those of all other layers, mean over samples.
    """
    mass, perturbation, theta = (
        trace.arrays[name][:, :, 0] for name in ("retained_mass", "perturbation_isolated", "theta")
    )
    for place, label in enumerate(trace.run.labels()):
        said = []
        for name, layers in (("first layer", slice(0, 1)), ("others", slice(1, None))):
            lost = 1 - mass[:, place, layers]
            distance, norms = (array[:, place, layers] / lost for array in (perturbation, theta))
            total = perturbation[:, place, layers].sum(axis=(1, 2)).mean()
            said.append(
                f"{name}: 1 − S {lost.mean():.2f}, D {distance.mean():.1f}, N {norms.mean():.0f}, ΣL {total:.1f}"
            )
        print(f"{label}: {'; '.join(said)}")


def single_heads(trace: Trace) -> None:
    """Print S and L where attention and two-stage differ most at the smallest budget, each way round."""
    selections = [config.selection.name for config in trace.run.configs]
    sides = [selections.index(name) for name in ("attention", "two-stage")]
    mass, perturbation = (
        trace.arrays[name][:, sides, 0].mean(axis=0) for name in ("retained_mass", "perturbation_isolated")
    )
    difference = perturbation[0] - perturbation[1]
    for flat in [*np.argsort(difference.ravel())[:2], *np.argsort(-difference.ravel())[:2]]:
        layer, head = np.unravel_index(flat, difference.shape)
        kept, lost = mass[:, layer, head], perturbation[:, layer, head]
        print(
            f"layer {layer}, head {head}: S {kept[0]:.2f} and {kept[1]:.2f}, L {lost[0]:.0f} and {lost[1]:.0f} "
            f"({trace.run.labels()[sides[0]]}, two-stage)"
        )


def spread(trace: Trace, data_dir: Path) -> None:
    """Print the coefficient of variation over a head's entries: median over heads, then the range over samples."""
    run, adapter = ResolvedRun.from_run(trace.run), load_model(trace.run.model)
    voting, found = run.configs[0].requests[0], {"ν": [], "window attention": []}
    options = DatasetOptions(run.samples, seed=run.seed, data_dir=data_dir)
    for sample in load(run.dataset, options, adapter.tokenizer).samples:
        prompt = encode(sample, adapter.tokenizer, chat_template=run.chat_template, max_tokens=run.max_tokens)
        seen = prefill(adapter, prompt, run, Resources()).statistics
        for name, layers in (("ν", seen.norms), ("window attention", seen.scored[voting])):
            per_head = [layer[:, SINKS:].std(dim=1) / layer[:, SINKS:].mean(dim=1) for layer in layers]
            found[name].append(float(np.median(np.concatenate(per_head))))
    for name, values in found.items():
        print(f"coefficient of variation of {name}: {min(values):.2f} to {max(values):.2f} over samples")


def one_token(trace: Trace, layer: int, head: int, position: int) -> None:
    """Print in how many samples a head keeps the token at a position, and its mean L with it and without it."""
    place = [trace.layer_name(place) for place in range(trace.arrays["theta"].shape[3])].index(layer)
    for config, label in enumerate(trace.run.labels()):
        lost = trace.arrays["perturbation_isolated"][:, config, 0, place, head]
        keeps = np.array([position in trace.kept(sample, config, place, head) for sample in range(len(lost))])
        means = (f"{lost[some].mean():.1f}" if some.any() else "–" for some in (keeps, ~keeps))
        print(
            f"{label}: {keeps.sum()} of {len(keeps)} keep token {position} in head {layer}-{head}; "
            f"L with it and without it: {', '.join(means)}"
        )


if __name__ == "__main__":
    opened = read_trace(Path(sys.argv[1]))
    if sys.argv[2:3] == ["--token"]:
        one_token(opened, *map(int, sys.argv[3:]))
        sys.exit()
    configurations(opened)
    decomposition(opened)
    first_layer(opened)
    single_heads(opened)
    if len(sys.argv) > 2:
        spread(opened, Path(sys.argv[2]))
