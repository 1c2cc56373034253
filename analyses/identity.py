"""Which run a figure or a table shows, in the words that stand in its foot."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from perturbkv.analyses import text
from perturbkv.analyses.measurements import byte_shares, measured_steps
from perturbkv.analyses.pairing import SIDE, apart, common, counted, short_names
from perturbkv.configs import layer_types
from perturbkv.configs.eviction import EvictionConfig
from perturbkv.configs.run import RunConfig
from perturbkv.display import Table
from perturbkv.escaping import escape_line
from perturbkv.schema import MEASURED_LAYERS
from perturbkv.storage.answers_file import WrittenAnswers
from perturbkv.trace import Trace

_STORED = ("", "#bits", "#bytes /\nfull")
MOST_NAMED = 12
"""A foot that names more configurations than this grows taller than its figure; the metadata name them all."""


@dataclass(frozen=True)
class RunIdentity:
    """What a reader needs to find the run again.

    Attributes:
        model, dataset: as the user named them.
        samples, failed: complete and failed ones.
        configs: the configurations shown.
        trace: short digest of the trace file, or of the file of answers.
        random_weights: True where the numbers say nothing of a trained model.
        made_with: versions.
        scenario: what was compressed; said where it is not the whole prompt.
        weights: the type that they are stored in → the run's, where they are quantised.
        ended: complete samples left out because their text ends before the step shown.
        source: what the digest is of: `trace`, `answers`, or the name of what else a run left.
        measured: which layers of how many, such as `5 11 17 of 18`; empty where all were.
        stored: of each configuration, bytes over those of the full cache in 16 bits, mean over samples; empty where
            none stores few bits or is corrected, or the trace does not tell.
    """

    model: str
    dataset: str
    samples: int
    failed: int
    configs: tuple[EvictionConfig, ...]
    trace: str
    random_weights: bool
    made_with: str
    scenario: str = "regular"
    weights: str = ""
    ended: int = 0
    source: str = "trace"
    measured: str = ""
    stored: tuple[float, ...] = ()

    def layer(self, place: int) -> int:
        """Which decoder layer stands at a place along an axis of measured layers."""
        return layer_types.parse_measured(self.measured)[0][place] if self.measured else place

    def bytes_table(self) -> list[Table]:
        """What each configuration takes where some store few bits or more than entries: these alone compare nothing."""
        if not self.stored:
            return []
        names = [name or config.label() for name, config in zip(short_names(self.configs), self.configs, strict=True)]
        rows = [[name, str(config.bits), f"{share:.2f}"]
                for name, config, share in zip(names, self.configs, self.stored, strict=True)]  # fmt: skip
        return [Table("what is stored: bytes over those of the full cache in 16 bits", _STORED, rows)]

    def about_read(self) -> str:
        """What held / full counts of configurations that evict nothing; empty where there are none."""
        read = dict.fromkeys(config.policy.name for config in self.configs if config.reads_pages)
        lined = dict.fromkeys(config.policy.name for config in self.configs if config.has_sparse_prefill)
        said = ((read, text.READ_NOTE), (lined, text.SPARSE_PREFILL_NOTE))
        return " ".join(f"{', '.join(names)}: {about}" for names, about in said if names)

    def lines(self) -> list[str]:
        """Return the foot: the run, its configurations, and what those hold that evict nothing."""
        words = [
            "RANDOM WEIGHTS" if self.random_weights else "",
            self.model,
            f"weights {self.weights}" if self.weights else "",
            f"layers {self.measured} measured" if self.measured else "",
            self.dataset,
            self.scenario if self.scenario != "regular" else "",
            counted(self.samples, "sample"),
            f"{self.ended} ended before" if self.ended else "",
            f"{self.failed} failed" if self.failed else "",
            f"{self.source} {self.trace or 'in memory'}",
            self.made_with,
        ]
        return [" · ".join(map(escape_line, filter(None, words))), self._shown(), *filter(None, [self.about_read()])]

    def _shown(self) -> str:
        """What the configurations share, then what tells them apart: sides and settings where every pair is there."""
        told = apart(self.configs)
        sides, settings = ([_joined(words, of_side) for words in told] for of_side in (True, False))
        parts = [list(dict.fromkeys(part)) for part in (sides, settings)]
        if len(parts[0]) * len(parts[1]) != len(self.configs):
            parts = [[" ".join(words.values()) for words in told]]
        if sum(bool(name) for part in parts for name in part) > MOST_NAMED:
            parts = [[f"{len(self.configs)} configurations"]]
        return " · ".join(filter(None, (common(self.configs), *(" | ".join(filter(None, part)) for part in parts))))


def _joined(words: dict[str, str], of_side: bool) -> str:
    """Return the words of policy and selection, or those of everything else."""
    return " ".join(word for choice, word in words.items() if (choice in SIDE) == of_side)


def identity(trace: Trace, configs: Sequence[EvictionConfig], step: int = 0) -> RunIdentity:
    """Return the identity of a trace, of which some configurations are shown at one decode step."""
    held = int((measured_steps(trace) > step).sum())
    return RunIdentity(
        model=trace.run.model,
        dataset=trace.run.dataset,
        samples=held,
        failed=len(trace.failures),
        configs=tuple(configs),
        trace=trace.digest,
        random_weights=trace.run.random_weights,
        made_with=f"perturbkv {trace.attrs.get('perturbkv_version', '')}".strip(),
        scenario=trace.run.scenario,
        weights=trace.attrs.get("weights", "") if trace.attrs.get("quantised_weights") == "true" else "",
        ended=int(trace.ok.sum()) - held,
        measured=trace.attrs.get(MEASURED_LAYERS, ""),
        stored=_stored(trace, configs),
    )


def together(each: Sequence[RunIdentity]) -> RunIdentity:
    """Of several traces: the first one's, with the models, data sets, digests and samples of all."""
    return replace(
        each[0],
        model=", ".join(dict.fromkeys(one.model for one in each)),
        dataset=", ".join(dict.fromkeys(one.dataset for one in each)),
        trace=", ".join(one.trace for one in each),
        samples=sum(one.samples for one in each),
        failed=sum(one.failed for one in each),
        ended=sum(one.ended for one in each),
    )


