"""What cases share: a tiny model, prompts, a trace and answers in `../shared`, code to plug in, and odd words."""

from __future__ import annotations

import json
from pathlib import Path

from tests.attack.case import run
from tests.support.folders import model_folder

MODEL, PROMPTS, TRACE = "../shared/model", "../shared/prompts.jsonl", "../shared/trace.h5"
GENERATION, EVICT = "../shared/generation.jsonl", "../shared/evict.py:evict"
SMALL = ("--model", MODEL, "--budget", "24", "--window", "8")
RUN = (*SMALL, "--dataset", PROMPTS, "--samples", "1")
"""Options of a run that takes a moment."""
TEXT = "The quick brown fox jumps over the lazy dog. " * 4
SCORE_CODE = b'''from dataclasses import dataclass

import perturbkv as pk


@dataclass(frozen=True)
class Peak(pk.Score):
    """The largest attention that any query of the window gives an entry."""

    needs = ("attention",)

    def score(self, layer):
        return layer.attention[..., : layer.prefix].amax(dim=1)
'''
EVICTION_CODE = b"""from transformers import DynamicCache


def evict(model, input_ids, attention_mask):
    cache = DynamicCache()
    positions = (attention_mask.cumsum(-1) - 1).clamp(min=0)
    model(input_ids=input_ids, attention_mask=attention_mask, position_ids=positions, past_key_values=cache)
    return cache
"""
WORDS = {
    "a closing tag": "Who? [/INST]", "a style": "[bold red]bold[/bold red]", "an open bracket": "[",
    "a link": "[link=https://example.org]here[/link]", "a title": "\x1b]0;owned\x07", "8-bit codes": "\x9b31m",
    "a cleared screen": "\x1b[2J\x1b[H", "CR": "good\rbad", "LF": "first\nerror: second", "a tab": "a\tb",
    "backspaces": "abc\b\b\bxyz", "bidi": "\u202egnp.exe\u2066", "a line separator": "a\u2028b",
    "an emoji's name": ":smile: :warning:", "an emoji": "👩\u200d🔬 漢字 é", "a formula": "=cmd|' /C calc'!A0",
    "plus": "+1+cmd", "minus": "-2+3", "at": "@SUM(1)", "broken mathtext": r"$\frac{1", "mathtext": "$x_1^2$ $",
    "TeX": r"a_b^c\d{e}~#%&", "XML": "<b>&amp;\"'--></b>]]>", "format": "%s {0} {x!r} %(a)s", "underscore": "_hidden",
    "long": "x" * 900,
}  # fmt: skip
"""Words that terminals, spreadsheets, browsers and typesetters obey: here they are names and texts."""


def prepare(workshop: Path) -> Path:
    """Make everything in `shared` under the workshop, and return the folder."""
    shared = workshop / "shared"
    model_folder(shared / "model", positions=1024)
    rows = [{"id": f"p{number}", "prompt": f"{number} {TEXT}", "answers": ["a dog"]} for number in range(6)]
    (shared / "prompts.jsonl").write_text("\n".join(map(json.dumps, rows)))
    (shared / "evict.py").write_bytes(EVICTION_CODE)
    options = (*RUN[:-1], "2")
    for argv in (
        ("trace", *options, "--steps", "3", "--save", "outputs", "--output", "trace.h5"),
        ("generate", *options, "--max-new-tokens", "2", "--output", "."),
    ):
        made = run(argv, shared, limit=60)
        if made.code:
            raise RuntimeError(made.err)
    return shared
