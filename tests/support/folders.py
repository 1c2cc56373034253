"""A tiny model as a folder on disk, tokenizer included, as a user would bring one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from tests.support.models import tiny_model


def model_folder(path: Path, family: str = "llama", **more: Any) -> Path:
    """Safetensors, config.json and a byte-level tokenizer under `path`."""
    tiny_model(family, **more).save_pretrained(path)
    alphabet = {symbol: index for index, symbol in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    tokenizer = Tokenizer(models.BPE(vocab=alphabet, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer).save_pretrained(path)
    return path


def chat_folder(path: Path, template: str, **more: Any) -> Path:
    """A model's folder, as `model_folder` makes it, whose tokenizer has a chat template."""
    folder = model_folder(path, **more)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.chat_template = template
    tokenizer.save_pretrained(folder)
    return folder
