"""What searches for best kept sets found, of a whole run."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from perturbkv.configs.run import RunConfig

PROMPT, PREFIX = "prompt", "prefix"
"""What a search is of: a whole prompt, or a few tokens of it."""


@dataclass(frozen=True)
class FoundSets:
    """The lines of a run, an object per prompt.

    Attributes:
        run: what was run; every budget holds the same methods in the same order, the hindsight ones among them.
        rows: per prompt its name under `sample`, and under `heads` an object per head, budget and part: `part`,
            `budget`, `layer`, `head`, and the fields of `HeadSearch`, whose `perturbation` is in the methods' order.
        asked: how heads were searched.
        made_with: provenance.
    """

    run: RunConfig
    rows: Sequence[Mapping[str, Any]]
    asked: Mapping[str, Any] = field(default_factory=dict)
    made_with: Mapping[str, Any] = field(default_factory=dict)

    @property
    def digest(self) -> str:
        """Of the rows, short."""
        return hashlib.sha256(json.dumps(list(self.rows)).encode()).hexdigest()[:12]
