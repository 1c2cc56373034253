from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from perturbkv.configs.entry_counts import Budget
from perturbkv.configs.eviction import EvictionConfig
from perturbkv.errors import TraceError
from perturbkv.storage.run.journal import journal_path
from perturbkv.storage.run.writer import TraceWriter
from perturbkv.storage.trace.trace_file import read_run, read_trace
from perturbkv.trace import FailedSample
from tests.store.test_parts_join_to_the_sample import with_arrays
from tests.support.growing import CONFIGS, NEW, OLD, assert_same_file, fill, measured, opened
from tests.support.traces import run_config


@pytest.fixture
def at_once(tmp_path: Path) -> Path:
    return fill(opened(tmp_path / "at-once.h5", CONFIGS))


@pytest.mark.slow
def test_a_finished_trace_gets_configurations(tmp_path: Path, at_once: Path) -> None:
    path = fill(opened(tmp_path / "t.h5", OLD))
    writer = opened(path, CONFIGS)
    assert writer.missing() == {"s0": NEW, "s1": NEW, "s2": NEW}
    assert writer.done() == set()
    assert_same_file(fill(writer), at_once)
    assert not journal_path(path).exists()


def test_an_interrupted_run_gets_configurations(tmp_path: Path, at_once: Path) -> None:
    path = tmp_path / "t.h5"
    interrupted = opened(path, OLD)
    for name in ("s0", "s1"):
        interrupted.append(measured(name, OLD))
    writer = opened(path, CONFIGS)
    assert writer.missing() == {"s0": NEW, "s1": NEW, "s2": CONFIGS}
    assert_same_file(fill(writer), at_once)


def test_configurations_come_together_with_samples(tmp_path: Path, at_once: Path) -> None:
    path = fill(opened(tmp_path / "t.h5", OLD, samples=2))
    writer = opened(path, CONFIGS)
    assert writer.missing() == {"s0": NEW, "s1": NEW, "s2": CONFIGS}
    assert_same_file(fill(writer), at_once)


@pytest.mark.slow
def test_a_trace_grows_more_than_once_between_interruptions(tmp_path: Path, at_once: Path) -> None:
    path = fill(opened(tmp_path / "t.h5", CONFIGS[2:3], samples=2))
    opened(path, CONFIGS[1:4], samples=2).append(measured("s1", (CONFIGS[3],)), (CONFIGS[3],))
    writer = opened(path, CONFIGS[1:5])
    assert writer.missing()["s1"] == (CONFIGS[1], CONFIGS[4])
    writer.append(measured("s1", (CONFIGS[4],)), (CONFIGS[4],))
    again = opened(path, CONFIGS)
    assert again.missing() == {"s0": (*OLD, *CONFIGS[3:]), "s1": (*OLD, CONFIGS[5]), "s2": CONFIGS}
    assert_same_file(fill(again), at_once)


def test_parts_may_hold_their_configurations_in_any_order(tmp_path: Path, at_once: Path) -> None:
    writer = opened(tmp_path / "t.h5", CONFIGS)
    for name in writer.sample_ids:
        for part in (CONFIGS[4::-2], CONFIGS[5::-2]):
            writer.append(measured(name, part), part)
    assert writer.done() == set(writer.sample_ids)
    assert_same_file(writer.finish(), at_once)


@pytest.mark.slow
def test_a_grown_file_has_the_order_that_was_asked_for(tmp_path: Path) -> None:
    backwards = CONFIGS[::-1]
    path = fill(opened(tmp_path / "t.h5", OLD))
    fill(opened(path, backwards))
    assert_same_file(path, fill(opened(tmp_path / "at-once.h5", backwards)))


@pytest.mark.parametrize("asked", [CONFIGS, CONFIGS[::-1]], ids=["same order", "other order"])
def test_where_nothing_is_new_the_file_is_left_as_it_is(at_once: Path, asked: tuple[EvictionConfig, ...]) -> None:
    content, written = at_once.read_bytes(), at_once.stat().st_mtime_ns
    writer = opened(at_once, asked)
    assert writer.missing() == {}
    assert writer.finish() == at_once
    assert (at_once.read_bytes(), at_once.stat().st_mtime_ns) == (content, written)
    assert read_run(at_once).configs == CONFIGS


def test_fewer_configurations_than_the_file_holds_are_refused(at_once: Path) -> None:
    content = at_once.read_bytes()
    with pytest.raises(TraceError, match=r"differs in configs; .*\(only samples and configurations may be added\)"):
        opened(at_once, CONFIGS[:-1])
    with pytest.raises(TraceError, match="differs in configs;"):
        opened(at_once, (*CONFIGS[:-1], EvictionConfig(budget=Budget(512))), samples=4)
    assert at_once.read_bytes() == content


def test_only_what_hinders_is_told(at_once: Path) -> None:
    more = (*CONFIGS, EvictionConfig(budget=Budget(512)))
    with pytest.raises(TraceError, match=r"differs in seed \(0, not 1\); use"):
        opened(at_once, more, samples=4, seed=1)


