"""Run a real vLLM in one situation, and dump its cache: `python -m tests.vllm.situations NAME MODEL FOLDER`.

A process of its own for each engine; it prints as JSON what happened to the requests.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

os.environ |= {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_LOGGING_LEVEL": "ERROR",
    "HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1",
}  # fmt: skip

from perturbkv.auditing.dumps.vllm_engine import EngineRequest, dump_vllm

BLOCK = 32


def overwrite(worker: Any, block: int) -> None:
    """Overwrite a block in every layer, in vLLM's worker."""
    for cache in worker.model_runner.kv_caches:
        cache[block] = 0.25


def copy(worker: Any, source: int, target: int) -> None:
    """Copy a block onto another one in every layer, in vLLM's worker."""
    for cache in worker.model_runner.kv_caches:
        cache[target] = cache[source]


def tables(llm: Any) -> dict[str, list[int]]:
    """Request -> its block table, by the scheduler."""
    scheduler = llm.llm_engine.engine_core.engine_core.scheduler
    return {name.split("-")[0]: list(scheduler.kv_cache_manager.get_block_ids(name)[0]) for name in scheduler.requests}


@dataclass
class Situation:
    """Requests to an engine with options of its own; `damage` is called with it before its step `at`."""

    requests: list[EngineRequest]
    options: dict[str, Any] = field(default_factory=dict)
    until: str = ""
    damage: Callable[[Any], object] | None = None
    at: int = 4


def ids(count: int, seed: int) -> tuple[int, ...]:
    """Tokens of a text that is none."""
    return tuple((seed * 7919 + 13 * place * place + 31 * place) % 40000 + 100 for place in range(count))


def request(name: str, tokens: tuple[int, ...], new: int = 6, **more: Any) -> EngineRequest:
    return EngineRequest(name, tokens, new, **more)


TWO = [request("a", ids(150, 1), 12), request("b", ids(90, 2), 12, after=2)]
SHARED = ids(4 * BLOCK, 3)
SITUATIONS: dict[str, Situation] = {
    "plain": Situation([request("a", ids(200, 0))]),
    "chunked": Situation([request("a", ids(200, 0))], {"max_num_batched_tokens": 64, "max_num_seqs": 4}),
    "prefix": Situation(
        [request("a", SHARED + ids(40, 4), 2, prompt_logprobs=False),
         request("b", SHARED + ids(50, 5), 8, after=4, prompt_logprobs=False)],
        until="b",
    ),
    "interleaved": Situation(TWO),
    "preempted": Situation(
        [request("a", ids(64, 6), 56), request("b", ids(64, 7), 56)],
        {"num_gpu_blocks_override": 6, "max_model_len": 160}, until="b",
    ),
    "overwritten": Situation(
        [request("a", ids(200, 0), 8)], damage=lambda llm: llm.collective_rpc(overwrite, args=(tables(llm)["a"][2],))
    ),
    "another request's block": Situation(
        TWO, damage=lambda llm: llm.collective_rpc(copy, args=(tables(llm)["b"][1], tables(llm)["a"][1])), at=6
    ),
    "float16 cache of a float32 model": Situation([request("a", ids(70, 0))], {"kv_cache_dtype": "float16"}),
}  # fmt: skip


def main(name: str, model: str, folder: Path) -> None:
    """Run a situation, and write what happened."""
    from vllm import LLM

    situation = SITUATIONS[name]
    options = {"block_size": BLOCK, "max_model_len": 512, **situation.options}
    llm = LLM(model=model, dtype="float32", enforce_eager=True, seed=0, disable_log_stats=True, **options)
    if situation.damage is not None:
        step, taken = llm.llm_engine.step, [0]

        def damaged_step() -> Any:
            taken[0] += 1
            if taken[0] == situation.at:
                situation.damage(llm)  # type: ignore[misc]
            return step()

        llm.llm_engine.step = damaged_step
    done = dump_vllm(llm, folder, situation.requests, situation.until)
    sys.stdout.write(json.dumps(asdict(done), default=str) + "\n")


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], Path(sys.argv[3]))
