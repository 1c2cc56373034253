"""GGUF files: their header, the check that they are complete, and their conversion to safetensors in the user's cache.

Format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md; only the header is parsed here. Parsing the weights
takes 10 to 30 s, loading the converted copy takes one. A cache entry holds the weights dequantised to float32, the
configurations of model and generation, and the tokenizer: its backend's JSON and its settings. It is read without
AutoTokenizer, which would take the JSON for another family's tokenizer and give other ids.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
import logging
import math
import mmap
import re
import struct
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from tokenizers import Tokenizer
from transformers import AutoConfig, AutoTokenizer, PreTrainedTokenizerFast

from perturbkv.errors import ModelError
from perturbkv.models import sanity, user_cache
from perturbkv.models.families import check_family, check_layers
from perturbkv.models.sanity import load_whole_model
from perturbkv.models.sources import Source, explain_errors

_MAGIC = b"GGUF"
_SIZES = {0: 1, 1: 1, 2: 2, 3: 2, 4: 4, 5: 4, 6: 4, 7: 1, 10: 8, 11: 8, 12: 8}
"""Type of a metadata value -> its size in bytes; strings and arrays have no fixed size."""
_UINT32, _STRING, _ARRAY, _ALIGNMENT = 4, 8, 9, "general.alignment"
_VERSIONS = (2, 3)
_FLOATS = ("F32", "F16", "BF16", "F64")


@dataclass(frozen=True)
class StoredTensor:
    """A tensor as the header describes it; `offset` is in bytes from the beginning of the tensor data."""

    name: str
    values: int
    kind: int
    offset: int

    @property
    def type_name(self) -> str:
        """Name of the storage type, for example Q4_1."""
        from gguf import GGMLQuantizationType

        return str(GGMLQuantizationType(self.kind).name)

    @property
    def end(self) -> int:
        """The first byte after the tensor, from the beginning of the tensor data."""
        from gguf import GGML_QUANT_SIZES, GGMLQuantizationType

        values, size = GGML_QUANT_SIZES[GGMLQuantizationType(self.kind)]
        return self.offset + self.values // int(values) * int(size)

    @property
    def part(self) -> str:
        """matrices, embeddings or norms (biases count as norms: one row)."""
        if re.match(r"token_embd|output\.weight", self.name):
            return "embeddings"
        return "norms" if "norm" in self.name or self.name.endswith("bias") else "matrices"


class _CutError(Exception):
    """A header that extends beyond the end of its file."""


class _Reader:
    """A parser of a file's header. Raises _CutError where it would read beyond the file."""

    def __init__(self, data: mmap.mmap) -> None:
        self.data, self.at, self.alignment = data, 0, 32

    def skip(self, size: int) -> None:
        self.at += size
        if self.at > len(self.data):
            raise _CutError

    def number(self, kind: str) -> int:
        self.skip(struct.calcsize(kind))
        (value,) = struct.unpack_from(f"<{kind}", self.data, self.at - struct.calcsize(kind))
        return int(value)

    def text(self) -> str:
        size = self.number("Q")
        self.skip(size)
        return self.data[self.at - size : self.at].decode(errors="replace")

    def skip_value(self, kind: int) -> None:
        if kind == _STRING:
            self.skip(self.number("Q"))
        elif kind == _ARRAY:
            inside, count = self.number("I"), self.number("Q")
            if inside in _SIZES:
                self.skip(_SIZES[inside] * count)
            elif inside == _STRING:
                for _ in range(count):
                    self.skip_value(inside)
            else:
                raise _CutError  # arrays in arrays: no file has them, and a damaged one would nest them without end
        elif kind in _SIZES:
            self.skip(_SIZES[kind])
        else:
            raise _CutError

    def skip_pair(self) -> None:
        name, kind = self.text(), self.number("I")
        self.skip_value(kind)
        if name == _ALIGNMENT and kind == _UINT32:
            (self.alignment,) = struct.unpack_from("<I", self.data, self.at - 4)
            if self.alignment == 0:
                raise _CutError

    def tensor(self) -> StoredTensor:
        name = self.text()
        shape = [self.number("Q") for _ in range(self.number("I"))]
        return StoredTensor(name, math.prod(shape), self.number("I"), self.number("Q"))


