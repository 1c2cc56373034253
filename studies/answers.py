"""Which methods keep an answer, which number foretells that, and how long an answer a pooling kernel keeps.

`python studies/answers.py` measures one run (a model, and the digits of its hidden numbers) after the other and writes
docs/answers/RUN.csv, a row per prompt and cache, and for the compared methods RUN-foretelling.csv, a row per budget and
measure. A run whose files are there is not measured again, and one that was cut goes on where it was. `--only WORD`
takes the runs whose name holds a word; with `--short` it measures a single run of four prompts, to see it work.
`answers_tables.py` tells what was measured. The rules stand in docs/results/rules.md, which was written first.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import random
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import common
import numpy as np
from second_model import prompt_rows
from specification import DOCS, model, write_rows

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


def write_run(run: Run, trace: pk.Trace, folder: Path) -> None:
    """Write what the tables need of a run, the file that says that it is done last."""
    if run.digits == 7:
        write_rows(folder / f"{run.name}-foretelling.csv", FORETELLING, list(foretelling(trace, run)))
    write_rows(folder / f"{run.name}.csv", CELLS, list(rows(trace, run)))


def study(asked: argparse.Namespace) -> None:
    """Measure the runs that are missing, or a short one."""
    if asked.short:
        run = Run(SMOLLM2, 7, 4)
        write_run(run, measure(run, asked.output), asked.output)
        asked.written += [asked.output / f"{run.name}{end}.csv" for end in ("", "-foretelling")]
        return
    for run in runs():
        if asked.only in run.name and not (ROWS / f"{run.name}.csv").exists():
            write_run(run, measure(run), ROWS)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="a word in a run's name")
    parser.add_argument("--short", action="store_true", help="one run of four prompts, to see it work")
    parser.add_argument("--output", "-o", type=Path, help="folder of the short run")
    common.main(study, parser)
