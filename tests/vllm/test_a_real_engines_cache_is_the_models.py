"""A real vLLM's cache is the plain model's in every situation, and faults planted inside it are found and named.

Run by `make test-vllm` in an environment of its own.
"""

from __future__ import annotations

import json
import subprocess
import sys
from functools import cache
from pathlib import Path
from typing import Any

import pytest

import perturbkv as pk
from perturbkv.analyses.audit.dump_verdict import DumpAudit
from perturbkv.auditing.dumps.dump_file import HEADER
from perturbkv.models.adapter import Adapter
from perturbkv.models.loading import open_model


@cache
def model() -> Adapter:
    return pk.load_model("smollm2-135m-q4_1")


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The embedded model as vLLM opens it."""
    path = tmp_path_factory.mktemp("model")
    model().model.save_pretrained(path)
    open_model("smollm2-135m-q4_1").tokenizer.save_pretrained(path)
    return path


def run(name: str, model_folder: Path, path: Path) -> dict[str, Any]:
    """Dump a real engine's cache in a situation, and return what happened to its requests."""
    command = [sys.executable, "-m", "tests.vllm.situations", name, str(model_folder), str(path)]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=280, check=False)
    assert ran.returncode == 0, ran.stderr[-3000:]
    happened: dict[str, Any] = json.loads(ran.stdout.splitlines()[-1])
    return happened


def audited(path: Path) -> DumpAudit:
    return pk.audit_dump(model(), path, progress=False)


HAPPENED = {
    "plain": ("partial_prefills", 0), "chunked": ("partial_prefills", 1), "prefix": ("cached_tokens", 128),
    "interleaved": ("shared_steps", 1), "preempted": ("preemptions", 1),
}  # fmt: skip


@pytest.mark.parametrize("name", HAPPENED)
def test_a_right_cache_is_exact(name: str, folder: Path, tmp_path: Path) -> None:
    happened = run(name, folder, tmp_path / "dump")
    what, least = HAPPENED[name]
    assert happened[what] >= least, happened
    result = audited(tmp_path / "dump")
    assert result.verdict == "exact", result.summary
    assert result.engine.startswith("vLLM 0.32")
    assert all(one.compared == 30 * 3 * one.tokens for one in result.requests)
    assert any(one.logprobs < 1e-3 for one in result.requests), [one.logprobs for one in result.requests]


PLANTED = {
    "overwritten": ("unknown", "no token"),
    "another request's block": ("request", "of request b"),
    "float16 cache of a float32 model": ("infinite", "no numbers"),
}


@pytest.mark.parametrize("name", PLANTED)
def test_a_fault_inside_the_engine_is_named(name: str, folder: Path, tmp_path: Path) -> None:
    run(name, folder, tmp_path / "dump")
    result = audited(tmp_path / "dump")
    kind, words = PLANTED[name]
    assert result.verdict == "differs", result.summary
    assert any(fault.kind == kind and words in fault.what for fault in result.faults), result.summary


def test_a_wrong_entry_of_the_table_is_named(folder: Path, tmp_path: Path) -> None:
    run("interleaved", folder, tmp_path / "dump")
    header = json.loads((tmp_path / "dump" / HEADER).read_text())
    first, second = (request["blocks"] for request in header["requests"])
    first[3] = second[0]
    (tmp_path / "dump" / HEADER).write_text(json.dumps(header))
    result = audited(tmp_path / "dump")
    assert result.verdict == "differs"
    fault = next(one for one in result.faults if one.kind == "request")
    assert (fault.request, fault.first, fault.blocks) == ("a", 96, [second[0]])
    assert fault.what == "tokens 0 to 31 of request b"
