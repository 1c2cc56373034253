"""Whether eviction hits the same heads in other prompts, data sets, lengths, seeds, decode steps and models.

Heads are ranked in every prompt by L / ‖o_h‖₁ (L1, isolated and propagated, step 0), and by what a selection gains: the
baseline's relative L1 less its own. A trace's profile is its prompts' mean ranks: a more perturbed one counts no more.

How it is decided:

- *Within a trace*: reliability is Spearman's ρ between the profiles of two halves of the prompts, mean over all splits
  (of more than 200 as many are drawn), brought to all prompts by Spearman and Brown's 2r / (1 + r). Beside it the mean
  ρ of two single prompts, and ρ of step 0 with the last third of the steps.
- *Between two traces of one model*: ρ of their profiles, as measured and over the root of both reliabilities
  (Spearman's correction for attenuation, 1904; by chance it exceeds 1); and how much of the most perturbed tenth of the
  heads they share. Control: random orders share a tenth, and in 97.5 % of draws at most `chance_most`.
- *Between two models* heads cannot be matched: ρ of the profiles over relative depth, layer / (layers − 1), brought to
  20 points by lines; points before the first measured layer and behind the last have no value.
- Intervals are over prompts (a jackknife), of fewer than five ranges of single splits, pairs or prompts. Traces of one
  data set and seed leave a prompt out of both at once, as it may be the same. How often intervals hold the truth:
  `tests/studies/test_rank_correlations_are_covered.py`.

Without traces it measures two, of one data set and two seeds:

    python studies/stability.py --dataset needle --length 1000 --samples 8 --budget 128
    python studies/stability.py TRACE TRACE … --budget 128 --selection two-stage --baseline attention
"""

from __future__ import annotations

import argparse
import contextlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import combinations
from math import ceil, comb
from typing import Any

import common
import numpy as np
from common import Floats, interval_text, percent_text, variable
from matplotlib.figure import Figure
from numpy.typing import NDArray
from scipy import stats

import perturbkv as pk

KINDS = ("propagated", "isolated")
MOST_SPLITS, SPLITS_SEED = 200, 0
WORST = 0.1
"""Two traces are asked for the same heads among this share of them, the most perturbed ones."""
GRID = np.linspace(0, 1, 20)
CORRECTED = replace(pk.stats.intervals.CORRELATION, limits=(-np.inf, np.inf))
"""A correlation that was corrected may exceed 1 by chance."""
intervals, ratio, spearman = pk.stats.intervals, pk.stats.arithmetic.ratio, pk.stats.rank_correlation.spearman


def correlation_entry(value: Any, interval: Any = None) -> dict[str, Any]:
    """Return a rank correlation with its interval as an object of a document."""
    return {"value": float(value), "interval": interval}


@dataclass(frozen=True)
class HeadRanks:
    """The heads of one trace, ranked in each of its samples.

    Attributes:
        ranks: (sample, head) from 1, ties at their mean.
        reliability: split-half, of the mean ranks; NaN of one sample.
        without: (sample,) the reliability with each sample left out; NaN where one is left.
    """

    ranks: Floats
    reliability: float
    without: Floats

    @classmethod
    def of(cls, values: Floats) -> HeadRanks:
        """Rank the heads of each sample by (sample, …) values."""
        ranks = np.stack([pk.stats.rank_correlation.mean_ranks(sample.reshape(-1)) for sample in values])
        return cls(ranks, split_half(ranks), np.array([split_half(rows) for rows in leave_one_out(ranks)]))


def split_half(ranks: Floats) -> float:
    """Return the split-half reliability of (sample, head) ranks, brought to all samples; NaN for one sample."""
    each = [rho(ranks[half], ranks[~half]) for half in halves(len(ranks))]
    return spearman_brown(float(np.mean(each))) if each else np.nan


def halves(samples: int) -> list[NDArray[np.bool_]]:
    """Return splits of the samples into halves, (sample,) masks of the smaller half: all, or 200 that are drawn."""
    size, even = samples // 2, samples % 2 == 0
    if comb(samples, size) // (2 if even else 1) <= MOST_SPLITS:
        splits = [split for split in combinations(range(samples), size) if size and (not even or 0 in split)]
    else:
        source = np.random.default_rng(SPLITS_SEED)
        splits = [tuple(source.permutation(samples)[:size].tolist()) for _ in range(MOST_SPLITS)]
    return [np.isin(np.arange(samples), split) for split in splits]


