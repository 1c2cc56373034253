"""Scores and policies by name: built-in, registered, those of installed packages, and those of a user's file.

Names are listed without importing anything. A class of a user's file is written `my_file.py:MyScore`. Errors of
external code are reported in one line.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import hashlib
import importlib
import importlib.util
import inspect
import logging
import os
import pkgutil
import random
import re
import shlex
import site
import sys
import sysconfig
import traceback
import warnings
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from functools import cache
from importlib.metadata import EntryPoint, distributions, entry_points, packages_distributions
from pathlib import Path
from types import ModuleType
from typing import Any, Generic, TypeVar, cast

import numpy as np

from perturbkv.configs.option import field_name
from perturbkv.errors import ConfigError, PerturbkvError, PluginError, UnknownNameError
from perturbkv.user_files import MIB, FileKind

PACKAGE_PREFIX = "perturbkv."
_PACKAGE = Path(__file__).parents[1]
_KIND = FileKind("a Python file", PluginError, 16 * MIB)
_FILE = ".py:"
_MODULE_PREFIX = "perturbkv_plugin_"
"""The beginning of the name of a module that is imported from a user's file."""
_log = logging.getLogger(__name__)
_Class = TypeVar("_Class")
_FRAMEWORKS = ("torch", "transformers", "numpy", "perturbkv")
"""Packages whose lines say little of where somebody else's code goes wrong."""
_LONGEST = 200
"""Longest quotation of an external error message, in characters."""


def refers_to_file(name: str) -> bool:
    """Return whether a name refers to a class in a user's file, such as `my_file.py:MyScore`."""
    return _FILE in name


def check_class_file(name: str) -> None:
    """Raise PluginError where the file that holds a class, such as `my_file.py:MyScore`, is not there."""
    _KIND.check(Path(name.rpartition(":")[0]))


def is_library_file(file: Path) -> bool:
    """Return whether a file belongs to Python, to an installed package or to this one, and so not to the user.

    A package is installed where its metadata can be found on `sys.path`: in any site folder, in a folder that a `.pth`
    file or PYTHONPATH names, and in a checkout that is installed editably.
    """
    return (
        file.name.startswith(("<frozen ", "<@"))  # Python's own; what a library made at run time
        or any(file.is_relative_to(folder) for folder in _python_folders())
        or any(file.is_relative_to(place) for place in _imported_packages())
    )


@cache
def _python_folders() -> tuple[Path, ...]:
    """Return the folders of Python, of its site packages and of this package."""
    paths = sysconfig.get_paths()
    folders = (paths["stdlib"], paths["platstdlib"], paths["purelib"], paths["platlib"], *site.getsitepackages())
    return (_PACKAGE, *map(Path, dict.fromkeys(folders)))


@cache
def _installed_names() -> frozenset[str]:
    """Return the names of what installed packages hold; of an editable one, whose record may not tell, its own name."""
    return frozenset(packages_distributions()).union(one.name.replace("-", "_") for one in distributions() if one.name)


def _imported_packages(without: Collection[str] = ()) -> Iterator[Path]:
    """Yield the folders and files of the installed packages that are imported, but for those named in `without`."""
    for name in (_installed_names() & sys.modules.keys()).difference(without):
        module = sys.modules[name]
        for place in getattr(module, "__path__", None) or [getattr(module, "__file__", None)]:
            if place:
                yield Path(place)


def is_builtin(kind: type) -> bool:
    """Return whether a class is defined in this package."""
    return kind.__module__.startswith(PACKAGE_PREFIX)


def commands_for_signed(score: type) -> str:
    """Return as advice the commands that rank by a score alone, without products, so that it may be below 0."""
    name = getattr(score, "name", score.__name__)
    if score.__module__.startswith(_MODULE_PREFIX):
        path = Path(inspect.getfile(score))
        name = f"{path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path}:{score.__name__}"
    policy = f"--policy {shlex.quote(name)}"
    return (
        f"rank by it alone: perturbkv heads {policy} --compare attention,random, or perturbkv trace {policy} "
        "--selection attention"
    )


