"""What an audit says of evictions that are right, only lossy, wrong in one planted way each, or unreadable."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np

import perturbkv as pk
from tests.audit import planted
from tests.pins.running import below, leaves, left, prompts, run, tiny_model

NAMES = (
    "right", "off_by_one", "rotated_again", "swapped_values", "values_of_others", "with_padding", "quantised",
    "repeated", "moved", "twice", "without_sinks", "without_window", "shuffled", "read_in_parts", "Streaming",
    "nothing", "breaks", "alone_only",
)  # fmt: skip
"""Of the evictions that the tests plant: right ones, ten faults, what is only lossy, and what cannot be read."""


def record(folder: Path) -> dict[str, Any]:
    """Audit each by the command, some with losses, and positions that another program kept."""
    shutil.copy(planted.__file__, folder / "planted.py")
    model = tiny_model(folder / "model")
    data = prompts(folder / "prompts.jsonl", 2, sentences=1)
    asked: list[Any] = ["--model", model, "--dataset", data, "--steps", 3, "--format", "svg", "--json"]
    found: dict[str, Any] = {}

    def audit(name: str, eviction: Any, *more: Any) -> None:
        ran = run("audit", eviction, *asked, *more, "-o", folder / name)
        found[f"{name}/code"] = ran.code
        found.update(leaves(ran.document(), name, folder))
        found.update(below(f"{name}/figure", ran.figures))
        if (folder / name).exists():
            found.update(below(f"{name}/files", left(folder, folder / name, (".svg",))))

    for name in NAMES:
        audit(name, f"{folder / 'planted.py'}:{name}", "--no-loss")
    for name in ("right", "swapped_values", "Streaming"):
        audit(f"{name} with losses", f"{folder / 'planted.py'}:{name}", "--samples", 2)
    audit("option", f"{folder / 'planted.py'}:swapped_values(layer=0)", "--no-loss", "--situation", "single")
    loaded = pk.load_model(str(model))
    prompt = next(iter(pk.load_prompts(str(data), loaded, samples=1)))
    kept = [[planted.positions(len(prompt.token_ids), head).tolist() for head in range(2)] for _ in range(3)]
    positions = folder / "kept.json"
    positions.write_text(json.dumps({"token_ids": list(map(int, prompt.token_ids)), "kept": kept}))
    audit("positions", positions, "--no-loss")
    arrays = {f"layer_{layer}_head_{head}": one for layer, sets in enumerate(kept) for head, one in enumerate(sets)}
    np.savez(folder / "kept.npz", token_ids=prompt.token_ids, **arrays)
    audit("positions of numpy", folder / "kept.npz")
    result = pk.audit(loaded, prompt, folder / "kept.npz", steps=2, losses=False, progress=False)
    found["from a script"] = [result.verdict, result.exit_code]
    return found
