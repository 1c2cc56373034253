"""Is random enough? Policies that evict while a model decodes, under one protocol, on long answers.

A cache holds the prompt's n entries and 128 more (the budget n + 128), and is compressed to that after every 64 tokens:
at its fullest it holds n + 192. The methods: SnapKV's score, R-KV, TOVA, random entries and the most recent ones
(StreamingLLM: 4 sinks and a window), each with the prompt kept, so that only the answer's own tokens compete; random
entries and SnapKV's score also with all entries competing. One set per key/value head, a window of the last 16 entries
that always stays, seed 0, defaults otherwise: all methods hold the same number of entries, which the tables tell.

Prompts are of three kinds. *Code*: a small Python module. *Needle*: a table of 36 persons and their rooms, of each of
which a numbered sentence is to be written. *Arithmetic*: three accounts get a number from 2 to 6 in turns, 36 of
them, a numbered line each, which goes on from the account's total three lines, some fifty tokens before: more than the
window.
The answers to the latter two begin with four and six lines that are given.

What is measured of a prompt and a method:

- *On the full run's own greedy text*, at most 512 tokens, so that all methods read the same tokens, as means over its
  steps: propagated Σ L / Σ ‖o_h‖₁, KL(full ‖ evicted), and the perplexity of the text over the full cache's; at
  compressions the isolated loss that is added. The first 192 steps come before any compression: they lose nothing under
  any method, and lie in every mean.
- *Of its own greedy answer*, at most 544 tokens: the share of lines that it has right (of needle those that stand in it
  letter by letter, of arithmetic those that add the account's number to its total of three lines before, be that right
  or wrong), and whether it loops. An answer is *right* with 9 of 10 lines. It *loops* where it is cut off at the 544th
  token and its last tokens, 32 at least, are four or more times the same block of up to 32 tokens.

## How it is decided

Written before any method was measured on needle prompts, and before any answer from an evicted cache was looked at; the
prompts for arithmetic later, before any method was measured on them. Methods are compared in pairs, the prompt kept in
both. Of the numbers along the text the geometric mean over prompts of random's ratio to a score, with its 95 %
interval: *random is enough* against the score where the upper end lies below 1.1, *not enough* where the lower end lies
above 1, *undecided* otherwise. Of the answers the mean share of right lines that random loses against a score: *enough*
where its upper end lies below 0.1, *not enough* where its lower end lies above 0. Answers that are right, and those
that loop, are told by McNemar's exact p. *Keeping the prompt* is better for a method where the interval of (kept /
competing) lies below 1, worse where above. Each kind decides for itself, and all of them together; fewer than five
prompts give ranges, which decide nothing. Of some sixty intervals three may lie off 1 or 0 by chance. Seven prompts in
which no line is lost still leave ± 0.41, so that answers can show that random is not enough, and hardly that it is.

*What had been seen.* Six prompts for code were measured along the text, with ten methods, under an earlier wording of
this rule (the same but for answers); their rows stand. Earlier prompts of the other kinds had texts of 134 and 89
tokens, which no compression reached. So these were made anew, and wordings tried with the full cache alone, on other
names and numbers, a hundred tokens or two of each: rooms in another order (20 of 34 lines right), a list and then the
same once more (the answer ended after the first), `16 + 2 = 18` behind two given lines (operands taken from the list
alone) and `total += 2  # 18` (one prompt wrong from the sixth line on, one in another form) were given up. Of the form
that was chosen for the needle two prompts had 12 of 12 lines right. The first form of arithmetic (the running total of
a list of 39 numbers; two prompts with 7 of the first 8 lines right) was measured on one prompt: the full cache had 49 %
of the lines right, random entries beside the prompt 54 %, every other method 43 to 49 %. It took wrong numbers from the
list, and was given up, as was adding 14 again and again (wrong from the sixth line on). Of the accounts, two prompts of
other numbers were tried with the full cache: 12 of the first 16 lines were right letter by letter.
The program was tried on SmolLM2-135M, one prompt of a kind and 32 tokens (`--short`).

    python studies/decoding.py --model qwen2.5-coder-0.5b-q4_k_m
    python studies/decoding.py docs/decoding
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import common
import numpy as np
from common import Floats, estimate, interval_text, side_of
from compaction import geometric_interval
from decoding_tasks import KINDS, MODULES, Task, answer_of, tasks
from matplotlib.figure import Figure
from scipy.stats import binomtest

import perturbkv as pk

STEPS, EVERY, BEYOND, WINDOW = 512, 64, 128, 16
LONGEST = 544
"""Tokens of an answer at most."""
MARGIN, LINES = 1.1, 0.1
"""Random is enough where it is worse by less: a factor of the numbers, a share of lines that are lost."""
RIGHT = 0.9
"""Share of the lines of a right answer."""
SCORES = ("snapkv", "r-kv", "tova", "streaming-llm")
METHODS = {
    **{name: {"policy": name, "selection": "attention"} for name in ("snapkv", "r-kv", "tova")},
    "random": {"policy": "snapkv", "selection": "random"},
    "streaming-llm": {"policy": "streaming-llm", "selection": "position"},
}
"""Name -> choices; each with the prompt kept, and those of `COMPETING` with all entries competing, too."""
COMPETING = ("snapkv", "random")
KEPT = " + prompt"
"""End of the name of a method that keeps the prompt."""
FULL, ALL = "full cache", "all"
NAMES = {"needle": "copying", "arithmetic": "sums", "code": "code"}
"""Kind of a prompt -> what it is called in tables and picture."""
COMPARED = (
    *((f"random{KEPT}", f"{score}{KEPT}") for score in SCORES),
    *((name, f"{name}{KEPT}") for name in COMPETING),
    (f"random{KEPT}", FULL),
)
"""Methods whose answers are compared: treatment and baseline."""
NUMBERS = {"propagated": "propagated Σ L / Σ ‖o_h‖₁", "kl": "KL", "perplexity": "perplexity over full cache's"}
BESIDE = {"added": "isolated, added at a compression", "gone": "attention on what is gone", "held": "entries held"}


def configurations(budget: int, seed: int) -> dict[str, pk.EvictionConfig]:
    """Return name -> configuration."""
    found = {}
    for name, choices in METHODS.items():
        for keep in (KEPT, *([""] if name in COMPETING else [])):
            policy = f"{choices['policy']}(keep=prompt)" if keep else choices["policy"]
            made: dict[str, Any] = {**choices, "policy": policy, "granularity": "kv", "window": WINDOW}
            made |= {"seed": seed} if name == "random" else {}
            (found[name + keep],) = pk.grid([budget], **made)
    return found


def about(asked: argparse.Namespace) -> dict[str, Any]:
    """Return what rows of one file have in common."""
    return {"model": asked.model, "seed": asked.seed, "short": asked.short, "chat_template": asked.chat_template}


def prepared(model: Any, task: Task, asked: argparse.Namespace) -> tuple[Any, dict[str, pk.EvictionConfig], int]:
    """Return a task's encoded prompt, alone in its series, the configurations by name, and the tokens between cuts."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "prompt.jsonl"
        path.write_text(json.dumps(task.row()) + "\n")
        prompts = pk.load_prompts(str(path), model, chat_template=asked.chat_template)
    beyond, every = (WINDOW + 2, 4) if asked.short else (BEYOND, EVERY)
    return prompts, configurations(len(prompts[0].token_ids) + beyond, asked.seed), every


