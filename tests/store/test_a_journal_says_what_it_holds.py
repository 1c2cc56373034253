from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from perturbkv.configs.eviction import EvictionConfig
from perturbkv.errors import TraceError
from perturbkv.storage.journal import Journal, journal_path
from perturbkv.storage.trace_file import read_trace
from perturbkv.storage.writer import TraceWriter
from perturbkv.trace import SampleTrace
from tests.support.growing import CONFIGS, NEW, OLD, assert_same_file, fill, measured, opened
from tests.support.traces import run_config, sample_trace


@pytest.fixture
def at_once(tmp_path: Path) -> Path:
    return fill(opened(tmp_path / "at-once.h5", CONFIGS))


def former_entry(folder: Path, sample: SampleTrace) -> None:
    """A journal's file as it was before files said which configurations they hold."""
    head = np.frombuffer(json.dumps({"id": sample.sample_id, "reason": None}).encode(), dtype=np.uint8)
    name = hashlib.sha256(sample.sample_id.encode()).hexdigest()[:24]
    np.savez(folder / f"{name}.npz", head=head, **{name: _plain(array) for name, array in sample.arrays.items()})


def _plain(array: Any) -> Any:
    """Texts without objects, which are no plain numbers."""
    return array.astype(str) if array.dtype.kind == "O" else array


def former_journal(path: Path, configs: tuple[EvictionConfig, ...], *names: str) -> None:
    folder = journal_path(path)
    folder.mkdir()
    (folder / "run.json").write_text(run_config(3, configs=configs).to_json())
    for name in names:
        former_entry(folder, measured(name, configs))


def test_fewer_configurations_than_the_journal_holds_are_refused(tmp_path: Path, at_once: Path) -> None:
    path = tmp_path / "t.h5"
    opened(path, CONFIGS).append(measured("s0", NEW), NEW)
    with pytest.raises(TraceError, match="differs in configs"):
        opened(path, OLD)
    writer = opened(path, CONFIGS)
    assert writer.missing()["s0"] == OLD
    assert_same_file(fill(writer), at_once)


def test_opening_a_journal_for_more_configurations_changes_nothing_yet(tmp_path: Path) -> None:
    path = tmp_path / "t.h5"
    opened(path, OLD).append(measured("s0", OLD))
    opened(path, CONFIGS)
    assert opened(path, OLD).done() == {"s0"}


@pytest.mark.parametrize("asked", [CONFIGS, CONFIGS[::-1], OLD[::-1]], ids=["more", "more backwards", "backwards"])
def test_a_former_versions_journal_holds_the_configurations_of_its_run(
    tmp_path: Path, asked: tuple[EvictionConfig, ...]
) -> None:
    path = tmp_path / "t.h5"
    former_journal(path, OLD, "s0", "s2")
    first = opened(path, asked)
    assert first.missing().get("s0", ()) == tuple(config for config in asked if config not in OLD)
    first.append(measured("s1", asked))
    again = opened(path, asked)
    assert again.missing().get("s0", ()) == tuple(config for config in asked if config not in OLD)
    assert_same_file(fill(again), fill(opened(tmp_path / "at-once.h5", asked)))


def test_a_former_versions_damaged_entry_is_measured_again(tmp_path: Path, at_once: Path) -> None:
    path = tmp_path / "t.h5"
    former_journal(path, OLD, "s0", "s1", "s2")
    for damaged, name in zip(("cut", "spoilt"), ("s0", "s1"), strict=True):
        (entry,) = (entry.path for entry in Journal(journal_path(path)).entries() if entry.sample_id == name)
        content = bytearray(entry.read_bytes())
        place = content.index(b"theta.npy") + 200
        content[place] ^= 255
        entry.write_bytes(content if damaged == "spoilt" else content[:2000])
    writer = opened(path, CONFIGS)
    assert writer.missing() == {"s0": CONFIGS, "s1": NEW, "s2": NEW}  # spoilt numbers are not read yet
    with pytest.raises(TraceError, match="file of the sample 's1' .* run the same command again"):
        fill(writer)
    again = opened(path, CONFIGS)
    assert again.missing() == {"s1": CONFIGS, "s2": NEW}
    assert_same_file(fill(again), at_once)


