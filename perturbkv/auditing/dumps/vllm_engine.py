"""The cache of vLLM: a dump of the moment before a request's blocks are freed (METHOD: Engines' caches).

Blocks are read by functions that run in vLLM's worker, through `llm.collective_rpc`. vLLM is read as of version 0.32.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Shaped
from torch import Tensor

from perturbkv.auditing.dumps.dump_file import REMOVED, Request, write_dump
from perturbkv.devices import dtype_name
from perturbkv.errors import ConfigError, UnknownNameError, UnreadableCacheError

_ON_CPU = "CPU_ATTN"
BACKENDS: Mapping[str, str] = {
    _ON_CPU: "a block and head holds all keys (dim token), then all values (token dim)",
    **dict.fromkeys(
        ("FLASH_ATTN", "FLASHINFER", "TRITON_ATTN", "FLEX_ATTENTION"), "a token and head holds its key, then its value"
    ),
}
"""Attention backend that is read -> how it stores keys and values."""
_UNKNOWN_ON_CPU = ("neon", "rvv", "vsx", "vxe")
"""Instruction sets of `CPU_ATTN` whose blocks were not seen; `vec` and `vec16` store them as above."""
_AMX, _TILE = "amx", 16
"""Instruction set that stores keys in tiles of 16 tokens, values in tiles of 16 components, and two of the other axis
side by side: keys (tile dim/2 token 2), values (tile token/2 dim 2)."""
_EIGHT_BITS = {"fp8": torch.float8_e4m3fn, "fp8_e4m3": torch.float8_e4m3fn, "fp8_e5m2": torch.float8_e5m2}
_CACHE_TYPES = ("auto", "float16", "bfloat16", "float32", *_EIGHT_BITS)
_LAYOUT = "block token head dim"
_NULL_BLOCK = 0
"""Id of the block that stands in tables for those that a request no longer needs."""


def describe_cache(worker: Any) -> dict[str, Any]:
    """Return, in vLLM's worker, what its cache is: backend, types, sizes, number of layers and their names."""
    layers = _attention_layers(worker)
    layer = layers[0][1] if layers else None
    return {
        "names": [name for name, _ in layers],
        "backends": sorted({one.attn_backend.get_name() for _, one in layers}),
        "instructions": str(getattr(layer, "isa", "")),
        "types": sorted({one.kv_cache_dtype for _, one in layers}),
        "kv_heads": getattr(layer, "num_kv_heads", 0),
        "head_size": getattr(layer, "head_size", 0),
    }


def read_blocks(worker: Any, index: int, block_ids: Sequence[int]) -> dict[str, Tensor]:
    """Return, in vLLM's worker, a layer's `keys` and `values` in these blocks (block token head dim), as stored.

    Of a cache in 8 bits `key_scale` and `value_scale`, by which entries are multiplied, are returned too.
    """
    layer = _attention_layers(worker)[index][1]
    keys, values = (part.cpu() for part in _split_blocks(worker, layer, block_ids))
    if layer.kv_cache_dtype not in _EIGHT_BITS:
        return {"keys": keys, "values": values}
    eight = _EIGHT_BITS[layer.kv_cache_dtype]
    return {
        "keys": keys.contiguous().view(eight), "values": values.contiguous().view(eight),
        "key_scale": layer._k_scale.float().cpu(), "value_scale": layer._v_scale.float().cpu(),
    }  # fmt: skip


def _attention_layers(worker: Any) -> list[tuple[str, Any]]:
    """Return (name, layer) of all attention layers with a cache, in the model's order."""
    from vllm.model_executor.layers.attention import Attention

    layers = worker.model_runner.vllm_config.compilation_config.static_forward_context
    found = [(name, layer) for name, layer in layers.items() if isinstance(layer, Attention)]
    return sorted(found, key=lambda item: [int(number) for number in re.findall(r"\d+", item[0])])


