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
from perturbkv.models import user_cache
from perturbkv.models.sanity import check_config, load_whole_model
from perturbkv.models.sources import Source, explain_errors

_MAGIC = b"GGUF"
_SIZES = {0: 1, 1: 1, 2: 2, 3: 2, 4: 4, 5: 4, 6: 4, 7: 1, 10: 8, 11: 8, 12: 8}
"""Type of a metadata value -> its size in bytes; strings and arrays have no fixed size."""
_UINT32, _STRING, _ARRAY, _ALIGNMENT = 4, 8, 9, "general.alignment"
_VERSIONS = (2, 3)


@dataclass(frozen=True)
class StoredTensor:
    """A tensor as a file's header describes it.

    Attributes:
        name: its name in the file.
        values: number of its values.
        kind: code of its storage type.
        offset: its first byte, counted from the beginning of the tensor data.
    """

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
        """The end of the tensor's data: the first byte after it, counted like `offset`."""
        from gguf import GGML_QUANT_SIZES, GGMLQuantizationType

        values, size = GGML_QUANT_SIZES[GGMLQuantizationType(self.kind)]
        return self.offset + self.values // int(values) * int(size)

    @property
    def part(self) -> str:
        """The part of the model: `embeddings`, `matrices`, or `norms`, which include biases."""
        if re.match(r"token_embd|output\.weight", self.name):
            return "embeddings"
        return "norms" if "norm" in self.name or self.name.endswith("bias") else "matrices"


class _TruncatedError(Exception):
    """A header that extends beyond the end of its file."""


class _Reader:
    """A parser of a file's header, at byte `at`. Its methods raise _TruncatedError where the file ends too early."""

    def __init__(self, data: mmap.mmap) -> None:
        self.data, self.at, self.alignment = data, 0, 32

    def skip(self, size: int) -> None:
        """Advance by `size` bytes."""
        self.at += size
        if self.at > len(self.data):
            raise _TruncatedError

    def number(self, kind: str) -> int:
        """Read an integer of the `struct` format character `kind`."""
        self.skip(struct.calcsize(kind))
        (value,) = struct.unpack_from(f"<{kind}", self.data, self.at - struct.calcsize(kind))
        return int(value)

    def text(self) -> str:
        """Read a length-prefixed string."""
        size = self.number("Q")
        self.skip(size)
        return self.data[self.at - size : self.at].decode(errors="replace")

    def skip_value(self, kind: int) -> None:
        """Skip a metadata value of the type code `kind`."""
        if kind == _STRING:
            self.skip(self.number("Q"))
        elif kind == _ARRAY:
            item_kind, count = self.number("I"), self.number("Q")
            if item_kind in _SIZES:
                self.skip(_SIZES[item_kind] * count)
            elif item_kind == _STRING:
                for _ in range(count):
                    self.skip_value(item_kind)
            else:
                raise _TruncatedError  # arrays in arrays: no file has them, a damaged one would nest them without end
        elif kind in _SIZES:
            self.skip(_SIZES[kind])
        else:
            raise _TruncatedError

    def tensors(self) -> list[StoredTensor]:
        """Read the descriptions of all tensors, after the metadata, of which the tensor data's alignment is stored."""
        self.at = len(_MAGIC) + 4  # magic and version
        count, pairs = self.number("Q"), self.number("Q")
        for _ in range(pairs):
            name, kind = self.text(), self.number("I")
            self.skip_value(kind)
            if name == _ALIGNMENT and kind == _UINT32:
                (self.alignment,) = struct.unpack_from("<I", self.data, self.at - 4)
                if self.alignment == 0:
                    raise _TruncatedError
        tensors = []
        for _ in range(count):
            name = self.text()
            shape = [self.number("Q") for _ in range(self.number("I"))]
            tensors.append(StoredTensor(name, math.prod(shape), self.number("I"), self.number("Q")))
        return tensors


