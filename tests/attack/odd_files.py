"""What may lie where a text file is expected: bytes of any kind, and what is no file at all."""

from __future__ import annotations

import gzip
import os
import socket
from collections.abc import Callable
from pathlib import Path

Make = Callable[[Path, bytes], None]
"""Puts something at a path, made of what would be right there."""
DEEP, DIGITS = 10_000, "9" * 5_000
_SPARSE = 100 * 2**30


def _bytes(content: Callable[[bytes], bytes]) -> Make:
    return lambda path, right: _write(path, content(right))


def _write(path: Path, content: bytes) -> None:
    path.write_bytes(content)


def _socket(path: Path, right: bytes) -> None:
    here = Path.cwd()
    os.chdir(path.parent)  # a socket's whole address has 108 bytes
    try:
        with socket.socket(socket.AF_UNIX) as made:
            made.bind(path.name)
    finally:
        os.chdir(here)


def _sparse(path: Path, right: bytes) -> None:
    path.touch()
    os.truncate(path, _SPARSE)


WRONG: dict[str, Make] = {
    "empty": _bytes(lambda right: b""),
    "NUL bytes": _bytes(lambda right: bytes(64)),
    "UTF-16": _bytes(lambda right: right.decode("latin-1").encode("utf-16")),
    "latin-1": _bytes(lambda right: b"\xe9" + right),
    "gzip": _bytes(lambda right: gzip.compress(right, mtime=0)),
    "deep JSON": _bytes(lambda right: ("[" * DEEP + "]" * DEEP).encode()),
    "deep objects": _bytes(lambda right: ('{"a":' * DEEP + "1" + "}" * DEEP).encode()),
    "5,000 digits": _bytes(lambda right: f'{{"prompt": {DIGITS}}}'.encode()),
    "a number": _bytes(lambda right: b"3\n"),
    "a text": _bytes(lambda right: b'"text"\n'),
    "null": _bytes(lambda right: b"null\n"),
    "a list": _bytes(lambda right: b"[1, 2]\n"),
    "NaN": _bytes(lambda right: b"NaN\n"),
    "an object of NaN": _bytes(lambda right: b'{"prompt": NaN, "rows": Infinity}\n'),
    "half a surrogate pair": _bytes(lambda right: b'{"\\ud800": "\\udfff"}\n'),
    "escape codes": _bytes(lambda right: b'{"\\u001b[2J": "\x1b]0;x\x07"}\n'),
    "half of it": _bytes(lambda right: right[: len(right) // 2]),
    "100,000 empty lines": _bytes(lambda right: b"\n" * 100_000),
    "10 MB of one letter": _bytes(lambda right: b"x" * 10_000_000),
    "100 GiB of nothing": _sparse,
    "a FIFO": lambda path, right: os.mkfifo(path),
    "/dev/zero": lambda path, right: path.symlink_to("/dev/zero"),
    "/dev/tty": lambda path, right: path.symlink_to("/dev/tty"),
    "a folder": lambda path, right: path.mkdir(),
    "a loop of links": lambda path, right: path.symlink_to(path.name),
    "a link to nothing": lambda path, right: path.symlink_to("nothing"),
    "nothing": lambda path, right: None,
    "a socket": _socket,
}
"""Each of them is refused, whatever was to be read."""
RIGHT: dict[str, Make] = {
    "as it should be": _bytes(lambda right: right),
    "a byte order mark": _bytes(lambda right: b"\xef\xbb\xbf" + right),
    "CR alone": _bytes(lambda right: right.replace(b"\n", b"\r")),
    "CR LF": _bytes(lambda right: right.replace(b"\n", b"\r\n")),
    "no last newline": _bytes(lambda right: right.rstrip(b"\n")),
    "100,000 empty lines behind it": _bytes(lambda right: right + b"\n" * 100_000),
}
"""Each of them is read."""
