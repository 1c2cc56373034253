"""Checks of whole samples on a device, against the same samples on the CPU.

A small model in float32 measures a prompt with every policy, with few bits, corrections, moved keys and attention
sinks, and generates from evicted caches, compressed again while it decodes or not. Rounding may exchange entries of
nearly equal scores: so sums over heads are compared, and shares of equal tokens.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from perturbkv.configs.eviction import EvictionConfig
from perturbkv.configs.run import RunConfig
from perturbkv.models.adapter import Adapter
from perturbkv.models.loading import ByteTokenizer
from perturbkv.pipeline.answers.generation import answer
from perturbkv.pipeline.sample.one_sample import trace_sample
from perturbkv.selection.grid import grid
from perturbkv.selection.policies import registry
from perturbkv.selection.resolved_config import ResolvedRun
from perturbkv.selfcheck.checks import Check, random_prompt, relative_distance, run_check

_VARIABLES = (
    "perturbation_isolated",
    "perturbation_propagated",
    "theta",
    "retained_mass",
    "hidden_drift_l1",
    "kept_count",
)
_TOKENS, _BUDGET, _WINDOW, _ANSWER = 200, 64, 16, 24
_SUMS_BOUND, _ANSWERS_BOUND = 1e-3, 0.1
_SUMS_RULE = "largest relative difference of a sum over heads from the CPU's, in float32"
_ANSWERS_RULE = "share of answer tokens that are not the CPU's, in float32"
_HEAD_SCORES = ((1.0, 2.0, 3.0, 4.0),) * 2
KINDS: Mapping[str, Mapping[str, Any]] = {
    "few bits": {"precision": "quantise(bits=4)"},
    "corrected": {"correction": "corrected"},
    "moved keys": {"policy": "adakv(positions=in-cache)"},
    "two stages": {"selection": "two-stage"},
}
"""Name of a kind of eviction -> its choices."""


def check_samples(device: torch.device) -> list[Check]:
    """Return a check per policy and kind of eviction, of a model with attention sinks, and of answers."""
    sums = {f"policy {name}": _policy_configs(name) for name in registry.names()}
    sums |= {name: _configs(**choices) for name, choices in KINDS.items()}
    work = {name: partial(_check_sums, name, device, configs) for name, configs in sums.items()}
    work["attention sinks"] = partial(_check_sums, "attention sinks", device, _configs(), "gpt_oss")
    for name, limit in (("answers", 0), ("answers, compressed again", 8)):
        work[name] = partial(_check_answers, name, device, limit)
    return [check for name, one in work.items() for check in run_check(name, "", one)]


def _configs(**choices: Any) -> tuple[EvictionConfig, ...]:
    """Return the configurations with these choices, else with a small window and the selection `attention`."""
    return grid(_BUDGET, **{"window": _WINDOW, "selection": "attention", **choices})


def _policy_configs(name: str) -> tuple[EvictionConfig, ...]:
    """Return a policy's configurations with the selection `attention`, or with its first if it does not take that."""
    selections = registry.policy_class(name).selections
    return _configs(policy=name, selection="attention" if "attention" in selections else selections[0])


def _model(family: str, device: torch.device) -> Adapter:
    """Return a model of two layers with random weights, the same on every device."""
    config = AutoConfig.for_model(
        family, num_hidden_layers=4 if family == "gpt_oss" else 2, num_attention_heads=4, num_key_value_heads=2,
        head_dim=64, hidden_size=256, intermediate_size=256, vocab_size=260, max_position_embeddings=1024,
        initializer_range=0.1, pad_token_id=None, num_local_experts=2, num_experts_per_tok=1,
        **({"layer_types": ["sliding_attention", "full_attention"] * 2, "sliding_window": 64}
           if family == "gpt_oss" else {}),
    )  # fmt: skip
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(
            config, dtype=torch.float32, attn_implementation="eager" if family == "gpt_oss" else "sdpa"
        )
    return Adapter(model.eval().to(device), ByteTokenizer(), family, "seed 0", True)


def _run(configs: Sequence[EvictionConfig], **settings: Any) -> ResolvedRun:
    """Return a run of these configurations."""
    needed = any(registry.policy_class(config.policy.name).needs_scores for config in configs)
    scores = _HEAD_SCORES if needed else ()
    return ResolvedRun.from_run(RunConfig("small", "random tokens", tuple(configs), head_scores=scores, **settings))


def _check_sums(
    name: str, device: torch.device, configs: Sequence[EvictionConfig], family: str = "llama"
) -> list[Check]:
    """Return the check of the sums over heads of a sample that a model of this family measures."""
    expected, found = (
        trace_sample(_model(family, place), random_prompt(_TOKENS), _run(configs, steps=2)).arrays
        for place in (torch.device("cpu"), device)
    )
    distances = [
        relative_distance(_sum_last_axis(found[one]), _sum_last_axis(expected[one]))
        for one in _VARIABLES
        if one in expected
    ]
    return [Check(name, max(distances), _SUMS_BOUND, _SUMS_RULE)]


def _sum_last_axis(array: np.ndarray) -> np.ndarray:
    """Return sums over the last axis, that of heads or layers, in float64; NaN counts as 0."""
    return np.asarray(np.nansum(array.astype(np.float64), axis=-1))


def _check_answers(name: str, device: torch.device, compress_over: int) -> list[Check]:
    """Return the check of greedy answers from the full cache and from evicted ones.

    `compress_over`: entries above which a cache is compressed again while it decodes; 0: never.
    """
    configs = [*_configs(), *_configs(policy="adakv"), *_configs(policy="streaming-llm", selection="position")]
    run = _run(configs, generate=_ANSWER, compress_over=compress_over)
    expected, found = (
        answer(_model("llama", place), random_prompt(_TOKENS), run) for place in (torch.device("cpu"), device)
    )
    pairs = [(found.full, expected.full), *zip(found.evicted, expected.evicted, strict=True)]
    differs = sum(
        one != other
        for first, second in pairs
        for one, other in zip(_pad_answer(first), _pad_answer(second), strict=True)
    )
    return [Check(name, differs / (len(pairs) * _ANSWER), _ANSWERS_BOUND, _ANSWERS_RULE)]


def _pad_answer(tokens: Sequence[int]) -> list[int]:
    """Return an answer's tokens, filled up with -1, which is no token, where it ended early."""
    return [*tokens, *[-1] * (_ANSWER - len(tokens))]
