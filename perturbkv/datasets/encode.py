"""A sample's text -> token ids: chat template, answer prefix, and LongBench's cut in the middle."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import Any, Protocol

from perturbkv.datasets.sample import Sample
from perturbkv.errors import ConfigError, DatasetError


class Tokenizer(Protocol):
    """What is used of a transformers tokenizer."""

    chat_template: Any

    def __call__(self, text: str, add_special_tokens: bool = True) -> Any:
        """Token ids under `input_ids`."""


@dataclass(frozen=True)
class EncodedPrompt:
    """A prompt as the model gets it.

    Attributes:
        sample_id: of the sample it was made from.
        token_ids: at least one.
        cut_tokens: how many tokens its middle lost.
        question_tokens: how many of `token_ids`, the last ones, come after the context: question, template, prefix.
        answers: accepted answers, for scoring.
    """

    sample_id: str
    token_ids: tuple[int, ...]
    cut_tokens: int
    question_tokens: int = 0
    answers: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if not self.token_ids:
            msg = f"sample '{self.sample_id}' has no tokens; give it a prompt"
            raise DatasetError(msg)

    def parts(self, scenario: str) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """What is prefilled and compressed, and what is run over the compressed cache.

        Raises DatasetError for a context-only prompt that has no context or no question of its own.
        """
        if scenario == "regular":
            return self.token_ids, ()
        split = len(self.token_ids) - self.question_tokens
        if split == 0 or self.question_tokens == 0:
            lacks = "context" if split == 0 else "question"
            msg = (
                f"sample '{self.sample_id}' has no {lacks} of its own, which context-only needs; use --scenario regular"
            )
            raise DatasetError(msg)
        return self.token_ids[:split], self.token_ids[split:]


def encode(sample: Sample, tokenizer: Tokenizer, *, chat_template: bool, max_tokens: int | None) -> EncodedPrompt:
    """Token ids of the prompt, its middle cut out where it is longer than `max_tokens`.

    The cut is made on the final ids (first half and last half stay), so that what the chat template puts around the
    prompt survives. Raises ConfigError where a chat template is asked for that the tokenizer lacks.
    """
    text = _chat_text(sample, tokenizer) if chat_template else _plain_text(sample)
    more = {"add_special_tokens": False} if chat_template else {}
    ids = tuple(tokenizer(text, **more)["input_ids"])
    question = _question_tokens(sample, tokenizer, text, ids, more)
    kept = cut_middle(ids, max_tokens)
    if len(kept) < len(ids):
        question = min(question, len(kept) // 2)
    return EncodedPrompt(sample.id, kept, len(ids) - len(kept), question, sample.answers)


def _question_tokens(sample: Sample, tokenizer: Tokenizer, text: str, ids: tuple[int, ...], more: Any) -> int:
    """Tokens behind the context, counted on the prompt's own ids: one that reaches over the border is the question's.

    0 for a sample without a question, 1 token at least for one with.
    """
    place = text.rfind(sample.question.rstrip()) if sample.question.strip() and sample.context else -1
    if place < 0:
        return 0
    before = tokenizer(text[:place], **more)["input_ids"]
    alike = sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], zip(before, ids, strict=False)))
    return len(ids) - min(alike, len(ids) - 1)


def cut_middle(ids: tuple[int, ...], max_tokens: int | None) -> tuple[int, ...]:
    """The first ⌈max/2⌉ and the last ⌊max/2⌋ ids where there are more than `max_tokens`."""
    if max_tokens is None or len(ids) <= max_tokens:
        return ids
    last = max_tokens // 2
    return ids[: max_tokens - last] + ids[len(ids) - last :]


def check_length(prompt: EncodedPrompt, positions: int, steps: int) -> None:
    """Raise DatasetError where prompt and decode steps need more positions than the model has."""
    needed = len(prompt.token_ids) + steps
    if needed > positions:
        msg = (
            f"sample '{prompt.sample_id}' has {len(prompt.token_ids)} tokens, with {steps} decode steps more than the "
            f"model's {positions} positions; use --max-tokens {positions - steps} or less"
        )
        raise DatasetError(msg)


def _chat_text(sample: Sample, tokenizer: Any) -> str:
    if not tokenizer.chat_template:
        msg = "--chat-template needs a tokenizer with a chat template, and this one has none"
        raise ConfigError(msg)
    turn = [{"role": "user", "content": sample.prompt}]
    return str(tokenizer.apply_chat_template(turn, tokenize=False, add_generation_prompt=True)) + sample.answer_prefix


def _plain_text(sample: Sample) -> str:
    return f"{sample.prompt}\n{sample.answer_prefix}" if sample.answer_prefix else sample.prompt
