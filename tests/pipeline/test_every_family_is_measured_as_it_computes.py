"""Every family whose twin is proven: observed bit for bit, decoded as if masked, measured as METHOD's formulas say.

A family that the proof refuses, or that cannot be made small, is in no table.
"""

from __future__ import annotations

import copy
import functools
import runpy
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from inspect import signature
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from torch import Tensor
from transformers import DynamicCache
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING, MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

import perturbkv as pk
from perturbkv import theory
from perturbkv.cache import compact
from perturbkv.cache.compact import CompactCache, CompactLayer, full_cache, join_layers, prompt_states
from perturbkv.cache.entries import borrow
from perturbkv.configs.resources import Resources
from perturbkv.datasets.encode import Prompt
from perturbkv.errors import ModelError
from perturbkv.models import adapter as adapters
from perturbkv.models.adapter import Adapter
from perturbkv.models.attention_facts import FULL, RefusedError
from perturbkv.models.forward import run_with_cache
from perturbkv.models.loading import ByteTokenizer
from perturbkv.models.proof.proven_twin import try_twin
from perturbkv.models.proof.twin import WINDOW, make_twin
from perturbkv.models.sanity import check_config
from perturbkv.pipeline.sample import measure
from perturbkv.pipeline.sample.capture import Observer, capture, decode_from, intercept_attention
from perturbkv.selection.grid import configuration
from tests.support.caches import gather
from tests.support.resolved import prefill
from tests.support.traces import kept_of

pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated:DeprecationWarning"),  # old GPT BigCode
]

SHARING: dict[str, tuple[str, dict[str, Any]]] = {
    "gemma4-sharing": ("gemma4", {"text_config": {"model_type": "gemma4_text", "num_kv_shared_layers": 12}}),
    "gemma4_text-sharing": ("gemma4_text", {"num_kv_shared_layers": 12}),
    "gemma4_unified_text-sharing": ("gemma4_unified_text", {"num_kv_shared_layers": 12}),
}
"""Families some of whose models have layers that read another's cache, which their default configuration has not."""
COMPLETED = runpy.run_path(str(Path(__file__).parents[2] / "docs" / "scripts" / "models_page.py"))["COMPLETED"]
"""The page's values of families whose default configuration is no model; the page calls the models so made measured."""
FAMILIES = (*MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, *SHARING)
LEAST = 110
"""Families whose twins are proven, at least."""
of_newer_versions = pytest.mark.skipif(
    tuple(map(int, transformers.__version__.split(".")[:2])) < (5, 23), reason="older transformers have fewer families"
)
N, LAST = 32, 4
"""Tokens of the prompt, far more than a twin's window, and of the window by which entries are scored."""
PARTS = (3, 1, 1, 1)
"""Tokens that are decoded together: a question, then one by one."""
Kept = Sequence[Tensor]
"""Positions of the kept entries of each kept set."""


# The families, and a twin of each.


@functools.cache
def proven(family: str) -> tuple[Any, Any, str] | None:
    """The configuration, class and attention of a family whose twin is proven, else None."""
    name, values = SHARING.get(family, (family, COMPLETED.get(family, {})))
    try:
        config = CONFIG_MAPPING[name](**values)
    except Exception:  # a family whose defaults are no model
        return None
    kind = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]
    kernel = "sdpa" if kind._supports_sdpa else "eager"  # as a model is loaded
    try:
        try_twin(config, kind, kernel)
    except RefusedError:
        return None
    return config, kind, kernel


def adapt(model: Any, family: str) -> Adapter:
    """The adapter of a twin, of which no further twin is tried."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(adapters, "check_twin", lambda model: None)
        return Adapter(model, ByteTokenizer(), f"twin-{family}", "test", True)


def twin_adapter(family: str) -> Adapter | None:
    """The adapter of a family's twin, or None; where all layers slide, with a window that holds the whole text."""
    if (found := proven(family)) is None:
        return None
    config, kind, kernel = found
    check_config(config, config.model_type)
    model = make_twin(config, kind=kind)
    model.set_attn_implementation(kernel)
    adapter = adapt(model, family)
    if adapter.layer_facts(0).kind == FULL:
        return adapter
    with pytest.raises(ModelError, match=f"a sliding window of {WINDOW} entries, fewer than the {N + 1} of"):
        measured(adapter)
    config = copy.deepcopy(model.config)
    config.sliding_window = 2 * N
    wide = type(model)._from_config(config, dtype=torch.float32, attn_implementation=kernel).eval()
    wide.load_state_dict(model.state_dict())
    return adapt(wide, family)


