"""Measured numbers of a trace as analyses read them: complete samples alone, float64, checked once.

Also the scores of answers, and the log p of texts.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from perturbkv.configs.eviction import EvictionConfig
from perturbkv.display import plural
from perturbkv.errors import ConfigError, TraceError
from perturbkv.schema import AT_CHOSEN_STEPS, ISOLATED, OF_KEPT_SETS, TOKEN_KINDS, VARIABLES, isolated_steps
from perturbkv.storage.trace.trace_file import LazyArrays
from perturbkv.trace import Trace

Floats = NDArray[np.float64]
EVIDENCE = 0.5
"""Theorem 3 speaks only of heads whose σ exceeds this."""
_UNBOUNDED = frozenset({"theta_hat", "theta_hat_relax"})
"""Infinite where stage 1 holds no attention at all: their slope 2 − 1/σ has no end."""


class Measurements:
    """A trace's complete samples, read as float64 arrays: means over the decode steps of each, or one step, or all.

    Samples whose text ends before the step are left out. Where caches are compressed again, isolated quantities are
    means over the steps at which they were measured, and NaN at others.

    Attributes:
        trace: with the complete samples that have the step.
        analysis: the command, which error messages name.
        step: the decode step, from 0; None: the mean over those that a sample has (METHOD: the protocol, 2).
        by_step: whether arrays have all steps, on their axis.
        kinds: kinds of decoded tokens, of `TOKEN_KINDS`, whose steps alone count; samples without any are left out.

    Raises TraceError where no sample is complete, ConfigError where the trace, or every sample of it, lacks the step,
    or where isolated quantities that are read were not measured at it.
    """

    def __init__(
        self,
        trace: Trace,
        analysis: str,
        step: int | None = None,
        by_step: bool = False,
        kinds: Sequence[str] = TOKEN_KINDS,
    ) -> None:
        self.analysis = analysis
        self.by_step: bool = by_step
        self.kinds: Sequence[str] = tuple(kinds)
        self.step: int | None = resolve_step(trace, step)
        self._arrays: dict[str, Floats] = {}
        self.trace: Trace = _drop_ended_samples(trace, analysis, step or 0)
        if self.kinds != TOKEN_KINDS:  # samples without a measured step of these kinds go, too
            self.trace = _select_samples(self.trace, np.asarray((self.counted & self._chosen).any(axis=1)))

    def __getitem__(self, name: str) -> Floats:
        """Return a variable over the complete samples: (sample, config?, layer?, head?), with steps if `by_step`.

        Raises TraceError where the trace lacks it, or where a complete sample holds NaN or infinity at a step that it
        measured (bounds of Theorems 3 and 4 may be infinite).
        """
        if name not in self._arrays:
            self._arrays[name] = self._read(name)
        return self._arrays[name]

    def share_above(self, name: str, threshold: float) -> Floats:
        """Return the share of the steps at which a variable exceeds a threshold, of the axes that it has itself.

        Raises as `__getitem__`.
        """
        return self._read(name, threshold)

    def least(self, name: str) -> Floats:
        """Return the least number of a variable over the decode steps of each sample. Raises as `__getitem__`."""
        return self._read(name, least=True)

    def sizes(self, name: str) -> Floats:
        """Return a signed variable's size, the mean of its absolute numbers over the steps. Raises as `__getitem__`."""
        return self._read(name, size=True)

    def __contains__(self, name: str) -> bool:
        return name in self.trace.arrays

    @property
    def counted(self) -> NDArray[np.bool_]:
        """(sample, step) True where a step's numbers count: it was measured, is the chosen one, and of the kinds."""
        places = np.arange(self.trace.run.steps)
        counted = places < measured_steps(self.trace)[:, None]
        if self.step is not None and not self.by_step:
            counted &= places == self.step
        if self.kinds != TOKEN_KINDS:
            numbers = [TOKEN_KINDS.index(kind) for kind in self.kinds]
            counted &= np.isin(self.trace.get("token_kind", self.analysis), numbers)
        return np.asarray(counted)

    @property
    def _chosen(self) -> NDArray[np.bool_]:
        """(sample, step) True where the isolated quantities of all configurations were measured."""
        measured = np.arange(self.trace.run.steps) < measured_steps(self.trace)[:, None]
        return isolated_steps(measured, self.trace.run.isolated_every)

    @property
    def samples(self) -> int:
        """Number of samples that have the step."""
        return int(self.trace.ok.sum())

    @property
    def sample_ids(self) -> tuple[str, ...]:
        """Names of the samples that have the step."""
        return tuple(name for name, complete in zip(self.trace.sample_ids, self.trace.ok, strict=True) if complete)

    def index(self, config: EvictionConfig) -> int:
        """Return the configuration's index along the axis `config`. Raises TraceError where it is not there."""
        return self.trace.config_index(config.label())

    @cached_property
    def cache_shares(self) -> Floats:
        """Cache shares (config,): entries of the evicted cache over the full one's, sample mean; NaN if unknown."""
        return np.asarray(self.cache_shares_by_sample.mean(axis=0))

    @cached_property
    def cache_shares_by_sample(self) -> Floats:
        """Cache shares (sample, config): entries of the evicted cache over those of the full one; NaN where unknown.

        Counted in entries of the model's own cache: one kept set per query head can hold more than the whole grouped
        cache (METHOD: the protocol, 5). A trace without the shares implies them where one of its configurations keeps
        a set per key/value head, which shows the number of these heads.
        """
        if "held_share" in self:
            return self["held_share"]
        kept, tokens = self["kept_count"], self["prompt_tokens"]
        grouped = np.array([config.granularity.name != "query" for config in self.trace.run.configs])
        heads = kept.shape[-1]
        sets = np.nan
        if grouped.any():  # heads that share a set share its offset, and all samples have as many sets
            offsets = self.trace.get("kept_offset", "kept sets")[0, int(np.argmax(grouped))]
            sets = max(len(np.unique(layer)) for layer in offsets)
        stored = np.where(grouped, heads, sets)  # in a group one head stands for all
        return np.asarray(kept.mean(axis=2).sum(axis=-1) / stored / tokens[:, None])

    @property
    def byte_shares(self) -> Floats:
        """Packed byte shares (config,), as `byte_shares_by_sample` has them, mean over samples."""
        return np.asarray(self.byte_shares_by_sample().mean(axis=0))

    def byte_shares_by_sample(self, name: str = "held_bytes") -> Floats:
        """Byte shares (sample, config): bytes of the evicted cache, `name`, over the full one's in 16 bits.

        NaN where somebody's cache does not tell, and of all caches where the trace does not.
        """
        if name not in self:
            return np.full((self.samples, len(self.trace.run.configs)), np.nan)
        held, full = (np.asarray(self.trace.get(one, self.analysis), dtype=np.float64) for one in (name, "full_bytes"))
        return np.asarray(held / full[:, None])

    @property
    def prefill_seconds(self) -> tuple[Floats, float]:
        """Mean seconds of each configuration's own prefill, (config,), NaN without one, and of the full prefill."""
        if "prefill_seconds" not in self:
            return np.full(len(self.trace.run.configs), np.nan), np.nan
        own, full = (self.trace.arrays[name][self.trace.ok] for name in ("prefill_seconds", "prefill_seconds_full"))
        return np.asarray(own.mean(axis=0)), float(full.mean())

    def _read(self, name: str, threshold: float | None = None, least: bool = False, size: bool = False) -> Floats:
        """Return a variable of the complete samples as the object reads it, or 1 where it exceeds a threshold, else 0.

        `least`: its least number over the steps in place of the mean; `size`: of absolute numbers. Raises as
        `__getitem__`.
        """
        array = np.asarray(self.trace.get(name, self.analysis), dtype=np.float64)
        array = np.abs(array) if size else array
        dims = VARIABLES[name].dims
        if "step" not in dims:
            _check_numbers(self.trace, name, array)
            return array
        axis, measured, chosen = 1 + dims.index("step"), self.counted, name in AT_CHOSEN_STEPS
        expected = measured & self._chosen if chosen else measured
        if self.step is not None and not self.by_step:
            array, measured = array.take([self.step], axis=axis), measured[:, [self.step]]
            expected = measured
        by_step = np.moveaxis(array, axis, 1)
        _check_numbers(self.trace, name, by_step[expected])
        where = measured.reshape(*measured.shape, *[1] * (by_step.ndim - 2))
        if chosen and self.trace.run.isolated_every > 1:
            where = where & known_steps(by_step)
        if threshold is not None:
            by_step = (by_step > threshold).astype(np.float64)
        if self.by_step:
            return np.moveaxis(by_step, 1, axis)
        if least:
            return np.asarray(by_step.min(axis=1, where=where, initial=np.inf))
        return np.asarray(by_step.mean(axis=1, where=where))


