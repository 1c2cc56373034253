"""The configuration of a run, frozen, validated and stored as a whole in the trace; and the shards of a run.

`RunConfig` combines the model, the data, the protocol and the eviction configurations. No torch here.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Self, TypeVar

from perturbkv.configs import option
from perturbkv.configs.eviction import EvictionConfig
from perturbkv.configs.resources import STEPS_AT_ONCE
from perturbkv.errors import ConfigError, UnknownNameError

NO_DATASET = "prompts"
"""Dataset name of prompts that come from no dataset."""
DIGESTS = "prompt_digests"
"""Dataset option: prompt id -> digest of the prompt, for prompts that came from no dataset."""
METRICS = "metrics"
"""Dataset option: names of the metrics that grade answers, where any are generated."""
SAVES = ("outputs", "effect")
FULL, MEAN = "full", "mean"
ISOLATED_EVERY = 16
"""Stride of the steps at which isolated quantities are measured where caches are compressed again; elsewhere 1."""
EFFECT_GRADIENTS = {FULL: "the full run's", MEAN: "the mean of the full and the evicted run's"}
"""Gradient of the text's log p by which effects are measured (METHOD: effect on the text)."""
SCENARIOS = {
    "regular": "the whole prompt is compressed, its question included",
    "context-only": "only the context is compressed; the question is run over the compressed cache",
}
OWN, ANSWER = "own", "answer"
TEXTS = {
    OWN: "the full run's greedy continuation",
    ANSWER: "the first accepted answer",
    "given": "the row's `text`",
}
"""Text that the decode steps read (METHOD: log p and perplexity)."""
CACHES = {
    "ragged": "heads of any lengths, in blocks with bounded padding",
    "rectangular": "one length per configuration and layer, no padding",
}


@dataclass(frozen=True)
class Settings:
    """Settings of a measurement that hold for every prompt and configuration.

    Attributes:
        steps: number of decode steps at most, teacher-forced on `text`; None: 8, or 1 where a policy reads the prompt
            in a prefill of its own.
        scenario: `regular`, or `context-only`, which compresses the context before the question is known.
        cache: layout of evicted caches, `ragged` or `rectangular`.
        save: `outputs` keeps head outputs, hidden states and attention too; `effect` what each head's loss, and each
            evicted entry, costs the text (METHOD: effect on the text).
        effect_gradient: gradient by which `effect` is measured, a key of `EFFECT_GRADIENTS`; `mean` takes a backward
            pass through every configuration's steps, too.
        generate: number of tokens that every cache generates, which takes prompts with accepted answers that grade
            them; None: as many as the dataset says.
        head_scores: one row of scores per layer, for the policy `headkv`.
        text: text that the decode steps read, a key of `TEXTS`.
        prompts: whether the trace holds each prompt's tokens and text, which `tokens` shows, and the text of answers.
            No number depends on it: a run that goes on leaves finished samples as they are.
        kept: whether the trace holds the positions that every head keeps, which `tokens` and `Trace.kept` show, beside
            their counts; likewise.
        scored: whether a prompt whose answers nothing grades is refused, where answers are generated.
        leave_out_unfit: whether a budget that some prompt makes no larger than the window is left out, not refused.
        compress_every: after every so many tokens of a text or answer, each cache is compressed to its budget again; 0:
            never.
        compress_over: a cache that holds more entries than this, at the prompt's end or later, is compressed to its
            budget; 0: it is compressed once, at the prompt's end.
        isolated_every: where caches are compressed again, isolated quantities are measured at each compression, at
            every so many steps and at the last; None: 16.

    Raises UnknownNameError for an unknown choice, ConfigError for a number out of range.
    """

    steps: int | None = None
    scenario: str = "regular"
    cache: str = "ragged"
    save: tuple[str, ...] = ()
    effect_gradient: str = FULL
    generate: int | None = 0
    head_scores: Sequence[Sequence[float]] = ()
    text: str = OWN
    prompts: bool = True
    kept: bool = True
    scored: bool = True
    leave_out_unfit: bool = False
    compress_every: int = 0
    compress_over: int = 0
    isolated_every: int | None = None

    def __post_init__(self) -> None:
        for field, least in (
            ("steps", 1),
            ("generate", 0),
            ("compress_every", 0),
            ("compress_over", 0),
            ("isolated_every", 1),
        ):
            number = getattr(self, field)
            if number is not None:
                option.check_whole(field, number)
                option.check_number(field, number)
                if number < least:
                    raise ConfigError(f"{field} (--{field.replace('_', '-')}) must be at least {least}, got {number}")
        for field, known in (
            ("scenario", SCENARIOS), ("cache", CACHES), ("text", TEXTS), ("effect_gradient", EFFECT_GRADIENTS),
        ):  # fmt: skip
            if getattr(self, field) not in known:
                raise UnknownNameError(getattr(self, field), field.replace("_", " "), known)
        for name in self.save:
            if name not in SAVES:
                raise UnknownNameError(name, "save", SAVES)


