"""Which model it is: a digest of every file that its numbers depend on. A trace is gone on with by no other."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from pathlib import Path

_SETTINGS = (
    "config.json", "generation_config.json", "chat_template.jinja", "chat_template.json", "tokenizer.json",
    "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", "tokenizer.model", "vocab.json",
    "vocab.txt", "merges.txt",
)  # fmt: skip
"""What transformers reads of a folder beside its weights: how they compute, where answers end, how text is encoded."""


def of_folder(folder: Path, weights: Sequence[Path]) -> str:
    """Of a folder's model, whose weights are these files. Raises OSError for one that cannot be read."""
    settings = [folder / name for name in _SETTINGS if (folder / name).is_file()]
    return of_digests(file.name.encode() + digest(file) for file in (*weights, *settings))


def of_digests(digests: Iterable[bytes]) -> str:
    """Of several files, in this order."""
    return f"sha256:{hashlib.sha256(b''.join(digests)).hexdigest()[:16]}"


def digest(file: Path) -> bytes:
    """Of one file."""
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").digest()
