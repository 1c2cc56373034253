"""How the audit's threshold was chosen and judged, on clean situations and on planted faults.

`PYTHONPATH=. python docs/audit-threshold/situations.py` measures the situations, with `faults` the planted faults, and
with `report` it prints the table and draws the figure of docs/results/audit.md.

A clean situation is a right eviction, written here without the audit's code: another way to read the prompt, another
policy, another order of what stays. Its largest distance from the reference, in noise floors, is a row of the table.

The rule, written before any row was measured: *the threshold is the smallest whole number that is at least twice the
largest distance of the 500 clean situations of the first half*. It is judged on 1,000 others: models with other seeds,
two families and one real model that the first half does not have. A false alarm is a clean situation above it.
"""

from __future__ import annotations

import csv
import itertools
import math
import random
import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt
import numpy as np
import torch
from numpy.typing import NDArray
from scipy.stats import binomtest
from torch import Tensor
from transformers import DynamicCache

import perturbkv as pk
from perturbkv.analyses.audit.audited_runs import AuditedRun
from perturbkv.analyses.audit.cache_entries import FLOORS
from perturbkv.auditing import reference
from perturbkv.auditing.external_run import run_eviction
from perturbkv.auditing.forward_passes import make_situation, token_count
from perturbkv.cache.model_state import ModelState
from perturbkv.configs.audit_settings import SITUATIONS
from perturbkv.models.adapter import Adapter
from perturbkv.models.forward import run_with_cache
from perturbkv.selection.external_eviction import callable_eviction
from tests.audit import planted
from tests.audit.test_planted_faults_are_told_apart import audited
from tests.support.models import tiny_adapter

COUNTS = {"chosen": 500, "judged": 1000}
REAL = {
    "chosen": ("smollm2-135m-q4_1", 40, ("float32", "bfloat16")),
    "judged": ("qwen2.5-coder-0.5b-q4_k_m", 30, ("float32",)),
}
"""Half -> a real model, the number of its situations, and its types."""
REAL_MODELS = [name for name, *_ in REAL.values()]
FAMILIES = {"chosen": ("llama", "qwen3", "phi3"), "judged": ("llama", "qwen3", "phi3", "mistral", "granite")}
SEEDS = {"chosen": range(10), "judged": range(100, 120)}
FOLDER = Path(__file__).resolve().parent
COUNTED = ("hidden", "repeated", "padding", "duplicate", "uneven", "raised", "empty")
"""Kinds of faults that are found by counting, whatever the distance."""
DISTANCES = ["keys", "values", "heads", "hidden", "logits"]
TEXT = Path("/usr/share/common-licenses/GPL-3")
STEPS = 3


@dataclass(frozen=True)
class Setting:
    """A clean situation.

    Attributes:
        half: chosen or judged.
        model: family of random weights, or a real model's name.
        seed: of weights and prompt.
        dtype: of weights and cache.
        tokens: length of the prompt.
        situation: single, block, batch.
        reader: how the prompt is read: whole, in chunks of 7 or 32 tokens, each row alone, with eager attention.
        policy: which entries stay.
        share: of the prompt that stays.
        order: of the entries in the cache: prompt, reversed, score.
    """

    half: str
    model: str
    seed: int
    dtype: str
    tokens: int
    situation: str
    reader: str
    policy: str
    share: float
    order: str


READERS = ("whole", "chunks of 7", "chunks of 32", "rows alone", "eager")
UNEVEN = "more in early layers"
POLICIES = ("streaming", "small keys", "large values", "attention", "random", UNEVEN)
ORDERS = ("prompt", "reversed", "score")


