"""The prompts of a run as token ids, with everything needed to make them again; tokens' texts; and answers' scores."""

from __future__ import annotations

import dataclasses
import hashlib
import itertools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, overload

from perturbkv.configs.run import DIGESTS, NO_DATASET, OWN
from perturbkv.datasets import dataset_registry, metrics
from perturbkv.datasets.dataset_registry import GENERATION_LENGTH, DatasetOptions
from perturbkv.datasets.encode import Prompt, Tokenizer, encode
from perturbkv.datasets.metrics import Metric
from perturbkv.display import Table
from perturbkv.errors import DatasetError
from perturbkv.escaping import escape_line

DEFAULT_SAMPLES = 8


@dataclass(frozen=True, repr=False)
class Prompts(Sequence[Prompt]):
    """A sequence of `Prompt` with the dataset and settings that it was made with; a slice keeps these.

    Attributes:
        prompts: at least one, with different ids.
        dataset: name of their dataset.
        options: options of the dataset for the trace (JSON-able).
        chat_template: whether a chat template was applied.
        max_tokens: the length to which longer prompts were cut; None: none was.
        generation_length: longest answer in tokens, unless the user chooses one.
        seed: seed of the samples.

    Raises DatasetError for no prompts, and for two with the same id.
    """

    prompts: tuple[Prompt, ...]
    dataset: str = NO_DATASET
    options: Mapping[str, Any] = field(default_factory=dict)
    chat_template: bool = False
    max_tokens: int | None = None
    generation_length: int = GENERATION_LENGTH
    seed: int = 0

    def __post_init__(self) -> None:
        ids = self.ids
        if not ids:
            raise DatasetError("expected at least one prompt, got none")
        if len(set(ids)) < len(ids):
            repeated = next(name for name in ids if ids.count(name) > 1)
            raise DatasetError(f"expected prompts of different ids, got '{repeated}' twice; give each an id of its own")

    @property
    def ids(self) -> list[str]:
        """The prompts' ids, in order."""
        return [prompt.sample_id for prompt in self.prompts]

    @property
    def cut_count(self) -> int:
        """Number of prompts that were cut in the middle."""
        return sum(prompt.cut_tokens > 0 for prompt in self.prompts)

    def __len__(self) -> int:
        return len(self.prompts)

    def __repr__(self) -> str:
        return "\n".join([self._title(), *(f"  {prompt}" for prompt in self.prompts)])

    def _repr_html_(self) -> str:
        """Return the title and a table of the prompts as HTML for a notebook."""
        rows = [
            (each.sample_id, f"{len(each.token_ids):,}", f"{each.cut_tokens:,}", each.excerpt, " | ".join(each.answers))
            for each in self.prompts
        ]
        return Table(self._title(), ("prompt", "#tokens", "#cut", "text", "expected"), rows).as_html()

    def _title(self) -> str:
        """Return a one-line title: dataset, number of prompts, chat template."""
        template = "with" if self.chat_template else "without"
        counted = "1 prompt" if len(self.prompts) == 1 else f"{len(self.prompts)} prompts"
        return f"{escape_line(self.dataset)}: {counted}, {template} chat template"

    @overload
    def __getitem__(self, index: int) -> Prompt: ...

    @overload
    def __getitem__(self, index: slice) -> Prompts: ...

    def __getitem__(self, index: int | slice) -> Prompt | Prompts:
        return replace(self, prompts=self.prompts[index]) if isinstance(index, slice) else self.prompts[index]


