"""Scores of heads by their attention to the sentence with the answer while the model answers, for headkv's budgets.

Measured as HeadKV's released detection does (Fu et al., 2024, https://arxiv.org/abs/2410.19258, section 3.1; code:
FYYFU/HeadKV, retrieval_head_detection_r2.py). The model answers greedily, at most as many tokens as the answer has, a
space before it included; at each step a head scores the attention on the sentence that holds the answer, counting only
entries among the head's |sentence| largest, over |sentence| · |answer|. A prompt counts only where the answer is right:
F1 of its words above 0.5. A head's score is its mean over those prompts.

What differs: the prompts are needle's with one distractor, a sentence of the same words about another city, while the
release hides three sentences, a reasoning step and a wrong answer among them, in essays; they go through the chat
template where there is one and end in the answer's first words; the sentence is found where its tokens stand, not
where they overlap most; attention is in float64; and the release multiplies by 10, which no share notices. So scores of
a model are not those of the released files, and what headkv does with them speaks of these prompts.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from perturbkv import memory
from perturbkv.cache.compact import full_cache
from perturbkv.datasets.encode import Prompt
from perturbkv.datasets.metrics import f1
from perturbkv.devices import full_precision, stack_on_device
from perturbkv.errors import DatasetError
from perturbkv.models.adapter import Adapter
from perturbkv.models.forward import run_with_cache
from perturbkv.pipeline.answers.generation import end_tokens
from perturbkv.pipeline.sample.capture import FiniteCheck, Observer, capture
from perturbkv.pipeline.sample.replay import tokenize
from perturbkv.scoring.window_attention import causal_logits
from perturbkv.theory import WORK, Softmax


@dataclass(frozen=True)
class Evidence:
    """A prompt and its sentence that contains the answer."""

    prompt: Prompt
    sentence: str


@memory.translate_allocation_errors()
@full_precision()
def head_scores(
    adapter: Adapter, prompts: Iterable[Evidence], finished: Callable[[], None] = lambda: None
) -> tuple[Float[Tensor, "layer head"], int]:
    """Return every head's mean retrieval score over the correctly answered prompts, and the number of these.

    `finished` is called per prompt.

    Raises DatasetError for a prompt without its sentence, and where no answer is right; ActivationError for NaN or Inf.
    """
    scored, total = [], 0
    for evidence in prompts:
        total += 1
        scores, text = score_prompt(adapter, evidence)
        if is_right(text, evidence.prompt.answers):
            scored.append(scores)
        finished()
    if not scored:
        raise DatasetError(
            f"expected a right answer to one of {total} prompts at least, got none, and head scores count right "
            "answers alone; use shorter prompts (--length), more of them (--samples) or a model that finds the needle"
        )
    return torch.stack(scored).mean(dim=0), len(scored)


@torch.inference_mode()
def score_prompt(adapter: Adapter, evidence: Evidence) -> tuple[Float[Tensor, "layer head"], str]:
    """Return the retrieval score of every head on one prompt, and the model's answer as text.

    Raises DatasetError as `locate_sentence`, and ActivationError for NaN or Inf.
    """
    span = locate_sentence(evidence, adapter.tokenizer)
    most_tokens = len(tokenize(adapter.tokenizer, f" {evidence.prompt.answers[0]}"))
    masses: list[list[Tensor]] = [[] for _ in adapter.layers]

    def observe(layer: int, query: Tensor, key: Tensor, value: Tensor) -> None:
        masses[layer].append(span_attention(query[0, :, -1:], key[0], adapter.softmax(layer), span))

    finite = FiniteCheck()
    with capture(adapter, Observer(attention=observe, hidden=finite)):
        answer = _generate_answer(adapter, evidence.prompt.token_ids, most_tokens, end_tokens(adapter))
    finite.raise_if_not(evidence.prompt.sample_id)
    totals = stack_on_device(adapter.device, (torch.stack(steps).sum(dim=0) for steps in masses)).cpu()
    text = str(adapter.tokenizer.decode(answer, skip_special_tokens=True))
    return totals / (len(span) * most_tokens), text


def _generate_answer(adapter: Adapter, prompt: Sequence[int], most: int, ends: Collection[int]) -> list[int]:
    """Return the greedy answer of at most `most` tokens, up to and including an end token in `ends` or a new line."""
    cache, tokens, answer = full_cache(adapter), list(prompt), list[int]()
    while len(answer) < most:
        ids = torch.tensor([tokens], device=adapter.device)
        logits = run_with_cache(adapter.model, ids, cache, logits_to_keep=1).logits
        tokens = [int(logits[0, -1].argmax())]
        answer += tokens
        if tokens[0] in ends or "\n" in adapter.tokenizer.decode(tokens):
            break
    return answer


def span_attention(
    query: Float[Tensor, "head query d_key"],
    key: Float[Tensor, "kv_head key d_key"],
    softmax: Softmax,
    span: range,
) -> Float[Tensor, " head"]:
    """Return each head's attention mass on entries of `span` that are among its |span| largest, as a mean of queries.

    The queries are the newest: the last one attends to all entries.
    """
    weights, _ = softmax.weights(causal_logits(query.to(WORK), key.to(WORK), softmax))
    largest = weights.topk(min(len(span), key.shape[1]), dim=-1)
    inside = (largest.indices >= span.start) & (largest.indices < span.stop)
    return (largest.values * inside).sum(dim=-1).mean(dim=-1)


def is_right(text: str, answers: Sequence[str]) -> bool:
    """Return whether the F1 score between the text and any accepted answer, as bags of words, exceeds 0.5."""
    return f1(text, answers) > 0.5


def locate_sentence(evidence: Evidence, tokenizer: Callable[..., dict[str, Sequence[int]]]) -> range:
    """Return the range of the sentence's tokens in the prompt, the first one where it occurs twice.

    Raises DatasetError for a prompt without the sentence, or without an accepted answer.
    """
    prompt = evidence.prompt
    for text in (f" {evidence.sentence}", evidence.sentence):
        ids = tokenize(tokenizer, text)
        for start in range(len(prompt.token_ids) - len(ids) + 1):
            if prompt.answers and list(prompt.token_ids[start : start + len(ids)]) == ids:
                return range(start, start + len(ids))
    raise DatasetError(
        f"expected sample '{prompt.sample_id}' to have an answer ({', '.join(prompt.answers) or 'it has none'}) and to "
        f"hold '{evidence.sentence}', got a prompt without; head scores need prompts that hold their answer's sentence"
    )
