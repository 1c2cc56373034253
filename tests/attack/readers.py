"""Every file that a command reads: what would be right in it, and the command line that reads it."""

from __future__ import annotations

import io
import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from perturbkv.trace import Trace
from tests.attack.odd_files import RIGHT, Make
from tests.attack.odd_rows import LONG
from tests.support.folders import model_folder
from tests.support.traces import run_config, sample_trace

LAYERS, HEADS, KV_HEADS = 2, 4, 2


@dataclass(frozen=True)
class Shop:
    """What all cases share: a tiny model, prompts, a trace, and the options of a run that takes a moment."""

    model: Path
    prompts: Path
    trace: Path

    @property
    def small(self) -> tuple[str, ...]:
        return "--model", str(self.model), "--budget", "24", "--window", "8"

    @property
    def run(self) -> tuple[str, ...]:
        return (*self.small, "--dataset", str(self.prompts), "--samples", "1")


def open_shop(workshop: Path) -> Shop:
    """Everything that cases share, in folders of its own under the workshop."""
    model = model_folder(workshop / "model", positions=512)
    prompts, trace = workshop / "prompts.jsonl", workshop / "trace.h5"
    prompts.write_text(json.dumps({"id": "p", "prompt": LONG}) + "\n")
    Trace.of(run_config(2), [sample_trace(name, seed=seed) for seed, name in enumerate("ab")], {}).save(trace)
    return Shop(model, prompts, trace)


@dataclass(frozen=True)
class Reader:
    """One kind of file.

    `argv` is the command line, given the shop and the file's name; `takes` names kinds of wrong files that are none
    here, `forms` the kinds of right ones that are read: none of a binary file whose line ends are others.
    """

    name: str
    right: bytes
    argv: Callable[[Shop, str], tuple[str, ...]]
    takes: tuple[str, ...] = ()
    forms: tuple[str, ...] = tuple(RIGHT)

    def prepare(self, shop: Shop, folder: Path, put: Make) -> tuple[str, ...]:
        """Put the file there and give the command line."""
        (folder / self.name).parent.mkdir(exist_ok=True)
        put(folder / self.name, self.right)
        return self.argv(shop, self.name)


def _rows(shop: Shop, name: str) -> tuple[str, ...]:
    return "list", "datasets", name, "--show", "--model", str(shop.model)


def _longbench(shop: Shop, name: str) -> tuple[str, ...]:
    return "list", "datasets", "trec", "--show", "--data-dir", ".", "--model", str(shop.model)


def _head_scores(shop: Shop, name: str) -> tuple[str, ...]:
    return "trace", "--policy", "headkv", "--head-scores", name, "--dry-run", *shop.run


def _positions(shop: Shop, name: str) -> tuple[str, ...]:
    asked = ("--dataset", str(shop.prompts), "--samples", "1", "--no-loss", "--format", "svg", "-o", "out")
    return "audit", name, "--model", str(shop.model), *asked


def _sweep(shop: Shop, name: str) -> tuple[str, ...]:
    return "trace", "--config", name, "--dry-run", "--model", str(shop.model), *shop.run[-4:]


def _bench(shop: Shop, name: str) -> tuple[str, ...]:
    good = Path(__file__).resolve().parents[2] / "docs" / "bench" / "cpu.json"
    return "doctor", "bench", "compare", name, str(good), "--json"


def _policy(shop: Shop, name: str) -> tuple[str, ...]:
    return "trace", "--policy", f"{name}:Peak", "--dry-run", *shop.run


def _eviction(shop: Shop, name: str) -> tuple[str, ...]:
    return *_positions(shop, f"{name}:evict"), "--situation", "single", "--steps", "1"


def _generation(shop: Shop, name: str) -> tuple[str, ...]:
    return "generate", "--max-new-tokens", "2", "-o", "out", *shop.run


def _summary(shop: Shop, name: str) -> tuple[str, ...]:
    return "heads", str(shop.trace), "--format", "svg", "-o", "out"


def _trace(shop: Shop, name: str) -> tuple[str, ...]:
    return "list", name


def npz(**arrays: object) -> bytes:
    """An .npz file's bytes."""
    held = io.BytesIO()
    np.savez(held, **arrays)  # type: ignore[arg-type]
    return held.getvalue()


KEPT = [[[0, 1, 5, 9], [0, 2, 5, 9]], [[0, 1, 5, 9], [3, 4, 5, 9]]]
SCORES = {f"{layer}-{head}": 1.5 for layer in range(LAYERS) for head in range(HEADS)}
PLUGIN = b'''from dataclasses import dataclass

import perturbkv as pk


@dataclass(frozen=True)
class Peak(pk.Score):
    """The largest attention that any query of the window gives an entry."""

    needs = ("attention",)

    def score(self, layer):
        return layer.attention[..., : layer.prefix].amax(dim=1)
'''
EVICTION = b"""from transformers import DynamicCache


def evict(model, input_ids, attention_mask):
    cache = DynamicCache()
    places = (attention_mask.cumsum(-1) - 1).clamp(min=0)
    model(input_ids=input_ids, attention_mask=attention_mask, position_ids=places, past_key_values=cache)
    return cache
"""
_ROW = json.dumps({"id": "a", "prompt": LONG}).encode() + b"\n"
_TREC = json.dumps({"context": LONG, "input": "Q", "answers": ["a"], "all_classes": ["a", "b"]}).encode() + b"\n"
_ALL_ARRAYS = {f"layer_{layer}_head_{head}": KEPT[layer][head] for layer in range(2) for head in range(2)}
_REPLACED = ("nothing", "a link to nothing", "a loop of links")
"""Where a file of ours is looked for beside what is to be written: there is none."""
READERS: dict[str, Reader] = {
    "dataset": Reader("odd.jsonl", _ROW, _rows),
    "LongBench": Reader("trec.jsonl", _TREC, _longbench),
    "head scores": Reader("odd.json", json.dumps(SCORES, indent=1).encode() + b"\n", _head_scores),
    "positions in JSON": Reader("odd.json", json.dumps({"kept": KEPT}, indent=1).encode() + b"\n", _positions),
    "positions in npz": Reader("odd.npz", npz(**_ALL_ARRAYS), _positions, forms=("as it should be",)),
    "sweep": Reader("odd.yaml", b"budget: [24, 40]\nwindow: 8\npolicy: [snapkv, 'adakv(floor=0.1)']\n", _sweep),
    "benchmark": Reader(
        "odd.json", (Path(__file__).resolve().parents[2] / "docs" / "bench" / "cpu.json").read_bytes(), _bench
    ),
    "policy": Reader("odd.py", PLUGIN, _policy),
    "eviction": Reader("odd.py", EVICTION, _eviction),
    "answers before": Reader("out/generation.jsonl", b"{}\n", _generation, takes=(*_REPLACED, "empty"), forms=()),
    "summary before": Reader("out/summary.json", b"{}\n", _summary, takes=_REPLACED, forms=()),
    "trace": Reader("odd.h5", b"", _trace, forms=()),
}


def named(reader: Reader) -> tuple[str, ...]:
    """What an error about the file has to name."""
    return (Path(reader.name).name,)
