"""Files of a benchmark: in the user's --data-dir, or downloaded from the hub."""

from __future__ import annotations

import os
from pathlib import Path

from perturbkv.datasets.dataset_registry import DATA_DIR_VARIABLE
from perturbkv.errors import DatasetError
from perturbkv.models import hub
from perturbkv.models.hub import HubError


def local_file(data_dir: Path | None, benchmark: str, file: str) -> Path | None:
    """Return a benchmark's file in a data folder, or in its subfolder `benchmark` or `data`; None if it is missing."""
    if data_dir is None:
        return None
    paths = [data_dir / folder / file for folder in ("", benchmark, "data")]
    return next((path for path in paths if os.path.lexists(path)), None)


def hub_file(dataset: str, local: str, repo: str, file: str, revision: str = "") -> Path:
    """Return the path of a file of a dataset repository, from the hub or its cache on disk.

    `local` is the name under which the file could be in --data-dir. Raises DatasetError, which names both.
    """
    try:
        return hub.download_file(repo, file, revision, "dataset")
    except HubError as error:
        raise DatasetError(
            f"dataset '{dataset}' needs {local}, and the hub did not give {repo}/{file} ({error}); bring it "
            f"with --data-dir DIR (or {DATA_DIR_VARIABLE}) holding {local}, or with a reachable hub or a filled HF_HOME"
        ) from error
