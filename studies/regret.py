"""How far each method is from the best kept set, and what makes the distance.

What is asked. Of one head and one size there is a kept set that perturbs its output least (isolated L1). How much more
does a method's own set perturb, and is that its criterion, or that nobody knows the query that will decode?

How it is decided. Two searches check each other. On the prompt, entries of the best given set are exchanged until no
exchange of two helps: the best *known* set. On a prefix of 64 tokens (the first one, and 63 of the prompt's middle)
with 16 kept, integer programs find the best set there is and prove it; a head whose proof does not close in time keeps
its lower bound, and is never called optimal. L(method) over L(best) is a product of three factors, each the change of
one thing: *form* (pooling and stages, over Top-k of the window's unpooled mean A, of two-stage A ν), *query* (that over
Top-k of the realised one, which hindsight knows) and *criterion* (that over the best set). In another order the same
factor would be shared out otherwise; where the best set is not proven, the factor and its last part are lower bounds.
Factors are geometric means over heads, then over samples; heads whose best set loses nothing but rounding are left out.
Controls: `random`, and the sets that know the query, which no eviction can be asked to reach.

    python studies/regret.py --length 1000 --budget 128
    python studies/regret.py runs/studies/regret/regret.jsonl

What is left: regret.jsonl (the searches, a line per prompt), regret.json, regret.png.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import cycle, pairwise
from pathlib import Path
from typing import Any

import numpy as np
from common import interval_text, load_model, main, number_text, options, page_figure, plain_log, prompts, save, show
from matplotlib.figure import Figure
from numpy.typing import NDArray

import perturbkv as pk

Floats = NDArray[np.float64]
Row = Mapping[str, Any]
METHODS = ("attention", "attention-unpooled", "two-stage", "random")
BY_ATTENTION = ("attention", "attention-unpooled", "two-stage-uniform", "hindsight-attention")
BY_VALUES = ("two-stage", "hindsight")
QUERY_KNOWN = ("hindsight-attention", "hindsight")
"""Selections that know the query."""
FACTORS = ("factor", "form", "query", "criterion")
ROUNDING = 1e-9
"""Share of L below which a difference is rounding."""
FARTHEST = 1000.0
"""Largest factor on the picture's axis; greater ones are drawn there."""

intervals, ratio = pk.stats.intervals, pk.stats.arithmetic.ratio
NEVER_BELOW = replace(intervals.RATIO, limits=(1, np.inf))
"""L over that of the best set known: never below 1."""


@dataclass(frozen=True)
class Searches:
    """Finished searches: the run's configurations, an object per prompt with its heads, and how was searched."""

    configs: tuple[pk.EvictionConfig, ...]
    rows: Sequence[Row]
    settings: Mapping[str, Any]


def arguments() -> argparse.ArgumentParser:
    """Return the parser of this study's options."""
    parser = options(__doc__ or "")
    parser.add_argument("--method", action="append", help=f"a selection; may be repeated [{', '.join(METHODS)}]")
    parser.add_argument("--heads", type=int, default=64, help="heads searched of each prompt [%(default)s]")
    parser.add_argument("--proven", type=int, default=8, help="heads of each prefix, by integer programs [%(default)s]")
    parser.add_argument("--seconds", type=float, default=60.0, help="at most, per head and search [%(default)s]")
    return parser


def study(asked: argparse.Namespace) -> None:
    """Search, or read finished searches; print and write how far each method is from the best sets."""
    searches = read(Path(asked.trace[0])) if asked.trace else search(asked)
    parts = searched_parts(searches)
    samples = [str(row["sample"]) for row in searches.rows]
    print_tables(parts, len(samples))
    save(asked, {"samples": samples, "parts": parts, "searches": searches.settings}, draw(searches, parts))


