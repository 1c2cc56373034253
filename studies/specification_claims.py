"""Claims of docs/results/four_models.md, read from the rows and traces that `specification.py` left.

`python studies/specification_claims.py next` tells the sums of preset paper by the token that comes next, `bounds` how
near the bounds are to the change, `gain` what part of preset paper's gain stages and un-pooling bring on news; with
`--confirm confirm` they are about the confirming runs. `sentences --confirm FOLDER` judges by the confirming runs what
was read off the others: `confirm` of the first token, `confirm2` of eight steps. The rules stand in
docs/results/rules.md, which was written first.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from common import Table, main, to_json, write_tables
from specification import COMPARISONS, CONFIRMING, RUNS, SEED, STEPS, Run, read_rows, runs
from specification_counts import count
from tables import percent, points

import perturbkv as pk

ELSEWHERE, LEAST, PERMUTATIONS = 0.25, 3, 10_000
"""A specific token stands in at most this share of other prompts; fewest prompts of a kind; draws of a permutation."""
SMALL, QWEN = "smollm2-135m-q4_1", ("qwen2.5-coder-0.5b-q4_k_m", "qwen2.5-coder-1.5b-q4_k_m")
POOLED = ("paper-v2", "released-v2")
FIRST_TOKEN = "confirm"
"""The confirming runs of the first token alone."""
NEWS, RULER = "multi_news", "ruler:niah_multikey_2"
GAIN_SETTING = ("model", "template", "window", "granularity")
NEXT_HEADS = ["model", "template", "window", "granularity", "common tokens: n", "specific: n", "common: ×",
              "specific: ×", "p"]  # fmt: skip
BOUND_HEADS = ["model", "template", "n", "θ violated, heads", "θ/L", "θ̂/L", "by θ", "by 1 − S", "θ gains", "θ̂ gains"]
BOTH, MANY, FEW = ("isolated", "propagated"), 0.8, 0.05
"""Both kinds; of a confirmed sentence's settings, at least so many are on its side, and at most so few against it."""


@dataclass(frozen=True)
class Sentence:
    """A sentence of docs/results/rules.md that the confirming runs judge.

    Attributes:
        text: the sentence.
        comparison: first words of the comparison that it speaks of.
        kinds: isolated, propagated or both, judged apart; empty for the last layer's.
        wanted: the verdict that agrees with it, `holds` or `reversed`.
        levels: setting's name -> the levels that it names; of others all.
    """

    text: str
    comparison: str
    kinds: tuple[str, ...]
    wanted: str
    levels: Mapping[str, tuple[str, ...]]

    def judged(self, found: Sequence[dict[str, str]]) -> list[str]:
        """Return a row with a cell for isolated and one for propagated."""
        cells = {kind: self._cell(found, f"{self.comparison}, {kind}") for kind in self.kinds or ("propagated",)}
        return [self.text, cells.get("isolated", ""), cells.get("propagated", "")]

    def _cell(self, found: Sequence[dict[str, str]], title: str) -> str:
        """Return how many settings are on its side, agree, and are against it, and the verdict."""
        title = title if self.kinds else self.comparison
        rows = [
            row
            for row in found
            if row["comparison"] == title and all(row[name] in said for name, said in self.levels.items())
        ]
        told = count(rows, COMPARISONS[title])
        claimed, holds, against = told.claimed, told.holds, told.reversed
        if self.wanted == "reversed":
            claimed, holds, against = len(rows) - claimed, against, holds
        return verdict_text(len(rows), claimed, holds, against)


