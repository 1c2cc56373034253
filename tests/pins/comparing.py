"""The comparison of what two versions recorded, and what goes on purpose."""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Mapping
from typing import Any

GOES: dict[str, str] = {
    "question alpha": "studies/alpha.py",
    "question measures": "studies/measures.py",
    "question regret": "studies/regret.py",
    "question split": "studies/split.py",
    "question stability": "studies/stability.py",
    "budget --savings": "studies/savings.py",
    "budget --by": "studies/savings.py",
    "budget --bytes": "studies/equal_bytes.py",
    "budget --bits": "studies/equal_bytes.py",
    "budget --answers": "studies/equal_bytes.py",
    "budget --max-new-tokens": "studies/equal_bytes.py",
    "quality --judge": "studies/judge.py",
    "generate --judge": "studies/judge.py",
    "quality --pairwise": "studies/judge.py",
    "quality --scale": "studies/judge.py",
    "quality --time-limit": "studies/judge.py",
    "doctor bench": "benchmarks/",
    "heads-cosine-attention-two-stage.svg": "heads-cosine.svg, of a trace's own sides",
    "card": "gone",
    "@crc32": "gone",
    "export --card": "gone",
    "export --license": "gone",
    "pk.Policy.first_counts": "pk.Policy.stage1_counts",
    "pk.CompactCache.evicted": "pk.CompactCache.evicted_layers",
    "pk.tokens(budget)": "trace.sel(budget=…)",
    "pk.alpha": "studies/alpha.py",
    "pk.measures": "studies/measures.py",
    "pk.regret": "studies/regret.py",
    "pk.split": "studies/split.py",
    "pk.stability": "studies/stability.py",
    "pk.savings": "studies/savings.py",
    "pk.equal_bytes": "studies/equal_bytes.py",
    "pk.judge": "studies/judge.py",
}
"""What goes on purpose -> what replaces it: a command, an option of one, a public name, or a key of JSON documents.

Pins begin with it, or parts of them between slashes, or entries of lists. Texts that name such a command are not
compared.
"""
RENAMED = {"question patching": "patching"}
"""Old name -> new one, wherever a version says it; a command is asked by the name that the version knows."""
NEW: tuple[str, ...] = (
    "relative", "relative_interval", "ablation-methods-budgets.svg", "heads-cosine.svg", "evicted_attention_baseline",
    "evicted_attention_treatment", "pk.search_kept_sets", "pk.stats", "pk.EvictionConfig.cache_contents",
    "pk.EvictionConfig.in_16_bits", "pk.EvictionConfig.is_staged", "pk.Policy.check_model", "pk.Policy.provenance",
    "pk.Policy.ranks", "pk.Policy.stage1_counts", "pk.CompactCache.evicted_layers", "unmeasured_bytes",
    "pk.CompactCache.prompt_states", "pk.CompactCache.mark", "pk.CompactCache.rows", "token_kind",
    "first_token",
    "pk.perplexity", "pk.Prompt.forced_tokens", "pk.Prompt.step_count", "pk.Prompt.answer_tokens",
    "pk.Prompt.text_tokens", "next_token_id", "text_tokens", "text_logp", "first_logp", "max_perplexity",
    "text",
)  # fmt: skip
"""What comes on purpose: beginnings of pins, and of entries of lists, that the earlier version does not have."""
WORDS: tuple[str, ...] = (
    r"/figure/[^/]+/(texts|size|axes \d+/(place|ticks|tick labels))$",  # the foot names whole caches, which takes room
    r"^ablation --methods all/figures/(length|\d+)$",
    r"^pk\.\w+\((baseline|treatments?|compare)\)/default$|^pk\.Prompt\.from_text\(id\)/default$",  # a trace's own
    r"^(grown|interrupted|killed|merge|terminated|workers)/equal$",  # counts of what files hold, sums among them
    r"(gemma3_text|gpt_oss)\b.*/(held_share|held_bytes|full_bytes|held|stored)$",  # windows are in every cache
    r"^report( of two)?/(bytes|scripts|words|document page/traces/\d+/warnings/\d+)$",
)
"""Patterns of pins that hold words which are rewritten on purpose; they are not compared."""
_SHOWN, _LONGEST = 20, 60
_MISSING = "nothing"


