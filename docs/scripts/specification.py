"""The paper's headline comparisons over every setting that can be had here, for docs/results.md.

`python docs/scripts/specification.py measure LONGBENCH` measures a run (model × chat template × data set) after the
other and writes its rows to docs/specification/RUN.csv; a run whose file is there is not measured again.
`--only WORD` takes the runs whose name holds a word. `python docs/scripts/specification.py draw` draws the picture and
prints in how many settings each comparison holds. The rules stand in docs/rules.md, which was written first.
"""

from __future__ import annotations

import argparse
import csv
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

import perturbkv as pk
from perturbkv.analyses.stats import intervals
from perturbkv.analyses.stats.intervals import OptionalInterval, share_kind
from perturbkv.trace import Trace

DOCS = Path(__file__).resolve().parents[1]
ROWS, PICTURE = DOCS / "specification", DOCS / "figures" / "specification.png"
RUNS = DOCS.parent / "runs" / "specification"
SAMPLES = {
    "smollm2-135m-q4_1": 16,
    "gemma-3-270m-q4_k_m": 16,
    "qwen2.5-coder-0.5b-q4_k_m": 16,
    "qwen2.5-coder-1.5b-q4_k_m": 8,
}
"""Model -> prompts of each of its runs."""
WITHOUT_TEMPLATE = ("gemma-3-270m-q4_k_m",)
"""Models that have no chat template, so that half of their runs are not there."""
DATA: dict[str, dict[str, Any]] = {
    "multi_news": {"max_tokens": 1500},
    "needle": {"lengths": (1000,)},
    "ruler:niah_multikey_2": {"lengths": (1000,)},
}
"""Data set -> options of loading it."""
BUDGET, SEED = 128, 0
WINDOWS, GRANULARITIES, PRESETS = (8, 32), ("query", "kv"), ("paper", "paper-v2", "released-v2")
CONTRADICTING = {("released-v2", "query"): "product-of-means is of a group's heads, which share one kept set"}
"""(preset, granularity) that is left out -> why."""
SELECTIONS = ("attention", "two-stage", "two-stage-uniform", "attention-unpooled")
COLOURS = {"holds": "C0", "turned": "C1", "undecided": "0.6"}
SETTINGS = ("model", "template", "dataset", "window", "granularity", "preset")
COLUMNS = (*SETTINGS, "n", "shortest", "longest", "seed", "comparison", "value", "low", "high")


@dataclass(frozen=True)
class Comparison:
    """A comparison of two selections in one number per setting.

    Attributes:
        baseline, treatment: the selections.
        kind: isolated, propagated, or the last layer.
        even: the value at which neither is better.
        sign: 1 where more than even is the treatment's gain, -1 where less is.
        text: what the number is.
    """

    baseline: str
    treatment: str
    kind: str
    even: float
    sign: int
    text: str

    def verdict(self, low: float, high: float) -> str:
        """Return holds, turned or undecided: whether the whole interval lies on one side of even; NaN: undecided."""
        ends = sorted(self.sign * (end - self.even) for end in (low, high))
        return "holds" if ends[0] > 0 else "turned" if ends[1] < 0 else "undecided"


def _comparisons() -> dict[str, Comparison]:
    """Return name -> comparison, in the order of the rules."""
    found = {}
    for kind in ("isolated", "propagated"):
        sides = "attention", "two-stage", kind
        found[f"heads by means, {kind}"] = Comparison(*sides, 0.5, 1, "share of heads whose mean is lower")
        found[f"heads by sample, {kind}"] = Comparison(*sides, 0.5, 1, "mean share of a prompt's heads that are lower")
        found[f"sum, {kind}"] = Comparison(*sides, 1, -1, "sum over heads and prompts over the baseline's")
        found[f"value norms, {kind}"] = Comparison("two-stage-uniform", "two-stage", kind, 1, -1, "sum, equal stages")
        found[f"un-pooling, {kind}"] = Comparison("attention", "attention-unpooled", kind, 1, -1, "sum, no value norms")
    last = "attention", "two-stage", "last layer"
    found["last layer, prompts"] = Comparison(*last, 0.5, 1, "share of prompts that drift less")
    found["last layer, sum"] = Comparison(*last, 1, -1, "sum of drifts over the baseline's")
    return found


COMPARISONS = _comparisons()


def say(text: str) -> None:
    """Write a line of output."""
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


