"""A run from its plan to a finished trace: missing samples are measured on an engine, and each is stored at once.

A run that was interrupted continues with the samples that are missing. A trace also has its provenance, and the text of
prompts and answers, decoded from their tokens without weights.
"""

from __future__ import annotations

import logging
import platform
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
import transformers
from numpy.typing import NDArray

import perturbkv
from perturbkv.configs import layer_types
from perturbkv.configs.entry_counts import Budget
from perturbkv.configs.eviction import EvictionConfig
from perturbkv.datasets.decoded_tokens import decoded_texts
from perturbkv.datasets.encode import Prompt
from perturbkv.datasets.prompts import Decode, Prompts, decode_answer, token_texts
from perturbkv.display import plural
from perturbkv.errors import InterruptedRunError, OutputError
from perturbkv.pipeline.run.plan import Plan
from perturbkv.schema import MEASURED_LAYERS, VARIABLES
from perturbkv.storage.output import Lock, check_writable
from perturbkv.storage.run.sample_parts import join_parts
from perturbkv.storage.run.shard_merging import ShardWriter, joint_provenance, resumable_shards
from perturbkv.storage.run.writer import TraceWriter
from perturbkv.storage.trace.texts import SampleText, Texts, with_text, without_kept
from perturbkv.storage.trace.trace_file import LazyArrays
from perturbkv.trace import FailedSample, SampleTrace, Trace


def provenance(planned: Plan) -> dict[str, str]:
    """Return the root attributes of a run's trace: model, weights, device, and the libraries' versions."""
    run, device, stored = planned.run, planned.placement.device, planned.files.stored
    hardware = torch.cuda.get_device_name(device) if device.type == "cuda" else platform.machine()
    measured = layer_types.format_measured(planned.files.config)
    of_policies = {name: text for config in planned.configs for name, text in config.system.provenance().items()}
    return {
        "model": run.model,
        "revision": run.revision,
        "model_type": str(planned.files.config.model_type),
        "dataset": run.dataset,
        "seed": str(run.seed),
        "dtype": run.dtype,
        "weights": stored.as_run(run.dtype),
        "weights_stored": stored.detail,
        "quantised_weights": str(stored.quantised).lower(),
        "device": f"{device} ({hardware})",
        "device_map": planned.placement.device_map,
        "norm_kernel": planned.resources.norm_kernel,
        "random_weights": str(run.random_weights).lower(),
        "created": datetime.now().astimezone().isoformat(timespec="seconds"),
        "perturbkv_version": perturbkv.__version__,
        "torch_version": str(torch.__version__),
        "transformers_version": transformers.__version__,
        "python_version": platform.python_version(),
        **({MEASURED_LAYERS: measured} if measured else {}),
        **of_policies,
    }


Arrays = Mapping[str, NDArray[Any]]
_DECODED_VARIABLES = ("prompt_start", "prompt_text")
"""Variables that are decoded from a prompt's tokens when they are read."""


def text_arrays(prompt: Prompt, decode: Callable[[list[int]], str]) -> Arrays:
    """Return the variables of a prompt's tokens, text, and token offsets in the text; text is decoded on first read."""
    stored: dict[str, Any] = {
        "prompt_count": len(prompt.token_ids),
        "prompt_offset": 0,
        "prompt_token": prompt.token_ids,
    }
    text: dict[str, NDArray[Any]] = {}

    def read(name: str) -> NDArray[Any]:
        if not text:
            pieces = token_texts(prompt.token_ids, decode)
            starts = [0, *np.cumsum([len(piece) for piece in pieces])[:-1]]
            values = zip(_DECODED_VARIABLES, (starts, "".join(pieces)), strict=True)
            text.update((name, _as_variable(name, value)) for name, value in values)
        return text[name]

    return LazyArrays({name: _as_variable(name, value) for name, value in stored.items()}, _DECODED_VARIABLES, read)


