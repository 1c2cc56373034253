"""Which heads look at the answer while it is copied? The scores that headkv shares budgets out by.

The prompt's answer is written after it, and every head's attention is read at each token of the answer: its score is
the attention that falls on the answer's own place in the prompt, counting only the entries among the head's |answer|
largest (HeadKV, section 3.1, on needle prompts), averaged over the answer's tokens and the prompts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import torch
from jaxtyping import Float
from torch import Tensor

from perturbkv.capture import Observer, capture
from perturbkv.datasets.encode import EncodedPrompt
from perturbkv.errors import DatasetError
from perturbkv.models import Adapter
from perturbkv.prefill import FiniteCheck
from perturbkv.scores import causal_rows
from perturbkv.theory import WORK


@torch.inference_mode()
def head_scores(
    adapter: Adapter, prompts: Iterable[EncodedPrompt], finished: Callable[[], None] = lambda: None
) -> Float[Tensor, "layer head"]:
    """Mean score of every head, in [0, 1].

    Raises DatasetError for a prompt that does not hold its answer, ActivationError for NaN or Inf.
    """
    found = []
    for prompt in prompts:
        found.append(_of_prompt(adapter, prompt))
        finished()
    return torch.stack(found).mean(dim=0)


def _of_prompt(adapter: Adapter, prompt: EncodedPrompt) -> Tensor:
    place, answer = locate_answer(prompt, adapter.tokenizer)
    scores: list[Tensor] = []

    def observe(layer: int, query: Tensor, key: Tensor, value: Tensor) -> None:
        scores.append(copying(query[0, :, -len(answer) :], key[0], adapter.scale(layer), place).cpu())

    check = FiniteCheck()
    ids = torch.tensor([[*prompt.token_ids, *answer[:-1]]], device=adapter.device)
    with capture(adapter, Observer(attention=observe, hidden=check)):
        adapter.model(input_ids=ids, use_cache=False, logits_to_keep=1)
    check.raise_if_not(prompt.sample_id)
    return torch.stack(scores)


def copying(
    query: Float[Tensor, "head query d_head"], key: Float[Tensor, "kv_head key d_head"], scale: float, place: range
) -> Float[Tensor, " head"]:
    """Attention of the last queries on the entries at `place`, where they are among the |place| largest; mean."""
    heads, queries, d_head = query.shape
    kv_heads, keys, _ = key.shape
    found = []
    for kv_head, group in enumerate(query.view(kv_heads, heads // kv_heads, queries, d_head)):
        rows = causal_rows(group.to(WORK), key[kv_head].to(WORK), scale, keys - queries)
        largest = rows.topk(min(len(place), keys), dim=-1)
        inside = (largest.indices >= place.start) & (largest.indices < place.stop)
        found.append((largest.values * inside).sum(dim=-1).mean(dim=-1))
    return torch.cat(found)


def locate_answer(prompt: EncodedPrompt, tokenizer: Callable[..., dict[str, Sequence[int]]]) -> tuple[range, list[int]]:
    """Where the first answer stands in the prompt, and its tokens. Raises DatasetError where it does not."""
    for text in [f" {answer}" for answer in prompt.answers] + list(prompt.answers):
        ids = list(tokenizer(text, add_special_tokens=False)["input_ids"])
        for start in range(len(prompt.token_ids) - len(ids) + 1):
            if list(prompt.token_ids[start : start + len(ids)]) == ids:
                return range(start, start + len(ids)), ids
    msg = (
        f"expected sample '{prompt.sample_id}' to hold its answer ({', '.join(prompt.answers) or 'it has none'}), got "
        "a prompt without it; head scores need prompts that copy their answer, such as needle's"
    )
    raise DatasetError(msg)
