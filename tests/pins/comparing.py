"""The comparison of what two versions recorded."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

COMMANDS = {
    "methods": "ablation-methods",
    "restriction": "ablation-restrictions",
    "cliff": "budget-cliff",
    "savings": "budget-savings",
    "bytes": "budget-bytes",
    "link": "correlation",
    "divergence": "quality-divergence",
    "judge": "quality-judge",
    "swap": "patching",
}
"""What commands were called before -> in documents and in the names of their files."""
RENAMED: dict[str, dict[str, str]] = {
    "cliff": {"contests": "ratios", "told": "known"},
    "link": {"stands": "significant"},
    "correlation": {"stands": "significant"},
    "stability": {"suffering": "perturbation", "place": "number"},
    "horizon": {"leads": "advantages"},
    "budget/asked": {"selection": "compare"},
}
"""What was renamed on purpose: command, or command/next part -> old name -> new name, of a key or a column."""
GONE: dict[str, set[str]] = {"names": {"twin"}}
"""What went on purpose: recorder -> words of its pins that only the earlier commit has."""
NEW: dict[str, set[str]] = {"names": {"shapes"}}
"""What came on purpose, likewise."""
WORDS = re.compile(
    r"/figure/.*/(title|labels|legends?|tick labels|texts|place|\S+ \d+ called)$"
    r"|/error/message$"
    r"|^report/(bytes|words|document page/traces/\d+/(conclusions|sides|warnings|ablation/\d+/title))"
    r"|^(budget(-\w+)?/selections|layers/budgets/curves)/\d+/name$"
    r"|^quality/files/quality\.(md|tex)$"
    r"|^report(-of-two)?/(scripts|bytes|document page/traces/\d+/conclusions)"
    r"|^link/(settings/\d+/name|too_few/\d+)$"
    r"|^alpha(-of-a-trace)?/.*/about/(made_by|note)$"
)
"""Pins of words, which were rewritten on purpose: what configurations are called, sentences, and the room they take."""
_SHOWN, _LONGEST = 20, 60
_MISSING = "nothing"


def renamed(recorded: Mapping[str, Any], mapping: Mapping[str, Mapping[str, str]] = RENAMED) -> dict[str, Any]:
    """Give what an earlier version recorded its present names, also where a value is such a name."""
    return dict(_renamed(name, value, mapping) for name, value in recorded.items())


def _renamed(name: str, value: Any, mapping: Mapping[str, Mapping[str, str]]) -> tuple[str, Any]:
    """Give a pin and its value their present names; of a list of keys each, in an order that no version decides."""
    parts = name.split("/")
    command = parts[0].partition("-")[0]
    keys = {**mapping.get(command, {}), **mapping.get("/".join([command, *parts[1:2]]), {})}
    if "figure" in parts:
        keys = {}
    name = "/".join(keys.get(part, _file(part)) for part in parts)
    if not isinstance(value, str):
        return name, value
    if name.endswith("/keys"):
        return name, " ".join(sorted(keys.get(key, key) for key in value.split()))
    if name.endswith("/analysis"):
        return name, COMMANDS.get(value, value)
    return name, "/".join(_file(keys.get(part, part)) for part in value.split("/"))


def _file(name: str) -> str:
    """Return the present name of a command's file."""
    stem, dot, end = name.partition(".")
    return f"{COMMANDS.get(stem, stem)}{dot}{end}" if dot else name


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
        if not WORDS.search(name) and _told(before, name, None) != _told(after, name, None)
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