def runs() -> list[tuple[str, bool, str]]:
    """Return every run: model, whether with its chat template, data set."""
    return [
        (model, template, dataset)
        for model in SAMPLES
        for template in ((False,) if model in WITHOUT_TEMPLATE else (True, False))
        for dataset in DATA
    ]


def by_preset() -> dict[str, tuple[Any, ...]]:
    """Return the configurations of each preset: every window, granularity and selection."""
    return {
        preset: tuple(
            config
            for granularity in GRANULARITIES
            if (preset, granularity) not in CONTRADICTING
            for config in pk.grid(BUDGET, preset=preset, window=WINDOWS, granularity=granularity, selection=SELECTIONS)
        )
        for preset in PRESETS
    }


def measure(model: str, template: bool, dataset: str, longbench: Path) -> Trace:
    """Return a run's trace, measured or finished."""
    loaded = pk.load_model(model, device="cpu", dtype="float32")
    prompts = pk.load_prompts(
        dataset, loaded, samples=SAMPLES[model], seed=SEED, chat_template=template, data_dir=longbench, **DATA[dataset]
    )
    path = RUNS / f"{name(model, template, dataset)}.h5"
    path.parent.mkdir(parents=True, exist_ok=True)
    ends = [loaded.tokenizer.decode(part) for part in (prompts[0].token_ids[:20], prompts[0].token_ids[-20:])]
    say(f"{path.stem}: {len(prompts)} prompts, {ends[0]!r} … {ends[1]!r}")
    configs = [config for made in by_preset().values() for config in made]
    return pk.measure(loaded, prompts, configs, path=path)


def name(model: str, template: bool, dataset: str) -> str:
    """Return a run's name."""
    return f"{model}-{'template' if template else 'plain'}-{dataset.replace(':', '-')}"


def rows(trace: Trace, model: str, template: bool, dataset: str) -> Iterator[dict[str, Any]]:
    """Yield a row per setting and comparison of a run."""
    lengths = trace.arrays["prompt_tokens"][trace.ok]
    run = {"model": model, "template": template, "dataset": dataset, "n": len(lengths), "seed": SEED,
           "shortest": int(lengths.min()), "longest": int(lengths.max())}  # fmt: skip
    presets = {config: preset for preset, made in by_preset().items() for config in made}
    pairs: dict[tuple[str, str], tuple[Any, Any]] = {}
    for title, comparison in COMPARISONS.items():
        sides = comparison.baseline, comparison.treatment
        if sides not in pairs:
            drifts = {one.treatment: one for series in pk.last_layer(trace, *sides) for one in series}
            pairs[sides] = list(pk.compare_heads(trace, *sides)), drifts
        for pair in pairs[sides][0]:
            config = pair.treatment
            value, interval = number(title, comparison, pair, pairs[sides][1][config])
            low, high = (float("nan"),) * 2 if interval is None else (interval.low, interval.high)
            yield {
                **run, "window": config.window, "granularity": config.granularity.name, "preset": presets[config],
                "comparison": title, "value": value, "low": low, "high": high,
            }  # fmt: skip


def number(title: str, comparison: Comparison, pair: Any, drift: Any) -> tuple[float, OptionalInterval]:
    """Return a comparison's number in one setting and its interval; None where the rules give it no verdict.

    In shares a tie counts half, so that two selections that keep the same are even.
    """
    if comparison.kind == "last layer":
        if title.endswith("prompts"):
            decided = drift.verdict[drift.verdict != 0]
            return shares(drift.verdict).mean(), intervals.of_share(decided == 1) if len(decided) else None
        return drift.mean_ratio, drift.mean_ratio_interval
    kind = getattr(pair, comparison.kind)
    if title.startswith("heads by means"):
        return float(shares(kind.verdict).mean()), None
    if title.startswith("heads by sample"):
        each = shares(np.sign(kind.differences)).reshape(len(kind.differences), -1)
        return float(each.mean()), intervals.of_mean(each.mean(axis=1), share_kind(each.shape[1]))
    return kind.sum_ratio, kind.sum_ratio_interval


def shares(verdicts: np.ndarray) -> np.ndarray:
    """Return 1 for better, 1/2 for tied, 0 for worse, of verdicts 1, 0, -1."""
    return np.asarray((verdicts + 1) / 2)


