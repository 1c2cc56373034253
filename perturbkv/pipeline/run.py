"""From a plan to a finished trace: measure what is missing on an engine, keep every sample, go on after a kill."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Protocol

from perturbkv.configs import layer_types
from perturbkv.configs.eviction import EvictionConfig
from perturbkv.errors import InterruptedRunError, OutputError
from perturbkv.pipeline.plan import Plan
from perturbkv.pipeline.provenance import provenance
from perturbkv.pipeline.texts import PromptTexts
from perturbkv.storage.left_out import without_kept
from perturbkv.storage.lock import Lock
from perturbkv.storage.memory import in_memory
from perturbkv.storage.places import check_place
from perturbkv.storage.texts import Texts, with_text
from perturbkv.storage.writer import TraceWriter
from perturbkv.trace import FailedSample, SampleTrace, Trace

_log = logging.getLogger(__name__)
Finished = Callable[[SampleTrace | FailedSample], None]
Missing = Mapping[str, Sequence[EvictionConfig]]
"""Sample id -> the configurations that it still lacks."""
Progress = Callable[[int, int], None]
"""Gets how many samples are done, and of how many, when a run begins and after each sample."""


class Engine(Protocol):
    """Where the samples of a run are measured."""

    def measure(self, planned: Plan, missing: Missing, finished: Finished) -> None:
        """Measure the samples that `missing` names; `finished` gets each as it is ready, failed ones too."""


def run_to_file(
    planned: Plan,
    engine: Engine,
    path: Path,
    *,
    overwrite: bool = False,
    wait: bool = False,
    progress: Progress = lambda done, total: None,
) -> Path:
    """Measure what the trace at `path` lacks and finish its file; the model is loaded only where something is lacking.

    One process at a time writes it: with `wait` others wait for it. Raises InterruptedRunError on Ctrl-C, and
    PerturbkvErrors; finished samples survive all of them.
    """
    check_place(path)
    with Lock(path, wait) as lock:
        return _run(planned, engine, path, lock, overwrite, progress)


def _run(planned: Plan, engine: Engine, path: Path, lock: Lock, overwrite: bool, progress: Progress) -> Path:
    made, total = provenance(planned), len(planned.prompts)
    writer = TraceWriter(path, planned.run, planned.prompts.ids, made, overwrite, _texts(planned), planned.kept)
    missing = writer.missing()
    _say_what_is_there(planned, missing)
    _say_what_is_special(planned)
    _say_whose_text_changes(planned, writer.changing_text())
    _say_whose_positions_go(*writer.changing_kept())

    def finished(sample: SampleTrace | FailedSample) -> None:
        lock.check()
        writer.append(sample, missing[sample.sample_id])
        progress(len(writer.done()), total)

    try:
        if missing:
            progress(total - len(missing), total)
            engine.measure(planned, missing, finished)
        lock.check()
        return writer.finish()
    except KeyboardInterrupt:
        raise InterruptedRunError(len(writer.done()), total, path) from None
    except OutputError as error:
        writer.leave()
        msg = f"{error}; {len(writer.done())} of {total} samples are kept, and the same command goes on with them"
        raise OutputError(msg) from error


def run_in_memory(planned: Plan, engine: Engine, progress: Progress = lambda done, total: None) -> Trace:
    """Measure every sample and keep everything in memory. Raises PerturbkvErrors."""
    _say_what_is_special(planned)
    measured: dict[str, SampleTrace | FailedSample] = {}
    total = len(planned.prompts)
    progress(0, total)

    def finished(sample: SampleTrace | FailedSample) -> None:
        measured[sample.sample_id] = sample if planned.kept else without_kept(sample)
        progress(len(measured), total)

    engine.measure(planned, dict.fromkeys(planned.prompts.ids, planned.run.configs), finished)
    texts = _texts(planned)
    samples = [with_text(measured[name], texts) for name in planned.prompts.ids]
    return in_memory(planned.run, samples, provenance(planned))


def _texts(planned: Plan) -> Texts:
    return PromptTexts(planned.prompts, planned.files.tokenizer.decode) if planned.text else {}


def _say_what_is_there(planned: Plan, missing: Missing) -> None:
    """What an earlier run has measured already, in samples and in configurations."""
    samples, configs = len(planned.prompts), len(planned.run.configs)
    done = samples - len(missing)
    if done:
        _log.info("%d of %d samples are there already; going on", done, samples)
    parts = [len(lacking) for lacking in missing.values() if len(lacking) < configs]
    if parts:
        counted = f"{len(parts):,} sample{'' if len(parts) == 1 else 's'}"
        _log.info(
            "%s with %d of %d configurations there already: measuring %d more",
            counted, configs - max(parts), configs, max(parts),
        )  # fmt: skip


def _say_whose_text_changes(planned: Plan, changing: int) -> None:
    """Text is no number: samples that are there get it, or lose it, without being measured again."""
    if changing:
        samples = f"{changing:,} sample{'' if changing == 1 else 's'}"
        added = f"the text of {samples} that were measured without it is added; --no-text (text=False) leaves it out"
        _log.info(added if planned.text else f"the text of {samples} is taken out of the trace")


def _say_whose_positions_go(leaving: int, lacking: int) -> None:
    """Kept positions are measured: they can be taken out of samples that are there, and not be added to them."""
    if leaving:
        _log.info(
            "the kept positions of %s are taken out of the trace", f"{leaving:,} sample{'' if leaving == 1 else 's'}"
        )
    if lacking:
        _log.info(
            "%s were measured without kept positions (--no-kept, kept=False) and stay without them; --overwrite "
            "measures all anew", f"{lacking:,} sample{'' if lacking == 1 else 's'}"
        )  # fmt: skip


def _say_what_is_special(planned: Plan) -> None:
    """Prompts that were cut, configurations that evict nothing, weights that mean nothing."""
    prompts, run = planned.prompts, planned.run
    if prompts.cut:
        most = "" if run.max_tokens is None else f" to {run.max_tokens} tokens"
        _log.info("%d of %d prompts were cut in the middle%s", prompts.cut, len(prompts), most)
    lengths = [len(prompt.parts(run.scenario)[0]) for prompt in prompts]
    for config in run.configs:
        whole = sum(config.kept_entries(tokens) >= tokens for tokens in lengths)
        if whole:
            only = f", and stores it in {config.bits} bits" if config.quantised else ""
            _log.info("'%s' evicts nothing in %d of %d samples%s: b ≥ n", config.label(), whole, len(prompts), only)
    if measured := layer_types.told(planned.files.config):
        _log.info("layers %s are measured: the others keep their own sliding window", measured)
    if run.random_weights:
        _log.info("random weights: these numbers say nothing of a trained model")
