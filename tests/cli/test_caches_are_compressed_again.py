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
    assert read_run(Path("out/trace.h5")).isolated_every == 16
    shown = perturbkv("heads", "out/trace.h5")
    told = " ".join(shown.out.split())
    assert "Isolated numbers are measured at compressions, every 16 steps and at the last: 5 of 12 steps." in told
    refused(
        perturbkv("heads", "out/trace.h5", "--step", 1, "-o", "first"), "a step at which isolated numbers are measured"
    )
    assert "Cache shares are those at the start; caches are compressed again every 3" in " ".join(shown.out.split())
    other = perturbkv("horizon", *asked[:-6], "--compress-every", 4, "--format", "png", "-o", "out")
    refused(other, "compress_every", "--overwrite")
    found = pk.horizon(pk.read_trace("out/trace.h5"))
    assert all(one.compressions.times > 0 for one in found.configs)


def test_isolated_steps_are_chosen_where_caches_are_compressed_again(perturbkv: Run, tiny: list[object]) -> None:
    refused(perturbkv("trace", *tiny, "--isolated-every", 4, "-o", "out"), "--compress-every or --compress-over")
    ran = perturbkv("trace", *tiny, "--steps", 6, "--compress-every", 4, "--isolated-every", 1, "-o", "out")
    assert ran.code == 0, ran.err
    assert "Isolated numbers" not in perturbkv("heads", "out/trace.h5").out


@pytest.mark.parametrize("option", ["--compress-every", "--compress-over", "--isolated-every"])
def test_less_than_one_is_one_line(perturbkv: Run, tiny: list[object], option: str) -> None:
    refused(perturbkv("trace", *tiny, option, 0, "-o", "out"), f"{option} must be at least 1, got 0")
