"""Execution of a single Python file of another package, with substitutes for its imports, outside `sys.modules`."""

from __future__ import annotations

import ast
import builtins
from collections.abc import Callable
from pathlib import Path
from typing import Any

Substitute = Callable[[str], Any]
"""Name of an imported module -> its substitute; None: the module itself."""


def run_file(path: Path, substitute: Substitute) -> dict[str, Any]:
    """Execute a Python file, suppressing its prints, and return its global names -> values.

    `substitute` gives what it imports. Its bare `except:` is compiled as `except Exception:`, so that Ctrl-C and
    `NoEnd` end loops that retry forever. Raises OSError, SyntaxError and ImportError as importing the file would.
    """

    def import_module(name: str, *more: Any) -> Any:
        module = substitute(name)
        return builtins.__import__(name, *more) if module is None else module

    tree = ast.fix_missing_locations(_BareExceptTransformer().visit(ast.parse(path.read_text(encoding="utf-8"))))
    file_builtins = {**vars(builtins), "__import__": import_module, "print": lambda *texts, **options: None}
    names: dict[str, Any] = {"__name__": path.stem, "__builtins__": file_builtins}
    exec(compile(tree, str(path), "exec", dont_inherit=True), names)
    return names


class NoEnd(BaseException):
    """Raised to end an endless loop; no subclass of `Exception`, which such loops catch."""


class _BareExceptTransformer(ast.NodeTransformer):
    """A transformer of source code that turns every bare `except:` into `except Exception:`."""

    def visit_ExceptHandler(self, node: ast.ExceptHandler) -> ast.AST:
        """Return an `except` clause with an explicit exception class."""
        node.type = node.type or ast.Name("Exception", ast.Load())
        return self.generic_visit(node)
