"""From a user's options to a finished trace file: load, encode, run, resume."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from perturbkv.cli import console
from perturbkv.cli.options import RunOptions
from perturbkv.config import EvictionConfig, RunConfig
from perturbkv.errors import BudgetError, PerturbkvError

if TYPE_CHECKING:
    import torch

    from perturbkv.datasets.encode import EncodedPrompt
    from perturbkv.loading import ModelFiles
    from perturbkv.trace import FailedSample, SampleTrace


class InterruptedRunError(PerturbkvError):
    """Ctrl-C during a run; what is finished stays in the journal."""

    exit_code = 130


@dataclass(frozen=True)
class Encoded:
    """The prompts of a run as token ids, and what the dataset wants recorded."""

    prompts: tuple[EncodedPrompt, ...]
    options: dict[str, Any]
    chat_template: bool

    @property
    def cut(self) -> int:
        """How many samples lost their middle."""
        return sum(prompt.cut_tokens > 0 for prompt in self.prompts)


def run_folder(options: RunOptions) -> Path:
    """`--output`, or runs/<time>-<model>-<dataset>."""
    if options.output is not None:
        return options.output
    names = [Path(name).stem if "/" in name else name for name in (options.model, options.dataset)]
    slug = "-".join(re.sub(r"[^A-Za-z0-9._]+", "-", name).strip("-") for name in names)
    return Path("runs") / f"{datetime.now():%Y%m%d-%H%M%S}-{slug}"


def encode_prompts(options: RunOptions, model_config: Any, tokenizer: Any, after: int) -> Encoded:
    """Load the dataset and encode it; every error of data and length comes here, before anything runs.

    `after` tokens are decoded after a prompt.
    """
    from perturbkv.datasets import registry as datasets
    from perturbkv.datasets.encode import check_length, encode
    from perturbkv.models import check_sliding_window

    asked = datasets.DatasetOptions(
        samples=options.sample_count, seed=options.seed, data_dir=options.data_dir, haystack=options.haystack
    )
    if options.lengths:
        asked = replace(asked, lengths=options.lengths)
    if options.depths:
        asked = replace(asked, depths=options.depths)
    loaded = datasets.load(options.dataset, asked, tokenizer)
    template = bool(tokenizer.chat_template) if options.chat_template is None else options.chat_template
    prompts = tuple(
        encode(sample, tokenizer, chat_template=template, max_tokens=options.max_tokens) for sample in loaded.samples
    )
    for prompt in prompts:
        prompt.parts(options.scenario)
        check_length(prompt, int(model_config.max_position_embeddings), after)
        total = len(prompt.token_ids) + after
        check_sliding_window(model_config, total, prompt.sample_id, options.model)
    return Encoded(prompts, loaded.options, template)


@dataclass(frozen=True)
class Plan:
    """A run that is known to be possible, before any weight is loaded."""

    files: ModelFiles
    dtype: torch.dtype
    device: torch.device
    encoded: Encoded
    run: RunConfig


def fitting(
    configs: Sequence[EvictionConfig], prompts: Sequence[EncodedPrompt], scenario: str, leave_out_unfit: bool
) -> tuple[EvictionConfig, ...]:
    """The configurations whose budget exceeds the window in every prompt.

    Raises BudgetError for one that does not, or with `leave_out_unfit` where none is left; those left out are said.
    """
    fit: list[EvictionConfig] = []
    refused: dict[str, BudgetError] = {}
    for config in configs:
        try:
            for prompt in prompts:
                config.tokens(len(prompt.parts(scenario)[0]))
        except BudgetError as error:
            refused[str(config.budget)] = error
        else:
            fit.append(config)
    if refused and not (leave_out_unfit and fit):
        raise next(iter(refused.values()))
    for reason in refused.values():
        console.note(f"left out: {reason}")
    return tuple(fit)


def plan(
    options: RunOptions, configs: Sequence[EvictionConfig], leave_out_unfit: bool = False, generate: int = 0
) -> Plan:
    """Check everything that can be checked without the weights. Raises PerturbkvErrors.

    `leave_out_unfit`: a budget that some prompt makes no larger than the window is left out instead of refused.
    `generate`: tokens generated from every cache and scored.
    """
    from perturbkv import head_scores
    from perturbkv.datasets import registry as datasets
    from perturbkv.loading import open_model, pick_device, pick_dtype
    from perturbkv.policies import registry as policies

    datasets.check_name(options.dataset)
    device = pick_device(options.device)
    dtype = pick_dtype(options.dtype, device)
    files = open_model(options.model, options.seed)
    needed = [config.policy for config in configs if policies.info(config.policy).needs_scores]
    scores = head_scores.given(options.head_scores, files.config, needed[0] if needed else None, policies.works())
    encoded = encode_prompts(options, files.config, files.tokenizer, max(options.step_count, generate))
    run = RunConfig(
        model=options.model,
        dataset=options.dataset,
        configs=fitting(configs, encoded.prompts, options.scenario, leave_out_unfit),
        revision=files.revision,
        random_weights=files.random_weights,
        dataset_options=encoded.options,
        samples=options.sample_count,
        seed=options.seed,
        steps=options.step_count,
        max_tokens=options.max_tokens,
        chat_template=encoded.chat_template,
        dtype=str(dtype).removeprefix("torch."),
        device=device.type,
        save=tuple(options.save or ()),
        scenario=options.scenario,
        cache=options.cache,
        head_scores=scores,
        generate=generate,
    )
    return Plan(files, dtype, device, encoded, run)


def make_trace(options: RunOptions, planned: Plan, path: Path) -> Path:
    """Run what is missing of a trace and finish its file; the weights are loaded only where something is.

    Raises PerturbkvErrors; finished samples survive all of them.
    """
    from perturbkv.loading import load_weights
    from perturbkv.runner import trace
    from perturbkv.writer import TraceWriter

    prompts = planned.encoded.prompts
    names = [prompt.sample_id for prompt in prompts]
    writer = TraceWriter(path, planned.run, names, provenance(planned), overwrite=options.overwrite)
    done = writer.done()
    todo = [prompt for prompt in prompts if prompt.sample_id not in done]
    _say_what_is_special(planned.encoded, planned.run, len(done))
    if not todo:
        return writer.finish()
    adapter = load_weights(planned.files, planned.dtype, planned.device, options.seed)
    try:
        with console.progress("samples", len(names), len(done)) as bar:

            def finished(sample: SampleTrace | FailedSample) -> None:
                writer.append(sample)
                bar.advance(bar.task_ids[0])

            trace(adapter, todo, planned.run, options.chunk_mib * 2**20, finished)
    except KeyboardInterrupt:
        again = path if path == options.output else path.parent
        msg = (
            f"interrupted: {len(writer.done())} of {len(names)} samples are kept beside {path}; "
            f"run the same command with --output {again} to go on"
        )
        raise InterruptedRunError(msg) from None
    return writer.finish()


def _say_what_is_special(encoded: Encoded, run: RunConfig, done: int) -> None:
    if done:
        console.note(f"{done} of {len(encoded.prompts)} samples are there already; going on")
    if encoded.cut:
        console.note(
            f"{encoded.cut} of {len(encoded.prompts)} prompts were cut in the middle to {run.max_tokens} tokens"
        )
    for config in run.configs:
        compressed = [len(prompt.parts(run.scenario)[0]) for prompt in encoded.prompts]
        whole = sum(config.tokens(tokens) >= tokens for tokens in compressed)
        if whole:
            console.note(f"'{config.label()}' evicts nothing in {whole} of {len(encoded.prompts)} samples: b ≥ n")
    if run.random_weights:
        console.note("random weights: these numbers say nothing of a trained model")


def provenance(planned: Plan) -> dict[str, str]:
    """Root attributes of the trace: what was used, down to the libraries' versions."""
    import platform

    import torch
    import transformers

    import perturbkv

    run, device = planned.run, planned.device
    hardware = torch.cuda.get_device_name(device) if device.type == "cuda" else platform.machine()
    return {
        "model": run.model,
        "revision": run.revision,
        "model_type": str(planned.files.config.model_type),
        "dataset": run.dataset,
        "seed": str(run.seed),
        "dtype": run.dtype,
        "device": f"{device} ({hardware})",
        "random_weights": str(run.random_weights).lower(),
        "created": datetime.now().astimezone().isoformat(timespec="seconds"),
        "perturbkv_version": perturbkv.__version__,
        "torch_version": str(torch.__version__),
        "transformers_version": transformers.__version__,
        "python_version": platform.python_version(),
    }
