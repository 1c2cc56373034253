"""Reading files that a user names: regular files of limited size, UTF-8 text, and strict JSON.

Any other file is refused with an error of one line before more than the limit is read. A named pipe without a writer
would block for ever, and a device never ends; a pipe that the shell opened for this process, `<(…)` or `|`, has a
writer.
"""

from __future__ import annotations

import hashlib
import json
import os
import stat
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from perturbkv.errors import PerturbkvError

MIB = 2**20
_KINDS = {
    stat.S_IFDIR: "a folder",
    stat.S_IFIFO: "a named pipe",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
    stat.S_IFSOCK: "a socket",
}
_DESCRIPTORS = (Path("/dev/fd"), Path("/proc/self/fd"))


def sha256(path: Path) -> bytes:
    """Return the SHA-256 digest of a file's content."""
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").digest()


@dataclass(frozen=True)
class FileKind:
    """A kind of user file: its description, its size limit and the error for invalid files.

    Attributes:
        description: such as "a sweep file (YAML)".
        error: the exception for another file.
        max_bytes: largest size.
        hint: advice at the end of the error message.
    """

    description: str
    error: type[PerturbkvError]
    max_bytes: int = 256 * MIB
    hint: str = ""

    def check(self, path: Path, piped: bool = False) -> None:
        """Raise `error` unless the path is a regular file of at most `max_bytes`.

        `piped`: whether a pipe that the shell opened is accepted too; it can be read only once.
        """
        try:
            status = path.stat()
        except OSError as error:
            raise self.refusal(
                path, "nothing" if isinstance(error, FileNotFoundError) else _error_reason(error)
            ) from None
        except ValueError as error:  # a NUL, which no path holds
            raise self.refusal(path, f"'{error}'") from None
        kind = _KINDS.get(stat.S_IFMT(status.st_mode))
        if kind and not (piped and stat.S_ISFIFO(status.st_mode) and _is_shell_pipe(path)):
            raise self.refusal(path, f"{kind}, not a regular file")
        if status.st_size > self.max_bytes:
            raise self.refusal(path, f"{status.st_size:,} bytes, more than {self.max_bytes // MIB:,} MiB")

    def read_bytes(self, path: Path) -> bytes:
        """Return the file's bytes. Raises `error` for a file that cannot be read or is too large."""
        self.check(path, piped=True)
        content = bytearray()  # read in parts: Python allocates what is asked for, however short the file
        try:
            with path.open("rb") as stream:
                while len(content) <= self.max_bytes and (part := stream.read(MIB)):
                    content += part
        except OSError as error:
            raise self.refusal(path, _error_reason(error)) from None
        if len(content) > self.max_bytes:
            raise self.refusal(path, f"more than {self.max_bytes // MIB:,} MiB")
        return bytes(content)

    def read_text(self, path: Path) -> str:
        """Return the file's text without a byte order mark, all line ends as newlines. Raises `error`."""
        content = self.read_bytes(path)
        try:
            return content.decode("utf-8-sig").replace("\r\n", "\n").replace("\r", "\n")
        except UnicodeDecodeError as error:
            line = content.count(b"\n", 0, error.start) + 1
            raise self.refusal(path, f"no UTF-8 text (line {line}: {error.reason})") from None

    def read_json(self, path: Path) -> Any:
        """Return the value of a JSON file. Raises `error` for a file that is not JSON."""
        text = self.read_text(path)
        try:
            return parse_json(text)
        except ValueError as error:
            raise self.refusal(path, f"text that is no JSON ({error})") from None

    def refusal(self, path: Path, got: str) -> PerturbkvError:
        """Return, not raise, the error for a file that is not of this kind; `got` describes the file."""
        return self.error(f"expected {self.description} at {path}, got {got}{self.hint and f'; {self.hint}'}")


def is_path(path: Path) -> bool:
    """Return whether a file system takes the path: it holds no NUL and is not too long."""
    try:
        path.lstat()
    except (FileNotFoundError, NotADirectoryError, PermissionError):
        return True
    except (OSError, ValueError):
        return False
    return True


def _is_shell_pipe(path: Path) -> bool:
    """Return whether the path is standard input or a file descriptor, such as bash's `<(…)`."""
    return path == Path("/dev/stdin") or path.parent in _DESCRIPTORS


def parse_json(text: str, finite: bool = True) -> Any:
    """Return the value of a JSON text. Raises ValueError with a short message for invalid text.

    `finite`: whether NaN and infinities are invalid, which no standard has and Python writes into JSON.
    """
    try:
        return json.loads(text, parse_constant=_refuse_constant if finite else None, object_pairs_hook=_parse_object)
    except json.JSONDecodeError as error:
        where = f"line {error.lineno}, column {error.colno}" if "\n" in text else f"column {error.colno}"
        raise ValueError(f"{error.msg}: {where}") from None
    except RecursionError:
        raise ValueError("lists or objects lie too deep in one another") from None


def _parse_object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Return a JSON object as a dict. Raises ValueError where it has a key twice, of which Python takes the last."""
    parsed = dict(pairs)
    if len(parsed) < len(pairs):
        counts = Counter(key for key, _ in pairs)
        raise ValueError(f"the key '{counts.most_common(1)[0][0]:.40}' is there twice")
    return parsed


def _refuse_constant(word: str) -> NoReturn:
    """Raise ValueError for NaN or Infinity in a JSON text."""
    raise ValueError(f"{word} is no number")


def _error_reason(error: OSError) -> str:
    """Return the system's error message of an OSError, in quotes."""
    return f"'{error.strerror or os.strerror(error.errno or 0)}'"
