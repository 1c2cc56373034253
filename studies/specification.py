"""The paper's headline comparisons over every setting that can be had: docs/results/eight_steps.md, four_models.md.

`python studies/specification.py LONGBENCH` measures a run (model × chat template × data set × scenario) after the
other, over eight decode steps, and writes its rows to docs/specification/RUN.csv, of the first step and of all, and
those by kind of token to RUN-kinds.csv. A run whose files are there is not measured again, and one that was cut goes on
where it was. `--only WORD` takes the runs whose name holds a word. With `--confirm confirm2` it measures the confirming
runs, on prompts that nothing else has used. With `--short` it measures four short prompts, to see it work.
`specification_counts.py` counts and draws what was measured. The rules stand in docs/results/rules.md, which was
written first.
"""

from __future__ import annotations

import argparse
import csv
import dataclasses
import subprocess
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import common
import numpy as np

import perturbkv as pk

intervals = pk.stats.intervals
DOCS = Path(__file__).resolve().parents[1] / "docs"
ROWS, FIGURES = DOCS / "specification", DOCS / "figures"
RUNS = DOCS.parent / "runs" / "specification"
SAMPLES = {
    "smollm2-135m-q4_1": 16,
    "gemma-3-270m-q4_k_m": 16,
    "qwen2.5-coder-0.5b-q4_k_m": 16,
    "qwen2.5-coder-1.5b-q4_k_m": 8,
}
"""Model -> prompts of each of its runs."""
CONFIRMING: dict[str, tuple[dict[str, int], dict[str, int]]] = {
    "confirm": (
        {
            "smollm2-135m-q4_1": 60,
            "gemma-3-270m-q4_k_m": 60,
            "qwen2.5-coder-0.5b-q4_k_m": 60,
            "qwen2.5-coder-1.5b-q4_k_m": 16,
        },
        {"multi_news": 0},
    ),
    "confirm2": (
        {"smollm2-135m-q4_1": 40, "qwen2.5-coder-0.5b-q4_k_m": 40},
        {"multi_news": 0, "ruler:niah_multikey_2": 41},
    ),
}
"""Folder of LongBench's files that confirm -> prompts of each model's runs; data set -> its seed."""
WITHOUT_TEMPLATE = ("gemma-3-270m-q4_k_m",)
"""Models that have no chat template, so that half of their runs are not there."""
DATA: dict[str, dict[str, Any]] = {
    "multi_news": {"max_tokens": 1500},
    "needle": {"lengths": (1000,)},
    "ruler:niah_multikey_2": {"lengths": (1000,)},
}
"""Data set -> options of loading it."""
BUDGET, SEED, STEPS = 128, 0, 8
SCENARIOS, WINDOWS, GRANULARITIES = ("regular", "context-only"), (8, 32), ("query", "kv")
EIGHT_STEPS = pk.Settings(steps=STEPS)
SIDES = ("attention", "two-stage")
PRESETS = {
    "paper": (*SIDES, "two-stage-uniform", "attention-unpooled"),
    "paper-v2": SIDES,
    "released-v2": (*SIDES, "attention-unpooled"),
    "kvpress": SIDES,
}
"""Preset -> its selections. Others are another comparison's: where both stages read pooled scores, two-stage with ν = 1
keeps what attention keeps, and un-pooling is `paper`'s where the pooling is."""
OWN_WINDOW = {"kvpress": 64}
"""Preset that is measured with a window of its own alone -> that window."""
CONTRADICTING = {(preset, "query"): "product-of-means is of a group's heads, which share one kept set"
                 for preset in ("released-v2", "kvpress")}  # fmt: skip
"""(preset, granularity) that is left out -> why."""
UNCOUNTED = {
    ("un-pooling", "paper-v2"): "the same two selections as under the preset paper",
    **{(words, preset): why
       for preset in ("paper-v2", "released-v2")
       for words, why in {"stages": "both stages read pooled scores and keep what attention keeps",
                          "stages beyond un-pooling": "un-pooling the other way round",
                          "value norms": "the same number as the sum"}.items()},
}  # fmt: skip
"""(first words of a comparison, preset) that earlier rows have and that is not counted -> why."""
COLOURS = {"holds": "C0", "reversed": "C1", "undecided": "0.6"}
SETTINGS = ("model", "template", "dataset", "scenario", "window", "granularity", "preset")
COLUMNS = (*SETTINGS, "n", "shortest", "longest", "seed", "commit", "steps", "comparison", "value", "low", "high")
RATIOS = ("isolated_ratio", "propagated_ratio", "rest_ratio")
KIND_COLUMNS = (
    *(*SETTINGS, "kind", "samples", "tokens"),
    *(name + end for name in RATIOS for end in ("", "_low", "_high")),
    *("differs", "makes_sign"),
)
"""Columns of the rows by kind of token: ratios are of two-stage over attention, `rest_ratio` is of all other tokens."""


