"""Retrieval as docs/results/one_model.md tables it, from `make needle`: `python docs/scripts/needle.py runs/needle`."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from perturbkv.analyses.json_values import parse_config_object
from perturbkv.analyses.measurements import FIRST_STEP_MEASURES
from perturbkv.analyses.needle.retrieval import CIRCULAR
from perturbkv.analyses.pairing import short_names
from perturbkv.datasets.dataset_registry import DatasetOptions, load
from perturbkv.datasets.encode import Prompt, encode
from perturbkv.models.loading import open_model
from perturbkv.storage.trace.trace_file import read_trace
from perturbkv.trace import Trace


def say(line: str) -> None:
    """One line of the page."""
    sys.stdout.write(line + "\n")


def needle_of(folder: Path) -> dict[str, Any]:
    """The analysis' section of a run's summary."""
    told: dict[str, Any] = json.loads((folder / "summary.json").read_text())["analyses"]["needle"]
    return told


def ends(interval: dict[str, Any] | None, digits: int = 2, scale: float = 1) -> str:
    """An interval of summary.json in brackets, a range in parentheses."""
    if not interval:
        return ""
    low, high = (f"{scale * interval[end]:.{digits}f}" for end in ("low", "high"))
    return f" ({low} … {high})" if interval["kind"] == "range" else f" [{low}, {high}]"


def percent(method: dict[str, Any], name: str) -> str:
    """A share with its interval."""
    return f"{100 * method[name]:.0f} %{ends(method[f'{name}_interval'], 0, 100)}"


def methods(folder: Path) -> None:
    """A row per method: found, leading digits, and found by prompt length."""
    told = needle_of(folder)
    say(f"\n{folder}: {told['scenario']}\n\n| | cache share | found | digits | by length: {told['lengths']} |")
    say("|---|---|---|---|---|")
    labels = short_names([parse_config_object(method["config"]) for method in told["methods"]])
    for name, method in zip(["full cache", *labels], [told["full"], *told["methods"]], strict=True):
        by_length = " / ".join(f"{100 * np.mean(column):.0f}" for column in np.transpose(method["digits_grid"]))
        held = "–" if method["held"] is None else f"{method['held']:.2f}"
        say(f"| {name} | {held} | {percent(method, 'score')} | {percent(method, 'digits')} | {by_length} |")
    say("by depth, digits: " + ", ".join(f"{depth:g}" for depth in told["depths"]))
    for name, method in zip(labels, told["methods"], strict=True):
        say(f"  {name}: " + ", ".join(f"{100 * np.mean(row):.0f}" for row in method["digits_grid"]))


def link(folder: Path) -> None:
    """A row per budget and measure: rank correlation between the methods of one prompt, with both outcomes."""
    told = needle_of(folder)["correlation"]
    for budget in told["budgets"]:
        for kind in ("correlations", "circular"):
            say(f"\n{kind}, b={budget['name']}, {told['samples']} prompts\n\n| | whole number | n | digits | n |")
            say("|---|---|---|---|---|")
            found = {(one["measure"], one["outcome"]): one for one in budget[kind]}
            for measure in dict.fromkeys(measure for measure, _ in found):
                cells = [cell for outcome in ("score", "digits") for cell in _rho(found[measure, outcome])]
                say(f"| {({**FIRST_STEP_MEASURES, **CIRCULAR})[measure]} | {' | '.join(cells)} |")


def levels(folder: Path) -> None:
    """Mean of every measure per configuration, over prompts."""
    told = needle_of(folder)["correlation"]
    say(f"\n{folder}: means over {told['samples']} prompts that the full cache answers")
    for budget in told["budgets"] if told["samples"] else []:
        names = short_names(list(map(parse_config_object, budget["configs"])))
        for measure, rows in budget["measured"].items():
            means = ", ".join(f"{name} {value:.3f}" for name, value in zip(names, np.mean(rows, axis=0), strict=True))
            say(f"  b={budget['name']}, {({**FIRST_STEP_MEASURES, **CIRCULAR})[measure]}: {means}")


def _rho(one: dict[str, Any]) -> list[str]:
    """ρ with its interval, and how many prompts it is of."""
    shown = "–" if one["rho"] is None else f"{one['rho']:.2f}{ends(one['interval'])}".replace("-", "−")
    return [shown, str(one["deciding"])]


def digits_kept(folder: Path, inside: float) -> None:
    """The number's digits that a head keeps, and how many of them in a row from the first, at depths below `inside`."""
    trace = read_trace(folder / "trace.h5")
    places = answer_places(trace)
    say(f"\n{folder}: tokens of the number that a head keeps, depth below {inside:g}")
    depths = needle_of(folder)["depths"]
    lengths = needle_of(folder)["lengths"]
    cells = len(lengths) * len(depths)
    chosen = {place: where for place, where in enumerate(places) if depths[place % cells % len(depths)] < inside}
    for config, name in enumerate(short_names(trace.run.configs)):
        kept, run = digits_held(trace, config, chosen)
        say(f"  {name}: {kept:.2f} of {len(places[0])}; from the first on {run:.2f}")


def digits_held(trace: Trace, config: int, places: Mapping[int, range]) -> tuple[float, float]:
    """Tokens of the number that a head keeps, and of those heads that keep the first one how many in a row from it.

    `places` says of each sample that counts where its number stands; means over heads, then over samples.
    """
    kept, run = [], []
    for sample, place in places.items():
        held = _held(trace, sample, config, place)
        kept.append(held.sum(axis=-1).mean())
        first = held[held[..., 0]]
        run.append(first.cumprod(axis=-1).sum(axis=-1).mean() if len(first) else np.nan)
    return float(np.mean(kept)), float(np.nanmean(run))


def _held(trace: Trace, sample: int, config: int, place: range) -> Any:
    """(layer, head, token) True where the head keeps that token of the number."""
    return trace.kept_masks(sample, config)[..., place.start : place.stop]


def answer_places(trace: Trace) -> list[range]:
    """Where each prompt's number stands: needle prompts made once more, or those of the file that was measured."""
    run, tokenizer = trace.run, open_model(trace.run.model).tokenizer
    made = {
        name: run.dataset_options[name] for name in ("lengths", "depths", "haystack") if name in run.dataset_options
    }
    options = DatasetOptions(run.samples, seed=run.seed, **made)
    samples = load(run.dataset, options, tokenizer).samples
    prompts = [encode(one, tokenizer, chat_template=run.chat_template, max_tokens=None) for one in samples]
    return [_answer_place(prompt, tokenizer) for prompt in prompts]


def _answer_place(prompt: Prompt, tokenizer: Any) -> range:
    """Where the number's digits stand in the prompt: a token each."""
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
        digits_kept(part, inside=1.0)
