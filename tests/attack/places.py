"""Places where no file and no folder can be made, and what lies in the way there."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable
from pathlib import Path

PRECIOUS = b"notes of somebody else\n"
Place = Callable[[Path, str], str]
"""Makes what lies in the way in a case's folder, for a file of such a suffix or a folder; returns the output's path."""


def _under_a_file(folder: Path, suffix: str) -> str:
    (folder / "notes.txt").write_bytes(PRECIOUS)
    return f"notes.txt/out{suffix}"


def _far_under_a_file(folder: Path, suffix: str) -> str:
    (folder / "notes.txt").write_bytes(PRECIOUS)
    return f"notes.txt/a/b/out{suffix}"


def _loop(folder: Path, suffix: str) -> str:
    (folder / "loop").symlink_to("loop")
    return f"loop/out{suffix}"


def _loop_itself(folder: Path, suffix: str) -> str:
    (folder / f"loop{suffix}").symlink_to(f"loop{suffix}")
    return f"loop{suffix}"


def _link_to_nowhere(folder: Path, suffix: str) -> str:
    (folder / f"link{suffix}").symlink_to("/proc/nowhere/out")
    return f"link{suffix}"


def _of_another_kind(folder: Path, suffix: str) -> str:
    """A folder where a file should be, a file where a folder should be."""
    path = folder / f"taken{suffix}"
    if suffix:
        path.mkdir()
        (path / "notes.txt").write_bytes(PRECIOUS)
    else:
        path.write_bytes(PRECIOUS)
    return path.name


def _pipe(folder: Path, suffix: str) -> str:
    os.mkfifo(folder / f"pipe{suffix}")
    return f"pipe{suffix}"


def _socket(folder: Path, suffix: str) -> str:
    here = os.getcwd()
    os.chdir(folder)  # a socket's path may have 107 bytes
    try:
        with socket.socket(socket.AF_UNIX) as opened:
            opened.bind(f"socket{suffix}")
    finally:
        os.chdir(here)
    return f"socket{suffix}"


def _full_device(folder: Path, suffix: str) -> str:
    (folder / f"full{suffix}").symlink_to("/dev/full")
    return f"full{suffix}"


def _read_only_mount(folder: Path, suffix: str) -> str:
    mounts = [line.split() for line in Path("/proc/mounts").read_text().splitlines()]
    found = [place for _, place, _, options, *_ in mounts if "ro" in options.split(",") and Path(place).is_dir()]
    return f"{(found or ['/proc/sys'])[0]}/out{suffix}"


PLACES: dict[str, Place] = {
    "under a file": _under_a_file,
    "far under a file": _far_under_a_file,
    "a name of 300 characters": lambda folder, suffix: "n" * 300 + suffix,
    "a name that leaves no room for names beside it": lambda folder, suffix: (
        "n" * (255 - len(suffix) + (not suffix)) + suffix
    ),
    "a folder of 300 characters": lambda folder, suffix: f"{'n' * 300}/out{suffix}",
    "a path of 5,000 characters": lambda folder, suffix: "/".join(["n" * 99] * 50) + f"/out{suffix}",
    "in /proc": lambda folder, suffix: f"/proc/out{suffix}",
    "under /proc": lambda folder, suffix: f"/proc/nowhere/out{suffix}",
    "in /sys": lambda folder, suffix: f"/sys/out{suffix}",
    "under /dev/full": lambda folder, suffix: f"/dev/full/out{suffix}",
    "a loop of links": _loop,
    "a link to itself": _loop_itself,
    "a link to nowhere": _link_to_nowhere,
    "a thing of another kind": _of_another_kind,
    "a pipe": _pipe,
    "a socket": _socket,
    "a link to /dev/full": _full_device,
    "a read-only mount": _read_only_mount,
    "a suffix alone": lambda folder, suffix: f"/proc/{suffix}",
}
ANYWAY = ("a thing of another kind", "a pipe", "a socket", "a link to /dev/full", "a link to itself")
"""What --overwrite does not replace either."""
