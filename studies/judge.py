"""What a judge thinks of evicted caches' answers (the paper's appendix K: annotators compare answers).

`perturbkv generate -o FOLDER` writes `FOLDER/generation.jsonl`; `python studies/judge.py FOLDER/generation.jsonl
--command "python my_judge.py"` hands its answers to a command and reads back what it thinks. The command reads a JSON
object per line of its standard input and writes one per line, in any order:

- alone: `id, sample, prompt, question, answers, full, answer` → `id, score`, and a `comment` if it likes;
- `--pairwise`: `id, sample, prompt, question, answers, a, b` → `id, winner` (`a`, `b` or `tie`).

The judge does not learn which cache wrote a text; `--seed` draws which of a pair is `a`. Pairs of equal texts are ties
that it does not get. What it said is kept in `judgements.jsonl` line by line: a judge that fails loses nothing, and the
same call asks only what is missing.

How it is decided. Scores: a cache's answers are worse where the 95 % interval of the mean drop, the full cache's score
less its own, sample by sample, lies above 0. No interval goes beyond the scale (`--scale`); without one the scores that
were given stand for it, and there is no interval where all are equal. Pairs: the full cache's answers are better where
the exact interval of the share of losses among the pairs that are no ties lies above one half.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import math
import shlex
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import common
import numpy as np
from matplotlib.figure import Figure

import perturbkv as pk

FREEDOM_PER_SAMPLE = 3 / 8
"""Degrees of freedom per sample, as of a mean of shares: for scores of 1 to 10, skewed and not, intervals of eight
samples with the scale's limits cover the mean in 93 to 100 % of draws."""
OUTCOMES = ("win", "tie", "loss")
"""Of the evicted cache's answer."""
Question = dict[str, Any]


def digest(value: Any) -> str:
    """Return a short digest of a JSON value."""
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()[:16]


def questions(answers: Any, pairwise: bool, seed: int) -> Iterator[tuple[tuple[str, str | None], Question]]:
    """Yield ((sample, label), question); the label is None for the full cache's own answer, which pairs lack."""
    for row in answers.rows:
        told = {"sample": row["sample"], "prompt": row.get("prompt"), "question": row.get("question"),
                "answers": row["answers"]}  # fmt: skip
        full = row["full"]["text"]
        texts = {None: full, **{label: row["evicted"][label]["text"] for label in answers.run.labels()}}
        for label, text in texts.items():
            key = digest([row["sample"], label, pairwise])
            if not pairwise:
                yield (row["sample"], label), {"id": key, **told, "full": full, "answer": text}
            elif label is not None:
                first, second = (full, text) if full_is_a(seed, row["sample"], label) else (text, full)
                yield (row["sample"], label), {"id": key, **told, "a": first, "b": second}


def full_is_a(seed: int, sample: str, label: str) -> bool:
    """Return whether the full cache's answer of a pair is shown first, drawn for each pair on its own."""
    return int(digest([seed, sample, label]), 16) % 2 == 0


def ask_judge(
    command: Sequence[str], asked: Sequence[Question], path: Path, header: Mapping[str, Any]
) -> dict[str, Any]:
    """Ask the judge what its file lacks, keep its replies there, and return id -> reply of every question.

    Raises PerturbkvError for a file of another judge or other answers, and for a judge that fails or replies wrongly.
    """
    replies = read_replies(asked, path, header)
    missing = {question["id"]: question for question in asked if question["id"] not in replies}
    for key, question in list(missing.items()):
        if "a" in question and question["a"] == question["b"]:
            replies[key] = {"id": key, "winner": "tie"}
            del missing[key]
    if missing:
        replies |= run_judge(command, missing, path, header["scale"])
    return replies


def read_replies(asked: Sequence[Question], path: Path, header: Mapping[str, Any]) -> dict[str, Any]:
    """Return id -> reply from a file of judgements; begin the file where there is none.

    Raises PerturbkvError for a file of another judge or answers.
    """
    content = {question["id"]: digest(question) for question in asked}
    lines = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else [dict(header)]
    replies = {line["id"]: line["reply"] for line in lines[1:] if content.get(line["id"]) == line["content"]}
    if lines[0] != header or len(replies) < len(lines) - 1:
        raise pk.PerturbkvError(f"expected no judgements of another judge in {path}; choose another --output")
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return replies


