"""What a case needs to get as far as its output: a tiny model, its prompts, a trace, an eviction that is not ours."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

from tests.attack.running import run
from tests.support.folders import model_folder

_EVICTION = """
from transformers import DynamicCache


def everything(model, input_ids, attention_mask):
    cache = DynamicCache()
    model(input_ids, attention_mask=attention_mask, past_key_values=cache, use_cache=True)
    return cache
"""
_ASKED = ("--samples", "2", "--budget", "24", "--window", "8", "--steps", "3")


class Materials:
    """A folder with all of it, made once."""

    def __init__(self, folder: Path, prompts: int = 6) -> None:
        self.folder = folder
        model_folder(folder / "model", positions=512)
        text = "The quick brown fox jumps over the lazy dog. "
        rows = [{"id": f"p{i}", "prompt": f"{i} {text * 4}", "answers": ["a dog"]} for i in range(prompts)]
        (folder / "prompts.jsonl").write_text("\n".join(map(json.dumps, rows)))
        (folder / "kept.py").write_text(_EVICTION)
        asked = ("trace", "--model", "model", "--dataset", "prompts.jsonl", *_ASKED, "--output", "trace.h5")
        answers = ("generate", *asked[1:5], *_ASKED[:6], "--max-new-tokens", "2", "--output", ".")
        for words in (asked, answers):
            made = run(words, folder, 60.0)
            if made.code:
                raise RuntimeError(made.err)


def copied(materials: Materials, folder: Path) -> None:
    """All of it in a new folder."""
    shutil.copytree(materials.folder, folder)
