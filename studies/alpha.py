"""The gain of choosing stage 1's share α per layer or per head.

Two-stage selection takes the share α of the free entries by attention, the others by attention times value norm. The
paper's α is 0.25 for all heads (its figure 7 varies it, and leaves others open). Here one selection is measured at many
α, beside `attention`. A head's isolated L1 depends on its own α alone (budgets that change with α are refused), so the
loss of any choice is put together from these measurements.

How it is decided:

- α is chosen for all heads, per layer, and per head (heads that share a kept set together), by the least Σ isolated L1
  over the samples of all folds but one; it is judged on that one. Sample i is in fold i mod K; K is 4, below eight
  samples each is a fold. Of equal sums the α nearest the paper's is taken.
- Controls: the paper's α; one α for all heads, chosen in the same way; the choice of all samples judged on the very
  samples that it was made on, which flatters.
- Then every fold's samples are really run with what the other folds chose: KL, drift, propagated L1. What is composed
  and what is measured must be one number.
- Ratios are of sums over heads and samples, with 95 % intervals over samples; the choices are held fixed in them.

It leaves `alpha-global.json`, `alpha-layer.json` and `alpha-head.json`, chosen on all samples, which
`two-stage(alpha=FILE)` reads.

    python studies/alpha.py --samples 8 -o runs/studies/alpha
    python studies/alpha.py runs/studies/alpha/trace.h5
"""

from __future__ import annotations

import argparse
import dataclasses
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import common
import numpy as np
from common import Floats, choices_except, compare, estimate, number_text, percent_text, ratio_of_sums, variable
from matplotlib.figure import Figure
from numpy.typing import NDArray

import perturbkv as pk

PAPER = 0.25
"""The paper's α (section 4.2)."""
LEAST_SAMPLES, USUAL_FOLDS = 4, 4
LEVELS = {"global": "one for all heads", "layer": "per layer", "head": "per head"}
OTHERS, SAME = "others", "same"
"""Whether α was chosen on other samples than those that it is judged on, or on the same ones."""
Chosen = Mapping[str, NDArray[np.intp]]
"""Level of choice -> (layer, head) index of the α that each query head takes."""


@dataclass(frozen=True, eq=False)
class Sweep:
    """Losses of one selection at every α of a trace.

    Attributes:
        baseline: `attention`, which has no α.
        configs: the selection at each α, ascending.
        paper: index of the paper's α.
        loss: (sample, α, layer, head) isolated L1; `propagated` likewise.
        baseline_loss: (sample, layer, head).
        floor, norm: (sample, layer, head) noise floor of isolated L1, and ‖o_h‖₁.
        heads_per_set: query heads that share a kept set, and so an α.
    """

    trace: pk.Trace
    baseline: pk.EvictionConfig
    configs: Sequence[pk.EvictionConfig]
    paper: int
    loss: Floats
    propagated: Floats
    baseline_loss: Floats
    floor: Floats
    norm: Floats
    heads_per_set: int

    @property
    def alphas(self) -> Floats:
        """(α,) the shares."""
        return np.array([config.mean_alpha for config in self.configs])

    @property
    def samples(self) -> list[str]:
        """Names of the complete samples."""
        return [name for name, ok in zip(self.trace.sample_ids, self.trace.ok, strict=True) if ok]

    @property
    def levels(self) -> list[str]:
        """The levels of choice; `head` only where a layer has several kept sets."""
        return [level for level in LEVELS if level != "head" or self.heads_per_set < self.loss.shape[-1]]

    def composed_loss(self, indices: NDArray[np.intp]) -> Floats:
        """Return (sample, layer, head) isolated L1 where each head takes the α at its (layer, head) index."""
        return np.asarray(np.take_along_axis(self.loss, indices[None, None], axis=1)[:, 0])


