"""What is lost where heads or layers share a kept set, for docs/results/raggedness.md.

`python studies/raggedness.py measure LONGBENCH` measures a run (model × chat template × data set) after the other and
writes its rows to docs/raggedness/RUN.csv; a run whose file is there is not measured again, and one that was cut goes
on where it was. `--only WORD` takes the runs whose name holds a word. `python studies/raggedness.py draw` draws the
picture and prints the page's tables. With `--short` it measures and draws a single run of four short prompts, to see it
work. The rules stand in docs/results/rules.md, which was written first.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import common
import numpy as np
from common import ONE_STEP, Table, perturbation_of, ratio_of_sums, variable
from matplotlib.axes import Axes
from specification import (
    COLOURS,
    DOCS,
    SEED,
    WITHOUT_TEMPLATE,
    commit_hash,
    measure_short,
    model,
    read_rows,
    verdict,
    write_rows,
)

import perturbkv as pk

ROWS, PICTURE = DOCS / "raggedness", DOCS / "figures" / "raggedness.png"
RUNS = DOCS.parent / "runs" / "raggedness"
SAMPLES = {
    "smollm2-135m-q4_1": 16,
    "gemma-3-270m-q4_k_m": 16,
    "qwen2.5-coder-0.5b-q4_k_m": 8,
    "qwen2.5-coder-1.5b-q4_k_m": 8,
}
"""Model -> prompts of each of its runs."""
DATA: dict[str, dict[str, Any]] = {"multi_news": {"max_tokens": 1000}, "needle": {"lengths": (1000,)}}
"""Data set -> options of loading it."""
BUDGETS, SELECTIONS = (0.1, 0.2), ("attention", "two-stage")
UNITED = tuple(f"{name}(reduce=union)" for name in ("layer", "head", "model"))
SHARED = ("kv", "layer", "head", "model", *UNITED)
ADAKV = "adakv"
COMPARISONS = {
    "allocation": ("kv", ADAKV, -1),
    "layer": ("kv", "layer", 1),
    "head": ("kv", "head", 1),
    "model": ("kv", "model", 1),
    "model over layer": ("layer", "model", 1),
    "model over head": ("head", "model", 1),
    "union, layer": ("layer", UNITED[0], -1),
    "union, head": ("head", UNITED[1], -1),
    "union, model": ("model", UNITED[2], -1),
}
"""Comparison -> baseline, treatment, and 1 where the claim is that the treatment loses more, -1 where less."""
SHOWN = {f"{name} over kv": ("kv", name, 1) for name in UNITED}
"""Comparisons that the picture has and the rules do not judge."""
ONE_HEAD, EQUAL_BY_HEAD = "gemma-3-270m-q4_k_m", ("allocation", "layer", "model over head")
"""The model of one key/value head, and the comparisons whose sides are then one set: they are not counted."""
NUMBERS = ("isolated", "propagated", "KL")
SETTINGS = ("model", "template", "dataset", "budget", "selection")
COLUMNS = (*SETTINGS, "n", "shortest", "longest", "seed", "commit", "cache_share", "comparison", "number", "value",
           "low", "high")  # fmt: skip
NEAR = (0.95, 1.05)
PICTURED = {
    "allocation": "AdaKV: a set per head,\ncounts of their own",
    "layer": "layer",
    f"{UNITED[0]} over kv": "layer, union",
    "head": "head",
    f"{UNITED[1]} over kv": "head, union",
    "model": "model",
    f"{UNITED[2]} over kv": "model, union",
}
"""Comparison -> its row in the picture."""


@dataclass(frozen=True)
class Run:
    """A measuring run: a model with or without its chat template on a data set."""

    model: str
    template: bool
    dataset: str

    @property
    def name(self) -> str:
        """Name of its files."""
        return "-".join((self.model, "template" if self.template else "plain", self.dataset))

    @property
    def rows(self) -> Path:
        """The file of its rows."""
        return ROWS / f"{self.name}.csv"


def runs() -> list[Run]:
    """Return every run."""
    return [
        Run(name, template, dataset)
        for name in SAMPLES
        for template in ((False,) if name in WITHOUT_TEMPLATE else (True, False))
        for dataset in DATA
    ]


def configs() -> dict[tuple[float, str], dict[str, Any]]:
    """Return (budget, selection) -> what a kept set is of, as in SHARED, or ADAKV -> configuration."""
    found: dict[tuple[float, str], dict[str, Any]] = {}
    for budget in BUDGETS:
        for selection in SELECTIONS:
            fields: dict[str, Any] = {"window": 32, "selection": selection}
            made = {name: pk.grid(budget, policy="snapkv", granularity=name, **fields)[0] for name in SHARED}
            (made[ADAKV],) = pk.grid(budget, policy=ADAKV, granularity="kv", **fields)
            found[budget, selection] = made
    return found


def measure(run: Run, longbench: Path) -> pk.Trace:
    """Return a run's trace: measured now, or read where it is finished."""
    loaded = model(run.model)
    prompts = pk.load_prompts(
        run.dataset, loaded, samples=SAMPLES[run.model], seed=SEED, chat_template=run.template, data_dir=longbench,
        **DATA[run.dataset],
    )  # fmt: skip
    path = RUNS / f"{run.name}.h5"
    path.parent.mkdir(parents=True, exist_ok=True)
    print(f"{run.name}: {len(prompts)} prompts", flush=True)
    return pk.measure(
        loaded,
        prompts,
        [config for made in configs().values() for config in made.values()],
        settings=common.ONE_STEP,
        path=path,
    )


