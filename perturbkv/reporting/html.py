"""The HTML page of a payload: it loads nothing, and text from traces is never markup.

A page from disk cannot import its neighbours, so the ES modules become one inline module: each module is a function
that is called once and returns its exports; imports are destructurings of those. Supported are the forms that the
modules use: `import { a, b as c } from "./x.js";` and `export` before a function, class or const, each at the beginning
of a line. The content security policy allows no network, and no script or style but those in the page.
"""

from __future__ import annotations

import base64
import hashlib
import json
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from typing import Any

from jinja2 import Environment, StrictUndefined, Template
from markupsafe import Markup

from perturbkv.escaping import escape_json
from perturbkv.reporting.page_blocks import Payload

_COMMENT = re.compile(r"/\*.*?\*/|^[ \t]*//[^\n]*", re.DOTALL | re.MULTILINE)
_IMPORT = re.compile(r'^import\s*\{([\w$\s,]*)\}\s*from\s*"\./([\w-]+\.js)";', re.MULTILINE)
_EXPORT = re.compile(r"^export\s+((?:async\s+)?function|const|class)\s+([\w$]+)(?=[\s(={])", re.MULTILINE)
_OTHER = re.compile(r"^[ \t]*(?:import|export)\b[^\n]*|\bimport\s*[(.][^\n]*", re.MULTILINE)
_AS = re.compile(r"\s+as\s+")
_ENDS_A_SCRIPT = re.compile(r"</script|<!--|<script", re.IGNORECASE)
Read = Callable[[str], str]
"""Function that returns the source of a module by its file name."""


class ModuleError(ValueError):
    """An error of a module that cannot be bundled."""


@dataclass(frozen=True)
class _Module:
    """A JavaScript module: imports, as source and text between braces, exports, and remaining code."""

    imports: tuple[tuple[str, str], ...]
    exports: tuple[str, ...]
    body: str


def bundle(read: Read, entry: str = "main.js") -> str:
    """Return a single JavaScript module equivalent to the entry module with all its imports.

    Args:
        read: returns the source of a module.
        entry: file name of the entry module.

    Raises:
        ModuleError: for a form that is not supported, and text that would end the inline script.
    """
    modules: dict[str, _Module] = {}
    _collect_modules(read, entry, modules)
    return "".join(_wrap_module(name, module) for name, module in modules.items())


def check_inline(name: str, source: str) -> str:
    """Return the source unchanged. Raises ModuleError for text that ends a script in HTML, or that browsers change."""
    if ends := _ENDS_A_SCRIPT.search(source):
        raise ModuleError(f"{name} holds '{ends[0]}', which an inline script cannot; write it in pieces")
    if "\r" in source or "\0" in source:
        raise ModuleError(
            f"{name} holds a carriage return or NUL, which a browser changes before it compares the script's hash"
        )
    return source


def _collect_modules(read: Read, name: str, modules: dict[str, _Module]) -> None:
    """Append a module to `modules` after all its imports."""
    if name not in modules:
        module = _parse_module(name, check_inline(name, read(name)))
        for other, _ in module.imports:
            _collect_modules(read, other, modules)
        modules[name] = module


def _parse_module(name: str, source: str) -> _Module:
    """Return a module parsed from its source. Raises ModuleError for unsupported forms of import and export."""
    code = _COMMENT.sub("", source)  # types are imported in comments
    imports = tuple((match[2], match[1]) for match in _IMPORT.finditer(code))
    exports = tuple(match[2] for match in _EXPORT.finditer(code))
    if other := _OTHER.search(_EXPORT.sub("", _IMPORT.sub("", code))):
        raise ModuleError(
            f"{name} has '{other[0].strip()}'; only import {{ … }} from \"./x.js\"; and export function, const, class"
        )
    return _Module(imports, exports, _EXPORT.sub(r"\1 \2", _IMPORT.sub("", source)).strip())


def _wrap_module(name: str, module: _Module) -> str:
    """Return a module as JavaScript code: an immediately called function that returns the exports."""
    imports = "".join(
        f"const {{{_AS.sub(': ', names)}}} = {_module_variable(other)};\n" for other, names in module.imports
    )
    exports = f"return {{ {', '.join(module.exports)} }};"
    return f"// {name}\nconst {_module_variable(name)} = (() => {{\n{imports}{module.body}\n{exports}\n}})();\n"


def _module_variable(name: str) -> str:
    """Return the name of the JavaScript constant that holds a module's exports."""
    return f"$module_{name.removesuffix('.js').replace('-', '_')}"


PLOT_CLASS = "plot-d6a7b5"
"""Class of Plot's figures; with another one the policy would refuse their styles."""
_SWATCHES = """\
:where(.{name}-swatches) {{
  font-family: system-ui, sans-serif;
  font-size: 10px;
  margin-bottom: 0.5em;
}}
:where(.{name}-swatch > svg) {{
  margin-right: 0.5em;
  overflow: visible;
}}
"""
PLOT_STYLES = tuple(
    text.format(name=PLOT_CLASS)
    for text in (
        """\
:where(.{name}) {{
  --plot-background: white;
  display: block;
  height: auto;
  height: intrinsic;
  max-width: 100%;
}}
:where(.{name} text),
:where(.{name} tspan) {{
  white-space: pre;
}}""",
        """\
:where(.{name}-ramp) {{
  display: block;
  height: auto;
  height: intrinsic;
  max-width: 100%;
  overflow: visible;
}}
:where(.{name}-ramp text) {{
  white-space: pre;
}}""",
        _SWATCHES
        + """\
:where(.{name}-swatches-wrap) {{
  display: flex;
  align-items: center;
  min-height: 33px;
  flex-wrap: wrap;
}}
:where(.{name}-swatches-wrap .{name}-swatch) {{
  display: inline-flex;
  align-items: center;
  margin-right: 1em;
}}""",
        _SWATCHES
        + """\
:where(.{name}-swatches-columns .{name}-swatch) {{
  display: flex;
  align-items: center;
  break-inside: avoid;
  padding-bottom: 1px;
}}
:where(.{name}-swatches-columns .{name}-swatch::before) {{
  flex-shrink: 0;
}}
:where(.{name}-swatches-columns .{name}-swatch-label) {{
  white-space: nowrap;
  overflow: hidden;
  text-overflow: ellipsis;
}}""",
    )
)
"""The `<style>` texts of Plot's figures, its colour ramps and its swatches, in lines or in columns."""


