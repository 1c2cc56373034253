"""The rows of a GPU, each measured by a process: `python -m perturbkv.selfcheck.gpu_rows WORK JSON` prints its result.

Value norms are compared with a loop over heads and a matrix product on the same device, a sweep with transformers' own
prefill, and decoding from a compact cache with decoding from a full one. All are timed in turns in one process.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache

from perturbkv.cache.compact import CompactCache, CompactLayer, full_cache, join_layers, prompt_states
from perturbkv.cache.entries import KeptEntries
from perturbkv.configs.eviction import EvictionConfig
from perturbkv.configs.run import RunConfig
from perturbkv.datasets.encode import Prompt
from perturbkv.devices import synchronise
from perturbkv.models.adapter import Adapter
from perturbkv.models.forward import run_with_cache
from perturbkv.models.loading import load_model, pick_device
from perturbkv.pipeline.progress import time_phases
from perturbkv.pipeline.sample.capture import decode_from
from perturbkv.pipeline.sample.one_sample import trace_sample
from perturbkv.scoring.value_norms import projected_value_norms
from perturbkv.selection.grid import grid
from perturbkv.selection.resolved_config import ResolvedRun
from perturbkv.selfcheck.checks import loop_norms
from perturbkv.selfcheck.rows import (
    Group,
    Report,
    Result,
    Target,
    Values,
    machine,
    print_result,
    ratio_with_parts,
    run_groups,
    run_process,
    time_call,
)
from perturbkv.trace import SampleTrace

TARGETS = (
    Target("triton-time", "value norms in Triton / loop, 7B shapes, 32k entries, bf16", 0.35, cuda=True),
    Target("triton-rate", "value norms in Triton / matmul rate measured there", 0.6, at_least=True, cuda=True),
    Target("cuda-24", "24 configurations / plain prefill, random:mistral-7b, 8,192 tokens, bf16", 1.5, cuda=True),
    Target("cuda-decode", "decoding from b = 1,024 / from 32k entries, 7B shapes, batch 4", 0.5, cuda=True),
)
TOGETHER = (("triton-time", "triton-rate"), ("cuda-24",), ("cuda-decode",))
"""Rows that are measured together, the longest last."""
SEVEN_B = {"d_model": 4096, "heads": 32, "kv_heads": 8}
SWEEP = grid((128, 256, 512, 1024), policy=("snapkv", "pyramidkv", "adakv"), selection=("attention", "two-stage"))
"""The 24 configurations of a sweep: three policies, two selections, four budgets."""
_REPEATS = 3
"""Timings of decoding; the quicker rows have more."""


def measure(device: torch.device, names: Collection[str]) -> Report:
    """Return the report of the named rows; without a GPU they have its lack as the reason instead of a value."""
    rows = run_groups([target for target in TARGETS if target.name in names], groups(_REPEATS))
    return Report(machine(str(device), "auto"), {"repeats": _REPEATS, "device": str(device)}, rows)


def groups(repeats: int) -> Iterator[Group]:
    """Yield the groups of rows of a GPU, none on a machine without one; `repeats`: timings at least."""
    if torch.cuda.is_available():
        yield "triton", ("triton-time", "triton-rate"), lambda: _triton_rows(repeats)
        yield "cuda sweep", ("cuda-24",), lambda: _sweep_row(repeats)
        yield "cuda decoding", ("cuda-decode",), lambda: _decoding_row(repeats)


def _triton_rows(repeats: int) -> Values:
    """Return the rows of value norms in Triton: seconds over a loop's, and throughput over a matrix product's."""
    shapes = {**SEVEN_B, "entries": 32768, "dtype": "bfloat16", "device": "cuda"}
    spent = run_process(__name__, "time_norms", {**shapes, "repeats": max(20, repeats)})
    rate = statistics.median(spent["rate"])
    return {
        "triton-time": ratio_with_parts(spent["seconds"]["ours"], spent["seconds"]["loop"]),
        "triton-rate": (rate / spent["matmul_rate"], {"rate": rate, "matmul_rate": spent["matmul_rate"]}),
    }


def _sweep_row(repeats: int) -> Values:
    """Return the row of the seconds of 24 configurations of a 7B model, over the seconds of a plain prefill."""
    asked = {"model": "random:mistral-7b", "tokens": 8192, "dtype": "bfloat16", "device": "cuda"}
    measured = run_process(__name__, "time_sweep", {**asked, "repeats": max(5, repeats)})
    value, details = ratio_with_parts(measured["seconds"]["24"], measured["seconds"]["prefill"])
    return {"cuda-24": (value, {**details, "phases": measured["phases"]["24"]})}


def _decoding_row(repeats: int) -> Values:
    """Return the row of the seconds of decoding from an evicted cache, over the seconds from a full cache."""
    asked = {"model": "random:mistral-7b", "tokens": 32768, "dtype": "bfloat16", "device": "cuda"}
    spent = run_process(
        __name__, "time_decoding", {**asked, "budget": 1024, "batch": 4, "steps": 16, "repeats": repeats}
    )
    return {"cuda-decode": ratio_with_parts(spent["evicted"], spent["full"])}


NORMS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {"ours": projected_value_norms, "loop": loop_norms}


def random_layer(
    entries: int, d_model: int, heads: int, kv_heads: int, dtype: str, device: str
) -> tuple[Tensor, Tensor]:
    """Return random values (kv_head, entry, d_value) and a random W_O (d_model, d_model) of a layer."""
    chosen, d_value = pick_device(device), d_model // heads
    generator = torch.Generator(chosen).manual_seed(0)
    options: dict[str, Any] = {"generator": generator, "device": chosen, "dtype": getattr(torch, dtype)}
    return torch.randn(kv_heads, entries, d_value, **options), torch.randn(d_model, d_model, **options) / d_model**0.5


@torch.inference_mode()
def time_norms(repeats: int, **shapes: Any) -> Result:
    """Return the seconds of ν and of the loop, turn by turn, and the device's rates of ν and of a matrix product."""
    value, w_o = random_layer(**shapes)
    taken: dict[str, list[float]] = {name: [] for name in NORMS}
    for turn in range(repeats + 1):
        for name, compute in NORMS.items():
            spent = time_call(lambda compute=compute: compute(value, w_o), value.device)  # type: ignore[misc]
            taken[name] += [spent] if turn else []
    square = torch.randn_like(w_o)
    product = min(time_call(lambda: w_o @ square, value.device) for _ in range(repeats + 1))
    operations = 2 * value.shape[1] * w_o.numel()
    return {
        "seconds": taken,
        "matmul_rate": 2 * len(w_o) ** 3 / product,
        "rate": [operations / spent for spent in taken["ours"]],
    }


