"""The ways to quantise weights that transformers reads, each with the package that it needs. No torch here."""

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
"""transformers' quant_method -> what pip installs for it; what is not here needs nothing, or says so itself."""
_MODULES = {"optimum-quanto": "optimum.quanto", "flute-kernel": "flute"}
"""Where it is imported by another name than its own."""


def method(about: Any) -> str:
    """The quant_method of a `quantization_config`, as an object or as JSON has it."""
    held = as_dict(about)
    named = held.get("quant_method") or ("bitsandbytes" if {"load_in_4bit", "load_in_8bit"} & held.keys() else "")
    return str(getattr(named, "value", named)).removesuffix("_4bit").removesuffix("_8bit")


def kind(about: Any) -> str:
    """For example `bitsandbytes int4`, `torchao Int8WeightOnly`."""
    held = as_dict(about)
    bits = 4 if held.get("load_in_4bit") else 8 if held.get("load_in_8bit") else held.get("bits")
    said = f"int{bits}" if bits else held.get("weights") or _of_torchao(held.get("quant_type"))
    return " ".join(filter(None, (method(held) or "quantised", str(said or ""))))


def check_installed(config: Any, name: str) -> None:
    """Raise ModelError where the package that reads a model's quantised weights is not there."""
    about = getattr(config, "quantization_config", None)
    package = PACKAGES.get(method(about)) if about else None
    if package is not None and not _is_there(_MODULES.get(package, package.replace("-", "_"))):
        by = method(about)
        msg = f"model '{name}' is quantised by {by}, which needs a package that is not here: pip install {package}"
        raise ModelError(msg)


def as_dict(about: Any) -> dict[str, Any]:
    """A `quantization_config` as JSON has it; empty for what is none."""
    return about if isinstance(about, dict) else about.to_dict() if hasattr(about, "to_dict") else {}


def _of_torchao(about: Any) -> str:
    """The kind that torchao's own configuration names, `Int8WeightOnlyConfig` or, in older ones, `int8_weight_only`."""
    inside = about.get("default", about) if isinstance(about, dict) else about
    named = inside.get("_type", "") if isinstance(inside, dict) else inside
    return str(named or "").removesuffix("Config")


def _is_there(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:  # of the package around it
        return False
