"""The known datasets, by name, and the way to load one. A dataset's module is imported when it is asked for."""

from __future__ import annotations

import importlib
import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

from perturbkv.configs import numbers
from perturbkv.configs.kinds import LONGBENCH
from perturbkv.datasets.encode import Tokenizer
from perturbkv.datasets.sample import Sample
from perturbkv.datasets.wording import WITHOUT_CHAT, Wording
from perturbkv.errors import ConfigError, DatasetError, UnknownNameError

DATA_DIR_VARIABLE = "PERTURBKV_DATA_DIR"
SHORTEST = 128
GENERATION_LENGTH = 64
"""Tokens of an answer at most, for data that names no length of its own."""


def _data_dir() -> Path | None:
    named = os.environ.get(DATA_DIR_VARIABLE)
    return Path(named) if named else None


@dataclass(frozen=True)
class DatasetOptions:
    """How samples are made or picked; needle alone looks at lengths, depths and haystack.

    Attributes:
        samples: how many.
        at_most: whether fewer will do, where the dataset has no more.
        seed: of everything random.
        data_dir: folder with LongBench's files; default: the environment's PERTURBKV_DATA_DIR.
        lengths: tokens of a prompt, before the chat template.
        depths: where the fact lies, 0 (beginning) to 1 (end).
        haystack: `prose` or `noise`.

    Raises ConfigError where one is out of its range.
    """

    samples: int
    seed: int = 0
    data_dir: Path | None = field(default_factory=_data_dir)
    lengths: tuple[int, ...] = (1000,)
    depths: tuple[float, ...] = (0.1, 0.35, 0.6, 0.85)
    haystack: str = "prose"
    at_most: bool = False

    def __post_init__(self) -> None:
        if self.samples < 1:
            msg = f"a run needs at least 1 sample, got {self.samples}"
            raise ConfigError(msg)
        numbers.check("samples (--samples)", self.samples, numbers.MOST_SAMPLES)
        numbers.check("seed (--seed)", self.seed)
        for length in self.lengths:
            numbers.check("length (--length) of needle", length, numbers.LONGEST)
        if not self.lengths or min(self.lengths) < SHORTEST:
            msg = f"needle prompts need at least {SHORTEST} tokens, got --length {min(self.lengths)}"
            raise ConfigError(msg)
        wrong = [depth for depth in self.depths if not 0 <= depth <= 1]
        if wrong:
            msg = f"a depth must lie in [0, 1], got {wrong[0]}"
            raise ConfigError(msg)
        if self.haystack not in ("prose", "noise"):
            raise UnknownNameError(self.haystack, "haystack", ("prose", "noise"))


@dataclass(frozen=True)
class LoadedDataset:
    """Samples, and what came with them.

    Attributes:
        samples: at least one.
        options: what has to be known to make them again (JSON-able, stored in the trace).
        wordings: LongBench's that were used.
    """

    samples: tuple[Sample, ...]
    options: dict[str, Any]
    wordings: tuple[Wording, ...] = ()

    @property
    def generation_length(self) -> int:
        """Tokens of an answer at most, where the user does not say: the longest that a wording gives."""
        return max((worded.generation_length for worded in self.wordings), default=GENERATION_LENGTH)

    @property
    def chat_template(self) -> bool:
        """Whether a chat template is used where the tokenizer has one and the user does not say.

        Raises ConfigError for samples that go with one and samples that go without.
        """
        without = [sample.task for sample in self.samples if sample.task in WITHOUT_CHAT]
        if without and len(without) < len(self.samples):
            msg = (
                f"LongBench's {without[0]} goes without a chat template, other samples of this file with one; "
                "choose for all with --chat-template or --no-chat-template"
            )
            raise ConfigError(msg)
        return not without


@dataclass(frozen=True)
class DatasetInfo:
    """A registered dataset: what it is, its kind of task, what it needs."""

    name: str
    summary: str
    kind: str
    needs: str
    module: str


_REGISTRY: dict[str, DatasetInfo] = {}


def register(info: DatasetInfo) -> None:
    """Add a dataset. Raises ConfigError where the name is taken."""
    if info.name in _REGISTRY:
        msg = f"a dataset named '{info.name}' is registered already; choose another name"
        raise ConfigError(msg)
    _REGISTRY[info.name] = info


def known() -> list[DatasetInfo]:
    """Every registered dataset, in the order of registration."""
    return list(_REGISTRY.values())


def in_longbench(name: str) -> bool:
    """Whether it is one of LongBench's 21 data sets."""
    return any(name in names for names in LONGBENCH.values())


def is_file(name: str) -> bool:
    """Whether a dataset is named by its path."""
    return name.endswith((".jsonl", ".json")) or Path(name).is_file()


def check_name(name: str) -> None:
    """Raise UnknownNameError unless `name` is registered or names a file."""
    if name not in _REGISTRY and not is_file(name):
        raise UnknownNameError(name, "dataset", _REGISTRY, "a .jsonl file works too")


def load(name: str, options: DatasetOptions, tokenizer: Tokenizer) -> LoadedDataset:
    """The first `options.samples` samples of a dataset. Raises UnknownNameError or DatasetError.

    Fewer are an error, unless `options.at_most`.
    """
    check_name(name)
    module = "perturbkv.datasets.jsonl" if is_file(name) else _REGISTRY[name].module
    loaded = cast("LoadedDataset", importlib.import_module(module).load(name, options, tokenizer))
    if len(loaded.samples) < options.samples and not options.at_most:
        msg = f"dataset '{name}' has {len(loaded.samples)} samples, fewer than --samples {options.samples}"
        raise DatasetError(msg)
    return loaded


register(
    DatasetInfo(
        "needle",
        "a fact hidden in running English prose, asked for at the end",
        "retrieval",
        "nothing",
        "perturbkv.datasets.needle",
    )
)
_LONGBENCH_NEEDS = "--data-dir or the hub; perturbkv[longbench]"
for _kind, _names in LONGBENCH.items():
    for _name in _names:
        register(DatasetInfo(_name, "LongBench", _kind, _LONGBENCH_NEEDS, "perturbkv.datasets.longbench"))
