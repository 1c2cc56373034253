"""Rows of docs/paper.md: scores, budgets saved, chats, and what measuring costs (tables 1 to 8, figures 1 and 8)."""

from __future__ import annotations

import json
import math
import statistics
from pathlib import Path

import numpy as np
from paper_read import (
    CONTRADICTS,
    OPEN,
    SUPPORTS,
    Document,
    Row,
    Told,
    analysis,
    document,
    estimate,
    joined,
    listed,
    lower,
    policy_of,
    value,
    verdict,
)
from tables import number, percent, selection

from perturbkv.analyses.json_values import json_value
from perturbkv.analyses.stats import intervals

_BENCH = Path(__file__).parents[1] / "bench" / "cpu.json"
_SUITES = {"quality": "four retrieval tasks", "summaries": "multi_news"}
_BUDGETS = (128, 256)
_RISING = ("snapkv", "pyramidkv", "adakv")


def _gain(found: Document, policy: str, budget: int) -> Document:
    (only,) = (
        one for one in found["gains"] if (policy_of(one["treatment"]), one["treatment"]["budget"]) == (policy, budget)
    )
    gain: Document = only
    return gain


def _integrated(policy: str, output: Path) -> Told:
    """Mean score of two-stage less that of attention, over the prompts of each suite."""
    cells, verdicts = [], []
    for step, name in _SUITES.items():
        found = analysis(output, step, "quality")["average"]
        for budget in _BUDGETS:
            gain = _gain(found, policy, budget)
            verdicts.append(verdict(gain["difference_interval"], 0, 1))
            counts = f"{gain['wins']} better, {gain['losses']} worse of {found['samples']}"
            cells.append(f"{name}, b = {budget}: {value(gain, 'difference', 3)} ({counts})")
    return Told(f"score less attention's: {listed(cells)}", joined(verdicts))


def _snapkv(output: Path) -> Told:
    return _integrated("snapkv", output)


def _pyramid(output: Path) -> Told:
    return _integrated("pyramidkv", output)


def _adakv(output: Path) -> Told:
    return _integrated("adakv", output)


def _method(found: Document, policy: str, way: str, budget: int) -> Document:
    for one in found["methods"]:
        config = one["config"]
        if (policy_of(config), selection(config), config["budget"]) == (policy, way, budget):
            method: Document = one
            return method
    raise LookupError(policy, way, budget)


def _needle(output: Path) -> Told:
    """SnapKV, PyramidKV, AdaKV by the score of both needle tasks, with and without the criterion."""
    cells, verdicts = [], []
    for found in _needles(output):
        for budget in _BUDGETS:
            gains = [_gain(found, policy, budget) for policy in _RISING]
            verdicts += [verdict(gain["difference_interval"], 0, 1) for gain in gains]
            cells.append(f"{found['name']}, b = {budget}: {', '.join(value(gain, 'difference') for gain in gains)}")
    return Told(
        f"score less attention's, in that order, {listed(cells)}; n = {found['samples']} each", joined(verdicts)
    )


def _ordered(output: Path) -> Told:
    cells, verdicts = [], []
    for found in _needles(output):
        for budget in _BUDGETS:
            scores = [_method(found, one, "attention", budget) for one in _RISING]
            verdicts += [_below(low, high) for low, high in zip(scores, scores[1:], strict=False)]
            cells.append(f"{found['name']}, b = {budget}: {', '.join(value(one, 'score') for one in scores)}")
    return Told(f"attention's scores in that order, {listed(cells)}; n = {found['samples']} each", joined(verdicts))


def _needles(output: Path) -> list[Document]:
    names = ("needle", "ruler:niah_single_1")
    return [one for one in analysis(output, "quality", "quality")["datasets"] if one["name"] in names]


def _below(low: Document, high: Document) -> str:
    return lower(low["score_interval"], high["score_interval"])


def _streaming(output: Path) -> Told:
    cells, verdicts = [], []
    for step, name in _SUITES.items():
        found = analysis(output, step, "quality")["average"]
        for budget in _BUDGETS:
            poor, good = (
                _method(found, *one, budget) for one in (("streaming-llm", "position"), ("snapkv", "two-stage"))
            )
            verdicts.append(_below(poor, good))
            cells.append(f"{name}, b = {budget}: {value(poor, 'score')} against {value(good, 'score')}")
    return Told(f"streaming-llm's mean score against two-stage's: {listed(cells)}", joined(verdicts))


def _saved(output: Path) -> Told:
    cells, verdicts = [], []
    for one in analysis(output, "savings", "budget-savings")["savings"]:
        for measure in one["measures"]:
            told = [point for point in measure["points"] if point["saving"] is not None]
            if measure["measure"] == "score":  # what the figure shows; KL is told beside it
                verdicts += [verdict(_closed(point["saving_interval"]), 0, 1) for point in told]
            shown = [f"b = {point['config']['budget']}: {_saving(point)}" for point in told]
            cells.append(f"by {measure['measure']}, {', '.join(shown) or 'outside the budgets measured'}")
    return Told(f"budget saved (below 0: lost) {listed(cells)}", joined(verdicts))


