"""Shards beside one output: of one run or refused; what they hold counts for every later run."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from perturbkv.configs.run import Shard
from perturbkv.errors import ConfigError, LockedOutputError, OutputError, TraceError, UnknownNameError
from perturbkv.schema import ANSWER_TEXT
from perturbkv.storage.output import Lock
from perturbkv.storage.run.journal import journal_path
from perturbkv.storage.run.shard_merging import ShardWriter, measured_shards, merge, merge_shards, resumable_shards
from perturbkv.storage.run.shards import find_shards
from perturbkv.storage.run.writer import TraceWriter
from perturbkv.storage.trace.trace_file import read_trace
from perturbkv.trace import FailedSample
from tests.support.growing import CONFIGS, measured, opened
from tests.support.sharded import FAILED, SAMPLES, assert_same_trace, content, in_one_process, measure_shard, record
from tests.support.traces import run_config, told


def test_a_shard_takes_every_nth_from_its_own_on() -> None:
    items = [f"i{place}" for place in range(1, 41)]
    assert Shard.parse("3/16").share(items) == ("i3", "i19", "i35")
    shares = [Shard(number, 7).share(items) for number in range(1, 8)]
    assert sorted(one for share in shares for one in share) == sorted(items)
    assert Shard(9, 16).share(items[:4]) == ()
    assert Shard(2, 3, "configs").select(("a", "b"), (1, 2, 3, 4, 5)) == (("a", "b"), (2, 5))


NO_SHARDS = ["", "3", "x/y", "0/4", "5/4", "1/0", "-1/4", "1/4/4", "1/ 4", "½", "1" * 30, "9" * 5000 + "/1"]


@pytest.mark.parametrize("text", NO_SHARDS, ids=lambda text: text[:9])
def test_what_is_no_shard_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="shards are counted from 1"):
        Shard.parse(text)


def test_too_many_shards_and_another_way_to_share_are_refused() -> None:
    with pytest.raises(ConfigError, match="the number of shards must be at most 100,000"):
        Shard.parse("1/100001")
    with pytest.raises(UnknownNameError, match="'layers'; known: "):
        Shard.parse("1/2", "layers")


@pytest.mark.slow
def test_more_shards_than_samples_need_not_all_be_measured(tmp_path: Path) -> None:
    path = tmp_path / "t.h5"
    measure_shard(path, "9/9")
    for number in range(1, len(SAMPLES) + 1):
        measure_shard(path, f"{number}/9")
    merge(path)
    assert_same_trace(path, in_one_process(tmp_path / "one.h5"))


@pytest.mark.slow
@pytest.mark.parametrize("first", [1, 2, 3])
def test_parts_by_configurations_join_in_the_order_of_shards_whichever_was_first(tmp_path: Path, first: int) -> None:
    for turn in range(3):
        measure_shard(tmp_path / "t.h5", f"{(first + turn) % 3 + 1}/3", "configs")
    merge(tmp_path / "t.h5")
    writer = TraceWriter(tmp_path / "one.h5", record("1/1").run, SAMPLES, {"model": "m"}, texts={})
    for name in SAMPLES:
        for place in range(3):
            configs = CONFIGS[place::3]
            if name != FAILED:
                writer.append(measured(name, configs), configs)
    writer.append(FailedSample(FAILED, "it broke"))
    assert content(tmp_path / "t.h5") == content(writer.finish())


def test_a_missing_shard_is_named_with_what_measures_it(tmp_path: Path) -> None:
    path = tmp_path / "t.h5"
    measure_shard(path, "2/3")
    told = "expected all 3 shards of .*, got 1: 1/3, 3/3 are missing; the same command with --shard 1/3 "
    with pytest.raises(TraceError, match=told):
        merge(path)
    with pytest.raises(TraceError, match="is in shards, of which 1 of 3 are done; perturbkv merge .*t.h5 joins"):
        read_trace(path)


@pytest.mark.slow
def test_a_damaged_sample_makes_its_shard_a_missing_one_which_measures_it_again(tmp_path: Path) -> None:
    path = tmp_path / "t.h5"
    for shard in ("1/2", "2/2"):
        measure_shard(path, shard)
    next(find_shards(path)[1].journal.folder.glob("*.npz")).write_bytes(b"damaged")
    with pytest.raises(TraceError, match="got 1: 2/2 is missing; the same command with --shard 2/2"):
        merge(path)
    measure_shard(path, "2/2")
    merge(path)
    assert_same_trace(path, in_one_process(tmp_path / "one.h5"))


def damaged_record(folder: Path) -> None:
    (folder / "shard.json").write_text("{")


def without_run(folder: Path) -> None:
    (folder / "run.json").unlink()


@pytest.mark.parametrize("damage", [damaged_record, without_run])
def test_a_shard_that_does_not_say_of_which_run_it_is_is_measured_again(
    tmp_path: Path, damage: Callable[[Path], None]
) -> None:
    path = tmp_path / "t.h5"
    measure_shard(path, "1/1")
    damage(find_shards(path)[0].journal.folder)
    with pytest.raises(TraceError, match="t.h5.shard-1-of-1.journal, which does not say of which"):
        merge(path)
    measure_shard(path, "1/1")
    merge(path)
    assert_same_trace(path, in_one_process(tmp_path / "one.h5"))


def test_a_folder_of_somebody_else_is_left_as_it_is(tmp_path: Path) -> None:
    path = tmp_path / "t.h5"
    measure_shard(path, "1/2")
    measure_shard(path, "2/2")
    (find_shards(path)[0].journal.folder / "thesis.tex").touch()
    for attempt in (lambda: merge(path), lambda: resumable_shards(path, record("1/2").run, True, False)):
        with pytest.raises(OutputError, match="expected a run's journal at .*shard-1-of-2.journal, got .*thesis.tex"):
            attempt()
    assert not path.exists()


OTHERS = {
    "another count": (
        {"shard": "1/4"},
        "of 4 by samples and of 2 .* as the run was begun, with --shard 2/2",
    ),
    "another way": ({"by": "configs"}, "of 2 by configs and of 2 by samples; .* without --shard, which takes what all"),
    "another seed": (
        {"run": run_config(5, configs=CONFIGS, seed=3)},
        r"which differ in seed \(3 and 0\); use another --output",
    ),
    "another model": ({"run": run_config(5, configs=CONFIGS, model="n")}, "which differ in model"),
    "more configurations": ({"run": run_config(5, configs=CONFIGS[:2])}, "which differ in configs; go on as"),
}


@pytest.mark.parametrize(("other", "words"), OTHERS.values(), ids=OTHERS)
def test_shards_of_another_run_are_refused(tmp_path: Path, other: dict[str, object], words: str) -> None:
    path, apart = tmp_path / "t.h5", tmp_path / "apart" / "t.h5"
    measure_shard(path, "2/2")
    asked = {"shard": "1/2", **other}
    with pytest.raises(OutputError, match=rf"expected shards of one run beside .*, got .* {words}"):
        measure_shard(path, **asked)
    assert len(find_shards(path)) == 1
    apart.parent.mkdir()
    measure_shard(apart, **asked)
    shutil.copytree(find_shards(apart)[0].journal.folder, path.parent / find_shards(apart)[0].journal.folder.name)
    with pytest.raises(OutputError, match="expected shards of one run beside .*/t.h5, got "):
        merge(path)


def test_overwriting_replaces_the_shards_of_another_run_and_keeps_those_of_this(tmp_path: Path) -> None:
    path = tmp_path / "t.h5"
    other = run_config(5, configs=CONFIGS, seed=3)
    for shard in ("1/3", "2/3"):
        measure_shard(path, shard, run=other)
    ShardWriter(path, record("1/2"), {}, overwrite=True)
    assert [str(one.shard) for one in find_shards(path)] == ["1/2"]
    ShardWriter(path, record("2/2"), {}, overwrite=True)
    assert [str(one.shard) for one in find_shards(path)] == ["1/2", "2/2"]


def test_an_unfinished_shard_says_what_is_missing(tmp_path: Path) -> None:
    shard = ShardWriter(tmp_path / "t.h5", record("1/2"), {})
    shard.append(measured("s0", CONFIGS), CONFIGS)
    with pytest.raises(TraceError, match=r"every sample of shard 1/2 in .*, got all but 2; run the same command"):
        shard.finish()
    shutil.rmtree(shard.shard.journal.folder)
    with pytest.raises(TraceError, match="got a folder that was removed meanwhile; run the same command"):
        shard.finish()


@pytest.mark.parametrize("measured_before", [0, 1, 2])
def test_a_shard_whose_journal_was_removed_is_not_done(tmp_path: Path, measured_before: int) -> None:
    """Samples that are measured after that make the folder anew, and are there for the same command."""
    path = tmp_path / "t.h5"
    shard = ShardWriter(path, record("1/2"), {})
    for place, name in enumerate(["s0", "s2", "s4"]):
        if place == measured_before:
            shutil.rmtree(shard.shard.journal.folder)
        shard.append(measured(name, CONFIGS), CONFIGS)
    with pytest.raises(
        TraceError, match="shard 1/2 in .*, got a folder that was removed meanwhile; run the same command again"
    ):
        shard.finish()
    assert not shard.shard.is_done()
    assert list(ShardWriter(path, record("1/2"), {}).missing()) == ["s0", "s2", "s4"][:measured_before]


def test_a_run_without_shards_takes_what_they_hold(tmp_path: Path) -> None:
    path = tmp_path / "t.h5"
    measure_shard(path, "1/4")
    measure_shard(path, "2/4")
    shards = resumable_shards(path, record("1/4").run, False, False)
    run, journals = record("1/4").run, [one.journal for one in shards]
    writer = TraceWriter(path, run, SAMPLES, {"model": "m"}, texts={}, shards=journals)
    assert list(writer.missing()) == ["s2", "s3"], "s0, s4 and s1 are there"
    writer.append(measured("s2", CONFIGS))
    writer.append(FailedSample(FAILED, "it broke"))
    writer.finish()
    assert_same_trace(path, in_one_process(tmp_path / "one.h5"))
    assert find_shards(path) == []


def test_shards_add_to_a_trace_and_to_a_run_that_was_killed(tmp_path: Path) -> None:
    path = tmp_path / "t.h5"
    writer = opened(path, CONFIGS, len(SAMPLES))
    writer.append(measured("s0", CONFIGS))
    shard = ShardWriter(path, record("1/2"), {})
    assert list(shard.missing()) == ["s2", "s4"]
    for name in ("s2", "s4"):
        shard.append(measured(name, CONFIGS), CONFIGS)
    shard.finish()
    measure_shard(path, "2/2")
    merge(path)
    assert_same_trace(path, in_one_process(tmp_path / "one.h5"))
    assert not journal_path(path).exists()


@pytest.mark.slow
def test_a_sample_that_failed_is_measured_again_by_its_shard_alone(tmp_path: Path) -> None:
    path = in_one_process(tmp_path / "t.h5")
    shard = ShardWriter(path, record("4/4"), {})
    assert list(shard.missing()) == [FAILED]
    shard.append(measured(FAILED, CONFIGS), CONFIGS)
    shard.finish()
    merge(path)
    assert read_trace(path).failures == {}
    assert read_trace(path).sample_ids == tuple(SAMPLES)


def test_a_whole_trace_is_left_as_it_is_and_nothing_is_nothing(tmp_path: Path) -> None:
    path = in_one_process(tmp_path / "t.h5")
    stamp = path.stat().st_mtime_ns
    assert merge_shards(path) == 0
    assert path.stat().st_mtime_ns == stamp
    with pytest.raises(TraceError, match="expected a trace file at .*nothing.h5, got nothing"):
        merge(tmp_path / "nothing.h5")


def test_a_shard_that_is_written_is_not_joined_nor_taken(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "t.h5"
    measure_shard(path, "1/2")
    writer = ShardWriter(path, record("2/2"), {})
    with Lock(writer.shard.path):
        for attempt in (lambda: merge(path), lambda: resumable_shards(path, record("1/2").run, False, False)):
            with pytest.raises(
                LockedOutputError, match=r"shard-2-of-2 for this command alone, got it locked by another process"
            ):
                attempt()


def test_a_shard_that_begins_again_and_lacks_nothing_is_done_all_the_time(tmp_path: Path) -> None:
    """Who joins all, and who waits for that, finds none missing; the one with the failed sample lacks that."""
    path, first = tmp_path / "t.h5", record("1/3")
    for shard in ("1/3", "2/3", "3/3"):
        measure_shard(path, shard)
    for shard in ("2/3", "3/3"):
        again = ShardWriter(path, record(shard, attrs={"model": "on another machine"}), {})
        assert again.missing() == {}
        assert measured_shards(path, first) == first.shards()
    assert list(ShardWriter(path, first, {}).missing()) == [FAILED]
    assert measured_shards(path, first) == first.shards()[1:]


@pytest.mark.parametrize("by", ["samples", "configs"])
def test_answers_of_shards_are_joined_without_a_tokenizer(tmp_path: Path, by: str) -> None:
    path, whole = tmp_path / "t.h5", record("1/1", by)
    for shard in ("1/2", "2/2"):
        measure_shard(path, shard, by, with_text=True)
    trace = merge(path)
    texts = {name: told(name) for name in SAMPLES}
    writer = TraceWriter(tmp_path / "one.h5", whole.run, SAMPLES, {}, texts=texts)
    for name, configs in writer.missing().items():
        writer.append(FailedSample(name, "it broke") if name == FAILED else measured(name, configs), configs)
    alone = read_trace(writer.finish())
    assert set(alone.arrays["answer"][0]) == set(map(str, alone.arrays["generated"][0].tolist()))
    for name in ANSWER_TEXT:
        assert trace.arrays[name].tolist() == alone.arrays[name].tolist()


def test_what_processes_say_of_themselves_is_told_of_all(tmp_path: Path) -> None:
    path = tmp_path / "t.h5"
    for shard, device, when in (("1/2", "A100", "2026-01-02"), ("2/2", "H100", "2026-01-01")):
        measure_shard(path, shard, attrs={"model": "m", "device": device, "created": when})
    attrs = merge(path).attrs
    assert (attrs["model"], attrs["device"], attrs["created"]) == ("m", "A100; H100", "2026-01-02")


def test_a_record_is_read_as_it_was_written(tmp_path: Path) -> None:
    measure_shard(tmp_path / "t.h5", "2/3", "configs")
    assert find_shards(tmp_path / "t.h5")[0].record() == record("2/3", "configs")
    assert find_shards(tmp_path / "t.h5")[0].record() != replace(record("2/3", "configs"), attrs={})


def test_a_folder_that_spells_a_shard_otherwise_is_none(tmp_path: Path) -> None:
    (tmp_path / "t.h5.shard-01-of-2.journal").mkdir()
    assert find_shards(tmp_path / "t.h5") == []
