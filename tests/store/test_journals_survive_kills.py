"""A journal, and a file of a line per sample, hold what was finished, whatever ended the run."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from perturbkv.errors import ConfigError, OutputError, TraceError
from perturbkv.storage.json_lines import open_sample_lines
from perturbkv.storage.run.journal import Entry, Journal, journal_path, write_entry
from tests.support.growing import CONFIGS, NEW, OLD, assert_same_file, fill, measured, opened
from tests.support.traces import run_config, sample_trace


@pytest.fixture
def at_once(tmp_path: Path) -> Path:
    return fill(opened(tmp_path / "at-once.h5", CONFIGS))


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


def test_an_entry_that_does_not_hold_what_it_should_is_measured_again(tmp_path: Path, at_once: Path) -> None:
    path = tmp_path / "t.h5"
    opened(path, OLD).append(measured("s2", OLD))
    labels = tuple(config.label() for config in OLD)
    for sample, told, lacking in (("s1", labels, "none"), ("s0", labels, "theta"), ("s0", ("a", "b"), "none")):
        configs = CONFIGS if sample == "s1" else OLD  # six configurations under the names of two
        arrays = {key: array for key, array in measured(sample, configs).arrays.items() if key != lacking}
        write_entry(Entry(journal_path(path), f"{sample}-{told[0]}-{lacking}.npz", sample, told), arrays)
    writer = opened(path, CONFIGS)
    assert writer.missing() == {"s0": CONFIGS, "s1": CONFIGS, "s2": NEW}
    writer.append(measured("s2", NEW), NEW)
    again = opened(path, CONFIGS)
    assert again.missing() == {"s0": CONFIGS, "s1": CONFIGS}
    for name, part in (("s0", OLD), ("s0", NEW), ("s1", CONFIGS)):
        again.append(measured(name, part), part)
    assert_same_file(again.finish(), at_once)


def test_an_entry_that_does_not_say_what_it_holds_is_measured_again(tmp_path: Path) -> None:
    path = tmp_path / "t.h5"
    opened(path, OLD).append(measured("s2", OLD))
    head = np.frombuffer(json.dumps({"id": "s0", "reason": None}).encode(), dtype=np.uint8)
    numbers = {name: array for name, array in measured("s0", OLD).arrays.items() if array.dtype.kind != "O"}
    np.savez(journal_path(path) / "s0.npz", head=head, **numbers)
    assert set(opened(path, OLD).missing()) == {"s0", "s1"}


def test_what_a_killed_run_left_half_written_is_cleared(tmp_path: Path) -> None:
    path = tmp_path / "t.h5"
    opened(path, OLD).append(measured("s0", OLD))
    (journal_path(path) / "a.npz.tmp-1").touch()
    opened(path, OLD).append(measured("s1", OLD))
    assert [file.suffix for file in sorted(journal_path(path).iterdir())] == [".npz", ".npz", ".json"]


@pytest.mark.slow
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


@pytest.mark.slow
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


def test_a_journal_file_that_names_a_configuration_twice_is_damaged(tmp_path: Path) -> None:
    journal = Journal(journal_path(tmp_path / "t.h5"))
    journal.begin(run_config())
    journal.append(sample_trace("whole"), run_config().labels())
    journal.append(sample_trace("twice"), run_config().labels()[:1] * 2)
    assert journal.sample_ids() == ["whole"]


QUESTION = {"run": {"model": "m"}, "heads": 2}


def written(path: Path, *names: str) -> None:
    with open_sample_lines(path, QUESTION) as lines:
        for name in names:
            lines.add({"sample": name, "value": 1.5})


def test_what_was_found_is_there_again(tmp_path: Path) -> None:
    path = tmp_path / "found.jsonl"
    written(path, "b", "a")
    with open_sample_lines(path, QUESTION) as lines:
        assert lines.sample_ids == {"a", "b"}
        assert [row["sample"] for row in lines.select(["a", "c", "b"])] == ["a", "b"]
        lines.add({"sample": "c"})
    assert [json.loads(line) for line in path.read_text().splitlines()][0] == QUESTION
    assert len(path.read_text().splitlines()) == 4


def test_a_line_that_a_kill_left_unfinished_is_found_again(tmp_path: Path) -> None:
    path = tmp_path / "found.jsonl"
    written(path, "a")
    path.write_text(path.read_text() + '{"sample": "b", "val')
    with open_sample_lines(path, QUESTION) as lines:
        assert lines.sample_ids == {"a"}
        lines.add({"sample": "b"})
    with open_sample_lines(path, QUESTION) as lines:
        assert lines.sample_ids == {"a", "b"}


@pytest.mark.parametrize("held", ['{"run": {}}\n', "", '{"sample": "a"}\n'])
def test_a_file_of_another_question_is_refused_and_stays(tmp_path: Path, held: str) -> None:
    path = tmp_path / "found.jsonl"
    path.write_text(held)
    with pytest.raises(ConfigError, match="of another question"), open_sample_lines(path, QUESTION):
        pass
    assert path.read_text() == held
    with open_sample_lines(path, QUESTION, overwrite=True) as lines:
        assert lines.rows == []


def test_a_broken_line_in_the_middle_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "found.jsonl"
    written(path, "a")
    path.write_text(path.read_text() + 'oops\n{"sample": "b"}\n')
    with pytest.raises(ConfigError, match="a line 3 that is no JSON object"), open_sample_lines(path, QUESTION):
        pass


def test_a_line_that_is_no_samples_is_quoted_by_its_first_forty_characters(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    row = {"row": "x" * 60}
    path.write_text(f"{json.dumps(QUESTION)}\n{json.dumps(row)}\n")
    refused = f"a line that is no sample's, {str(row)[:40]}"
    with pytest.raises(ConfigError) as told, open_sample_lines(path, QUESTION):
        pass
    assert str(told.value).endswith(refused) or f"{refused};" in str(told.value)
    assert str(row)[:41] not in str(told.value)


def test_two_processes_do_not_write_one_file(tmp_path: Path) -> None:
    path = tmp_path / "found.jsonl"
    with open_sample_lines(path, QUESTION), pytest.raises(OutputError), open_sample_lines(path, QUESTION):
        pass


def test_without_a_path_nothing_is_written(tmp_path: Path) -> None:
    with open_sample_lines(None, QUESTION) as lines:
        lines.add({"sample": "a"})
    assert lines.sample_ids == {"a"} and not list(tmp_path.iterdir())
