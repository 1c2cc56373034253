"""What an audited eviction does to the model, the process and its arguments is undone or told, whatever it raises."""

from __future__ import annotations

import contextlib
import copy
import functools
import os
import random
import re
import sys
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import numpy as np
import pytest
import torch
from transformers import DynamicCache
from transformers.integrations.sdpa_attention import sdpa_attention_forward as sdpa
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

import perturbkv as pk
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


def scaling_per_head(loaded: Any) -> None:
    loaded.model.layers[0].self_attn.scaling = torch.ones(4, 1, 1)


def patch_torch(loaded: Any) -> None:
    """A function of torch itself, for all that follows."""
    plain = torch.rsqrt
    monkeypatched.setattr(torch, "rsqrt", lambda *args, **named: 0.9 * plain(*args, **named))


monkeypatched = pytest.MonkeyPatch()


@pytest.fixture(autouse=True)
def torch_as_it_is() -> Iterator[None]:
    yield
    monkeypatched.undo()


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (scale_attention, "scaling of model.layers.1.self_attn"),
        (scale_rotary, "attention_scaling of model.rotary_emb"),
        (larger_epsilon, "variance_epsilon of model.norm"),
        (train, "training of the model"),
        (other_activation, "replaced: parts of model.layers.0.mlp"),
        (scaling_per_head, "scaling of model.layers.0.self_attn"),
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
    assert len(result.runs) == 1  # there is no reference any more
    model.cache_clear()


@pytest.mark.slow
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


def patch_registry(loaded: Any) -> None:
    plain = ALL_ATTENTION_FUNCTIONS["sdpa"]

    def attend(module: Any, query: Any, *args: Any, **named: Any) -> Any:
        return plain(module, 0.9 * query, *args, **named)

    ALL_ATTENTION_FUNCTIONS["sdpa"] = attend


def patch_kernel(loaded: Any) -> None:
    plain = torch.nn.functional.scaled_dot_product_attention
    torch.nn.functional.scaled_dot_product_attention = lambda *args, **named: 0.9 * plain(*args, **named)


def patch_linear(loaded: Any) -> None:
    torch.nn.Linear.forward = lambda module, rows: 0.9 * torch.nn.functional.linear(rows, module.weight, module.bias)


def swap_class(loaded: Any) -> None:
    kind = type(loaded.model.layers[0].mlp)

    class Faint(kind):  # type: ignore[misc, valid-type]
        def forward(self, hidden: Any) -> Any:
            return 0.9 * super().forward(hidden)

    loaded.model.layers[0].mlp.__class__ = Faint


def call_of_class(loaded: Any) -> None:
    """A method that the class did not have."""
    kind = type(loaded.model.layers[0].mlp)
    kind.__call__ = lambda module, hidden: 0.9 * module.forward(hidden)


def hook_everywhere(loaded: Any) -> None:
    def faint(module: Any, inputs: Any, output: Any) -> Any:
        return 0.9 * output if type(module).__name__.endswith("MLP") else output

    torch.nn.modules.module.register_module_forward_hook(faint)


@pytest.mark.parametrize(
    "damage",
    [patch_class, patch_function, patch_forward, patch_registry, patch_kernel, patch_linear, swap_class, call_of_class,
     hook_everywhere],
)  # fmt: skip
def test_replaced_functions_are_put_back_before_the_reference_runs(damage: Callable[[Any], None]) -> None:
    """They stay for the eviction's own decoding, which then differs."""
    model.cache_clear()
    loaded = model("llama").model
    with torch.no_grad():
        plain = loaded(torch.arange(9).unsqueeze(0)).logits
        result = audited("llama", after(damage), situations=["single"], losses=True)
        assert result.verdict == "differs"
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
    assert "no plain model is left to compare with: LlamaMLP.forward is of patches.py" in result.conclusion()


def test_a_function_of_the_registry_is_told_too() -> None:
    model("llama")
    with monkeypatched.context() as patched:
        patched.setitem(ALL_ATTENTION_FUNCTIONS._global_mapping, "sdpa", functools.wraps(sdpa)(lambda *args: None))
        result = audited("llama", planted.right, situations=["single"])
    assert "the attention function or mask 'sdpa' is of test_an_eviction_may_not" in result.conclusion()


