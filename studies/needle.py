"""Whether a hidden number is still found, and what perturbation tells of it, from the runs that `make needle` leaves.

`python studies/needle.py runs/needle` prints the tables of docs/results/one_model.md of the run in that folder, and of
those in `context`, `pooled` and `kernel` inside it where they are there: what each method finds, the rank correlation
of perturbation with what is found, the means behind it, and how much of the number its heads keep.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import common
import numpy as np
from common import Table, configuration, short_names
from tables import number, percent

import perturbkv as pk

MEASURES = {
    "isolated": "isolated L1", "theta": "θ", "propagated": "propagated L1", "lost": "1 − S", "kl": "KL, nat",
    "drift": "last layer's drift", "kl_all": "KL, nat, all steps", "drift_all": "drift, all steps",
    "propagated_all": "propagated L1, all steps",
}  # fmt: skip
"""Measures of the summary -> their names in the tables."""


def needle_results(folder: Path) -> dict[str, Any]:
    """Return the numbers of the analysis `needle` from a run's summary."""
    told: dict[str, Any] = json.loads((folder / "summary.json").read_text())["analyses"]["needle"]
    return told


def method_tables(folder: Path) -> Iterator[Table]:
    """Yield the table of what each method finds, whole numbers and leading digits, and that of the digits by depth."""
    told = needle_results(folder)
    labels = short_names([configuration(method["config"]) for method in told["methods"]])
    rows = []
    for name, method in zip(["full cache", *labels], [told["full"], *told["methods"]], strict=True):
        by_length = " / ".join(f"{100 * np.mean(column):.0f}" for column in np.transpose(method["digits_grid"]))
        shares = [percent(method[one], method[f"{one}_interval"]) for one in ("score", "digits")]
        rows.append([name, "–" if method["held"] is None else f"{method['held']:.2f}", *shares, by_length])
    heads = ["", "cache share", "found", "digits", f"by length: {told['lengths']}"]
    yield f"{folder.name}: {told['scenario']}", heads, rows
    depths = [[name, *(f"{100 * np.mean(row):.0f}" for row in method["digits_grid"])]
              for name, method in zip(labels, told["methods"], strict=True)]  # fmt: skip
    yield f"{folder.name}: digits by depth", ["", *(f"{depth:g}" for depth in told["depths"])], depths


def correlation_tables(folder: Path) -> Iterator[Table]:
    """Yield tables of each measure's rank correlation with both outcomes, over the methods of one prompt and budget."""
    told = needle_results(folder)["correlation"]
    for budget in told["budgets"]:
        for kind in ("correlations", "circular"):
            found = {(one["measure"], one["outcome"]): one for one in budget[kind]}
            rows = [[MEASURES[measure], *(cell for outcome in ("score", "digits")
                                          for cell in _rho_cells(found[measure, outcome]))]
                    for measure in dict.fromkeys(measure for measure, _ in found)]  # fmt: skip
            title = f"{folder.name}: {kind}, b={budget['name']}, {told['samples']} prompts"
            yield title, ["", "whole number", "n", "digits", "n"], rows


def mean_tables(folder: Path) -> Iterator[Table]:
    """Yield a table per budget: each measure's mean per configuration, over the prompts that the full cache answers."""
    told = needle_results(folder)["correlation"]
    for budget in told["budgets"] if told["samples"] else []:
        names = short_names(list(map(configuration, budget["configs"])))
        rows = [[MEASURES[measure], *(f"{value:.3f}" for value in np.mean(values, axis=0))]
                for measure, values in budget["measured"].items()]  # fmt: skip
        yield f"{folder.name}: means over {told['samples']} answered prompts, b={budget['name']}", ["", *names], rows


def _rho_cells(one: dict[str, Any]) -> list[str]:
    """Return ρ with its interval, and the number of prompts that decide it."""
    return [number(one["rho"], one["interval"]), str(one["deciding"])]


def kept_digits_table(folder: Path) -> Iterator[Table]:
    """Yield the table of how many tokens of the number a head keeps, and how many of them in a row from the first."""
    trace = pk.read_trace(folder / "trace.h5")
    places = dict(enumerate(answer_places(trace)))
    rows = []
    for config, name in enumerate(short_names(trace.run.configs)):
        kept, run = kept_digits(trace, config, places)
        rows.append([name, f"{kept:.2f} of {len(places[0])}", f"{run:.2f}"])
    yield f"{folder.name}: tokens of the number that a head keeps", ["", "kept", "from the first on"], rows


def kept_digits(trace: pk.Trace, config: int, places: Mapping[int, range]) -> tuple[float, float]:
    """Return how many tokens of the number a head keeps, and how many in a row where it keeps the first one (else NaN).

    `places` maps each sample that counts to the positions of its number; means over heads, then over samples.
    """
    kept, run = [], []
    for sample, place in places.items():
        held = _kept_tokens(trace, sample, config, place)
        kept.append(held.sum(axis=-1).mean())
        first = held[held[..., 0]]
        run.append(first.cumprod(axis=-1).sum(axis=-1).mean() if len(first) else np.nan)
    return float(np.mean(kept)), float(np.nanmean(run))


def _kept_tokens(trace: pk.Trace, sample: int, config: int, place: range) -> Any:
    """Return (layer, head, token), True where the head keeps that token of the number."""
    return trace.kept_masks(sample, config)[..., place.start : place.stop]


def answer_places(trace: pk.Trace) -> list[range]:
    """Return the positions of each prompt's number; the prompts are made once more, or read from the measured file."""
    run, model = trace.run, pk.load_model(trace.run.model)
    made = {
        name: run.dataset_options[name] for name in ("lengths", "depths", "haystack") if name in run.dataset_options
    }
    prompts = pk.load_prompts(
        run.dataset, model, samples=run.samples, seed=run.seed, chat_template=run.chat_template, **made
    )
    return [_answer_place(prompt, model.tokenizer) for prompt in prompts]


def _answer_place(prompt: pk.Prompt, tokenizer: Any) -> range:
    """Return the positions of the number's digits in the prompt, a token each."""
    digits = [*tokenizer(prompt.answers[0], add_special_tokens=False)["input_ids"]]
    starts = range(len(prompt.token_ids) - len(digits) + 1)
    start = next(start for start in starts if [*prompt.token_ids[start : start + len(digits)]] == digits)
    return range(start, start + len(digits))


def tables(root: Path) -> Iterator[Table]:
    """Yield the tables of the folder's run and of those inside it."""
    inside = {name: root / name for name in ("context", "pooled", "kernel") if (root / name).is_dir()}
    for part in (root, *inside.values()):
        yield from method_tables(part)
        yield from correlation_tables(part)
    for part in (root, *(folder for name, folder in inside.items() if name != "context")):
        yield from mean_tables(part)
        yield from kept_digits_table(part)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="of the runs that `make needle` leaves")
    parser.add_argument("--output", "-o", type=Path, help="folder of the JSON document")
    common.main(lambda asked: common.write_tables(asked, tables(asked.folder)), parser)
