"""Which methods keep an answer, which number foretells that, and how long an answer a pooling kernel keeps.

`python studies/answers.py measure` measures one run (a model, and the digits of its hidden numbers) after the other and
writes docs/answers/RUN.csv, a row per prompt and cache, and for the compared methods RUN-foretelling.csv, a row per
budget and measure. A run whose files are there is not measured again, and one that was cut goes on where it was.
`--only WORD` takes the runs whose name holds a word. `python studies/answers.py` prints the tables and draws a picture;
with `--short` it first measures a single run of four prompts, to see it work.
The rules stand in docs/results/rules.md, which was written first.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import random
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from pathlib import Path
from typing import Any

import common
import numpy as np
from matplotlib.figure import Figure
from paper_verdicts import p_text, sign_test
from second_model import prompt_rows
from specification import DOCS, FIGURES, model, read_rows, write_rows

import perturbkv as pk

ROWS, RUNS = DOCS / "answers", DOCS.parent / "runs" / "answers"
SMOLLM2, QWEN, LARGER = "smollm2-135m-q4_1", "qwen2.5-coder-0.5b-q4_k_m", "qwen2.5-coder-1.5b-q4_k_m"
LENGTH, DEPTHS, SEED, WINDOW = 600, (0.1, 0.35, 0.6, 0.85), 31, 32
BUDGETS, CROSSED = (0.1, 0.2, 0.4), 0.2
DIGITS, KERNELS, STEPS = (3, 7, 15), (1, 7, 21), 8  # steps of a space and seven digits
BASELINE = "SnapKV"
METHODS: dict[str, dict[str, Any]] = {
    BASELINE: {"selection": "attention"},
    "un-pooled": {"selection": "attention-unpooled"},
    "two-stage, first": {"selection": "two-stage"},
    "two-stage, later": {"selection": "two-stage", "preset": "paper-v2"},
    "AdaKV": {"policy": "adakv", "selection": "attention"},
    "random": {"selection": "random"},
}
"""Method -> its choices in `pk.grid`; two-stage is of the paper's first version and of its later one."""
POOLED = (BASELINE, "two-stage, later")
"""Methods that are crossed with kernels: every ranking that they do is of pooled scores."""
HEADS = {QWEN: 336, SMOLLM2: 270, LARGER: 336}
# θ̂'s first stages differ between methods; the others nearly are the score
NO_VERDICT = ("theta_hat", "propagated", "effect_propagated", "kl", "drift", "text_loss")
FEWEST, AT_FLOOR = 10, 0.05  # answered prompts for a verdict; share found, or lost, under which nothing is told
MOVED = ("moved_first", "moved", "heads_less")
"""Columns of isolated L1 along the answer: Σ over heads at its first token and over all of its steps, relative to the
full run's outputs; and the share of heads that move less than under SnapKV of the same budget, ties half."""
CELLS = (
    *("model", "digits", "sample", "prompt_tokens", "method", "budget", "kernel", "cache_share", "full", "found"),
    *MOVED,
)
FORETELLING = (
    *("model", "budget", "measure", "prompts", "area", "area_low", "area_high"),
    *("beyond", "beyond_low", "beyond_high", "rho", "rho_low", "rho_high"),
    *("prompts_without", "without", "without_low", "without_high"),
)


@dataclass(frozen=True)
class Run:
    """A measuring run: a model, how many digits its hidden numbers have, and how many prompts it reads."""

    model: str
    digits: int
    prompts: int

    @property
    def name(self) -> str:
        """Name of its files."""
        return f"{self.model}-{self.digits}"

    def configs(self) -> dict[tuple[str, float, int], pk.EvictionConfig]:
        """Return (method, budget, kernel) -> configuration: seven digits compare methods, all lengths kernels."""
        budgets = () if self.digits != 7 else (CROSSED,) if self.model == LARGER else BUDGETS
        found = {(method, budget, 7): _config(method, budget, 7) for budget in budgets for method in METHODS}
        crossed = () if self.model == LARGER else [(method, kernel) for method in POOLED for kernel in KERNELS]
        return found | {(method, CROSSED, kernel): _config(method, CROSSED, kernel) for method, kernel in crossed}


