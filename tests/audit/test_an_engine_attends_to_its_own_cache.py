"""An engine attends to its own cache: what follows from fewer bits, or from a fault, is told apart from faults."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import DynamicCache

from perturbkv.analyses.audit.dump_verdict import DumpAudit
from perturbkv.auditing.changes import round_towards_zero
from perturbkv.auditing.dumps.dump_audit import audit_dump
from perturbkv.auditing.dumps.dump_file import read_dump, write_dump
from perturbkv.cache.entries import rotate_keys
from perturbkv.models.adapter import Adapter
from tests.audit.dumped import TOKENS, entries, model

Round = Callable[[Tensor], Tensor]
IDS = TOKENS["a"]


class FewBits(DynamicCache):  # type: ignore[misc]
    """A cache that rounds what it is given, which the model's attention then reads."""

    def __init__(self, rounded: Round) -> None:
        super().__init__()
        self.rounded = rounded

    def update(self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any) -> Any:
        own = [self.rounded(part).to(part.dtype) for part in (key_states, value_states)]
        return super().update(own[0], own[1], layer_idx, *args, **kwargs)


def to(dtype: torch.dtype) -> Round:
    return lambda part: part.to(dtype)


def served(rounded: Round, engine: Any = None, cache: Any = None) -> tuple[Any, list[float | None]]:
    """An engine's cache and log-probabilities: the tokens one by one."""
    engine = model().model if engine is None else engine
    cache, told = FewBits(rounded) if cache is None else cache, list[float | None]([None])
    with torch.inference_mode():
        for token, following in zip(IDS, [*IDS[1:], 0], strict=True):
            logits = engine(torch.tensor([[token]]), past_key_values=cache).logits[0, -1].double()
            told.append(float(logits.log_softmax(-1)[following]))
    return cache, told[:-1]


def audited(
    folder: Path,
    rounded: Round,
    dtype: torch.dtype,
    damage: Callable[[int, Tensor], object] = lambda *_: None,
    logprob: float = 0.0,
) -> DumpAudit:
    cache, told = served(rounded)
    told = [value if value is None else value + logprob for value in told]

    def layers() -> Iterator[dict[str, Tensor]]:
        for index, layer in enumerate(cache.layers):
            keys = layer.keys[0].clone()
            damage(index, keys)
            yield {
                "keys.a": keys.to(dtype),
                "values.a": layer.values[0].to(dtype),
                "positions.a": torch.arange(len(IDS)),
            }

    request = {"id": "a", "token_ids": IDS, "logprobs": told}
    return audit_dump(model(), read_dump(write_dump(folder, [request], layers(), kv_heads=2, head_size=8)))


def halved() -> Adapter:
    return Adapter(copy.deepcopy(model().model).bfloat16(), model().tokenizer, "halved", "test", True)


def audited_halved(folder: Path, factor: float) -> DumpAudit:
    """An engine that decodes token by token in 16 bits, and multiplies 16 values of layer 1 by a factor."""
    adapter = halved()
    cache, told = served(lambda part: part, adapter.model)

    def layers() -> Iterator[dict[str, Tensor]]:
        for index, layer in enumerate(cache.layers):
            values = layer.values[0].clone()
            if index == 1:
                values[:, 16:32] *= factor
            yield {"keys.a": layer.keys[0], "values.a": values, "positions.a": torch.arange(len(IDS))}

    request = {"id": "a", "token_ids": IDS, "logprobs": told}
    path = write_dump(folder, [request], layers(), kv_heads=2, head_size=8)
    return audit_dump(adapter, read_dump(path))


def test_a_short_request_in_16_bits_is_no_fault_of_decoding(tmp_path: Path) -> None:
    """Rounding is another one than of a prompt that is read whole."""
    result = audited_halved(tmp_path / "dump", 1.0)
    assert result.verdict == "exact", result.summary
    assert result.requests[0].logprobs > 6 * 0.001  # the least floor


def test_neighbours_that_differ_together_are_named_below_the_limit_of_one(tmp_path: Path) -> None:
    result = audited_halved(tmp_path / "dump", 1.05)
    (fault,) = result.faults
    assert (fault.first, fault.last, list(fault.layers)) == (16, 31, [1])
    assert 0.05 < 7 * result.floors[1, 1]


