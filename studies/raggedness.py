"""What is lost where heads or layers share a kept set, for docs/results/raggedness.md.

`python docs/scripts/raggedness.py measure LONGBENCH` measures a run (model × chat template × data set) after the other
and writes its rows to docs/raggedness/RUN.csv; a run whose file is there is not measured again, and one that was cut
goes on where it was. `--only WORD` takes the runs whose name holds a word. `python docs/scripts/raggedness.py draw`
draws the picture and prints the page's tables. The rules stand in docs/results/rules.md, which was written first.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from specification import COLOURS, SEED, WITHOUT_TEMPLATE, commit, model, read_rows, verdict, write_rows

import perturbkv as pk
from perturbkv.analyses.heads.head_comparison import summarise
from perturbkv.analyses.measurements import Measurements
from perturbkv.analyses.stats import intervals
from perturbkv.figures import style
from perturbkv.trace import Trace

DOCS = Path(__file__).resolve().parents[1]
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
    """Return (budget, selection) -> name of the kept sets -> configuration."""
    found: dict[tuple[float, str], dict[str, Any]] = {}
    for budget in BUDGETS:
        for selection in SELECTIONS:
            fields = {"window": 32, "selection": selection}
            made = {name: pk.grid(budget, policy="snapkv", granularity=name, **fields)[0] for name in SHARED}
            (made[ADAKV],) = pk.grid(budget, policy=ADAKV, granularity="kv", **fields)
            found[budget, selection] = made
    return found


def measure(run: Run, longbench: Path) -> Trace:
    """Return a run's trace, measured or finished."""
    loaded = model(run.model)
    prompts = pk.load_prompts(
        run.dataset, loaded, samples=SAMPLES[run.model], seed=SEED, chat_template=run.template, data_dir=longbench,
        **DATA[run.dataset],
    )  # fmt: skip
    path = RUNS / f"{run.name}.h5"
    path.parent.mkdir(parents=True, exist_ok=True)
    print(f"{run.name}: {len(prompts)} prompts", flush=True)
    return pk.measure(loaded, prompts, [config for made in configs().values() for config in made.values()], path=path)


