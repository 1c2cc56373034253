"""A whole audit: every prompt in every situation, plain use, and the loss of the kept sets."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
import transformers

import perturbkv
from perturbkv import memory
from perturbkv.audit_trace import SITUATIONS, AuditRun, AuditTrace, PlainUse
from perturbkv.auditing import loss, reference, situations
from perturbkv.auditing.evictions import Eviction
from perturbkv.auditing.external_run import plain_use, run
from perturbkv.auditing.positions_file import KeptFile, prompt_of
from perturbkv.auditing.positions_file import audited as of_file
from perturbkv.configs.resources import Resources
from perturbkv.datasets.encode import Prompt, check_length, check_vocabulary
from perturbkv.errors import ConfigError, PerturbkvError, UnknownNameError, UnreadableCacheError
from perturbkv.models.adapter import Adapter, check_long_rotations, check_sliding_window

POSITIONS = "positions file"
_DEFAULT = Resources()


@dataclass(frozen=True)
class Settings:
    """The options of an audit.

    Attributes:
        steps: number of forward passes after the eviction.
        situations: keys of `SITUATIONS`.
        losses: whether the loss is measured, and that of controls.

    Raises ConfigError or UnknownNameError for invalid values.
    """

    steps: int = 4
    situations: tuple[str, ...] = tuple(SITUATIONS)
    losses: bool = True

    def __post_init__(self) -> None:
        if self.steps < 1:
            msg = f"expected at least 1 step, got {self.steps}"
            raise ConfigError(msg)
        if not self.situations:
            msg = f"expected at least one situation of {', '.join(SITUATIONS)}, got none"
            raise ConfigError(msg)
        for name in self.situations:
            if name not in SITUATIONS:
                raise UnknownNameError(name, "situation", SITUATIONS)


@torch.inference_mode()
@memory.translate_allocation_errors()
def audit(
    adapter: Adapter,
    prompts: Sequence[Prompt],
    eviction: Eviction | KeptFile,
    settings: Settings,
    about: Mapping[str, str],
    resources: Resources = _DEFAULT,
    progress: Callable[[], object] = lambda: None,
) -> AuditTrace:
    """Measure an eviction; one that cannot be read gives a trace that says why.

    Raises ConfigError and DatasetError for prompts that do not fit, ModelError for an attention that takes no masks.
    """
    reference.check(adapter)
    used = (prompt_of(eviction, prompts),) if isinstance(eviction, KeptFile) else tuple(prompts)
    for prompt in prompts:  # a file's own tokens are its own affair
        check_vocabulary(prompt, int(adapter.config.vocab_size), adapter.name)
    for prompt in used:
        _check_length(adapter, prompt, situations.token_count(settings.steps, settings.situations))
    kind = POSITIONS if isinstance(eviction, KeptFile) else eviction.kind
    blank = AuditTrace(
        eviction.name, kind, _about(adapter, about, len(used)), len(adapter.layers), adapter.heads, adapter.kv_heads
    )
    try:
        runs = []
        for prompt in used:
            runs += _prompt(adapter, prompt, eviction, settings)
            progress()
        found = dataclasses.replace(blank, runs=tuple(runs), plain=_plain(adapter, used[0], eviction))
    except UnreadableCacheError as error:
        return dataclasses.replace(blank, unreadable=error.reason)
    return _with_losses(found, adapter, used, resources) if settings.losses else found


def _check_length(adapter: Adapter, prompt: Prompt, steps: int) -> None:
    check_length(prompt, adapter.positions, steps)
    tokens = len(prompt.token_ids)
    check_sliding_window(adapter.config, tokens + steps, prompt.sample_id, adapter.name, steps)
    check_long_rotations(adapter.config, tokens, tokens + steps, prompt.sample_id, adapter.name, steps)
    if len(prompt.token_ids) <= situations.BLOCK:
        msg = f"expected prompts of more than {situations.BLOCK} tokens, sample '{prompt.sample_id}' is shorter"
        raise ConfigError(msg)


def _about(adapter: Adapter, about: Mapping[str, str], samples: int) -> dict[str, str]:
    return {
        "model": adapter.name,
        "random_weights": str(adapter.random_weights).lower(),
        "dtype": str(adapter.dtype).removeprefix("torch."),
        "device": str(adapter.device),
        "samples": str(samples),
        "perturbkv_version": perturbkv.__version__,
        "torch_version": str(torch.__version__),
        "transformers_version": transformers.__version__,
        **about,
    }


def _prompt(adapter: Adapter, prompt: Prompt, eviction: Eviction | KeptFile, settings: Settings) -> list[AuditRun]:
    """Measure all situations of one prompt; a file of positions has only the first."""
    ids = torch.tensor(prompt.token_ids, device=adapter.device)
    if isinstance(eviction, KeptFile):
        return [of_file(adapter, ids, eviction, prompt.sample_id)]
    tokens = reference.greedy(adapter, ids, situations.token_count(settings.steps, settings.situations))
    full = reference.read(adapter, situations.situation("single", ids, tokens, 1))
    floors, found = reference.entry_floors(adapter, ids, full), []
    for name in settings.situations:
        made = situations.situation(name, ids, tokens, settings.steps)
        found += run(adapter, eviction, made, floors, full if made.rows == 1 else None).audited(prompt.sample_id)
    return found


def _plain(adapter: Adapter, prompt: Prompt, eviction: Eviction | KeptFile) -> PlainUse | None:
    """Return the plain use of the cache; None where it has its own decoding or the prompt cannot be read."""
    if isinstance(eviction, KeptFile) or eviction.decode is not None:
        return None
    ids = torch.tensor(prompt.token_ids, device=adapter.device)
    try:
        return plain_use(adapter, eviction, situations.situation("single", ids, ids[-1:], 1))
    except UnreadableCacheError:
        raise
    except Exception:  # what reading raises, the runs say
        return None


def _with_losses(found: AuditTrace, adapter: Adapter, prompts: Sequence[Prompt], resources: Resources) -> AuditTrace:
    """Add the loss of each prompt's kept sets in the situation `single`."""
    kept = [_kept(found, prompt.sample_id) for prompt in prompts]
    whole = [one for one in kept if one is not None]
    if len(whole) < len(kept):
        return dataclasses.replace(found, lossless="no kept sets per key/value head were found")
    if not all(len(own) for sets in whole for layer in sets for own in layer):
        return dataclasses.replace(found, lossless="some kept set is empty")
    try:
        measured = loss.measure(adapter, prompts, whole, resources)
    except PerturbkvError as error:
        return dataclasses.replace(found, lossless=str(error))
    return dataclasses.replace(
        found, losses=measured.losses, protected=measured.protected, configs=measured.configs, freed=measured.freed
    )


def _kept(found: AuditTrace, sample: str) -> loss.Sets | None:
    """Return a prompt's kept sets per key/value head; None where they are unknown, or differ within a group."""
    for one in found.runs:
        if one.sample == sample and one.row == 0 and one.entries is not None:
            if one.entries.heads == found.kv_heads:
                return one.entries.kept
            if len(one.entries.repeated) == found.layers:
                return tuple(layer[:: found.query_heads // found.kv_heads] for layer in one.entries.kept)
    return None
