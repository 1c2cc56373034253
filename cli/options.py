"""Options that commands share: measuring a trace, analysing it, drawing figures."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Any

from typer import Argument, Option

from perturbkv.cli.choices import check_choice, check_distinct
from perturbkv.cli.data_options import DataOptions
from perturbkv.configs.cache_contents import DEFAULT_STEPS
from perturbkv.configs.entry_counts import Budget
from perturbkv.configs.eviction import EvictionConfig
from perturbkv.configs.option import check_number
from perturbkv.configs.resources import Resources, Workers, parse_size
from perturbkv.configs.run import BY, CACHES, FULL, ISOLATED_EVERY, OWN, SCENARIOS, TEXTS, Settings, Shard
from perturbkv.configs.selections import PRESETS
from perturbkv.datasets.metrics import CHOICES, DEFAULT
from perturbkv.errors import ConfigError
from perturbkv.figures import STYLE_NAMES, check_backend
from perturbkv.selection.grid import FIELDS, expand_grid, names_policy

LOOK = "Analysis and figures"
"""The group of these options in the help."""


@dataclass(frozen=True)
class FigureOptions:
    """The options of figures: format, width, style; and explanations. `own_options` has the command's own options."""

    figure_format: Annotated[
        list[str] | None,
        Option("--format", metavar="NAME", help="png, svg, pdf", rich_help_panel=LOOK, show_default="png, svg"),
    ] = None
    columns: Annotated[
        int, Option(metavar="N", help="Figures' width: 1 (84 mm) or 2 (174 mm) columns", rich_help_panel=LOOK)
    ] = 2
    style: Annotated[
        str,
        Option(metavar="NAME", help="screen, paper (notes in a caption) or talk", rich_help_panel=LOOK),
    ] = "screen"
    explain: Annotated[
        bool, Option("--explain", help="Also say what columns mean, and show further tables", rich_help_panel=LOOK)
    ] = False
    own_options: Mapping[str, Any] = dataclasses.field(default_factory=dict)

    def __post_init__(self) -> None:
        for suffix in self.formats:
            check_choice("format", suffix, ("png", "svg", "pdf"))
        if self.columns not in (1, 2):
            raise ConfigError(f"--columns must be 1 (84 mm) or 2 (174 mm), got {self.columns}")
        check_choice("style", self.style, STYLE_NAMES)
        if self.style == "talk" and self.columns == 1:
            raise ConfigError("--columns 1 is 84 mm, and a slide of --style talk 174 mm wide; leave out --columns")
        if "MPLBACKEND" in os.environ:  # before anything is measured; matplotlib takes a moment to import
            check_backend()

    @property
    def paths(self) -> tuple[Path, ...]:
        """The paths of the traces that the user named; empty in this class."""
        return ()

    @property
    def summary_options(self) -> dict[str, Any]:
        """The command's own options by name, as summary.json keeps them."""
        return dict(self.own_options)

    @property
    def formats(self) -> list[str]:
        """The file formats of the figures."""
        return self.figure_format or ["png", "svg"]

    @property
    def width_mm(self) -> float:
        """The printed width of the figures, mm."""
        from perturbkv.figures import style

        return style.COLUMN_MM if self.columns == 1 else style.WIDE_MM


FRACTIONS = ("0.025", "0.05", "0.1", "0.2", "0.4")
"""The budgets of the paper's sweeps: the default of analyses that compare budgets."""
RARE = (
    "revision", "depth", "haystack", "chat_template", "correction", "protect_first", "protect_recent", "head_scores",
    "cache", "compress_every", "compress_over", "isolated_every", "device_map", "text", "save", "effect_gradient",
    "prompts", "kept", "max_memory", "chunk_mib",
    "norm_kernel", "wait", "shard", "shard_by", "engine", "workers", "ray_address", "cpus_per_worker",
    "timeout_per_sample",
)  # fmt: skip
"""Options of every measuring command that only the help of `perturbkv trace` shows."""
_MOST_MIB = 2**20
"""Largest --chunk-mib."""
_EVICT, _RUN, _MANY = "Eviction", "Running and output", "Many processes"

_BY_PRESET = "by preset"
_JSON = "Print JSON (docs/reference/json.md) instead of tables"

