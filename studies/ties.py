"""Whether verdicts on heads in half precision hold in float32, of the same prompts measured twice.

`python studies/ties.py FLOAT32.h5 BFLOAT16.h5 …` compares traces that are alike but for their type; of each data set
one is in float32. Without traces it measures both types itself:

    python studies/ties.py -o needle
    python studies/ties.py --dataset multi_news --data-dir FOLDER --max-tokens 800 -o news
    python studies/ties.py needle/*.h5 news/*.h5

A verdict in half precision is decided by METHOD's rule, two perturbations that differ by more than two noise floors;
beside it stands another rule, which calls a tie where each value alone lies under three floors. Of the heads that a
rule decides, how many have float32's verdict, the opposite one, or are tied there? Samples whose first decoded token
differs between the types decode different texts, and are left out.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import common
import numpy as np
from common import perturbation_of, variable
from numpy.typing import NDArray

import perturbkv as pk

HEADS = ["dataset", "dtype", "measure", "samples", "heads decided", "float32's verdict", "opposite", "tied in float32"]
OTHER_RULE = "each value against 3 floors"
KINDS = ("isolated", "propagated")
DISTANCES = {"l1": ("", "L1"), "l2": ("_l2", "L2"), "cosine": ("_cosine", "cosine distance")}
"""Distance -> end of its variables' names, and its unit."""
OTHER_RULE_FLOORS = 3
"""Noise floors under which both values tie by the other rule."""
Signs = NDArray[np.int8]


def study(asked: argparse.Namespace) -> None:
    """Read or measure the traces, and write a row per data set, type and measure."""
    traces = list(map(pk.read_trace, asked.trace)) or measure(asked)
    rows = [row for exact, rounded in match_dtypes(traces) for row in agreement_rows(exact, rounded)]
    common.write_tables(asked, [("verdicts in half precision", HEADS, rows)])


def measure(asked: argparse.Namespace) -> list[pk.Trace]:
    """Measure the same prompts in float32 and in another type."""
    traces = []
    for dtype in ("float32", asked.other):
        model = pk.load_model(asked.model, dtype=dtype, seed=asked.seed)
        configs = pk.grid(asked.budget or 128, selection=("attention", "two-stage"))
        traces.append(common.measure(asked, f"{dtype}.h5", model, common.prompts(asked, model), configs))
    return traces


def match_dtypes(traces: Iterable[pk.Trace]) -> Iterator[tuple[pk.Trace, pk.Trace]]:
    """Yield (float32 trace, other trace) of one data set. Raises PerturbkvError for a trace without one in float32."""
    held = list(traces)
    exact = {trace.run.dataset: trace for trace in held if trace.run.dtype == "float32"}
    for trace in (trace for trace in held if trace.run.dtype != "float32"):
        if trace.run.dataset not in exact:
            raise pk.PerturbkvError(f"expected a float32 trace of {trace.run.dataset} beside {trace.source}, got none")
        yield exact[trace.run.dataset], trace


def agreement_rows(exact: pk.Trace, rounded: pk.Trace) -> Iterator[list[str]]:
    """Yield a row for each pair of configurations and each measure that both traces have.

    Raises PerturbkvError where the traces are of other prompts or configurations, or decode no token alike.
    """
    if _complete_samples(exact) != _complete_samples(rounded) or exact.run.configs != rounded.run.configs:
        raise pk.PerturbkvError(
            f"expected one run's samples and configurations in {exact.source} and {rounded.source}, got others"
        )
    same = np.equal(*(trace.get("token_id", "ties")[:, 0] for trace in (exact, rounded)))
    if not same.any():
        raise pk.PerturbkvError(
            f"expected samples of {rounded.source} that decode the token of {exact.source} first, got none"
        )
    measures = [
        (kind, distance) for kind in KINDS for distance, (suffix, _) in DISTANCES.items()
        if all(f"perturbation_{kind}{suffix}" in trace.arrays for trace in (exact, rounded))
    ]  # fmt: skip
    compared = {distance: tuple(pk.compare_heads(trace, "attention", "two-stage", distance=distance)
                                for trace in (exact, rounded))
                for distance in dict.fromkeys(distance for _, distance in measures)}  # fmt: skip
    for place in range(len(compared["l1"][0])):
        for kind, distance in measures:
            pairs = [comparisons[place] for comparisons in compared[distance]]
            yield table_row(rounded, kind, distance, pairs, same)


