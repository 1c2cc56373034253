"""The decorator that gives a command the options of a dataclass, as if they were its own parameters.

Every field that is annotated with an option becomes one. A field `typed` gets the names of what the user really wrote,
a field `asked` the values of the command's own parameters.
"""

from __future__ import annotations

import copy
import dataclasses
import functools
import inspect
from collections.abc import Callable, Mapping
from typing import Annotated, Any, get_args, get_origin, get_type_hints

import typer


def with_options(command: Callable[..., None]) -> Callable[..., None]:
    """Spread each parameter that is annotated with a dataclass of options over the command's own parameters."""
    signature = inspect.signature(command)
    hints = get_type_hints(command, include_extras=True)
    groups = {name: hints[name] for name in signature.parameters if dataclasses.is_dataclass(hints[name])}
    own = [
        parameter.replace(annotation=hints[name], kind=inspect.Parameter.KEYWORD_ONLY)
        for name, parameter in signature.parameters.items()
        if name not in groups
    ]
    spread = [parameter for group in groups.values() for parameter in _parameters(group)]
    context = inspect.Parameter("context", inspect.Parameter.KEYWORD_ONLY, annotation=typer.Context)

    @functools.wraps(command)
    def wrapper(context: typer.Context, **values: Any) -> None:
        told = {"typed": typed(context), "asked": {parameter.name: values[parameter.name] for parameter in own}}
        made = {name: _made(group, values, told) for name, group in groups.items()}
        command(**made, **values)

    parameters = [context, *own, *spread]
    wrapper.__signature__ = signature.replace(parameters=parameters)  # type: ignore[attr-defined]
    wrapper.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    return wrapper


def showing(**defaults: str) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Say in a command's help what its own defaults are of options that it shares with others."""
    return _changing({name: {"show_default": default} for name, default in defaults.items()})


def telling(*names: str) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Have a command's help tell of options that are hidden elsewhere."""
    return _changing({name: {"hidden": False} for name in names})


def hiding(*names: str) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Keep out of a command's help the options that it shares with others and has no use for."""
    return _changing({name: {"hidden": True} for name in names})


def _changing(
    changes: Mapping[str, Mapping[str, Any]],
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """A decorator that gives a command some options of its own, which differ from the shared ones in this."""

    def changed(command: Callable[..., None]) -> Callable[..., None]:
        signature = inspect.signature(command)
        parameters = [_with(one, changes.get(one.name, {})) for one in signature.parameters.values()]
        command.__signature__ = signature.replace(parameters=parameters)  # type: ignore[attr-defined]
        command.__annotations__ = {one.name: one.annotation for one in parameters}
        return command

    return changed


def _with(parameter: inspect.Parameter, changes: Mapping[str, Any]) -> inspect.Parameter:
    if not changes:
        return parameter
    kind, option = get_args(parameter.annotation)
    own = copy.copy(option)
    vars(own).update(changes)
    return parameter.replace(annotation=Annotated[kind, own])


def typed(context: typer.Context) -> frozenset[str]:
    """Names of the parameters that stand on the command line; neither defaults nor the environment's values."""
    sources = {name: context.get_parameter_source(name) for name in context.params}
    return frozenset(name for name, source in sources.items() if source is not None and source.name == "COMMANDLINE")


def options(group: Any) -> dict[str, Any]:
    """The annotations of a dataclass' fields that are options, by name."""
    hints = get_type_hints(group, include_extras=True)
    return {
        field.name: hints[field.name]
        for field in dataclasses.fields(group)
        if get_origin(hints[field.name]) is Annotated
    }


def _made(group: Any, values: dict[str, Any], told: dict[str, Any]) -> Any:
    """The dataclass of its options' values, which are taken out of `values`, and of what is told of the command."""
    named = {field.name for field in dataclasses.fields(group)}
    chosen = {name: values.pop(name) for name in options(group)}
    return group(**chosen, **{name: value for name, value in told.items() if name in named})


def _parameters(group: Any) -> list[inspect.Parameter]:
    defaults = {field.name: field.default for field in dataclasses.fields(group)}
    return [
        inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=defaults[name], annotation=hint)
        for name, hint in options(group).items()
    ]
