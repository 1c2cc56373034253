"""Whether a model is read rightly, for docs/how-to/models.md: `python docs/scripts/model_sanity.py MODEL [MODEL…]`.

Of each model: how its weights are stored, its loss on prose that it is likely to know, a number asked for among 1,000
tokens, the first and last characters of that prompt as the model gets it, and what loading took. One process each, so
that peaks are told apart.
"""

from __future__ import annotations

import resource
import subprocess
import sys
import time

import torch

from perturbkv.datasets.dataset_registry import DatasetOptions, load
from perturbkv.datasets.encode import encode
from perturbkv.datasets.needle import sentences
from perturbkv.models.adapter import Adapter
from perturbkv.models.loading import load_model

PROSE, LENGTH, DEPTH, ANSWER, ENDS = 400, 1000, 0.4, 10, 70
"""Tokens of prose, of the prompt, where in it the number stands, tokens of the answer, characters shown of each end."""


def loss(adapter: Adapter) -> float:
    """Return the mean loss, in nats per token, of the first tokens of CPython's manual."""
    ids = torch.tensor([adapter.tokenizer(" ".join(sentences()[:40]))["input_ids"][:PROSE]])
    with torch.inference_mode():
        logits = adapter.model(input_ids=ids).logits[0, :-1].float()
    return float(torch.nn.functional.cross_entropy(logits, ids[0, 1:]))


def answered(adapter: Adapter) -> tuple[str, str, str]:
    """Return a needle prompt as the model gets it, the number that it asks for, and the model's answer."""
    chat = bool(adapter.tokenizer.chat_template)
    sample = load("needle", DatasetOptions(1, lengths=(LENGTH,), depths=(DEPTH,)), adapter.tokenizer).samples[0]
    ids = torch.tensor([encode(sample, adapter.tokenizer, chat_template=chat, max_tokens=None).token_ids])
    with torch.inference_mode():
        made = adapter.model.generate(ids, max_new_tokens=ANSWER, do_sample=False)
    return adapter.tokenizer.decode(ids[0]), sample.answers[0], adapter.tokenizer.decode(made[0, ids.shape[1] :])


def report(name: str) -> str:
    """Return a paragraph on one model."""
    start = time.monotonic()
    adapter = load_model(name, dtype="float32", device="cpu")
    seconds, peak = time.monotonic() - start, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    prompt, number, answer = answered(adapter)
    return "\n".join(
        (
            f"{name}: {adapter.weights} ({adapter.stored.detail})",
            f"  loaded in {seconds:.0f} s, {peak:.1f} GiB at most",
            f"  loss {loss(adapter):.2f} nats per token",
            f"  {number} {'found' if number in answer else 'not found'}: {answer!r}",
            f"  prompt {prompt[:ENDS]!r} … {prompt[-ENDS:]!r}",
        )
    )


if __name__ == "__main__":
    if len(sys.argv) == 2:
        print(report(sys.argv[1]))
    for model in sys.argv[1:] if len(sys.argv) > 2 else ():
        subprocess.run([sys.executable, __file__, model], check=True)
