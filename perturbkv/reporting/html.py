"""A payload as one HTML page: nothing is loaded from elsewhere, and text from outside is never markup."""

from __future__ import annotations

import base64
import json
import re
from functools import cache
from importlib.resources import files
from typing import Any

from jinja2 import Environment, StrictUndefined, Template
from markupsafe import Markup

from perturbkv.reporting.document import Payload
from perturbkv.reporting.modules import check_inline, joined
from perturbkv.reporting.policy import policy
from perturbkv.visible import in_json

_PAGE, _VENDOR = files("perturbkv.reporting") / "page", files("perturbkv.reporting") / "vendor"
_MARKUP = {"<": "\\u003c", ">": "\\u003e", "&": "\\u0026"}
"""What a JSON document writes otherwise, so that no text in it ends its script."""
_PLAIN = re.compile(r"[A-Za-z][A-Za-z0-9_.-]*")
_TAKEN = frozenset(
    "main page choose verdict map scatter head prompt layers assumption budgets ablation answers".split()
)
"""Ids of the page's own parts."""
LIBRARIES = ("d3.min.js", "plot.min.js")
"""Files of `vendor/`, in the order that they need each other."""


def page(payload: Payload) -> str:
    """The whole page.

    Args:
        payload: what it shows.

    Returns:
        HTML, in UTF-8 to be written.

    Raises:
        ValueError: where the document holds a number that JSON has not, or a block's name is no plain word.
    """
    scripts = [*(_library(name) for name in LIBRARIES), _ours()]
    style = _style()
    return _template().render(
        payload=payload,
        policy=policy(scripts, [style]),
        style=Markup(style),
        data=Markup(as_json(payload.document)),
        blocks={_word(name): base64.b64encode(block).decode() for name, block in payload.blocks.items()},
        libraries=[Markup(script) for script in scripts[:-1]],
        module=Markup(scripts[-1]),
        made_with=payload.document.get("made_with", "perturbkv"),
        vendored=vendored(),
        licences=(_VENDOR / "LICENCES.txt").read_text(encoding="utf-8"),
    )


def as_json(document: Any) -> str:
    """A JSON document that HTML may hold between the tags of a script."""
    text = in_json(json.dumps(document, ensure_ascii=False, allow_nan=False, separators=(",", ":")))
    for sign, written in _MARKUP.items():
        text = text.replace(sign, written)
    return text


def vendored() -> list[dict[str, str]]:
    """The libraries in the page: package, version, file, npm's integrity and the file's own sha256."""
    found: list[dict[str, str]] = json.loads((_VENDOR / "vendor.json").read_text(encoding="utf-8"))
    return found


@cache
def _template() -> Template:
    environment = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    return environment.from_string((_PAGE / "page.html.j2").read_text(encoding="utf-8"))


@cache
def _library(name: str) -> str:
    return check_inline(name, (_VENDOR / name).read_text(encoding="utf-8"))


@cache
def _ours() -> str:
    return joined(lambda name: (_PAGE / name).read_text(encoding="utf-8"))


@cache
def _style() -> str:
    style = (_PAGE / "page.css").read_text(encoding="utf-8")
    if "</style" in style.lower() or "\r" in style:
        msg = "page.css holds '</style' or a carriage return, which an inline style cannot"
        raise ValueError(msg)
    return style


def _word(name: str) -> str:
    """A block's id. Raises ValueError for one that no attribute holds as it is, or that a part of the page has."""
    if not _PLAIN.fullmatch(name) or name in _TAKEN:
        msg = f"expected a block's name of letters, digits, '-', '_' and '.' that no part of the page has, got '{name}'"
        raise ValueError(msg)
    return name