@pytest.mark.parametrize(("digests", "refused"), [("aa", False), ("ab", True), (None, True)])
def test_a_file_of_prompts_may_have_moved_but_not_changed(tmp_path: Path, digests: str | None, refused: bool) -> None:
    first, second = ({"file_sha256": one} for one in digests) if digests else ({}, {})
    path = fill(opened(tmp_path / "t.h5", OLD, samples=2, dataset="there/rows.jsonl", dataset_options=first))
    if refused:
        with pytest.raises(TraceError, match="differs in dataset"):
            opened(path, OLD, dataset="here/rows.jsonl", dataset_options=second)
    else:
        assert opened(path, OLD, dataset="here/rows.jsonl", dataset_options=second).missing().keys() == {"s2"}


def test_a_policy_that_needs_head_scores_may_join_those_that_do_not(tmp_path: Path) -> None:
    path = fill(opened(tmp_path / "t.h5", OLD))
    headkv = EvictionConfig(budget=Budget(64), policy="headkv")
    grown = (*OLD, headkv)
    assert opened(path, grown, head_scores=((1.0,),)).missing()["s0"] == (headkv,)
    writer = opened(tmp_path / "other.h5", grown, head_scores=((1.0,),))
    for name in writer.sample_ids:
        writer.append(measured(name, CONFIGS[:3]), grown)
    with pytest.raises(TraceError, match="differs in head_scores"):
        opened(writer.finish(), grown, head_scores=((2.0,),))


@pytest.mark.slow
def test_the_full_run_of_the_part_measured_first_is_told(tmp_path: Path) -> None:
    path = tmp_path / "t.h5"
    for place, config in enumerate(CONFIGS):
        writer = opened(path, CONFIGS[: place + 1], samples=1)
        part = measured("s0", (config,))
        writer.append(with_arrays(part, output_norm=part.arrays["output_norm"] + place), (config,))
        if place == 2:
            writer.finish()
    norm = read_trace(writer.finish()).arrays["output_norm"][0]
    np.testing.assert_array_equal(norm, measured("s0", CONFIGS).arrays["output_norm"])


def test_another_score_of_the_full_cache_is_refused_and_no_score_is_one(tmp_path: Path) -> None:
    for place, (first, second) in enumerate(((1.0, 0.5), (np.nan, 0.5), (0.5, np.nan))):
        writer = opened(tmp_path / f"{place}.h5", CONFIGS, samples=1)
        old, new = (with_arrays(measured("s0", part), score_full=np.float64(score)) for part, score in
                    ((OLD, first), (NEW, second)))  # fmt: skip
        writer.append(old, OLD)
        with pytest.raises(TraceError, match="to be the one measured before, got another score_full"):
            writer.append(new, NEW)
    writer = opened(tmp_path / "alike.h5", CONFIGS, samples=1)
    for part in (OLD, NEW):
        writer.append(with_arrays(measured("s0", part), score_full=np.float64(np.nan)), part)
    assert np.isnan(read_trace(writer.finish()).arrays["score_full"]).all()


@pytest.mark.parametrize(
    ("held", "asked", "refused"),
    [
        ({}, {"metrics": ["exact-number"]}, True),
        ({}, {"metrics": ["f1"]}, True),
        ({"metrics": ["f1"]}, {"metrics": ["f1", "rouge"]}, False),
        ({"metrics": ["f1", "rouge"]}, {"metrics": ["f1"]}, True),
        ({"metrics": ["f1"]}, {"metrics": ["exact-match"]}, True),
    ],
)
def test_a_trace_goes_on_where_its_answers_were_graded_alike(
    tmp_path: Path, held: dict[str, object], asked: dict[str, object], refused: bool
) -> None:
    path = fill(opened(tmp_path / "t.h5", OLD, samples=2, generate=4, dataset_options=held))
    if refused:
        with pytest.raises(TraceError, match="differs in dataset_options"):
            opened(path, OLD, generate=4, dataset_options=asked)
    else:
        assert set(opened(path, OLD, generate=4, dataset_options=asked).missing()) == {"s2"}


@pytest.mark.slow
def test_another_full_run_is_refused_before_it_is_kept(tmp_path: Path, at_once: Path) -> None:
    path = fill(opened(tmp_path / "t.h5", OLD))
    content = path.read_bytes()
    writer, part = opened(path, CONFIGS), measured("s0", NEW)
    other = with_arrays(part, token_id=part.arrays["token_id"] + 1)
    with pytest.raises(TraceError, match="run of 's0' to be the one measured before, got another token_id"):
        writer.append(other, NEW)
    assert path.read_bytes() == content
    assert writer.missing() == opened(path, CONFIGS).missing() == {"s0": NEW, "s1": NEW, "s2": NEW}
    assert_same_file(fill(writer), at_once)


@pytest.mark.slow
def test_a_file_that_another_process_wrote_meanwhile_is_not_overwritten(tmp_path: Path) -> None:
    path = fill(opened(tmp_path / "t.h5", OLD))
    writer = opened(path, CONFIGS)
    fill(opened(path, CONFIGS[::-1]))
    content = path.read_bytes()
    with pytest.raises(TraceError, match="got one written since"):
        fill(writer)
    assert path.read_bytes() == content