SENTENCES = {"confirm": (
    Sentence("1: `paper`, most heads change less", "heads by sample", BOTH, "holds", {"preset": ("paper",)}),
    Sentence("2: `paper`, the stages alone lower the sum", "stages", BOTH, "holds", {"preset": ("paper",)}),
    Sentence("3: pooled stages, SmolLM2: most heads lose", "heads by sample", BOTH, "reversed",
             {"model": (SMALL,), "preset": POOLED}),
    Sentence("4: value norms lower Qwen's sums", "value norms", BOTH, "holds", {"model": QWEN}),
    Sentence("5: `paper`, value norms raise SmolLM2's sum", "value norms", ("propagated",), "reversed",
             {"model": (SMALL,), "preset": ("paper",)}),
    Sentence("6: the last layer's drift is lower", "last layer, sum", (), "holds", {}),
), "confirm2": (
    Sentence("1: `paper`, most heads change less", "heads by sample", ("isolated",), "holds", {"preset": ("paper",)}),
    Sentence("2: `paper`, RULER: the sum is larger", "sum", ("propagated",), "reversed",
             {"preset": ("paper",), "dataset": (RULER,)}),
    Sentence("3: `paper`, RULER: most heads lose", "heads by sample", ("propagated",), "reversed",
             {"preset": ("paper",), "dataset": (RULER,)}),
    Sentence("4: `paper`, news: the sum is lower", "sum", ("propagated",), "holds",
             {"preset": ("paper",), "dataset": (NEWS,)}),
    Sentence("5: `paper`, value norms lower Qwen's sum", "value norms", ("propagated",), "holds",
             {"model": QWEN, "preset": ("paper",)}),
    Sentence("6: later presets, the sum is lower", "sum", ("propagated",), "holds", {"preset": POOLED}),
    Sentence("7: later presets, the last layer drifts less", "last layer, sum", (), "holds", {"preset": POOLED}),
    Sentence("8: later presets, most heads lose", "heads by sample", ("isolated",), "reversed", {"preset": POOLED}),
)}  # fmt: skip
"""Confirming runs -> the sentences of docs/results/rules.md that they judge."""


def verdict_text(count: int, claimed: int, holds: int, against: int) -> str:
    """Return the counts, 'on its side / holds / reversed of settings', and the verdict that rules.md gives them."""
    refuted = against > FEW * count or count - claimed > count / 2
    confirmed = claimed >= MANY * count and holds >= count / 2
    verdict = "refuted" if refuted else "confirmed" if confirmed else "open"
    return f"{claimed} / {holds} / {against} of {count}: {verdict}"


def next_token_is_specific(trace: pk.Trace) -> np.ndarray:
    """Return (prompt,) True where the token after the prompt is one that this prompt brought.

    It stands in its own prompt, and in at most `ELSEWHERE` of the others.
    """
    arrays = trace.arrays
    starts, counts = arrays["prompt_offset"].astype(int), arrays["prompt_count"].astype(int)
    seen = [
        set(arrays["prompt_token"][start : start + count].tolist()) for start, count in zip(starts, counts, strict=True)
    ]
    following = arrays["token_id"].reshape(len(seen), -1)[:, 0].tolist()
    return np.array([
        token in seen[at] and np.mean([token in other for place, other in enumerate(seen) if place != at]) <= ELSEWHERE
        for at, token in enumerate(following)
    ])  # fmt: skip


@dataclass(frozen=True)
class NextToken:
    """Two-stage's propagated sum over attention's in one setting of the preset paper, by the kind of the next token.

    Attributes:
        run: of the setting.
        window, granularity: of the setting.
        prompts: whose next token is common, is specific.
        ratios: their geometric means.
        p: of a permutation of which prompts are followed by a specific token.
    """

    run: Run
    window: int
    granularity: str
    prompts: tuple[int, int]
    ratios: tuple[float, float]
    p: float

    def row(self) -> list[str]:
        """Return the row of its table."""
        cells = self.run.model, _template_text(self.run), self.window, self.granularity, *self.prompts
        return [*map(str, cells), *(f"{ratio:.2f}" for ratio in self.ratios), f"{self.p:.4f}"]


def _template_text(run: Run) -> str:
    """Return whether a run's prompts went through the chat template: 'with' or 'without'."""
    return "with" if run.template else "without"


