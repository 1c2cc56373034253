"""What a link is looked for in: perturbation and scores of the prompts that the full cache answers, of several traces.

θ̂ is evidence only where σ > 0.5. So that configurations are ranked by the same heads, a head counts in a prompt where
σ > 0.5 under every configuration that is ranked there; others, those with an infinite θ̂ among them, are left out of
all configurations' sums, and a prompt without such a head has no θ̂.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from perturbkv.analyses import first_step
from perturbkv.analyses.correlation.lost_answers import Rule
from perturbkv.analyses.first_token import only_alike
from perturbkv.analyses.measurements import EVIDENCE, Floats, at_step, held_shares, values
from perturbkv.analyses.multi_trace import check_together
from perturbkv.analyses.scores import scores
from perturbkv.analyses.stats.arithmetic import median, ratio
from perturbkv.configs.eviction import EvictionConfig
from perturbkv.configs.run import RunConfig
from perturbkv.trace import Trace

ANALYSIS = "link"


@dataclass(frozen=True)
class Part:
    """One trace.

    Attributes:
        dataset, trace, trace_digest: what it is of, its path, and a short digest of it.
        samples: complete ones.
        answered: those of them that the full cache answers.
        median_full: of the full cache's scores of the answered ones; NaN of none.
        alike: answered ones whose full answer has no token but one that all caches share, as `first_token` says.
    """

    dataset: str
    trace: str
    trace_digest: str
    samples: int
    answered: int
    median_full: float
    alike: int


@dataclass(frozen=True)
class Pooled:
    """The prompts that the full cache answers, those of one trace behind those of another.

    Attributes:
        parts: the traces.
        part: (prompt,) which of them a prompt is of.
        names: (prompt,) sample ids.
        run: the first trace's; its configurations are those of the axis `config`.
        held: (config,) entries that each cache holds over those of the full cache; NaN where a trace does not tell.
        kept: (prompt, config) share of a prompt's entries that is kept.
        measured: measure -> (prompt, config), as `first_step` says.
        theta_hat, sigma: (prompt, config, layer, head); `norm` (prompt, layer, head), of the full run's outputs.
        full: (prompt,) scores in [0, 1]; `evicted` (prompt, config).
    """

    parts: tuple[Part, ...]
    part: NDArray[np.int64]
    names: tuple[str, ...]
    run: RunConfig
    held: Floats
    kept: Floats
    measured: dict[str, Floats]
    theta_hat: Floats
    sigma: Floats
    norm: Floats
    full: Floats
    evicted: Floats

    @property
    def alike(self) -> NDArray[np.bool_]:
        """(prompt, prompt) True where two are of one data set."""
        datasets = np.array([self.parts[part].dataset for part in self.part], dtype=str)
        return np.asarray(datasets[:, None] == datasets)

    @property
    def configs(self) -> tuple[EvictionConfig, ...]:
        """Those that all traces measured."""
        return self.run.configs

    def bound(self, places: Sequence[int]) -> tuple[Floats, float]:
        """(prompt, place) θ̂ over ‖o_h‖ of the heads with σ > 0.5 in all of these configurations, and their share."""
        counted = np.asarray((self.sigma[:, places] > EVIDENCE).all(axis=1))
        top = np.where(counted[:, None], self.theta_hat[:, places], 0).sum(axis=(2, 3))
        found = ratio(top, np.where(counted, self.norm, 0).sum(axis=(1, 2))[:, None])
        return np.asarray(found), float(ratio(counted.sum(), counted.size))


def pooled(traces: Sequence[Trace], rule: Rule) -> Pooled:
    """The answered prompts of all traces. Raises TraceError where one has no graded answers, or they do not fit."""
    check_together(traces, ANALYSIS)
    run = traces[0].run
    each = [_answered(at_step(trace, ANALYSIS, 0), run.configs, rule) for trace in traces]
    joined = {name: np.concatenate([one[name] for _, one, _ in each]) for name in each[0][1]}
    parts = tuple(part for part, _, _ in each)
    measured = {name: joined.pop(name) for name in (*first_step.MEASURES, *first_step.CIRCULAR)}
    return Pooled(
        parts=parts,
        part=np.repeat(np.arange(len(parts)), [part.answered for part in parts]),
        names=tuple(name for _, _, names in each for name in names),
        run=run,
        held=_held(traces, run.configs, parts),
        measured=measured,
        **joined,
    )


def _answered(trace: Trace, configs: Sequence[EvictionConfig], rule: Rule) -> tuple[Part, dict[str, Floats], list[str]]:
    """The arrays of the prompts that the full cache answers, configurations in the order asked for."""
    graded, order = scores(trace, ANALYSIS), _order(trace, configs)
    answered = graded.full > rule.right
    ids = [name for name, whole in zip(trace.sample_ids, trace.ok, strict=True) if whole]
    kept, tokens = values(trace, "kept_count", ANALYSIS), values(trace, "prompt_tokens", ANALYSIS)
    by_config = {
        **first_step.measures(trace, ANALYSIS),
        "kept": kept.mean(axis=(2, 3)) / tokens[:, None],
        "theta_hat": values(trace, "theta_hat", ANALYSIS, 0),
        "sigma": values(trace, "sigma_stage1", ANALYSIS, 0),
        "evicted": graded.evicted,
    }
    found = {name: array[answered][:, order] for name, array in by_config.items()}
    found |= {"norm": values(trace, "output_norm", ANALYSIS, 0)[answered], "full": graded.full[answered]}
    counts = (len(answered), int(answered.sum()))
    alike = int(only_alike(trace)[answered].sum())
    part = Part(trace.run.dataset, trace.source, trace.digest, *counts, median(graded.full[answered]), alike)
    return part, found, [name for name, right in zip(ids, answered, strict=True) if right]


def _held(traces: Sequence[Trace], configs: Sequence[EvictionConfig], parts: Sequence[Part]) -> Floats:
    """(config,) mean over the samples of all traces."""
    shares = np.stack([held_shares(trace, ANALYSIS)[_order(trace, configs)] for trace in traces])
    return np.asarray(np.average(shares, axis=0, weights=[part.samples for part in parts]))


def _order(trace: Trace, configs: Sequence[EvictionConfig]) -> list[int]:
    return [trace.run.configs.index(config) for config in configs]
