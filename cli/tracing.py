"""From a plan to a finished trace file: load, run, resume."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING

from perturbkv.analyses.naming import counted
from perturbkv.cli import console
from perturbkv.cli.options import RunOptions
from perturbkv.cli.planning import Encoded, Plan
from perturbkv.configs.eviction import EvictionConfig
from perturbkv.configs.run import RunConfig
from perturbkv.errors import PerturbkvError

if TYPE_CHECKING:
    from perturbkv.models.adapter import Adapter
    from perturbkv.trace import FailedSample, SampleTrace


class InterruptedRunError(PerturbkvError):
    """Ctrl-C during a run; what is finished stays in the journal."""

    exit_code = 130


def run_folder(options: RunOptions) -> Path:
    """`--output`, or runs/<time>-<model>-<dataset>."""
    if options.output is not None:
        return options.output
    names = [Path(name).stem if "/" in name else name for name in (options.model, options.dataset)]
    slug = "-".join(re.sub(r"[^A-Za-z0-9._]+", "-", name).strip("-") for name in names)
    return Path("runs") / f"{datetime.now():%Y%m%d-%H%M%S}-{slug}"


def make_trace(options: RunOptions, planned: Plan, path: Path) -> Path:
    """Run what is missing of a trace and finish its file; the weights are loaded only where something is.

    Raises PerturbkvErrors; finished samples survive all of them.
    """
    from perturbkv.pipeline.samples import trace
    from perturbkv.storage.writer import TraceWriter

    prompts = planned.encoded.prompts
    names = [prompt.sample_id for prompt in prompts]
    writer = TraceWriter(path, planned.run, names, provenance(planned), overwrite=options.overwrite)
    missing = writer.missing()
    todo = [prompt for prompt in prompts if prompt.sample_id in missing]
    _say_what_is_there(planned, missing)
    _say_what_is_special(planned.encoded, planned.run)
    if not todo:
        return writer.finish()
    adapter = load(planned)
    try:
        with console.progress("samples", len(names), len(names) - len(todo)) as bar:

            def finished(sample: SampleTrace | FailedSample) -> None:
                writer.append(sample, missing[sample.sample_id])
                bar.advance(bar.task_ids[0])

            trace(adapter, todo, planned.run, planned.resources, finished, missing)
    except KeyboardInterrupt:
        again = path if path == options.output else path.parent
        msg = (
            f"interrupted: {len(writer.done())} of {len(names)} samples are kept beside {path}; "
            f"run the same command with --output {again} to go on"
        )
        raise InterruptedRunError(msg) from None
    return writer.finish()


def load(planned: Plan) -> Adapter:
    """The planned run's model with its weights. Raises ModelError."""
    from perturbkv.models.loading import load_weights

    return load_weights(planned.files, planned.dtype, planned.device, planned.run.seed, planned.device_map)


def _say_what_is_there(planned: Plan, missing: Mapping[str, Sequence[EvictionConfig]]) -> None:
    """What an earlier run has measured already, in samples and in configurations."""
    samples, configs = len(planned.encoded.prompts), len(planned.run.configs)
    done = samples - len(missing)
    if done:
        console.note(f"{done} of {samples} samples are there already; going on")
    parts = [len(lacking) for lacking in missing.values() if len(lacking) < configs]
    if parts:
        console.note(
            f"{counted(len(parts), 'sample')} with {configs - max(parts)} of {configs} configurations there already: "
            f"measuring {max(parts)} more"
        )


def _say_what_is_special(encoded: Encoded, run: RunConfig) -> None:
    if encoded.cut:
        console.note(
            f"{encoded.cut} of {len(encoded.prompts)} prompts were cut in the middle to {run.max_tokens} tokens"
        )
    for config in run.configs:
        compressed = [len(prompt.parts(run.scenario)[0]) for prompt in encoded.prompts]
        whole = sum(config.kept_entries(tokens) >= tokens for tokens in compressed)
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
        "weights": planned.files.stored.as_run(run.dtype),
        "weights_stored": planned.files.stored.detail,
        "quantised_weights": str(planned.files.stored.quantised).lower(),
        "device": f"{device} ({hardware})",
        "device_map": planned.device_map,
        "norm_kernel": planned.resources.norm_kernel,
        "random_weights": str(run.random_weights).lower(),
        "created": datetime.now().astimezone().isoformat(timespec="seconds"),
        "perturbkv_version": perturbkv.__version__,
        "torch_version": str(torch.__version__),
        "transformers_version": transformers.__version__,
        "python_version": platform.python_version(),
    }
