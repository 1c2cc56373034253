"""`perturbkv audit vllm:MODEL` prints a verdict per situation and ends with the worst; tests/vllm runs the engine."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from perturbkv.auditing.dumps import vllm_audit
from perturbkv.models.aliases import EMBEDDED
from tests.support.asked import refused

Run = Callable[..., Any]
VERDICTS = {"plain": ("exact: all", 0), "prefix": ("differs: request b", 1), "chunked": ("exact: all", 0)}


@pytest.fixture
def asked_for(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The models and options that an engine is asked for, which answers at once."""
    asked: list[Any] = []

    def answer(model: str, situations: list[str], **options: Any) -> Iterator[tuple[str, Any]]:
        asked.append((model, list(situations), options["dtype"]))
        for name in situations:
            summary, code = VERDICTS[name]
            yield name, SimpleNamespace(summary=summary, exit_code=code, to_dict=lambda summary=summary: [summary])

    monkeypatch.setattr(vllm_audit, "audit_vllm", answer)
    return asked


def test_each_situation_has_its_line_and_the_worst_is_the_exit_code(perturbkv: Run, asked_for: list[Any]) -> None:
    names = ["--situation", "plain", "--situation", "prefix", "--situation", "chunked"]
    ran = perturbkv("audit", "vllm:my/model", *names, "--dtype", "bfloat16")
    assert ran.out.splitlines() == ["plain: exact: all", "prefix: differs: request b", "chunked: exact: all"]
    assert (ran.code, asked_for) == (1, [("my/model", ["plain", "prefix", "chunked"], "bfloat16")])
    assert perturbkv("audit", "vllm:", *names[:2]).code == 0
    assert asked_for[-1][0] == EMBEDDED
    ran = perturbkv("audit", "vllm:my/model", *names, "--json")
    assert (ran.code, ran.json()["situations"]) == (1, {name: [text] for name, (text, _) in VERDICTS.items()})


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--budget", "8"], "--budget has no effect on audit of an engine"),
        (["--junit", "x.xml"], "--junit has no effect on audit of an engine"),
        (["--situation", "plain", "--situation", "plain"], "got plain twice"),
        (["--situation", "batch"], "unknown situation 'batch'; known: "),
        ([], "expected the package vllm, got none installed; type: pip install vllm"),
    ],
)
def test_what_an_engine_cannot_do_is_one_line(perturbkv: Run, options: list[str], words: str) -> None:
    refused(perturbkv("audit", "vllm:", *options), words)


def test_a_slot_of_llamacpp_is_told_by_its_content(perturbkv: Run, tmp_path: Path) -> None:
    (tmp_path / "anything.json").write_bytes(b"qsgg" + bytes([9, 0, 0, 0, 0, 0, 0, 0]))
    refused(
        perturbkv("audit", str(tmp_path / "anything.json"), "--model", "random:smollm2-135m"),
        "cannot read this slot file of llama.cpp: expected version 4, got 9",
    )
    refused(perturbkv("audit", str(tmp_path / "anything.json"), "--budget", "8"), "--budget has no effect on")
