"""Prompts of one's own: the trace says whether they went through the model's chat template."""

from __future__ import annotations

from pathlib import Path

import pytest

import perturbkv as pk
from perturbkv.errors import DatasetError
from perturbkv.models.adapter import Adapter
from tests.support.folders import model_folder

TEXT = "The quick brown fox jumps over the lazy dog. " * 3
TEMPLATE = "{% for turn in messages %}<{{ turn['role'] }}>{{ turn['content'] }}{% endfor %}<assistant>"
CONFIGS = pk.grid(24, window=8)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Adapter:
    found = pk.load_model(str(model_folder(tmp_path_factory.mktemp("api") / "tiny", positions=512)))
    found.tokenizer.chat_template = TEMPLATE
    return found


@pytest.mark.parametrize(("asked", "told"), [(None, True), (True, True), (False, False)])
def test_what_was_done_is_what_the_trace_tells(model: Adapter, asked: bool | None, told: bool, tmp_path: Path) -> None:
    mine = pk.Prompt.from_text(TEXT, model, "Who?", chat_template=asked)
    said = model.tokenizer.decode(mine.token_ids)
    assert said == (f"<user>{TEXT}\n\nWho?<assistant>" if told else f"{TEXT}\n\nWho?")
    pk.measure(model, mine, CONFIGS, path=tmp_path / "t.h5", progress=False)
    assert pk.read_trace(tmp_path / "t.h5").run.chat_template is told


def test_some_prompts_of_a_dataset_keep_its_template(model: Adapter) -> None:
    prompts = pk.load_prompts("needle", model, samples=2, lengths=[200], haystack="noise")
    assert prompts.chat_template
    found = pk.measure(model, [prompts[1]], CONFIGS, progress=False)
    assert found.run.dataset == "prompts"
    assert found.run.chat_template


def test_a_trace_that_could_tell_only_half_the_truth_is_refused(model: Adapter) -> None:
    mine = [pk.Prompt.from_text(TEXT, model, id=name, chat_template=name == "a") for name in ("b", "a")]
    with pytest.raises(DatasetError, match="got 'a' with it and 'b' without") as found:
        pk.measure(model, mine, CONFIGS, progress=False)
    assert "\n" not in str(found.value)
