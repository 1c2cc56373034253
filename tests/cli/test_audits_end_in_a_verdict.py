"""`perturbkv audit` ends in a verdict, an exit code, a document and a figure; what is asked wrongly in one line."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from tests.audit import planted
from tests.support.asked import refused

Run = Callable[..., Any]
FILE = planted.__file__


@pytest.fixture
def asked(model: Path, data: Path) -> list[object]:
    return ["--model", model, "--dataset", data, "--samples", 1, "--steps", 2]


def test_the_verdict_is_the_first_line_and_the_exit_code(perturbkv: Run, asked: list[object]) -> None:
    exact = perturbkv("audit", f"{FILE}:right", *asked, "-o", "right")
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


def test_no_line_is_wider_than_the_terminal(perturbkv: Run, asked: list[object]) -> None:
    assert perturbkv("audit", f"{FILE}:quantised", *asked, "-o", "out").code != 2


def test_the_document_on_stdout_is_the_files(perturbkv: Run, asked: list[object]) -> None:
    ran = perturbkv("audit", f"{FILE}:right", *asked, "--situation", "single", "--json", "-o", "out")
    document = ran.json()
    assert document == json.loads(Path("out/audit.json").read_text())
    assert (document["verdict"], len(document["runs"])) == ("exact", 1)


def test_results_of_another_audit_stay(perturbkv: Run, asked: list[object]) -> None:
    Path("out").mkdir()
    Path("out/audit.json").write_text("{}")
    ran = perturbkv("audit", f"{FILE}:right", *asked, "-o", "out")
    refused(ran, "--overwrite")
    assert perturbkv("audit", f"{FILE}:right", *asked, "--no-loss", "--overwrite", "-o", "out").code == 0


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


def test_allowed_changes_are_named_kinds(perturbkv: Run, asked: list[object]) -> None:
    few = [*asked, "--situation", "single", "--no-loss"]
    assert perturbkv("audit", f"{FILE}:rounded", *few, "-o", "one").code == 1
    allowed = perturbkv("audit", f"{FILE}:rounded", *few, "--allow", "rounded", "-o", "two")
    assert (allowed.code, "as allowed, which moves it by at most" in " ".join(allowed.out.split())) == (0, True)
    refused(
        perturbkv("audit", f"{FILE}:rounded", *few, "--allow", "moved", "-o", "three"),
        "unknown kind of change",
        "rounded",
    )
