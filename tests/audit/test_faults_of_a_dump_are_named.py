"""Faults planted in dumps of an engine's cache are found and named, and right dumps raise no alarm."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from perturbkv.auditing.dumps import matching
from perturbkv.auditing.dumps.dump_audit import audit_dump
from perturbkv.auditing.dumps.dump_file import HEADER, read_dump, write_dump
from perturbkv.auditing.dumps.layouts import NAMED
from perturbkv.cache.entries import rotate_keys
from perturbkv.models.adapter import Adapter
from perturbkv.pipeline.sample.capture import intercept_attention
from tests.audit.dumped import BLOCK, PREFIX, TOKENS, Damage, Made, entries, model, tables, together
from tests.support.models import tiny_adapter, token_ids

Tables = dict[str, list[int]]


def both(change: Callable[[Tensor, Tables], None]) -> Damage:
    """The same change to keys and values, in every layer."""

    def damage(layer: int, keys: Tensor, values: Tensor, blocks: Tables) -> None:
        change(keys, blocks)
        change(values, blocks)

    return damage


def swap(part: Tensor, blocks: Tables) -> None:
    first, second = blocks["a"][2], blocks["a"][4]
    part[[first, second]] = part[[second, first]]


def from_other(part: Tensor, blocks: Tables) -> None:
    part[blocks["a"][3]] = part[blocks["b"][3]]


def half_a_shared_prefix(part: Tensor, blocks: Tables) -> None:
    """The last four tokens of the prefix, and the four of b after it."""
    own = torch.cat([part[blocks["a"][1], 4:], part[blocks["b"][2], :4]])
    part[blocks["a"][4]] = own


def stale(part: Tensor, blocks: Tables) -> None:
    part[blocks["b"][3]] = part[blocks["old"][1]]


def late(part: Tensor, blocks: Tables) -> None:
    """Every entry of a's own blocks is the next token's."""
    flat = part[blocks["a"][2:]].flatten(0, 1)
    part[blocks["a"][2:]] = flat.roll(-1, dims=0).view(-1, *part.shape[1:])


def heads(part: Tensor, blocks: Tables) -> None:
    part[blocks["b"][2]] = part[blocks["b"][2]].flip(1)


def kinds(layer: int, keys: Tensor, values: Tensor, blocks: Tables) -> None:
    block = blocks["a"][5]
    keys[block], values[block] = values[block].clone(), keys[block].clone()


def clip(part: Tensor) -> None:
    """Cut off a quarter of the numbers."""
    most = float(part.abs().flatten().quantile(0.75))
    part.clamp_(-most, most)


def in_one_layer(damage: Damage, layer: int) -> Damage:
    return lambda index, *more: damage(index, *more) if index == layer else None


def of_next_layer(layer: int, keys: Tensor, values: Tensor, blocks: Tables) -> None:
    """Block 2 of a holds what layer 2 has, in layer 1."""
    if layer == 1:
        for part, known in zip((keys, values), entries()["a"][2], strict=True):
            part[blocks["a"][2]] = known[:, 2 * BLOCK : 3 * BLOCK].transpose(0, 1)


def turned(shift: int | None) -> Damage:
    """Keys of a's third block, rotated by more positions; None: each by its own position once more."""

    def damage(layer: int, keys: Tensor, values: Tensor, blocks: Tables) -> None:
        places = torch.arange(2 * BLOCK, 3 * BLOCK)
        more = places if shift is None else torch.full_like(places, shift)
        angle, block = more.unsqueeze(-1) * model().frequencies, blocks["a"][2]
        keys[block] = torch.stack([rotate_keys(head, angle) for head in keys[block].unbind(1)], dim=1)

    return damage


def other_layout(layer: int, keys: Tensor, values: Tensor, blocks: Tables) -> None:
    """A block written as (head, token, dim) where (token, head, dim) belongs."""
    for part in (keys, values):
        block = part[blocks["a"][4]]
        part[blocks["a"][4]] = block.transpose(0, 1).contiguous().view_as(block)


