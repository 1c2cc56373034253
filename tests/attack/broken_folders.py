"""Folders of a model with spoiled weights, shards or tokenizers."""

from __future__ import annotations

import json
import struct
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from tests.attack.spoiling import Spoiled

WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"
SHARD = "model-00001-of-00002.safetensors"
TOKENIZER, ABOUT_TOKENS = "tokenizer.json", "tokenizer_config.json"
UP, EMBEDDED = "model.layers.1.mlp.up_proj.weight", "model.embed_tokens.weight"
DEEP = "[" * 100_000
Change = Callable[[Path], object]


def kinds() -> Mapping[str, Sequence[Spoiled]]:
    return {
        "weights cut": _cuts(),
        "weights' header": _headers(),
        "tensors": _tensors(),
        "shards": _shards(),
        "tokenizer": _tokenizers(),
        "generation": _generations(),
    }


def replace(name: str, content: str | bytes) -> Change:
    """A file of the folder holds this instead."""
    return lambda folder: (folder / name).write_bytes(content.encode() if isinstance(content, str) else content)


def update(name: str, **values: object) -> Change:
    """A JSON file of the folder says these instead."""

    def change(folder: Path) -> None:
        path = folder / name
        path.write_text(json.dumps({**(json.loads(path.read_text()) if path.exists() else {}), **values}))

    return change