def known_steps(by_step: Floats) -> NDArray[np.bool_]:
    """Return the mask of an isolated variable's numbers (sample, step, …); True at all steps where it has none."""
    known = ~np.isnan(by_step)
    return np.asarray(known | ~known.any(axis=1, keepdims=True))


def _drop_ended_samples(trace: Trace, analysis: str, step: int) -> Trace:
    """Return the trace without the complete samples whose text ends before `step`. Raises as `Measurements`."""
    if not trace.ok.any():
        raise TraceError(f"{analysis} needs at least one complete sample, {trace.source or 'this trace'} has none")
    if not 0 <= step < trace.run.steps:
        raise ConfigError(f"expected a step from 0 to {trace.run.steps - 1}, got {step}")
    steps = measured_steps(trace)
    if step >= steps.max():
        raise ConfigError(f"expected a step from 0 to {steps.max() - 1}, where the longest text ends, got {step}")
    return trace if (steps > step).all() else _select_samples(trace, steps > step)


def select_texts_that_go_on(trace: Trace, analysis: str) -> Trace:
    """Return the trace without the complete samples none of whose steps predicts a token of the text.

    Raises TraceError where no sample is left, or the trace does not tell.
    """
    goes_on = texts_that_go_on(trace, analysis)
    if not goes_on.any():
        raise TraceError(f"{analysis} needs a text of at least two tokens, {trace.source or 'this trace'} has none")
    return trace if goes_on.all() else _select_samples(trace, goes_on)


