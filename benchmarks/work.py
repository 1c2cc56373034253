"""Work of the benchmark's processes: `python -m benchmarks.work WORK JSON` prints a measurement as JSON.

24 configurations of ours, by one prefill, are compared with presses of kvpress, a prefill each. All are timed in turns
in one process. Most rows are of the pieces of one sample: of its pipeline, of coding, writing and generating.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import DynamicCache

from benchmarks.many_workers import store_one_sample, time_coordination, time_merging, time_speed_up
from benchmarks.report_pages import synthetic_trace
from benchmarks.subprocesses import measure_memory
from perturbkv.cache.entries import encode_kept_sets, pack_bits
from perturbkv.configs.eviction import EvictionConfig
from perturbkv.configs.resources import Resources
from perturbkv.configs.run import ISOLATED_EVERY, RunConfig, Settings
from perturbkv.datasets.encode import Prompt
from perturbkv.datasets.prompts import Prompts
from perturbkv.devices import synchronise
from perturbkv.models.adapter import Adapter
from perturbkv.models.forward import run_with_cache
from perturbkv.models.loading import ModelFiles, load_model
from perturbkv.pipeline.answers.compression import Compressor
from perturbkv.pipeline.answers.generation import generate, prefill_and_evict
from perturbkv.pipeline.progress import time_phases
from perturbkv.pipeline.run.plan import Placement, plan
from perturbkv.pipeline.sample.one_sample import Finisher, trace_sample
from perturbkv.schema import DIGEST
from perturbkv.selection.grid import grid
from perturbkv.selection.resolved_config import ResolvedRun
from perturbkv.selfcheck import gpu_rows
from perturbkv.selfcheck.gpu_rows import (
    NORMS,
    SWEEP,
    random_layer,
    random_tokens,
    resolved_run,
    run_plain,
    time_in_turns,
    time_norms,
    trace_prompt,
)
from perturbkv.selfcheck.rows import Result, print_result, time_call
from perturbkv.storage.run.writer import TraceWriter
from perturbkv.trace import SampleTrace


@torch.inference_mode()
def norms_peak(which: str, **shapes: Any) -> Result:
    """Return the peak extra bytes of computing ν (`ours`) or of the loop (`loop`), without inputs and result."""
    value, w_o = random_layer(**shapes)
    before, most = measure_memory(lambda: NORMS[which](value, w_o), value.device)
    return {"extra": most - before}


BUDGETS = (128, 256, 512, 1024)


def press_runs(adapter: Adapter, token_ids: list[int]) -> list[Callable[[], object]]:
    """Return one prefill function per combination of a kvpress press and a budget, which keeps that many entries.

    The presses are SnapKV, PyramidKV and AdaKV, each also within CriticalKV, at four budgets.
    """
    import kvpress

    def kinds(ratio: float) -> list[Any]:
        snapkv, pyramid = kvpress.SnapKVPress(ratio), kvpress.PyramidKVPress(ratio)
        critical = [kvpress.CriticalKVPress(snapkv), kvpress.CriticalKVPress(pyramid)]
        return [snapkv, pyramid, *critical, kvpress.AdaKVPress(snapkv), kvpress.CriticalAdaKVPress(snapkv)]

    ids = torch.tensor([token_ids], device=adapter.device)

    def prefill(press: Any) -> None:
        with torch.inference_mode(), press(adapter.model):
            run_with_cache(adapter.model, ids, DynamicCache(), logits_to_keep=1)

    presses = [press for budget in BUDGETS for press in kinds(1 - budget / len(token_ids))]
    return [lambda press=press: prefill(press) for press in presses]  # type: ignore[misc]


def _time_press_runs(
    adapter: Adapter, token_ids: list[int], ours: Callable[[], object], repeats: int
) -> dict[str, Any]:
    """Return the seconds of all presses together and of the function `ours`, in each of `repeats` turns."""
    taken: dict[str, list[float]] = {"presses": [], "ours": []}
    runs = press_runs(adapter, token_ids)
    for _ in range(repeats):
        taken["presses"].append(sum(time_call(run, adapter.device) for run in runs))
        taken["ours"].append(time_call(ours, adapter.device))
    return taken


_GENERATED = 32
_SELECTIONS = ("attention", "two-stage")
_LATER = ("caote", "dropkv", "obcache-value", "obcache-key", "obcache-joint", "knorm", "value-norm",
          "expected-attention", "lava", "defensive")  # fmt: skip
"""Later scores that need no replay of the context."""


def configurations(count: int) -> tuple[EvictionConfig, ...]:
    """Return the standard set of `count` configurations: 2, 11, 12, 24 or 200.

    2: SnapKV's two selections at b = 128; 11: SnapKV's score and ten others; 12: two policies, two selections, three
    shares; 24: three policies, two selections, four budgets; 200: two policies at ten budgets, two-stage at five alphas
    and five other selections, no two of which keep the same entries.
    """
    if count == 11:
        return grid(128, policy=("snapkv", *_LATER), selection="attention")
    if count == 12:
        return grid((0.1, 0.2, 0.4), policy=("snapkv", "adakv"), selection=_SELECTIONS)
    if count == 2:
        return grid(128, selection=_SELECTIONS)
    if count == 24:
        return SWEEP
    budgets, policies = (64, 96, 128, 192, 256, 384, 512, 640, 768, 1024), ("snapkv", "adakv")
    others = ("attention", "attention-unpooled", "value", "two-stage-uniform", "hindsight")
    return grid(budgets, policy=policies, alpha=(0.1, 0.2, 0.3, 0.5, 0.75)) + grid(
        budgets, policy=policies, selection=others
    )


def time_sweeps(model: str, tokens: int, repeats: int, dtype: str, device: str, counts: list[int]) -> Result:
    """Return the seconds of plain and traced runs per turn, and the phases of the last traced runs."""
    sweeps = {str(count): configurations(count) for count in counts}
    return gpu_rows.time_runs(load_model(model, dtype, device), random_tokens(tokens), repeats, sweeps)


def time_steps(model: str, tokens: int, repeats: int, dtype: str, device: str, steps: int) -> Result:
    """Return the seconds of a plain prefill and of 24 configurations at `steps` decode steps, per turn.

    The text never ends before its last step.
    """
    adapter, token_ids = load_model(model, dtype, device), random_tokens(tokens)
    adapter.tokenizer.eos_token = adapter.model.generation_config.eos_token_id = None
    prompt, run = Prompt("benchmark", tuple(token_ids), 0), replace(resolved_run(adapter, SWEEP), steps=steps)
    runs: dict[str, Callable[[], object]] = {
        "plain": lambda: run_plain(adapter, token_ids, 0),
        "traced": lambda: trace_sample(adapter, prompt, run),
    }
    runs["plain"]()
    taken, phases = time_in_turns(runs, repeats, adapter.device)
    return {"seconds": taken, "phases": phases["traced"]}


def time_decoding(model: str, tokens: int, repeats: int, dtype: str, device: str, steps: int, every: int) -> Result:
    """Return the seconds of decoding from 8 evicted caches that are compressed every `every` tokens, and of tracing it.

    Both read a prompt; the trace measures `steps` steps, and the other generates as many tokens.
    """
    adapter, token_ids = load_model(model, dtype, device), random_tokens(tokens)
    adapter.tokenizer.eos_token = adapter.model.generation_config.eos_token_id = None
    prompt = Prompt("benchmark", tuple(token_ids), 0)
    configs = grid((128, 256), policy=("snapkv", "tova"), selection=("attention", "random"), granularity="kv")
    run = replace(resolved_run(adapter, configs), steps=steps, compress_every=every, isolated_every=ISOLATED_EVERY)

    def decode() -> None:
        read = prefill_and_evict(adapter, prompt, run, with_full=True)
        generate(adapter, read, (), steps, Compressor(adapter, read, run, "benchmark", Resources()))

    runs: dict[str, Callable[[], object]] = {"decoded": decode, "traced": lambda: trace_sample(adapter, prompt, run)}
    decode()
    taken, phases = time_in_turns(runs, repeats, adapter.device)
    return {"seconds": taken, "phases": phases["traced"]}


def _trace_function(adapter: Adapter, token_ids: Sequence[int], count: int) -> Callable[[], object]:
    """Return a function that traces the prompt under the standard set of `count` configurations."""
    configs = configurations(count)
    return lambda: trace_prompt(adapter, token_ids, configs)


def time_presses(model: str, tokens: int, repeats: int, dtype: str, device: str) -> Result:
    """Return the seconds of 24 prefills under kvpress' presses, and of a traced sample of the same configurations."""
    adapter, token_ids = load_model(model, dtype, device), random_tokens(tokens)
    return _time_press_runs(adapter, token_ids, _trace_function(adapter, token_ids, 24), repeats)


