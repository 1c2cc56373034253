"""What measuring costs, and what evicting saves, against plain runs of the same prompt.

Times of both come from one process, in turns; peak memory from one process each, as memory that a first run leaves
behind would hide the second's peak. Run as a module it is such a process: `python -m perturbkv.benchmark MODE …`.
"""

from __future__ import annotations

import gc
import json
import os
import platform
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
import transformers
from transformers import DynamicCache

from perturbkv.config import Budget, EvictionConfig, RunConfig, from_preset
from perturbkv.datasets.encode import EncodedPrompt
from perturbkv.errors import PerturbkvError
from perturbkv.generation import generate, read_evicting
from perturbkv.loading import load_model, pick_device, pick_dtype
from perturbkv.models import Adapter
from perturbkv.runner import trace_sample

_PLAIN_STEPS = 2
_GENERATED = 32
_EXACT_PEAK = {"MALLOC_ARENA_MAX": "1", "MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536"}
"""glibc hands freed memory back at once, so that a process's peak counts what is held and not what it may reuse."""


@dataclass(frozen=True)
class CaptureCost:
    """Seconds and bytes of a plain run and of a traced one; ratios are traced / plain.

    `plain_seconds` and `traced_seconds` hold one entry per repeat, taken in turns; `machine` says where.
    """

    model: str
    tokens: int
    configurations: list[str]
    plain_seconds: list[float]
    traced_seconds: list[float]
    time_ratio: float
    plain_peak_bytes: int
    traced_peak_bytes: int
    memory_ratio: float
    machine: dict[str, str]


def capture_cost(model: str, tokens: int, repeats: int, budget: Budget, dtype: str, device: str) -> CaptureCost:
    """Measure in three processes: times, plain peak, traced peak. Raises PerturbkvError where one fails."""
    configs = _configs(budget)
    arguments = [model, str(tokens), str(repeats), str(budget), dtype, device]
    times = _in_process("times", arguments)
    plain, traced = _in_process("plain", arguments), _in_process("traced", arguments)
    ratios = [b / a for a, b in zip(times["plain"], times["traced"], strict=True)]
    return CaptureCost(
        model=model,
        tokens=tokens,
        configurations=[config.label() for config in configs],
        plain_seconds=times["plain"],
        traced_seconds=times["traced"],
        time_ratio=statistics.median(ratios),
        plain_peak_bytes=int(plain["peak"][0]),
        traced_peak_bytes=int(traced["peak"][0]),
        memory_ratio=traced["peak"][0] / plain["peak"][0],
        machine=machine(device, dtype),
    )


@dataclass(frozen=True)
class GenerationMemory:
    """Peak bytes of generating from the full cache and from one that is evicted while the prompt is read, same code.

    `full_cache_bytes` and `evicted_cache_bytes` are what the caches of the prompt hold; `saved_share` is how much of
    their difference the peak went down by.
    """

    model: str
    tokens: int
    new_tokens: int
    configuration: str
    full_peak_bytes: int
    evicted_peak_bytes: int
    full_cache_bytes: int
    evicted_cache_bytes: int
    saved_share: float
    machine: dict[str, str]


def generation_memory(model: str, tokens: int, budget: Budget, dtype: str, device: str) -> GenerationMemory:
    """Measure in a process for each cache. Raises PerturbkvError where one fails."""
    arguments = [model, str(tokens), str(_GENERATED), str(budget), dtype, device]
    full, evicted = _in_process("generate-full", arguments), _in_process("generate-evicted", arguments)
    peaks, held = [int(one["peak"][0]) for one in (full, evicted)], [int(one["cache"][0]) for one in (full, evicted)]
    return GenerationMemory(
        model=model,
        tokens=tokens,
        new_tokens=_GENERATED,
        configuration=_configs(budget)[1].label(),
        full_peak_bytes=peaks[0],
        evicted_peak_bytes=peaks[1],
        full_cache_bytes=held[0],
        evicted_cache_bytes=held[1],
        saved_share=(peaks[0] - peaks[1]) / (held[0] - held[1]),
        machine=machine(device, dtype),
    )


def machine(device: str, dtype: str) -> dict[str, str]:
    """What the numbers were measured on."""
    place = pick_device(device)
    return {
        "device": torch.cuda.get_device_name(place) if place.type == "cuda" else _processor(),
        "cores": str(len(os.sched_getaffinity(0))),
        "dtype": str(pick_dtype(dtype, place)).removeprefix("torch."),
        "python": platform.python_version(),
        "torch": str(torch.__version__),
        "transformers": transformers.__version__,
    }


def _processor() -> str:
    """The CPU's name where Linux tells it."""
    known = Path("/proc/cpuinfo")
    lines = known.read_text().splitlines() if known.exists() else []
    return next((line.split(":")[1].strip() for line in lines if line.startswith("model name")), platform.machine())


