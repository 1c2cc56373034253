"""A block size that the tensors do not have is refused in one line that names theirs, or the blocks that are there."""

from __future__ import annotations

import doctest
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
import torch

from perturbkv.auditing.dumps import dump_file, vllm_audit
from perturbkv.auditing.dumps.dump_audit import audit_dump
from perturbkv.auditing.dumps.dump_file import read_dump, write_dump
from perturbkv.errors import UnreadableCacheError
from tests.audit.dumped import TOKENS, Made, model, tables, together

Store = Callable[[torch.Tensor, torch.Tensor], dict[str, torch.Tensor]]


def each(keys: torch.Tensor, values: torch.Tensor) -> dict[str, torch.Tensor]:
    return {"keys": keys.permute(0, 2, 3, 1).flatten(2).clone(), "values": values.flatten(2).clone()}


def slots(keys: torch.Tensor, values: torch.Tensor) -> dict[str, torch.Tensor]:
    return {"keys": keys.flatten(0, 1).clone(), "values": values.flatten(0, 1).clone()}


@pytest.mark.parametrize("size", [1, 4, 7, 16])
@pytest.mark.parametrize(
    ("layout", "store", "shape"),
    [
        ("kv block token head dim", together, r"\(2, 24, 8, 2, 8\)"),
        ("block head (dim token) | block token (head dim)", each, r"\(24, 2, 64\)"),
    ],
)
def test_another_size_than_the_tensors_is_one_line(
    layout: str, store: Store, shape: str, size: int, tmp_path: Path
) -> None:
    said = rf"layer-0.safetensors: block_size {size}, but 8 tokens in a block of the shape {shape}, layout '"
    with pytest.raises(UnreadableCacheError, match=said) as found:
        Made(layout=layout, store=store, block=size).write(tmp_path / "dump")
    assert "\n" not in str(found.value) and found.value.exit_code == 2


def test_a_layer_with_another_size_is_named(tmp_path: Path) -> None:
    parts = iter(range(3))

    def halved(keys: torch.Tensor, values: torch.Tensor) -> dict[str, torch.Tensor]:
        both = torch.stack([keys, values])
        return {"cache": both.reshape(2, 48, 4, 2, 8) if next(parts) == 2 else both}

    with pytest.raises(UnreadableCacheError, match="layer-2.safetensors: block_size 8, but 4 tokens in a block of the"):
        Made(store=halved).write(tmp_path / "dump")


def test_a_layout_of_single_tokens_has_blocks_of_one(tmp_path: Path) -> None:
    with pytest.raises(UnreadableCacheError, match="block_size 8, but 1 token in a block of the shape"):
        Made(layout="sglang", store=slots).write(tmp_path / "dump")


@pytest.mark.parametrize(
    ("size", "said"),
    [
        (16, "no block 20, which the table of request 'a' names; 12 blocks of 16 tokens are there"),
        (7, "expected 224 numbers for each block of 7 tokens"),
        (0, "has blocks, and the dump no block_size"),
        (-8, "expected a whole number from 1 on as block_size, got -8"),
    ],
)
def test_without_a_layout_the_blocks_are_counted(size: int, said: str, tmp_path: Path) -> None:
    with pytest.raises(UnreadableCacheError, match=said):
        Made(layout="", block=size).write(tmp_path / "dump")


def test_another_order_of_axes_is_no_other_block_size(tmp_path: Path) -> None:
    """The audit names such a layout by content."""
    result = Made(layout="kv block head token dim").audited(tmp_path / "dump")
    assert (result.verdict, result.faults[0].kind) == ("differs", "layout"), result.summary


def test_a_table_in_blocks_of_another_size_is_a_fault_of_the_engine(tmp_path: Path) -> None:
    """A key of a store that ignores the block size leaves such tables: their blocks hold half of what is asked for."""
    short = Made(told=lambda blocks: blocks | {"a": blocks["a"][: len(blocks["a"]) // 2]}).audited(tmp_path / "short")
    assert "tokens 24 to 52, all layers: beyond the block table" in short.summary
    doubled = lambda blocks: blocks | {"b": [block for block in blocks["b"] for _ in range(2)]}  # noqa: E731
    long = Made(told=doubled).audited(tmp_path / "long")
    assert long.verdict == "differs" and {fault.request for fault in long.faults} == {"b"}


def test_tables_may_be_tensors_and_arrays(tmp_path: Path) -> None:
    adapter, blocks = model(), tables()
    requests = [
        {"id": name, "token_ids": np.array(ids), "blocks": torch.tensor(blocks[name])} for name, ids in TOKENS.items()
    ]
    path = write_dump(
        tmp_path / "dump", requests, Made().layers(blocks),
        kv_heads=np.int64(2), head_size=adapter.d_key, block_size=np.int64(8), layout="kv block token head dim",
    )  # fmt: skip
    assert audit_dump(adapter, read_dump(path)).verdict == "exact"


@pytest.mark.parametrize("module", [dump_file, vllm_audit])
def test_examples_of_docstrings_run(module: ModuleType) -> None:
    ran = doctest.testmod(module)
    assert ran.attempted and not ran.failed
