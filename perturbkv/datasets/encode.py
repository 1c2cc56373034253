"""Encoding of samples as token ids: chat template, answer prefix, and LongBench's cut in the middle of the context."""

from __future__ import annotations

import itertools
from array import array
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, overload

import numpy as np
from numpy.typing import NDArray

from perturbkv.configs.run import OWN, TEXTS
from perturbkv.datasets import metrics
from perturbkv.datasets import sample as templates
from perturbkv.datasets.sample import RenderedPrompt, Sample, check_id
from perturbkv.display import shorten_middle
from perturbkv.errors import ConfigError, DatasetError, ModelError, UnknownNameError
from perturbkv.escaping import escape_line


class TokenIds(Sequence[int]):
    """A sequence of token ids that takes four bytes per id, also when pickled; a tuple takes 36.

    Equal to a tuple of the same integers, with its hash and its repr; a slice is a tuple. Raises TypeError
    for anything but integers, OverflowError beyond 64 bits.
    """

    __slots__ = ("_ids",)

    def __init__(self, ids: Iterable[int]) -> None:
        whole = np.array(ids if isinstance(ids, TokenIds) else array("q", ids))
        narrow = whole.astype(np.int32)
        self._ids: NDArray[Any] = narrow if np.array_equal(narrow, whole) else whole

    @overload
    def __getitem__(self, index: int) -> int: ...

    @overload
    def __getitem__(self, index: slice) -> tuple[int, ...]: ...

    def __getitem__(self, index: int | slice) -> int | tuple[int, ...]:
        ids = self._ids[index].tolist()
        return tuple(ids) if isinstance(index, slice) else int(ids)

    def __len__(self) -> int:
        return len(self._ids)

    def __iter__(self) -> Iterator[int]:
        return iter(self._ids.tolist())

    def __add__(self, more: Iterable[int]) -> tuple[int, ...]:
        return (*self, *more)

    def __eq__(self, other: object) -> bool:
        if isinstance(other, TokenIds):
            return np.array_equal(self._ids, other._ids)
        return tuple(self) == other if isinstance(other, tuple) else NotImplemented

    def __hash__(self) -> int:
        return hash(tuple(self))

    def __repr__(self) -> str:
        return repr(tuple(self))

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> NDArray[Any]:
        return np.array(self._ids, dtype=dtype)


class Tokenizer(Protocol):
    """The part of a transformers tokenizer that is used."""

    chat_template: Any

    def __call__(self, text: str, add_special_tokens: bool = True) -> Any:
        """Return the token ids under `input_ids`."""


