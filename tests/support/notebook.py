"""What the tests of the Python surface measure."""

from __future__ import annotations

import perturbkv as pk
from perturbkv.models.adapter import Adapter

CONFIGS = pk.grid(24, selection=("attention", "two-stage"), window=8)


def prompt(model: Adapter) -> pk.Prompt:
    return pk.Prompt.from_text("The quick brown fox jumps over the lazy dog. " * 3, model)
