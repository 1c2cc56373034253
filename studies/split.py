"""Each head's loss split into how much attention goes and how unlike the rest it is; what a stored mean wins back.

A head's isolated L1 is L = (1 − S) · D: 1 − S is the attention on evicted entries, D = ‖μ_gone − μ_kept‖₁ how far their
mean value is from that of the kept ones (METHOD, the split of an evicted output). Both follow from the stored S and L.

How it is decided:

- *What tells heads apart*: Var(log L) over the heads of a prompt is Var(log(1 − S)) + Var(log D) + 2 Cov, each as a
  share, mean over prompts. "By mass" counts half of 2 Cov. Of all layers, and without the first, in which more goes.
- *By what a method wins*: ratios of L, 1 − S and D over the first of `--compare`, at the same budget: geometric means
  over heads, then over prompts. L's is the product of the others. Heads that keep the same entries in both count as 1.
- *Corrections*: the first two of `--compare` with one entry in place of what went, over the same uncorrected: its value
  is the mean of what went, its weight as predicted. `corrected-oracle` knows the weight: a control, which tells what
  predicting costs.
- Controls: `random`, which chooses neither by attention nor by values, and `two-stage-uniform`, which is `two-stage`
  without the value norms. Left out are heads of which nothing goes, or too little to tell from rounding.

    python studies/split.py --dataset needle --length 1000 --samples 8 --budget 128 --budget 0.1
    python studies/split.py TRACE --compare two-stage-uniform,two-stage
"""

from __future__ import annotations

import argparse
import textwrap
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import common
import numpy as np
from common import (
    Estimated,
    Floats,
    choices_except,
    compare,
    estimate,
    number_text,
    percent_text,
    ratio_of_sums,
    variable,
)
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from numpy.typing import NDArray

import perturbkv as pk

COMPARED = "attention,two-stage,attention-unpooled,two-stage-uniform,random"
CORRECTIONS = ("corrected", "corrected(mass=linear)", "corrected-oracle")
LEAST_MASS = 1e-12
"""Values of 1 − S below this are rounding errors of a sum of attention: L / (1 − S) would be noise."""
EQUAL = 1e-9
"""A head is equal in both configurations where the logarithm of its ratio is at most this: that is rounding."""
SIGNED = replace(pk.stats.intervals.RATIO, log=False, limits=(-np.inf, np.inf))
"""A part of a variance, which can be negative: as uncertain as a ratio, on the plain scale."""
FACTORS = ("loss", "mass", "difference")


@dataclass(frozen=True)
class Logs:
    """Logarithms of L, 1 − S and D of one configuration, (sample, layer, head) each; NaN where L is unknown."""

    loss: Floats
    mass: Floats

    @property
    def difference(self) -> Floats:
        """(sample, layer, head) log D."""
        return np.asarray(self.loss - self.mass)

    @property
    def known(self) -> NDArray[np.bool_]:
        """(sample, layer, head) True where L is known."""
        return ~np.isnan(self.loss)

    def of_layers(self, layers: slice) -> Logs:
        """Return the logarithms of some layers alone."""
        return Logs(self.loss[:, layers], self.mass[:, layers])


def logs_of(trace: pk.Trace, config: pk.EvictionConfig, step: int) -> Logs:
    """Return the logarithms of a configuration; NaN for heads whose 1 − S is rounding, or L below its noise floor."""
    index = trace.config_index(config.label())
    loss, floor = (
        variable(trace, "perturbation_isolated", step)[:, index],
        variable(trace, "noise_floor_isolated", step),
    )
    mass = 1 - variable(trace, "retained_mass", step)[:, index]
    known = (mass > LEAST_MASS) & (loss > floor)
    return Logs(*(np.log(np.where(known, values, np.nan)) for values in (loss, mass)))


def log_variance_parts(logs: Logs) -> dict[str, Any]:
    """Return the parts of the variance of log L over heads, mean over the samples with two heads that differ."""
    intervals = pk.stats.intervals
    first, second, twice = np.array([_variances(*pair) for pair in zip(logs.mass, logs.difference, strict=True)]).T
    whole = first + second + twice
    whole = np.where(whole > 0, whole, np.nan)
    product = np.sqrt(first * second)
    found = {
        "deviation": (np.sqrt(whole), intervals.RATIO),
        "mass": (first / whole, intervals.RATIO),
        "difference": (second / whole, intervals.RATIO),
        "both": (twice / whole, SIGNED),
        "by_mass": ((first + twice / 2) / whole, SIGNED),
        "correlation": (twice / 2 / np.where(product > EQUAL, product, np.nan), intervals.CORRELATION),
    }
    means = {name: intervals.estimate_mean(values, kind) for name, (values, kind) in found.items()}
    numbers = {
        key: one for name, mean in means.items() for key, one in estimate(name, (mean.value, mean.interval)).items()
    }
    heads = int(logs.known.sum())
    return {**numbers, "heads": heads, "left_out": logs.known.size - heads}