def settings(half: str, count: int) -> Iterator[Setting]:
    """Draw the clean situations of a half; the real model's come last."""
    draw = random.Random(half)
    real, of_real, dtypes = REAL[half]
    for index in range(count):
        is_real, situation, policy = index >= count - of_real, draw.choice(tuple(SITUATIONS)), draw.choice(POLICIES)
        yield Setting(
            half=half,
            model=real if is_real else draw.choice(FAMILIES[half]),
            seed=draw.choice(SEEDS[half]),
            dtype=draw.choice(dtypes if is_real else ("float32", "bfloat16", "float16")),
            tokens=draw.choice((60, 120) if is_real else (30, 60, 120, 240, 480)),
            situation=situation,
            reader=draw.choice(READERS),
            policy=policy if situation != "block" or policy != UNEVEN else "random",  # one mask fits all layers
            share=draw.choice((0.1, 0.2, 0.4, 0.7)),
            order=draw.choice(ORDERS),
        )


def read_prompts(
    setting: Setting, model: Any, input_ids: Tensor, attention_mask: Tensor
) -> list[tuple[Tensor, Tensor]]:
    """Return keys and values (row, kv_head, token, width) per layer, the way the setting reads."""
    if setting.reader == "rows alone" and len(input_ids) > 1:
        rows = []
        for ids, mask in zip(input_ids, attention_mask, strict=True):
            own = read_prompts(setting, model, ids[None, mask.bool()], mask[None, mask.bool()])
            filler = len(ids) - int(mask.sum())
            rows.append([[torch.nn.functional.pad(kind, (0, 0, filler, 0)) for kind in layer] for layer in own])
        return [tuple(torch.cat(kind) for kind in zip(*layers, strict=True)) for layers in zip(*rows, strict=True)]
    cache, positions = DynamicCache(), (attention_mask.cumsum(dim=-1) - 1).clamp(min=0)
    size = int(setting.reader.split()[-1]) if setting.reader.startswith("chunks") else input_ids.shape[1]
    if setting.reader == "eager":
        model.config._attn_implementation = "eager"
    for first in range(0, input_ids.shape[1], size):
        part = slice(first, first + size)
        mask = None if bool(attention_mask.all()) else attention_mask[:, : first + size]
        run_with_cache(model, input_ids[:, part], cache, attention_mask=mask, position_ids=positions[:, part])
    model.config._attn_implementation = "sdpa"
    return [(layer.keys, layer.values) for layer in cache.layers]


def kept_indices(setting: Setting, keys: Tensor, values: Tensor, layer: int, draw: torch.Generator) -> Tensor:
    """Return which entries (kv_head, kept) of one row's layer stay: the last 4, and the best of the others."""
    heads, tokens = keys.shape[:2]
    count = max(5, round(setting.share * tokens))
    if setting.policy == UNEVEN:
        count = max(5, count - 3 * layer)
    if setting.policy == "streaming":
        scores = torch.arange(tokens).expand(heads, -1).clone().float()
        scores[:, :4] += tokens
    elif setting.policy == "small keys":
        scores = -keys.float().norm(dim=-1)
    elif setting.policy == "large values":
        scores = values.float().norm(dim=-1)
    elif setting.policy == "attention":
        scores = (keys.float() @ keys[:, -1:].float().mT).squeeze(-1)
    else:
        scores = torch.rand(heads, tokens, generator=draw)
    scores[:, -4:] = torch.inf
    best = scores.topk(min(count, tokens)).indices
    if setting.order == "score":
        return best
    return best.sort(dim=-1, descending=setting.order == "reversed").values


def clean_eviction(setting: Setting) -> Callable[[Any, Tensor, Tensor], DynamicCache]:
    """Return the setting's eviction: it reads, chooses per row and head, and gathers."""

    def evict(model: Any, input_ids: Tensor, attention_mask: Tensor) -> DynamicCache:
        cache, draw = DynamicCache(), torch.Generator().manual_seed(setting.seed)
        least = int(attention_mask.sum(dim=-1).min())
        for layer, (keys, values) in enumerate(read_prompts(setting, model, input_ids, attention_mask)):
            rows = []
            for own_keys, own_values, mask in zip(keys, values, attention_mask, strict=True):
                padding = len(mask) - int(mask.sum())
                extra = int(mask.sum()) - least  # so that every row keeps as many
                own = (own_keys[:, padding + extra :], own_values[:, padding + extra :])
                index = kept_indices(setting, *own, layer, draw).unsqueeze(-1)
                rows.append([kind.gather(1, index.expand(-1, -1, kind.shape[-1])) for kind in own])
            cache.update(*(torch.stack(kind) for kind in zip(*rows, strict=True)), layer)
        return cache

    return evict


