"""What an audited eviction does to the model, the process and its arguments is undone or told, whatever it raises."""

from __future__ import annotations

import contextlib
import os
import random
import re
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import DynamicCache

from perturbkv.configs.plugins import external_code
from perturbkv.errors import ConfigError, PluginError
from tests.audit import planted
from tests.audit.test_planted_faults_are_told_apart import audited, model

Evict = Callable[[Any, torch.Tensor, torch.Tensor], Any]


def after(damage: Callable[[Any], object]) -> Evict:
    """A right eviction that damages something afterwards."""

    def evict(loaded: Any, input_ids: torch.Tensor, attention_mask: torch.Tensor) -> Any:
        cache = planted.right(loaded, input_ids, attention_mask)
        damage(loaded)
        return cache

    return evict


def scale_weights(loaded: Any) -> None:
    loaded.lm_head.weight.data.mul_(2)


def nan_weights(loaded: Any) -> None:
    loaded.model.layers[1].mlp.down_proj.weight.data[0, 0] = torch.nan


def swap_rows(loaded: Any) -> None:
    weight = loaded.model.layers[0].self_attn.q_proj.weight.data
    weight.copy_(weight.flip(0))


def other_frequencies(loaded: Any) -> None:
    loaded.model.rotary_emb.inv_freq.mul_(0.5)


def exchange_layers(loaded: Any) -> None:
    loaded.model.layers[0], loaded.model.layers[1] = loaded.model.layers[1], loaded.model.layers[0]


def scale_attention(loaded: Any) -> None:
    loaded.model.layers[1].self_attn.scaling *= 0.5


def scale_rotary(loaded: Any) -> None:
    loaded.model.rotary_emb.attention_scaling = 0.9


def larger_epsilon(loaded: Any) -> None:
    loaded.model.norm.variance_epsilon = 0.1


def train(loaded: Any) -> None:
    loaded.train()


def other_activation(loaded: Any) -> None:
    loaded.model.layers[0].mlp.act_fn = torch.nn.ReLU()


def other_configuration(loaded: Any) -> None:
    loaded.config.rms_norm_eps = 0.1


def patch_torch(loaded: Any) -> None:
    """Scaled dot products of torch itself, for all that follows."""
    plain = torch.nn.functional.scaled_dot_product_attention
    torch.nn.functional.scaled_dot_product_attention = lambda *args, **named: 0.9 * plain(*args, **named)


@pytest.fixture(autouse=True)
def torch_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        torch.nn.functional, "scaled_dot_product_attention", torch.nn.functional.scaled_dot_product_attention
    )


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (scale_attention, "scaling of model.layers.1.self_attn"),
        (scale_rotary, "attention_scaling of model.rotary_emb"),
        (larger_epsilon, "variance_epsilon of model.norm"),
        (train, "training of the model"),
        (other_activation, "replaced: parts of model.layers.0.mlp"),
        (other_configuration, "config.rms_norm_eps"),
        (patch_torch, "plain calls of it give other logits, though its weights and parts are as before"),
        (scale_weights, "weights of lm_head.weight"),
        (nan_weights, "weights of model.layers.1.mlp.down_proj.weight"),
        (swap_rows, "weights of model.layers.0.self_attn.q_proj.weight"),
        (other_frequencies, "weights of model.rotary_emb.inv_freq"),
        (exchange_layers, "replaced: parts of model.layers"),
    ],
)
def test_a_changed_model_is_a_fault_that_is_named(damage: Callable[[Any], None], words: str) -> None:
    model.cache_clear()
    result = audited("llama", after(damage))
    assert (result.verdict, result.faults[0].kind) == ("differs", "model")
    assert f"it changed the model ({words}" in result.conclusion()
    assert len(result.trace.runs) == 1  # there is no reference any more
    model.cache_clear()


def test_replaced_parts_are_put_back() -> None:
    model.cache_clear()
    layers = list(model("llama").model.model.layers)
    audited("llama", after(exchange_layers))
    assert list(model("llama").model.model.layers) == layers
    assert audited("llama", planted.right, situations=["single"]).verdict == "exact"


