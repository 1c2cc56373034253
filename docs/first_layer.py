"""What two-stage selection in the first layer alone does to the whole run: `python docs/first_layer.py [LONGBENCH]`.

The preset `paper` at budget 128, once as it is and once with the baseline's selection in the first layer, on the
demo's needle prompts and, with LongBench's folder, on the `multi_news` samples of docs/results.md; beside it the same
without value norms (two-stage-uniform). `--help` lists what can be other.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from unittest.mock import patch

import perturbkv as pk
from perturbkv.analyses.heads import summarise
from perturbkv.analyses.intervals import Scalar
from perturbkv.configs.eviction import EvictionConfig
from perturbkv.datasets.prompts import Prompts
from perturbkv.models.adapter import Adapter
from perturbkv.models.aliases import DEFAULT
from perturbkv.selection.kept_sets import ranking_groups
from perturbkv.selection.ranking import Scores

CONFIGS = pk.grid(128, selection=("attention", "two-stage", "two-stage-uniform"))


def first_layer_by_attention(
    configs: Sequence[EvictionConfig], scores: Callable[[EvictionConfig], Scores], prompt_tokens: int
) -> list[Family]:
    """`families`, but as the baseline selects in the first layer."""
    if scores(configs[0]).statistics.layer == 0:
        configs = [replace(config, selection="attention") for config in configs]
    return ranking_groups(configs, scores, prompt_tokens)


def compare(model: Adapter, prompts: Prompts, words: str) -> None:
    """Propagated perturbation of each treatment over the baseline's, and heads improved, intervals over samples."""
    trace = pk.measure(model, prompts, CONFIGS, progress=False)
    baseline, *treatments = trace.run.configs
    for treatment in treatments:
        found = summarise(trace, baseline, treatment).propagated
        heads = f"{found.improved_count} / {found.tied_count} / {found.worsened_count} heads"
        share = f"{found.better_share:.0%}{within(found.better_share_interval, '.0%')} of a sample's"
        ratio = f"L1 × {found.sum_ratio:.2f}{within(found.sum_ratio_interval, '.2f')}"
        sys.stdout.write(f"{words.format(treatment.selection)}, n = {len(prompts)}: {ratio}, {heads}, {share}\n")


def within(interval: Scalar, form: str) -> str:
    """An interval in brackets; nothing where there is none."""
    return "" if interval is None else f" [{interval.low:{form}}, {interval.high:{form}}]"


def asked() -> argparse.Namespace:
    """The command line; its defaults are those of docs/results.md."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("longbench", nargs="?", type=Path)
    parser.add_argument("--model", default=DEFAULT)
    parser.add_argument("--samples", default=8, type=int, help="needle prompts")
    parser.add_argument("--news", default=40, type=int, help="multi_news prompts")
    parser.add_argument("--length", default=1000, type=int, help="tokens of a needle prompt")
    return parser.parse_args()


def main() -> None:
    """Both kinds of prompts, both ways."""
    given = asked()
    model = pk.load_model(given.model, device="cpu")
    cases = [pk.load_prompts("needle", model, samples=given.samples, lengths=[given.length])]
    if given.longbench:
        news = {"data_dir": given.longbench, "max_tokens": 1500, "samples": given.news}
        cases.append(pk.load_prompts("multi_news", model, **news))
    for prompts in cases:
        compare(model, prompts, f"{prompts.dataset}, {{}} in every layer")
        with patch("perturbkv.selection.given.ranking_groups", first_layer_by_attention):
            compare(model, prompts, f"{prompts.dataset}, {{}} but for attention in the first layer")


if __name__ == "__main__":
    main()
