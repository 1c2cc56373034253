"""The options that every command making a trace shares, and those of every analysis."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from typer import Argument, Option

from perturbkv.cli import completion
from perturbkv.cli.choices import apart, check_choice, numbers
from perturbkv.configs.budget import Budget
from perturbkv.configs.eviction import PRESETS, EvictionConfig
from perturbkv.configs.resources import Resources, parse_size
from perturbkv.configs.run import CACHES, SCENARIOS
from perturbkv.errors import ConfigError
from perturbkv.models.aliases import DEFAULT
from perturbkv.selection.grid import FIELDS, every, names_policy

FRACTIONS = ("0.025", "0.05", "0.1", "0.2", "0.4")
"""Budgets of the paper's sweeps, where an analysis is about budgets and the user chose none."""
FORMATS = ("png", "svg", "pdf")
COLUMNS = (1, 2)
_LOOK = "Analysis and figures"
_DATA, _EVICT, _RUN = "Model and data", "Eviction", "Running and output"

JsonOption = Annotated[bool, Option("--json", help="Print JSON instead of a table.", rich_help_panel=_RUN)]


CompareOption = Annotated[
    str, Option(help="Baseline and treatments: selections, or policy:selection, separated by commas.")
]


def _data(*names: str, **more: Any) -> Any:
    return Option(*names, rich_help_panel=_DATA, **more)


def _evict(*names: str, **more: Any) -> Any:
    return Option(*names, rich_help_panel=_EVICT, **more)


def _run(*names: str, **more: Any) -> Any:
    return Option(*names, rich_help_panel=_RUN, **more)


