"""Refusals of options that have no effect, are repeated or unknown, before anything is written.

Only options on the command line or in a sweep file are refused, never a default. An option in none of the tables below
always has an effect.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from perturbkv.cli.choices import check_distinct
from perturbkv.cli.commands import former_message
from perturbkv.cli.data_options import DataOptions
from perturbkv.configs import option as numbers
from perturbkv.configs.eviction import EvictionConfig
from perturbkv.configs.selections import STAGED
from perturbkv.errors import ConfigError
from perturbkv.selection import grid


@dataclass(frozen=True)
class Need:
    """A condition that some configuration must meet for an option to have an effect; `text` names it to the user."""

    is_met: Callable[[DataOptions, EvictionConfig], bool]
    text: str
    each: bool = False
    """Check every value of an option by itself, as each gives a configuration of its own."""

    def has_no_effect(self, name: str, run: DataOptions, configs: Sequence[EvictionConfig]) -> bool:
        """Return whether the option `name` has no effect, as no configuration meets the condition.

        With `each` it has none either where one of its values has no configuration that meets the condition.
        """
        useful = [config for config in configs if self.is_met(run, config)]
        if not self.each or not useful:
            return not useful
        return {getattr(config, name) for config in useful} != {getattr(config, name) for config in configs}


def _uses_seed(run: DataOptions, config: EvictionConfig) -> bool:
    """Return whether prompts, weights or kept entries are drawn at random."""
    random_entries = "random" in (config.selection.name, config.policy.name)
    return random_entries or _uses_data_option("seed")(run, config) or run.model.startswith("random:")


def _protects_more_than_window(run: DataOptions, config: EvictionConfig) -> bool:
    """Return whether --protect-recent can protect more entries than the window; a share can for long prompts."""
    recent = config.protect_recent
    return isinstance(recent, float) or recent == 0 or recent > config.window


def _uses_data_option(option: str) -> Callable[[DataOptions, EvictionConfig], bool]:
    """Return a condition: whether the run's data set uses `option`, a field of `DatasetOptions`."""

    def is_used(run: DataOptions, config: EvictionConfig) -> bool:
        """Return whether the run's data set uses the option."""
        from perturbkv.datasets.dataset_registry import uses_option

        return uses_option(run.dataset, option)

    return is_used


NEEDS: Mapping[str, Need] = {
    "length": Need(_uses_data_option("lengths"), "--dataset needle or a ruler: task"),
    "depth": Need(_uses_data_option("depths"), "--dataset needle"),
    "haystack": Need(_uses_data_option("haystack"), "--dataset needle"),
    "data_dir": Need(_uses_data_option("data_dir"), "a LongBench name as --dataset, or a ruler: task that reads files"),
    "seed": Need(_uses_seed, "--dataset needle or a ruler: task, a random: model, or a random selection or policy"),
    "head_scores": Need(lambda run, config: config.policy.name == "headkv", "--policy headkv"),
    "window": Need(lambda run, config: not config.is_external, "a policy of ours: a press has a window of its own"),
    "effect_gradient": Need(lambda run, config: "effect" in (getattr(run, "save", None) or ()), "--save effect"),
    "isolated_every": Need(
        lambda run, config: bool(getattr(run, "compress_every", 0) or getattr(run, "compress_over", 0)),
        "--compress-every or --compress-over",
    ),
    "protect_recent": Need(_protects_more_than_window, "more entries than the window, which always stays", each=True),
}
"""Option -> condition. Options of a policy, a selection or a granularity declare their conditions themselves."""

_STRICTER_NEEDS: Mapping[str, Mapping[str, Need]] = {
    "generate": {"alpha": Need(lambda run, config: config.selection.name in STAGED, "a two-stage selection")}
}
"""Command -> options whose conditions are stricter there: generation has no bounds."""

_ON_A_TRACE = frozenset({
    "trace", "output", "overwrite", "as_json", "step", "figure_format", "columns", "style", "explain",
    "compare", "distance", "per_sample", "budget", "budgets", "selection", "methods", "margin", "restrictions",
    "bytes",
    "traces", "right", "lost", "by", "max_kl", "max_perplexity", "max_drop", "min_top1", "for_length", "for_batch",
    "everything", "kl", "cliff", "sample", "layer", "head", "metric",
})  # fmt: skip
"""Options that have an effect on a finished trace; all others say how a trace is made."""
_NOT_ON_A_TRACE: Mapping[str, frozenset[str]] = {
    "bound-tightness": frozenset({"compare"}),
    "needle": frozenset({"compare"}),
    "quality": frozenset({"compare", "metric"}),
    "quality --metric perplexity": frozenset({"compare"}),
}
"""Command -> options that have an effect only where it makes its trace."""

_OWN_OPTIONS: Mapping[str, frozenset[str]] = {
    "patching": frozenset({"by", "seed"}),
}
"""Command -> options of its own that have the name of a shared option; they always have an effect."""