def rows(trace: pk.Trace, run: Run) -> Iterator[dict[str, Any]]:
    """Yield a row per setting, comparison and number of a run."""
    lengths = trace.arrays["prompt_tokens"][trace.ok]
    same = {"model": run.model, "template": run.template, "dataset": run.dataset, "n": len(lengths), "seed": SEED,
            "shortest": int(lengths.min()), "longest": int(lengths.max()), "commit": commit_hash()}  # fmt: skip
    divergence, shares = variable(trace, "logit_kl"), common.cache_shares(trace)
    for (budget, selection), made in configs().items():
        places = {name: trace.config_index(config.label()) for name, config in made.items()}
        for title, (first, second, _) in (COMPARISONS | SHOWN).items():
            baseline, treatment = places[first], places[second]
            kl = divergence[:, treatment] - divergence[:, baseline]
            numbers: dict[str, common.Estimated] = {
                kind: ratio_of_sums(*perturbation_of(trace, kind, baseline, treatment))
                for kind in ("isolated", "propagated")
            }
            numbers["KL"] = float(np.median(kl)), pk.stats.intervals.of_median(kl)
            for number, (value, interval) in numbers.items():
                low, high = (float("nan"),) * 2 if interval is None else (interval.low, interval.high)
                yield {
                    **same, "budget": budget, "selection": selection, "cache_share": float(shares[treatment]),
                    "comparison": title, "number": number, "value": value, "low": low, "high": high,
                }  # fmt: skip


def select_rows(
    found: Sequence[dict[str, str]], comparison: str, number: str, counted: bool = True
) -> list[dict[str, str]]:
    """Return the rows of one comparison's number, a row per setting; `counted`: of those that the rules count."""
    selected = [row for row in found if (row["comparison"], row["number"]) == (comparison, number)]
    equal = EQUAL_BY_HEAD if counted else ()
    return [row for row in selected if (row["model"] != ONE_HEAD or comparison not in equal)]


def verdict_of(row: dict[str, str]) -> str:
    """Return a row's verdict, holds, reversed or undecided, as the rules have it."""
    sign, even = (COMPARISONS | SHOWN)[row["comparison"]][2], 0 if row["number"] == "KL" else 1
    return verdict(sign, even, float(row["low"]), float(row["high"]))


def overall_verdict(selected: Sequence[dict[str, str]]) -> str:
    """Return supported, contradicted or undecided over settings, as the rules have it."""
    verdicts = [verdict_of(row) for row in selected]
    holds, against = (verdicts.count(word) / len(verdicts) for word in ("holds", "reversed"))
    if holds >= 0.8 and against <= 0.05:
        return "supported"
    return "contradicted" if against >= 0.8 and holds <= 0.05 else "undecided"


