"""A fault that is planted inside a running vLLM, or in what is told of it, is found and named."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from perturbkv.analyses.audit.dump_verdict import DumpAudit
from perturbkv.auditing.dumps import vllm_audit, vllm_engine
from perturbkv.auditing.dumps.vllm_engine import EngineRequest, describe_cache, dump_vllm
from perturbkv.errors import ConfigError, EngineError, UnknownNameError, UnreadableCacheError
from perturbkv.models.aliases import EMBEDDED
from tests.vllm.conftest import before_step, copy, fill

Audited = Callable[..., DumpAudit]
DYING = """
import os, signal, sys
from perturbkv.auditing.dumps import vllm_audit, vllm_engine
read = vllm_engine.read_blocks
def dying(worker, index, block_ids):
    if index == 3:
        print("out of luck", file=sys.stderr, flush=True)
        os.kill(os.getpid(), signal.SIGKILL)
    return read(worker, index, block_ids)
vllm_engine.read_blocks = dying
vllm_audit.main()
"""
HALVED = """
from dataclasses import replace
from perturbkv.auditing.dumps import vllm_audit
plain = vllm_audit.VLLM_SITUATIONS["plain"]
halved = replace(plain, engine={**plain.engine, "kv_cache_dtype": "float16"})
vllm_audit.VLLM_SITUATIONS = {"plain": halved}
vllm_audit.main()
"""


def two(text: tuple[int, ...]) -> tuple[EngineRequest, EngineRequest]:
    return EngineRequest("a", text[:100], 6), EngineRequest("b", text[200:300], 9)


def kinds(audit: DumpAudit) -> dict[str, tuple[str, int, int, list[int]]]:
    """Kind of fault -> request, first and last token, blocks, of its fault in the lowest layer."""
    assert audit.verdict == "differs"
    return {
        fault.kind: (fault.request, fault.first, fault.last, list(fault.blocks)) for fault in reversed(audit.faults)
    }


def test_an_overwritten_block_is_named_and_what_follows_is_not(
    llm: Any, audited: Audited, text: tuple[int, ...]
) -> None:
    blocks: list[int] = []

    def plant(tables: dict[str, list[int]]) -> None:
        blocks.append(tables["a"][1])
        llm.collective_rpc(fill, args=(blocks[0], 0.0))

    with before_step(llm, 3, plant):
        found = kinds(audited(*two(text)))
    assert found["missing"] == ("a", 32, 63, blocks)
    assert "decoding" not in found  # what the engine answers is what attention to the zeros gives


def test_a_block_of_another_request_is_named(llm: Any, audited: Audited, text: tuple[int, ...]) -> None:
    blocks: list[int] = []

    def plant(tables: dict[str, list[int]]) -> None:
        blocks.append(tables["a"][2])
        llm.collective_rpc(copy, args=(tables["b"][0], tables["a"][2], range(30)))

    with before_step(llm, 6, plant):
        audit = audited(*two(text))
    assert kinds(audit)["request"] == ("a", 64, 95, blocks)
    assert "tokens 0 to 31 of request b" in audit.summary


def test_a_block_of_a_request_that_has_ended_is_named_in_its_layer(
    llm: Any, audited: Audited, text: tuple[int, ...]
) -> None:
    ended, tables_at = EngineRequest("c", text[320:370], 2), []

    def plant(tables: dict[str, list[int]]) -> None:
        tables_at.append(tables)
        stale = tables_at[0]["c"][0] if len(tables_at) > 1 else None
        if stale is not None:
            llm.collective_rpc(copy, args=(stale, tables["a"][0], [7]))

    with before_step(llm, 2, plant), before_step(llm, 6, plant):
        audit = audited(*two(text), ended, until="a")
    (fault,) = [fault for fault in audit.faults if fault.kind == "stale"]
    assert (fault.request, fault.layers, fault.blocks) == ("a", (7,), (tables_at[1]["a"][0],))
    assert fault.what == "entries of tokens 0 to 31 of request c, which has ended"


def test_a_wrong_block_table_is_named(audited: Audited, text: tuple[int, ...]) -> None:
    def swap(path: Path) -> None:
        header = json.loads((path / "dump.json").read_text())
        blocks = header["requests"][0]["blocks"]
        blocks[0], blocks[1] = blocks[1], blocks[0]
        (path / "dump.json").write_text(json.dumps(header))

    audit = audited(*two(text), change=swap)
    assert {(fault.kind, fault.what) for fault in audit.faults} == {
        ("token", "entries of tokens 0 to 31 of the same request"),
        ("token", "entries of tokens 32 to 63 of the same request"),
    }  # fmt: skip
    assert all(len(fault.layers) == 30 and fault.request == "a" for fault in audit.faults)


def test_a_block_table_one_short_is_named(audited: Audited, text: tuple[int, ...]) -> None:
    def cut(path: Path) -> None:
        header = json.loads((path / "dump.json").read_text())
        header["requests"][1]["blocks"].pop()
        (path / "dump.json").write_text(json.dumps(header))

    assert kinds(audited(*two(text), change=cut))["missing"] == ("b", 96, 104, [])


@pytest.mark.slow
def test_a_cache_in_float16_under_float32_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vllm_audit, "_BEGIN", HALVED)
    ((_, audit),) = vllm_audit.audit_vllm(EMBEDDED, ["plain"])
    assert audit.stored == "float16"
    assert {"infinite"} <= kinds(audit).keys() <= {"infinite", "missing", "decoding"}
    assert len(audit.faults[0].layers) == 30 and all(one.differing == one.compared for one in audit.requests)


def test_an_engine_that_dies_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vllm_audit, "_BEGIN", DYING)
    with pytest.raises(EngineError) as raised:
        list(vllm_audit.audit_vllm(EMBEDDED, ["plain"]))
    assert str(raised.value) == "vLLM ended with SIGKILL while it ran plain: out of luck"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"backends": ["CPU_ATTN", "ROCM_ATTN"]}, "attention backend ROCM_ATTN is not read; those read: CPU_ATTN, FL"),
        ({"types": ["turboquant_k8v4"]}, "type of cache turboquant_k8v4 is not read; those read: auto, "),
        ({"instructions": "neon"}, "CPU_ATTN stores blocks for neon, which are not read"),
        ({"names": []}, "layer model.layers.0.self_attn.attn has another kind of cache"),
    ],
)
def test_a_cache_that_is_stored_otherwise_is_refused_by_name(llm: Any, change: dict[str, Any], message: str) -> None:
    (cache,) = llm.collective_rpc(describe_cache)
    with pytest.raises(UnreadableCacheError, match=message):
        vllm_engine._check_cache({**cache, **change}, cache["names"], 1)
    with pytest.raises(UnreadableCacheError, match="2 groups of layers"):
        vllm_engine._check_cache(cache, cache["names"], 2)


def test_an_engine_that_cannot_be_stepped_from_here_is_refused(llm: Any, text: tuple[int, ...], tmp_path: Path) -> None:
    elsewhere = SimpleNamespace(llm_engine=SimpleNamespace(engine_core=SimpleNamespace()))
    with pytest.raises(ConfigError, match="VLLM_ENABLE_V1_MULTIPROCESSING=0"):
        dump_vllm(elsewhere, tmp_path / "dump", two(text))
    with pytest.raises(UnknownNameError, match="unknown request 'z'; known: a, b"):
        dump_vllm(llm, tmp_path / "dump", two(text), until="z")


@pytest.mark.parametrize("parts", [1, 2])
def test_blocks_of_gpu_backends_are_split_by_token(parts: int) -> None:
    """Keys and values side by side, the memory in the order block, token, head; a block is one of a kernel or two."""
    keys, values = (torch.randn(6, 32, 3, 64) for _ in range(2))  # block token head dim
    memory = torch.cat([keys, values], dim=-1).unflatten(1, (parts, 32 // parts)).flatten(0, 1)
    layer = SimpleNamespace(
        kv_cache=memory.transpose(1, 2), head_size=64, attn_backend=SimpleNamespace(get_name=lambda: "FLASH_ATTN")
    )
    worker = SimpleNamespace(model_runner=SimpleNamespace(kv_cache_config=SimpleNamespace(num_blocks=6)))
    found = vllm_engine._split_blocks(worker, layer, [4, 1])
    assert torch.equal(found[0], keys[[4, 1]]) and torch.equal(found[1], values[[4, 1]])


def test_blocks_in_tiles_are_split_by_token() -> None:
    """AMX: keys by 16 tokens, values by 16 components, and two numbers of the other axis side by side."""
    keys, values = (torch.randn(3, 32, 2, 64) for _ in range(2))  # block token head dim
    memory = torch.empty(3, 2, 2 * 32 * 64)
    for token in range(32):
        for dim in range(64):
            place = token // 16 * 1024 + dim // 2 * 32 + token % 16 * 2 + dim % 2
            memory[:, :, place] = keys[:, token, :, dim]
            place = 32 * 64 + dim // 16 * 512 + token // 2 * 32 + dim % 16 * 2 + token % 2
            memory[:, :, place] = values[:, token, :, dim]
    layer = SimpleNamespace(
        kv_cache=memory.view(3, 2, 32, 128), head_size=64, isa="amx",
        attn_backend=SimpleNamespace(get_name=lambda: "CPU_ATTN"),
    )  # fmt: skip
    worker = SimpleNamespace(model_runner=SimpleNamespace(kv_cache_config=SimpleNamespace(num_blocks=3)))
    found = vllm_engine._split_blocks(worker, layer, [2, 0])
    assert torch.equal(found[0], keys[[2, 0]]) and torch.equal(found[1], values[[2, 0]])
