"""vLLM in this process on the embedded model, one engine for all tests, and the plain model beside it."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from perturbkv.analyses.audit.dump_verdict import DumpAudit
from perturbkv.auditing.dumps import vllm_audit
from perturbkv.auditing.dumps.dump_audit import audit_dump
from perturbkv.auditing.dumps.dump_file import read_dump
from perturbkv.auditing.dumps.vllm_engine import EngineRequest, dump_vllm
from perturbkv.datasets.needle import sentences
from perturbkv.models.adapter import Adapter
from perturbkv.models.aliases import EMBEDDED
from perturbkv.models.loading import load_model, open_model

os.environ.update({name: os.environ.get(name, value) for name, value in vllm_audit.ENVIRONMENT.items()})


@pytest.fixture(scope="session")
def adapter() -> Adapter:
    return load_model(EMBEDDED, "float32", "cpu")


@pytest.fixture(scope="session")
def text(adapter: Adapter) -> tuple[int, ...]:
    return tuple(adapter.tokenizer(" ".join(sentences()[:200]))["input_ids"][:400])


@pytest.fixture(scope="session")
def llm() -> Any:
    """Engine in this process; vLLM takes no second one beside it."""
    source = open_model(EMBEDDED).source
    assert source is not None
    return vllm_audit.start_engine(source.location, "float32", "plain")


@pytest.fixture
def audited(llm: Any, adapter: Adapter, tmp_path: Path) -> Callable[..., DumpAudit]:
    """The audit of a dump of requests in the engine, after a change of its header."""

    def run(*requests: EngineRequest, until: str = "", change: Callable[[Path], None] = lambda path: None) -> DumpAudit:
        llm.reset_prefix_cache()
        path = dump_vllm(llm, tmp_path / "dump", requests, until).path
        change(path)
        return audit_dump(adapter, read_dump(path))

    return run


@contextmanager
def before_step(llm: Any, number: int, act: Callable[[dict[str, list[int]]], object]) -> Iterator[None]:
    """Before this step of the engine, counted from 1, `act` gets the block tables of the live requests."""
    engine, scheduler, done = llm.llm_engine, llm.llm_engine.engine_core.engine_core.scheduler, 0
    stock = engine.step

    def step() -> Any:
        nonlocal done
        done += 1
        if done == number:
            tables = {
                name.rpartition("-")[0]: list(scheduler.kv_cache_manager.get_block_ids(name)[0])
                for name in scheduler.requests
            }
            act(tables)
        return stock()

    engine.step = step
    yield
    engine.step = stock
    assert done >= number


def layers_of(worker: Any) -> list[Any]:
    """In vLLM's worker: (block, head, all keys (dim token), then all values (token dim)) of each layer, as views."""
    return [cache.flatten(2) for cache in worker.model_runner.kv_caches]


def fill(worker: Any, block: int, number: float) -> None:
    """In vLLM's worker: overwrite a block in all layers."""
    for layer in layers_of(worker):
        layer[block] = number


def copy(worker: Any, source: int, target: int, layers: Sequence[int]) -> None:
    """In vLLM's worker: overwrite a block by another one."""
    for layer in layers:
        whole = layers_of(worker)[layer]
        whole[target] = whole[source]
