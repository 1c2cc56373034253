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
from tests.attack.case import MAIN, Case, Flaw, Outcome, refused, run
from tests.attack.materials import MODEL, PROMPTS
from tests.attack.trace_edits import EDITS, SUMMED, without_sums

COUNT = 1000
NAME = "t.h5"
_OPTIONS = (
    "--model",
    MODEL,
    "--budget",
    "24",
    "--budget",
    "30",
    "--window",
    "8",
    "--save",
    "outputs",
    "--steps",
    "3",
    "--json",
)
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
    for change, count in {**BYTES, **EDITS, **SUMMED}.items():
        for _ in range(count):
            number += 1
            readers = READERS if number % 3 == 0 else QUICK
            reader = readers[number // 3 % len(readers)]
            spoil = partial(_spoil, shared, reader, change, [seed, number])
            expected = partial(_expected, shared, reader)
            name = f"{number} {change.__name__}: {reader.argv[0]}"
            yield Case(name, reader.argv, expected, spoil, change.__name__, module=reader.module)


def _spoil(shared: Path, reader: Reader, change: Callable[..., Any], seed: list[int], folder: Path) -> None:
    """Write the spoilt file; sums stay where an edit would make sense in a file that somebody else wrote."""
    draw, path, whole = np.random.default_rng(seed), folder / NAME, reader.whole(shared)
    if change in BYTES:
        path.write_bytes(change(whole, draw))
        return
    for name in (NAME, "whole.h5"):
        (folder / name).write_bytes(whole)
    with h5py.File(path, "r+", track_order=True) as file:
        if change in EDITS and draw.integers(2):
            without_sums(file)
        change(file, draw)


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


# Changes of bytes, which know nothing of what they mean.
def _chunks(content: bytes) -> list[tuple[int, int]]:
    """Return the first and last byte of each chunk or block of numbers."""
    found: list[tuple[int, int]] = []
    with h5py.File(io.BytesIO(content)) as file:
        for variable in file.values():
            if variable.chunks:
                chunks = [variable.id.get_chunk_info(number) for number in range(variable.id.get_num_chunks())]
                found += [(chunk.byte_offset, chunk.byte_offset + chunk.size) for chunk in chunks]
            elif variable.id.get_offset() is not None:
                found.append((variable.id.get_offset(), variable.id.get_offset() + variable.id.get_storage_size()))
    return found


def _chunk(content: bytes, draw: Draw) -> tuple[int, int]:
    chunks = _chunks(content)
    return chunks[int(draw.integers(len(chunks)))]


def _block(content: bytes, draw: Draw) -> tuple[int, int]:
    size = int(2 ** draw.uniform(2, 13))
    begin = int(draw.integers(len(content) - size))
    return begin, begin + size


def _flipped(content: bytes, indices: list[int], draw: Draw) -> bytes:
    made = bytearray(content)
    for index in indices:
        made[index] ^= 1 << int(draw.integers(8))
    return bytes(made)


def one_bit(content: bytes, draw: Draw) -> bytes:
    return _flipped(content, [int(draw.integers(len(content)))], draw)


def many_bits(content: bytes, draw: Draw) -> bytes:
    return _flipped(content, draw.integers(len(content), size=int(draw.integers(2, 200))).tolist(), draw)


def bit_of_the_numbers(content: bytes, draw: Draw) -> bytes:
    return _flipped(content, [int(draw.integers(*_chunk(content, draw)))], draw)


def byte_between_the_numbers(content: bytes, draw: Draw) -> bytes:
    """Change a byte of HDF5's own: headers, indices, attributes, texts."""
    own, made = np.ones(len(content), dtype=bool), bytearray(content)
    for begin, end in _chunks(content):
        own[begin:end] = False
    made[int(draw.choice(np.flatnonzero(own)))] = int(draw.integers(256))
    return bytes(made)


def letter(content: bytes, draw: Draw) -> bytes:
    """Change a letter of something that a person could read."""
    values, made = np.frombuffer(content, dtype=np.uint8), bytearray(content)
    letters = (values >= ord("0")) & (values <= ord("z"))
    runs = np.flatnonzero(np.convolve(letters, np.ones(6), mode="same") >= 6)
    made[int(draw.choice(runs))] = ord("0") + int(draw.integers(10))
    return bytes(made)


def cut(content: bytes, draw: Draw) -> bytes:
    return content[: int(draw.integers(len(content)))]


def cut_a_little(content: bytes, draw: Draw) -> bytes:
    return content[: -int(draw.integers(1, 64))]


def longer(content: bytes, draw: Draw) -> bytes:
    return content + draw.bytes(int(draw.integers(1, 5000)))


def _zeroed(content: bytes, begin: int, end: int) -> bytes:
    return content[:begin] + bytes(end - begin) + content[end:]


def zeroed(content: bytes, draw: Draw) -> bytes:
    return _zeroed(content, *_block(content, draw))


def numbers_zeroed(content: bytes, draw: Draw) -> bytes:
    """Zero a whole chunk, whose sum is zero too."""
    return _zeroed(content, *_chunk(content, draw))


def duplicated(content: bytes, draw: Draw) -> bytes:
    begin, end = _block(content, draw)
    to = int(draw.integers(len(content) - (end - begin)))
    return content[:to] + content[begin:end] + content[to + end - begin :]


def _swapped(content: bytes, one: int, two: int, size: int) -> bytes:
    made = bytearray(content)
    made[one : one + size], made[two : two + size] = content[two : two + size], content[one : one + size]
    return bytes(made)


def swapped(content: bytes, draw: Draw) -> bytes:
    begin, end = _block(content, draw)
    return _swapped(content, begin, int(draw.integers(len(content) - (end - begin))), end - begin)


def numbers_swapped(content: bytes, draw: Draw) -> bytes:
    """Swap two chunks of one length, each with the sum that belongs to it."""
    chunks = _chunks(content)
    pairs = [(one, two) for one in chunks for two in chunks if one < two and one[1] - one[0] == two[1] - two[0]]
    (begin, end), (other, _) = pairs[int(draw.integers(len(pairs)))]
    return _swapped(content, begin, other, end - begin)


def shifted(content: bytes, draw: Draw) -> bytes:
    """Add or remove a byte."""
    at = int(draw.integers(len(content)))
    return content[:at] + (draw.bytes(1) + content[at:] if draw.integers(2) else content[at + 1 :])


def random_bytes(content: bytes, draw: Draw) -> bytes:
    """Leave HDF5's signature and nothing of HDF5 behind it."""
    return content[: int(draw.choice([8, 48, 96]))] + draw.bytes(len(content) // 2)


BYTES: dict[Callable[[bytes, Draw], bytes], int] = {
    one_bit: 110, many_bits: 40, bit_of_the_numbers: 50, byte_between_the_numbers: 100, letter: 40, cut: 25,
    cut_a_little: 10, longer: 10, zeroed: 40, numbers_zeroed: 25, duplicated: 20, swapped: 25, numbers_swapped: 20,
    shifted: 10, random_bytes: 5,
}  # fmt: skip
"""Change -> how often it is tried."""