def peaks(model: str, tokens: int, dtype: str, device: str, count: int) -> Result:
    """Return the peak bytes of a plain prefill (`count` 0) or of a traced sample, weights included."""
    adapter, token_ids = load_model(model, dtype, device), random_tokens(tokens)
    work = _trace_function(adapter, token_ids, count) if count else lambda: run_plain(adapter, token_ids, 0)
    return {"peak": measure_memory(work, adapter.device)[1]}


def time_growth(model: str, lengths: list[int], repeats: int, dtype: str, device: str, count: int) -> Result:
    """Return the seconds of a traced sample without its plain prefill, per prompt length and turn."""
    adapter, configs = load_model(model, dtype, device), configurations(count)
    trace_prompt(adapter, random_tokens(min(lengths)), configs)
    taken: dict[str, list[float]] = {str(length): [] for length in lengths}
    for _ in range(repeats):
        for length in lengths:
            with time_phases(lambda: synchronise(adapter.device)) as spent:
                ids = random_tokens(length)
                whole = time_call(lambda ids=ids: trace_prompt(adapter, ids, configs), adapter.device)  # type: ignore[misc]
            taken[str(length)].append(whole - (spent["prefill"] - spent["scores"] - spent["norms"]))
    return {"seconds": taken}


def time_writing(model: str, tokens: int, repeats: int, dtype: str, device: str, count: int) -> Result:
    """Return the seconds of measuring one sample, of writing its journal and of writing its file, per turn."""
    adapter, configs, cpu = load_model(model, dtype, device), configurations(count), torch.device("cpu")
    ids = random_tokens(tokens)
    taken: dict[str, list[float]] = {"run": [], "journal": [], "file": []}
    for _ in range(repeats + 1):
        samples: list[SampleTrace] = []
        taken["run"].append(time_call(lambda: samples.append(trace_prompt(adapter, ids, configs)), adapter.device))  # noqa: B023
        with tempfile.TemporaryDirectory() as folder:
            writer = TraceWriter(Path(folder) / "trace.h5", resolved_run(adapter, configs), ["benchmark"], {})
            taken["journal"].append(time_call(lambda: writer.append(samples[0]), cpu))  # noqa: B023
            taken["file"].append(time_call(writer.finish, cpu))  # noqa: B023
    return {name: spent[1:] for name, spent in taken.items()}