def from_plain(rounded: Round) -> float:
    """Largest distance of a key of the last layer from the plain model's, over the root mean square norm."""
    own, full = served(rounded)[0].layers[-1].keys[0], entries()["a"][-1][0]
    unit = full.square().sum(-1).mean(-1, keepdim=True).sqrt()
    return float((torch.linalg.vector_norm(own - full, dim=-1) / unit).max())


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2, torch.bfloat16])
def test_its_cache_is_exact_to_its_type_in_every_layer(dtype: torch.dtype, tmp_path: Path) -> None:
    result = audited(tmp_path / "dump", to(dtype), dtype)
    assert result.verdict == "exact", result.summary
    (request,) = result.requests
    assert 0.3 * torch.finfo(dtype).eps < request.key_distance < 0.65 * torch.finfo(dtype).eps
    assert request.key_distance < 0.8 * from_plain(to(dtype))
    assert request.logprobs < 1e-4


def test_numbers_that_are_rounded_towards_zero_are_named(tmp_path: Path) -> None:
    dtype = torch.float8_e4m3fn
    result = audited(tmp_path / "dump", lambda part: round_towards_zero(part, dtype), dtype)
    assert result.verdict == "differs"
    assert [(fault.kind, fault.what, list(fault.layers)) for fault in result.faults] == [
        ("rounded", f"all {name} rounded towards zero", [0, 1, 2]) for name in ("keys", "values")
    ]
    assert result.requests[0].logprobs < 1e-4


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_rounding_towards_zero_in_16_bits_is_named(dtype: torch.dtype, tmp_path: Path) -> None:
    result = audited(tmp_path / "dump", lambda part: round_towards_zero(part, dtype), dtype)
    assert {(fault.kind, fault.what) for fault in result.faults} == {
        ("rounded", f"all {name} rounded towards zero") for name in ("keys", "values")
    }


def test_rounding_towards_zero_of_one_head_is_named(tmp_path: Path) -> None:
    def first_head(part: Tensor) -> Tensor:
        nearest = part.to(torch.float8_e4m3fn).float()
        nearest[:, 0] = round_towards_zero(part[:, 0], torch.float8_e4m3fn).float()
        return nearest

    result = audited(tmp_path / "dump", first_head, torch.float8_e4m3fn)
    assert {(fault.kind, fault.what, tuple(fault.heads)) for fault in result.faults} == {
        ("rounded", f"{name} rounded towards zero", (0,)) for name in ("keys", "values")
    }


@pytest.mark.parametrize("more", [0.05, 0.5, 1.9])
def test_wrong_probabilities_are_found_in_few_bits(more: float, tmp_path: Path) -> None:
    dtype = torch.float8_e4m3fn
    result = audited(tmp_path / "dump", to(dtype), dtype, logprob=more)
    assert {fault.kind for fault in result.faults} == {"decoding"}


def test_numbers_of_8_bits_in_16_are_named(tmp_path: Path) -> None:
    through = to(torch.float8_e4m3fn)
    result = audited(tmp_path / "dump", through, torch.bfloat16)
    assert "all keys rounded to float8_e4m3fn" in {fault.what for fault in result.faults}


def test_freed_entries_in_few_bits_are_a_kept_set(tmp_path: Path) -> None:
    dtype = torch.float8_e5m2
    cache, _ = served(to(dtype))
    kept = torch.tensor([*range(10), *range(20, len(IDS))])

    def layers() -> Iterator[dict[str, Tensor]]:
        for layer in cache.layers:
            keys, values = (part[0, :, kept].to(dtype) for part in (layer.keys, layer.values))
            yield {"keys.a": keys, "values.a": values, "positions.a": kept}

    path = write_dump(tmp_path / "dump", [{"id": "a", "token_ids": IDS}], layers(), kv_heads=2, head_size=8)
    result = audit_dump(model(), read_dump(path))
    assert result.verdict == "exact", result.summary
    (request,) = result.requests
    assert request.removed == 3 * 2 * 10
    assert request.key_distance < 0.8 * from_plain(to(dtype))


