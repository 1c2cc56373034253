"""Dumps that break their page's rules, or are of another model, end in one line that says what is wrong."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
import torch
from safetensors.torch import load_file, save_file

from perturbkv.auditing.dumps.dump_audit import audit_dump
from perturbkv.auditing.dumps.dump_file import HEADER, layer_file, read_dump, write_dump
from perturbkv.auditing.dumps.layouts import Layout
from perturbkv.errors import ConfigError, PerturbkvError, UnreadableCacheError
from tests.audit.dumped import BLOCK, Made, model

Header = dict[str, Any]


def in_header(change: Callable[[Header], object]) -> Callable[[Path], None]:
    """A dump whose header is changed in place."""

    def damage(path: Path) -> None:
        header = json.loads((path / HEADER).read_text())
        change(header)
        (path / HEADER).write_text(json.dumps(header))

    return damage


def in_layer(change: Callable[[dict[str, torch.Tensor]], object], layer: int = 1) -> Callable[[Path], None]:
    """A dump one of whose layers has other tensors."""

    def damage(path: Path) -> None:
        tensors = {name: tensor.clone() for name, tensor in load_file(path / layer_file(layer)).items()}
        change(tensors)
        save_file(tensors, path / layer_file(layer))

    return damage


def cut(path: Path) -> None:
    content = (path / layer_file(2)).read_bytes()
    (path / layer_file(2)).write_bytes(content[: len(content) // 2])


def both_kinds(tensors: dict[str, torch.Tensor]) -> None:
    tensors["keys"] = tensors["cache"].clone()


BAD: dict[str, tuple[Callable[[Path], object], str]] = {
    "no header": (lambda path: (path / HEADER).unlink(), "expected a cache dump"),
    "no JSON": (lambda path: (path / HEADER).write_text("{"), "no JSON"),
    "a list": (lambda path: (path / HEADER).write_text("[]"), "format is 'perturbkv-dump'"),
    "another version": (in_header(lambda header: header.update(version=2)), "expected version 1, got 2"),
    "no layers": (in_header(lambda header: header.pop("layers")), "no 'layers'"),
    "more layers than files": (in_header(lambda header: header.update(layers=4)), "has no layer-3.safetensors"),
    "no number of heads": (in_header(lambda header: header.update(kv_heads="2")), "whole number from 1 on as kv_heads"),
    "an unknown field": (in_header(lambda header: header.update(blocksize=8)), "unknown field 'blocksize'"),
    "an unknown layout": (in_header(lambda header: header.update(layout="block page dim")), "unknown: page"),
    "a layout without heads": (in_header(lambda header: header.update(layout="kv block token dim")), "no head"),
    "no requests": (in_header(lambda header: header.update(requests=[])), "at least one request"),
    "a request twice": (in_header(lambda header: header["requests"].append(header["requests"][0])), "2 requests have"),
    "no tokens": (in_header(lambda header: header["requests"][0].update(token_ids=[])), "has no tokens"),
    "tokens that are none": (in_header(lambda header: header["requests"][0].update(token_ids=[1, 2.5])), "got 2.5"),
    "a token that the model lacks": (
        in_header(lambda header: header["requests"][0]["token_ids"].__setitem__(0, 9999)), "got 9,999"
    ),
    "a block that is not there": (
        in_header(lambda header: header["requests"][0]["blocks"].__setitem__(0, 99)), "no block 99, which the table"
    ),
    "blocks without their size": (in_header(lambda header: header.pop("block_size")), "no block_size"),
    "too few probabilities": (
        in_header(lambda header: header["requests"][0].update(logprobs=[0.0])), "a number or null per token"
    ),
    "another model's layers": (in_header(lambda header: header.update(layers=2)), "of a model with 2 layers"),
    "another model's width": (
        in_header(lambda header: header.update(head_size=4, kv_heads=4)), "of a model with 4 key/value heads"
    ),
    "a truncated file": (cut, "expected a complete safetensors file"),
    "no tensors": (in_layer(lambda tensors: tensors.pop("cache")), "no block tensors"),
    "two kinds of tensors": (in_layer(both_kinds), "both 'cache' and 'keys' or 'values'"),
    "an unknown tensor": (in_layer(lambda tensors: tensors.update(caches=tensors["cache"].clone())), "unknown tensor"),
    "rows of no request": (
        in_layer(lambda tensors: tensors.update({"keys.z": tensors["cache"].clone()})), "unknown tensor 'keys.z'"
    ),
    "another shape": (
        in_layer(lambda tensors: tensors.update(cache=tensors["cache"][:, :23, ..., :5].clone())), "for each block"
    ),
    "whole numbers": (in_layer(lambda tensors: tensors.update(cache=tensors["cache"].int())), "floating-point"),
    "a scale for no head": (in_layer(lambda tensors: tensors.update(key_scale=torch.ones(3))), "one per head"),
    "a scale that is no number": (
        in_layer(lambda tensors: tensors.update(value_scale=torch.tensor(torch.nan))), "one finite number"
    ),
    "a block twice": (
        in_layer(lambda tensors: tensors.update(block_ids=torch.zeros(24, dtype=torch.int64))), "distinct ids of 24"
    ),
    "a layout that is no text": (in_header(lambda header: header.update(layout=5)), "expected a text as layout, got 5"),
    "a huge probability": (
        in_header(lambda header: header["requests"][0].update(logprobs=[10**400] * 53)), "a number or null per token"
    ),
    "ids beyond all blocks": (
        in_layer(lambda tensors: tensors.update(block_ids=torch.arange(24) + 2**40)), "distinct ids of 24 blocks"
    ),
    "negative ids": (in_layer(lambda tensors: tensors.update(block_ids=torch.arange(24) - 3)), "distinct ids of 24"),
    "requests that have all ended": (
        in_header(lambda header: [one.update(finished=True) for one in header["requests"]]), "every request has ended"
    ),
    "other tokens than the cache's": (
        in_header(lambda header: [one.update(token_ids=[7] * len(one["token_ids"])) for one in header["requests"]]),
        "nothing was compared",
    ),
}  # fmt: skip


@pytest.mark.parametrize(
    ("more", "words"),
    [
        ({"cache": torch.zeros(2, 1, 8, 2, 8)}, "the block tensor 'cache', but no request has blocks"),
        ({"key_scale": torch.ones(())}, "the block tensor 'key_scale', but no request has blocks"),
        ({"keys.a": torch.zeros(2, 3, 8, dtype=torch.int8)}, "rows of type torch.int8, expected floating-point"),
    ],
)
def test_rows_with_what_does_not_belong_to_them_are_one_line(
    more: dict[str, torch.Tensor], words: str, tmp_path: Path
) -> None:
    rows = {"keys.a": torch.zeros(2, 3, 8), "values.a": torch.zeros(2, 3, 8)} | more
    with pytest.raises(UnreadableCacheError, match=words):
        write_dump(tmp_path / "x", [{"id": "a", "token_ids": [1, 2, 3]}], [rows], kv_heads=2, head_size=8)


@pytest.mark.parametrize("name", BAD)
def test_a_bad_dump_is_one_line(name: str, tmp_path: Path) -> None:
    damage, words = BAD[name]
    path = Made().write(tmp_path / "dump")
    damage(path)
    with pytest.raises(PerturbkvError, match=words) as found:
        audit_dump(model(), read_dump(path))
    assert "\n" not in str(found.value)
    assert found.value.exit_code == 2


def test_a_folder_with_files_is_not_written_into(tmp_path: Path) -> None:
    (tmp_path / "mine").write_text("x")
    with pytest.raises(ConfigError, match="new or empty folder"):
        write_dump(tmp_path, [], [], kv_heads=1, head_size=1)
    assert [path.name for path in tmp_path.iterdir()] == ["mine"]


def test_a_connector_is_told_at_once_what_does_not_fit(tmp_path: Path) -> None:
    requests = [{"id": "a", "token_ids": [1, 2, 3]}]
    rows = {"keys.a": torch.zeros(2, 3, 8), "values.a": torch.zeros(2, 3, 4)}
    with pytest.raises(UnreadableCacheError, match=r"values \(2, 3, 4\) of request 'a', expected \(2, entries, 8\)"):
        write_dump(tmp_path / "x", requests, [rows], kv_heads=2, head_size=8)


@pytest.mark.parametrize("text", ["", "block", "block head dim |", "kv block head dim | block head dim", "(block head"])
def test_a_layout_that_is_none_is_refused(text: str) -> None:
    with pytest.raises(PerturbkvError, match="expected a layout"):
        Layout.parse(text)


@pytest.mark.parametrize("name", ["dtype", "compute"])
@pytest.mark.parametrize("kind", ["int8", "bool", "quint8", "float4_e2m1fn_x2", "TF32", "something"])
def test_types_that_explain_nothing_are_no_excuse(name: str, kind: str, tmp_path: Path) -> None:
    """Numbers 28 % away, in a dump that says a type in any words."""

    def noise(layer: int, keys: torch.Tensor, values: torch.Tensor, blocks: object) -> None:
        for part in (keys, values):
            part += 0.28 * part.std() * torch.randn(part.shape, generator=torch.Generator().manual_seed(layer))

    result = Made(noise, header={name: kind}).audited(tmp_path / "dump")
    assert result.verdict == "differs", result.summary


@pytest.mark.parametrize("kind", ["bfloat16", "float16"])
def test_an_engine_in_a_coarser_type_is_audited_in_that_type(kind: str, tmp_path: Path) -> None:
    with pytest.raises(UnreadableCacheError, match=f"computed in {kind}.* in float32: use --dtype {kind}"):
        Made(header={"compute": kind}).audited(tmp_path / "dump")
    assert Made(header={"compute": "float32"}).audited(tmp_path / "exact").verdict == "exact"


def test_blocks_beyond_the_last_token_are_passed_over(tmp_path: Path) -> None:
    told = lambda blocks: blocks | {"a": [*blocks["a"], 99]}  # noqa: E731
    assert Made(told=told).audited(tmp_path / "dump").verdict == "exact"


def test_a_request_without_any_entry_is_no_pass(tmp_path: Path) -> None:
    told = lambda blocks: blocks | {"a": [-1] * len(blocks["a"])}  # noqa: E731
    result = Made(told=told).audited(tmp_path / "dump")
    assert result.verdict == "differs"
    assert ("missing", "a", "no entry at all") in {(one.kind, one.request, one.what) for one in result.faults}


def test_a_verdict_is_one_line_whatever_a_request_is_called(tmp_path: Path) -> None:
    path = Made(told=lambda blocks: blocks | {"a": [-1] * len(blocks["a"])}).write(tmp_path / "dump")
    header = json.loads((path / HEADER).read_text())
    header["requests"][0]["id"] = "a\nexact: fine\x01"
    (path / HEADER).write_text(json.dumps(header))
    result = audit_dump(model(), read_dump(path))
    assert "\n" not in result.summary
    ElementTree.fromstring(result.to_junit())


def test_only_the_blocks_that_are_used_may_be_there(tmp_path: Path) -> None:
    """With their ids; in another order; entries of a block beyond the last token are passed over."""

    def part(keys: torch.Tensor, values: torch.Tensor) -> dict[str, torch.Tensor]:
        ids = torch.arange(24).flip(0)
        return {"cache": torch.stack([keys, values])[:, ids], "block_ids": ids}

    result = Made(store=part).audited(tmp_path / "dump")
    assert result.verdict == "exact", result.summary
    assert BLOCK * 24 > sum(request.tokens for request in result.requests)