def run_judge(
    command: Sequence[str], asked: Mapping[str, Question], path: Path, scale: Sequence[float] | None
) -> dict[str, Any]:
    """Run the judge on questions, id -> question, append each reply to the file, and return id -> reply.

    Raises PerturbkvError for a judge that cannot be started, fails, or replies wrongly or not to all.
    """
    missing: dict[str, Question] = dict(asked)
    replies: dict[str, Any] = {}
    batch = path.with_name("questions.jsonl")
    batch.write_text("".join(json.dumps(question) + "\n" for question in missing.values()))
    try:
        with (
            batch.open() as stdin,
            path.open("a") as kept,
            subprocess.Popen(command, stdin=stdin, stdout=subprocess.PIPE, text=True) as judge,
        ):
            for line in judge.stdout or ():
                reply = parse_reply(line, missing, scale)
                replies[reply["id"]] = reply
                content = digest(missing.pop(reply["id"]))
                kept.write(json.dumps({"id": reply["id"], "content": content, "reply": reply}) + "\n")
                kept.flush()
    except OSError as error:
        raise pk.PerturbkvError(f"expected a judge that can be started, got '{command[0]}': {error.strerror}") from None
    if judge.returncode or missing:
        raise pk.PerturbkvError(
            f"expected a judge that replies to each question and ends with 0, got exit code {judge.returncode} and "
            f"{len(missing)} questions without a reply; the same command asks only these"
        )
    return replies


def parse_reply(line: str, missing: Mapping[str, Question], scale: Sequence[float] | None) -> dict[str, Any]:
    """Parse the judge's reply in a line. Raises PerturbkvError for anything but a reply to a question that is open."""
    try:
        reply = json.loads(line)
        question = missing[reply["id"]]
    except (ValueError, KeyError, TypeError):
        raise pk.PerturbkvError(
            f"expected from the judge a JSON object with the `id` of an open question, got {line.strip()[:60]!r}"
        ) from None
    if "a" in question:
        right, wanted = reply.get("winner") in ("a", "b", "tie"), "a `winner` of a, b or tie"
    else:
        low, high = scale or (-math.inf, math.inf)
        score = reply.get("score")
        number = isinstance(score, int | float) and not isinstance(score, bool) and abs(score) < 1e300
        right, wanted = number and low <= score <= high, f"a `score` from {low:g} to {high:g}"
    if not right:
        raise pk.PerturbkvError(f"expected from the judge {wanted}, of sample '{question['sample']}', got {reply}")
    return {name: reply[name] for name in ("id", "score", "winner", "comment") if name in reply}


def score_rows(
    answers: Any, replies: Mapping[tuple[str, str | None], Any], scale: Sequence[float] | None
) -> list[dict]:
    """Return a row per cache, the full one's first: its mean score and its mean drop, each with its interval."""
    samples = [row["sample"] for row in answers.rows]
    every = [reply["score"] for reply in replies.values()]
    limits = (float(min(every)), float(max(every))) if scale is None else (float(scale[0]), float(scale[1]))
    full = np.array([replies[sample, None]["score"] for sample in samples], dtype=float)

    def interval(each: np.ndarray, kind: Any) -> Any:
        return None if scale is None and np.ptp(each) == 0 else pk.stats.intervals.of_mean(each, kind)

    rows = []
    for label in (None, *answers.run.labels()):
        own = np.array([replies[sample, label]["score"] for sample in samples], dtype=float)
        kind = pk.stats.intervals.StatisticKind(FREEDOM_PER_SAMPLE, limits=limits)
        drop_kind = pk.stats.intervals.difference_kind(limits[1] - limits[0])
        rows.append({
            "config": label, "cache_share": cache_share(answers, label), "scores": own, "mean": own.mean(),
            "mean_interval": interval(own, kind), "mean_drop": (full - own).mean(),
            "mean_drop_interval": interval(full - own, drop_kind),
        })  # fmt: skip
    return rows


def pair_rows(answers: Any, replies: Mapping[tuple[str, str | None], Any], seed: int) -> tuple[list[dict], list[bool]]:
    """Return a row per configuration (shares of wins, ties and losses), and whether `a` won each decided pair."""
    rows, firsts = [], []
    for label in answers.run.labels():
        outcomes = []
        for sample in (row["sample"] for row in answers.rows):
            winner = replies[sample, label]["winner"]
            full_won = winner == ("a" if full_is_a(seed, sample, label) else "b")
            outcomes.append("tie" if winner == "tie" else "loss" if full_won else "win")
            firsts += [] if winner == "tie" else [winner == "a"]
        hits = {name: np.array([one == name for one in outcomes]) for name in OUTCOMES}
        decided = hits["loss"][~hits["tie"]]
        rows.append({
            "config": label, "cache_share": cache_share(answers, label), "outcomes": outcomes,
            "shares": {name: hit.mean() for name, hit in hits.items()},
            "share_intervals": {name: pk.stats.intervals.of_share(hit) for name, hit in hits.items()},
            "lost": decided.mean() if len(decided) else np.nan,
            "lost_interval": pk.stats.intervals.of_share(decided) if len(decided) else None,
        })  # fmt: skip
    return rows, firsts


def cache_share(answers: Any, label: str | None) -> float:
    """Return the entries of a cache over those of the full one, mean over samples; NaN where the file has it not."""
    if label is None:
        return 1.0
    return float(np.mean([row["evicted"][label].get("held_share", np.nan) for row in answers.rows]))


