"""`perturbkv doctor`: versions, devices, the embedded model and folders."""

from __future__ import annotations

import importlib.metadata
import os
import platform
from pathlib import Path

import typer

from perturbkv.analyses.names import plural
from perturbkv.cli import console
from perturbkv.cli.options import JsonOption

_LIBRARIES = ("torch", "transformers", "numpy", "h5py", "h5netcdf", "matplotlib", "pyarrow", "gguf", "accelerate")


def doctor(context: typer.Context, as_json: JsonOption = False) -> None:
    """Report versions, devices, folders; selfcheck."""
    if context.invoked_subcommand is not None:
        return
    findings = _findings()
    if as_json:
        console.print_json(findings)
        return
    console.table("doctor", ["what", "found"], list(findings.items()))


def _findings() -> dict[str, str]:
    """Return name -> text for every item that `perturbkv doctor` reports."""
    import torch

    cuda = [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]
    data = os.environ.get("PERTURBKV_DATA_DIR")
    return {
        "python": platform.python_version(),
        **{name: importlib.metadata.version(name) for name in _LIBRARIES},
        "CUDA devices": ", ".join(cuda) or "none: runs use the CPU",
        "CPU threads": str(torch.get_num_threads()),
        "norm kernel": _norm_kernel(),
        "embedded model": _embedded_model(),
        "hub cache": _hub_cache(),
        "converted models": _converted_models(),
        "data folder": data or "PERTURBKV_DATA_DIR is not set: LongBench comes from the hub",
    }


def _embedded_model() -> str:
    """Return the embedded model's name, quantisation and path as text, or how to install it."""
    from perturbkv.models.aliases import EMBEDDED, INSTALL_EMBEDDED
    from perturbkv.models.gguf import read_header
    from perturbkv.models.sources import embedded_gguf
    from perturbkv.models.stored_weights import gguf_storage

    path = embedded_gguf()
    return f"{EMBEDDED}: {gguf_storage(read_header(path)).detail}; {path}" if path else f"missing: {INSTALL_EMBEDDED}"


def _norm_kernel() -> str:
    """Return the kernel that `--norm-kernel auto` chooses on this machine, with the reason where it is not Triton."""
    from perturbkv.models.loading import pick_device
    from perturbkv.scoring.value_norms import triton_unavailable_reason

    reason = triton_unavailable_reason(pick_device("auto"))
    return f"chunked ({reason})" if reason else "triton"


def _converted_models() -> str:
    """Return the folder of converted GGUF models, their number and size as text."""
    from perturbkv.models import user_cache

    entries, size = user_cache.usage()
    return f"{user_cache.cache_folder()} ({plural(entries, 'model')}, {size / 2**20:,.0f} MiB; may be deleted)"


def _hub_cache() -> str:
    """Return the cache folder of the Hugging Face hub and its number of models as text."""
    from huggingface_hub.constants import HF_HUB_CACHE, HF_HUB_OFFLINE

    models = len(list(Path(HF_HUB_CACHE).glob("models--*")))
    return f"{HF_HUB_CACHE} ({models} models){', offline' if HF_HUB_OFFLINE else ''}"
