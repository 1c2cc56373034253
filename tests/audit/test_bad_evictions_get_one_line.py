"""What cannot be audited says in one line what it is, and what can be read only in part says which part."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import DynamicCache

import perturbkv as pk
from perturbkv.analyses.audit.cache_entries import FLOORS
from perturbkv.errors import ConfigError, PerturbkvError, PluginError, UnknownNameError
from tests.audit import planted
from tests.audit.test_planted_faults_are_told_apart import audited, model
from tests.support.models import token_ids

FILE = Path(planted.__file__)


@pytest.mark.parametrize(
    ("eviction", "words"),
    [
        (planted.nothing, "expected nothing to return a transformers Cache, got NoneType"),
        (planted.too_many, "layer 0 keeps 65 entries, more than the 60 that there were"),
        (planted.uneven, "lengths differ between layers where the cache says that they do not"),
        (planted.breaks, "reading the prompt raises ValueError: no such thing"),
    ],
)
def test_what_cannot_be_read_is_unreadable_with_its_reason(eviction: Any, words: str) -> None:
    result = audited("llama", eviction)
    assert (result.verdict, result.exit_code) == ("unreadable", 2)
    assert words in result.conclusion()
    assert "\n" not in result.conclusion()


@pytest.mark.parametrize("eviction", [planted.Narrow, planted.narrow_after_reading])
def test_a_cache_that_takes_fewer_arguments_than_layers_pass_is_one_line(eviction: Any) -> None:
    result = audited("llama", eviction, situations=["single"])
    assert (result.verdict, result.exit_code) == ("unreadable", 2)
    assert "NarrowLayer.update() got an unexpected keyword argument 'kwargs'" in result.conclusion()
    assert "layers of transformers 5.24 and newer pass more to it, so let update take **kwargs" in result.conclusion()
    assert "\n" not in result.conclusion()


def test_another_error_of_an_update_stays_the_evictions_own() -> None:
    def evict(model: Any, input_ids: torch.Tensor, attention_mask: torch.Tensor) -> Any:
        DynamicCache().update()

    result = audited("llama", evict, situations=["single"])
    assert "reading the prompt raises TypeError" in result.conclusion()


def test_a_decoding_that_shows_no_keys_is_unreadable() -> None:
    def evict(model: Any, input_ids: torch.Tensor, attention_mask: torch.Tensor) -> Any:
        return planted.right(model, input_ids, attention_mask)

    evict.decode = lambda model, cache, token, step: torch.zeros(1, token.shape[1], 260)  # type: ignore[attr-defined]
    result = audited("llama", evict, situations=["single"])
    assert (result.verdict, result.exit_code) == ("unreadable", 2)
    assert "no keys to look at" in result.conclusion()


@pytest.mark.slow
def test_a_refusal_is_no_fault_and_a_failure_is_one() -> None:
    refusing = audited("llama", planted.alone_only)
    assert refusing.verdict == "exact"
    said = [run.refused for run in refusing.runs if run.situation == "batch"]
    assert said[0].startswith("NotImplementedError: one prompt at a time (planted.py, line ")
    failing = audited("llama", planted.breaks_in_a_batch)
    assert failing.verdict == "differs"
    assert failing.faults[0].situation == "batch"
    assert "ValueError: shapes do not fit" in failing.conclusion()


@pytest.mark.parametrize(
    ("written", "words"),
    [
        ("nowhere.py:right", "expected a Python file at nowhere.py, got nothing"),
        ("right", "expected an eviction as file.py:name(option=value"),
        (f"{FILE}:rigt", "unknown name in"),
        (f"{FILE}:Streaming(sink=3)", "unexpected keyword argument 'sink'); it takes layers: 'int' = 3, sinks"),
        (f"{FILE}:right(keep=3)", "unexpected keyword argument 'keep'); it takes model, input_ids, attention_mask"),
        (f"{FILE}:Streaming(3)", "expected every option of"),
        (f"{FILE}:Streaming(recent=abc)", "Streaming(recent=abc) to be a whole number (recent: 'int' = 8), got 'abc'"),
        (f"{FILE}:Streaming(recent=2.5)", "to be a whole number"),
        (f"{FILE}:swapped_values(layer=abc)", "expected layer of"),
        (f"{FILE}:KEPT", "expected"),
        ("nothing.npz", "expected a file of kept positions at nothing.npz, got nothing"),
    ],
)
def test_an_eviction_that_is_not_there_is_one_line(written: str, words: str) -> None:
    with pytest.raises((ConfigError, PluginError, UnknownNameError), match=".") as raised:
        audited("llama", written)
    assert words in str(raised.value)
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize(
    "text",
    [
        "raise SystemExit(0)",
        "exit()",
        "raise GeneratorExit",
        "class E(BaseException): pass\nraise E",
        "x = bytearray(2**62)",
    ],
)
def test_a_file_that_leaves_the_command_is_one_line(tmp_path: Path, text: str) -> None:
    path = tmp_path / "leaves.py"
    path.write_text(f"{text}\n\n\ndef evict(): ...\n")
    with pytest.raises(PluginError, match="leaves.py cannot be loaded: "):
        audited("llama", f"{path}:evict")


def test_a_file_that_cannot_be_run_is_one_line(tmp_path: Path) -> None:
    path = tmp_path / "broken.py"
    path.write_text("import nothing_of_this_name\n")
    with pytest.raises(PluginError, match="cannot be loaded: ModuleNotFoundError"):
        audited("llama", f"{path}:right")


def test_options_reach_a_class_and_a_function(tmp_path: Path) -> None:
    result = audited("llama", f"{FILE}:Streaming(sinks=2, recent=5)", situations=["single"])
    entries = result.runs[0].entries
    assert entries is not None
    assert {count for layer in entries.kept for count in layer} == {7}
    result = audited("llama", f"{FILE}:rotated_again(layer=2)", situations=["single"])
    assert result.faults[0].layer == 2


def test_a_decode_in_the_file_is_used(tmp_path: Path) -> None:
    path = tmp_path / "own.py"
    path.write_text(
        "from transformers import DynamicCache\n"
        "def keep(model, input_ids, attention_mask):\n"
        "    cache = DynamicCache()\n"
        "    model(input_ids=input_ids, past_key_values=cache)\n"
        "    return cache\n"
        "def decode(model, cache, token, step):\n"
        "    return model(input_ids=token, past_key_values=cache, position_ids=token * 0 + 57 + step).logits\n"
    )
    result = audited("llama", f"{path}:keep", situations=["single"])
    assert result.faults[0].what == "new tokens stand 3 positions too early"
    assert result.plain_use is None


@pytest.mark.parametrize(
    ("asked", "words"),
    [
        ({"steps": 0}, "expected at least 1 step, got 0"),
        ({"situations": ["alone"]}, "unknown situation 'alone'; known: block, single, batch"),
        ({"situations": []}, "expected at least one situation of single, block, batch, got none"),
    ],
)
def test_an_audit_of_nothing_is_refused(asked: dict[str, Any], words: str) -> None:
    with pytest.raises(PerturbkvError) as raised:
        audited("llama", planted.right, **asked)
    assert str(raised.value) == words


def test_short_prompts_and_other_attention_are_refused() -> None:
    with pytest.raises(ConfigError, match="more than 8 tokens, sample 's' is shorter"):
        pk.audit(model("llama"), pk.Prompt("s", token_ids(8), 0), DynamicCache, progress=False)
    with pytest.raises(PerturbkvError, match="expected a model from pk.load_model, got str"):
        pk.audit("llama", pk.Prompt("s", token_ids(20), 0), DynamicCache)  # type: ignore[arg-type]


def test_an_attention_without_masks_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(model("llama").config, "_attn_implementation", "flash_attention_2")
    with pytest.raises(PerturbkvError, match="an audit masks entries per head"):
        audited("llama", planted.right)


@pytest.mark.slow
def test_a_result_is_json_and_a_table() -> None:
    for eviction in (planted.right, planted.nothing, planted.breaks_in_a_batch):
        result = audited("llama", eviction)
        assert json.loads(json.dumps(result.to_dict(), allow_nan=False))["verdict"] == result.verdict
        assert result.verdict in repr(result)
        assert result.plot() is not None
    frame = audited("llama", planted.swapped_values, situations=["single"]).to_frame("layers")
    assert len(frame) == 3 * 3
    assert set(frame[frame.floors > FLOORS].layer) == {1, 2}


def test_a_press_needs_kvpress_and_a_budget_and_others_take_none() -> None:
    with pytest.raises(PerturbkvError, match="needs kvpress 0.5.5, which runs with transformers below 5.3"):
        audited("llama", "kvpress:SnapKVPress", budget=32)
    with pytest.raises(PerturbkvError, match=r"expected a budget for the press kvpress:SnapKVPress, got none"):
        audited("llama", "kvpress:SnapKVPress")
    with pytest.raises(PerturbkvError, match="a budget has no effect here: it needs a press of kvpress"):
        audited("llama", f"{FILE}:right", budget=32)


def test_what_an_eviction_leaves_on_the_model_is_gone() -> None:
    attention = model("llama").attentions[0]

    def evict(loaded: Any, input_ids: torch.Tensor, attention_mask: torch.Tensor) -> Any:
        attention.register_forward_hook(lambda module, given, found: (found[0] * 0, *found[1:]))
        return planted.right(loaded, input_ids, attention_mask)

    assert audited("llama", evict, situations=["single"]).verdict == "differs"
    assert not attention._forward_hooks
    assert audited("llama", planted.right, situations=["single"]).verdict == "exact"
