"""Our ES modules as one inline module, as a page from disk cannot import its neighbours.

Each module becomes a function that is called once and gives its exports; imports become destructurings of those. What
is supported is what we write: `import { a, b as c } from "./x.js";` and `export` before a function, class or const,
each at the beginning of a line.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass

_COMMENT = re.compile(r"/\*.*?\*/|^[ \t]*//[^\n]*", re.DOTALL | re.MULTILINE)
_IMPORT = re.compile(r'^import\s*\{([\w$\s,]*)\}\s*from\s*"\./([\w-]+\.js)";', re.MULTILINE)
_EXPORT = re.compile(r"^export\s+((?:async\s+)?function|const|class)\s+([\w$]+)(?=[\s(={])", re.MULTILINE)
_OTHER = re.compile(r"^[ \t]*(?:import|export)\b[^\n]*|\bimport\s*[(.][^\n]*", re.MULTILINE)
_NAMED = re.compile(r"([\w$]+)(?:\s+as\s+([\w$]+))?")
_ENDS_A_SCRIPT = re.compile(r"</script|<!--|<script", re.IGNORECASE)
Read = Callable[[str], str]
"""Gives the source of a module by its file name; raises FileNotFoundError for one that is not there."""


class ModuleError(ValueError):
    """A module that cannot be joined with the others: the message says which, and what it has."""


@dataclass(frozen=True)
class _Module:
    """One source: what it imports from where, as (name there, name here), what it exports, and the rest."""

    imports: tuple[tuple[str, tuple[tuple[str, str], ...]], ...]
    exports: tuple[str, ...]
    body: str


def joined(read: Read, entry: str = "main.js") -> str:
    """One module that does what the entry does.

    Args:
        read: the modules' sources.
        entry: file name of the first one.

    Raises:
        ModuleError: for a form that is not supported, a module or name that is not there, modules that import each
            other, and text that would end the inline script.
    """
    found: dict[str, _Module] = {}
    _collect(read, entry, (), found)
    return "".join(_wrapped(name, module) for name, module in found.items())


def check_inline(name: str, source: str) -> str:
    """The source. Raises ModuleError for text that an HTML page reads as the end of a script, or changes."""
    if ends := _ENDS_A_SCRIPT.search(source):
        msg = f"{name} holds '{ends[0]}', which an inline script cannot; write it in pieces"
        raise ModuleError(msg)
    if "\r" in source or "\0" in source:
        msg = f"{name} holds a carriage return or NUL, which a browser changes before it compares the script's hash"
        raise ModuleError(msg)
    return source


def _collect(read: Read, name: str, way: tuple[str, ...], found: dict[str, _Module]) -> None:
    """Put a module behind everything that it imports."""
    if name in way:
        msg = f"modules import each other: {' → '.join((*way[way.index(name) :], name))}"
        raise ModuleError(msg)
    if name in found:
        return
    module = _parsed(name, _source(read, name, way))
    for other, names in module.imports:
        _collect(read, other, (*way, name), found)
        for there, _ in names:
            if there not in found[other].exports:
                msg = f"{name} imports {there} of {other}, which exports {', '.join(found[other].exports) or 'nothing'}"
                raise ModuleError(msg)
    found[name] = module


def _source(read: Read, name: str, way: tuple[str, ...]) -> str:
    try:
        return check_inline(name, read(name))
    except FileNotFoundError:
        msg = f"{way[-1] if way else 'the page'} imports {name}, which is not there"
        raise ModuleError(msg) from None


def _parsed(name: str, source: str) -> _Module:
    code = _COMMENT.sub("", source)  # types are imported in comments
    imports = tuple((found[2], _names(name, found[1])) for found in _IMPORT.finditer(code))
    exports = tuple(found[2] for found in _EXPORT.finditer(code))
    if other := _OTHER.search(_EXPORT.sub("", _IMPORT.sub("", code))):
        msg = f"{name} has '{other[0].strip()}'; only import {{ … }} from \"./x.js\"; and export function, const, class"
        raise ModuleError(msg)
    return _Module(imports, exports, _EXPORT.sub(r"\1 \2", _IMPORT.sub("", source)).strip())


def _names(name: str, listed: str) -> tuple[tuple[str, str], ...]:
    pairs = []
    for one in filter(None, (part.strip() for part in listed.split(","))):
        if not (found := _NAMED.fullmatch(one)):
            msg = f"{name} imports '{one}', which is no name"
            raise ModuleError(msg)
        pairs.append((found[1], found[2] or found[1]))
    return tuple(pairs)


def _wrapped(name: str, module: _Module) -> str:
    """The module as a function that is called at once and whose result later ones take apart."""
    taken = "".join(
        f"const {{ {', '.join(f'{there}: {here}' for there, here in names)} }} = {_variable(other)};\n"
        for other, names in module.imports
    )
    given = f"return {{ {', '.join(module.exports)} }};"
    return f"// {name}\nconst {_variable(name)} = (() => {{\n{taken}{module.body}\n{given}\n}})();\n"


def _variable(name: str) -> str:
    return f"$module_{name.removesuffix('.js').replace('-', '_')}"