def texts_that_go_on(trace: Trace, analysis: str) -> NDArray[np.bool_]:
    """Return (complete sample,) True where some step predicts a token of the text.

    Raises TraceError where the trace does not tell.
    """
    following = np.asarray(trace.get("next_token_id", analysis), dtype=np.int64)
    return np.asarray((following >= 0).any(axis=1))


def resolve_step(trace: Trace, step: int | None) -> int | None:
    """Return the step itself, and 0 for no step where no sample has more than one: the mean is that step."""
    return 0 if step is None and measured_steps(trace).max(initial=0) <= 1 else step


def measured_steps(trace: Trace) -> NDArray[np.int64]:
    """Return the number of decode steps of each complete sample, (sample,); its text ends there."""
    if "steps_measured" not in trace.arrays:
        return np.full(int(trace.ok.sum()), trace.run.steps)
    return np.asarray(trace.arrays["steps_measured"][trace.ok], dtype=np.int64)


def _select_samples(trace: Trace, selected: NDArray[np.bool_]) -> Trace:
    """Return the trace with its failed samples and the `selected` complete samples, (complete sample,).

    Its arrays are selected when first used.
    """
    stays = ~trace.ok
    stays[trace.ok] = selected

    def read(name: str) -> NDArray[np.generic]:
        array = trace.arrays[name]
        return array[stays] if VARIABLES[name].axes[0] == "sample" else array

    names = tuple(name for name, stay in zip(trace.sample_ids, stays, strict=True) if stay)
    return dataclasses.replace(trace, sample_ids=names, arrays=LazyArrays({}, tuple(trace.arrays), read))


def only_evicts(trace: Trace) -> NDArray[np.bool_]:
    """Return (config,) True where a configuration's entries are a kept set of the full cache's in every sample.

    Then eviction alone changes the outputs, so that the theorems apply.
    """
    chosen = np.array([config.only_evicts for config in trace.run.configs], dtype=bool)
    if "own_entries" not in trace.arrays:
        return chosen
    own = np.asarray(trace.get("own_entries", "this analysis"))
    return np.asarray(chosen & (own == 0).all(axis=0))


def _check_numbers(trace: Trace, name: str, numbers: Floats) -> None:
    """Raise TraceError for NaN, or for infinity in a variable that must be finite; ConfigError at an unmeasured step.

    Numbers of kept sets, and isolated ones, may be unknown of somebody's caches: NaN.
    """
    may_lack = name in (*OF_KEPT_SETS, *ISOLATED) and "own_entries" in trace.arrays
    every = trace.run.isolated_every
    if name in AT_CHOSEN_STEPS and every > 1 and np.isnan(numbers).any() and not may_lack:
        raise ConfigError(
            f"expected a step at which isolated numbers are measured, one of compressions, of every {every} or the "
            "last, got another; leave the step out for their mean"
        )
    nothing, infinite = np.isnan(numbers) & (not may_lack), np.isinf(numbers) & (name not in _UNBOUNDED)
    if (nothing | infinite).any():
        got = "NaN" if nothing.any() else "infinity"
        raise TraceError(f"expected numbers in every complete sample of {trace.source}, got {got} in '{name}'")


@dataclass(frozen=True)
class Scores:
    """Scores in [0, 1] of the answers of the complete samples.

    Attributes:
        full: (sample,) of the full cache's answers.
        evicted: (sample, config) of the answers from each configuration's cache.
    """

    full: Floats
    evicted: Floats

    @property
    def drop(self) -> Floats:
        """Loss of score by eviction, (sample, config); negative where the evicted cache answers better."""
        return self.full[:, None] - self.evicted


