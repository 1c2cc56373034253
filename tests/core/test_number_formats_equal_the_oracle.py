"""Formats of stored numbers against loops, torch's casts and gguf's quantisers; and what rules of precision denote."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch

from perturbkv.analyses import sides
from perturbkv.cache import codecs
from perturbkv.cache.entries import KeptEntries
from perturbkv.cache.quantisation import quantise_entries
from perturbkv.configs.eviction import EvictionConfig
from perturbkv.configs.number_formats import CODES, FORMATS, format_of
from perturbkv.configs.precision import as_precision, check_precisions, entries_in_bytes, stored_bits
from perturbkv.configs.run import RunConfig
from perturbkv.errors import ConfigError, UnknownNameError
from perturbkv.selection.grid import configuration, grid
from tests.oracle import quantisation as naive
from tests.support.configs import flat

LENGTHS, WIDTH, WINDOW = [9, 14, 4], 64, 4
"""Of kept sets; the last one is all window."""


def config(precision: str, **more: Any) -> EvictionConfig:
    return configuration(30, precision=precision, window=WINDOW, granularity="kv", **more)


def numbers(rows: int = 23, width: int = WIDTH, size: float = 1.0) -> torch.Tensor:
    draw = np.random.default_rng(rows + width)
    return torch.from_numpy(size * (draw.normal(size=(rows, width)) + 3 * draw.normal(size=width)))


def kept() -> KeptEntries:
    keys, values = numbers(sum(LENGTHS)), numbers(sum(LENGTHS), 2 * WIDTH)[:, :WIDTH]
    return KeptEntries.of(torch.split(keys, LENGTHS), torch.split(values, LENGTHS))


@pytest.mark.parametrize("size", [1e-3, 1.0, 50.0])
def test_fp8_has_the_nearest_numbers_and_is_torchs_cast(size: float) -> None:
    data, counts = numbers(size=size), [9, 0, 14]
    found, sets = codecs.as_fp8(data, counts), torch.split(data, counts)
    expected = [entry for one in sets if len(one) for entry in naive.fp8(list(one.numpy()))]
    np.testing.assert_array_equal(found.numpy(), np.array(expected))
    for one, own in zip(sets, torch.split(found, counts), strict=True):
        scale = one.float().abs().max() / 448 if len(one) else torch.ones(())
        assert torch.equal((one.float() / scale).to(torch.float8_e4m3fn).float() * scale, own.float())


def test_fp8_saturates_and_keeps_zeros() -> None:
    assert float(torch.tensor(448.0).to(torch.float8_e4m3fn)) == 448 == torch.finfo(torch.float8_e4m3fn).max
    data = torch.cat([torch.full((1, 4), np.float32(3.4e38)), torch.zeros(2, 4)])
    found = codecs.as_fp8(data, [1, 2])
    assert found.isfinite().all() and torch.equal(found[1:], data[1:])


@pytest.mark.parametrize("bits", [1, 2, 3, 4, 8])
def test_levels_are_lloyd_and_maxs(bits: int) -> None:
    found = codecs.normal_levels(bits)
    assert len(found) == 2**bits and (np.diff(found) > 0).all() and np.array_equal(found, -found[::-1])
    if bits < 8:  # Lloyd's iteration takes ever longer
        np.testing.assert_allclose(found, naive.levels(bits), atol=1e-9)
    table = {1: [0.7980], 2: [0.4528, 1.510], 3: [0.2451, 0.7560, 1.344, 2.152]}  # Max (1960), table I
    np.testing.assert_allclose(found[2 ** (bits - 1) :][:4], table.get(bits, found[2 ** (bits - 1) :][:4]), atol=5e-4)


@pytest.mark.parametrize("bits", [1, 2, 3, 4])
@pytest.mark.parametrize("width", [8, 64, 80])
def test_rotated_numbers_are_the_nearest_levels_turned_back(bits: int, width: int) -> None:
    data, rotation = torch.cat([numbers(6, width), torch.zeros(1, width)]), codecs.rotation_map(width, 1)
    expected = np.array(naive.rotated(list(data.numpy()), bits, rotation))
    np.testing.assert_allclose(codecs.as_rotated(data, bits, 1).numpy(), expected, atol=2e-6 * float(data.abs().max()))


@pytest.mark.parametrize("width", [1, 8, 64, 80, 128])
def test_maps_are_orthogonal_and_of_each_kind(width: int) -> None:
    keys, values = (codecs.rotation_map(width, seed) for seed in (0, 1))
    np.testing.assert_allclose(keys @ keys.T, np.eye(width), atol=1e-12)
    assert width < 8 or not np.array_equal(keys, values)
    assert width == 80 or np.allclose(np.abs(keys), width**-0.5)


@pytest.mark.parametrize(("bits", "expected"), [(1, 0.3634), (2, 0.1175), (3, 0.03454), (4, 0.009497)])
def test_distortion_is_turboquants(bits: int, expected: float) -> None:
    """Mean squared error over the squared norm: theorem 1 of the paper, with the digits of Max's table (1960)."""
    data = torch.from_numpy(np.random.default_rng(0).normal(size=(500, 128)))
    lost = (codecs.as_rotated(data, bits, 0) - data).square().sum(dim=1) / data.square().sum(dim=1)
    assert float(lost.mean()) == pytest.approx(expected, rel=0.05)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("size", [1e-3, 1.0, 50.0])