def _variances(mass: Floats, difference: Floats) -> tuple[float, float, float]:
    """Return Var(log(1 − S)), Var(log D) and 2 Cov over one sample's heads; NaN of fewer than two."""
    known = ~np.isnan(mass)
    if known.sum() < 2:
        return np.nan, np.nan, np.nan
    (first, shared), (_, second) = np.cov(mass[known], difference[known], bias=True)
    return float(first), float(second), float(2 * shared)


def treatment_ratios(
    trace: pk.Trace, baseline: pk.EvictionConfig, treatment: pk.EvictionConfig, logs: Mapping[str, Logs]
) -> dict[str, Any]:
    """Return the ratios of L, 1 − S and D, treatment over baseline, and the shares of heads in which each falls."""
    first, second = logs[baseline.label()], logs[treatment.label()]
    same, known = equal_kept_sets(trace, baseline, treatment), first.known & second.known
    ratios = {name: np.where(known, np.where(same, 0, getattr(second, name) - getattr(first, name)), np.nan)
              for name in FACTORS}  # fmt: skip
    document: dict[str, Any] = {"baseline": baseline.label(), "treatment": treatment.label()}
    for name, each in ratios.items():
        document |= estimate(name, _geometric_mean(each))
    for name in ("mass", "difference"):
        document |= estimate(f"{name}_falls", _falling_share(ratios[name], known))
    heads = int(known.sum())
    return {**document, "heads": heads, "left_out": known.size - heads}


def equal_kept_sets(trace: pk.Trace, baseline: pk.EvictionConfig, treatment: pk.EvictionConfig) -> NDArray[np.bool_]:
    """Return (sample, layer, head) True where two uncorrected configurations keep a head's same entries.

    False where one reads pages or prefills along lines, unless nothing is evicted: a trace holds the pages of the full
    run alone.
    """
    first, second = (trace.config_index(config.label()) for config in (baseline, treatment))
    whole = trace.arrays["evicted"][trace.ok][:, first] == 0
    return np.asarray(trace.same_kept(first, second) & (whole | (baseline.evicts and treatment.evicts))[:, None, None])


def _sample_means(values: Floats) -> Floats:
    """Return (sample,) means over heads without NaN, of the samples that have a number."""
    flat = values.reshape(len(values), -1)
    flat = flat[~np.isnan(flat).all(axis=1)]
    return np.asarray(np.nanmean(flat, axis=1))


def _geometric_mean(logs: Floats) -> Estimated:
    """Return the geometric mean over heads, then samples, from logarithms (sample, …), ignoring NaN; NaN if all are."""
    each = _sample_means(logs)
    if not len(each):
        return np.nan, None
    kind = pk.stats.intervals.RATIO
    return float(np.exp(each.mean())), pk.stats.intervals.of_statistic(lambda one: np.exp(one @ each), len(each), kind)


def _falling_share(logs: Floats, known: NDArray[np.bool_]) -> Estimated:
    """Return the mean over samples of the share of `known` heads with a negative log ratio; NaN without a known one."""
    each = _sample_means(np.where(known, logs < -EQUAL, np.nan))
    if not len(each):
        return np.nan, None
    kind = pk.stats.intervals.share_kind(logs[0].size)
    return float(each.mean()), pk.stats.intervals.of_mean(each, kind)