def _split_blocks(
    worker: Any, layer: Any, block_ids: Sequence[int]
) -> tuple[Shaped[Tensor, "block token head dim"], Shaped[Tensor, "block token head dim"]]:
    """Return keys and values of these blocks; a kernel's blocks may be parts of the scheduler's."""
    cache = layer.kv_cache
    parts = cache.shape[0] // worker.model_runner.kv_cache_config.num_blocks
    first = torch.tensor(block_ids, dtype=torch.int64, device=cache.device).unsqueeze(-1) * parts
    chosen = (first + torch.arange(parts, device=cache.device)).flatten()
    blocks, size = cache[chosen], layer.head_size  # (part, head, token, 2 · dim), whatever its strides
    on_cpu = layer.attn_backend.get_name() == _ON_CPU
    both = _split_cpu_blocks(blocks, size, layer.isa) if on_cpu else blocks.split(size, dim=-1)
    keys, values = (part.unflatten(0, (-1, parts)).permute(0, 1, 3, 2, 4).flatten(1, 2) for part in both)
    return keys, values


def _split_cpu_blocks(
    blocks: Shaped[Tensor, "part head token both"], size: int, instructions: str
) -> tuple[Shaped[Tensor, "part head token dim"], Shaped[Tensor, "part head token dim"]]:
    """Return keys and values, of `size` components, of blocks of `CPU_ATTN` for an instruction set."""
    tokens = blocks.shape[2]
    keys, values = torch.split(blocks.flatten(2), tokens * size, dim=-1)
    if instructions != _AMX:
        return torch.unflatten(keys, -1, (size, tokens)).mT, torch.unflatten(values, -1, (tokens, size))
    keys = torch.unflatten(keys, -1, (tokens // _TILE, size // 2, _TILE, 2)).permute(0, 1, 2, 4, 3, 5)
    values = torch.unflatten(values, -1, (size // _TILE, tokens // 2, _TILE, 2)).permute(0, 1, 3, 5, 2, 4)
    keys, values = (torch.unflatten(part.flatten(2), -1, (tokens, size)) for part in (keys, values))
    return keys, values


@dataclass(frozen=True)
class EngineRequest:
    """A request to an engine.

    Attributes:
        id: its name in the dump.
        token_ids: the prompt.
        new_tokens: tokens that are decoded, greedily.
        after: steps of the engine before it is added.
        prompt_logprobs: whether log-probabilities of the prompt are asked for; vLLM then computes all of the prompt,
            and takes no block from its prefix cache.
    """

    id: str
    token_ids: tuple[int, ...]
    new_tokens: int
    after: int = 0
    prompt_logprobs: bool = True


@dataclass(frozen=True)
class EngineDump:
    """A written dump, and what had happened to its requests.

    Attributes:
        path: the dump's folder.
        partial_prefills: how often a step ended with a prompt partly computed.
        cached_tokens: prompt tokens that were found in the prefix cache, over all requests.
        preemptions: how often a request was preempted.
        shared_steps: steps that computed tokens of more than one request.
    """

    path: Path
    partial_prefills: int = 0
    cached_tokens: int = 0
    preemptions: int = 0
    shared_steps: int = 0


def dump_vllm(llm: Any, folder: str | Path, requests: Sequence[EngineRequest], until: str = "") -> EngineDump:
    """Run requests in a vLLM engine, and write a dump of the moment before the blocks of one of them are freed.

    Args:
        llm: a `vllm.LLM` that runs in this process: VLLM_ENABLE_V1_MULTIPROCESSING=0 before vLLM is imported.
        folder: a new or empty folder.
        requests: at least one. Those that have ended by then, or are preempted, are in the dump as finished.
        until: id of the request whose end is that moment; empty: the first to end. What is left is aborted.

    Raises ConfigError or UnknownNameError for invalid arguments, UnreadableCacheError for a cache that is not read.
    """
    names = [request.id for request in requests]
    if until and until not in names:
        raise UnknownNameError(until, "request", names)
    return _Run(llm, Path(folder), requests, until).dump()


@dataclass
class _Run:
    """A run of requests in an engine, up to the dump.

    Its first attributes are the arguments of `dump_vllm`, the counts those of `EngineDump`.
    """

    llm: Any
    folder: Path
    requests: Sequence[EngineRequest]
    until: str
    names: dict[str, str] = field(default_factory=dict)
    """Name inside the engine -> the request's id."""
    outputs: dict[str, Any] = field(default_factory=dict)
    """Request -> the engine's newest output."""
    ended: list[Request] = field(default_factory=list)
    """Requests that ended before the dump."""
    path: Path | None = None
    """The dump's folder, once it is written."""
    partial_prefills: int = 0
    shared_steps: int = 0
    preemptions: dict[str, int] = field(default_factory=dict)
    """Name inside the engine -> how often the request was preempted."""

    def __post_init__(self) -> None:
        engine = self.llm.llm_engine
        core = getattr(engine.engine_core, "engine_core", None)
        if core is None:
            raise ConfigError(
                "expected a vLLM engine in this process, got one in another; set VLLM_ENABLE_V1_MULTIPROCESSING=0 "
                "before vllm is imported"
            )
        if engine.vllm_config.scheduler_config.async_scheduling:
            raise ConfigError(
                "expected a vLLM engine that waits for each step, got async_scheduling=True; set it to False"
            )
        if engine.has_unfinished_requests():
            raise ConfigError("expected an idle vLLM engine, got one with unfinished requests; wait for them")
        self.engine, self.scheduler = engine, core.scheduler
        self.manager = self.scheduler.kv_cache_manager
        groups = self.manager.kv_cache_config.kv_cache_groups
        self.cache = self._call_worker(describe_cache)
        _check_cache(self.cache, [name for group in groups for name in group.layer_names], len(groups))
        self.block_size = int(groups[0].kv_cache_spec.block_size)

    def _call_worker(self, function: Callable[..., Any], *arguments: Any) -> Any:
        """Return what a function returns in vLLM's worker. Raises UnreadableCacheError where there are several."""
        answers = self.llm.collective_rpc(function, args=arguments)
        if len(answers) != 1:
            raise UnreadableCacheError(
                f"{len(answers)} vLLM workers have a part of the cache each; one is read: tensor_parallel_size=1"
            )
        return answers[0]

    def dump(self) -> EngineDump:
        """Step the engine until the dump is written, then abort what is left."""
        waiting, step, free = list(self.requests), 0, self.manager.free

        def note_and_free(request: Any) -> None:
            """Note that a request ends, then free its blocks."""
            self._note_end(request)
            free(request)

        self.manager.free = note_and_free
        try:
            while self.path is None and (waiting or self.engine.has_unfinished_requests()):
                for request in [one for one in waiting if one.after <= step]:
                    waiting.remove(request)
                    self._add(request)
                for output in self.engine.step():
                    self.outputs[output.request_id] = output
                self._count_events()
                step += 1
        finally:
            del self.manager.free  # of the object: the class has its own
            self.engine.abort_request(list(self.names), internal=True)
        if self.path is None:
            raise UnreadableCacheError("the vLLM engine ended no request, so that there is no cache to dump")
        return EngineDump(
            self.path, self.partial_prefills, sum(output.num_cached_tokens or 0 for output in self.outputs.values()),
            sum(self.preemptions.values()), self.shared_steps,
        )  # fmt: skip

    def _add(self, request: EngineRequest) -> None:
        """Give a request to the engine."""
        from vllm import SamplingParams, TokensPrompt

        sampling = SamplingParams(
            max_tokens=request.new_tokens, temperature=0.0, ignore_eos=True, detokenize=False, logprobs=0,
            prompt_logprobs=0 if request.prompt_logprobs else None,
        )  # fmt: skip
        name = self.engine.add_request(request.id, TokensPrompt(prompt_token_ids=list(request.token_ids)), sampling)
        self.names[name] = request.id

    def _count_events(self) -> None:
        """Count what happened to the requests in the step."""
        running = self.scheduler.running
        self.shared_steps += len(running) > 1
        for name, request in self.scheduler.requests.items():
            self.partial_prefills += 0 < request.num_computed_tokens < request.num_prompt_tokens
            self.preemptions[name] = request.num_preemptions

    def _note_end(self, request: Any) -> None:
        """Note a request that ends; write the dump where it is the one that was waited for.

        Nothing for a request whose blocks are freed as it is preempted, nor after the dump.
        """
        import vllm

        if self.path is not None or not request.is_finished():
            return
        name = self.names[request.request_id]
        if self.until not in ("", name):
            self.ended.append(self._dumped_request(request, finished=True))
            return
        self._count_events()
        live = [self._dumped_request(request) for request in self.scheduler.requests.values()]
        requests = sorted([*self.ended, *live], key=lambda request: list(self.names.values()).index(request.id))
        held = [request.blocks or () for request in requests if not request.finished]
        ids = sorted({block for table in held for block in table} - {REMOVED})
        block_ids = torch.tensor(ids)
        layers = (
            {**self._call_worker(read_blocks, index, ids), "block_ids": block_ids}
            for index in range(len(self.cache["names"]))
        )
        self.path = write_dump(
            self.folder, requests, layers,
            kv_heads=self.cache["kv_heads"], head_size=self.cache["head_size"], block_size=self.block_size,
            layout=_LAYOUT, compute=dtype_name(self.engine.vllm_config.model_config.dtype),
            engine=f"vLLM {vllm.__version__}",
        )  # fmt: skip

    def _dumped_request(self, request: Any, finished: bool = False) -> Request:
        """Return a request of the engine with its tokens that are in the cache, and their blocks.

        A preempted one has lost its blocks, and counts as finished.
        """
        name = self.names[request.request_id]
        ids = list(self.manager.get_block_ids(request.request_id)[0])
        tokens = tuple(request.all_token_ids)[: request.num_computed_tokens]
        if not ids or not tokens:  # preempted: its blocks were given away
            tokens, finished = tuple(request.all_token_ids), True
        table = tuple(REMOVED if block == _NULL_BLOCK else block for block in ids[: -(-len(tokens) // self.block_size)])
        return Request(name, tokens, table, finished, self._logprobs(name, tokens))

    def _logprobs(self, name: str, tokens: Sequence[int]) -> tuple[float | None, ...]:
        """Return the log-probability of each of a request's tokens, None where the engine has not told it.

        Empty where it has told nothing of the request.
        """
        output = self.outputs.get(name)
        if output is None:
            return ()
        told = list(output.prompt_logprobs or [None] * len(output.prompt_token_ids))
        told += list(output.outputs[0].logprobs or [])
        told += [None] * (len(tokens) - len(told))
        return tuple(
            None if each is None or token not in each else float(each[token].logprob)
            for token, each in zip(tokens, told, strict=False)
        )


def _check_cache(cache: Mapping[str, Any], names: Sequence[str], groups: int) -> None:
    """Raise UnreadableCacheError for a cache that is stored in a way that is not read.

    `cache` is what `describe_cache` returns; `names` are those of all layers that have a cache of any kind, in so many
    `groups`.
    """
    if groups != 1:
        raise UnreadableCacheError(f"vLLM has {groups} groups of layers with block tables of their own; one is read")
    if other := sorted({*names} ^ {*cache["names"]}):
        raise UnreadableCacheError(f"vLLM's layer {other[0]} has another kind of cache than keys and values")
    for what, known, found in (
        ("attention backend", BACKENDS, cache["backends"]), ("type of cache", _CACHE_TYPES, cache["types"]),
    ):  # fmt: skip
        if unknown := [name for name in found if name not in known]:
            raise UnreadableCacheError(f"vLLM's {what} {unknown[0]} is not read; those read: {', '.join(known)}")
    if _ON_CPU in cache["backends"] and cache["instructions"] in _UNKNOWN_ON_CPU:
        raise UnreadableCacheError(
            f"vLLM's attention backend {_ON_CPU} stores blocks for {cache['instructions']}, which are not read"
        )
