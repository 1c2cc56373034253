"""Audits of external evictions: broken, or only lossy."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from perturbkv.api.inputs import check_model, collect_prompts
from perturbkv.auditing import audit_dump as measure_dump
from perturbkv.auditing import audit_eviction, load_eviction, open_dump
from perturbkv.configs.audit_settings import AUTO, SITUATIONS, AuditSettings
from perturbkv.configs.entry_counts import Budget, as_budget
from perturbkv.configs.eviction import EvictionConfig
from perturbkv.configs.resources import Resources
from perturbkv.datasets.encode import Prompt
from perturbkv.models import user_model
from perturbkv.models.adapter import Adapter
from perturbkv.pipeline.progress import bar

if TYPE_CHECKING:
    from perturbkv.analyses.audit.audit import Audit
    from perturbkv.analyses.audit.dump_verdict import DumpAudit

_DEFAULT = Resources()


def audit(
    model: Adapter,
    prompts: Iterable[Prompt],
    eviction: Any,
    *,
    budget: Budget | float | str | None = None,
    steps: int = 4,
    situations: Sequence[str] = tuple(SITUATIONS),
    losses: bool = True,
    plain_use: bool = True,
    allow: Sequence[str] = (),
    positions: str = AUTO,
    expect: str | Path | EvictionConfig = "",
    resources: Resources = _DEFAULT,
    progress: bool = True,
) -> Audit:
    """Test whether an external eviction is broken, or only loses what it evicts.

    The reference is the plain model with its full cache and a mask of exactly the entries that the eviction keeps.
    `.verdict` is `exact` (only evicted entries are lost), `lossy` (entries are rounded, too), `unknown` (some match
    none), `differs` (with `.faults`), `did nothing`, `unreadable` or `not compared`.

    Args:
        model: from `load_model`.
        prompts: from `load_prompts`, or any series of `Prompt`.
        eviction: a function `(model, input_ids, attention_mask) -> cache`, a transformers `Cache` class, or text:
            `file.py:name(option=value)` of either, or a `.npz` or `.json` file of kept positions. It may bring a
            `decode(model, cache, token, step) -> logits`. Or a press of kvpress, `kvpress:SnapKVPress(window_size=32)`.
        budget: of a press, and of nothing else: entries per head (128), or a share of the prompt (0.3), as in `grid`.
        steps: forward passes after the eviction.
        situations: situations in which it is run: `single`, `block`, `batch`.
        losses: whether its loss is measured, with controls that keep as many entries.
        plain_use: whether it counts where plain calls of the model put new tokens: where that is at wrong positions,
            and it brings no `decode`, the verdict is `differs`.
        allow: what makes no exit code 1: `lossy`, `unknown`, `idle`, `plain-use`.
        positions: `original`, `in-cache` (keys rotated to 0, 1, …, new tokens after them), or `auto`: whichever fits.
        expect: kept sets that it should have: a file of kept positions, a policy with its budget, `snapkv(b=128)`, or
            a configuration. Another kept set is then a fault.
        resources: as in `measure`.
        progress: whether a bar is shown.

    Raises ConfigError for invalid options, an eviction that cannot be called, a press without a budget or a budget
    without a press, and prompts of too few tokens; UnknownNameError for a situation, convention of positions, kind of
    change or name in a file that is unknown; PluginError for code that cannot be loaded; UnreadableCacheError for a
    file that does not hold kept positions; DatasetError for prompts that do not fit the model; ModelError for what
    `load_model` did not return, or attention that cannot be measured.

    >>> import perturbkv as pk
    >>> from transformers import DynamicCache
    >>> def recent(model, input_ids, attention_mask):
    ...     cache = DynamicCache()
    ...     model(input_ids=input_ids, past_key_values=cache)
    ...     for layer in cache.layers:
    ...         layer.keys, layer.values = layer.keys[:, :, -8:], layer.values[:, :, -8:]
    ...     return cache
    >>> model = pk.load_model("random:smollm2-135m")
    >>> prompt = pk.Prompt.from_text("Paris is in France. " * 3, model)
    >>> quick = {"situations": ["single"], "losses": False, "progress": False}
    >>> pk.audit(model, prompt, recent, **quick).conclusion().partition(" (")[0]
    'differs: without position_ids transformers puts the next token at 8, not 60'
    >>> pk.audit(model, prompt, recent, allow=["plain-use"], **quick).verdict
    'exact'
    """
    meant = str(expect) if isinstance(expect, Path) else expect
    settings = AuditSettings(steps, tuple(situations), losses, tuple(allow), positions, plain_use, meant)
    external = load_eviction(eviction, None if budget is None else as_budget(budget))
    collected = collect_prompts(prompts)
    check_model(model)
    source = {"dataset": collected.dataset, "seed": str(collected.seed)}
    with bar("prompts", len(collected), shown=progress) as progress_bar, user_model.eval_mode(model.model):
        return audit_eviction(model, collected, external, settings, source, resources, progress_bar.advance)


def audit_dump(
    model: Adapter,
    dump: str | Path,
    *,
    losses: bool = True,
    resources: Resources = _DEFAULT,
    progress: bool = True,
) -> DumpAudit:
    """Compare a dump of an engine's cache with the plain model's cache of the same tokens (METHOD: Engines' caches).

    `.verdict` is `exact`, `differs` (with `.faults`: what is there instead, where) or `unreadable`, where nothing could
    be compared.

    Args:
        model: from `load_model`, in the type that the engine computes with.
        dump: a folder that `write_dump` made, or that follows the format's page; or a slot file of llama.cpp.
        losses: whether the loss is measured where entries are gone, beside controls that hold as many.
        resources: as in `measure`.
        progress: whether a bar is shown.

    Raises ConfigError for a path that is no dump; UnreadableCacheError for a dump that breaks its format, of another
    model's shape or of ended requests alone; DatasetError for tokens that the model lacks, or too many; ModelError for
    what `load_model` did not return, or attention that cannot be measured.

    >>> import tempfile, torch
    >>> import perturbkv as pk
    >>> from transformers import DynamicCache
    >>> model = pk.load_model("random:smollm2-135m")
    >>> prompt = pk.Prompt.from_text("Paris is in France. " * 3, model)
    >>> cache = DynamicCache()
    >>> _ = model.model(torch.tensor([prompt.token_ids]), past_key_values=cache)
    >>> rows = ({"keys.a": layer.keys[0], "values.a": layer.values[0]} for layer in cache.layers)
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     path = pk.write_dump(
    ...         folder, [{"id": "a", "token_ids": list(prompt.token_ids)}], rows, kv_heads=3, head_size=64
    ...     )
    ...     pk.audit_dump(model, path, progress=False).verdict
    'exact'
    """
    check_model(model)
    opened = open_dump(Path(dump), model.config)
    with bar("layers", opened.layers, shown=progress) as progress_bar, user_model.eval_mode(model.model):
        return measure_dump(model, opened, losses=losses, resources=resources, progress=progress_bar.advance)