def _cuts() -> list[Spoiled]:
    def cut(at: float, folder: Path) -> None:
        content = (folder / WEIGHTS).read_bytes()
        header = 8 + int.from_bytes(content[:8], "little")
        places = {"header": header, "middle": header // 2}
        end = places.get(str(at), int(at) if at == int(at) else int(at * len(content))) if at is not None else 0
        (folder / WEIGHTS).write_bytes(content[:end])

    places = [0, 1, 7, 8, 9, 100, 0.3, 0.5, 0.9, 0.99, -1, -2, -50, -1000]
    return [Spoiled(f"weights cut at {place}", partial(cut, place)) for place in places]


def _header(change: Callable[[dict[str, Any]], object]) -> Change:
    """The header as `change` leaves it, the tensors as they were."""

    def spoil(folder: Path) -> None:
        content = (folder / WEIGHTS).read_bytes()
        size = int.from_bytes(content[:8], "little")
        header = json.loads(content[8 : 8 + size])
        text = json.dumps(change(header) or header).encode()
        (folder / WEIGHTS).write_bytes(struct.pack("<Q", len(text)) + text + content[8 + size :])

    return spoil


def _headers() -> list[Spoiled]:
    def length(value: int, folder: Path) -> None:
        content = (folder / WEIGHTS).read_bytes()
        (folder / WEIGHTS).write_bytes(struct.pack("<Q", value) + content[8:])

    def junk(at: int, byte: int, folder: Path) -> None:
        content = bytearray((folder / WEIGHTS).read_bytes())
        content[at] = byte
        (folder / WEIGHTS).write_bytes(content)

    sizes = [0, 1, 2, 1000, 10**6, 10**8 + 1, 2**31, 2**63, 2**64 - 1]
    set_up = {
        "an unknown dtype": {"dtype": "F33"},
        "a dtype that is a number": {"dtype": 5},
        "another dtype": {"dtype": "I64"},
        "offsets outside": {"data_offsets": [0, 10**15]},
        "offsets backwards": {"data_offsets": [100, 0]},
        "offsets below zero": {"data_offsets": [-8, 0]},
        "offsets that overlap": {"data_offsets": [0, 6144]},
        "a shape of too much": {"shape": [10**10, 10**10]},
        "a shape below zero": {"shape": [-48, -32]},
        "a shape of text": {"shape": "big"},
        "no shape": {"shape": None},
    }

    def entry(values: dict[str, Any], header: dict[str, Any]) -> None:
        header[UP] = {**header[UP], **values}

    return [
        *(Spoiled(f"a header of {size} bytes", partial(length, size)) for size in sizes),
        *(Spoiled(f"byte {at} of the weights is {byte}", partial(junk, at, byte))
          for at, byte in ((8, 0), (8, 0x5B), (12, 0xFF), (30, 0x22), (60, 0x00))),
        *(Spoiled(name, _header(partial(entry, values))) for name, values in set_up.items()),
        Spoiled("a header that is a list", _header(lambda header: [header])),
        Spoiled("a deep header", replace(WEIGHTS, struct.pack("<Q", len(DEEP)) + DEEP.encode())),
    ]  # fmt: skip


def _with(change: Callable[[dict[str, torch.Tensor]], object], folder: Path) -> None:
    tensors = load_file(folder / WEIGHTS)
    change(tensors)
    save_file(tensors, folder / WEIGHTS, {"format": "pt"})


def _tensors() -> list[Spoiled]:
    def filled(value: float, held: dict[str, torch.Tensor]) -> None:
        held[UP].view(-1)[3] = value

    def renamed(held: dict[str, torch.Tensor]) -> None:
        held["model.layers.1.mlp.down_prj.weight"] = held.pop(UP)

    changes: dict[str, Callable[[dict[str, torch.Tensor]], object]] = {
        "a tensor is missing": lambda held: held.pop(UP),
        "embeddings are missing": lambda held: held.pop(EMBEDDED),
        "all tensors are missing": lambda held: held.clear(),
        "a tensor too many": lambda held: held.update(more=torch.zeros(2)),
        "a tensor of another name": renamed,
        "a tensor of another shape": lambda held: held.update({UP: torch.zeros(3, 5)}),
        "a transposed tensor": lambda held: held.update({UP: held[UP].T.contiguous()}),
        "a tensor of no values": lambda held: held.update({UP: torch.zeros(0)}),
        "a tensor that is a number": lambda held: held.update({UP: torch.tensor(1.0)}),
        "complex weights": lambda held: held.update({UP: held[UP].to(torch.complex64)}),
        "NaN": partial(filled, float("nan")),
        "Inf": partial(filled, float("inf")),
        "minus Inf": partial(filled, float("-inf")),
    }
    valid: dict[str, Callable[[dict[str, torch.Tensor]], object]] = {
        f"weights of {dtype}": lambda held, dtype=dtype: held.update({UP: held[UP].to(dtype)})
        for dtype in (torch.float64, torch.float16, torch.int8, torch.uint8, torch.bool, torch.float8_e4m3fn)
    }
    valid["huge weights"] = partial(filled, 3e38)
    return [
        *(Spoiled(name, partial(_with, change)) for name, change in changes.items()),
        *(Spoiled(name, partial(_with, change), never=False) for name, change in valid.items()),
    ]


def _sharded(folder: Path, index: Mapping[str, object] = MappingProxyType({})) -> None:
    names = load_file(folder / WEIGHTS)
    (folder / WEIGHTS).rename(folder / SHARD)
    places: dict[str, object] = dict.fromkeys(names, SHARD)
    (folder / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": {**places, **index}}))


def _shards() -> list[Spoiled]:
    def text(content: str, folder: Path) -> None:
        _sharded(folder)
        (folder / INDEX).write_text(content)

    texts = ["", "{", "[]", "null", "5", '{"weight_map": []}', '{"weight_map": {}}', '{"metadata": {}}', DEEP]
    entries: dict[str, object] = {
        "a missing shard": "model-00002-of-00002.safetensors",
        "a shard outside": "../../etc/passwd",
        "a shard that is the folder": ".",
        "a shard that is a number": 5,
        "a shard without a name": "",
        "a shard that is null": None,
    }
    return [
        *(Spoiled(f"an index of {text_[:20]!r}", partial(text, text_)) for text_ in texts),
        *(Spoiled(name, partial(_sharded, index={UP: value})) for name, value in entries.items()),
        Spoiled("an index of what no shard has", partial(_sharded, index={"more": SHARD}), never=False),
        Spoiled("no weights", lambda folder: (folder / WEIGHTS).unlink()),
        Spoiled("weights that are a folder", lambda folder: ((folder / WEIGHTS).unlink(), (folder / WEIGHTS).mkdir())),
        Spoiled("weights that are pickled", _pickled),
    ]  # fmt: skip


def _pickled(folder: Path) -> None:
    """A pickle that leaves a file where it is opened."""
    (folder / WEIGHTS).unlink()
    (folder / "pytorch_model.bin").write_bytes(b"cos\nsystem\n(S'touch opened'\ntR.")


def _tokenizers() -> list[Spoiled]:
    def without(folder: Path) -> None:
        for name in (TOKENIZER, ABOUT_TOKENS):
            (folder / name).unlink()

    def cut(share: float, folder: Path) -> None:
        content = (folder / TOKENIZER).read_bytes()
        (folder / TOKENIZER).write_bytes(content[: int(share * len(content))])

    def ids(first: int, folder: Path) -> None:
        held = json.loads((folder / TOKENIZER).read_text())
        held["model"]["vocab"] = {token: first + place for place, token in enumerate(held["model"]["vocab"])}
        (folder / TOKENIZER).write_text(json.dumps(held))

    def model(value: object, folder: Path) -> None:
        update(TOKENIZER, model=value)(folder)

    contents = ["", "{", "{}", "[]", "null", "5", '"x"', DEEP, "\x00\x01\x02", b"\xff\xfe\xfd"]
    about: dict[str, object] = {
        "tokenizer_class": "NoSuchTokenizer", "chat_template": "{% for", "model_max_length": -5, "eos_token": 5,
        "added_tokens_decoder": {"9999": {"content": "<x>"}}, "bos_token": {"content": "<far>"}, "auto_map": {"x": "y"},
    }  # fmt: skip
    return [
        Spoiled("no tokenizer", without),
        *(Spoiled(f"a tokenizer of {content[:10]!r}", replace(TOKENIZER, content)) for content in contents),
        *(Spoiled(f"a tokenizer cut at {share}", partial(cut, share)) for share in (0.1, 0.5, 0.99)),
        *(Spoiled(f"token ids from {first}", partial(ids, first)) for first in (200, 260, 10**6, 2**32 - 300)),
        *(Spoiled(f"a tokenizer's model of {value!r}", partial(model, value))
          for value in (None, {}, [], "BPE", {"type": "Nothing"}, {"type": "BPE", "vocab": {}, "merges": []})),
        *(Spoiled(f"{ABOUT_TOKENS} of {content[:10]!r}", replace(ABOUT_TOKENS, content), never=False)
          for content in contents),
        *(Spoiled(f"{name} of {value!r}", update(ABOUT_TOKENS, **{name: value}), never=False)
          for name, value in about.items()),
    ]  # fmt: skip


def _generations() -> list[Spoiled]:
    name = "generation_config.json"
    contents = ["", "{", "[]", "null", "5", DEEP, b"\xff\xfe\xfd"]
    values: dict[str, object] = {
        "eos_token_id": "x", "temperature": "hot", "max_length": -1, "pad_token_id": 10**20, "num_beams": 0,
        "do_sample": 5, "bos_token_id": [1, 2],
    }  # fmt: skip
    return [
        *(Spoiled(f"{name} of {content[:10]!r}", replace(name, content), never=False) for content in contents),
        *(Spoiled(f"{key} of {value!r}", update(name, **{key: value}), never=False) for key, value in values.items()),
        Spoiled("an end of text that no token is", update(name, eos_token_id=-5), never=False),
    ]
