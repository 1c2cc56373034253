"""Before anything of ours is imported: no hub is asked, and every annotated axis is checked while tests run."""

from __future__ import annotations

import gc
import os
from collections.abc import Callable
from functools import cache, wraps
from types import CellType, CodeType, FunctionType
from typing import Any

import jaxtyping
import typer.main
from beartype import beartype
from beartype.roar import BeartypeCallHintViolation
from jaxtyping import TypeCheckError, install_import_hook
from jaxtyping._decorator import _destring_annotation
from jaxtyping._storage import pop_shape_memo, push_shape_memo

os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["TQDM_DISABLE"] = "1"
os.environ.setdefault("TRITON_INTERPRET", "1")  # before a kernel is decorated; with 0 kernels are compiled for a GPU

os.fsync = lambda descriptor: None  # what a test leaves need not survive a power cut
typer.main.get_command = cache(typer.main.get_command)  # all options of all commands: made once, not for every command

CHECKED = (  # not kernels: Triton compiles a function's source in its module's names, which a checking wrapper hides
    "theory",
    "scoring.value_norms",
    "scoring.window_attention",
    "selection",
    "cache",
    "pipeline.sample",
    "pipeline.variants.given_sets",
    "pipeline.answers.generation",
    "pipeline.answers.compression",
    "pipeline.answers.answer_heads",
)


def _with_hints(function: Any, of: Any) -> Any:
    """The function with the hints of another, which are strings there."""
    hints = {name: _destring_annotation(hint, of.__globals__) for name, hint in of.__annotations__.items()}
    function.__annotations__ = hints
    return function


_COMPILED: dict[CodeType, Any] = {}
"""Code of a function inside a function -> what checks its calls, compiled once though the function is made again."""


def _bound(of: Any) -> Any:
    """What checks calls of a function inside a function; nothing that one of them closes over is held."""
    if of.__code__ not in _COMPILED:
        cells = tuple(CellType() for _ in of.__code__.co_freevars)
        _COMPILED[of.__code__] = beartype(_with_hints(FunctionType(of.__code__, of.__globals__, None, None, cells), of))
    known = _COMPILED[of.__code__]
    if known.__code__ is of.__code__:  # it has no hints
        return of
    made = FunctionType(known.__code__, known.__globals__)
    made.__kwdefaults__ = {**known.__kwdefaults__, "__beartype_func": of}
    return made


def _checked(*, typechecker: Any, jaxtyped: Any = jaxtyping.jaxtyped) -> Callable[[Any], Any]:
    """The decorator of the import hook: every call is checked as by jaxtyping's own, which does it twice and slowly."""

    def decorated(of: Any) -> Any:
        if isinstance(of, type):
            return jaxtyped(of, typechecker=typechecker)
        checking = _bound(of) if "<locals>" in of.__qualname__ else beartype(_with_hints(of, of))

        @wraps(of)
        def call(*arguments: Any, **more: Any) -> Any:
            push_shape_memo({})
            try:
                return checking(*arguments, **more)
            except BeartypeCallHintViolation as error:
                jaxtyped(of, typechecker=typechecker)(*arguments, **more)  # which tells the axes
                raise TypeCheckError(str(error)) from error
            finally:
                pop_shape_memo()

        return call

    return decorated


jaxtyping.jaxtyped = _checked
install_import_hook([f"perturbkv.{name}" for name in CHECKED], "beartype.beartype")

from perturbkv.cli import planned_run  # noqa: E402

planned_run._PROBE_S = 0.0  # a run's time is estimated from a single product of matrices


def pytest_collection_finish() -> None:
    """Leave libraries and collected tests out of garbage collections, which took a tenth of the suite's time."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(50_000, 20, 20)


def pytest_unconfigure() -> None:
    """Hand everything back to the collector, so that libraries see their objects go at the interpreter's end."""
    gc.unfreeze()