def search(asked: argparse.Namespace) -> Searches:
    """Run the searches that the output folder lacks, and return all that were asked for."""
    model = load_model(asked)
    configs = add_references(pk.grid(asked.budget or [128], selection=asked.method or METHODS))
    few = {"heads": 4, "proven": 1, "seconds": 10.0} if asked.short else {}
    asked.written.append(asked.output / "regret.jsonl")
    found = pk.search_kept_sets(
        model, prompts(asked, model), configs, path=asked.written[-1], seed=asked.seed,
        **{"heads": asked.heads, "proven": asked.proven, "seconds": asked.seconds, **few},
    )  # fmt: skip
    return Searches(found.run.configs, found.rows, found.settings)


def read(path: Path) -> Searches:
    """Return finished searches. Raises PerturbkvError for a file that holds none."""
    try:
        header, *rows = map(json.loads, path.read_text().splitlines())
        run = pk.RunConfig.from_json(json.dumps(header["run"]))
        return Searches(run.configs, rows, header["searches"])
    except (OSError, ValueError, KeyError, TypeError):
        raise pk.PerturbkvError(
            f"expected a regret.jsonl of finished searches at {path}, got another file or none"
        ) from None


def add_references(configs: Sequence[pk.EvictionConfig]) -> tuple[pk.EvictionConfig, ...]:
    """Return the configurations by budget, each group followed by its forms without pooling and with a known query."""
    ordered: list[pk.EvictionConfig] = []
    for group in by_budget(configs):
        references = [reference(config) for reference in (unpooled_config, known_query_config) for config in group]
        ordered += [*group, *(config for config in references if config is not None)]
    return tuple(dict.fromkeys(ordered))


def by_budget(configs: Sequence[pk.EvictionConfig]) -> list[list[pk.EvictionConfig]]:
    """Return the configurations in groups of one budget, in their order."""
    budgets = dict.fromkeys(config.budget for config in configs)
    return [[config for config in configs if config.budget == budget] for budget in budgets]


def unpooled_config(config: pk.EvictionConfig) -> pk.EvictionConfig | None:
    """Return what ranks by the window's mean A, or A ν, without pooling and stages; None for a method of neither."""
    name = config.selection.name
    if not is_ranked_by_attention(config) or name in QUERY_KNOWN:
        return config if is_ranked_by_attention(config) else None
    choices: dict[str, Any] = {"selection": "attention-unpooled", "policy": config.policy.name}
    if name in BY_VALUES:
        choices = {"selection": f"two-stage(alpha=0{norm_option(config)})"}
    return replace(config, **choices)


def known_query_config(config: pk.EvictionConfig) -> pk.EvictionConfig | None:
    """Return the configuration that ranks by the realised A, or A ν, as the method estimates; None where by neither."""
    if not is_ranked_by_attention(config):
        return None
    by_values = f"hindsight({norm_option(config).removeprefix(', ')})" if norm_option(config) else "hindsight"
    selection: Any = by_values if config.selection.name in BY_VALUES else "hindsight-attention"
    policy: Any = config.policy.name
    return replace(config, selection=selection, policy=policy)


def is_ranked_by_attention(config: pk.EvictionConfig) -> bool:
    """Return whether a method ranks by the window's attention, or by that times value norms."""
    return config.policy.name == "snapkv" and config.selection.name in (*BY_ATTENTION, *BY_VALUES)


def norm_option(config: pk.EvictionConfig) -> str:
    """Return the option of a selection that says which norm it ranks by; empty for L1."""
    return ", norm=l2" if config.euclidean else ""


def searched_parts(searches: Searches) -> list[dict[str, Any]]:
    """Return the numbers of whole prompts by budget, then those of the prefixes, where heads were searched."""
    groups = by_budget(searches.configs)
    parts = [part_summary(searches.rows, "prompt", str(group[0].budget), group) for group in groups]
    budget, window = pk.Budget(searches.settings["budget"]), searches.settings["window"]
    prefix = [replace(config, budget=budget, window=window) for config in groups[0]]
    parts.append(part_summary(searches.rows, "prefix", str(budget), prefix))
    return [part for part in parts if part["heads"]]


