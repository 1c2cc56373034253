"""How soon and how far do long answers from evicted caches leave the full cache's? (Paper, appendix K.).

Two questions that are kept apart. Free answers: where is the first token that differs, and how much of the text is the
same? Forced ones: every cache reads the full cache's answer, so that each next token's distribution can be compared to
the end; this nearly is the score itself and links nothing with it (METHOD: not circular).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from math import isinf
from typing import Any

import numpy as np

from perturbkv.analyses import text
from perturbkv.analyses.identity import RunIdentity, of_answers
from perturbkv.analyses.json_values import columns_of
from perturbkv.analyses.measurements import Floats
from perturbkv.analyses.pairing import common, counted, folded, short_names
from perturbkv.analyses.quality.divergence_point import MOST_SPANS, Forced, Parting, parting, spans
from perturbkv.analyses.result import Result
from perturbkv.analyses.stats.arithmetic import plain
from perturbkv.analyses.stats.intervals import Scalar
from perturbkv.analyses.text import extremes, over, sentence
from perturbkv.display import Table
from perturbkv.storage.answers_file import WrittenAnswers, check_answers

ANALYSIS = "divergence"
_FREE = ("configuration", "#held /\nfull", "#equal\nanswers", "#first\ndifference", "#ROUGE-L")
_FORCED = ("configuration", "#KL,\nnat", "#KL,\nlast third", "#same\nnext token")


@dataclass(frozen=True, repr=False)
class Divergence(Result):
    """Every configuration's answers beside the full cache's.

    Attributes:
        identity: which run this is.
        samples: names, in the file's order.
        compress_every: entries above which a cache was compressed again; None: never.
        lengths: (sample,) tokens of the full cache's answers.
        span: steps that make one point of the KL curves.
        configs: in the run's order.
        noise_floor: (span,) KL of a cache that keeps everything, averaged as the curves are; empty where KL was not
            measured.
    """

    identity: RunIdentity
    samples: tuple[str, ...]
    compress_every: int | None
    lengths: tuple[int, ...]
    span: int
    configs: tuple[Parting, ...]
    noise_floor: Floats

    def conclusion(self) -> str:
        """Where answers part in the middle, and what the caches make of the full cache's answer."""
        named, held = self._held()
        medians = [(name, one.free.median) for name, one in named]
        never = sum(isinf(median) for _, median in medians)
        if never:
            said = [f"half of the answers, or more, are the full cache's with {never} of {len(medians)} configurations"]
        else:
            told = [(name, median, counted(int(median), "token")) for name, median in medians]
            said = [f"the median answer first differs from the full cache's after {extremes(told, 'with')}"]
        forced = [(name, one.forced) for name, one in named if one.forced is not None]
        if forced:
            told = [(name, one.medians["kl"], _nat(one)) for name, one in forced]
            answers = counted(self._read, "answer")
            said.append(
                f"where every cache reads the full one's, the median KL of {answers} is {extremes(told, 'with')}"
            )
        return sentence(f"{'; '.join(said)} ({over(len(self.samples))}{held})")

    def tables(self) -> list[Table | str]:
        """Free answers, and where it was measured the reading of the full cache's."""
        every = f"compressed again above {self.compress_every:,} entries" if self.compress_every else "compressed once"
        shared = " · ".join(
            filter(None, (f"answers of {_counted(self.lengths)}", every, common(self.identity.configs)))
        )
        columns = [text.HELD_AT_START if self.compress_every and "held" in name else name for name in _FREE]
        free = Table("Answers of their own", columns, self._rows(_free_row))
        found: list[Table | str] = [shared, free]
        if self.noise_floor.size:
            found.append(Table("Reading the full cache's answer", _FORCED, self._rows(_forced_row)))
        else:
            found.append("KL was not measured: perturbkv generate --divergence does.")
        return found

    def notes(self) -> str:
        """What the columns mean, n, and the noise floor."""
        said = [
            text.about_intervals(len(self.samples), exact=True, medians=True),
            "First difference: tokens before the first that differs, median over samples; an answer that ends before "
            "the other differs there; never: no token differs, to the end or to as many tokens as were asked for. "
            "ROUGE-L: F1 of the longest common sequence of words, mean.",
        ]
        if self.noise_floor.size:
            floor = f"{np.nanmax(self.noise_floor):.1e} nat (the noise floor, its largest span's)"
            said.append(
                "KL(full ‖ evicted), also over the last third of each answer's own tokens, and same next token: means "
                f"over an answer's tokens, then of KL the median and of the same token the mean over the "
                f"{counted(self._read, 'answer')} with any. Everything kept: {floor}."
            )
        return " ".join([*said, text.about_held([one.held for one in self.configs], self.compress_every)])

    def to_dict(self) -> dict[str, Any]:
        """Everything a reader needs, as JSON-able numbers."""
        found: dict[str, Any] = plain(
            {
                "samples": self.samples,
                "compress_every": self.compress_every,
                "lengths": self.lengths,
                "span": self.span,
                "noise_floor": self.noise_floor,
                "configs": [one.to_dict() for one in self.configs],
            }
        )
        return found

    def records(self) -> list[dict[str, Any]]:
        """A row per configuration and sample; `first_difference` is infinite where no token differs."""
        return [
            {
                **columns_of(one.config),
                "sample": sample,
                "tokens_full": self.lengths[place],
                "first_difference": float(one.free.first[place]),
                "rouge_l": float(one.free.rouge[place]),
                "kl": float(one.forced.kl[place]) if one.forced else None,
                "top1": float(one.forced.top1[place]) if one.forced else None,
            }
            for one in self.configs
            for place, sample in enumerate(self.samples)
        ]

    @property
    def _read(self) -> int:
        """How many samples have an answer of the full cache's to read."""
        return sum(length > 0 for length in self.lengths)

    def _named(self) -> list[tuple[str, Parting]]:
        names = [name or "evicted" for name in short_names(self.identity.configs)]
        return list(zip(names, self.configs, strict=True))

    def _held(self) -> tuple[list[tuple[str, Parting]], str]:
        """The configurations by name, and what they hold: of all, or behind each name where that differs."""
        start = " at the start" if self.compress_every else ""
        shown = [f"held / full {text.held(one.held)}{start}" for one in self.configs]
        if len(set(shown)) == 1:
            return self._named(), f"; {shown[0]}"
        return [(f"{name} ({held})", one) for (name, one), held in zip(self._named(), shown, strict=True)], ""

    def _rows(self, of: Callable[[Parting], list[str]]) -> list[list[str]]:
        return [[folded(name, 24), *of(one)] for name, one in self._named()]