def test_keys_at_other_places_are_no_convention_where_nothing_is_gone(tmp_path: Path) -> None:
    order = torch.randperm(len(IDS), generator=torch.Generator().manual_seed(1))

    def layers() -> Iterator[dict[str, Tensor]]:
        for keys, values in entries()["a"]:
            turned = (torch.arange(len(IDS)) - order).unsqueeze(-1) * model().frequencies
            moved = torch.stack([rotate_keys(head, turned) for head in keys[:, order]])
            yield {"keys.a": moved, "values.a": values[:, order].clone(), "positions.a": order}

    path = write_dump(tmp_path / "dump", [{"id": "a", "token_ids": IDS}], layers(), kv_heads=2, head_size=8)
    assert audit_dump(model(), read_dump(path)).verdict == "differs"


def test_a_constant_factor_is_not_taken_for_it(tmp_path: Path) -> None:
    dtype = torch.float8_e4m3fn
    result = audited(tmp_path / "dump", lambda part: (0.94 * part).to(dtype), dtype)
    assert {fault.kind for fault in result.faults} == {"scale"}


def test_entries_that_were_overwritten_later_are_still_named(tmp_path: Path) -> None:
    dtype = torch.float8_e4m3fn

    def overwrite(layer: int, keys: Tensor) -> None:
        if layer == 1:
            keys[:, 20:24] = keys[:, 30:34].clone()

    result = audited(tmp_path / "dump", to(dtype), dtype, overwrite)
    assert [(fault.first, fault.last, list(fault.layers)) for fault in result.faults] == [(20, 23, [1])]


class Late(DynamicCache):  # type: ignore[misc]
    """A cache that writes the keys of head 1 in layer 1 one token late, for tokens that come one by one."""

    last: Tensor | None = None

    def update(self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any) -> Any:
        if layer_idx == 1:
            right, key_states = key_states, key_states.clone()
            key_states[:, 1] = right[:, 1] if self.last is None else self.last[:, 1]
            self.last = right
        return super().update(key_states, value_states, layer_idx, *args, **kwargs)


def test_what_follows_from_a_fault_while_serving_is_no_fault_of_its_own(tmp_path: Path) -> None:
    """Entries of layer 2, and probabilities, are what attention to the wrong keys of layer 1 gives."""
    cache, told = served(lambda part: part, model().model, Late())

    def layers() -> Iterator[dict[str, Tensor]]:
        for layer in cache.layers:
            yield {"keys.a": layer.keys[0], "values.a": layer.values[0], "positions.a": torch.arange(len(IDS))}

    far = torch.linalg.vector_norm(cache.layers[2].keys[0] - entries()["a"][2][0], dim=-1)
    assert float(far.median()) > 0.01
    request = {"id": "a", "token_ids": IDS, "logprobs": told}
    path = write_dump(tmp_path / "dump", [request], layers(), kv_heads=2, head_size=8)
    result = audit_dump(model(), read_dump(path))
    assert [
        (fault.kind, fault.what, fault.first, fault.last, list(fault.layers), list(fault.heads))
        for fault in result.faults
    ] == [("shifted", "keys of the token 1 position earlier", 1, len(IDS) - 1, [1], [1])]
    words = "request a, tokens 1 to 52, layer 1, head 1: keys of the token 1 position earlier; 1 layer after it follows"
    assert result.summary == f"differs: {words}"


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2, torch.bfloat16, torch.float16])
def test_rounding_towards_zero_is_the_largest_number_of_the_type_that_is_not_larger(dtype: torch.dtype) -> None:
    """By a search among all numbers of the type, in float64."""
    numbers = torch.randn(300, generator=torch.Generator().manual_seed(0)) * torch.logspace(-4, 1, 300)
    bits = torch.arange(2 ** (8 * dtype.itemsize - 1))
    kind = torch.uint8 if dtype.itemsize == 1 else torch.int16
    every = bits.to(kind).view(dtype).double()
    known = np.sort(every[every.isfinite()].numpy())
    expected = known[np.searchsorted(known, numbers.abs().double().numpy(), side="right") - 1] * np.sign(
        numbers.numpy()
    )
    np.testing.assert_array_equal(round_towards_zero(numbers, dtype).double().numpy(), expected)
