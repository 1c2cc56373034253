"""Commands as docs/how-to/cluster.md has them, and a shell that finds this environment's `perturbkv`."""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path

_PAGE = Path(__file__).resolve().parents[2] / "docs" / "how-to" / "cluster.md"


def commands(section: str) -> str:
    """The shell blocks of a section, one behind the other; at least one."""
    _, _, rest = _PAGE.read_text().partition(f"{section}\n")
    blocks: list[str] = re.findall(r"```sh\n(.*?)```", re.split(r"^## ", rest, flags=re.MULTILINE)[0], re.DOTALL)
    assert blocks, section
    return "".join(blocks)


def shell(**more: str) -> dict[str, str]:
    """The environment of such commands."""
    return {**os.environ, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}", **more}
