"""Measures of perturbation that are linked with scores of answers, by the text along which they were measured.

Along the model's own text they are those of the first decode step, which reads an answer's first token and gives its
second, so that they are known before that token is (METHOD: the protocol, 7). Along the accepted answer, a text that
was fixed before, isolated numbers may be linked with free answers over all of its steps; what runs over the evicted
cache itself is circular. L1, θ, θ̂ and drift are relative to the full run's own norms, so that prompts can be compared.

In the regular scenario an answer's first token comes from the prefill, which saw the whole prompt: eviction shows from
the second token on. In context-only the question is read over the evicted cache, and every token can differ.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from perturbkv.analyses.measurements import Floats, Measurements, measured_steps, summed_log_p
from perturbkv.analyses.text import FIRST_ORDER_NOTES
from perturbkv.analyses.verdicts import equal_whole
from perturbkv.configs.run import ANSWER, FULL, OWN
from perturbkv.errors import TraceError
from perturbkv.trace import Trace

REFERENCE = "lost"
"""The measure that every other measure is compared with: the evicted attention 1 − S, which ignores values."""


@dataclass(frozen=True)
class Measures:
    """The measures of perturbation along one text.

    Attributes:
        predictors: measure -> name; known before the free answer. The last is `REFERENCE`.
        circular: measure -> name; nearly the score itself.
        headline: predictor of conclusions and of curves on the screen, chosen beforehand.
        subject: the methods of the first claim, in words.
        circular_tokens: the tokens of which the circular measures nearly are the score.
        step: decode step; None: the mean over those of the text.
    """

    predictors: Mapping[str, str]
    circular: Mapping[str, str]
    headline: str
    subject: str
    circular_tokens: str
    step: int | None

    @property
    def names(self) -> dict[str, str]:
        """Measure -> name, the circular ones last."""
        return {**self.predictors, **self.circular}

    def without(self, names: Collection[str]) -> Measures:
        """Return the measures without the named ones."""
        predictors, circular = (
            {name: shown for name, shown in each.items() if name not in names}
            for each in (self.predictors, self.circular)
        )
        return replace(self, predictors=predictors, circular=circular)


OWN_TEXT = Measures(
    predictors={
        "isolated": "isolated L1",
        "propagated": "propagated L1",
        "theta": "θ",
        "theta_hat": "θ̂",
        REFERENCE: "1 − S",
    },
    circular={"kl": "KL, nat", "drift": "last layer's drift"},
    headline="propagated",
    subject="the methods of a prompt that perturb its first step more",
    circular_tokens="the answer's second token",
    step=0,
)
"""Of the first step of the model's own text."""
ACCEPTED_ANSWER = Measures(
    predictors={
        "isolated": "isolated L1",
        "isolated_first": "isolated L1, first token",
        "effect": "−Δ log p, isolated",
        "effect_size": "|Δ log p|, isolated",
        "theta": "θ",
        "theta_hat": "θ̂",
        REFERENCE: "1 − S",
    },
    circular={
        "propagated": "propagated L1",
        "effect_propagated": "−Δ log p, propagated",
        "kl": "KL, nat",
        "drift": "last layer's drift",
        "text_loss": "log p lost, nat",
    },
    headline="isolated",
    subject="the methods of a prompt that have the larger isolated perturbation along its accepted answer",
    circular_tokens="the right answer's own tokens",
    step=None,
)
"""Of all measured steps of the accepted answer; those of its log p are sums over steps (METHOD: effect on the text)."""


def effect_note(gradient: str) -> str:
    """Return the definition of the effects on the accepted answer, by a gradient, a key of `EFFECT_GRADIENTS`."""
    return (
        "−Δ log p: loss of the accepted answer's log p to first order, in nat, summed over heads and steps, above 0 "
        f"where it becomes less likely; |Δ log p|: the sum of absolute values. {FIRST_ORDER_NOTES[gradient]}"
    )