def _config(method: str, budget: float, kernel: int) -> pk.EvictionConfig:
    """Return a method's configuration, a kept set per key/value head; every one keeps the window."""
    choices = {"policy": "snapkv", **METHODS[method]}
    choices["policy"] += f"(kernel={kernel})" if kernel != 7 else ""
    (made,) = pk.grid(budget, granularity="kv", window=WINDOW, **choices)
    return made


def runs() -> list[Run]:
    """Return every run, those that compare methods first."""
    prompts = {QWEN: 100, SMOLLM2: 100, LARGER: 30}
    comparing = [Run(name, 7, count) for name, count in prompts.items()]
    return [*comparing, *(Run(name, digits, prompts[name]) for name in (QWEN, SMOLLM2) for digits in (3, 15))]


def write_prompts(run: Run, path: Path) -> Path:
    """Write a run's prompts as rows of a jsonl file: needle's, their number replaced by one of the run's digits."""
    made = pk.load_prompts("needle", model(run.model), samples=run.prompts, seed=SEED, lengths=(LENGTH,), depths=DEPTHS,
                           chat_template=False)  # fmt: skip
    rows = []
    for row in prompt_rows(made, model(run.model)):
        (hidden,) = row["answers"]
        number = with_digits(row["id"], run.digits)
        rows.append({**row, "prompt": row["prompt"].replace(hidden, number), "answers": [number]})
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), "utf-8")
    return path


def with_digits(name: str, digits: int) -> str:
    """Return the number that the prompt of this name hides."""
    return str(random.Random(f"answers/{SEED}/{name}/{digits}").randrange(10 ** (digits - 1), 10**digits))


