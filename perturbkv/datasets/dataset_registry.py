"""The known datasets by name, and loading them; a dataset's module is imported on first use."""

from __future__ import annotations

import importlib
import os
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, cast

from perturbkv.configs import option as numbers
from perturbkv.configs.task_kinds import LONGBENCH, RULER_PREFIX, kind_of
from perturbkv.datasets import metrics
from perturbkv.datasets.encode import Tokenizer
from perturbkv.datasets.sample import Sample
from perturbkv.datasets.wording import WITHOUT_CHAT
from perturbkv.errors import ConfigError, DatasetError, UnknownNameError

DATA_DIR_VARIABLE = "PERTURBKV_DATA_DIR"
SHORTEST = 128
GENERATION_LENGTH = 64
"""Longest answer in tokens, for data without a length of its own."""


def _default_data_dir() -> Path | None:
    """Return the folder named by PERTURBKV_DATA_DIR; None if the variable is not set."""
    path = os.environ.get(DATA_DIR_VARIABLE)
    return Path(path) if path else None


@dataclass(frozen=True)
class DatasetOptions:
    """Options of loading samples; `DatasetInfo.options` names those that a dataset uses.

    Attributes:
        samples: number of samples.
        at_most: whether a dataset with fewer samples is accepted.
        seed: seed of everything random.
        data_dir: folder with LongBench's or RULER's files; default: the environment's PERTURBKV_DATA_DIR.
        lengths: tokens of a prompt, before the chat template; RULER's include the answer.
        depths: position of the fact, 0 (beginning) to 1 (end).
        haystack: `prose` or `noise`.
        metric: metric in place of the dataset's, one of `metrics.CHOICES`; empty: none is chosen.

    Raises ConfigError for a value out of range, UnknownNameError for an unknown haystack or metric.
    """

    samples: int
    seed: int = 0
    data_dir: Path | None = field(default_factory=_default_data_dir)
    lengths: tuple[int, ...] = (1000,)
    depths: tuple[float, ...] = (0.1, 0.35, 0.6, 0.85)
    haystack: str = "prose"
    at_most: bool = False
    metric: str = ""

    def __post_init__(self) -> None:
        for name in ("samples", "seed"):
            numbers.check_whole(f"{name} (--{name})", getattr(self, name))
        if self.samples < 1:
            raise ConfigError(f"a run needs at least 1 sample, got {self.samples}")
        numbers.check_number("samples (--samples)", self.samples, numbers.MOST_SAMPLES)
        numbers.check_number("seed (--seed)", self.seed)
        for length in self.lengths:
            numbers.check_number("length (--length) of a prompt", length, numbers.LONGEST_PROMPT)
        if not self.lengths or min(self.lengths) < SHORTEST:
            raise ConfigError(
                f"prompts that are made need at least {SHORTEST} tokens, got --length {min(self.lengths)}"
            )
        wrong = [depth for depth in self.depths if not 0 <= depth <= 1]
        if wrong:
            raise ConfigError(f"a depth must lie in [0, 1], got {wrong[0]}")
        if self.metric:
            metrics.check_name(self.metric)
        if self.haystack not in ("prose", "noise"):
            raise UnknownNameError(self.haystack, "haystack", ("prose", "noise"))


@dataclass(frozen=True)
class LoadedDataset:
    """The samples of a dataset, and the options that reproduce them.

    Attributes:
        samples: at least one.
        options: everything needed to make the samples again (JSON-able, stored in the trace).
        generation_length: longest answer in tokens, unless the user chooses one.
    """

    samples: tuple[Sample, ...]
    options: dict[str, Any]
    generation_length: int = GENERATION_LENGTH

    @property
    def chat_template(self) -> bool:
        """True if the prompts use the tokenizer's chat template by default.

        Raises ConfigError where some samples need it and others must go without.
        """
        without = [sample.task for sample in self.samples if sample.task in WITHOUT_CHAT]
        if without and len(without) < len(self.samples):
            raise ConfigError(
                f"LongBench's {without[0]} goes without a chat template, other samples of this file with one; "
                "choose for all with --chat-template or --no-chat-template"
            )
        return not without