def read() -> list[dict[str, str]]:
    """Return the rows of every run that was measured, in the order of `runs`."""
    found: list[dict[str, str]] = []
    for path in (ROWS / f"{name(*run)}.csv" for run in runs()):
        if path.exists():
            with path.open(newline="") as stream:
                found += csv.DictReader(stream)
    return found


def write(run: tuple[str, bool, str], measured: Sequence[dict[str, Any]]) -> None:
    """Write the rows of a run, which appear at once."""
    ROWS.mkdir(parents=True, exist_ok=True)
    path = ROWS / f"{name(*run)}.csv"
    with path.with_suffix(".tmp").open("w", newline="") as stream:
        writer = csv.DictWriter(stream, COLUMNS, lineterminator="\n")
        writer.writeheader()
        writer.writerows({key: _cell(row[key]) for key in COLUMNS} for row in measured)
    path.with_suffix(".tmp").replace(path)


def _cell(value: Any) -> str:
    """Return a number with four digits, anything else as text."""
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def tally(found: Sequence[dict[str, str]]) -> Iterator[str]:
    """Yield a line per comparison: settings, those on the claimed side, and where it holds, turns, is undecided."""
    for title, comparison in COMPARISONS.items():
        rows = _of(found, title)
        claimed = sum(comparison.sign * (float(row["value"]) - comparison.even) > 0 for row in rows)
        verdicts = [comparison.verdict(float(row["low"]), float(row["high"])) for row in rows]
        counts = {verdict: verdicts.count(verdict) for verdict in ("holds", "turned", "undecided")}
        yield f"| {title} | {comparison.text} | {len(rows)} | {claimed} | {' | '.join(map(str, counts.values()))} |"


def _of(found: Sequence[dict[str, str]], title: str) -> list[dict[str, str]]:
    """Return the rows of one comparison."""
    return [row for row in found if row["comparison"] == title]


def draw(found: Sequence[dict[str, str]], path: Path) -> None:
    """Draw every setting's interval, sorted by the first panel, over a matrix of the settings."""
    from perturbkv.figures import style

    shown = ("heads by means, propagated", "sum, propagated", "sum, isolated", "last layer, prompts")
    first = _of(found, shown[0])
    key = {tuple(row[name] for name in SETTINGS): float(row["value"]) for row in first}
    order = {setting: place for place, setting in enumerate(sorted(key, key=key.__getitem__))}
    levels = [(name, level) for name in SETTINGS for level in dict.fromkeys(row[name] for row in first)]
    with style.use():
        figure = style.figure(174, 190)
        axes = figure.subplots(len(shown) + 1, 1, sharex=True, height_ratios=[1] * len(shown) + [2])
        for axis, title in zip(axes, shown, strict=False):
            comparison = COMPARISONS[title]
            for row in _of(found, title):
                place = order[tuple(row[name] for name in SETTINGS)]
                value, low, high = (float(row[name]) for name in ("value", "low", "high"))
                colour = COLOURS[comparison.verdict(low, high)]
                axis.plot([place, place], [low, high], color=colour, linewidth=0.6)
                axis.plot(place, value, ".", color=colour, markersize=2.5)
            axis.axhline(comparison.even, color="0.3", linewidth=0.6, linestyle=":")
            axis.set_title(f"{title}: {comparison.text}", loc="left")
        for place, (name, level) in enumerate(levels):
            on = [order[setting] for setting in order if setting[SETTINGS.index(name)] == level]
            axes[-1].plot(on, [place] * len(on), "|", color="0.2", markersize=3.5)
        labels = [f"{name}: {level}" for name, level in levels]
        axes[-1].set_yticks(range(len(levels)), labels)
        axes[-1].invert_yaxis()
        axes[-1].set_xlabel(f"{len(order)} settings, sorted by the first panel")
        figure.savefig(path, dpi=200)


def main() -> None:
    """Measure the runs that are missing, or draw what was measured."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("work", choices=("measure", "draw"))
    parser.add_argument("longbench", nargs="?", type=Path)
    parser.add_argument("--only", default="", help="a word in the names of the runs to measure")
    asked = parser.parse_args()
    if asked.work == "draw":
        draw(read(), PICTURE)
        say("\n".join(tally(read())))
        return
    for run in runs():
        if not (ROWS / f"{name(*run)}.csv").exists() and asked.only in name(*run):
            write(run, list(rows(measure(*run, asked.longbench), *run)))


if __name__ == "__main__":
    main()
