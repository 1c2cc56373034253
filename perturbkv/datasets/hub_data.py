"""Download of a dataset's file from the hub, with a one-line error that says how to get it otherwise."""

from __future__ import annotations

from perturbkv.datasets.dataset_registry import DATA_DIR_VARIABLE
from perturbkv.errors import DatasetError
from perturbkv.models import hub
from perturbkv.models.hub import HubError


def hub_file(dataset: str, local: str, repo: str, file: str, revision: str = "") -> str:
    """Return the path of a dataset repository's file, from the hub or its cache on disk.

    `local` is the name of the file in --data-dir that would replace it. Raises DatasetError, which names both.
    """
    try:
        repository = hub.find(repo, revision, "dataset")
        repository.download([file])
    except HubError as error:
        msg = (
            f"dataset '{dataset}' needs {local}, and the hub did not give {repo}/{file} ({error}); bring it "
            f"with --data-dir DIR (or {DATA_DIR_VARIABLE}) holding {local}, or with a reachable hub or a filled HF_HOME"
        )
        raise DatasetError(msg) from error
    return str(repository.folder / file)