def part_summary(
    samples: Sequence[Row], part: str, budget: str, configs: Sequence[pk.EvictionConfig]
) -> dict[str, Any]:
    """Return the summary of one budget's part: how certain its best sets are, each method's distance from them."""
    by_sample = [rows_of(sample, part, budget) for sample in samples]
    every = [row for rows in by_sample for row in rows]
    tried = [row for row in every if row["lower"] is not None]
    closed = [row for row in tried if row["closed"]]
    layers = {
        "methods": by_sample,
        "first_layer": [[row for row in rows if not row["layer"]] for rows in by_sample],
        "other_layers": [[row for row in rows if row["layer"]] for rows in by_sample],
    }
    gaps = {name: distances(configs, [losses(rows, len(configs)) for rows in one]) for name, one in layers.items()}
    return {
        "part": part,
        "budget": budget,
        "heads": len(every),
        "left_out": len(every) - sum(losses(rows, len(configs))[1].size for rows in by_sample),
        "settled": sum(bool(row["settled"]) for row in every),
        "tried": len(tried),
        "closed": len(closed),
        "at_optimum": sum(row["improved"] <= row["best"] * (1 + ROUNDING) for row in closed),
        "gap": max((1 - row["lower"] / row["best"] for row in tried if not row["closed"]), default=0.0),
        **gaps,
    }


def rows_of(sample: Row, part: str, budget: str) -> list[Row]:
    """Return a sample's heads of one part and budget."""
    return [row for row in sample["heads"] if (row["part"], row["budget"]) == (part, budget)]


def losses(rows: Sequence[Row], methods: int) -> tuple[Floats, Floats]:
    """Return (method, head) L of each method's set and (head,) L of the best one, of the heads that lose something."""
    values = np.array([row["perturbation"] for row in rows], dtype=np.float64).reshape(-1, methods).T
    best = np.array([row["best"] for row in rows], dtype=np.float64)
    lossy = best > ROUNDING * values.max(axis=0, initial=0)
    return values[:, lossy], best[lossy]


def distances(configs: Sequence[pk.EvictionConfig], samples: Sequence[tuple[Floats, Floats]]) -> list[dict[str, Any]]:
    """Return every method's distance from the best sets, over the samples that have heads; empty without any."""
    known = [(methods, best) for methods, best in samples if best.size]
    return [distance(configs, index, known) for index in range(len(configs))] if known else []


def distance(
    configs: Sequence[pk.EvictionConfig], index: int, samples: Sequence[tuple[Floats, Floats]]
) -> dict[str, Any]:
    """Return one method's L over that of the best sets: sums, medians, and the factor with its three parts."""
    own = [(methods[index], best) for methods, best in samples]
    sums = np.array([(values.sum(), best.sum()) for values, best in own])
    medians = np.array([np.median(values / best) for values, best in own])
    links = [configs[index], unpooled_config(configs[index]), known_query_config(configs[index])]
    chain = [configs.index(link) for link in links if link is not None] if {*links} <= {*configs} else []
    logs = [log_factors([*(methods[place] for place in chain), best]) for methods, best in samples]
    parts = np.array(logs) if chain else np.full((len(samples), 3), np.nan)
    return {
        "config": configs[index],
        "heads": sum(best.size for _, best in own),
        "samples": len(own),
        "sum_ratio": float(ratio(*sums.sum(axis=0))),
        "sum_ratio_interval": intervals.of_statistic(lambda weights: ratio(*(weights @ sums).T), len(own), NEVER_BELOW),
        "median_ratio": float(np.median(medians)),
        "median_ratio_interval": intervals.of_median(medians),
        "half": pk.stats.arithmetic.half_share(np.concatenate([values for values, _ in own])),
        "factor": geometric_mean(np.array([log_factors(one)[0] for one in own]), NEVER_BELOW),
        "form": geometric_mean(parts[:, 0]),
        "query": geometric_mean(parts[:, 1]),
        "criterion": geometric_mean(parts[:, 2], NEVER_BELOW),
    }


def log_factors(values: Sequence[Floats]) -> list[float]:
    """Return the mean over heads of log(L / next L) along a chain of (head,) L."""
    return [float(np.log(above / below).mean()) for above, below in pairwise(values)]


