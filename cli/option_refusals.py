"""Options that are refused: without effect, given twice, unknown. Nothing is written then.

Only what stands on the command line or in a sweep file counts: a default asks for nothing. An option that is in none of
these tables always has an effect.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from perturbkv.cli.choices import check_distinct
from perturbkv.cli.commands import FORMER_OPTIONS
from perturbkv.cli.data_options import DataOptions
from perturbkv.configs import option as numbers
from perturbkv.configs.eviction import EvictionConfig
from perturbkv.configs.resources import NEEDS as ENGINES
from perturbkv.configs.resources import engine_options as engine_needs
from perturbkv.configs.selections import STAGED
from perturbkv.errors import ConfigError
from perturbkv.selection import grid


@dataclass(frozen=True)
class Need:
    """A condition for an option to matter: `met` by at least one configuration of the run, in `words` otherwise."""

    met: Callable[[DataOptions, EvictionConfig], bool]
    words: str
    each: bool = False
    """Whether every value that is asked for has to matter, as each gives a configuration of its own."""

    def has_no_effect(self, name: str, run: DataOptions, configs: Sequence[EvictionConfig]) -> bool:
        """Return whether the option, or with `each` one of its values, makes no difference to any configuration."""
        matters: dict[Any, bool] = {}
        for config in configs:
            value = getattr(config, name) if self.each else None
            matters[value] = matters.get(value, False) or self.met(run, config)
        return not (matters and all(matters.values()))


def _staged(run: DataOptions, config: EvictionConfig) -> bool:
    return config.selection.name in STAGED


def _random(run: DataOptions, config: EvictionConfig) -> bool:
    """Whether anything is drawn: text, weights, kept entries."""
    drawn = "random" in (config.selection.name, config.policy.name)
    return drawn or _made("seed")(run, config) or run.model.startswith("random:")


def _beyond_window(run: DataOptions, config: EvictionConfig) -> bool:
    """Whether more stays than the window, or nothing was asked; how many entries a share is, the prompt decides."""
    asked = config.protect_recent
    return isinstance(asked, float) or asked == 0 or asked > config.window


def _made(option: str) -> Callable[[DataOptions, EvictionConfig], bool]:
    """Whether the dataset looks at one of `DatasetOptions`."""

    def looks(run: DataOptions, config: EvictionConfig) -> bool:
        from perturbkv.datasets.dataset_registry import uses_option

        return uses_option(run.dataset, option)

    return looks


def _engine(option: str) -> Need:
    """What an option of many processes needs."""
    return Need(lambda run, config: getattr(run, "engine", "") in ENGINES[option], engine_needs(option))


NEEDS: Mapping[str, Need] = {
    "length": Need(_made("lengths"), "--dataset needle or a ruler: task"),
    "depth": Need(_made("depths"), "--dataset needle"),
    "haystack": Need(_made("haystack"), "--dataset needle"),
    "data_dir": Need(_made("data_dir"), "a LongBench name as --dataset, or a ruler: task that reads files"),
    "seed": Need(_random, "--dataset needle or a ruler: task, a random: model, or a random selection or policy"),
    "head_scores": Need(lambda run, config: config.policy.name == "headkv", "--policy headkv"),
    "window": Need(lambda run, config: not config.is_external, "a policy of ours: a press has a window of its own"),
    "shard_by": Need(
        lambda run, config: "shard" in run.typed or getattr(run, "engine", "") in ENGINES["by_configs"],
        f"--shard, or {engine_needs('by_configs')}",
    ),
    "protect_recent": Need(_beyond_window, "more entries than the window, which always stays", each=True),
    **{name: _engine(name) for name in ("workers", "ray_address", "cpus_per_worker", "timeout_per_sample")},
}
"""Option -> what it needs. Options of a policy, a selection or a granularity say themselves what they need."""

_STAGES = Need(_staged, "a two-stage selection")
_OWN: Mapping[str, Mapping[str, Need]] = {"generate": {"alpha": _STAGES}}
"""Where a command asks for more: generation has no bounds."""

UNUSED: Mapping[str, Mapping[str, str]] = {
    "generate": {
        "steps": "answers are as long as --max-new-tokens says",
        "save": "generate measures no outputs; perturbkv trace does",
        "text": "it leaves no trace, and answers alone in its file",
        "shard": "it leaves no trace, which alone has shards",
        "shard_by": "it leaves no trace, which alone has shards",
        "kept": "it leaves no trace, and answers alone in its file",
    },
    "question regret": {
        "steps": "it searches at the first decoding step",
        **dict.fromkeys(("save", "text", "kept"), "it leaves no trace"),
        **dict.fromkeys(("shard", "shard_by"), "it leaves no trace, which alone has shards"),
        **dict.fromkeys(("cache", "max_memory"), "it evicts nothing: it asks what would be lost"),
        **dict.fromkeys(
            ("engine", "workers", "ray_address", "cpus_per_worker", "timeout_per_sample"), "it searches in this process"
        ),
    },
    "question patching": {
        "save": "it measures no outputs; perturbkv trace does",
        "text": "it leaves no trace, and no text in its file",
        "kept": "it leaves no trace, and no positions in its file",
        "correction": "it decodes from kept sets alone",
        **dict.fromkeys(("shard", "shard_by"), "it leaves no trace, which alone has shards"),
        **dict.fromkeys(
            ("engine", "workers", "ray_address", "cpus_per_worker", "timeout_per_sample"),
            "each choice waits for all samples; it measures in this process",
        ),
    },
    "horizon": {"step": "it shows all of them"},
    "question alpha": {
        **dict.fromkeys(("step", "steps"), "it chooses at the first decode step"),
        **dict.fromkeys(("shard", "shard_by"), "it measures again what it chose; perturbkv trace has shards"),
    },
    "budget --bytes": {
        "precision": "it measures several, which --bits names",
        "correction": "it compares entries in few bits with those of full precision",
    },
    "question split": {"precision": "L = (1 − S) ‖μ_gone − μ_kept‖₁ is of eviction alone"},
    "budget": {"step": "means are over all of them"},
    "budget --cliff": {"step": "KL is the mean over all of them"},
    "needle": {"step": "perturbation is averaged over all of them"},
    "tokens": {"step": "it shows the first"},
}
"""Command -> options that it shares with others and has no use for, and why."""

_ON_A_TRACE = frozenset({
    "trace", "output", "overwrite", "as_json", "step", "figure_format", "columns", "explain",
    "compare", "distance", "per_sample", "budgets", "selection", "methods", "restrictions", "traces", "right", "lost",
    "by", "max_kl", "max_drop", "min_top1", "for_length", "for_batch", "everything", "folds", "kl",
    "savings", "bytes", "cliff", "sample", "layer", "head",
})  # fmt: skip
"""What can be asked of a finished trace; everything else says how one is made."""
_NOT_ON_A_TRACE: Mapping[str, frozenset[str]] = {
    "bound-tightness": frozenset({"compare"}),
    "needle": frozenset({"compare"}),
    "quality": frozenset({"compare"}),
}
"""Command -> what it asks of a trace that it makes, and not of a finished one."""
_ALSO_ON_A_TRACE: Mapping[str, frozenset[str]] = {"tokens": frozenset({"budget"})}
"""Command -> what says how a trace is made, and what it asks of a finished one too."""


_CALLED_ALIKE: Mapping[str, frozenset[str]] = {
    "budget --savings": frozenset({"by"}),
    "question patching": frozenset({"by", "seed"}),
}
"""Command -> its own options that are called as one of a policy's or of all commands', and always have an effect."""


def reason_without_effect(command: str, name: str, run: DataOptions, configs: Sequence[EvictionConfig]) -> str:
    """Return why an option makes no difference to any of these configurations; empty where it makes one."""
    if name in _CALLED_ALIKE.get(command, ()):
        return ""
    need = _OWN.get(command, {}).get(name) or NEEDS.get(name)
    if name in UNUSED.get(command, {}):
        return _unused(command, name)
    if need is None:
        needs = grid.why_without_effect(name, configs) if name in grid.known_options() else ""
    else:
        needs = need.words if need.has_no_effect(name, run, configs) else ""
    return f"has no effect here: it needs {needs}; leave it out" if needs else ""


def check(command: str, run: DataOptions, configs: Sequence[EvictionConfig]) -> None:
    """Raise ConfigError for the first option that was typed and makes no difference to the run."""
    check_all(command, [run], configs)


def check_all(command: str, runs: Sequence[DataOptions], configs: Sequence[EvictionConfig]) -> None:
    """Raise ConfigError for the first typed option that makes no difference to any of several runs."""

    def reason(name: str) -> str:
        reasons = [reason_without_effect(command, name, run, configs) for run in runs]
        return reasons[0] if all(reasons) else ""

    _refuse_first(runs[0], reason)


def check_finished(command: str, run: DataOptions, path: Path) -> None:
    """Raise ConfigError for the first option that was typed and makes no difference to a finished trace."""
    known = (_ON_A_TRACE | _ALSO_ON_A_TRACE.get(command, frozenset())) - _NOT_ON_A_TRACE.get(command, frozenset())
    instead = f"has no effect on a finished trace, and {path} is one; leave it out, or the trace, to make another"
    _refuse_first(run, lambda name: _unused(command, name) if name in known else instead)


def check_file(command: str, run: DataOptions, path: Path, known: Collection[str]) -> None:
    """Raise ConfigError for the first option that was typed and makes no difference to a finished file of answers."""
    instead = f"has no effect on {command}, which looks at {path}; leave it out"
    _refuse_first(run, lambda name: "" if name in known else instead)


def check_view(view: str, run: DataOptions, views: Mapping[str, Collection[str]]) -> None:
    """Raise ConfigError for a typed option of another view of a command.

    `views` are the options that choose a view, '' for the view without one -> names of the view's own options.
    """
    known = {name for names in views.values() for name in names}

    def reason(name: str) -> str:
        if name not in known or name in views[view]:
            return ""
        owners = [spelled(one) for one, names in views.items() if one and name in names]
        needs = f"it needs {' or '.join(owners)}" if owners else f"it does not go with {spelled(view)}"
        return f"has no effect here: {needs}; leave it out"

    _refuse_first(run, reason)


def _unused(command: str, name: str) -> str:
    why = UNUSED.get(command, {}).get(name)
    return f"has no effect on {command}: {why}; leave it out" if why else ""


def _refuse_first(run: DataOptions, reason: Callable[[str], str]) -> None:
    for name in sorted(run.typed):
        if why := reason(name):
            msg = f"{spelled(name)} {why}"
            raise ConfigError(msg)


_SPELLED = {"as_json": "--json", "everything": "--all", "figure_format": "--format"}


def spelled(name: str) -> str:
    """Return an option as it is written on the command line."""
    return _SPELLED.get(name, f"--{name.replace('_', '-')}")


def check_given_once(order: Sequence[Any]) -> None:
    """Raise ConfigError for an option that takes one value and stands twice, in whichever spelling."""
    for parameter in dict.fromkeys(order):
        times = list(order).count(parameter)
        if parameter.param_type_name == "option" and not parameter.multiple and times > 1:
            names = "/".join([*parameter.opts, *parameter.secondary_opts])
            msg = f"expected {names} once, got it {times} times; leave all but one out"
            raise ConfigError(msg)


def check_values(order: Sequence[Any], values: Mapping[str, Any]) -> None:
    """Raise ConfigError for a value that is given twice, and for a whole number beyond all that can be counted."""
    for parameter in dict.fromkeys(order):
        given = values.get(parameter.name)
        if isinstance(given, (list, tuple)):
            check_distinct(parameter.opts[0], given)
        for value in given if isinstance(given, (list, tuple)) else [given]:
            if isinstance(value, int):
                numbers.check_number(parameter.opts[0], value)


_EXTRA = re.compile(r"Got unexpected extra arguments?(?:\(s\))? \((.*)\)")
"""Click's message where it finds more arguments than a command has."""