def correction_row(
    trace: pk.Trace, plain: pk.EvictionConfig, corrected: pk.EvictionConfig, oracle: pk.EvictionConfig | None, step: int
) -> dict[str, Any]:
    """Return a corrected configuration's ratios over the same one uncorrected, and over the oracle, if any."""
    index, base = (trace.config_index(config.label()) for config in (corrected, plain))
    whole = trace.arrays["evicted"][trace.ok][:, base] == 0  # nothing goes: both are the full cache but for rounding

    def sides(name: str, control: int = base) -> tuple[Floats, Floats]:
        """Return a variable of the control and of the corrected configuration, equal where nothing goes."""
        values = variable(trace, name, step)
        first, second = values[:, control], values[:, index]
        return first, np.where(whole.reshape(-1, *[1] * (first.ndim - 1)), first, second)

    flagged = common.sigma_at_most_half(trace, step)[index]
    kinds = {kind: sides(f"perturbation_{kind}") for kind in ("isolated", "propagated")}
    floors = {"isolated": "noise_floor_isolated", "propagated": "noise_floor"}
    intervals, ratio, drift = pk.stats.intervals, pk.stats.arithmetic.ratio, sides("hidden_drift_l1")
    first, second = (variable(trace, "logit_kl", step)[:, place] for place in (base, index))
    over_layers = ratio(drift[1].mean(axis=0), drift[0].mean(axis=0))
    band = intervals.of_statistics(lambda one: ratio(one @ drift[1], one @ drift[0]), len(first), intervals.RATIO)
    falls = common.signs_beyond_noise(first, second, variable(trace, "logit_kl_noise_floor", step)) == 1
    document = {
        "name": str(corrected.correction), "treatment": corrected.label(),
        **{kind: compare(*pair, variable(trace, floors[kind], step), variable(trace, "output_norm", step), flagged)
           for kind, pair in kinds.items()},
        **estimate("drift_ratio", (over_layers[-1], None if band is None else band.at(-1))),
        **next_token_kl(trace, corrected, step),
        **estimate("kl_ratio", _ratio_of_means(first, second)),
        **estimate("kl_falls", (float(falls.mean()), intervals.of_share(falls))),
        "isolated_ratio_by_layer": ratio(*(part.sum(axis=(0, 2)) for part in kinds["isolated"][::-1])),
        **estimate("drift_ratio_by_layer", (over_layers, band)),
    }  # fmt: skip
    if oracle is not None:
        known = trace.config_index(oracle.label())
        over = {kind: ratio_of_sums(*sides(f"perturbation_{kind}", known)) for kind in kinds}
        document["over_oracle"] = {key: one for kind in over for key, one in estimate(kind, over[kind]).items()}
    return document


def _ratio_of_means(first: Floats, second: Floats) -> Estimated:
    """Return the mean of the second over that of the first, (sample,) each, with its interval."""
    ratio = pk.stats.arithmetic.ratio
    return float(ratio(second.mean(), first.mean())), pk.stats.intervals.of_ratio(second, first)


def next_token_kl(trace: pk.Trace, config: pk.EvictionConfig, step: int) -> dict[str, Any]:
    """Return the median over samples of KL(full ‖ evicted) of the next token, in nat."""
    kl = variable(trace, "logit_kl", step)[:, trace.config_index(config.label())]
    return estimate("kl_median", (float(np.median(kl)), pk.stats.intervals.of_median(kl)))


def sides_of(trace: pk.Trace, names: Sequence[str]) -> list[list[pk.EvictionConfig]]:
    """Return each side's uncorrected configurations. Raises PerturbkvError for a side without any."""
    alone = [config for config in trace.run.configs if config.only_evicts]
    found = [[config for config in alone if common.matches(config, name)] for name in names]
    for name, configs in zip(names, found, strict=True):
        if not configs:
            raise pk.PerturbkvError(
                f"expected uncorrected configurations of '{name}', got {'; '.join(trace.run.labels())}"
            )
    return found


def pairs_of(sides: Sequence[Sequence[pk.EvictionConfig]]) -> list[tuple[pk.EvictionConfig, pk.EvictionConfig]]:
    """Return the first side's configurations with those of the others that share all but the selection.

    Of several first ones with another α, that with the same α is taken.
    """
    pairs = []
    for treatment in (config for later in sides[1:] for config in later):
        near = [one for one in sides[0] if one != treatment and common.differ_in_selection(one, treatment)]
        alike = [one for one in near if one.selection.options.get("alpha") == treatment.selection.options.get("alpha")]
        pairs += [(one, treatment) for one in (alike or near)[:1]]
    return pairs


def head_means(logs: Logs, trace: pk.Trace) -> list[dict[str, Any]]:
    """Return every head's geometric means of L, 1 − S and D over the samples in which L is known."""
    counts = logs.known.sum(axis=0)
    means = {name: np.nansum(getattr(logs, name), axis=0) / np.maximum(counts, 1) for name in FACTORS}
    return [
        {"layer": trace.layers[layer], "head": head, "samples": counts[layer, head],
         **{name: np.exp(each[layer, head]) if counts[layer, head] else None for name, each in means.items()}}
        for layer, head in np.ndindex(counts.shape)
    ]  # fmt: skip


