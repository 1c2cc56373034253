"""Is random enough? Policies that evict while a model decodes, under one protocol, on long answers.

A cache holds the prompt's n entries and 128 more (the budget n + 128), and is compressed to that after every 64 tokens:
at its fullest it holds n + 192. The methods: SnapKV's score, R-KV, TOVA, random entries and the most recent ones
(StreamingLLM: 4 sinks and a window), each once with all entries competing and once with the prompt kept, so that only
the answer's own tokens compete. One set per key/value head, a window of the last 16 entries that always stays, seed 0,
defaults otherwise. The steps read the full run's own greedy text, at most 512 tokens, so that all methods are measured
on the same tokens. Prompts ask for a small Python module, 20 tasks.

Three numbers of a method and a prompt decide, each a mean over the text's steps: the propagated Σ L / Σ ‖o_h‖₁,
KL(full ‖ evicted), and the perplexity of the full run's text over the full cache's. The first 192 steps come before any
compression: they lose nothing under any method, and lie in every mean.

## How it is decided

Written before any of these prompts was measured; the program was tried on random weights alone. Methods are compared in
pairs by the geometric mean over prompts of the ratio of a number, with its 95 % interval over prompts.

*Random is enough* against a score where the upper end of random's ratio to it lies below 1.1, *not enough* where the
lower end lies above 1, *undecided* otherwise; both with the prompt kept. *Keeping the prompt* is better for a method
where the whole interval of (kept / competing) lies below 1, worse where above. Twelve intervals decide the first
question, fifteen the second: of the latter one may lie off 1 by chance. Fewer than five prompts give ranges, which
decide nothing.

*Amended when one prompt of each of three kinds was measured.* Prompts that ask for facts to be given back, and for a
sum in steps, stood beside those for code; their texts had 134 and 89 tokens and ended before any cache was compressed,
so that there was nothing to measure. They are left out, with the answers that were to be graded, and the tasks for code
became 20. A prompt whose text no compression reaches is left out, and counted. The rule is as it was.

    python studies/decoding.py --model qwen2.5-coder-0.5b-q4_k_m
    python studies/decoding.py runs/studies/decoding/rows.jsonl
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import common
import numpy as np
from common import Floats, estimate, interval_text, side_of
from compaction import geometric_interval
from matplotlib.figure import Figure

import perturbkv as pk

STEPS, EVERY, BEYOND, WINDOW = 512, 64, 128, 16
MARGIN = 1.1
"""Random is enough where it is worse by less than this factor."""
SCORES = ("snapkv", "r-kv", "tova", "streaming-llm")
METHODS = {
    **{name: {"policy": name, "selection": "attention"} for name in ("snapkv", "r-kv", "tova")},
    "random": {"policy": "snapkv", "selection": "random"},
    "streaming-llm": {"policy": "streaming-llm", "selection": "position"},
}
"""Name -> choices; each with all entries competing, and with the prompt kept."""
KEPT = " + prompt"
"""End of the name of a method that keeps the prompt."""
NUMBERS = {"propagated": "propagated Σ L / Σ ‖o_h‖₁", "kl": "KL, nat", "perplexity": "perplexity over full cache's"}
BESIDE = {"added": "isolated, added at a compression", "gone": "attention on what is gone", "draft": "draft taken"}
TASKS = (
    "a queue with priorities that are changed later", "a cache that forgets what was used least recently",
    "a parser of arithmetic expressions with brackets", "a matrix class with products and inverses",
    "a tokenizer of a small language", "a text adventure with five rooms", "a bank with accounts and transfers",
    "a calendar of appointments that must not overlap", "a spell checker by edit distance",
    "a library that lends books",
    "a simulation of a lift in a house", "a graph with shortest paths", "a deck of cards and a game of rummy",
    "a compressor of texts by repeated words", "a chess board that knows legal moves", "a shop with stock and orders",
    "a logger with levels and files", "a binary tree that stays balanced", "a converter between units of measure",
    "a scheduler of jobs that depend on each other",
)  # fmt: skip


def text_of(task: str) -> str:
    """Return the prompt of a task."""
    return f"Write a complete Python module for {task}, with docstrings, type hints and tests for every function."


def configurations(budget: int, seed: int) -> dict[str, pk.EvictionConfig]:
    """Return name -> configuration."""
    found = {}
    for name, choices in METHODS.items():
        for keep in ("", KEPT):
            policy = f"{choices['policy']}(keep=prompt)" if keep else choices["policy"]
            made: dict[str, Any] = {**choices, "policy": policy, "granularity": "kv", "window": WINDOW}
            made |= {"seed": seed} if name == "random" else {}
            (found[name + keep],) = pk.grid([budget], **made)
    return found


def about(asked: argparse.Namespace) -> dict[str, Any]:
    """Return what rows of one file have in common."""
    return {"model": asked.model, "seed": asked.seed, "short": asked.short, "chat_template": asked.chat_template}


def measure_task(model: Any, task: str, asked: argparse.Namespace) -> list[dict[str, Any]]:
    """Return a row per method of one task."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "prompt.jsonl"
        path.write_text(json.dumps({"id": task, "prompt": text_of(task)}) + "\n")
        prompts = pk.load_prompts(str(path), model, chat_template=asked.chat_template)
    (prompt,) = prompts
    steps, every, beyond = (32, 4, WINDOW + 2) if asked.short else (STEPS, EVERY, BEYOND)
    configs = configurations(len(prompt.token_ids) + beyond, asked.seed)
    settings = dataclasses.replace(common.ONE_STEP, steps=steps, compress_every=every, kept=False)
    resources = pk.Resources(max_bytes=2**33)  # one batch
    trace = pk.measure(model, prompts, configs.values(), settings=settings, resources=resources, progress=False)
    if trace.failures:
        raise pk.PerturbkvError(f"task '{task}' failed: {trace.failures}")
    names = {config.label(): name for name, config in configs.items()}
    return [
        {**about(asked), "prompt": task, "method": names[config.label()], "prompt_tokens": len(prompt.token_ids),
         **numbers_of(trace, index)}
        for index, config in enumerate(trace.run.configs)
    ]  # fmt: skip


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
        "draft": float(of("draft_acceptance").mean()),
        "held": float(of("held_entries").mean()),
    }


