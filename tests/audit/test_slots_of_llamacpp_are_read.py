"""A slot file of llama.cpp is read in every type and order, its faults are named, and what is none is one line."""

from __future__ import annotations

import re
import struct
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from scipy.linalg import hadamard

from perturbkv.api.auditing import audit_dump
from perturbkv.auditing.dumps.llamacpp import TYPES, StorageForm, read_slot
from perturbkv.configs.audit_settings import is_slot
from perturbkv.errors import PerturbkvError, UnreadableCacheError
from tests.audit.slots import IDS, LAYERS, SIZE, Made, config, content, entries, model

CODES = {name: code for code, name in TYPES.items()}
ROUNDED = {
    "f32": 0,
    "f16": 2e-4,
    "bf16": 1.6e-3,
    "q8_0": 5e-3,
    "q5_1": 0.036,
    "q5_0": 0.04,
    "q4_1": 0.074,
    "q4_0": 0.08,
}
"""Type -> distance of entries that it rounds, of entries with independent components."""


@pytest.mark.parametrize("name", ROUNDED)
def test_every_type_is_read_and_is_as_far_as_its_rounding(name: str, tmp_path: Path) -> None:
    result = Made(name, name).audited(tmp_path / "slot.bin")
    assert result.verdict == "exact", result.summary
    assert result.stored == f"{name} keys, {name} values"
    (request,) = result.requests
    assert request.compared == LAYERS * 2 * len(IDS)
    assert result.typical[0] == pytest.approx([ROUNDED[name]] * 2, rel=0.15, abs=1e-7)


@pytest.mark.parametrize(
    "made",
    [
        Made("f16", "q8_0"),
        Made("q4_0", "f16", transposed=True),
        Made("f32", "f32", transposed=True),
        Made("q8_0", "q4_0", family="qwen2"),
        Made("f16", "f16", kv_heads=1),
        Made(streams=4),
        Made(coded=False),
        Made("q8_0", "q8_0", order=[*range(20, 45), *range(20)]),
    ],
    ids=["mixed", "transposed", "transposed in 32 bits", "not in pairs", "one head", "four streams", "tokens", "order"],
)
def test_a_right_slot_in_another_order_is_exact(made: Made, tmp_path: Path) -> None:
    result = made.audited(tmp_path / "slot.bin")
    assert result.verdict == "exact", result.summary
    assert float(result.requests[0].worst_perturbation) < 0.5


def test_entries_that_the_server_dropped_are_a_kept_set(tmp_path: Path) -> None:
    result = Made(order=[*range(4), *range(20, 45)]).audited(tmp_path / "slot.bin")
    assert result.verdict == "exact", result.summary
    assert result.requests[0].removed == LAYERS * 2 * 16


def swapped(layer: int, keys: Any, values: Any) -> None:
    for part in (keys, values):
        part[[10, 30]] = part[[30, 10]]


def overwritten(layer: int, keys: Any, values: Any) -> None:
    if layer == 1:
        values[7] = np.random.default_rng(0).standard_normal(values[7].shape) * values.std()