def reason_without_effect(command: str, name: str, run: DataOptions, configs: Sequence[EvictionConfig]) -> str:
    """Return the reason why an option has no effect on any of the configurations; empty if it has an effect."""
    if name in _OWN_OPTIONS.get(command, ()):
        return ""
    need = _STRICTER_NEEDS.get(command, {}).get(name) or NEEDS.get(name)
    if need is None:
        unmet = grid.why_without_effect(name, configs) if name in grid.known_options() else ""
    else:
        unmet = need.text if need.has_no_effect(name, run, configs) else ""
    return f"has no effect here: it needs {unmet}; leave it out" if unmet else ""


def check_effects(command: str, configs: Sequence[EvictionConfig], *runs: DataOptions) -> None:
    """Raise ConfigError for the first typed option that has no effect on any run of the command."""

    def reason(name: str) -> str:
        """Return why an option has no effect on any run; empty where it has an effect on one."""
        reasons = [reason_without_effect(command, name, run, configs) for run in runs]
        return reasons[0] if all(reasons) else ""

    _refuse_first(runs[0], reason)


def check_trace_options(command: str, run: DataOptions, path: Path) -> None:
    """Raise ConfigError for the first typed option that has no effect on a finished trace."""
    known = _ON_A_TRACE - _NOT_ON_A_TRACE.get(command, frozenset())
    reason = f"has no effect on a finished trace, and {path} is one; leave it out, or the trace, to make another"
    _refuse_first(run, lambda name: "" if name in known else reason)


def check_known(command: str, run: DataOptions, source: str, known: Collection[str]) -> None:
    """Raise ConfigError for the first typed option that is not among the `known` ones of a command.

    Such a command measures no run: `source` names what it looks at instead, a file or an engine's model.
    """
    reason = f"has no effect on {command}, which looks at {source}; leave it out"
    _refuse_first(run, lambda name: "" if name in known else reason)


def check_view_options(view: str, run: DataOptions, views: Mapping[str, Collection[str]]) -> None:
    """Raise ConfigError for a typed option that belongs to another view of the command.

    `views` maps the option that chooses a view ('' for the default view) to the names of the view's own options.
    """
    known = {name for names in views.values() for name in names}

    def reason(name: str) -> str:
        """Return why an option has no effect on the view; empty where it has one."""
        if name not in known or name in views[view]:
            return ""
        owners = [option_flag(other) for other, names in views.items() if other and name in names]
        needs = f"it needs {' or '.join(owners)}" if owners else f"it does not go with {option_flag(view)}"
        return f"has no effect here: {needs}; leave it out"

    _refuse_first(run, reason)


def _refuse_first(run: DataOptions, reason_of: Callable[[str], str]) -> None:
    """Raise ConfigError for the first typed option, by name, for which `reason_of` returns a reason."""
    for name in sorted(run.typed_options):
        if reason := reason_of(name):
            raise ConfigError(f"{option_flag(name)} {reason}")


_FLAGS = {"as_json": "--json", "everything": "--all", "figure_format": "--format"}


def option_flag(name: str) -> str:
    """Return an option's spelling on the command line: `--max-kl` for `max_kl`."""
    return _FLAGS.get(name, f"--{name.replace('_', '-')}")


def check_typed_once(parameters: Sequence[Any]) -> None:
    """Raise ConfigError for a single-valued option that was typed more than once, in any spelling.

    `parameters` are the Click parameters of a command line, in its order.
    """
    for parameter in dict.fromkeys(parameters):
        times = list(parameters).count(parameter)
        if parameter.param_type_name == "option" and not parameter.multiple and times > 1:
            names = "/".join([*parameter.opts, *parameter.secondary_opts])
            raise ConfigError(f"expected {names} once, got it {times} times; leave all but one out")


def check_values(parameters: Sequence[Any], values: Mapping[str, Any]) -> None:
    """Raise ConfigError for a repeated value of an option, and for a whole number that is too large.

    `parameters` are the Click parameters of a command line, `values` their values by name.
    """
    for parameter in parameters:
        value = values.get(parameter.name)
        items = value if isinstance(value, (list, tuple)) else [value]
        check_distinct(parameter.opts[0], items)
        for item in items:
            if isinstance(item, int):
                numbers.check_number(parameter.opts[0], item)


def usage_message(said: str, error: Any) -> str:
    """Return a one-line message on a command line that Click cannot parse, with advice on how to type it.

    `said` is Click's message, `error` its usage error, whose context is None where Click has none.
    """
    line, context = " ".join(said.split()).rstrip("."), error.ctx
    option = getattr(error, "option_name", "")
    is_unknown = hasattr(error, "possibilities")  # names similar to an unknown option, if any: no other error has them
    if is_unknown and context and (message := former_message(context.command_path.split()[1:], [option])):
        return message
    name = option.lstrip("-").replace("-", "_")
    # an option with similar names is misspelt: the policies, which import torch, are not asked about it
    is_known = name in grid.ORDER or not getattr(error, "possibilities", None)
    if option and is_known and name in grid.known_options():
        owners = " or ".join(grid.option_owners(name)[:3])
        return f"No such option: {option}; it belongs to {owners}: write {grid.option_example(name)}"
    separator = "" if line.endswith("?") else ";"
    return f"{line}{separator} {context.command_path} --help lists what there is" if context else line
