from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from perturbkv.configs.run import Shard
from perturbkv.engines import engine_choice
from perturbkv.pipeline.run import running, sharding
from perturbkv.storage.output import Lock
from perturbkv.storage.run.shards import find_shards
from tests.support.asked import instead, refused
from tests.support.sharded import assert_same_trace

Run = Callable[..., Any]


@pytest.mark.slow
def test_an_analysis_measures_its_shard_and_the_last_one_goes_on(perturbkv: Run, tiny: list[object]) -> None:
    assert perturbkv("heads", *tiny, "-o", "one", "--format", "png").code == 0
    first = perturbkv("heads", *tiny, "-o", "out", "--format", "png", "--shard", "2/2", "--json")
    assert (first.code, first.json()["shards"][0]["samples"]) == (0, ["p1"])
    assert not Path("out/summary.json").exists()
    missing = perturbkv("merge", "out")
    refused(missing, "got 1: 1/2 is missing; the same command with --shard 1/2 (shard='1/2') measures that")
    refused(perturbkv("list", "out/trace.h5"), "is in shards, of which 1 of 2 are done")
    last = perturbkv("heads", *tiny, "-o", "out", "--format", "png", "--shard=1/2")
    assert last.code == 0, last.err
    assert Path("out/summary.json").exists()
    assert_same_trace(Path("out/trace.h5"), Path("one/trace.h5"))
    merged = perturbkv("merge", "out", "--json").json()["merged"]
    assert [(one["trace"], one["shards"]) for one in merged] == [("out/trace.h5", 0)]
    assert "out/trace.h5: 2 samples" in perturbkv("merge", "out/trace.h5").out