def content_security_policy(scripts: Sequence[str], styles: Sequence[str]) -> str:
    """Return the content security policy that allows exactly the given inline scripts and styles, and Plot's styles.

    Args:
        scripts: text between the tags of each inline script.
        styles: text between the tags of each inline style.

    Returns:
        The content of the `<meta http-equiv="Content-Security-Policy">`.
    """
    rules = {
        "default-src": "'none'",
        "script-src": " ".join(map(_policy_source, scripts)),
        "style-src": " ".join(map(_policy_source, (*styles, *PLOT_STYLES))),
        "img-src": "data:",
        "base-uri": "'none'",
        "form-action": "'none'",
    }
    return "; ".join(f"{name} {allowed}" for name, allowed in rules.items())


def _policy_source(text: str) -> str:
    """Return a script's or style's source expression `'sha256-…'` for the content security policy."""
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"


_PAGE, _VENDOR = files("perturbkv.reporting") / "page", files("perturbkv.reporting") / "vendor"
_MARKUP = {"<": "\\u003c", ">": "\\u003e", "&": "\\u0026"}
"""Escapes in a JSON document, so that no text in it ends its script."""
_BLOCK_ID = re.compile(r"[A-Za-z][A-Za-z0-9_.-]*")
_ELEMENT_IDS = frozenset(
    (
        "main page choose verdict map scatter head prompt missed kinds layers assumption budgets equal-bytes "
        "ablation perplexity answers"
    ).split()
)
"""Ids of the elements in the page's template."""
LIBRARIES = ("d3.min.js", "plot.min.js")
"""Files of `vendor/`, in the order of their dependencies."""


def page(payload: Payload) -> str:
    """Return the complete HTML page of a payload.

    Args:
        payload: the contents.

    Returns:
        HTML, to be written as UTF-8.

    Raises:
        ValueError: where the document holds a number that JSON cannot, or a block's name is no plain word.
    """
    scripts = [*(_library_source(name) for name in LIBRARIES), _page_module()]
    traces = payload.document.get("traces", ())
    measures = {one["key"] for part in traces for one in part["measures"]}
    style = _page_style()
    return _template().render(
        payload=payload,
        staged="sigma_stage1" in measures,
        effects="effect_isolated" in measures,
        missed=any("missed" in part for part in traces),
        kinds=any("kinds" in part for part in traces),
        perplexity=any("perplexity" in part for part in traces),
        equal_bytes=any("equal_bytes" in part for part in traces),
        policy=content_security_policy(scripts, [style]),
        style=Markup(style),
        data=Markup(as_json(payload.document)),
        blocks={_check_id(name): base64.b64encode(block).decode() for name, block in payload.blocks.items()},
        libraries=[Markup(script) for script in scripts[:-1]],
        module=Markup(scripts[-1]),
        made_with=payload.document.get("made_with", "perturbkv"),
        libraries_used=libraries(),
        licences=(_VENDOR / "LICENCES.txt").read_text(encoding="utf-8"),
    )


def as_json(document: Any) -> str:
    """Return a JSON document as text that is safe inside an HTML script element."""
    text = escape_json(json.dumps(document, ensure_ascii=False, allow_nan=False, separators=(",", ":")))
    for sign, escape in _MARKUP.items():
        text = text.replace(sign, escape)
    return text


def libraries() -> list[dict[str, str]]:
    """Return the libraries of the page: package, version, file, npm's integrity and the sha256 of the file."""
    described: list[dict[str, str]] = json.loads((_VENDOR / "vendor.json").read_text(encoding="utf-8"))
    return described


@cache
def _template() -> Template:
    """Return the page's template."""
    environment = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    return environment.from_string((_PAGE / "page.html.j2").read_text(encoding="utf-8"))


@cache
def _library_source(name: str) -> str:
    """Return the source of a library in `vendor/`. Raises ModuleError for text unsafe in an inline script."""
    return check_inline(name, (_VENDOR / name).read_text(encoding="utf-8"))


@cache
def _page_module() -> str:
    """Return the page's own JavaScript, bundled as one module."""
    return bundle(lambda name: (_PAGE / name).read_text(encoding="utf-8"))


@cache
def _page_style() -> str:
    """Return the page's CSS."""
    return (_PAGE / "page.css").read_text(encoding="utf-8")


def _check_id(name: str) -> str:
    """Return a block's name unchanged, as an element's id. Raises ValueError where it needs escaping or is taken."""
    if not _BLOCK_ID.fullmatch(name) or name in _ELEMENT_IDS:
        raise ValueError(
            f"expected a block's name of letters, digits, '-', '_' and '.' that no part of the page has, got '{name}'"
        )
    return name