def worst(run: AuditedRun) -> dict[str, float]:
    """Return the largest distances of a run's entries and decoding in noise floors."""
    assert run.entries is not None and run.steps, run.failed or run.refused
    entries = run.entries
    return {
        "keys": float(entries.key_floors.max()),
        "values": float(entries.value_floors.max()),
        "heads": max(step.worst_head for step in run.steps),
        "hidden": max(step.worst_hidden for step in run.steps),
        "logits": max(step.logits for step in run.steps),
    }


def models(setting: Setting, kept: dict[tuple[str, ...], Adapter]) -> Adapter:
    """Return the setting's model; those that were made are `kept`."""
    real = setting.model in REAL_MODELS
    key = (setting.model, setting.dtype, "" if real else str(setting.seed))
    if key not in kept:
        if real:
            kept.clear()
            kept[key] = pk.load_model(setting.model, dtype=setting.dtype)
        else:
            dtype = getattr(torch, setting.dtype)
            kept[key] = tiny_adapter(setting.model, layers=4, d_head=16, positions=1024, seed=setting.seed, dtype=dtype)
    return kept[key]


def prompt_ids(setting: Setting, adapter: Adapter) -> Tensor:
    """Return the setting's prompt: a licence's text from a drawn place for a real model, else random tokens."""
    draw = random.Random(setting.seed)
    if adapter.tokenizer is not None and setting.model in REAL_MODELS:
        text = TEXT.read_text()
        ids = adapter.tokenizer(text[draw.randrange(20_000) :], add_special_tokens=True).input_ids[: setting.tokens]
        return torch.tensor(ids)
    return torch.tensor([draw.randrange(256) for _ in range(setting.tokens)])


@torch.inference_mode()
def measure(setting: Setting, adapter: Adapter) -> dict[str, float]:
    """Return the largest distances of a clean situation, over the rows of its batch."""
    ids = prompt_ids(setting, adapter)
    tokens, _ = reference.decode_greedily(adapter, ids, token_count(STEPS, ["block"]))
    situation = make_situation(setting.situation, ids, tokens, STEPS)
    external = callable_eviction(clean_eviction(setting), "clean")
    prompts, before = reference.prompt_entries(adapter, situation), ModelState.capture(adapter.model)
    runs = run_eviction(adapter, external, situation, prompts, before).results("p")
    each = [worst(run) for run in runs]
    return {name: max(row[name] for row in each) for name in each[0]}


def measure_settings(counts: dict[str, int]) -> None:
    """Write a row per clean situation of the halves that `counts` names; rows that are there are not measured again."""
    made: dict[tuple[str, ...], Adapter] = {}
    for half, count in counts.items():
        path = FOLDER / f"{half}.csv"
        done = len(read_rows(path))
        with path.open("a", newline="") as file:
            table = csv.DictWriter(file, [field.name for field in fields(Setting)] + DISTANCES, lineterminator="\n")
            if not done:
                table.writeheader()
            for setting in itertools.islice(settings(half, count), done, None):
                distances = measure(setting, models(setting, made))
                table.writerow({**asdict(setting), **{name: f"{value:.3g}" for name, value in distances.items()}})
                file.flush()


