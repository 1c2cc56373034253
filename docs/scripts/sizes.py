"""The tables of sizes in docs/explanation/gpu.md, by formula: `python docs/scripts/sizes.py`."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

import perturbkv as pk
from perturbkv.configs.resources import Resources, Shape
from perturbkv.configs.run import Settings
from perturbkv.datasets.prompts import collect
from perturbkv.kept_codec import mask_bytes
from perturbkv.models.loading import open_model
from perturbkv.pipeline.run.footprint import Memory, estimate_memory
from perturbkv.pipeline.run.plan import Placement, Plan, plan

MODEL = "random:llama-3.1-8b"
TOKENS = (8_192, 32_768, 131_071)
GRID = pk.grid((0.05, 0.1, 0.2, 0.4), policy=("snapkv", "adakv", "pyramidkv"), selection=("attention", "two-stage"))
WINDOW = GRID[0].window
STAGES = {"prefill": "the prefill", "layer": "a layer's sums", "decoding": "decoding"}
MOST_TOKENS = 2**20


@dataclass(frozen=True)
class Card:
    """A GPU by its published numbers: bytes, bytes a second, and dense operations a second in 16 and 64 bits."""

    name: str
    memory: float
    bandwidth: float
    half: float = 989e12
    double: float = 67e12


CARDS = (Card("H100, 80 GB", 80e9, 3.35e12), Card("H200, 141 GB", 141e9, 4.8e12))


def planned(tokens: int, steps: int = 1) -> Plan:
    """Return the plan of one prompt, longer than the model's context where that is asked for."""
    files = open_model(MODEL)
    files.config.max_position_embeddings = MOST_TOKENS + steps
    placement = Placement(torch.bfloat16, torch.device("meta"))  # blocks of long loops do not occur in this run
    return plan(files, placement, collect([pk.Prompt("p", (5,) * tokens, 0)]), GRID, Settings(steps=steps), Resources())


def most_tokens(memory: float, steps: int) -> tuple[int, Memory]:
    """Return the most tokens that fit, to 256, and the memory that one step more takes."""
    fits, above = 256, MOST_TOKENS
    while above - fits > 256:
        middle = (fits + above) // 2
        fits, above = (middle, above) if estimate_memory(planned(middle, steps)).total <= memory else (fits, middle)
    return fits, estimate_memory(planned(above, steps))


def most_configs(plan: Plan, memory: float) -> int:
    """Return the most configurations whose coded kept sets fit beside a batch as large as it may be."""
    told, batches, shape = estimate_memory(plan), plan.batches, plan.shape
    tokens = max(len(prompt.token_ids) for prompt in plan.prompts)
    decoding = told.decoding - batches.largest_bytes + batches.bound_bytes
    room = memory - (told.weights + told.full_cache + told.statistics + max(told.prefill, decoding))
    return len(plan.configs) + int(room / (shape.layers * shape.heads * mask_bytes(tokens)))


def prefill_operations(shape: Shape, linear: int, tokens: int) -> tuple[float, float]:
    """Return the operations of a prefill's projections (`linear` weights) and of its causal attention."""
    return 2 * linear * tokens, tokens**2 * shape.layers * shape.heads * (shape.d_key + shape.d_value)


def linear_weights(plan: Plan) -> int:
    """Return the number of weights that every token is multiplied with: all but the embedding and the logits'."""
    return plan.files.parameters() - 2 * plan.shape.vocab * plan.shape.d_model


def least_seconds(plan: Plan, tokens: int, card: Card) -> dict[str, float]:
    """Return what a run's parts take at least: operations at the card's peak, or bytes at its bandwidth."""
    shape, configs = plan.shape, len(plan.configs)
    heads, layers = shape.heads * tokens, shape.layers
    norms = 2 * heads * shape.d_value * shape.d_model * layers
    window = 2 * WINDOW * heads * shape.d_key * layers
    columns = shape.d_value + shape.heads // shape.kv_heads + 1
    sums = 2 * (configs + 1) * heads * columns * layers
    kept = sum(shape.kept_bytes(config, tokens) for config in plan.run.configs)
    projections, attention = prefill_operations(shape, linear_weights(plan), tokens)
    return {
        "projections": projections / card.half,
        "attention": attention / card.half,
        "value norms": norms / card.half,
        "window": window / card.double,
        "sums": sums / card.double,
        "decoding": (2 * shape.weights_bytes + 2 * shape.full_cache_bytes(tokens) + 2 * kept) / card.bandwidth,
    }


def main() -> None:
    """Print the tables of memory, of limits and of time."""
    print("\n".join(itertools.chain(memory_table(), [""], limits_table(), [""], time_table())))


def memory_table() -> Iterator[str]:
    """Yield the lines of the table of memory, in GiB."""
    yield from _head(("tokens", "full cache", "scores and norms", *STAGES.values(), "at most", "at most, 16 steps"))
    for tokens in TOKENS:
        told, longer = (estimate_memory(planned(tokens, steps)) for steps in (1, 16))
        parts = (told.full_cache, told.statistics, told.prefill, told.layer, told.decoding)
        yield _row(f"{tokens:,}", *map(_gib, (*parts, told.total, longer.total)))


def limits_table() -> Iterator[str]:
    """Yield the lines of the table of limits."""
    configs = (f"configurations at {tokens:,}" for tokens in TOKENS)
    yield from _head(("GPU", "steps", "tokens that fit", "breaks first", *configs))
    for card, steps in itertools.product(CARDS, (1, 16)):
        fits, told = most_tokens(card.memory, steps)
        counts = (f"{int(float(f'{most_configs(planned(tokens, steps), card.memory):.2g}')):,}" for tokens in TOKENS)
        yield _row(card.name, str(steps), f"{fits // 1000:,},000", STAGES[told.stage], *counts)


def time_table() -> Iterator[str]:
    """Yield the lines of the table of least times, in seconds."""
    parts = list(least_seconds(planned(TOKENS[0]), TOKENS[0], CARDS[0]))
    yield from _head(("tokens", "GPU", *parts, "in all"))
    for tokens, card in itertools.product(TOKENS, CARDS):
        seconds = least_seconds(planned(tokens), tokens, card).values()
        yield _row(f"{tokens:,}", card.name, *(f"{one:.2g}" for one in seconds), f"{sum(seconds):.2g}")


def _head(columns: Sequence[str]) -> list[str]:
    """Return the first two lines of a table."""
    return [_row(*columns), "|" + "---|" * len(columns)]


def _row(*cells: str) -> str:
    """Return a line of a table."""
    return f"| {' | '.join(cells)} |"


def _gib(size: float) -> str:
    """Return bytes as GiB."""
    return f"{size / 2**30:.1f}"


if __name__ == "__main__":
    main()