@pytest.mark.parametrize("name", ["q8_0", "q4_0"])
def test_blocks_are_llamacpps(name: str, size: float, dtype: torch.dtype) -> None:
    data, kind = numbers(size=size).to(dtype), gguf.GGMLQuantizationType[name.upper()]
    data[3, :32] = 0
    found = getattr(codecs, f"as_{name}")(data.float())
    theirs = gguf.quants.dequantize(gguf.quants.quantize(data.float().numpy(), kind), kind)
    np.testing.assert_array_equal(found.numpy(), theirs)
    np.testing.assert_array_equal(found.numpy(), [getattr(naive, name)(row) for row in data.float().numpy()])


@pytest.mark.parametrize("code", CODES)
@pytest.mark.parametrize("kind", ["keys", "values"])
def test_each_code_goes_to_its_kind_and_to_nothing_else(code: str, kind: str) -> None:
    """Of kept sets of several lengths, each for itself, without the window; the other kind stays, bit for bit."""
    other, entries = {"keys": "values", "values": "keys"}[kind], kept()
    found = quantise_entries(entries, config(f"quantise({kind}={code}, {other}=16)"), 7)
    assert torch.equal(getattr(found, other), getattr(entries, other))
    for own, before in zip(found.sets(), entries.sets(), strict=True):
        place, few = ("keys", "values").index(kind), len(before[0]) - WINDOW
        assert torch.equal(own[place][few:], before[place][few:])
        if few and code != "fp8-tensor" and not code.startswith("rotated"):
            expected = naive.coded(list(before[place][:few].numpy()), code, kind, 32)
            np.testing.assert_array_equal(own[place][:few].numpy(), np.array(expected))
        assert not few or torch.equal(own[place], before[place]) == (code == "16")


def test_one_scale_for_the_tensor_is_that_of_all_sets() -> None:
    entries = kept()
    found = quantise_entries(entries, config("fp8-tensor"), 0)
    few = [keys[: len(keys) - WINDOW] for keys, _ in entries.sets()]
    own = [keys[: len(keys) - WINDOW] for keys, _ in found.sets()]
    assert torch.equal(torch.cat(own), codecs.as_fp8(torch.cat(few), [sum(map(len, few))]))
    assert not torch.equal(torch.cat(own), codecs.as_fp8(torch.cat(few), list(map(len, few))))


def test_a_rule_changes_its_layers_alone() -> None:
    chosen, entries = config("keys=4, values=2; layers 1, 3-4: 16; layers 6: keys=8"), kept()
    plain, whole = config("quantise(keys=4, values=2)"), config("quantise(keys=8, values=2)")
    for layer in range(8):
        found = quantise_entries(entries, chosen, layer)
        expected = entries if layer in (1, 3, 4) else quantise_entries(entries, whole if layer == 6 else plain, layer)
        assert torch.equal(found.keys, expected.keys) and torch.equal(found.values, expected.values)