def test_a_function_that_the_model_does_not_call_may_be_registered() -> None:
    with monkeypatched.context() as patched:
        patched.setitem(ALL_ATTENTION_FUNCTIONS._global_mapping, "mine", lambda *args: None)
        assert audited("llama", planted.right, situations=["single"]).verdict == "exact"


def buffer(loaded: Any) -> None:
    loaded.model.layers[0].self_attn.register_buffer("kept", torch.ones(3))


def scorer(loaded: Any) -> None:
    loaded.model.layers[0].scorer = torch.nn.Linear(2, 2)


def settings(loaded: Any) -> None:
    loaded.config.use_cache = False
    loaded.config.window_size = 32
    del loaded.config.rms_norm_eps
    loaded.model.layers[0].self_attn.config = copy.copy(loaded.config)


def flag(loaded: Any) -> None:
    loaded.patched = type(loaded).patched = True


@pytest.mark.parametrize("addition", [buffer, scorer, settings, flag])
def test_additions_and_settings_are_removed_and_no_fault(addition: Callable[[Any], None]) -> None:
    model.cache_clear()
    loaded = model("llama").model
    before = list(loaded.state_dict()), loaded.config.to_dict()
    assert audited("llama", after(addition)).verdict == "exact"
    assert (list(loaded.state_dict()), loaded.config.to_dict()) == before
    assert not hasattr(loaded, "patched")


@pytest.mark.slow
def test_an_eviction_that_is_patched_in_once_evicts_in_every_situation() -> None:
    """A flag on the model's class goes with the forward that it stands for."""

    def evict(loaded: Any, input_ids: torch.Tensor, attention_mask: torch.Tensor) -> Any:
        attention = type(loaded.model.layers[0].self_attn)
        if not getattr(attention, "is_patched", False):
            attention.is_patched, plain = True, attention.forward

            def forward(module: Any, *args: Any, past_key_values: Any, **named: Any) -> Any:
                result = plain(module, *args, past_key_values=past_key_values, **named)
                layer = past_key_values.layers[module.layer_idx]
                if layer.keys.shape[2] == input_ids.shape[1]:
                    layer.keys, layer.values = layer.keys[:, :, -20:], layer.values[:, :, -20:]
                return result

            attention.forward = forward
        return planted.full(loaded, input_ids, attention_mask)

    for _ in range(2):
        result = audited("llama", evict)
        assert result.verdict == "exact", result.conclusion()
        assert "nothing was evicted" not in result.conclusion()
        assert all(run.entries.evicted for run in result.runs)


def test_situations_without_eviction_are_named() -> None:
    def evict(loaded: Any, input_ids: torch.Tensor, attention_mask: torch.Tensor) -> Any:
        cache = planted.full(loaded, input_ids, attention_mask)
        return cache if len(input_ids) > 1 else planted.gathered(cache, attention_mask)

    evict.decode = masked_decode  # type: ignore[attr-defined]
    result = audited("llama", evict, situations=["single", "batch"])
    assert result.verdict == "exact", result.conclusion()
    assert result.conclusion().endswith("; nothing was evicted in p: batch, row 0, p: batch, row 1")


def masked_decode(loaded: Any, cache: Any, token: torch.Tensor, step: int) -> torch.Tensor:
    """A decoding that hides the padding of a batch."""
    rows, padding = len(token), 60 // 8
    mask = torch.ones(rows, cache.layers[0].keys.shape[2] + token.shape[1], dtype=torch.int64)
    mask[1:, :padding] = 0
    first = torch.tensor([[60], [60 - padding]])[:rows] + step
    return loaded(
        input_ids=token, attention_mask=mask, position_ids=first + torch.arange(token.shape[1]), past_key_values=cache
    ).logits


def test_keeping_everything_of_a_batch_did_nothing() -> None:
    def evict(loaded: Any, input_ids: torch.Tensor, attention_mask: torch.Tensor) -> Any:
        return planted.full(loaded, input_ids, attention_mask)

    evict.decode = masked_decode  # type: ignore[attr-defined]
    assert audited("llama", evict).verdict == "did nothing"


