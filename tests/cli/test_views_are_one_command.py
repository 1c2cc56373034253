"""Views of one command: each takes its own options, and what it does is summed up under its own name."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.support.asked import instead

Run = Callable[..., Any]


@pytest.mark.slow
def test_each_view_keeps_its_own_options_under_its_own_name(perturbkv: Run, tiny: list[object]) -> None:
    ran = perturbkv("ablation", "--restrictions", *instead(tiny, "--budget", 0.5), "-o", "out", "--format", "png")
    assert ran.code == 0, ran.err
    found = json.loads(Path("out/summary.json").read_text())["analyses"]
    assert {name: set(one["asked"]) for name, one in found.items()} == {"ablation-restrictions": {"step"}}
    assert Path("out/ablation-restrictions.png").exists()


@pytest.mark.slow
def test_tokens_measures_its_trace_where_none_is_given(perturbkv: Run, tiny: list[object]) -> None:
    ran = perturbkv("tokens", *tiny, "-o", "out", "--layer", 1, "--head", 2, "--json")
    assert ran.code == 0, ran.err
    again = perturbkv("tokens", "out/trace.h5", "--layer", 1, "--head", 2, "--json")
    assert ran.json()["figures"], "the command that measures writes files, the look at its trace does not"
    assert again.json().items() <= ran.json().items()
    left = {"summary.json", "tokens.png", "tokens.svg", "trace.h5"}
    assert {path.name for path in Path("out").iterdir()} == left