def read_sweep(trace: pk.Trace) -> Sweep:
    """Return the sweep over α of a trace.

    Raises PerturbkvError where it lacks the paper's α, another α or the baseline, holds several settings, has fewer
    than four complete samples, or where kept sets depend on the α of other heads.
    """
    swept = [config for config in trace.run.configs if config.selection.name == "two-stage" and _has_one_alpha(config)]
    papers = [config for config in swept if config.mean_alpha == PAPER]
    if len(papers) != 1:
        got = "; ".join(config.label() for config in papers) or "none"
        raise pk.PerturbkvError(f"expected one configuration of two-stage at α = {PAPER}, got {got}; use trace.sel")
    (paper,) = papers
    alike = choices_except(paper, "selection_alpha")
    configs = sorted((one for one in swept if choices_except(one, "selection_alpha") == alike),
                     key=lambda one: one.mean_alpha)  # fmt: skip
    baselines = [config for config in trace.run.configs
                 if config.selection.name == "attention" and common.differ_in_selection(config, paper)]  # fmt: skip
    if len(configs) < 2 or len(baselines) != 1:
        raise pk.PerturbkvError(
            f"expected attention, and two-stage at several α, in one setting; got {'; '.join(trace.run.labels())}"
        )
    if (samples := int(trace.ok.sum())) < LEAST_SAMPLES:
        raise pk.PerturbkvError(
            f"expected {LEAST_SAMPLES} samples, to choose on some and judge on others, got {samples}"
        )
    if paper.granularity.name in ("head", "model"):
        raise pk.PerturbkvError(
            f"expected kept sets of one layer, got granularity {paper.granularity}; choose query, kv"
        )
    indices = [trace.config_index(config.label()) for config in configs]
    kept = trace.get("kept_count", "alpha")[:, indices]
    if (kept != kept[:, :1]).any():
        raise pk.PerturbkvError(
            f"policy '{paper.policy.name}' gives heads other budgets at another α, so that a head's set depends on all "
            "heads' α; take budgets that do not, such as snapkv's"
        )
    loss = variable(trace, "perturbation_isolated")
    return Sweep(
        trace=trace,
        baseline=baselines[0],
        configs=configs,
        paper=configs.index(paper),
        loss=loss[:, indices],
        propagated=variable(trace, "perturbation_propagated")[:, indices],
        baseline_loss=loss[:, trace.config_index(baselines[0].label())],
        floor=variable(trace, "noise_floor_isolated"),
        norm=variable(trace, "output_norm"),
        heads_per_set=_heads_per_set(trace, paper),
    )


def _has_one_alpha(config: pk.EvictionConfig) -> bool:
    return isinstance(config.alpha, int | float)


def _heads_per_set(trace: pk.Trace, config: pk.EvictionConfig) -> int:
    """Return how many query heads share a kept set: heads that do point to one place in the trace."""
    heads = int(trace.arrays["output_norm"].shape[-1])
    if config.granularity.name == "query":
        return 1
    if config.granularity.name == "layer":
        return heads
    offsets = trace.get("kept_offset", "alpha")[0, trace.config_index(config.label())]
    return heads // max(len(np.unique(layer)) for layer in offsets)


def choose(sweep: Sweep, trained: NDArray[np.bool_]) -> Chosen:
    """Return level -> (layer, head) index of the α of least Σ isolated L1 over the samples in the mask `trained`."""
    by_head = sweep.loss[trained].sum(axis=0)
    loss = by_head.reshape(*by_head.shape[:-1], -1, sweep.heads_per_set).sum(axis=-1)  # (α, layer, kept set)
    sums = {"global": loss.sum(axis=(1, 2), keepdims=True), "layer": loss.sum(axis=2, keepdims=True), "head": loss}
    near = np.lexsort((sweep.alphas, np.abs(sweep.alphas - PAPER)))  # of equal sums the α nearest the paper's
    chosen = {}
    for level in sweep.levels:
        best = near[sums[level][near].argmin(axis=0)]
        every = np.repeat(best, _heads_per_choice(sweep, level), axis=1)
        chosen[level] = np.broadcast_to(every, sweep.loss.shape[2:])
    return chosen