def reached(rows: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Return the rows of prompts whose texts some compression reaches under every method."""
    least = {prompt: min(row["compressions"] for row in rows if row["prompt"] == prompt)
             for prompt in dict.fromkeys(row["prompt"] for row in rows)}  # fmt: skip
    found = [row for row in rows if least[row["prompt"]]]
    if not found:
        raise pk.PerturbkvError("expected a text that some compression reaches, got none")
    return found


def compare(rows: Sequence[Mapping[str, Any]], treatment: str, baseline: str) -> dict[str, Any]:
    """Return the geometric means over prompts of a treatment's numbers over a baseline's, with their intervals."""
    found: dict[str, Any] = {"treatment": treatment, "baseline": baseline}
    for number in NUMBERS:
        values = {(row["prompt"], row["method"]): row[number] for row in rows}
        prompts = list(dict.fromkeys(row["prompt"] for row in rows))
        logs = np.log([values[prompt, treatment] / values[prompt, baseline] for prompt in prompts])
        found |= estimate(number, (float(np.exp(logs.mean())), geometric_interval(logs)))
    return found


def is_enough(interval: Any) -> str:
    """Return whether random is enough, by the interval of its ratio to a score."""
    if interval is None or interval.kind != "interval":
        return "undecided"
    return "enough" if interval.high < MARGIN else "not enough" if interval.low > 1 else "undecided"


def tables(every: Sequence[Mapping[str, Any]]) -> Iterator[common.Table]:
    """Return the tables: methods, is random enough, and is the prompt to be kept."""
    rows = reached(every)
    prompts = list(dict.fromkeys(row["prompt"] for row in rows))
    lines = []
    for method in dict.fromkeys(row["method"] for row in rows):
        own = [row for row in rows if row["method"] == method]
        lines.append([method, *(f"{np.mean([row[name] for row in own]):.3g}" for name in (*NUMBERS, *BESIDE))])
    short = len({row["prompt"] for row in every}) - len(prompts)
    steps = sorted({row["prompt"]: row["steps"] for row in rows}.values())
    told = f"texts of {steps[0]} to {steps[-1]} tokens; {short} prompts left out, whose texts no compression reaches"
    yield f"Means over {len(prompts)} prompts, {told}", ["method", *NUMBERS.values(), *BESIDE.values()], lines
    lines = []
    for score in SCORES:
        row = compare(rows, f"random{KEPT}", f"{score}{KEPT}")
        cells = [
            f"{interval_text(row[name], row[f'{name}_interval'])} {is_enough(row[f'{name}_interval'])}"
            for name in NUMBERS
        ]
        lines.append([score, *cells])
    yield (
        f"Is random enough? Random over each score, the prompt kept, n = {len(prompts)}",
        ["score", *NUMBERS.values()],
        lines,
    )
    lines = []
    for method in METHODS:
        row = compare(rows, f"{method}{KEPT}", method)
        words = {1: "worse", 0: "undecided", -1: "better"}
        ends = {name: row[f"{name}_interval"] for name in NUMBERS}
        cells = [f"{interval_text(row[name], ends[name])} {words[side_of(ends[name], 1)]}" for name in NUMBERS]
        lines.append([method, *cells])
    yield f"Keeping the prompt: kept over competing, n = {len(prompts)}", ["method", *NUMBERS.values()], lines


def draw(rows: Sequence[Mapping[str, Any]]) -> Figure:
    """Draw random's ratio to every score, the prompt kept, a panel a number."""
    figure = common.page_figure(52)
    panels = figure.subplots(1, len(NUMBERS), sharey=True)
    compared = [compare(rows, f"random{KEPT}", f"{score}{KEPT}") for score in SCORES]
    for axes, (number, told) in zip(panels, NUMBERS.items(), strict=True):
        values = [row[number] for row in compared]
        bars = common.error_bars(values, [row[f"{number}_interval"] for row in compared])
        axes.errorbar(values, range(len(SCORES)), xerr=bars, fmt="o", markersize=3, linewidth=0.9)
        common.plain_log(axes, "x")
        axes.axvline(1, color="0.35", linewidth=0.9)
        axes.axvline(MARGIN, color="0.35", linewidth=0.6, linestyle=":")
        axes.set_title(told, fontsize="medium")
    panels[0].set_yticks(range(len(SCORES)), SCORES)
    panels[0].invert_yaxis()
    figure.supxlabel(f"random over the score, the prompt kept; dotted: {MARGIN:g}", fontsize="medium")
    return figure


def measured_rows(asked: argparse.Namespace) -> list[dict[str, Any]]:
    """Return the rows of a file that was named, or measure the prompts that lack theirs, a line each."""
    if asked.trace:
        return [json.loads(line) for line in Path(asked.trace[0]).read_text().splitlines()]
    path = asked.output / "rows.jsonl"
    asked.output.mkdir(parents=True, exist_ok=True)
    asked.written.append(path)
    rows = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
    if any(row | about(asked) != row for row in rows):
        raise pk.PerturbkvError(f"{path} has rows of another model or other settings; give another --output")
    there, model = {row["prompt"] for row in rows}, None
    for task in TASKS[: 3 if asked.short else asked.samples]:
        if task in there:
            continue
        model = model or common.load_model(asked)
        made = measure_task(model, task, asked)
        with path.open("a") as stream:
            stream.writelines(json.dumps(each) + "\n" for each in made)
        rows += made
        print(f"{task}: {made[0]['steps']} steps, {made[0]['compressions']} compressions", flush=True)
    return rows


def study(asked: argparse.Namespace) -> None:
    """Measure or read the rows; print the tables, write document and picture."""
    rows = measured_rows(asked)
    common.write_tables(asked, tables(rows), draw(reached(rows)))


if __name__ == "__main__":
    common.main(study, common.options(__doc__ or "", samples=20))