def _configs(budget: Budget) -> tuple[EvictionConfig, ...]:
    return tuple(from_preset("paper", budget, selection=name) for name in ("attention", "two-stage"))


def _in_process(mode: str, arguments: Sequence[str]) -> dict[str, list[float]]:
    command = [sys.executable, "-m", "perturbkv.benchmark", mode, *arguments]
    surroundings = os.environ | (_EXACT_PEAK if mode.startswith("generate") else {})
    finished = subprocess.run(command, capture_output=True, text=True, check=False, env=surroundings)
    if finished.returncode != 0:
        lines = finished.stderr.strip().splitlines() or ["no message"]
        msg = f"the benchmark's process '{mode}' failed: {lines[-1]}"
        raise PerturbkvError(msg)
    result: dict[str, list[float]] = json.loads(finished.stdout.splitlines()[-1])
    return result


def _plain(adapter: Adapter, token_ids: Sequence[int]) -> None:
    """Prefill and decode greedily, nothing watched."""
    cache = DynamicCache()
    ids = torch.tensor([list(token_ids)], device=adapter.device)
    with torch.inference_mode():
        for _ in range(_PLAIN_STEPS + 1):
            logits = adapter.model(input_ids=ids, past_key_values=cache, use_cache=True, logits_to_keep=1).logits
            ids = logits[:, -1:].argmax(dim=-1)
    _wait(adapter)


def _traced(adapter: Adapter, token_ids: Sequence[int], configs: tuple[EvictionConfig, ...]) -> None:
    run = RunConfig(model=adapter.name, dataset="benchmark", configs=configs)
    trace_sample(adapter, EncodedPrompt("benchmark", tuple(token_ids), 0), run)
    _wait(adapter)


def _generate(adapter: Adapter, token_ids: Sequence[int], configs: tuple[EvictionConfig, ...], tokens: int) -> int:
    """Read and generate, from the full cache where there is no configuration; returns the bytes that the cache kept."""
    read = read_evicting(adapter, token_ids, configs, "benchmark", with_full=not configs)
    generate(adapter, read.cache, (), read.logits, tokens, ())
    _wait(adapter)
    return read.cache.nbytes


def _wait(adapter: Adapter) -> None:
    if adapter.device.type == "cuda":
        torch.cuda.synchronize(adapter.device)


def _seconds(work: Callable[[], None]) -> float:
    gc.collect()
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def _peak(adapter: Adapter, work: Callable[[], None]) -> int:
    """Peak bytes while `work` runs: of the GPU's memory, or of the process, weights included."""
    if adapter.device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(adapter.device)
        work()
        return int(torch.cuda.max_memory_allocated(adapter.device))
    _reset_process_peak()
    work()
    return _process_peak()


def _reset_process_peak() -> None:
    """Linux: forget the peak that loading the model left (proc(5), clear_refs)."""
    gc.collect()
    clear = Path("/proc/self/clear_refs")
    if clear.exists():
        clear.write_text("5")


def _process_peak() -> int:
    status = Path("/proc/self/status")
    if status.exists():
        line = next(line for line in status.read_text().splitlines() if line.startswith("VmHWM"))
        return int(line.split()[1]) * 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def _measure(mode: str, model: str, tokens: int, repeats: int, budget: Budget, dtype: str, device: str) -> str:
    adapter, configs = load_model(model, dtype, device), _configs(budget)
    token_ids = torch.randint(0, 256, (tokens,), generator=torch.Generator().manual_seed(0)).tolist()
    runs: dict[str, Callable[[], None]] = {
        "plain": lambda: _plain(adapter, token_ids),
        "traced": lambda: _traced(adapter, token_ids, configs),
    }
    if mode.startswith("generate"):
        held: list[int] = []
        chosen = configs[1:] if mode == "generate-evicted" else ()
        peak = _peak(adapter, lambda: held.append(_generate(adapter, token_ids, chosen, repeats)))
        return json.dumps({"peak": [peak], "cache": held})
    if mode != "times":
        return json.dumps({"peak": [_peak(adapter, runs[mode])]})
    for work in runs.values():
        work()
    taken: dict[str, list[float]] = {name: [] for name in runs}
    for _ in range(repeats):
        for name, work in runs.items():
            taken[name].append(_seconds(work))
    return json.dumps(taken)


def to_dict(cost: CaptureCost | GenerationMemory) -> dict[str, object]:
    """Every field as JSON-able values."""
    return asdict(cost)


if __name__ == "__main__":
    mode, model, tokens, repeats, budget, dtype, device = sys.argv[1:]
    sys.stdout.write(_measure(mode, model, int(tokens), int(repeats), Budget.parse(budget), dtype, device) + "\n")