def measures_of(trace: Trace, analysis: str) -> Measures:
    """Return the measures that a trace has, by its text; those of effects where it was made with `save=("effect",)`.

    Error messages name the `analysis`. Raises TraceError for a text that is neither the model's own nor the answer.
    """
    if trace.run.text not in (OWN, ANSWER):
        raise TraceError(
            f"{analysis} asks what perturbation tells of answers, and {trace.source or 'this trace'} was measured "
            f"along another text (--text {trace.run.text}); measure along --text {ANSWER} or {OWN}"
        )
    if trace.run.text == OWN:
        return OWN_TEXT
    return (
        ACCEPTED_ANSWER
        if "effect_isolated" in trace.arrays
        else ACCEPTED_ANSWER.without(("effect", "effect_size", "effect_propagated"))
    )


def common_measures(traces: Sequence[Trace], analysis: str) -> Measures:
    """Return the measures of traces that are pooled. Raises TraceError as `measures_of`, and where they differ.

    Along the accepted answer they are the same where as many steps of it were measured, and effects by one gradient.
    """
    each = [measures_of(trace, analysis) for trace in traces]
    for other, trace in zip(each, traces, strict=True):
        if other != each[0] or (other.step is None and _described(trace) != _described(traces[0])):
            got = " and ".join(f"{_described(one)} in {one.source or one.run.dataset}" for one in (traces[0], trace))
            raise TraceError(f"expected traces of one text and equal measures, got {got}; give them singly")
    return each[0]


def _described(trace: Trace) -> str:
    """Return the options that decide on a trace's measures."""
    effect = " --save effect" if "effect_isolated" in trace.arrays else ""
    if trace.run.effect_gradient != FULL:
        effect += f" --effect-gradient {trace.run.effect_gradient}"
    return f"--text {trace.run.text} --steps {trace.run.steps}{effect}"


def measure_values(trace: Trace, measures: Measures, analysis: str) -> dict[str, Floats]:
    """Return measure -> (sample, config), all but θ̂; configurations with identical runs get equal values.

    θ̂ is of the heads with evidence under the configurations that are ranked. Raises TraceError as `Measurements`.
    """
    measured = Measurements(trace, analysis, measures.step)
    drift, hidden_norm = (measured[name][..., -1] for name in ("hidden_drift_l1", "hidden_norm"))
    values = {
        "isolated": _over_norms(measured, "perturbation_isolated"),
        "theta": _over_norms(measured, "theta"),
        "propagated": _over_norms(measured, "perturbation_propagated"),
        REFERENCE: 1 - measured["retained_mass"].mean(axis=(2, 3)),
        "kl": measured["logit_kl"],
        "drift": drift / hidden_norm[:, None],
    }
    if measures.step is None:  # the text is known to its end; losses are positive where it becomes less likely
        full, evicted, _ = summed_log_p(trace, analysis)
        values["isolated_first"] = _over_norms(Measurements(trace, analysis, 0), "perturbation_isolated")
        values["text_loss"] = full[:, None] - evicted
    if measures.step is None and "effect_isolated" in measured:
        steps = measured_steps(trace)[:, None]  # sums over them, from means
        values |= {
            "effect": -steps * measured["effect_isolated"].sum(axis=(2, 3)),
            "effect_size": steps * measured.sizes("effect_isolated").sum(axis=(2, 3)),
            "effect_propagated": -steps * measured["effect_propagated"].sum(axis=(2, 3)),
        }
    return equalise_identical_runs(trace, values)


def _over_norms(measured: Measurements, name: str) -> Floats:
    """Return (sample, config) sums of a variable over heads, relative to those of the full run's norms."""
    return np.asarray(measured[name].sum(axis=(2, 3)) / measured["output_norm"].sum(axis=(1, 2))[:, None])


def equalise_identical_runs(trace: Trace, values: dict[str, Floats]) -> dict[str, Floats]:
    """Return the (sample, config) arrays, with one value for all configurations whose kept sets are all equal.

    Their values differ by rounding alone.
    """
    count, samples = len(trace.run.configs), int(trace.ok.sum())
    first = np.tile(np.arange(count), (samples, 1))  # index of the first configuration with the same kept sets
    for later in range(count):
        for earlier in reversed(range(later)):  # the smallest index is written last
            same = equal_whole(trace, earlier, later)
            first[same, later] = first[same, earlier]
    return {name: np.take_along_axis(array, first, axis=1) for name, array in values.items()}