def measure_faults() -> None:
    """Write a row per planted fault and model: the largest distance in the runs that show it."""
    from tests.audit.test_every_fault_has_its_kind_and_place import FAULTS, MODELS

    with (FOLDER / "faults.csv").open("w", newline="") as file:
        table = csv.writer(file, lineterminator="\n")
        table.writerow(["fault", "kind", "model", "found", "floors"])
        for (fault, (kind, where, layer, head, entry, _)), name in itertools.product(FAULTS.items(), MODELS):
            result = audited(name, getattr(planted, fault))
            place = [(one.kind, one.layer, one.head, one.entry) for one in result.faults[:1]]
            found = "rightly" if place == [(kind, layer, head, entry)] else "otherwise"
            runs = [run for run in result.runs if run.situation in where and run.entries and run.steps]
            floors = max((max(worst(run).values()) for run in runs), default=float("inf"))
            table.writerow([fault, kind, name, found, f"{floors:.3g}"])


def read_rows(path: Path) -> list[dict[str, str]]:
    """Return the rows of a table; none where there is no file."""
    if not path.exists():
        return []
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def distances_of(half: str) -> NDArray[np.float64]:
    """Return the largest distance of each clean situation of a half, in noise floors."""
    return np.array([max(float(row[name]) for name in DISTANCES) for row in read_rows(FOLDER / f"{half}.csv")])


def threshold(chosen: NDArray[np.float64]) -> int:
    """Return the smallest whole number that is at least twice every distance."""
    return math.ceil(2 * float(chosen.max()))


def report() -> None:
    """Print the table of docs/results/audit.md and draw its figure."""
    chosen, judged, faults = distances_of("chosen"), distances_of("judged"), read_rows(FOLDER / "faults.csv")
    limit, by_rule = FLOORS, threshold(chosen)
    lines = [
        "| | clean situations | largest distance | median | above the threshold | 95 % interval |",
        "|---" * 6 + "|",
    ]
    for half, distances in (("chosen", chosen), ("judged", judged)):
        count = int((distances > limit).sum())
        interval = binomtest(count, len(distances)).proportion_ci(method="exact")
        lines.append(
            f"| {half} | {len(distances):,} | {distances.max():.3g} | {np.median(distances):.3g} | {count} | "
            f"{100 * interval.low:.2f} to {100 * interval.high:.2f} % |"
        )
    floors = np.array([float(row["floors"]) for row in faults if row["kind"] not in COUNTED])
    rightly = sum(row["found"] == "rightly" for row in faults)
    lines.append(
        f"\nthreshold {limit}, by these rows {by_rule}; {rightly} of {len(faults)} faults named rightly; least "
        f"{np.sort(floors)[:5]}"
    )
    sys.stdout.write("\n".join(lines) + "\n")
    figure, axes = plt.subplots(figsize=(5.5, 3), layout="constrained")
    grid = np.geomspace(0.3, 1e7, 600)
    for label, distances, style in (
        (f"false alarms of {len(chosen)} clean situations, chosen", chosen, "--"),
        (f"false alarms of {len(judged):,} clean situations, judged", judged, "-"),
    ):
        axes.step(grid, [100 * np.mean(distances > at) for at in grid], style, color="C0", label=label)
    missed = [100 * np.mean(floors <= at) for at in grid]
    axes.step(grid, missed, color="C1", label=f"planted faults whose distance is no more, of {len(floors)}")
    axes.axvline(limit, color="0.3", linewidth=0.8, linestyle=":")
    axes.annotate(f"{limit} floors", (limit, 30), xytext=(4, 0), textcoords="offset points")
    axes.set(xscale="log", xlabel="threshold, noise floors", ylabel="%")
    axes.legend(fontsize=7, loc="upper center")
    figure.savefig(FOLDER.parent / "figures" / "audit-threshold.png", dpi=160)


if __name__ == "__main__":
    torch.set_num_threads(1)
    match sys.argv[1:]:
        case ["faults"]:
            measure_faults()
        case ["report"]:
            report()
        case halves:
            measure_settings({half: COUNTS[half] for half in halves or COUNTS})