def usage_message(message: str, error: Any) -> str:
    """Return one line on what Click could not read: what to do, the option's owner, or where help is."""
    line, context = " ".join(message.split()).rstrip("."), error.ctx
    option = getattr(error, "option_name", "")
    if context and (hint := FORMER_OPTIONS.get((context.command.name, option))):
        return f"No such option: {option}; {hint}"
    if extra := _EXTRA.fullmatch(line):
        line = _extra_message(extra[1], context.command)
    if owner := _owner(option):
        return f"No such option: {option}; {owner}"
    border = "" if line.endswith("?") else ";"
    return f"{line}{border} {context.command_path} --help lists what there is" if context else line


def _extra_message(extra: str, command: Any) -> str:
    """Return a line on what stands where no argument is left."""
    names = [str(one.name).upper() for one in command.params if one.param_type_name == "argument"]
    most = f"no argument but {' and '.join(names)}" if names else "no argument"
    measures = not names and any(one.name == "dry_run" for one in command.params)
    hint = "; it measures for itself and takes no finished trace" if measures else ""
    return f"expected {most}, got '{extra}'{' too' if names else ''}{hint}"


def _owner(option: str) -> str:
    """Return where an option belongs that a policy, a selection or a granularity has; empty for any other."""
    name = option.lstrip("-").replace("-", "_")
    if name not in grid.known_options():
        return ""
    return f"it belongs to {' or '.join(grid.option_owners(name)[:3])}: write {grid.option_example(name)}"