def _as_variable(name: str, value: Any) -> NDArray[Any]:
    """Return a value as an array of the dtype of the trace variable `name`."""
    return np.asarray(value).astype(VARIABLES[name].dtype)


class PromptTexts(Mapping[str, SampleText]):
    """A mapping from sample ids to the text of prompts, decoded tokens and answers, decoded on each access."""

    def __init__(self, prompts: Prompts, decode: Decode) -> None:
        self._prompts = {prompt.sample_id: prompt for prompt in prompts}
        self._decode = decode

    def __getitem__(self, sample_id: str) -> SampleText:
        prompt = self._prompts[sample_id]
        answer_text = partial(decode_answer, decode=self._decode)
        pieces = partial(decoded_texts, prompt.token_ids, decode=self._decode)
        return SampleText(text_arrays(prompt, self._decode), answer_text, pieces, prompt.answers)

    def __iter__(self) -> Iterator[str]:
        return iter(self._prompts)

    def __len__(self) -> int:
        return len(self._prompts)


_log = logging.getLogger(__name__)
Finished = Callable[[SampleTrace | FailedSample, Sequence[EvictionConfig]], None]
"""Callback with a sample and the configurations that it was measured for: all that it lacked, or some of them."""
Missing = Mapping[str, Sequence[EvictionConfig]]
"""Sample id -> the configurations that it still lacks."""
Progress = Callable[[int, int], None]
"""Callback with the number of samples that are done, and of all, when a run begins and after each sample."""


class Engine(Protocol):
    """A way to carry out a run, such as in this process or on workers."""

    def measure(self, planned: Plan, missing: Missing, finished: Finished) -> None:
        """Measure the samples in `missing`, and call `finished` with every measured or failed sample.

        A sample may come in parts, each with other configurations of those that it lacks.
        """


def run_to_file(
    planned: Plan,
    engine: Engine,
    path: Path,
    *,
    overwrite: bool = False,
    wait: bool = False,
    progress: Progress = lambda done, total: None,
) -> Path:
    """Measure the samples and configurations missing from the trace at `path`, finish its file, and return the path.

    The model is loaded only where something is missing. One process at a time writes a trace; with `wait` others wait
    for it. Raises InterruptedRunError on Ctrl-C, and PerturbkvErrors; finished samples survive all of them.
    """
    check_writable(path)
    with Lock(path, wait):
        shards = resumable_shards(path, planned.run, overwrite, wait)
        attributes, journals = joint_provenance(provenance(planned), shards), [shard.journal for shard in shards]
        writer = TraceWriter(
            path, planned.run, planned.prompts.ids, attributes, overwrite, texts_of(planned), journals, planned.kept
        )
        missing, samples, configs = writer.missing(), len(planned.prompts), len(planned.run.configs)
        if len(missing) < samples:
            _log.info("%d of %d samples are there already; going on", samples - len(missing), samples)
        if lacking := [len(own) for own in missing.values() if len(own) < configs]:  # of samples that are there in part
            _log.info(
                "%s with %d of %d configurations there already: measuring %d more",
                plural(len(lacking), "sample"), configs - max(lacking), configs, max(lacking),
            )  # fmt: skip
        return measure_missing(planned, engine, writer, path, len(planned.prompts), progress)


def measure_missing(
    planned: Plan, engine: Engine, writer: TraceWriter | ShardWriter, path: Path, total: int, progress: Progress
) -> Path:
    """Measure a writer's missing samples, of `total`, and return the finished file's path. Raises as `run_to_file`.

    `path` is the trace's, for messages.
    """
    missing = writer.missing()
    _log_peculiarities(planned)
    left, done = {name: len(configs) for name, configs in missing.items()}, set[str]()  # configurations per sample

    def finished(sample: SampleTrace | FailedSample, configs: Sequence[EvictionConfig]) -> None:
        writer.append(sample, configs)
        left[sample.sample_id] = 0 if isinstance(sample, FailedSample) else left[sample.sample_id] - len(configs)
        if left[sample.sample_id] <= 0:
            done.add(sample.sample_id)
        progress(total - len(missing) + len(done), total)

    try:
        if missing:
            progress(total - len(missing), total)
            engine.measure(planned, missing, finished)
        return writer.finish()
    except KeyboardInterrupt:
        raise InterruptedRunError(len(writer.done()), total, path) from None
    except OutputError as error:
        writer.abandon()
        raise OutputError(
            f"{error}; {len(writer.done())} of {total} samples are kept, and the same command goes on with them"
        ) from error


