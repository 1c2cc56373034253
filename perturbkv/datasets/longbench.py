"""LongBench (Bai et al., 2023, https://arxiv.org/abs/2308.14508) from local jsonl files, or from the hub's archive.

The hub has a single `data.zip`, dataset zai-org/LongBench, formerly THUDM/LongBench; its loading script is not used.
"""

from __future__ import annotations

import hashlib
import zipfile

from perturbkv.datasets import wording
from perturbkv.datasets.data_files import hub_file, local_file
from perturbkv.datasets.dataset_registry import DatasetOptions, LoadedDataset
from perturbkv.datasets.encode import Tokenizer
from perturbkv.datasets.jsonl import FILE, longbench_sample, read_rows

HUB_ID = "zai-org/LongBench"
ARCHIVE = "data.zip"


def load(name: str, options: DatasetOptions, tokenizer: Tokenizer) -> LoadedDataset:
    """Return the first samples of a LongBench dataset.

    Raises DatasetError where its file or wording is not available.
    """
    dataset_wording = wording.read(name)
    local = local_file(options.data_dir, "longbench", f"{name}.jsonl")
    text, where = (FILE.read_text(local), str(local)) if local else (_download_text(name), f"{HUB_ID}/{ARCHIVE}")
    samples = tuple(longbench_sample(row, dataset_wording) for row in read_rows(text, where, options.samples))
    recorded = {
        "source": "file" if local else where,
        "file_sha256": hashlib.sha256(text.encode()).hexdigest(),
        "wording": {name: dataset_wording.record()},
    }
    return LoadedDataset(samples, recorded, dataset_wording.generation_length)


def _download_text(name: str) -> str:
    """Return the jsonl text of a LongBench dataset from the hub's archive. Raises DatasetError."""
    with zipfile.ZipFile(hub_file(name, f"{name}.jsonl", HUB_ID, ARCHIVE)) as files:
        return files.read(f"data/{name}.jsonl").decode("utf-8")
