"""The command line in this process, on a tiny model, as the tests of the command line have it."""

from __future__ import annotations

from tests.cli.conftest import data, model, perturbkv, tiny

__all__ = ["data", "model", "perturbkv", "tiny"]
