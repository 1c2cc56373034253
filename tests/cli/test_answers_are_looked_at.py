"""Chats answered at length, and where their answers leave the full cache's."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from tests.support.asked import refused
from tests.support.folders import model_folder

Run = Callable[..., Any]
TEMPLATE = (
    "{% for m in messages %}<{{ m['role'] }}>{{ m['content'] }}{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


@pytest.fixture(scope="module")
def chatty(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model whose tokenizer has a chat template."""
    folder = model_folder(tmp_path_factory.mktemp("models") / "chatty", positions=512)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture
def chats(tmp_path: Path) -> Path:
    path = tmp_path / "chats.jsonl"
    turns = [("user", "Read this. " * 9), ("assistant", "I did. " * 6), ("user", "And now?")]
    rows = [
        {"id": f"c{place}", "messages": [{"role": role, "content": f"{place} {text}"} for role, text in turns]}
        for place in range(2)
    ]
    path.write_text("\n".join(map(json.dumps, rows)))
    return path


@pytest.fixture
def made(perturbkv: Run, chatty: Path, chats: Path) -> Path:
    """The answers of both chats, compressed as they grow, read by every cache."""
    options = ["--budget", 24, "--window", 8, "--max-new-tokens", 30, "--compress-every", 40, "--divergence"]
    ran = perturbkv("generate", "--model", chatty, "--dataset", chats, *options, "-o", "out")
    assert ran.code == 0, ran.err
    return Path("out/generation.jsonl")


@pytest.mark.slow
def test_long_answers_to_chats_are_followed_and_gone_on_with(
    perturbkv: Run, chatty: Path, chats: Path, made: Path
) -> None:
    header, first, _ = map(json.loads, made.read_text().splitlines())
    assert (header["compress_every"], header["divergence"]) == (40, True)
    assert first["question"].startswith("0 And now?")
    assert first["prompt"].startswith("<user>0 Read this.")
    steps = len(first["full"]["tokens"])
    assert steps == len(first["divergence"]["noise_floor"]) > 20
    for read in first["divergence"]["caches"].values():
        assert len(read["kl"]) == len(read["top1"]) == steps
    assert first["compressions"]
    whole = made.read_text()
    made.write_text("\n".join(whole.splitlines()[:2]) + '\n{"sample": "c1", "unfini')
    same = ["generate", "--model", chatty, "--dataset", chats, "--budget", 24, "--window", 8, "--max-new-tokens", 30,
            "--compress-every", 40, "-o", "out"]  # fmt: skip
    other = perturbkv(*same)
    assert (other.code, made.read_text().splitlines()[-1]) == (2, '{"sample": "c1", "unfini')
    again = perturbkv(*same, "--divergence")
    assert again.code == 0, again.err
    assert made.read_text() == whole


@pytest.mark.slow
def test_where_answers_part_is_shown_drawn_and_written(perturbkv: Run, made: Path) -> None:
    ran = perturbkv("quality", "--divergence", made, "--format", "png")
    assert ran.code == 0, ran.err
    for heading in ("first", "ROUGE", "KL"):
        assert heading in ran.out
    document = json.loads(Path("out/quality-divergence.json").read_text())
    assert document["figures"] == ["out/quality-divergence.png"]
    assert document["samples"] == ["c0", "c1"]
    again = perturbkv("quality", "--divergence", made, "--format", "png", "--json")  # what is ours is replaced
    assert again.json()["configs"] == document["configs"]
    Path("out/quality-divergence.json").write_text("my own")
    refused(perturbkv("quality", "--divergence", made), "out/quality-divergence.json")
    assert Path("out/quality-divergence.json").read_text() == "my own"
    assert perturbkv("quality", "--divergence", made, "--overwrite").code == 0
