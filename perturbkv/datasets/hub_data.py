"""A data set's file from the hub, or one line that says how to bring it."""

from __future__ import annotations

import textwrap

from perturbkv.datasets.registry import DATA_DIR_VARIABLE
from perturbkv.errors import DatasetError
from perturbkv.models import hub

_LONGEST = 120
"""Letters of a reason."""


def hub_file(dataset: str, local: str, repo: str, file: str, revision: str | None = None) -> str:
    """Path of a data set repository's file, from the hub or its cache on disk.

    `local` is the file that --data-dir would hold instead. Raises DatasetError, which names both.
    """
    from huggingface_hub import hf_hub_download

    try:
        return str(
            hf_hub_download(
                repo_id=repo, filename=file, revision=revision, repo_type="dataset", local_files_only=hub.local_only()
            )
        )
    except Exception as error:  # the hub's client fails in many ways, all of which mean the same here
        msg = (
            f"dataset '{dataset}' needs {local}, and the hub did not give {repo}/{file} ({_reason(error)}); bring it "
            f"with --data-dir DIR (or {DATA_DIR_VARIABLE}) holding {local}, or with a reachable hub or a filled HF_HOME"
        )
        raise DatasetError(msg) from error


def _reason(error: Exception) -> str:
    """The first sentence of what the hub's client says, whole words of it; its kind where it says nothing."""
    first = str(error).strip().partition("\n")[0].partition(". ")[0]
    return textwrap.shorten(first, _LONGEST, placeholder=" …") or type(error).__name__