def measure(run: Run, folder: Path = RUNS) -> pk.Trace:
    """Return a run's trace: measured now, or read where it is finished. Print how the first prompt begins and ends."""
    loaded = model(run.model)
    prompts = pk.load_prompts(str(write_prompts(run, folder / f"{run.name}.jsonl")), loaded, samples=run.prompts)
    ends = [loaded.tokenizer.decode(part) for part in (prompts[0].token_ids[:20], prompts[0].token_ids[-20:])]
    print(f"{run.name}: {len(prompts)} prompts, {ends[0]!r} … {ends[1]!r}, {prompts[0].answers}", flush=True)
    settings = pk.Settings(steps=1, generate=run.digits * 4 // 3 + 4)
    if run.digits == 7:
        settings = dataclasses.replace(settings, steps=STEPS, text="answer", save=("effect",))
    return pk.measure(loaded, prompts, list(run.configs().values()), settings=settings, path=folder / f"{run.name}.h5")


def rows(trace: pk.Trace, run: Run) -> Iterator[dict[str, Any]]:
    """Yield a row per complete prompt and configuration: what is found, and how far outputs move along the answer."""
    same = {"model": run.model, "digits": run.digits}
    names = [name for name, kept in zip(trace.sample_ids, trace.ok, strict=True) if kept]
    full, found, share, tokens = (trace.arrays[name][trace.ok] for name in
                                  ("score_full", "score", "held_share", "prompt_tokens"))  # fmt: skip
    moved = moved_along(trace, run) if trace.run.text == "answer" else np.full((*found.shape, len(MOVED)), np.nan)
    for (method, budget, kernel), config in run.configs().items():
        place = trace.config_index(config.label())
        for index, name in enumerate(names):
            yield {**same, "sample": name, "prompt_tokens": int(tokens[index]), "method": method, "budget": budget,
                   "kernel": kernel, "cache_share": float(share[index, place]), "full": int(full[index]),
                   "found": int(found[index, place]),
                   **dict(zip(MOVED, moved[index, place].tolist(), strict=True))}  # fmt: skip


def moved_along(trace: pk.Trace, run: Run) -> common.Floats:
    """Return the columns `MOVED` (sample, config, 3); NaN steps after the text's end are left out."""
    loss, norm = (trace.arrays[name][trace.ok].astype(np.float64) for name in ("perturbation_isolated", "output_norm"))
    means, norm = np.nanmean(loss, axis=2), norm.sum(axis=(2, 3))
    first = loss[:, :, 0].sum(axis=(2, 3)) / norm[:, :1]
    whole = means.sum(axis=(2, 3)) / np.nanmean(norm, axis=1)[:, None]
    base = np.empty_like(means)
    for (_, budget, _), config in run.configs().items():
        snapkv = run.configs()[BASELINE, budget, 7]
        base[:, trace.config_index(config.label())] = means[:, trace.config_index(snapkv.label())]
    less = ((np.sign(base - means) + 1) / 2).mean(axis=(2, 3))
    return np.stack([first, whole, less], axis=-1)


def foretelling(trace: pk.Trace, run: Run) -> Iterator[dict[str, Any]]:
    """Yield a row per budget and measure: what it foretells between methods, also less names and without random."""
    compared = {config: method for (method, _, kernel), config in run.configs().items() if kernel == 7}
    told = pk.correlation(trace.sel(where=lambda config: config in compared))
    others = pk.correlation(trace.sel(where=lambda config: compared.get(config, "random") != "random"))
    for setting, without in zip(told.settings, others.settings, strict=True):
        for measure in setting.measured:
            own, beyond = setting.strength(measure), setting.identity_baselines(measure).auc.beyond
            yield {
                "model": run.model, "budget": str(setting.configs[0].budget), "measure": measure,
                "prompts": own.auc.prompts, **_ends("area", own.auc), **_ends("beyond", beyond),
                **_ends("rho", own.rho), "prompts_without": without.strength(measure).auc.prompts,
                **_ends("without", without.strength(measure).auc),
            }  # fmt: skip


def _ends(name: str, found: Any) -> dict[str, float]:
    """Return an estimate as three cells; NaN for ends that it lacks."""
    low, high = (np.nan, np.nan) if found.interval is None else (found.interval.low, found.interval.high)
    return {name: found.value, f"{name}_low": low, f"{name}_high": high}


@dataclass(frozen=True)
class Outcomes:
    """Answers of a run: which prompts each cache answers, of those that the full cache answers.

    Attributes:
        model, digits: the run's.
        prompts: number of prompts that were read.
        found: (method, budget, kernel) -> (answered prompt,) whether its cache finds the number.
        moved: the same -> (answered prompt, 3) the columns `MOVED`.
    """

    model: str
    digits: int
    prompts: int
    found: Mapping[tuple[str, float, int], np.ndarray]
    moved: Mapping[tuple[str, float, int], np.ndarray]

    @property
    def answered(self) -> int:
        """Number of prompts that the full cache answers."""
        return len(next(iter(self.found.values())))


def outcomes(cells: Sequence[Mapping[str, str]]) -> list[Outcomes]:
    """Return the outcomes of each run, in the order of the rows."""
    found = []
    for name, digits in dict.fromkeys((row["model"], row["digits"]) for row in cells):
        own = [row for row in cells if (row["model"], row["digits"]) == (name, digits)]
        each: dict[tuple[str, float, int], list[Mapping[str, str]]] = {}
        for row in own:
            key = row["method"], float(row["budget"]), int(row["kernel"])
            each.setdefault(key, []).extend([row] if row["full"] == "1" else [])
        hits = {key: np.array([row["found"] == "1" for row in one]) for key, one in each.items()}
        moved = {key: np.array([[float(row[name]) for name in MOVED] for row in one]) for key, one in each.items()}
        found.append(Outcomes(name, int(digits), len({row["sample"] for row in own}), hits, moved))
    return found


@dataclass(frozen=True)
class Pair:
    """A comparison of two caches on the prompts that the full cache answers.

    Attributes:
        run: whose prompts.
        first, second: (method, budget, kernel); `second` is claimed to find more.
        more, fewer: prompts that only the second finds, and only the first.
        decided: whether both differ, with the tests of its table corrected together.
    """

    run: Outcomes
    first: tuple[str, float, int]
    second: tuple[str, float, int]
    more: int
    fewer: int
    decided: bool = False

    @property
    def p(self) -> float:
        """McNemar's exact p, two-sided."""
        return sign_test(self.more, self.fewer)

    def text(self) -> str:
        """Return '12 more, 3 fewer, p = 0.035', with a star where it is decided."""
        p = f"p {'' if self.p < 0.001 else '= '}{p_text(self.p)}{'*' * self.decided}"
        return f"{self.more} more, {self.fewer} fewer, {p}"


def decide(pairs: Iterable[Pair]) -> list[Pair]:
    """Return the pairs with `decided` set (Benjamini–Hochberg, 5 %), but not for runs of too few answered prompts."""
    counted = list(pairs)
    p = np.array([pair.p if pair.run.answered >= FEWEST else np.nan for pair in counted])
    marks = pk.stats.permutation.benjamini_hochberg(p)
    return [dataclasses.replace(pair, decided=bool(mark)) for pair, mark in zip(counted, marks, strict=True)]


def pair_of(run: Outcomes, first: tuple[str, float, int], second: tuple[str, float, int]) -> Pair:
    """Return the comparison of two caches of a run."""
    one, other = run.found[first], run.found[second]
    return Pair(run, first, second, int((other & ~one).sum()), int((one & ~other).sum()))


def method_pairs(found: Sequence[Outcomes]) -> list[Pair]:
    """Return every method against SnapKV, at every budget of every model, all tests corrected together."""
    return decide(
        pair_of(run, (BASELINE, budget, 7), (method, budget, 7))
        for run in found
        for budget in BUDGETS
        for method in METHODS
        if method != BASELINE and (method, budget, 7) in run.found
    )


def kernel_pairs(found: Sequence[Outcomes]) -> list[Pair]:
    """Return every two kernels of a method, the wider one second, for every length, all tests corrected together."""
    return decide(
        pair_of(run, (method, CROSSED, narrow), (method, CROSSED, wide))
        for run in found
        for method in POOLED
        for narrow, wide in combinations(KERNELS, 2)
        if run.found.keys() >= {(method, CROSSED, narrow), (method, CROSSED, wide)}
    )


def share_text(hits: np.ndarray) -> str:
    """Return '54 % [44, 64]', the share of answers that are found."""
    return common.percent_text(float(hits.mean()), pk.stats.intervals.of_share(hits)) if len(hits) else "–"


def at_end(run: Outcomes, budget: float) -> bool:
    """Return whether all methods of a budget find so few answers, or lose so few, that nothing tells them apart."""
    shares = [one.mean() for (_, at, kernel), one in run.found.items() if (at, kernel) == (budget, 7)]
    return not shares or max(shares) < AT_FLOOR or min(shares) > 1 - AT_FLOOR


def tables(cells: Sequence[Mapping[str, str]], foretold: Sequence[Mapping[str, str]]) -> Iterator[common.Table]:
    """Yield every table of the page."""
    found = outcomes(cells)
    compared = [run for run in found if run.digits == 7]
    pairs = {(pair.run.model, pair.second): pair for pair in method_pairs(compared)}
    for run in compared:
        budgets = [budget for budget in BUDGETS if (BASELINE, budget, 7) in run.found]
        ends = [f"b={budget:g}" for budget in budgets if at_end(run, budget)]
        title = f"{run.model}: the full cache answers {run.answered} of {run.prompts}; the others find of these"
        lines = []
        for method in METHODS:
            cells_of = [(share_text(run.found[method, budget, 7]), pairs.get((run.model, (method, budget, 7))))
                        for budget in budgets]  # fmt: skip
            lines.append([method, *(f"{share}; {pair.text()}" if pair else share for share, pair in cells_of)])
        at = f" (at an end: {', '.join(ends)})" if ends else ""
        yield title + at, ["method, against SnapKV", *(f"b = {budget:g} n" for budget in budgets)], lines
        yield moved_table(run)
    yield from foretelling_tables(foretold)
    yield from kernel_tables([run for run in found if (BASELINE, CROSSED, 1) in run.found])


def kernel_tables(found: Sequence[Outcomes]) -> Iterator[common.Table]:
    """Yield what each kernel finds of numbers of each length, and the tests between kernels."""
    lines = [
        [run.model, str(run.digits), method, f"{run.answered} of {run.prompts}",
         *(share_text(run.found[method, CROSSED, kernel]) for kernel in KERNELS)]
        for run in sorted(found, key=lambda run: (run.model, run.digits)) for method in POOLED
    ]  # fmt: skip
    heads = ["model", "digits", "method", "answered in full", *(f"kernel {kernel}" for kernel in KERNELS)]
    yield f"numbers found at b = {CROSSED:g} n, by the width of pooling", heads, lines
    tests = [[pair.run.model, str(pair.run.digits), pair.first[0], f"{pair.first[2]} → {pair.second[2]}", pair.text()]
             for pair in kernel_pairs(found)]  # fmt: skip
    yield "wider kernels against narrower ones", ["model", "digits", "method", "kernel", "found by the wider"], tests


def foretelling_tables(foretold: Sequence[Mapping[str, str]]) -> Iterator[common.Table]:
    """Yield what each measure foretells of lost answers, per model and budget."""
    for name, budget in dict.fromkeys((row["model"], row["budget"]) for row in foretold):
        own = [row for row in foretold if (row["model"], row["budget"]) == (name, budget)]
        lines = [[row["measure"], _cell(row, "rho", 1, 2), *(_cell(row, one, 100, 0) for one in ("area", "beyond")),
                  row["prompts"], _cell(row, "without", 100, 0), row["prompts_without"], verdict_of(row)]
                 for row in own]  # fmt: skip
        heads = ["measure", "ρ with found", "lost above kept, %", "less names, points", "deciding prompts",
                 "without random, %", "deciding", "verdict"]  # fmt: skip
        yield f"{name}, b = {budget}: does it foretell lost answers between methods?", heads, lines


def _cell(row: Mapping[str, str], name: str, scale: float, digits: int) -> str:
    """Return a number of a row with its interval."""
    value, low, high = (scale * float(row[one]) for one in (name, f"{name}_low", f"{name}_high"))
    return "–" if np.isnan(value) else f"{value:.{digits}f} [{low:.{digits}f}, {high:.{digits}f}]"


def verdict_of(row: Mapping[str, str]) -> str:
    """Return what the rules say of a measure in a setting."""
    if row["measure"] in NO_VERDICT or int(row["prompts"]) < FEWEST:
        return "–" if row["measure"] in NO_VERDICT else "too few"
    low, high, least, most = (float(row[name]) for name in ("area_low", "area_high", "beyond_low", "beyond_high"))
    if low > 0.5 and least > 0:
        return "foretells"
    if high < 0.5 and most < 0:
        return "reversed"
    return "no more than names" if max(abs(least), abs(most)) <= 0.1 else "undecided"


def moved_ratio(run: Outcomes, cache: tuple[str, float, int], column: int) -> common.Estimated:
    """Return how far a cache moves outputs, over SnapKV's of its budget; `column` is an index of `MOVED`."""
    one, other = run.moved[cache][:, column], run.moved[BASELINE, cache[1], 7][:, column]
    return float(one.sum() / other.sum()), pk.stats.intervals.of_ratio(one, other)


def moved_table(run: Outcomes) -> common.Table:
    """Return how far each cache moves outputs, over SnapKV's, at the answer's first token and over all of them."""
    lines = []
    for (method, budget, kernel), hits in run.found.items():
        ratios = (common.interval_text(*moved_ratio(run, (method, budget, kernel), column)) for column in (0, 1))
        each = run.moved[method, budget, kernel][:, 2]
        less = common.percent_text(
            float(each.mean()), pk.stats.intervals.of_mean(each, pk.stats.intervals.share_kind(HEADS.get(run.model, 0)))
        )
        name = f"{method}{f', kernel {kernel}' if kernel != 7 else ''}"
        lines.append([name, f"{budget:g}", *ratios, less, share_text(hits)])
    heads = ["method", "b / n", "first token", "whole answer", "heads that move less", "found"]
    return f"{run.model}: isolated L1 along the right answer, over SnapKV's", heads, lines


def draw_moved(run: Outcomes) -> Figure:
    """Draw what each cache of a fifth of the prompt finds over how far it moves outputs: first token and whole answer.

    `random`, which moves them several times as far, is told at the right edge.
    """
    axes = (figure := common.page_figure(84, 130)).subplots()
    caches = [key for key in run.found if key[1] == CROSSED and key[0] != "random" and key[::2] != (BASELINE, 1)]
    caches.sort(key=lambda cache: (run.found[cache].mean(), moved_ratio(run, cache, 1)[0]))
    for place, cache in enumerate(caches):
        hits = run.found[cache]
        share, ends = 100 * float(hits.mean()), common.in_percent(pk.stats.intervals.of_share(hits))
        for column, shape in enumerate(("none", "full")):
            ratio, sides = moved_ratio(run, cache, column)
            across = common.error_bars([share], [ends]) if column else None
            axes.errorbar(ratio, share, across, common.error_bars([ratio], [sides]), fmt="o", markersize=4,
                          elinewidth=0.7, color=f"C{column}", fillstyle=shape)  # fmt: skip
        name = cache[0] + (f", kernel {cache[2]}" if cache[2] != 7 else "")
        at, side = (((4, -11), "left"), ((4, 4), "left"), ((-4, 4), "right"))[place % 3]
        axes.annotate(name, (ratio, share), at, textcoords="offset points", ha=side, fontsize="small")
    far = " and ".join(f"{moved_ratio(run, ('random', CROSSED, 7), column)[0]:.1f}" for column in (0, 1))
    axes.text(1, 0.02, f"random: {far} →", transform=axes.transAxes, ha="right", fontsize="small")
    axes.axvline(1, color="0.3", linewidth=0.6, linestyle=":")
    axes.set(
        xlabel="isolated L1 of all heads, over SnapKV's", ylabel=f"numbers found, % of {run.answered}", ylim=(-22, 116)
    )
    axes.set_title(f"{run.model.partition('-q4')[0]}, {100 * CROSSED:.0f} % of the cache kept")
    axes.set_yticks(range(0, 101, 20))
    axes.margins(x=0.12)
    axes.plot([], [], "o", color="C0", fillstyle="none", markersize=4, label="at the answer's first token")
    axes.plot([], [], "o", color="C1", markersize=4, label="over the whole answer")
    axes.legend(loc="upper right")
    return figure


def write_run(run: Run, trace: pk.Trace, folder: Path) -> None:
    """Write what the tables need of a run, the file that says that it is done last."""
    if run.digits == 7:
        write_rows(folder / f"{run.name}-foretelling.csv", FORETELLING, list(foretelling(trace, run)))
    write_rows(folder / f"{run.name}.csv", CELLS, list(rows(trace, run)))


def study(asked: argparse.Namespace) -> None:
    """Measure the runs that are missing, or tell what was measured."""
    wanted, folder = ([Run(SMOLLM2, 7, 4)], asked.output) if asked.short else (runs(), ROWS)
    if asked.short:
        write_run(wanted[0], measure(wanted[0], folder), folder)
    elif asked.work == "measure":
        for run in wanted:
            if asked.only in run.name and not (ROWS / f"{run.name}.csv").exists():
                write_run(run, measure(run), ROWS)
        return
    cells, foretold = (read_rows(folder / f"{run.name}{end}.csv" for run in wanted) for end in ("", "-foretelling"))
    (drawn, *_) = (run for run in outcomes(cells) if (BASELINE, BUDGETS[-1], 7) in run.found)
    asked.written.append((folder if asked.short else FIGURES) / "answers-moved.png")
    draw_moved(drawn).savefig(asked.written[-1], dpi=200)
    common.write_tables(asked, tables(cells, foretold))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("work", choices=("measure", "tell"), nargs="?", default="tell")
    parser.add_argument("--only", default="", help="a word in a run's name")
    parser.add_argument("--short", action="store_true", help="one run of four prompts, to see it work")
    parser.add_argument("--output", "-o", type=Path, help="folder of the JSON document")
    common.main(study, parser)
