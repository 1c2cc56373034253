"""The prompts of second_model.md, whole for both models: `python docs/scripts/second_prompts.py LONGBENCH FOLDER`.

`news.jsonl`: those of LongBench's first `multi_news` samples that neither model's tokenizer makes longer than LONGEST
tokens, so that nothing is cut and both models read the same text. `needle.jsonl`: needle prompts, made once, with the
first model's tokens. No chat template: the second model has none.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from perturbkv.datasets.dataset_registry import DatasetOptions, load
from perturbkv.datasets.encode import Tokenizer, encode
from perturbkv.datasets.sample import Sample
from perturbkv.models.aliases import EMBEDDED
from perturbkv.models.loading import open_model

MODELS = (EMBEDDED, "gemma-3-270m-q4_k_m")
NEWS, LONGEST = 40, 2100
"""Samples that are looked at, and tokens that neither model's prompt may exceed."""
DEPTHS, NEEDLES = (0.0, 0.2, 0.4, 0.6, 0.8, 1.0), 36


def main() -> None:
    """Write both files, and print how many tokens the prompts have."""
    given = asked()
    tokenizers = [open_model(name).tokenizer for name in given.models]
    news = load("multi_news", DatasetOptions(NEWS, data_dir=given.longbench, at_most=True), tokenizers[0]).samples
    whole = [sample for sample in news if max(tokens(sample, tokenizers)) <= given.longest]
    grid = DatasetOptions(given.needles, lengths=tuple(given.lengths), depths=DEPTHS)
    given.folder.mkdir(parents=True, exist_ok=True)
    for name, samples in (("news", whole), ("needle", load("needle", grid, tokenizers[0]).samples)):
        (given.folder / f"{name}.jsonl").write_text(rows(samples), encoding="utf-8")
        counted = [tokens(one, tokenizers) for one in samples]
        for model, counts in zip(given.models, zip(*counted, strict=True), strict=True):
            sys.stdout.write(f"{name}: {len(counts)} prompts of {min(counts):,} to {max(counts):,} tokens, "
                             f"{sum(counts) / len(counts):,.0f} on average, for {model}\n")  # fmt: skip


def asked() -> argparse.Namespace:
    """Return the parsed command line; its defaults are those of docs/results/second_model.md."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("longbench", type=Path)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--models", nargs=2, default=MODELS)
    parser.add_argument("--longest", type=int, default=LONGEST, help="tokens of a news prompt, in either model's")
    parser.add_argument("--needles", type=int, default=NEEDLES, help="needle prompts")
    parser.add_argument("--lengths", type=int, nargs="+", default=(600, 1000, 1500), help="tokens of a needle prompt")
    return parser.parse_args()


def tokens(sample: Sample, tokenizers: Iterable[Tokenizer]) -> list[int]:
    """Return the number of tokens of the whole prompt, as each tokenizer makes it."""
    return [len(encode(sample, one, chat_template=False, max_tokens=None).token_ids) for one in tokenizers]


def rows(samples: Sequence[Sample]) -> str:
    """Write a jsonl file of these prompts, each under its own name; those that can be graded by a number are."""
    return "".join(json.dumps(_row(sample), ensure_ascii=False) + "\n" for sample in samples)


def _row(sample: Sample) -> dict[str, Any]:
    row: dict[str, Any] = {"id": sample.id, "prompt": sample.prompt}
    if sample.task != "needle":
        return row
    answer = {"answer_prefix": sample.answer_prefix, "answers": list(sample.answers), "metric": "exact-number"}
    return {**row, **answer}


if __name__ == "__main__":
    main()
