"""The first line of an audit of a dump is the cause: the fault in the lowest layer, with its kind, not what follows.

Faults are planted in what was stored, or in what a made-up engine computes: a plain model whose attention reads the
cache that the fault is in.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cache
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import DynamicCache

from perturbkv.analyses.audit.dump_verdict import DumpAudit
from perturbkv.auditing.dumps.dump_audit import audit_dump
from perturbkv.auditing.dumps.dump_file import read_dump, write_dump
from perturbkv.auditing.dumps.query_heads import describe_read_heads
from perturbkv.cache.entries import rotate_keys
from perturbkv.errors import UnreadableCacheError
from perturbkv.models.adapter import Adapter
from perturbkv.pipeline.sample.capture import intercept_attention
from tests.support.models import tiny_adapter, token_ids

LAYERS, BLOCK, IDS = 4, 8, token_ids(50, seed=5)
Pair = tuple[Tensor, Tensor]
"""Keys and values (kv_head, token, width)."""
Change = Callable[[int, list[Pair]], Pair]
"""`(layer, right)`: what is in a layer instead, given the right entries of all layers."""
NAMES = ("keys", "values", "entries")


def only(parts: str, change: Change) -> Change:
    """The change of keys alone, of values alone, or of both (`entries`)."""

    def chosen(layer: int, right: list[Pair]) -> Pair:
        keys, values = change(layer, right)
        return keys if parts != "values" else right[layer][0], values if parts != "keys" else right[layer][1]

    return chosen


def heads(layer: int, right: list[Pair]) -> Pair:
    return right[layer][0].roll(1, dims=0), right[layer][1].roll(1, dims=0)


def exchanged(layer: int, right: list[Pair]) -> Pair:
    return right[layer][1], right[layer][0]


def next_layer(layer: int, right: list[Pair]) -> Pair:
    return right[(layer + 1) % LAYERS]


def late(layer: int, right: list[Pair]) -> Pair:
    keys, values = right[layer]
    return torch.cat([keys[:, :1], keys[:, :-1]], dim=1), torch.cat([values[:, :1], values[:, :-1]], dim=1)


def scaled(layer: int, right: list[Pair]) -> Pair:
    return right[layer][0] * 1.3, right[layer][1] * 1.3


def turned(layer: int, right: list[Pair]) -> Pair:
    keys, values = right[layer]
    return rotate_keys(keys, torch.full((len(IDS), 1), 5.0) * engine().frequencies), values


def other_base(layer: int, right: list[Pair]) -> Pair:
    keys, values = right[layer]
    pairs = len(engine().frequencies)
    more = 5e5 ** (-torch.arange(pairs) / pairs) - engine().frequencies
    return rotate_keys(keys, torch.arange(len(IDS)).unsqueeze(-1) * more), values


WORDS: dict[str, tuple[Change, str, dict[str, str]]] = {
    "heads": (heads, "head", {name: f"{name} of head 1 in head 0, of head 0 in head 1" for name in NAMES}),
    "exchanged": (exchanged, "swapped", {
        "keys": "values where keys belong", "values": "keys where values belong",
        "entries": "keys where values belong, and values where keys do",
    }),
    "next layer": (next_layer, "layer", {name: f"{name} of layer n + 1 in layer n" for name in NAMES}),
    "late": (late, "shifted", {name: f"{name} of the token 1 position earlier" for name in NAMES}),
    "scaled": (scaled, "scale", {name: f"all {name} multiplied by 1.3" for name in ("keys", "values")}),
    "turned": (turned, "rotation", {"keys": "keys rotated by 5 more positions"}),
    "another base": (other_base, "rotation", {"keys": "keys rotated with base 500,000, the model's is 10,000"}),
}  # fmt: skip
"""Fault -> the change, its kind, and per part what is said first."""
CASES = [(fault, parts) for fault, (_, _, words) in WORDS.items() for parts in words]


@cache
def engine() -> Adapter:
    return tiny_adapter("llama", 4, 2, layers=LAYERS)


def right_entries() -> list[Pair]:
    kept = DynamicCache()
    with torch.inference_mode():
        engine().model(torch.tensor([IDS]), past_key_values=kept)
    return [(layer.keys[0], layer.values[0]) for layer in kept.layers]


class Faulty(DynamicCache):  # type: ignore[misc]
    """A cache that changes what it is given in some layers, and stores it in a type; attention reads what it stores."""

    def __init__(self, change: Change, layers: set[int], dtype: torch.dtype) -> None:
        super().__init__()
        self.change, self.changed, self.dtype, self.known = change, layers, dtype, right_entries()

    def update(self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any) -> Any:
        self.known[layer_idx] = key_states[0], value_states[0]
        new = self.change(layer_idx, self.known) if layer_idx in self.changed else self.known[layer_idx]
        keys, values = (part.to(self.dtype).to(part.dtype).unsqueeze(0) for part in new)
        return super().update(keys, values, layer_idx, *args, **kwargs)


def dumped(entries: list[Pair], folder: Path, dtype: torch.dtype) -> DumpAudit:
    """The audit of a dump of blocks, in reverse order."""
    count = -(-len(IDS) // BLOCK)
    table = list(range(count))[::-1]

    def layers() -> Iterator[dict[str, Tensor]]:
        for pair in entries:
            blocks = torch.zeros(2, count, BLOCK, *pair[0].shape[::2])
            for kind, part in enumerate(pair):
                for token in range(len(IDS)):
                    blocks[kind, table[token // BLOCK], token % BLOCK] = part[:, token]
            yield {"cache": blocks.to(dtype)}

    path = write_dump(
        folder, [{"id": "a", "token_ids": IDS, "blocks": table}], layers(), kv_heads=2, head_size=8, block_size=BLOCK,
        layout="kv block token head dim",
    )  # fmt: skip
    return audit_dump(engine(), read_dump(path), losses=False)


def served(change: Change, layers: set[int], dtype: torch.dtype) -> list[Pair]:
    kept = Faulty(change, layers, dtype)
    with torch.inference_mode():
        engine().model(torch.tensor([IDS]), past_key_values=kept)
    return [(layer.keys[0], layer.values[0]) for layer in kept.layers]


def where(everywhere: bool) -> set[int]:
    return set(range(LAYERS)) if everywhere else {1}


@pytest.mark.parametrize(
    ("fault", "parts", "computed", "everywhere", "dtype"),
    [
        pytest.param(*case, *more, marks=[] if (index + place) % 4 == 0 else [pytest.mark.slow])
        for index, case in enumerate(CASES)
        for place, more in enumerate(product((False, True), (False, True), (torch.float32, torch.bfloat16)))
    ],
)
def test_the_first_line_is_the_cause_in_its_place(
    fault: str, parts: str, computed: bool, everywhere: bool, dtype: torch.dtype, tmp_path: Path
) -> None:
    change, kind, words = WORDS[fault]
    faulty, layers = only(parts, change), where(everywhere)
    right = right_entries()
    stored = [faulty(layer, right) if layer in layers else right[layer] for layer in range(LAYERS)]
    found = dumped(served(faulty, layers, dtype) if computed else stored, tmp_path / "dump", dtype)
    first = found.faults[0]
    assert (first.kind, first.what, first.layers[0]) == (kind, words[parts], min(layers)), found.summary
    assert {layer for one in found.faults for layer in one.layers} <= layers, found.summary
    # keys and queries that are all turned alike attend as right ones do: stored or computed is one
    assert bool(found.following) <= (computed or kind == "rotation"), found.summary


def regrouped(read: tuple[int, ...], layers: set[int], dtype: torch.dtype) -> list[Pair]:
    """Entries of an engine whose query heads read other key/value heads in some layers, written out."""
    places = {id(module): layer for layer, module in enumerate(engine().attentions)}

    def attend(stock: Any, module: Any, args: Any, kwargs: Any) -> Any:
        if places[id(module)] not in layers:
            return stock(module, *args, **kwargs)
        query, keys, values = args[0], args[1][:, read], args[2][:, read]
        later = torch.full((len(IDS), len(IDS)), -torch.inf).triu(1)
        weights = (query @ keys.mT * kwargs["scaling"] + later).softmax(dim=-1)
        return (weights @ values).transpose(1, 2), None

    with intercept_attention(engine(), attend):
        return served(lambda layer, right: right[layer], set(), dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("layers", [{0, 1, 2, 3}, {1}], ids=["all", "one"])
@pytest.mark.parametrize(
    ("read", "words"),
    [
        ((0, 1, 0, 1), "query head i of layer {} read key/value head i mod 2"),
        ((0, 0, 1, 0), "query head 3 of layer {} read key/value head 0"),
        ((1, 1, 1, 1), "query heads 0 to 1 of layer {} read key/value head 1"),
        (
            (0, 1, 1, 0),
            "query head 1 of layer {0} read key/value head 1, query head 3 of layer {0} read key/value head 0",
        ),
    ],
    ids=["mod", "one head", "group", "two heads"],
)
def test_query_heads_that_read_other_heads_are_the_cause(
    read: tuple[int, ...], words: str, layers: set[int], dtype: torch.dtype, tmp_path: Path
) -> None:
    found = dumped(regrouped(read, layers, dtype), tmp_path / "dump", dtype)
    (fault,) = found.faults
    assert (fault.kind, fault.layers, fault.what) == ("grouping", (min(layers) + 1,), words.format(min(layers)))
    assert found.following == tuple(range(min(layers) + 2, LAYERS))


def test_query_heads_that_nearly_cancel_are_both_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Head 3 asks as head 2 does, and 0.7 of it is taken away: to move one of them alone leads farther off."""
    cancelling = tiny_adapter("llama", 4, 2, layers=LAYERS)
    layer = cancelling.layers[1].self_attn
    with torch.no_grad():
        layer.q_proj.weight[24:] = layer.q_proj.weight[16:24]
        layer.o_proj.weight[:, 16:24] *= 0.2
        layer.o_proj.weight[:, 24:] = -0.7 * layer.o_proj.weight[:, 16:24]
    monkeypatch.setattr("tests.audit.test_the_cause_comes_first.engine", lambda: cancelling)
    found = dumped(regrouped((0, 0, 0, 0), {1}, torch.float32), tmp_path / "dump", torch.float32)
    assert found.faults[0].what == "query heads 2 to 3 of layer 1 read key/value head 0", found.summary