def time_kept_coding(samples: int, prefill: float, layers: int, sets: int, tokens: int) -> Result:
    """Return the seconds of every made-up sample but the first, of waiting and finishing, and the file's bytes.

    A prefill is a sleep of `prefill` seconds. Meanwhile another thread codes the kept sets of the sample before, which
    a run does on the device, and writes its journal. Every layer has the same `sets` kept sets of `tokens` entries.
    """
    configs = grid((0.025, 0.05, 0.1, 0.4), policy=("snapkv", "pyramidkv", "adakv"), selection=_SELECTIONS)
    counts = [int(config.budget.value * tokens) for config in configs]
    kept = _random_masks(counts, sets, tokens)
    masks, position = pack_bits(kept.flatten(0, 1)), kept.nonzero()[:, -1].to(torch.int32)
    per_set = [count for count in counts for _ in range(sets)]
    run = ResolvedRun.from_run(RunConfig("made", "made", configs, samples=samples))
    made = synthetic_trace(1, layers, sets, tokens, configs=configs, kept=False).sample("p0")
    assert isinstance(made, SampleTrace)
    others = {name: array for name, array in made.arrays.items() if name != DIGEST}
    names, taken = [f"p{number}" for number in range(samples)], []

    def finish(name: str) -> None:
        coded = [encode_kept_sets(position, per_set, masks) for _ in range(layers)]
        lengths = np.stack([length.numpy().reshape(len(configs), sets) for _, length in coded])
        codes = [part.numpy()[np.arange(part.shape[1]) < length.numpy()[:, None]] for part, length in coded]
        offsets = lengths.cumsum().reshape(lengths.shape) - lengths
        own = {"kept_length": lengths.swapaxes(0, 1), "kept_offset": offsets.swapaxes(0, 1)}
        writer.append(SampleTrace(name, {**others, **own, "kept_code": np.concatenate(codes)}))

    with tempfile.TemporaryDirectory() as folder:
        writer = TraceWriter(Path(folder) / "trace.h5", run, names, {})
        with Finisher() as finisher:
            for name in names:
                begin = time.monotonic()
                time.sleep(prefill)
                finisher.add(partial(finish, name))
                taken.append(time.monotonic() - begin)
            begin = time.monotonic()
        waited = time.monotonic() - begin
        finishing = time_call(writer.finish, torch.device("cpu"))
        size = (Path(folder) / "trace.h5").stat().st_size
    return {"seconds": taken[1:], "waited": waited, "finish": finishing, "bytes": size}