@pytest.mark.parametrize("raised", [KeyboardInterrupt, ValueError])
def test_the_model_is_put_back_whatever_ends_an_audit(raised: type[BaseException]) -> None:
    model.cache_clear()
    loaded = model("llama").model
    forward = type(loaded.model.layers[0].mlp).forward

    def evict(given: Any, input_ids: torch.Tensor, attention_mask: torch.Tensor) -> Any:
        patch_class(given)
        if raised is KeyboardInterrupt:
            raise raised
        return []  # no cache, which ends the audit

    with contextlib.suppress(KeyboardInterrupt):
        assert audited("llama", evict).verdict == "unreadable"
    assert type(loaded.model.layers[0].mlp).forward is forward


def test_faults_stay_where_a_later_situation_cannot_be_read() -> None:
    def evict(loaded: Any, input_ids: torch.Tensor, attention_mask: torch.Tensor) -> Any:
        return planted.swapped_values(loaded, input_ids, attention_mask) if len(input_ids) == 1 else []

    result = audited("llama", evict)
    assert (result.verdict, result.exit_code) == ("differs", 1)
    assert "values of head 1" in result.conclusion()
    assert "then unreadable: expected evict to return a transformers Cache, got list" in result.conclusion()
    suite = ElementTree.fromstring(result.to_junit())
    assert (suite.get("failures"), suite.get("errors")) == ("2", "1")


def test_damage_and_what_is_raised_after_it_are_both_told() -> None:
    model.cache_clear()

    def raises(loaded: Any) -> None:
        scale_weights(loaded)
        raise ValueError("boom")

    result = audited("llama", after(raises))
    assert "it changed the model (weights of lm_head.weight), and reading the prompt raises ValueError: boom" in (
        result.conclusion()
    )
    model.cache_clear()

    def refuses(loaded: Any) -> None:
        scale_weights(loaded)
        raise NotImplementedError

    suite = ElementTree.fromstring(audited("llama", after(refuses)).to_junit())
    assert (suite.get("failures"), suite.get("skipped")) == ("1", "0")
    model.cache_clear()


def unknown_model(loaded: Any) -> None:
    pk.load_model("no-such-draft")


def own_class(loaded: Any) -> None:
    raise ConfigError("not today")


@pytest.mark.parametrize(
    ("raises", "words"), [(own_class, "ConfigError: not today (test_an_"), (unknown_model, "UnknownNameError: unknown")]
)
def test_an_error_class_of_ours_is_no_way_out(raises: Callable[[Any], None], words: str) -> None:
    assert f"reading the prompt raises {words}" in audited("llama", after(raises)).conclusion()


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
        torch.get_num_threads(), torch.get_default_device(), torch.backends.cuda.flash_sdp_enabled(),
        torch.is_grad_enabled(),
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
        torch.backends.cuda.enable_flash_sdp(False)
        torch.set_grad_enabled(not torch.is_grad_enabled())
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
        (
            torch.zeros(1, 1, 260, dtype=torch.bool),
            r"torch.bool .* on cpu, expected dense floating-point logits on cpu",
        ),
        (
            torch.zeros(1, 1, 260, device="meta"),
            r"torch.float32 .* on meta, expected dense floating-point logits on cpu",
        ),
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
    shape = "" if "expected" in words else r", expected logits \(batch, new, vocab\) \(1, 1, 260\)"
    found = audited("llama", evict, situations=["single"]).conclusion()
    assert re.search(f"decoding token 0 gives {words}{shape}", found)


def test_decoding_row_by_row_or_token_by_token_cannot_be_read() -> None:
    def token_by_token(loaded: Any, cache: Any, token: torch.Tensor, step: int) -> torch.Tensor:
        return torch.cat([loaded(column, past_key_values=cache).logits for column in token.split(1, dim=1)], dim=1)

    result = audited("llama", decoded_by(token_by_token), situations=["block"])
    assert result.verdict == "unreadable"
    assert "gives the model 1 × 1 tokens in a call, expected 1 × 8 at once" in result.conclusion()


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
