"""The libraries in the page, their licences, and the script that renews them."""

from __future__ import annotations

import base64
import hashlib
import json
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace

import pytest

from perturbkv.reporting.html import LIBRARIES
from tests.support.scripts import functions

FOLDER = Path(__file__).resolve().parents[2] / "perturbkv" / "reporting" / "vendor"
ROWS = json.loads((FOLDER / "vendor.json").read_text())
vendor = SimpleNamespace(**functions("vendor"))


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row["package"])
def test_a_library_is_the_file_that_is_written_down(row: dict[str, str]) -> None:
    assert hashlib.sha256((FOLDER / row["file"]).read_bytes()).hexdigest() == row["sha256"]
    assert len(base64.b64decode(row["integrity"].removeprefix("sha512-"))) == 64
    assert row["version"] in (FOLDER / row["file"]).read_text()[:100]


def test_the_script_renews_what_is_there() -> None:
    assert [asdict(one) for one in vendor.wanted(vendor.read(), {})] == ROWS
    assert [one["file"] for one in ROWS] == list(LIBRARIES)
    held = {path.name for path in FOLDER.iterdir()}
    assert held == {*LIBRARIES, "LICENCES.txt", "vendor.json"}


def test_another_version_has_no_integrity_yet() -> None:
    changed, same = vendor.wanted(vendor.read(), {"d3": "7.9.0"})
    assert (changed.version, changed.integrity, changed.file) == ("7.9.0", "", "d3.min.js")
    assert asdict(same) == ROWS[1]
    with pytest.raises(SystemExit, match="expected packages of d3, @observablehq/plot, got d4"):
        vendor.wanted(vendor.read(), {"d4": "1"})


def fetched(tmp_path: Path, integrity: str) -> tuple[Path, dict[str, dict[str, str]]]:
    """What npm would leave, of one package with another that it bundles."""
    for name, path, licence in (("d3", "dist/d3.min.js", "LICENSE"), ("internmap", "x.js", "license.md")):
        (tmp_path / name / path).parent.mkdir(parents=True)
        (tmp_path / name / path).write_text("code")
        (tmp_path / name / licence).write_text("as you like \n")
    lock = {f"node_modules/{name}": {"version": "7.9.2", "integrity": integrity} for name in ("d3", "internmap")}
    return tmp_path, {"": {}, **lock}


def test_a_library_with_another_integrity_is_refused(tmp_path: Path) -> None:
    d3 = vendor.read()[0]
    row = vendor.renewed(d3, *fetched(tmp_path, d3.integrity))
    assert row.sha256 == hashlib.sha256(b"code").hexdigest()
    with pytest.raises(SystemExit, match=r"expected d3 7\.9\.2 with sha512-.*, got sha512-other"):
        vendor.renewed(d3, *fetched(tmp_path / "other", "sha512-other"))


def test_licences_of_what_is_bundled_stand_once(tmp_path: Path) -> None:
    assert vendor.licences(*fetched(tmp_path, ""), ["d3"]) == "d3 7.9.2, internmap 7.9.2\n\nas you like\n"
    told = (FOLDER / "LICENCES.txt").read_text()
    for name in ("d3", "@observablehq/plot", "delaunator", "robust-predicates", "internmap", "interval-tree-1d",
                 "binary-search-bounds", "isoformat", "d3-scale-chromatic"):  # fmt: skip
        assert f"{name} " in told
