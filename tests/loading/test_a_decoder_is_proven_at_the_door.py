"""What a decoder's attention is, is found by running it; what would be measured wrongly is refused by a check."""

from __future__ import annotations

import re
import sys
import weakref
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, LlamaForCausalLM
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, sdpa_mask
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.models.llama.modeling_llama import LlamaAttention, apply_rotary_pos_emb

from perturbkv.configs import layer_types
from perturbkv.errors import ModelError
from perturbkv.models import recurrent_states
from perturbkv.models.aliases import ALIASES
from perturbkv.models.attention_facts import LayerFacts, RefusedError
from perturbkv.models.loading import ByteTokenizer, open_model
from perturbkv.models.proof import _check_measured, layers, prove
from perturbkv.models.proof.calls import TOKENS
from perturbkv.models.proof.masks import mask_kind
from perturbkv.models.sanity import check_config
from perturbkv.models.user_model import adapt
from perturbkv.pipeline.sample.capture import Observer, capture
from tests.support.hybrids import hybrid_model
from tests.support.models import MIXED, tiny_adapter, tiny_model


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


@pytest.mark.parametrize("family", MIXED)
def test_a_model_says_how_many_of_its_layers_are_measured(family: str) -> None:
    adapter = tiny_adapter(family)
    assert "4 layers (2 measured) × 4 heads" in repr(adapter)
    assert adapter.layer_indices == (1, 3)
    assert [adapter.layer_of(attention) for attention in adapter.attentions] == [0, 1]


class Changed(LlamaAttention):
    """Llama's attention with something else before, in or after its softmax; the parts are attributes to replace."""

    def before(self, query: Tensor, key: Tensor, value: Tensor, mask: Any) -> tuple[Any, ...]:
        return query, key, value, mask

    def after(self, output: Tensor, hidden: Tensor) -> Tensor:
        return output

    def project(self, output: Tensor) -> Tensor:
        return self.o_proj(output)

    def attend(self, *given: Any, **options: Any) -> Tensor:
        return ALL_ATTENTION_FUNCTIONS[self.config._attn_implementation](self, *given, **options)[0]

    def forward(
        self, hidden_states: Tensor, position_embeddings: Any = None, attention_mask: Any = None,
        past_key_values: Any = None, cache: Any = None, **kwargs: Any,
    ) -> tuple[Tensor, None]:  # fmt: skip
        cache = cache if past_key_values is None else past_key_values  # named so by the newest transformers
        shape = (*hidden_states.shape[:-1], -1, self.head_dim)
        query, key, value = (
            part(hidden_states).view(shape).transpose(1, 2) for part in (self.q_proj, self.k_proj, self.v_proj)
        )
        query, key = apply_rotary_pos_emb(query, key, *position_embeddings)
        if cache is not None:
            key, value = cache.update(key, value, self.layer_idx)
        given = self.before(query, key, value, attention_mask)
        output = self.attend(*given, dropout=0.0, scaling=self.scaling)
        output = self.after(output, hidden_states)
        return self.project(output.reshape(*hidden_states.shape[:-1], -1)), None


def changed_model(**parts: Callable[..., Any]) -> Any:
    """Return a tiny Llama whose second layer's attention has other parts: functions of the module and their inputs."""
    model = tiny_model("llama", layers=2)
    plain = model.model.layers[1].self_attn
    kind = type("Changed", (Changed,), parts)
    other = kind(model.config, 1).eval()
    other.load_state_dict(plain.state_dict())
    model.model.layers[1].self_attn = other
    return model


def refusal(model: Any) -> str:
    with pytest.raises(ModelError) as raised:
        adapt(model, ByteTokenizer())
    return str(raised.value)


def test_the_plain_attention_of_these_tests_is_accepted() -> None:
    assert adapt(changed_model(), ByteTokenizer()).facts == adapt(tiny_model("llama"), ByteTokenizer()).facts


def later(module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Any) -> tuple[Any, ...]:
    return query, key, value, torch.ones(1, 1, query.shape[2], key.shape[2], dtype=torch.bool)


def without_sinks(module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Any) -> tuple[Any, ...]:
    mask = torch.ones(query.shape[2], key.shape[2], dtype=torch.bool).tril(key.shape[2] - query.shape[2])
    mask[8:, :4] = False
    return query, key, value, mask[None, None]


def without_sinks_in_place(module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Any) -> tuple[Any, ...]:
    if mask is not None:
        mask[..., 8:, :4] = False
    return query, key, value, mask


def by_values(module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Any) -> tuple[Any, ...]:
    causal = torch.full((query.shape[2], key.shape[2]), -1e9).triu(1 + key.shape[2] - query.shape[2])
    return query, key, value, causal[None, None] + value.norm(dim=-1).mean(dim=1)[:, None, None]


def twice(module: Any, *given: Any, **options: Any) -> Tensor:
    return Changed.attend(module, *given, **options) + Changed.attend(module, *given, **options)


def with_memory(module: Any, output: Tensor, hidden: Tensor) -> Tensor:
    module.__dict__.setdefault("seen", torch.zeros(hidden.shape[-1]))
    found = output + 0.5 * module.seen.view(1, 1, *output.shape[2:])
    module.seen = hidden[0, -1].detach().clone()
    return found


def past_the_map(module: Any, output: Tensor) -> Tensor:
    return module.o_proj(output) + output.flip(-1)


def beside_the_map(module: Any, output: Tensor) -> Tensor:
    """Times a function of the heads' outputs, which is 0 where the map puts out 0."""
    return module.o_proj(output) * (1 + output.flip(-1))