def random_tokens(count: int) -> list[int]:
    """Return `count` random token ids, the same in every call."""
    return torch.randint(0, 256, (count,), generator=torch.Generator().manual_seed(0)).tolist()


def run_plain(adapter: Adapter, token_ids: Sequence[int], decodes: int) -> None:
    """Prefill and decode `decodes` tokens greedily, without hooks."""
    cache, ids = DynamicCache(), torch.tensor([list(token_ids)], device=adapter.device)
    with torch.inference_mode():
        for _ in range(decodes + 1):
            logits = run_with_cache(adapter.model, ids, cache, logits_to_keep=1).logits
            ids = logits[:, -1:].argmax(dim=-1)


def resolved_run(adapter: Adapter, configs: Sequence[EvictionConfig]) -> ResolvedRun:
    """Return the resolved run of one sample with the given configurations."""
    return ResolvedRun.from_run(RunConfig(model=adapter.name, dataset="benchmark", configs=tuple(configs), samples=1))


def trace_prompt(adapter: Adapter, token_ids: Sequence[int], configs: Sequence[EvictionConfig]) -> SampleTrace:
    """Return the measurements of one prompt under the given configurations."""
    return trace_sample(adapter, Prompt("benchmark", tuple(token_ids), 0), resolved_run(adapter, configs))


def time_sweep(model: str, tokens: int, repeats: int, dtype: str, device: str) -> Result:
    """Return the seconds and phases of the sweep of 24 configurations, and the seconds of plain runs."""
    return time_runs(load_model(model, dtype, device), random_tokens(tokens), repeats, {"24": SWEEP})


