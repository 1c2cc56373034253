"""What is special about a family is said, and a variant that decoding would get wrong is refused by its name."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers
from transformers import AutoConfig

from perturbkv.configs import layer_types
from perturbkv.errors import ModelError
from perturbkv.models.adapter import Adapter, check_projections
from perturbkv.models.aliases import ALIASES
from perturbkv.models.families import FAMILIES, check_family, check_layers
from perturbkv.models.loading import ByteTokenizer, open_model
from perturbkv.models.user_model import adapt
from tests.support import models
from tests.support.models import MIXED, WINDOW, tiny_adapter, tiny_model, token_ids


def test_every_family_has_a_tiny_model_in_the_tests() -> None:
    assert set(models.FAMILIES) == set(FAMILIES)


@pytest.mark.parametrize("alias", ALIASES)
def test_every_alias_has_the_shapes_of_its_family(alias: str) -> None:
    config = open_model(f"random:{alias}").config
    assert config.model_type == ALIASES[alias].family
    for key, value in ALIASES[alias].shapes.items():
        if key != "rope_parameters":
            assert getattr(config, key) == value, key


def test_the_layers_of_gemma_that_see_everything_are_every_sixth() -> None:
    assert layer_types.format_measured(open_model("random:gemma-3-270m").config) == "5 11 17 of 18"
    assert layer_types.format_measured(open_model("random:gemma-3-1b").config) == "5 11 17 23 of 26"
    assert layer_types.format_measured(open_model("random:llama-3.1-8b").config) == ""


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        ("gemma2", "'gemma2', which soft-caps the logits of its attention; supported: Llama, "),
        ("gemma3", "'gemma3', which reads images beside text; its text part alone .gemma3_text. is supported"),
        ("llama4_text", "'llama4_text', which attends in chunks"),
        ("gpt2", "'gpt2'; supported: "),
    ],
)
def test_families_that_would_be_misread_are_refused_by_name(kind: str, words: str) -> None:
    with pytest.raises(ModelError, match=words):
        check_family(AutoConfig.for_model(kind), "m")


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"attn_logit_softcapping": 50.0}, "soft-caps its attention .attn_logit_softcapping."),
        ({"use_bidirectional_attention": True}, "attends to later tokens .use_bidirectional_attention."),
        ({"is_causal": False}, "attends to later tokens .is_causal."),
        ({"layer_types": ["sliding_attention", "chunked_attention"] * 2}, "layers of the type 'chunked_attention'"),
        ({"layer_types": ["full_attention"]}, "names the types of 1 layers .layer_types. and has 4"),
        ({"sliding_window": None}, "a window of None entries"),
        ({"sliding_window": 1}, "a window of 1 entries"),
        ({"layer_types": ["sliding_attention"] * 4, "sliding_window": None}, "a window of None entries"),
    ],
)
def test_variants_that_would_be_misread_are_refused(changed: dict[str, Any], words: str) -> None:
    model = tiny_model("gemma3_text")
    check_layers(model.config, "m")
    for key, value in changed.items():
        object.__setattr__(model.config, key, value)
    with pytest.raises(ModelError, match=f"{words}.*an eviction study would misread it"):
        Adapter(model, ByteTokenizer(), "m")


@pytest.mark.parametrize("family", [family for family in FAMILIES if not FAMILIES[family].by_layer])
@pytest.mark.parametrize(
    ("types", "window"),
    [
        (["full_attention", "sliding_attention"], WINDOW),
        (["full_attention", "full_attention"], WINDOW),
        (["sliding_attention", "sliding_attention"], WINDOW),
    ],
    ids=["mixed", "full", "sliding"],
)
def test_kinds_of_layers_that_a_familys_code_passes_over_are_refused(
    family: str, types: list[str], window: int
) -> None:
    """Its layers all slide, or none does, whatever `layer_types` says."""
    config = tiny_model(family).config
    object.__setattr__(config, "layer_types", types)
    object.__setattr__(config, "sliding_window", window)
    with pytest.raises(ModelError, match="names kinds of layers .layer_types., which the code of its family passes"):
        check_layers(config, "m")


@pytest.mark.parametrize("family", FAMILIES)
def test_kinds_of_layers_make_a_difference_where_a_familys_code_reads_them(family: str) -> None:
    """Asked of transformers itself: one model with its last layer sliding, or not; a prompt longer than the window."""
    model = tiny_model(family)
    ids, layers = torch.tensor([token_ids(2 * WINDOW)]), model.config.num_hidden_layers
    found = []
    for last in ("full_attention", "sliding_attention"):
        object.__setattr__(model.config, "layer_types", ["full_attention"] * (layers - 1) + [last])
        object.__setattr__(model.config, "sliding_window", WINDOW)
        other = type(model)(model.config).eval()
        other.load_state_dict(model.state_dict())
        with torch.inference_mode():
            found.append(other(input_ids=ids, use_cache=False).logits)
    assert torch.equal(*found) != FAMILIES[family].by_layer


def test_a_sink_in_a_family_without_one_is_refused() -> None:
    adapter = tiny_adapter("llama")
    check_projections(adapter)
    adapter.layers[1].self_attn.sinks = torch.nn.Parameter(torch.zeros(4))
    with pytest.raises(ModelError, match="layer 1 of model 'tiny-llama' has a sink in its softmax"):
        check_projections(adapter)


@pytest.mark.parametrize("kind", ["LlamaModel", "LlamaForTokenClassification", "LlamaForQuestionAnswering"])
def test_a_model_that_predicts_no_tokens_is_refused(kind: str) -> None:
    """Its last numbers are no logits of tokens."""
    model = getattr(transformers, kind)(tiny_model("llama").config)
    with pytest.raises(ModelError, match=f"expected a causal language model .AutoModelForCausalLM., got .*a {kind}"):
        adapt(model, ByteTokenizer())


def test_a_model_of_another_number_of_layers_than_it_says_is_refused() -> None:
    model = tiny_model("gemma3_text")
    model.model.layers = model.model.layers[:2]
    with pytest.raises(ModelError, match="has 2 layers and its configuration says 4; change num_hidden_layers too"):
        adapt(model, ByteTokenizer())


def test_the_family_of_a_given_model_is_looked_at_first() -> None:
    model = transformers.AutoModel.from_config(AutoConfig.for_model("gpt2", n_layer=1, n_embd=8, n_head=1))
    with pytest.raises(ModelError, match="is of the family 'gpt2'; supported: "):
        adapt(model, ByteTokenizer())


@pytest.mark.parametrize("family", MIXED)
def test_a_model_says_how_many_of_its_layers_are_measured(family: str) -> None:
    adapter = tiny_adapter(family)
    assert "4 layers (2 measured) × 4 heads" in repr(adapter)
    assert adapter.layer_indices == (1, 3)
    assert [adapter.layer_of(attention) for attention in adapter.attentions] == [0, 1]