@dataclass(frozen=True)
class RunOptions:
    """What the user asked for, as typed; `configs` turns it into eviction configurations.

    `typed` names the options that stand on the command line.
    """

    model: Annotated[
        str,
        _data(
            "--model",
            "-m",
            help="Alias, hub id, folder, .gguf file, or random:<alias> (`perturbkv models`).",
            autocompletion=completion.models,
        ),
    ] = DEFAULT
    dataset: Annotated[
        str,
        _data(
            "--dataset",
            "-d",
            help="needle, a LongBench name, or a .jsonl file (`perturbkv datasets`).",
            autocompletion=completion.datasets,
        ),
    ] = "needle"
    samples: Annotated[
        int | None, _data(help="How many samples. Default: 8, or all where there are fewer.", show_default=False)
    ] = None
    seed: Annotated[int, _data(help="Seed of the data, of random weights and of the random selection.")] = 0
    data_dir: Annotated[
        Path | None, _data(help="Folder with LongBench's jsonl files.", envvar="PERTURBKV_DATA_DIR")
    ] = None
    length: Annotated[
        list[str] | None,
        _data("--length", "--lengths", help="needle: tokens of a prompt; repeatable, or with commas.",
              show_default=False),
    ] = None  # fmt: skip
    depth: Annotated[
        list[str] | None,
        _data("--depth", "--depths", help="needle: where the fact lies, 0 to 1; repeatable, or with commas.",
              show_default=False),
    ] = None  # fmt: skip
    haystack: Annotated[str, _data(help="needle: prose or noise.")] = "prose"
    max_tokens: Annotated[int | None, _data(help="Cut longer prompts in the middle.")] = None
    chat_template: Annotated[
        bool | None,
        _data("--chat-template/--no-chat-template", help="Default: on where the tokenizer has one, but off for "
              "LongBench's few-shot and code sets.", show_default=False),
    ] = None  # fmt: skip
    policy: Annotated[
        list[str] | None,
        _evict(
            help="Eviction system (`perturbkv policies`), with its own parameters in brackets: adakv(floor=0.1); "
            "repeatable. Default: snapkv.",
            show_default=False,
            autocompletion=completion.policies,
        ),
    ] = None
    budget: Annotated[
        list[str] | None,
        _evict("--budget", "-b", help="Entries kept per head, window included: tokens (128) or a fraction (0.05); "
               "repeatable. Default: 128.", show_default=False),
    ] = None  # fmt: skip
    preset: Annotated[
        list[str] | None,
        _evict(
            help=f"{', '.join(PRESETS)}; repeatable. Default: paper.",
            show_default=False,
            autocompletion=completion.presets,
        ),
    ] = None
    alpha: Annotated[list[float] | None, _evict(help="Share of stage 1, 0 to 1; repeatable.")] = None
    window: Annotated[int | None, _evict(help="Last queries that vote and always stay.")] = None
    granularity: Annotated[
        list[str] | None, _evict(help="One kept set per query head or per kv head: query, kv; repeatable.")
    ] = None
    protect_first: Annotated[
        str | None, _evict(help="First entries that always stay: entries (4) or a share of b (0.1). Default: 0.")
    ] = None
    protect_recent: Annotated[
        str | None, _evict(help="Most recent entries that always stay, likewise. Default: the window.")
    ] = None
    head_scores: Annotated[
        Path | None, _evict(help='headkv: JSON of {"layer-head": score} (`perturbkv head-scores`).')
    ] = None
    scenario: Annotated[str, _evict(help=f"{' or '.join(SCENARIOS)}: is the question compressed too?")] = "regular"
    cache: Annotated[str, _evict(help=f"Layout of evicted caches: {' or '.join(CACHES)}.")] = "ragged"
    steps: Annotated[
        int | None,
        _run(help="Decode steps measured, teacher-forced on the full run. Default: 1.", show_default=False),
    ] = None
    dtype: Annotated[str, _run(help="auto, float32, bfloat16, float16.")] = "auto"
    device: Annotated[str, _run(help="auto, cpu, cuda, cuda:1, …")] = "auto"
    device_map: Annotated[
        str, _run(help="auto: the model's layers over all GPUs, for one larger than a GPU; none.")
    ] = "none"
    save: Annotated[list[str] | None, _run(help="outputs: also head outputs, hidden states, attention.")] = None
    max_memory: Annotated[
        str | None,
        _run(help="Most that evicted caches which are decoded together may take: 512MiB, 2GiB; more go in several "
             "batches. Default: half of what weights and full cache take.", show_default=False),
    ] = None  # fmt: skip
    chunk_mib: Annotated[int, _run(help="Bound on the working memory of value norms and sums over entries.")] = 256
    norm_kernel: Annotated[str, _run(help="How value norms are computed: auto, triton, chunked.")] = "auto"
    output: Annotated[
        Path | None, _run("--output", "-o", help="Where results go. Default: runs/<time>-<model>-<dataset>.")
    ] = None
    overwrite: Annotated[bool, _run("--overwrite", help="Replace a trace of another run.")] = False
    dry_run: Annotated[
        bool, _run("--dry-run", help="Print samples, tokens, configurations and memory; run nothing.")
    ] = False
    as_json: JsonOption = False
    typed: frozenset[str] = frozenset()

    def __post_init__(self) -> None:
        if self.chunk_mib < 1:
            msg = f"--chunk-mib must be at least 1, got {self.chunk_mib}"
            raise ConfigError(msg)
        if self.max_tokens is not None and self.max_tokens < 2:
            msg = f"--max-tokens must be at least 2, got {self.max_tokens}"
            raise ConfigError(msg)
        check_choice("scenario", self.scenario, tuple(SCENARIOS))
        check_choice("cache", self.cache, tuple(CACHES))
        check_choice("device map", self.device_map, ("none", "auto"))
        if self.device_map == "auto" and self.device != "auto":
            msg = f"--device-map auto takes all GPUs and --device {self.device} one; give only one of them"
            raise ConfigError(msg)

    @property
    def resources(self) -> Resources:
        """How the run may use the machine. Raises ConfigError for text that is not a size."""
        bound = None if self.max_memory is None else parse_size("--max-memory", self.max_memory)
        return Resources(self.chunk_mib * 2**20, bound, self.norm_kernel)

    @property
    def step_count(self) -> int:
        """How many decode steps; 1 where the user did not say."""
        return 1 if self.steps is None else self.steps

    @property
    def lengths(self) -> tuple[int, ...]:
        """Needle's prompt lengths; empty if the user gave none. Raises ConfigError for anything but numbers."""
        found = numbers("--length", self.length)
        if any(number != int(number) for number in found):
            msg = f"--length takes whole numbers of tokens, got '{', '.join(self.length or [])}'"
            raise ConfigError(msg)
        return tuple(map(int, found))

    @property
    def depths(self) -> tuple[float, ...]:
        """Needle's depths; empty if the user gave none. Raises ConfigError for anything but numbers."""
        return numbers("--depth", self.depth)

    def with_budgets(self, budgets: tuple[str, ...]) -> RunOptions:
        """The same with these budgets, where the user chose none."""
        return self if self.budget else dataclasses.replace(self, budget=list(budgets))

    def choices(self) -> dict[str, Any]:
        """What every configuration is asked to be, but for its selection, as `perturbkv.selection.grid` takes it.

        Raises BudgetError for text that is not a budget, ConfigError for one that is asked for twice.
        """
        asked = {field.name: getattr(self, field.name) for field in dataclasses.fields(self) if field.name in FIELDS}
        budgets = apart("--budget", [Budget.parse(text) for text in self.budget or ["128"]])
        several = {"preset": self.preset or "paper", "policy": self.policy or "snapkv", "budget": budgets}
        beside = {"alpha": self.alpha or None, "seed": self.seed}
        return {**asked, **several, **beside, "granularity": self.granularity or None}

    def configs(self, selections: list[str]) -> tuple[EvictionConfig, ...]:
        """Every preset × budget × alpha × granularity × policy × selection, what policy and cache cannot do refused.

        A selection may name its policy: `streaming-llm:position`. A policy alone stands for its first selection;
        `random` alone is the selection. Raises ConfigError for a --policy that no selection leaves open.
        """
        if "policy" in self.typed and all(map(names_policy, selections)):
            msg = f"--policy has no effect here: {', '.join(selections)} name their own; leave it out"
            raise ConfigError(msg)
        return every({**self.choices(), "selection": selections}, self.cache)