def next_token_sums(run: Run) -> Iterator[NextToken]:
    """Yield the numbers of each setting of the preset paper; of a run with too few prompts of a kind, print that."""
    trace = pk.read_trace(RUNS / f"{run.name}.h5")
    kinds = next_token_is_specific(trace)
    if min(kinds.sum(), (~kinds).sum()) < LEAST:
        print(f"{run.name}: {kinds.sum()} of {len(kinds)} next tokens are specific", flush=True)
        return
    for pair in pk.compare_heads(trace, "attention", "two-stage", step=0):
        config = pair.treatment
        if run.configs().get(config) != "paper":
            continue
        sums = [
            trace.arrays["perturbation_propagated"][:, trace.run.configs.index(one), 0].sum(axis=(1, 2), dtype=float)
            for one in (pair.baseline, config)
        ]
        logs = np.log(sums[1] / sums[0])
        common, own = (float(np.exp(logs[kinds == kind].mean())) for kind in (False, True))
        prompts = int((~kinds).sum()), int(kinds.sum())
        yield NextToken(run, config.window, config.granularity.name, prompts, (common, own), permutation_p(logs, kinds))


def bounds_row(run: Run, step: int | None) -> tuple[list[str], dict[str, list[Any]]]:
    """Return a run's row of the table of bounds, and of each bound what it gains on 1 − S in every setting, at a step.

    The row is of preset paper, window 32, a set per query head: medians of θ/L and θ̂/L over prompts and heads with
    σ > ½; and of two-stage and the same with ν = 1, in how many of the heads the lower bound has the lower L, and what
    θ and θ̂ gain on 1 − S, in points.
    """
    found = pk.bound_tightness(pk.read_trace(RUNS / f"{run.name}.h5"), step=step)
    chosen = {
        config
        for config, preset in run.configs().items()
        if (preset, config.window, config.granularity.name) == ("paper", 32, "query")
    }
    (shown,) = (one for one in found.agreements if chosen.issuperset(one.configs))
    (two_stage,) = (one for one in found.configs if one.config in chosen and one.config.selection.name == "two-stage")
    told = {one.bound: one for one in shown.pairs if one.same_stage1}
    gains = (points(told[name].gain, to_json(told[name].gain_interval)) for name in ("θ", "θ̂"))
    times = (f"{1 / two_stage.spreads[name].evidence[2]:.1f}" for name in ("L/θ", "L/θ̂"))
    checked = f"{found.violations} of {found.inequalities_checked['L ≤ θ']:,}"
    cells = (
        run.model,
        _template_text(run),
        run.prompts,
        checked,
        *times,
        *(percent(told[name].share) for name in ("θ", "1 − S")),
    )
    every = {
        name: [one for each in found.agreements for one in each.pairs if one.same_stage1 and one.bound == name]
        for name in ("θ", "θ̂")
    }
    return [*map(str, (*cells, *gains))], every


def gains_row(name: str, found: Sequence[Any]) -> list[str]:
    """Return the row of a bound: in how many settings it gains on 1 − S, gains decidedly, and loses decidedly."""
    lows, highs = ([getattr(one.gain_interval, end) for one in found] for end in ("low", "high"))
    gains, losses = sum(low > 0 for low in lows), sum(high < 0 for high in highs)
    return [name, f"{sum(one.gain > 0 for one in found)} / {gains} / {losses} of {len(found)}"]


def gain_parts(found: Sequence[dict[str, str]]) -> Iterator[list[str]]:
    """Yield, per setting of preset paper on news, what part of the propagated sum's gain each of two alone brings."""
    rows = [row for row in found if row["preset"] == "paper" and row["dataset"] == "multi_news"]
    sums = {(tuple(row[name] for name in GAIN_SETTING), row["comparison"]): float(row["value"]) for row in rows}
    for setting in dict.fromkeys(setting for setting, _ in sums):
        gain = 1 - sums[setting, "sum, propagated"]
        stages, pooling = (1 - sums[setting, f"{name}, propagated"] for name in ("stages", "un-pooling"))
        yield [*setting, f"{1 - gain:.3f}", percent(stages / gain), percent(pooling / gain)]