def patch_class(loaded: Any) -> None:
    """The forward of all MLPs, as evictions of old replace that of an attention class."""
    kind = type(loaded.model.layers[0].mlp)
    plain = kind.forward
    kind.forward = lambda module, hidden: 0.9 * plain(module, hidden)


def patch_function(loaded: Any) -> None:
    """A function of the file that defines the model."""
    file = sys.modules[type(loaded).__module__]
    plain = file.apply_rotary_pos_emb
    file.apply_rotary_pos_emb = lambda query, key, *args, **named: plain(0.9 * query, key, *args, **named)


def patch_forward(loaded: Any) -> None:
    mlp = loaded.model.layers[0].mlp
    plain = mlp.forward
    mlp.forward = lambda hidden: 0.9 * plain(hidden)


@pytest.mark.parametrize("damage", [patch_class, patch_function, patch_forward])
def test_replaced_functions_are_put_back_before_the_reference_runs(damage: Callable[[Any], None]) -> None:
    """They stay for the eviction's own decoding, which then differs."""
    model.cache_clear()
    loaded = model("llama").model
    with torch.no_grad():
        plain = loaded(torch.arange(9).unsqueeze(0)).logits
        result = audited("llama", after(damage), situations=["single"], losses=True)
        assert (result.verdict, result.faults[0].kind) == ("differs", "decoding")
        assert torch.equal(loaded(torch.arange(9).unsqueeze(0)).logits, plain)
    model.cache_clear()


def test_a_file_that_replaces_the_model_on_import_is_told(tmp_path: Path) -> None:
    from transformers.models.llama import modeling_llama

    source = tmp_path / "patches.py"
    source.write_text(
        "from transformers.models.llama import modeling_llama\n"
        "from tests.audit.planted import right\n"
        "def forward(module, hidden): return hidden\n"
        "modeling_llama.LlamaMLP.forward = forward\n"
    )
    plain = modeling_llama.LlamaMLP.forward
    try:
        result = audited("llama", f"{source}:right", situations=["single"])
    finally:
        modeling_llama.LlamaMLP.forward = plain
    assert (result.verdict, result.exit_code) == ("unreadable", 2)
    assert "its file replaces LlamaMLP.forward on import" in result.conclusion()


def test_an_error_class_of_ours_is_no_way_out() -> None:
    def refuse(loaded: Any) -> None:
        msg = "not today"
        raise ConfigError(msg)

    result = audited("llama", after(refuse))
    assert "reading the prompt raises ConfigError: not today (test_an_" in result.conclusion()


class OwnError(BaseException):
    """What no `except Exception` catches, with a text that cannot be made."""

    def __str__(self) -> str:
        raise SystemExit(0)


def exits(loaded: Any) -> None:
    raise SystemExit(0)


def raises_its_own(loaded: Any) -> None:
    raise OwnError


def long_text(loaded: Any) -> None:
    raise ValueError("x\n" * 10**6)


@pytest.mark.parametrize(
    ("damage", "words"), [(exits, "SystemExit: 0"), (raises_its_own, "OwnError"), (long_text, "ValueError: x x x")]
)
def test_whatever_it_raises_is_one_line_with_its_place(damage: Callable[[Any], None], words: str) -> None:
    result = audited("llama", after(damage))
    assert (result.verdict, result.exit_code) == ("unreadable", 2)
    assert f"reading the prompt raises {words}" in result.conclusion()
    assert "(test_an_eviction_may_not_touch_what_is_not_its_own.py, line " in result.conclusion()
    assert len(result.conclusion()) < 400


def test_ctrl_c_is_not_caught() -> None:
    def interrupt(loaded: Any) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        audited("llama", after(interrupt), situations=["single"])


