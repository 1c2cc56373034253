"""`studies/compaction_press.py`: its words from planted numbers, the bytes of a press that names none."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import perturbkv as pk
from tests.support.measured import hand_made
from tests.support.scripts import study

SAMPLES = 6
INSIDE = {"choice": "SnapKVPress(window_size=16)", "options": {"window_size": 16, "kernel_size": 5}}
PRESSES: dict[str, dict[str, Any]] = {
    "kvpress:SnapKVPress(window_size=16)": dict(INSIDE["options"]),  # type: ignore[arg-type]
    "kvpress:MergingPress(press=SnapKVPress(window_size=16))": {
        "press": INSIDE, "merge_fraction": 1.0, "similarity_threshold": 0.0,
    },
}  # fmt: skip


def press(name: str, share: float) -> pk.EvictionConfig:
    """A press as a trace has it, without kvpress."""
    return pk.EvictionConfig.from_document({
        "budget": share, "policy": name, "policy_options": PRESSES[name], "selection": "given",
        "selection_options": {}, "window": 0, "granularity": "kv", "granularity_options": {}, "protect_first": 0,
        "protect_recent": 0,
    })  # fmt: skip


def test_words_and_bytes_follow_from_planted_numbers(tmp_path: Path) -> None:
    """Merging loses more than the press inside it at both shares, and less than SnapKV at one."""
    configs = list(pk.grid(["0.05", "0.2"], selection="attention", granularity="kv", window=16))
    configs += [press(name, share) for name in PRESSES for share in (0.05, 0.2)]
    base = np.array([5.0, 2.0, 3.0, 2.0, 4.0, 3.0])
    each = base * np.exp(np.linspace(-0.02, 0.02, SAMPLES)[:, None] * np.arange(6))
    held = np.tile([50.0, 200.0], (SAMPLES, 3))
    arrays = {
        "perturbation_propagated": each[:, :, None, None],
        "perturbation_isolated": each[:, :, None, None],
        "logit_kl": each / 100,
        "held_bytes": np.where(np.arange(6) < 4, held, np.nan),
        "resident_bytes": held,
        "full_bytes": np.full(SAMPLES, 1000.0),
    }
    path = hand_made(configs, arrays).save(tmp_path / "trace.h5")
    said = study("compaction_press", path, "-o", tmp_path / "out")
    rows = [line.split(" | ") for line in said.splitlines() if line.startswith("| MergingPress <")]
    assert [(row[1], row[-1].strip(" |")) for row in rows if row[1] != "isolated"] == [
        ("propagated", "reversed"), ("KL", "reversed"), ("propagated", "depends"), ("KL", "depends"),
    ]  # fmt: skip
    document = json.loads((tmp_path / "out" / "compaction_press.json").read_text())
    merging = [row for row in document["levels"] if row["method"] == "MergingPress"]
    assert [row["bytes"] for row in merging] == [pytest.approx(0.05), pytest.approx(0.2)]
    assert merging[0]["propagated"] == pytest.approx(0.8, rel=0.05)
