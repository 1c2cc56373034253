"""The page's modules as one inline module, and its libraries as npm gave them."""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace

import pytest

from perturbkv.reporting.html import LIBRARIES, ModuleError, bundle, check_inline
from tests.support.modules import SOURCES, of
from tests.support.scripts import functions

MODULES = Path(__file__).resolve().parents[2] / "perturbkv" / "reporting" / "page"


def test_every_module_stands_once_behind_what_it_imports() -> None:
    text = of(SOURCES)
    places = [text.index(f"// {name}\n") for name in ("deep-er.js", "a.js", "main.js")]
    assert places == sorted(places)
    assert text.count("// deep-er.js\n") == 1


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"a.js": "export default function () {}\n"}, "a.js has 'export default function"),
        ({"a.js": "export { twice };\n"}, "only import"),
        ({"a.js": "export let twice = 1;\n"}, "only import"),
        ({"a.js": "export const { twice } = { twice: 1 };\n"}, "only import"),
        ({"a.js": "export function* twice() {}\n"}, "only import"),
        ({"a.js": 'export * from "./deep-er.js";\n'}, "only import"),
        ({"main.js": 'import * as a from "./a.js";\n'}, "main.js has 'import \\* as a"),
        ({"main.js": 'import a from "./a.js";\n'}, "only import"),
        ({"main.js": 'import "./a.js";\n'}, "only import"),
        ({"main.js": 'import { twice } from "d3";\n'}, "only import"),
        ({"main.js": 'import { twice } from "https://x.org/a.js";\n'}, "only import"),
        ({"main.js": '  import { twice } from "./a.js";\n'}, "only import"),
        ({"main.js": 'import { twice } from "./a.js"\n'}, "only import"),
        ({"main.js": 'const a = await import("./a.js");\n'}, "only import"),
        ({"main.js": "const a = import.meta.url;\n"}, "only import"),
        ({"a.js": 'const s = "</ScRipt>";\n'}, "holds '</ScRipt'"),
        ({"a.js": 'const s = "<!-- <script>";\n'}, "holds '<!--'"),
        ({"a.js": "const s = 1;\r\n"}, "carriage return"),
    ],
)
def test_another_form_is_refused_by_name(change: Mapping[str, str], said: str) -> None:
    with pytest.raises(ModuleError, match=said):
        of({**SOURCES, **change})


def test_our_own_modules_join() -> None:
    text = bundle(lambda name: (MODULES / name).read_text())
    assert check_inline("all", text) == text
    assert text.startswith("// ")


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