def other_base(base: float) -> Damage:
    """All keys, rotated with another base than 10000."""

    def damage(layer: int, keys: Tensor, values: Tensor, blocks: Tables) -> None:
        pairs = len(model().frequencies)
        wrong = base ** (-torch.arange(pairs) / pairs)
        for name, table in blocks.items():
            for place in range(len(PREFIX) if name == "b" else 0, len(TOKENS[name])):  # a has the prefix
                entry = keys[table[place // BLOCK], place % BLOCK]
                entry.copy_(rotate_keys(entry, (place * (wrong - model().frequencies)).expand(len(entry), -1)))

    return damage


FAULTS: dict[str, tuple[Made, str, str]] = {
    "entries that are half of a shared prefix": (
        Made(both(half_a_shared_prefix)), "request", "entries of tokens 12 to 19 of request b",
    ),
    "two blocks swapped": (Made(both(swap)), "token", "tokens 32 to 39 of the same request"),
    "another request's block": (Made(both(from_other)), "request", "tokens 24 to 31 of request b"),
    "a block of a request that ended": (Made(both(stale)), "stale", "of request old, which has ended"),
    "entries one token late": (Made(both(late)), "shifted", "token 1 position later"),
    "heads in the opposite order": (Made(both(heads)), "head", "entries of head 1 in head 0, of head 0 in head 1"),
    "keys and values exchanged in a block": (Made(kinds), "swapped", "keys where values belong"),
    "a block that was never written": (
        Made(both(lambda part, blocks: part[blocks["a"][6]].zero_())), "missing", "never written"
    ),
    "keys that are zero": (
        Made(lambda layer, keys, values, blocks: keys[blocks["a"][6]].zero_()), "missing", "keys all zero"
    ),
    "numbers that are none": (
        Made(lambda layer, keys, values, blocks: keys[blocks["b"][2], 3].fill_(torch.nan)), "infinite", "or NaN"
    ),
    "values times a constant": (
        Made(lambda layer, keys, values, blocks: values[blocks["a"][2]].mul_(1.25)), "scale",
        "values multiplied by 1.25",
    ),
    "keys times a small constant": (
        Made(lambda layer, keys, values, blocks: keys[blocks["a"][2]].mul_(1.02)), "scale", "keys multiplied by 1.02"
    ),
    "a scale in one layer alone": (
        Made(in_one_layer(lambda layer, keys, values, blocks: keys[blocks["a"][2]].mul_(0.5), 1)), "scale", "by 0.5"
    ),
    "another layer's entries": (Made(of_next_layer), "layer", "entries of layer n + 1 in layer n"),
    "keys rotated five positions too far": (Made(turned(5)), "rotation", "rotated by 5 more positions"),
    "keys rotated twice": (Made(turned(None)), "rotation", "rotated again, each by its own position"),
    "all keys rotated with another base": (Made(other_base(5e5)), "rotation", "base 500,000"),
    "all keys rotated with a base that is nearly right": (Made(other_base(10500)), "rotation", "base 10,5"),
    "a block in another layout": (Made(other_layout), "layout", "written as"),
    "a block through 8 bits": (
        Made(both(lambda part, blocks: part[blocks["a"][3]].copy_(
            part[blocks["a"][3]].to(torch.float8_e4m3fn).float()))), "rounded", "float8_e4m3fn",
    ),
    "a wrong scale told, in 16 bits": (
        Made(store=lambda keys, values: {
            "cache": torch.stack([keys, values]).bfloat16(), "value_scale": torch.tensor(1.1)}),
        "scale", "all values multiplied by 1.1",
    ),
    "a scale that is nearly right, in 8 bits": (
        Made(store=lambda keys, values: {
            "cache": torch.stack([keys, values]).to(torch.float8_e4m3fn), "key_scale": torch.tensor(0.96)}),
        "scale", "all keys multiplied by 0.96",
    ),
    "another base, in 16 bits": (
        Made(other_base(5e5), store=lambda keys, values: {"cache": torch.stack([keys, values]).half()}),
        "rotation", "base 500,000",
    ),
    "a named layout that holds no numbers": (
        Made(both(lambda part, blocks: part.fill_(torch.nan))), "infinite", "or NaN"
    ),
    "random numbers": (
        Made(both(lambda part, blocks: part[blocks["a"][5]].normal_())), "unknown", "entries of no token"
    ),
    "a block with noise": (
        Made(both(lambda part, blocks: part[blocks["a"][5]].add_(
            0.02 * torch.randn(part[blocks["a"][5]].shape, generator=torch.Generator().manual_seed(0))))),
        "changed", "% away",
    ),
    "one entry of one head": (
        Made(in_one_layer(lambda layer, keys, values, blocks: values[blocks["b"][3], 2, 1].add_(0.5), 2)),
        "unknown", "values of no token",
    ),
    "values clipped at a number of their own": (
        Made(in_one_layer(lambda layer, keys, values, blocks: clip(values[blocks["a"][3]]), 1)),
        "clipped", "values clipped at ",
    ),
    "two entries of the table exchanged": (
        Made(told=lambda blocks: blocks | {"a": [*blocks["a"][:2], blocks["a"][3], blocks["a"][2], *blocks["a"][4:]]}),
        "token", "of the same request",
    ),
    "a table that names another request's block": (
        Made(told=lambda blocks: blocks | {"b": [*blocks["b"][:4], blocks["a"][5], *blocks["b"][5:]]}),
        "request", "of request a",
    ),
    "a table that names a block that was given away": (
        Made(told=lambda blocks: blocks | {"b": [*blocks["b"][:4], blocks["old"][0], *blocks["b"][5:]]}),
        "stale", "request old",
    ),
    "a table that is too short": (
        Made(told=lambda blocks: blocks | {"a": blocks["a"][:5]}), "missing", "beyond the block table"
    ),
    "the wrong order of kv and heads named, two heads": (
        Made(
            store=lambda keys, values: {"cache": torch.stack([keys, values], dim=2)}, layout="block token head kv dim"
        ),
        "layout", "written as 'block token kv head dim'",
    ),
    "kv and block exchanged, as many blocks as kv": (
        Made(
            store=lambda keys, values: {"cache": torch.stack([keys, values], dim=1)}, layout="block token kv head dim"
        ),
        "layout", "written as 'block kv token head dim'",
    ),
    "keys named values": (
        Made(store=lambda keys, values: {"keys": values, "values": keys}, layout="block token head dim"), "swapped", ""
    ),
    "a wrong scale told": (
        Made(store=lambda keys, values: {**together(keys, values), "key_scale": torch.tensor(0.8)}),
        "scale", "all keys multiplied by 0.8",
    ),
    "everything through bfloat16, and nothing said": (
        Made(both(lambda part, blocks: part.copy_(part.bfloat16().float()))), "rounded",
        "keys rounded to bfloat16 and values rounded to bfloat16",
    ),
}  # fmt: skip
"""A fault -> the dump, the fault's kind, and words of it."""


@pytest.mark.parametrize("name", FAULTS)
def test_a_planted_fault_is_named(name: str, tmp_path: Path) -> None:
    made, kind, words = FAULTS[name]
    result = made.audited(tmp_path / "dump")
    assert result.verdict == "differs", result.summary
    assert kind in {fault.kind for fault in result.faults}, result.summary
    first = next(fault for fault in result.faults if fault.kind == kind)
    assert words in first.what, result.summary


def test_zeros_beside_wrong_numbers_are_faults_of_their_own(tmp_path: Path) -> None:
    def damage(part: Tensor, blocks: Tables) -> None:
        part[blocks["a"][5], :3] = 0
        part[blocks["a"][5], 3:].normal_(generator=torch.Generator().manual_seed(0))

    found = Made(both(damage)).audited(tmp_path / "dump")
    assert [(one.kind, one.last - one.first + 1) for one in found.faults] == [("missing", 3), ("unknown", BLOCK - 3)]
    assert "Also request a" in found.caveats()[0] and "and 1 more fault" in found.summary


def test_a_fault_of_every_request_is_one_of_the_dump(tmp_path: Path) -> None:
    found = Made(other_base(5e5)).audited(tmp_path / "dump")
    (fault,) = found.faults
    assert (fault.request, fault.kind, fault.layers) == ("", "rotation", (0, 1, 2))
    assert found.to_junit().count("<failure") == 3, "of both requests, and the verdict"


def test_few_entries_of_every_request_are_not_the_whole_dump(tmp_path: Path) -> None:
    """The first token and the last whole block's first."""

    def damage(layer: int, keys: Tensor, values: Tensor, blocks: Tables) -> None:
        for name in ("a", "b"):
            for block in (blocks[name][0], blocks[name][len(TOKENS[name]) // BLOCK - 1]):
                keys[block, 0] = torch.nan

    found = Made(damage).audited(tmp_path / "dump").faults
    assert [(fault.request, fault.kind, len(fault.blocks)) for fault in found] == [
        ("a", "infinite", 2), ("b", "infinite", 2),
    ]  # fmt: skip


def test_clipped_entries_of_a_lower_layer_do_not_hide_another_fault(tmp_path: Path) -> None:
    def damage(layer: int, keys: Tensor, values: Tensor, blocks: Tables) -> None:
        if layer == 0:
            clip(values[blocks["a"][3]])
        if layer == 2:
            keys[[block for table in blocks.values() for block in table]] *= 0.5

    result = Made(damage).audited(tmp_path / "dump")
    assert [(fault.kind, fault.layers) for fault in result.faults] == [("scale", (2,)), ("clipped", (0,))]


def test_equal_tokens_are_named_by_where_the_others_are() -> None:
    """Entries three tokens on, of which two are equal to an earlier token's, which is found first."""
    tokens, positions = torch.tensor([[3, 0, 5, 1, 7]]), torch.arange(5).expand(1, 5)
    distances = torch.ones(1, 5, 8)
    for entry, near in enumerate(([3], [0, 4], [5], [1, 6], [7])):
        distances[0, entry, near] = 0
    every = torch.ones(1, 5, dtype=torch.bool)
    assert matching._moved_tokens(tokens, positions, distances, every).tolist() == [3, 4, 5, 6, 7]
    distances[0, 1, 4] = 0.5
    assert matching._moved_tokens(tokens, positions, distances, every).tolist() == [3, 0, 5, 6, 7]


def test_only_entries_that_differ_tell_whose_they_are(tmp_path: Path) -> None:
    """A head of another request's block beside a head whose first entry alone is, of a block of the shared prefix."""

    def damage(part: Tensor, blocks: Tables) -> None:
        part[blocks["a"][4], :, 0] = part[blocks["b"][3], :, 0]
        part[blocks["a"][4], 0, 1] = part[blocks["b"][3], 0, 1]

    (fault,) = Made(both(damage)).audited(tmp_path / "dump").faults
    assert (fault.kind, fault.what, fault.layers) == ("request", "entries of tokens 24 to 31 of request b", (0, 1, 2))


def test_a_block_of_many_requests_is_named_by_the_gravest_kind(tmp_path: Path) -> None:
    def damage(part: Tensor, blocks: Tables) -> None:
        own, other, old = (part[blocks[name][place]] for name, place in (("a", 5), ("b", 3), ("old", 1)))
        part[blocks["a"][3]] = torch.cat([old[:3], other[:3], own[:2]])

    (fault,) = Made(both(damage)).audited(tmp_path / "dump").faults
    assert fault.kind == "stale" and fault.what.endswith(", which has ended, and others")


def test_one_infinite_entry_does_not_hide_whose_the_others_are(tmp_path: Path) -> None:
    def damage(layer: int, keys: Tensor, values: Tensor, blocks: Tables) -> None:
        for part in (keys, values):
            part[blocks["a"][3]] = part[blocks["b"][3]]
        keys[blocks["a"][3], 2] = torch.nan

    found = Made(damage).audited(tmp_path / "dump")
    assert {fault.kind for fault in found.faults} == {"infinite", "request"}
    first, second = found.requests
    assert first.worst_perturbation == float("inf") and second.worst_perturbation < 1e-6
    assert [any("∞" in cell for cell in row) for row in found.table().rows] == [True, False]


def test_keys_and_values_exchanged_in_a_shared_block_are_named_in_every_layer(tmp_path: Path) -> None:
    def damage(layer: int, keys: Tensor, values: Tensor, blocks: Tables) -> None:
        block = blocks["a"][0]
        keys[block], values[block] = values[block].clone(), keys[block].clone()

    found = Made(damage).audited(tmp_path / "dump").faults
    assert [(fault.request, fault.kind, fault.layers) for fault in found] == [
        (name, "swapped", (0, 1, 2)) for name in ("a", "b")
    ]


def test_a_scaled_layer_counts_once_and_shows_what_it_costs(tmp_path: Path) -> None:
    damage = in_one_layer(lambda layer, keys, values, blocks: values.mul_(1.3), 1)
    found = Made(damage).audited(tmp_path / "dump")
    assert [fault.what for fault in found.faults] == ["all values multiplied by 1.3"]
    for request in found.requests:
        assert request.differing * 3 == request.compared
        assert (request.perturbation, request.worst_perturbation) == (pytest.approx(0, abs=1e-6), pytest.approx(0.3))
        keys, values = zip(*request.differing_distances, strict=True)
        assert values[1] > 100 * found.limits[1, 1] and all(value != value for value in (*keys, values[0], values[2]))


def store_as(layout: str) -> Callable[[Tensor, Tensor], dict[str, Tensor]]:
    """Store blocks in a named layout, written apart from the code under test: einsum-like, by hand."""
    stores: dict[str, Callable[[Tensor, Tensor], dict[str, Tensor]]] = {
        "vllm": lambda k, v: {"cache": torch.cat([k, v], dim=-1).transpose(1, 2)},
        "vllm-nhd": lambda k, v: {"cache": torch.cat([k, v], dim=-1)},
        "vllm-cpu": lambda k, v: {
            "cache": torch.cat([k.permute(0, 2, 3, 1).flatten(2), v.transpose(1, 2).flatten(2)], dim=-1).unflatten(
                -1, (k.shape[1], -1)
            )
        },
        "flash-attn": together,
        "flashinfer": lambda k, v: {"cache": torch.stack([k, v], dim=1)},
        "flashinfer-hnd": lambda k, v: {"cache": torch.stack([k.transpose(1, 2), v.transpose(1, 2)], dim=1)},
        "tensorrt-llm": lambda k, v: {"cache": torch.stack([k, v], dim=1)},
        "lmcache": lambda k, v: {"cache": torch.stack([k.flatten(2), v.flatten(2)], dim=1)},
        "sglang": lambda k, v: {"keys": k.flatten(0, 1), "values": v.flatten(0, 1)},
    }
    return stores[layout]


@pytest.mark.parametrize("kv_heads", [1, 2, 4])
@pytest.mark.parametrize("named", [True, False], ids=["named", "found"])
@pytest.mark.parametrize("layout", NAMED)
def test_a_right_dump_in_every_layout_is_exact(layout: str, named: bool, kv_heads: int, tmp_path: Path) -> None:
    made = Made(store=store_as(layout), layout=layout if named else "", kv_heads=kv_heads)
    if layout == "sglang":
        made.block = 1
        made.told = lambda blocks: {
            name: [block * BLOCK + slot for block in table for slot in range(BLOCK)] for name, table in blocks.items()
        }
    result = made.audited(tmp_path / "dump")
    assert result.verdict == "exact", result.summary
    assert [request.differing for request in result.requests] == [0, 0]
    assert sum(request.compared for request in result.requests) == 3 * kv_heads * (len(TOKENS["a"]) + len(TOKENS["b"]))


@pytest.mark.parametrize("seed", range(20))
def test_right_dumps_raise_no_alarm(seed: int, tmp_path: Path) -> None:
    """With another placement of blocks each, as an engine rounds (in 16 bits) or not at all."""
    dtype = (torch.float32, torch.bfloat16, torch.float16, torch.float8_e4m3fn)[seed % 4]
    made = Made(store=lambda keys, values: {"cache": torch.stack([keys, values]).to(dtype)}, seed=seed)
    result = made.audited(tmp_path / "dump")
    assert result.verdict == "exact", result.summary
    assert (max(request.key_distance for request in result.requests) > 1e-4) == (dtype != torch.float32)


def test_entries_that_are_there_twice_are_named(tmp_path: Path) -> None:
    ids, known = TOKENS["b"], entries()["b"]
    positions = torch.arange(len(ids))
    positions[7] = 6

    def layers() -> Iterator[dict[str, Tensor]]:
        for keys, values in known:
            yield {"keys.b": keys[:, positions], "values.b": values[:, positions], "positions.b": positions}

    path = write_dump(tmp_path / "dump", [{"id": "b", "token_ids": ids}], layers(), kv_heads=2, head_size=8)
    result = audit_dump(model(), read_dump(path))
    assert result.verdict == "differs"
    assert [(fault.kind, fault.first, fault.last) for fault in result.faults] == [("duplicate", 6, 6)] * len(
        result.faults
    )


def test_freed_blocks_are_a_kept_set_with_its_loss(tmp_path: Path) -> None:
    def freed(blocks: Tables) -> Tables:
        return blocks | {
            "a": [blocks["a"][0], -1, *blocks["a"][2:]],
            "b": [blocks["b"][0], *[-1] * 2, *blocks["b"][3:]],
        }

    result = Made(told=freed).audited(tmp_path / "dump")
    assert result.verdict == "exact", result.summary
    assert "% are evicted" in result.summary
    assert [request.removed for request in result.requests] == [3 * 2 * BLOCK, 3 * 2 * 2 * BLOCK]
    own, *controls = result.losses
    assert own.name == "its kept sets"
    assert {loss.name for loss in controls} == {"attention", "two-stage", "random", "hindsight"}
    assert own.propagated > 0


def test_a_table_that_shares_a_prefix_is_right() -> None:
    blocks = tables()
    assert blocks["a"][:2] == blocks["b"][:2]
    assert not set(blocks["a"][2:]) & set(blocks["b"][2:])


def test_probabilities_are_held_against_the_plain_models(tmp_path: Path) -> None:
    """Those that decoding gave, token by token; by an oracle of the plain model's logits."""
    ids = TOKENS["b"]
    with torch.inference_mode():
        logits = model().model(torch.tensor([ids])).logits[0].double()
    right = [None, *(float(logits[i - 1].log_softmax(-1)[ids[i]]) for i in range(1, len(ids)))]
    path = Made().write(tmp_path / "dump")
    header = json.loads((path / HEADER).read_text())
    for wrong in (False, True):
        told = [*right[:-1], right[-1] - 0.05] if wrong else right
        header["requests"][1]["logprobs"] = told
        (path / HEADER).write_text(json.dumps(header))
        result = audit_dump(model(), read_dump(path))
        assert result.verdict == ("differs" if wrong else "exact"), result.summary
        assert [fault.kind for fault in result.faults] == ["decoding"] * wrong
        assert result.requests[1].logprobs == pytest.approx(0.05 * wrong, abs=1e-4)


def test_outputs_are_perturbed_through_gates(tmp_path: Path) -> None:
    """By hand, from the input of each attention: its query projection gives a gate beside every query."""
    adapter, ids, inputs = tiny_adapter("qwen3_next"), token_ids(30), []
    hooks = [one.register_forward_pre_hook(lambda module, args, kwargs: inputs.append(kwargs["hidden_states"]),
                                           with_kwargs=True) for one in adapter.attentions]  # fmt: skip
    with torch.inference_mode():
        cache = adapter.model(torch.tensor([ids])).past_key_values
    for hook in hooks:
        hook.remove()
    stored = [
        (layer.keys[0].transpose(0, 1).clone(), layer.values[0].transpose(0, 1).clone()) for layer in cache.layers
    ]
    stored[1][1][7:9] *= 3
    blocks = [{"cache": torch.stack(pair).unsqueeze(1)} for pair in stored]  # one block of all tokens
    made = write_dump(
        tmp_path / "dump", [{"id": "a", "token_ids": list(ids), "blocks": [0]}], blocks, kv_heads=2, head_size=8,
        block_size=30, layout="kv block token head dim", engine="made-up 1.0",
    )  # fmt: skip
    (request,) = audit_dump(adapter, read_dump(made), losses=False).requests
    with torch.inference_mode():
        projected = adapter.attentions[1].q_proj(inputs[1][0, -1]).view(4, 16)
    gate = projected[:, 8:].double().sigmoid()
    w_o = adapter.attentions[1].o_proj.weight.detach().double().view(32, 4, 8)
    weights = _last_weights(adapter, ids)
    moved = []
    for head in range(4):
        plain, changed = (
            w_o[:, head] @ (gate[head] * (weights[head] @ values.double()))
            for values in (cache.layers[1].values[0, head // 2], stored[1][1][:, head // 2])
        )
        moved.append(float((changed - plain).abs().sum() / plain.abs().sum()))
    np.testing.assert_allclose(request.perturbations[1], moved, rtol=1e-4)
    assert float(request.perturbations[0].max()) < 1e-5


def _last_weights(adapter: Adapter, ids: tuple[int, ...]) -> torch.Tensor:
    """Of the last token in layer 1 (head, entry), from the queries and keys that attention gets."""
    seen: list[torch.Tensor] = []

    def attend(stock: Any, module: Any, args: Any, kwargs: Any) -> Any:
        query, key = args[0][0, :, -1].double(), args[1][0].double().repeat_interleave(2, dim=0)
        seen.append(((key @ query.unsqueeze(-1)).squeeze(-1) * kwargs["scaling"]).softmax(dim=-1))
        return stock(module, *args, **kwargs)

    with torch.inference_mode(), intercept_attention(adapter, attend):
        adapter.model(torch.tensor([ids]))
    return seen[1]
