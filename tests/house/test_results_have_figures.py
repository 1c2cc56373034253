"""The table of contents of figures names every result that draws itself, and nothing else; and that this can fail."""

from __future__ import annotations

import importlib.util
import inspect
import pkgutil
from collections.abc import Iterator, Mapping

import perturbkv.analyses
from perturbkv.analyses.result import Result, ResultGroup
from perturbkv.figures import FIGURES


def subclasses(one: type) -> Iterator[type]:
    for below in one.__subclasses__():
        yield below
        yield from subclasses(below)


def named() -> set[str]:
    """What needs an entry: each result that analyses define, and its further figures; several are drawn singly."""
    for module in pkgutil.walk_packages(perturbkv.analyses.__path__, "perturbkv.analyses."):
        importlib.import_module(module.name)
    found = set()
    for result in subclasses(Result):
        if result.__module__.startswith("perturbkv.analyses.") and not inspect.isabstract(result):
            further = {f"{result.__name__}.{name}" for name in vars(result) if name.startswith("plot_")}
            found |= further if issubclass(result, ResultGroup) else further | {result.__name__}
    return found


def astray(figures: Mapping[str, tuple[str, str]]) -> set[str]:
    """Names without an entry, entries without a name, and those whose module has no such function."""
    wrong = named() ^ figures.keys()
    for name, (place, headline) in figures.items():
        module, _, function = place.partition(":")
        found = importlib.util.find_spec(f"perturbkv.figures.{module}")
        drawn = found and getattr(importlib.import_module(found.name), function or "draw", None)
        if (
            not headline
            or not inspect.isfunction(drawn)
            or list(inspect.signature(drawn).parameters) != ["result", "width_mm"]
        ):
            wrong.add(name)
    return wrong


def test_every_result_has_its_figure() -> None:
    assert astray(FIGURES) == set()


def test_what_is_planted_is_found() -> None:
    assert astray({name: place for name, place in FIGURES.items() if name != "Patching"}) == {"Patching"}
    assert astray({name: place for name, place in FIGURES.items() if name != "Needle.plot_digits"}) == {
        "Needle.plot_digits"
    }
    assert astray({**FIGURES, "Former": ("patching", "Former")}) == {"Former"}
    planted = {"Patching": ("swapped", "a"), "Quality": ("quality:draws", "b"), "Link": ("style:set_plain_ticks", "c")}
    assert astray({**FIGURES, **planted, "Audit": ("audit", "")}) == {*planted, "Audit"}