def spearman_brown(half: float) -> float:
    """Return the reliability at twice the number of samples, from that of one half; it keeps the sign of `half`."""
    return 2 * half / (1 + abs(half))


def leave_one_out(values: Floats) -> list[Floats]:
    """Return copies of (sample, …) values, each without another sample."""
    return [np.delete(values, index, axis=0) for index in range(len(values))]


def trace_reliability(heads: HeadRanks) -> dict[str, Any]:
    """Return the reliability of a trace's ranks: between halves of its samples, and between two samples."""
    ranks, matrix = heads.ranks, sample_correlations(heads.ranks)
    pairs, mean = matrix[np.triu_indices(len(ranks), 1)], _mean_of_pairs(matrix)
    left = np.array([_mean_of_pairs(np.delete(rows, i, axis=1)) for i, rows in enumerate(leave_one_out(matrix))])
    each = np.array([spearman_brown(rho(ranks[half], ranks[~half])) for half in halves(len(ranks))])
    return {
        "split_half": correlation_entry(heads.reliability, _over_samples(heads.reliability, heads.without, each)),
        "pairwise": correlation_entry(mean, _over_samples(mean, left, pairs)),
        "splits": len(each),
    }


def sample_correlations(ranks: Floats) -> Floats:
    """Return (sample, sample) ρ of the heads' ranks in two samples."""
    return np.array([[float(spearman(one, other)) for other in ranks] for one in ranks])


def _mean_of_pairs(matrix: Floats) -> float:
    pairs = matrix[np.triu_indices(len(matrix), 1)]
    return float(pairs.mean()) if len(pairs) else np.nan


def _over_samples(value: float, left: Floats, single: Floats) -> Any:
    """Return the interval of a value from its (sample,) leave-one-out values; of fewer than five single ones' range."""
    if len(left) < intervals.MIN_SAMPLES:
        return None if len(left) < 2 else intervals.Interval(float(single.min()), float(single.max()), "range")
    return _jackknife_interval(value, left, intervals.CORRELATION)


def _jackknife_interval(value: float, left: Floats, kind: Any) -> Any:
    """Return the interval of a value from its leave-one-out values, (sample,); None where any is NaN."""
    if np.isnan(left).any() or np.isnan(value):
        return None
    low, high = intervals.jackknife(np.asarray(value), left, kind)
    return intervals.Interval(float(low), float(high))


def agreement(first: HeadRanks, second: HeadRanks, paired: bool) -> dict[str, Any]:
    """Return how alike two traces rank the same heads; `paired`: they may be of the same prompts."""
    heads, profiles = first.ranks.shape[1], [one.ranks.mean(axis=0) for one in (first, second)]
    worst = ceil(WORST * heads)
    first_worst, second_worst = (np.argsort(-profile, kind="stable")[:worst] for profile in profiles)
    chance, measured = stats.hypergeom(heads, worst, worst), rho(first.ranks, second.ranks)
    corrected = correlation_entry(_disattenuate(measured, first.reliability, second.reliability))
    if min(len(first.ranks), len(second.ranks)) >= intervals.MIN_SAMPLES:
        singly = [(first.without, second.reliability), (first.reliability, second.without)]
        parts: list[tuple[Any, Any]] = [(first.without, second.without)] if paired else [*singly]
        without = _left_out_rho(first.ranks, second.ranks, paired)
        left = [_disattenuate(one, *part) for one, part in zip(without, parts, strict=True)]
        corrected["interval"] = _join_groups(corrected["value"], left, CORRECTED)
    return {
        "rho": rho_with_interval(first.ranks, second.ranks, paired), "corrected": corrected,
        "shared": len(np.intersect1d(first_worst, second_worst)) / worst,
        "chance": float(chance.mean()) / worst, "chance_most": float(chance.ppf(0.975)) / worst,
        "paired": paired,
    }  # fmt: skip


def rho(first: Floats, second: Floats) -> float:
    """Return Spearman's ρ of the means over samples of two (sample, …) arrays."""
    return float(spearman(first.mean(axis=0), second.mean(axis=0)))