def keep_entries(module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Any) -> tuple[Any, ...]:
    module.__dict__["read"] = key, value
    return query, key, value, mask


def by_mean_values(module: Any, output: Tensor) -> Tensor:
    """Times a gate behind the map from all values up to each token's."""
    value = module.read[1].mean(dim=(1, 3))
    means = value.cumsum(dim=1) / torch.arange(1, value.shape[1] + 1)
    return module.o_proj(output) * (1 + means[:, -output.shape[1] :, None])


def of_earlier_tokens(module: Any, output: Tensor, hidden: Tensor) -> Tensor:
    """Times a gate from what stood before each token in the same pass, the first of which knows of nothing."""
    before = hidden.cumsum(dim=1) - hidden
    return output * before.view(*output.shape).sigmoid()


def of_the_last_pass(module: Any, output: Tensor, hidden: Tensor) -> Tensor:
    """Times a gate from the token before, which the module remembers."""
    seen = module.__dict__.get("seen", torch.zeros_like(hidden[:1, -1:]))
    before = torch.cat([seen.expand_as(hidden[:, :1]), hidden[:, :-1]], dim=1)
    module.__dict__["seen"] = hidden[:1, -1:].detach().clone()
    return output * before.view(*output.shape).sigmoid()


def of_the_entries(module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Any) -> tuple[Any, ...]:
    module.__dict__["mean"] = value.mean(dim=2).repeat_interleave(query.shape[1] // value.shape[1], dim=1).unsqueeze(1)
    return query, key, value, mask


def normed(module: Any, output: Tensor, hidden: Tensor) -> Tensor:
    """As where a norm stands before the projection; random outputs are about as long as ones."""
    flat = output.flatten(2)
    return torch.nn.functional.rms_norm(flat, flat.shape[-1:]).view_as(output)


TURN = torch.linalg.qr(torch.randn(8, 8, generator=torch.Generator().manual_seed(0)))[0]


@pytest.mark.parametrize(
    ("parts", "check", "words"),
    [
        ({"after": lambda module, output, hidden: output.tanh()}, "projection", "changes its heads' outputs before"),
        ({"after": lambda module, output, hidden: output.flip(2)}, "projection", "changes its heads' outputs before"),
        ({"after": lambda module, output, hidden: output @ TURN}, "projection", "changes its heads' outputs before"),
        ({"after": lambda module, output, hidden: output * output.sigmoid()}, "projection", "changes its heads'"),
        ({"after": normed}, "projection", "changes its heads' outputs before any map receives them"),
        ({"after": lambda module, output, hidden: output * output.mean(dim=(2, 3), keepdim=True).sigmoid()},
         "projection", "changes its heads' outputs before any map receives them"),
        ({"before": of_the_entries, "after": lambda module, output, hidden: output * module.mean.sigmoid()},
         "projection", "changes its heads' outputs before any map receives them"),
        ({"after": with_memory}, "projection", "changes its heads' outputs before any map receives them"),
        ({"project": past_the_map}, "projection", "lets its heads' outputs past the map that receives them"),
        ({"project": beside_the_map}, "projection", "lets its heads' outputs past the map that receives them"),
        ({"before": keep_entries, "project": by_mean_values}, "projection",
         "lets its heads' outputs past the map that receives them"),
        ({"project": lambda module, output: module.o_proj(output.flip(-1)) + module.o_proj(output)}, "projection",
         "calls 'o_proj', which receives its heads' outputs, 2 times"),
        ({"after": lambda module, output, hidden: output.clamp(-30, 30)}, "projection", "changes its heads' outputs"),
        ({"before": without_sinks}, "mask", "has a mask that transformers did not make from positions"),
        ({"before": without_sinks_in_place}, "mask", "has a mask that is not what its rule says"),
        ({"before": by_values}, "mask", "has a mask that transformers did not make from positions"),
        ({"before": later}, "mask", "has a mask that transformers did not make from positions"),
        ({"before": lambda module, query, key, value, mask: (query, key, key, mask)}, "cache",
         "attends to other values than its cache holds"),
        ({"before": lambda module, query, key, value, mask: (query, key, value.roll(1, 2), mask)}, "cache",
         "attends to other values than its cache holds"),
        ({"attend": twice}, "interface", "calls the attention interface 2 times"),
        ({"attend": lambda module, query, key, value, mask, **options: Changed.attend(
            module, query, key, value, mask, position_bias=torch.ones(1), **options)}, "keywords",
         "gives its attention 'position_bias', which is not known here"),
        ({"attend": lambda module, query, key, value, mask, **options: torch.zeros_like(query).transpose(1, 2)},
         "interface", "never calls the attention interface"),
    ],
    ids=["post-processed", "permuted", "rotated", "output-gate", "norm", "gate-of-all-outputs",
         "gate-of-entries", "memory-of-outputs", "past-the-map", "beside-the-map",
         "values-behind-the-map", "map-called-twice", "clamped", "sinks-hidden", "sinks-hidden-in-place",
         "mask-of-values", "later-tokens", "keys-as-values", "values-moved",
         "second-attention", "unknown-keyword", "none"],
)  # fmt: skip
def test_attention_that_would_be_measured_wrongly_is_refused(parts: dict[str, Any], check: str, words: str) -> None:
    found = refusal(changed_model(**parts))
    assert f"of model 'LlamaForCausalLM' {words}" in found
    assert found.endswith(f"; an eviction study would misread it (proof: {check})")


def by_number_of_keys(module: Any, output: Tensor, hidden: Tensor) -> Tensor:
    count = module.read[0].shape[2]
    return output / torch.arange(1 + count - output.shape[1], 1 + count).sqrt()[:, None, None]


def with_mean_key(module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Any) -> tuple[Any, ...]:
    means = key.cumsum(dim=2) / torch.arange(1, key.shape[2] + 1)[:, None]
    return query + means[:, :, -query.shape[2] :].repeat_interleave(2, dim=1), key, value, mask


def averaging(store: Callable[[Any], dict[str, Any]]) -> Any:
    """Return a model whose second layer's attention reads the mean of all tokens so far, summed in `store(cache)`."""

    def forward(module: Any, hidden_states: Tensor, *args: Any, **given: Any) -> Any:
        kept = store(cache) if (cache := given.get("past_key_values", given.get("cache"))) is not None else {}
        total, count = kept.get("mean", (0.0, 0))
        sums = total + hidden_states.cumsum(dim=1)
        kept["mean"] = sums[:, -1:].clone(), count + hidden_states.shape[1]
        counts = count + torch.arange(1, hidden_states.shape[1] + 1)[:, None]
        return Changed.forward(module, sums / counts, *args, **given)

    return changed_model(forward=forward)


_MEANS: weakref.WeakKeyDictionary[Any, dict[str, Any]] = weakref.WeakKeyDictionary()


@pytest.mark.parametrize(
    "make",
    [
        lambda: changed_model(before=keep_entries, after=by_number_of_keys),
        lambda: changed_model(before=with_mean_key),
        lambda: averaging(lambda cache: _MEANS.setdefault(cache, {})),
        lambda: averaging(lambda cache: vars(cache.layers[1])),
    ],
    ids=["number-of-keys", "cached-keys-in-queries", "state-of-the-cache-object", "state-on-the-cache-layer"],
)
def test_what_depends_on_entries_that_an_evicted_cache_lacks_is_refused(make: Callable[[], Any]) -> None:
    found = refusal(make())
    assert "decodes from an evicted cache otherwise than with the evicted entries masked" in found
    assert found.endswith("(proof: evicted)")


@pytest.mark.parametrize("hides", [lambda token: token == 2, lambda token: token >= 600], ids=["special", "late"])
def test_a_mask_of_what_tokens_are_is_refused(hides: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A rule that can be asked beyond the text, of which a text of early, ordinary tokens shows nothing."""
    model = tiny_model("llama", vocab=1000, eos_token_id=2)
    read: Any = sys.modules[type(model.model).__module__]
    stock, given = read.create_causal_mask, dict[str, Tensor]()
    model.register_forward_pre_hook(
        lambda module, args, kwargs: given.update(ids=kwargs["input_ids"]), with_kwargs=True
    )

    def create(**options: Any) -> Any:
        ids = given["ids"]
        rule = lambda b, h, q, k: ~hides(ids[b, k % ids.shape[1]]) | (q == k)  # noqa: E731
        return stock(**options, and_mask_function=rule)

    monkeypatch.setattr(read, "create_causal_mask", create)
    assert "sees neither all earlier entries nor a window or chunk of them" in refusal(model)


@pytest.mark.parametrize("scaled", [False, True])
def test_an_attention_implementation_of_somebodys_own_is_one_if_it_computes_attention(
    scaled: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    def attend(module: nn.Module, query: Tensor, *given: Any, **options: Any) -> Any:
        query = nn.functional.normalize(query, dim=-1) if scaled else query
        return ALL_ATTENTION_FUNCTIONS["sdpa"](module, query, *given, **options)

    for functions, function in ((ALL_ATTENTION_FUNCTIONS, attend), (ALL_MASK_ATTENTION_FUNCTIONS, sdpa_mask)):
        monkeypatch.setitem(type(functions)._global_mapping, "mine", function)
    model = tiny_model("llama")
    model.set_attn_implementation("mine")
    if not scaled:
        assert adapt(model, ByteTokenizer()).facts == adapt(tiny_model("llama"), ByteTokenizer()).facts
    else:
        assert "computes by its attention implementation 'mine' what attention is not" in refusal(model)


@pytest.mark.parametrize("gate", [of_earlier_tokens, of_the_last_pass])
def test_a_gate_of_other_tokens_is_refused_as_decoding_does_not_know_them(gate: Callable[..., Any]) -> None:
    found = refusal(changed_model(after=gate))
    assert "reads a text in two parts otherwise than at once" in found or "remembers another text" in found


@pytest.mark.parametrize(
    "after",
    [
        lambda module, output, hidden: output * module.q_proj(hidden).view(*output.shape).sigmoid(),
        lambda module, output, hidden: output * hidden[..., :4, None].tanh(),
        lambda module, output, hidden: output * 0.5,
        lambda module, output, hidden: (output.transpose(1, 2) * hidden[:, None, :, :8]).transpose(1, 2).contiguous(),
        lambda module, output, hidden: torch.cat([one * 2 for one in output.float().split(2, dim=2)], dim=2).to(hidden),
    ],
    ids=["element", "head-and-signed", "constant", "transposed", "in-parts"],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_gate_from_the_query_token_is_accepted_and_captured(after: Any, dtype: torch.dtype) -> None:
    model = changed_model(after=after).to(dtype)
    attention = model.model.layers[1].self_attn
    gates, hidden = dict[int, Tensor](), dict[int, Tensor]()
    adapter = adapt(model, ByteTokenizer())
    assert [layer.has_gate for layer in adapter.facts.layers] == [False, True]
    ids = torch.tensor([list(range(20))])
    with torch.inference_mode():
        plain = model(ids).logits
        with capture(adapter, Observer(gate=gates.__setitem__, attention_input=hidden.__setitem__)):
            assert torch.equal(model(ids).logits, plain)
        ones = torch.ones(1, 20, 4, 8, dtype=dtype)
        assert torch.equal(gates.pop(1), after(attention, ones, hidden[1]).flatten(2))
    assert not gates


@pytest.mark.parametrize("gating", ["per-head", "per-element"])
def test_the_gates_of_a_family_are_found(gating: str) -> None:
    adapter = tiny_adapter("laguna", gating=gating)
    assert adapter.layer_indices == (1, 3)
    assert all(layer.has_gate for layer in adapter.facts.layers)
    assert not tiny_adapter("llama").has_gates


def test_code_that_loses_what_stands_beside_the_output_is_refused_at_the_door() -> None:
    def through_a_buffer(module: Any, output: Tensor, hidden: Tensor) -> Tensor:
        made = torch.empty_like(hidden).view(*output.shape)
        made[:] = output
        return made * hidden.view(*output.shape).sigmoid()

    assert "expected a projection that receives what follows from attention's output" in refusal(
        changed_model(after=through_a_buffer)
    )


of_latents = pytest.mark.skipif(
    tuple(map(int, transformers.__version__.split(".")[:2])) < (5, 23), reason="older transformers have other caches"
)


def latent_model(expand: Callable[..., Any], size: float = 1.0) -> Any:
    """A tiny DeepSeek V3 whose second layer makes keys and values of latents by `expand(module, stock, *latents)`.

    What the layer puts out is multiplied by `size`.
    """
    model = tiny_model("deepseek_v3", 4, 4)
    attention = model.model.layers[1].self_attn
    stock = attention.expand_kv
    attention.expand_kv = lambda *latents: expand(attention, stock, *latents)
    attention.register_forward_pre_hook(
        lambda module, args, given: module.__dict__.update(new=given["hidden_states"].shape[1]), with_kwargs=True
    )
    with torch.no_grad():
        attention.o_proj.weight.mul_(size)
    return model


def in_decoding(module: Any, stock: Any, latent: Tensor, rotated: Tensor) -> Any:
    return stock(latent * (1.5 if module.new == 1 else 1.0), rotated)


def before(latent: Tensor) -> Tensor:
    """Each token's latent with that of the token before it."""
    return latent + torch.nn.functional.pad(latent, (0, 0, 1, 0))[:, :, :-1]


def values_of_new(module: Any, stock: Any, latent: Tensor, rotated: Tensor) -> Any:
    return stock(latent, rotated)[0], stock(latent / module.new, rotated)[1]


@of_latents
@pytest.mark.parametrize(
    ("expand", "what"),
    [
        (in_decoding, "keys"),
        (
            lambda module, stock, latent, rotated: stock(latent - latent[:, :, -module.new :].mean(2, True), rotated),
            "keys",
        ),
        (values_of_new, "values"),
    ],
    ids=["in-decoding", "mixed-with-new-ones", "values"],
)
def test_a_latent_that_becomes_other_entries_later_is_refused(expand: Any, what: str) -> None:
    assert "(proof: parts)" in refusal(latent_model(expand))
    found = refusal(latent_model(expand, size=1e-5))  # which logits do not show
    assert f"layer 1 of model 'DeepseekV3ForCausalLM' reads other {what} while it decodes" in found
    assert found.endswith("(proof: decoding)")


@of_latents
def test_a_latent_that_becomes_entries_with_others_is_refused_as_an_evicted_cache_lacks_them() -> None:
    model = latent_model(lambda module, stock, latent, rotated: stock(before(latent), rotated))
    with pytest.raises(RefusedError, match="decodes from an evicted cache otherwise"):
        prove(model)
    assert [layer.latent for layer in prove(tiny_model("deepseek_v3", 4, 4)).layers] == [14, 14]


def test_entries_that_change_in_the_cache_while_decoding_are_refused() -> None:
    """What attention reads is what the cache holds then, but no longer what it held."""

    def faded(module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Any) -> tuple[Any, ...]:
        if query.shape[2] < key.shape[2]:
            key[:, :, :-1] *= 0.5
        return query, key, value, mask

    model = changed_model(before=faded)
    with torch.no_grad():
        model.model.layers[1].self_attn.o_proj.weight.mul_(1e-5)  # so that logits do not show it
    assert "layer 1 of model 'LlamaForCausalLM' reads other keys while it decodes" in refusal(model)


class Routed(nn.Module):
    """A projection with one of two additions, as each token's hidden state says; alone, it is the plain matrix."""

    def __init__(self, plain: nn.Linear, size: float) -> None:
        super().__init__()
        self.plain, self.routes = plain, torch.zeros(0)
        self.additions = nn.Parameter(size * torch.randn(2, *plain.weight.shape) / plain.weight.shape[1] ** 0.5)

    def forward(self, rows: Tensor) -> Tensor:
        return self.add(torch.nn.functional.linear(rows, self.plain.weight), rows)

    def add(self, output: Tensor, rows: Tensor) -> Tensor:
        if rows.shape[:-1] != self.routes.shape:
            return output
        return output + torch.einsum("...ij,...j->...i", self.additions[self.routes.long()], rows)


@pytest.mark.parametrize("size", [1.0, 0.1])
def test_a_projection_whose_matrix_depends_on_the_token_is_refused(size: float) -> None:
    """By a router on the attention's input (mixtures of LoRA), and by a hook on a plain linear layer."""

    words = "which is no fixed matrix: what it does in a text depends on more than its input"
    for hooked in (False, True):
        model = tiny_model("llama")
        attention = model.model.layers[1].self_attn
        routed = Routed(attention.o_proj, size)

        def route(module: nn.Module, args: Any, kwargs: Any, routed: Routed = routed) -> None:
            routed.routes = kwargs["hidden_states"][..., 0] > 0

        attention.register_forward_pre_hook(route, with_kwargs=True)
        if hooked:
            attention.o_proj.register_forward_hook(
                lambda module, args, output, routed=routed: routed.add(output, *args)
            )
        else:
            attention.o_proj = routed
        assert words in refusal(model)


def test_a_state_outside_the_cache_is_refused() -> None:
    model = tiny_model("llama")
    norm = model.model.layers[0].input_layernorm

    def remembered(module: nn.Module, args: Any, output: Tensor) -> Tensor:
        before = module.__dict__.get("seen", 0.0)
        module.__dict__["seen"] = output[0, -1].detach().clone()
        return output if output.shape[1] > 1 else output + before

    norm.register_forward_hook(remembered)
    found = refusal(model)
    assert "reads a text in two parts otherwise than at once" in found or "remembers another text" in found


def test_a_decoder_of_a_class_of_somebodys_own_is_accepted() -> None:
    """With parts under names of its own, and a configuration that transformers does not know."""

    class OwnConfig(transformers.LlamaConfig):
        model_type = "somebodys_own"

    class OwnAttention(Changed):
        def __init__(self, config: Any, layer_idx: int) -> None:
            super().__init__(config, layer_idx)
            self.back = self.o_proj
            del self.o_proj

        def project(self, output: Tensor) -> Tensor:
            return self.back(output)

    config = OwnConfig(**tiny_model("llama").config.to_diff_dict() | {"model_type": "somebodys_own"})
    config._attn_implementation = "sdpa"
    model = LlamaForCausalLM(config).eval()
    for index, layer in enumerate(model.model.layers):
        layer.attention_of_mine = OwnAttention(config, index)
        layer.__dict__["self_attn"] = layer.attention_of_mine
        del layer._modules["self_attn"]
    facts = adapt(model.eval(), ByteTokenizer()).facts
    assert [(layer.attention, layer.projection) for layer in facts.layers] == [("attention_of_mine", "back")] * 2


@pytest.mark.parametrize(
    ("family", "path", "projection"),
    [
        ("gpt2", "transformer.h", "c_proj"),
        ("opt", "model.decoder.layers", "out_proj"),
        ("gpt_neox", "gpt_neox.layers", "dense"),
        ("modernbert-decoder", "model.layers", "Wo"),
        ("gemma2", "model.layers", "o_proj"),
    ],
)
def test_parts_are_found_where_they_are(family: str, path: str, projection: str) -> None:
    sizes = {"hidden_size": 32, "intermediate_size": 48, "ffn_dim": 48, "num_hidden_layers": 2,
             "num_attention_heads": 4, "vocab_size": 260, "word_embed_proj_dim": 32, "max_position_embeddings": 64,
             "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}  # fmt: skip
    config = AutoConfig.for_model(family, **sizes)
    facts = adapt(AutoModelForCausalLM.from_config(config).eval(), ByteTokenizer()).facts
    assert facts.path == path
    assert {layer.projection for layer in facts.layers} == {projection}
    assert {layer.cap for layer in facts.layers} == {50.0 if family == "gemma2" else None}


@pytest.mark.parametrize("family", ["gpt2", "opt", "cohere", "glm"])
def test_keys_that_are_not_rotated_by_halves_have_no_rotary_module(family: str) -> None:
    sizes = {"hidden_size": 32, "intermediate_size": 48, "ffn_dim": 48, "num_hidden_layers": 2, "head_dim": 8,
             "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 260, "word_embed_proj_dim": 32,
             "max_position_embeddings": 64, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}  # fmt: skip
    config = AutoConfig.for_model(family, **sizes)
    assert adapt(AutoModelForCausalLM.from_config(config).eval(), ByteTokenizer()).rotary is None


@pytest.mark.parametrize(
    ("rule", "kind"),
    [
        (lambda b, h, q, k: k <= q, ("full", None)),
        (lambda b, h, q, k: (k <= q) & (k > q - 4096), ("sliding", 4096)),
        (lambda b, h, q, k: (k <= q) & (k // 8192 == q // 8192), ("chunked", 8192)),
        (lambda b, h, q, k: (k <= q) & ((k > q - 512) | (k < 4)), None),
        (lambda b, h, q, k: k < q + 2, None),
        (lambda b, h, q, k: (k <= q) & (k != 5), None),
        (lambda b, h, q, k: (k <= q) & (k > q - 100 - q // 1000), None),
    ],
)
def test_the_kind_of_a_mask_is_told_by_its_rule_far_beyond_the_probe(rule: Any, kind: Any) -> None:
    assert mask_kind(rule) == kind


class Sharing(Changed):
    """Llama's attention that reads, where `owners` says so, what another layer's gave its own; `read` may change it."""

    owners: dict[int, int]
    given: dict[int, tuple[Tensor, Tensor]]

    def read(self, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        return key, value

    def owner(self, query: Tensor, key: Tensor) -> int | None:
        return self.owners.get(self.layer_idx)

    def before(self, query: Tensor, key: Tensor, value: Tensor, mask: Any) -> tuple[Any, ...]:
        if (owner := self.owner(query, key)) is not None:
            return (query, *self.read(*self.given[owner]), mask)
        self.given[self.layer_idx] = key, value
        return query, key, value, mask

    def forward(
        self, hidden_states: Tensor, *args: Any, past_key_values: Any = None, cache: Any = None, **kwargs: Any
    ) -> Any:
        own = None if self.layer_idx in self.owners else cache if past_key_values is None else past_key_values
        return super().forward(hidden_states, *args, past_key_values=own, **kwargs)


def sharing_model(owners: dict[int, int], **parts: Callable[..., Any]) -> Any:
    """Return a tiny Llama of three layers, those in `owners` without a cache of their own."""
    model = tiny_model("llama", layers=3)
    kind = type("Sharing", (Sharing,), {"owners": owners, "given": {}, **parts})
    for index, layer in enumerate(model.model.layers):
        plain, layer.self_attn = layer.self_attn, kind(model.config, index).eval()
        layer.self_attn.load_state_dict(plain.state_dict())
    return model


def test_a_layer_that_reads_another_layers_cache_is_accepted_with_its_owner() -> None:
    facts = adapt(sharing_model({2: 1}), ByteTokenizer()).facts
    assert [layer.owner for layer in facts.layers] == [None, None, 1]


def turned(module: Any, query: Tensor, key: Tensor) -> int | None:
    """Layer 2 reads layer 0's entries in a prompt, and layer 1's while it decodes."""
    return (0 if query.shape[2] > 8 else 1) if module.layer_idx == 2 else None


@pytest.mark.parametrize(
    ("owners", "parts", "words"),
    [
        ({2: 1}, {"read": lambda module, key, value: (2 * key, value)},
         "layer 2 of model '.*' fills no cache of its own, and reads those of no single other layer"),
        ({2: 1}, {"read": lambda module, key, value: (key.roll(1, -1), value)},
         "layer 2 of model '.*' fills no cache of its own, and reads those of no single other layer"),
        ({2: 1}, {"read": lambda module, key, value: (module.given[0][0], value)},
         "layer 2 of model '.*' fills no cache of its own, and reads those of no single other layer"),
        ({2: 1}, {"read": lambda module, key, value: (key, 1.1 * value) if key.shape[2] != TOKENS else (key, value)},
         "layer 2 of model '.*' attends to other values than the cache of layer 1 holds, whose entries it read before"),
        ({2: 1}, {"owner": turned},
         "layer 2 of model '.*' attends to other keys than the cache of layer 0 holds, whose entries it read before"),
        ({1: 0}, {}, "layer 2 of model '.*' fills a cache after layer 1, which reads another's"),
    ],
    ids=["scaled", "moved", "two-owners", "scaled-later", "another-later", "before-a-cache"],
)  # fmt: skip
def test_what_else_a_layer_without_a_cache_reads_is_refused(
    owners: dict[int, int], parts: dict[str, Any], words: str
) -> None:
    assert re.search(rf"{words}.* [(]proof: cache[)]", refusal(sharing_model(owners, **parts)))


def test_entries_that_two_layers_hold_alike_have_no_owner() -> None:
    model = sharing_model({2: 1})
    one, other = (model.model.layers[index].self_attn for index in (0, 1))
    for module in (one, other):
        torch.nn.init.zeros_(module.k_proj.weight)
        torch.nn.init.zeros_(module.v_proj.weight)
    found = refusal(model)
    assert "layer 2 of model 'LlamaForCausalLM' fills no cache of its own, and reads entries that layers 0 and" in found


def test_entries_on_another_device_are_refused() -> None:
    entries = torch.randn(1, 2, 6, 8)
    cached = SimpleNamespace(keys=entries, values=entries)
    call = SimpleNamespace(query=torch.empty(1, device="meta"), key=entries, value=entries)
    cache = SimpleNamespace(layers=[cached, SimpleNamespace(keys=None)])
    with pytest.raises(RefusedError, match="reads entries of layer 0 from another device; load it on one"):
        layers._find_owner(1, call, cache)


def test_a_reader_that_sees_otherwise_than_its_owner_is_refused() -> None:
    sliding = LayerFacts("attention", "o_proj", "sliding", 8, 4, 2, 8, 8, 1.0)
    for changed in ({"kind": "full", "window": None}, {"window": 9}):
        with pytest.raises(RefusedError, match="reads the entries of layer 0, and does not see those that it sees"):
            _check_measured([sliding, replace(sliding, owner=0, **changed)], ())
    _check_measured([sliding, replace(sliding, owner=0)], (0, 1))


def prompt_queries_dropped(*dropping: int) -> Any:
    """Return a Llama some of whose layers have the last query alone where the last logits alone are asked for."""

    def before(module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Any) -> tuple[Any, ...]:
        module.__dict__["queries"] = query.shape[2]
        if module.layer_idx in dropping and module.given.get("logits_to_keep") == 1:
            return query[:, :, -1:], key, value, None if mask is None else mask[:, :, -1:]
        return query, key, value, mask

    def after(module: Any, output: Tensor, hidden: Tensor) -> Tensor:
        return output.expand(-1, module.queries, -1, -1)

    model = sharing_model({}, before=before, after=after)
    given = model.model.layers[0].self_attn.given
    model.register_forward_pre_hook(lambda module, args, kwargs: given.update(kwargs), with_kwargs=True)
    return model


def test_a_layer_with_a_cache_that_drops_a_prompts_queries_is_refused() -> None:
    assert adapt(prompt_queries_dropped(), ByteTokenizer()).owners == (0, 1, 2)
    found = refusal(prompt_queries_dropped(2))
    assert "layer 2 of model 'LlamaForCausalLM' has the queries of 1 of 24 tokens" in found


def test_logits_that_differ_where_the_last_alone_are_asked_for_are_refused() -> None:
    model = tiny_model("llama")
    asked = dict[str, Any]()
    model.register_forward_pre_hook(lambda module, args, kwargs: asked.update(kwargs), with_kwargs=True)
    model.model.norm.register_forward_hook(
        lambda module, args, output: output.flip(-1) if asked.pop("logits_to_keep", 0) == 1 else output
    )
    assert "reads a text otherwise for its last logits" in refusal(model)


def test_layers_that_put_out_no_residual_streams_are_refused() -> None:
    model = tiny_model("llama")
    model.model.layers[0].register_forward_hook(lambda module, args, output: output[None, None])
    model.model.layers[1].register_forward_pre_hook(lambda module, args: (args[0][0, 0], *args[1:]))
    assert re.search(r"layer 0 of model .* puts out numbers of the shape .1, 1, 5, 2, 32.", refusal(model))


@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")
def test_a_wrapped_or_compiled_model_says_what_to_give_instead() -> None:
    class Wrapper(nn.Module):
        """As PEFT's: what it lacks is the model's inside."""

        def __init__(self, model: Any) -> None:
            super().__init__()
            self.inside = model

        def merge_and_unload(self) -> Any:
            return self.inside

        def __getattr__(self, name: str) -> Any:
            return super().__getattr__(name) if name == "inside" else getattr(self.inside, name)

    wrapped = Wrapper(tiny_model("llama"))
    found = refusal(wrapped)
    assert "got a Wrapper around one; give it as load_model(model.merge_and_unload(), tokenizer=…)" in found
    assert adapt(wrapped.merge_and_unload(), ByteTokenizer()).facts
    compiled = torch.compile(tiny_model("llama"))
    inside, inner = tiny_model("llama"), tiny_model("llama")
    inside.compile()
    inner.model.layers[0].mlp = torch.compile(inner.model.layers[0].mlp)
    for model in (compiled, inside, inner):
        assert "as it is before torch.compile, which hides its attention; give the plain model" in refusal(model)
    assert adapt(compiled._orig_mod, ByteTokenizer()).facts


@pytest.mark.parametrize("kind", ["LlamaModel", "LlamaForTokenClassification", "LlamaForQuestionAnswering"])
def test_a_model_that_predicts_no_tokens_is_refused(kind: str) -> None:
    """Its last numbers are no logits of tokens."""
    model = getattr(transformers, kind)(tiny_model("llama").config)
    with pytest.raises(ModelError, match=f"expected a causal language model .AutoModelForCausalLM., got .*a {kind}"):
        adapt(model, ByteTokenizer())


def test_a_model_of_another_number_of_layers_than_it_says_is_refused() -> None:
    model = tiny_model("gemma3_text")
    model.model.layers = model.model.layers[:2]
    assert "has 2 layers and its configuration says 4; change num_hidden_layers too" in refusal(model)


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"layer_types": ["full_attention"]}, "layer_types .* the kinds of its 2 layers"),
        ({"layer_types": "full_attention"}, "layer_types .* a list of texts"),
    ],
)
def test_kinds_of_layers_that_are_no_list_of_all_are_refused(changed: dict[str, Any], words: str) -> None:
    config = tiny_model("llama").config
    for key, value in changed.items():
        object.__setattr__(config, key, value)
    with pytest.raises(ModelError, match=words):
        check_config(config, "m")


def test_kinds_of_layers_that_a_familys_code_passes_over_are_refused() -> None:
    model = tiny_model("llama")
    object.__setattr__(model.config, "layer_types", ["sliding_attention", "full_attention"])
    object.__setattr__(model.config, "sliding_window", 64)
    assert "layer 0 of model 'LlamaForCausalLM' sees all entries, and its cache is one of 64" in refusal(model)


def test_a_layer_whose_attention_was_taken_out_and_is_still_told_is_refused() -> None:
    class Nothing(nn.Module):
        def forward(self, hidden_states: Tensor, **kwargs: Any) -> tuple[Tensor, None]:
            return torch.zeros_like(hidden_states), None

    model = tiny_model("llama", layers=3)
    model.model.layers[1].self_attn = Nothing()
    assert "says that layers 0-2 see the whole prompt, and its code lets layers 0, 2" in refusal(model)


def test_a_family_without_a_causal_language_model_is_refused_before_anything_is_read() -> None:
    with pytest.raises(ModelError, match="is of the family 'vit', of which transformers .* makes no causal"):
        check_config(AutoConfig.for_model("vit"), "m")


@pytest.mark.parametrize(
    ("family", "kinds"),
    [
        ("lfm2", ["recurrent", "full"] * 2),
        ("nemotron_h", ["recurrent", "full", "memoryless", "full"]),
        ("falcon_h1", ["full"] * 2),
    ],
)
def test_layers_without_attention_have_a_state_or_no_memory(family: str, kinds: list[str]) -> None:
    layers = adapt(hybrid_model(family), ByteTokenizer()).facts.layers
    assert [layer.kind for layer in layers] == kinds
    assert [bool(layer.state) for layer in layers] == [kind == "recurrent" or family == "falcon_h1" for kind in kinds]
    assert [layer.attends for layer in layers] == [kind == "full" for kind in kinds]


@pytest.mark.parametrize(
    ("family", "shapes", "words"),
    [
        ("recurrent_gemma", {"num_hidden_layers": 3, "lru_width": 32},
         "ran without the cache that it was given .* run"),
        ("minimax", {"num_local_experts": 4}, "cannot read a short text .*MiniMax uses cache of its own.* run"),
        ("jamba", {"attn_layer_period": 2, "attn_layer_offset": 1, "num_experts": 1, "num_experts_per_tok": 1,
                   "mamba_d_state": 8, "mamba_dt_rank": 4, "use_mamba_kernels": False},
         "reads on from a cache one token at a time, and several at once otherwise than in one text .* parts"),
    ],
    ids=["in-its-modules", "in-a-cache-of-its-own", "not-read-on-from"],
)  # fmt: skip
def test_a_state_that_is_not_in_the_cache_is_refused(family: str, shapes: dict[str, Any], words: str) -> None:
    with pytest.raises(ModelError, match=words):
        adapt(hybrid_model(family, **shapes), ByteTokenizer())


def test_what_looks_like_attention_beside_a_state_is_refused_where_it_fills_the_cache() -> None:
    """A layer of keys and values whose attention does not call the interface; recurrent layers beside it."""
    model = hybrid_model("lfm2")
    attention = model.model.layers[1].self_attn

    def silent(
        hidden_states: Tensor, past_key_values: Any = None, cache: Any = None, **kwargs: Any
    ) -> tuple[Tensor, None]:
        if (filled := cache if past_key_values is None else past_key_values) is not None:
            entries = attention.k_proj(hidden_states).unflatten(-1, (2, 8)).transpose(1, 2)
            filled.update(entries, entries, 1)
        return attention.out_proj(torch.zeros_like(hidden_states)), None

    attention.forward = silent
    assert "layer 1 of model 'Lfm2ForCausalLM' never calls the attention interface" in refusal(model)


def test_an_older_transformers_is_named_where_a_recurrent_model_needs_another(monkeypatch: pytest.MonkeyPatch) -> None:
    assert recurrent_states.version_note() == ""
    monkeypatch.setattr(recurrent_states, "LEAST", "9.1")
    assert "(models with recurrent layers need transformers 9.1 or newer" in refusal(
        hybrid_model("minimax", num_local_experts=4)
    )


@pytest.mark.parametrize("family", ["llama", "gemma2", "qwen3_moe", "falcon_h1"])
def test_heads_outputs_that_reach_the_residual_stream_beside_the_attention_module_are_refused(family: str) -> None:
    """As of a decoder layer that keeps what its attention's map received, and adds a function of it to its output."""
    model = hybrid_model(family) if family == "falcon_h1" else tiny_model(family)
    layer, received = model.model.layers[1], list[Tensor]()
    size = model.config.hidden_size
    beside = torch.randn(size, size, generator=torch.Generator().manual_seed(0)) / size**0.5

    def add(module: nn.Module, args: Any, output: Any) -> Any:
        hidden = output[0] if isinstance(output, tuple) else output
        added = hidden + received.pop() @ beside
        return (added, *output[1:]) if isinstance(output, tuple) else added

    layer.self_attn.o_proj.register_forward_pre_hook(lambda module, args: received.append(args[0]))
    layer.register_forward_hook(add)
    assert "layer 1 of model" in (found := refusal(model))
    assert "lets its heads' outputs past the map that receives them" in found


@pytest.mark.parametrize(("reader", "where"), [(None, "model"), (2, "layer 2 of model")])
def test_heads_outputs_that_reach_the_residual_stream_between_layers_or_behind_them_are_refused(
    reader: int | None, where: str
) -> None:
    model, received = tiny_model("llama", layers=3), list[Tensor]()
    model.model.layers[0].self_attn.o_proj.register_forward_pre_hook(lambda module, args: received.append(args[0]))
    if reader is None:
        model.model.norm.register_forward_hook(lambda module, args, output: output + received.pop())
    else:
        model.model.layers[reader].register_forward_pre_hook(lambda module, args: (args[0] + received.pop(), *args[1:]))
    found = refusal(model)
    assert found.startswith(f"{where} 'LlamaForCausalLM' lets its heads' outputs past the map that receives them")


@pytest.mark.parametrize("kv_heads", [2, 1])
def test_heads_that_are_repeated_after_the_cache_are_no_latents(kv_heads: int) -> None:
    """Of each of the cache's heads other entries can be evicted; counted as latents, shares and bytes are too large."""

    def repeated(module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Any) -> tuple[Any, ...]:
        module.num_key_value_groups = 1
        return query, *(part.repeat_interleave(4 // kv_heads, dim=1) for part in (key, value)), mask

    def padded(module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Any) -> tuple[Any, ...]:
        return *(nn.functional.pad(part, (0, 4)) for part in (query, key)), value, mask

    for before_attention in (repeated, padded)[:kv_heads]:
        model = tiny_model("llama", kv_heads=kv_heads)
        kind = type("Changed", (Changed,), {"before": before_attention})
        for index, layer in enumerate(model.model.layers):
            other = kind(model.config, index).eval()
            other.load_state_dict(layer.self_attn.state_dict())
            layer.self_attn = other
        assert "attends to other keys than its cache holds" in refusal(model)