JsonOption = Annotated[bool, Option("--json", help=_JSON)]
MetricOption = Annotated[
    str,
    Option(
        metavar="NAME",
        help=f"Grades answers: {', '.join(CHOICES)}",
        show_default=f"the dataset's, else {DEFAULT}",
    ),
]
MaxNewTokensOption = Annotated[
    int | None, Option(metavar="N", help="Tokens of an answer at most", show_default="the dataset's, else 64")
]
DEFAULT_SELECTIONS = ["attention", "two-stage"]
SelectionOption = Annotated[
    list[str] | None,
    Option(metavar="NAME", help="Rule that selects entries", show_default=", ".join(DEFAULT_SELECTIONS)),
]
CompareOption = Annotated[
    str,
    Option(metavar="NAMES", help="Baseline, then treatments: NAME or policy:NAME"),
]


_eviction_option = partial(Option, rich_help_panel=_EVICT)
_run_option = partial(Option, rich_help_panel=_RUN)


def _rare_option(panel: str, *flags: str, **attributes: Any) -> Any:
    """Return an option in the help's group `panel`, shown only by `perturbkv trace -h`."""
    return Option(*flags, rich_help_panel=panel, hidden=True, **attributes)


@dataclass(frozen=True)
class RunOptions(DataOptions):
    """The options of a run that measures; `configs` returns its eviction configurations.

    `reads_whole_text` says that without --steps the steps read a text to its end.
    """

    policy: Annotated[
        list[str] | None,
        _eviction_option(
            metavar="NAME",
            help="From `list policies`: adakv(floor=0.1)",
            show_default="snapkv",
        ),
    ] = None
    budget: Annotated[
        list[str] | None,
        _eviction_option("--budget", "-b", metavar="B", help="Entries per head with window: 128, 0.05",
               show_default="128"),
    ] = None  # fmt: skip
    preset: Annotated[
        list[str] | None,
        _eviction_option(metavar="NAME", help=", ".join(PRESETS), show_default="paper"),
    ] = None
    alpha: Annotated[
        list[float] | None, _eviction_option(metavar="X", help="Share of stage 1, 0 to 1", show_default=_BY_PRESET)
    ] = None
    window: Annotated[
        int | None,
        _eviction_option(metavar="N", help="Last queries, which vote and always stay", show_default=_BY_PRESET),
    ] = None
    granularity: Annotated[
        list[str] | None,
        _eviction_option(metavar="NAME", help="Kept sets: query, kv, layer, head, model", show_default=_BY_PRESET),
    ] = None
    precision: Annotated[
        list[str] | None,
        _eviction_option(metavar="NAME", help="Kept entries: full, 'keys=4, values=2', FILE", show_default="full"),
    ] = None
    correction: Annotated[
        list[str] | None,
        _rare_option(
            _EVICT, metavar="NAME", help="Stand-in for what went: corrected(mass=linear)", show_default="none"
        ),
    ] = None
    protect_first: Annotated[
        str | None,
        _rare_option(_EVICT, metavar="N", help="First entries that always stay: 4, or 0.1 of b", show_default="0"),
    ] = None
    protect_recent: Annotated[
        str | None,
        _rare_option(_EVICT, metavar="N", help="Last entries that always stay, likewise", show_default="the window"),
    ] = None
    head_scores: Annotated[
        Path | None, _rare_option(_EVICT, metavar="PATH", help="headkv's file; trace without headkv measures it")
    ] = None
    scenario: Annotated[str, _eviction_option(metavar="NAME", help=f"{' or '.join(SCENARIOS)} (without question)")] = (
        "regular"
    )
    cache: Annotated[
        str, _rare_option(_EVICT, metavar="NAME", help=f"Layout of evicted caches: {', '.join(CACHES)}")
    ] = "ragged"
    compress_every: Annotated[
        int | None,
        _rare_option(_EVICT, metavar="N", help="Compress to the budget again every N decoded tokens"),
    ] = None
    compress_over: Annotated[
        int | None, _rare_option(_EVICT, metavar="N", help="Compress what holds more than N entries")
    ] = None
    isolated_every: Annotated[
        int | None,
        _rare_option(
            _EVICT, metavar="N", help="Isolated L every N steps and where compressed", show_default=str(ISOLATED_EVERY)
        ),
    ] = None
    text: Annotated[str, _rare_option(_RUN, metavar="NAME", help=f"Text that the steps read: {', '.join(TEXTS)}")] = OWN
    steps: Annotated[
        int | None,
        _run_option(metavar="N", help="Decode steps, along the text (--text)", show_default=str(DEFAULT_STEPS)),
    ] = None
    dtype: Annotated[str, _run_option(metavar="NAME", help="auto, float32, bfloat16, float16")] = "auto"
    device: Annotated[str, _run_option(metavar="NAME", help="auto, cpu, cuda, cuda:1, …")] = "auto"
    device_map: Annotated[str, _rare_option(_RUN, metavar="NAME", help="auto: layers over all GPUs; none")] = "none"
    save: Annotated[
        list[str] | None,
        _rare_option(
            _RUN,
            metavar="NAME",
            help="outputs (heads, layers, attention); effect (on log p)",
        ),
    ] = None
    effect_gradient: Annotated[
        str, _rare_option(_RUN, metavar="NAME", help="Effects' gradient: full, mean (of both runs')")
    ] = FULL
    prompts: Annotated[
        bool,
        _rare_option(
            _RUN, "--prompts/--no-prompts", help="Keep texts of prompts and answers in the trace", show_default="yes"
        ),
    ] = True
    kept: Annotated[
        bool,
        _rare_option(_RUN, "--kept/--no-kept", help="Store the positions of kept entries", show_default="yes"),
    ] = True
    max_memory: Annotated[
        str | None,
        _rare_option(_RUN, metavar="SIZE", help="Memory of evicted caches: 2GiB", show_default="half of the model's"),
    ] = None
    chunk_mib: Annotated[
        int, _rare_option(_RUN, metavar="N", help="Working memory of value norms and sums, MiB")
    ] = 256  # fmt: skip
    norm_kernel: Annotated[
        str, _rare_option(_RUN, metavar="NAME", help="Kernel of value norms: auto, triton, chunked")
    ] = "auto"
    output: Annotated[
        Path | None,
        _run_option("--output", "-o", metavar="PATH", help="Folder of the results",
             show_default="runs/<time>-<model>-<dataset>"),
    ] = None  # fmt: skip
    overwrite: Annotated[bool, _run_option("--overwrite", help="Replace a trace of another run")] = False
    wait: Annotated[bool, _rare_option(_RUN, "--wait", help="Wait while another process writes there")] = False
    dry_run: Annotated[bool, _run_option("--dry-run", help="Show samples, memory, time; run nothing")] = False
    as_json: Annotated[bool, _run_option("--json", help=_JSON)] = False
    shard: Annotated[
        str | None, _rare_option(_MANY, metavar="K/N", help="Measure share K of N (docs/how-to/cluster.md)")
    ] = None
    shard_by: Annotated[str, _rare_option(_MANY, metavar="NAME", help="Parts of a shard: samples or configs")] = BY[0]
    engine: Annotated[str, _rare_option(_MANY, metavar="NAME", help="Processes that measure: here, workers, ray")] = (
        "here"
    )
    workers: Annotated[
        int | None, _rare_option(_MANY, metavar="N", help="Number of processes", show_default="one per GPU")
    ] = None  # fmt: skip
    ray_address: Annotated[
        str | None,
        _rare_option(_MANY, metavar="ADDR", help="Head of the Ray cluster: host:port", show_default="RAY_ADDRESS"),
    ] = None
    cpus_per_worker: Annotated[
        int | None, _rare_option(_MANY, metavar="N", help="Cores of each worker", show_default="an even share")
    ] = None
    timeout_per_sample: Annotated[
        float | None,
        _rare_option(_MANY, metavar="S", help="Seconds after which a worker is ended", show_default="never"),
    ] = None
    reads_whole_text: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        check_number("--chunk-mib", self.chunk_mib, _MOST_MIB)
        if self.chunk_mib < 1:
            raise ConfigError(f"--chunk-mib must be at least 1, got {self.chunk_mib}")
        for flag, least in (
            ("--compress-every", self.compress_every),
            ("--compress-over", self.compress_over),
            ("--isolated-every", self.isolated_every),
        ):
            if least is not None and least < 1:
                raise ConfigError(f"{flag} must be at least 1, got {least}")
        check_choice("device map", self.device_map, ("none", "auto"))
        check_choice("way to share a run out", self.shard_by, BY)
        _ = self.parsed_shard, self.engine_config, self.settings  # refuse what is invalid before anything else is done
        if self.device_map == "auto" and self.device != "auto":
            raise ConfigError(f"--device-map auto takes all GPUs and --device {self.device} one; give only one of them")

    @property
    def parsed_shard(self) -> Shard | None:
        """The shard to measure; None: the whole run. Raises ConfigError for text that is no shard."""
        return None if self.shard is None else Shard.parse(self.shard, self.shard_by)

    @property
    def engine_config(self) -> Workers:
        """The choice of the engine and its workers. Raises ConfigError for options without effect on the engine."""
        return Workers(
            self.engine,
            self.workers,
            self.ray_address,
            self.cpus_per_worker,
            self.timeout_per_sample,
            by_configs=self.shard is None and self.shard_by != BY[0],
        )

    @property
    def settings(self) -> Settings:
        """The protocol of the run. Raises ConfigError and UnknownNameError for invalid choices."""
        return Settings(
            self.steps, self.scenario, self.cache, tuple(self.save or ()), self.effect_gradient, text=self.text,
            prompts=self.prompts, kept=self.kept, compress_every=self.compress_every or 0,
            compress_over=self.compress_over or 0, isolated_every=self.isolated_every,
        )  # fmt: skip

    @property
    def resources(self) -> Resources:
        """The memory that the run may use, and its norm kernel. Raises ConfigError for text that is not a size."""
        max_bytes = None if self.max_memory is None else parse_size("--max-memory", self.max_memory)
        return Resources(self.chunk_mib * 2**20, max_bytes, self.norm_kernel)

    def with_budgets(self, budgets: tuple[str, ...]) -> RunOptions:
        """Return the options with `budgets` as default budgets; budgets that the user chose stay."""
        return self if self.budget else dataclasses.replace(self, budget=list(budgets))

    def beside_snapkv(self, compare: str) -> tuple[RunOptions, str]:
        """Return the options and --compare: SnapKV against policies from outside alone, unless --compare was typed."""
        from perturbkv.selection.policies.registry import is_external

        policies = self.policy or []
        if "compare" in self.typed_options or not policies or not all(map(is_external, policies)):
            return self, compare
        typed = self.typed_options - {"policy"}
        sides = ",".join(["snapkv:attention", *policies])
        return dataclasses.replace(self, typed_options=typed), sides

    def choices(self) -> dict[str, Any]:
        """Return choice -> value or values of all eviction choices except the selection, for `expand_grid`.

        Raises BudgetError for text that is not a budget, ConfigError for a repeated budget.
        """
        return {
            **{field.name: getattr(self, field.name) for field in dataclasses.fields(self) if field.name in FIELDS},
            "preset": self.preset or "paper",
            "policy": self.policy or "snapkv",
            "budget": check_distinct("--budget", [Budget.parse(text) for text in self.budget or ["128"]]),
            "alpha": self.alpha or None,
            "seed": self.seed,
            **{name: getattr(self, name) or None for name in ("granularity", "precision", "correction")},
        }

    def configs(self, selections: list[str]) -> tuple[EvictionConfig, ...]:
        """Return the configurations of all combinations: preset × budget × alpha × granularity × policy × selection.

        A selection may name its policy: `streaming-llm:position`. A policy alone stands for its first selection;
        `random` alone is the selection. Beside policies from outside, which hold one set per key/value head, all
        others hold one, too, unless granularity or preset is asked for. Raises ConfigError for a --policy or
        --selection without effect, and first of all as `check_inputs`.
        """
        self.check_inputs()
        if "policy" in self.typed_options and all(map(names_policy, selections)):
            raise ConfigError(f"--policy has no effect here: {', '.join(selections)} name their own; leave it out")
        choices = {**self.choices(), "selection": selections}
        configs = expand_grid(choices, self.cache)
        if any(one.is_external for one in configs) and not self.typed_options & {"granularity", "preset"}:
            configs = expand_grid({**choices, "granularity": "kv"}, self.cache)
        if (
            "selection" in self.typed_options
            and all(one.is_external for one in configs)
            and not any(map(names_policy, selections))
        ):
            raise ConfigError(
                f"--selection has no effect here: {configs[0].policy.name} keeps what it keeps; leave it out"
            )
        return configs


