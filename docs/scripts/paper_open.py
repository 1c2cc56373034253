"""Rows of docs/paper.md: what the paper leaves open, and what others asked; docs/questions.md has each at length."""

from __future__ import annotations

from pathlib import Path

from paper_read import (
    UNDECIDED,
    Document,
    Row,
    Told,
    analysis,
    document,
    estimate,
    listed,
    lower,
    policy_of,
    ratio,
    samples,
    value,
    verdict,
)
from tables import number, percent, selection

ANSWERED = "answered"
"""What a row says of a question that is no claim, where its interval decides."""


def _alpha_zero(output: Path) -> Told:
    """Isolated Σ at α = 0 over that at 0.25, on the same heads."""
    found = {round(one["alpha"], 2): one for one in analysis(output, "alpha", "alpha")["curve"]}
    cells = [f"α = {at:g}: {number(found[at]['ratio'], found[at]['interval'])}" for at in (0.0, 0.5, 1.0)]
    text = (
        f"isolated Σ over that of α = 0.25: {listed(cells)}; n = {len(analysis(output, 'alpha', 'alpha')['samples'])}"
    )
    return Told(text, verdict(found[0.0]["interval"], 1, 1))


def _row(found: Document, name: str) -> Document:
    (only,) = (one for one in found["rows"] if one["name"] == name)
    row: Document = only
    return row


def _still_better(output: Path) -> Told:
    """α = 0 against pooled attention, both over the paper's α, as a ratio of their means."""
    found = analysis(output, "alpha", "alpha")
    attention = _row(found, "attention")
    text = f"attention's isolated Σ is {value(attention, 'over_paper_sum_ratio')} of that of α = 0.25"
    zero = next(one for one in found["curve"] if one["alpha"] == 0)
    found_lower = lower(zero["interval"], attention["over_paper_sum_ratio_interval"])
    return Told(f"{text}, α = 0's {number(zero['ratio'], zero['interval'])}", found_lower)


def _tuned(output: Path) -> Told:
    """Choices of some samples judged on others, over the best fixed α of the same samples."""
    found = analysis(output, "alpha", "alpha")
    (one,) = (one for one in found["rows"] if (one["name"], one["chosen_on"]) == ("per head", "others"))
    text = f"per head, chosen on other prompts: isolated Σ {value(one, 'over_fixed_sum_ratio')} of the best fixed α's"
    return Told(f"{text}; n = {len(found['samples'])}", _answer(one["over_fixed_sum_ratio_interval"]))


def _answer(interval: Document | None, at: float = 1) -> str:
    decided = interval is not None and interval["kind"] == "interval" and not interval["low"] <= at <= interval["high"]
    return ANSWERED if decided else UNDECIDED


def _distances(output: Path) -> Told:
    """Selecting by ν in L2 against ν in L1, and what L2 and cosine conclude of the same comparisons."""
    (setting,) = analysis(output, "measures", "measures")["settings"]
    cells = []
    for one in setting["orders"]:
        rho = one["rho"]
        cells.append(f"{one['kind']} " + listed(f"{name} {estimate(rho[name])}" for name in rho))
    norms = [measured for one in setting["norms"] for measured in one["measured"] if measured["distance"] == "l1"]
    sums = listed(f"{one['kind']} {value(one, 'sum_ratio', 3)}" for one in norms[:2])
    return Told(
        f"methods' order, ρ with L1's: {listed(cells)}; two-stage by L2 norms, Σ in L1 over L1 norms': {sums}", ANSWERED
    )


def _pages(output: Path) -> Told:
    found = {selection(one["treatment"]): one for one in analysis(output, "pages", "heads")["comparisons"]}
    one, best = found["two-stage"], found["hindsight-attention"]
    text = (
        f"quest, pages by A ν over pages by A: isolated {ratio(one, 'isolated')}, propagated {ratio(one)}; by a page's "
        f"true A (control): isolated {ratio(best, 'isolated')}; n = {one['samples']}"
    )
    return Told(text, _answer(one["propagated"]["sum_ratio_interval"]))


def _lines(output: Path) -> Told:
    """The criterion over attention: with all sums, and where neither sums what every query looks at anyway."""
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
    verdicts = [_answer(one[kind]["sum_ratio_interval"]) for kind in ("isolated", "propagated")]
    return Told(text, ANSWERED if ANSWERED in verdicts else UNDECIDED)


