"""Outputs that cannot be written, and files of somebody else that lie where they would: every command that writes."""

from __future__ import annotations

import ctypes
import os
import resource
import socket
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from tests.attack.case import Case, answers_or_refused, refused
from tests.attack.materials import EVICT, GENERATION, MODEL, PROMPTS, RUN, TRACE

COUNT = 300
NOTES = b"notes of somebody else\n"
_PNG = ("--format", "png")


@dataclass(frozen=True)
class Command:
    """A command that writes: its words, the files that it leaves in a folder, or the suffix of the one file."""

    argv: tuple[str, ...]
    files: tuple[str, ...] = ()
    suffix: str = ""
    option: str = "--output"

    def __str__(self) -> str:
        return " ".join(self.argv[:2])


COMMANDS = (
    Command(("trace", *RUN), ("trace.h5",)),
    Command(("trace", *RUN), suffix=".h5"),
    Command(("heads", *RUN, *_PNG), ("trace.h5", "heads.png", "summary.json")),
    Command(("heads", TRACE, *_PNG), ("heads.png", "summary.json")),
    Command(("layers", TRACE, "--per-sample", *_PNG), ("layers.png", "layers-samples.png")),
    Command(("assumption", TRACE, *_PNG), ("assumption.png", "summary.json")),
    Command(("bound-tightness", TRACE, *_PNG), ("bound-tightness.png", "summary.json")),
    Command(("generate", *RUN, "--max-new-tokens", "2"), ("generation.jsonl",)),
    Command(("quality", *RUN, "--compare", "attention", "--max-new-tokens", "2", *_PNG),
            ("prompts/trace.h5", "quality.png", "quality.tex", "quality.md", "quality.csv", "summary.json")),
    Command(("quality", GENERATION, "--divergence", *_PNG), ("quality-divergence.json", "quality-divergence.png")),
    Command(("audit", EVICT, "--situation", "single", "--no-loss", "--model", MODEL, "--dataset", PROMPTS,
             "--samples", "1", *_PNG), ("audit.json", "audit.png")),
    Command(("export", TRACE), suffix=".csv"),
    Command(("export", TRACE), suffix=".parquet"),
    Command(("trace", "--model", MODEL, "--length", "256", "--samples", "1"), suffix=".json", option="--head-scores"),
    Command(("doctor", "selfcheck", "--device", "cpu", "--model", MODEL), suffix=".json"),
)  # fmt: skip


def _file(folder: Path, name: str, content: bytes = NOTES) -> None:
    (folder / name).parent.mkdir(parents=True, exist_ok=True)
    (folder / name).write_bytes(content)


def _link(target: str, folder: Path, name: str) -> None:
    (folder / name).symlink_to(target or name)


def _loop(folder: Path, name: str) -> None:
    _link("loop", folder, "loop")


def _pipe(folder: Path, name: str) -> None:
    os.mkfifo(folder / name)


def bind_socket(folder: Path, name: str) -> None:
    """Put a socket there; its whole path may have 107 bytes."""
    here = Path.cwd()
    os.chdir(folder)
    try:
        with socket.socket(socket.AF_UNIX) as opened:
            opened.bind(name)
    finally:
        os.chdir(here)


def _other_kind(folder: Path, name: str) -> None:
    _file(folder, f"{name}/notes.txt" if Path(name).suffix else name)


def _read_only() -> str:
    mounts = [line.split() for line in Path("/proc/mounts").read_text().splitlines()]
    found = [path for _, path, _, options, *_ in mounts if "ro" in options.split(",") and Path(path).is_dir()]
    return (found or ["/proc/sys"])[0]


def _nothing(folder: Path, name: str) -> None:
    """Leave the folder empty."""


