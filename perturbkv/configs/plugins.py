"""Classes of somebody else: of a file, of an installed package; which version they are; what broke, in one line."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import importlib.util
import inspect
import sys
import traceback
from importlib.metadata import EntryPoint
from pathlib import Path
from types import ModuleType

from perturbkv.errors import PluginError
from perturbkv.user_files import MIB, FileKind

OURS = "perturbkv."
_KIND = FileKind("a Python file", PluginError, 16 * MIB)
_FILE = ".py:"
_LONGEST = 200
"""Characters of somebody else's message."""


def of_file(name: str) -> bool:
    """Whether a name means a class of a user's own file."""
    return _FILE in name


def is_ours(known: type) -> bool:
    """Whether a class is a part of the toolkit."""
    return known.__module__.startswith(OURS)


def digest(known: type) -> str:
    """What tells one version of somebody's class from another: of the file that it is in, or of its own source."""
    path = inspect.getsourcefile(known) if known.__module__ not in ("__main__", None) else None
    try:
        source = Path(path).read_bytes() if path else inspect.getsource(known).encode()
    except (OSError, TypeError):
        codes = [vars(known)[name] for name in sorted(vars(known)) if inspect.isfunction(vars(known)[name])]
        source = b"".join(made.__code__.co_code + repr(made.__code__.co_consts).encode() for made in codes)
    return hashlib.sha256(source).hexdigest()[:16]


def loaded(entry: EntryPoint) -> object:
    """What an installed package brings. Raises PluginError."""
    package = entry.dist.name if entry.dist else entry.value
    try:
        return entry.load()
    except Exception as error:
        msg = f"'{entry.name}' of the package {package} cannot be loaded: {said(error)}"
        raise PluginError(msg) from error


def class_of_file(name: str) -> object:
    """The class of `my_file.py:MyScore`. Raises PluginError."""
    path, _, wanted = name.rpartition(":")
    module = module_of_file(Path(path))
    found = vars(module).get(wanted)
    if not inspect.isclass(found):
        held = [key for key, one in vars(module).items() if inspect.isclass(one) and one.__module__ == module.__name__]
        msg = f"{path} has no class '{wanted}'; its classes: {', '.join(held) or 'none'}"
        raise PluginError(msg)
    return found


def module_of_file(path: Path) -> ModuleType:
    """A Python file as a module, run once for each content; what it prints goes to stderr. Raises PluginError."""
    _KIND.check(path)
    stamp = path.stat()
    return _module(path.resolve(), (stamp.st_mtime_ns, stamp.st_size))


@functools.cache
def _module(path: Path, stamp: tuple[int, int]) -> ModuleType:
    """`stamp` tells that the file was not written since."""
    known_as = f"perturbkv_plugin_{hashlib.sha256(bytes(path) + _KIND.read_bytes(path)).hexdigest()[:16]}"
    if known_as in sys.modules:
        return sys.modules[known_as]
    spec = importlib.util.spec_from_file_location(known_as, path)
    if spec is None or spec.loader is None:
        msg = f"{path} is no Python file"
        raise PluginError(msg)
    module = sys.modules[known_as] = importlib.util.module_from_spec(spec)
    try:
        with contextlib.redirect_stdout(sys.stderr):
            spec.loader.exec_module(module)
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # exits, and exceptions of no kind, are the file's too
        del sys.modules[known_as]
        msg = f"{path} cannot be loaded: {said(error)}"
        raise PluginError(msg) from error
    return module


def said(error: BaseException) -> str:
    """An error of somebody else's code in one line."""
    text = " ".join(_text(error).split())
    text = f"{text[:_LONGEST]}…" if len(text) > _LONGEST else text
    said_by = f"{type(error).__name__}: {text}".rstrip(": ")
    if not (frames := traceback.extract_tb(error.__traceback__)):
        return said_by
    file = Path(frames[-1].filename)
    return f"{said_by} ({file.name}, line {frames[-1].lineno}){_beside(error, file.parent)}"


def _beside(error: BaseException, folder: Path) -> str:
    """What to do where a file cannot import what lies beside it: it is loaded by itself."""
    name = (error.name or "").partition(".")[0] if isinstance(error, ImportError) else ""
    if not name or not ((folder / f"{name}.py").is_file() or (folder / name).is_dir()):
        return ""
    return f"; files beside it are imported by their names with PYTHONPATH={folder} before the command"


def _text(error: BaseException) -> str:
    try:
        return str(error)
    except Exception:  # its own __str__ fails
        return ""
