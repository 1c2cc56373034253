"""Which configuration a name means where several match it: the one without options that the name leaves unsaid."""

from __future__ import annotations

from collections.abc import Sequence

from perturbkv.analyses.pairing import matches
from perturbkv.configs.choice import FIRST, Choice, halves, parse
from perturbkv.configs.eviction import EvictionConfig
from perturbkv.errors import ConfigError

_BY = "by"


def meant(found: Sequence[EvictionConfig], side: str) -> EvictionConfig | None:
    """Of configurations that match a side the only one, or the only plain one; None where there is none.

    Plain is what evicts alone, uncorrected and in full precision, with no option that is not at its default but those
    that the side says: `two-stage` beside `two-stage(norm=l2)` is the first, `two-stage(norm=l2)` the second.
    """
    plain = found if len(found) == 1 else [one for one in found if _plain(one, side)]
    return plain[0] if len(plain) == 1 else None


def one_meant(found: Sequence[EvictionConfig], side: str) -> EvictionConfig:
    """The same. Raises ConfigError where a side means none of them, with the names that mean one, if there are any."""
    if (one := meant(found, side)) is not None:
        return one
    held = dict.fromkeys(f"{config.policy}:{config.selection}" for config in found)
    names = [name for name in held if meant([config for config in found if matches(config, name)], name) is not None]
    if names:
        msg = f"'{side}' means one of {len(found)} configurations; say which: {_listed(names)}"
    else:
        labels = ", ".join(config.label() for config in found[:3])
        msg = f"'{side}' means {len(found)} configurations that no name tells apart, such as {labels}; trace one alone"
    raise ConfigError(msg)


def _listed(names: Sequence[str]) -> str:
    """As a shell takes them: 'a', 'b' or 'c'."""
    *others, last = [f"'{name}'" for name in names]
    return f"{', '.join(others)} or {last}" if others else last


def _plain(config: EvictionConfig, side: str) -> bool:
    told = [parse(part) for part in halves(side)]
    choices = (config.policy, config.selection, config.granularity)
    return config.evicts_alone and not any(_unsaid(choice, told) for choice in choices)


def _unsaid(held: Choice, told: Sequence[Choice]) -> bool:
    """Whether a choice has an option off its default that the side does not say."""
    said = {name for one in told if one.name == held.name for name in one.options}
    if FIRST in said:  # the score that a policy ranks by, or its only option
        said |= {_BY} if _BY in held.options else held.options.keys()
    return bool(held.told.keys() - said)
