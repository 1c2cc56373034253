"""The verdict on a model's twin: the same class, tiny, with every parameter drawn and every window exceeded.

A short text does not exceed a real model's windows, and what begins at 0 or 1 may hide what it multiplies. So the proof
is made on a twin, too, which also decodes from an evicted cache. The verdict depends on the configuration and on code
alone, and is kept in the user's cache.
"""

from __future__ import annotations

import functools
import hashlib
import json
from pathlib import Path
from typing import Any

import torch
import transformers

from perturbkv.errors import ModelError
from perturbkv.models import interface, proof, twin, user_cache
from perturbkv.models.proof import Refused

_VERDICT = "verdict.json"


def check_twin(model: Any) -> None:
    """Raise Refused unless the twin of a model is proven, and decodes from an evicted cache as with a mask."""
    try:
        small = twin.twin_config(model.config)
    except ModelError as error:
        raise Refused("twin", f"cannot be tried when it is small ({error})") from error
    kernel = proof.implementation(model)
    refusal = _cached_refusal(json.dumps(_fields(small), sort_keys=True, default=str), type(model), kernel)
    if refusal:
        raise Refused(refusal["check"], f"{refusal['seen']} (when it is small and all its parameters are drawn)")


def _fields(config: Any) -> dict[str, Any]:
    """Return what a configuration says but for names and versions."""
    return {key: value for key, value in config.to_dict().items() if not key.startswith(("_", "transformers_"))}


@functools.cache
def _cached_refusal(fields: str, kind: type, kernel: str) -> dict[str, str]:
    """Return the check and the words by which a twin is refused, empty where it is proven, from the user's cache.

    A class of somebody's own, whose code may change, is tried in every process.
    """
    if not kind.__module__.startswith("transformers."):
        return _refusal(fields, kind, kernel)
    code = "".join(Path(module.__file__ or "").read_text() for module in (interface, proof, twin))
    versions = f"{transformers.__version__} {torch.__version__} {kind.__module__}.{kind.__qualname__} {kernel}"
    digest = hashlib.sha256(f"{versions}\n{fields}\n{code}".encode()).hexdigest()[:16]
    try:
        folder = user_cache.cached_folder(
            f"twin-{digest}",
            lambda place: (place / _VERDICT).write_text(json.dumps(_refusal(fields, kind, kernel))),
        )
        found: dict[str, str] = json.loads((folder / _VERDICT).read_text())
    except user_cache.NotCachedError:
        return _refusal(fields, kind, kernel)
    return found


def _refusal(fields: str, kind: type, kernel: str) -> dict[str, str]:
    """Return the check and the words by which the twin of small fields is refused; empty where it is proven."""
    try:
        made = twin.begin_twin(kind, json.loads(fields), kernel)
        proof.prove_evicted(made, proof.prove(made))
    except ModelError as error:
        return {"check": "twin", "seen": f"cannot be tried ({error})"}
    except Refused as refusal:
        where = "" if refusal.layer is None else f"has a layer that {refusal}"
        return {"check": refusal.check, "seen": where or str(refusal)}
    return {}