def seventh_row(found: Sequence[NextToken]) -> list[str]:
    """Return the row of the seventh sentence on first tokens, that the gain is lost at specific ones."""
    larger = [one.ratios[1] > one.ratios[0] for one in found]
    decided = [one.p < FEW for one in found]
    holds, against = (sum(clear and side == wanted for clear, side in zip(decided, larger, strict=True))
                      for wanted in (True, False))  # fmt: skip
    return ["7: less gain at specific tokens", "", verdict_text(len(found), sum(larger), holds, against)]


def permutation_p(values: np.ndarray, kinds: np.ndarray) -> float:
    """Return the two-sided p of the difference of two kinds' means, over random permutations of (prompt,) `kinds`."""
    source = np.random.default_rng(SEED)
    drawn = source.permuted(np.tile(kinds, (PERMUTATIONS, 1)), axis=1)
    means = [values @ chosen.T / chosen.sum(axis=1) for chosen in (drawn, ~drawn)]
    seen = abs(values[kinds].mean() - values[~kinds].mean())
    return float((1 + (np.abs(means[0] - means[1]) >= seen * (1 - 1e-9)).sum()) / (1 + PERMUTATIONS))


def bound_tables(measured: Sequence[Run], step: int | None) -> Iterator[Table]:
    """Yield the table of bounds at a step, all together for None, and that of the settings where they gain on 1 − S."""
    every: dict[str, list[Any]] = {}
    rows = []
    for run in measured:
        row, gained = bounds_row(run, step)
        rows.append(row)
        every = {name: every.get(name, []) + gained[name] for name in gained}
    yield "bounds", BOUND_HEADS, rows
    yield "gains on 1 − S", ["", "gains / decided / lost of settings"], [gains_row(*one) for one in every.items()]


def tables(claim: str, measured: Sequence[Run], steps: int) -> Iterator[Table]:
    """Yield the tables of a claim, from the runs that were measured, of the first step or of all."""
    if claim == "bounds":
        yield from bound_tables(measured, 0 if steps == 1 else None)
        return
    found = [row for row in read_rows(run.rows for run in measured) if int(row["steps"]) == steps]
    if claim == "gain":
        yield "parts of the gain", [*GAIN_SETTING, "sum, ×", "stages", "un-pooling"], list(gain_parts(found))
        return
    if claim == "next":
        tokens = (one for run in measured for one in next_token_sums(run))
        yield "by the next token", NEXT_HEADS, [one.row() for one in tokens]
        return
    for confirm in dict.fromkeys(run.confirm for run in measured):
        judged = [sentence.judged(found) for sentence in SENTENCES[confirm]]
        if confirm == FIRST_TOKEN:
            judged.append(seventh_row([one for run in measured for one in next_token_sums(run)]))
        yield "sentences", ["sentence", "isolated", "propagated"], judged


def study(asked: argparse.Namespace) -> None:
    """Write what the finished runs say of a claim."""
    if asked.claim == "sentences" and not asked.confirm:
        raise pk.PerturbkvError(f"expected --confirm with sentences, one of {', '.join(CONFIRMING)}")
    every = (run for run in runs(asked.confirm) if run.scenario == "regular" and asked.only in run.name)
    steps = STEPS if asked.claim == "sentences" and asked.confirm != FIRST_TOKEN else asked.steps
    write_tables(asked, tables(asked.claim, [run for run in every if run.rows.exists()], steps))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("claim", choices=("next", "sentences", "bounds", "gain"))
    parser.add_argument("--only", default="", help="a word in the names of the runs")
    parser.add_argument("--steps", type=int, choices=(1, STEPS), default=1, help="the first token [1], or all steps")
    parser.add_argument("--confirm", choices=CONFIRMING, default="", help="the confirming runs of this folder")
    parser.add_argument("--output", "-o", type=Path, help="folder of the JSON document")
    main(study, parser)
