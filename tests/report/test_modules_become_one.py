"""The page's ES modules as one inline module, and each form that is refused."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pytest

from perturbkv.reporting.html import ModuleError, bundle, check_inline
from tests.support.modules import SOURCES, of

PAGE = Path(__file__).resolve().parents[2] / "perturbkv" / "reporting" / "page"


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
        ({"main.js": 'import { a b } from "./a.js";\n'}, "imports 'a b', which is no name"),
        ({"main.js": 'import { thrice } from "./a.js";\n'}, "imports thrice of a.js, which exports twice, Counter"),
        ({"main.js": 'import { x } from "./nowhere.js";\n'}, "main.js imports nowhere.js, which is not there"),
        ({"deep-er.js": 'import { twice } from "./a.js";\n'}, "each other: a.js → deep-er.js → a.js"),
        ({"a.js": 'const s = "</ScRipt>";\n'}, "holds '</ScRipt'"),
        ({"a.js": 'const s = "<!-- <script>";\n'}, "holds '<!--'"),
        ({"a.js": "const s = 1;\r\n"}, "carriage return"),
    ],
)
def test_another_form_is_refused_by_name(change: Mapping[str, str], said: str) -> None:
    with pytest.raises(ModuleError, match=said):
        of({**SOURCES, **change})


def test_an_entry_that_is_not_there_is_refused() -> None:
    with pytest.raises(ModuleError, match="the page imports main.js, which is not there"):
        of({})


def test_our_own_modules_join() -> None:
    text = bundle(lambda name: (PAGE / name).read_text())
    assert check_inline("all", text) == text
    assert text.startswith("// ")