def compared(before: Mapping[str, Any], after: Mapping[str, Any]) -> list[str]:
    """Name what differs beyond what was changed on purpose."""
    before, after = renamed(before), renamed(after)
    return differences(_without(before, after, GOES), _without(after, before, NEW))


def renamed(recorded: Mapping[str, Any]) -> dict[str, Any]:
    """Put the new names in place of the old ones, in names of pins, in texts and in lists; keys have no order."""
    return {
        _renamed(pin): sorted(_renamed(value)) if pin.endswith("/keys") else _renamed(value)
        for pin, value in recorded.items()
    }


def _renamed(value: Any) -> Any:
    if isinstance(value, list):
        return [_renamed(one) for one in value]
    if isinstance(value, str):
        for old, new in RENAMED.items():
            value = re.sub(rf"(?<![\w-]){re.escape(old)}(?![\w-])", new, value)
    return value


def is_of(names: Collection[str], pin: str) -> str:
    """Return which of the names a part of the pin begins with, as a whole word; empty if none."""
    found = re.search(rf"(?:^|/)({'|'.join(map(re.escape, names))})(?![\w-])", pin) if names else None
    return found[1] if found else ""


def _without(recorded: Mapping[str, Any], other: Mapping[str, Any], names: Collection[str]) -> dict[str, Any]:
    """Leave out pins of these names that the other version does not have, entries of lists, and texts that name one."""
    return {
        pin: _entries(value, other[pin], names) if pin in other else value
        for pin, value in recorded.items()
        if pin in other or not is_of(names, pin)
    }


def _entries(value: Any, other: Any, names: Collection[str]) -> Any:
    """Leave out entries of these names that the other's list lacks; the other's text where the value names one."""
    if isinstance(value, list) and isinstance(other, list):
        return [one for one in value if one in other or not (isinstance(one, str) and is_of(names, one))]
    if isinstance(value, str) and isinstance(other, str) and any(name in value for name in names if not name.isalpha()):
        return other
    return value


def differences(before: Mapping[str, Any], after: Mapping[str, Any]) -> list[str]:
    """Name every pin that is not the same on both sides, or is on one side alone."""
    return [
        f"{name}: before {_told(before, name)} … after {_told(after, name)}"
        for name in sorted({**before, **after}, key=lambda name: (not name.endswith("code"), name))
        if _told(before, name, None) != _told(after, name, None) and not any(re.search(one, name) for one in WORDS)
    ]


def line(recorder: str, before: Mapping[str, Any], after: Mapping[str, Any]) -> str:
    """Say in one line whether all pins of a recorder are equal, and name the first that are not."""
    found = compared(before, after)
    went = sum(is_of(GOES, pin) != "" for pin in set(before) - set(after))
    told = f", {went} went on purpose" if went else ""
    if not found:
        return f"{recorder}: {len(after)} values equal{told}"
    more = f"\n  and {len(found) - _SHOWN} more" if len(found) > _SHOWN else ""
    shown = "".join(f"\n  {one}" for one in found[:_SHOWN])
    return f"{recorder}: {len(found)} of {len({**renamed(before), **renamed(after)})} differ{told}:{shown}{more}"


def _told(recorded: Mapping[str, Any], name: str, longest: int | None = _LONGEST) -> str:
    """The value as JSON, which tells 1 from 1.0 and NaN from null; abbreviated unless `longest` is None."""
    if name not in recorded:
        return _MISSING
    said = json.dumps(recorded[name], ensure_ascii=False, sort_keys=True)
    return said if longest is None or len(said) <= longest else f"{said[:longest]}…"
