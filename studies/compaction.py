"""Caches that are no kept set of the prompt's entries: fitted and merged ones against evicting, at equal bytes.

*Matching* fits a cache to the attention of reference queries ("Fast KV compaction via attention matching", arXiv
2602.16284). In each key/value head it keeps the keys with the largest mean attention; a bias per kept entry makes the
weights of these entries, before they are normalised, add up to what all entries' add up to (least squares with weights
of at least 0, as logarithms); values are then fitted so that the outputs are those of the whole prefix. References are
the last 16 queries of the prompt, or 256 queries of a second reading of the prompt right behind the first (`repeat`).
*Merging* averages every evicted key and value into the kept entry whose key is most like it, with or without a bias of
the logarithm of how many there are. All keep the last 16 entries as they are, as SnapKV does.

Ours, where the paper leaves a choice or has another: masses are matched relative to each query's own; a weight lies in
e⁻³ to e³; values are pulled towards those that the entries had (`RIDGE`), as there are fewer queries than numbers; and
mean attention chooses, so that `attention-unpooled` keeps the same entries and what fits bring is seen alone.

A bias counts as a number of 16 bits, so that with biases fewer entries are kept: d_head numbers each for key and value.

## How it is decided

Written before anything but `needle` prompts of 400 tokens was measured, on which the program was tried and RIDGE
chosen. Settings: `multi_news` cut to 700 tokens, with the chat template, the first 12 prompts (8 for models of 0.5
billion parameters and more), window 16, one kept set per key/value head, seed 0, budgets of 5, 10, 20 and 40 % of the
bytes, eight decode steps whose mean is a prompt's number. Two numbers decide apart: the propagated L1 summed over all
heads, as the difference in logarithms (a ratio, whose mean over prompts is geometric), and KL(full ‖ evicted), as the
median difference. Each is *better* where its whole 95 % interval over prompts of the paired difference, treatment less
baseline, lies below 0, *worse* where it lies above, *undecided* otherwise. A claim *holds* where it is better at three
or four of the shares and worse at none, is *reversed* where it is worse at three or four and better at none, and
*depends* otherwise; the shares are named. Eight claims with two numbers at four shares are 64 intervals, of which three
would lie off 0 by chance. The isolated sum is shown and decides nothing: the queries that are decoded are not those of
the fit.

What is claimed (CLAIMS): matching moves less than SnapKV; its fits bring something to the same keys, the values alone,
too, and the bias something to the values; more reference queries are better; merging is better than evicting the same
entries, and with a bias better than without; matching is better than the best subset. For that one `hindsight` stands,
which ranks by the realised A ν of each head; the search for a head's best set takes seconds a head and budget, of 270
heads a prompt, and is left out. (Added when the numbers were there: it knows the query of the first step alone.)

    python studies/compaction.py --dataset multi_news --data-dir LONGBENCH --samples 12 --max-tokens 700
    python studies/compaction.py TRACE
"""

from __future__ import annotations

import argparse
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import common
import numpy as np
import torch
from common import Floats, estimate, interval_text, side_of
from matplotlib.figure import Figure
from torch import Tensor
from transformers import DynamicCache

import perturbkv as pk

WINDOW, STEPS = 16, 8
SHARES = ("0.05", "0.1", "0.2", "0.4")
REPEATED = 256
"""Queries of a second reading that a key/value head's fit takes, at even distances, its query heads together."""
RIDGE = 0.01
"""Weight of the squared distance of fitted values from those of the entries, beside a squared error of a reference."""
LARGEST = 3.0
"""Largest absolute bias of a fit."""
ROUNDS = 500
"""Steps of the projected gradient."""
METHODS: dict[str, dict[str, Any]] = {
    "matching": {"fits": "bias+values"},
    "matching-values": {"fits": "values"},
    "matching-repeat": {"fits": "bias+values", "repeat": True},
    "merge": {"fits": "merge"},
    "merge-count": {"fits": "merge+bias"},
}
"""Name of a cache -> options of `make`."""
EVICTED = ("attention", "attention-unpooled", "random", "hindsight")
CLAIMS = (
    ("matching", "attention"),
    ("matching", "attention-unpooled"),
    ("matching-values", "attention-unpooled"),
    ("matching", "matching-values"),
    ("matching-repeat", "matching"),
    ("merge", "attention-unpooled"),
    ("merge-count", "merge"),
    ("matching", "hindsight"),
)
"""Treatment and baseline: the treatment is claimed to be better."""
WORDS = {-1: "better", 1: "worse", 0: "undecided"}


