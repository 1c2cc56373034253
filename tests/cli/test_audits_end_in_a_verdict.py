"""perturbkv audit ends in a verdict, an exit code, a document and a figure; what is asked wrongly in one line."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from xml.etree import ElementTree

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import DynamicCache

from perturbkv import load_model, write_dump
from perturbkv.auditing.dumps import vllm_audit
from perturbkv.models.aliases import EMBEDDED
from tests.audit import planted
from tests.support.asked import refused

Run = Callable[..., Any]
FILE = planted.__file__
ANYHOW = "--allow", "plain-use"


@pytest.fixture
def asked(model: Path, data: Path) -> list[object]:
    return ["--model", model, "--dataset", data, "--samples", 1, "--steps", 2]


@pytest.mark.slow
def test_the_verdict_is_the_first_line_and_the_exit_code(perturbkv: Run, asked: list[object]) -> None:
    exact = perturbkv("audit", f"{FILE}:right", *asked, *ANYHOW, "-o", "right")
    assert (exact.code, exact.out.partition(":")[0]) == (0, "exact")
    wrong = perturbkv("audit", f"{FILE}:rotated_again", *asked, "--no-loss", "-o", "wrong")
    assert (wrong.code, wrong.err) == (1, "")
    assert " ".join(wrong.out.split()).startswith(
        "differs: layer 1, head 0, entry 1, step 0: keys rotated again, each by its own position (p0, single, "
    )
    nothing = perturbkv("audit", f"{FILE}:nothing", *asked, "-o", "nothing")
    assert (nothing.code, nothing.out.partition(":")[0]) == (2, "unreadable")
    assert [sorted(path.name for path in Path(name).glob("*")) for name in ("right", "wrong", "nothing")] == [
        ["audit.json", "audit.png", "audit.svg"], ["audit.json", "audit.png", "audit.svg"], []
    ]  # fmt: skip


@pytest.mark.slow
def test_no_line_is_wider_than_the_terminal(perturbkv: Run, asked: list[object]) -> None:
    assert perturbkv("audit", f"{FILE}:quantised", *asked, "-o", "out").code != 2


def test_the_document_on_stdout_is_the_files(perturbkv: Run, asked: list[object]) -> None:
    ran = perturbkv("audit", f"{FILE}:right", *asked, *ANYHOW, "--situation", "single", "--json", "-o", "out")
    document = ran.json()
    assert document == json.loads(Path("out/audit.json").read_text())
    assert (document["verdict"], len(document["runs"])) == ("exact", 1)


def test_results_of_another_audit_stay(perturbkv: Run, asked: list[object]) -> None:
    Path("out").mkdir()
    Path("out/audit.json").write_text("{}")
    ran = perturbkv("audit", f"{FILE}:right", *asked, *ANYHOW, "-o", "out")
    refused(ran, "--overwrite")
    assert perturbkv("audit", f"{FILE}:right", *asked, *ANYHOW, "--no-loss", "--overwrite", "-o", "out").code == 0


def test_a_ci_gets_a_junit_report_and_a_quick_run(perturbkv: Run, asked: list[object]) -> None:
    given = [str(value) for value in asked if value not in ("--samples", 1)]
    ran = perturbkv("audit", f"{FILE}:rotated_again", *given, "--quick", "--junit", "made/audit.xml", "-o", "out")
    assert ran.code == 1
    suite = ElementTree.parse("made/audit.xml").getroot()
    assert [case.get("name", "").partition(": ")[2] for case in suite] == ["block", "batch, row 0", "batch, row 1"]
    assert suite.get("failures") == "3"
    document = json.loads(Path("out/audit.json").read_text())
    assert (document["losses"], document["plain_use"]) == ([], None)
    Path("made/audit.xml").write_text("<mine/>")
    refused(
        perturbkv("audit", f"{FILE}:right", *given, "--quick", "--junit", "made/audit.xml", "-o", "new"),
        "a JUnit report of an audit",
    )


@pytest.mark.slow
def test_allowed_changes_are_named_kinds(perturbkv: Run, asked: list[object]) -> None:
    few = [*asked, *ANYHOW, "--situation", "single", "--no-loss"]
    assert perturbkv("audit", f"{FILE}:rounded", *few, "-o", "one").code == 1
    allowed = perturbkv("audit", f"{FILE}:rounded", *few, "--allow", "lossy", "-o", "two")
    assert (allowed.code, allowed.out.startswith("lossy: ")) == (0, True)
    refused(
        perturbkv("audit", f"{FILE}:rounded", *few, "--allow", "moved", "-o", "three"),
        "unknown verdict to allow",
        "lossy",
    )


@pytest.fixture
def dump(model: Path, tmp_path: Path) -> list[object]:
    """A right dump of the model's cache, of 40 tokens in rows, and the options of its audit."""
    adapter, ids = load_model(str(model)), list(range(5, 45))
    cache = DynamicCache()
    with torch.inference_mode():
        adapter.model(torch.tensor([ids]), past_key_values=cache)
    rows = ({"keys.a": layer.keys[0].clone(), "values.a": layer.values[0].clone()} for layer in cache.layers)
    shape = {"kv_heads": adapter.kv_heads, "head_size": adapter.d_key}
    path = write_dump(tmp_path / "dump", [{"id": "a", "token_ids": ids}], rows, engine="made-up 1.0", **shape)
    return ["audit", path, "--model", model]


