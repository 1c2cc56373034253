"""`perturbkv bench`: what measuring costs, as ratios within one run."""

from __future__ import annotations

from typing import Annotated

import typer
from typer import Option

from perturbkv.cli import console
from perturbkv.cli.options import JsonOption
from perturbkv.config import Budget

bench = typer.Typer(help="Measure what measuring costs.", no_args_is_help=True)
_MIB = 2**20


@bench.command()
def capture(
    model: Annotated[str, Option("--model", "-m", help="Model to run.")] = "smollm2-135m",
    tokens: Annotated[int, Option(help="Prompt length.")] = 4096,
    repeats: Annotated[int, Option(help="How often each of the two is timed, in turns.")] = 3,
    budget: Annotated[str, Option("--budget", "-b", help="Entries kept per head.")] = "128",
    dtype: Annotated[str, Option(help="auto, float32, bfloat16, float16.")] = "auto",
    device: Annotated[str, Option(help="auto, cpu, cuda, …")] = "auto",
    as_json: JsonOption = False,
) -> None:
    """Time and peak memory of one traced sample, two configurations, against a plain prefill and two decode steps."""
    from perturbkv.benchmark import capture_cost, to_dict

    cost = capture_cost(model, tokens, repeats, Budget.parse(budget), dtype, device)
    if as_json:
        console.print_json(to_dict(cost))
        return
    rows = [
        ("time, s (median)", _median(cost.plain_seconds), _median(cost.traced_seconds), f"{cost.time_ratio:.3f}"),
        (
            "peak memory, MiB",
            f"{cost.plain_peak_bytes / _MIB:,.0f}",
            f"{cost.traced_peak_bytes / _MIB:,.0f}",
            f"{cost.memory_ratio:.3f}",
        ),
    ]
    title = f"{model}, {tokens} tokens, {len(cost.configurations)} configurations, {repeats} repeats"
    console.table(title, ["", "#plain", "#traced", "#ratio"], rows)


@bench.command()
def generation(
    model: Annotated[str, Option("--model", "-m", help="Model to run.")] = "smollm2-135m",
    tokens: Annotated[int, Option(help="Prompt length.")] = 4096,
    budget: Annotated[str, Option("--budget", "-b", help="Entries kept per head.")] = "128",
    dtype: Annotated[str, Option(help="auto, float32, bfloat16, float16.")] = "auto",
    device: Annotated[str, Option(help="auto, cpu, cuda, …")] = "auto",
    as_json: JsonOption = False,
) -> None:
    """Peak memory of generating from a cache that is evicted while the prompt is read, against the full cache."""
    from perturbkv.benchmark import generation_memory, to_dict

    found = generation_memory(model, tokens, Budget.parse(budget), dtype, device)
    if as_json:
        console.print_json(to_dict(found))
        return
    rows = [
        (name, *(f"{value / _MIB:,.1f}" for value in (full, evicted, full - evicted)))
        for name, full, evicted in (
            ("cache of the prompt", found.full_cache_bytes, found.evicted_cache_bytes),
            ("peak of the run", found.full_peak_bytes, found.evicted_peak_bytes),
        )
    ]
    console.table(
        f"{model}, {tokens} tokens and {found.new_tokens} generated, MiB", ["", "#full", "#evicted", "#saved"], rows
    )
    console.say(f"{found.configuration}: the peak goes down by {found.saved_share:.0%} of the cache saved")


def _median(seconds: list[float]) -> str:
    return f"{sorted(seconds)[len(seconds) // 2]:.2f}"
