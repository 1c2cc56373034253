"""An eviction that is not ours: is it broken, or only lossy."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

from perturbkv.api.inputs import check_model, held_prompts
from perturbkv.audit_trace import SITUATIONS
from perturbkv.auditing import audit as audits
from perturbkv.auditing.evictions import load as load_eviction
from perturbkv.configs.entry_counts import Budget
from perturbkv.configs.resources import Resources
from perturbkv.datasets.encode import Prompt
from perturbkv.models import user_model
from perturbkv.models.adapter import Adapter
from perturbkv.pipeline.progress import bar

if TYPE_CHECKING:
    from perturbkv.analyses.audit.audit import Audit

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
    resources: Resources = _DEFAULT,
    progress: bool = True,
) -> Audit:
    """Is an eviction that is not ours broken, or only lossy? `.verdict` is `exact`, `differs` or `unreadable`.

    It is held against the plain model with its full cache and a mask of exactly the entries that the eviction keeps.

    Args:
        model: from `load_model`.
        prompts: from `load_prompts`, or any series of `Prompt`.
        eviction: a function `(model, input_ids, attention_mask) -> cache`, a transformers `Cache` class, or text:
            `file.py:name(option=value)` of either, or a `.npz` or `.json` file of kept positions. It may bring a
            `decode(model, cache, token, step) -> logits`. Or a press of kvpress, `kvpress:SnapKVPress(window_size=32)`.
        budget: of a press: entries per head, as in `grid`.
        steps: forward passes after the eviction.
        situations: of `single`, `block` and `batch`, in which it is run.
        losses: whether the loss is measured beside controls that hold as much.
        resources: as in `measure`.
        progress: whether a bar is shown.

    Raises ConfigError, UnknownNameError, DatasetError, ModelError.

    >>> import perturbkv as pk
    >>> from transformers import DynamicCache
    >>> model = pk.load_model("random:smollm2-135m")
    >>> prompt = pk.Prompt.from_text("Paris is in France. " * 3, model)
    >>> pk.audit(model, prompt, DynamicCache, situations=["single"], losses=False, progress=False).verdict
    'exact'
    """
    from perturbkv.analyses.audit.audit import conclude

    settings = audits.Settings(steps, tuple(situations), losses)
    given_eviction = load_eviction(eviction, _as_budget(budget))
    held = held_prompts(prompts)
    check_model(model)
    about = {"dataset": held.dataset, "seed": str(held.seed)}
    with bar("prompts", len(held), shown=progress) as drawn, user_model.eval_mode(model):
        return conclude(audits.audit(model, held, given_eviction, settings, about, resources, drawn.advance))


def _as_budget(given: Any) -> Budget | None:
    if given is None or isinstance(given, Budget):
        return given
    return Budget.parse(given) if isinstance(given, str) else Budget(given)
