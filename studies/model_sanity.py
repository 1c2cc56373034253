"""Whether a model is read rightly, for docs/how-to/models.md: `python studies/model_sanity.py MODEL [MODEL…]`.

Of each model: how its weights are stored, its loss on prose that it is likely to know, a number asked for among 1,000
tokens, the first and last characters of that prompt as the model gets it, and what loading took. One process each, so
that peaks are told apart. The prose is that of needle's prompts, CPython's manual; its import is no public name.
"""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import common
import torch

import perturbkv as pk
from perturbkv.datasets.needle import sentences

EMBEDDED = "smollm2-135m-q4_1"
PROSE, LENGTH, DEPTH, ANSWER, ENDS = 400, 1000, 0.4, 10, 70
"""Tokens of prose, of the prompt, where in it the number stands, tokens of the answer, characters shown of each end."""


def loss(model: Any) -> float:
    """Return the mean loss, in nats per token, of the first tokens of CPython's manual."""
    ids = torch.tensor([model.tokenizer(" ".join(sentences()[:40]))["input_ids"][:PROSE]])
    with torch.inference_mode():
        logits = model.model(input_ids=ids).logits[0, :-1].float()
    return float(torch.nn.functional.cross_entropy(logits, ids[0, 1:]))


def ask_for_number(model: Any) -> tuple[str, str, str]:
    """Return a needle prompt as the model gets it, the number that it asks for, and the model's answer."""
    chat = bool(model.tokenizer.chat_template)
    (prompt,) = pk.load_prompts("needle", model, samples=1, lengths=(LENGTH,), depths=(DEPTH,), chat_template=chat)
    ids = torch.tensor([prompt.token_ids])
    with torch.inference_mode():
        made = model.model.generate(ids, max_new_tokens=ANSWER, do_sample=False)
    return model.tokenizer.decode(ids[0]), prompt.answers[0], model.tokenizer.decode(made[0, ids.shape[1] :])


def report(name: str) -> dict[str, Any]:
    """Return the numbers and texts on one model, as the module's docstring lists them."""
    start = time.monotonic()
    model = pk.load_model(name, dtype="float32", device="cpu")
    seconds, peak = time.monotonic() - start, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    prompt, number, answer = ask_for_number(model)
    return {
        "model": name, "weights": model.weights, "stored": model.stored.detail, "seconds": seconds, "gib": peak,
        "loss": loss(model), "number": number, "answer": answer, "begins": prompt[:ENDS], "ends": prompt[-ENDS:],
    }  # fmt: skip


def report_text(found: dict[str, Any]) -> str:
    """Return a paragraph on one model."""
    answer = f"{'found' if found['number'] in found['answer'] else 'not found'}: {found['answer']!r}"
    return "\n".join(
        (
            f"{found['model']}: {found['weights']} ({found['stored']})",
            f"  loaded in {found['seconds']:.0f} s, {found['gib']:.1f} GiB at most",
            f"  loss {found['loss']:.2f} nats per token",
            f"  {found['number']} {answer}",
            f"  prompt {found['begins']!r} … {found['ends']!r}",
        )
    )


def study(asked: argparse.Namespace) -> None:
    """Report every model from a process of its own, and write what was found."""
    if asked.one:
        print(json.dumps(report(asked.models[0])))
        return
    found = []
    for name in asked.models:
        command = [sys.executable, __file__, "--one", name]
        found.append(
            json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout.splitlines()[-1])
        )
        print(report_text(found[-1]), flush=True)
    common.save(asked, {"models": found})


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="*", default=[EMBEDDED], help="[%(default)s]")
    parser.add_argument("--one", action="store_true", help="print the report of one model as JSON")
    parser.add_argument("--output", "-o", type=Path, help="folder of the JSON document")
    common.main(study, parser)
