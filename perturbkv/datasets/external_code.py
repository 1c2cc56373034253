"""Execution of a single Python file of another package, with substitutes for its imports, outside `sys.modules`."""

from __future__ import annotations

import ast
import builtins
from collections.abc import Callable
from pathlib import Path
from typing import Any

StandIn = Callable[[str], Any]
"""Name of a module -> its substitute; None: the module itself."""


def run_file(path: Path, stand_in: StandIn) -> dict[str, Any]:
    """Execute a file and return the names that it defines, new at each call; it prints nothing.

    Its bare `except:` is compiled as `except Exception:`, so that Ctrl-C and `NoEnd` end loops that retry forever.
    Raises OSError, SyntaxError and ImportError as importing the file would.
    """

    def import_module(name: str, *more: Any) -> Any:
        substitute = stand_in(name)
        return builtins.__import__(name, *more) if substitute is None else substitute

    tree = ast.fix_missing_locations(_Stoppable().visit(ast.parse(path.read_text(encoding="utf-8"))))
    own = {**vars(builtins), "__import__": import_module, "print": lambda *texts, **options: None}
    names: dict[str, Any] = {"__name__": path.stem, "__builtins__": own}
    exec(compile(tree, str(path), "exec", dont_inherit=True), names)
    return names


class NoEnd(BaseException):
    """A loop that would not end; not an `Exception`, which such loops catch."""


class _Stoppable(ast.NodeTransformer):
    def visit_ExceptHandler(self, node: ast.ExceptHandler) -> ast.AST:
        node.type = node.type or ast.Name("Exception", ast.Load())
        return self.generic_visit(node)
