"""Policies and scores of others in a worker: those of files load by their names, registered ones with their module."""

from __future__ import annotations

import importlib

from perturbkv.configs.plugins import of_file
from perturbkv.configs.run import RunConfig
from perturbkv.errors import ConfigError, PluginError
from perturbkv.scoring.score_registry import SCORES
from perturbkv.selection.policies import registry

_PROGRAM = "__main__"


def modules(run: RunConfig) -> tuple[str, ...]:
    """The modules that register a run's plug-ins. Raises ConfigError for one that no other process can import."""
    found = {name: _module(name) for name in run.plugins if not of_file(name)}
    for name, module in found.items():
        if module == _PROGRAM:
            msg = (
                f"'{name}' is defined in the program itself, which worker processes do not run; put it into a file of "
                f"its own and write my_file.py:{_class(name).__name__}, or measure with engine='here'"
            )
            raise ConfigError(msg)
    return tuple(dict.fromkeys(found.values()))


def bring(names: tuple[str, ...], run: RunConfig) -> None:
    """Import what registers a run's plug-ins. Raises PluginError where one is missing here, or is another version."""
    for name in names:
        try:
            importlib.import_module(name)
        except Exception as error:
            msg = f"module '{name}', which registers a policy or score of the run, cannot be imported here: {error}"
            raise PluginError(msg) from error
    if not run.plugins:
        return
    here = {name: version for config in run.configs for name, version in registry.plugins(config).items()}
    for name, version in run.plugins.items():
        if here.get(name) != version:
            msg = f"expected '{name}' as the run was planned with it, got another version of it here; copy its file"
            raise PluginError(msg)


def _module(name: str) -> str:
    return _class(name).__module__


def _class(name: str) -> type:
    """The class that was registered: of a policy that is a score, the score."""
    if name in SCORES.names():
        return SCORES.info(name)
    return registry.info(name)