def scores(trace: Trace, analysis: str, instead: str = "") -> Scores:
    """Return the scores of a trace's answers; error messages name the `analysis`, and what to ask of a trace `instead`.

    Raises TraceError where no answers were generated, or where no metric graded one of them.
    """
    if "score_full" not in trace.arrays:
        raise TraceError(
            f"{analysis} needs graded answers, {trace.source or 'this trace'} has none; make a trace that has them: "
            f"perturbkv quality --model {trace.run.model} --dataset {trace.run.dataset}{instead}"
        )
    full, evicted = (np.asarray(trace.get(name, analysis), dtype=np.float64) for name in ("score_full", "score"))
    if ungraded := int((np.isnan(full) | np.isnan(evicted).any(axis=1)).sum()):
        raise TraceError(
            f"{analysis} needs graded answers, got none in {ungraded} of {len(full)} samples of "
            f"{trace.source or 'this trace'}; measure prompts that have accepted answers"
        )
    return Scores(full, evicted)


@dataclass(frozen=True)
class TextLogP:
    """Mean log p of a text's tokens, nat (METHOD: log p and perplexity), of complete samples whose text has a token.

    Attributes:
        full: (sample,) under the full cache.
        evicted: (sample, config) under each configuration's.
        tokens: (sample,) number of tokens, the same for all caches.
        known: (complete sample,) False where the text has no token that counts: the sample is left out.
    """

    full: Floats
    evicted: Floats
    tokens: NDArray[np.int64]
    known: NDArray[np.bool_]


def text_log_p(trace: Trace, analysis: str) -> TextLogP:
    """Return the mean log p of each text's tokens; error messages name the `analysis`.

    Of a context-only run the first token counts too. Raises TraceError where the trace lacks log p, and where no sample
    has a token that counts.
    """
    full, evicted, tokens = summed_log_p(trace, analysis)
    known = tokens > 0
    if not known.any():
        raise TraceError(
            f"{analysis} needs a text of two tokens or more, got none in {trace.source or 'this trace'}: its first "
            "comes from the prefill; measure longer texts"
        )
    tokens = tokens[known]
    return TextLogP(full[known] / tokens, evicted[known] / tokens[:, None], tokens, known)


def summed_log_p(trace: Trace, analysis: str) -> tuple[Floats, Floats, NDArray[np.int64]]:
    """Return the summed log p of each text's tokens and their number; 0 of a text without a token that counts.

    In nat, under the full cache, (sample,), and under each configuration's, (sample, config); the number is (sample,).
    In context-only the first token counts too. Raises TraceError where the trace lacks log p.
    """
    counts = np.asarray(trace.get("next_token_id", analysis)) >= 0
    full = np.where(counts, trace.get("text_logp_full", analysis), 0).sum(axis=1)
    evicted = np.where(counts[:, None], trace.get("text_logp", analysis), 0).sum(axis=2)
    tokens = counts.sum(axis=1)
    if "first_logp" not in trace.arrays:
        return full, evicted, tokens
    first_full, first = (trace.get(name, analysis) for name in ("first_logp_full", "first_logp"))
    return full + first_full, evicted + first, tokens + 1


def one_token_caveat(count: int) -> list[str]:
    """Return the note on `count` samples that perplexity leaves out, as a list; empty for 0."""
    note = f"Perplexity leaves out {plural(count, 'sample')} whose text is one token, which the prefill gives."
    return [note] if count else []


def has_only_first_token(trace: Trace) -> NDArray[np.bool_]:
    """Return, per complete sample, True if the full cache's answer is at most its first token.

    Eviction cannot change such an answer in the regular scenario, where all caches share the first token (METHOD:
    Generation); in others it is False.
    """
    if trace.run.scenario != "regular" or "generated_full" not in trace.arrays:
        return np.zeros(int(trace.ok.sum()), dtype=bool)
    tokens = np.asarray(trace.arrays["generated_full"][trace.ok], dtype=np.int64)
    return np.asarray((tokens >= 0).sum(axis=1) <= 1)


def is_cut_off(trace: Trace) -> NDArray[np.bool_]:
    """Return, per complete sample, True if the full cache's answer has the run's largest number of tokens.

    No end token ended it. False where the trace holds no answers.
    """
    if "generated_full" not in trace.arrays:
        return np.zeros(int(trace.ok.sum()), dtype=bool)
    tokens = np.asarray(trace.arrays["generated_full"][trace.ok], dtype=np.int64)
    return np.asarray((tokens >= 0).all(axis=1))


def first_token_caveat(count: int, samples: int) -> list[str]:
    """Return the short note on `count` answers that eviction cannot change, as a list; empty for 0."""
    note = f"In {count} of {plural(samples, 'sample')} the full cache's answer is one token or none, alike for all."
    return [note] if count else []


def first_token_note(count: int, samples: int) -> str:
    """Return the long note on `count` answers that eviction cannot change; empty for 0."""
    if not count:
        return ""
    return (
        f"In {count} of {plural(samples, 'sample')} the full cache's answer is one token or none: in the regular "
        "scenario that token comes from the prefill, alike for all caches. Such an answer cannot be lost but by what "
        "is added to it, at whatever budget; context-only has no such token."
    )