def read_header(path: Path) -> list[StoredTensor]:
    """Return the tensors of a GGUF file's header. Raises ModelError for a file that is not GGUF or is truncated."""
    size = path.stat().st_size
    with path.open("rb") as stream:
        if stream.read(len(_MAGIC)) != _MAGIC:
            raise ModelError(f"expected a GGUF file, got {path}, which does not begin with 'GGUF'")
        with mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ) as data:
            version = int.from_bytes(data[len(_MAGIC) : len(_MAGIC) + 4], "little")
            if version not in _VERSIONS:
                raise ModelError(
                    f"expected a GGUF file of version {' or '.join(map(str, _VERSIONS))}, got {path} of version "
                    f"{version}"
                )
            reader = _Reader(data)
            try:
                tensors = reader.tensors()
            except _TruncatedError:
                raise ModelError(
                    f"{path} is cut or damaged: its header does not end within its {size:,} bytes"
                ) from None
    _check_tensors(path, tensors, -(-reader.at // reader.alignment) * reader.alignment, size)
    return tensors


def _check_tensors(path: Path, tensors: Sequence[StoredTensor], start: int, size: int) -> None:
    """Raise ModelError for a tensor of unknown type, or a tensor that ends beyond the file's `size`."""
    from gguf import GGMLQuantizationType

    known = {int(kind) for kind in GGMLQuantizationType}
    for tensor in tensors:
        if tensor.kind not in known:
            raise ModelError(
                f"{path} is damaged, or too new: tensor '{tensor.name}' is of type {tensor.kind}, which is not known"
            )
        if start + tensor.end > size:
            raise ModelError(f"{path} is cut: tensor '{tensor.name}' ends at byte {start + tensor.end:,} of {size:,}")


def check_all_used(tensors: Sequence[StoredTensor], model: Any, name: str) -> None:
    """Raise ModelError if a GGUF file holds tensors that the model lacks: transformers drops them silently."""
    expected = len({tensor.data_ptr() for tensor in model.state_dict().values()})  # tied weights count once
    known = re.compile(r"(token_embd|output_norm|output)\.weight|blk\.(\d+)\..*")
    matches = {tensor.name: known.fullmatch(tensor.name) for tensor in tensors}
    layers = len(model.model.layers)
    unknown = [tensor for tensor, match in matches.items() if match is None or int(match[2] or 0) >= layers]
    if unknown or len(tensors) != expected:
        which = f", not '{unknown[0]}'" if unknown else ""
        raise ModelError(
            f"model '{name}' is not whole: of the {len(tensors)} tensors in its GGUF file transformers would use "
            f"{expected}{which}; use the model's safetensors"
        )


CONVERTER = 1
"""Version of the conversion, part of a cache entry's name; raise it with every change of an entry's content."""
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


def convert(source: Source, tensors: Sequence[StoredTensor], digest: bytes) -> Path:
    """Return the cache folder with a GGUF file's model as safetensors, after converting the file if it is not cached.

    `tensors` are those of the file's header, `digest` is the file's SHA-256. Raises NotCachedError where it cannot be
    cached, ModelError for an unsupported family and for an incomplete or unreadable file.
    """

    def fill(folder: Path) -> None:
        cache = user_cache.cache_folder()
        _log.info("converting %s to safetensors, once (about 20 s for 100 MB), in %s", source.gguf_file, cache)
        _convert(source, tensors, folder)

    return user_cache.cached_folder(entry_name(digest), fill)


def entry_name(digest: bytes) -> str:
    """Return the cache entry's name for a GGUF file's SHA-256, this converter and the installed library versions."""
    versions = "-".join(importlib.metadata.version(library) for library in _LIBRARIES)
    maker = hashlib.sha256(f"{CONVERTER}-{versions}".encode()).hexdigest()
    return f"gguf-{digest.hex()[:32]}-{maker[:8]}"


def read_tokenizer(folder: Path) -> Any:
    """Return the tokenizer of a converted GGUF file."""
    settings = json.loads((folder / _SETTINGS).read_text(encoding="utf-8"))
    return PreTrainedTokenizerFast(tokenizer_object=Tokenizer.from_file(str(folder / _TOKENIZER)), **settings)


def _convert(source: Source, tensors: Sequence[StoredTensor], folder: Path) -> None:
    """Write a GGUF file's tokenizer, configurations and float32 weights to a folder.

    Raises NotCachedError if reading it back gives a different tokenizer.
    """
    with explain_errors(source, "the GGUF file"):
        config = AutoConfig.from_pretrained(source.location, **source.arguments)
    check_config(config, source.name)
    with explain_errors(source, "the tokenizer"):
        tokenizer = AutoTokenizer.from_pretrained(source.location, **source.arguments)
    model = load_whole_model(source, config=config, dtype=torch.float32)
    check_all_used(tensors, model, source.name)
    with user_cache.explain_write_errors():
        (folder / _TOKENIZER).write_text(tokenizer.backend_tokenizer.to_str(), encoding="utf-8")
        (folder / _SETTINGS).write_text(json.dumps(_tokenizer_settings(tokenizer)), encoding="utf-8")
        if _tokenizer_state(read_tokenizer(folder)) != _tokenizer_state(tokenizer):
            raise user_cache.NotCachedError(f"a {type(tokenizer).__name__} does not come back as it was")
        config.save_pretrained(folder)
        model.generation_config.save_pretrained(folder)
        _write_weights(dict(model.state_dict()), folder / _WEIGHTS)


def _tokenizer_state(tokenizer: Any) -> tuple[Any, ...]:
    """Return the parts of a tokenizer on which ids and texts depend, for a comparison."""
    return _tokenizer_settings(tokenizer), tokenizer.backend_tokenizer.to_str(), sorted(tokenizer.all_special_ids)


def _tokenizer_settings(tokenizer: Any) -> dict[str, Any]:
    """Return a tokenizer's settings outside its backend's JSON: `_KEPT_SETTINGS` and special tokens."""
    kept = {name: getattr(tokenizer, name) for name in _KEPT_SETTINGS if hasattr(tokenizer, name)}
    return {**kept, **{name: str(token) for name, token in tokenizer.special_tokens_map.items()}}


def _write_weights(state: dict[str, torch.Tensor], path: Path) -> None:
    """Write a state dict as safetensors aligned for memory mapping; tied tensors only under their first name."""
    first = {tensor.data_ptr(): name for name, tensor in reversed(state.items())}
    tensors = {name: state[name].contiguous() for name in first.values()}
    metadata = {"format": "pt", "pad": ""}
    _save(tensors, path, metadata)
    with path.open("rb") as stream:
        start = 8 + int.from_bytes(stream.read(8), "little")  # a safetensors file: header's length, header, tensors
    _save(tensors, path, {**metadata, "pad": " " * (-start % ALIGNMENT)})


def _save(tensors: dict[str, torch.Tensor], path: Path, metadata: dict[str, str]) -> None:
    """Write a safetensors file. Raises OSError where it cannot be written."""
    try:
        save_file(tensors, path, metadata)
    except SafetensorError as error:  # a full disk is no OSError there
        raise OSError(str(error)) from error
