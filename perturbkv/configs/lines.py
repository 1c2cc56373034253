"""Policies whose prompt is read in a prefill of its own, in which every query looks along some lines alone.

Nothing is evicted: what such a prefill leaves is whole, and each decoding query looks at all of it. A budget b is the
most entries that one query of the prompt looks at: the local band, which is the window, the first entries, and as many
lines as are left (METHOD: Lines that a prefill looks along).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from perturbkv.configs import layer_types, pages
from perturbkv.configs.choice import Choice
from perturbkv.errors import ConfigError

LINED = ("vertical-slash",)
"""Their names."""
EVICT_NOTHING = (*pages.READERS, *LINED)
"""Policies whose cache holds the whole prompt."""
ASKED = 32
"""Queries of the prompt at which isolated quantities are measured, at most."""


def lined(policy: Choice) -> bool:
    """Whether a policy is one of these."""
    return policy.name in LINED


def check(policies: Sequence[Choice], steps: int, generate: int, model_config: Any, model: str) -> None:
    """Raise ConfigError where a run asks such a policy for what it does not have; `generate` tokens of answers."""
    own = next((policy.name for policy in policies if lined(policy)), None)
    if own is None:
        return
    for met, what, instead in (
        (steps > 1, f"{steps} decode steps", "the prompt's queries have no steps: use --steps 1"),
        (generate > 0, f"answers of {generate} tokens", "it is measured and does not answer: generate nothing"),
        (layer_types.is_mixed(model_config), f"model '{model}', some of whose layers slide", "choose another model"),
    ):
        if met:
            msg = f"policy '{own}' reads the prompt in a prefill of its own and expects no {what}; {instead}"
            raise ConfigError(msg)
