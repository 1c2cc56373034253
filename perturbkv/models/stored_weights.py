"""In which types a model's weights are stored, and what a run makes of them. No torch here."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import safe_open

from perturbkv.errors import ModelError
from perturbkv.models import gguf, quantisers
from perturbkv.models.gguf import StoredTensor
from perturbkv.models.sources import Source, explained
from perturbkv.user_files import FileKind

_FLOAT = re.compile(r"B?F\d")
_INDEX = FileKind("an index of safetensors", ModelError)
_FILE = FileKind("weights (safetensors)", ModelError, most=2**63)
_READ = "W_O read as what o_proj multiplies by, dequantised"
_NAMES = {"F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16"}


@dataclass(frozen=True)
class Stored:
    """How weights are stored.

    Attributes:
        kind: the type of most of them: a dtype, a GGUF type such as Q4_1, or a way to quantise.
        detail: more in words, where there are several types.
        quantised: True where they are rounded to fewer levels than a floating-point type has.
        nbytes: what they take where they are computed with as they are stored; 0 where they are computed with as
            floats, or where that is not known before they are here.
    """

    kind: str
    detail: str = ""
    quantised: bool = False
    nbytes: int = 0

    def as_run(self, dtype: str) -> str:
        """Storage type → the type that a run computes with; one word where they are the same."""
        return dtype if self.kind == dtype else f"{self.kind} → {dtype}"


def of_gguf(tensors: Sequence[StoredTensor]) -> Stored:
    """As a GGUF file's header says."""
    kind, detail = gguf.storage(tensors)
    return Stored(_NAMES.get(kind, kind), detail, gguf.is_quantised(kind))


def of_safetensors(source: Source | None, config: Any) -> Stored:
    """As the configuration's `quantization_config` says, or the files' headers.

    Of a hub's model, and of one without a source, the configuration's word on its dtype is taken. Raises ModelError for
    files that cannot be read, and for weights of no floating-point type that are not quantised.
    """
    here = files(source.path) if source is not None and not source.hub_id else []
    if about := getattr(config, "quantization_config", None):
        packed = quantisers.method(about) in quantisers.PACKAGES  # the others may be read as floats
        size = sum(file.stat().st_size for file in here) if packed else 0
        return Stored(quantisers.kind(about), _READ, quantised=True, nbytes=size)
    kinds = _kinds(source) if source is not None and here else Counter()
    if kinds:
        return Stored(kinds.most_common(1)[0][0], ", ".join(kinds) if len(kinds) > 1 else "")
    return Stored(str(getattr(config, "dtype", None) or "unknown").removeprefix("torch."))


def shapes(source: Source) -> dict[str, tuple[int, ...]]:
    """Weight -> shape, as the headers of its safetensors say; nothing of a GGUF file."""
    found: dict[str, tuple[int, ...]] = {}
    for file in [] if source.gguf_file else files(source.path):
        with explained(source, "the weights"), safe_open(file, framework="numpy") as tensors:
            found |= {name: tuple(tensors.get_slice(name).get_shape()) for name in tensors.keys()}
    return found


def _kinds(source: Source) -> Counter[str]:
    """How many tensors of each type a folder's safetensors hold."""
    kinds: Counter[str] = Counter()
    for file in files(source.path):
        with explained(source, "the weights"), safe_open(file, framework="numpy") as tensors:
            found = {name: tensors.get_slice(name).get_dtype() for name in tensors.keys()}
        if wrong := next((name for name, kind in found.items() if not _FLOAT.match(kind)), ""):
            msg = (
                f"model '{source.name}' is not whole: '{wrong}' in {file.name} is of {found[wrong]}, no floating-point "
                "type; get its files anew, or a configuration that says how they are quantised"
            )
            raise ModelError(msg)
        kinds.update(found.values())
    return Counter({_NAMES.get(kind, kind): count for kind, count in kinds.items()})


def files(folder: Path) -> list[Path]:
    """The safetensors that transformers reads: the whole, else the parts that the index names; else whatever is there.

    Raises ModelError for an index that is none, and for what is no regular file.
    """
    whole, index = folder / "model.safetensors", folder / "model.safetensors.index.json"
    if whole.is_file():
        return [whole]
    found = [folder / name for name in parts(index)] if index.exists() else list(folder.glob("*.safetensors"))
    for file in sorted(found):
        _FILE.check(file)
    return sorted(found)


def parts(index: Path) -> set[str]:
    """The names that an index holds. Raises ModelError."""
    held = _INDEX.read_json(index)
    names = held.get("weight_map") if isinstance(held, dict) else None
    if not isinstance(names, dict) or not names or not all(isinstance(name, str) for name in names.values()):
        raise _INDEX.refusal(index, "one without a weight_map")
    return set(names.values())