def test_a_query_head_that_adds_next_to_nothing_is_not_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What head 3 adds is less than rounding moves, so it may have read either."""
    idle = tiny_adapter("llama", 4, 2, layers=LAYERS)
    with torch.no_grad():
        idle.layers[1].self_attn.o_proj.weight[:, 24:] *= 1e-4
    monkeypatch.setattr("tests.audit.test_the_cause_comes_first.engine", lambda: idle)
    found = dumped(regrouped((0, 0, 0, 1), {1}, torch.bfloat16), tmp_path / "dump", torch.bfloat16)
    assert found.faults[0].what == "query head 2 of layer 1 read key/value head 0", found.summary


def test_heads_in_many_runs_are_not_listed() -> None:
    own = (0, 0, 1, 1, 2, 2, 3, 3)
    assert describe_read_heads((1, 1, 1, 1, 2, 0, 0, 3), own, 5) == (
        "query heads 0 to 1 of layer 5 read key/value head 1, query heads 5 to 6 of layer 5 read key/value head 0"
    )
    many = describe_read_heads((1, 0, 0, 1, 3, 2, 2, 3), own, 5)
    assert many == "query heads of layer 5 read other key/value heads than their own"


@pytest.mark.parametrize("kept", [1, 10])
def test_entries_that_were_computed_after_other_text_are_one_fault(kept: int, tmp_path: Path) -> None:
    """A context shift: 20 tokens after the first `kept` are dropped, later keys turned back; then 12 are decoded."""
    dropped, decoded = token_ids(20, seed=9), IDS[-12:]
    before, after = DynamicCache(), DynamicCache()
    with torch.inference_mode():
        engine().model(torch.tensor([[*IDS[:kept], *dropped, *IDS[kept:-12]]]), past_key_values=before)
        for index, layer in enumerate(before.layers):
            back = torch.zeros(layer.keys.shape[2], 1)
            back[kept:] = -len(dropped)
            keys = rotate_keys(layer.keys[0], back * engine().frequencies)
            rest = [torch.cat([part[:, :kept], part[:, kept + 20 :]], dim=1) for part in (keys, layer.values[0])]
            after.update(rest[0][None], rest[1][None], index)
        for token in decoded:
            engine().model(torch.tensor([[token]]), past_key_values=after)
    found = dumped([(layer.keys[0], layer.values[0]) for layer in after.layers], tmp_path / "dump", torch.float32)
    (fault,) = found.faults
    assert (fault.kind, fault.first, fault.last, fault.layers) == ("context", kept, len(IDS) - 13, (1, 2, 3))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn])
@pytest.mark.parametrize("reads", [True, False], ids=["reads what it stores", "stores a copy"])
def test_an_engine_with_another_base_has_one_fault(reads: bool, dtype: torch.dtype, tmp_path: Path) -> None:
    """Queries and keys are rotated with it; by the model's own frequencies, changed while it reads."""
    rotary, pairs = engine().model.model.rotary_emb, len(engine().frequencies)
    plain = rotary.inv_freq
    rotary.inv_freq = 5e5 ** (-torch.arange(pairs) / pairs)
    try:
        entries = served(lambda layer, right: right[layer], set(), dtype if reads else torch.float32)
    finally:
        rotary.inv_freq = plain
    found = dumped(entries, tmp_path / "dump", dtype)
    (fault,) = found.faults
    assert (fault.kind, fault.layers, found.following) == ("rotation", (0,), (1, 2, 3)), found.summary
    assert found.summary.endswith("rotated with base 500,000, the model's is 10,000; 3 layers after it follow")


