"""How long something may take on a machine that others use too."""

from __future__ import annotations

import os


def patience(seconds: float) -> float:
    """Seconds of an idle machine, in those of this one now."""
    return seconds * max(1.0, os.getloadavg()[0] / (os.cpu_count() or 1))