@dataclass(frozen=True)
class RunConfig:
    """Everything that a run's numbers depend on; stored as JSON in the trace, and compared when a run is resumed.

    Attributes:
        model: alias, hub id, folder or GGUF file, as the user gave it.
        revision: version of the weights: a commit, or a digest of the files.
        random_weights: True where the model has the alias' shapes and random weights.
        dataset: dataset name or file, as the user gave it.
        dataset_options: options of the dataset (lengths, depths, wording with its template, …), and the metrics that
            grade its answers.
        samples: number of samples.
        seed: seed of the data and the random weights.
        steps: decode steps measured; step 0 is the first decoding token.
        max_tokens: prompts longer than this are cut in the middle; None: never.
        chat_template: whether prompts went through the tokenizer's chat template.
        dtype, device: dtype and device of the model.
        configs: the eviction configurations, in the order of the trace's `config` dimension.
        save: extra variables to store: `outputs`, `effect`.
        effect_gradient: gradient by which effects are measured, a key of `EFFECT_GRADIENTS`; `full` without effects.
        scenario: what is compressed, a key of `SCENARIOS`.
        cache: layout of evicted caches, a key of `CACHES`.
        head_scores: one row of scores per layer, for `headkv`; empty where no configuration needs them.
        generate: tokens generated greedily from each cache and scored; 0: none.
        text: text that the decode steps read, a key of `TEXTS`.
        plugins: external score or policy -> digest of its version.
        compress_every, compress_over: when caches are compressed again, as in `Settings`; 0: never.
        isolated_every: at which steps isolated quantities are measured, as in `Settings`; 1: at all.
    """

    model: str
    dataset: str
    configs: tuple[EvictionConfig, ...]
    revision: str = ""
    random_weights: bool = False
    dataset_options: dict[str, Any] = dataclasses.field(default_factory=dict)
    samples: int = 8
    seed: int = 0
    steps: int = 1
    max_tokens: int | None = None
    chat_template: bool = True
    dtype: str = "float32"
    device: str = "cpu"
    save: tuple[str, ...] = ()
    effect_gradient: str = FULL
    scenario: str = "regular"
    cache: str = "ragged"
    head_scores: tuple[tuple[float, ...], ...] = ()
    generate: int = 0
    text: str = OWN
    plugins: dict[str, str] = dataclasses.field(default_factory=dict)
    compress_every: int = 0
    compress_over: int = 0
    isolated_every: int = 1

    def __post_init__(self) -> None:
        if self.effect_gradient != FULL and "effect" not in self.save:
            raise ConfigError(f"--effect-gradient {self.effect_gradient} needs --save effect, whose gradient it is")
        if not self.configs:
            raise ConfigError("a run needs at least one eviction configuration, got none")
        labels = self.labels()
        if len(set(labels)) < len(labels):
            twice = next(label for label in labels if labels.count(label) > 1)
            raise ConfigError(f"the configuration '{twice}' is asked for twice; leave one out")

    @property
    def compresses(self) -> bool:
        """True if caches are compressed again while they are decoded from (METHOD: decode-time eviction)."""
        return bool(self.compress_every or self.compress_over)

    @property
    def compressed_again(self) -> str:
        """When caches are compressed again, as text; empty for never."""
        if self.compress_over:
            return f"above {self.compress_over:,} entries"
        return f"every {self.compress_every:,} tokens" if self.compress_every else ""

    @property
    def recorded_steps(self) -> int:
        """Number of decode steps of evicted runs whose records are held at once: a pass, or all for gradients."""
        return self.steps if self.averages_gradients else min(self.steps, STEPS_AT_ONCE)

    @property
    def averages_gradients(self) -> bool:
        """True if effects are measured by the mean of both runs' gradients."""
        return self.effect_gradient == MEAN

    @property
    def largest_window(self) -> int:
        """The largest window of the configurations, in tokens."""
        return max(config.window for config in self.configs)

    def labels(self) -> list[str]:
        """Return the labels of the configurations, the `config` coordinate of the trace."""
        return [config.label() for config in self.configs]

    def to_json(self) -> str:
        """Return the run as JSON text with sorted keys."""
        document = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        document["configs"] = [config.to_document() for config in self.configs]
        return json.dumps(document, sort_keys=True)

    @classmethod
    def from_json(cls, text: str) -> Self:
        """Return the run in a text written by `to_json`. Raises ConfigError for any other text."""
        expected = "expected a run configuration as JSON, got one"
        try:
            return cls(**_parse_fields(json.loads(text)))
        except KeyError as error:
            msg = f"{expected} without {error}"
        except (TypeError, AttributeError, RecursionError):
            msg = f"{expected} with an entry that no run has"
        except ValueError as error:
            msg = f"{expected} that cannot be read: {error}"
        raise ConfigError(msg)

    def digest(self) -> str:
        """Return the SHA-256 of `to_json`, equal exactly for equal runs."""
        return hashlib.sha256(self.to_json().encode()).hexdigest()

    def differences(self, other: RunConfig) -> list[str]:
        """Return the names of the fields that differ between two runs."""
        mine, theirs = json.loads(self.to_json()), json.loads(other.to_json())
        return [name for name in mine if mine[name] != theirs[name]]


