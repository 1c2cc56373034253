"""Audits: every prompt in every situation, plain use of the cache, and the loss of the kept sets."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
import transformers

import perturbkv
from perturbkv import memory
from perturbkv.audit_trace import ALLOWED, AUTO, IN_CACHE, POSITIONS, SITUATIONS, AuditRun, AuditTrace, PlainUse
from perturbkv.auditing import loss, reference, situations
from perturbkv.auditing.evictions import Eviction, FailedError, RefusedError
from perturbkv.auditing.external_run import run_eviction
from perturbkv.auditing.model_state import ModelState, describe_damage, foreign_code
from perturbkv.auditing.plain_use import plain_use
from perturbkv.auditing.positions_file import KeptFile, audit_file, select_prompt
from perturbkv.configs.resources import Resources
from perturbkv.datasets.encode import Prompt, check_length, check_vocabulary
from perturbkv.devices import dtype_name, full_precision
from perturbkv.errors import ConfigError, PerturbkvError, UnknownNameError, UnreadableCacheError
from perturbkv.models.adapter import Adapter, check_long_rotations, check_sliding_window
from perturbkv.pipeline.variants.sparse_prefill import full_prefill_seconds

POSITIONS_FILE = "positions file"
_READINGS, _LOSS_READINGS = 5, 6
"""Prefills of a prompt that its reading in several ways costs, decoding included, and those of its losses."""
_DEFAULT = Resources()


@dataclass(frozen=True)
class Settings:
    """The options of an audit.

    Attributes:
        steps: number of forward passes after the eviction.
        situations: keys of `SITUATIONS`.
        losses: whether the loss is measured, and that of controls.
        plain_use: whether plain calls of the model with the cache are tried.
        allow: kinds of changed entries, of `ALLOWED`, that are no fault.
        positions: a key of `POSITIONS`.

    Raises ConfigError or UnknownNameError for invalid values.
    """

    steps: int = 4
    situations: tuple[str, ...] = tuple(SITUATIONS)
    losses: bool = True
    allow: tuple[str, ...] = ()
    positions: str = AUTO
    plain_use: bool = True

    def __post_init__(self) -> None:
        if self.steps < 1:
            raise ConfigError(f"expected at least 1 step, got {self.steps}")
        if not self.situations:
            raise ConfigError(f"expected at least one situation of {', '.join(SITUATIONS)}, got none")
        for name in self.situations:
            if name not in SITUATIONS:
                raise UnknownNameError(name, "situation", SITUATIONS)
        if self.positions not in POSITIONS:
            raise UnknownNameError(self.positions, "convention of positions", POSITIONS)
        for name in self.allow:
            if name not in ALLOWED:
                raise UnknownNameError(name, "kind of change that can be allowed", ALLOWED)


@torch.inference_mode()
@memory.translate_allocation_errors()
@full_precision()
def audit(
    adapter: Adapter,
    prompts: Sequence[Prompt],
    eviction: Eviction | KeptFile,
    settings: Settings,
    source: Mapping[str, str],
    resources: Resources = _DEFAULT,
    progress: Callable[[], object] = lambda: None,
) -> AuditTrace:
    """Audit an eviction on every prompt, and return the trace; of an unreadable one the reason and the runs before.

    `source` is the provenance of the prompts. Raises ConfigError and DatasetError for prompts that do not fit,
    ModelError for an attention that takes no masks.
    """
    reference.check(adapter)
    used = (select_prompt(eviction, prompts),) if isinstance(eviction, KeptFile) else tuple(prompts)
    for prompt in prompts:  # tokens of a file are checked with its positions
        check_vocabulary(prompt, int(adapter.config.vocab_size), adapter.name)
    for prompt in used:
        _check_length(adapter, prompt, situations.token_count(settings.steps, settings.situations))
    kind = POSITIONS_FILE if isinstance(eviction, KeptFile) else eviction.kind
    blank = AuditTrace(
        eviction.name,
        kind,
        provenance(adapter, source, len(used)),
        len(adapter.layers),
        adapter.heads,
        adapter.kv_heads,
        allowed=settings.allow,
    )
    runs: list[AuditRun] = []
    plain, damage = None, ""
    try:
        before = _plain_model(adapter)
        for prompt in used:
            for run in _audit_prompt(adapter, prompt, eviction, settings, before):
                runs.append(run)  # at once, as a later situation may be unreadable
            progress()
            if runs[-1].damage:  # there is no reference any more
                return dataclasses.replace(blank, runs=tuple(runs), lossless=runs[-1].damage)
        if settings.plain_use:
            plain, damage = _measure_plain_use(adapter, used[0], eviction, runs[0], before)
    except UnreadableCacheError as error:
        return dataclasses.replace(blank, runs=tuple(runs), unreadable=error.reason)
    trace = dataclasses.replace(blank, runs=tuple(runs), plain=plain, lossless=damage)
    return _with_losses(trace, adapter, used, resources) if settings.losses and not damage else trace


def estimate_seconds(
    adapter: Adapter, prompts: Sequence[Prompt], eviction: Eviction | KeptFile, settings: Settings
) -> float:
    """Return a rough estimate of an audit's duration, in seconds, from one prefill of the shortest prompt."""
    shortest = min(prompts, key=lambda prompt: len(prompt.token_ids))
    seconds = full_prefill_seconds(adapter, shortest.token_ids) / len(shortest.token_ids)
    rows = sum(2 if name == "batch" else 1 for name in settings.situations)
    alone = any(name != "batch" for name in settings.situations)
    prefills = _READINGS * (alone + rows) if not isinstance(eviction, KeptFile) else _READINGS
    prefills += _LOSS_READINGS if settings.losses else 0
    return seconds * prefills * sum(len(prompt.token_ids) for prompt in prompts)


