"""Labels of configurations, and the files that commands leave and read again."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

import perturbkv as pk
from tests.pins.running import (
    POLICIES,
    below,
    digest,
    frame,
    known,
    leaves,
    left,
    plain,
    prompts,
    run,
    table,
    tiny_model,
)

SELECTIONS = ["attention", "attention-unpooled", "two-stage", "two-stage(alpha=0.5, split=total, score=pooled)",
              "two-stage(epsilon=0.001, norm=l2)", "two-stage-uniform", "value", "random", "hindsight",
              "hindsight-attention"]  # fmt: skip
CHOICES: dict[str, list[Any]] = {
    "granularity": ["query", "kv", "layer", "kv(block=16)", "kv(reduce=max, product=mean-of-products)"],
    "precision": ["full", "quantise(bits=4)", "quantise(bits=2, group=8, fill=64)"],
    "correction": ["none", "corrected", "corrected(mass=linear)", "corrected-oracle"],
    "preset": ["paper", "paper-v2", "released-v2", "kvpress"],
    "protect_first": [0, 4, 0.1], "protect_recent": [0, 16, 0.5], "window": [1, 8, 16], "alpha": [0, 0.25, 1],
    "kernel": [3, 7], "pool": ["max", "average"],
}  # fmt: skip
OPTIONED = (
    "adakv(floor=0.1)", "adakv(safeguard=guaranteed)", "pyramidkv(beta=5, line=total)", "h2o(recent=0.25)",
    "headkv(beta=1.2)", "scissorhands(history=30)", "quest(page=8)", "defensive(mass=0.5)", "lava(floor=0.3)",
    "expected-attention(n_future=64)", "kvzip(chunk=512)", "value-norm(sinks=2)", "snapkv(pool=average, kernel=5)",
    "adakv(h2o)", "adakv(tova)", "pyramidkv(obcache-joint)",
)  # fmt: skip


def _no_prompts() -> str:
    """The option that leaves texts out, as the version names it."""
    return "--no-prompts" if known("trace --no-prompts") else "--no-text"


def record(folder: Path) -> dict[str, Any]:
    """Make labels, sweeps, and files of every kind."""
    found = {f"labels/{name}": value for name, value in _labels().items()}
    model = tiny_model(folder / "model")
    data = prompts(folder / "prompts.jsonl", 3, answers=["seven"])
    common: list[Any] = ["--model", model, "--dataset", data, "--budget", 40, "--window", 8]
    two = ["--selection", "attention", "--selection", "two-stage"]
    made: dict[str, list[Any]] = {
        "trace": ["trace", *common, *two, "--save", "outputs", "--steps", 2],
        "trace-bare": ["trace", *common, *two, _no_prompts(), "--no-kept"],
        "trace-kv": ["trace", *common, *two, "--granularity", "kv", "--precision", "quantise(bits=4)"],
        "trace-rectangular": ["trace", *common, *two, "--cache", "rectangular", "--dtype", "bfloat16"],
        "generate": ["generate", *common, *two, "--max-new-tokens", 6, "--divergence"],
        "patching": ["patching", *common, "--exact", "--format", "svg"],
    }
    for name, arguments in made.items():
        ran = run(*arguments, "-o", folder / name, "--json")
        found[f"{name}/code"] = ran.code
        found |= below(name, left(folder, folder / name, (".svg",)))
    trace = next((folder / "trace").glob("*.h5"))
    for kind in ("csv", "parquet"):
        found[f"export-{kind}/code"] = run("export", trace, "-o", folder / "out" / f"t.{kind}", "--json").code
    found |= below("export", {path.name: table(path) for path in sorted((folder / "out").iterdir())})
    found |= below("read", _read(trace, folder))
    sweep = folder / "sweep.yaml"
    sweep.write_text(_SWEEP.format(model=model, data=data))
    found |= leaves(run("trace", "--config", sweep, "--dry-run", "--json").document(), "sweep", folder)
    return found


def _labels() -> dict[str, Any]:
    """Labels of a broad grid, and the error where a combination is refused."""
    found: dict[str, Any] = {}
    every = ["snapkv", "streaming-llm", "vertical-slash", *POLICIES, *OPTIONED]
    for policy in every:
        for selection in [*SELECTIONS, "position"]:
            found[f"{policy} {selection}"] = _label(0.2, policy=policy, selection=selection)
    for name, values in CHOICES.items():
        for value in values:
            for policy in ("snapkv", "adakv"):
                for selection in ("attention", "two-stage"):
                    choices = {"policy": policy, "selection": selection, name: value}
                    found[f"{policy} {selection} {name}={value}"] = _label(64, **choices)
    wide = pk.grid([64, 0.1, "0.5"], policy=["snapkv", "adakv", "pyramidkv"], selection=SELECTIONS,
                   granularity=["query", "kv"], window=16)  # fmt: skip
    found["wide"] = digest(*(one.label() for one in wide))
    return found


def _label(budget: Any, **choices: Any) -> Any:
    try:
        return [one.label() for one in pk.grid(budget, **choices)]
    except (pk.PerturbkvError, ValueError, TypeError) as error:
        return f"{type(error).__name__}: {error}"


def _read(path: Path, folder: Path) -> dict[str, Any]:
    """What `read_trace` makes of a trace, and what a trace gives on."""
    trace = pk.read_trace(path)
    found: dict[str, Any] = {
        f"array {name}": digest(np.asarray(array)) for name, array in trace.arrays.items() if "seconds" not in name
    }
    found["samples"] = list(trace.sample_ids)
    found["labels"] = [one.label() for one in trace.run.configs]
    found["run"] = plain(folder)(repr(trace.run))
    for name in ("compare_heads", "layer_drift", "horizon", "assumption"):
        try:
            told = getattr(pk, name)(trace)
        except pk.PerturbkvError as error:
            found[f"pk.{name}"] = plain(folder)(f"{type(error).__name__}: {error}")
            continue
        found |= leaves(told.to_dict(), f"pk.{name}", folder)
        found[f"pk.{name} as a table"] = frame(told.to_frame(*filter(None, [getattr(told, "ROWS", "")])))
    return found


_SWEEP = """
model: {model}
dataset: {data}
samples: 2
window: 8
policy: [snapkv, "adakv(floor=0.1)", pyramidkv]
selection: [attention, "adakv:two-stage"]
budget: [64, 0.2]
grids:
  - selection: attention
  - selection: two-stage
    alpha: [0, 0.25, 0.5]
  - policy: streaming-llm
    selection: position
"""
