"""Spoilt trace files before every reader: each is refused in one line, or read as if nothing had been done to it."""

from __future__ import annotations

import hashlib
import io
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import h5py
import numpy as np

import perturbkv as pk
from perturbkv.errors import PerturbkvError
from perturbkv.schema import FORMAT_VERSION
from tests.attack.case import MAIN, Case, Flaw, Outcome, refused, run
from tests.attack.materials import MODEL, PROMPTS

COUNT = 130
NAME = "t.h5"
_OPTIONS = ("--model", MODEL, "--budget", "24", "--budget", "30", "--window", "8", "--save", "outputs", "--steps", "3",
            "--json")  # fmt: skip
_TRACE = ("trace", *_OPTIONS, "--dataset", PROMPTS, "--samples", "2", "-o", NAME)
_NEEDLE = ("needle", *_OPTIONS, "--lengths", "300", "--depths", "0,1", "--haystack", "noise", "--max-new-tokens", "3",
           "--compare", "snapkv:attention,two-stage", "--format", "svg", "-o", "out")  # fmt: skip
_SHOW = ("--json", "-o", "out", "--format", "svg")
Draw = np.random.Generator


@dataclass(frozen=True)
class Reader:
    """A command that reads a trace, of a needle test or not; its answer for the whole file is asked once."""

    argv: tuple[str, ...]
    needle: bool = False
    module: str = MAIN
    expected: dict[str, str] = field(default_factory=dict, compare=False)

    def whole(self, shared: Path) -> bytes:
        """Return the file that is spoilt."""
        folder = shared.parent / f"whole-{self.needle}"
        path = folder / ("out/trace.h5" if self.needle else NAME)
        if not path.exists():
            folder.mkdir()
            made = run(_NEEDLE if self.needle else _TRACE, folder, limit=120)
            assert made.code == 0, made
        return path.read_bytes()

    def answer(self, shared: Path) -> dict[str, str]:
        """Return what it prints and the tables that it leaves for the whole file."""
        if not self.expected:
            folder = shared.parent / f"expected-{hash(self)}"
            folder.mkdir()
            (folder / NAME).write_bytes(self.whole(shared))
            made = run(self.argv, folder, limit=120, module=self.module)
            assert made.code == 0, (self, made)
            self.expected.update(_printed(made, folder))
        return self.expected


READERS = (
    *(Reader(("list", NAME, "--json"), needle) for needle in (False, True)),
    *(Reader((NAME,), needle, __name__) for needle in (False, True)),
    *(Reader((name, NAME, *_SHOW)) for name in ("heads", "layers", "bound-tightness", "assumption", "ablation",
            "horizon")),
    Reader(("tokens", NAME, "--json")), Reader(("export", NAME, "-o", "t.csv", "--json")), Reader(_TRACE),
    Reader(("needle", NAME, *_SHOW), True),
)  # fmt: skip
QUICK = tuple(reader for reader in READERS if not {"--format", "trace"} & set(reader.argv))
"""Those that draw nothing get two thirds of the files: their whole answer takes a moment."""


def main() -> None:
    """Read everything in a trace as a script does, and print its digest."""
    try:
        trace = pk.read_trace(sys.argv[1])
        digest = hashlib.sha256(repr((trace.sample_ids, dict(trace.failures), trace.run.to_json())).encode())
        for name in sorted(trace.arrays):
            digest.update(name.encode() + repr(np.asarray(trace.arrays[name]).tolist()).encode())
        for name in trace.sample_ids:
            trace.sample(name)
        digest.update(repr(trace.to_xarray().sizes).encode())
        sys.stdout.write(digest.hexdigest())
    except PerturbkvError as error:
        sys.stderr.write(f"error: {error}\n")
        sys.exit(error.exit_code)