def within_margin(row: dict[str, str]) -> bool:
    """Return whether a ratio's whole interval is within 5 % of 1."""
    return row["number"] != "KL" and NEAR[0] <= float(row["low"]) and float(row["high"]) <= NEAR[1]


def _median_text(selected: Sequence[dict[str, str]]) -> str:
    """Return the median of the settings' values with the least and the largest."""
    values = [float(row["value"]) for row in selected]
    shown: Callable[[float], str] = "{:+.3f}".format if selected[0]["number"] == "KL" else "{:.2f}".format
    return f"{shown(float(np.median(values)))} ({shown(min(values))} to {shown(max(values))})".replace("-", "−")


def verdicts_table(found: Sequence[dict[str, str]]) -> Table:
    """Return the table of every comparison's verdicts, a row per number."""
    heads = ["comparison", "number", "median (least to largest)", "holds", "reversed", "undecided", "within 5 %",
             "sentence"]  # fmt: skip
    rows = []
    for title in COMPARISONS:
        for number in NUMBERS:
            selected = select_rows(found, title, number)
            counts = [sum(verdict_of(row) == word for row in selected) for word in ("holds", "reversed", "undecided")]
            near = "–" if number == "KL" else str(sum(map(within_margin, selected)))
            rows.append([title, number, _median_text(selected), *map(str, counts), near, overall_verdict(selected)])
    return "verdicts", heads, rows


def levels_table(found: Sequence[dict[str, str]]) -> Table:
    """Return the table of propagated ratios over `kv`, a row per level: median, and holds / reversed."""
    titles, rows = [title for title in COMPARISONS if COMPARISONS[title][0] == "kv"], []
    for name in SETTINGS:
        for level in dict.fromkeys(row[name] for row in found):
            rows.append([level if name != "template" else _template_text(level)])
            for title in titles:
                selected = [row for row in select_rows(found, title, "propagated") if row[name] == level]
                words = [verdict_of(row) for row in selected]
                middle = f"{np.median([float(row['value']) for row in selected]):.2f}" if selected else ""
                counts = f"({words.count('holds')} / {words.count('reversed')} of {len(selected)})"
                rows[-1].append(f"{middle} {counts}" if selected else "–")
    return "by level", ["settings", *titles], rows


def _template_text(level: str) -> str:
    """Return a level of the chat template as text."""
    return "with template" if level == "True" else "without template"


def reversed_table(found: Sequence[dict[str, str]]) -> Table:
    """Return the table of the settings in which a comparison's number is reversed."""
    rows = []
    for title in COMPARISONS:
        for number in NUMBERS:
            for row in select_rows(found, title, number):
                if verdict_of(row) == "reversed":
                    where = (
                        row["model"],
                        _template_text(row["template"]),
                        row["dataset"],
                        row["budget"],
                        row["selection"],
                    )
                    rows.append([title, number, *where, f"{row['value']} [{row['low']}, {row['high']}]"])
    return "reversed", ["comparison", "number", "model", "template", "data", "b", "selection", ""], rows


def settings_table(found: Sequence[dict[str, str]]) -> Table:
    """Return the table of every setting's propagated ratios over `kv`, with their intervals."""
    titles = [title for title in (*COMPARISONS, *SHOWN) if (COMPARISONS | SHOWN)[title][0] == "kv"]
    by_title, rows = [select_rows(found, title, "propagated", counted=False) for title in titles], []
    for each in zip(*by_title, strict=True):
        row = each[0]
        cells = [f"{float(one['value']):.2f} [{float(one['low']):.2f}, {float(one['high']):.2f}]" for one in each]
        where = [row["model"], "yes" if row["template"] == "True" else "no", row["dataset"], row["budget"],
                 row["selection"], row["n"]]  # fmt: skip
        rows.append([*where, *cells])
    return "every setting, propagated", ["model", "template", "data", "b", "selection", "n", *titles], rows


TABLES = verdicts_table, levels_table, reversed_table, settings_table


