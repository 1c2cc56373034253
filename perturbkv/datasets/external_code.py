"""A Python file of another package, run alone: what it imports is chosen, and nothing is left in `sys.modules`."""

from __future__ import annotations

import ast
import builtins
from collections.abc import Callable
from pathlib import Path
from typing import Any

StandIn = Callable[[str], Any]
"""Name of a module -> what stands in for it; None: the module itself."""


def run_file(path: Path, stand_in: StandIn) -> dict[str, Any]:
    """The names that a file defines, each time anew; it prints nothing.

    Its bare `except:` is read as `except Exception:`, so that Ctrl-C and `NoEnd` get through loops that try for ever.

    Raises OSError, SyntaxError and ImportError as importing the file would.
    """

    def imported(name: str, *more: Any) -> Any:
        chosen = stand_in(name)
        return builtins.__import__(name, *more) if chosen is None else chosen

    tree = ast.fix_missing_locations(_Stoppable().visit(ast.parse(path.read_text(encoding="utf-8"))))
    own = {**vars(builtins), "__import__": imported, "print": lambda *said, **more: None}
    names: dict[str, Any] = {"__name__": path.stem, "__builtins__": own}
    exec(compile(tree, str(path), "exec", dont_inherit=True), names)
    return names


class NoEnd(BaseException):
    """A loop that would go on for ever; no `Exception`, which such loops catch."""


class _Stoppable(ast.NodeTransformer):
    def visit_ExceptHandler(self, node: ast.ExceptHandler) -> ast.AST:
        node.type = node.type or ast.Name("Exception", ast.Load())
        return self.generic_visit(node)
