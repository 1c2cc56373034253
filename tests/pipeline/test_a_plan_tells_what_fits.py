"""What a run will take is told before it runs; what is advised makes it fit by the same formula."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

import perturbkv as pk
from perturbkv.api.inputs import make_plan
from perturbkv.configs.resources import Resources, parse_size
from perturbkv.configs.run import Settings
from perturbkv.pipeline.run import footprint
from perturbkv.pipeline.run.plan import Plan
from perturbkv.selection.grid import grid
from perturbkv.storage.run.journal import Journal
from tests.support.models import tiny_adapter, token_ids

CONFIGS = grid((10, 0.5), window=4, policy=["snapkv", "adakv"], selection=["attention", "two-stage"])
PROMPTS = [pk.Prompt(f"p{seed}", token_ids(300 + 40 * seed, seed=seed), 0) for seed in range(4)]


@pytest.fixture(scope="module")
def whole() -> Plan:
    settings = Settings(save=("outputs",))
    return make_plan(tiny_adapter(layers=4), PROMPTS, CONFIGS, settings, Resources(2**20, 2**30), resumable=True)


@pytest.mark.slow
def test_a_trace_and_its_journal_are_as_large_as_was_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, whole: Plan
) -> None:
    """Within a fifth: of random weights with outputs saved, which deflate as those of trained ones."""
    journals: list[int] = []
    discard = Journal.discard

    def watched(journal: Journal) -> None:
        journals.append(sum(file.stat().st_size for file in journal.folder.glob("*.npz")))
        discard(journal)

    monkeypatch.setattr(Journal, "discard", watched)
    path = tmp_path / "t.h5"
    pk.measure(
        tiny_adapter(layers=4), PROMPTS, CONFIGS, path=path, settings=pk.Settings(save=("outputs",)), progress=False
    )
    told = footprint.footprint(whole)
    assert told.trace == pytest.approx(path.stat().st_size, rel=0.2)
    assert sum(told.journal) == pytest.approx(journals[-1], rel=0.2)


@pytest.mark.parametrize("share", [0.6, 0.8, 0.95])
def test_what_is_advised_for_the_disk_makes_it_fit(whole: Plan, share: float) -> None:
    found = footprint.footprint(whole)
    free = int(found.disk * share)
    said = footprint.suggest_options(whole, free, found.memory.total)
    others = {
        "--no-kept": replace(whole, kept=False),
        "--no-text": replace(whole, text=False),
        "no --save outputs": replace(whole, run=replace(whole.run, save=())),
    }
    for name, other in others.items():
        assert (name in said) == (footprint.footprint(other).disk <= free)
    (samples,) = [int(one.split()[1].rstrip(",")) for one in said if one.startswith("--samples")]
    for count, fits in ((samples, True), (samples + 1, False)):
        part = replace(whole, prompts=whole.prompts[:count])
        assert (footprint.footprint(part).disk <= free) == fits
    assert footprint.suggest_options(whole, found.disk, found.memory.total) == []


def test_what_is_advised_for_memory_makes_it_fit() -> None:
    whole = make_plan(
        tiny_adapter(layers=4), PROMPTS, CONFIGS, Settings(steps=2), Resources(2**20, 2**30), resumable=True
    )
    needed = footprint.estimate_memory(whole).total
    assert len(whole.batches.indices) == 1, "all at once, unless a bound is given"
    (size, dtype) = footprint.suggest_options(whole, 2**60, needed - 1)
    assert dtype == "--dtype bfloat16"
    bound = parse_size("--max-memory", size.split()[1])
    less = make_plan(
        tiny_adapter(layers=4), PROMPTS, CONFIGS, Settings(steps=2), Resources(2**20, bound), resumable=True
    )  # fmt: skip
    assert footprint.estimate_memory(less).total < needed
    assert footprint.suggest_options(whole, 2**60, 0) == [], "nothing makes it fit into nothing"
