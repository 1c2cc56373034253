"""Which option needs what to make a difference. One that is given and makes none is refused, and nothing is written.

Only what stands on the command line or in a sweep file counts: a default asks for nothing. An option that is in none of
these tables always has an effect.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from perturbkv.cli.data_options import DataOptions
from perturbkv.configs.eviction import EvictionConfig
from perturbkv.configs.resources import NEEDS as ENGINES
from perturbkv.configs.resources import needs as engine_needs
from perturbkv.configs.selections import STAGED
from perturbkv.errors import ConfigError
from perturbkv.selection import grid


@dataclass(frozen=True)
class Need:
    """What makes an option matter: `met` by at least one configuration of the run, in `words` otherwise."""

    met: Callable[[DataOptions, EvictionConfig], bool]
    words: str
    each: bool = False
    """Whether every value that is asked for has to matter, as each gives a configuration of its own."""

    def idle(self, name: str, run: DataOptions, configs: Sequence[EvictionConfig]) -> bool:
        """Whether the option `name`, or with `each` one of its values, makes no difference to any configuration."""
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
        from perturbkv.datasets.dataset_registry import takes

        return takes(run.dataset, option)

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
    "window": Need(lambda run, config: not config.given, "a policy of ours: a press has a window of its own"),
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
    "regret": {
        "steps": "it searches at the first decoding step",
        **dict.fromkeys(("save", "text", "kept"), "it leaves no trace"),
        **dict.fromkeys(("shard", "shard_by"), "it leaves no trace, which alone has shards"),
        **dict.fromkeys(("cache", "max_memory"), "it evicts nothing: it asks what would be lost"),
        **dict.fromkeys(
            ("engine", "workers", "ray_address", "cpus_per_worker", "timeout_per_sample"), "it searches in this process"
        ),
    },
    "swap": {
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
    "alpha": {
        **dict.fromkeys(("step", "steps"), "it chooses at the first decode step"),
        **dict.fromkeys(("shard", "shard_by"), "it measures again what it chose; perturbkv trace has shards"),
    },
    "bytes": {
        "precision": "it measures several, which --bits names",
        "correction": "it compares entries in few bits with those of full precision",
    },
    "split": {"precision": "L = (1 − S) ‖μ_gone − μ_kept‖₁ is of eviction alone"},
    "budget": {"step": "means are over all of them"},
    "cliff": {"step": "KL is the mean over all of them"},
    "needle": {"step": "perturbation is averaged over all of them"},
    "link": {"step": "it looks at the first alone, which is known after one token of the answer"},
}
"""Command -> options that it shares with others and has no use for, and why."""

_ON_A_TRACE = frozenset({
    "trace", "output", "overwrite", "as_json", "step", "figure_format", "columns",
    "compare", "distance", "per_sample", "budgets", "selection", "methods", "traces", "right", "lost", "by",
    "max_kl", "max_drop", "min_top1", "for_length", "for_batch", "everything", "folds", "kl",
})  # fmt: skip
"""What can be asked of a finished trace; everything else says how one is made."""
_NOT_ON_A_TRACE: Mapping[str, frozenset[str]] = {
    "bound-tightness": frozenset({"compare"}),
    "needle": frozenset({"compare"}),
    "quality": frozenset({"compare"}),
}
"""Command -> what it asks of a trace that it makes, and not of a finished one."""


_CALLED_ALIKE: Mapping[str, frozenset[str]] = {"savings": frozenset({"by"}), "swap": frozenset({"by", "seed"})}
"""Command -> its own options that are called as one of a policy's or of all commands', and always have an effect."""


def idle(command: str, name: str, run: DataOptions, configs: Sequence[EvictionConfig]) -> str:
    """Why an option makes no difference to any of these configurations, in words; empty where it makes one."""
    if name in _CALLED_ALIKE.get(command, ()):
        return ""
    need = _OWN.get(command, {}).get(name) or NEEDS.get(name)
    if name in UNUSED.get(command, {}):
        return _unused(command, name)
    if need is None:
        needs = grid.idle(name, configs) if name in grid.known_options() else ""
    else:
        needs = need.words if need.idle(name, run, configs) else ""
    return f"has no effect here: it needs {needs}; leave it out" if needs else ""


def check(command: str, run: DataOptions, configs: Sequence[EvictionConfig]) -> None:
    """Raise ConfigError for the first option that was typed and makes no difference to the run."""
    check_all(command, [run], configs)


def check_all(command: str, runs: Sequence[DataOptions], configs: Sequence[EvictionConfig]) -> None:
    """The same of an option that makes no difference to any of several runs of the same command line."""

    def reason(name: str) -> str:
        said = [idle(command, name, run, configs) for run in runs]
        return said[0] if all(said) else ""

    _refuse_first(runs[0], reason)


def check_finished(command: str, run: DataOptions, path: Path) -> None:
    """Raise ConfigError for the first option that was typed and makes no difference to a finished trace."""
    known = _ON_A_TRACE - _NOT_ON_A_TRACE.get(command, frozenset())
    instead = f"has no effect on a finished trace, and {path} is one; leave it out, or the trace, to make another"
    _refuse_first(run, lambda name: _unused(command, name) if name in known else instead)


def _unused(command: str, name: str) -> str:
    why = UNUSED.get(command, {}).get(name)
    return f"has no effect on {command}: {why}; leave it out" if why else ""


def _refuse_first(run: DataOptions, reason: Callable[[str], str]) -> None:
    for name in sorted(run.typed):
        if said := reason(name):
            msg = f"{spelled(name)} {said}"
            raise ConfigError(msg)


def spelled(name: str) -> str:
    """How an option is written on the command line."""
    return f"--{name.removeprefix('as_').replace('_', '-')}"
