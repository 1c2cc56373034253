"""Commands whose caches are compressed again while they are decoded from."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import perturbkv as pk
from perturbkv.storage.trace.trace_file import read_run
from tests.support.asked import refused

Run = Callable[..., Any]


def test_horizon_tells_of_compressions_and_a_run_says_when(perturbkv: Run, tiny: list[object]) -> None:
    asked = [*tiny, "--steps", 12, "--compress-every", 3, "--format", "png", "-o", "out"]
    ran = perturbkv("horizon", *asked)
    assert ran.code == 0, ran.err
    assert "caches compressed again every 3 tokens" in ran.out
    assert Path("out/horizon-steps.png").exists()
    assert read_run(Path("out/trace.h5")).compress_every == 3
    shown = perturbkv("heads", "out/trace.h5")
    assert "Cache shares are those at the start; caches are compressed again every 3" in " ".join(shown.out.split())
    other = perturbkv("horizon", *asked[:-6], "--compress-every", 4, "--format", "png", "-o", "out")
    refused(other, "compress_every", "--overwrite")
    found = pk.horizon(pk.read_trace("out/trace.h5"))
    assert all(one.compressions.times > 0 for one in found.configs)


@pytest.mark.parametrize("option", ["--compress-every", "--compress-over"])
def test_less_than_none_is_one_line(perturbkv: Run, tiny: list[object], option: str) -> None:
    refused(perturbkv("trace", *tiny, option, -1, "-o", "out"), f"({option}) must be at least 0, got -1")