def cases(shared: Path, seed: int) -> Iterator[Case]:
    """Yield each way to spoil a file as often as its table says, before readers in turn."""
    number = 0
    for change, count in BYTES.items():
        for _ in range(count):
            number += 1
            readers = READERS if number % 3 == 0 else QUICK
            reader = readers[number // 3 % len(readers)]
            spoil = partial(_spoil, shared, reader, change, [seed, number])
            expected = partial(_expected, shared, reader)
            name = f"{number} {change.__name__}: {reader.argv[0]}"
            yield Case(name, reader.argv, expected, spoil, change.__name__, module=reader.module)


def _spoil(shared: Path, reader: Reader, change: Callable[..., Any], seed: list[int], folder: Path) -> None:
    """Write the spoilt file."""
    (folder / NAME).write_bytes(change(reader.whole(shared), np.random.default_rng(seed)))


def _printed(outcome: Outcome, folder: Path) -> dict[str, str]:
    """Return what a command printed and left in tables, without the file's digest."""
    digest = hashlib.sha256((folder / NAME).read_bytes()).hexdigest()[:12]
    tables = {path.name: path.read_text(errors="replace") for path in folder.glob("*.csv")}
    return {name: text.replace(digest, "DIGEST") for name, text in {"stdout": outcome.out, **tables}.items()}


def _expected(shared: Path, reader: Reader, outcome: Outcome, folder: Path) -> Flaw:
    """Expect the whole file's answer, or one line that names the file, and the file as it was."""
    if outcome.code:
        lines = [line for line in outcome.err.strip().splitlines()[:-1] if "going on" not in line]
        return refused(NAME)(outcome, folder) or (f"more than one line: {lines}" if lines else None)
    if outcome.changed or "Traceback" in outcome.err:
        return f"changed {outcome.changed}: {outcome.err[-300:]}"
    found = _printed(outcome, folder)
    for name, text in reader.answer(shared).items():
        if found.get(name) != text:
            return f"{name}: other numbers"
    return None


# What arrives: files that were cut, damaged on a disk, of another program or of another version.
def bit_of_the_numbers(content: bytes, draw: Draw) -> bytes:
    """Change a bit inside a chunk of numbers."""
    with h5py.File(io.BytesIO(content)) as file:
        chunked = [variable.id for variable in file.values() if variable.chunks and variable.fletcher32]
        chunks = [one.get_chunk_info(number) for one in chunked for number in range(one.get_num_chunks())]
    chunk, made = chunks[int(draw.integers(len(chunks)))], bytearray(content)
    made[chunk.byte_offset + int(draw.integers(chunk.size))] ^= 1 << int(draw.integers(8))
    return bytes(made)


def cut(content: bytes, draw: Draw) -> bytes:
    return content[: int(draw.integers(len(content)))]


def cut_a_little(content: bytes, draw: Draw) -> bytes:
    return content[: -int(draw.integers(1, 64))]


def longer(content: bytes, draw: Draw) -> bytes:
    return content + draw.bytes(int(draw.integers(1, 5000)))


def random_bytes(content: bytes, draw: Draw) -> bytes:
    """Leave HDF5's signature and nothing of HDF5 behind it."""
    return content[: int(draw.choice([8, 48, 96]))] + draw.bytes(len(content) // 2)


def another_program(content: bytes, draw: Draw) -> bytes:
    """Put there a text, an archive, or an HDF5 file of something else."""
    made = io.BytesIO()
    kind = int(draw.integers(3))
    if kind == 0:
        return b"step,loss\n1,0.5\n"
    if kind == 1:
        np.savez(made, theta=np.arange(3))
    else:
        with h5py.File(made, "w") as file:
            file["theta"] = np.arange(3.0)
    return made.getvalue()


def another_version(content: bytes, draw: Draw) -> bytes:
    made = io.BytesIO(content)
    with h5py.File(made, "r+", track_order=True) as file:
        file.attrs["format_version"] = int(draw.choice([1, FORMAT_VERSION - 1, FORMAT_VERSION + 1, 99]))
    return made.getvalue()


BYTES: dict[Callable[[bytes, Draw], bytes], int] = {
    bit_of_the_numbers: 40, cut: 25, cut_a_little: 10, longer: 10, random_bytes: 5, another_program: 20,
    another_version: 20,
}  # fmt: skip
"""Change -> how often it is tried."""
