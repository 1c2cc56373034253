"""Which run a figure or a table shows, in the words that stand in its foot."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from perturbkv.analyses.naming import common, counted, short
from perturbkv.analyses.reading import measured_steps
from perturbkv.trace import Trace

MOST_NAMED = 12
"""A foot that names more configurations than this grows taller than its figure; the metadata name them all."""


@dataclass(frozen=True)
class RunIdentity:
    """What a reader needs to find the run again.

    Attributes:
        model, dataset: as the user named them.
        samples, failed: complete and failed ones.
        configs: labels of the configurations shown.
        trace: short digest of the trace file.
        random_weights: True where the numbers say nothing of a trained model.
        made_with: versions.
        scenario: what was compressed; said where it is not the whole prompt.
        ended: complete samples left out because their text ends before the step shown.
    """

    model: str
    dataset: str
    samples: int
    failed: int
    configs: tuple[str, ...]
    trace: str
    random_weights: bool
    made_with: str
    scenario: str = "regular"
    ended: int = 0

    def lines(self) -> list[str]:
        """The foot: the run, then its configurations."""
        words = [self.model, self.dataset, counted(self.samples, "sample"), f"trace {self.trace or 'in memory'}"]
        if self.scenario != "regular":
            words.insert(2, self.scenario)
        if self.ended:
            words.insert(3, f"{self.ended} ended before")
        if self.failed:
            words.insert(3, f"{self.failed} failed")
        if self.random_weights:
            words.insert(0, "RANDOM WEIGHTS")
        return [" · ".join([*words, self.made_with]), self._shown()]

    def _shown(self) -> str:
        """What the configurations share, then what tells them apart: sides and settings where every pair is there."""
        parts = [list(dict.fromkeys(part)) for part in zip(*(_split(label) for label in self.configs), strict=True)]
        whole = len(parts) == 2 and len(parts[0]) * len(parts[1]) == len(self.configs)
        apart = [[name for name in short(part) if name] for part in (parts if whole else [self.configs])]
        if sum(len(names) for names in apart) > MOST_NAMED:
            apart = [[f"{len(self.configs)} configurations"]]
        return " · ".join(part for part in (common(self.configs), *(" | ".join(names) for names in apart)) if part)


def _split(label: str) -> tuple[str, str]:
    """Policy and selection; everything else."""
    side, _, rest = label.partition(" ")
    return side, rest


def identity(trace: Trace, labels: Sequence[str], step: int = 0) -> RunIdentity:
    """The identity of a trace, of which the configurations `labels` are shown at one decode step."""
    held = int((measured_steps(trace) > step).sum())
    return RunIdentity(
        model=trace.run.model,
        dataset=trace.run.dataset,
        samples=held,
        failed=len(trace.failures),
        configs=tuple(labels),
        trace=trace.digest,
        random_weights=trace.run.random_weights,
        made_with=f"perturbkv {trace.attrs.get('perturbkv_version', '')}".strip(),
        scenario=trace.run.scenario,
        ended=int(trace.ok.sum()) - held,
    )
