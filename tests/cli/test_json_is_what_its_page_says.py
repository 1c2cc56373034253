"""Every document that `--json` prints is walked, key by key, against reference/json.md: no other key, no other type."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import DynamicCache

import perturbkv as pk
from perturbkv.cli.commands import trace
from perturbkv.cli.console import SCHEMA
from perturbkv.models import aliases
from perturbkv.selfcheck import checks
from perturbkv.storage.trace import trace_file
from tests.audit import planted
from tests.house.test_no_label_is_parsed import COMMANDS as ANALYSES
from tests.house.test_no_label_is_parsed import OWN, asked_of, made
from tests.support.undrawn import undrawn

Run = Callable[..., Any]
PAGE = Path(__file__).resolve().parents[2] / "docs" / "reference" / "json.md"
ROW = re.compile(r"^\| `([^`]+)` \| ([^|]+?) \| .+ \|$", re.MULTILINE)
ALSO = re.compile(r"^All keys of `([^`]+)`, and:$", re.MULTILINE)
PLAIN: dict[str, Any] = {"text": str, "integer": int, "number": int | float | None, "boolean": bool, "any": object}
Page = dict[str, dict[str, str]]
SHARED = ("every document", "every analysis", "about answers", "of a trace", "of several traces", "of scores",
          "of perplexity", "of measurements", "of an audit", "outcome")  # fmt: skip
"""Sections whose keys stand in documents of other sections."""
ELSEWHERE = {
    ("provenance", "kvpress_version"): "kvpress needs an older transformers; tests/kvpress hold it in one of their own"
}
"""Rows of the page that no command of this environment prints -> why."""


def read_page(text: str) -> Page:
    """Heading -> key -> type, of every table; the keys of the section that it names come first."""
    sections = re.split(r"^#+ ", text, flags=re.MULTILINE)[1:]
    own = {section.partition("\n")[0]: section for section in sections}

    def keys(name: str) -> dict[str, str]:
        inherited = {key: kind for base in ALSO.findall(own[name]) for key, kind in keys(base).items()}
        return inherited | dict(ROW.findall(own[name]))

    return {name: keys(name) for name in own}


class Walk:
    """What a document has that the page does not say, and which rows of the page were seen."""

    def __init__(self, page: Page) -> None:
        self.page, self.seen, self.wrong = page, set[tuple[str, str]](), list[str]()

    def value(self, value: Any, kind: str, where: str) -> None:
        """Hold a value against its type."""
        if kind.endswith(" or null"):
            if value is not None:
                self.value(value, kind.removesuffix(" or null"), where)
        elif kind.startswith(("list of ", "map of ")):
            inside = value.values() if isinstance(value, dict) and kind.startswith("map") else value
            if isinstance(value, dict if kind.startswith("map") else list):
                for one in inside:
                    self.value(one, kind.partition(" of ")[2], f"{where}[]")
            else:
                self.wrong.append(f"{where} is {value!r}, no {kind}")
        elif kind not in PLAIN:
            self.thing(value, kind, where)
        elif not isinstance(value, PLAIN[kind]) or (isinstance(value, bool) and kind not in ("boolean", "any")):
            self.wrong.append(f"{where} is {value!r}, no {kind}")

    def thing(self, value: Any, section: str, where: str) -> None:
        """Hold an object against its section of the page."""
        if section not in self.page or not isinstance(value, dict):
            self.wrong.append(f"{where} is {value!r}, expected the object '{section}'")
            return
        for key, inside in value.items():
            self.seen.add((section, key))
            if key in self.page[section]:
                self.value(inside, self.page[section][key], f"{where}.{key}")
            else:
                self.wrong.append(f"{where}.{key}: no such key in section '{section}'")


def commands(tiny: list[object], model: Path, data: Path) -> dict[str, list[object]]:
    """Section of the page -> the command that prints its document; in this order, as some read what others leave."""
    own = ["--model", model]
    small = [*own, "--samples", 1, "--length", 300, "--entries", 24, "--placed", "random:small"]
    audited = [*own, "--dataset", data, "--samples", 1, "--steps", 1, "--format", "png"]
    return {
        "trace": ["trace", *tiny, "-o", "t.h5"],
        "trace --shard": ["trace", *tiny, "-o", "s.h5", "--shard", "1/2"],
        "merge": ["merge", "t.h5"],
        "list FILE": ["list", "t.h5"],
        "list PROMPTS.jsonl": ["list", data],
        "export": ["export", "t.h5", "-o", "t.csv"],
        "tokens": ["tokens", "t.h5"],
        "report": ["report", "t.h5"],
        **of_answers(tiny),
        "dry run": ["heads", *tiny, "--dry-run", "-o", "dry", "--shard", "1/2", "--correction", "corrected"],
        "trace --head-scores": ["trace", "--head-scores", "s.json", *own],
        "list models": ["list", "models"],
        "list models NAME": ["list", "models", "random:gpt-oss-20b"],
        "list datasets": ["list", "datasets"],
        "list datasets NAME": ["list", "datasets", "trec"],
        "list datasets NAME --show": ["list", "datasets", data, "--show", *own, "--tokens", 5],
        "list policies": ["list", "policies"],
        "list policies NAME": ["list", "policies", "adakv"],
        "doctor": ["doctor"],
        "doctor selfcheck": ["doctor", "selfcheck", "--device", "cpu", *small],
        "patching": ["patching", *tiny, "--treatment-in", 0, "-o", "swap", "--format", "png"],
        "patching --dry-run": ["patching", *tiny, "--dry-run"],
        "audit": ["audit", f"{planted.__file__}:swapped_values", *audited, "-o", "audit"],
        "audit DUMP": ["audit", dumped(model), *own, "-o", "dumped", "--format", "png"],
        "error": ["heads", "nothere.h5"],
    }


def dumped(model: Path) -> Path:
    """A dump in which entries are gone, and others are zero."""
    ids = list(range(40, 72))
    cache = DynamicCache()
    with torch.inference_mode():
        pk.load_model(model).model(torch.tensor([ids]), past_key_values=cache)
    layers = []
    for layer in cache.layers:
        keys, values = layer.keys[0, :, 4:].clone(), layer.values[0, :, 4:].clone()
        keys[:, 3] = values[:, 3] = 0
        layers.append({"keys.a": keys, "values.a": values})
    heads, _, size = layers[0]["keys.a"].shape
    request = {"id": "a", "token_ids": ids, "logprobs": [None] + [-1.0] * 31}
    return pk.write_dump("dump", [request], layers, kv_heads=heads, head_size=size)


def of_answers(tiny: list[object]) -> dict[str, list[object]]:
    """Those that write answers and look at them."""
    file, png = "out/generation.jsonl", ["--format", "png"]
    few = "--precision quantise --max-new-tokens 6 --compress-over 25 --divergence -o out".split()
    return {
        "generate": ["generate", *tiny, *few],
        "list ANSWERS.jsonl": ["list", file],
        "quality --divergence": ["quality", file, "--divergence", *png],
    }


@pytest.fixture
def little(monkeypatch: pytest.MonkeyPatch) -> None:
    """Models, head scores, and kernels as small as a test can wait for."""
    shapes = {**aliases.ALIASES["smollm2-135m"].shapes, "num_hidden_layers": 1, "vocab_size": 300}
    monkeypatch.setitem(aliases.ALIASES, "small", aliases.Alias("owner/small", "llama", shapes))
    monkeypatch.setattr(trace, "_score_heads", lambda *asked: ((0,), [[0.5, 0.25]], 1))
    monkeypatch.setattr(checks, "SHAPES", {"grouped by 2": (2, 1, 5, 33)})


@pytest.fixture
def documents(
    perturbkv: Run, tiny: list[object], model: Path, data: Path, little: None, monkeypatch: pytest.MonkeyPatch
) -> dict[str, Any]:
    """Section of the page -> the document that its command prints."""
    found = {name: perturbkv(*asked, "--json").json() for name, asked in commands(tiny, model, data).items()}
    moved = ["--compare", "snapkv:attention,snapkv(positions=in-cache):attention", "-o", "moved", "--json"]
    changed = perturbkv("heads", *tiny, *moved, "--format", "png").json()["changed"]
    again = ["--steps", 12, "--compress-every", 3, "-o", "again", "--json", "--format", "png"]
    compressed = perturbkv("horizon", *tiny, *again).json()["configs"][0]["compressions"]
    finished = made()
    finished.arrays["sigma_topk"][..., 0, 0] = 0.4  # type: ignore[index]
    for name, options in ANALYSES.items():
        shown = asked_of(name) if name in OWN else finished
        monkeypatch.setattr(trace_file, "read_trace", lambda path, shown=shown: shown)
        folder = f"analyses/{name}"
        with undrawn():
            told = perturbkv(*name.split(), *options, "made.h5", "-o", folder, "--format", "png", "--json")
        found[name] = told.json()
    found["heads"]["changed"] = changed
    found["horizon"]["configs"][0]["compressions"] = compressed
    found["summary.json"] = json.loads(Path("analyses/budget --cliff/summary.json").read_text())
    return found


@pytest.mark.slow
def test_every_key_of_every_document_stands_on_the_page_with_its_type(documents: dict[str, Any]) -> None:
    walk = Walk(read_page(PAGE.read_text()))
    for section, document in documents.items():
        assert document["schema"] == SCHEMA, section
        walk.thing(document, section, section)
    assert walk.wrong == [], "\n".join(map(str, walk.wrong))
    rows = {(section, key) for section, keys in walk.page.items() for key in keys}
    shared = {(section, key) for section, key in rows if section in SHARED}
    assert rows - walk.seen - shared == set(ELSEWHERE)  # nothing else stands there that no command prints


def test_a_key_that_is_not_documented_and_a_type_that_is_another_are_found() -> None:
    page = read_page("## a\n\n| `b` | list of c | x |\n\n## c\n\n| `d` | number | x |\n| `e` | text or null | x |\n")
    walk = Walk(page)
    walk.thing({"b": [{"d": None, "e": None}, {"d": 1, "e": ""}]}, "a", "a")
    assert walk.wrong == []
    walk.thing({"b": [{"d": "1", "e": 2, "f": 3}], "g": 4}, "a", "a")
    assert [line.partition(" ")[0].rstrip(":") for line in walk.wrong] == ["a.b[].d", "a.b[].e", "a.b[].f", "a.g"]
    flags = Walk({"a": {"b": "integer", "c": "boolean", "d": "map of text"}})
    flags.thing({"b": True, "c": 1, "d": ["x"]}, "a", "a")
    assert len(flags.wrong) == 3