def _regret(output: Path) -> Told:
    found = document(output, "regret", "regret.json")
    part = next(one for one in found["parts"] if one["part"] == "prompt")
    one = next(one for one in part["methods"] if selection(one["config"]) == "two-stage")
    factors = listed(f"{name} {estimate(one[name])}" for name in ("form", "query", "criterion"))
    text = f"two-stage's isolated L over the best set's known: × {estimate(one['factor'])}"
    return Told(f"{text}, of which {factors}; {part['heads']} heads, n = {len(found['samples'])}", ANSWERED)


def _split(output: Path) -> Told:
    found = analysis(output, "split", "split")
    one = next(one for one in found["spreads"] if selection(one["config"]) == "two-stage")
    setting = next(one for one in found["corrections"] if selection(one["baseline"]) == "two-stage")
    row = next(one for one in setting["rows"] if one["name"] == "corrected(mass=linear)")
    text = (
        f"{percent(one['by_mass'], one['by_mass_interval'])} of the variance of log L over heads is how much goes; "
        f"corrected by a stored mean of what went: propagated {ratio(row)} of two-stage's"
    )
    return Told(f"{text}; n = {row['samples']}", _answer(row["propagated"]["sum_ratio_interval"]))


def _swap(output: Path) -> Told:
    found = document(output, "swap", "patching.json")
    shapley = found["shapley"]
    players = sorted(shapley["players"], key=lambda one: -abs(one["value"]))[:3]
    cells = listed(f"layer {one['player']} {percent(one['value'], one['interval'])}" for one in players)
    whole = percent(shapley["everybody"], shapley["everybody_interval"])
    text = f"two-stage changes the last layer's drift by {whole}; Shapley values, the largest three of 30: {cells}"
    return Told(f"{text}; n = {found['samples']}", ANSWERED)


def _cliff(output: Path) -> Told:
    cells = []
    for one in analysis(output, "cliff", "budget-cliff")["methods"]:
        if selection(one["configs"][0]) in ("attention", "two-stage") and policy_of(one["configs"][0]) == "snapkv":
            for crossing in one["crossings"]:
                cells.append(f"{one['name']}, {crossing['threshold']:g} nat: {_crossing(crossing)}")
    return Told(f"budget at which the median KL passes {listed(cells)}; n = {samples(output, 'cliff')}", ANSWERED)


def _crossing(one: Document) -> str:
    return estimate(one, 3) if one["value"] is not None else one["beyond"]


def _stable(output: Path) -> Told:
    found = analysis(output, "stability", "stability")
    within = [one["perturbation"]["propagated"]["split_half"] for one in found["members"]]
    between = estimate(found["pairs"][0]["perturbation"]["propagated"]["rho"])
    cells = listed(f"{one['dataset']} {estimate(half)}" for one, half in zip(found["members"], within, strict=True))
    text = f"ρ of heads' propagated L between halves of the prompts: {cells}; between the two data sets {between}"
    return Told(text, ANSWERED)


ROWS = (
    Row("table 5, figure 7", "α = 0 does worse than α = 0.25 (scores there, isolated L here)", "alpha", _alpha_zero,
        "alpha, tables"),
    Row("figure 7", "and still better than SnapKV", "alpha", _still_better, "alpha, tables"),
    Row("open question 1", "is an α of its own for each head worth it?", "alpha", _tuned, "alpha"),
    Row("open question 2, appendix G", "would L2 or cosine do better than L1?", "measures", _distances, "heads"),
    Row("open question 3, appendix J", "does the criterion refine sparse decoding?", "pages", _pages, "sparse"),
    Row("open question 3", "does it refine a sparse prefill?", "lines", _lines, "sparse"),
    Row("conclusion", "how far is the selection from the best one?", "regret", _regret, "regret"),
    Row("section 3.2", "is a head hurt by how much goes, or by what goes?", "split", _split, "heads"),
    Row("section 5.2", "which layers decide what comes out?", "swap", _swap, "swap"),
    Row("limitations", "where is the fundamental loss of extremely small budgets (2.5 %)?", "cliff", _cliff, "heads"),
    Row("figure 2", "are they the same heads in other texts?", "stability", _stable, "heads"),
)  # fmt: skip