@dataclass(frozen=True)
class Run:
    """A measuring run: a model with or without its chat template on a data set.

    Its cache is compressed with the question in it (regular) or before the question comes (context-only). Of a
    confirming run, `confirm` is the name in `CONFIRMING`.
    """

    model: str
    template: bool
    dataset: str
    scenario: str = "regular"
    confirm: str = ""

    @property
    def name(self) -> str:
        """Name of its files."""
        words = self.model, "template" if self.template else "plain", self.dataset.replace(":", "-")
        scenario = () if self.scenario == "regular" else (self.scenario,)
        return "-".join((*words, *scenario, *((self.confirm,) if self.confirm else ())))

    @property
    def prompts(self) -> int:
        """Number of prompts that it measures."""
        return (CONFIRMING[self.confirm][0] if self.confirm else SAMPLES)[self.model]

    @property
    def seed(self) -> int:
        """Seed of its prompts and of everything random."""
        return CONFIRMING[self.confirm][1][self.dataset] if self.confirm else SEED

    @property
    def rows(self) -> Path:
        """The file of its rows."""
        return ROWS / f"{self.name}.csv"

    @property
    def kinds(self) -> Path:
        """The file of its rows by kind of token."""
        return ROWS / f"{self.name}-kinds.csv"

    def configs(self) -> dict[pk.EvictionConfig, str]:
        """Return every configuration -> its preset: every window, granularity and selection of the scenario."""
        windows = WINDOWS if self.scenario == "regular" else WINDOWS[-1:]
        return {
            config: preset
            for preset, selections in PRESETS.items()
            for granularity in GRANULARITIES
            if (preset, granularity) not in CONTRADICTING
            for config in pk.grid(
                BUDGET, preset=preset, window=OWN_WINDOW.get(preset, windows), granularity=granularity,
                selection=selections,
            )
        }  # fmt: skip


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
        """Return holds, reversed or undecided: whether the whole interval lies on one side of even; NaN: undecided."""
        return verdict(self.sign, self.even, low, high)


def verdict(sign: int, even: float, low: float, high: float) -> str:
    """Return holds, reversed or undecided: whether an interval lies above `even` (`sign` 1) or below it (-1)."""
    ends = sorted(sign * (end - even) for end in (low, high))
    return "holds" if ends[0] > 0 else "reversed" if ends[1] < 0 else "undecided"


def _comparisons() -> dict[str, Comparison]:
    """Return name -> comparison, in the order of the rules."""
    found = {}
    for kind in ("isolated", "propagated"):
        sides = "attention", "two-stage", kind
        found[f"heads by means, {kind}"] = Comparison(*sides, 0.5, 1, "share of heads that change less, by their means")
        found[f"heads by sample, {kind}"] = Comparison(*sides, 0.5, 1, "share of a prompt's heads that change less")
        found[f"sum, {kind}"] = Comparison(*sides, 1, -1, "changes, two-stage over attention")
        stages = "attention", "two-stage-uniform", kind
        found[f"stages, {kind}"] = Comparison(*stages, 1, -1, "changes, two-stage with ν = 1 over attention")
        found[f"value norms, {kind}"] = Comparison(
            "two-stage-uniform", "two-stage", kind, 1, -1, "changes, two-stage over the same with ν = 1"
        )
        found[f"un-pooling, {kind}"] = Comparison(
            "attention", "attention-unpooled", kind, 1, -1, "changes, attention without pooling over attention"
        )
        found[f"stages beyond un-pooling, {kind}"] = Comparison(
            "attention-unpooled", "two-stage-uniform", kind, 1, -1,
            "changes, two-stage with ν = 1 over attention without pooling",
        )  # fmt: skip
    last = "attention", "two-stage", "last layer"
    found["last layer, prompts"] = Comparison(*last, 0.5, 1, "share of prompts that drift less")
    found["last layer, sum"] = Comparison(*last, 1, -1, "drifts, two-stage over attention")
    return found