@dataclass(frozen=True, repr=False)
class Prompt:
    """A prompt as token ids.

    Attributes:
        sample_id: id of its sample; empty until the prompts that are measured together are numbered.
        token_ids: at least one; stored as `TokenIds`, which compare equal to a tuple.
        cut_tokens: number of tokens cut out of its middle.
        question_tokens: how many of `token_ids`, the last ones, come after the context: question, template, prefix.
        answers: accepted answers, for scoring.
        task: task whose metric scores an answer; empty where none does.
        classes: possible answers, for classification tasks.
        control_tokens: special tokens in the sample's own text, before any cut: a typed `<|im_end|>` is no text to the
            model.
        excerpt: the first and last words of the sample's own text, for people: no number depends on it.
        chat_template: whether the tokenizer's chat template was applied; `token_ids` include it.
        metric: metric in place of the task's; empty where none is chosen.
        template_tail: indices of the chat template's own tokens behind the last message, before an answer prefix. A
            token that holds a part of either belongs to the text. Empty where they are not known, or there are none.
        answer_tokens: the first accepted answer as the model would write it after the prompt; empty without one.
        text_tokens: the text that follows the prompt, likewise.
    """

    sample_id: str
    token_ids: Sequence[int]
    cut_tokens: int
    question_tokens: int = 0
    answers: tuple[str, ...] = ()
    task: str = ""
    classes: tuple[str, ...] = ()
    control_tokens: int = 0
    excerpt: str = field(default="", compare=False)
    chat_template: bool = field(default=False, compare=False)
    metric: str = ""
    template_tail: range = field(default=range(0), compare=False)
    answer_tokens: Sequence[int] = field(default=(), compare=False)
    text_tokens: Sequence[int] = ()

    def __post_init__(self) -> None:
        check_id(self.sample_id)
        try:
            for name in ("token_ids", "answer_tokens", "text_tokens"):
                object.__setattr__(self, name, TokenIds(getattr(self, name)))
        except (TypeError, OverflowError) as error:
            raise DatasetError(
                f"expected token ids of sample '{self.sample_id}', got others ({error}); give whole numbers"
            ) from None
        if not self.token_ids:
            raise DatasetError(f"sample '{self.sample_id}' has no tokens; give it a prompt")

    def __repr__(self) -> str:
        cut = f" ({self.cut_tokens:,} cut)" if self.cut_tokens else ""
        name = f" '{self.sample_id}'" if self.sample_id else ""
        return escape_line(f"Prompt{name}: {len(self.token_ids):,} tokens{cut}: {self.excerpt or '(text not known)'}")

    @classmethod
    def from_text(
        cls,
        text: str,
        model: Any,
        question: str = "",
        *,
        id: str = "",
        answers: Sequence[str] = (),
        continuation: str = "",
        metric: str = "",
        chat_template: bool | None = None,
        max_tokens: int | None = None,
    ) -> Prompt:
        """Return a prompt of a text and a question about it, which follows the text.

        Args:
            text: the context, which a context-only scenario compresses alone; all of the prompt without a question.
            model: model whose tokenizer and chat template are used.
            question: question after the text; a line of its own.
            id: unique among the prompts that are measured together; empty: the first number that is no id of these.
            answers: accepted answers.
            continuation: a text that follows the prompt, which decode steps read with `Settings(text="given")`.
            metric: metric of an answer, one of `metrics.CHOICES`; empty: f1.
            chat_template: None: where the tokenizer has one.
            max_tokens: a longer prompt is cut in the middle.

        Raises DatasetError for an empty prompt and for a cut that would reach into the question; UnknownNameError for
        an unknown metric.

        >>> import perturbkv as pk
        >>> model = pk.load_model("random:smollm2-135m")
        >>> prompt = pk.Prompt.from_text("Paris is in France.", model, "Where is Paris?")
        >>> prompt.question_tokens > 0
        True
        """
        if metric:
            metrics.check_name(metric)
        suffix = f"\n\n{question}" if question and text else question
        template = bool(model.tokenizer.chat_template) if chat_template is None else chat_template
        sample = Sample(id, text, suffix, tuple(answers), metric=metric, text=continuation)
        return encode(sample, model.tokenizer, chat_template=template, max_tokens=max_tokens)

    @property
    def grading(self) -> str:
        """Name of the metric that grades an answer; empty without accepted answers."""
        return (self.metric or self.task or metrics.DEFAULT) if self.answers else ""

    def forced_tokens(self, text: str) -> Sequence[int]:
        """Return the tokens of a text, a key of `configs.run.TEXTS`, that decode steps read; empty for `own`.

        Raises DatasetError where the prompt has no such text, UnknownNameError for another key.
        """
        if text == OWN:
            return ()
        if text not in TEXTS:
            raise UnknownNameError(text, "text", TEXTS)
        tokens, needs = {
            "answer": (self.answer_tokens, "an accepted answer, as the first of `answers`"),
            "given": (self.text_tokens, "a text, as `text` in its row"),
        }[text]
        if not tokens:
            raise DatasetError(
                f"expected {needs}, for --text {text}, got none or an empty one in sample '{self.sample_id}'; give it "
                f"one, or use --text {OWN}"
            )
        return tokens

    def step_count(self, text: str, most: int) -> int:
        """Return the number of decode steps along a text, at most `most`: of K tokens K − 1, and at least 1.

        Along its own text the full run may take fewer. Raises as `forced_tokens`.
        """
        tokens = self.forced_tokens(text)
        return min(most, max(1, len(tokens) - 1)) if tokens else most

    @property
    def cut_index(self) -> int | None:
        """Number of `token_ids` before the cut; None if nothing was cut."""
        return first_half(len(self.token_ids)) if self.cut_tokens else None

    def parts(self, scenario: str) -> tuple[Sequence[int], Sequence[int]]:
        """Return the token ids that a scenario prefills and compresses, and the ids that follow the compression.

        Raises DatasetError for a context-only prompt without a separate context or question.
        """
        if scenario == "regular":
            return self.token_ids, ()
        split = len(self.token_ids) - self.question_tokens
        if split == 0 or self.question_tokens == 0:
            lacks = "context" if split == 0 else "question"
            raise DatasetError(
                f"sample '{self.sample_id}' has no {lacks} of its own, which context-only needs; use --scenario regular"
            )
        return self.token_ids[:split], self.token_ids[split:]