def process_state() -> tuple[Any, ...]:
    return (
        os.getcwd(), dict(os.environ), random.getstate(), np.random.get_state()[1].tolist(),  # noqa: NPY002
        list(warnings.filters), np.geterr(), torch.get_rng_state().tolist(), torch.get_default_dtype(),
        torch.get_num_threads(), torch.get_default_device(),
    )  # fmt: skip


@pytest.mark.parametrize("ending", [None, ValueError])
def test_the_process_is_as_before(tmp_path: Path, ending: type[Exception] | None) -> None:
    before = process_state()
    with contextlib.suppress(PluginError), external_code("it raised"):
        os.chdir(tmp_path)
        os.environ["PERTURBKV_TEST"] = "1"
        random.seed(7)
        np.random.seed(7)  # noqa: NPY002
        np.seterr(all="raise")
        warnings.simplefilter("error")
        torch.manual_seed(7)
        torch.set_default_dtype(torch.float64)
        torch.set_num_threads(torch.get_num_threads() + 1)
        torch.set_default_device("meta")
        if ending is not None:
            raise ending
    assert process_state() == before


def test_an_audit_is_not_disturbed_by_what_an_eviction_sets() -> None:
    def disturb(loaded: Any) -> None:
        torch.set_default_dtype(torch.float64)
        torch.set_default_device("meta")
        print("to nobody")  # noqa: T201

    assert audited("llama", after(disturb), situations=["single"]).verdict == "exact"


def test_prompt_and_mask_are_copies() -> None:
    def evict(loaded: Any, input_ids: torch.Tensor, attention_mask: torch.Tensor) -> Any:
        cache = planted.right(loaded, input_ids, attention_mask)
        input_ids.zero_()
        attention_mask.zero_()
        return cache

    assert audited("llama", evict).verdict == "exact"


def decoded_by(decode: Callable[..., Any]) -> Evict:
    """A right eviction with its own decoding."""

    def evict(loaded: Any, input_ids: torch.Tensor, attention_mask: torch.Tensor) -> Any:
        return planted.right(loaded, input_ids, attention_mask)

    evict.decode = decode  # type: ignore[attr-defined]
    return evict


@pytest.mark.parametrize(
    ("logits", "words"),
    [
        ([1, 2], "list"),
        (torch.zeros(1, 1, 7), r"\(1, 1, 7\)"),
        (torch.zeros(3, 1, 260), r"\(3, 1, 260\)"),
        (torch.zeros(1, 5, 260), r"\(1, 5, 260\)"),
        (torch.zeros(1, 0, 260), r"\(1, 0, 260\)"),
        (torch.zeros(260), r"\(260,\)"),
    ],
)
def test_logits_of_another_shape_are_a_failure(logits: Any, words: str) -> None:
    evict = decoded_by(lambda loaded, cache, token, step: logits)
    expected = rf"decoding token 0 gives {words}, expected logits \(batch, new, vocab\) \(1, 1, 260\)"
    assert re.search(expected, audited("llama", evict, situations=["single"]).conclusion())


def test_decoding_row_by_row_or_token_by_token_cannot_be_read() -> None:
    def token_by_token(loaded: Any, cache: Any, token: torch.Tensor, step: int) -> torch.Tensor:
        return torch.cat([loaded(column, past_key_values=cache).logits for column in token.split(1, dim=1)], dim=1)

    result = audited("llama", decoded_by(token_by_token), situations=["block"])
    assert result.verdict == "unreadable"
    assert "reads 1 × 1 tokens in a call of the model, it got 1 × 8" in result.conclusion()


def test_a_cache_whose_methods_fail_is_one_line() -> None:
    class Failing(DynamicCache):
        def get_seq_length(self, layer_idx: int = 0) -> int:
            raise SystemExit(0)

    def evict(loaded: Any, input_ids: torch.Tensor, attention_mask: torch.Tensor) -> Any:
        cache = Failing()
        cache.layers = planted.right(loaded, input_ids, attention_mask).layers
        return cache

    result = audited("llama", evict)
    assert result.exit_code == 2
    assert "looking at its cache raises SystemExit: 0" in result.conclusion()