def test_a_computation_without_a_known_cause_is_unknown_and_first(tmp_path: Path) -> None:
    """Attention that is twice as sharp in layer 1."""
    sharp = engine().attentions[1]

    def attend(stock: Any, module: Any, args: Any, kwargs: Any) -> Any:
        return stock(module, *args, **(kwargs | {"scaling": kwargs["scaling"] * (2 if module is sharp else 1)}))

    with intercept_attention(engine(), attend):
        entries = served(lambda layer, right: right[layer], set(), torch.float32)
    first = dumped(entries, tmp_path / "dump", torch.float32).faults[0]
    assert (first.kind in ("unknown", "changed"), first.layers[0], first.first) == (True, 2, 1)


@pytest.mark.parametrize("reads", [True, False], ids=["reads what it stores", "stores a copy"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn])
@pytest.mark.parametrize("tokens", [1, 2, 9, 70, pytest.param(300, marks=pytest.mark.slow)])
def test_right_dumps_of_any_length_are_exact(
    tokens: int, dtype: torch.dtype, reads: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tests.audit.test_the_cause_comes_first.IDS", token_ids(tokens, seed=tokens))
    entries = served(lambda layer, right: right[layer], set(), dtype) if reads else right_entries()
    found = dumped(entries, tmp_path / "dump", dtype)
    assert found.verdict == "exact", found.summary


def test_one_entry_is_no_layout(tmp_path: Path) -> None:
    """The first of a block, in the first head: other orders of the block's numbers leave it in its place."""
    entries = [(keys.clone(), values.clone()) for keys, values in right_entries()]
    entries[1][1][0, 2 * BLOCK] *= 1 + 0.01 * torch.randn(8, generator=torch.Generator().manual_seed(0))
    (fault,) = dumped(entries, tmp_path / "dump", torch.float32).faults
    assert (fault.kind, fault.first, fault.last, fault.layers, fault.heads) == ("changed", 16, 16, (1,), (0,))
    assert fault.what.startswith("values ") and fault.what.endswith(" % away")


def in_8_bits(folder: Path, largest: float, told: Callable[[int], int]) -> DumpAudit:
    """The audit of e4m3 in one block, scaled so that the largest number of each layer becomes `largest`.

    `told`: layer -> the layer whose scale is told of it.
    """
    right = right_entries()
    scales = [[part.abs().amax() / largest for part in pair] for pair in right]

    def layers() -> Iterator[dict[str, Tensor]]:
        for layer, pair in enumerate(right):
            keys, values = (
                (part / scale).clamp(-448, 448).transpose(0, 1)[None].to(torch.float8_e4m3fn)
                for part, scale in zip(pair, scales[layer], strict=True)
            )
            key_scale, value_scale = scales[told(layer)]
            yield {"keys": keys, "values": values, "key_scale": key_scale, "value_scale": value_scale}

    path = write_dump(
        folder, [{"id": "a", "token_ids": IDS, "blocks": [0]}], layers(), kv_heads=2, head_size=8, block_size=len(IDS),
        layout="block token head dim",
    )  # fmt: skip
    return audit_dump(engine(), read_dump(path), losses=False)


@pytest.mark.parametrize("largest", [700.0, 2000.0])
def test_numbers_beyond_the_types_largest_are_clipped(largest: float, tmp_path: Path) -> None:
    found = in_8_bits(tmp_path / "dump", largest, lambda layer: layer)
    assert {fault.kind for fault in found.faults} == {"clipped"}, found.summary
    assert found.faults[0].layers[0] == 0


def test_a_scale_of_another_layer_is_named_in_its_layer(tmp_path: Path) -> None:
    assert in_8_bits(tmp_path / "right", 448.0, lambda layer: layer).verdict == "exact"
    found = in_8_bits(tmp_path / "dump", 448.0, lambda layer: 2 if layer == 1 else layer)
    assert {(fault.kind, fault.layers) for fault in found.faults} == {("scale", (1,))}, found.summary
    assert all(fault.what.endswith(", their scale is layer 2's") for fault in found.faults)


def test_half_a_layout_is_none(tmp_path: Path) -> None:
    """Keys in tiles, as vLLM stores them for some processors, and values in order, in a tensor of unknown layout."""
    right = right_entries()

    def layers() -> Iterator[dict[str, Tensor]]:
        for keys, values in right:
            both = [part.transpose(0, 1)[None] for part in (keys, values)]
            tiles = both[0].reshape(1, 2, len(IDS) // 2, 2, 4, 2).permute(0, 1, 2, 4, 3, 5).reshape(both[0].shape)
            yield {"cache": torch.stack([tiles, both[1]])}

    path = write_dump(
        tmp_path / "dump", [{"id": "a", "token_ids": IDS, "blocks": [0]}], layers(), kv_heads=2, head_size=8,
        block_size=len(IDS),
    )  # fmt: skip
    with pytest.raises(UnreadableCacheError, match="values are found as 'kv block token head dim', alone"):
        audit_dump(engine(), read_dump(path))
