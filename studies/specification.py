"""The paper's headline comparisons over every setting that can be had here, for docs/results/four_models.md.

`python studies/specification.py measure LONGBENCH` measures a run (model × chat template × data set × scenario) after the
other, over eight decode steps, and writes its rows to docs/specification/RUN.csv, of the first step and of all, and those
by kind of token to RUN-kinds.csv; a run whose files are there is not measured again, and one that was cut goes on where
it was. `--only WORD` takes the runs whose name holds a word. `python studies/specification.py draw` draws
the pictures and prints in how many settings each comparison holds: of all, and of each level of them. With `--confirm`
both are about the confirming runs, on prompts that nothing else has used; `specification_claims.py` tells what these
say. With `--short` it measures and draws a single run of four short prompts, to see it work.
The rules stand in docs/results/rules.md, which was written first.
"""

from __future__ import annotations

import argparse
import csv
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
CONFIRMING = {
    "smollm2-135m-q4_1": 60,
    "gemma-3-270m-q4_k_m": 60,
    "qwen2.5-coder-0.5b-q4_k_m": 60,
    "qwen2.5-coder-1.5b-q4_k_m": 16,
}
"""Model -> prompts of each of its confirming runs, which are of `multi_news` alone."""
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
PANELS = {
    "propagated": ("heads by sample", "sum", "stages", "value norms", "un-pooling", "last layer, sum"),
    "isolated": ("heads by sample", "sum", "stages", "value norms", "un-pooling"),
}
"""Kind -> the first words of the comparisons in its picture's panels."""


@dataclass(frozen=True)
class Run:
    """A measuring run: a model with or without its chat template on a data set, or on its confirming prompts.

    Its cache is compressed with the question in it (regular) or before the question comes (context-only).
    """

    model: str
    template: bool
    dataset: str
    scenario: str = "regular"
    confirm: bool = False

    @property
    def name(self) -> str:
        """Name of its files."""
        words = self.model, "template" if self.template else "plain", self.dataset.replace(":", "-")
        scenario = () if self.scenario == "regular" else (self.scenario,)
        return "-".join((*words, *scenario, "confirm") if self.confirm else (*words, *scenario))

    @property
    def prompts(self) -> int:
        """Number of prompts that it measures."""
        return (CONFIRMING if self.confirm else SAMPLES)[self.model]

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


def runs(confirm: bool = False) -> list[Run]:
    """Return every run, or every confirming one."""
    return [
        Run(model, template, dataset, scenario, confirm)
        for scenario in (SCENARIOS[:1] if confirm else SCENARIOS)
        for model in SAMPLES
        for template in ((False,) if model in WITHOUT_TEMPLATE else (True, False))
        for dataset in (DATA if not confirm else ("multi_news",))
    ]


@lru_cache(maxsize=1)
def model(name: str) -> Any:
    """Return a model, read once for the runs that follow each other with it."""
    return pk.load_model(name, device="cpu", dtype="float32")


def measure(run: Run, longbench: Path) -> pk.Trace:
    """Return a run's trace: measured now, or read where it is finished. Print how the first prompt begins and ends."""
    loaded = model(run.model)
    folder = longbench / "confirm" if run.confirm else longbench
    prompts = pk.load_prompts(
        run.dataset, loaded, samples=run.prompts, seed=SEED, chat_template=run.template, data_dir=folder,
        **DATA[run.dataset],
    )  # fmt: skip
    path = RUNS / f"{run.name}.h5"
    path.parent.mkdir(parents=True, exist_ok=True)
    ends = [loaded.tokenizer.decode(part) for part in (prompts[0].token_ids[:20], prompts[0].token_ids[-20:])]
    print(f"{path.stem}: {len(prompts)} prompts, {ends[0]!r} … {ends[1]!r}", flush=True)
    settings = pk.Settings(steps=STEPS, scenario=run.scenario)
    return pk.measure(loaded, prompts, list(run.configs()), settings=settings, path=path)


def commit_hash() -> str:
    """Return the short hash of the commit of the code that measures."""
    words = ("git", "rev-parse", "--short", "HEAD")
    return subprocess.run(words, cwd=DOCS, capture_output=True, text=True, check=True).stdout.strip()


