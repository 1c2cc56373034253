"""What vLLM has in its blocks, in every situation, is what transformers computes from the same tokens."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import DynamicCache

from perturbkv.analyses.audit.dump_verdict import DUMP_FLOORS, DumpAudit
from perturbkv.auditing.dumps.dump_file import read_dump
from perturbkv.auditing.dumps.vllm_audit import DEFAULT_SITUATIONS, audit_vllm
from perturbkv.auditing.dumps.vllm_engine import EngineRequest, describe_cache, dump_vllm, read_blocks
from perturbkv.errors import EngineError
from perturbkv.models.adapter import Adapter
from perturbkv.models.aliases import EMBEDDED

COMPARED = {"plain": ["a"], "prefix": ["a", "b"], "interleaved": ["a", "b"], "chunked": ["a"], "preempted": ["b", "c"]}


@pytest.fixture(scope="module")
def audits(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Mapping[str, DumpAudit]]:
    folder = tmp_path_factory.mktemp("dumps")
    return folder, dict(audit_vllm(EMBEDDED, folder=folder))


@pytest.mark.slow
@pytest.mark.parametrize("name", DEFAULT_SITUATIONS)
def test_every_situation_is_exact(audits: tuple[Path, Mapping[str, DumpAudit]], name: str) -> None:
    audit = audits[1][name]
    assert audit.verdict == "exact", audit.summary
    assert audit.engine.startswith("vLLM 0.")
    assert [request.request for request in audit.requests if request.compared] == COMPARED[name]
    for request in audit.requests:
        if request.compared:
            assert request.compared == request.tokens * 30 * 3
            assert max(request.key_distance, request.value_distance) < 1e-4


@pytest.mark.slow
@pytest.mark.parametrize("name", DEFAULT_SITUATIONS)
def test_log_probabilities_of_prompt_and_decoding_are_the_plain_models(
    audits: tuple[Path, Mapping[str, DumpAudit]], name: str
) -> None:
    folder, by_name = audits
    known = {
        request.id: sum(value is not None for value in request.logprobs)
        for request in read_dump(folder / name).requests
    }
    for request in by_name[name].requests:
        if request.compared:
            prompt_unknown = name == "prefix" and request.request == "b"
            assert known[request.request] == (19 if prompt_unknown else request.tokens - 1)
            assert 0 < request.logprobs < 1e-3 < DUMP_FLOORS["float32"] * request.logprobs_floor


@pytest.mark.slow
def test_a_prefix_is_shared_and_blocks_are_used_again(audits: tuple[Path, Mapping[str, DumpAudit]]) -> None:
    shared = {request.id: request.blocks for request in read_dump(audits[0] / "prefix").requests}
    assert shared["a"] is not None and shared["b"] is not None
    assert shared["a"][:4] == shared["b"][:4]
    assert not set(shared["a"][4:]) & set(shared["b"][4:])
    again = {request.id: request for request in read_dump(audits[0] / "preempted").requests}
    assert again["a"].finished
    assert set(again["a"].blocks or ()) & set(again["c"].blocks or ())


def test_dumped_blocks_are_transformers_numbers(
    llm: Any, adapter: Adapter, text: tuple[int, ...], tmp_path: Path
) -> None:
    path = dump_vllm(llm, tmp_path / "dump", [EngineRequest("a", text[:70], 3)]).path
    dump = read_dump(path)
    (request,), cache = dump.requests, DynamicCache()
    assert (request.token_ids[:70], len(request.token_ids)) == (text[:70], 72)
    with torch.inference_mode():
        adapter.model(torch.tensor([request.token_ids]), past_key_values=cache)
    for index in (0, 13, 29):
        layer = dump.layer(index)
        order = [layer.block_ids.tolist().index(block) for block in request.blocks or ()]
        for stored, full in zip(
            layer.block_tensors, (cache.layers[index].keys, cache.layers[index].values), strict=True
        ):
            assert stored.shape == (3, 32, 3, 64)
            torch.testing.assert_close(stored[order].flatten(0, 1)[:72], full[0].transpose(0, 1), atol=1e-4, rtol=1e-4)


def test_a_worker_tells_its_cache_and_gives_single_blocks(llm: Any, text: tuple[int, ...], tmp_path: Path) -> None:
    path = dump_vllm(llm, tmp_path / "dump", [EngineRequest("a", text[:70], 3)]).path
    (cache,) = llm.collective_rpc(describe_cache)
    assert (cache["backends"], cache["types"], cache["kv_heads"], cache["head_size"]) == (["CPU_ATTN"], ["auto"], 3, 64)
    assert len(cache["names"]) == 30
    table = read_dump(path).requests[0].blocks
    assert table is not None
    (blocks,) = llm.collective_rpc(read_blocks, args=(4, [table[1]]))
    torch.testing.assert_close(blocks["keys"], read_dump(path).layer(4).block_tensors[0][1:2], rtol=0, atol=0)


def test_an_engine_serves_on_after_a_dump(
    llm: Any, audited: Callable[..., DumpAudit], text: tuple[int, ...], tmp_path: Path
) -> None:
    requests = [EngineRequest("a", text[:40], 2), EngineRequest("b", text[100:140], 9)]
    assert not dump_vllm(llm, tmp_path / "first", requests).preemptions
    assert not llm.llm_engine.has_unfinished_requests()
    assert audited(*requests).verdict == "exact"


@pytest.mark.slow
def test_a_cache_in_bfloat16_is_exact() -> None:
    """In tiles, where the processor has AMX."""
    ((_, audit),) = audit_vllm(EMBEDDED, ["preempted"], dtype="bfloat16")
    assert (audit.verdict, audit.stored) == ("exact", "bfloat16"), audit.summary


@pytest.mark.slow
def test_a_cache_of_8_bits_is_cut_off_or_refused_in_the_engines_words() -> None:
    """This build rounds towards zero; else its cache is what a model computes that attends to it."""
    if not torch.cpu._is_avx512_supported():
        with pytest.raises(EngineError, match="^vLLM ended .* fp8: NotImplementedError: FP8 KV cache on CPU requires"):
            list(audit_vllm(EMBEDDED, ["fp8"]))
        return
    ((_, audit),) = audit_vllm(EMBEDDED, ["fp8"])
    assert (audit.verdict, audit.stored) == ("differs", "float8_e4m3fn")
    assert [(fault.kind, fault.what, len(fault.layers)) for fault in audit.faults] == [
        ("rounded", f"all {name} rounded towards zero", 30) for name in ("keys", "values")
    ]
    assert audit.requests[0].logprobs < 1e-3
