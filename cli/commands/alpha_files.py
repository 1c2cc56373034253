"""What `perturbkv alpha` leaves beside figure and numbers: tables of α, and a trace per fold."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

from perturbkv.cli.saving import free
from perturbkv.configs.alpha_table import BY
from perturbkv.errors import ConfigError, PerturbkvError
from perturbkv.storage.atomic_files import write_whole
from perturbkv.user_files import MIB, FileKind

if TYPE_CHECKING:
    from perturbkv.analyses.questions.alpha.alpha import Alpha

_KIND = FileKind("shares of stage 1 as JSON", ConfigError, 16 * MIB)
_MADE_BY = "perturbkv alpha"
_FLATTERS = "chosen on all of these samples: what it gains on them flatters; `perturbkv alpha` judges on others"


def of_fold(folder: Path, number: int) -> Path:
    """The trace of a fold's samples, at what was chosen on the others."""
    return folder / f"alpha-fold-{number}.h5"


def check_free(folder: Path, overwrite: bool) -> None:
    """Raise ConfigError where a table or a fold's trace would replace a file of somebody else; OutputError."""
    for by in BY:
        path = _table(folder, by)
        free(path, overwrite or _is_table(path))
    for path in sorted(folder.glob("alpha-fold-*.h5")):
        free(path, overwrite or _is_trace(path))


def leave(result: Alpha, folder: Path, overwrite: bool) -> None:
    """Write the tables of what was chosen on all samples."""
    check_free(folder, overwrite)
    identity = result.identity
    about = {
        "made_by": _MADE_BY,
        "model": identity.model,
        "dataset": identity.dataset,
        "samples": identity.samples,
        "trace": identity.trace,
        "configuration": result.sweep.configs[result.sweep.paper].label(),
        "note": _FLATTERS,
    }
    for by, table in result.shares.items():
        document = json.dumps({**table.to_document(), "about": about}, indent=1, ensure_ascii=False) + "\n"
        write_whole(_table(folder, by), lambda stream, text=document: stream.write(text.encode()))  # type: ignore[misc]


def _table(folder: Path, by: str) -> Path:
    return folder / f"alpha-{by}.json"


def _is_table(path: Path) -> bool:
    """Whether it is one that this command wrote."""
    if not path.is_file():
        return False
    try:
        found = _KIND.read_json(path)
    except ConfigError:
        return False
    about = found.get("about") if isinstance(found, dict) else None
    return isinstance(about, dict) and about.get("made_by") == _MADE_BY


def _is_trace(path: Path) -> bool:
    from perturbkv.storage.trace.trace_file import read_trace

    try:
        return bool(read_trace(path).sample_ids)
    except PerturbkvError:
        return False