def measure_numbers(model: Any, task: Task, asked: argparse.Namespace) -> list[dict[str, Any]]:
    """Return a row per method of the numbers along the full run's text."""
    prompts, configs, every = prepared(model, task, asked)
    steps = 32 if asked.short else STEPS
    settings = dataclasses.replace(common.ONE_STEP, steps=steps, compress_every=every, kept=False)
    resources = pk.Resources(max_bytes=2**33)  # one batch
    trace = pk.measure(model, prompts, configs.values(), settings=settings, resources=resources, progress=False)
    if trace.failures:
        raise pk.PerturbkvError(f"prompt '{task.name}' failed: {trace.failures}")
    same = {**about(asked), "kind": task.kind, "prompt": task.name, "prompt_tokens": len(prompts[0].token_ids)}
    return [
        {**same, "method": name, **numbers_of(trace, trace.config_index(config.label()))}
        for name, config in configs.items()
    ]


def measure_answers(model: Any, task: Task, asked: argparse.Namespace) -> list[dict[str, Any]]:
    """Return a row per method, and of the full cache, of what it answers."""
    prompts, configs, every = prepared(model, task, asked)
    most = 32 if asked.short else LONGEST
    made = pk.generate(model, prompts, configs.values(), max_new_tokens=most, compress_every=every, progress=False)
    (row,) = made.written.rows
    answers = {FULL: row["full"], **{name: row["evicted"][config.label()] for name, config in configs.items()}}
    same = {**about(asked), "kind": task.kind, "prompt": task.name, "prompt_tokens": row["prompt_tokens"]}
    return [
        {**same, "method": name, **answer_of(task, answer["tokens"], answer["text"], most)}
        for name, answer in answers.items()
    ]


