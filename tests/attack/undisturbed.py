"""A tiny run where nothing disturbs it: its file, how long each way of it takes, and how often it changes the disk."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from pathlib import Path

from tests.attack.accidents import counting_changes
from tests.attack.counted import IDS, LENGTHS, Counted
from tests.attack.life import HERE, SHARDS, Life, ended
from tests.attack.ray_nodes import nodes
from tests.attack.running import Running
from tests.support.folders import model_folder

_TEXT = "The quick brown fox jumps over the lazy dog. " * 6


@contextmanager
def life(folder: Path, on_ray: bool = False) -> Iterator[Life]:
    """A tiny model, its prompts and the score in a folder; the run's file as nothing disturbs it; a cluster on wish."""
    place = folder / "life"
    model_folder(place / "model", positions=512)
    texts = {name: f"{name} {_TEXT}"[: length - 1] + "." for name, length in zip(IDS, LENGTHS, strict=True)}
    rows = [{"id": name, "prompt": text} for name, text in texts.items()]
    (place / "prompts.jsonl").write_text("\n".join(map(json.dumps, rows)))
    made = Life(place, folder / "expected.h5", Counted(place, folder / "notes"))
    for way in (HERE, SHARDS):
        made.clear()
        _undisturbed(made, way.name, lambda counting, way=way: made.begin(way, before=counting))
        made.trace.replace(made.expected)
    made.all_shards()
    _undisturbed(made, "merge", lambda counting: [made.merge(counting)])
    with nodes() if on_ray else nullcontext() as made.ray:
        yield made


def _undisturbed(made: Life, name: str, begin: Callable[[Callable[[], None]], list[Running]]) -> None:
    """Run commands and count the changes on disk of the one that ends last."""
    told = made.folder / "changes"
    began = time.monotonic()
    if flaw := made.flaw_of_ended(ended(begin(partial(counting_changes, made.shared, told))), (0,)):
        raise RuntimeError(flaw)
    made.seconds[name] = time.monotonic() - began
    made.changes[name] = int(told.read_text())
