"""The inputs of a measurement from a notebook: model, prompts and configurations, checked and planned."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

import torch

from perturbkv.configs.eviction import EvictionConfig
from perturbkv.configs.option import check_configurations
from perturbkv.configs.resources import Resources
from perturbkv.configs.run import Settings
from perturbkv.datasets.encode import Prompt
from perturbkv.datasets.prompts import Prompts, collect, load
from perturbkv.errors import ConfigError, ModelError
from perturbkv.models import user_model
from perturbkv.models.adapter import Adapter
from perturbkv.models.loading import ModelFiles
from perturbkv.models.loading import load_model as load_by_name
from perturbkv.pipeline.run.plan import Placement, Plan, plan
from perturbkv.scoring import head_scores, value_norms
from perturbkv.selection import compatibility
from perturbkv.selection.grid import unique
from perturbkv.selection.policies import registry as policies


def load_model(
    model: Any,
    *,
    tokenizer: Any = None,
    dtype: Any = "auto",
    device: Any = "auto",
    seed: int = 0,
    revision: str | None = None,
) -> Adapter:
    """Return a model to measure: loaded by name, or wrapped where it is loaded already.

    Args:
        model: an alias (`smollm2-135m-q4_1`), a hub id, a hub's file (`owner/name:file.gguf`), a folder, a .gguf file,
            `random:<alias>`; or a transformers model, on any device, which is used where it is and left as it was.
        tokenizer: the tokenizer of a loaded model.
        dtype: of a model that is loaded by name: auto, float32, bfloat16, float16.
        device: of a model that is loaded by name: auto, cpu, cuda, cuda:1, ….
        seed: of random weights.
        revision: branch, tag or commit of a hub's model; None: the newest of its main branch.

    Raises ModelError, UnknownNameError or ConfigError, each with what was expected and what to do.

    >>> import perturbkv as pk
    >>> pk.load_model("random:smollm2-135m").heads
    9
    """
    if isinstance(model, str | Path):
        if tokenizer is not None:
            raise ConfigError(f"model '{model}' brings its own tokenizer; give a tokenizer with a loaded model alone")
        return load_by_name(str(model), str(dtype).removeprefix("torch."), str(device), seed, revision=revision or "")
    if isinstance(model, Adapter):
        return model
    if (dtype, device, revision) != ("auto", "auto", None):
        raise ConfigError("a loaded model stays what and where it is; leave dtype, device and revision out")
    return user_model.adapt(model, tokenizer)


def load_prompts(
    dataset: str,
    model: Adapter,
    *,
    samples: int | None = None,
    seed: int = 0,
    data_dir: str | Path | None = None,
    lengths: Sequence[int] = (),
    depths: Sequence[float] = (),
    haystack: str = "prose",
    metric: str = "",
    max_tokens: int | None = None,
    chat_template: bool | None = None,
) -> Prompts:
    """Return the prompts of a data set, encoded for a model.

    Args:
        dataset: `needle`, one of LongBench's 21 names, or a .jsonl file.
        model: the model whose tokenizer and chat template encode them.
        samples: number of prompts; None: 8, or all where there are fewer.
        seed: seed of everything random.
        data_dir: folder with LongBench's files.
        lengths: lengths of needle's and RULER's prompts, tokens.
        depths: positions of needle's fact, 0 to 1.
        haystack: needle's filler text, `prose` or `noise`.
        metric: the metric that grades answers: `f1`, `exact-match`, `rouge-l`, `exact-number`, `contains` or
            `string_match_all`; empty: that of the data set, and f1 for other prompts with accepted answers.
        max_tokens: longer prompts are cut in the middle.
        chat_template: use the model's chat template; None: where the tokenizer has one and the data set suits it.

    Raises UnknownNameError, DatasetError, ConfigError.
    """
    return load(
        dataset, model.tokenizer, samples=samples, seed=seed, data_dir=None if data_dir is None else Path(data_dir),
        lengths=lengths, depths=depths, haystack=haystack, metric=metric, max_tokens=max_tokens,
        chat_template=chat_template, positions=model.positions,
    )  # fmt: skip


CONFIGS = "configurations, as pk.grid makes them"
_Kind = TypeVar("_Kind")


def make_plan(
    model: Adapter,
    prompts: Iterable[Prompt],
    configs: Iterable[EvictionConfig],
    settings: Settings,
    resources: Resources,
    resumable: bool = False,
) -> Plan:
    """Return the plan of a run; with `resumable`, a loaded model is identified by a fingerprint of its weights."""
    given = as_tuple(EvictionConfig, configs, CONFIGS)
    check_configurations(len(given))  # before each is completed, which takes milliseconds
    chosen = unique(map(policies.normalise, given))
    collected = collect_prompts(prompts)
    check_model(model)
    for config in chosen:
        compatibility.check(config, settings.cache)
    needed = any(policies.policy_class(config.policy.name).needs_scores for config in chosen)
    scores = head_scores.from_rows(settings.head_scores, len(model.layers), model.heads) if needed else ()
    value_norms.check_kernel(resources.norm_kernel, model.device)
    files = ModelFiles.from_adapter(model)
    if resumable and files.revision == user_model.GIVEN:
        files = replace(files, revision=user_model.fingerprint(model))
    placement = Placement(model.dtype, torch.device(model.device))
    return plan(files, placement, collected, chosen, replace(settings, head_scores=scores), resources, model)


def collect_prompts(prompts: Iterable[Prompt]) -> Prompts:
    """Return a prompt, or an iterable of prompts, as `Prompts`. Raises ConfigError for any other object."""
    if isinstance(prompts, Prompts):
        return collect(prompts)
    return collect(as_tuple(Prompt, prompts, "prompts: pk.Prompt.from_text"))


def as_tuple(kind: type[_Kind], value: Any, what: str) -> tuple[_Kind, ...]:
    """Return an object of type `kind`, or an iterable of such objects, as a tuple.

    Raises ConfigError for anything else; `what` says in it what was expected.
    """
    items = (value,) if isinstance(value, kind) or not isinstance(value, Iterable) else tuple(value)
    for one in items:
        if not isinstance(one, kind):
            raise ConfigError(f"expected {what}; got {type(one).__name__}")
    return items


def check_model(model: Any) -> None:
    """Raise ModelError for an object that is not a model from `load_model`."""
    if not isinstance(model, Adapter):
        raise ModelError(f"expected a model from pk.load_model, got {type(model).__name__}")
