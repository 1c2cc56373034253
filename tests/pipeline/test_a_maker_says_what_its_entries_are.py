"""The contract of makers: its example runs, and a maker that nobody knows is measured by what it returns."""

from __future__ import annotations

import doctest
from typing import Any

import numpy as np
import pytest
import torch

from perturbkv.cache import makers
from perturbkv.cache.entries import GatheredSet, KeptEntries
from perturbkv.cache.makers import Entries, Maker, PrefilledLayer, StoredEntries, entry_bits
from perturbkv.configs.cache_contents import EVICTED
from perturbkv.configs.run import RunConfig
from perturbkv.datasets.encode import Prompt
from perturbkv.pipeline.variants import readers
from perturbkv.selection.grid import configuration
from tests.support.models import exact_adapter, token_ids
from tests.support.resolved import answer, trace_sample

PROMPT = Prompt("s", token_ids(40, seed=4), 0)
CONFIG = configuration(16, policy="adakv(kernel=3)", window=5, granularity="kv")
COVERING = configuration(1.0, policy="adakv(kernel=3)", window=5, granularity="kv")
OWN = {"perturbation_eviction", "perturbation_change"}


class Halved(Maker):
    """The kept entries with half their values, which take no memory."""

    has_own_tensors = True
    factor = 0.5

    def make(self, layer: PrefilledLayer, kept: GatheredSet) -> Entries:
        sets = kept.entries.sets()
        row = KeptEntries.of([keys for keys, _ in sets], [values * self.factor for _, values in sets])
        return StoredEntries(row, 0, has_rounded_numbers=True, kept=kept.entries)


class Quartered(Halved):
    factor = 0.25


def measured(monkeypatch: pytest.MonkeyPatch, maker: type[Maker] | None = None) -> dict[str, Any]:
    if maker is not None:
        monkeypatch.setitem(readers._MAKERS, EVICTED, lambda config: maker())  # type: ignore[index]
    run = RunConfig("m", "d", (CONFIG, COVERING), generate=3)
    return dict(trace_sample(exact_adapter("llama", 4, 2), PROMPT, run).arrays)


def test_the_example_of_the_contract_runs() -> None:
    ran = doctest.testmod(makers)
    assert ran.attempted > 4 and not ran.failed


def test_what_a_maker_keeps_unchanged_is_a_kept_set(monkeypatch: pytest.MonkeyPatch) -> None:
    plain, again = measured(monkeypatch), measured(monkeypatch, Maker)
    assert plain.keys() == again.keys() and plain.keys().isdisjoint(OWN)
    assert all(np.array_equal(plain[name], again[name], equal_nan=plain[name].dtype.kind == "f") for name in plain)


def test_entries_of_its_own_are_measured_as_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    """Values halved halve a kept set's output; its kept set, S and θ stay, its bytes are what it says."""
    plain, halved = measured(monkeypatch), measured(monkeypatch, Halved)
    for name in ("kept_code", "kept_count", "retained_mass", "theta", "held_share"):
        assert np.array_equal(plain[name], halved[name])
    assert np.array_equal(halved["perturbation_eviction"], plain["perturbation_isolated"])
    assert halved["held_bytes"].tolist() == [0, 0] and plain["held_bytes"][1] == plain["full_bytes"]
    assert not np.isclose(halved["perturbation_propagated"], plain["perturbation_propagated"], rtol=1e-3).any()
    assert (halved["perturbation_change"] > 0).all()


def test_isolated_perturbation_is_that_of_the_outputs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where nothing is evicted, what is lost is a share of the prompt's part of the output: a half, three quarters."""
    halved, quartered = measured(monkeypatch, Halved), measured(monkeypatch, Quartered)
    for name in ("perturbation_isolated", "perturbation_isolated_l2"):
        np.testing.assert_allclose(halved[name][1] / quartered[name][1], 0.5 / 0.75, rtol=1e-10)
    assert np.array_equal(halved["perturbation_change"][1], halved["perturbation_isolated"][1])


def test_answers_come_from_what_a_maker_returns(monkeypatch: pytest.MonkeyPatch) -> None:
    adapter, context = exact_adapter("llama", 4, 2), Prompt("s", token_ids(40, seed=4), 0)
    plain = answer(adapter, context, (CONFIG, COVERING), 5)
    monkeypatch.setitem(readers._MAKERS, EVICTED, lambda config: Halved())  # type: ignore[index]
    halved = answer(adapter, context, (CONFIG, COVERING), 5)
    assert halved.held == plain.held and halved.full == plain.full
    assert halved.evicted[1] != plain.evicted[1]


def test_a_row_counts_sixteen_bits_a_number() -> None:
    keys = torch.zeros(3, 8)
    assert entry_bits(KeptEntries.of([keys, keys[:1]], [keys, keys[:1]])) == 4 * 2 * 8 * 16