def _check_length(adapter: Adapter, prompt: Prompt, steps: int) -> None:
    """Raise an error for a prompt too short to audit, or too long for the model with `steps` new tokens."""
    check_length(prompt, adapter.positions, steps)
    tokens = len(prompt.token_ids)
    check_sliding_window(adapter.config, tokens + steps, prompt.sample_id, adapter.name, steps)
    check_long_rotations(adapter.config, tokens, tokens + steps, prompt.sample_id, adapter.name, steps)
    if tokens <= situations.BLOCK:
        raise ConfigError(
            f"expected prompts of more than {situations.BLOCK} tokens, sample '{prompt.sample_id}' is shorter"
        )


def provenance(adapter: Adapter, source: Mapping[str, str], samples: int) -> dict[str, str]:
    """Return the provenance of an audit as name -> text: model, versions, number of samples, source of the prompts."""
    return {
        "model": adapter.name,
        "random_weights": str(adapter.random_weights).lower(),
        "dtype": dtype_name(adapter.dtype),
        "device": str(adapter.device),
        "samples": str(samples),
        "perturbkv_version": perturbkv.__version__,
        "torch_version": str(torch.__version__),
        "transformers_version": transformers.__version__,
        **source,
    }


def _plain_model(adapter: Adapter) -> ModelState:
    """Return the model before any eviction. Raises UnreadableCacheError where the eviction's file replaced its code."""
    if found := foreign_code(adapter.model):
        raise UnreadableCacheError(
            f"no plain model is left to compare with: {found}; replace it inside the eviction, not on import"
        )
    return ModelState.of(adapter.model)


def _audit_prompt(
    adapter: Adapter, prompt: Prompt, eviction: Eviction | KeptFile, settings: Settings, before: ModelState
) -> Iterator[AuditRun]:
    """Yield the audited runs of a prompt in all situations; for a file of positions, in the first situation only."""
    ids = torch.tensor(prompt.token_ids, device=adapter.device)
    if isinstance(eviction, KeptFile):
        yield audit_file(adapter, ids, eviction, prompt.sample_id)
        return
    tokens, full = reference.greedy(adapter, ids, situations.token_count(settings.steps, settings.situations))
    alone = None
    for name in settings.situations:
        situation = situations.situation(name, ids, tokens, settings.steps)
        if situation.rows == 1:
            alone = prompts = alone or reference.prompt_entries(adapter, situation, full)
        else:
            prompts = reference.prompt_entries(adapter, situation)
        run = run_eviction(adapter, eviction, situation, prompts, before, bool(settings.allow), settings.positions)
        yield from run.results(prompt.sample_id)
        if run.damage:
            break


def _measure_plain_use(
    adapter: Adapter, prompt: Prompt, eviction: Eviction | KeptFile, run: AuditRun, before: ModelState
) -> tuple[PlainUse | None, str]:
    """Return how plain model calls use the evicted cache, and how that changed the model, in words.

    None for a failing eviction or one with its own decoding. `run` is the prompt's first run, which shows at which
    position the next token belongs.
    """
    if isinstance(eviction, KeptFile) or eviction.decode is not None:
        return None, ""
    ids = torch.tensor(prompt.token_ids, device=adapter.device)
    try:
        single = situations.situation("single", ids, ids[-1:], 1)
        if run.positions == IN_CACHE and run.entries is not None:
            single = dataclasses.replace(single, cached=(max(len(kept) for kept in run.entries.kept[0]),))
        found = plain_use(adapter, eviction, single)
    except (FailedError, RefusedError):  # the runs record what reading raises
        found = None
    finally:
        damage = describe_damage(before.restore())
    return found, damage


def _with_losses(trace: AuditTrace, adapter: Adapter, prompts: Sequence[Prompt], resources: Resources) -> AuditTrace:
    """Return the trace with the losses of the kept sets in the situation `single`, or with the reason for none."""
    kept = [_kept_sets(trace, prompt.sample_id) for prompt in prompts]
    known = [sets for sets in kept if sets is not None]
    if len(known) < len(kept):
        return dataclasses.replace(trace, lossless="no kept sets per key/value head were found")
    if not all(len(positions) for sets in known for layer in sets for positions in layer):
        return dataclasses.replace(trace, lossless="some kept set is empty")
    try:
        measured = loss.measure(adapter, prompts, known, resources)
    except PerturbkvError as error:
        return dataclasses.replace(trace, lossless=str(error))
    return dataclasses.replace(
        trace, losses=measured.losses, protected=measured.protected, configs=measured.configs, freed=measured.freed
    )


def _kept_sets(trace: AuditTrace, sample: str) -> loss.Sets | None:
    """Return a prompt's kept sets per key/value head; None if unknown or different within a group of query heads."""
    for run in trace.runs:
        if run.sample == sample and run.row == 0 and run.entries is not None:
            if run.entries.heads == trace.kv_heads:
                return run.entries.kept
            if len(run.entries.repeated) == trace.layers:
                return tuple(layer[:: trace.query_heads // trace.kv_heads] for layer in run.entries.kept)
    return None
