"""Which run a figure or a table shows, in the words that stand in its foot."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from perturbkv.trace import Trace


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
    """

    model: str
    dataset: str
    samples: int
    failed: int
    configs: tuple[str, ...]
    trace: str
    random_weights: bool
    made_with: str

    def lines(self) -> list[str]:
        """The foot: the run, then one line per configuration."""
        words = [self.model, self.dataset, f"{self.samples} samples", f"trace {self.trace or 'in memory'}"]
        if self.failed:
            words.insert(3, f"{self.failed} failed")
        if self.random_weights:
            words.insert(0, "RANDOM WEIGHTS")
        return [" · ".join([*words, self.made_with]), " | ".join(self.configs)]


def identity(trace: Trace, labels: Sequence[str]) -> RunIdentity:
    """The identity of a trace, of which the configurations `labels` are shown."""
    return RunIdentity(
        model=trace.run.model,
        dataset=trace.run.dataset,
        samples=int(trace.ok.sum()),
        failed=len(trace.failures),
        configs=tuple(labels),
        trace=trace.digest,
        random_weights=trace.run.random_weights,
        made_with=f"perturbkv {trace.attrs.get('perturbkv_version', '')}".strip(),
    )