COMPARISONS = _comparisons()


def runs(confirm: str = "") -> list[Run]:
    """Return every run, or every confirming one of a name in `CONFIRMING`."""
    models, data = CONFIRMING[confirm] if confirm else (SAMPLES, DATA)
    return [
        Run(model, template, dataset, scenario, confirm)
        for scenario in (SCENARIOS[:1] if confirm else SCENARIOS)
        for model in models
        for template in ((False,) if model in WITHOUT_TEMPLATE else (True, False))
        for dataset in data
    ]


@lru_cache(maxsize=1)
def model(name: str) -> Any:
    """Return a model, read once for the runs that follow each other with it."""
    return pk.load_model(name, device="cpu", dtype="float32")


def measure(run: Run, longbench: Path) -> pk.Trace:
    """Return a run's trace: measured now, or read where it is finished. Print how the first prompt begins and ends."""
    loaded = model(run.model)
    prompts = pk.load_prompts(
        run.dataset, loaded, samples=run.prompts, seed=run.seed, chat_template=run.template,
        data_dir=longbench / run.confirm,
        **DATA[run.dataset],
    )  # fmt: skip
    path = RUNS / f"{run.name}.h5"
    path.parent.mkdir(parents=True, exist_ok=True)
    ends = [loaded.tokenizer.decode(part) for part in (prompts[0].token_ids[:20], prompts[0].token_ids[-20:])]
    print(f"{path.stem}: {len(prompts)} prompts, {ends[0]!r} … {ends[1]!r}", flush=True)
    settings = dataclasses.replace(EIGHT_STEPS, scenario=run.scenario)
    return pk.measure(loaded, prompts, list(run.configs()), settings=settings, path=path)


def commit_hash() -> str:
    """Return the short hash of the commit of the code that measures."""
    words = ("git", "rev-parse", "--short", "HEAD")
    return subprocess.run(words, cwd=DOCS, capture_output=True, text=True, check=True).stdout.strip()


def rows(trace: pk.Trace, run: Run) -> Iterator[dict[str, Any]]:
    """Yield a row per setting and comparison of a run, of the first step and of all steps together."""
    lengths, presets = trace.arrays["prompt_tokens"][trace.ok], run.configs()
    same = {"n": len(lengths), "seed": run.seed, "shortest": int(lengths.min()), "longest": int(lengths.max()),
            "commit": commit_hash()}  # fmt: skip
    for step, steps in ((0, 1), (None, trace.run.steps)):
        pairs: dict[tuple[str, str], tuple[Any, Any]] = {}
        for title, comparison in COMPARISONS.items():
            sides = comparison.baseline, comparison.treatment
            if sides not in pairs:
                drifts = {one.treatment: one for series in pk.last_layer(trace, *sides, step=step) for one in series}
                pairs[sides] = list(pk.compare_heads(trace, *sides, step=step)), drifts
            for pair in pairs[sides][0]:
                if presets[pair.baseline] != presets[pair.treatment]:
                    continue
                value, interval = comparison_number(title, comparison, pair, pairs[sides][1][pair.treatment])
                low, high = (float("nan"),) * 2 if interval is None else (interval.low, interval.high)
                yield {**_setting(run, pair.treatment, presets), **same, "steps": steps, "comparison": title,
                       "value": value, "low": low, "high": high}  # fmt: skip


def _setting(run: Run, config: pk.EvictionConfig, presets: Mapping[pk.EvictionConfig, str]) -> dict[str, Any]:
    """Return the setting of a run's configuration."""
    return {"model": run.model, "template": run.template, "dataset": run.dataset, "scenario": run.scenario,
            "window": config.window, "granularity": config.granularity.name, "preset": presets[config]}  # fmt: skip


def kind_rows(trace: pk.Trace, run: Run) -> Iterator[dict[str, Any]]:
    """Yield a row per setting and kind of token: two-stage over attention, sums over heads at the kind's steps."""
    presets = run.configs()
    for kind in pk.compare_heads(trace, *SIDES).token_kinds:
        numbers: dict[str, Any] = {}
        for name in RATIOS:
            interval = getattr(kind, f"{name}_interval")
            ends = (float("nan"),) * 2 if interval is None else (interval.low, interval.high)
            numbers |= {name: getattr(kind, name), f"{name}_low": ends[0], f"{name}_high": ends[1]}
        yield {**_setting(run, kind.treatment, presets), "kind": kind.kind, "samples": kind.samples,
               "tokens": kind.steps, **numbers, "differs": kind.differs, "makes_sign": kind.makes_sign}  # fmt: skip