@pytest.mark.slow
def test_a_sample_that_fails_for_new_configurations_is_failed_and_measured_again_as_a_whole(
    tmp_path: Path, at_once: Path
) -> None:
    path = fill(opened(tmp_path / "t.h5", OLD))
    writer = opened(path, CONFIGS)
    writer.append(FailedSample("s1", "broke"), NEW)
    assert writer.missing() == {"s0": NEW, "s2": NEW}
    assert opened(path, CONFIGS).missing()["s1"] == NEW  # killed here, another run tries again
    assert dict(read_trace(fill(writer)).failures) == {"s1": "broke"}
    again = opened(path, CONFIGS)
    assert again.missing() == {"s1": CONFIGS}
    assert_same_file(fill(again), at_once)


@pytest.mark.slow
def test_a_failed_sample_stays_failed_in_a_grown_file_unless_it_is_measured(tmp_path: Path) -> None:
    writer = opened(tmp_path / "t.h5", OLD)
    writer.append(FailedSample("s1", "broke"))
    path = fill(writer)
    grown = opened(path, CONFIGS)
    assert grown.missing() == {"s0": NEW, "s1": CONFIGS, "s2": NEW}
    for name in ("s0", "s2"):
        grown.append(measured(name, NEW), NEW)
    grown.append(measured("s1", NEW), NEW)
    with pytest.raises(TraceError, match="1 are not, such as 's1'"):
        grown.finish()
    again = opened(path, CONFIGS)
    assert again.missing() == {"s1": OLD}
    again.append(FailedSample("s1", "broke again"))
    assert dict(read_trace(again.finish()).failures) == {"s1": "broke again"}


def test_a_whole_sample_replaces_its_parts(tmp_path: Path, at_once: Path) -> None:
    path = fill(opened(tmp_path / "t.h5", OLD))
    writer = opened(path, CONFIGS)
    for name in writer.sample_ids:
        whole = measured(name, CONFIGS)
        writer.append(with_arrays(whole, token_id=whole.arrays["token_id"] + 1))
    tokens = read_trace(writer.finish()).arrays["token_id"]
    np.testing.assert_array_equal(tokens, read_trace(at_once).arrays["token_id"] + 1)


def test_of_two_whole_measurements_of_a_sample_the_last_counts(tmp_path: Path) -> None:
    writer, whole = opened(tmp_path / "t.h5", CONFIGS, samples=1), measured("s0", CONFIGS)
    for more in (1, 2):
        writer.append(with_arrays(whole, token_id=whole.arrays["token_id"] + more))
    trace = read_trace(writer.finish())
    np.testing.assert_array_equal(trace.arrays["token_id"][0], whole.arrays["token_id"] + 2)


def test_a_failed_sample_of_which_a_part_is_measured_lacks_the_rest(tmp_path: Path) -> None:
    writer = opened(tmp_path / "t.h5", CONFIGS, samples=1)
    writer.append(FailedSample("s0", "broke"))
    assert writer.missing() == {}
    writer.append(measured("s0", OLD), OLD)
    assert writer.missing() == {"s0": NEW}
    writer.append(FailedSample("s0", "broke again"), NEW)
    assert dict(read_trace(writer.finish()).failures) == {"s0": "broke again"}


def test_samples_asked_for_in_another_order_are_put_into_it(tmp_path: Path, at_once: Path) -> None:
    before, names = read_trace(at_once).arrays["theta"], ["s2", "s0", "s1"]
    writer = TraceWriter(at_once, run_config(3, configs=CONFIGS), names, {"model": "m"})
    assert writer.missing() == {}
    found = read_trace(writer.finish())
    assert found.sample_ids == tuple(names)
    np.testing.assert_array_equal(found.arrays["theta"], before[[2, 0, 1]])


def test_what_does_not_fit_is_refused_and_not_kept(tmp_path: Path) -> None:
    path = tmp_path / "t.h5"
    writer = opened(path, CONFIGS[:5])
    writer.append(measured("s0", OLD), OLD)
    with pytest.raises(TraceError, match="expected 3 configurations in sample 's1', got 2"):
        writer.append(measured("s1", OLD), CONFIGS[:3])
    with pytest.raises(TraceError, match="expected 5 configurations in sample 's1', got 2"):
        writer.append(measured("s1", OLD))
    with pytest.raises(TraceError, match="configurations of this run, each once, got '.* b=256 .*'"):
        writer.append(measured("s1", CONFIGS[4:]), CONFIGS[4:])
    with pytest.raises(TraceError, match="configurations of this run, each once"):
        writer.append(measured("s1", OLD), (OLD[0], OLD[0]))
    with pytest.raises(TraceError, match="expected what is missing of sample 's0', got '.*b=64.*', which is there"):
        writer.append(measured("s0", CONFIGS[1:4]), CONFIGS[1:4])
    assert opened(path, CONFIGS[:5]).missing() == {"s0": CONFIGS[2:5], "s1": CONFIGS[:5], "s2": CONFIGS[:5]}