def geometric_means(logs: Logs) -> dict[str, float]:
    """Return the geometric means of L, 1 − S and D over heads, then samples."""
    return {name: _geometric_mean(getattr(logs, name))[0] for name in FACTORS}


def draw(document: Mapping[str, Any]) -> Figure:
    """Draw 1 − S and D of every head, a panel per configuration, with lines of equal L; and what corrections leave."""
    spreads = document["spreads"]
    corrected = [row for setting in document["corrections"] for row in setting["rows"]]
    lines = -(-len(spreads) // 3)
    heights = [44 * lines + 5, *([6 * len(corrected) + 18] if corrected else [])]
    figure = common.page_figure(sum(heights))
    parts = figure.subfigures(len(heights), 1, height_ratios=heights, squeeze=False)[:, 0]
    for index, one in enumerate(spreads, 1):
        axes = parts[0].add_subplot(lines, 3, index)
        known = [(head["mass"], head["difference"]) for head in one["heads_of_layers"] if head["samples"]]
        axes.plot(*np.array(known).reshape(-1, 2).T, ".", markersize=2)
        for name in ("x", "y"):
            common.plain_log(axes, name, steps=(1,))
        _draw_equal_loss(axes)
        axes.set_title(textwrap.fill(one["config"], 32), fontsize=7)
    parts[0].supxlabel("1 − S: attention that goes", fontsize=8)
    parts[0].supylabel("D = ‖μ_gone − μ_kept‖₁", fontsize=8)
    if corrected:
        axes, places = parts[1].add_subplot(), np.arange(len(corrected))
        for kind, colour, shift in (("isolated", "C0", 0.12), ("propagated", "C1", -0.12)):
            values = [row[kind]["sum_ratio"] for row in corrected]
            ends = common.error_bars(values, [row[kind]["sum_ratio_interval"] for row in corrected])
            axes.errorbar(values, places + shift, xerr=ends, fmt="o", color=colour, label=kind, markersize=3)
        axes.axvline(1, color="0.6", linewidth=0.8)
        axes.set_yticks(places, [row["treatment"] for row in corrected], fontsize=6)
        common.plain_log(axes, "x")
        axes.set_xlabel("Σ L over uncorrected")
        axes.legend()
    return figure


def _draw_equal_loss(axes: Axes) -> None:
    """Draw lines along which (1 − S) · D is a power of ten."""
    ends, (low, high) = np.array(axes.get_xlim()), axes.get_ylim()
    for power in range(int(np.floor(np.log10(ends[0] * low))), int(np.ceil(np.log10(ends[1] * high))) + 1):
        axes.plot(ends, 10.0**power / ends, color="0.85", linewidth=0.6, zorder=0)
    axes.set(xlim=ends, ylim=(low, high))


def share_text(row: Mapping[str, Any], name: str) -> str:
    """Return a share of a row in percent, with its interval."""
    return percent_text(row[name], row[f"{name}_interval"])


def print_tables(document: Mapping[str, Any]) -> None:
    """Print the tables and the conclusion."""
    common.show("shares of Var(log L) over heads", [_spread_row(one) for one in document["spreads"]])
    common.show("without the first layer", [_spread_row(one) for one in document["spreads_without_first_layer"]])
    common.show("geometric means over heads: 1 − S and D of the first layer, and of the others", [
        {"configuration": one["config"], **{f"{name}, {where}": one[where][name] for where in ("first layer", "others")
                                            for name in ("mass", "difference")}}
        for one in document["spreads"]
    ])  # fmt: skip
    if document["contests"]:
        common.show("treatment over baseline: L is (1 − S) times D", [
            {"treatment": one["treatment"], "over": one["baseline"], "L": number_text(one, "loss"),
             "1 − S": number_text(one, "mass"),
             "D": number_text(one, "difference"), "1 − S falls in": share_text(one, "mass_falls"),
             "D falls in": share_text(one, "difference_falls")}
            for one in document["contests"]
        ])  # fmt: skip
    for setting in document["corrections"]:
        kl = number_text(setting, "kl_median")
        common.show(f"over uncorrected {setting['baseline']}, whose median KL is {kl} nat", [
            {"correction": row["name"], "isolated": number_text(row["isolated"], "sum_ratio"),
             "propagated": number_text(row["propagated"], "sum_ratio"), "drift": number_text(row, "drift_ratio"),
             "KL falls in": share_text(row, "kl_falls"), "mean KL": number_text(row, "kl_ratio"),
             "isolated / oracle": number_text(row["over_oracle"], "isolated") if "over_oracle" in row else ""}
            for row in setting["rows"]
        ])  # fmt: skip
    sides = [common.side_of(one["by_mass_interval"], 0.5) for one in document["spreads"]]
    print(
        f"\nhow much goes explains more than half of what makes heads differ in {sides.count(1)} of {len(sides)} "
        f"configurations, less in {sides.count(-1)}; {sides.count(0)} are undecided"
    )


def _spread_row(one: Mapping[str, Any]) -> dict[str, Any]:
    """Return a configuration's parts of Var(log L) as a line of a table."""
    return {
        "configuration": one["config"], "sd of log L": number_text(one, "deviation"),
        "Var log(1 − S)": percent_text(one["mass"]), "Var log D": percent_text(one["difference"]),
        "2 Cov": percent_text(one["both"]), "by mass": share_text(one, "by_mass"), "left out": one["left_out"],
    }  # fmt: skip


def study(asked: argparse.Namespace) -> None:
    """Measure, split every head's loss, and write what was found."""
    names, step = asked.compare.split(",") if asked.compare else COMPARED.split(","), asked.step
    configs: Iterable[pk.EvictionConfig] = ()
    if not asked.trace:
        choices: dict[str, Any] = {
            "budget": asked.budget or (["128"] if asked.short else ["128", "0.1"]),
            "policy": asked.policy,
        }
        configs = dict.fromkeys([*pk.grid(selection=names, **choices),
                                 *pk.grid(selection=names[:2], correction=CORRECTIONS, **choices)])  # fmt: skip
    trace = common.read_or_measure(asked, configs, steps=max(asked.steps, step + 1))
    if not asked.compare:  # what the trace has
        names = list(dict.fromkeys(one.selection.name for one in trace.run.configs if one.only_evicts))
        names.sort(key=lambda name: name != "attention")
    lacking = [name for name, has in zip(trace.sample_ids, trace.measured[:, step], strict=True) if not has]
    if trace.ok.any() and {*lacking} - {*trace.failures}:
        trace = trace.sel(sample=[name for name in trace.sample_ids if name not in lacking])
    document = document_of(trace, names, step)
    print_tables(document)
    common.save(asked, document, draw(document))


def document_of(trace: pk.Trace, names: Sequence[str], step: int) -> dict[str, Any]:
    """Return the numbers of the sides called `names`, the baseline first. Raises PerturbkvError as `sides_of`."""
    sides = sides_of(trace, names)
    shown = [config for config in trace.run.configs if any(config in side for side in sides)]
    logs = {config.label(): logs_of(trace, config, step) for config in shown}
    layers = {"first layer": slice(0, 1), "others": slice(1, None)}
    return {
        "about": common.trace_summary(trace, step),
        "step": step,
        "spreads": [
            {"config": label, **log_variance_parts(one), "heads_of_layers": head_means(one, trace),
             **{name: geometric_means(one.of_layers(own)) for name, own in layers.items()}}
            for label, one in logs.items()
        ],
        "spreads_without_first_layer": [
            {"config": label, **log_variance_parts(one.of_layers(layers["others"]))} for label, one in logs.items()
        ],
        "contests": [treatment_ratios(trace, *pair, logs) for pair in pairs_of(sides)],
        "corrections": corrections_of(trace, shown, step),
    }  # fmt: skip


def corrections_of(trace: pk.Trace, plain: Sequence[pk.EvictionConfig], step: int) -> list[dict[str, Any]]:
    """Return the corrections of each uncorrected configuration that has any, the oracle's last."""
    settings = []
    for config in plain:
        alike = choices_except(config, "correction")
        own = [one for one in trace.run.configs if one.corrected and choices_except(one, "correction") == alike]
        own.sort(key=lambda one: one.correction.name == "corrected-oracle")
        oracle = own[-1] if own and own[-1].correction.name == "corrected-oracle" else None
        if own:
            rows = [correction_row(trace, config, one, oracle if one != oracle else None, step) for one in own]
            settings.append({"baseline": config.label(), **next_token_kl(trace, config, step), "rows": rows})
    return settings


if __name__ == "__main__":
    parser = common.options(__doc__ or "")
    parser.add_argument("--compare", metavar="NAMES", help=f"selections, the baseline first [{COMPARED}]")
    parser.add_argument("--policy", default="snapkv", help="[%(default)s]")
    parser.add_argument("--steps", type=int, default=1, help="decode steps to measure [%(default)s]")
    parser.add_argument("--step", type=int, default=0, help="the decode step that is looked at [%(default)s]")
    common.main(study, parser)
