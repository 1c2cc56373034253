"""A trace as a page may tell of it: pages are mailed, and name no folder of the machine that they were made on."""

from __future__ import annotations

import os
import re
from dataclasses import replace
from pathlib import Path, PurePosixPath, PureWindowsPath

from perturbkv.trace import Trace
from perturbkv.visible import line

_USUAL = "trace.h5"
"""What every analysis calls its trace: the folder around it says which one it is."""
_BEGINS = r"(?:~|[A-Za-z]:|\.{1,2})?"
_FOLDERS = re.compile(
    rf"(?<=['\"]){_BEGINS}[\\/][^'\"<>]*[\\/](?=[^'\"<>])"  # between quotes folders may have blanks in their names
    rf"|(?:(?<=file://)|(?<![\w/\\:.<~-])){_BEGINS}(?:[\\/][\w.@+~-]+)+[\\/](?=[\w.@+~-])"
)
"""Of a path within a sentence everything before its last part."""


def name_of(trace: Trace) -> str:
    """The file's name, of one that has the usual name the folder around it too."""
    if not trace.source:
        return "in memory"
    path = Path(os.path.abspath(trace.source))  # noqa: PTH100 # links keep the names that they were given by
    return line(f"{path.parent.name}/{path.name}" if path.name == _USUAL and path.parent.name else path.name)


def portable(trace: Trace) -> Trace:
    """The same trace, of which neither its file nor its model, its data or its failures name folders."""
    return replace(
        trace,
        source=name_of(trace) if trace.source else "",
        run=replace(trace.run, model=_last(trace.run.model), dataset=_last(trace.run.dataset)),
        failures={name: _FOLDERS.sub("", reason) for name, reason in trace.failures.items()},
    )


def _last(name: str) -> str:
    """The last part of what is a path by how it begins; ids of hubs and names of data sets stay."""
    if not (name.startswith(("/", "~", "./", "../", ".\\", "..\\")) or PureWindowsPath(name).is_absolute()):
        return name
    windows = "\\" in name and "/" not in name or PureWindowsPath(name).drive != ""
    return (PureWindowsPath(name) if windows else PurePosixPath(name)).name or name