def rows(trace: pk.Trace, run: Run) -> Iterator[dict[str, Any]]:
    """Yield a row per setting and comparison of a run, of the first step and of all steps together."""
    lengths, presets = trace.arrays["prompt_tokens"][trace.ok], run.configs()
    same = {"n": len(lengths), "seed": SEED, "shortest": int(lengths.min()), "longest": int(lengths.max()),
            "commit": commit_hash()}  # fmt: skip
    for step, steps in ((0, 1), (None, trace.run.steps)):
        pairs: dict[tuple[str, str], tuple[Any, Any]] = {}
        for title, comparison in COMPARISONS.items():
            sides = comparison.baseline, comparison.treatment
            if sides not in pairs:
                drifts = {one.treatment: one for series in pk.last_layer(trace, *sides, step=step) for one in series}
                pairs[sides] = list(pk.compare_heads(trace, *sides, step=step)), drifts
            for pair in pairs[sides][0]:
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


def read(confirm: bool = False) -> list[dict[str, str]]:
    """Return the rows of every run that was measured, in the order of `runs`."""
    return read_rows(run.rows for run in runs(confirm))


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


def tally_table(found: Sequence[dict[str, str]]) -> common.Table:
    """Return the table of comparisons: settings, those on the claimed side, and the verdicts."""
    rows = [[title, comparison.text, *map(str, count_verdicts(counted_rows(found, title), comparison))]
            for title, comparison in COMPARISONS.items()]  # fmt: skip
    heads = ["comparison", "number", "settings", "on the claimed side", "holds", "reversed", "undecided"]
    return "comparisons", heads, rows


def level_table(found: Sequence[dict[str, str]], kind: str = "propagated") -> common.Table:
    """Return the table of the settings' levels: of each of a picture's comparisons, holds / reversed, of how many."""
    rows = []
    for name in SETTINGS:
        for level in dict.fromkeys(row[name] for row in found):
            rows.append([_level_label(name, level)])
            for title in _titles(kind):
                own = [row for row in counted_rows(found, title) if row[name] == level]
                count, _, holds, against, _ = count_verdicts(own, COMPARISONS[title])
                rows[-1].append(f"{holds} / {against} of {count}" if count else "–")
    return f"by level, {kind}", ["settings", *_titles(kind)], rows


def _titles(kind: str) -> list[str]:
    """Return the titles of the comparisons in the panels of one kind's picture."""
    return [words if words.startswith("last") else f"{words}, {kind}" for words in PANELS[kind]]


def count_verdicts(rows: Sequence[dict[str, str]], comparison: Comparison) -> tuple[int, ...]:
    """Return how many settings there are, lie on the claimed side, hold, are reversed and are undecided."""
    claimed = sum(comparison.sign * (float(row["value"]) - comparison.even) > 0 for row in rows)
    verdicts = [comparison.verdict(float(row["low"]), float(row["high"])) for row in rows]
    return len(rows), claimed, *(verdicts.count(verdict) for verdict in ("holds", "reversed", "undecided"))


def counted_rows(found: Sequence[dict[str, str]], title: str) -> list[dict[str, str]]:
    """Return the rows of one comparison that the rules count."""
    words = title.split(",")[0]
    return [row for row in found if row["comparison"] == title and (words, row["preset"]) not in UNCOUNTED]