def _heads_per_choice(sweep: Sweep, level: str) -> int:
    return sweep.heads_per_set if level == "head" else int(sweep.loss.shape[-1])


@dataclass(frozen=True, eq=False)
class Fold:
    """Samples on which choices are judged that were made on all others.

    Attributes:
        judged: (sample,) True for its samples.
        configs: `attention`, `paper`, then each level's choice -> the configuration that its samples are run with.
        tables: the files of its choices.
    """

    number: int
    judged: NDArray[np.bool_]
    samples: Sequence[str]
    chosen: Chosen
    configs: Mapping[str, pk.EvictionConfig]
    tables: Sequence[Path]

    @property
    def distinct(self) -> list[pk.EvictionConfig]:
        """The configurations without repetition, such as one α for all that is the paper's."""
        return list(dict.fromkeys(self.configs.values()))


def split_folds(sweep: Sweep, number: int | None, folder: Path) -> list[Fold]:
    """Return the folds; their tables of α are written into the folder, where configurations read them."""
    samples = len(sweep.samples)
    count = number or (USUAL_FOLDS if samples >= 2 * USUAL_FOLDS else samples)
    if not 2 <= count <= samples:
        raise pk.PerturbkvError(f"expected 2 to {samples} folds of {samples} samples, got --folds {count}")
    folds = []
    for index in range(count):
        judged = np.arange(samples) % count == index
        chosen, paper = choose(sweep, ~judged), sweep.configs[sweep.paper]
        tables = {level: write_table(folder / f"alpha-fold-{index + 1}-{level}.json", sweep, level, chosen[level])
                  for level in chosen if level != "global"}  # fmt: skip
        configs = {"attention": sweep.baseline, "paper": paper, "global": sweep.configs[int(chosen["global"][0, 0])],
                   **{level: _with_table(paper, path) for level, path in tables.items()}}  # fmt: skip
        names = [name for name, inside in zip(sweep.samples, judged, strict=True) if inside]
        folds.append(Fold(index + 1, judged, names, chosen, configs, [*tables.values()]))
    return folds


def alpha_table(sweep: Sweep, level: str, indices: NDArray[np.intp]) -> dict[str, Any]:
    """Return chosen shares as `two-stage(alpha=FILE)` reads them."""
    shares = sweep.alphas[indices]
    alpha = {"global": shares[0, 0], "layer": shares[:, 0], "head": shares}[level]
    return {"by": level, "alpha": alpha.tolist(), "layers": list(sweep.trace.layers)}


def write_table(path: Path, sweep: Sweep, level: str, indices: NDArray[np.intp], **more: Any) -> Path:
    """Write chosen shares into a file; return its path."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(alpha_table(sweep, level, indices) | more, indent=1, ensure_ascii=False) + "\n")
    return path


def _with_table(config: pk.EvictionConfig, path: Path) -> pk.EvictionConfig:
    """Return the configuration with the shares of a file in place of its α."""
    options = {**config.selection.options, "alpha": str(path)}
    unread = dataclasses.replace(config.selection, options=options, defaults=None)  # the configuration reads the file
    return dataclasses.replace(config, selection=unread)


def rows_of(sweep: Sweep, folds: Sequence[Fold], whole: Chosen) -> list[dict[str, Any]]:
    """Return a row per way to choose α: over the paper's α, and over one α for all chosen on other samples."""
    judged = {}
    for level in whole:
        judged[level] = np.empty_like(sweep.baseline_loss)
        for fold in folds:
            judged[level][fold.judged] = sweep.composed_loss(fold.chosen[level])[fold.judged]
    paper, fixed = sweep.loss[:, sweep.paper], judged["global"]
    losses = [("attention", "", sweep.baseline_loss), (f"α = {PAPER}", "", paper)]
    losses += [(LEVELS[level], OTHERS, judged[level]) for level in whole]
    losses += [(LEVELS[level], SAME, sweep.composed_loss(indices)) for level, indices in whole.items()]
    return [
        {"name": name, "chosen_on": on, **{
            against: compare(control, loss, sweep.floor, sweep.norm)
            for against, control in (("over_paper", paper), ("over_fixed", fixed))
        }}
        for name, on, loss in losses
    ]  # fmt: skip