def geometric_mean(logs: Floats, kind: Any = intervals.RATIO) -> dict[str, Any]:
    """Return the factor over samples from its logarithms, with its interval; NaN where it is not defined."""
    if np.isnan(logs).any():
        return {"value": float("nan"), "interval": None}
    ends = intervals.of_statistic(lambda weights: np.exp(weights @ logs), len(logs), kind)
    return {"value": float(np.exp(logs.mean())), "interval": ends}


def part_name(part: Mapping[str, Any]) -> str:
    """Return 'prompts, b=128' or 'prefixes, b=16'."""
    return f"{'prefixes' if part['part'] == 'prefix' else 'prompts'}, b={part['budget']}"


def print_tables(parts: Sequence[Mapping[str, Any]], samples: int) -> None:
    """Print each part's table, how certain its best sets are, and a line of conclusion."""
    for part in parts:
        tables = [("all layers", "methods")]
        if part["first_layer"] and part["other_layers"] and part["part"] == "prompt":
            tables += [("first layer", "first_layer"), ("other layers", "other_layers")]
        for name, key in tables:
            if part[key]:
                show(f"{part_name(part)}, {name}: L over that of the best known set, {part[key][0]['heads']} heads",
                     [table_line(one) for one in part[key]])  # fmt: skip
        print(f"{part['heads']} heads searched, no swap helps in {part['settled']}; {part['left_out']} left out")
        if part["tried"]:
            print(f"the best set is proven in {part['closed']} of {part['tried']}, where swaps alone had reached it in "
                  f"{part['at_optimum']}; elsewhere its bound is up to {part['gap']:.1%} lower")  # fmt: skip
    told = [one for part in parts[:1] for one in part["methods"] if one["config"].selection.name not in QUERY_KNOWN]
    factors = ", ".join(f"{one['config'].selection} {interval_text(*one['factor'].values())}" for one in told)
    print(f"\nL over that of the best known set: {factors or 'no head loses more than rounding'} (n = {samples}).")


def table_line(one: Mapping[str, Any]) -> dict[str, str]:
    """Return a method as a line of a table."""
    return {
        "method": str(one["config"].selection),
        "Σ": number_text(one, "sum_ratio"),
        "median head": number_text(one, "median_ratio"),
        "half of Σ in": f"{one['half']:.0%} of heads",
        **{name: interval_text(*one[name].values()) for name in FACTORS},
    }


def draw(searches: Searches, parts: Sequence[Mapping[str, Any]]) -> Figure:
    """Draw a panel per part, the share of heads within a factor of the best known set; dashed: the query is known."""
    figure = page_figure(80)
    panels = figure.subplots(1, max(1, len(parts)), squeeze=False, sharey=True)[0]
    configs = by_budget(searches.configs)[0]
    for panel, part in zip(panels, parts, strict=False):
        rows = [row for sample in searches.rows for row in rows_of(sample, part["part"], part["budget"])]
        methods, best = losses(rows, len(configs))
        widths = cycle((2.4, 1.0))
        for config, values in zip(configs, methods, strict=True):
            factors = np.sort(np.minimum(values / best, FARTHEST))
            share = np.arange(1, len(factors) + 1) / max(1, len(factors))
            known = config.selection.name in QUERY_KNOWN
            panel.plot(np.r_[1, factors], np.r_[0, share], drawstyle="steps-post", label=str(config.selection),
                       linestyle="--" if known else "-", linewidth=next(widths) if known else 1.2)  # fmt: skip
        plain_log(panel, "x")
        title = f"{part_name(part)}: n = {len(best)} heads"
        panel.set(ylim=(0, 1.02), xlabel="L over that of the best set known", title=title)
        panel.grid(visible=True)
    panels[0].set_ylabel("share of heads within")
    figure.legend(*panels[0].get_legend_handles_labels(), loc="outside upper left", ncols=4)
    return figure


if __name__ == "__main__":
    main(study, arguments())
