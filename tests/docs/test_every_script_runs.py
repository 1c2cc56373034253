"""The scripts of docs/ that read only what is in the repository say what their pages need."""

from __future__ import annotations

import runpy
from pathlib import Path

from tests.support.scripts import DOCS, SCRIPTS, script

BY_OTHERS = {"code_sizes.py", "models_page.py", "reference_pages.py", "report_pictures.py", "sizes.py", "vendor.py"}
"""Scripts that have a test of their own."""


def test_every_script_has_a_test_here() -> None:
    tested = Path(__file__).read_text()
    names = {path.name for path in SCRIPTS.glob("*.py")} - BY_OTHERS
    assert {name for name in names if f'script("{name.removesuffix(".py")}"' not in tested} == set()


def test_the_json_reference_is_what_results_declare() -> None:
    page = (DOCS / "reference" / "json.md").read_text()
    assert runpy.run_path(str(SCRIPTS / "json_reference.py"))["page"](page) == page  # script("json_reference")


def test_cost_shows_the_rows_and_where_the_sweeps_spend_their_seconds() -> None:
    said = script("cost", DOCS / "bench" / "cpu.json")
    assert "| `sweep-24` |" in said
    assert "sweep-24: " in said


def test_plan_calculates_the_table_of_its_page() -> None:
    said = script("plan", DOCS / "bench")
    assert said.splitlines()[:2] == ["| what | who | how much | how long |", "|---|---|---|---|"]
    assert said.strip() in (DOCS / "how-to" / "cluster.md").read_text()
