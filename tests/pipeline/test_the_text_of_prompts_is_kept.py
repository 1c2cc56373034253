"""What a run leaves of its prompts' text, and what of the losses that move the output most."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

import perturbkv as pk
from perturbkv.pipeline.sample.layer import LOST_ENTRIES, largest_evicted_outputs, rank_outputs
from perturbkv.schema import TEXT
from perturbkv.storage.trace.trace_file import describe
from tests.support.models import tiny_adapter

CONFIGS = pk.grid(24, window=8, selection=["attention", "two-stage"])
SAID = "Grüße, 日本! \n[red]The quick brown fox[/red] jumps over the lazy dog."


def prompts(model: object, count: int = 2) -> list[pk.Prompt]:
    made = [pk.Prompt.from_text(f"{place} {SAID}", model, "Who?", id=f"p{place}") for place in range(count)]
    return [*made]


def test_the_stored_tokens_and_text_are_the_prompts() -> None:
    model = tiny_adapter()
    trace = pk.measure(model, prompts(model), CONFIGS, progress=False)
    assert trace.arrays["prompt_text"].tolist() == [f"{place} {SAID}\n\nWho?" for place in range(2)]
    np.testing.assert_array_equal(
        trace.arrays["prompt_token"], [token for one in prompts(model) for token in one.token_ids]
    )
    counts = trace.arrays["prompt_tokens"] + trace.arrays["question_tokens"]
    np.testing.assert_array_equal(trace.arrays["prompt_count"], counts)


def test_in_context_only_the_question_stands_behind_what_is_compressed() -> None:
    model = tiny_adapter()
    trace = pk.measure(model, prompts(model, 1), CONFIGS, settings=pk.Settings(scenario="context-only"), progress=False)
    starts, n = trace.arrays["prompt_start"], int(trace.arrays["prompt_tokens"][0])
    assert str(trace.arrays["prompt_text"][0])[int(starts[n]) :] == "\n\nWho?"
    assert int(trace.arrays["lost_position"].max()) < n


def test_a_run_without_text_leaves_none(tmp_path: Path) -> None:
    model = tiny_adapter()
    for path in (None, tmp_path / "t.h5"):
        trace = pk.measure(
            model, prompts(model), CONFIGS, settings=pk.Settings(prompts=False), path=path, progress=False
        )
        assert set(trace.arrays).isdisjoint(TEXT)
        assert "lost_position" in trace.arrays
    assert b"fox" not in (tmp_path / "t.h5").read_bytes()


def test_decoded_tokens_have_their_text_where_caches_are_compressed_again() -> None:
    model, asked = tiny_adapter(), {"steps": 6, "compress_every": 2}
    held, bare, uncut = (
        pk.measure(model, prompts(model), CONFIGS, settings=pk.Settings(**settings), progress=False)
        for settings in (asked, {**asked, "prompts": False}, {"steps": 6})
    )
    for sample, prompt in enumerate(prompts(model)):
        tokens = held.arrays["token_id"][sample]
        read = [*prompt.token_ids, *tokens[tokens >= 0].tolist()]
        text = model.tokenizer.decode(prompt.token_ids) + "".join(held.arrays["token_text"][sample])
        assert text == model.tokenizer.decode(read)
    assert "token_text" not in bare.arrays and "token_text" not in uncut.arrays
    for name, array in bare.arrays.items():
        np.testing.assert_array_equal(held.arrays[name], array)


@pytest.mark.slow
def test_samples_that_are_there_stay_as_they_are_and_added_ones_have_text(tmp_path: Path) -> None:
    model, path = tiny_adapter(), tmp_path / "t.h5"
    pk.measure(model, prompts(model, 1), CONFIGS, settings=pk.Settings(prompts=False), path=path, progress=False)
    trace = pk.measure(model, prompts(model, 3), CONFIGS, path=path, progress=False)
    assert describe(path).with_text == ("p1", "p2")
    assert [str(one)[:1] for one in trace.arrays["prompt_text"]] == ["", "1", "2"]


def test_of_equal_losses_the_earlier_position_comes_first_and_missing_ones_are_marked() -> None:
    attention = torch.tensor([[0.2, 0.1, 0.2, 0.1, 0.4]], dtype=torch.float64)
    norms = torch.tensor([[1.0, 2.0, 1.0, 8.0, 1.0]])
    found = largest_evicted_outputs(
        rank_outputs(attention, norms, 4), torch.tensor([[[False, False, False, True]], [[True] * 4]])
    )
    missing = [-1] * (LOST_ENTRIES - 3)
    assert found["lost_position"].tolist() == [[[0, 1, 2, *missing]], [[-1] * LOST_ENTRIES]]
    np.testing.assert_allclose(found["lost_output"][0, 0, :3], [0.2, 0.2, 0.2])
    assert torch.isnan(found["lost_output"][0, 0, 3:]).all()


def test_largest_losses_are_found_however_many_configurations_go_at_once() -> None:
    generator = torch.Generator().manual_seed(0)
    attention = torch.rand((3, 41), generator=generator, dtype=torch.float64)
    norms, kept = torch.rand((3, 41), generator=generator), torch.rand((5, 3, 40), generator=generator) < 0.6
    found = largest_evicted_outputs(rank_outputs(attention, norms, 40), kept)
    for config in range(5):
        alone = largest_evicted_outputs(rank_outputs(attention, norms, 40), kept[config : config + 1])
        for head in range(3):
            lost = [
                (-float(attention[head, i] * norms[head, i].double()), i)
                for i in range(40)
                if not kept[config, head, i]
            ]
            assert found["lost_position"][config, head].tolist() == [i for _, i in sorted(lost)][:LOST_ENTRIES]
            assert torch.equal(alone["lost_position"][0], found["lost_position"][config])
