"""A fault that is planted in a file that llama.cpp saved is found and named."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import gguf
import numpy as np
import pytest
from numpy.typing import NDArray

from perturbkv.auditing.dumps.llamacpp import read_slot
from perturbkv.models.adapter import Adapter
from tests.llamacpp.conftest import Audited, Save

Bytes = NDArray[np.uint8]


class Planted:
    """A copy of a slot file, whose rows are changed in place."""

    def __init__(self, source: Path, path: Path, adapter: Adapter) -> None:
        path.write_bytes(source.read_bytes())
        self.path, self.slot = path, read_slot(path, adapter.config)
        self.content: Bytes = np.memmap(path, np.uint8, "r+")

    def rows(self, *layers: int) -> Iterator[tuple[Bytes, Bytes]]:
        """Keys and values (cell, byte) of layers, by default of all."""
        for index in layers or range(self.slot.layers):
            yield tuple(
                self.content[part.offset : part.offset + part.nbytes].reshape(len(self.slot.positions), -1)
                for part in self.slot.parts[index]
            )  # type: ignore[misc]


@pytest.mark.parametrize(
    ("weights", "kind"), [("q4_1", "f16"), pytest.param("q4_1", "q4_0", marks=pytest.mark.slow), ("float32", "q8_0")]
)
def test_swapped_rows_are_named(
    slot: Save, audited: Audited, adapters: dict[str, Adapter], tmp_path: Path, weights: str, kind: str
) -> None:
    planted = Planted(slot(weights, kind, kind), tmp_path / "slot.bin", adapters[weights])
    for part in (part for both in planted.rows() for part in both):
        part[[20, 90]] = part[[90, 20]]
    audit = audited(planted.path, weights)
    assert audit.verdict == "differs"
    assert {(fault.kind, fault.first, fault.what) for fault in audit.faults if len(fault.layers) > 20} == {
        ("token", 20, "entries of token 90 of the same request"),
        ("token", 90, "entries of token 20 of the same request"),
    }  # fmt: skip


@pytest.mark.parametrize("kind", ["f16", "q4_0"])
def test_an_overwritten_row_is_named_in_its_layer(
    slot: Save, audited: Audited, adapters: dict[str, Adapter], tmp_path: Path, kind: str
) -> None:
    planted = Planted(slot("q4_1", kind, kind), tmp_path / "slot.bin", adapters["q4_1"])
    ((_, values),) = planted.rows(7)
    values[33] = values[33, ::-1] if kind == "q4_0" else np.roll(values[33], 20)
    faults = audited(planted.path, "q4_1").faults
    assert {(fault.first, fault.last, tuple(fault.layers)) for fault in faults} == {(33, 33, (7,))}
    assert {fault.kind for fault in faults} <= {"unknown", "infinite", "changed"}


@pytest.mark.slow
def test_rows_of_another_prompt_are_named(
    slot: Save, audited: Audited, adapters: dict[str, Adapter], tmp_path: Path
) -> None:
    planted = Planted(slot("q4_1", "q8_0", "q8_0"), tmp_path / "slot.bin", adapters["q4_1"])
    other = Planted(slot("q4_1", "q8_0", "q8_0", True, 200), tmp_path / "other.bin", adapters["q4_1"])
    for own, foreign in zip(planted.rows(), other.rows(), strict=True):
        for part, source in zip(own, foreign, strict=True):
            part[50:60] = source[50:60]
    faults = audited(planted.path, "q4_1").faults
    named = [fault for fault in faults if fault.kind == "unknown"]
    assert {layer for fault in named for layer in fault.layers} == set(range(30))
    assert min(fault.first for fault in named) == 50 and max(fault.last for fault in named) == 59
    assert all(50 <= fault.first <= fault.last <= 59 for fault in faults)


@pytest.mark.slow
@pytest.mark.parametrize(("weights", "kind"), [("q4_1", "q8_0"), ("float32", "q8_0"), ("q4_1", "q4_0")])
def test_numbers_of_another_type_are_named(
    slot: Save, audited: Audited, adapters: dict[str, Adapter], tmp_path: Path, weights: str, kind: str
) -> None:
    """A slot says float16, and its values went through fewer bits, as another slot has them."""
    planted = Planted(slot(weights, "f16", "f16"), tmp_path / "slot.bin", adapters[weights])
    for both in planted.rows():
        numbers = gguf.dequantize(np.array(both[1]), gguf.GGMLQuantizationType.F16).astype(np.float32)
        rounded = gguf.GGMLQuantizationType[kind.upper()]
        both[1][:] = gguf.dequantize(gguf.quantize(numbers, rounded), rounded).astype(np.float16).view(np.uint8)
    audit = audited(planted.path, weights)
    named = {fault.what: len(fault.layers) for fault in audit.faults if fault.kind == "rounded"}
    assert named.get(f"values {kind}'s numbers in f16") == 30, audit.summary


@pytest.mark.slow
@pytest.mark.parametrize(("step", "layer"), [(1, 0), (2, 1)])
def test_noise_in_a_run_is_not_taken_for_other_text(
    slot: Save, audited: Audited, adapters: dict[str, Adapter], tmp_path: Path, step: int, layer: int
) -> None:
    """In every layer, or in every other token from layer 1 on: above that of rounding, and in a few tokens much."""
    planted = Planted(slot("q4_1", "f16", "f16"), tmp_path / "slot.bin", adapters["q4_1"])
    noise, rows = np.random.default_rng(0), slice(30, 80, step)
    for index, both in enumerate(planted.rows()):
        for part, typical in zip(both, (0.008, 0.03), strict=True) if index >= layer else ():
            numbers = np.array(part[rows]).view(np.float16).astype(np.float32)
            size = typical * np.sqrt(np.square(numbers).mean(axis=1, keepdims=True))
            size[: 6 if index else 0] *= 10
            part[rows] = (numbers + size * noise.standard_normal(numbers.shape)).astype(np.float16).view(np.uint8)
    audit = audited(planted.path, "q4_1")
    assert audit.verdict == "differs" and audit.faults[0].layers[0] == 1, audit.summary
    assert "context" not in {fault.kind for fault in audit.faults}


@pytest.mark.slow
def test_fewer_bits_than_those_of_the_type_are_named(
    slot: Save, audited: Audited, adapters: dict[str, Adapter], tmp_path: Path
) -> None:
    """A slot says q8_0, and its keys went through q4_0."""
    planted = Planted(slot("q4_1", "q8_0", "q8_0"), tmp_path / "slot.bin", adapters["q4_1"])
    eight, four = gguf.GGMLQuantizationType.Q8_0, gguf.GGMLQuantizationType.Q4_0
    for keys, _ in planted.rows():
        numbers = gguf.dequantize(np.array(keys), eight)
        keys[:] = gguf.quantize(gguf.dequantize(gguf.quantize(numbers, four), four), eight)
    audit = audited(planted.path, "q4_1")
    (coarse,) = [fault for fault in audit.faults if fault.kind == "coarse"]
    assert coarse.what == "keys farther from the plain model's than rounding to q8_0 keys, q8_0 values moves them"
    assert len(coarse.layers) == 30


@pytest.mark.slow
def test_a_slot_of_other_weights_is_named(slot: Save, audited: Audited) -> None:
    """Those in 4 bits, held against a model that says that its weights are in float32."""
    audit = audited(slot("q4_1", "f16", "f16"), "float32")
    assert audit.verdict == "differs"
    assert {fault.kind for fault in audit.faults} >= {"coarse"}