def curve_of(sweep: Sweep, whole: Chosen) -> list[dict[str, Any]]:
    """Return a point per α for all heads: Σ over the paper's, and the shares of layers and heads that choose it."""
    return [
        {
            "alpha": alpha,
            **estimate("ratio", ratio_of_sums(sweep.loss[:, sweep.paper], sweep.loss[:, index])),
            **estimate("propagated", ratio_of_sums(sweep.propagated[:, sweep.paper], sweep.propagated[:, index])),
            "layers": (whole["layer"] == index).mean(),
            "heads": (whole["head"] == index).mean() if "head" in whole else None,
            "isolated_by_head": sweep.loss[:, index].mean(axis=0),
        }
        for index, alpha in enumerate(sweep.alphas)
    ]


def outcomes_of(sweep: Sweep, folds: Sequence[Fold], traces: Sequence[pk.Trace]) -> dict[str, Any]:
    """Return KL, drift and propagated L1 where each fold is run with the others' choices; `traces`: one per fold."""
    parts = []
    composed_off = 0.0
    for fold, trace in zip(folds, traces, strict=True):
        indices = [trace.config_index(config.label()) for config in fold.configs.values()]
        parts.append({name: variable(trace, name)[:, indices] for name in _OUTCOMES})
        places = [sweep.samples.index(name) for name, ok in zip(trace.sample_ids, trace.ok, strict=True) if ok]
        largest = np.maximum(sweep.loss.max(axis=(0, 1)), np.finfo(float).tiny)
        for level, chosen in fold.chosen.items():
            loss = variable(trace, "perturbation_isolated")[:, trace.config_index(fold.configs[level].label())]
            off = np.abs(loss - sweep.composed_loss(chosen)[places]) / largest
            composed_off = max(composed_off, float(off.max()))
    kl, drift, propagated = (np.concatenate([part[name] for part in parts]) for name in _OUTCOMES)
    roles = list(folds[0].configs)
    paper, fixed = roles.index("paper"), roles.index("global")

    def over(values: Floats, control: int, index: int) -> Any:
        first, second = (values[:, role].reshape(len(values), 1, -1) for role in (control, index))
        return ratio_of_sums(first, second)

    intervals, rows = pk.stats.intervals, []
    for index, role in enumerate(roles):
        lower = kl[:, index] < kl[:, paper]
        rows.append({
            "name": f"α = {PAPER}" if role == "paper" else LEVELS.get(role, role),
            **estimate("kl_median", (float(np.median(kl[:, index])), intervals.of_median(kl[:, index]))),
            **estimate("kl", over(kl, paper, index)),
            **estimate("kl_lower", (float(lower.mean()), intervals.of_share(lower))),
            **estimate("kl_over_fixed", over(kl, fixed, index)),
            **estimate("drift", over(drift[:, :, -1], paper, index)),
            **estimate("propagated", ratio_of_sums(propagated[:, paper], propagated[:, index])),
        })  # fmt: skip
    return {"rows": rows, "samples": len(kl), "composed_off": composed_off}


_SIDES = {-1: "less", 0: "undecided", 1: "more"}
_OUTCOMES = ("logit_kl", "hidden_drift_l1", "perturbation_propagated")


