from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import perturbkv as pk
from perturbkv.errors import ActivationError
from perturbkv.models.adapter import Adapter
from perturbkv.pipeline.run.sharding import ShardDone
from perturbkv.pipeline.sample import one_sample
from perturbkv.pipeline.variants import readers
from perturbkv.schema import ANSWER_TEXT, AT_CHOSEN_STEPS, KEPT, SUMS
from perturbkv.selection.policies import registry
from perturbkv.storage.run.sample_parts import _FLOORS
from perturbkv.trace import Trace
from tests.support.alike import assert_close_where_rounded
from tests.support.models import tiny_adapter
from tests.support.sharded import assert_same_trace

SHARDS, WHERE = 7, "hidden states of layer 1"
CONFIGS = tuple(
    config
    for one in registry.all_policies()
    for config in pk.grid(40, policy=one.name, selection=one.selections[0], window=6)
)
HEAD_SCORES = ((1.0, 2.0, 5.0, 1.0),)


@pytest.fixture(scope="module")
def adapter() -> Adapter:
    return tiny_adapter(layers=1)


@pytest.fixture
def prompts(adapter: Adapter, monkeypatch: pytest.MonkeyPatch) -> tuple[pk.Prompt, ...]:
    """Eight, of which the fifth fails."""
    texts = [f"{place} The quick brown fox jumps over it. " * 2 for place in range(8)]
    made = tuple(pk.Prompt.from_text(text, adapter, "Which fox?", id=f"p{place}") for place, text in enumerate(texts))
    whole, broken = one_sample.trace_sample, made[4].sample_id

    def failing(adapter: Any, prompt: pk.Prompt, *more: Any) -> Any:
        if prompt.sample_id == broken:
            raise ActivationError(WHERE, broken)
        return whole(adapter, prompt, *more)

    monkeypatch.setattr(one_sample, "trace_sample", failing)
    return made


_SETTINGS = pk.Settings()


@pytest.fixture
def a_still_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    """Prefills that are timed take no time."""
    timed = readers._time_prefill
    monkeypatch.setattr(readers, "_time_prefill", lambda *asked: (0.0, timed(*asked)[1]))


def in_shards(
    path: Path, *asked: Any, count: int = SHARDS, by: str = "samples", settings: pk.Settings = _SETTINGS
) -> Iterator[Trace | ShardDone]:
    for number in range(count, 0, -1):
        shard = f"{number}/{count}" if by == "samples" else pk.Shard(number, count, by)
        yield pk.measure(*asked, settings=settings, path=path, shard=shard, progress=False)


@pytest.mark.usefixtures("a_still_clock")
@pytest.mark.parametrize(
    ("scenario", "text"), [("regular", True), pytest.param("context-only", False, marks=pytest.mark.slow)]
)
def test_seven_shards_give_the_file_of_one_process(
    adapter: Adapter, prompts: tuple[pk.Prompt, ...], tmp_path: Path, scenario: str, text: bool
) -> None:
    assert {config.policy.name for config in CONFIGS} == set(registry.names())
    settings = pk.Settings(scenario=scenario, prompts=text, head_scores=HEAD_SCORES)
    alone = pk.measure(adapter, prompts, CONFIGS, settings=settings, path=tmp_path / "one.h5", progress=False)
    *left, last = in_shards(tmp_path / "t.h5", adapter, prompts, CONFIGS, settings=settings)
    assert [len(one.samples) for one in left] == [1] * 6
    assert [len(one.done) for one in left] == list(range(1, SHARDS))
    assert isinstance(last, Trace)
    assert last.failures == alone.failures != {}
    assert ("prompt_text" in last.arrays) == text
    assert_same_trace(tmp_path / "t.h5", tmp_path / "one.h5")
    assert sorted(file.name for file in tmp_path.iterdir()) == ["one.h5", "t.h5"]


@pytest.mark.slow
@pytest.mark.parametrize("by", ["samples", "configs"])
def test_shards_give_the_answers_of_one_process(adapter: Adapter, tmp_path: Path, by: str) -> None:
    text = "The quick brown fox jumps over it. " * 2
    prompts = [pk.Prompt.from_text(f"{place} {text}", adapter, id=f"p{place}", answers=["é"]) for place in range(3)]
    asked: tuple[Any, ...] = (adapter, prompts, CONFIGS[:4])
    alone = pk.measure(*asked, path=tmp_path / "one.h5", settings=pk.Settings(generate=5), progress=False)
    last = list(in_shards(tmp_path / "t.h5", *asked, count=2, by=by, settings=pk.Settings(generate=5)))[-1]
    assert isinstance(last, Trace)
    assert "".join(alone.arrays["answer"].ravel()) != ""
    for name in ANSWER_TEXT:
        assert last.arrays[name].tolist() == alone.arrays[name].tolist()


@pytest.mark.parametrize("by", ["samples", "configs"])
def test_shards_give_the_text_of_decoded_tokens(adapter: Adapter, tmp_path: Path, by: str) -> None:
    text = "The quick brown fox jumps over it. " * 2
    prompts = [pk.Prompt.from_text(f"{place} {text}", adapter, id=f"p{place}") for place in range(2)]
    asked: tuple[Any, ...] = (adapter, prompts, pk.grid((20, 24), window=6, selection=["attention", "two-stage"]))
    settings = pk.Settings(steps=8, compress_over=25)
    alone = pk.measure(*asked, path=tmp_path / "one.h5", settings=settings, progress=False)
    last = list(in_shards(tmp_path / "t.h5", *asked, count=2, by=by, settings=settings))[-1]
    assert isinstance(last, Trace)
    assert "".join(alone.arrays["token_text"].ravel()) != ""
    assert last.arrays["token_text"].tolist() == alone.arrays["token_text"].tolist()
    measured = ~np.isnan(alone.arrays["retained_mass"][..., 0, 0])
    assert measured[:, 0].sum() < measured[:, -1].sum() < measured[:, -1].size
    for name in AT_CHOSEN_STEPS:
        if name in alone.arrays:
            assert_close_where_rounded(last.arrays[name], alone.arrays[name], name)


@pytest.mark.slow
def test_shards_of_configurations_give_it_up_to_floors_and_bytes(
    adapter: Adapter, prompts: tuple[pk.Prompt, ...], tmp_path: Path
) -> None:
    chosen = CONFIGS[:5]
    alone = pk.measure(adapter, prompts[:2], chosen, path=tmp_path / "one.h5", progress=False)
    *left, last = in_shards(tmp_path / "t.h5", adapter, prompts[:2], chosen, count=2, by="configs")
    assert [(len(one.samples), one.configs) for one in left] == [(2, 2)]
    assert isinstance(last, Trace)
    assert (last.run, last.sample_ids) == (alone.run, alone.sample_ids)
    for name, array in alone.arrays.items():
        if name not in (*_FLOORS, *SUMS, *KEPT):
            assert_close_where_rounded(last.arrays[name], array, name)
    for sample, config in itertools.product(range(2), range(len(chosen))):
        np.testing.assert_array_equal(last.kept_masks(sample, config), alone.kept_masks(sample, config))
