"""A tiny model of the same class as a configuration, with random parameters, to see what its attention does.

Each number of a configuration is made small by what its name says it is (a count of heads, a width, a window), never
by the family. Of the layers, the first of each kind stays. A window, a chunk, an indexer's choice and a cap are so
small that a text of 24 tokens exceeds them.
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

from perturbkv.errors import ModelError

TEXT = 24
"""Tokens that exceed what is small."""
LAYERS = 4
"""Fewest layers; there are more where a configuration has more kinds of them."""
WINDOW = 8
"""Entries of a window or a chunk; position from which on scaled rotations differ."""
VOCABULARY = 256
MOST_PARAMETERS = 5_000_000
MOST_HEADS = 8
"""Most heads of a layer; a longer vector is not one number for each head."""

_HIDDEN = r"hidden_size|d_model|n_embd|emb_dim"
_LAYER_COUNTS = (r"num_layers_per_stack", r"(num_)?decoder_layers", r"(num_|n_)?(hidden_)?(layers?|blocks)")
"""Names of a count of layers, those first that leave an encoder's out."""
_LAYER_INDICES = r"layer|index|idx"
_FROM_START = r"first_k_dense|num_dense_layers|max_window_layers|layer_(start|end)_index"
"""Counts of the first layers, which are of another kind."""
_FROM_END = r"kv_shared_layers$"
"""Counts of the last layers, which are of another kind."""
_MAIN_HEADS = r"(num_)?(decoder_)?attention_heads|n_heads?|num_heads"
_QUERY_HEADS = r"attention_heads"
_HEADS = r"((?<!d_)heads?(_per_layer)?|num_query_groups)$"
_KEY_VALUE = r"key_value|kv|query_groups"
_SSM = r"mamba"
_RECURRENT = rf"^linear_|{_SSM}"
_HEAD_WIDTH = r"head_?(dim|size)$|d_head$|dim_head$|d_kv$|kv_channels$|rotary_dim$"
_WIDTH = r"size|dim|width|channels|inner|ffn?_|dff|embd|d_model|d_ff|d_ssm|rank$"
_TOKEN = r"(pad|bos|eos|sep|cls|mask|unk|eod|decoder_start|forced_\w+)_(token_)?(id|index)$"
_COMPRESSED = r"compress_(rates?|ratio)"
_OFFSET = r"layer_offset$"
_LOGITS = {
    r"soft_?cap|logit_cap": 2.0,
    r"attention_multiplier$": 0.4,
    r"query_pre_attn_scalar$": 12,
}
"""Names of what caps or scales logits -> its value in a twin, in which products are of order 1 to 5."""
_MOST = {
    r"vocab": VOCABULARY,
    r"original_max_position|floor_scale|n_floor": WINDOW,
    r"positions?$|position_embeddings$|max_seq_len|n_ctx$|context_length|max_length$": 256,
    r"index_block_size$": 4,
    r"index_topk_blocks$|experts_per_tok|(?<!index_)top_?k(_experts)?$|moe_k$|n_groups?$|expert_group$|o_groups$": 2,
    r"topk_group$": 1,
    r"index_topk$": 6,
    r"(window|chunk|block)(_size|_len|_length)?$|rel_extent$|indexer_budget$": WINDOW,
    r"local_attention$": 2 * WINDOW,
    r"period$|layer_group_size$": LAYERS,
    r"experts$|expert_num$": 16,
}
"""Names of counts and lengths -> the most that a twin has."""


