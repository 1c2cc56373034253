"""What a shell offers for the names that an option takes."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from perturbkv.configs.presets import PRESETS
from perturbkv.models.aliases import ALIASES
from perturbkv.selection.policies import registry as _policies


def _offering(names: Callable[[], Iterable[str]]) -> Callable[[str], list[str]]:
    def offer(incomplete: str) -> list[str]:
        return [name for name in names() if name.startswith(incomplete)]

    return offer


def _datasets() -> list[str]:
    from perturbkv.datasets.dataset_registry import known

    return [info.name for info in known()]


models = _offering(lambda: [*ALIASES, *(f"random:{name}" for name in ALIASES)])
datasets = _offering(_datasets)
policies = _offering(_policies.names)
presets = _offering(lambda: PRESETS)