def _saving(point: Document) -> str:
    ends = point["saving_interval"]
    low, high = ("…" if ends[end] is None else f"{100 * ends[end]:.0f}" for end in ("low", "high"))
    return f"{percent(point['saving'])} [{low}, {high}]".replace("-", "−")


def _closed(ends: Document) -> Document:
    """An end that no measured budget reaches lies beyond every number."""
    low, high = (math.inf if ends[end] is None else ends[end] for end in ("low", "high"))
    return {"low": -low if ends["low"] is None else low, "high": high, "kind": ends["kind"]}


def _half(output: Path) -> Told:
    """How much of attention's loss is left, over all prompts of both suites."""
    cells, verdicts = [], []
    for step, name in _SUITES.items():
        found = analysis(output, step, "quality")["average"]
        for budget in _BUDGETS:
            before, after = (_method(found, "snapkv", way, budget)["minus_full"] for way in ("attention", "two-stage"))
            half = {end: part / 2 for end, part in before["difference_interval"].items() if end != "kind"}
            kept = lower({**half, "kind": "interval"}, after["difference_interval"])
            worse = _gain(found, "snapkv", budget)["difference_interval"]["high"] < 0
            verdicts.append(CONTRADICTS if worse else kept)
            cells.append(f"{name}, b = {budget}: {value(before, 'difference')} → {value(after, 'difference')}")
    return Told(f"score less the full cache's, attention → two-stage: {listed(cells)}", joined(verdicts))


def _linked(output: Path) -> Told:
    """Spearman's ρ of a prompt's methods' perturbation with their scores."""
    cells, verdicts = [], []
    found = analysis(output, "link", "correlation")["overall"][0]["strengths"]
    for one in found:
        if one["measure"] in ("isolated", "propagated", "kl"):
            rho = one["rho"]
            verdicts.append(verdict(rho["interval"], 0, -1))
            cells.append(f"{one['measure']} {estimate(rho, 3)} ({rho['prompts']} prompts)")
    return Told(f"ρ of first-step perturbation with the score: {listed(cells)}", joined(verdicts[:2]))


def _chats(output: Path) -> Told:
    """12 instructions, answers of at most 320 tokens, compressed to 64 entries beyond 256."""
    found = {selection(one["config"]): one for one in document(output, "chats", "quality-divergence.json")["configs"]}
    sides = [found[way] for way in ("attention", "two-stage")]
    kls = [both for both in zip(*(one["forced"]["kl"] for one in sides), strict=True) if None not in both]
    smaller = np.array([two < one for one, two in kls])
    interval = json_value(intervals.of_share(smaller))
    cells = [
        f"{selection(one['config'])} first differs {_tokens(one['median_first_difference'])}, KL {middle:.3f} nat"
        for one, middle in zip(sides, np.median(kls, axis=0), strict=True)
    ]
    text = f"medians, {listed(cells)}; lower KL in {percent(smaller.mean(), interval)} of the answers, n = {len(kls)}"
    return Told(text, verdict(interval, 0.5, 1))


def _tokens(count: float | None) -> str:
    return "never" if count is None else f"after {count:.0f} tokens"


def _larger(output: Path) -> Told:
    return Told(
        "one model here; [second_model.md](second_model.md) has Gemma 3 270M beside it, on the same prompts", OPEN
    )


def _overhead(output: Path) -> Told:
    """Of a sweep of 24 configurations over 4,096 tokens."""
    row = next(one for one in json.loads(_BENCH.read_text())["rows"] if one["name"] == "sweep-24")
    phases, whole = row["details"]["phases"], statistics.median(row["details"]["seconds"])
    text = (
        f"value norms take {phases['norms']:.2f} s, {percent(phases['norms'] / phases['prefill'])} of a prefill of "
        f"4,096 tokens; measuring 24 configurations {whole:.1f} s, × {number(row['value'])} of a plain prefill; "
        "GPU: not measured"
    )
    return Told(text, SUPPORTS if phases["norms"] < 0.1 * phases["prefill"] else CONTRADICTS)


ROWS = (
    Row("table 1", "the criterion improves SnapKV's scores", "quality", _snapkv, "tables"),
    Row("table 2", "it improves Pyramid's", "quality", _pyramid, "tables"),
    Row("table 3", "it improves AdaKV's", "quality", _adakv, "tables"),
    Row("later version", "it more than halves the loss on average", "quality", _half, "tables"),
    Row("figure 1", "for the same score it saves 18.7 to 34 % of the budget", "savings", _saved, "tables"),
    Row("figure 8", "it improves the retrieval of SnapKV, Pyramid and AdaKV", "quality", _needle, "needle"),
    Row("figure 8", "retrieval rises from SnapKV to Pyramid to AdaKV", "quality", _ordered, "needle"),
    Row("table 6", "StreamingLLM is far worse", "quality", _streaming, "tables"),
    Row("appendix I", "less perturbation means better answers", "link", _linked, "link"),
    Row("table 7", "long answers, compressed to 64 entries beyond 256, are better", "chats", _chats, "chats"),
    Row("table 8", "the gain holds on a model of 32 billion parameters", "", _larger, "larger"),
    Row("abstract", "the criterion costs next to nothing", "", _overhead, "heads"),
)  # fmt: skip