@dataclass(frozen=True)
class DatasetInfo:
    """A registered dataset: its summary, kind of task, requirements, module, and the `DatasetOptions` that it uses."""

    name: str
    summary: str
    kind: str
    needs: str
    module: str
    options: frozenset[str] = frozenset()


_REGISTRY: dict[str, DatasetInfo] = {}


def register(info: DatasetInfo) -> None:
    """Register a dataset. Raises ConfigError if its name is already registered."""
    if info.name in _REGISTRY:
        raise ConfigError(f"a dataset named '{info.name}' is registered already; choose another name")
    _REGISTRY[info.name] = info


def all_datasets() -> list[DatasetInfo]:
    """Return every registered dataset, in the order of registration."""
    return list(_REGISTRY.values())


def uses_option(name: str, option: str) -> bool:
    """Return whether a dataset uses a field of `DatasetOptions`; True for an unknown name."""
    return option in _REGISTRY[name].options if name in _REGISTRY else not is_file(name)


def in_ruler(name: str) -> bool:
    """Return whether a name is one of RULER's 13 tasks."""
    return name in _REGISTRY and name.startswith(RULER_PREFIX)


def in_longbench(name: str) -> bool:
    """Return whether a name is one of LongBench's 21 datasets."""
    return any(name in names for names in LONGBENCH.values())


def is_file(name: str) -> bool:
    """Return whether a dataset's name is that of a file: one that is there, or any name of a .jsonl or .json file."""
    return name.endswith((".jsonl", ".json")) or Path(name).is_file()


def check_name(name: str) -> None:
    """Raise UnknownNameError unless `name` is registered or names a file."""
    if name not in _REGISTRY and not is_file(name):
        raise UnknownNameError(name, "dataset", _REGISTRY, "see `perturbkv list datasets`; a .jsonl file works too")


def load(name: str, options: DatasetOptions, tokenizer: Tokenizer) -> LoadedDataset:
    """Return the first `options.samples` samples of a dataset. Raises UnknownNameError or DatasetError.

    Fewer samples are an error, unless `options.at_most`.
    """
    check_name(name)
    module = "perturbkv.datasets.jsonl" if is_file(name) else _REGISTRY[name].module
    loaded = cast("LoadedDataset", importlib.import_module(module).load(name, options, tokenizer))
    if len(loaded.samples) < options.samples and not options.at_most:
        raise DatasetError(
            f"dataset '{name}' has {len(loaded.samples)} samples, fewer than --samples {options.samples}"
        )
    if options.metric:
        return replace(loaded, samples=tuple(replace(sample, metric=options.metric) for sample in loaded.samples))
    return loaded


register(
    DatasetInfo(
        "needle",
        "a fact hidden in running English prose, asked for at the end",
        "retrieval",
        "nothing",
        "perturbkv.datasets.needle",
        frozenset({"seed", "lengths", "depths", "haystack"}),
    )
)
_LONGBENCH_NEEDS = "--data-dir or the hub; perturbkv[longbench]"
for _kind, _names in LONGBENCH.items():
    for _name in _names:
        _module = "perturbkv.datasets.longbench"
        register(DatasetInfo(_name, "LongBench", _kind, _LONGBENCH_NEEDS, _module, frozenset({"data_dir"})))
_ESSAYS = "--data-dir or the hub: PaulGrahamEssays.json; nltk's punkt_tab; "
_RULER = (
    ("", "RULER, made offline", ("niah_single_1", "niah_multikey_2", "niah_multikey_3", "vt", "cwe", "fwe")),
    (_ESSAYS, "RULER, over essays",
     ("niah_single_2", "niah_single_3", "niah_multikey_1", "niah_multivalue", "niah_multiquery")),
    ("--data-dir: squad.json; ", "RULER, over squad.json", ("qa_squad",)),
    ("--data-dir or the hub: hotpotqa.json; ", "RULER, over hotpotqa.json", ("qa_hotpot",)),
)  # fmt: skip
for _data, _what, _names in _RULER:
    _module = "perturbkv.datasets.ruler.samples"
    _options = frozenset({"seed", "lengths"} | ({"data_dir"} if _data else set()))
    for _name in map(RULER_PREFIX.__add__, _names):
        register(DatasetInfo(_name, _what, kind_of(_name), f"{_data}perturbkv[ruler]", _module, _options))
