"""Divergence: how soon and how far long answers from evicted caches differ from the full cache's (paper, appendix K).

Two questions that are kept distinct. In free answers: where is the first token that differs, and how much of the text
is the same? In forced reading, every cache reads the full cache's answer, so that each next token's distribution can be
compared to the end; this nearly is the score itself and explains nothing of it (METHOD: not circular).
"""

from __future__ import annotations

from collections.abc import Sequence
from math import isinf
from typing import Any

import numpy as np

from perturbkv.analyses import columns, text
from perturbkv.analyses.budget.budget_axis import above_full_caveat
from perturbkv.analyses.columns import Line, column, record
from perturbkv.analyses.conclusions import Case, Claim
from perturbkv.analyses.identity import RunIdentity, answers_identity
from perturbkv.analyses.json_values import config_columns
from perturbkv.analyses.measurements import Floats
from perturbkv.analyses.quality.divergence_point import (
    AT_START,
    MOST_SPANS,
    DivergencePoint,
    divergence_point,
    span_means,
)
from perturbkv.analyses.result import Result
from perturbkv.display import Part, plural
from perturbkv.storage.answers_file import WrittenAnswers, check_answers

ANALYSIS = "divergence"


@record
class Divergence(
    Result,
    section="quality --divergence",
    document="about answers",
    rows="samples",
    shown=(
        "cache_share",
        "equal_share",
        "median_first_difference",
        "mean_rouge_l",
        "kl",
        "same_token",
    ),
):
    """The divergence of every configuration's answers from the full cache's."""

    identity: RunIdentity
    samples: tuple[str, ...] = column("ids, in the file's order")
    lengths: tuple[int, ...] = column("tokens of the full cache's answer, per sample")
    span: int = column("steps that make one point of a KL curve")
    configs: tuple[DivergencePoint, ...] = column("one per configuration, in the run's order")
    noise_floor: Floats = column(
        "KL of a cache that keeps everything, per span; empty where KL was not measured", unit="nat", dims=("span",)
    )

    def claims(self) -> Sequence[Claim]:
        """Return the median number of tokens before answers differ, and the median KL along the full cache's answer."""
        first, kl = [], []
        for name, one in self._with_names(self.configs):
            median = one.median_first_difference
            first.append(Case(name, median, "throughout" if isinf(median) else f"for {plural(int(median), 'token')}"))
            if one.kl is not None:
                value, _, ends = text.three_digits(one.kl, one.kl_interval).partition("\n")
                kl.append(Case(name, one.kl, f"{value} nat {ends}".rstrip()))
        answers = f"the median KL of {plural(self._answer_count, 'answer')}"
        forced = Claim(f"where every cache reads the full one's, {answers}", "is", kl)
        return [Claim("the median answer", "equals the full cache's", first), *([forced] if kl else [])]

    def title(self) -> str:
        """Return the table's title: answers' lengths, how often caches were compressed, and shared choices."""
        every = f"compressed again {self.identity.compressed_again}" if self.identity.compressed_again else "cut once"
        least, most = min(self.lengths), max(self.lengths)
        length = plural(most, "token") if least == most else f"{least:,} to {plural(most, 'token')}"
        return " · ".join(filter(None, (f"answers of {length}", every, self.identity.shared)))

    def lines(self) -> Sequence[Line]:
        """Return a line per configuration."""
        return [Line(name, (one,)) for name, one in self._with_names(self.configs)]

    def interval_note(self) -> str:
        """Return the line on n and intervals."""
        return text.intervals_note(len(self.samples), exact=True, medians=True)

    def caveats(self) -> Sequence[str]:
        """Return notes on the time at which cache shares were taken, and on how to measure KL where it is missing."""
        return [
            *([AT_START] if self.identity.compressed_again else []),
            *above_full_caveat(one.cache_share for one in self.configs),
            *([] if self.noise_floor.size else ["KL was not measured: perturbkv generate --divergence does."]),
        ]

    def details(self) -> Sequence[Part]:
        """Return the table of KL in the last third of answers, and notes on differences, KL and its noise floor."""
        parts: list[Part] = [
            "An answer that ends before the other differs there; never: no token differs, to the end or to the longest "
            "answer that was generated."
        ]
        if self.noise_floor.size:
            parts.insert(
                0, columns.table("reading the full cache's answer", self.lines(), ("kl", "kl_last"), self.FIRST)
            )
            parts.append(
                f"KL and same next token are of the {plural(self._answer_count, 'answer')} with any token. "
                f"Everything kept: {np.nanmax(self.noise_floor):.1e} nat (the noise floor, its largest span's)."
            )
        return [
            *parts,
            text.cache_share_note([one.cache_share for one in self.configs], self.identity.compressed_again),
        ]

    def records(self) -> list[dict[str, Any]]:
        """Return a row per configuration and sample; `first_difference` is infinite where no token differs."""
        return [
            {
                **config_columns(one.config),
                "sample": sample,
                "tokens_full": self.lengths[index],
                "first_difference": float(one.first_difference[index]),
                "rouge_l": float(one.rouge_l[index]),
                "kl": float(one.forced.kl[index]) if one.forced else None,
                "top1": float(one.forced.top1[index]) if one.forced else None,
            }
            for one in self.configs
            for index, sample in enumerate(self.samples)
        ]

    @property
    def _answer_count(self) -> int:
        """The number of samples with a non-empty answer from the full cache."""
        return sum(length > 0 for length in self.lengths)


def divergence(answers: WrittenAnswers) -> Divergence:
    """Measure how soon and how far answers from evicted caches differ from the full cache's.

    Args:
        answers: from `read_answers`, or `.written` of `generate`'s result. KL needs `generate(…, divergence=True)`.

    Raises ConfigError for anything else.

    Example, of `answers` to one prompt:
        >>> import perturbkv as pk
        >>> model = pk.load_model("random:smollm2-135m")
        >>> prompt = pk.Prompt.from_text("Paris is in France. " * 9, model)
        >>> made = pk.generate(model, prompt, pk.grid(40), max_new_tokens=3, divergence=True, progress=False)
        >>> pk.divergence(made.written).configs[0].first_difference.shape
        (1,)
    """
    check_answers(answers)
    rows = answers.rows
    lengths = tuple(len(row["full"]["tokens"]) for row in rows)
    span = max(1, -(-max(lengths) // MOST_SPANS))
    has_kl = all(row.get("divergence") is not None for row in rows) and max(lengths) > 0
    compared = rows if has_kl else tuple({**row, "divergence": None} for row in rows)
    floors = span_means([row["divergence"]["noise_floor"] for row in rows], span) if has_kl else np.zeros((1, 0))
    return Divergence(
        identity=answers_identity(answers),
        samples=tuple(row["sample"] for row in rows),
        lengths=lengths,
        span=span,
        configs=tuple(divergence_point(compared, config, span) for config in answers.run.configs),
        noise_floor=np.nanmean(floors, axis=0),
    )