def class_digest(kind: Any) -> str:
    """Return a version digest of an external class or function: of its source file, or its own where it has no file.

    Where no source is known, as of a class typed at a prompt, it is a digest of its methods' bytecode. Arguments that a
    partial holds, plain values of a closure and of an object are part of it.
    """
    if isinstance(kind, functools.partial):
        return hashlib.sha256(f"{class_digest(kind.func)}{kind.args}{kind.keywords}".encode()).hexdigest()[:16]
    cells = [cell.cell_contents for cell in getattr(kind, "__closure__", None) or ()]
    held = [*cells, *(() if inspect.isclass(kind) or inspect.isfunction(kind) else vars(kind).values())]
    if plain := [value for value in held if isinstance(value, bool | int | float | str)]:
        code = kind.__code__.co_code.hex() if inspect.isfunction(kind) else type(kind).__qualname__
        return hashlib.sha256(f"{code}{plain}".encode()).hexdigest()[:16]
    try:
        path = inspect.getsourcefile(kind) if kind.__module__ not in ("__main__", None) else None
        source = Path(path).read_bytes() if path else inspect.getsource(kind).encode()
    except (OSError, TypeError):
        own = [vars(kind)[name] for name in sorted(vars(kind))]
        functions = [value for value in (kind, *own) if inspect.isfunction(value)]
        codes = [function.__code__ for function in functions]
        source = b"".join(code.co_code + repr(code.co_consts).encode() for code in codes)
    return hashlib.sha256(source).hexdigest()[:16]


def load_entry_point(entry: EntryPoint) -> object:
    """Return the object named by an entry point of an installed package. Raises PluginError if loading fails."""
    package = entry.dist.name if entry.dist else entry.value
    with external_code(f"'{entry.name}' of the package {package} cannot be loaded:"):
        return entry.load()


def load_class(name: str) -> object:
    """Return the class named by a text such as `my_file.py:MyScore`. Raises PluginError if it does not exist."""
    path, _, class_name = name.rpartition(":")
    module = load_module(Path(path))
    value = vars(module).get(class_name)
    if not inspect.isclass(value):
        classes = [
            key for key, item in vars(module).items() if inspect.isclass(item) and item.__module__ == module.__name__
        ]
        hint = f"; a function that returns a cache is measured as cache:{name}" if callable(value) else ""
        raise PluginError(f"{path} has no class '{class_name}'; its classes: {', '.join(classes) or 'none'}{hint}")
    return value


def load_module(path: Path) -> ModuleType:
    """Return the module of a Python file, imported once per version; its output goes to stderr. Raises PluginError."""
    _KIND.check(path)
    stamp = path.stat()
    return _import_module(path.resolve(), (stamp.st_mtime_ns, stamp.st_size))


@functools.cache
def _import_module(path: Path, stamp: tuple[int, int]) -> ModuleType:
    """Return the module of a Python file, imported anew when `stamp`, the file's time and size, changes."""
    module_name = f"{_MODULE_PREFIX}{hashlib.sha256(bytes(path) + _KIND.read_bytes(path)).hexdigest()[:16]}"
    if module_name in sys.modules:
        return sys.modules[module_name]
    spec = importlib.util.spec_from_file_location(module_name, path)
    if spec is None or spec.loader is None:
        raise PluginError(f"{path} is no Python file")
    module = sys.modules[module_name] = importlib.util.module_from_spec(spec)
    try:
        with external_code(f"{path} cannot be loaded:"):
            spec.loader.exec_module(module)
    except PluginError:
        del sys.modules[module_name]
        raise
    return module


@contextlib.contextmanager
def external_code(what: str, error: type[PerturbkvError] = PluginError) -> Iterator[None]:
    """Run code that is not ours inside the block: turn what it raises into one line, and set back what it set.

    Its output goes to stderr. An exception, `SystemExit` among them, becomes an `error` that begins with `what`; Ctrl-C
    passes, and errors of ours unless code of the user's led to them. Working directory, environment, warnings, random
    states, numpy's handling of errors, and torch's threads, default type, default device and choice of attention
    kernels are afterwards as before.
    """
    with _restore_process_state(), contextlib.redirect_stdout(sys.stderr):
        try:
            yield
        except KeyboardInterrupt:
            raise
        except BaseException as raised:  # it may also exit, or raise an exception of its own kind
            if isinstance(raised, PerturbkvError) and _is_free_of_user_code(raised):
                raise
            _log.debug(what, exc_info=raised)
            raise error(f"{what} {format_error(raised)}") from raised


def instantiate(kind: type[_Class], options: Mapping[str, Any], what: str) -> _Class:
    """Return a new object of a score or policy class with these options.

    Raises PluginError, which begins with `what`, where a class that is not ours fails.
    """
    fields = {field_name(name): value for name, value in options.items()}
    if is_builtin(kind):
        return kind(**fields)
    with external_code(f"{what} cannot be made:"):
        return kind(**fields)


