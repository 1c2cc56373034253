"""A tokenizer that needs no files: one token per UTF-8 byte, for models with random weights."""

from __future__ import annotations

from collections.abc import Sequence


class ByteTokenizer:
    """Bytes as token ids 0 … 255; no chat template, no special tokens."""

    chat_template: str | None = None
    eos_token_id: int | None = None

    def __call__(self, text: str, add_special_tokens: bool = True) -> dict[str, list[int]]:
        """Token ids of `text` under `input_ids`."""
        return {"input_ids": list(text.encode())}

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool = False) -> str:
        """The text of byte ids; ids above 255, which only a model makes, show as replacement characters."""
        return b"".join(bytes([token]) if token < 256 else b"\xff" for token in token_ids).decode(errors="replace")