def rho_with_interval(first: Floats, second: Floats, paired: bool) -> dict[str, Any]:
    """Return `rho` with its interval over the samples of both arrays."""
    value, count = rho(first, second), min(len(first), len(second))
    if count < intervals.MIN_SAMPLES:
        each = [rho(one[None], second) for one in first] + [rho(first, one[None]) for one in second]
        return correlation_entry(value, None if count < 2 else intervals.Interval(min(each), max(each), "range"))
    return correlation_entry(value, _join_groups(value, _left_out_rho(first, second, paired), intervals.CORRELATION))


def _left_out_rho(first: Floats, second: Floats, paired: bool) -> list[Floats]:
    """Return `rho` with each sample left out: of both at once if `paired`, else of either."""
    if paired:
        return [np.array([rho(*one) for one in zip(leave_one_out(first), leave_one_out(second), strict=True)])]
    return [np.array([rho(one, second) for one in leave_one_out(first)]),
            np.array([rho(first, one) for one in leave_one_out(second)])]  # fmt: skip


def _disattenuate(measured: Any, first: Any, second: Any) -> Floats:
    """Return a correlation over the root of two reliabilities; NaN where one of these is not positive."""
    usable = (np.asarray(first) > 0) & (np.asarray(second) > 0)
    return np.where(usable, measured / np.sqrt(np.where(usable, np.multiply(first, second), 1.0)), np.nan)


def _join_groups(value: float, left: Sequence[Floats], kind: Any) -> Any:
    """Return the interval over independent groups of samples: squared distances to the ends of each one's add up."""
    known = [one for one in (_jackknife_interval(value, group, kind) for group in left) if one is not None]
    if len(known) < len(left):
        return None
    low, high = (float(np.sqrt(sum((getattr(one, end) - value) ** 2 for one in known))) for end in ("low", "high"))
    return intervals.Interval(max(value - low, kind.limits[0]), min(value + high, kind.limits[1]))


def depth_summary(relative: Floats, depths: Floats) -> dict[str, Any]:
    """Return where in depth (sample, layer, head) L lies: profile, first layers' shares, share of heads with half."""
    layers, heads = relative.shape[1:]
    shares = ratio(relative.sum(axis=2), relative.sum(axis=(1, 2))[:, None])
    each, kind = depth_profiles(relative, depths), intervals.share_kind(layers * heads)
    band = intervals.of_statistics(lambda weights: weights @ each, len(each), intervals.POSITIVE)
    halved = np.array([pk.stats.arithmetic.half_share(one) for one in relative])
    return {
        "profile": each.mean(axis=0), "profile_interval": band,
        "first_layer": intervals.estimate_mean(shares[:, 0], kind),
        "first_tenth": intervals.estimate_mean(shares[:, : ceil(layers / 10)].sum(axis=1), kind),
        "half": intervals.estimate_mean(halved, kind),
    }  # fmt: skip


def depth_profiles(relative: Floats, depths: Floats) -> Floats:
    """Return (sample, point) each layer's mean head over the mean of all heads, at 20 points of relative depth."""
    means = ratio(relative.mean(axis=2), relative.mean(axis=(1, 2))[:, None])
    return np.stack([np.interp(GRID, depths, one, left=np.nan, right=np.nan) for one in means])


@dataclass(frozen=True)
class TraceRanks:
    """The heads of one trace under one configuration, ranked.

    Attributes:
        relative: kind -> (sample, layer, head) L / ‖o_h‖₁ at step 0.
        ranked: `perturbation`, and `gain` where the trace has the baseline, -> kind -> heads ranked by it.
    """

    trace: pk.Trace
    config: pk.EvictionConfig
    relative: Mapping[str, Floats]
    ranked: Mapping[str, Mapping[str, HeadRanks]]

    @classmethod
    def of(cls, trace: pk.Trace, config: pk.EvictionConfig, baseline: pk.EvictionConfig | None) -> TraceRanks:
        """Rank the heads of a trace by perturbation and, where a `baseline` is given, by what is gained over it."""
        relative, other = ({} if one is None else _relative_perturbation(trace, one) for one in (config, baseline))
        by = {"perturbation": relative, "gain": {kind: values - relative[kind] for kind, values in other.items()}}
        ranked = {name: {kind: HeadRanks.of(one) for kind, one in values.items()} for name, values in by.items()}
        return cls(trace, config, relative, ranked)

    @property
    def depths(self) -> Floats:
        """(layer,) layer / (layers − 1) of the measured layers; 0 of a model of one layer."""
        return np.array(self.trace.layers, dtype=np.float64) / max(1, self.trace.decoder_layers - 1)


