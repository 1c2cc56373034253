"""From options as typed to the library's plan of a run."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from perturbkv.cli.data_options import DataOptions
from perturbkv.cli.options import RunOptions
from perturbkv.configs.eviction import EvictionConfig
from perturbkv.errors import ConfigError

if TYPE_CHECKING:
    from perturbkv.datasets.prompts import Prompts
    from perturbkv.models.loading import ModelFiles
    from perturbkv.pipeline.run.plan import Plan


def encode_prompts(options: DataOptions, tokenizer: Any, positions: int | None = None, metric: str = "") -> Prompts:
    """Load the dataset and encode it for a model of so many positions, None where that does not matter.

    `metric` grades answers instead of the data set's own.

    Raises DatasetError and ConfigError for all that is wrong with the data.
    """
    from perturbkv.datasets.prompts import load

    return load(
        options.dataset, tokenizer, samples=options.samples, seed=options.seed, data_dir=options.data_dir,
        lengths=options.lengths, depths=options.depths, haystack=options.haystack, max_tokens=options.max_tokens,
        chat_template=options.chat_template, positions=positions, metric=metric,
    )  # fmt: skip


def plan(
    options: RunOptions,
    configs: Sequence[EvictionConfig],
    leave_out_unfit: bool = False,
    generate: int | None = 0,
    metric: str = "",
    scored: bool = True,
    files: ModelFiles | None = None,
) -> Plan:
    """Check everything that can be checked without the weights. Raises PerturbkvErrors.

    `leave_out_unfit`: a budget that some prompt makes no larger than the window is left out instead of refused.
    `generate`: tokens generated from every cache; None: as many as the dataset says. `metric`: that grades answers
    instead of the data set's own. `scored`: whether prompts whose answers nothing grades are refused.
    `files`: the model, where it was opened for another run already.
    """
    if options.shard is not None and options.output is None:
        msg = "expected --output with --shard, got none; name the place that all shards of the run share"
        raise ConfigError(msg)
    from perturbkv.cache import positions
    from perturbkv.datasets import dataset_registry as datasets
    from perturbkv.engines import choosing
    from perturbkv.models.loading import open_model, pick_dtype
    from perturbkv.pipeline.run.plan import Placement, Settings
    from perturbkv.pipeline.run.plan import plan as plan_run
    from perturbkv.scoring import head_scores, value_norms
    from perturbkv.selection import compatibility
    from perturbkv.selection.policies import registry as policies

    datasets.check_name(options.dataset)
    resources, device = options.resources, choosing.device(options.spread, options.device)
    placement = Placement(pick_dtype(options.dtype, device), device, options.device_map)
    value_norms.check_kernel(resources.norm_kernel, device)
    files = files or open_model(options.model, options.seed, options.revision or "")
    positions.check(configs, files.config, files.name)
    needed = [config.policy.name for config in configs if policies.info(config.policy.name).needs_scores]
    scores = head_scores.given(options.head_scores, files.config, needed[0] if needed else None, compatibility.works())
    settings = Settings(
        steps=options.step_count,
        scenario=options.scenario,
        cache=options.cache,
        save=tuple(options.save or ()),
        generate=generate,
        head_scores=scores,
        text=options.text,
        kept=options.kept,
        scored=scored,
        leave_out_unfit=leave_out_unfit,
    )
    prompts = encode_prompts(options, files.tokenizer, int(files.config.max_position_embeddings), metric)
    return plan_run(files, placement, prompts, configs, settings, resources)
