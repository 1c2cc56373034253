"""Model and prompts: the options of every command that runs a model."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Any

from typer import Option

from perturbkv.cli.choices import parse_numbers, split_names
from perturbkv.errors import ConfigError
from perturbkv.models.aliases import DEFAULT

DATA = "Model and data"
"""The group of these options in the help."""


_data_option = partial(Option, rich_help_panel=DATA)


@dataclass(frozen=True)
class DataOptions:
    """The options that choose model and prompts.

    `typed_options` holds the names of all options that the user typed, those of other groups too.
    """

    model: Annotated[
        str,
        _data_option(
            "--model",
            "-m",
            metavar="NAME",
            help="Alias, hub id, folder, .gguf file",
        ),
    ] = DEFAULT
    revision: Annotated[
        str | None,
        _data_option(
            metavar="NAME", help="Branch, tag or commit of a hub's model", show_default="the newest", hidden=True
        ),
    ] = None
    dataset: Annotated[
        str,
        _data_option(
            "--dataset",
            "-d",
            metavar="NAME",
            help="Name in `list datasets`, or a .jsonl file",
        ),
    ] = "needle"
    samples: Annotated[
        int | None, _data_option(metavar="N", help="Prompts; all where there are fewer", show_default="8")
    ] = None
    seed: Annotated[int, _data_option(metavar="N", help="Seed of data, random weights and random selections")] = 0
    data_dir: Annotated[
        Path | None,
        _data_option(
            metavar="PATH", help="LongBench's or RULER's files; PERTURBKV_DATA_DIR", envvar="PERTURBKV_DATA_DIR"
        ),
    ] = None
    length: Annotated[
        list[str] | None,
        _data_option("--length", "--lengths", metavar="N", help="needle, ruler: tokens of a prompt, also with commas"),
    ] = None
    depth: Annotated[
        list[str] | None,
        _data_option("--depth", "--depths", metavar="X", help="needle: where the fact lies, 0 to 1, also with commas",
              hidden=True),
    ] = None  # fmt: skip
    haystack: Annotated[str, _data_option(metavar="NAME", help="needle: prose or noise", hidden=True)] = "prose"
    max_tokens: Annotated[int | None, _data_option(metavar="N", help="Cut longer prompts in the middle")] = None
    chat_template: Annotated[
        bool | None,
        _data_option("--chat-template/--no-chat-template", help="Use the model's template",
              show_default="yes; few-shot and code: no", hidden=True),
    ] = None  # fmt: skip
    typed_options: frozenset[str] = frozenset()

    def __post_init__(self) -> None:
        if self.max_tokens is not None and self.max_tokens < 2:
            raise ConfigError(f"--max-tokens must be at least 2, got {self.max_tokens}")

    def check_inputs(self) -> None:
        """Check that the model and the data exist, without importing torch.

        --dataset may list several data sets, as for `split_datasets`. Raises PerturbkvErrors, NoMemoryError among them
        where the process's limits leave no room to import torch.
        """
        from perturbkv import memory
        from perturbkv.datasets import dataset_registry, jsonl, prompts
        from perturbkv.models import sources

        memory.check_address_space()
        sources.check_name(self.model, self.revision or "")
        for name in [self.dataset] if Path(self.dataset).is_file() else split_names(self.dataset):
            prompts.resolve_options(name, **self.data_request())
            if dataset_registry.is_file(name):
                jsonl.FILE.check(Path(name), piped=True)

    def data_request(self, metric: str = "") -> dict[str, Any]:
        """Return the loader's arguments for the data set; `metric` grades answers in place of the data set's own.

        Raises ConfigError for a --length or --depth that is no number.
        """
        return {
            "samples": self.samples, "seed": self.seed, "data_dir": self.data_dir, "lengths": self.lengths,
            "depths": self.depths, "haystack": self.haystack, "metric": metric,
        }  # fmt: skip

    @property
    def lengths(self) -> tuple[int, ...]:
        """The lengths of generated prompts, tokens; empty without --length. Raises ConfigError for other text."""
        lengths = parse_numbers("--length", self.length)
        if any(number != int(number) for number in lengths):
            raise ConfigError(f"--length takes whole numbers of tokens, got '{', '.join(self.length or [])}'")
        return tuple(map(int, lengths))

    @property
    def depths(self) -> tuple[float, ...]:
        """The depths of the needle, 0 to 1; empty without --depth. Raises ConfigError for text that is no number."""
        return parse_numbers("--depth", self.depth)