@dataclass(frozen=True)
class LookOptions(FigureOptions):
    """The options of figures, the path of the trace to analyse, and the decode step."""

    trace: Annotated[
        Path | None, Argument(help="A finished trace; without it one is made first", show_default=False)
    ] = None
    step: Annotated[
        int | None,
        Option(
            metavar="N",
            help="Decode step that is looked at",
            show_default="the mean over all",
            rich_help_panel=LOOK,
        ),
    ] = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.step is not None and self.step < 0:
            raise ConfigError(f"expected a step of at least 0, got {self.step}")

    @property
    def paths(self) -> tuple[Path, ...]:
        """The path of the trace that the user named, if any."""
        return () if self.trace is None else (self.trace,)

    @property
    def summary_options(self) -> dict[str, Any]:
        """The command's own options and the decode step by name, as summary.json keeps them."""
        return {**self.own_options, "step": self.step}


@dataclass(frozen=True)
class TracesOptions(FigureOptions):
    """The options of figures, and the paths of the traces to analyse together."""

    traces: Annotated[
        list[Path] | None,
        Argument(help="Finished traces; without them they are made first", show_default=False),
    ] = None

    @property
    def paths(self) -> tuple[Path, ...]:
        """The paths of the traces that the user named, if any."""
        return tuple(self.traces or ())
