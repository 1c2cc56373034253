"""Shared parts of the studies: options, the trace, tables, and output files.

A study is one script on `import perturbkv as pk`. `python studies/NAME.py` measures its prompts and leaves a trace, a
JSON document and a picture; a killed one goes on where it was. `python studies/NAME.py TRACE` reads a finished trace.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import matplotlib.style
import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, MaxNLocator, NullLocator
from numpy.typing import NDArray

import perturbkv as pk

Floats = NDArray[np.float64]
Estimated = tuple[float, Any]
"""A number and its interval over samples: None of a single sample, a range of fewer than five."""

Table = tuple[str, Sequence[str], Sequence[Sequence[str]]]
"""A table of a page as text: its title, its heads, its rows."""
EVIDENCE = 0.5
"""Theorem 3 speaks only of heads whose σ exceeds this."""
STYLE = "perturbkv.figures.perturbkv"
"""The style sheet of the package's figures, as matplotlib finds it."""

ONE_STEP = pk.Settings(steps=1)
"""Settings of the tables in docs/results, which are of the first new token alone."""
SHORT = {"dataset": "needle", "samples": 4, "length": [300], "max_tokens": None}
"""Options of `--short`, which `make studies` gives: enough to see a study work, too little to conclude from."""


def options(
    text: str, names: str = "trace", about: str = "finished traces, instead of measuring one", **defaults: Any
) -> argparse.ArgumentParser:
    """Return a parser of the options that studies share; `defaults` are those of this study.

    `text` describes the study; `names` and `about` are the name and the help of what it is called with beside options.
    Budgets are tokens (128) or shares of the prompt (0.1), as in `pk.grid`.
    """
    parser = argparse.ArgumentParser(description=text, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(names, nargs="*", help=about)
    parser.add_argument("--model", default="smollm2-135m-q4_1", help="[%(default)s]")
    parser.add_argument("--dtype", default="auto", help="auto, float32, bfloat16, float16 [%(default)s]")
    parser.add_argument("--dataset", default="needle", help="as `perturbkv list datasets` names them [%(default)s]")
    parser.add_argument("--data-dir", help="folder with LongBench's files")
    parser.add_argument("--samples", type=int, default=8, help="number of prompts [%(default)s]")
    parser.add_argument(
        "--length", type=list_of(int), action="extend", help="tokens of a made prompt, also with commas"
    )
    parser.add_argument("--depth", type=list_of(float), action="extend",
                        help="needle: where the fact lies, 0 to 1, also with commas")  # fmt: skip
    parser.add_argument("--max-tokens", type=int, help="longer prompts are cut in the middle")
    parser.add_argument("--no-chat-template", dest="chat_template", action="store_false", default=None)
    parser.add_argument("--budget", action="append", help="entries per head, or a share; may be repeated")
    parser.add_argument("--seed", type=int, default=0, help="of everything random [%(default)s]")
    parser.add_argument("--short", action="store_true", help="four short prompts, to see it work")
    parser.add_argument("--output", "-o", type=Path, help="folder of trace, JSON document and picture")
    parser.set_defaults(**defaults)
    return parser


def list_of(kind: type) -> Callable[[str], list[Any]]:
    """Return the type of an option that takes numbers, `1,2`."""

    def numbers(text: str) -> list[Any]:
        return [kind(number) for number in text.split(",")]

    return numbers


def load_model(asked: argparse.Namespace) -> Any:
    """Return the model that was asked for."""
    return pk.load_model(asked.model, dtype=asked.dtype, seed=asked.seed)


def prompts(asked: argparse.Namespace, model: Any) -> Any:
    """Return the prompts that were asked for, encoded for the model."""
    chosen = {**vars(asked), **(SHORT if asked.short else {})}
    return pk.load_prompts(
        chosen["dataset"], model, samples=chosen["samples"], seed=asked.seed, data_dir=asked.data_dir,
        lengths=chosen["length"] or (), depths=chosen["depth"] or (), max_tokens=chosen["max_tokens"],
        chat_template=asked.chat_template,
    )  # fmt: skip


def read_or_measure(asked: argparse.Namespace, configs: Iterable[pk.EvictionConfig], **settings: Any) -> pk.Trace:
    """Read the finished trace that was named, or measure the configurations into `trace.h5` of the output folder.

    `settings` are those of `pk.Settings`.
    """
    if asked.trace:
        if len(asked.trace) > 1:
            raise pk.PerturbkvError(f"expected one trace, got {len(asked.trace)}")
        return pk.read_trace(asked.trace[0])
    model, chosen = load_model(asked), dataclasses.replace(ONE_STEP, **settings)
    return measure(asked, "trace.h5", model, prompts(asked, model), configs, settings=chosen)


def measure(
    asked: argparse.Namespace, name: str, model: Any, prompts: Any, configs: Iterable[pk.EvictionConfig],
    settings: pk.Settings = ONE_STEP, **more: Any,
) -> pk.Trace:  # fmt: skip
    """Measure the configurations into a file of the output folder, with further arguments of `pk.measure`."""
    asked.written.append(asked.output / name)
    trace: pk.Trace = pk.measure(model, prompts, configs, settings=settings, path=asked.written[-1], **more)
    return trace


def variable(trace: pk.Trace, name: str, step: int = 0) -> Floats:
    """Return a measured variable of the complete samples at a step: (sample, config where it has them, …).

    Raises TraceError where the trace lacks it.
    """
    values: Floats = np.asarray(trace.get(name, "a study"), dtype=np.float64)
    of_full_run = "norm" in name or "noise" in name  # without an axis `config`
    return np.asarray(values.take(step, axis=1 if of_full_run else 2))


def trace_summary(trace: pk.Trace, step: int = 0) -> dict[str, Any]:
    """Return a trace's entry in a document: where it is, its run, its failed samples and its configurations.

    Of every configuration: label and choices, S (mean over heads and samples), entries and bytes of its cache over the
    full one's, the heads with σ ≤ ½ (layer-head), and the seconds of a prefill of its own.
    """
    arrays = {name: array[trace.ok].astype(np.float64) for name, array in trace.arrays.items() if name in _OF_CACHES}
    if "held_bytes" in arrays:
        arrays["held_bytes"] /= trace.arrays["full_bytes"][trace.ok].astype(np.float64)[:, None]
    mass, weak = variable(trace, "retained_mass", step).mean(axis=(0, 2, 3)), sigma_at_most_half(trace, step)
    configs = [
        {
            "label": config.label(), **config.to_document(), "retained_mass": mass[index],
            **{_OF_CACHES[name]: array[:, index].mean() for name, array in arrays.items()},
            "flagged_heads": [f"{trace.layers[layer]}-{head}" for layer, head in np.argwhere(weak[index])],
        }
        for index, config in enumerate(trace.run.configs)
    ]  # fmt: skip
    run = {name: value for name, value in json.loads(trace.run.to_json()).items() if name != "configs"}
    return {"trace": trace.source, "digest": trace.digest, "samples": int(trace.ok.sum()), "failed": trace.failures,
            "run": run, "configurations": configs}  # fmt: skip


_OF_CACHES = {"held_share": "held_over_full", "held_bytes": "bytes_over_full", "prefill_seconds": "prefill_seconds"}
"""Variables of a configuration's cache -> their names in a document."""


def matches(config: pk.EvictionConfig, name: str) -> bool:
    """Return whether a configuration is meant by a name: selection, policy or `policy:selection`, as labels write it.

    A bare name means any options; one with options, `two-stage(alpha=0.5)`, exactly these.
    """
    policy, selection = config.policy, config.selection
    names = {f"{one}:{two}" for one in (policy, policy.name) for two in (selection, selection.name)}
    return name in names | {str(policy), policy.name, str(selection), selection.name}


def differ_in_selection(first: pk.EvictionConfig, second: pk.EvictionConfig) -> bool:
    """Return whether two configurations share every choice that both have, but for the selection and its options."""
    one, other = first.flat(), second.flat()
    owned = ("selection", "granularity_product")
    return all(one[name] == other[name] for name in one.keys() & other.keys() if not name.startswith(owned))


def choices_except(config: pk.EvictionConfig, prefix: str) -> dict[str, Any]:
    """Return a configuration's choices, without those whose names begin with `prefix`."""
    return {name: value for name, value in config.flat().items() if not name.startswith(prefix)}


def sigma_at_most_half(trace: pk.Trace, step: int = 0) -> NDArray[np.bool_]:
    """Return (config, layer, head) True where σ, mean over samples, is at most ½: Theorem 3 says nothing there."""
    return np.asarray(variable(trace, "sigma_stage1", step).mean(axis=0) <= EVIDENCE)


def cache_shares(trace: pk.Trace) -> Floats:
    """Return each configuration's entries over those of the full cache, (config,): mean over samples."""
    return np.asarray(np.asarray(trace.get("held_share", "a study"), dtype=np.float64).mean(axis=0))


def perturbation_of(
    trace: pk.Trace, kind: str, baseline: int, treatment: int, suffix: str = ""
) -> tuple[Floats, Floats]:
    """Return two configurations' perturbation at step 0, (sample, layer, head) each, equal where the kept sets are.

    Args:
        trace: of configurations that evict alone.
        kind: isolated, or propagated, where the sets of all earlier layers have to be equal, too.
        baseline: index of a configuration.
        treatment: index of another one.
        suffix: end of the variable's name: empty, `_l2` or `_cosine`.
    """
    values, same = variable(trace, f"perturbation_{kind}{suffix}"), trace.same_kept(baseline, treatment)
    if kind == "propagated":
        earlier = np.logical_and.accumulate(same.all(axis=2), axis=1)[:, :-1]
        same = same & np.concatenate([np.ones((len(same), 1), dtype=bool), earlier], axis=1)[:, :, None]
    first = values[:, baseline]
    return first, np.where(same, first, values[:, treatment])


def signs_beyond_noise(baseline: Floats, treatment: Floats, floor: Floats) -> NDArray[np.int8]:
    """Return 1 where the treatment is lower, −1 where it is higher, 0 where they differ by at most two noise floors."""
    sign = np.sign(baseline - treatment).astype(np.int8)
    return np.where(np.abs(baseline - treatment) <= 2 * floor, np.int8(0), sign)


def ratio_of_sums(baseline: Floats, treatment: Floats) -> Estimated:
    """Return Σ treatment / Σ baseline of (sample, layer, head) values, with its interval over samples."""
    first, second = baseline.sum(axis=(1, 2)), treatment.sum(axis=(1, 2))
    value = pk.stats.arithmetic.ratio(treatment.mean(axis=0).sum(), baseline.mean(axis=0).sum())
    return float(value), pk.stats.intervals.of_ratio(second, first)


def estimate(name: str, value: Estimated) -> dict[str, Any]:
    """Return a number and its interval as two keys of a document: `name` and `name_interval`."""
    return {name: value[0], f"{name}_interval": value[1]}


def compare(
    baseline: Floats, treatment: Floats, floor: Floats, norm: Floats, flagged: NDArray[np.bool_] | None = None
) -> dict[str, Any]:
    """Return the comparison of a treatment's perturbation with a baseline's: (sample, layer, head) arrays.

    Differences of at most two noise floors are ties. Ratios are treatment over baseline; `flagged` (layer, head) are
    left out of `unflagged_better_share`; `sign_flips` are tests of every head, corrected for their number.
    """
    stats, samples = pk.stats, len(baseline)
    means = [part.mean(axis=0) for part in (baseline, treatment, floor)]
    by_sample, of_means = signs_beyond_noise(baseline, treatment, floor), signs_beyond_noise(*means)
    better = (by_sample == 1).reshape(samples, -1)
    others = np.ones(better.shape[1], dtype=bool) if flagged is None else ~flagged.reshape(-1)
    tests = stats.permutation.sign_flip_tests(np.where(by_sample == 0, 0, baseline - treatment))
    relative = stats.arithmetic.quantiles(stats.arithmetic.ratio(means[2], norm.mean(axis=0)), (0.5, 1.0))

    def median_of(weights: Floats) -> Floats:
        first, second = (weights @ part.reshape(samples, -1) for part in (baseline, treatment))
        return np.asarray(stats.arithmetic.quantiles(stats.arithmetic.ratio(second, first), (0.5,), axis=1)[0])

    median = stats.arithmetic.median(stats.arithmetic.ratio(means[1], means[0]))
    share = (
        float(better.mean()),
        stats.intervals.of_mean(better.mean(axis=1), stats.intervals.share_kind(better.shape[1])),
    )
    return {
        **estimate("sum_ratio", ratio_of_sums(baseline, treatment)),
        **estimate("median_ratio", (median, stats.intervals.of_statistic(median_of, samples, stats.intervals.RATIO))),
        **estimate("better_share", share),
        "unflagged_better_share": better[:, others].mean() if others.any() else np.nan,
        "half_of_the_sum_in_share_of_heads": stats.arithmetic.half_share(means[0]),
        "noise_floor_relative_median": relative[0], "noise_floor_relative_max": relative[1],
        "sign_flips": tests.to_dict(),
        **{name: (of_means == sign).sum() for name, sign in (("improved", 1), ("tied", 0), ("worsened", -1))},
        "baseline_mean": means[0].mean(), "treatment_mean": means[1].mean(),
    }  # fmt: skip


def save(asked: argparse.Namespace, document: Mapping[str, Any], figure: Figure | None = None) -> None:
    """Write the JSON document and the picture of a study into its output folder; print all files that it wrote."""
    name = Path(sys.argv[0]).stem
    asked.output.mkdir(parents=True, exist_ok=True)
    paths = [*asked.written, asked.output / f"{name}.json"]
    paths[-1].write_text(json.dumps(to_json(document), indent=1, allow_nan=False) + "\n")
    if figure is not None:
        paths.append(asked.output / f"{name}.png")
        figure.savefig(paths[-1], dpi=200)
    print("wrote", ", ".join(map(str, paths)))


def write_tables(asked: argparse.Namespace, tables: Iterable[Table], figure: Figure | None = None) -> None:
    """Print tables as Markdown, each when it is made; write them as a document, with the picture where there is one."""
    made = []
    for title, heads, rows in tables:
        print(f"\n{title}\n\n{markdown(heads, rows)}", flush=True)
        made.append({"title": title, "heads": heads, "rows": rows})
    save(asked, {"tables": made}, figure)


def markdown(heads: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return a table as Markdown."""
    return "\n".join(f"| {' | '.join(cells)} |" for cells in (heads, ["---"] * len(heads), *rows))


def simulate(text: str, tables: Callable[[int], Iterable[Table]], draws: int, few: int) -> None:
    """Run a study, described by `text`, whose tables are simulated by `draws` draws, or `few` with `--short`."""
    parser = argparse.ArgumentParser(description=text, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("draws", type=int, nargs="?", default=draws, help="number of draws [%(default)s]")
    parser.add_argument("--short", action="store_true", help=f"{few} draws, to see it work")
    parser.add_argument("--output", "-o", type=Path, help="folder of the JSON document")
    main(lambda asked: write_tables(asked, tables(few if asked.short else asked.draws)), parser)


def short_names(configs: Sequence[pk.EvictionConfig]) -> list[str]:
    """Return each configuration's choices that not all share, as a label has them: 'two-stage b=64'."""
    parts = [config.label_parts() for config in configs]
    shared = {one for one in parts[0].items() if all(one in each.items() for each in parts)}
    return [
        " ".join(word for one, word in each.items() if (one, word) not in shared) or config.selection.name
        for config, each in zip(configs, parts, strict=True)
    ]


def setting_name(config: pk.EvictionConfig, *without: str) -> str:
    """Return a configuration's choices as a label has them, but for policy, selection and those in `without`."""
    left_out = {"policy", "selection", *without}
    return " ".join(word for choice, word in config.label_parts().items() if choice not in left_out)


def configuration(document: Mapping[str, Any]) -> pk.EvictionConfig:
    """Return the configuration that an object of a document describes: its label and choices."""
    return pk.EvictionConfig.from_document({name: value for name, value in document.items() if name != "label"})


def page_figure(height_mm: float, width_mm: float = 174) -> Figure:
    """Return an empty figure of a printed size, by default as wide as a page's text."""
    return Figure(figsize=(width_mm / 25.4, height_mm / 25.4), layout="constrained")


def plain_log(axes: Axes, name: str, steps: Sequence[float] = (1, 2, 5)) -> None:
    """Make the axis `x` or `y` logarithmic with a few plain numbers, after its values were drawn.

    `steps` are the ticks of a power of ten where there are at most a few powers; `(1,)` of a narrow panel.
    """
    axis = axes.xaxis if name == "x" else axes.yaxis
    axes.set(**{f"{name}scale": "log"})
    low, high = axis.get_view_interval()
    decades = np.log10(high / low)
    axis.set_major_locator(MaxNLocator(5) if decades < 0.7 else LogLocator(subs=steps if decades < 2.5 else (1,)))
    axis.set_major_formatter(lambda value, _: tick_text(value))
    axis.set_minor_locator(NullLocator())


def tick_text(value: float) -> str:
    """Return a tick's number: 4,000, 0.05, or 2×10⁻⁵ where a number would have many zeros."""
    if value >= 1e-4:
        return f"{value:,.0f}" if value >= 1000 else f"{value:.4g}"
    times, _, power = f"{value:.0e}".partition("e")
    return f"{times}×10{str(int(power)).translate(_RAISED)}".removeprefix("1×")


_RAISED = str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹")


def log_ticks(axes: Axes, values: Iterable[float]) -> None:
    """Make the x axis logarithmic, with a plain number at each of the values."""
    ticks = sorted(set(values))
    axes.set_xscale("log")
    axes.set_xticks(ticks, [f"{tick:.3g}" for tick in ticks])
    axes.minorticks_off()


def show(title: str, rows: Sequence[Mapping[str, Any]]) -> None:
    """Print a table with a line per row."""
    print(f"\n{title}")
    print(pd.DataFrame(rows).to_string(index=False, float_format=lambda value: f"{value:.3g}", na_rep="–"))


def interval_text(value: float, interval: Any, digits: int = 2, unit: str = "") -> str:
    """Return a number with its interval: `0.83 [0.80, 0.86]`; the range of few samples in round brackets."""
    if np.isnan(value):
        return "–"
    number = f"{value:.{digits}f}{unit}"
    if interval is None:
        return number
    ends = f"{interval.low:.{digits}f}, {interval.high:.{digits}f}"
    return f"{number} [{ends}]" if interval.kind == "interval" else f"{number} ({ends})"


def percent_text(value: float, interval: Any = None) -> str:
    """Return a share in percent with its interval: `83 % [80, 86]`."""
    return interval_text(100 * value, in_percent(interval), 0, " %")


def in_percent(interval: Any) -> Any:
    """Return an interval of shares in percent; None for None."""
    return interval and dataclasses.replace(interval, low=100 * interval.low, high=100 * interval.high)


def number_text(row: Mapping[str, Any], name: str, digits: int = 2) -> str:
    """Return a number of a row with its interval as text: `0.83 [0.80, 0.86]`."""
    return interval_text(row[name], row[f"{name}_interval"], digits)


def side_of(interval: Any, at: float) -> int:
    """Return 1 for an interval above `at`, −1 for one below; 0 where it holds `at`, or too few samples allow none."""
    known = interval is not None and interval.kind == "interval"
    return int(interval.low > at) - int(interval.high < at) if known else 0


def error_bars(values: Sequence[float], ends: Sequence[Any]) -> list[list[float]]:
    """Return the lengths to the lower and to the upper ends of intervals, as `Axes.errorbar` takes them; 0 for none."""
    pairs = list(zip(values, ends, strict=True))
    low = [0.0 if end is None else max(0.0, value - end.low) for value, end in pairs]
    high = [0.0 if end is None else max(0.0, end.high - value) for value, end in pairs]
    return [low, high]


def finite_or_none(value: float) -> float | None:
    """Return a number as JSON has it: None where it is not finite."""
    return float(value) if np.isfinite(value) else None


def to_json(value: Any) -> Any:
    """Return a value as JSON can hold it: arrays as lists, NaN as None, a configuration as its label and choices.

    Intervals, estimates and other dataclasses become their fields.
    """
    if isinstance(value, np.ndarray | np.generic):
        return to_json(value.tolist())
    if isinstance(value, pk.EvictionConfig):
        return to_json({"label": value.label(), **value.to_document()})
    if dataclasses.is_dataclass(value):
        return to_json(vars(value))
    if isinstance(value, Mapping):
        return {str(key): to_json(one) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return [to_json(one) for one in value]
    return finite_or_none(value) if isinstance(value, float) else value


def main(study: Callable[[argparse.Namespace], None], parser: argparse.ArgumentParser) -> None:
    """Run a study, in the style of the package's figures. What a user gets wrong is one line and exit code 2."""
    asked = parser.parse_args()
    asked.written = []  # the files that the study wrote before its document
    asked.output = asked.output or Path("runs") / "studies" / Path(sys.argv[0]).stem
    try:
        _make_folder(asked.output)
        with matplotlib.style.context(STYLE):
            study(asked)
    except pk.PerturbkvError as error:
        print(f"error: {error}", file=sys.stderr)
        raise SystemExit(error.exit_code) from None


def _make_folder(folder: Path) -> None:
    """Make the folder of a study's files. Raises PerturbkvError where it cannot be."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise pk.PerturbkvError(
            f"expected a folder for results at {folder}, got '{error.strerror}'; choose another --output"
        ) from None