def tokens(count: int, seed: int) -> list[int]:
    drawn: list[int] = torch.randint(3, 200, (count,), generator=torch.Generator().manual_seed(seed)).tolist()
    return drawn


PROMPT = tokens(N, 0)
CONFIGS = tuple(
    configuration(12, policy="snapkv", window=LAST, granularity=granularity) for granularity in ("kv", "query")
)


def measured(adapter: Adapter) -> Any:
    prompt = Prompt("s", tuple(PROMPT), 0)
    return pk.measure(adapter, [prompt], CONFIGS, settings=pk.Settings(steps=1), progress=False)


def plain_logits(adapter: Adapter, text: Sequence[int]) -> Tensor:
    """Logits (token, vocab) of a text that is read at once, without a cache."""
    logits: Tensor = adapter.model(input_ids=torch.tensor([list(text)]), use_cache=False).logits[0]
    return logits


# What METHOD says of one head, in float64.


def weights(query: Tensor, key: Tensor, seen: Tensor, options: dict[str, Any], head: int) -> tuple[Tensor, Tensor]:
    """A (query, entry), and the weight (query,) of the head's sink, an entry without a value; 0 without sinks."""
    logits = options.get("scaling", query.shape[-1] ** -0.5) * query.double() @ key.double().T
    if (cap := options.get("softcap")) is not None:
        logits = cap * torch.tanh(logits / cap)
    powers = torch.where(seen, logits, -torch.inf).exp()
    sink = torch.zeros(len(query), dtype=torch.float64)
    if (sinks := options.get("s_aux")) is not None:
        sink += sinks.double().flatten()[head].exp()
    total = powers.sum(dim=-1) + sink
    return powers / total.unsqueeze(-1), sink / total


