"""A twin has the class, the kinds of layers, the options and the ratios of its model, and none of its size."""

from __future__ import annotations

import copy
import functools
from typing import Any

import pytest
import torch
from transformers import AutoConfig, ViTConfig
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

from perturbkv.errors import ModelError
from perturbkv.models.proof.twin import make_twin, twin_config

FAMILIES = (
    "llama", "mixtral", "gemma2", "gemma3_text", "gemma3n_text", "gpt_oss", "llama4_text", "deepseek_v3", "qwen3_next",
    "falcon_h1", "gpt2", "opt",
)  # fmt: skip
TEXT = 24
"""Tokens of a text."""


def model_config(family: str, **fields: Any) -> Any:
    """The configuration that a family has by default, which is as large as its models."""
    if family not in CONFIG_MAPPING:
        pytest.skip(f"this transformers has no {family}")
    return AutoConfig.for_model(family, **fields)


@functools.cache
def twin_of(family: str) -> Any:
    return make_twin(model_config(family))


def tokens() -> torch.Tensor:
    return torch.randint(3, 200, (1, TEXT), generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("family", FAMILIES)
def test_a_twin_is_a_small_model_of_the_same_class(family: str) -> None:
    twin = twin_of(family)
    assert type(twin) is MODEL_FOR_CAUSAL_LM_MAPPING[type(model_config(family))]
    assert sum(parameter.numel() for parameter in twin.parameters()) < 2e6
    assert not twin.training
    assert {parameter.dtype for parameter in twin.parameters()} == {torch.float32}


@pytest.mark.parametrize("family", FAMILIES)
def test_all_parameters_of_a_twin_are_drawn(family: str) -> None:
    constant = [
        name
        for name, parameter in twin_of(family).named_parameters()
        if parameter.numel() > 1 and parameter.unique().numel() < parameter.numel() / 2
    ]
    assert constant == []


@pytest.mark.parametrize("family", FAMILIES)
def test_logits_of_a_twin_are_moderate(family: str) -> None:
    with torch.no_grad():
        logits = twin_of(family)(input_ids=tokens()).logits
    assert logits.isfinite().all()
    assert 0.05 < logits.std() < 20


@pytest.mark.parametrize("family", FAMILIES)
def test_attention_of_a_twin_is_neither_uniform_nor_on_one_entry(family: str) -> None:
    with torch.no_grad():
        layers = twin_of(family)(input_ids=tokens(), output_attentions=True).attentions
    for weights in layers:
        last = weights[0, :, -1].double()
        seen = (last > 0).sum(-1)
        entries = last.square().sum(-1).reciprocal() * last.sum(-1).square()
        assert 1.2 < entries.mean() < 0.95 * seen.double().mean()


@pytest.mark.parametrize("family", FAMILIES)
def test_a_short_text_exceeds_the_windows_of_a_twin(family: str) -> None:
    small = twin_of(family).config.to_dict()
    real = model_config(family).to_dict()
    for name in ("sliding_window", "attention_chunk_size"):
        if real.get(name):
            assert 2 <= small[name] < TEXT / 2


@pytest.mark.parametrize("family", FAMILIES)
def test_a_twin_has_each_kind_of_layer_in_the_order_of_its_model(family: str) -> None:
    small, real = (getattr(each, "layer_types", None) or [] for each in (twin_of(family).config, model_config(family)))
    assert list(dict.fromkeys(small)) == list(dict.fromkeys(real))


@pytest.mark.parametrize(
    ("family", "fields", "holds"),
    [
        ("llama", {"num_key_value_heads": 8}, lambda c: c.num_attention_heads > c.num_key_value_heads > 1),
        ("llama", {"num_key_value_heads": 32}, lambda c: c.num_attention_heads == c.num_key_value_heads),
        ("llama", {"num_key_value_heads": 1}, lambda c: c.num_attention_heads > c.num_key_value_heads == 1),
        ("llama", {}, lambda c: c.hidden_size == c.num_attention_heads * c.head_dim),
        ("gpt_oss", {}, lambda c: c.hidden_size < c.num_attention_heads * c.head_dim),
        ("deepseek_v3", {}, lambda c: c.qk_nope_head_dim + c.qk_rope_head_dim > c.v_head_dim),
        ("qwen3_next", {}, lambda c: c.linear_num_value_heads == 2 * c.linear_num_key_heads),
        ("falcon_h1", {}, lambda c: c.mamba_n_heads * c.mamba_d_head == c.mamba_d_ssm),
        ("mamba2", {}, lambda c: c.num_heads * c.head_dim == c.expand * c.hidden_size),
        ("gemma3n_text", {}, lambda c: 0 < c.num_kv_shared_layers < c.num_hidden_layers),
        ("gemma4_text", {"num_kv_shared_layers": 12}, lambda c: 0 < c.num_kv_shared_layers < c.num_hidden_layers),
        ("gemma2", {}, lambda c: c.attn_logit_softcapping > 0 and c.hidden_activation == "gelu_pytorch_tanh"),
    ],
)
def test_relations_between_sizes_and_options_stay(family: str, fields: dict[str, Any], holds: Any) -> None:
    real = model_config(family, **fields)
    assert holds(real)
    assert holds(twin_config(real))


@pytest.mark.parametrize(
    ("family", "name"),
    [
        ("gemma2", "sliding_window"),
        ("gemma2", "attn_logit_softcapping"),
        ("gemma2", "final_logit_softcapping"),
        ("llama4_text", "attention_chunk_size"),
        ("llama4_text", "floor_scale"),
        ("gpt_oss", "sliding_window"),
        ("deepseek_v32", "index_topk"),
    ],
)
def test_what_is_small_changes_a_short_text(family: str, name: str) -> None:
    twin = twin_of(family)
    config = copy.deepcopy(twin.config)
    small = getattr(config, name)
    setattr(config, name, type(small)(100 * small))
    large = type(twin)(config).eval()
    large.load_state_dict(twin.state_dict())
    large.set_attn_implementation("eager")
    with torch.no_grad():
        one, two = (model(input_ids=tokens()).logits for model in (twin, large))
    assert (one - two).abs().max() > 0.005 * one.abs().max()


def test_readers_of_shared_entries_stay_of_each_kind() -> None:
    small, real = twin_of("gemma3n_text").config, model_config("gemma3n_text")
    for config in (small, real):
        own = config.num_hidden_layers - config.num_kv_shared_layers
        assert set(config.layer_types[:own]) == set(config.layer_types[own:])


def test_the_same_seed_draws_the_same_twin_and_leaves_the_global_numbers() -> None:
    before = torch.random.get_rng_state()
    one, same, other = (make_twin(model_config("gpt_oss"), seed) for seed in (1, 1, 2))
    assert torch.equal(torch.random.get_rng_state(), before)
    for a, b, c in zip(one.parameters(), same.parameters(), other.parameters(), strict=True):
        assert torch.equal(a, b)
        assert not torch.equal(a, c)


def test_a_model_whose_vision_cannot_be_small_is_the_part_that_reads_text() -> None:
    assert type(twin_of("gemma3n")) is type(twin_of("gemma3n_text"))


def test_a_second_layer_stays_where_it_shares_the_parameters_of_the_first() -> None:
    twin = make_twin(model_config("zamba", use_mamba_kernels=False))
    assert twin.config.layers_block_type.count("hybrid") == 2


def test_a_configuration_without_a_causal_model_is_refused() -> None:
    with pytest.raises(ModelError, match="expected a configuration of a causal language model"):
        make_twin(ViTConfig())


def test_what_cannot_be_built_is_refused_with_the_reason() -> None:
    config = model_config("llama", hidden_act="unheard")
    with pytest.raises(ModelError, match="'llama'.*unheard"):
        make_twin(config)