def load(
    name: str,
    tokenizer: Tokenizer,
    *,
    samples: int | None = None,
    lengths: Sequence[int] = (),
    depths: Sequence[float] = (),
    data_dir: Path | None = None,
    chat_template: bool | None = None,
    max_tokens: int | None = None,
    positions: int | None = None,
    **options: Any,
) -> Prompts:
    """Return the prompts of a dataset as token ids.

    Args:
        name: the dataset's name, or the path of a jsonl file.
        tokenizer: the model's tokenizer.
        samples: number of prompts; None: 8, or all where there are fewer.
        lengths: tokens of a prompt; empty: the default of `DatasetOptions`, as for the next two.
        depths: position of the fact, from 0 to 1.
        data_dir: folder with the dataset's files.
        chat_template: None: where the tokenizer has one and the dataset uses one.
        max_tokens: a longer prompt is cut in the middle.
        positions: number of positions of the model, so that a longer --length is refused before prompts are made; None
            where it is not known.
        options: further fields of `DatasetOptions`.

    Raises UnknownNameError, DatasetError and ConfigError for invalid data.
    """
    requested = resolve_options(name, samples=samples, lengths=lengths, depths=depths, data_dir=data_dir, **options)
    if dataset_registry.uses_option(name, "lengths") and positions is not None:
        _check_length(name, max(requested.lengths), max_tokens, positions)
    loaded = dataset_registry.load(name, requested, tokenizer)
    if chat_template is None:
        chat_template = bool(tokenizer.chat_template) and loaded.chat_template
    prompts = tuple(
        encode(sample, tokenizer, chat_template=chat_template, max_tokens=max_tokens) for sample in loaded.samples
    )
    return Prompts(prompts, name, loaded.options, chat_template, max_tokens, loaded.generation_length, requested.seed)


def resolve_options(
    name: str,
    *,
    samples: int | None = None,
    lengths: Sequence[int] = (),
    depths: Sequence[float] = (),
    data_dir: Path | None = None,
    **options: Any,
) -> DatasetOptions:
    """Return a dataset's options, the defaults of `load` filled in, after every check that needs no tokenizer.

    Arguments are those of `load`. Raises UnknownNameError for a dataset that is not there, and as `DatasetOptions`.
    """
    dataset_registry.check_name(name)
    chosen: dict[str, Any] = {"lengths": tuple(lengths), "depths": tuple(depths), "data_dir": data_dir}
    return DatasetOptions(
        samples=DEFAULT_SAMPLES if samples is None else samples,
        at_most=samples is None,
        **{field: value for field, value in chosen.items() if value},
        **options,
    )


def _check_length(name: str, length: int, max_tokens: int | None, positions: int) -> None:
    """Raise DatasetError if prompts of a requested length, cut to `max_tokens`, exceed the model's positions."""
    if min(length, max_tokens or length) > positions:
        raise DatasetError(
            f"a {name} prompt of {length:,} tokens is longer than the model's {positions} positions; use a shorter "
            f"--length, such as {positions * 3 // 4}, or --max-tokens, which cuts its middle out"  # room for an answer
        )


def whole_text_steps(prompts: Prompts, text: str) -> int:
    """Return the number of decode steps that read every prompt's text to its end; at least 1.

    Of their own text as many as the data set's answers have tokens. Raises as `Prompt.forced_tokens`.
    """
    if text == OWN:
        return prompts.generation_length
    return max(1, *(len(prompt.forced_tokens(text)) - 1 for prompt in prompts))


def collect(prompts: Iterable[Prompt]) -> Prompts:
    """Return prompts as `Prompts`; those of a dataset are returned as they are.

    Prompts from no dataset get a number where they have no id, and their digests become options for the trace.

    Raises DatasetError where only some prompts from no dataset use the chat template.
    """
    collected = prompts if isinstance(prompts, Prompts) else Prompts(_fill_ids(tuple(prompts)))
    if collected.dataset != NO_DATASET:
        return collected
    digests = {prompt.sample_id: _digest(prompt) for prompt in collected}
    return replace(
        collected, options={**collected.options, DIGESTS: digests}, chat_template=_uses_chat_template(collected)
    )


def _fill_ids(prompts: tuple[Prompt, ...]) -> tuple[Prompt, ...]:
    """Return the prompts with an id each: those without one get the first numbers, from 0, that are no other's id."""
    given = {prompt.sample_id for prompt in prompts}
    free = (number for number in map(str, itertools.count()) if number not in given)
    return tuple(prompt if prompt.sample_id else replace(prompt, sample_id=next(free)) for prompt in prompts)


