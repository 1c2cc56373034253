"""Which eviction method perturbs least, and how much of that is what it protects? (METHOD: Protection)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

from perturbkv.analyses import text
from perturbkv.analyses.ablation.method_rows import Row, Setting, settings
from perturbkv.analyses.heads.head_comparison import HeadComparison
from perturbkv.analyses.naming import counted, folded
from perturbkv.analyses.of_settings import OfSettings, by_head
from perturbkv.analyses.pairing import matches
from perturbkv.analyses.sentences import capital, decided, over
from perturbkv.display import Table
from perturbkv.errors import TraceError
from perturbkv.trace import Trace

_OVER = ("method", "#held /\nfull", "#snapkv", "#random,\nsame ends", "#snapkv,\nsame ends")
_OUTPUT = ("method", "#isolated", "#last layer's\ndrift", "#KL of the next\ntoken (nat)")


class MethodRanking(OfSettings[Setting]):
    """Every budget and granularity of a trace that holds SnapKV and another method.

    A setting: methods of equal budget and granularity.
    """

    def conclusion(self) -> str:
        """Of each setting the method that perturbs least, and how many perturb less than SnapKV, or than chance."""
        return " ".join(_concluded(one) for one in self.settings) + f" ({over(self.identity.samples)})"

    def tables(self) -> list[Table | str]:
        """Of each setting the methods by their propagated perturbation, then what comes out."""
        return [part for setting in self.settings for part in _tables(setting)]

    def notes(self) -> str:
        """What rows and columns mean."""
        kind = self.settings[0].rows[0].compared.propagated
        return (
            f"{text.about_intervals(self.identity.samples, medians=True)} Σ of all heads' propagated L1, the "
            "method's over what the column names; below 1 it perturbs less. Same ends: with the method's own window "
            "and protected first and recent entries, the others drawn at random, or by SnapKV's score. KL: median over "
            f"samples. {text.ABOUT_HELD} {text.about_floor(kind.floor_relative_median)}"
        )

    def records(self) -> list[dict[str, Any]]:
        """A row per method, kind, layer and head: both sides' mean L1 over samples, their floor and the verdict.

        `baseline` is SnapKV's label. A verdict is 1 (better), 0 (tied) or −1 (worse).
        """
        return [
            one for setting in self.settings for row in setting.rows for one in by_head(row.compared, name=row.name)
        ]


def methods(trace: Trace, step: int = 0, only: Sequence[str] = ()) -> MethodRanking:
    """Rank eviction methods by how much they perturb, each beside what its protected entries alone bring.

    Compared is propagated L1 over all heads (METHOD: the quantities) with SnapKV's at the same budget, and with
    random entries and SnapKV's under the method's own window and protected entries, where the trace holds them.

    Args:
        trace: what was measured.
        step: decode step.
        only: policies, or `policy:selection`, where not all that the trace holds are to be ranked.

    Raises TraceError where no budget holds SnapKV and another policy, or the trace has no complete sample or not what
    is needed; ConfigError where it has no such step.
    """
    for name in only:
        if not any(matches(config, name) for config in trace.run.configs):
            held = ", ".join(dict.fromkeys(str(config.policy) for config in trace.run.configs))
            msg = f"expected {name} among the trace's methods, got a trace of {held}"
            raise TraceError(msg)
    return MethodRanking.of(trace, settings(trace, step, only), step)


def _concluded(setting: Setting) -> str:
    """'At b=128 query, caote perturbs least: 0.80 [0.70, 0.90] of snapkv; of 12 methods 5 perturb less, …'."""
    best = setting.rows[0]
    ratio, interval = best.compared.propagated.sum_ratio, best.compared.propagated.sum_ratio_interval
    least = best.name if ratio < 1 else "snapkv"
    told = f"{text.decimal(ratio, interval)} of snapkv's" if ratio < 1 else f"{best.name} is next, {ratio:.2f} of it"
    chance = [row.controls["random"] for row in setting.rows if "random" in row.controls]
    beside = f"; {_counted(chance)} than random entries under the same protection" if chance else ""
    among = f"of {counted(len(setting.rows), 'method')} {_counted([row.compared for row in setting.rows])}"
    return f"{capital(f'at {setting.setting}')}, {least} perturbs least ({told}); {among} than snapkv{beside}."


def _counted(found: list[HeadComparison]) -> str:
    """'5 perturb less and 3 more, 4 undecided'."""
    sides = Counter(decided(one.propagated.sum_ratio_interval, 1) for one in found)
    undecided = sides[0] + sides[None]
    return f"{sides[-1]} perturb less and {sides[1]} more{f' ({undecided} undecided)' if undecided else ''}"


def _tables(setting: Setting) -> list[Table | str]:
    held = text.held(setting.rows[0].compared.held[0])
    first = ["snapkv (= 1)", held, "1", _summed(setting.controls.get("random")), ""]
    kl = text.significant(setting.kl.median, setting.kl.interval)
    return [
        Table(
            f"{setting.setting}: propagated, Σ of all heads, over that of", _OVER, [first, *map(_over, setting.rows)]
        ),
        Table(
            f"{setting.setting}: over snapkv's, and KL",
            _OUTPUT,
            [["snapkv", "1", "1", kl], *map(_output, setting.rows)],
        ),
    ]


def _over(row: Row) -> list[str]:
    ratios = [row.compared, row.controls.get("random"), row.controls.get("attention")]
    return [folded(row.name), text.held(row.compared.held[1]), *map(_summed, ratios)]


def _summed(found: HeadComparison | None) -> str:
    if found is None:
        return ""
    return text.decimal(found.propagated.sum_ratio, found.propagated.sum_ratio_interval, apart="\n")


def _output(row: Row) -> list[str]:
    isolated = row.compared.isolated
    return [
        folded(row.name),
        text.decimal(isolated.sum_ratio, isolated.sum_ratio_interval, apart="\n"),
        text.decimal(row.drift_ratio, row.drift_ratio_interval, apart="\n"),
        text.significant(row.kl.median, row.kl.interval),
    ]
