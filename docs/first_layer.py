"""What two-stage selection in the first layer alone does to the whole run: `python docs/first_layer.py [LONGBENCH]`.

The preset `paper` at budget 128, once as it is and once with the baseline's selection in the first layer, on the
demo's needle prompts and, with LongBench's folder, on README's `multi_news` samples. `--help` lists what can be other.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from unittest.mock import patch

import numpy as np

from perturbkv.configs.budget import Budget
from perturbkv.configs.eviction import EvictionConfig, from_preset
from perturbkv.configs.run import RunConfig
from perturbkv.datasets.encode import EncodedPrompt, encode
from perturbkv.datasets.registry import DatasetOptions, load
from perturbkv.models.adapter import Adapter
from perturbkv.models.aliases import DEFAULT
from perturbkv.models.loading import load_model
from perturbkv.pipeline.samples import trace_sample
from perturbkv.selection.kept_sets import RankingGroup, ranking_groups
from perturbkv.selection.ranking import Scores

CONFIGS = tuple(from_preset("paper", Budget(128), selection=name) for name in ("attention", "two-stage"))


def first_layer_by_attention(
    configs: Sequence[EvictionConfig], scores: Callable[[EvictionConfig], Scores], prompt_tokens: int
) -> list[RankingGroup]:
    """`ranking_groups`, but as the baseline selects in the first layer."""
    if scores(configs[0]).statistics.layer == 0:
        configs = [replace(config, selection="attention") for config in configs]
    return ranking_groups(configs, scores, prompt_tokens)


def compare(adapter: Adapter, prompts: list[EncodedPrompt], words: str) -> None:
    """Propagated perturbation of two-stage over the baseline's, and heads improved."""
    run = RunConfig(model=adapter.name, dataset="readings", configs=CONFIGS)
    measured = [trace_sample(adapter, prompt, run).arrays["perturbation_propagated"][:, 0] for prompt in prompts]
    baseline, treatment = np.mean(measured, axis=0)
    better = int((treatment < baseline).sum())
    sys.stdout.write(
        f"{words}: L1 × {treatment.sum() / baseline.sum():.2f}, {better} of {baseline.size} heads better\n"
    )


def asked() -> argparse.Namespace:
    """The command line; its defaults are README's."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("longbench", nargs="?", type=Path)
    parser.add_argument("--model", default=DEFAULT)
    parser.add_argument("--samples", default=8, type=int, help="needle prompts")
    parser.add_argument("--length", default=1000, type=int, help="tokens of a needle prompt")
    return parser.parse_args()


def main() -> None:
    """Both kinds of prompts, both ways."""
    given = asked()
    adapter = load_model(given.model, device="cpu")
    needle = DatasetOptions(given.samples, lengths=(given.length,))
    cases: list[tuple[str, DatasetOptions, int | None]] = [("needle", needle, None)]
    if given.longbench:
        cases.append(("multi_news", DatasetOptions(40, data_dir=given.longbench, at_most=True), 1500))
    for name, options, longest in cases:
        samples = load(name, options, adapter.tokenizer).samples
        template = bool(adapter.tokenizer.chat_template)
        prompts = [encode(sample, adapter.tokenizer, chat_template=template, max_tokens=longest) for sample in samples]
        compare(adapter, prompts, f"{name}, two-stage in every layer")
        with patch("perturbkv.pipeline.layer.ranking_groups", first_layer_by_attention):
            compare(adapter, prompts, f"{name}, attention in the first layer")


if __name__ == "__main__":
    main()