def seen_entries(length: int, kept: Kept | None, head: int, heads: int) -> Tensor:
    """Which entries each query of a text sees: all up to its own; after the prompt, only the kept ones of it."""
    seen = torch.ones(length, length, dtype=torch.bool).tril()
    if kept is not None:
        own = kept[head * len(kept) // heads].tolist()
        seen[N:, [position for position in range(N) if position not in own]] = False
    return seen


def masked_logits(adapter: Adapter, text: Sequence[int], kept: Sequence[Kept | None]) -> Tensor:
    """Logits of a whole text, in which all but the measured layers' attention is the plain model's.

    `kept` are each measured layer's kept sets.
    """

    def attend(stock: Any, module: Any, args: Any, kwargs: Any) -> Any:
        (query, key, value), outputs = (given[0] for given in args[:3]), []
        for head in range(len(query)):
            own, sets = head * len(key) // len(query), kept[adapter.layer_of(module)]
            seen = seen_entries(len(text), sets, head, len(query))
            outputs.append(weights(query[head], key[own], seen, kwargs, head)[0] @ value[own].double())
        return torch.stack(outputs, dim=1).unsqueeze(0).to(args[0].dtype), None

    with intercept_attention(adapter, attend):
        return plain_logits(adapter, text)


# Observing.


def read_and_decode(adapter: Adapter, cache: DynamicCache) -> Tensor:
    parts = torch.tensor([tokens(N + 1, 1)]).split([N, 1], dim=1)
    return torch.cat([run_with_cache(adapter.model, part, cache).logits for part in parts], dim=1)


@torch.inference_mode()
def check_observed(adapter: Adapter) -> None:
    """With all callbacks in place the logits are the plain model's bit for bit, and each callback is called."""
    seen: list[str] = []

    def noted(name: str) -> Callable[..., None]:
        return lambda *given: seen.append(f"{name} {given[0]}" if isinstance(given[0], int) else name)

    plain = read_and_decode(adapter, DynamicCache(config=adapter.model.config))
    with capture(adapter, Observer(**{field.name: noted(field.name) for field in fields(Observer)})):
        assert torch.equal(read_and_decode(adapter, DynamicCache(config=adapter.model.config)), plain)
    layers = range(len(adapter.layers))
    expected = [f"{name} {layer}" for name in ("attention", "attention_input", "head_output") for layer in layers]
    expected += [f"hidden {layer}" for layer in range(len(adapter.every_layer))]
    expected += [f"gate {layer}" for layer in layers if adapter.has_gate(layer)] + ["final"]
    expected += ["positions"] if "position_ids" in signature(type(adapter.model).forward).parameters else []
    assert sorted(seen) == sorted(2 * expected)


@torch.inference_mode()
def check_hidden_states(adapter: Adapter) -> None:
    """The residual stream is what the model calls its hidden states, after the final norm too."""
    hidden, final, ids = list[Tensor](), list[Tensor](), torch.tensor([tokens(N, 1)])
    output, received = adapter.model.get_output_embeddings(), list[Tensor]()
    hook = output.register_forward_pre_hook(lambda module, args: received.append(args[0]))
    with capture(adapter, Observer(hidden=lambda layer, state: hidden.append(state), final=final.append)):
        own = adapter.model(input_ids=ids, use_cache=False, output_hidden_states=True).hidden_states
    hook.remove()
    assert len(own) == len(adapter.every_layer) + 1
    for index, state in enumerate(hidden):
        after = own[index + 1] if own[0].dim() == 3 else torch.cat(list(own[index + 1]), dim=-1)  # of several streams
        assert index + 1 == len(adapter.every_layer) or torch.equal(state, after)  # the last comes normed
    others = (own[-1], received[0])  # old BioGPT's last is not normed; ModernBERT has a layer in between
    assert any(torch.equal(final[0], other) for other in others)


@torch.inference_mode()
def check_bytes(adapter: Adapter) -> None:
    """The full cache's bytes are those of the plain model's cache, in float32, and of what is made of its latents."""
    cache, sizes, read = DynamicCache(config=adapter.model.config), [], dict[int, int]()
    seen = Observer(attention=lambda layer, query, key, value: read.update({layer: key.nbytes + value.nbytes}))
    with capture(adapter, seen):
        read_and_decode(adapter, cache)
    for layer, facts in zip(cache.layers, adapter.facts.layers, strict=True):
        if facts.attends and facts.owner is None:
            entries = N + 1 if facts.window is None else min(N + 1, facts.window)
            own = [tensor[0, :, -1:].nbytes for tensor in (layer.keys, layer.values)]
            sizes.append(entries * sum(own))
        if facts.state:
            sizes.append(sum(tensor.nbytes for tensor in states(layer)))
    latents = adapter.shape.latent > 0
    assert adapter.shape.full_cache_bytes(N + 1) == sum(sizes) + latents * sum(read.values())
    entries, numbers = adapter.shape.stored_entries
    assert 4 * (entries * numbers * (N + 1) + adapter.shape.unmeasured_numbers(N + 1)) == sum(sizes)


def states(layer: Any) -> list[Tensor]:
    """The recurrent states of a cache layer."""
    kinds = [getattr(layer, name, None) for name in ("conv_states", "recurrent_states")]
    held = [tensor for kind in kinds for tensor in (kind.values() if isinstance(kind, dict) else [kind])]
    return [tensor for tensor in held if tensor is not None]


# Decoding.


def drawn_sets(sets: int, seed: int) -> Kept:
    """Kept sets, each of another length and of other positions."""
    generator = torch.Generator().manual_seed(seed)
    counts = torch.randint(2, N - 6, (sets,), generator=generator).tolist()
    return [torch.randperm(N, generator=generator)[:count].sort().values for count in counts]


def evicted_logits(adapter: Adapter, texts: Tensor, kept: Sequence[Sequence[Kept | None]]) -> Tensor:
    """Logits (row, token, vocab) of what follows the prompt, from a compact cache; `kept[layer with a cache][row]`."""
    cache, layers, read = full_cache(adapter), [], dict[int, tuple[Tensor, Tensor]]()
    seen = Observer(attention=lambda layer, query, key, value: read.update({layer: (key[0], value[0])}))
    with capture(adapter, seen):
        run_with_cache(adapter.model, torch.tensor([PROMPT]), cache)
    for index, rows in enumerate(kept):
        keys, values = read[index]
        entries = [borrow(keys, values) if row is None else gather(keys, values, row) for row in rows]
        layers.append(CompactLayer(entries, adapter.heads, N))
    evicted = CompactCache(join_layers(adapter, layers, prompt_states(adapter, cache)))
    with decode_from(adapter, evicted):
        parts = texts.split(list(PARTS), dim=1)
        return torch.cat([run_with_cache(adapter.model, part, evicted).logits for part in parts], dim=1)


@torch.inference_mode()
def check_decoded(adapter: Adapter) -> None:
    """A row that keeps everything and a ragged one, of another text, decode as the model with the rest masked."""
    texts = [tokens(sum(PARTS), 2 + row) for row in range(2)]
    for sets in (adapter.kv_heads, adapter.heads):
        own = [[None, drawn_sets(sets, 10 * layer + sets)] for layer in adapter.holders]
        found = evicted_logits(adapter, torch.tensor(texts), own)
        kept = [own[owner] for owner in adapter.owners]
        full = [masked_logits(adapter, [*PROMPT, *text], [None] * len(kept))[N:] for text in texts]
        ragged = masked_logits(adapter, [*PROMPT, *texts[1]], [rows[1] for rows in kept])[N:]
        for row, expected in enumerate((full[0], ragged)):
            far = (found[row] - expected).abs().max() / expected.std()
            assert far < 3e-4, f"row {row} with {sets} kept sets"
        assert (ragged - full[1]).abs().max() > 0.1 * ragged.std(), "what was evicted made no difference"


# Measuring.


@dataclass(frozen=True)
class Step:
    """One layer at the last token of a text, by the plain model.

    `attention` (head, entry) and `sink` (head,) are the weights; `values` (head, entry, d_value) those of each query
    head; `slices` (head, d_value, d_model) are W_O^h and `gates` (token, head, d_value) γ.
    """

    attention: Tensor
    sink: Tensor
    values: Tensor
    slices: Tensor
    gates: Tensor


def last_step(adapter: Adapter, layer: int, text: Sequence[int]) -> Step:
    """From two passes over the text: a plain one, and one with ones in place of the layer's attention output."""
    given: dict[str, Any] = {}
    projected: list[tuple[Tensor, Tensor]] = []
    projection, heads = adapter.projections[layer], adapter.heads

    def plain(stock: Any, module: Any, args: Any, kwargs: Any) -> Any:
        if adapter.layer_of(module) == layer:
            given.update(query=args[0][0], key=args[1][0], value=args[2][0].double(), options=kwargs)
        return stock(module, *args, **kwargs)

    def ones(stock: Any, module: Any, args: Any, kwargs: Any) -> Any:
        output, _ = stock(module, *args, **kwargs)
        return torch.ones_like(output) if adapter.layer_of(module) == layer else output, None

    hook = projection.register_forward_hook(lambda module, args, output: projected.append((args[0], output)))
    try:
        for attend in (plain, ones):
            with intercept_attention(adapter, attend):
                plain_logits(adapter, text)
    finally:
        hook.remove()
    group, d_value = heads // len(given["key"]), given["value"].shape[-1]
    bias, *rows = projection(torch.eye(heads * d_value + 1, heads * d_value).roll(1, 0).unsqueeze(0))[0].double()
    gates = projected[1][0].double().reshape(len(text), heads, d_value)
    everything = torch.ones(1, len(text), dtype=torch.bool)
    found = [
        weights(given["query"][head, -1:], given["key"][head // group], everything, given["options"], head)
        for head in range(heads)
    ]
    attention, sink = (torch.cat(parts) for parts in zip(*found, strict=True))
    values, slices = given["value"].repeat_interleave(group, dim=0), (torch.stack(rows) - bias).view(heads, d_value, -1)
    output = torch.einsum("he,hev,hv,hvd->d", attention, values, gates[-1], slices) + bias
    torch.testing.assert_close(output, projected[0][1].reshape(len(text), -1)[-1].double(), rtol=1e-5, atol=1e-5)
    return Step(attention, sink, values, slices, gates)


@torch.inference_mode()
def check_measured(adapter: Adapter) -> None:
    """S, L, θ, C and ν of the last measured layer at the first decoding token."""
    arrays = {name: array if name == "kept_code" else array[0] for name, array in measured(adapter).arrays.items()}
    layer, first = len(adapter.layers) - 1, int(plain_logits(adapter, PROMPT)[-1].argmax())
    step = last_step(adapter, layer, [*PROMPT, first])
    for index, head in np.ndindex(len(CONFIGS), adapter.heads):
        kept = torch.zeros(N + 1, dtype=torch.float64)
        kept[[*kept_of(arrays, index, layer, head), N]] = 1
        assert kept_of(arrays, index, layer, head) == kept_of(arrays, index, adapter.owners[layer], head)
        assert kept.sum() == 12 + 1
        a, projected = step.attention[head], step.values[head] @ (step.gates[-1, head, :, None] * step.slices[head])
        norms = projected.abs().sum(dim=-1)
        mass, total = kept @ a + step.sink[head], a @ norms
        gone = (a * norms)[kept == 0].sort(descending=True).values[:10]
        expected = {
            "retained_mass": mass,
            "perturbation_isolated": (a @ projected - (kept * a / mass) @ projected).abs().sum(),
            "theta": total - (2 - 1 / mass) * ((kept * a) @ norms),
        }
        for name, number in expected.items():
            assert float(arrays[name][index, 0, layer, head]) == pytest.approx(float(number), rel=1e-4), name
        assert float(arrays["weighted_norm"][layer, head]) == pytest.approx(float(total), rel=1e-4)
        assert arrays["lost_output"][index, layer, head].tolist() == pytest.approx(gone.tolist(), rel=1e-4)
    check_norms(adapter, adapter.owners[layer], last_step(adapter, adapter.owners[layer], [*PROMPT, first]))


def check_norms(adapter: Adapter, layer: int, step: Step) -> None:
    """ν of every entry as selections have it, with the window's mean |γ|."""
    size = step.gates[N - LAST : N].abs().mean(dim=0).unsqueeze(-1)
    norms = torch.einsum("hev,hvd->hed", step.values[:, :N], size * step.slices).abs().sum(dim=-1)
    found = prefill(adapter, PROMPT, CONFIGS, Resources(), "s").statistics.norms[LAST if adapter.has_gates else 0][
        layer
    ]
    torch.testing.assert_close(found.double(), norms, rtol=1e-4, atol=0)


CHECKS = (check_observed, check_hidden_states, check_bytes, check_decoded, check_measured)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_proven_family_is_measured_as_it_computes(family: str) -> None:
    if (adapter := twin_adapter(family)) is not None:
        for check in CHECKS:
            check(adapter)


@of_newer_versions
@pytest.mark.parametrize("family", [*SHARING, "bamba", "gemma3n", "gemma3n_text"])
def test_variants_are_proven_with_what_they_have(family: str) -> None:
    adapter = twin_adapter(family)
    assert adapter is not None
    assert adapter.shares_caches == (family in SHARING or "gemma3n" in family)


@of_newer_versions
def test_many_families_are_proven() -> None:
    assert sum(proven(family) is not None for family in FAMILIES) >= LEAST


@of_newer_versions
@pytest.mark.parametrize(
    ("family", "owner", "name", "wrong", "check"),
    [
        ("gpt_oss", Adapter, "sinks", lambda adapter, layer: None, check_measured),
        ("granite", Adapter, "scale", lambda adapter, layer: 0.9 * adapter.layer_facts(layer).scale, check_measured),
        ("gemma2", Adapter, "softmax", lambda adapter, layer: theory.Softmax(adapter.scale(layer)), check_measured),
        ("qwen3_next", Adapter, "has_gate", lambda adapter, layer: False, check_measured),
        ("llama4", compact, "CHUNKED", "none", check_decoded),
        ("opt", Adapter, "base", property(lambda adapter: adapter.model.base_model), check_observed),
        ("llama4", Adapter, "base", property(lambda adapter: adapter.model.base_model), check_hidden_states),
    ],
    ids=lambda given: given if isinstance(given, str) else None,
)
def test_the_checks_can_fail(
    family: str, owner: Any, name: str, wrong: Any, check: Callable[[Adapter], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    adapter = twin_adapter(family)
    assert adapter is not None
    monkeypatch.setattr(owner, name, wrong)
    if check is check_measured:
        with pytest.raises(ModelError, match="other heads' outputs than its attention's formula gives"):
            check(adapter)
        monkeypatch.setattr(measure, "check_head_outputs", lambda *given: None)  # what the run says by itself
    with pytest.raises(AssertionError):
        check(adapter)