@pytest.mark.slow
def test_the_same_command_without_a_shard_measures_the_rest_alone(
    perturbkv: Run, tiny: list[object], monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[list[str]] = []
    measure = engine_choice.LocalEngine.measure

    def noted(self: Any, planned: Any, missing: Any, finished: Any) -> None:
        asked.append(list(missing))
        measure(self, planned, missing, finished)

    monkeypatch.setattr(engine_choice.LocalEngine, "measure", noted)
    ran = perturbkv("trace", *tiny, "-o", "t.h5", "--shard", "1/2")
    assert "shard 1/2 is done: 1 sample; 1 of 2 shards are there; perturbkv merge t.h5 joins" in " ".join(
        ran.out.split()
    )
    (held,) = find_shards(Path("t.h5"))
    with Lock(held.path):
        refused(perturbkv("trace", *tiny, "-o", "t.h5", "--shard", "1/2"), "t.h5.shard-1-of-2 for this command alone")
    with Lock(Path("t.h5")):
        refused(perturbkv("trace", *tiny, "-o", "t.h5", "--shard", "2/2"), "t.h5 for this command alone, got it locked")
    assert "1 of 2 samples are there already" in perturbkv("trace", *tiny, "-o", "t.h5").err
    assert asked == [["p0"], ["p1"]]
    assert sorted(path.name for path in Path().iterdir()) == ["t.h5"]


BAD = {
    "none of four": (["--shard", "0/4"], ["from 1/4 to 4/4, got 0/4; shards are counted from 1"]),
    "the fifth of four": (["--shard", "5/4"], ["from 1/4 to 4/4, got 5/4"]),
    "of none": (["--shard", "1/0"], ["got 1/0; shards are counted from 1"]),
    "words": (["--shard", "x/y"], ["such as 3/16, got 'x/y'"]),
    "a number": (["--shard", "3"], ["such as 3/16, got '3'"]),
    "of too many": (["--shard", "1/999999999"], ["number of shards must be at most 100,000"]),
    "a way": (["--shard", "1/2", "--shard-by", "layers"], ["'layers'", "samples"]),
    "a way to share nothing": (["--shard-by", "configs"], ["has no effect here: it needs --engine workers"]),
}


@pytest.mark.parametrize(("options", "words"), BAD.values(), ids=BAD)
def test_a_shard_that_is_none_is_one_line(
    perturbkv: Run, tiny: list[object], tmp_path: Path, options: list[str], words: list[str]
) -> None:
    refused(perturbkv("trace", *tiny, "-o", "t.h5", *options), *words)
    assert list(tmp_path.iterdir()) == []


def test_a_shard_needs_a_place_and_a_trace(perturbkv: Run, tiny: list[object], tmp_path: Path) -> None:
    refused(perturbkv("heads", *tiny, "--shard", "1/2"), "expected --output with --shard, got none")
    refused(
        perturbkv("generate", *tiny, "-o", "out", "--shard", "1/2"),
        "No such option: --shard",
        "perturbkv generate --help",
    )
    refused(perturbkv("merge", "nothing"), "expected a trace or shards of one in nothing, got neither")
    refused(perturbkv("merge", "nothing.h5"), "expected a trace file at nothing.h5, got nothing")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
def test_a_shard_of_another_run_is_one_line(perturbkv: Run, tiny: list[object]) -> None:
    command = ["trace", *tiny, "-o", "t.h5", "--shard"]
    assert perturbkv(*command, "1/4").code == 0
    refused(perturbkv(*command, "1/8"), "got 1/8 and 1/4, of 8 by samples and of 4 by samples")
    refused(perturbkv(*command[:1], *instead(tiny, "--window", 6), *command[-3:], "2/4"), "which differ in configs")
    refused(perturbkv("trace", *tiny, "--max-tokens", 99, "-o", "t.h5"), "shard-1-of-4.journal, got one that differs")


def test_a_dry_run_tells_the_share_and_leaves_nothing(perturbkv: Run, tiny: list[object], tmp_path: Path) -> None:
    asked = [*tiny, "-o", "t.h5", "--dry-run", "--shard"]
    share = perturbkv("trace", *asked, "2/2", "--shard-by", "configs", "--json").json()["shard"]
    assert (share["samples"], share["configs"], share["by"]) == (["p0", "p1"], 1, "configs")
    assert "3/3: 0 samples, 2 configurations of each" in perturbkv("trace", *asked, "3/3").out
    assert list(tmp_path.iterdir()) == []


class OneAfterTheOther(engine_choice.LocalEngine):
    """Two threads play processes, which a model's hooks do not allow."""

    def __init__(self) -> None:
        super().__init__()
        self.turn = threading.Lock()

    def measure(self, planned: Any, missing: Any, finished: Any) -> None:
        with self.turn:
            super().measure(planned, missing, finished)


@pytest.mark.slow
def test_of_shards_that_end_at_once_one_joins_them(
    perturbkv: Run, tiny: list[object], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both are done before either looks whether all are."""
    from perturbkv.cli.options import RunOptions
    from perturbkv.cli.planned_run import plan

    assert perturbkv("trace", *tiny, "-o", "one.h5").code == 0
    options = RunOptions(model=str(tiny[1]), dataset=str(tiny[3]), samples=2, budget=["24"], window=8)
    planned = plan(options, options.configs(["attention", "two-stage"]))
    engine, path, ended = OneAfterTheOther(), Path("t.h5").resolve(), threading.Barrier(2, timeout=60)
    joined, made = sharding._join_if_complete, dict[int, Any]()

    def both_done(*asked: Any) -> bool:
        ended.wait()
        return joined(*asked)

    def measure(number: int) -> None:
        try:
            made[number] = sharding.run_shard(planned, engine, path, Shard(number, 2))
        except BaseException as error:
            made[number] = error
            ended.abort()

    monkeypatch.setattr(sharding, "_join_if_complete", both_done)
    threads = [threading.Thread(target=measure, args=(number,)) for number in (1, 2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert path in made.values(), made
    assert_same_trace(path, Path("one.h5"))
    assert sorted(file.name for file in Path().iterdir()) == ["one.h5", "t.h5"]
    assert running.run_to_file(planned, engine, path) == path
