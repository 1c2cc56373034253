"""Commands in a network of their own: Ray announces the host's outward address, and here there is none."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Sequence
from functools import cache

_WITH_LO = 'ip link set lo up && exec "$@"'


@cache
def possible() -> bool:
    """Whether this machine lets us have a network namespace."""
    if not shutil.which("unshare") or not shutil.which("ip"):
        return False
    return subprocess.run(alone(["true"]), capture_output=True, check=False).returncode == 0


def alone(command: Sequence[str]) -> list[str]:
    """The command in a namespace with nothing but `lo`."""
    return ["unshare", "--net", "--map-root-user", "sh", "-c", _WITH_LO, "sh", *command]
