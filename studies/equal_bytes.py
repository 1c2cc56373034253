"""Evicting entries against storing more of them in few bits, at equal bytes: perturbation, KL and answers.

A budget of bytes is filled with entries of 16 bits, or with more entries of 8, 4 or 2 bits, scales and minima counted
(`quantise(bits=4, fill=d_head)`). Rows of a setting differ in bits alone. Beside them stands what keeps every entry in
few bits: quantisation alone, compared with nothing.

How it is decided. Perturbation is the propagated L1 of the last layer's heads over the norms of the full run's outputs,
of the first decoding step. A number of bits moves less than evicting alone, or more, where the 95 % interval of the
ratio of both sums over samples lies on one side of 1; its answers score higher, or lower, where that of the difference,
sample by sample, lies on one side of 0 (`--answers`). Perturbation of one step need not tell an answer.

    python studies/equal_bytes.py --dataset needle --length 1000 --samples 24 --answers
    python studies/equal_bytes.py TRACE
"""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import common
import numpy as np
from common import estimate, interval_text, number_text, side_of, variable
from matplotlib.figure import Figure

import perturbkv as pk

BITS = (8, 4, 2)
"""Held against 16."""
WORDS = {1: "more", -1: "less", 0: "undecided"}
SCORED = {1: "higher", -1: "lower", 0: "undecided"}


def configurations(asked: argparse.Namespace, d_head: int) -> list[pk.EvictionConfig]:
    """Return each method at each budget in 16 bits and in few, then the first method with every entry in few bits."""
    chosen = {"granularity": "kv", "window": asked.window, "selection": asked.compare.split(",")}
    few = [f"quantise(bits={bits}, fill={d_head})" for bits in asked.bits]
    budgets = asked.budget or (["0.2", "0.4"] if asked.short else ["0.1", "0.2", "0.4"])
    evicted = pk.grid(budgets, precision=["full", *few], **chosen)
    chosen["selection"] = chosen["selection"][:1]
    return [*evicted, *pk.grid(1.0, precision=[f"quantise(bits={bits})" for bits in asked.bits], **chosen)]


def stored_as(config: pk.EvictionConfig) -> str:
    """Return how a configuration stores numbers: `16 bits`, `4 bits`, or its precision where more than bits says it."""
    text = str(config.precision.drop(["fill"]))
    return f"{config.bits} bits" if text in ("full", f"quantise(bits={config.bits})") else text


class TraceNumbers:
    """Measured numbers of the rows: (sample, config) arrays of a trace's complete samples."""

    def __init__(self, trace: pk.Trace) -> None:
        self.configs = trace.run.configs
        self.points = {point.config: point for point in pk.equal_bytes(trace, 0).points}
        norms = variable(trace, "output_norm")[:, -1].sum(axis=-1)
        self.perturbation = variable(trace, "perturbation_propagated")[:, :, -1].sum(axis=-1) / norms[:, None]
        self.kl = variable(trace, "logit_kl")
        self.cache_share = common.cache_shares(trace)
        self.score = self.full_score = None
        if "score_full" in trace.arrays:
            self.score, self.full_score = (
                trace.get(name, "equal_bytes").astype(float) for name in ("score", "score_full")
            )
            if np.isnan(self.score).any() or np.isnan(self.full_score).any():
                raise pk.PerturbkvError("equal_bytes needs graded answers, got some that no metric graded")

    def row(self, index: int, base: int | None) -> dict[str, Any]:
        """Return a configuration's row, held against the one at `base`, which evicts alone; None: against none."""
        stats, config, own, kl = pk.stats.intervals, self.configs[index], self.perturbation[:, index], self.kl[:, index]
        point = self.points[config]
        row = {
            "config": config, "bits": config.bits, "stored": stored_as(config), "kind": point.kind,
            "held": self.cache_share[index], "bytes": point.packed.share,
            **estimate("moved", (own.mean(), stats.of_mean(own, stats.POSITIVE))),
            **estimate("kl_median", (float(np.median(kl)), stats.of_median(kl))),
        }  # fmt: skip
        if base is not None:
            first = self.perturbation[:, base]
            over = float(pk.stats.arithmetic.ratio(own.sum(), first.sum()))
            row |= estimate("over", (over, stats.of_ratio(own, first)))
        if self.score is not None:
            score = self.score[:, index]
            row |= estimate("score", (score.mean(), stats.of_mean(score, stats.share_kind(0))))
            if base is not None:
                gain = score - self.score[:, base]
                row |= estimate("gain", (gain.mean(), stats.of_mean(gain, stats.DIFFERENCE)))
        return row