def integers_before(keys: torch.Tensor, values: torch.Tensor, bits: int) -> tuple[torch.Tensor, torch.Tensor]:
    """KIVI's integers as they were before other formats were there: groups of 32, of whole groups."""
    found = []
    for data, axis in ((keys.unflatten(0, (-1, 32)), 1), (values.unflatten(1, (-1, 32)), 2)):
        low, high = data.float().amin(axis, keepdim=True), data.float().amax(axis, keepdim=True)
        scale, low = ((high - low) / (2**bits - 1)).half().float(), low.half().float()
        codes = ((data.float() - low) / scale.where(scale > 0, 1)).round().clamp(0, 2**bits - 1)
        found.append((codes * scale + low).to(data.dtype).reshape(keys.shape))
    return found[0], found[1]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("bits", [8, 4, 2])
def test_integers_are_what_they_were(bits: int, dtype: torch.dtype) -> None:
    keys, values = numbers(96 + WINDOW).to(dtype), numbers(96 + WINDOW, 65)[:, 1:].to(dtype)
    found = quantise_entries(KeptEntries.of([keys], [values]), config(f"quantise(bits={bits})"), 0)
    for own, expected in zip((found.keys, found.values), integers_before(keys[:96], values[:96], bits), strict=True):
        assert torch.equal(own[:96], expected)


@pytest.mark.parametrize("code", CODES)
def test_bytes_are_counted_number_by_number(code: str) -> None:
    asked = config(f"quantise(keys={code}, values=8, by_layer='3: values={code}')")
    for layer, kinds in ((0, 1), (3, 2)):
        expected = sum(naive.bits_held(flat(asked), length, 99, WIDTH, layer) for length in LENGTHS)
        if code == "fp8-tensor":  # one scale for the first two sets, which have entries before the window
            expected -= 32 * kinds
        assert stored_bits(asked.precision, LENGTHS, WINDOW, WIDTH, WIDTH, layer) == expected


def test_bytes_by_hand() -> None:
    """68 entries of 64 numbers before the window: a scale a head, a norm an entry, two blocks an entry."""
    whole = 32 * 2 * 64 * 16
    few = {"fp8": 2 * (68 * 64 * 8 + 32), "rotated-3": 2 * 68 * (64 * 3 + 16), "q4_0": 2 * 68 * (64 * 4 + 2 * 16)}
    for code, bits in few.items():
        assert stored_bits(config(code).precision, [100], 32, 64, 64) == whole + bits


@pytest.mark.parametrize("code", [code for code in CODES if code != "16"])
def test_a_budget_of_bytes_is_filled_with_any_format(code: str) -> None:
    precision = config(f"quantise(bits={code}, fill=64)").precision
    room, found = 50 * 2 * 16 * 64, entries_in_bytes(precision, 50, 32, 400)
    assert stored_bits(precision, [found], 32, 64, 64) <= room
    assert found == 400 or stored_bits(precision, [found + 1], 32, 64, 64) > room


@pytest.mark.parametrize(
    ("text", "printed"),
    [
        ("quantise", "quantise(bits=4)"),
        ("8", "quantise(bits=8)"),
        ("fp8", "quantise(bits=fp8)"),
        ("quantise(keys=4-channel, values=4-token)", "quantise(bits=4)"),
        ("4-token", "quantise(keys=4-token, values=4)"),
        ("quantise(keys=8)", "quantise(keys=8, values=16)"),
        ("values=4, group=8", "quantise(keys=16, values=4, group=8)"),
        ("quantise(bits=8, values=2)", "quantise(keys=8, values=2)"),
        ("keys=4,values=2", "quantise(keys=4, values=2)"),
        ("keys=4,values=2;layers 0,29: 16", 'quantise(keys=4, values=2, by_layer="0, 29: 16")'),
        ("layers 3-6 : keys = q8_0 , values=q8_0", 'quantise(bits=16, by_layer="3-6: q8_0")'),
        ("full; layer 2: 4-token", 'quantise(bits=16, by_layer="2: keys=4-token, values=4")'),
        (
            "4, group=64; layers 1, 0: values=8; layers 2: 2",
            'quantise(bits=4, group=64, by_layer="0-1: values=8; 2: 2")',
        ),
        ("full", "full"),
    ],
)
def test_rules_become_one_choice_that_parses_back(text: str, printed: str, tmp_path: Path) -> None:
    chosen = config(text)
    assert str(chosen.precision) == printed
    assert config(printed) == chosen == EvictionConfig.from_document(chosen.to_document())
    file = tmp_path / "rules"
    file.write_text(text.replace(";", "\n\n") + "\n")
    (found,) = grid(30, precision=str(file), window=WINDOW, granularity="kv")
    file.unlink()
    assert found == chosen == EvictionConfig.from_document(found.to_document())