def _complete_samples(trace: pk.Trace) -> list[str]:
    """Return the names of a trace's complete samples."""
    return [name for name, there in zip(trace.sample_ids, trace.ok, strict=True) if there]


def table_row(trace: pk.Trace, kind: str, distance: str, pairs: list[Any], same: NDArray[np.bool_]) -> list[str]:
    """Return the row of one measure: the numbers of METHOD's rule, and beside each that of the other rule.

    `pairs` are the two types' comparison of one pair of configurations, `same` the samples that count.
    """
    expected, decided = (np.sign(getattr(pair, kind).differences)[same].astype(np.int8) for pair in pairs)
    alone = signs_by_other_rule(trace, kind, distance, pairs[1])[same]
    counts, others = count_verdicts(expected, decided), count_verdicts(expected, alone)
    left_out = f" (+ {(~same).sum()} with another token)" if not same.all() else ""
    by_sample = np.array([_agreeing_share(count_verdicts(*each)) for each in zip(expected, decided, strict=True)])
    ends = pk.stats.intervals.of_mean(by_sample, pk.stats.intervals.share_kind(expected[0].size))
    return [
        Path(trace.run.dataset).stem, trace.run.dtype, f"{kind} {DISTANCES[distance][1]}", f"{same.sum()}{left_out}",
        f"{counts['decided']:,} of {expected.size:,}",
        f"{share_text(counts, ends)}; {OTHER_RULE}: {share_text(others)}",
        *(f"{counts[name]:,}; {others[name]:,}" for name in ("opposite", "tied")),
    ]  # fmt: skip


def signs_by_other_rule(trace: pk.Trace, kind: str, distance: str, pair: Any) -> Signs:
    """Return the verdicts of the other rule, (sample, layer, head): a tie is both values under three noise floors."""
    suffix = DISTANCES[distance][0]
    baseline, treatment = (trace.run.configs.index(config) for config in (pair.baseline, pair.treatment))
    both = perturbation_of(trace, kind, baseline, treatment, suffix)
    floor = variable(trace, f"noise_floor{'_isolated' if kind == 'isolated' else ''}{suffix}")
    return np.where(
        np.maximum(*both) < OTHER_RULE_FLOORS * floor, np.int8(0), np.sign(both[0] - both[1]).astype(np.int8)
    )


def count_verdicts(expected: Signs, rounded: Signs) -> dict[str, int]:
    """Return how many heads the rounded trace decides; of them those like float32, opposite to it, and tied there."""
    decided = rounded != 0
    return {
        "decided": int(decided.sum()),
        "agreeing": int((decided & (rounded == expected)).sum()),
        "opposite": int((decided & (rounded == -expected) & (expected != 0)).sum()),
        "tied": int((decided & (expected == 0)).sum()),
    }


def _agreeing_share(counts: dict[str, int]) -> float:
    """Return the share of the decided heads that have float32's verdict; NaN without a decided one."""
    return counts["agreeing"] / counts["decided"] if counts["decided"] else float("nan")


def share_text(counts: dict[str, int], interval: Any = None) -> str:
    """Return '97.2 % [95.0, 98.8]'; of fewer than five samples the brackets hold their range."""
    ends = f" [{100 * interval.low:.1f}, {100 * interval.high:.1f}]" if interval else ""
    return f"{100 * _agreeing_share(counts):.1f} %{ends}" if counts["decided"] else "–"


if __name__ == "__main__":
    parser = common.options(__doc__ or "")
    parser.add_argument("--other", default="bfloat16", help="type that is held against float32 [%(default)s]")
    common.main(study, parser)