def encode(sample: Sample, tokenizer: Tokenizer, *, chat_template: bool, max_tokens: int | None) -> Prompt:
    """Return a sample's prompt; if it is longer than `max_tokens`, its middle is cut out.

    The cut is made on the final ids (first half and last half stay), so that the chat template's text around the prompt
    survives; a chat may lose whole turns to it. Raises ConfigError where a chat template is requested that the
    tokenizer lacks, DatasetError where the cut would reach into the question, and for a chat that the template refuses.
    """
    if max_tokens is not None and max_tokens < 2:
        raise ConfigError(f"--max-tokens must be at least 2, got {max_tokens}")
    rendered = _render(sample, tokenizer, chat_template)
    more = {"add_special_tokens": False} if chat_template else {}  # a chat template has them in its text
    ids = tuple(tokenizer(rendered.text, **more)["input_ids"])
    question = len(ids) - _count_context_tokens(rendered, tokenizer, ids, more)
    kept, last = cut_middle(ids, max_tokens), len(ids)
    if len(kept) < len(ids):
        last = len(kept) - first_half(len(kept))
        if question > last:
            raise DatasetError(
                f"expected --max-tokens to leave the question of sample '{sample.id}' whole, got {len(kept)}, whose "
                f"last half is {last} tokens; {question} tokens come after the context: use --max-tokens "
                f"{min(2 * question, len(ids))} or more"
            )
    tail = _template_tail(rendered, tokenizer, ids, more)
    tail_start, tail_stop = (
        len(kept) - min(len(ids) - index, last) for index in (tail.start, tail.stop)
    )  # after a cut
    after = [
        _continuation_tokens(rendered.text, text, tokenizer, ids, more)
        for text in (next(iter(sample.answers), ""), sample.text)
    ]
    around = tokenizer(rendered.template_text, **more)["input_ids"]
    control = _count_special_tokens(ids, tokenizer) - _count_special_tokens(around, tokenizer)
    return Prompt(
        sample.id, kept, len(ids) - len(kept), question, sample.answers, sample.task, sample.classes, control,
        shorten_middle(sample.prompt), chat_template, sample.metric,
        range(tail_start, tail_stop), *after,
    )  # fmt: skip


def _continuation_tokens(
    before: str, text: str, tokenizer: Tokenizer, ids: tuple[int, ...], more: Any
) -> tuple[int, ...]:
    """Return the ids of a text that follows the text `before`, whose tokens are `ids`; empty for an empty text.

    A space separates the two where neither has one: " 1234567" after "number is", "Paris" after a template's line
    break. Where the text would change the last tokens of `before`, as after two line breaks, it is encoded by itself.
    `more` are arguments of the tokenizer.
    """
    if not text:
        return ()
    separated = text if before[-1:].isspace() or text[:1].isspace() else f" {text}"
    whole = tuple(tokenizer(before + separated, **more)["input_ids"])
    if whole[: len(ids)] == ids:
        return whole[len(ids) :]
    return tuple(tokenizer(separated, add_special_tokens=False)["input_ids"])


def _count_special_tokens(ids: Sequence[int], tokenizer: Any) -> int:
    """Return the number of ids that are special tokens of the tokenizer."""
    added = getattr(tokenizer, "added_tokens_decoder", {})
    special = {*getattr(tokenizer, "all_special_ids", ()), *(id for id, token in added.items() if token.special)}
    return sum(token in special for token in ids)


def _render(sample: Sample, tokenizer: Tokenizer, chat_template: bool) -> RenderedPrompt:
    """Return a sample's whole text, with or without the chat template.

    Raises ConfigError or DatasetError for a chat template that the tokenizer lacks, or that refuses a chat.
    """
    if sample.chat is not None:
        if not (chat_template and tokenizer.chat_template):
            template = tokenizer.chat_template
            why = "--no-chat-template leaves out" if template else "this tokenizer lacks"
            hint = "leave that option out" if template else "use a chat model"
            raise DatasetError(f"{sample.chat.where}: messages need the model's chat template, which {why}; {hint}")
        return templates.render_chat(sample.chat, tokenizer, sample.answer_prefix)
    if not chat_template:
        text = f"{sample.prompt}{sample.delimiter}{sample.answer_prefix}" if sample.answer_prefix else sample.prompt
        return RenderedPrompt(text, _context_end(sample, text, 0), "")
    if not tokenizer.chat_template:
        raise ConfigError("--chat-template needs a tokenizer with a chat template, and this one has none")
    turn = templates.render_turn(sample.prompt, tokenizer)
    around, start = templates.turn_frame(tokenizer)
    text, after = turn + sample.answer_prefix, templates.text_after_turn(tokenizer)
    message_end = len(turn) - len(after) if turn.endswith(after) else -1
    return RenderedPrompt(text, _context_end(sample, text, start), around, message_end, len(turn))