def _is_free_of_user_code(error: BaseException) -> bool:
    """Return whether an error passed through no code of the user's: every frame of its traceback is a library's."""
    return all(is_library_file(Path(frame.filename)) for frame in traceback.extract_tb(error.__traceback__))


@contextlib.contextmanager
def _restore_process_state() -> Iterator[None]:
    """Restore after the block what external code can change in the process."""
    filters, numpy_errors = list(warnings.filters), np.geterr()
    folder, environment = os.getcwd(), dict(os.environ)
    python_random, numpy_random = random.getstate(), np.random.get_state()  # noqa: NPY002
    torch: Any = sys.modules.get("torch")  # which code that reads traces does without
    if torch is not None:
        torch_random, dtype, threads = torch.get_rng_state(), torch.get_default_dtype(), torch.get_num_threads()
        device, settings = torch.get_default_device(), [read() for read, _ in _torch_settings(torch)]
    try:
        yield
    finally:
        os.chdir(folder)
        if dict(os.environ) != environment:
            os.environ.clear()
            os.environ.update(environment)
        warnings.filters[:] = filters  # type: ignore[index]
        np.seterr(**numpy_errors)
        random.setstate(python_random)
        np.random.set_state(numpy_random)  # noqa: NPY002
        if torch is not None:
            torch.set_rng_state(torch_random)
            torch.set_default_dtype(dtype)
            if torch.get_default_device() != device:
                torch.set_default_device(device)
            if torch.get_num_threads() != threads:
                torch.set_num_threads(threads)
            for (_, write), setting in zip(_torch_settings(torch), settings, strict=True):
                write(setting)


def _torch_settings(torch: Any) -> list[tuple[Callable[[], Any], Callable[[Any], object]]]:
    """Return (read, write) functions of torch's attention kernels, precision of products, determinism, gradients."""
    cuda, matmul = torch.backends.cuda, torch.backends.cuda.matmul
    return [
        (cuda.flash_sdp_enabled, cuda.enable_flash_sdp),
        (cuda.mem_efficient_sdp_enabled, cuda.enable_mem_efficient_sdp),
        (cuda.math_sdp_enabled, cuda.enable_math_sdp),
        (lambda: matmul.fp32_precision, lambda chosen: setattr(matmul, "fp32_precision", chosen)),
        (torch.are_deterministic_algorithms_enabled, torch.use_deterministic_algorithms),
        (torch.is_grad_enabled, torch.set_grad_enabled),
    ]


def format_error(error: BaseException) -> str:
    """Return an error of external code as a line of text, with the last line of the user's own that led to it.

    Where that called an installed package, as one that is audited, the last line of the package follows.
    """
    text = " ".join(_error_text(error).split())
    text = f"{text[:_LONGEST]}…" if len(text) > _LONGEST else text
    message = f"{type(error).__name__}: {text}".rstrip(": ")
    if not (frames := traceback.extract_tb(error.__traceback__)):
        return message
    own = [place for place, frame in enumerate(frames) if not is_library_file(Path(frame.filename))]
    last = own[-1] if own else len(frames) - 1
    file, line = Path(frames[last].filename), frames[last].lineno
    return f"{message} ({file.name}, line {line}{_package_line(frames[last + 1 :])}){_import_hint(error, file.parent)}"


def _package_line(frames: Sequence[traceback.FrameSummary]) -> str:
    """Return the last line of an installed package in text, but for Python's, the frameworks' and this one's."""
    folders = tuple(_imported_packages(without=_FRAMEWORKS))
    for frame in reversed(frames):
        file = Path(frame.filename)
        if any(file.is_relative_to(folder) for folder in folders):
            return f"; in {file.parent.name}/{file.name}, line {frame.lineno}"
    return ""


def _import_hint(error: BaseException, folder: Path) -> str:
    """Return advice for a plugin that fails to import a file in its folder; empty for any other error."""
    name = (error.name or "").partition(".")[0] if isinstance(error, ImportError) else ""
    if not name or not ((folder / f"{name}.py").is_file() or (folder / name).is_dir()):
        return ""
    return f"; files beside it are imported by their names with PYTHONPATH={folder} before the command"


def _error_text(error: BaseException) -> str:
    """Return the message of an external error; empty if creating the message fails."""
    try:
        return str(error)
    except KeyboardInterrupt:
        raise
    except BaseException:
        return ""


_NAME = re.compile(r"[a-z][a-z0-9_-]*")