def run_in_memory(planned: Plan, engine: Engine, progress: Progress = lambda done, total: None) -> Trace:
    """Measure every sample, and return the trace without writing a file. Raises PerturbkvErrors."""
    _log_peculiarities(planned)
    measured: dict[str, list[tuple[SampleTrace | FailedSample, list[str]]]] = {}
    total = len(planned.prompts)
    progress(0, total)

    def finished(sample: SampleTrace | FailedSample, configs: Sequence[EvictionConfig]) -> None:
        stored = sample if planned.kept else without_kept(sample)
        measured.setdefault(sample.sample_id, []).append((stored, [config.label() for config in configs]))
        progress(len(measured), total)

    engine.measure(planned, dict.fromkeys(planned.prompts.ids, planned.run.configs), finished)
    texts, labels = texts_of(planned), planned.run.labels()
    samples = [with_text(_join_parts(measured[name], labels), texts) for name in planned.prompts.ids]
    return Trace.from_samples(planned.run, samples, provenance(planned))


def _join_parts(
    parts: Sequence[tuple[SampleTrace | FailedSample, list[str]]], labels: Sequence[str]
) -> SampleTrace | FailedSample:
    """Return one sample joined from parts measured for different configurations; a failed sample if any part failed.

    Each part comes with its configurations' labels; `labels` are those of the run.
    """
    if failed := [sample for sample, _ in parts if isinstance(sample, FailedSample)]:
        return failed[-1]
    measured = [(sample, own_labels) for sample, own_labels in parts if isinstance(sample, SampleTrace)]
    return measured[0][0] if len(measured) == 1 else join_parts(measured, labels)


def texts_of(planned: Plan) -> Texts:
    """Return sample id -> text of the prompt and its answers; empty where the trace stores no text."""
    return PromptTexts(planned.prompts, planned.files.tokenizer.decode) if planned.with_text else {}


def _log_peculiarities(planned: Plan) -> None:
    """Log cut prompts, configurations that evict nothing, unmeasured layers and random weights."""
    prompts, run = planned.prompts, planned.run
    if prompts.cut_count:
        most = "" if run.max_tokens is None else f" to {run.max_tokens} tokens"
        _log.info("%d of %d prompts were cut in the middle%s", prompts.cut_count, len(prompts), most)
    lengths = [len(prompt.parts(run.scenario)[0]) for prompt in prompts]
    covered: dict[Budget, list[int]] = {}  # per configuration the number of samples that its budget covers
    for config in run.configs:
        count = sum(config.kept_entries(tokens) >= tokens for tokens in lengths)
        covered.setdefault(config.budget, []).append(count)
    sizes = " to ".join(f"{size:,}" for size in dict.fromkeys((min(lengths), max(lengths))))  # one where they are equal
    for budget, counts in covered.items():
        if min(counts):
            _log.info(
                "nothing is evicted in %d of %d samples: budget %s, prompts have %s tokens",
                min(counts), len(lengths), budget, sizes,
            )  # fmt: skip
    if measured := layer_types.format_measured(planned.files.config):
        kept = "window or recurrent state" if layer_types.is_recurrent(planned.files.config) else "sliding window"
        _log.info("%s: the others keep their own %s", layer_types.describe_measured(measured), kept)
    if run.random_weights:
        _log.info("random weights: these numbers say nothing of a trained model")