def draw(found: Sequence[dict[str, str]], kind: str, path: Path) -> None:
    """Draw every setting's numbers of one kind with their intervals, sorted by the sum, over a matrix of the settings.

    Hollow points in the first panel are the shares of heads by their means, which have no interval.
    """
    sums = counted_rows(found, f"sum, {kind}")
    key = {_setting_of(row): float(row["value"]) for row in sums}
    order = {setting: place for place, setting in enumerate(sorted(key, key=key.__getitem__))}
    levels = [(name, level) for name in SETTINGS for level in dict.fromkeys(row[name] for row in sums)]
    titles = _titles(kind)
    figure = common.page_figure(27 * len(titles) + 64)
    axes = figure.subplots(len(titles) + 1, 1, sharex=True, height_ratios=[1] * len(titles) + [2.8])
    for axis, title in zip(axes, titles, strict=False):
        _draw_panel(axis, counted_rows(found, title), COMPARISONS[title], order)
        comparison = COMPARISONS[title]
        better = "above" if comparison.sign > 0 else "below"
        words = title.removesuffix(f", {kind}")
        axis.set_title(f"{words}: {comparison.text}; {better} {comparison.even:g} is better", loc="left")
    for row in counted_rows(found, f"heads by means, {kind}"):
        axes[0].plot(order[_setting_of(row)], float(row["value"]), "o", color="0.3", fillstyle="none", markersize=1.8,
                     markeredgewidth=0.4)  # fmt: skip
    for place, (name, level) in enumerate(levels):
        on = [order[setting] for setting in order if setting[SETTINGS.index(name)] == level]
        axes[-1].plot(on, [place] * len(on), "|", color="0.2", markersize=3)
    for verdict, colour in COLOURS.items():
        label = verdict if verdict == "undecided" else f"{verdict}, 95 %"
        axes[0].plot([], [], ".-", color=colour, markersize=2.5, linewidth=0.6, label=label)
    axes[0].plot([], [], "o", color="0.3", fillstyle="none", markersize=1.8, label="by means over prompts")
    figure.legend(loc="outside upper center", ncols=4)
    axes[-1].set_yticks(range(len(levels)), [_level_label(*one) for one in levels])
    axes[-1].invert_yaxis()
    axes[-1].set_xlabel(f"{len(order)} settings, {kind}, sorted by the second panel")
    figure.savefig(path, dpi=200)


def _level_label(name: str, level: str) -> str:
    """Return a level's label."""
    if name == "template":
        return "with chat template" if level == "True" else "no chat template"
    return level if name in ("model", "dataset") else f"{name} {level}"


def _draw_panel(axis: Any, rows: Sequence[dict[str, str]], comparison: Comparison, order: dict[Any, int]) -> None:
    """Draw a comparison's numbers and intervals, coloured by verdict; ratios on a logarithmic axis."""
    for row in rows:
        place = order[_setting_of(row)]
        value, low, high = (float(row[name]) for name in ("value", "low", "high"))
        colour = COLOURS[comparison.verdict(low, high)]
        axis.plot([place, place], [low, high], color=colour, linewidth=0.6)
        axis.plot(place, value, ".", color=colour, markersize=2.5)
    if comparison.even == 1:
        common.plain_log(axis, "y")
    axis.axhline(comparison.even, color="0.3", linewidth=0.6, linestyle=":")


def _setting_of(row: dict[str, str]) -> tuple[str, ...]:
    """Return a row's setting."""
    return tuple(row[name] for name in SETTINGS)


def study(asked: argparse.Namespace) -> None:
    """Measure the runs that are missing, or draw and tell what was measured."""
    if asked.short:
        run, trace = measure_short(asked.output)
        measured = [asked.output / "rows.csv"]
        write_rows(measured[0], COLUMNS, list(rows(trace, run)))
    elif asked.work == "measure":
        for run in runs(asked.confirm):
            if not run.rows.exists() and asked.only in run.name:
                trace = measure(run, asked.longbench)
                write_rows(run.kinds, KIND_COLUMNS, list(kind_rows(trace, run)))
                write_rows(run.rows, COLUMNS, list(rows(trace, run)))
        return
    else:
        measured = [run.rows for run in runs(asked.confirm)]
    found, folder = read_rows(measured), asked.output if asked.short else FIGURES
    for kind in PANELS:
        asked.written.append(folder / f"{'confirmation' if asked.confirm else 'specification'}-{kind}.png")
        draw(found, kind, asked.written[-1])
    common.write_tables(asked, [tally_table(found), level_table(found)])


def measure_short(folder: Path, length: int = 300) -> tuple[Run, pk.Trace]:
    """Return a run of four short prompts, and its trace."""
    run = Run(next(iter(SAMPLES)), False, "needle")
    prompts = pk.load_prompts(run.dataset, model(run.model), samples=4, lengths=(length,), chat_template=False)
    settings = pk.Settings(steps=STEPS)
    return run, pk.measure(model(run.model), prompts, list(run.configs()), settings=settings, path=folder / "trace.h5")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("work", choices=("measure", "draw"), nargs="?", default="draw")
    parser.add_argument("longbench", nargs="?", type=Path)
    parser.add_argument("--only", default="", help="a word in the names of the runs to measure")
    parser.add_argument("--confirm", action="store_true", help="the confirming runs")
    parser.add_argument("--short", action="store_true", help="one run of four short prompts, to see it work")
    parser.add_argument("--output", "-o", type=Path, help="folder of the JSON document")
    common.main(study, parser)