def read_header(path: Path) -> list[StoredTensor]:
    """Return the tensors of a GGUF file. Raises ModelError for another kind of file, or a truncated one."""
    size = path.stat().st_size
    with path.open("rb") as stream:
        if stream.read(len(_MAGIC)) != _MAGIC:
            msg = f"expected a GGUF file, got {path}, which does not begin with 'GGUF'"
            raise ModelError(msg)
        with mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ) as data:
            _check_version(path, data)
            try:
                tensors, start = _read_tensors(_Reader(data))
            except _CutError:
                msg = f"{path} is cut or damaged: its header does not end within its {size:,} bytes"
                raise ModelError(msg) from None
    _check_tensors(path, tensors, start, size)
    return tensors


def _read_tensors(reader: _Reader) -> tuple[list[StoredTensor], int]:
    """Return all tensors, and the byte offset of the tensor data."""
    reader.at = len(_MAGIC) + 4  # magic and version
    count, pairs = reader.number("Q"), reader.number("Q")
    for _ in range(pairs):
        reader.skip_pair()
    tensors = [reader.tensor() for _ in range(count)]
    return tensors, -(-reader.at // reader.alignment) * reader.alignment


def _check_version(path: Path, data: mmap.mmap) -> None:
    """Raise ModelError for a version with an unknown header layout, and for the other byte order."""
    version = int.from_bytes(data[len(_MAGIC) : len(_MAGIC) + 4], "little")
    if version not in _VERSIONS:
        msg = f"expected a GGUF file of version {' or '.join(map(str, _VERSIONS))}, got {path} of version {version}"
        raise ModelError(msg)


def _check_tensors(path: Path, tensors: Sequence[StoredTensor], start: int, size: int) -> None:
    """Raise ModelError for a tensor of unknown type, and for a truncated one."""
    from gguf import GGMLQuantizationType

    known = {int(kind) for kind in GGMLQuantizationType}
    for tensor in tensors:
        if tensor.kind not in known:
            msg = f"{path} is damaged, or too new: tensor '{tensor.name}' is of type {tensor.kind}, which is not known"
            raise ModelError(msg)
        if start + tensor.end > size:
            msg = f"{path} is cut: tensor '{tensor.name}' ends at byte {start + tensor.end:,} of {size:,}"
            raise ModelError(msg)


def check_complete(tensors: Sequence[StoredTensor], layers: int, expected: int, name: str) -> None:
    """Raise ModelError where the file holds tensors that the model does not use: transformers drops them silently.

    `expected` is how many the model has, tied ones counted once.
    """
    places = re.compile(r"(token_embd|output_norm|output)\.weight|blk\.(\d+)\..*")
    matches = {tensor.name: places.fullmatch(tensor.name) for tensor in tensors}
    extra = [tensor for tensor, place in matches.items() if place is None or int(place[2] or 0) >= layers]
    if extra or len(tensors) != expected:
        which = f", not '{extra[0]}'" if extra else ""
        msg = (
            f"model '{name}' is not whole: of the {len(tensors)} tensors in its GGUF file transformers would use "
            f"{expected}{which}; use the model's safetensors"
        )
        raise ModelError(msg)


def storage(tensors: Sequence[StoredTensor]) -> tuple[str, str]:
    """Return the storage type of most weights outside the embeddings, and a description of all.

    For example `Q4_1` and `Q4_1 matrices, Q8_0 embeddings, F32 norms`.
    """
    parts: dict[str, Counter[str]] = {part: Counter() for part in ("matrices", "embeddings", "norms")}
    for tensor in tensors:
        parts[tensor.part][tensor.type_name] += tensor.values
    named = [f"{'/'.join(kind for kind, _ in kinds.most_common())} {part}" for part, kinds in parts.items() if kinds]
    main = parts["matrices"] or sum(parts.values(), Counter())
    return main.most_common(1)[0][0], ", ".join(named)


def is_quantised(kind: str) -> bool:
    """Return whether a storage type rounds weights to fewer levels than floating-point numbers have."""
    return kind not in _FLOATS


CONVERTER = 1
"""Version of the conversion, part of an entry's name; raise it with every change of an entry's content."""
LARGEST = 2**30
"""Bytes of the largest GGUF file that is converted: float32 takes up to eight times as many."""
ALIGNMENT = 64
"""Alignment of the weights in the file, in bytes, as of torch's own allocations."""
_WEIGHTS, _TOKENIZER, _SETTINGS = "model.safetensors", "tokenizer.json", "tokenizer_settings.json"
_LIBRARIES = ("transformers", "gguf", "tokenizers")
_KEPT_SETTINGS = (
    "chat_template",
    "model_max_length",
    "padding_side",
    "truncation_side",
    "clean_up_tokenization_spaces",
    "split_special_tokens",
    "add_prefix_space",
    "add_bos_token",
    "add_eos_token",
)
_log = logging.getLogger(__name__)


def convert(gguf: Source, tensors: Sequence[StoredTensor], digest: bytes) -> Path:
    """Return the folder of a GGUF file converted to safetensors, and convert it where the cache has none.

    `tensors` are those of the file's header, `digest` is the file's SHA-256. Raises NotCachedError where it cannot be
    cached, ModelError for an unsupported family and for an incomplete or unreadable file.
    """

    def fill(folder: Path) -> None:
        cache = user_cache.cache_folder()
        _log.info("converting %s to safetensors, once (about 20 s for 100 MB), in %s", gguf.gguf_file, cache)
        _convert(gguf, tensors, folder)

    return user_cache.cached_folder(entry_name(digest), fill)


def entry_name(digest: bytes) -> str:
    """Return the cache entry's name, from the file, the converter and the versions of the libraries in use."""
    versions = "-".join(importlib.metadata.version(library) for library in _LIBRARIES)
    maker = hashlib.sha256(f"{CONVERTER}-{versions}".encode()).hexdigest()
    return f"gguf-{digest.hex()[:32]}-{maker[:8]}"


def read_tokenizer(folder: Path) -> Any:
    """Return the tokenizer of a converted GGUF file."""
    settings = json.loads((folder / _SETTINGS).read_text(encoding="utf-8"))
    return PreTrainedTokenizerFast(tokenizer_object=Tokenizer.from_file(str(folder / _TOKENIZER)), **settings)


def _convert(gguf: Source, tensors: Sequence[StoredTensor], folder: Path) -> None:
    with explain_errors(gguf, "the GGUF file"):
        config = AutoConfig.from_pretrained(gguf.location, **gguf.arguments)
    check_family(config, gguf.name)
    sanity.check(config, gguf.name)
    check_layers(config, gguf.name)
    with explain_errors(gguf, "the tokenizer"):
        tokenizer = AutoTokenizer.from_pretrained(gguf.location, **gguf.arguments)
    model = load_whole_model(gguf, config=config, dtype=torch.float32)
    check_used(tensors, model, gguf.name)
    with user_cache.explain_write_errors():
        _write_tokenizer(tokenizer, folder)
        config.save_pretrained(folder)
        model.generation_config.save_pretrained(folder)
        _write_weights(dict(model.state_dict()), folder / _WEIGHTS)


def check_used(tensors: Sequence[StoredTensor], model: Any, name: str) -> None:
    """Raise ModelError where a GGUF file holds tensors that its model does not."""
    addresses = {tensor.data_ptr() for tensor in model.state_dict().values()}
    check_complete(tensors, len(model.model.layers), len(addresses), name)


def _write_tokenizer(tokenizer: Any, folder: Path) -> None:
    """Write the tokenizer. Raises NotCachedError where reading it gives another one."""
    (folder / _TOKENIZER).write_text(tokenizer.backend_tokenizer.to_str(), encoding="utf-8")
    (folder / _SETTINGS).write_text(json.dumps(_settings(tokenizer)), encoding="utf-8")
    if _state(read_tokenizer(folder)) != _state(tokenizer):
        msg = f"a {type(tokenizer).__name__} does not come back as it was"
        raise user_cache.NotCachedError(msg)


def _state(tokenizer: Any) -> tuple[Any, ...]:
    """Return everything that ids and texts depend on."""
    return _settings(tokenizer), tokenizer.backend_tokenizer.to_str(), sorted(tokenizer.all_special_ids)


def _settings(tokenizer: Any) -> dict[str, Any]:
    """Return the settings of a tokenizer outside its backend."""
    kept = {name: getattr(tokenizer, name) for name in _KEPT_SETTINGS if hasattr(tokenizer, name)}
    return {**kept, **{name: str(token) for name, token in tokenizer.special_tokens_map.items()}}


def _write_weights(state: dict[str, torch.Tensor], path: Path) -> None:
    """Write each tensor once, tied ones under their first name, aligned for memory mapping."""
    first = {tensor.data_ptr(): name for name, tensor in reversed(state.items())}
    tensors = {name: state[name].contiguous() for name in first.values()}
    metadata = {"format": "pt", "pad": ""}
    _save(tensors, path, metadata)
    with path.open("rb") as stream:
        start = 8 + int.from_bytes(stream.read(8), "little")  # a safetensors file: header's length, header, tensors
    _save(tensors, path, {**metadata, "pad": " " * (-start % ALIGNMENT)})


def _save(tensors: dict[str, torch.Tensor], path: Path, metadata: dict[str, str]) -> None:
    try:
        save_file(tensors, path, metadata)
    except SafetensorError as error:  # a full disk is no OSError there
        raise OSError(str(error)) from error