def halves(layer: int, keys: Any, values: Any) -> None:
    keys[...] = np.concatenate([keys[..., SIZE // 2 :], keys[..., : SIZE // 2]], axis=-1)


def through(kind: str, rotated: bool) -> Callable[[int, Any, Any], None]:
    """Numbers of another type, as its slot would give them."""
    matrix = (hadamard(SIZE) / np.sqrt(SIZE)).astype(np.float32)

    def damage(layer: int, keys: Any, values: Any) -> None:
        rows = values @ matrix if rotated else values
        stored = StorageForm(CODES[kind]).dequantise(content(rows.reshape(len(rows), -1), kind)).reshape(rows.shape)
        values[...] = stored @ matrix if rotated else stored

    return damage


def coarse(layer: int, keys: Any, values: Any) -> None:
    """Every number 6 % away in no order, which no type of the file explains."""
    values += (0.06 * np.random.default_rng(layer).standard_normal(values.shape) * values.std()).astype(np.float32)


FAULTS: dict[str, tuple[Made, str, str]] = {
    "rows swapped": (Made("q8_0", "q8_0", swapped), "token", "token 30 of the same request"),
    "rows swapped, 4 bits": (Made("q4_0", "q4_0", swapped), "token", "token 30 of the same request"),
    "a row overwritten": (Made("q4_0", "q8_0", overwritten), "unknown", "values of no token"),
    "a row never written": (
        Made("q4_0", "q4_0", lambda layer, keys, values: [part[5].fill(0) for part in (keys, values)]),
        "missing", "all zero",
    ),
    "another token's head": (
        Made("f16", "f16", lambda layer, keys, values: [part[9].__setitem__(slice(None), part[9, ::-1].copy())
                                                         for part in (keys, values)]), "head", "of head 1 in head 0",
    ),
    "halves of keys exchanged": (Made("q8_0", "q8_0", halves), "unknown", "keys of no token"),
    "values scaled": (Made("q8_0", "q8_0", lambda layer, keys, values: values.__imul__(1.1)), "scale", "by 1.1"),
    "8 bits in 16": (Made("f16", "f16", through("q8_0", rotated=True)), "rounded", "values q8_0's numbers in f16"),
    "4 bits in 16": (Made("f16", "bf16", through("q4_0", rotated=False)), "rounded", "values q4_0's numbers in bf16"),
    "4 bits in 32": (Made("f32", "f32", through("q5_1", rotated=True)), "rounded", "values q5_1's numbers in f32"),
    "4 bits in 8": (Made("q8_0", "q8_0", through("q4_0", rotated=True)), "coarse", "values farther from"),
    "noise in 8 bits": (Made("q8_0", "q8_0", coarse), "coarse", "than rounding to q8_0 keys, q8_0 values"),
    "an entry twice": (Made(order=[*range(44), 10]), "duplicate", "cached several times"),
}  # fmt: skip
"""A fault -> the slot, the fault's kind, and words of it."""


@pytest.mark.parametrize("name", FAULTS)
def test_a_planted_fault_is_named(name: str, tmp_path: Path) -> None:
    made, kind, words = FAULTS[name]
    result = made.audited(tmp_path / "slot.bin")
    assert result.verdict == "differs", result.summary
    assert kind in {fault.kind for fault in result.faults}, result.summary
    assert any(words in fault.what for fault in result.faults if fault.kind == kind), result.summary


def test_swapped_rows_are_placed(tmp_path: Path) -> None:
    faults = Made("q8_0", "q8_0", swapped).audited(tmp_path / "slot.bin").faults
    assert {(fault.kind, fault.first, fault.last) for fault in faults} == {("token", 10, 10), ("token", 30, 30)}
    assert all(fault.layers == (0, 1, 2) for fault in faults)


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-9])


def cut_in_tokens(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:60])


def many_words(path: Path) -> None:
    path.write_bytes(b"qsgg" + struct.pack("<II", 4, 2**32 - 1) + path.read_bytes()[12:])


BAD: dict[str, tuple[Made, Callable[[Path], object], str]] = {
    "another version": (Made(version=3), str, "expected version 4, got 3"),
    "cut": (Made(), cut, r"it ends after [\d,]+ bytes"),
    "cut among tokens": (Made(), cut_in_tokens, "it ends after 60 bytes"),
    "cut at once": (Made(), lambda path: path.write_bytes(b"qsgg"), "it ends after 4 bytes"),
    "more tokens than bytes": (Made(), many_words, "where more should follow"),
    "bytes after it": (Made(after=b"more"), str, "4 bytes follow the values"),
    "a type that is not read": (Made(kinds={"f16": 20}), str, "keys of ggml's type 20; those read: f32, f16, q4_0"),
    "another model's width": (Made(kv_heads=1), str, "its model has 64 numbers a token in keys, this one 128"),
    "another model's width, transposed": (
        Made(kv_heads=1, transposed=True), str, "its model has 64 numbers a token in keys, this one 128"
    ),
    "another model's layers": (Made(layers=4), str, "of a model with 4 layers"),
    "a token that the model lacks": (Made(ids=[*IDS[:-1], 260]), str, "got 260"),
    "a negative token": (Made(ids=[*IDS[:-1], -5]), str, "token -5"),
    "no entries": (Made(order=[]), str, "no entries"),
    "a position beyond the tokens": (Made(ids=list(IDS[:40])), str, "position 40 of 40 tokens"),
    "no tokens": (Made(ids=[], coded=False), str, "no tokens"),
}  # fmt: skip