@dataclass(frozen=True)
class LookOptions:
    """Which trace an analysis looks at, where in it, and how its figures come out.

    `asked` holds the analysis' own options: what it is asked of the trace.
    """

    trace: Annotated[
        Path | None,
        Argument(help="A finished trace; without it the options below make one first.", show_default=False),
    ] = None
    step: Annotated[int, Option(help="Which decode step is looked at.", rich_help_panel=_LOOK)] = 0
    figure_format: Annotated[
        list[str] | None,
        Option("--format", help="png, svg, pdf; repeatable. Default: png and svg.", rich_help_panel=_LOOK,
               show_default=False),
    ] = None  # fmt: skip
    columns: Annotated[
        int, Option(help="Width of the figures in a journal's columns: 1 (84 mm) or 2 (174 mm).", rich_help_panel=_LOOK)
    ] = 2
    asked: Mapping[str, Any] = dataclasses.field(default_factory=dict)

    def __post_init__(self) -> None:
        for suffix in self.formats:
            check_choice("format", suffix, FORMATS)
        if self.columns not in COLUMNS:
            msg = f"--columns must be 1 (84 mm) or 2 (174 mm), got {self.columns}"
            raise ConfigError(msg)
        if self.step < 0:
            msg = f"expected a step of at least 0, got {self.step}"
            raise ConfigError(msg)

    @property
    def formats(self) -> list[str]:
        """Which files each figure becomes."""
        return self.figure_format or ["png", "svg"]
