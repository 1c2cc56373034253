"""The command, a tiny model's folder and prompts: those of the command line's own tests."""

from __future__ import annotations

from tests.cli.conftest import data, model, perturbkv, tiny

__all__ = ["data", "model", "perturbkv", "tiny"]