def test_bits_are_one_number_only_where_they_are() -> None:
    found = {
        text: (config(text).bits, config(text).bits_text) for text in ("full", "4-token", "fp8", "keys=4, values=2")
    }
    assert found == {"full": (16, "16"), "4-token": (4, "4"), "fp8": (8, "8"), "keys=4, values=2": (None, "4/2")}
    ruled = config("keys=8,values=4; layers 0: 16")
    assert (ruled.bits, ruled.bits_text) == (None, "8/4, by layer")


@pytest.mark.parametrize(
    ("precision", "error", "said"),
    [
        ("fp9", UnknownNameError, "unknown precision 'fp9'; known: full, quantise; or bits alone, 4 or fp8; rules"),
        ("keys=5", UnknownNameError, "unknown keys '5'; nearest of 19 known: "),
        ("4; 8", ConfigError, "expected one rule for all layers in a precision, got '4; 8'"),
        ("", ConfigError, "expected one rule for all layers in a precision, got ''"),
        ("layers 3 keys=4", ConfigError, "expected rules of layers such as '0, 29: 16; 3-6: keys=8', got '3 keys=4'"),
        ("layers 3: group=8", ConfigError, "to give a code, or keys=… and values=…, got 'group=8'"),
        ("layers 3: 4; layers 2-4: 8", ConfigError, "expected one rule for a layer, got two for layer 3"),
        ("none.txt", ConfigError, "expected rules of precision as text at none.txt, got nothing"),
        ("quantise(bits=4, keys=4, values=2)", ConfigError, "bits of precision 'quantise' has no effect beside keys"),
        ("quantise(fill=64, by_layer='3: 8')", ConfigError, "fill of precision 'quantise' takes layers that are alike"),
        ("fp8, group=16", ConfigError, "group of precision 'quantise' has no effect here: it needs integers"),
    ],
)
def test_what_cannot_be_asked_for(precision: str, error: type[Exception], said: str) -> None:
    with pytest.raises(error) as raised:
        grid(64, precision=precision)
    assert said in str(raised.value)


def test_a_model_must_have_the_layers_and_whole_blocks() -> None:
    with pytest.raises(ConfigError, match="a rule for layer 9, and model 'm' stores measured entries in layers 5, 8"):
        check_precisions([config("4; layers 5, 9: 16").precision], [5, 8], 64, 64, "m")
    with pytest.raises(ConfigError, match="blocks of 32 components, and model 'm' has keys of 80 and values of 80"):
        check_precisions([config("16; layers 5: values=q4_0").precision], [5], 80, 80, "m")
    check_precisions([config("q8_0; layers 5: 16").precision], [5], 64, 96, "m")


def test_precisions_are_never_held_against_each_other() -> None:
    """Whichever options their choices have: a pair differs in selection alone."""
    texts = (
        "full",
        "4",
        "fp8",
        "fp8, fill=64",
        "keys=4, values=2",
        "4; layers 1: 16",
        "8; layers 1: 4",
        "4-token",
        "16",
    )
    run = RunConfig("m", "d", grid(64, precision=texts, selection=("attention", "two-stage")))
    found = sides.pairs(run, "attention", "two-stage")
    assert len(found) == len(texts) == len(sides.group_by_selection(run))
    assert all(first.precision == second.precision for first, second in found)


def test_formats_are_told_apart() -> None:
    assert {format_of(code, "keys") for code in CODES} == {*FORMATS.values()}
    assert as_precision(as_precision("fp8")) == as_precision("quantise(bits=fp8)")