def test_a_dump_of_an_engines_cache_ends_in_a_verdict(perturbkv: Run, dump: list[object]) -> None:
    exact = perturbkv(*dump, "-o", "exact", "--junit", "exact.xml")
    assert (exact.code, exact.out.partition(":")[0]) == (0, "exact"), exact.err
    assert "made-up 1.0" in exact.out
    document = json.loads(Path("exact/audit.json").read_text())
    assert (document["verdict"], document["requests"][0]["differing"], document["faults"]) == ("exact", 0, [])
    assert sorted(path.name for path in Path("exact").glob("*")) == ["audit.json", "audit.png", "audit.svg"]
    layer = Path(str(dump[1])) / "layer-1.safetensors"
    tensors = {name: tensor.clone() for name, tensor in load_file(layer).items()}
    tensors["values.a"][1, 7] = tensors["values.a"][1, 30]
    save_file(tensors, layer)
    differs = perturbkv(*dump, "-o", "differs", "--junit", "differs.xml", "--explain")
    assert differs.code == 1
    assert " ".join(differs.out.split()).startswith("differs: request a, token 7, layer 1, head 1: ")
    cases = [ElementTree.parse(name).getroot() for name in ("exact.xml", "differs.xml")]
    assert [(case.get("tests"), case.get("failures")) for case in cases] == [("2", "0"), ("2", "1")]


def test_what_a_dump_does_not_take_is_refused(perturbkv: Run, dump: list[object]) -> None:
    for option in (["--dataset", "needle"], ["--situation", "block"], ["--quick"], ["--steps", 2]):
        refused(perturbkv(*dump, *option, "-o", "out"), f"{option[0]} has no effect on audit of a dump")
    (Path(str(dump[1])) / "layer-0.safetensors").write_bytes(b"cut")
    refused(perturbkv(*dump, "-o", "out"), "expected a complete safetensors file")
    assert not Path("out/audit.json").exists()


VERDICTS = {"plain": ("exact: all", 0), "prefix": ("differs: request b", 1), "chunked": ("exact: all", 0)}


@pytest.fixture
def asked_for(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The models and options that an engine is asked for, which answers at once."""
    engines_asked: list[Any] = []

    def answer(model: str, situations: list[str], **options: Any) -> Iterator[tuple[str, Any]]:
        engines_asked.append((model, list(situations), options["dtype"]))
        for name in situations:
            summary, code = VERDICTS[name]
            yield name, SimpleNamespace(summary=summary, exit_code=code, to_dict=lambda summary=summary: [summary])

    monkeypatch.setattr(vllm_audit, "audit_vllm", answer)
    return engines_asked


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
