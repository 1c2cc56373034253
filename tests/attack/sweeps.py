"""Sweep files with nonsense in them: values, YAML that grows, what is no file."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

PIPE, ZEROS, FOLDER, LOOP = (f"({what})".encode() for what in ("pipe", "zeros", "folder", "loop"))
"""Contents that stand for what is no file."""


def write(path: Path, content: bytes) -> None:
    """The file, or what its content stands for."""
    special = {PIPE: os.mkfifo, ZEROS: _zeros, FOLDER: Path.mkdir, LOOP: _loop}
    special.get(content, lambda place: place.write_bytes(content))(path)  # type: ignore[operator]


def _zeros(path: Path) -> None:
    path.symlink_to("/dev/zero")


def _loop(path: Path) -> None:
    path.symlink_to(path)


def _listed(values: object) -> str:
    return "[" + ", ".join(map(str, values)) + "]"  # type: ignore[call-overload]


_NUMBERS = (".nan", "nan", ".inf", "1e999", str(10**20), "-1", "0", "1e-320", "''", "1_000", "٣", "0x10", "1:30",
            "null", "true", "{}", "[]", "[[1]]", "!!binary aGk=",
            "!!python/object/apply:os.system ['touch opened']")  # fmt: skip
_KEYS = ("budget", "window", "alpha", "samples", "steps", "max-tokens", "chunk-mib", "length", "depth", "kernel",
         "floor", "epsilon", "seed", "block", "max-memory", "protect-first")  # fmt: skip
_WORDS = ("model", "dataset", "policy", "preset", "granularity", "precision", "correction", "device", "dtype",
          "scenario", "cache", "data-dir", "text", "save", "head-scores", "pool")  # fmt: skip
_LAUGHS = "a: &a [x, x]\n" + "".join(
    f"{chr(98 + place)}: &{chr(98 + place)} [{', '.join([f'*{chr(97 + place)}'] * 9)}]\n" for place in range(12)
)


def _many(key: str, count: int) -> str:
    return f"budget: 24\nwindow: 8\n{key}: {_listed(place / count for place in range(count))}\n"


FILES: Mapping[str, Mapping[str, tuple[bytes, bool]]] = {
    "sweep numbers": {
        f"{key} = {value}": (f"{key}: {value}\n".encode(), False) for key in _KEYS for value in _NUMBERS
    },
    "sweep words": {
        f"{key} = {value[:20]!r}": (f"{key}: {value}\n".encode(), False)
        for key in _WORDS
        for value in ("nonsense", "''", "null", "[a, b]", "{a: b}", '"\\e[31m"', "x" * 100_000, "5", "*x")
    },
    "sweep YAML": {
        "aliases of aliases": (_LAUGHS.encode(), True),
        "aliases of aliases of a key": ((_LAUGHS + "budget: *m\n").encode(), True),
        "a list in itself": (b"budget: &a [*a]\n", True),
        "a mapping in itself": (b"grids: &a [{policy: *a}]\n", True),
        "a grid in itself": (b"grids: &a [*a]\n", True),
        "100,000 lists in one another": (b"budget: " + b"[" * 100_000, True),
        "100,000 mappings in one another": (b"{a: " * 100_000, True),
        "900 lists in one another": (b"budget: " + b"[" * 900 + b"1" + b"]" * 900, True),
        "an object": (b"!!python/object/apply:os.system ['touch opened']\n", True),
        "a merge": (b"base: &b {budget: 24}\n<<: *b\n", True),
        "a key twice": (b"budget: 24\nbudget: 25\n", True),
        "a key that is a list": (b"? [a, b]\n: 1\n", True),
        "keys without end": ("".join(f"k{place}: 1\n" for place in range(50_000)).encode(), True),
        "one value 100,000 times": (f"budget: {_listed([24] * 100_000)}\n".encode(), True),
        "100,000 values": (f"budget: {_listed(range(20, 100_020))}\n".encode(), True),
        "10,001 values": (_many("alpha", 10_001).encode(), True),
        "20,000 lengths": (f"length: {_listed(range(200, 20_200))}\n".encode(), True),
        "200 × 200 values": (f"budget: {_listed(range(20, 220))}\nwindow: {_listed(range(1, 201))}\n".encode(), True),
        "60 × 200 values in a grid": (
            
            f"grids:\n- alpha: {_listed(n / 60 for n in range(60))}\n  budget: {_listed(range(20, 220))}".encode(),
            True,
        ),
        "20,000 grids": (
            ("window: 8\ngrids:\n" + "".join(f"- budget: {20 + n}\n" for n in range(20_000))).encode(), True),
        "a number of 100,000 digits": (b"budget: " + b"9" * 100_000, True),
        "two documents": (b"budget: 24\n---\nbudget: 25\n", True),
        "a directive": (b"%YAML 9.9\n---\nbudget: 24\n", True),
        "only a comment": (b"# nothing\n", True),
        "no text": (bytes(range(256)), True),
        "zeros": (bytes(1000), True),
        "UTF-16": ("budget: 24\n".encode("utf-16"), True),
        "a mark of its order": ("\ufeffbudget: 24\nwindow: 8\n".encode(), False),
        "10 MB of one word": (b"model: " + b"x" * 10**7, False),
        "2 MB of comments": (b"# nothing\n" * 200_000 + b"budget: 24\nwindow: 8\n", False),
        "a pipe": (PIPE, True),
        "zeros without end": (ZEROS, True),
        "a folder": (FOLDER, True),
        "a link to itself": (LOOP, True),
        "nothing": (b"", True),
    },
}  # fmt: skip
"""Kind -> name -> the file's content, and whether it can only be refused."""
