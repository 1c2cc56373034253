"""The kept sets that an eviction is meant to have, from a file or a configuration, and what it keeps instead."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from perturbkv.analyses.audit.audited_runs import AuditedRun
from perturbkv.analyses.audit.cache_entries import Alteration
from perturbkv.auditing.loss import Sets, measure_kept_sets
from perturbkv.auditing.positions_file import KeptFile, read_positions, select_prompt
from perturbkv.configs.audit_settings import IN_CACHE, KEPT_SUFFIXES
from perturbkv.configs.choice import parse
from perturbkv.configs.eviction import EvictionConfig
from perturbkv.configs.resources import Resources
from perturbkv.datasets.encode import Prompt
from perturbkv.display import plural
from perturbkv.errors import ConfigError
from perturbkv.models.adapter import Adapter
from perturbkv.selection.grid import configuration
from perturbkv.selection.policies.registry import normalise

_FIELDS = {"w": "window", "selection": "selection", "granularity": "granularity"}
"""Option of an expected policy -> field of its configuration, beside b, the budget; others are the policy's own."""


def load_expected(source: str | Path | EvictionConfig) -> KeptFile | EvictionConfig:
    """Return the kept sets that are meant: a file's, or a configuration such as `snapkv(b=128)`.

    Options of the text are b, w, selection (attention), granularity (kv), and the policy's. Raises ConfigError without
    a budget, for a file that is not there and for options that there are not, UnreadableCacheError for another file.
    """
    if isinstance(source, EvictionConfig):
        return normalise(source)
    if str(source).endswith(KEPT_SUFFIXES):
        return read_positions(Path(source))
    choice = parse(str(source))
    if "b" not in choice.options:
        forms = "a file of kept positions, or a policy with a budget, snapkv(b=128)"
        raise ConfigError(f"expected {forms}, got '{source}'")
    fields = {_FIELDS[name]: value for name, value in choice.options.items() if name in _FIELDS}
    policy = choice.drop(("b", *_FIELDS))
    return configuration(choice["b"], policy=policy, **{"selection": "attention", "granularity": "kv", **fields})


def expected_sets(
    adapter: Adapter, prompts: Sequence[Prompt], expected: KeptFile | EvictionConfig, resources: Resources
) -> list[Sets]:
    """Return per prompt the kept sets that are meant, per key/value head or per query head.

    Raises ConfigError for a file of another prompt, UnreadableCacheError for one that does not fit the model.
    """
    if isinstance(expected, KeptFile):
        prompt = select_prompt(expected, prompts)
        if len(prompts) != 1 or prompt.token_ids != prompts[0].token_ids:
            raise ConfigError(f"expected no prompt to be audited but that of {expected.name}, which has token_ids")
        heads = adapter.kv_heads, adapter.heads
        expected.check(len(adapter.layers), heads, len(prompt.token_ids), int(adapter.config.vocab_size))
        return [expected.kept]
    trace = measure_kept_sets(adapter, prompts, [{}] * len(prompts), (expected,), resources, steps=1)
    group = 1 if expected.granularity.name == "query" else adapter.heads // adapter.kv_heads
    masks = [trace.kept_masks(sample, 0)[:, ::group] for sample in range(len(prompts))]
    return [tuple(tuple(np.flatnonzero(head) for head in layer) for layer in of_prompt) for of_prompt in masks]


def compare_kept_sets(run: AuditedRun, expected: Sets, prompt: Prompt) -> AuditedRun:
    """Return the run, with its first kept set that is not the expected one among `others`.

    Sets with entries that match none are left out, as these have a fault of their own. Where keys stand at their places
    in the cache, equal tokens have equal entries in the first layer, and any of them is as good. Only the first row of
    a batch holds the whole prompt. Raises ConfigError for sets per query head of a cache with sets per key/value head.
    """
    if run.entries is None or run.row:
        return run
    kept, times = run.entries.kept_sets, len(run.entries.kept_sets[0]) / len(expected[0])
    if times < 1:
        raise ConfigError(f"expected {len(kept[0])} kept sets per layer, as the cache has, got {len(expected[0])}")
    meant = [[layer[int(head / times)] for head in range(len(kept[0]))] for layer in expected]
    tokens = np.array(prompt.token_ids)

    def differs(layer: int, head: int) -> bool:
        own, other = kept[layer][head], meant[layer][head]
        if run.positions == IN_CACHE and layer == 0:
            own, other = np.sort(tokens[own]), np.sort(tokens[other])
        return not np.array_equal(own, other)

    places = [(layer, head) for layer in range(len(kept)) for head in range(len(kept[0]))]
    wrong = [place for place in places if not run.entries.strangers[place] and differs(*place)]
    if not wrong:
        return run
    layer, head = wrong[0]
    own, other = kept[layer][head], meant[layer][head]
    lacks, more = np.setdiff1d(other, own), np.setdiff1d(own, other)
    entry = int(min([*lacks[:1], *more[:1]]))
    what = (
        f"it lacks {plural(len(lacks), 'entry', 'entries')} that should stay and keeps {plural(len(more), 'other')}, "
        f"the first {entry}; {len(wrong):,} of {plural(len(places), 'kept set')} are not the expected ones"
    )
    return dataclasses.replace(run, others=(*run.others, Alteration(layer, head, "unexpected", what, entry)))
