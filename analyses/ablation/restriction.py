"""What does it cost that an engine's heads share one block table, which keeps whole blocks?."""

from __future__ import annotations

from typing import Any

from perturbkv.analyses import text
from perturbkv.analyses.ablation.restrictions import BASELINE, Row, Setting, settings
from perturbkv.analyses.naming import folded, short
from perturbkv.analyses.of_settings import OfSettings, by_head
from perturbkv.analyses.sentences import Case, compared, over, sentence
from perturbkv.display import Table
from perturbkv.trace import Trace

_HEADS = (
    "",
    "#held /\nfull",
    "#isolated:\nΣ of all heads",
    "#propagated:\nΣ of all heads",
    "#propagated:\nmedian head",
)
_OUTPUT = ("", "#last layer's drift\nover the baseline's", "#KL of the next token\n(nat)")


class Restriction(OfSettings[Setting]):
    """Every setting of a trace that holds one kept set per key/value head and something to compare with it.

    A setting: what shares everything but the restriction.
    """

    def conclusion(self) -> str:
        """By how much more restricted kept sets perturb; a set per query head is no restriction."""
        told = short([setting.baseline for setting in self.settings])
        cases = [_case(words, row) for words, one in zip(told, self.settings, strict=True) for row in one.rows]
        restricted = [case for case in cases if case is not None]
        who, baseline = "a restricted kept set", f"one of single entries per {BASELINE} head"
        if not restricted:
            return f"This trace holds no restriction to layers or blocks, only {BASELINE} and query."
        said = compared(who, baseline, restricted)
        return sentence(f"{said} (propagated, all heads, equal budgets; {over(self.identity.samples)})")

    def tables(self) -> list[Table | str]:
        """Of each setting what every restriction does to the heads, and to what comes out."""
        return [part for setting in self.settings for part in _tables(setting)]

    def notes(self) -> str:
        """What rows and columns mean, and how much each cache holds."""
        kind = self.settings[0].rows[0].compared.propagated
        return (
            f"{text.about_intervals(self.identity.samples, medians=True)} L1, treatment over {BASELINE}'s; below 1 "
            "it perturbs less. KL: median over samples. Blocks that hold an entry of the window are held whole, and a "
            "budget of b never holds more than b: what it cannot spend on a whole block is part of what blocks cost. "
            "A set per query head holds more of a grouped cache, and is no equal comparison. "
            f"{text.ABOUT_HELD} {text.about_floor(kind.floor_relative_median)}"
        )

    def records(self) -> list[dict[str, Any]]:
        """A row per restriction, kind, layer and head: both sides' mean L1 over samples, their floor and the verdict.

        `baseline` is the label of the set per key/value head, `held` what the restricted cache holds over the full
        one. A verdict is 1 (better), 0 (tied) or −1 (worse).
        """
        rows = [row for setting in self.settings for row in setting.rows]
        return [one for row in rows for one in by_head(row.compared, name=row.name, held=row.compared.held[1])]


def restriction(trace: Trace, step: int = 0) -> Restriction:
    """What does it cost to keep one set for all heads of a layer, or whole blocks, as engines do?.

    Compared is L1, isolated and propagated (METHOD: the quantities), of each granularity and size of block with that of
    `kv`, one set of single entries per key/value head, at the same budget; beside it the drift after the last layer,
    and KL(full ‖ evicted) of the next token.

    Args:
        trace: what was measured.
        step: decode step.

    Raises TraceError where no setting holds `kv` and another granularity or block, or the trace has no complete sample
    or not what is needed; ConfigError where it has no such step.

    Example, of a `trace` of 2 layers and 2 heads:
        >>> import perturbkv as pk
        >>> [row.name for row in pk.restriction(trace).settings[0].rows]
        ['kv(block=16)', 'layer', 'query']
    """
    return Restriction.of(trace, settings(trace, step), step)


def _case(words: str, row: Row) -> Case | None:
    kind = row.compared.propagated
    return None if row.wider else (f"{words} {row.name}".strip(), kind.sum_ratio, kind.sum_ratio_interval)


def _tables(setting: Setting) -> list[Table | str]:
    ones = ["1", "1", "1"]
    heads = [[BASELINE, text.held(setting.rows[0].compared.held[0]), *ones], *map(_heads, setting.rows)]
    output = [[BASELINE, "1", text.significant(setting.kl.median, setting.kl.interval)], *map(_output, setting.rows)]
    return [
        Table(f"{setting.setting}: L1 over that of {BASELINE}", _HEADS, heads),
        Table(f"{setting.setting}: what comes out", _OUTPUT, output),
    ]


def _heads(row: Row) -> list[str]:
    isolated, propagated = row.compared.isolated, row.compared.propagated
    return [
        folded(row.name),
        text.held(row.compared.held[1]),
        text.decimal(isolated.sum_ratio, isolated.sum_ratio_interval, apart="\n"),
        text.decimal(propagated.sum_ratio, propagated.sum_ratio_interval, apart="\n"),
        text.decimal(propagated.median_ratio, propagated.median_ratio_interval, apart="\n"),
    ]


def _output(row: Row) -> list[str]:
    drift = text.decimal(row.drift_ratio, row.drift_ratio_interval, apart="\n")
    return [folded(row.name), drift, text.significant(row.kl.median, row.kl.interval)]