def draw(sweep: Sweep, document: Mapping[str, Any], whole: Chosen) -> Figure:
    """Draw Σ over α with the level of each choice, and the map of the α that heads choose on all samples."""
    figure = common.page_figure(72)
    left, right = figure.subplots(1, 2)
    bands = [point["ratio_interval"] for point in document["curve"]]
    left.plot(sweep.alphas, [point["ratio"] for point in document["curve"]], "o-", label="one α for all heads")
    if all(bands):
        left.fill_between(sweep.alphas, [one.low for one in bands], [one.high for one in bands], alpha=0.2)
    for (level, name), dash in zip(LEVELS.items(), ("-", "--", ":"), strict=True):
        for row in (row for row in document["rows"] if level in whole and _is_row(row, name, OTHERS)):
            left.axhline(row["over_paper"]["sum_ratio"], color="0.3", linestyle=dash, label=f"chosen {name}")
    left.set(xlabel="α, the share of stage 1", ylabel=f"Σ isolated L1 over that of α = {PAPER}")
    left.legend()
    level = sweep.levels[-1]
    image = right.imshow(sweep.alphas[whole[level]], vmin=0, vmax=1, aspect="auto")
    right.set(xlabel="head", ylabel="measured layer", title=f"α chosen {LEVELS[level]}, on all samples")
    figure.colorbar(image, ax=right)
    return figure


def _is_row(row: Mapping[str, Any], name: str, on: str) -> bool:
    return bool(row["name"] == name and row["chosen_on"] == on)


def print_tables(document: Mapping[str, Any], finest: str) -> None:
    """Print the tables and the conclusion."""
    lines = []
    for row in document["rows"]:
        over_paper, over_fixed = row["over_paper"], row["over_fixed"]
        lines.append({
            "α": row["name"], "chosen on": row["chosen_on"],
            f"Σ over α = {PAPER}": number_text(over_paper, "sum_ratio"),
            "median head": number_text(over_paper, "median_ratio"),
            "heads better": percent_text(over_paper["better_share"], over_paper["better_share_interval"]),
            "Σ over one for all": number_text(over_fixed, "sum_ratio", 3),
        })  # fmt: skip
    common.show(f"isolated L1, {len(document['folds'])} folds", lines)
    common.show("one α for all heads; who chooses it on all samples", [
        {"α": point["alpha"], f"Σ over α = {PAPER}": number_text(point, "ratio", 3),
         "propagated": number_text(point, "propagated"), "layers": percent_text(point["layers"]),
         "heads": percent_text(point["heads"]) if point["heads"] is not None else ""}
        for point in document["curve"]
    ])  # fmt: skip
    measured = document["measured"]
    if measured:
        common.show(f"run with what other samples chose, over α = {PAPER}", [
            {"α": row["name"], "median KL, nat": number_text(row, "kl_median", 4), "mean KL": number_text(row, "kl"),
             "lower in": percent_text(row["kl_lower"], row["kl_lower_interval"]),
             "mean KL over one for all": number_text(row, "kl_over_fixed"),
             "drift": number_text(row, "drift"), "propagated Σ": number_text(row, "propagated")}
            for row in measured["rows"]
        ])  # fmt: skip
        off = measured["composed_off"]
        print(f"composed and measured isolated L1 differ by at most {off:.1e} of the head's largest")
    differing = document["differ_between_folds"].items()
    unstable = ", ".join(f"{LEVELS[level]} {percent_text(share)}" for level, share in differing)
    print(f"the folds' choices differ: {unstable}")
    (row,) = (row for row in document["rows"] if _is_row(row, LEVELS[finest], OTHERS))
    found = number_text(row["over_fixed"], "sum_ratio", 3)
    side = _SIDES[common.side_of(row["over_fixed"]["sum_ratio_interval"], 1)]
    print(f"α chosen {LEVELS[finest]}, over one for all heads, judged on other samples: isolated Σ {found}, {side}")