def rows(trace: Trace, run: Run) -> Iterator[dict[str, Any]]:
    """Yield a row per setting, comparison and number of a run."""
    lengths = trace.arrays["prompt_tokens"][trace.ok]
    same = {"model": run.model, "template": run.template, "dataset": run.dataset, "n": len(lengths), "seed": SEED,
            "shortest": int(lengths.min()), "longest": int(lengths.max()), "commit": commit()}  # fmt: skip
    measured = Measurements(trace, "raggedness", 0)
    for (budget, selection), made in configs().items():
        for title, (baseline, treatment, _) in (COMPARISONS | SHOWN).items():
            pair = summarise(trace, made[baseline], made[treatment])
            kl, base = (measured["logit_kl"][:, measured.index(made[name])] for name in (treatment, baseline))
            numbers = {
                "isolated": (pair.isolated.sum_ratio, pair.isolated.sum_ratio_interval),
                "propagated": (pair.propagated.sum_ratio, pair.propagated.sum_ratio_interval),
                "KL": (float(np.median(kl - base)), intervals.of_median(kl - base)),
            }
            for number, (value, interval) in numbers.items():
                low, high = (float("nan"),) * 2 if interval is None else (interval.low, interval.high)
                yield {
                    **same, "budget": budget, "selection": selection, "cache_share": pair.cache_shares[1],
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
    """Return holds, reversed or undecided, as the rules have it."""
    sign, even = (COMPARISONS | SHOWN)[row["comparison"]][2], 0 if row["number"] == "KL" else 1
    return verdict(sign, even, float(row["low"]), float(row["high"]))


def sentence(selected: Sequence[dict[str, str]]) -> str:
    """Return supported, contradicted or undecided over settings, as the rules have it."""
    verdicts = [verdict_of(row) for row in selected]
    holds, against = (verdicts.count(word) / len(verdicts) for word in ("holds", "reversed"))
    if holds >= 0.8 and against <= 0.05:
        return "supported"
    return "contradicted" if against >= 0.8 and holds <= 0.05 else "undecided"


def within(row: dict[str, str]) -> bool:
    """Return whether a ratio's whole interval is within 5 % of 1."""
    return row["number"] != "KL" and NEAR[0] <= float(row["low"]) and float(row["high"]) <= NEAR[1]


def _middle(selected: Sequence[dict[str, str]]) -> str:
    """Return the median of the settings' values with the least and the largest."""
    values = [float(row["value"]) for row in selected]
    shown: Callable[[float], str] = "{:+.3f}".format if selected[0]["number"] == "KL" else "{:.2f}".format
    return f"{shown(float(np.median(values)))} ({shown(min(values))} to {shown(max(values))})".replace("-", "−")


def verdicts_table(found: Sequence[dict[str, str]]) -> Iterator[str]:
    """Yield the table of every comparison's verdicts, a line per number."""
    yield "| comparison | number | median (least to largest) | holds | reversed | undecided | within 5 % | sentence |"
    yield "|---|---|---|---|---|---|---|---|"
    for title in COMPARISONS:
        for number in NUMBERS:
            selected = select_rows(found, title, number)
            counts = [sum(verdict_of(row) == word for row in selected) for word in ("holds", "reversed", "undecided")]
            near = "–" if number == "KL" else str(sum(map(within, selected)))
            cells = [title, number, _middle(selected), *map(str, counts), near, sentence(selected)]
            yield f"| {' | '.join(cells)} |"


def levels_table(found: Sequence[dict[str, str]]) -> Iterator[str]:
    """Yield the table of propagated ratios over `kv`, a line per level: median, and holds / reversed."""
    titles = [title for title in COMPARISONS if COMPARISONS[title][0] == "kv"]
    yield f"| settings | {' | '.join(titles)} |"
    yield "|---" * (1 + len(titles)) + "|"
    for name in SETTINGS:
        for level in dict.fromkeys(row[name] for row in found):
            cells = []
            for title in titles:
                selected = [row for row in select_rows(found, title, "propagated") if row[name] == level]
                words = [verdict_of(row) for row in selected]
                middle = f"{np.median([float(row['value']) for row in selected]):.2f}" if selected else ""
                counts = f"({words.count('holds')} / {words.count('reversed')} of {len(selected)})"
                cells.append(f"{middle} {counts}" if selected else "–")
            yield f"| {level if name != 'template' else _template(level)} | {' | '.join(cells)} |"


def _template(level: str) -> str:
    """Return a level of the chat template as text."""
    return "with template" if level == "True" else "without template"


def reversed_settings(found: Sequence[dict[str, str]]) -> Iterator[str]:
    """Yield a line per comparison's number with the settings in which it is reversed, if any."""
    for title in COMPARISONS:
        for number in NUMBERS:
            selected = [row for row in select_rows(found, title, number) if verdict_of(row) == "reversed"]
            if selected:
                names = [
                    f"{row['model']} {_template(row['template'])} {row['dataset']} b={row['budget']} "
                    f"{row['selection']} {row['value']} [{row['low']}, {row['high']}]"
                    for row in selected
                ]
                yield f"{title}, {number}, {len(selected)}: " + "; ".join(names)


def settings_table(found: Sequence[dict[str, str]]) -> Iterator[str]:
    """Yield the table of every setting's propagated ratios over `kv`, with their intervals."""
    titles = [title for title in (*COMPARISONS, *SHOWN) if (COMPARISONS | SHOWN)[title][0] == "kv"]
    yield f"| model | template | data | b | selection | n | {' | '.join(titles)} |"
    yield "|---" * (6 + len(titles)) + "|"
    by_title = [select_rows(found, title, "propagated", counted=False) for title in titles]
    for each in zip(*by_title, strict=True):
        row = each[0]
        cells = [f"{float(one['value']):.2f} [{float(one['low']):.2f}, {float(one['high']):.2f}]" for one in each]
        where = [row["model"], "yes" if row["template"] == "True" else "no", row["dataset"], row["budget"],
                 row["selection"], row["n"]]  # fmt: skip
        yield f"| {' | '.join([*where, *cells])} |"


def draw(found: Sequence[dict[str, str]], path: Path) -> None:
    """Draw every setting's numbers over those of `kv`: a row per kind of kept sets, a panel per number."""
    with style.use():
        figure = style.figure(174, 92)
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
        panel.set_xlim(-0.25, 5)
        panel.set_xticks([-0.1, 0, 0.1, 1], ["−0.1", "0", "0.1", "1"])
    else:
        panel.set_xscale("log")
        ticks = [0.7, 1, 1.4, 2, 3, 4]
        panel.set_xticks(ticks, [f"{tick:g}" for tick in ticks])
    panel.minorticks_off()


def main() -> None:
    """Measure runs, or draw and print what they gave."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    commands = parser.add_subparsers(dest="command", required=True)
    measuring = commands.add_parser("measure")
    measuring.add_argument("longbench", type=Path)
    measuring.add_argument("--only", default="")
    commands.add_parser("draw")
    arguments = parser.parse_args()
    if arguments.command == "measure":
        for run in runs():
            if arguments.only in run.name and not run.rows.exists():
                write_rows(run.rows, COLUMNS, list(rows(measure(run, arguments.longbench), run)))
        return
    found = read_rows(run.rows for run in runs())
    for table in (verdicts_table, levels_table, reversed_settings, settings_table):
        print(*table(found), "", sep="\n")
    draw(found, PICTURE)


if __name__ == "__main__":
    main()