def setting_rows(numbers: TraceNumbers) -> list[list[dict[str, Any]]]:
    """Return the rows of each budget of bytes, the one in 16 bits first; no setting where 16 bits hold everything.

    Raises PerturbkvError where nothing of 16 bits has another of its bytes beside it.
    """
    found = []
    for base, config in enumerate(numbers.configs):
        if numbers.points[config].kind != "evicted":
            continue
        alike = [
            index
            for index, other in enumerate(numbers.configs)
            if other.precision.options.get("fill") and dataclasses.replace(other, precision=config.precision) == config
        ]
        if alike:
            ordered = sorted(alike, key=lambda index: numbers.cache_share[index])
            found.append([numbers.row(index, base) for index in (base, *ordered)])
    if not found:
        raise pk.PerturbkvError(
            "equal_bytes needs a configuration in 16 bits that evicts and one like it in quantise(bits=…, fill=…), "
            "whose budget counts bytes; python studies/equal_bytes.py makes such a trace"
        )
    return found


def whole_cache_rows(numbers: TraceNumbers, shown: Sequence[Sequence[Mapping[str, Any]]]) -> list[dict[str, Any]]:
    """Return the rows of configurations that keep every entry in few bits and are in none of the settings `shown`."""
    compared = {row["config"] for rows in shown for row in rows}
    alone = [
        index
        for index, config in enumerate(numbers.configs)
        if numbers.points[config].kind == "rounded"
        and not config.precision.options.get("fill")
        and config not in compared
    ]
    return [
        numbers.row(index, None)
        for index in sorted(alone, key=lambda index: -numbers.points[numbers.configs[index]].packed.share)
    ]


def table_row(row: Mapping[str, Any]) -> dict[str, Any]:
    """Return a row as the table shows it: ratio and gain of few bits alone."""
    few = row["kind"] != "evicted"
    shown = {
        "method": f"{row['config'].policy}:{row['config'].selection} b={row['config'].budget}",
        "bits": row["stored"].removesuffix(" bits"), "share": row["held"], "bytes": row["bytes"],
        "L1 / evicting": number_text(row, "over") if few and "over" in row else "",
        "": WORDS[side_of(row["over_interval"], 1)] if few and "over" in row else "",
        "KL": row["kl_median"],
    }  # fmt: skip
    if "gain" in row and few:
        ends = row["gain_interval"]
        shown |= {"points": interval_text(100 * row["gain"], common.in_percent(ends), 1),
                  "score": SCORED[side_of(ends, 0)]}  # fmt: skip
    return shown


def conclusion(shown: Sequence[Sequence[Mapping[str, Any]]]) -> str:
    """Return, per precision, in how many settings it moves less and more, and scores higher and lower."""
    lines = []
    for stored in dict.fromkeys(row["stored"] for rows in shown for row in rows[1:]):
        rows = [row for setting in shown for row in setting[1:] if row["stored"] == stored]
        sides = [side_of(row["over_interval"], 1) for row in rows]
        told = f"{stored} move less than evicting alone in {sides.count(-1)} of {len(rows)}, more in {sides.count(1)}"
        gains = [side_of(row["gain_interval"], 0) for row in rows if "gain" in row]
        told += f"; score higher in {gains.count(1)}, lower in {gains.count(-1)}" if gains else ""
        lines.append(f"At equal bytes {told}.")
    return "\n".join(lines)