def _stored(trace: Trace, configs: Sequence[EvictionConfig]) -> tuple[float, ...]:
    told = "held_bytes" in trace.arrays and bool(np.isfinite(trace.arrays["held_bytes"][trace.ok]).all())
    if not told or not trace.ok.any() or all(config.only_evicts for config in configs):
        return ()
    shares = byte_shares(trace, "identity")
    return tuple(float(shares[trace.run.configs.index(config)]) for config in configs)


def of_answers(answers: WrittenAnswers) -> RunIdentity:
    """Return the identity of what `perturbkv generate` left, every configuration of it."""
    found = of_run(answers.run, answers.made_with, len(answers.rows), "answers", answers.digest)
    return replace(found, stored=_stored_by_answers(answers))


def of_run(run: RunConfig, made: Mapping[str, Any], samples: int, source: str, digest: str = "") -> RunIdentity:
    """Return the identity of what a run left that is no trace, every configuration of it; `made` is its provenance."""
    return RunIdentity(
        model=run.model,
        dataset=run.dataset,
        samples=samples,
        failed=0,
        configs=run.configs,
        trace=digest,
        random_weights=run.random_weights,
        made_with=f"perturbkv {made.get('perturbkv_version', '')}".strip(),
        scenario=run.scenario,
        weights=str(made.get("weights", "")) if made.get("quantised_weights") is True else "",
        source=source,
        measured=str(made.get(MEASURED_LAYERS, "")),
    )


def _stored_by_answers(answers: WrittenAnswers) -> tuple[float, ...]:
    each = [[row["evicted"][label].get("bytes_share") for row in answers.rows] for label in answers.run.labels()]
    return () if any(None in shares for shares in each) else tuple(float(np.mean(shares)) for shares in each)