def time_runs(
    adapter: Adapter, token_ids: Sequence[int], repeats: int, sweeps: Mapping[str, Sequence[EvictionConfig]]
) -> Result:
    """Return the seconds of plain and traced runs per turn, and the phases of the last traced runs, by name."""
    runs: dict[str, Callable[[], object]] = {
        "prefill": lambda: run_plain(adapter, token_ids, 0),
        "prefill and 2 decodes": lambda: run_plain(adapter, token_ids, 2),
    }
    for name, configs in sweeps.items():
        runs[name] = lambda configs=configs: trace_prompt(adapter, token_ids, configs)  # type: ignore[misc]
    runs["prefill"]()
    runs[next(iter(sweeps))]()
    taken, phases = time_in_turns(runs, repeats, adapter.device)
    return {"seconds": taken, "phases": {name: spent for name, spent in phases.items() if spent}}


def time_in_turns(
    runs: Mapping[str, Callable[[], object]], repeats: int, device: torch.device
) -> tuple[dict[str, list[float]], dict[str, dict[str, float]]]:
    """Return run -> seconds of each of `repeats` turns, and run -> phases of the last turn."""
    taken: dict[str, list[float]] = {name: [] for name in runs}
    phases: dict[str, dict[str, float]] = {}
    for _ in range(repeats):
        for name, work in runs.items():
            with time_phases(lambda: synchronise(device)) as spent:
                taken[name].append(time_call(work, device))
            phases[name] = dict(spent)
    return taken, phases


@torch.inference_mode()
def time_decoding(
    model: str, tokens: int, budget: int, batch: int, steps: int, repeats: int, dtype: str, device: str
) -> Result:
    """Return the seconds per step of decoding a batch from full and from evicted caches; the entries are random."""
    adapter = load_model(model, dtype, device)
    adapter.check_own_caches("the benchmark of decoding")
    adapter.check_no_latents("the benchmark of decoding")
    first = torch.zeros(batch, 1, dtype=torch.int64, device=adapter.device)
    full: list[float] = []
    evicted: list[float] = []
    for _ in range(repeats + 1):
        cache = _random_cache(adapter, batch, tokens)
        kept = [_keep_last(adapter, cache.layers[index], budget) for index in adapter.layer_indices]
        compact = CompactCache(join_layers(adapter, kept, prompt_states(adapter, cache)))
        full.append(time_call(lambda cache=cache: _greedy_steps(adapter, cache, first, steps), adapter.device) / steps)  # type: ignore[misc]
        del cache
        with decode_from(adapter, compact):
            evicted.append(
                time_call(lambda compact=compact: _greedy_steps(adapter, compact, first, steps), adapter.device) / steps  # type: ignore[misc]
            )
    return {"full": full[1:], "evicted": evicted[1:]}


def _random_cache(adapter: Adapter, batch: int, tokens: int) -> DynamicCache:
    """Return a full cache of `batch` rows with random entries behind one token, which recurrent states begin with."""
    cache = full_cache(adapter)
    run_with_cache(adapter.model, torch.zeros(batch, 1, dtype=torch.int64, device=adapter.device), cache)
    for index in adapter.every_attention:
        facts = adapter.facts.layers[index]
        keys, values = (
            torch.randn(batch, facts.kv_heads, tokens - 1, size, dtype=adapter.dtype, device=adapter.device)
            for size in (facts.d_key, facts.d_value)
        )
        cache.update(keys, values, index)
    return cache


def _keep_last(adapter: Adapter, layer: Any, budget: int) -> CompactLayer:
    """Return a compact layer of the last `budget` entries of every row and key/value head of a full cache's layer."""
    rows = [
        KeptEntries.of(list(key[:, -budget:]), list(value[:, -budget:]))
        for key, value in zip(layer.keys, layer.values, strict=True)
    ]
    return CompactLayer(rows, adapter.heads, layer.keys.shape[2])


def _greedy_steps(adapter: Adapter, cache: Any, ids: Tensor, steps: int) -> None:
    """Decode `steps` tokens greedily from a cache."""
    for _ in range(steps):
        logits = run_with_cache(adapter.model, ids, cache, logits_to_keep=1).logits
        ids = logits[:, -1:].argmax(dim=-1)


if __name__ == "__main__":
    print_result({work.__name__: work for work in (time_norms, time_sweep, time_decoding)})