Make = Callable[[Path, str], None]
PATHS: dict[str, tuple[Callable[[str], str], Make]] = {
    "under a file": (lambda suffix: f"notes.txt/out{suffix}", lambda folder, name: _file(folder, "notes.txt")),
    "far under a file": (lambda suffix: f"notes.txt/a/out{suffix}", lambda folder, name: _file(folder, "notes.txt")),
    "a name of 300 characters": (lambda suffix: "n" * 300 + suffix, _nothing),
    "a name without room for .tmp": (lambda suffix: "n" * (255 - len(suffix) + (not suffix)) + suffix, _nothing),
    "a folder of 300 characters": (lambda suffix: f"{'n' * 300}/out{suffix}", _nothing),
    "a path of 5,000 characters": (lambda suffix: "/".join(["n" * 99] * 50) + f"/out{suffix}", _nothing),
    "in /proc": (lambda suffix: f"/proc/out{suffix}", _nothing),
    "under /proc": (lambda suffix: f"/proc/nowhere/out{suffix}", _nothing),
    "in /sys": (lambda suffix: f"/sys/out{suffix}", _nothing),
    "under /dev/full": (lambda suffix: f"/dev/full/out{suffix}", _nothing),
    "a suffix alone": (lambda suffix: f"/proc/{suffix}", _nothing),
    "a read-only mount": (lambda suffix: f"{_read_only()}/out{suffix}", _nothing),
    "under a loop of links": (lambda suffix: f"loop/out{suffix}", _loop),
    "a link to nowhere": (lambda suffix: f"link{suffix}", partial(_link, "/proc/nowhere/out")),
    "a link to itself": (lambda suffix: f"link{suffix}", partial(_link, "")),
    "a link to /dev/full": (lambda suffix: f"full{suffix}", partial(_link, "/dev/full")),
    "a file for a folder, or a folder for a file": (lambda suffix: f"taken{suffix}", _other_kind),
    "a pipe": (lambda suffix: f"pipe{suffix}", _pipe),
    "a socket": (lambda suffix: f"socket{suffix}", bind_socket),
}
"""Name -> the output's path for a suffix, and what is put there."""
OVERWRITTEN = tuple(PATHS)[-5:]
"""What --overwrite does not replace either."""
FILES = {
    "text": NOTES, "bytes": bytes(range(256)), "JSON": b'{"name": "mine", "values": [1, 2]}\n',
    "a list": b"[1, 2, 3]\n",
    "JSON with our keys": b'{"trace": 3, "trace_digest": [], "analyses": {"heads": 7}, "run": [], "format": {}}\n',
}  # fmt: skip
"""Files of somebody else."""
ODD_NAMES = ("", ".", "..", "a\nb", "[bold]", "-", "ünïcode", os.fsdecode(b"\xff\xfe"), " ", "a/../b", "x" * 200)


def without_rights() -> None:
    """Let permissions bind this process, though it is root's: capset(2) of CAP_DAC_OVERRIDE and READ_SEARCH."""
    if os.geteuid():
        return
    header, data = (ctypes.c_uint32 * 2)(0x20080522, 0), (ctypes.c_uint32 * 6)()
    libc = ctypes.CDLL(None, use_errno=True)
    libc.capget(header, data)
    for index in range(3):  # effective, permitted, inheritable; the first 32 of each
        data[index] &= ~0b110
    if libc.capset(header, data):
        raise OSError(ctypes.get_errno(), "capset")


def without_space() -> None:
    """Let no file of this process grow beyond a few lines, which stderr needs."""
    resource.setrlimit(resource.RLIMIT_FSIZE, (2048, 2048))


def cases(shared: Path, seed: int) -> Iterator[Case]:
    """Yield every command with every path, file, missing right and odd name."""
    for command in COMMANDS:
        suffix, files = command.suffix, command.files

        def case(kind: str, path: str, spoil: Callable[[Path], object] = Path.exists, **more: object) -> Case:
            argv = (*command.argv, command.option, path, *more.pop("options", ()))  # noqa: B023
            name = f"{command}, {kind}: {path[:40]!r} {argv[-1] * (argv[-1] == '--overwrite')}"  # noqa: B023
            return Case(name, argv, more.pop("expected", refused()), spoil, kind, **more)

        for name, (path, make) in PATHS.items():
            for options in ((), ("--overwrite",))[: 1 + (name in OVERWRITTEN)]:
                yield case(name, path(suffix), partial(make, name=path(suffix)), options=options)
        for name in (*files, *([f"t{suffix}"] if suffix else [])):
            for kind, content in FILES.items():
                put = partial(_file, name=f"out/{name}", content=content)
                yield case(f"{kind} in {name}", "out" if files else f"out/{name}", put)
        for name in files:
            for options in ((), ("--overwrite",)):
                yield case(f"a folder {name}", "out", partial(_file, name=f"out/{name}/notes.txt"), options=options)
        for journal in ("trace.h5.journal", "trace.h5.journal/notes.txt") if "trace.h5" in files else ():
            yield case("a journal", "out", partial(_file, name=f"out/{journal}"), options=("--overwrite",))
        yield case("no right to write", f"out/out{suffix}", lambda folder: (folder / "out").mkdir(0o555),
                   before=without_rights)  # fmt: skip
        if command.argv[0] == "doctor":
            continue
        yield case("no space", f"out/out{suffix}", before=without_space, expected=answers_or_refused)
        for name in ODD_NAMES:
            path = name + suffix if name.strip("./") else name
            yield case("an odd name", path, expected=answers_or_refused)
