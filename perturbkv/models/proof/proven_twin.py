"""The verdict on a model's twin: the same class, tiny, with every parameter drawn and every window exceeded.

A short text does not exceed a real model's windows, and what begins at 0 or 1 may hide what it multiplies. So the proof
is made on a twin, too, which also decodes from an evicted cache. The verdict depends on the configuration and on code
alone, and is kept in the user's cache.
"""

from __future__ import annotations

import hashlib
import json
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

from perturbkv.errors import ModelError
from perturbkv.models import proof, user_cache
from perturbkv.models.attention_facts import Facts, LayerFacts, RefusedError
from perturbkv.models.interface import PLAIN_KERNELS, default_implementation, implementation
from perturbkv.models.proof import twin
from perturbkv.models.sanity import check_class

_PROVEN: dict[tuple[type, str, str], RefusedError | None] = {}
"""What this process has tried, by class, attention implementation and configuration -> its refusal."""
_CODE = Path(__file__).parents[1]
"""The folder with all code on which a verdict depends."""


def check_twin(model: Any) -> None:
    """Raise RefusedError unless the twin of a model is proven, and decodes from an evicted cache as with a mask."""
    try:
        small = twin.twin_config(model.config).to_dict()
    except ModelError as error:
        raise RefusedError("twin", f"cannot be tried when it is small ({error})") from error
    told = {key: value for key, value in small.items() if not key.startswith(("_", "transformers_"))}
    key = (type(model), implementation(model), json.dumps(told, sort_keys=True, default=str))
    if key not in _PROVEN:
        _PROVEN[key] = _refusal(model, key)
    if refusal := _PROVEN[key]:
        layer = "" if refusal.layer is None else f"in its layer {refusal.layer} "
        raise RefusedError(refusal.check, f"{layer}{refusal} (when it is small and all its parameters are drawn)")


def _refusal(model: Any, key: tuple[type, str, str]) -> RefusedError | None:
    """Return why a model's twin is refused; None where it is proven, which the user's cache remembers.

    A refusal is never stored.
    """
    kind, kernel, fields = key
    text = f"{kind.__module__}.{kind.__qualname__} {kernel} {fields}"

    def prove(place: Path) -> None:
        try_twin(model.config, kind, kernel)
        (place / "proven.txt").write_text(text, encoding="utf-8")

    as_installed = all(  # is all that the model runs, of transformers and torch
        type(module).forward.__module__.startswith(("transformers.", "torch.")) and "forward" not in vars(module)
        for module in model.modules()
    )
    try:
        if as_installed:
            code = "".join(path.read_text(encoding="utf-8") for path in sorted(_CODE.rglob("*.py")))
            versions = f"{transformers.__version__} {torch.__version__}"
            digest = hashlib.sha256("\n".join([text, versions, code]).encode()).hexdigest()[:16]
            with suppress(user_cache.NotCachedError, OSError):
                user_cache.cached_folder(f"twin-{digest}", prove)
                return None
        try_twin(model.config, kind, kernel)
    except RefusedError as refusal:
        return refusal
    return None


def try_twin(config: Any, kind: Any, kernel: str) -> Facts:
    """Return the facts of the twin of a configuration, a model of the class `kind` with an attention implementation.

    Raises RefusedError.
    """
    try:
        plain = kernel if kernel in PLAIN_KERNELS else default_implementation(kind)
        made = twin.make_twin(config, kind=kind, kernel=plain)
    except ModelError as error:
        raise RefusedError("twin", f"cannot be tried when it is small ({error})") from error
    return proof.prove(made)


@dataclass(frozen=True)
class Finding:
    """The proof's finding on a configuration's twin.

    Attributes:
        kinds: kinds of its layers; empty where it is refused.
        gate, cap, sinks: whether a layer has a gate, a soft cap, sinks.
        check: the check that refuses it; empty where it is measured.
        seen: what that check saw.
    """

    kinds: tuple[str, ...] = ()
    gate: bool = False
    cap: bool = False
    sinks: bool = False
    check: str = ""
    seen: str = ""


def describe(config: Any) -> Finding:
    """Return what the proof finds of a configuration's twin.

    Raises ModelError where transformers makes no causal language model of it.
    """
    check_class(config, config.model_type)
    kind = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]
    try:
        layers = try_twin(config, kind, default_implementation(kind)).layers
    except RefusedError as refusal:
        return Finding(check=refusal.check, seen=str(refusal))
    return Finding(
        kinds=tuple(sorted({_kind(layer) for layer in layers})),
        gate=any(layer.has_gate for layer in layers),
        cap=any(layer.cap for layer in layers),
        sinks=any(layer.sinks for layer in layers),
    )


def _kind(layer: LayerFacts) -> str:
    """Return the kind of a layer in words; what its cache holds is told where that is no keys and values alone."""
    if layer.latent:
        return f"{layer.kind} (latents)"
    return f"{layer.kind} and recurrent" if layer.attends and layer.state else layer.kind
