"""The tables of what every distance says: ratios side by side, verdicts, orders, links, and what selects."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from perturbkv.analyses import text
from perturbkv.analyses.correlation.correlation_tables import estimate
from perturbkv.analyses.distances import DISTANCES
from perturbkv.analyses.naming import folded
from perturbkv.analyses.questions.measures.measure_links import KL, LOST, SCORE, Linked
from perturbkv.analyses.questions.measures.measure_orders import Order
from perturbkv.analyses.questions.measures.measure_rows import KINDS, OTHERS, Row
from perturbkv.analyses.questions.measures.measure_settings import Setting
from perturbkv.configs.eviction import EvictionConfig
from perturbkv.display import Table

SHORT = {"l1": "L1", "l2": "L2", "cosine": "cosine"}
"""Distances where there is little room."""
_SIDES = tuple(f"#{SHORT[name]}" for name in DISTANCES)
_AGAINST = tuple(
    f"#{SHORT[other]}: {what}" for other in OTHERS for what in ("opposite\nto L1", "decided in\none alone")
)
_TARGETS = {
    KL: "ρ with KL of the same step, which nearly is the same thing",
    SCORE: "ρ with the answer's score",
    LOST: "lost answers above kept ones",
}
_LETTERS = 22
Named = Callable[[EvictionConfig], str]


def tables(setting: Setting) -> list[Table | str]:
    """All of one setting; what it has none of is left out."""
    return [
        _ratios(f"b={setting.name}: over {baseline_of(setting)}", setting.rows, setting.side),
        _better(setting),
        _verdicts(setting),
        *([_order(setting)] if setting.orders else []),
        *_links(setting),
        *([_ratios(f"b={setting.name}: selected by L2 over by L1 norms", setting.norms, setting.side)]
          if setting.norms else []),
    ]  # fmt: skip


def baseline_of(setting: Setting) -> str:
    """What a setting's treatments stand over, in words."""
    names = list(dict.fromkeys(setting.side(one.baseline) for one in setting.rows))
    return names[0] if len(names) == 1 else "its baseline"


def _ratios(title: str, rows: Sequence[Row], named: Named) -> Table:
    """Σ of all heads, the median head and what comes out, a distance beside the other."""
    return Table(title, ("", *_SIDES), [line for row in rows for line in _ratio_lines(row, named(row.treatment))])


def _ratio_lines(row: Row, name: str) -> list[list[str]]:
    lines = [[folded(name, _LETTERS), "", "", ""]]
    for kind in KINDS:
        found = [row.kind(kind, distance) for distance in DISTANCES]
        lines += [
            [f"  {kind}, Σ", *(text.decimal(one.sum_ratio, one.sum_ratio_interval) for one in found)],
            ["    its median head", *(text.decimal(one.median_ratio, one.median_ratio_interval) for one in found)],
        ]
    drift = [row.drift[distance] for distance in DISTANCES]
    return [*lines, ["  last layer's drift", *(text.decimal(one.ratio, one.interval) for one in drift)]]


def _better(setting: Setting) -> Table:
    rows = [line for row in setting.rows for line in _better_lines(row, setting.side(row.treatment))]
    return Table(f"b={setting.name}: heads perturbed less than under {baseline_of(setting)}", ("", *_SIDES), rows)


def _better_lines(row: Row, name: str) -> list[list[str]]:
    found = [[row.kind(kind, distance) for distance in DISTANCES] for kind in KINDS]
    shares = [[text.percent(one.better_share, one.better_share_interval) for one in line] for line in found]
    return [
        [folded(name, _LETTERS), "", "", ""],
        *([f"  {kind}", *line] for kind, line in zip(KINDS, shares, strict=True)),
    ]


def _verdicts(setting: Setting) -> Table:
    rows = [line for row in setting.rows for line in _verdict_lines(row, setting.side(row.treatment))]
    return Table(f"b={setting.name}: heads whose verdict is another than in L1", ("", *_AGAINST), rows)


def _verdict_lines(row: Row, name: str) -> list[list[str]]:
    lines = [[folded(name, _LETTERS), *[""] * len(_AGAINST)]]
    for kind in KINDS:
        cells = [
            text.percent(*pair)
            for one in row.against
            if one.kind == kind
            for pair in ((one.opposite, one.opposite_interval), (one.alone, one.alone_interval))
        ]
        lines.append([f"  {kind}", *cells])
    return lines


def _order(setting: Setting) -> Table:
    """The place of every method by each measure, in the order of propagated L1; below, agreement with L1."""
    last = setting.orders[-1].ranks["l1"]
    places = sorted(range(len(setting.configs)), key=lambda place: float(last[place]))
    columns = ("", *(f"#{kind[:4]}.\n{SHORT[name]}" for kind in KINDS for name in DISTANCES))
    rows = [
        [folded(setting.named(setting.configs[place]), _LETTERS), *_places(setting.orders, place)] for place in places
    ]
    return Table(f"b={setting.name}: methods' places, 1 perturbs least", columns, [*rows, _agreement(setting.orders)])


def _places(orders: Sequence[Order], place: int) -> list[str]:
    return [f"{order.ranks[name][place]:g}" for order in orders for name in DISTANCES]


def _agreement(orders: Sequence[Order]) -> list[str]:
    cells = [estimate(order.rho[name]) if name in order.rho else "" for order in orders for name in DISTANCES]
    return ["ρ with L1 in a prompt", *cells]


def _links(setting: Setting) -> list[Table]:
    """A table for each thing that is lost: what L1 tells, and how much more or less the others do."""
    found = {target: [one for one in setting.links if one.target == target] for target in _TARGETS}
    columns = ("", "#L1", "#L2", "#cosine", "#L2 less L1", "#cosine less L1", "#n")
    return [
        Table(f"b={setting.name}: {_TARGETS[target]}", columns, [_link(kind, links) for kind in KINDS])
        for target, links in found.items()
        if links
    ]


def _link(kind: str, links: Sequence[Linked]) -> list[str]:
    own = [one for one in links if one.kind == kind]
    less = [one.less_l1 for one in own if one.less_l1 is not None]
    return [kind, *(estimate(one.value) for one in own), *map(estimate, less), str(own[0].value.prompts)]
