"""A data set's file from the hub, or one line that says how to bring it."""

from __future__ import annotations

from perturbkv.datasets.dataset_registry import DATA_DIR_VARIABLE
from perturbkv.errors import DatasetError
from perturbkv.models import hub
from perturbkv.models.hub import HubError


def hub_file(dataset: str, local: str, repo: str, file: str, revision: str = "") -> str:
    """Path of a data set repository's file, from the hub or its cache on disk.

    `local` is the file that --data-dir would hold instead. Raises DatasetError, which names both.
    """
    try:
        found = hub.find(repo, revision, "dataset")
        found.bring([file])
    except HubError as error:
        msg = (
            f"dataset '{dataset}' needs {local}, and the hub did not give {repo}/{file} ({error}); bring it "
            f"with --data-dir DIR (or {DATA_DIR_VARIABLE}) holding {local}, or with a reachable hub or a filled HF_HOME"
        )
        raise DatasetError(msg) from error
    return str(found.folder / file)