def draw(shown: Sequence[Sequence[Mapping[str, Any]]], kept: Sequence[Mapping[str, Any]], full: float | None) -> Figure:
    """Draw perturbation, and scores where there are any, over bytes: a column per method, a line per precision.

    Args:
        shown: the rows of each setting.
        kept: the rows that keep every entry, drawn as stars.
        full: the full cache's mean score, a line; None: without scores.
    """
    methods: dict[str, list[Mapping[str, Any]]] = {}
    for rows in shown:
        config = rows[0]["config"]
        methods.setdefault(f"{config.policy}:{config.selection}", []).extend(rows)
    readings = [("moved", "last layer's L1 / ‖o‖₁", 1), *([("score", "score × 100", 100)] if full is not None else [])]
    precisions = dict.fromkeys(row["stored"] for rows in (*shown, kept) for row in rows)
    figure = common.page_figure(62 * len(readings) + 8)
    panels = figure.subplots(len(readings), len(methods), squeeze=False, sharey="row", sharex=True)
    for line, (name, label, factor) in zip(panels, readings, strict=True):
        for axes, (method, rows) in zip(line, methods.items(), strict=True):
            for stored in precisions:
                own = sorted((row for row in rows if row["stored"] == stored), key=lambda row: row["bytes"])
                bars = common.error_bars([row[name] for row in own], [row[f"{name}_interval"] for row in own])
                marks = axes.errorbar(
                    [100 * row["bytes"] for row in own], [factor * row[name] for row in own],
                    yerr=[[factor * end for end in ends] for ends in bars], marker="o", markersize=3, linewidth=0.9,
                )  # fmt: skip
                marks.set_label(stored)
                alone = [row for row in kept if row["stored"] == stored]
                axes.plot([100 * row["bytes"] for row in alone], [factor * row[name] for row in alone], "*",
                          color=marks[0].get_color())  # fmt: skip
            if name == "score":
                axes.axhline(100 * float(full or 0), color="0.35", linestyle="--", linewidth=0.9)
            else:
                common.plain_log(axes, "y")
                axes.set_title(method)
            common.log_ticks(axes, (round(100 * row["bytes"], 1) for row in rows if row["kind"] == "evicted"))
        line[0].set_ylabel(label)
    for axes in panels[-1]:
        axes.set_xlabel("bytes / full cache in 16 bits (%)")
    figure.legend(*panels[0, 0].get_legend_handles_labels(), loc="outside upper left", ncols=4,
                  title="stars: every entry kept")  # fmt: skip
    return figure


def study(asked: argparse.Namespace) -> None:
    """Measure or read the trace; print the table, write document and picture."""
    configs: list[pk.EvictionConfig] = []
    if not asked.trace:
        if wrong := [bits for bits in asked.bits if bits not in BITS]:
            raise pk.PerturbkvError(f"--bits takes 8, 4 and 2, got {wrong[0]}")
        configs = configurations(asked, common.load_model(asked).d_key)
    trace = common.read_or_measure(asked, configs, **({"generate": asked.max_new_tokens} if asked.answers else {}))
    numbers = TraceNumbers(trace)
    shown = setting_rows(numbers)
    kept = whole_cache_rows(numbers, shown)
    common.show("one budget of bytes, in entries of 16 bits or more entries of fewer bits",
                [table_row(row) for rows in (*shown, kept) for row in rows])  # fmt: skip
    samples = int(trace.ok.sum())
    print(f"n = {samples}; in brackets: 95 % intervals over samples; KL: median, nat.\n{conclusion(shown)}")
    compared = {row["config"] for rows in (*shown, kept) for row in rows}
    document: dict[str, Any] = {
        **common.trace_summary(trace), "settings": shown, "everything": kept,
        "left_out": [config.label() for config in trace.run.configs if config not in compared],
    }  # fmt: skip
    full = numbers.full_score
    if full is not None:
        ends = pk.stats.intervals.of_mean(full, pk.stats.intervals.share_kind(0))
        document |= estimate("full_score", (full.mean(), ends))
    common.save(asked, document, draw(shown, kept, None if full is None else float(full.mean())))


if __name__ == "__main__":
    parser = common.options(__doc__ or "")
    parser.add_argument("--compare", default="attention,two-stage", metavar="NAMES", help="selections [%(default)s]")
    parser.add_argument("--bits", type=int, nargs="+", default=BITS, help="held against 16 [8 4 2]")
    parser.add_argument("--window", type=int, default=32, help="[%(default)s]")
    parser.add_argument("--answers", action="store_true", help="also generate answers, and score them")
    parser.add_argument("--max-new-tokens", type=int, default=64, help="of an answer, with --answers [%(default)s]")
    common.main(study, parser)