def _uses_chat_template(prompts: Prompts) -> bool:
    """Return whether the prompts use the chat template. Raises DatasetError if only some do."""
    first = prompts[0]
    other = next((prompt for prompt in prompts if prompt.chat_template != first.chat_template), None)
    if other is not None:
        with_it, without = (first, other) if first.chat_template else (other, first)
        raise DatasetError(
            f"expected all prompts with the chat template or all without, got '{with_it.sample_id}' with it and "
            f"'{without.sample_id}' without; measure them apart, or give chat_template to each"
        )
    return first.chat_template


def _digest(prompt: Prompt) -> str:
    """Return a digest of all properties of a prompt on which results depend.

    A metric that is not chosen, missing answers and a missing text are left out, so that other prompts of older traces
    have equal digests.
    """
    later = ("metric", "answer_tokens", "text_tokens")
    names = [each.name for each in dataclasses.fields(prompt) if each.compare and each.name not in later]
    values = (getattr(prompt, name) for name in names), filter(None, (getattr(prompt, name) for name in later))
    values = tuple(itertools.chain(*values))
    return hashlib.sha256(repr(values).encode()).hexdigest()[:16]


INCOMPLETE = "\ufffd"
"""Replacement character of a tokenizer for an incomplete character."""
_LONGEST = 4
"""Largest number of tokens of one character: the longest in UTF-8 has four bytes."""
_NUL, _SHOWN_NUL = "\0", "\u2400"
"""U+0000, which no string of HDF5 can contain, and its replacement."""


def token_texts(token_ids: Sequence[int], decode: Callable[[list[int]], str]) -> list[str]:
    """Return the text of every token, decoded in the context of its predecessor; joined they are the whole text.

    A character of several tokens belongs to the last of them, and the text of the earlier ones is empty. Bytes that are
    no character are shown as the tokenizer shows them.
    """
    texts: list[str] = []
    ids = list(token_ids)
    begin = done = 0  # tokens from `begin` to `done` are decoded too: a leading space needs a token before it
    for end in range(1, len(ids) + 1):
        whole = decode(ids[begin:end])
        if whole.endswith(INCOMPLETE) and end < len(ids) and end - done < _LONGEST:
            texts.append("")
            continue
        before = decode(ids[begin:done]) if done > begin else ""
        texts.append(whole[len(before) :].replace(_NUL, _SHOWN_NUL))
        begin, done = done, end
    return texts


Decode = Callable[..., str]
"""A tokenizer's function from token ids to text."""


def metrics_of(prompts: Sequence[Prompt]) -> dict[str, Metric]:
    """Return name -> metric, for the metrics in `Prompt.grading` of prompts with accepted answers.

    Raises DatasetError where a metric is not installed or cannot read a prompt's accepted answers.
    """
    answered = [prompt for prompt in prompts if prompt.grading]
    by_name = {grading: metrics.find_metric(grading) for grading in {prompt.grading for prompt in answered}}
    known = {grading: metric for grading, metric in by_name.items() if metric is not None}
    for prompt in answered:
        metrics.check_gradable(known[prompt.grading], prompt.answers, prompt.classes, prompt.sample_id)
    return known


def check_answers(prompts: Prompts) -> None:
    """Raise DatasetError for a prompt without accepted answers, as its generated answer cannot be graded."""
    without = [prompt.sample_id for prompt in prompts if not prompt.grading]
    if without:
        raise DatasetError(
            f"expected accepted answers in every sample of {prompts.dataset}, to grade generated ones by, got none in "
            f"{len(without)} of {len(prompts)}, such as '{without[0]}'; give `answers`, or use generate, which shows "
            "answers without grading them"
        )


def decode_answer(tokens: Sequence[int], decode: Decode) -> str:
    """Return the text of an answer's tokens for grading, without special tokens."""
    return decode(list(tokens), skip_special_tokens=True)


def grade(text: str, prompt: Prompt, known: Mapping[str, Metric]) -> float:
    """Return the score of an answer to a prompt, 0 to 1; NaN where `known` (name -> metric) lacks its metric."""
    metric = known.get(prompt.grading)
    return metric.grade(text, prompt.answers, prompt.classes) if metric else math.nan