def test_an_entry_that_does_not_hold_what_it_should_is_measured_again(tmp_path: Path, at_once: Path) -> None:
    path = tmp_path / "t.h5"
    former_journal(path, OLD, "s2")
    former_entry(journal_path(path), measured("s1", CONFIGS))  # six configurations in a run of two
    labels = [config.label() for config in OLD]
    for name, told, lacking in (("lacking", labels, "theta"), ("strange", ["a", "b"], "none")):
        head = np.frombuffer(json.dumps({"id": "s0", "reason": None, "configs": told}).encode(), dtype=np.uint8)
        arrays = {key: array for key, array in measured("s0", OLD).arrays.items() if key != lacking}
        np.savez(journal_path(path) / f"{name}.npz", head=head, **arrays)
    writer = opened(path, CONFIGS)
    assert writer.missing() == {"s0": CONFIGS, "s1": CONFIGS, "s2": NEW}
    writer.append(measured("s2", NEW), NEW)
    again = opened(path, CONFIGS)
    assert again.missing() == {"s0": CONFIGS, "s1": CONFIGS}
    for name, part in (("s0", OLD), ("s0", NEW), ("s1", CONFIGS)):
        again.append(measured(name, part), part)
    assert_same_file(again.finish(), at_once)


def test_what_a_killed_run_left_half_written_is_cleared(tmp_path: Path) -> None:
    path = tmp_path / "t.h5"
    opened(path, OLD).append(measured("s0", OLD))
    for name in ("a.npz.tmp-1", "b.npz.tmp"):  # the latter as former versions called it
        (journal_path(path) / name).touch()
    opened(path, OLD).append(measured("s1", OLD))
    assert [file.suffix for file in sorted(journal_path(path).iterdir())] == [".npz", ".npz", ".json"]


def test_an_entry_spoilt_in_its_middle_is_told_and_measured_again(tmp_path: Path, at_once: Path) -> None:
    path = tmp_path / "t.h5"
    writer = opened(path, CONFIGS)
    for name in writer.sample_ids:
        writer.append(measured(name, CONFIGS))
    entry = next(journal_path(path).glob("*.npz"))
    content = bytearray(entry.read_bytes())
    content[content.index(b"data.npy") + 2000] ^= 255
    entry.write_bytes(content)
    with pytest.raises(TraceError, match="got a damaged one, now removed; run the same command again"):
        opened(path, CONFIGS).finish()
    assert not path.exists()
    again = opened(path, CONFIGS)
    assert len(again.missing()) == 1
    assert_same_file(fill(again), at_once)


def test_a_journal_left_behind_by_a_killed_removal_changes_nothing(tmp_path: Path, at_once: Path) -> None:
    path = fill(opened(tmp_path / "t.h5", OLD))
    writer = opened(path, CONFIGS)
    writer.append(measured("s1", NEW), NEW)
    left = {entry: entry.read_bytes() for entry in journal_path(path).iterdir()}
    fill(writer)
    content, written = path.read_bytes(), path.stat().st_mtime_ns
    journal_path(path).mkdir()
    for entry, held in left.items():
        entry.write_bytes(held)
    again = opened(path, CONFIGS)
    assert again.missing() == {}
    again.finish()
    assert (path.read_bytes(), path.stat().st_mtime_ns) == (content, written)
    assert not journal_path(path).exists()


def test_a_journal_that_format_2_began_is_gone_on_with(tmp_path: Path) -> None:
    path = tmp_path / "t.h5"
    run, journal = run_config(2), Journal(journal_path(path))
    journal.begin(run)
    old = [
        {"policy": "snapkv", "selection": name, "budget": 64, "window": 32, "alpha": 0.25, "split": "prefix",
         "pool": "max", "kernel": 7, "granularity": "query"} for name in ("attention", "two-stage")
    ]  # fmt: skip
    (journal.folder / "run.json").write_text(json.dumps({**json.loads(run.to_json()), "configs": old}))
    names = ("attention", "two-stage")
    journal.append(sample_trace("s0"), [f"snapkv:{name} b=64 a=0.25 w=32 max7 query" for name in names])
    writer = TraceWriter(path, run, ["s0", "s1"], {"model": "m"})
    assert set(writer.missing()) == {"s1"}
    writer.append(sample_trace("s1", seed=1))
    again = TraceWriter(path, run, ["s0", "s1"], {"model": "m"})
    assert again.missing() == {}
    np.testing.assert_array_equal(read_trace(again.finish()).arrays["theta"][0], sample_trace("s0").arrays["theta"])