def numbers_of(trace: pk.Trace, config: int) -> dict[str, Any]:
    """Return the numbers of one configuration of a trace of one prompt; means over its steps."""

    def of(name: str) -> Floats:
        values = np.asarray(trace.get(name, "decoding"), dtype=np.float64)[0]
        own = values if name in ("output_norm", "text_logp_full") else values[config]
        return np.asarray(own[:steps])

    steps = int(trace.get("steps_measured", "decoding")[0])
    norms, added = of("output_norm").sum(axis=(1, 2)), of("perturbation_added")[1:].sum(axis=(1, 2))
    cut = np.isfinite(added)
    lost = of("text_logp_full") - of("text_logp")
    return {
        "steps": steps,
        "compressions": int(cut.sum()),
        "propagated": float((of("perturbation_propagated").sum(axis=(1, 2)) / norms).mean()),
        "added": float((added / norms[1:])[cut].mean()) if cut.any() else None,
        "kl": float(of("logit_kl").mean()),
        "perplexity": float(np.exp(np.nanmean(lost))),
        "gone": float(of("gone_attention").sum(axis=-1).mean()),
        "held": float(of("held_entries").mean()),
    }


def reached(rows: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Return the rows of prompts whose texts some compression reaches under every method.

    Raises PerturbkvError where there are none, or where the methods hold unequal numbers of entries.
    """
    least = {prompt: min(row["compressions"] for row in rows if row["prompt"] == prompt)
             for prompt in dict.fromkeys(row["prompt"] for row in rows)}  # fmt: skip
    found = [row for row in rows if least[row["prompt"]]]
    if not found:
        raise pk.PerturbkvError("expected a text that some compression reaches, got none")
    for prompt in least:
        held = [row["held"] for row in found if row["prompt"] == prompt]
        if held and max(held) > min(held) * (1 + 1e-6):
            raise pk.PerturbkvError(f"expected equal numbers of held entries, got {min(held):g} to {max(held):g}")
    return found


def pairs_of(rows: Sequence[Mapping[str, Any]], number: str, treatment: str, baseline: str) -> Floats:
    """Return a treatment's and a baseline's number of every prompt that has both: (2, prompt)."""
    values = {(row["prompt"], row["method"]): row[number] for row in rows if row[number] is not None}
    prompts = [prompt for prompt, method in values if method == treatment and (prompt, baseline) in values]
    return np.array([[values[prompt, method] for prompt in prompts] for method in (treatment, baseline)], dtype=float)


def compare(rows: Sequence[Mapping[str, Any]], treatment: str, baseline: str) -> dict[str, Any]:
    """Return the geometric means over prompts of a treatment's numbers over a baseline's, with their intervals."""
    found: dict[str, Any] = {"treatment": treatment, "baseline": baseline}
    for number in NUMBERS:
        first, second = pairs_of(rows, number, treatment, baseline)
        logs = np.log(first / second)
        found |= estimate(number, (float(np.exp(logs.mean())), geometric_interval(logs))) | {"n": len(logs)}
    return found


def compare_answers(rows: Sequence[Mapping[str, Any]], treatment: str, baseline: str) -> dict[str, Any]:
    """Return the mean shares of right lines and resumed totals that a treatment loses, and pairs of right and of loops.

    Pairs are as `mcnemar` returns them; n counts prompts.
    """
    intervals = pk.stats.intervals
    shares = {name: pairs_of(rows, name, treatment, baseline) for name in ("lines", "resumed")}
    found: dict[str, Any] = {}
    for name, (first, second) in shares.items():
        lost = second - first
        value = (float(lost.mean()), intervals.of_mean(lost, intervals.DIFFERENCE)) if lost.size else (np.nan, None)
        found |= estimate(f"{name}_lost", value)
    looped = pairs_of(rows, "loops", treatment, baseline).astype(bool)
    right = shares["lines"] >= RIGHT
    return {**found, "n": looped.shape[1], "right": mcnemar(*right), "loops": mcnemar(*looped)}


def mcnemar(first: Any, second: Any) -> tuple[int, int, float]:
    """Return in how many pairs the first alone is true, the second alone, and McNemar's exact p, two-sided."""
    one, other = int((first & ~second).sum()), int((second & ~first).sum())
    return one, other, float(binomtest(one, one + other).pvalue) if one + other else 1.0


def verdict(interval: Any, worse: float, margin: float) -> str:
    """Return whether random is enough, by the interval of how much worse it is.

    `worse` is where worse begins, `margin` where enough ends.
    """
    if interval is None or interval.kind != "interval":
        return "undecided"
    return "enough" if interval.high < margin else "not enough" if interval.low > worse else "undecided"


def by_kind(rows: Sequence[Mapping[str, Any]]) -> dict[str, list[Mapping[str, Any]]]:
    """Return a kind's name -> its rows, of several kinds those of all of them last."""
    found = {NAMES[kind]: [row for row in rows if row["kind"] == kind] for kind in KINDS}
    found = {kind: own for kind, own in found.items() if own}
    return {**found, ALL: list(rows)} if len(found) > 1 else found


def methods_of(rows: Sequence[Mapping[str, Any]]) -> Iterator[tuple[str, str, list[Mapping[str, Any]]]]:
    """Yield each kind with each of its methods and their rows, a prompt each."""
    for kind, own in by_kind(rows).items():
        for method in dict.fromkeys(row["method"] for row in own if kind != ALL):
            yield kind, method, [row for row in own if row["method"] == method]


def number_tables(every: Sequence[Mapping[str, Any]]) -> Iterator[common.Table]:
    """Return the tables along the full run's text: methods, is random enough, and is the prompt to be kept."""
    rows = reached(every)
    lines = [
        [kind, method, str(len(own)), *(f"{np.mean([row[name] for row in own]):.3g}" for name in (*NUMBERS, *BESIDE))]
        for kind, method, own in methods_of(rows)
    ]
    steps = sorted({row["prompt"]: row["steps"] for row in rows}.values())
    short = len({row["prompt"] for row in every}) - len(steps)
    told = f"texts of {steps[0]} to {steps[-1]} tokens; {short} prompts left out, whose texts no compression reaches"
    yield (
        f"Means over prompts, {told}",
        ["kind", "method", "n", *{**NUMBERS, "kl": "KL, nat"}.values(), *BESIDE.values()],
        lines,
    )
    heads = ["n", *NUMBERS.values()]
    pairs = [(f"random{KEPT}", f"{score}{KEPT}") for score in SCORES]
    yield (
        "Is random enough? Random over each score, the prompt kept", ["kind", "score", *heads],
        ratio_lines(rows, pairs, lambda ends: verdict(ends, 1, MARGIN)),
    )  # fmt: skip
    words = {1: "worse", 0: "undecided", -1: "better"}
    yield (
        "Keeping the prompt: kept over competing", ["kind", "method", *heads],
        ratio_lines(rows, [(f"{method}{KEPT}", method) for method in METHODS], lambda ends: words[side_of(ends, 1)]),
    )  # fmt: skip


def ratio_lines(
    rows: Sequence[Mapping[str, Any]], pairs: Sequence[tuple[str, str]], told: Callable[[Any], str]
) -> list[list[str]]:
    """Return a line per kind and measured pair: the baseline, n, and each number's ratio with what is told of it."""
    lines = []
    for kind, own in by_kind(rows).items():
        for treatment, baseline in pairs:
            measured = {row["kind"] for row in own if row["method"] == baseline}
            if not pairs_of(own, "kl", treatment, baseline).size or (
                kind == ALL and len(measured) == 1  # it would say the same once more
            ):
                continue
            row = compare(own, treatment, baseline)
            ends = {name: row[f"{name}_interval"] for name in NUMBERS}
            cells = [f"{interval_text(row[name], ends[name])} {told(ends[name])}" for name in NUMBERS]
            lines.append([kind, baseline.removesuffix(KEPT), str(row["n"]), *cells])
    return lines


def with_resumed(rows: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return the rows of answers with the share of turns that go on from the account's total, None of other kinds."""
    by_name = {task.name: task for task in tasks(len(MODULES))}
    return [{**row, "resumed": by_name[row["prompt"]].share_resumed(row["text"])} for row in rows]


def answer_tables(rows: Sequence[Mapping[str, Any]]) -> Iterator[common.Table]:
    """Return the tables of answers: what each method writes, and random against the others."""
    lines = []
    for kind, method, own in methods_of(rows):
        lines_right = [row["lines"] for row in own if row["lines"] is not None]
        right = str(sum(share >= RIGHT for share in lines_right)) if lines_right else "–"
        shares = [mean_text([row[name] for row in own if row[name] is not None]) for name in ("lines", "resumed")]
        counts = (str(sum(row[name] for row in own)) for name in ("loops", "ended"))
        tokens = f"{np.mean([row['tokens'] for row in own]):.0f}"
        lines.append([kind, method, str(len(own)), *shares, right, *counts, tokens])
    heads = ["kind", "method", "n", "lines right", "totals resumed", "right answers", "loops", "ended", "tokens"]
    yield "Answers", heads, lines
    lines = []
    for kind, own in by_kind(rows).items():
        for treatment, baseline in COMPARED:
            row = compare_answers(own, treatment, baseline)
            lost, totals = (lost_text(row, name) for name in ("lines", "resumed"))
            told = verdict(row["lines_lost_interval"], 0, LINES) if np.isfinite(row["lines_lost"]) else ""
            counts = ("{} : {}, p = {:.2g}".format(*row[name]) for name in ("right", "loops"))
            lines.append([kind, treatment, baseline, str(row["n"]), f"{lost} {told}".strip(), totals, *counts])
    heads = ["kind", "method", "against", "n", "right lines lost", "resumed totals lost, looked at afterwards"]
    yield "Answers compared", [*heads, "right: it alone : the other", "loops: likewise"], lines


def lost_text(row: Mapping[str, Any], name: str) -> str:
    """Return a lost share with its interval as text; a dash where no answer of the kind has one."""
    value = row[f"{name}_lost"]
    return interval_text(value, row[f"{name}_lost_interval"]) if np.isfinite(value) else "–"


def mean_text(shares: Sequence[float]) -> str:
    """Return the mean of shares as text; a dash for none."""
    return f"{np.mean(shares):.2f}" if shares else "–"


def draw(numbers: Sequence[Mapping[str, Any]], answers: Sequence[Mapping[str, Any]]) -> Figure:
    """Draw random against every score, the prompt kept: ratios, a panel a number, and right lines that are lost."""
    figure = common.page_figure(75)
    panels = figure.subplots(1, len(NUMBERS) + 1, sharey=True)
    graded = [row for row in answers if row["lines"] is not None]
    for axes, (name, told) in zip(panels, {**NUMBERS, "lines_lost": "right lines lost"}.items(), strict=True):
        ratio = name in NUMBERS
        for kind, own in by_kind(reached(numbers) if ratio else graded).items():
            found = [(compare if ratio else compare_answers)(own, *pair) for pair in COMPARED[: len(SCORES)]]
            values, place = [row[name] for row in found], [*NAMES.values(), ALL].index(kind)
            bars = common.error_bars(values, [row[f"{name}_interval"] for row in found])
            look = {"fmt": "o", "markersize": 3, "linewidth": 0.9, "color": "black" if kind == ALL else f"C{place}"}
            axes.errorbar(values, np.arange(len(SCORES)) + 0.15 * (place - 1.5), xerr=bars, label=kind, **look)
        if ratio:
            common.plain_log(axes, "x")
        axes.axvline(1 if ratio else 0, color="0.35", linewidth=0.9)
        axes.axvline(MARGIN if ratio else LINES, color="0.35", linewidth=0.6, linestyle=":")
        axes.set_title(told, fontsize="medium")
    panels[0].set_yticks(range(len(SCORES)), SCORES)
    panels[0].invert_yaxis()
    about = "Random over each score, the prompt kept: right of the line it is worse; dotted: by a tenth."
    figure.suptitle(f"{about} Code is not graded.", fontsize="small")
    drawn = {kind: bars for axes in panels for bars, kind in zip(*axes.get_legend_handles_labels(), strict=True)}
    order = [kind for kind in (*NAMES.values(), ALL) if kind in drawn]
    figure.legend([drawn[kind] for kind in order], order, loc="outside lower center", ncols=len(order))
    return figure


def read_rows(path: Path) -> list[dict[str, Any]]:
    """Return the rows of a file, a line each; none where there is no file."""
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def measured_rows(asked: argparse.Namespace, name: str, measure: Measure, models: list[Any]) -> list[dict[str, Any]]:
    """Return the rows of a file of the output folder after measuring the prompts that lack theirs.

    `models` is empty until a model is needed. Raises PerturbkvError for a file of other settings.
    """
    path = asked.output / f"{name}.jsonl"
    asked.written.append(path)
    rows = read_rows(path)
    if any(row | about(asked) != row for row in rows):
        raise pk.PerturbkvError(f"{path} has rows of another model or other settings; give another --output")
    there = {row["prompt"] for row in rows}
    for task in tasks(1 if asked.short else asked.samples):
        if task.name not in there:
            models[:] = models or [common.load_model(asked)]
            made = measure(models[0], task, asked)
            with path.open("a") as stream:
                stream.writelines(json.dumps(row, ensure_ascii=False) + "\n" for row in made)
            rows += made
            print(f"{name} of {task.kind}, {task.name}", flush=True)
    return rows


def study(asked: argparse.Namespace) -> None:
    """Measure or read the rows; print the tables, write document and picture."""
    models: list[Any] = []
    if asked.folder:
        numbers, answers = (read_rows(Path(asked.folder[0]) / f"{name}.jsonl") for name in MEASURED)
    else:
        numbers, answers = (measured_rows(asked, name, measure, models) for name, measure in MEASURED.items())
    told = with_resumed(answers)
    common.write_tables(asked, [*number_tables(numbers), *answer_tables(told)], draw(numbers, told))


Measure = Callable[[Any, Task, argparse.Namespace], list[dict[str, Any]]]
MEASURED: dict[str, Measure] = {"numbers": measure_numbers, "answers": measure_answers}
"""File of rows -> what measures a prompt's."""

if __name__ == "__main__":
    about_folder = "folder of finished rows, instead of measuring them"
    common.main(study, common.options(__doc__ or "", "folder", about_folder, samples=7))
