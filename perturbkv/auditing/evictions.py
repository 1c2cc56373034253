"""Evictions that can be audited, and the texts that name them.

Somebody's function or Cache class, given as an object or as `file.py:name(option=…)`; a press of kvpress, at the ratio
that its budget asks for; a file of kept positions.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from perturbkv.auditing.positions_file import KeptFile, read_positions
from perturbkv.configs.audit_settings import DUMP_HEADER, KEPT_SUFFIXES
from perturbkv.configs.choice import parse
from perturbkv.configs.entry_counts import Budget
from perturbkv.errors import ConfigError
from perturbkv.selection.external_eviction import Eviction, callable_eviction, named_eviction
from perturbkv.selection.policies import kvpress
from perturbkv.selection.policies.kvpress import is_press


def load_eviction(source: Any, budget: Budget | None = None) -> Eviction | KeptFile:
    """Return the eviction, or the file of kept positions, denoted by a text or an object; only presses take `budget`.

    Raises ConfigError, PluginError or UnknownNameError in one line for anything that cannot be audited.
    """
    if isinstance(source, str) and not source.endswith(KEPT_SUFFIXES) and is_press(parse(source)):
        if budget is None:
            raise ConfigError(
                f"expected a budget for the press {source}, got none; give --budget (budget=), such as 128 or 0.3"
            )
        parsed = parse(source)
        return kvpress.press_eviction(kvpress.policy_class(parsed.name).complete(parsed), budget.tokens)
    if budget is not None:
        reason = f"it needs a press of kvpress, {source} says itself what it keeps"
        raise ConfigError(f"a budget has no effect here: {reason}; leave it out")
    if isinstance(source, Eviction | KeptFile):
        return source
    if not isinstance(source, str | Path):
        return callable_eviction(source, getattr(source, "__name__", type(source).__name__))
    text = str(source)
    if Path(text).suffix in KEPT_SUFFIXES:
        return read_positions(Path(text))
    choice = parse(text)
    path, colon, _ = choice.name.rpartition(":")
    if not colon or not path.endswith(".py"):
        what = "" if Path(text).exists() else ", which is no file or folder"
        what = f", a folder without {DUMP_HEADER}" if Path(text).is_dir() else what
        raise ConfigError(
            "expected an eviction as file.py:name(option=value, …), a .npz or .json file of kept positions, or "
            f"kvpress:Press(…), got '{text}'{what}"
        )
    return named_eviction(choice)