def make_twin(config: Any, seed: int = 0, kind: Any = None, kernel: str = "eager") -> Any:
    """Return a tiny model of the class `kind`, all its parameters drawn, in float32 on the CPU.

    Without `kind` it is transformers' causal model of the configuration. If one layer of each kind does not run, two of
    each are tried, since one may share another's parameters; last, where the parts for images or sound are large or
    cannot be built, the part that reads text alone.

    Raises:
        ModelError: transformers has no causal model for this configuration, or none that is small runs.
    """
    whole, text = kind or _causal_class(config), config.get_text_config(decoder=True)
    if whole is None:
        raise ModelError(f"expected a configuration of a causal language model, got {type(config).__name__}")
    parts = [(config, whole)] + ([] if text is config else [(text, _causal_class(text) or whole)])
    for (part, class_), of_kind in itertools.product(parts, (1, 2)):
        try:
            return _attempt(class_, _small_config(part, of_kind), seed, kernel)
        except Exception as error:  # a family's code raises what it likes at sizes that it does not take
            refusal = _refusal(config, error)
    raise refusal


def twin_config(config: Any) -> Any:
    """Return `config` with small sizes, and with its options, ratios and kinds of layers.

    Raises:
        ModelError: the configuration's class refuses the small sizes.
    """
    try:
        return _small_config(config)
    except Exception as error:
        raise _refusal(config, error) from error


def _refusal(config: Any, error: Exception) -> ModelError:
    """Return the error for a configuration whose small model failed."""
    what = f"{type(error).__name__}: {error}"
    return ModelError(f"expected a model of the type '{config.model_type}' that runs when it is small, got {what}")


def _small_config(config: Any, of_kind: int = 1) -> Any:
    """Return `config` with small sizes and with `of_kind` layers of each kind."""
    fields = config.to_dict()
    fields.pop("quantization_config", None)
    streams = _streams(fields)
    if not streams:
        raise ValueError(f"no field is the width of its residual stream ({_HIDDEN})")
    sizes = _Sizes.read(fields, streams) or _Sizes(*next(iter(streams.items())), streams=streams)
    return type(config).from_dict(_shrink(fields, of_kind, sizes))


def _causal_class(config: Any) -> Any:
    """Return transformers' class of causal models of a configuration; None where it has none."""
    return MODEL_FOR_CAUSAL_LM_MAPPING[type(config)] if type(config) in MODEL_FOR_CAUSAL_LM_MAPPING else None


def _attempt(kind: Any, config: Any, seed: int, kernel: str) -> Any:
    """Return the model of a small configuration, drawn, after it has read a text."""
    with torch.device("meta"):
        count = sum(parameter.numel() for parameter in _begin(kind, config, seed, kernel).parameters())
    if count > MOST_PARAMETERS:
        raise ValueError(f"{count:,} parameters")
    model, other = (_begin(kind, config, each, kernel) for each in (seed, seed + 1))
    with torch.no_grad():
        _draw(model, other, torch.Generator().manual_seed(seed))
        ids = (torch.arange(TEXT)[None] + 3) % config.get_text_config(decoder=True).vocab_size
        logits = model(input_ids=ids, use_cache=False).logits
    if not logits.isfinite().all():
        raise ValueError("logits that are not finite")
    return model


def _begin(kind: Any, config: Any, seed: int, kernel: str) -> Any:
    """Return the model as transformers begins it with the random numbers of `seed`."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = kind._from_config(config, dtype=torch.float32, attn_implementation=kernel)
    return model.eval()


def _draw(model: Any, other: Any, generator: torch.Generator) -> None:
    """Draw each parameter around where it begins: what also `other` begins with, or 0 where that differs."""
    embeddings = {id(module.weight) for module in model.modules() if isinstance(module, torch.nn.Embedding)}
    for one, two in zip(model.parameters(), other.parameters(), strict=True):
        noise = torch.randn(one.shape, generator=generator) * _spread(one, id(one) in embeddings)
        one.copy_(one + noise if torch.equal(one, two) else noise)


def _spread(parameter: torch.Tensor, is_embedding: bool) -> float:
    """Return a standard deviation with which activations stay of order 1."""
    if parameter.dim() < 2:
        return 0.3 if parameter.numel() > MOST_HEADS else 0.5
    return 0.5 if is_embedding else 1.2 * float(parameter.shape[-1] * parameter.shape[-2]) ** -0.25


def _shrink(fields: dict[str, Any], of_kind: int, sizes: _Sizes) -> dict[str, Any]:
    """Return the fields of a configuration made small, and of those inside it."""
    kept = _Layers.read(fields, of_kind)
    small: dict[str, Any] = {}
    for name, value in fields.items():
        if name == "per_layer_config":
            small[name] = {new: sizes.small(name, value[old]) for new, old in kept.renamed(value)}
        elif _is_config(value):
            small[name] = _shrink(value, of_kind, _Sizes.read(value, sizes.streams) or sizes)
        elif name.startswith("rope_") and isinstance(value, dict):
            small[name] = sizes.rotation(value)
        else:
            small[name] = sizes.small(name, kept.chosen(name, value))
    return small


def _is_config(value: Any) -> bool:
    """Return whether a field's value is a configuration inside another."""
    return isinstance(value, dict) and "model_type" in value