def divergence(answers: WrittenAnswers) -> Divergence:
    """How soon and how far answers from evicted caches leave the full cache's.

    Args:
        answers: of `read_answers`, or a `generate`'s `.written`. KL is there where `generate` was asked for it.

    Raises ConfigError for anything else.

    Example, of `answers` to one prompt:
        >>> import perturbkv as pk
        >>> model = pk.load_model("random:smollm2-135m")
        >>> prompt = pk.Prompt.from_text("Paris is in France. " * 9, model)
        >>> made = pk.generate(model, prompt, pk.grid(40), max_new_tokens=3, divergence=True, progress=False)
        >>> pk.divergence(made.written).configs[0].free.first.shape
        (1,)
    """
    check_answers(answers)
    rows = answers.rows
    lengths = tuple(len(row["full"]["tokens"]) for row in rows)
    span = max(1, -(-max(lengths) // MOST_SPANS))
    followed = all(row.get("divergence") is not None for row in rows) and max(lengths) > 0
    read = rows if followed else tuple({**row, "divergence": None} for row in rows)
    floors = spans([row["divergence"]["noise_floor"] for row in rows], span) if followed else np.zeros((1, 0))
    return Divergence(
        identity=of_answers(answers),
        samples=tuple(row["sample"] for row in rows),
        compress_every=answers.compress_every,
        lengths=lengths,
        span=span,
        configs=tuple(parting(read, config, span) for config in answers.run.configs),
        noise_floor=np.nanmean(floors, axis=0),
    )


def _free_row(one: Parting) -> list[str]:
    free = one.free
    return [
        text.held(one.held),
        text.percent(float(free.equal.mean()), free.equal_interval, apart="\n"),
        _place(free.median, free.median_interval),
        text.decimal(float(free.rouge.mean()), free.rouge_interval, apart="\n"),
    ]


def _forced_row(one: Parting) -> list[str]:
    forced = one.forced
    if forced is None:
        return ["–", "–", "–"]
    return [
        text.significant(forced.medians["kl"], forced.kl_interval),
        text.significant(forced.medians["last"], forced.last_interval),
        text.percent(float(np.nanmean(forced.top1)), forced.top1_interval, apart="\n"),
    ]


def _nat(forced: Forced) -> str:
    """'0.22 nat [0.1, 0.3]'."""
    value, _, interval = text.significant(forced.medians["kl"], forced.kl_interval).partition("\n")
    return f"{value} nat {interval}".rstrip()


def _place(value: float, interval: Scalar = None) -> str:
    """A number of tokens, or never; its interval beneath."""

    def said(number: float) -> str:
        return "never" if isinf(number) else f"{number:,.0f}"

    if interval is None:
        return said(value)
    low, high = said(interval.low), said(interval.high)
    return f"{said(value)}\n" + (f"({low} … {high})" if interval.kind == "range" else f"[{low}, {high}]")


def _counted(lengths: tuple[int, ...]) -> str:
    """'40 to 64 tokens'."""
    least, most = min(lengths), max(lengths)
    return counted(most, "token") if least == most else f"{least:,} to {counted(most, 'token')}"
