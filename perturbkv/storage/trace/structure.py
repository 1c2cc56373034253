"""Whether a file is built as FORMAT.md says: its variables' types, axes and units, and the texts that it was made with.

Called once for every file that is opened, before any numbers are read.
"""

from __future__ import annotations

from perturbkv.configs.run import RunConfig
from perturbkv.errors import PerturbkvError
from perturbkv.schema import ROWS
from perturbkv.storage.trace import checksums
from perturbkv.storage.trace.hdf5 import StoredFile
from perturbkv.storage.trace.layout import AXES, FLAGS, FORMAT, FORMAT_VERSION, STORED

_NEEDED = ("sample", "config", "step", *FLAGS)
"""What no trace is without, whichever variables it holds."""
_TEXTS = ("sample", "config")


def check_structure(file: StoredFile) -> None:
    """Raise TraceError unless everything that a reader knows is what the format makes of it."""
    names = file.names()
    for name in _NEEDED:
        if name not in names:
            file.refuse(f"'{name}'", "none")
    axes = axes_of(names)
    for axis in axes:
        _check_type(file, axis, "str" if axis in _TEXTS else "" if axis in ROWS else "int64")
        if len(file.shape(axis)) != 1:
            file.refuse(f"one axis of {axis}", f"the shape {file.shape(axis)}")
    for name in variables_of(names):
        _check_variable(file, name, axes)
    _check_sums(file, [*axes, *variables_of(names)])


def axes_of(names: list[str]) -> list[str]:
    """The axes that a file has, of those that there are."""
    return [axis for axis in AXES if axis in names]


def variables_of(names: list[str]) -> list[str]:
    """The variables that a file has, of those that there are."""
    return [name for name in STORED if name in names]


def check_version(file: StoredFile) -> None:
    """Raise TraceError for another format, or another version of it."""
    attrs = file.attributes()
    if attrs.get("format") != FORMAT:
        file.refuse("a perturbkv trace", "another HDF5 file")
    version = attrs.get("format_version")
    if not isinstance(version, int) or version < 1:
        file.refuse(f"the format_version {FORMAT_VERSION}", str(version))
    if version != FORMAT_VERSION:
        file.refuse_version(version, FORMAT_VERSION)


def run_of(file: StoredFile) -> RunConfig:
    """The run as the file holds it. Raises TraceError where it is none."""
    text = file.attributes().get("run")
    if not isinstance(text, str):
        file.refuse("the run as JSON", "none")
    try:
        return RunConfig.from_json(text)
    except PerturbkvError as error:
        file.refuse("the run as JSON", f"one that says: {error}")


def _check_type(file: StoredFile, name: str, dtype: str) -> None:
    if dtype and not file.is_of(name, dtype):
        file.refuse(f"{name} of the type {dtype}", "another")


def _check_variable(file: StoredFile, name: str, axes: list[str]) -> None:
    variable = STORED[name]
    _check_type(file, name, variable.dtype)
    if (found := file.axes(name, axes)) != variable.axes:
        file.refuse(f"{name} along {' '.join(variable.axes)}", " ".join(found) or "no axis")
    if (units := file.text(name, "units")) != variable.units:
        file.refuse(f"{name} in the unit {variable.units}", units)


def _check_sums(file: StoredFile, names: list[str]) -> None:
    """Texts as they were summed, and sums for every variable; nothing of a file that has none."""
    attrs = file.attributes()
    if checksums.NAME not in attrs:
        return
    said = {name: checksums.words(file.text(name, "units"), file.text(name, "long_name")) for name in names}
    texts = {name: value for name, value in attrs.items() if isinstance(value, str)}
    try:
        differing = checksums.differing(str(attrs[checksums.NAME]), texts, said)
    except (ValueError, RecursionError):
        differing = checksums.NAME
    if differing is not None:
        file.refuse(f"'{differing}' as it was written", "another or none")
    for name in names:
        if name not in ROWS and file.sums(name) is None:
            file.refuse(f"the sums of {name}", "none")