def _streams(fields: dict[str, Any]) -> dict[int, int]:
    """Return the widths of the residual streams of a configuration and those inside it -> small widths."""
    own = _Sizes.read(fields)
    found = {} if own is None else {own.hidden: own.small_hidden}
    for value in filter(_is_config, fields.values()):
        found = {**_streams(value), **found}
    return found


@dataclass(frozen=True)
class _Layers:
    """The layers of a model that stay in its twin.

    Attributes:
        count: how many the model has.
        kept: indices of those that stay, ascending: the first of each kind, and the next ones up to `LAYERS`.
    """

    count: int
    kept: list[int]

    @classmethod
    def read(cls, fields: dict[str, Any], of_kind: int) -> _Layers:
        """Return the layers that stay of a configuration, the first `of_kind` of each kind among them."""
        count = next(filter(None, (_first(fields, pattern) for pattern in _LAYER_COUNTS)), 0)
        kinds: dict[str, list[int]] = {}
        for layer in range(count):
            kinds.setdefault(repr(list(_kind(fields, layer, count))), []).append(layer)
        first = [layer for each in kinds.values() for layer in each[:of_kind]]
        others = [layer for layer in range(count) if layer not in first]
        return cls(count, sorted(first + others[: max(0, LAYERS - len(first))]))

    def chosen(self, name: str, value: Any) -> Any:
        """Return the value for the layers that stay: a count, a list with an entry for each, a list of indices."""
        if isinstance(value, list):
            return self._chosen_entries(name, value)
        if type(value) is not int or value < 1:
            return value
        if re.fullmatch("|".join(_LAYER_COUNTS), name):
            return min(value, len(self.kept) * max(1, value // self.count))
        if re.search(_FROM_START, name):
            return sum(layer < value for layer in self.kept)
        if re.search(_FROM_END, name):
            return sum(layer >= self.count - value for layer in self.kept)
        return value

    def _chosen_entries(self, name: str, value: list[Any]) -> list[Any]:
        """Return the entries of the layers that stay; a list may also be made of [pattern, how often]."""
        if _are_indices(name, value, self.count):
            return [new for new, old in enumerate(self.kept) if old in value]
        if len(value) == self.count:
            return [value[layer] for layer in self.kept]
        if value and all(isinstance(each, list) and len(each) == 2 and isinstance(each[0], list) for each in value):
            entries = [each for pattern, times in value for each in pattern * times]
            return [[self._chosen_entries(name, entries), 1]]
        return value

    def renamed(self, values: dict[Any, Any]) -> Iterator[tuple[Any, Any]]:
        """Yield the new and the old key of each layer that stays and has values of its own."""
        for new, old in enumerate(self.kept):
            yield from ((f"{new:02d}" if isinstance(key, str) else new, key) for key in values if int(key) == old)


def _kind(fields: dict[str, Any], layer: int, count: int) -> Iterator[Any]:
    """Yield all that a configuration says of one layer."""
    for name, value in fields.items():
        if isinstance(value, list):
            if _are_indices(name, value, count):
                yield layer in value
            elif len(value) == count:
                yield value[layer]
        elif type(value) is int and re.search(_FROM_START, name):
            yield layer < value
        elif type(value) is int and re.search(_FROM_END, name):
            yield layer >= count - value
        elif name == "per_layer_config" and value:
            yield next((own for key, own in value.items() if int(key) == layer), None)


def _are_indices(name: str, value: list[Any], count: int) -> bool:
    """Return whether a list holds the indices of some layers."""
    return (
        re.search(_LAYER_INDICES, name) is not None
        and all(type(each) is int for each in value)
        and value == sorted(set(value))
        and 0 < len(value) <= count
        and max(value) < count
    )


@dataclass(frozen=True)
class _Sizes:
    """Sizes and what they become, so that those which are equal, or multiples of each other, stay so.

    Attributes:
        hidden: width of the residual stream.
        small_hidden: what it becomes.
        heads: count of attention's heads -> small count.
        recurrent: count of a recurrence's heads -> small count.
        widths: width of a head -> small width.
        rotated: width of a head that is rotated.
        streams: widths of the residual streams of all parts -> small widths.
    """

    hidden: int
    small_hidden: int
    heads: dict[int, int] = field(default_factory=dict)
    recurrent: dict[int, int] = field(default_factory=dict)
    widths: dict[int, int] = field(default_factory=dict)
    rotated: int = 1
    streams: dict[int, int] = field(default_factory=dict)

    @classmethod
    def read(cls, fields: dict[str, Any], streams: dict[int, int] | None = None) -> _Sizes | None:
        """Return the sizes of a configuration; None without a residual stream of its own."""
        hidden = _first(fields, _HIDDEN)
        if not hidden:
            return None
        numbers = set(_numbers(fields))
        queries = _named(numbers, _QUERY_HEADS, f"{_KEY_VALUE}|{_RECURRENT}")
        heads = _small_heads(queries, _named(numbers, rf"({_KEY_VALUE}).*{_HEADS}"))
        recurrent = _named(numbers, rf"({_RECURRENT}).*{_HEADS}")
        widths = _named(numbers, _HEAD_WIDTH, _SSM)
        count = _first(fields, _MAIN_HEADS) or LAYERS
        of_one = hidden // count
        related = not widths or any(math.log2(of_one / width).is_integer() for width in widths)
        small_widths = _small_widths(widths | {of_one} if related else widths)
        width = of_one if related else fields.get("head_dim") or max(widths)
        small = heads.get(count, 4) * small_widths[width]
        if not related:
            ratio = hidden / (count * width)
            near = min(max(16 * round(ratio * small / 16), 32), 128)
            small = near + 16 * (near == small)
        return cls(
            hidden=hidden,
            small_hidden=small,
            heads=heads,
            recurrent={each: 4 if each == max(recurrent) else min(each, 2) for each in recurrent},
            widths=small_widths,
            rotated=fields.get("qk_rope_head_dim") or fields.get("head_dim") or of_one,
            streams=streams or {},
        )

    def small(self, name: str, value: Any) -> Any:
        """Return the value of a field made small."""
        if isinstance(value, dict):
            return {key: self.small(f"{name}.{key}", each) for key, each in value.items()}
        if isinstance(value, list):
            return [self.small(name, each) for each in value]
        if type(value) not in (int, float) or value <= 0:
            return value
        for pattern, number in _LOGITS.items():
            if re.search(pattern, name):
                return number
        return self._count(name, value) if type(value) is int else value

    def _count(self, name: str, value: int) -> int:
        """Return a whole number made small."""
        if re.search(_TOKEN, name):
            return value if value < VOCABULARY else 1 + ("bos" not in name)
        if re.search(_COMPRESSED, name):
            return min(value, 2 if value < 32 else WINDOW)
        for pattern, most in _MOST.items():
            if re.search(pattern, name):
                return min(value, most)
        if re.search(_HEADS, name):
            counts = self.recurrent if re.search(_RECURRENT, name) else self.heads
            return counts.get(value, min(value, 4))
        if re.search(_HEAD_WIDTH, name):
            if not re.search(_SSM, name):
                return self.widths.get(value, value)
            count = max(self.recurrent)  # a state space's heads together keep their ratio to the residual stream
            return self._width(count * value) // self.recurrent[count]
        if re.search(_OFFSET, name):
            return value % LAYERS
        return self._width(value) if re.search(_WIDTH, name) else value

    def _width(self, value: int) -> int:
        """Return a width in its ratio to the residual stream, at least 16 and at most 4 streams."""
        if value == self.hidden:
            return self.small_hidden
        if value in self.streams:
            return self.streams[value]
        exact, rest = divmod(value * self.small_hidden, self.hidden)
        if rest == 0 and exact % 8 == 0 and 16 <= exact <= 4 * self.small_hidden:
            return exact
        return min(value, max(16, min(16 * round(exact / 16), 4 * self.small_hidden)))

    def rotation(self, value: dict[str, Any]) -> dict[str, Any]:
        """Return the parameters of rotations for small heads."""
        small: dict[str, Any] = {}
        for name, each in value.items():
            if isinstance(each, dict):
                small[name] = self.rotation(each)
            elif isinstance(each, list):
                small[name] = self._of_pairs(each)
            else:
                small[name] = self.small(name, each) if "position" in name else each
        return small

    def _of_pairs(self, value: list[Any]) -> list[Any]:
        """Return what a rotation has for each pair of a head's entries: one factor for each, or counts of pairs."""
        share = self.widths.get(self.rotated, self.rotated) / self.rotated
        if any(type(each) is not int for each in value):
            count = round(len(value) * share)
            return [value[index * len(value) // count] for index in range(count)]
        counts = [int(each * share) for each in value]
        return [counts[0] + round(sum(value) * share) - sum(counts), *counts[1:]]


def _small_heads(queries: set[int], keys: set[int]) -> dict[int, int]:
    """Return small counts of heads: 4 queries to 2 keys, twice as many where layers differ."""
    own = keys - queries
    twice = len(queries) > 1 or len(own - {1}) > 1
    small = {count: min(count, 8 if twice and count == max(queries) else 4) for count in queries}
    small |= {count: min(count, 4 if len(own - {1}) > 1 and count == max(own) else 2) for count in own}
    return small


def _small_widths(widths: set[int]) -> dict[int, int]:
    """Return small widths in the ratios of `widths`, where these are simple."""
    unit, widest = math.gcd(*widths), max(widths)
    if widest // unit > 12:
        return {width: max(4, 4 * round(8 * width / widest)) for width in widths}
    return {width: width // unit * (16 if widest == unit else 8) for width in widths}


def _numbers(fields: dict[str, Any]) -> Iterator[tuple[str, int]]:
    """Yield names and whole numbers above 0 of a configuration, also those of single layers."""
    for name, value in fields.items():
        if name == "per_layer_config":
            for own in (value or {}).values():
                yield from _numbers(own)
        for each in value if isinstance(value, list) else [value]:
            if type(each) is int and each > 0:
                yield name, each


def _named(numbers: set[tuple[str, int]], pattern: str, other: str = "$^") -> set[int]:
    """Return the numbers whose names match `pattern` and not `other`."""
    return {number for name, number in numbers if re.search(pattern, name) and not re.search(other, name)}


def _first(fields: dict[str, Any], pattern: str) -> int:
    """Return the first whole number above 0 whose name is `pattern`; 0 without one."""
    found = (
        value for name, value in fields.items() if re.fullmatch(pattern, name) and type(value) is int and value > 0
    )
    return next(found, 0)
