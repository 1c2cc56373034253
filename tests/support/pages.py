"""Blocks of the pages, and a shell that runs those in `sh` with stand-ins for programs, `perturbkv` in this process."""

from __future__ import annotations

import json
import os
import re
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tests.support.screens import Ran

ROOT = Path(__file__).resolve().parents[2]
HOW_TO = ROOT / "docs" / "how-to"
BLOCK = re.compile(
    r"^(?:In a file `(?P<file>[^`]+)`[^\n]*:\n\n)?^```(?P<language>[^\n]*)\n(?P<text>.*?)^```$",
    re.MULTILINE | re.DOTALL,
)
CALL = """
import json, os, socket, sys
with socket.socket(socket.AF_UNIX) as link:
    link.connect({door!r})
    link.sendall(json.dumps([os.getcwd(), os.path.basename(sys.argv[0]), sys.argv[1:]]).encode() + b"\\n")
    code, out, err = json.loads(link.makefile().readline())
sys.stdout.write(out), sys.stderr.write(err), sys.exit(code)
"""
"""A program that the process of the test runs, where everything is imported already."""
Program = Callable[..., "Ran"]


@dataclass(frozen=True)
class Block:
    """A fenced block of a page.

    Attributes:
        language: what stands behind the fence; empty where nothing does.
        text: its lines.
        line: the line of its fence, from 1.
        file: the name of the file that it is, where "In a file `name`:" stands above it; else empty.
    """

    language: str
    text: str
    line: int
    file: str


def blocks(page: str) -> list[Block]:
    """The blocks of a page's text, in order."""
    return [
        Block(found["language"], found["text"], page.count("\n", 0, found.start("language")) + 1, found["file"] or "")
        for found in BLOCK.finditer(page)
    ]


def commands(section: str) -> str:
    """The shell blocks of a section of docs/how-to/cluster.md, one behind the other; at least one."""
    _, _, rest = (HOW_TO / "cluster.md").read_text().partition(f"{section}\n")
    found = [block.text for block in blocks(re.split(r"^## ", rest, flags=re.MULTILINE)[0]) if block.language == "sh"]
    assert found, section
    return "".join(found)


def environment(**more: str) -> dict[str, str]:
    """The environment of commands that find this environment's `python` and `perturbkv`."""
    return {**os.environ, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}", **more}


def shell(
    script: str, folder: Path, programs: Mapping[str, Program], sources: Mapping[str, str] | None = None
) -> list[Ran]:
    """What each command of a script left, in bash; the first that fails ends it.

    `programs` are run by this process, given their words; `sources` are Python, each with a process of its own.
    """
    with tempfile.TemporaryDirectory() as binaries, socket.socket(socket.AF_UNIX) as door:
        place = f"{binaries}/door"
        door.bind(place)
        door.listen()
        door.settimeout(0.05)
        for name, source in {**dict.fromkeys(programs, CALL.format(door=place)), **(sources or {})}.items():
            path = Path(binaries, name)
            path.write_text(f"#!{sys.executable} -S\n{source}")
            path.chmod(0o755)
        env = environment()
        bash = subprocess.Popen(
            ["bash", "-e", "-u", "-c", script], cwd=folder, env={**env, "PATH": f"{binaries}:{env['PATH']}"}
        )
        try:
            left = _served(door, bash, programs)
        finally:
            bash.kill()  # where a program raised; else it has ended
            bash.wait()
        assert bash.returncode == 0, (script, left[-1:])
    return left


def _served(door: socket.socket, bash: subprocess.Popen[bytes], programs: Mapping[str, Program]) -> list[Ran]:
    left: list[Ran] = []
    while bash.poll() is None:
        try:
            link, _ = door.accept()
        except TimeoutError:
            continue
        with link:
            link.settimeout(None)
            folder, name, words = json.loads(link.makefile().readline())
            os.chdir(folder)
            left.append(programs[name](*words))
            link.sendall(json.dumps([left[-1].code, left[-1].out, left[-1].err]).encode() + b"\n")
    return left
