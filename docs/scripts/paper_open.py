"""Rows of results/paper.md: what the paper leaves open, and what others asked; questions.md has more."""

from __future__ import annotations

from pathlib import Path

from paper_read import Document, Row, Told, analysis, document, estimate, listed, policy_of, ratio, samples, value
from paper_verdicts import ANSWERED, SUPPORTS, UNDECIDED, alike, answer, beyond_chance, chance, joined, verdict
from tables import number, percent, selection

_SAME = 0.5


def _tuned(output: Path) -> Told:
    """Return how choices of some samples do on others, over the best fixed α of the same samples."""
    found = document(output, "alpha", "alpha.json")
    (one,) = (one for one in found["rows"] if (one["name"], one["chosen_on"]) == ("per head", "others"))
    curve = {round(point["alpha"], 2): point for point in found["curve"]}
    cells = [f"α = {at:g}: {number(curve[at]['ratio'], curve[at]['ratio_interval'])}" for at in (0.0, 0.5, 1.0)]
    text = (
        f"per head, chosen on other prompts: isolated Σ {value(one['over_fixed'], 'sum_ratio')} of the best fixed α's; "
        f"one for all heads, over that of α = 0.25: {listed(cells)}"
    )
    return Told(f"{text}; n = {found['about']['samples']}", answer(one["over_fixed"]["sum_ratio_interval"]))


def _distances(output: Path) -> Told:
    """Return what selecting by ν in L2 brings over L1, and what L2 and cosine conclude of the same comparisons."""
    (setting,) = document(output, "measures", "measures.json")["settings"]
    cells = []
    for one in setting["orders"]:
        rho = one["rho"]
        cells.append(f"{one['kind']} " + listed(f"{name} {estimate(rho[name])}" for name in rho))
    norms = [measured for one in setting["norms"] for measured in one["measured"] if measured["distance"] == "l1"]
    sums = listed(f"{one['kind']} {value(one, 'sum_ratio', 3)}" for one in norms[:2])
    return Told(
        f"methods' order, ρ with L1's: {listed(cells)}; two-stage by L2 norms, Σ in L1 over L1 norms': {sums}",
        joined(alike(one["sum_ratio_interval"]) for one in norms[:2]),
    )


def _pages(output: Path) -> Told:
    found = {selection(one["treatment"]): one for one in analysis(output, "pages", "heads")["comparisons"]}
    one, best = found["two-stage"], found["hindsight-attention"]
    text = (
        f"quest, pages by A ν over pages by A: isolated {ratio(one, 'isolated')}, propagated {ratio(one)}; by a page's "
        f"true A (control): isolated {ratio(best, 'isolated')}; n = {one['samples']}"
    )
    return Told(text, _both(one))


def _both(one: Document) -> str:
    """Return isolated and propagated sums, each judged by the rule `effect`."""
    return joined(answer(one[kind]["sum_ratio_interval"]) for kind in ("isolated", "propagated"))


def _lines(output: Path) -> Told:
    """Return the criterion over attention: with all sums, and without those that every query looks at anyway."""
    found = {}
    for one in analysis(output, "lines", "heads")["comparisons"]:
        sides = one["baseline"], one["treatment"]
        found[*(side["policy_options"].get("sums") for side in sides), selection(sides[1])] = one
    keys = ("all", "all", "two-stage"), ("all", "free", "attention"), ("free", "free", "two-stage")
    one, free, own = (found[key] for key in keys)
    text = (
        f"vertical-slash, by A ν over by A: isolated {ratio(one, 'isolated')}, propagated {ratio(one)}; control, sums "
        f"without first entries and band: by A {ratio(free, 'isolated')} and {ratio(free)}, by A ν over that "
        f"{ratio(own, 'isolated')} and {ratio(own)}; n = {one['samples']}"
    )
    return Told(text, _both(one))


def _regret(output: Path) -> Told:
    """Return the factor over the best set known, and its parts, which depend on the order in which they are taken."""
    found = document(output, "regret", "regret.json")
    part = next(one for one in found["parts"] if one["part"] == "prompt")
    one = next(one for one in part["methods"] if selection(one["config"]) == "two-stage")
    least = "at least " if part["closed"] < part["heads"] else ""
    factors = listed(
        f"{name} {least if name == 'criterion' else ''}{estimate(one[name])}" for name in ("form", "query", "criterion")
    )
    text = (
        f"two-stage's isolated L over that of the best set known: × {least}{estimate(one['factor'])}; in steps from "
        f"two-stage to Top-k of the window's A ν, to Top-k of the realised A ν, to that set (another order would share "
        f"it out otherwise): {factors}; that set is proven best in {part['closed']} of {part['heads']} heads"
    )
    above = verdict(one["factor"]["interval"], 1, 1) == SUPPORTS
    return Told(f"{text}; n = {len(found['samples'])}", ANSWERED if above else UNDECIDED)


