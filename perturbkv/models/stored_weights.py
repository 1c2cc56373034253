"""Storage types of a model's weights, and their files. No torch here."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import safe_open

from perturbkv.errors import ModelError
from perturbkv.models import quantisers
from perturbkv.models.gguf import StoredTensor
from perturbkv.models.sources import Source, explain_errors
from perturbkv.user_files import FileKind

_FLOAT = re.compile(r"B?F\d")
_INDEX = FileKind("an index of safetensors", ModelError)
_FILE = FileKind("weights (safetensors)", ModelError, max_bytes=2**63)
_QUANTISED_DETAIL = "W_O read as what o_proj multiplies by, dequantised"
_NAMES = {"F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16"}
"""Floating-point storage type, in GGUF and safetensors -> torch's name."""


@dataclass(frozen=True)
class WeightStorage:
    """The storage of a model's weights.

    Attributes:
        kind: the type of most of them: a dtype, a GGUF type such as Q4_1, or a quantisation method.
        detail: description of all types, where there are several.
        quantised: whether they are rounded to fewer levels than a floating-point type has.
        nbytes: bytes of weights that stay as they are stored during computation; 0 where they are converted to floats,
            or where the size is not known before they are downloaded.
    """

    kind: str
    detail: str = ""
    quantised: bool = False
    nbytes: int = 0

    def as_run(self, dtype: str) -> str:
        """Return storage type and dtype of a run, such as `Q4_1 → float32`; a single word if they are equal."""
        return dtype if self.kind == dtype else f"{self.kind} → {dtype}"


def gguf_storage(tensors: Sequence[StoredTensor]) -> WeightStorage:
    """Return the storage of a GGUF file's weights; `kind` is the most frequent type outside the embeddings.

    Its detail is, for example, `Q4_1 matrices, Q8_0 embeddings, F32 norms`.
    """
    parts: dict[str, Counter[str]] = {part: Counter() for part in ("matrices", "embeddings", "norms")}
    for tensor in tensors:
        parts[tensor.part][tensor.type_name] += tensor.values
    named = [f"{'/'.join(kind for kind, _ in kinds.most_common())} {part}" for part, kinds in parts.items() if kinds]
    kind, _ = (parts["matrices"] or sum(parts.values(), Counter())).most_common(1)[0]
    return WeightStorage(_NAMES.get(kind, kind), ", ".join(named), kind not in _NAMES)


def safetensors_storage(source: Source | None, config: Any) -> WeightStorage:
    """Return the storage of weights from the configuration's `quantization_config`, else from the files' headers.

    For a model of the hub, and for one without a source, the configuration's dtype is used. Raises ModelError for
    unreadable files, and for weights of no floating-point type that are not quantised.
    """
    local = files(source.path) if source is not None and not source.hub_id else []
    if quantisation := getattr(config, "quantization_config", None):
        packed = quantisers.quant_method(quantisation) in quantisers.PACKAGES  # the others may be read as floats
        size = sum(file.stat().st_size for file in local) if packed else 0
        return WeightStorage(quantisers.describe(quantisation), _QUANTISED_DETAIL, quantised=True, nbytes=size)
    kinds = _kinds(source) if source is not None and local else Counter()
    if kinds:
        return WeightStorage(kinds.most_common(1)[0][0], ", ".join(kinds) if len(kinds) > 1 else "")
    return WeightStorage(str(getattr(config, "dtype", None) or "unknown").removeprefix("torch."))


def shapes(source: Source) -> dict[str, tuple[int, ...]]:
    """Return weight -> shape, from the headers of a source's safetensors; empty for a GGUF file."""
    weight_shapes: dict[str, tuple[int, ...]] = {}
    for file in [] if source.gguf_file else files(source.path):
        with explain_errors(source, "the weights"), safe_open(file, framework="numpy") as tensors:
            weight_shapes |= {name: tuple(tensors.get_slice(name).get_shape()) for name in tensors.keys()}
    return weight_shapes


def _kinds(source: Source) -> Counter[str]:
    """Return storage type -> number of tensors in a source's safetensors. Raises ModelError for an integer type."""
    kinds: Counter[str] = Counter()
    for file in files(source.path):
        with explain_errors(source, "the weights"), safe_open(file, framework="numpy") as tensors:
            types = {name: tensors.get_slice(name).get_dtype() for name in tensors.keys()}
        if wrong := next((name for name, kind in types.items() if not _FLOAT.match(kind)), ""):
            raise ModelError(
                f"model '{source.name}' is not whole: '{wrong}' in {file.name} is of {types[wrong]}, no floating-point "
                "type; get its files anew, or a configuration that says how they are quantised"
            )
        kinds.update(types.values())
    return Counter({_NAMES.get(kind, kind): count for kind, count in kinds.items()})


def files(folder: Path) -> list[Path]:
    """Return the safetensors files that transformers reads: the single file, else the index's files, else all present.

    Raises ModelError for an invalid index, and for anything but a regular file.
    """
    whole, index = folder / "model.safetensors", folder / "model.safetensors.index.json"
    if whole.is_file():
        return [whole]
    paths = [folder / name for name in index_files(index)] if index.exists() else list(folder.glob("*.safetensors"))
    for file in sorted(paths):
        _FILE.check(file)
    return sorted(paths)


def index_files(index: Path) -> set[str]:
    """Return the file names in an index of safetensors. Raises ModelError for an invalid index."""
    document = _INDEX.read_json(index)
    names = document.get("weight_map") if isinstance(document, dict) else None
    if not isinstance(names, dict) or not names or not all(isinstance(name, str) for name in names.values()):
        raise _INDEX.refusal(index, "one without a weight_map")
    return set(names.values())
