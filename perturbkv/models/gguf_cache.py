"""A GGUF file as safetensors in the user's cache: parsing one takes 10 to 30 s, loading what is kept takes one.

An entry holds the weights dequantised to float32, the configurations of model and generation, and the tokenizer: its
backend's own JSON and the settings around it. It is read back without AutoTokenizer, which would take the JSON for
another family's tokenizer and give other ids.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from tokenizers import Tokenizer
from transformers import AutoConfig, AutoTokenizer, PreTrainedTokenizerFast

from perturbkv.models import sanity, user_cache
from perturbkv.models.families import check_family, check_layers
from perturbkv.models.gguf import StoredTensor, check_complete
from perturbkv.models.sources import Source, explained
from perturbkv.models.wholeness import whole_model

CONVERTER = 1
"""To be raised with every change of what an entry holds; it is part of an entry's name."""
LARGEST = 2**30
"""Bytes of the largest GGUF file that is converted: float32 takes up to eight times as many."""
ALIGNMENT = 64
"""Bytes that the weights' place in the file is a multiple of, as torch's own allocations are."""
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


def converted(gguf: Source, tensors: Sequence[StoredTensor], digest: bytes) -> Path:
    """The folder that holds a GGUF file as safetensors, made now where the cache has none.

    `tensors` are what the file's header tells of, `digest` is the file's SHA-256.

    Raises NotKeptError where it cannot be kept, ModelError for a family that is not supported and for a file that is
    not whole or cannot be read.
    """

    def fill(folder: Path) -> None:
        place = user_cache.place()
        _log.info("converting %s to safetensors, once (about 20 s for 100 MB), in %s", gguf.gguf_file, place)
        _convert(gguf, tensors, folder)

    return user_cache.kept(entry_name(digest), fill)


def entry_name(digest: bytes) -> str:
    """File, converter and the libraries that read the file: what an entry depends on."""
    versions = "-".join(importlib.metadata.version(library) for library in _LIBRARIES)
    made_by = hashlib.sha256(f"{CONVERTER}-{versions}".encode()).hexdigest()
    return f"gguf-{digest.hex()[:32]}-{made_by[:8]}"


def read_tokenizer(folder: Path) -> Any:
    """The tokenizer of a converted GGUF file."""
    settings = json.loads((folder / _SETTINGS).read_text(encoding="utf-8"))
    return PreTrainedTokenizerFast(tokenizer_object=Tokenizer.from_file(str(folder / _TOKENIZER)), **settings)


def _convert(gguf: Source, tensors: Sequence[StoredTensor], folder: Path) -> None:
    with explained(gguf, "the GGUF file"):
        config = AutoConfig.from_pretrained(gguf.location, **gguf.arguments)
    check_family(config, gguf.name)
    sanity.check(config, gguf.name)
    check_layers(config, gguf.name)
    with explained(gguf, "the tokenizer"):
        tokenizer = AutoTokenizer.from_pretrained(gguf.location, **gguf.arguments)
    model = whole_model(gguf, config=config, dtype=torch.float32)
    check_used(tensors, model, gguf.name)
    with user_cache.writing():
        _write_tokenizer(tokenizer, folder)
        config.save_pretrained(folder)
        model.generation_config.save_pretrained(folder)
        _write_weights(dict(model.state_dict()), folder / _WEIGHTS)


def check_used(tensors: Sequence[StoredTensor], model: Any, name: str) -> None:
    """Raise ModelError where a GGUF file holds tensors that its model does not."""
    held = {tensor.data_ptr() for tensor in model.state_dict().values()}
    check_complete(tensors, len(model.model.layers), len(held), name)


def _write_tokenizer(tokenizer: Any, folder: Path) -> None:
    """Raises NotKeptError where the tokenizer does not come back as it was."""
    (folder / _TOKENIZER).write_text(tokenizer.backend_tokenizer.to_str(), encoding="utf-8")
    (folder / _SETTINGS).write_text(json.dumps(_settings(tokenizer)), encoding="utf-8")
    if _state(read_tokenizer(folder)) != _state(tokenizer):
        msg = f"a {type(tokenizer).__name__} does not come back as it was"
        raise user_cache.NotKeptError(msg)


def _state(tokenizer: Any) -> tuple[Any, ...]:
    """Everything that ids and texts depend on."""
    return _settings(tokenizer), tokenizer.backend_tokenizer.to_str(), sorted(tokenizer.all_special_ids)


def _settings(tokenizer: Any) -> dict[str, Any]:
    """What there is to a tokenizer beside its backend."""
    kept = {name: getattr(tokenizer, name) for name in _KEPT_SETTINGS if hasattr(tokenizer, name)}
    return {**kept, **{name: str(token) for name, token in tokenizer.special_tokens_map.items()}}


def _write_weights(state: dict[str, torch.Tensor], path: Path) -> None:
    """Each tensor once, tied ones under their first name, and where memory mapping them gives aligned weights."""
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