def _split(output: Path) -> Told:
    found = document(output, "split", "split.json")
    one = next(one for one in found["spreads"] if one["config"].startswith("snapkv:two-stage "))
    setting = next(each for each in found["corrections"] if each["baseline"] == one["config"])
    row = next(one for one in setting["rows"] if one["name"] == "corrected(mass=linear)")
    text = (
        f"{percent(one['by_mass'], one['by_mass_interval'])} of the variance of log L over heads is how much goes; "
        f"corrected by a stored mean of what went: propagated {ratio(row)} of two-stage's"
    )
    return Told(f"{text}; n = {found['about']['samples']}", answer(row["propagated"]["sum_ratio_interval"]))


def _swap(output: Path) -> Told:
    found = document(output, "swap", "patching.json")
    shapley = found["shapley"]
    players = sorted(shapley["players"], key=lambda one: -abs(one["value"]))[:3]
    cells = listed(f"layer {one['player']} {percent(one['value'], one['interval'])}" for one in players)
    whole = percent(shapley["everybody"], shapley["everybody_interval"])
    count = len(shapley["players"])
    decided = sum(answer(one["interval"], 0) == ANSWERED for one in shapley["players"])
    text = (
        f"two-stage changes the last layer's drift by {whole}; Shapley values, the largest three of {count}: {cells}; "
        f"{decided} of {count} intervals leave out 0, by chance up to {chance(count)}"
    )
    return Told(f"{text}; n = {found['samples']}", beyond_chance(decided, count))


def _cliff(output: Path) -> Told:
    cells, verdicts = [], []
    for one in analysis(output, "cliff", "budget-cliff")["methods"]:
        if selection(one["configs"][0]) in ("attention", "two-stage") and policy_of(one["configs"][0]) == "snapkv":
            for crossing in one["crossings"]:
                cells.append(f"{one['name']}, {crossing['threshold']:g} nat: {_crossing(crossing)}")
                verdicts.append(inside(crossing))
    text = f"budget at which the median KL passes {listed(cells)}"
    return Told(f"{text}; n = {samples(output, 'cliff')}", joined(verdicts))


def inside(crossing: Document) -> str:
    """Return what the rule `inside` says."""
    ends = crossing["interval"]
    known = crossing["value"] is not None and ends is not None and ends["kind"] == "interval"
    return ANSWERED if known and ends["low"] and ends["high"] is not None else UNDECIDED


def _crossing(one: Document) -> str:
    if one["value"] is None:
        return str(one["beyond"])
    if one["interval"] is not None and one["interval"]["high"] is None:
        return f"{number(one['value'], None, 3)} [{number(one['interval']['low'], None, 3)}, …]"
    return estimate(one, 3)


def _stable(output: Path) -> Told:
    found = document(output, "stability", "stability.json")
    within = [one["perturbation"]["propagated"]["split_half"] for one in found["members"]]
    between = found["pairs"][0]["perturbation"]["propagated"]["rho"]
    cells = listed(f"{one['dataset']} {estimate(half)}" for one, half in zip(found["members"], within, strict=True))
    text = f"ρ of heads' propagated L between halves of the prompts: {cells}; between the two data sets"
    return Told(f"{text} {estimate(between)}", answer(between["interval"], _SAME))


ROWS = (
    Row("open question 1", "is an α of its own for each head worth it?", "effect", "alpha", _tuned, "alpha"),
    Row("open question 2, appendix G", "would L2 or cosine do better than L1?", "alike", "measures", _distances,
        "heads"),
    Row("open question 3, appendix J", "does the criterion refine sparse decoding?", "effect", "pages", _pages,
        "sparse"),
    Row("open question 3", "does it refine a sparse prefill?", "effect", "lines", _lines, "sparse"),
    Row("conclusion", "how far is the selection from the best one?", "factor", "regret", _regret, "regret"),
    Row("section 3.2", "is a head hurt by how much goes, or by what goes?", "effect", "split", _split, "heads"),
    Row("section 5.2", "which layers decide what comes out?", "players", "swap", _swap, "swap"),
    Row("limitations", "where is the fundamental loss of extremely small budgets (2.5 %)?", "inside", "cliff", _cliff,
        "heads"),
    Row("figure 2", "are they the same heads in other texts?", "same", "stability", _stable, "heads"),
)  # fmt: skip