def _random_masks(counts: Sequence[int], sets: int, tokens: int) -> Tensor:
    """Return masks (config, set, entry) of random kept sets, `counts[config]` entries each, in another order each."""
    order = torch.rand(sets, tokens, generator=torch.Generator().manual_seed(0)).argsort(dim=-1)
    kept = torch.zeros(len(counts), sets, tokens, dtype=torch.bool)
    for index, count in enumerate(counts):
        kept[index].scatter_(-1, order[:, :count].roll(index, dims=0), True)
    return kept


def generation_memory(
    model: str, tokens: int, dtype: str, device: str, evicted: bool, generated: int = _GENERATED
) -> Result:
    """Return the peak bytes of prefill and generation from the full or an evicted cache, and the cache's bytes."""
    adapter = load_model(model, dtype, device)
    run, prompt = resolved_run(adapter, configurations(2)[1:]), Prompt("benchmark", tuple(random_tokens(tokens)), 0)
    adapter.tokenizer.eos_token = adapter.model.generation_config.eos_token_id = None
    sizes: list[int] = []

    def work() -> None:
        read = prefill_and_evict(adapter, prompt, run if evicted else replace(run, compress_over=tokens))
        generate(adapter, read, (), generated)
        sizes.append(read.cache.nbytes)

    return {"peak": measure_memory(work, adapter.device)[1], "cache": sizes[0]}


def time_scoring(model: str, tokens: int, answer: int, repeats: int, dtype: str, device: str) -> Result:
    """Return the seconds of one answer by the plain model, and of 12 configurations measured and scored, per turn.

    Answers never end before they have `answer` tokens, so that all are as long.
    """
    adapter = load_model(model, dtype, device)
    adapter.tokenizer.eos_token = adapter.model.generation_config.eos_token_id = None
    prompts = Prompts((Prompt("benchmark", tuple(random_tokens(tokens)), 0, answers=("0",)),), "benchmark")
    placement = Placement(adapter.dtype, torch.device(adapter.device))
    settings = Settings(generate=answer)
    planned = plan(
        ModelFiles.from_adapter(adapter), placement, prompts, configurations(12), settings, Resources(), adapter
    )
    runs: dict[str, Callable[[], object]] = {
        "plain": lambda: run_plain(adapter, prompts[0].token_ids, answer - 1),
        "scored": lambda: trace_sample(adapter, prompts[0], planned.resolved, planned.resources),
    }
    runs["plain"]()
    taken, phases = time_in_turns(runs, repeats, adapter.device)
    return {"seconds": taken, "phases": phases["scored"], "batches": len(planned.batches.indices)}


_WORKS = (time_sweeps, time_steps, time_decoding, time_presses, peaks, time_growth, time_writing, time_kept_coding,
          generation_memory, time_norms, norms_peak, time_scoring, store_one_sample, time_speed_up, time_coordination,
          time_merging)  # fmt: skip
WORK: dict[str, Callable[..., Result]] = {work.__name__: work for work in _WORKS}

if __name__ == "__main__":
    print_result(WORK)