def comparison_number(title: str, comparison: Comparison, pair: Any, drift: Any) -> tuple[float, Any]:
    """Return a comparison's number in one setting, and its interval; None where the rules give it no verdict.

    Args:
        title: of the comparison.
        comparison: of two selections.
        pair: their comparison of heads.
        drift: their drift after the last layer.

    In shares a tie counts half, so that two selections that keep the same are even.
    """
    if comparison.kind == "last layer":
        if title.endswith("prompts"):
            decided = drift.verdict[drift.verdict != 0]
            return even_shares(drift.verdict).mean(), intervals.of_share(decided == 1) if len(decided) else None
        return drift.mean_ratio, drift.mean_ratio_interval
    kind = getattr(pair, comparison.kind)
    if title.startswith("heads by means"):
        return float(even_shares(kind.verdict).mean()), None
    if title.startswith("heads by sample"):
        each = even_shares(np.sign(kind.differences)).reshape(len(kind.differences), -1)
        return float(each.mean()), intervals.of_mean(each.mean(axis=1), intervals.share_kind(each.shape[1]))
    return kind.sum_ratio, kind.sum_ratio_interval


def even_shares(verdicts: np.ndarray) -> np.ndarray:
    """Return 1 for better, 1/2 for tied, 0 for worse, of verdicts 1, 0, -1."""
    return np.asarray((verdicts + 1) / 2)


def read_rows(paths: Iterable[Path]) -> list[dict[str, str]]:
    """Return the rows of the files that are there, in order."""
    found: list[dict[str, str]] = []
    for path in paths:
        if path.exists():
            with path.open(newline="") as stream:
                found += csv.DictReader(stream)
    return found


def write_rows(path: Path, columns: Sequence[str], measured: Sequence[dict[str, Any]]) -> None:
    """Write the rows of a run into a file, whole or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_suffix(".tmp")
    with unfinished.open("w", newline="") as stream:
        writer = csv.DictWriter(stream, columns, lineterminator="\n")
        writer.writeheader()
        writer.writerows({key: _cell(row[key]) for key in columns} for row in measured)
    unfinished.replace(path)


def _cell(value: Any) -> str:
    """Return a number with four digits, anything else as text."""
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def write_run(run: Run, trace: pk.Trace) -> None:
    """Write a run's files of rows."""
    write_rows(run.kinds, KIND_COLUMNS, list(kind_rows(trace, run)))
    write_rows(run.rows, COLUMNS, list(rows(trace, run)))


def study(asked: argparse.Namespace) -> None:
    """Measure the runs that are missing, or a short one."""
    if asked.short:
        run, trace = measure_short(asked.output)
        asked.written.append(asked.output / "rows.csv")
        write_rows(asked.written[-1], COLUMNS, list(rows(trace, run)))
        return
    for run in runs(asked.confirm):
        if not run.rows.exists() and asked.only in run.name:
            write_run(run, measure(run, asked.longbench))


def measure_short(
    folder: Path, configs: Iterable[pk.EvictionConfig] = (), settings: pk.Settings = EIGHT_STEPS, length: int = 300
) -> tuple[Run, pk.Trace]:
    """Return a run of four short prompts, and its trace: of its own configurations, or of others."""
    run = Run(next(iter(SAMPLES)), False, "needle")
    prompts = pk.load_prompts(run.dataset, model(run.model), samples=4, lengths=(length,), chat_template=False)
    path = folder / "trace.h5"
    return run, pk.measure(model(run.model), prompts, list(configs or run.configs()), settings=settings, path=path)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("longbench", nargs="?", type=Path)
    parser.add_argument("--only", default="", help="a word in the names of the runs to measure")
    parser.add_argument("--confirm", choices=CONFIRMING, default="", help="the confirming runs of this folder")
    parser.add_argument("--short", action="store_true", help="one run of four short prompts, to see it work")
    parser.add_argument("--output", "-o", type=Path, help="folder of the short run")
    common.main(study, parser)
