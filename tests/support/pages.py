"""Commands as pages have them, and shells that find this environment's `perturbkv`, or run it in this process."""

from __future__ import annotations

import json
import os
import re
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

PERTURBKV = """
import json, os, socket, sys
with socket.socket(socket.AF_UNIX) as link:
    link.connect({place!r})
    link.sendall(json.dumps([os.getcwd(), sys.argv[1:]]).encode() + b"\\n")
    code, out, err = json.loads(link.makefile().readline())
sys.stdout.write(out), sys.stderr.write(err), sys.exit(code)
"""
"""Has a command run by the process of the test, where everything is imported already."""
_PAGE = Path(__file__).resolve().parents[2] / "docs" / "cluster.md"


def commands(section: str) -> str:
    """The shell blocks of a section, one behind the other; at least one."""
    _, _, rest = _PAGE.read_text().partition(f"{section}\n")
    blocks: list[str] = re.findall(r"```sh\n(.*?)```", re.split(r"^## ", rest, flags=re.MULTILINE)[0], re.DOTALL)
    assert blocks, section
    return "".join(blocks)


def shell(**more: str) -> dict[str, str]:
    """The environment of such commands."""
    return {**os.environ, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}", **more}


def program(folder: Path, name: str, source: str) -> None:
    path = folder / name
    path.write_text(f"#!{sys.executable} -S\n{source}")
    path.chmod(0o755)


def run_script(
    script: str, folder: Path, run: Callable[..., Any], programs: Mapping[str, str] | None = None
) -> list[Any]:
    """Run a script whose `perturbkv` is `run`, in this process, and return what each command left.

    `programs`: name -> Python source of other programs that the script finds.
    """
    with tempfile.TemporaryDirectory() as found, socket.socket(socket.AF_UNIX) as door:
        place = f"{found}/door"
        door.bind(place)
        door.listen()
        door.settimeout(0.05)
        for name, source in {**(programs or {}), "perturbkv": PERTURBKV.format(place=place)}.items():
            program(Path(found), name, source)
        env = {**os.environ, "PATH": f"{found}:{os.environ['PATH']}"}
        bash = subprocess.Popen(["bash", "-e", "-c", script], cwd=folder, env=env)
        left = served(door, bash, run)
        assert bash.returncode == 0, left[-1:]
    return left


def served(door: socket.socket, bash: subprocess.Popen[bytes], run: Callable[..., Any]) -> list[Any]:
    left: list[Any] = []
    while bash.poll() is None:
        try:
            link, _ = door.accept()
        except TimeoutError:
            continue
        with link:
            link.settimeout(None)
            folder, arguments = json.loads(link.makefile().readline())
            os.chdir(folder)
            left.append(run(*arguments))
            link.sendall(json.dumps([left[-1].code, left[-1].out, left[-1].err]).encode() + b"\n")
    return left
