"""Workflows and forms: what GitHub reads is well-formed and names what is there."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).resolve().parents[2]
WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))
FORMS = sorted(set((ROOT / ".github" / "ISSUE_TEMPLATE").glob("*.yml")) - {ROOT / ".github/ISSUE_TEMPLATE/config.yml"})
KINDS = {"textarea", "input", "checkboxes", "dropdown", "markdown"}


def read(path: Path) -> Any:
    return yaml.safe_load(path.read_text())


def targets() -> set[str]:
    return set(re.findall(r"^([a-z][\w-]*):", (ROOT / "Makefile").read_text(), re.MULTILINE))


def jobs(path: Path) -> list[dict[str, Any]]:
    return list(read(path)["jobs"].values())


def commands(job: dict[str, Any]) -> list[str]:
    """The `make` targets of a job, one of each value of its matrix."""
    lines = [line for step in job["steps"] for line in step.get("run", "").splitlines()]
    matrix = job.get("strategy", {}).get("matrix", {}).get("target", [])
    spread = [line.replace("${{ matrix.target }}", target) for line in lines for target in matrix or [""]]
    return [line.removeprefix("make ") for line in spread if line.startswith("make ")]


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.stem)
def test_a_workflow_runs_targets_that_are_there_with_pinned_actions_and_few_rights(path: Path) -> None:
    workflow = read(path)
    assert workflow[True]  # YAML reads the key `on` so
    assert workflow["permissions"] == {"contents": "read"}
    for job in jobs(path):
        assert job["timeout-minutes"]
        assert all(re.fullmatch(r"actions/[\w-]+@v\d+", step["uses"]) for step in job["steps"] if "uses" in step)
        checkouts = [step for step in job["steps"] if "checkout" in step.get("uses", "")]
        assert all(step["with"]["persist-credentials"] is False for step in checkouts)
        assert set(commands(job)) <= targets()
        assert bool(commands(job)) is bool(checkouts) is not bool(job.get("permissions"))  # what builds may not publish
    assert any(map(commands, jobs(path)))


def test_the_tests_workflow_runs_what_the_whole_check_runs() -> None:
    steps = set(re.search(r"for step in (.*?);", (ROOT / ".ci" / "run").read_text())[1].split())  # type: ignore[index]
    run = {target for path in WORKFLOWS for job in jobs(path) for target in commands(job)}
    assert steps - {"develop"} <= run


def test_the_site_is_published_from_where_it_is_built() -> None:
    steps = [step for job in jobs(ROOT / ".github" / "workflows" / "docs.yml") for step in job["steps"]]
    [folder] = [step["with"]["path"] for step in steps if "upload-pages" in step.get("uses", "")]
    assert f" {folder}\n" in (ROOT / "Makefile").read_text()


@pytest.mark.parametrize("path", FORMS, ids=lambda path: path.stem)
def test_a_form_asks_for_named_things(path: Path) -> None:
    form = read(path)
    assert form["name"] and form["description"]
    fields = form["body"]
    assert len({field["id"] for field in fields}) == len(fields)
    assert {field["type"] for field in fields} <= KINDS
    assert all(field["attributes"]["label"] for field in fields)
    assert any(field.get("validations", {}).get("required") for field in fields)


def test_the_package_can_be_searched_for_by_the_pythons_that_are_tested() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    (tested,) = [
        job["strategy"]["matrix"]["python"] for job in jobs(WORKFLOWS[-1]) if "python" in str(job.get("strategy"))
    ]
    named = [one.rpartition(" ")[2] for one in project["classifiers"] if re.search(r"Python :: \d\.\d+", one)]
    assert named == tested
    assert "kv-cache" in project["keywords"]


def test_the_example_workflow_runs_an_audit_that_the_command_takes() -> None:
    workflow = read(ROOT / "examples" / "ci" / "audit.yml")
    assert workflow["permissions"] == {"contents": "read"}
    (job,) = workflow["jobs"].values()
    assert job["timeout-minutes"]
    lines = [line for step in job["steps"] for line in step.get("run", "").splitlines()]
    (audit,) = [line for line in lines if line.startswith("perturbkv audit")]
    help_screen = (ROOT / "tests" / "cli" / "snapshots" / "audit_-h.txt").read_text()
    options = [word for word in audit.split() if word.startswith("--")]
    assert options == ["--quick", "--junit"]
    assert all(option in help_screen for option in options)
    (kept,) = [step["with"]["path"] for step in job["steps"] if "upload-artifact" in step.get("uses", "")]
    assert kept in audit.split()
