"""Is random enough? Policies that evict while a model decodes, under one protocol, on long answers.

A cache holds the prompt's n entries and 128 more (the budget n + 128), and is cut to that after every 64 tokens: at its
fullest it holds n + 192. The methods: SnapKV's score, R-KV, TOVA, random entries and the most recent ones
(StreamingLLM: 4 sinks and a window), each once with all entries competing and once with the prompt kept, so that only
the answer's own tokens compete. One set per key/value head, a window of the last 16 entries that always stays, seed 0,
defaults otherwise. The steps read the full run's own greedy text, at most 512 tokens, so that all methods are measured
on the same tokens; free answers, of at most 384 tokens, are graded where a prompt has an answer.

Prompts, 20, in three kinds: *code* (write a small module), *recall* (twelve made-up codes that the answer has to give
back, graded by the share of codes in it) and *steps* (a sum to be worked out step by step, graded by its result).

## How it is decided

Written before any of these prompts was measured; the program was tried on random weights alone. Three numbers of a
method and a prompt decide, each a mean over the text's steps: the propagated Σ L / Σ ‖o_h‖₁, KL(full ‖ evicted), and
the perplexity of the full run's text over the full cache's. Methods are compared in pairs by the geometric mean over
prompts of the ratio of a number, with its 95 % interval over prompts (perplexity: of the ratio itself).

*Random is enough* against a score where the upper end of random's ratio to it lies below 1.1, *not enough* where the
lower end lies above 1, *undecided* otherwise; both with the prompt kept. *Keeping the prompt* is better for a method
where the whole interval of (kept / competing) lies below 1, worse where above. Twelve intervals decide the first
question, fifteen the second: of the latter one may lie off 1 by chance. Kinds are shown beside, and decide nothing.
Fewer than five prompts give ranges, which decide nothing.

    python studies/decoding.py --model qwen2.5-coder-0.5b-q4_k_m
    python studies/decoding.py runs/decoding/rows.jsonl
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import random
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import common
import numpy as np
from common import Floats, estimate, interval_text, side_of
from compaction import geometric_interval
from matplotlib.figure import Figure

import perturbkv as pk

STEPS, ANSWER, EVERY, BEYOND, WINDOW = 512, 384, 64, 128, 16
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
)  # fmt: skip


def rows_of_prompts(seed: int) -> list[dict[str, Any]]:
    """Return the rows of the prompts, of the three kinds in turn."""
    made: dict[str, list[dict[str, Any]]] = {"code": [], "recall": [], "steps": []}
    draw = random.Random(seed)
    for task in TASKS:
        text = f"Write a complete Python module for {task}, with docstrings, type hints and tests for every function."
        made["code"].append({"prompt": text})
        codes = {f"{draw.choice('ABCDEFGH')}{number}": str(draw.randint(10000, 99999)) for number in range(1, 13)}
        lines = " ".join(f"The code of locker {locker} is {code}." for locker, code in codes.items())
        asked = (
            "Write a report with one numbered paragraph of two sentences for each locker, and repeat its code in it."
        )
        made["recall"].append(
            {"prompt": f"{lines}\n\n{asked}", "answers": [*codes.values()], "metric": "string_match_all"}
        )
    for _ in range(6):
        numbers = [draw.randint(11, 99) for _ in range(8)]
        asked = "Write every intermediate sum in a sentence of its own."
        text = f"Add {', '.join(map(str, numbers))} one after the other. {asked}"
        made["steps"].append({"prompt": text, "answers": [str(sum(numbers))], "metric": "contains"})
    return [
        {"id": f"{kind} {place}", **row}
        for place in range(len(TASKS))
        for kind, rows in made.items()
        for row in rows[place : place + 1]
    ]


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


def measure_prompt(model: Any, row: Mapping[str, Any], asked: argparse.Namespace) -> list[dict[str, Any]]:
    """Return a row per method of one prompt."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "prompt.jsonl"
        path.write_text(json.dumps(row) + "\n")
        prompts = pk.load_prompts(str(path), model, chat_template=asked.chat_template)
    (prompt,) = prompts
    steps, answer, every, beyond = (12, 8, 4, WINDOW + 2) if asked.short else (STEPS, ANSWER, EVERY, BEYOND)
    configs = configurations(len(prompt.token_ids) + beyond, asked.seed)
    settings = dataclasses.replace(
        common.ONE_STEP, steps=steps, compress_every=every,
        generate=answer if "answers" in row else 0, kept=False,
    )  # fmt: skip
    trace = pk.measure(model, prompts, configs.values(), settings=settings, progress=False)
    if trace.failures:
        raise pk.PerturbkvError(f"prompt '{row['id']}' failed: {trace.failures}")
    names = {config.label(): name for name, config in configs.items()}
    return [
        {"prompt": row["id"], "kind": row["id"].split()[0], "method": names[config.label()],
         "prompt_tokens": len(prompt.token_ids), **numbers_of(trace, index)}
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
    found: dict[str, Any] = {
        "steps": steps,
        "cuts": int(cut.sum()),
        "propagated": float((of("perturbation_propagated").sum(axis=(1, 2)) / norms).mean()),
        "added": float((added / norms[1:])[cut].mean()) if cut.any() else None,
        "kl": float(of("logit_kl").mean()),
        "perplexity": float(np.exp(np.nanmean(lost))),
        "gone": float(of("gone_attention").sum(axis=-1).mean()),
        "draft": float(of("draft_acceptance").mean()),
        "held": float(of("held_entries").mean()),
    }
    if "score" in trace.arrays:
        answers = [np.asarray(trace.get(name, "decoding")[0]) for name in ("generated_full", "generated")]
        found |= {"score_full": float(trace.get("score_full", "decoding")[0]),
                  "score": float(trace.get("score", "decoding")[0][config]),
                  "loops_full": has_loop(answers[0]), "loops": has_loop(answers[1][config])}  # fmt: skip
    return found


def has_loop(tokens: Iterable[int], longest: int = 32, times: int = 4) -> bool:
    """Return whether an answer ends in the same `longest` tokens or fewer, `times` times over."""
    made = [int(token) for token in tokens if token >= 0]
    return any(
        len(made) >= period * times and made[-period * times :] == made[-period:] * times
        for period in range(1, longest + 1)
    )


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


def tables(rows: Sequence[Mapping[str, Any]]) -> Iterator[common.Table]:
    """Return the tables: methods, is random enough, is the prompt to be kept, and random by kind."""
    prompts = list(dict.fromkeys(row["prompt"] for row in rows))
    methods = list(dict.fromkeys(row["method"] for row in rows))
    lines = []
    for method in methods:
        own = [row for row in rows if row["method"] == method]
        graded = [row for row in own if "score" in row]
        means = [np.mean([row[name] for row in own if row[name] is not None]) for name in (*NUMBERS, *BESIDE)]
        answers = [f"{np.mean([row['score'] for row in graded]):.2f}", f"{sum(row['loops'] for row in graded)}"]
        lines.append([method, *(f"{mean:.3g}" for mean in means), *(answers if graded else ["–", "–"])])
    full = [row for row in rows if row["method"] == methods[0] and "score" in row]
    score, loops = np.mean([row["score_full"] for row in full] or [np.nan]), sum(row["loops_full"] for row in full)
    of_full = f"; of the full cache {score:.2f}, {loops} loops" if full else ""
    heads = ["method", *NUMBERS.values(), *BESIDE.values(), "score", "loops"]
    yield f"Means over {len(prompts)} prompts; scores and loops over {len(full)} answers{of_full}", heads, lines
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
    lines = []
    for kind in dict.fromkeys(row["kind"] for row in rows):
        own = [row for row in rows if row["kind"] == kind]
        for score in SCORES:
            row = compare(own, f"random{KEPT}", f"{score}{KEPT}")
            lines.append([kind, score, *(interval_text(row[name], row[f"{name}_interval"]) for name in NUMBERS)])
    yield "By kind of prompt, random over each score, the prompt kept", ["kind", "score", *NUMBERS.values()], lines


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
    there, model = {row["prompt"] for row in rows}, None
    for row in rows_of_prompts(asked.seed)[: 3 if asked.short else asked.samples]:
        if row["id"] in there:
            continue
        model = model or common.load_model(asked)
        made = measure_prompt(model, row, asked)
        with path.open("a") as stream:
            stream.writelines(json.dumps(each) + "\n" for each in made)
        rows += made
        print(f"{row['id']}: {made[0]['steps']} steps, {made[0]['cuts']} cuts", flush=True)
    return rows


def study(asked: argparse.Namespace) -> None:
    """Measure or read the rows; print the tables, write document and picture."""
    rows = measured_rows(asked)
    common.write_tables(asked, tables(rows), draw(rows))


if __name__ == "__main__":
    common.main(study, common.options(__doc__ or "", samples=20))
