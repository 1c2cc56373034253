"""The comparison of what two versions recorded."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

RENAMED: dict[str, str] = {}
"""What was renamed on purpose: old name -> new name, of a part of a pin's name, such as a JSON key or a command."""
GONE: dict[str, set[str]] = {"names": {"twin"}}
"""What went on purpose: recorder -> words of its pins that only the earlier commit has."""
NEW: dict[str, set[str]] = {"names": {"shapes"}}
"""What came on purpose, likewise."""
_SHOWN, _LONGEST = 20, 60
_MISSING = "nothing"


def renamed(recorded: Mapping[str, Any], mapping: Mapping[str, str] = RENAMED) -> dict[str, Any]:
    """Give what an earlier version recorded its present names, also where a value is such a name."""
    return {
        "/".join(mapping.get(part, part) for part in name.split("/")): _renamed(name, value, mapping)
        for name, value in recorded.items()
    }


def _renamed(name: str, value: Any, mapping: Mapping[str, str]) -> Any:
    """Give a value its present name; of a list of keys each, in an order that does not depend on the version."""
    if not isinstance(value, str):
        return value
    if name.endswith("/keys"):
        return " ".join(sorted(mapping.get(key, key) for key in value.split()))
    return mapping.get(value, value)


def without(recorded: Mapping[str, Any], words: set[str]) -> dict[str, Any]:
    """Leave out pins that hold one of the words in their name, and entries of lists that do."""
    return {
        name: [one for one in value if not words & _words(one)] if isinstance(value, list) else value
        for name, value in recorded.items()
        if not words & _words(name)
    }


def compared(recorder: str, before: Mapping[str, Any], after: Mapping[str, Any]) -> list[str]:
    """Name what differs of a recorder's pins beyond what was changed on purpose."""
    after = renamed(after, {})
    return differences(without(renamed(before), GONE.get(recorder, set())), without(after, NEW.get(recorder, set())))


def differences(before: Mapping[str, Any], after: Mapping[str, Any]) -> list[str]:
    """Name every pin that is not the same on both sides, or is on one side alone."""
    return [
        f"{name}: before {_told(before, name)} … after {_told(after, name)}"
        for name in sorted({**before, **after}, key=lambda name: (not name.endswith("code"), name))
        if _told(before, name, None) != _told(after, name, None)
    ]


def line(recorder: str, before: Mapping[str, Any], after: Mapping[str, Any]) -> str:
    """Say in one line whether all pins of a recorder are equal, and name the first that are not."""
    found = compared(recorder, before, after)
    if not found:
        return f"{recorder}: {len(after)} values equal"
    total = len({**renamed(before), **after})
    more = f"\n  and {len(found) - _SHOWN} more" if len(found) > _SHOWN else ""
    return f"{recorder}: {len(found)} of {total} differ:" + "".join(f"\n  {one}" for one in found[:_SHOWN]) + more


def _words(value: object) -> set[str]:
    return set(re.findall(r"\w+", value)) if isinstance(value, str) else set()


def _told(recorded: Mapping[str, Any], name: str, longest: int | None = _LONGEST) -> str:
    """The value as JSON, which tells 1 from 1.0 and NaN from null; abbreviated unless `longest` is None."""
    if name not in recorded:
        return _MISSING
    said = json.dumps(recorded[name], ensure_ascii=False, sort_keys=True)
    return said if longest is None or len(said) <= longest else f"{said[:longest]}…"