def _parse_fields(document: Any) -> dict[str, Any]:
    """Return field -> value of a run, from its JSON. Raises KeyError, TypeError or ConfigError for another document."""
    if not isinstance(document, dict):
        raise ConfigError("expected a run configuration as JSON, got one that is no object")
    fields = {name: value for name, value in document.items() if name != "configs"}
    fields["save"], fields["head_scores"] = tuple(fields["save"]), tuple(map(tuple, fields.get("head_scores", ())))
    return {**fields, "configs": tuple(map(EvictionConfig.from_document, document["configs"]))}


BY = ("samples", "configs")
MAX_SHARDS = 100_000
"""Limit of shards in a run: the same as of samples."""
_SHARD = re.compile(r"([0-9]+)/([0-9]+)", re.ASCII)
_DIGITS = 18
"""Longest number in a shard's text, in digits: Python refuses to parse thousands of them."""
_Item = TypeVar("_Item")


@dataclass(frozen=True)
class Shard:
    """A part of a run that is divided into equal parts.

    Attributes:
        number: which part, from 1.
        count: how many parts there are.
        by: whether samples or configurations are divided.
    """

    number: int
    count: int
    by: str = BY[0]

    def __post_init__(self) -> None:
        if self.by not in BY:
            raise UnknownNameError(self.by, "way to share a run out", BY)
        option.check_number("the number of shards", self.count, MAX_SHARDS)
        if not 1 <= self.number <= self.count:
            most = max(self.count, 1)
            raise ConfigError(f"expected a shard from 1/{most} to {most}/{most}, got {self}; shards are counted from 1")

    @classmethod
    def parse(cls, text: str, by: str = BY[0]) -> Self:
        """Return the shard written as text, such as `3/16`. Raises ConfigError for any other text, such as 0/16."""
        match = _SHARD.fullmatch(text)
        if match is None or len(text) > 2 * _DIGITS:
            raise ConfigError(f"expected a shard such as 3/16, got '{text[:40]}'; shards are counted from 1")
        return cls(int(match[1]), int(match[2]), by)

    def __str__(self) -> str:
        return f"{self.number}/{self.count}"

    def share(self, items: Sequence[_Item]) -> tuple[_Item, ...]:
        """Return the shard's share of `items`, such as the 3rd, 19th, 35th, … of them for 3/16.

        A share of few items may be empty.
        """
        return tuple(items[self.number - 1 :: self.count])

    def select(self, sample_ids: Sequence[str], configs: Sequence[_Item]) -> tuple[tuple[str, ...], tuple[_Item, ...]]:
        """Return the ids of the shard's samples, and the configurations that the shard measures on each of them.

        `sample_ids` and `configs` are those of the whole run; the shard has all of one and its share of the other.
        """
        if self.by == "configs":
            return tuple(sample_ids), self.share(configs)
        return self.share(sample_ids), tuple(configs)
