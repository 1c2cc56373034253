"""Which configurations of a prompt are decoded together, and whether their caches have to lie in memory for it."""

from __future__ import annotations

from perturbkv.configs.resources import Batches, Resources, Shape, plan_batches
from perturbkv.configs.run import RunConfig
from perturbkv.datasets.encode import Prompt
from perturbkv.selection.policies import registry


def passing(run: RunConfig) -> bool:
    """Whether evicted caches are read once or, with a question, twice, and all they hold lies in the full one as well.

    Copying the kept entries out for each pass then takes less than holding them.
    """
    changed = any(config.quantised or registry.build(config.policy).in_cache for config in run.configs)
    return run.steps == 1 and not run.generate and not changed


def batches_of(prompt: Prompt, run: RunConfig, shape: Shape, resources: Resources) -> Batches:
    """The batches of one prompt. Raises ConfigError where a configuration exceeds the bound on memory."""
    context, question = prompt.parts(run.scenario)
    decoded = len(question) + max(run.steps, run.generate)
    bound = resources.max_bytes
    return plan_batches(run.configs, shape, len(context), decoded, run.steps, bound, passing=passing(run))
