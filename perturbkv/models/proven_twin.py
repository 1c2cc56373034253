"""The verdict on a model's twin: the same class, tiny, with every parameter drawn and every window exceeded.

A short text does not exceed a real model's windows, and what begins at 0 or 1 may hide what it multiplies. So the proof
is made on a twin, too, which also decodes from an evicted cache. The verdict depends on the configuration and on code
alone, and is kept in the user's cache.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

from perturbkv.errors import ModelError
from perturbkv.models import interface, proof, twin, user_cache
from perturbkv.models.interface import default_implementation
from perturbkv.models.proof import Facts, LayerFacts, Refused
from perturbkv.models.sanity import check_class

Verdict = dict[str, str]
"""The check by which a twin is refused and what was `seen`; empty where it is proven."""
_FILE = "verdict.json"
_VERDICTS: dict[str, Verdict] = {}
"""What this process has tried, by configuration and class."""


def check_twin(model: Any) -> None:
    """Raise Refused unless the twin of a model is proven, and decodes from an evicted cache as with a mask."""
    try:
        small = twin.twin_config(model.config).to_dict()
    except ModelError as error:
        raise Refused("twin", f"cannot be tried when it is small ({error})") from error
    kind, kernel = type(model), proof.implementation(model)
    told = {key: value for key, value in small.items() if not key.startswith(("_", "transformers_"))}
    key = f"{kind.__module__}.{kind.__qualname__} {kernel} {json.dumps(told, sort_keys=True, default=str)}"
    if key not in _VERDICTS:
        _VERDICTS[key] = _cached(key, lambda: _verdict(model)) if _is_of_transformers(kind) else _verdict(model)
    if verdict := _VERDICTS[key]:
        raise Refused(verdict["check"], f"{verdict['seen']} (when it is small and all its parameters are drawn)")


def _is_of_transformers(kind: type) -> bool:
    """Return whether a class is of transformers; the code of others may change."""
    return kind.__module__.startswith("transformers.")


def _cached(key: str, decide: Callable[[], Verdict]) -> Verdict:
    """Return the verdict of a key from the user's cache, decided where it is not there."""
    code = "".join(Path(module.__file__ or "").read_text(encoding="utf-8") for module in (interface, proof, twin))
    versions = f"{transformers.__version__} {torch.__version__}"
    digest = hashlib.sha256("\n".join([key, versions, code]).encode()).hexdigest()[:16]
    try:
        folder = user_cache.cached_folder(
            f"twin-{digest}", lambda place: (place / _FILE).write_text(json.dumps(decide()), encoding="utf-8")
        )
    except user_cache.NotCachedError:
        return decide()
    found: Verdict = json.loads((folder / _FILE).read_text(encoding="utf-8"))
    return found


def try_twin(config: Any, kind: Any, kernel: str) -> Facts:
    """Return the facts of the twin of a configuration, a model of the class `kind` with an attention implementation.

    Raises Refused.
    """
    try:
        made = twin.make_twin(config, kind=kind)
    except ModelError as error:
        raise Refused("twin", f"cannot be tried when it is small ({error})") from error
    made.set_attn_implementation(kernel)
    facts = proof.prove(made)
    proof.prove_evicted(made, facts)
    return facts


@dataclass(frozen=True)
class Finding:
    """What the proof finds of a configuration's twin.

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
    except Refused as refusal:
        return Finding(check=refusal.check, seen=str(refusal))
    return Finding(
        kinds=tuple(sorted({_kind(layer) for layer in layers})),
        gate=any(layer.has_gate for layer in layers),
        cap=any(layer.cap for layer in layers),
        sinks=any(layer.sinks for layer in layers),
    )


def _kind(layer: LayerFacts) -> str:
    """Return the kind of a layer in words; attention with a recurrent state beside it is told as both."""
    return f"{layer.kind} and recurrent" if layer.attends and layer.state else layer.kind


def _verdict(model: Any) -> Verdict:
    """Return the verdict on a model's twin, with the model's class and attention implementation."""
    try:
        try_twin(model.config, type(model), proof.implementation(model))
    except Refused as refusal:
        layer = "" if refusal.layer is None else f"in its layer {refusal.layer} "
        return {"check": refusal.check, "seen": f"{layer}{refusal}"}
    return {}