class Catalogue(Generic[_Class]):
    """The scores or the policies by name: built-in, registered, those of installed packages and of users' files.

    Args:
        kind: `score` or `policy`.
        package: package with one class per module, named like the class with `_` for `-`.
        base: function that returns the base class of all of them, called on first use.
        excluded: modules of the package without such a class.
        reserved: function that returns names that are used for something else.
    """

    def __init__(
        self, kind: str, package: str, base: Callable[[], type[_Class]], excluded: Iterable[str] = (),
        reserved: Callable[[], Iterable[str]] = tuple,
    ) -> None:  # fmt: skip
        self.kind = kind
        self.package = package
        self.base = base
        self.excluded: tuple[str, ...] = tuple(excluded)
        self.reserved = reserved
        self.registered: dict[str, type[_Class]] = {}

    def names(self) -> list[str]:
        """Return the names of all classes, built-in ones first and registered ones last, without importing modules."""
        return list(
            dict.fromkeys(
                [*self._builtin_names(), *installed_entry_points(f"{PACKAGE_PREFIX}{self._group}"), *self.registered]
            )
        )

    def load(self, name: str) -> type[_Class]:
        """Return the class with the given name, importing its module if necessary.

        Raises UnknownNameError for an unknown name, PluginError where an external class cannot be loaded.
        """
        if name in self.registered:
            return self.registered[name]
        if refers_to_file(name):
            return self._check_class(load_class(name), name)
        if name in self._builtin_names():
            return cast("type[_Class]", _find_builtin_class(f"{self.package}.{name.replace('-', '_')}", name))
        if entry := installed_entry_points(f"{PACKAGE_PREFIX}{self._group}").get(name):
            return self._check_class(load_entry_point(entry), name)
        raise UnknownNameError(name, self.kind, self.names())

    def register(self, new: type[_Class], taken: Iterable[str]) -> type[_Class]:
        """Register a class under its `name`, and return the class.

        Raises ConfigError where it is not of this kind, or where its name is among those `taken`.
        """
        name = getattr(new, "name", None)
        if not isinstance(name, str) or not _NAME.fullmatch(name) or name in self.reserved():
            raise ConfigError(
                f"expected a {self.kind}'s name of small letters, digits, '-' and '_' that no selection has, got "
                f"{name!r}"
            )
        checked = self._check_class(new, name, ConfigError)
        if name in taken:
            raise ConfigError(f"a {self.kind} named '{name}' is registered already; choose another name")
        self.registered[name] = checked
        return checked

    @property
    def _group(self) -> str:
        """Plural of the kind, the name of its entry-point group."""
        return {"policy": "policies"}.get(self.kind, f"{self.kind}s")

    def _builtin_names(self) -> list[str]:
        """Return the names of the built-in classes."""
        return _module_names(self.package, self.excluded)

    def _check_class(
        self, candidate: object, name: str, error: type[ConfigError | PluginError] = PluginError
    ) -> type[_Class]:
        """Return a validated class. Raises `error` for a candidate that is no class of this kind."""
        base = self.base()
        if not (
            inspect.isclass(candidate) and issubclass(candidate, base) and "__dataclass_params__" in vars(candidate)
        ):
            raise error(
                f"expected '{name}' to be a subclass of {base.__name__} that is a frozen dataclass, got {candidate!r}"
            )
        if bare := [
            field.name for field in dataclasses.fields(cast("Any", candidate)) if "option" not in field.metadata
        ]:
            raise error(
                f"{self.kind} '{name}': expected {bare[0]} to be an option(default, 'what it does'), got a plain field"
            )
        if flaw := getattr(candidate, "flaw", str)():
            raise error(f"{self.kind} '{name}': {flaw}")
        return candidate


@functools.cache
def _module_names(package: str, excluded: tuple[str, ...]) -> list[str]:
    """Return the names of a package's modules, with `-` for `_`, without importing any module."""
    spec = importlib.util.find_spec(package)
    folders = list(spec.submodule_search_locations or ()) if spec else []
    return [module.name.replace("_", "-") for module in pkgutil.iter_modules(folders) if module.name not in excluded]


@functools.cache
def _find_builtin_class(module: str, name: str) -> type:
    """Return the class of a module of this package whose own attribute `name` is `name`."""
    values = vars(importlib.import_module(module)).values()
    (match,) = (value for value in values if inspect.isclass(value) and vars(value).get("name") == name)
    return match


@functools.cache
def installed_entry_points(group: str) -> dict[str, EntryPoint]:
    """Return name -> entry point, for the installed packages' entry points in a group."""
    return {entry.name: entry for entry in entry_points(group=group)}