def draw(rows: Sequence[Mapping[str, Any]], pairwise: bool, samples: int) -> Figure:
    """Draw mean scores with the full cache's as a line, or stacked shares of wins, ties and losses."""
    shown = [row for row in rows if row["config"] is not None]
    figure = common.page_figure(22 + 8 * len(shown))
    axes = figure.subplots()
    for place, row in enumerate(shown):
        left = 0.0
        for outcome, colour in zip(OUTCOMES, ("#0173b2", "0.75", "#de8f05"), strict=True) if pairwise else ():
            axes.barh(place, row["shares"][outcome], left=left, color=colour, label=None if place else outcome)
            left += row["shares"][outcome]
        if not pairwise:
            ends = row["mean_interval"]
            reach = None if ends is None else [[row["mean"] - ends.low], [ends.high - row["mean"]]]
            axes.errorbar([row["mean"]], [place], xerr=reach, marker="o", color="#0173b2")
    if pairwise:
        axes.set(xlim=(0, 1), xlabel=f"share of {samples} samples, of the evicted cache's answer")
        figure.legend(loc="outside upper left", ncols=3)
    else:
        axes.axvline(rows[0]["mean"], color="0.35")
        bars = "95 % intervals" if samples >= pk.stats.intervals.MIN_SAMPLES else "ranges of single samples"
        axes.set_xlabel(f"mean score of {samples} samples (line: full cache); bars: {bars}")
    axes.set_yticks(range(len(shown)), [f"{row['config']} (share {row['cache_share']:.2f})" for row in shown])
    axes.set_ylim(len(shown) - 0.5, -0.5)
    return figure


def verdict_text(interval: Any, at: float, samples: int) -> str:
    """Return whether the evicted cache's answers are `worse`, `better` or `undecided`, or `too few samples`."""
    if interval is None or interval.kind == "range":
        return "too few samples" if samples < pk.stats.intervals.MIN_SAMPLES else "undecided"
    return "worse" if interval.low > at else "better" if interval.high < at else "undecided"


def study(asked: argparse.Namespace) -> None:
    """Ask the judge what is missing; print the table, write document and picture."""
    if len(asked.trace) != 1 or not asked.command:
        raise pk.PerturbkvError("expected a file of answers, which perturbkv generate writes, and --command")
    answers = pk.read_answers(asked.trace[0])
    scale = None if asked.scale is None else [float(end) for end in asked.scale]
    if scale and (asked.pairwise or not scale[0] < scale[1]):
        raise pk.PerturbkvError(f"expected --scale of a least and a largest score, without --pairwise, got {scale}")
    command = shlex.split(asked.command)
    header = {"judge": command, "pairwise": asked.pairwise, "seed": asked.seed, "scale": scale}
    pending = dict(questions(answers, asked.pairwise, asked.seed))
    asked.output.mkdir(parents=True, exist_ok=True)
    said = ask_judge(command, list(pending.values()), asked.output / "judgements.jsonl", header)
    asked.written += [path for name in ("questions", "judgements") if (path := asked.output / f"{name}.jsonl").exists()]
    replies = {key: said[question["id"]] for key, question in pending.items()}
    samples = len(answers.rows)
    document = {**header, "samples": [row["sample"] for row in answers.rows]}
    if asked.pairwise:
        rows, firsts = pair_rows(answers, replies, asked.seed)
        first = float(np.mean(firsts)) if firsts else math.nan
        document |= {"first_won": first, "decided_pairs": len(firsts)}
        common.show("answers against the full cache's", [
            {"cache": row["config"], "share": row["cache_share"],
             **{name: common.interval_text(row["shares"][name], row["share_intervals"][name]) for name in OUTCOMES},
             "its answers are": verdict_text(row["lost_interval"], 0.5, samples)} for row in rows])  # fmt: skip
        print(f"n = {samples}; the answer shown first won {first:.0%} of {len(firsts)} decided pairs.")
    else:
        rows = score_rows(answers, replies, scale)
        common.show("the judge's scores", [
            {"cache": row["config"] or "full cache", "share": row["cache_share"],
             "mean": common.number_text(row, "mean"),
             "drop": common.number_text(row, "mean_drop"),
             "its answers are": verdict_text(row["mean_drop_interval"], 0, samples) if row["config"] else ""}
            for row in rows])  # fmt: skip
        print(f"n = {samples}; brackets: 95 % intervals over samples.")
    common.save(
        asked, {**document, "caches": rows, "replies": list(said.values())}, draw(rows, asked.pairwise, samples)
    )


if __name__ == "__main__":
    parser = common.options(__doc__ or "")
    parser.add_argument("--command", help="the judge, split into words as by a shell: 'python my_judge.py'")
    parser.add_argument("--pairwise", action="store_true", help="show two answers: which is better?")
    parser.add_argument("--scale", nargs=2, metavar=("LOW", "HIGH"), help="the judge's least and largest score")
    common.main(study, parser)
