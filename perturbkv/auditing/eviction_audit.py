"""The audit of an eviction: every prompt in every situation, plain use of the cache, and the loss of the kept sets."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence

import torch
import transformers

import perturbkv
from perturbkv import memory
from perturbkv.analyses.audit.audit import Audit, PlainUse
from perturbkv.analyses.audit.audited_runs import AuditedRun
from perturbkv.auditing.expected_sets import compare_kept_sets, expected_sets, load_expected
from perturbkv.auditing.external_run import run_eviction
from perturbkv.auditing.forward_passes import BLOCK, make_situation, token_count
from perturbkv.auditing.loss import Sets, measure_losses
from perturbkv.auditing.positions import keys_can_move
from perturbkv.auditing.positions_file import KeptFile, audit_file, select_prompt
from perturbkv.auditing.reference import check_attention, decode_greedily, prompt_entries
from perturbkv.cache.model_state import ModelState, foreign_code
from perturbkv.configs.audit_settings import IN_CACHE, AuditSettings
from perturbkv.configs.choice import parse
from perturbkv.configs.layer_types import format_measured
from perturbkv.configs.resources import Resources
from perturbkv.datasets.encode import Prompt, check_length, check_vocabulary
from perturbkv.devices import dtype_name, full_precision
from perturbkv.errors import ConfigError, PerturbkvError, UnreadableCacheError
from perturbkv.models.adapter import Adapter, check_long_rotations, check_sliding_window
from perturbkv.schema import MEASURED_LAYERS
from perturbkv.selection.external_eviction import PRESS, Eviction
from perturbkv.selection.policies import kvpress

_DEFAULT = Resources()


@torch.inference_mode()
@memory.translate_allocation_errors()
@full_precision()
def audit_eviction(
    adapter: Adapter,
    prompts: Sequence[Prompt],
    eviction: Eviction | KeptFile,
    settings: AuditSettings,
    source: Mapping[str, str],
    resources: Resources = _DEFAULT,
    progress: Callable[[], object] = lambda: None,
) -> Audit:
    """Audit an eviction on every prompt; of an unreadable one return the reason and the runs before.

    `settings` say what is audited; `source` is the provenance of the prompts; `resources` are those of the runs that
    measure losses; `progress` is called per prompt. Raises ConfigError and DatasetError for prompts that do not fit,
    ModelError for an attention that takes no masks.
    """
    check_attention(adapter)
    if settings.positions == IN_CACHE and not keys_can_move(adapter):
        raise ConfigError(
            f"positions at places in the cache expect keys that all are rotated and evicted; those of model "
            f"'{adapter.name}' are not; use --positions original"
        )
    if isinstance(eviction, Eviction) and eviction.kind == PRESS:
        adapter.check_no_latents("an audit of a press")
        adapter.check_own_caches("an audit of a press")
        kvpress.policy_class(parse(eviction.name).name).check_model(adapter.config, adapter.name)
    used = (select_prompt(eviction, prompts),) if isinstance(eviction, KeptFile) else tuple(prompts)
    for prompt in prompts:  # tokens of a file are checked with its positions
        check_vocabulary(prompt, int(adapter.config.vocab_size), adapter.name)
    for prompt in used:
        steps, tokens = token_count(settings.steps, settings.situations), len(prompt.token_ids)
        check_length(prompt, adapter.positions, steps)
        check_sliding_window(adapter.config, tokens + steps, prompt.sample_id, adapter.name, steps)
        check_long_rotations(adapter.config, tokens, tokens + steps, prompt.sample_id, adapter.name, steps)
        if tokens <= BLOCK:
            raise ConfigError(f"expected prompts of more than {BLOCK} tokens, sample '{prompt.sample_id}' is shorter")
    kind = "positions file" if isinstance(eviction, KeptFile) else eviction.kind
    about = provenance(adapter, source, len(used))
    meant = settings.expect if isinstance(settings.expect, str) else settings.expect.label()
    blank = Audit(
        eviction.name, kind, about, len(adapter.layers), adapter.heads, adapter.kv_heads, expected=meant
    )  # fmt: skip
    runs: list[AuditedRun] = []
    plain: PlainUse | None = None
    sets = expected_sets(adapter, used, load_expected(settings.expect), resources) if meant else []
    try:
        if found := foreign_code(adapter.model):
            raise UnreadableCacheError(
                f"no plain model is left to compare with: {found}; replace it inside the eviction, not on import"
            )
        before = ModelState.capture(adapter.model)
        for index, prompt in enumerate(used):
            for run in _audit_prompt(adapter, prompt, eviction, settings, before):
                run = compare_kept_sets(run, sets[index], prompt) if sets else run  # noqa: PLW2901
                runs.append(run)  # at once, as a later situation may be unreadable
            progress()
            if runs[-1].damage:  # there is no reference any more
                return dataclasses.replace(blank, runs=tuple(runs), lossless=runs[-1].damage)
        if settings.plain_use and isinstance(eviction, Eviction) and not eviction.places_new_tokens:
            run = next((run for run in runs if run.entries and run.entries.evicted and not run.row), runs[0])
            if run.entries is not None:  # where a plain call of the model puts the token after the prompt
                in_cache = run.positions == IN_CACHE
                plain = PlainUse(run.next_position, run.entries.held_in_first_layer if in_cache else run.tokens)
    except UnreadableCacheError as error:
        return dataclasses.replace(blank, runs=tuple(runs), unreadable=error.reason)
    audit = dataclasses.replace(blank, runs=tuple(runs), plain_use=plain)
    return _add_losses(audit, adapter, used, resources) if settings.losses else audit


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
        **({MEASURED_LAYERS: layers} if (layers := format_measured(adapter.config)) else {}),
        **source,
    }


def _audit_prompt(
    adapter: Adapter, prompt: Prompt, eviction: Eviction | KeptFile, settings: AuditSettings, before: ModelState
) -> Iterator[AuditedRun]:
    """Yield the audited runs of a prompt in all situations; for a file of positions, in `single` only.

    `before` is the model before any eviction ran. The run that damages the model is the last.
    """
    ids = torch.tensor(prompt.token_ids, device=adapter.device)
    if isinstance(eviction, KeptFile):
        yield dataclasses.replace(audit_file(adapter, ids, eviction, prompt.sample_id), allowed=settings.allow)
        return
    tokens, read = decode_greedily(adapter, ids, token_count(settings.steps, settings.situations))
    alone = None  # the entries of the prompt by itself, which several situations share
    for name in settings.situations:
        situation = make_situation(name, ids, tokens, settings.steps)
        if situation.rows == 1:
            prompts = alone = alone or prompt_entries(adapter, situation, read)
        else:
            prompts = prompt_entries(adapter, situation)
        run = run_eviction(adapter, eviction, situation, prompts, before, settings)
        yield from run.results(prompt.sample_id)
        if run.damage:
            break


def _add_losses(audit: Audit, adapter: Adapter, prompts: Sequence[Prompt], resources: Resources) -> Audit:
    """Return the audit with the losses of the kept sets in the situation `single`, or with the reason for none."""
    kept = [_kept_sets(audit, prompt.sample_id) for prompt in prompts]
    known = [sets for sets in kept if sets is not None]
    if len(known) < len(kept):
        return dataclasses.replace(audit, lossless="no kept sets per key/value head were found")
    if not all(len(positions) for sets in known for layer in sets for positions in layer):
        return dataclasses.replace(audit, lossless="some kept set is empty")
    try:
        return dataclasses.replace(audit, **measure_losses(adapter, prompts, known, resources))
    except PerturbkvError as error:
        return dataclasses.replace(audit, lossless=str(error))


def _kept_sets(audit: Audit, sample: str) -> Sets | None:
    """Return a prompt's kept sets per key/value head; None if unknown or different within a group of query heads."""
    for run in audit.runs:
        if run.sample == sample and run.row == 0 and run.entries is not None:
            if len(run.entries.kept_sets[0]) == audit.kv_heads:
                return run.entries.kept_sets
            if len(run.entries.repeated) == audit.layers:
                return tuple(layer[:: audit.query_heads // audit.kv_heads] for layer in run.entries.kept_sets)
    return None
