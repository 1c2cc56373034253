"""Calls of eviction systems that are not ours, and what they may return: wrong values are one line."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from perturbkv.configs.plugins import external_code, is_builtin
from perturbkv.errors import PluginError

if TYPE_CHECKING:
    from torch import Tensor

    from perturbkv.configs.eviction import EvictionConfig
    from perturbkv.selection.layer_budget import LayerBudget
    from perturbkv.selection.policies.base import Policy

_FLAGS = ("mixes", "ranks_by_another")
"""Properties of a policy that are true or false."""


def check_policy(policy: Policy) -> None:
    """Raise PluginError for a policy whose properties fail or are of another type."""
    from perturbkv.scoring.score import Score

    kinds_of: dict[str, tuple[type, ...]] = {
        "score": (Score,), "first_stage": (Score, type(None)), **dict.fromkeys(_FLAGS, (bool,))
    }  # fmt: skip
    for name, kinds in kinds_of.items():
        with external_code(f"policy '{policy.name}': {name} raised"):
            value = getattr(policy, name)
        if not isinstance(value, kinds):
            expected = " or ".join("None" if kind is type(None) else kind.__name__ for kind in kinds)
            raise _refusal(policy, name, expected, value)


def count(policy: Policy, name: str, config: EvictionConfig, *numbers: int) -> int:
    """Return the number that a policy's method `name`, such as `first_entries`, gives for `config` and `numbers`.

    Raises PluginError where an external policy fails, or gives something other than a whole number from 0 on.
    """
    if _is_ours(policy):
        return int(getattr(policy, name)(config, *numbers))
    with external_code(f"policy '{policy.name}': {name} raised"):
        value = getattr(policy, name)(config, *numbers)
    if not isinstance(value, int) or isinstance(value, bool) or value < 0:
        raise _refusal(policy, name, "a whole number from 0 on", value)
    return value


def allocate(policy: Policy, config: EvictionConfig, available: LayerBudget) -> Tensor:
    """Return the number of entries (kept_head,) that a policy allocates to each kept set of a layer.

    Raises PluginError where an external policy fails, or gives something other than numbers of entries that exist.
    """
    if _is_ours(policy):
        return policy.allocate(config, available)
    with external_code(f"policy '{policy.name}': allocate raised"):
        counts = policy.allocate(config, available)
    return _check_counts(policy, "allocate", counts, available.kept_heads, max(available.prefix, available.free))


def stage1_counts(policy: Policy, config: EvictionConfig, scores: Tensor, competing: slice) -> Tensor:
    """Return the number of entries (kept_head,) of a policy's own stage 1. Raises PluginError as `allocate`."""
    if _is_ours(policy):
        return policy.stage1_counts(config, scores, competing)
    with external_code(f"policy '{policy.name}': stage1_counts raised"):
        counts = policy.stage1_counts(config, scores.clone(), competing)
    return _check_counts(policy, "stage1_counts", counts, len(scores), scores.shape[-1])


def _is_ours(policy: Policy) -> bool:
    """Return whether a policy's methods are of this package: built in, or the policy of a score."""
    return is_builtin(type(policy)) or hasattr(type(policy), "scored")


def _check_counts(policy: Policy, name: str, counts: Any, sets: int, most: int) -> Tensor:
    """Return counts per kept set. Raises PluginError for anything but `sets` whole numbers from 0 to `most`."""
    import torch

    expected = f"a tensor of {sets} whole numbers from 0 to {most}, one per kept set"
    if not isinstance(counts, torch.Tensor):
        raise _refusal(policy, name, expected, counts)
    whole = not (counts.is_floating_point() or counts.is_complex() or counts.dtype == torch.bool)
    if not whole or tuple(counts.shape) != (sets,) or bool(((counts < 0) | (counts > most)).any()):
        raise _refusal(policy, name, expected, counts.tolist() if counts.numel() <= 16 else tuple(counts.shape))
    return counts


def _refusal(policy: Policy, name: str, expected: str, value: Any) -> PluginError:
    """Return the error for a policy's value of another kind."""
    got = (
        f"a method; write @property above {name}"
        if callable(value) and name in ("score", "first_stage", *_FLAGS)
        else _short_repr(value)
    )
    return PluginError(f"policy '{policy.name}': expected {name} to give {expected}, got {got}")


def _short_repr(value: Any) -> str:
    """Return a value as short text; its type where the value cannot be shown."""
    try:
        return repr(value)[:80]
    except Exception:
        return type(value).__name__
