"""Methods of weight quantisation that transformers reads, each with the package that it needs. No torch here."""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping
from typing import Any

from perturbkv.errors import ModelError

PACKAGES: Mapping[str, str] = {
    "aqlm": "aqlm",
    "auto-round": "auto-round",
    "awq": "gptqmodel",
    "bitsandbytes": "bitsandbytes",
    "compressed-tensors": "compressed-tensors",
    "eetq": "kernels",
    "fp_quant": "fp_quant",
    "gptq": "gptqmodel",
    "higgs": "flute-kernel",
    "hqq": "hqq",
    "quanto": "optimum-quanto",
    "spqr": "spqr_quant",
    "torchao": "torchao",
    "vptq": "vptq",
}
"""transformers' quant_method -> package on PyPI; other methods need none, or report it themselves."""
_MODULES = {"optimum-quanto": "optimum.quanto", "flute-kernel": "flute"}
"""Package -> import name, where they differ."""


def quant_method(quantisation: Any) -> str:
    """Return the quant_method of a `quantization_config`, which is an object or a dictionary."""
    document = _as_dict(quantisation)
    method = document.get("quant_method") or (
        "bitsandbytes" if {"load_in_4bit", "load_in_8bit"} & document.keys() else ""
    )
    return str(getattr(method, "value", method)).removesuffix("_4bit").removesuffix("_8bit")


def describe(quantisation: Any) -> str:
    """Return a `quantization_config` in words, for example `bitsandbytes int4` or `torchao Int8WeightOnly`."""
    document = _as_dict(quantisation)
    bits = 4 if document.get("load_in_4bit") else 8 if document.get("load_in_8bit") else document.get("bits")
    kind = document.get("quant_type")  # of torchao: `Int8WeightOnly`, in older files `int8_weight_only`
    chosen = kind.get("default", kind) if isinstance(kind, dict) else kind
    method = chosen.get("_type", "") if isinstance(chosen, dict) else chosen
    detail = f"int{bits}" if bits else document.get("weights") or str(method or "").removesuffix("Config")
    return " ".join(filter(None, (quant_method(document) or "quantised", str(detail or ""))))


def check_installed(config: Any, name: str) -> None:
    """Raise ModelError if the package for reading a model's quantised weights is not installed."""
    quantisation = getattr(config, "quantization_config", None)
    package = PACKAGES.get(quant_method(quantisation)) if quantisation else None
    if package is not None and not _is_installed(_MODULES.get(package, package.replace("-", "_"))):
        by = quant_method(quantisation)
        raise ModelError(
            f"model '{name}' is quantised by {by}, which needs a package that is not here: pip install {package}"
        )


def _as_dict(quantisation: Any) -> dict[str, Any]:
    """Return a `quantization_config` as a dictionary; empty for any other object."""
    return (
        quantisation
        if isinstance(quantisation, dict)
        else quantisation.to_dict()
        if hasattr(quantisation, "to_dict")
        else {}
    )


def _is_installed(module: str) -> bool:
    """Return whether a module can be imported, without importing it."""
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:  # of the package around it
        return False