def _relative_perturbation(trace: pk.Trace, config: pk.EvictionConfig) -> dict[str, Floats]:
    """Return kind -> (sample, layer, head) relative L1 at step 0; 0 where a head has no output."""
    index, norm = trace.config_index(config.label()), variable(trace, "output_norm")
    return {kind: np.nan_to_num(ratio(variable(trace, f"perturbation_{kind}")[:, index], norm)) for kind in KINDS}


def step_agreement(one: TraceRanks) -> dict[str, Any]:
    """Return kind -> ρ of heads at step 0 and in the last third of the steps, mean over samples of at least 3 steps."""
    measured = one.trace.measured[one.trace.ok]
    counts = measured.sum(axis=1)
    long = counts >= 3
    if not long.any():
        return {}
    steps, third = np.arange(measured.shape[1]), (counts[long] // 3)[:, None]
    weights = ((steps >= counts[long, None] - third) & (steps < counts[long, None])) / third
    norm = np.asarray(one.trace.get("output_norm", "stability"), dtype=np.float64)
    index, found = one.trace.config_index(one.config.label()), {}
    for kind in KINDS:
        values = np.asarray(one.trace.get(f"perturbation_{kind}", "stability"), dtype=np.float64)[:, index]
        shown = measured[:, :, None, None]
        relative = np.nan_to_num(ratio(np.where(shown, values, 0), np.where(shown, norm, 0)))[long]
        late = np.einsum("st,st...->s...", weights, relative)
        each = [float(spearman(a.reshape(-1), b.reshape(-1))) for a, b in zip(relative[:, 0], late, strict=True)]
        found[kind] = {"value": np.mean(each), "prompts": len(each),
                       "interval": intervals.of_mean(np.array(each), intervals.CORRELATION)}  # fmt: skip
    return found


def compare_traces(first: TraceRanks, second: TraceRanks) -> dict[str, Any]:
    """Return how alike two traces' ranks are: head by head within one model, by depth between models."""
    runs = [one.trace.run for one in (first, second)]
    heads = {(run.model, run.revision, one.relative["isolated"].shape[1:], one.trace.attrs.get("measured_layers", ""))
             for run, one in zip(runs, (first, second), strict=True)}  # fmt: skip
    if len(heads) > 1:
        depth = {}
        for kind in KINDS:
            own, other = (depth_profiles(one.relative[kind], one.depths) for one in (first, second))
            shared = ~np.isnan(own).any(axis=0) & ~np.isnan(other).any(axis=0)
            depth[kind] = rho_with_interval(own[:, shared], other[:, shared], paired=False)
        return {"perturbation": {}, "gain": {}, "depth": depth}
    sources = {(run.dataset, run.seed) for run in runs}
    paired = len(sources) == 1 and np.array_equal(first.trace.ok, second.trace.ok)
    by = {name: {kind: agreement(heads, second.ranked[name][kind], paired) for kind, heads in one.items()}
          for name, one in first.ranked.items()}  # fmt: skip
    return {**by, "depth": {}}


def choose_configs(traces: Sequence[pk.Trace], name: str, budget: Any) -> list[pk.EvictionConfig]:
    """Choose the uncorrected configuration that a name means in each trace, as labels write it.

    Raises PerturbkvError where a trace has none or several, or they differ in more than the budget.
    """
    found = []
    for trace in traces:
        plain = [one for one in trace.run.configs if one.only_evicts and budget in (None, str(one.budget))]
        own = [one for one in plain if name in (str(one.selection), str(one.policy), f"{one.policy}:{one.selection}")]
        if len(own) != 1:
            labels = "; ".join(one.label() for one in own or trace.run.configs)
            raise pk.PerturbkvError(f"expected one configuration of '{name}', got {labels}; say which, and --budget")
        found += own
    alike = [{key: value for key, value in one.flat().items() if key != "budget"} for one in found]
    if any(one != alike[0] for one in alike):
        labels = "; ".join(dict.fromkeys(one.label() for one in found))
        raise pk.PerturbkvError(f"expected configurations that differ in budget at most, got {labels}")
    return found


def rank_traces(traces: Sequence[pk.Trace], selection: str, baseline: str, budget: Any = None) -> list[TraceRanks]:
    """Rank the heads of every trace. Without gains where a trace lacks the baseline, or it is the selection.

    Raises PerturbkvError as `choose_configs`, and for a trace that is given twice, or has no complete sample.
    """
    digests = [trace.digest for trace in traces if trace.digest]
    if len({*digests}) < len(digests) or not all(trace.ok.any() for trace in traces):
        raise pk.PerturbkvError("expected different traces with a complete sample each; leave the others out")
    sides = list(zip(traces, choose_configs(traces, selection, budget), strict=True))
    others: list[pk.EvictionConfig | None] = [None] * len(sides)
    with contextlib.suppress(pk.PerturbkvError):
        found = [choose_configs([trace], baseline, str(config.budget))[0] for trace, config in sides]
        if all(other != config for other, (_, config) in zip(found, sides, strict=True)):
            others = [*found]
    return [TraceRanks.of(*side, other) for side, other in zip(sides, others, strict=True)]


def draw(document: Mapping[str, Any]) -> Figure:
    """Draw ρ between traces with reliability on the diagonal, and relative L1 over depth, propagated and isolated."""
    figure, members = common.page_figure(140), document["members"]
    for (above, below), kind in zip(figure.subplots(2, 2).T, KINDS, strict=True):
        values = np.full((len(members), len(members)), np.nan)
        np.fill_diagonal(values, [one["perturbation"][kind]["split_half"]["value"] for one in members])
        for one in (one for one in document["pairs"] if one["perturbation"]):
            ends = one["first"] - 1, one["second"] - 1
            values[ends] = values[ends[::-1]] = one["perturbation"][kind]["rho"]["value"]
        image = above.imshow(values, vmin=0, vmax=1, extent=(0.5, len(values) + 0.5, len(values) + 0.5, 0.5))
        for (row, column), value in ((place, value) for place, value in np.ndenumerate(values) if not np.isnan(value)):
            colour = "black" if value > 0.5 else "white"
            above.text(column + 1, row + 1, f"{value:.2f}", ha="center", va="center", fontsize=6, color=colour)
        above.set(title=f"{kind} L1: ρ of heads' ranks", xlabel="trace", ylabel="trace")
        above.locator_params(integer=True)
        figure.colorbar(image, ax=above)
        for one in members:
            below.plot(GRID, one["depth"][kind]["profile"], label=f"{one['number']}: {one['dataset']}")
        common.plain_log(below, "y")
        below.set(xlabel="relative depth", ylabel="L / ‖o_h‖₁ over the mean head's")
        below.legend(fontsize=6)
    return figure


def estimate_text(number: Any) -> str:
    """Return an estimate with its interval as text: a correlation's entry, or a share in percent."""
    if isinstance(number, Mapping):
        return interval_text(number["value"], number["interval"])
    return percent_text(number.value, number.interval)


def print_tables(document: Mapping[str, Any]) -> None:
    """Print the tables and the conclusion."""
    members, pairs = document["members"], document["pairs"]
    shown = ("number", "model", "dataset", "tokens", "seed", "samples", "config")
    common.show("the traces", [{name: one[name] for name in shown} for one in members])
    for by in ("perturbation", "gain"):
        _show_table(members, by, f"within a trace, heads ranked by {by}", lambda one: {
            "reliability": estimate_text(one["split_half"]), "two samples": estimate_text(one["pairwise"])
        })  # fmt: skip
        _show_table(pairs, by, f"between traces of one model, heads ranked by {by}", lambda one: {
            "ρ": estimate_text(one["rho"]), "corrected": estimate_text(one["corrected"]),
            "worst tenth shared": percent_text(one["shared"]),
            "by chance at most": percent_text(one["chance_most"]), "same prompts": "perhaps" if one["paired"] else "no"
        })  # fmt: skip
    _show_table(pairs, "depth", "between models, layers over depth", lambda one: {"ρ": estimate_text(one)})
    _show_table(members, "over_steps", "step 0 with the last third",
          lambda one: {"ρ": estimate_text(one), "n": one["prompts"]})  # fmt: skip
    _show_table(members, "depth", "where in depth Σ L / ‖o_h‖₁ lies", lambda one: {
        "first layer": estimate_text(one["first_layer"]), "first tenth": estimate_text(one["first_tenth"]),
        "half in heads": estimate_text(one["half"])
    })  # fmt: skip
    halved = ", ".join(estimate_text(one["perturbation"]["propagated"]["split_half"]) for one in members)
    rhos = {_name(one): one["perturbation"]["propagated"]["rho"] for one in pairs if one["perturbation"]}
    between_traces = ", ".join(f"{name} {estimate_text(one)}" for name, one in rhos.items())
    print(f"\nreliability of heads' ranks by propagated L1: {halved}; ρ between traces: {between_traces or 'none'}")


def _show_table(every: Sequence[Any], key: str, title: str, row: Callable[[Any], dict[str, str]]) -> None:
    """Print a table with a row per trace, or per two traces, and kind of perturbation; none where nothing is known."""
    if rows := [{"trace": _name(one), "kind": kind, **row(found)} for one in every for kind, found in one[key].items()]:
        common.show(title, rows)


def _name(one: Mapping[str, Any]) -> str:
    """Return the number of a trace, '1', or the numbers of two, '1–2'."""
    return str(one["number"]) if "number" in one else f"{one['first']}–{one['second']}"


def document_of(members: Sequence[TraceRanks], baseline: str) -> dict[str, Any]:
    """Return the document: an entry per trace, and one per two of them."""
    return {
        "members": [{
            "number": number, "model": one.trace.run.model, "dataset": one.trace.run.dataset,
            "seed": one.trace.run.seed, "source": one.trace.source, "digest": one.trace.digest,
            "tokens": float(one.trace.get("prompt_tokens", "stability").astype(np.float64).mean()),
            **dict(zip(("samples", "layers", "heads"), one.relative["isolated"].shape, strict=True)),
            "config": one.config.label(),
            **{by: {kind: trace_reliability(each) for kind, each in own.items()} for by, own in one.ranked.items()},
            "over_steps": step_agreement(one),
            "depth": {kind: depth_summary(values, one.depths) for kind, values in one.relative.items()},
        } for number, one in enumerate(members, 1)],
        "pairs": [{"first": one, "second": two, **compare_traces(members[one - 1], members[two - 1])}
                  for one, two in combinations(range(1, len(members) + 1), 2)],
        "baseline": baseline if all(one.ranked["gain"] for one in members) else None,
    }  # fmt: skip


def study(asked: argparse.Namespace) -> None:
    """Read or measure the traces, rank their heads, and write what was found."""
    traces = [pk.read_trace(path) for path in asked.trace]
    if not traces:
        model = common.load_model(asked)
        configs = pk.grid(asked.budget or "128", policy=asked.policy, selection=[asked.baseline, asked.selection])
        settings = pk.Settings(steps=3 if asked.short else asked.steps, kept=False)
        for seed in (asked.seed, asked.seed + 1):
            prompts = common.prompts(argparse.Namespace(**{**vars(asked), "seed": seed}), model)
            traces.append(common.measure(asked, f"seed-{seed}.h5", model, prompts, configs, settings=settings))
    members = rank_traces(traces, asked.selection, asked.baseline, asked.budget[0] if asked.budget else None)
    document = document_of(members, asked.baseline)
    print_tables(document)
    common.save(asked, document, draw(document))


if __name__ == "__main__":
    parser = common.options(__doc__ or "")
    parser.add_argument("--selection", default="two-stage", help="or policy:selection, ranked by [%(default)s]")
    parser.add_argument("--baseline", default="attention", help="of its gain, likewise [%(default)s]")
    parser.add_argument("--policy", default="snapkv", help="[%(default)s]")
    parser.add_argument("--steps", type=int, default=12, help="decode steps to measure [%(default)s]")
    common.main(study, parser)
