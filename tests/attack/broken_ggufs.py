"""GGUF files: cut, with other bytes, and with a header that says what cannot be."""

from __future__ import annotations

import random
import struct
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import gguf

from tests.attack.spoiling import Spoiled
from tests.support import gguf_files

FLIPS = 60
_SUFFIX = "model.gguf"


def kinds(seed: int) -> Mapping[str, Sequence[Spoiled]]:
    return {
        "gguf cut": [_spoiled(f"a gguf file cut at {at}", partial(_cut, at)) for at in CUTS],
        "gguf begins": [_spoiled(name, partial(_write, *where)) for name, where in BEGINNINGS.items()],
        "gguf tensors": [_spoiled(name, partial(_write_tensor, *where)) for name, where in TENSORS.items()],
        "gguf says": [
            _spoiled(f"a gguf file of {key} = {value!r}", partial(_say, key, value), key in _NEVER)
            for key, values in SAID.items()
            for value in values
        ],
        "gguf bytes": _flips(seed),
    }


def _spoiled(name: str, spoil: Callable[[Path], object], never: bool = True) -> Spoiled:
    return Spoiled(name, spoil, never, gguf=True, words=(_SUFFIX, "sample 'p'", "chat template"))


CUTS = (0, 1, 3, 4, 6, 8, 12, 16, 20, 24, 30, 40, 100, 1000, 3000, 0.3, 0.5, 0.8, 0.99, -1, -100, -5000)


def _cut(at: float, path: Path) -> None:
    content = path.read_bytes()
    path.write_bytes(content[: int(at * len(content)) if isinstance(at, float) else at])


BEGINNINGS: dict[str, tuple[int, bytes]] = {
    "another magic": (0, b"GGUX"),
    "an older format's magic": (0, b"GGML"),
    "no magic": (0, bytes(4)),
    **{f"version {version}": (4, struct.pack("<I", version)) for version in (0, 1, 99, 2**31, 2**32 - 1)},
    "the other byte order": (4, struct.pack(">I", 3)),
    **{f"{count} tensors": (8, struct.pack("<Q", count)) for count in (0, 1, 19, 21, 10**6, 2**32, 2**63, 2**64 - 1)},
    **{f"{count} pairs": (16, struct.pack("<Q", count)) for count in (0, 1, 5, 10**6, 2**32, 2**63, 2**64 - 1)},
    **{f"a first key of {size} bytes": (24, struct.pack("<Q", size)) for size in (0, 2**31, 2**63, 2**64 - 1)},
}
"""What is written where."""


def _write(at: int, content: bytes, path: Path) -> None:
    held = bytearray(path.read_bytes())
    held[at : at + len(content)] = content
    path.write_bytes(held)


_NAME = b"blk.1.ffn_up.weight"
_TYPE, _OFFSET = 4 + 2 * 8, 4 + 2 * 8 + 4
"""Bytes behind a matrix's name: its number of axes, two lengths, type, offset."""
TENSORS: dict[str, tuple[int, bytes]] = {
    **{f"a tensor of {axes} axes": (0, struct.pack("<I", axes)) for axes in (0, 1, 3, 5, 2**32 - 1)},
    **{f"a tensor {size} wide": (4, struct.pack("<Q", size)) for size in (0, 1, 63, 10**9, 2**63, 2**64 - 1)},
    **{f"a tensor {size} high": (12, struct.pack("<Q", size)) for size in (0, 1, 97, 10**9, 2**63, 2**64 - 1)},
    **{f"a tensor of type {kind}": (_TYPE, struct.pack("<I", kind)) for kind in (0, 4, 8, 31, 99, 2**32 - 1)},
    **{f"a tensor at {place}": (_OFFSET, struct.pack("<Q", place)) for place in (1, 10**9, 2**63, 2**64 - 1)},
    "a tensor of another name": (-len(_NAME), b"blk.1.ffn_xx.weight"),
    "a tensor's name twice": (-len(_NAME), b"blk.0.ffn_up.weight"),
    "a tensor's name that is no text": (-len(_NAME), b"\xff" * len(_NAME)),
}


def _write_tensor(at: int, content: bytes, path: Path) -> None:
    held = path.read_bytes()
    _write(held.index(_NAME) + len(_NAME) + at, content, path)


_NAN, _INF = float("nan"), float("inf")
SAID: dict[str, Sequence[Any]] = {
    "context_length": (0, 1, 100, 2**32 - 1),
    "embedding_length": (0, 1, 32, 2**32 - 1),
    "block_count": (0, 1, 3, 10**6, 2**32 - 1),
    "feed_forward_length": (0, 1, 2**32 - 1),
    "head_count": (0, 3, 64, 2**32 - 1),
    "head_count_kv": (0, 2, 3, 2**32 - 1),
    "rope_dimension_count": (0, 7, 2**32 - 1),
    "rope_freq_base": (0.0, -1.0, _NAN, _INF),
    "layer_norm_rms_eps": (-1.0, _NAN, _INF),
    "vocab_size": (0, 5, 2**32 - 1),
    "tokenizer_model": ("", "nonsense"),
    "tokenizer_pre": ("", "nonsense"),
    "token_list": ([], ["a"], gguf_files.TOKENS[:50]),
    "token_merges": ([], ["nothing to merge"], ["a"]),
    "token_types": ([], [1]),
    "bos_token_id": (10**6, 2**32 - 1),
    "eos_token_id": (10**6, 2**32 - 1),
    "chat_template": ("{% for", "{{ nothing.at.all }}", ""),
    "custom_alignment": (1, 64, 2**16),
}
_NEVER = ("embedding_length", "block_count", "feed_forward_length")


def _say(key: str, value: object, path: Path) -> None:
    """The file anew; what the writer says last counts, so that the value is put in the writer's way."""
    usual = getattr(gguf.GGUFWriter, f"add_{key}")

    class Writer(gguf.GGUFWriter):
        def write_header_to_file(self, *args: Any) -> None:
            for held in self.kv_data:
                for known in [known for known in held if known.endswith(_KEYS.get(key, key))]:
                    del held[known]
            usual(self, value)
            super().write_header_to_file(*args)

    whole, gguf_files.gguf.GGUFWriter = gguf_files.gguf.GGUFWriter, Writer  # type: ignore[misc]
    try:
        gguf_files.gguf_file(path)
    finally:
        gguf_files.gguf.GGUFWriter = whole  # type: ignore[misc]


_KEYS = {
    "rope_dimension_count": "rope.dimension_count",
    "rope_freq_base": "rope.freq_base",
    "tokenizer_model": "ggml.model",
    "tokenizer_pre": "ggml.pre",
    "token_list": "ggml.tokens",
    "token_merges": "ggml.merges",
    "token_types": "ggml.token_type",
    "head_count": ".head_count",
    "custom_alignment": "alignment",
    "layer_norm_rms_eps": "layer_norm_rms_epsilon",
}
"""How the keys of these end; those of the others as they are called here."""


def _flips(seed: int) -> list[Spoiled]:
    """One byte in the first 8,000, where the header is."""
    draw = random.Random(f"gguf/{seed}")
    places = [(draw.randrange(8000), draw.randrange(256)) for _ in range(FLIPS)]
    return [_spoiled(f"byte {at} of a gguf file is {byte}", partial(_write, at, bytes([byte])), never=False)
            for at, byte in places]  # fmt: skip