def fold_traces(asked: argparse.Namespace, folds: Sequence[Fold], model: Any, prompts: Any) -> list[pk.Trace]:
    """Run each fold with its choices, or read its trace beside the one that was given; print where there is none."""
    traces = []
    for fold in folds:
        name = f"alpha-fold-{fold.number}.h5"
        if model is not None:
            own = [prompt for prompt in prompts or () if prompt.sample_id in fold.samples]
            traces.append(common.measure(asked, name, model, own, fold.distinct, overwrite=True))
        elif (beside := Path(asked.trace[0]).parent / name).exists():
            found = pk.read_trace(beside)
            if {*found.sample_ids} == {*fold.samples} and {*fold.distinct} <= {*found.run.configs}:
                traces.append(found)
    if len(traces) < len(folds):
        print(f"no runs of the folds: {asked.trace[0]} has no {len(folds)} traces beside it that are of these choices")
    return traces


def study(asked: argparse.Namespace) -> None:
    """Measure the sweep, choose, run the folds, and write what was found."""
    model = prompts = None
    if asked.trace:
        trace = common.read_or_measure(asked, ())
    else:
        alphas = sorted({*(asked.alpha or [tenths / 10 for tenths in range(11)]), PAPER})
        configs = pk.grid(asked.budget or "128", policy=asked.policy, granularity=asked.granularity,
                          selection=["attention", *(f"two-stage(alpha={alpha:g})" for alpha in alphas)])  # fmt: skip
        model = common.load_model(asked)
        prompts = list(common.prompts(asked, model))
        trace = common.measure(asked, "trace.h5", model, prompts, configs)
    sweep = read_sweep(trace)
    folds = split_folds(sweep, asked.folds, asked.output)
    whole = choose(sweep, np.ones(len(sweep.samples), dtype=bool))
    asked.written += [path for fold in folds for path in fold.tables]
    traces = fold_traces(asked, folds, model, prompts) if asked.runs else []
    note = "chosen on all of these samples: what it gains on them flatters; studies/alpha.py judges on others"
    made = {"made_by": "studies/alpha.py", "model": trace.run.model, "dataset": trace.run.dataset,
            "samples": len(sweep.samples), "trace": trace.digest, "note": note,
            "configuration": sweep.configs[sweep.paper].label()}  # fmt: skip
    for level, indices in whole.items():
        asked.written.append(write_table(asked.output / f"alpha-{level}.json", sweep, level, indices, about=made))
    differing = {level: np.stack([fold.chosen[level] for fold in folds])[..., :: _heads_per_choice(sweep, level)]
                 for level in whole}  # fmt: skip
    document = {
        "about": common.trace_summary(trace),
        "heads_per_kept_set": sweep.heads_per_set,
        "rows": rows_of(sweep, folds, whole),
        "curve": curve_of(sweep, whole),
        "chosen": {level: alpha_table(sweep, level, indices) for level, indices in whole.items()},
        "differ_between_folds": {level: (one != one[:1]).any(axis=0).mean() for level, one in differing.items()},
        "folds": [{"number": fold.number, "samples": fold.samples,
                   "chosen": {level: alpha_table(sweep, level, indices) for level, indices in fold.chosen.items()}}
                  for fold in folds],
        "measured": outcomes_of(sweep, folds, traces) if len(traces) == len(folds) else None,
    }  # fmt: skip
    print_tables(document, sweep.levels[-1])
    common.save(asked, document, draw(sweep, document, whole))


if __name__ == "__main__":
    parser = common.options(__doc__ or "")
    parser.add_argument("--alpha", type=float, action="append", help="a share to try; may be repeated [0, 0.1 … 1]")
    parser.add_argument("--policy", default="snapkv", help="[%(default)s]")
    parser.add_argument("--granularity", default=None, help="query, kv or layer [the policy's]")
    parser.add_argument("--folds", type=int, metavar="K", help="parts of the samples [4; below 8 samples 1 each]")
    parser.add_argument("--no-runs", dest="runs", action="store_false", help="do not run the folds with their choices")
    common.main(study, parser)