def draw(found: Sequence[dict[str, str]], path: Path) -> None:
    """Draw every setting's numbers over those of `kv`: a row per kind of kept sets, a panel per number."""
    figure = common.page_figure(92)
    axes = figure.subplots(1, len(NUMBERS), sharey=True)
    for panel, number in zip(axes, NUMBERS, strict=True):
        _draw_panel(panel, found, number)
    axes[0].set_yticks(range(len(PICTURED)), list(PICTURED.values()))
    axes[0].set_ylim(len(PICTURED) - 0.5, -0.5)
    handles = [
        axes[0].plot([], [], linestyle="none", marker="o", markersize=2.5, color=colour, label=word)[0]
        for word, colour in (("more lost than kv", COLOURS["reversed"]), ("less", COLOURS["holds"]),
                             ("undecided", COLOURS["undecided"]))
    ]  # fmt: skip
    handles += axes[0].plot([], [], linestyle="none", marker="|", color="black", label="median of the settings")
    figure.legend(handles=handles, loc="outside upper left", ncols=4)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=200)


def _draw_panel(panel: Axes, found: Sequence[dict[str, str]], number: str) -> None:
    """Draw one number: a point per setting, coloured by its verdict against `kv`, and the settings' median."""
    even, axis = (0.0, "KL minus kv's, nat") if number == "KL" else (1.0, "sum over kv's")
    for place, title in enumerate(PICTURED):
        selected = select_rows(found, title, number)
        shifts = np.linspace(-0.28, 0.28, len(selected))
        for row, shift in zip(sorted(selected, key=lambda one: float(one["value"])), shifts, strict=True):
            low, high = float(row["low"]), float(row["high"])
            colour = COLOURS["reversed"] if low > even else COLOURS["holds"] if high < even else COLOURS["undecided"]
            panel.plot(float(row["value"]), place + shift, "o", markersize=1.8, color=colour, zorder=2)
        middle = float(np.median([float(row["value"]) for row in selected]))
        panel.plot(middle, place, "|", color="black", markersize=11, markeredgewidth=1.2, zorder=3)
    panel.axvline(even, color="0.55", linewidth=0.8, zorder=1)
    panel.set_title({"isolated": "isolated L1", "propagated": "propagated L1", "KL": "KL of the next token"}[number])
    panel.set_xlabel(axis)
    if number == "KL":
        panel.set_xscale("symlog", linthresh=0.1)
        panel.set_xlim(-0.25, 7)
        panel.set_xticks([-0.1, 0, 0.1, 1], ["−0.1", "0", "0.1", "1"])
    else:
        panel.set_xscale("log")
        ticks = [0.7, 1, 1.4, 2, 3, 4]
        panel.set_xticks(ticks, [f"{tick:g}" for tick in ticks])
    panel.minorticks_off()


def study(asked: argparse.Namespace) -> None:
    """Measure the runs that are missing, or draw and tell what was measured."""
    if asked.short:
        chosen = [config for made in configs().values() for config in made.values()]
        of_needle, trace = measure_short(asked.output, chosen, ONE_STEP, length=400)
        measured = [asked.output / "rows.csv"]
        write_rows(measured[0], COLUMNS, list(rows(trace, Run(of_needle.model, False, of_needle.dataset))))
    elif asked.work == "measure":
        for run in runs():
            if asked.only in run.name and not run.rows.exists():
                write_rows(run.rows, COLUMNS, list(rows(measure(run, asked.longbench), run)))
        return
    else:
        measured = [run.rows for run in runs()]
    found = read_rows(measured)
    asked.written.append(asked.output / PICTURE.name if asked.short else PICTURE)
    draw(found, asked.written[-1])
    common.write_tables(asked, (table(found) for table in TABLES))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("work", choices=("measure", "draw"), nargs="?", default="draw")
    parser.add_argument("longbench", nargs="?", type=Path)
    parser.add_argument("--only", default="", help="a word in the names of the runs to measure")
    parser.add_argument("--short", action="store_true", help="one run of four short prompts, to see it work")
    parser.add_argument("--output", "-o", type=Path, help="folder of the JSON document")
    common.main(study, parser)