@pytest.mark.parametrize("name", BAD)
def test_a_bad_slot_is_one_line(name: str, tmp_path: Path) -> None:
    made, change, words = BAD[name]
    path = made.write(tmp_path / "slot.bin")
    change(path)
    with pytest.raises(PerturbkvError, match=words) as found:
        audit_dump(model(), path, progress=False)
    assert "\n" not in str(found.value)
    assert found.value.exit_code == 2


def test_other_words_than_tokens_are_refused(tmp_path: Path) -> None:
    path = Made().write(tmp_path / "slot.bin")
    whole = bytearray(path.read_bytes())
    whole[16:20] = struct.pack("<i", 2)
    path.write_bytes(whole)
    with pytest.raises(UnreadableCacheError, match="images or sound"):
        read_slot(path, model().config)


def test_what_begins_otherwise_is_no_slot(tmp_path: Path) -> None:
    (tmp_path / "x.bin").write_bytes(b"GGUF")
    assert not is_slot(tmp_path / "x.bin")
    assert not is_slot(tmp_path)
    assert not is_slot(tmp_path / "none")
    assert is_slot(Made().write(tmp_path / "slot.bin"))


def test_a_large_slot_is_read_by_layer(tmp_path: Path) -> None:
    """A sparse file of 1 GiB, 128 parts of 8 MiB."""
    layers, cells, width = 64, 8192, 512
    large = config(num_hidden_layers=layers, num_key_value_heads=8, num_attention_heads=8, hidden_size=512)
    with (tmp_path / "slot.bin").open("wb") as stream:
        stream.write(b"qsgg" + struct.pack("<II", 4, cells) + np.arange(cells, dtype="<i4").tobytes())
        stream.write(struct.pack("<II", 1, cells))
        stream.write(b"".join(struct.pack("<iIi", place, 1, 0) for place in range(cells)))
        stream.write(struct.pack("<IIII", 0, layers, 0, 0))
        for _ in range(2 * layers):
            stream.write(struct.pack("<iQ", 1, 2 * width))
            stream.seek(2 * width * cells, 1)
        stream.truncate()
    assert (tmp_path / "slot.bin").stat().st_size > 2**30
    tracemalloc.start()
    slot = read_slot(tmp_path / "slot.bin", large)
    opened = tracemalloc.get_traced_memory()[1]
    keys, _, positions = slot.layer(63).rows["slot"]
    read = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert (tuple(keys.shape), positions is not None) == ((8, cells, 64), True)
    assert opened < 8 * 2**20
    assert read < 16 * 8 * 2**20  # as stored, in float32, reordered


def test_rounding_to_a_type_is_that_of_its_slot() -> None:
    """Against rows written here, head by head: pairs, the Hadamard matrix of SciPy, gguf's blocks."""
    (keys, values), matrix = entries()[1], (hadamard(SIZE) / np.sqrt(SIZE)).astype(np.float32)
    halves = np.concatenate([np.arange(0, SIZE, 2), np.arange(1, SIZE, 2)])
    pairs = np.argsort(halves)
    for part, order in ((keys, pairs), (values, np.arange(SIZE))):
        rows = part[..., order] @ matrix
        stored = StorageForm(CODES["q4_0"]).dequantise(content(rows.reshape(len(rows), -1), "q4_0"))
        expected = (stored.reshape(rows.shape) @ matrix)[..., np.argsort(order)]
        kind = StorageForm(CODES["q4_0"], SIZE, paired=part is keys)
        found = kind.round(torch.from_numpy(part).transpose(0, 1))
        np.testing.assert_allclose(found.transpose(0, 1).numpy(), expected, atol=1e-5)


def test_readings_of_a_type_that_rounds_nothing_are_the_plain_model(tmp_path: Path) -> None:
    exact = read_slot(Made("f32", "f32", transposed=True).write(tmp_path / "slot.bin"), model().config)
    with torch.inference_mode():
        for reading in exact.rounded_entries(model(), IDS):
            for (keys, values), (plain_keys, plain_values) in zip(reading, entries(), strict=True):
                np.testing.assert_allclose(keys[0].transpose(0, 1), plain_keys, atol=1e-5)
                np.testing.assert_allclose(values[0].transpose(0, 1), plain_values, atol=1e-5)


def test_a_line_names_the_file(tmp_path: Path) -> None:
    path = Made(version=1).write(tmp_path / "slot.bin")
    with pytest.raises(UnreadableCacheError, match=re.escape(str(path))):
        read_slot(path, model().config)
