"""Retrieval as docs/results/one_model.md tables it, from `make needle`: `python docs/scripts/needle.py runs/needle`."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from tables import number, percent

from perturbkv.analyses.json_values import parse_config_object
from perturbkv.analyses.measurements import FIRST_STEP_MEASURES
from perturbkv.analyses.names import short_names
from perturbkv.analyses.needle.retrieval import CIRCULAR
from perturbkv.datasets.dataset_registry import DatasetOptions, load
from perturbkv.datasets.encode import Prompt, encode
from perturbkv.models.loading import open_model
from perturbkv.storage.trace.trace_file import read_trace
from perturbkv.trace import Trace


def needle_of(folder: Path) -> dict[str, Any]:
    """Return the analysis' section of a run's summary."""
    told: dict[str, Any] = json.loads((folder / "summary.json").read_text())["analyses"]["needle"]
    return told


def methods(folder: Path) -> None:
    """Print a row per method: found, leading digits, and found by prompt length."""
    told = needle_of(folder)
    print(f"\n{folder}: {told['scenario']}\n\n| | cache share | found | digits | by length: {told['lengths']} |")
    print("|---|---|---|---|---|")
    labels = short_names([parse_config_object(method["config"]) for method in told["methods"]])
    for name, method in zip(["full cache", *labels], [told["full"], *told["methods"]], strict=True):
        by_length = " / ".join(f"{100 * np.mean(column):.0f}" for column in np.transpose(method["digits_grid"]))
        shares = [percent(method[name], method[f"{name}_interval"]) for name in ("score", "digits")]
        held = "–" if method["held"] is None else f"{method['held']:.2f}"
        print(f"| {name} | {held} | {' | '.join(shares)} | {by_length} |")
    print("by depth, digits: " + ", ".join(f"{depth:g}" for depth in told["depths"]))
    for name, method in zip(labels, told["methods"], strict=True):
        print(f"  {name}: " + ", ".join(f"{100 * np.mean(row):.0f}" for row in method["digits_grid"]))


def link(folder: Path) -> None:
    """Print a row per budget and measure: rank correlation between the methods of one prompt, with both outcomes."""
    told = needle_of(folder)["correlation"]
    for budget in told["budgets"]:
        for kind in ("correlations", "circular"):
            print(f"\n{kind}, b={budget['name']}, {told['samples']} prompts\n\n| | whole number | n | digits | n |")
            print("|---|---|---|---|---|")
            found = {(one["measure"], one["outcome"]): one for one in budget[kind]}
            for measure in dict.fromkeys(measure for measure, _ in found):
                cells = [cell for outcome in ("score", "digits") for cell in _rho(found[measure, outcome])]
                print(f"| {({**FIRST_STEP_MEASURES, **CIRCULAR})[measure]} | {' | '.join(cells)} |")


def levels(folder: Path) -> None:
    """Print the mean of every measure per configuration, over prompts."""
    told = needle_of(folder)["correlation"]
    print(f"\n{folder}: means over {told['samples']} prompts that the full cache answers")
    for budget in told["budgets"] if told["samples"] else []:
        names = short_names(list(map(parse_config_object, budget["configs"])))
        for measure, rows in budget["measured"].items():
            means = ", ".join(f"{name} {value:.3f}" for name, value in zip(names, np.mean(rows, axis=0), strict=True))
            print(f"  b={budget['name']}, {({**FIRST_STEP_MEASURES, **CIRCULAR})[measure]}: {means}")


def _rho(one: dict[str, Any]) -> list[str]:
    """Return ρ with its interval, and the number of prompts that decide it."""
    return [number(one["rho"], one["interval"]), str(one["deciding"])]


def digits_kept(folder: Path) -> None:
    """Print how many of the number's tokens a head keeps, and how many of them in a row from the first."""
    trace = read_trace(folder / "trace.h5")
    places = dict(enumerate(answer_places(trace)))
    print(f"\n{folder}: tokens of the number that a head keeps")
    for config, name in enumerate(short_names(trace.run.configs)):
        kept, run = digits_held(trace, config, places)
        print(f"  {name}: {kept:.2f} of {len(places[0])}; from the first on {run:.2f}")


def digits_held(trace: Trace, config: int, places: Mapping[int, range]) -> tuple[float, float]:
    """Return how many tokens of the number a head keeps, and how many in a row where it keeps the first one.

    `places` maps each sample that counts to the positions of its number; means over heads, then over samples.
    """
    kept, run = [], []
    for sample, place in places.items():
        held = _held(trace, sample, config, place)
        kept.append(held.sum(axis=-1).mean())
        first = held[held[..., 0]]
        run.append(first.cumprod(axis=-1).sum(axis=-1).mean() if len(first) else np.nan)
    return float(np.mean(kept)), float(np.nanmean(run))


def _held(trace: Trace, sample: int, config: int, place: range) -> Any:
    """Return (layer, head, token), True where the head keeps that token of the number."""
    return trace.kept_masks(sample, config)[..., place.start : place.stop]


def answer_places(trace: Trace) -> list[range]:
    """Return the positions of each prompt's number, in prompts made once more or of the measured file."""
    run, tokenizer = trace.run, open_model(trace.run.model).tokenizer
    made = {
        name: run.dataset_options[name] for name in ("lengths", "depths", "haystack") if name in run.dataset_options
    }
    options = DatasetOptions(run.samples, seed=run.seed, **made)
    samples = load(run.dataset, options, tokenizer).samples
    prompts = [encode(one, tokenizer, chat_template=run.chat_template, max_tokens=None) for one in samples]
    return [_answer_place(prompt, tokenizer) for prompt in prompts]


def _answer_place(prompt: Prompt, tokenizer: Any) -> range:
    """Return the positions of the number's digits in the prompt, a token each."""
    digits = [*tokenizer(prompt.answers[0], add_special_tokens=False)["input_ids"]]
    starts = range(len(prompt.token_ids) - len(digits) + 1)
    start = next(start for start in starts if [*prompt.token_ids[start : start + len(digits)]] == digits)
    return range(start, start + len(digits))


if __name__ == "__main__":
    root = Path(sys.argv[1])
    for part in (root, root / "context", root / "pooled", root / "kernel"):
        methods(part)
        link(part)
    for part in (root, root / "pooled", root / "kernel"):
        levels(part)
        digits_kept(part)