@dataclass(frozen=True)
class Reading:
    """Reference queries (kv_head, row, …) per layer of a prompt as the model read it.

    `places` are the positions of the references, (row,); `scale` is that of logits.
    """

    queries: list[Tensor]
    places: Tensor
    scale: float


_READ: dict[tuple[Any, ...], Reading] = {}
"""The reading of the last prompt, which all caches of it are made from."""


@contextmanager
def queries_of(model: Any) -> Iterator[list[Tensor]]:
    """Collect each layer's rotated queries (head, token, d_head) of the passes inside the block."""
    found: list[Tensor] = []

    def record(attention: Any, _: Any, given: Mapping[str, Any]) -> None:
        hidden = given["hidden_states"][0]
        query = attention.q_proj(hidden).view(len(hidden), -1, attention.head_dim).transpose(0, 1)
        cosine, sine = given["position_embeddings"]
        first, second = query.chunk(2, dim=-1)
        found.append(query * cosine + torch.cat([-second, first], dim=-1) * sine)

    hooks = [layer.self_attn.register_forward_pre_hook(record, with_kwargs=True) for layer in model.model.layers]
    try:
        yield found
    finally:
        for hook in hooks:
            hook.remove()


def read(model: Any, input_ids: Tensor, repeat: bool) -> Reading:
    """Return a prompt's reading, with the queries of its window, or of a second reading behind the first."""
    key = (id(model), repeat, *input_ids[0].tolist())
    if key not in _READ:
        for old in [one for one in _READ if one[2:] != key[2:]]:
            del _READ[old]
        n, cache, config = input_ids.shape[1], DynamicCache(), model.config
        with torch.no_grad(), queries_of(model) as found:
            text = torch.cat([input_ids, input_ids], dim=1) if repeat else input_ids
            model(text, None, None, cache, logits_to_keep=1)
        grouped = config.num_attention_heads // config.num_key_value_heads
        places = torch.linspace(n, 2 * n - 1, REPEATED // grouped).long() if repeat else torch.arange(n - WINDOW, n)
        kv_heads = config.num_key_value_heads
        queries = [one[:, places].reshape(kv_heads, -1, one.shape[-1]).double() for one in found]
        _READ[key] = Reading(queries, places.repeat(grouped), float(model.model.layers[0].self_attn.scaling))
    return _READ[key]


def make(model: Any, input_ids: Tensor, attention_mask: Tensor, budget: int, fits: str, repeat: bool = False) -> Any:
    """Return a cache of at most the bytes of `budget` entries per key/value head.

    `fits` names what it has instead of the kept entries: bias, values, or means (`merge`). The prompt is read for each
    cache, as the plain model does: else there would be no isolated L.
    """
    reading, cache, held = read(model, input_ids, repeat), DynamicCache(), 0
    model(input_ids, None, None, cache, logits_to_keep=1)
    for layer, queries in zip(cache.layers, reading.queries, strict=True):
        keys, values, bias = compacted(layer.keys[0].double(), layer.values[0].double(), queries, reading, budget, fits)
        layer.keys, layer.values = keys.to(layer.keys.dtype)[None], values.to(layer.values.dtype)[None]
        if bias is not None:
            layer.bias = bias[None]
        biases = 0 if bias is None else keys.shape[1] - WINDOW
        held += len(keys) * (keys.shape[1] * (keys.shape[-1] + values.shape[-1]) + biases)
    cache.nbytes = 2 * held
    return cache


def compacted(
    keys: Tensor, values: Tensor, queries: Tensor, reading: Reading, budget: int, fits: str
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Return what stands for a layer's entries, the window's own last: keys, values (kv_head, entry, …) and biases."""
    numbers, with_bias = keys.shape[-1] + values.shape[-1], "bias" in fits
    kept = int((budget - WINDOW) * numbers / (numbers + with_bias))
    own_keys, own_values, bias = compacted_prefix(keys, values, queries, reading, kept, fits)
    own = [torch.cat([one, full[:, -WINDOW:]], dim=1) for one, full in ((own_keys, keys), (own_values, values))]
    return own[0], own[1], torch.nn.functional.pad(bias, (0, WINDOW)) if with_bias else None


def compacted_prefix(
    keys: Tensor, values: Tensor, queries: Tensor, reading: Reading, kept: int, fits: str
) -> tuple[Tensor, Tensor, Tensor]:
    """Return what stands for a layer's prefix: keys, values (kv_head, kept, …) and biases (kv_head, kept)."""
    prefix, logits = keys.shape[1] - WINDOW, queries @ keys.mT * reading.scale
    places = mean_attention(logits, reading).argsort(dim=-1, descending=True, stable=True)[:, :kept].sort(dim=-1).values
    own_keys, own_values = (full.gather(1, places[..., None].expand(-1, -1, full.shape[-1])) for full in (keys, values))
    bias = torch.zeros(places.shape, dtype=keys.dtype, device=keys.device)
    if "merge" in fits:
        return merged(keys[:, :prefix], values[:, :prefix], places, "bias" in fits)
    weights = logits[..., :prefix].softmax(dim=-1)
    at = weights.gather(2, places[:, None].expand(-1, weights.shape[1], -1))
    if "bias" in fits:
        bias = fitted_bias(at)
    if "values" in fits:
        own = at * bias[:, None].exp()
        own_values = fitted_values(own / own.sum(dim=-1, keepdim=True), own_values, weights @ values[:, :prefix])
    return own_keys, own_values, bias


def mean_attention(logits: Tensor, reading: Reading) -> Tensor:
    """Return (kv_head, prefix) mean weights of the entries before the window, from logits of references."""
    future = torch.arange(logits.shape[-1], device=logits.device) > reading.places[:, None]
    return logits.masked_fill(future, -torch.inf).softmax(dim=-1)[..., :-WINDOW].mean(dim=1)


def fitted_bias(weights: Tensor) -> Tensor:
    """Return the biases with which kept weights (kv_head, query, kept) add up to 1, by least squares.

    An accelerated projected gradient from 0 on, of the factors e^bias.
    """
    low, high = np.exp(-LARGEST), np.exp(LARGEST)
    step = 1 / torch.linalg.matrix_norm(weights, ord=2)[:, None, None] ** 2
    factors = ahead = torch.ones_like(weights[:, 0, :, None])
    momentum = 1.0
    for _ in range(ROUNDS):
        error = weights @ ahead - 1
        before, factors = factors, (ahead - step * (weights.mT @ error)).clamp(low, high)
        later = (1 + (1 + 4 * momentum**2) ** 0.5) / 2
        ahead, momentum = factors + (momentum - 1) / later * (factors - before), later
    return factors[..., 0].log()


def fitted_values(weights: Tensor, values: Tensor, outputs: Tensor) -> Tensor:
    """Return values near `values` (kv_head, kept, d) whose sums by weights (kv_head, query, kept) are near outputs."""
    queries = torch.eye(weights.shape[1], dtype=weights.dtype, device=weights.device)
    solved = torch.linalg.solve(weights @ weights.mT + RIDGE * queries, outputs - weights @ values)
    moved: Tensor = weights.mT @ solved
    return values + moved


def merged(keys: Tensor, values: Tensor, places: Tensor, counted: bool) -> tuple[Tensor, Tensor, Tensor]:
    """Return each kept entry's mean with the evicted ones whose keys are most like its own, and log(count) if asked."""
    unit = torch.nn.functional.normalize(keys, dim=-1)
    own = unit.gather(1, places[..., None].expand(-1, -1, keys.shape[-1]))
    nearest = (unit @ own.mT).argmax(dim=-1)
    nearest.scatter_(1, places, torch.arange(places.shape[1], device=keys.device).expand_as(places))
    members = torch.nn.functional.one_hot(nearest, places.shape[1]).to(keys.dtype).mT  # kv_head, kept, prefix
    counts = members.sum(dim=-1)
    means = [members @ full / counts[..., None] for full in (keys, values)]
    return means[0], means[1], counts.log() if counted else torch.zeros_like(counts)


def configurations(asked: argparse.Namespace) -> list[pk.EvictionConfig]:
    """Return the evicted caches and those that are no subset, at every share."""
    budgets = asked.budget or (["0.2", "0.4"] if asked.short else SHARES)
    found = list(pk.grid(budgets, selection=EVICTED, granularity="kv", window=WINDOW, seed=asked.seed))
    for name, options in METHODS.items():
        found += pk.grid(budgets, policy=pk.external(functools.partial(make, **options), name))
    return found


def geometric_interval(logs: Floats) -> Any:
    """Return the interval of a geometric mean from its logarithms."""
    stats = pk.stats.intervals
    return stats.of_statistic(lambda weights: np.exp(weights @ logs), len(logs), stats.RATIO)


def name_of(config: pk.EvictionConfig) -> str:
    """Return a configuration's method: its cache or press where it has one, else its selection."""
    selection = str(config.selection.name)
    return str(config.policy.name).split(":", 1)[-1] if selection == "given" else selection


class Numbers:
    """Sums over heads, KL (sample, config) and shares of bytes of a trace's complete samples; means over steps."""

    def __init__(self, trace: pk.Trace, claims: Sequence[tuple[str, str]] = CLAIMS) -> None:
        def steps_of(name: str) -> Floats:
            return np.asarray(trace.get(name, "compaction"), dtype=np.float64)

        self.places = {(name_of(config), str(config.budget)): i for i, config in enumerate(trace.run.configs)}
        self.budgets = list(dict.fromkeys(budget for _, budget in self.places))
        self.sums = {kind: np.nanmean(steps_of(f"perturbation_{kind}").sum(axis=(3, 4)), axis=2)
                     for kind in ("propagated", "isolated")}  # fmt: skip
        self.kl = np.nanmean(steps_of("logit_kl"), axis=2)
        held = steps_of("held_bytes")
        if np.isnan(held).any():  # a press says nothing of its file: what it has in memory
            held = np.where(np.isnan(held), steps_of("resident_bytes"), held)
        self.bytes = (held / steps_of("full_bytes")[:, None]).mean(axis=0)
        if missing := {name for pair in claims for name in pair} - {name for name, _ in self.places}:
            raise pk.PerturbkvError(
                f"expected a trace of this study, got one without {', '.join(sorted(missing))}; "
                "called without a trace it makes one"
            )

    def compare(self, treatment: str, baseline: str, budget: str) -> dict[str, Any]:
        """Return a treatment's ratios of sums and its difference in KL against a baseline at a share of bytes."""
        stats, (own, other) = pk.stats.intervals, (self.places[name, budget] for name in (treatment, baseline))
        row: dict[str, Any] = {"treatment": treatment, "baseline": baseline, "share": budget}
        for kind, sums in self.sums.items():
            logs = np.log(sums[:, own]) - np.log(sums[:, other])
            interval = geometric_interval(logs)
            row |= estimate(kind, (float(np.exp(logs.mean())), interval))
        moved = self.kl[:, own] - self.kl[:, other]
        row |= estimate("kl", (float(np.median(moved)), stats.of_median(moved)))
        return row | {"L": WORDS[side_of(row["propagated_interval"], 1)], "KL": WORDS[side_of(row["kl_interval"], 0)]}

    def level(self, name: str, budget: str) -> dict[str, Any]:
        """Return a method's own numbers at a share of bytes."""
        own, first = (self.places[one, budget] for one in (name, EVICTED[0]))
        over = {kind: float(np.exp((np.log(sums[:, own]) - np.log(sums[:, first])).mean()))
                for kind, sums in self.sums.items()}  # fmt: skip
        kl = float(np.median(self.kl[:, own]))
        return {"method": name, "share": budget, "bytes": self.bytes[own], **over, "kl": kl}


def verdict(words: Sequence[str]) -> str:
    """Return what the words of all shares decide of a claim."""
    better, worse, most = words.count("better"), words.count("worse"), max(1, len(words) - 1)
    if better >= most and not worse:
        return "holds"
    return "reversed" if worse >= most and not better else "depends"


def draw(rows: Sequence[Mapping[str, Any]], budgets: Sequence[str]) -> Figure:
    """Draw the ratio of propagated sums of every claim, a panel a share of bytes, the claim's own side left of 1."""
    figure = common.page_figure(62)
    panels = figure.subplots(1, len(budgets), squeeze=False, sharey=True, sharex=True)[0]
    names = [f"{treatment} / {baseline}" for treatment, baseline in CLAIMS]
    for axes, budget in zip(panels, budgets, strict=True):
        own = [row for row in rows if row["share"] == budget]
        for kind, marker, offset in (("propagated", "o", 0.0), ("isolated", "x", 0.25)):
            bars = common.error_bars([row[kind] for row in own], [row[f"{kind}_interval"] for row in own])
            axes.errorbar([row[kind] for row in own], np.arange(len(own)) + offset, xerr=bars, fmt=marker,
                          markersize=3, linewidth=0.9, label=kind)  # fmt: skip
        common.plain_log(axes, "x")
        axes.axvline(1, color="0.35", linewidth=0.9)
        axes.set(title=f"{100 * float(budget):g} % of the bytes")
    panels[0].set_yticks(range(len(names)), names)
    panels[0].invert_yaxis()
    figure.supxlabel("Σ L over heads / Σ L of the baseline", fontsize="medium")
    figure.legend(*panels[0].get_legend_handles_labels(), loc="outside upper left", ncols=2)
    return figure


LEVELS = {"propagated": ("propagated L over SnapKV's", 3), "isolated": ("isolated L over SnapKV's", 3),
          "kl": ("KL, nat", 4), "bytes": ("bytes over the full cache's", 4)}  # fmt: skip
"""Number of a method -> its name in a table, and its digits."""
COMPARED = {"propagated": ("propagated", 2, "L"), "kl": ("KL", 4, "KL"), "isolated": ("isolated", 2, None)}
"""Number of a comparison -> its name in a table, its digits, and the key of its word."""


def tables(
    levels: Sequence[Mapping[str, Any]], rows: Sequence[Mapping[str, Any]], n: int,
    decide: Callable[[Sequence[str]], str] = verdict,
) -> Iterator[common.Table]:  # fmt: skip
    """Return the tables: methods by number and share, then claims by number and share, with what is decided."""
    budgets = list(dict.fromkeys(row["share"] for row in rows))
    columns = [f"{100 * float(budget):g} %" for budget in budgets]
    lines = [
        [name, told, *(f"{row[number]:.{digits}f}" for row in levels if row["method"] == name)]
        for number, (told, digits) in LEVELS.items()
        for name in dict.fromkeys(row["method"] for row in levels)
    ]
    yield f"Methods at shares of the bytes, n = {n}: means over prompts, geometric of ratios; KL: median", [
        "cache", "number", *columns,
    ], lines  # fmt: skip
    lines = []
    for claim in dict.fromkeys((row["treatment"], row["baseline"]) for row in rows):
        own = [row for row in rows if (row["treatment"], row["baseline"]) == claim]
        for number, (told, digits, word) in COMPARED.items():
            cells = [interval_text(row[number], row[f"{number}_interval"], digits) for row in own]
            cells = [f"{cell} {row[word]}" if word else cell for cell, row in zip(cells, own, strict=True)]
            decided = decide([row[word] for row in own]) if word else ""
            lines.append([" < ".join(claim), told, *cells, decided])
    yield f"Claims, n = {n}: ratios of L and differences in KL, with 95 % intervals over prompts", [
        "claim", "number", *columns, "claim",
    ], lines  # fmt: skip


def study(asked: argparse.Namespace) -> None:
    """Measure or read the trace; print the tables, write document and picture."""
    configs = [] if asked.trace else configurations(asked)
    trace = common.read_or_measure(asked, configs, steps=STEPS)
    numbers = Numbers(trace)
    levels = [numbers.level(name, budget) for budget in numbers.budgets for name in (*EVICTED, *METHODS)]
    rows = [numbers.compare(*claim, budget) for claim in CLAIMS for budget in numbers.budgets]
    for title, heads, lines in tables(levels, rows, int(trace.ok.sum())):
        print(f"\n{title}\n\n{common.markdown(heads, lines)}")
    verdicts = {}
    for treatment, baseline in CLAIMS:
        own = [row for row in rows if (row["treatment"], row["baseline"]) == (treatment, baseline)]
        verdicts[f"{treatment} < {baseline}"] = {one: verdict([row[one] for row in own]) for one in ("L", "KL")}
    document = {**common.trace_summary(trace), "levels": levels, "claims": rows, "verdicts": verdicts}
    common.save(asked, document, draw(rows, numbers.budgets))


if __name__ == "__main__":
    common.main(study, common.options(__doc__ or ""))