def _count_context_tokens(rendered: RenderedPrompt, tokenizer: Tokenizer, ids: tuple[int, ...], more: Any) -> int:
    """Return the number of a prompt's `ids` before its question; all ids if the question cannot be separated.

    A token with text of both belongs to the question, which has at least one. `more` are arguments of the tokenizer.
    """
    if rendered.context_end < 0:
        return len(ids)
    return min(_common_tokens(rendered.text[: rendered.context_end], tokenizer, ids, more)[0], len(ids) - 1)


def _template_tail(rendered: RenderedPrompt, tokenizer: Tokenizer, ids: tuple[int, ...], more: Any) -> range:
    """Return the indices in `ids` of the chat template's tokens behind the last message; empty where not known.

    A token with a part of the message or of the answer prefix is not among them: they begin at the first character
    where a token begins. `more` are arguments of the tokenizer.
    """
    if rendered.message_end < 0:
        return range(len(ids), len(ids))
    stop = len(ids)
    if rendered.answer_start < len(rendered.text):
        stop = _common_tokens(rendered.text[: rendered.answer_start], tokenizer, ids, more)[0]
    for end in range(rendered.message_end, rendered.answer_start):
        start, whole = _common_tokens(rendered.text[:end], tokenizer, ids, more)
        if whole:
            return range(min(start, stop), stop)
    return range(stop, stop)


def _common_tokens(text: str, tokenizer: Tokenizer, ids: tuple[int, ...], more: Any) -> tuple[int, bool]:
    """Return how many first `ids` the tokens of a text's beginning share, and whether these are all of its tokens."""
    before = tokenizer(text, **more)["input_ids"]
    common = sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], zip(before, ids, strict=False)))
    return common, common == len(before)


def _context_end(sample: Sample, text: str, start: int) -> int:
    """Return the index in `text` at which the sample's context ends; its prompt is searched from `start` on.

    The prompt may have lost outer whitespace. −1 without a context or a question, and where a chat template changed the
    prompt otherwise.
    """
    if not sample.question.strip() or not sample.context:
        return -1
    stripped = sample.prompt.strip()
    begin = text.find(stripped, start)
    if begin < 0:
        return -1
    length = len(sample.context) - (len(sample.prompt) - len(sample.prompt.lstrip()))  # without leading whitespace
    return begin + min(max(length, 0), len(stripped))


def first_half(length: int) -> int:
    """Return ⌈length/2⌉: the number of ids kept from the beginning of a prompt that is cut to `length`."""
    return length - length // 2


def cut_middle(ids: tuple[int, ...], max_tokens: int | None) -> tuple[int, ...]:
    """Return the ids unchanged, or only the first ⌈max/2⌉ and the last ⌊max/2⌋ if there are more than `max_tokens`."""
    if max_tokens is None or len(ids) <= max_tokens:
        return ids
    first = first_half(max_tokens)
    return ids[:first] + ids[len(ids) - (max_tokens - first) :]


def check_length(prompt: Prompt, positions: int, steps: int, length: int | None = None) -> None:
    """Raise DatasetError if prompt and decode steps need more positions than the model has.

    `length` is --length where that decides how long a prompt is; None: --max-tokens does.
    """
    tokens = len(prompt.token_ids)
    if tokens + steps > positions:
        option, extra = ("--max-tokens", 0) if length is None else ("--length", tokens - length)
        most = positions - steps - extra
        hint = f"use {option} {most} or less" if most >= 2 else "decode fewer tokens, or use a model of more positions"
        raise DatasetError(
            f"sample '{prompt.sample_id}' has {tokens} tokens, with {steps} decode steps more than the "
            f"model's {positions} positions; {hint}"
        )


def check_vocabulary(prompt: Prompt, vocabulary: int, model: str, text: str = OWN) -> None:
    """Raise ModelError for a token id outside the model's vocabulary, as from another model's tokenizer.

    The tokens of the `text` that decode steps read count too.
    """
    ids = (*prompt.token_ids, *prompt.forced_tokens(text))
    token = max(ids)
    if not (0 <= min(ids) and token < vocabulary):
        raise ModelError(
            f"expected token ids below {vocabulary:,}, which model '{model}' has embeddings of, got {token:,} in "
            f"sample '{prompt.sample_id}'; bring the tokenizer that belongs to the model"
        )
