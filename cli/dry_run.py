"""What a run would do: samples, tokens, configurations and memory, without loading a weight."""

from __future__ import annotations

from typing import Any

from perturbkv.cli import console
from perturbkv.cli.tracing import Plan

_MIB = 2**20


def show(planned: Plan, as_json: bool) -> None:
    """Print the plan of a run."""
    document = describe(planned)
    if as_json:
        console.print_json(document)
        return
    rows = [
        ("model", f"{planned.run.model} ({document['model_parameters']:,} parameters, {planned.run.dtype})"),
        ("dataset", planned.run.dataset),
        ("samples", f"{document['samples']}, {document['tokens_min']} to {document['tokens_max']} tokens"),
        ("cut in the middle", f"{document['cut_samples']} samples"),
        ("scenario", planned.run.scenario),
        ("decode steps", str(planned.run.steps)),
        ("weights", f"{document['weights_mib']:,.0f} MiB"),
        ("full cache", f"{document['full_cache_mib']:,.1f} MiB for the longest sample"),
        ("evicted caches", f"{document['evicted_caches_mib']:,.1f} MiB for the longest sample, all configurations"),
    ]
    console.table("dry run: nothing was computed", ["", ""], rows)
    console.table("configurations", ["configuration", "#entries kept"], document["kept"])


def describe(planned: Plan) -> dict[str, Any]:
    """The same as numbers. Memory is what weights and caches take, in MiB, without activations."""
    config, run = planned.files.config, planned.run
    lengths = [len(prompt.token_ids) for prompt in planned.encoded.prompts]
    parameters = planned.files.parameters()
    d_head = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    entry = 2 * config.num_hidden_layers * d_head * planned.dtype.itemsize
    longest = max(lengths)
    compressed = max(len(prompt.parts(run.scenario)[0]) for prompt in planned.encoded.prompts)
    evicted = sum(
        eviction.tokens(compressed)
        * (config.num_attention_heads if eviction.granularity == "query" else config.num_key_value_heads)
        for eviction in run.configs
    )
    return {
        "model": run.model,
        "model_parameters": parameters,
        "dataset": run.dataset,
        "samples": len(lengths),
        "tokens_min": min(lengths),
        "tokens_max": longest,
        "cut_samples": planned.encoded.cut,
        "scenario": run.scenario,
        "compressed_tokens_max": compressed,
        "steps": run.steps,
        "weights_mib": parameters * planned.dtype.itemsize / _MIB,
        "full_cache_mib": entry * config.num_key_value_heads * longest / _MIB,
        "evicted_caches_mib": entry * evicted / _MIB,
        "kept": [(eviction.label(), str(eviction.tokens(compressed))) for eviction in run.configs],
    }
