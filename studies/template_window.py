"""What the chat template's tokens do to SnapKV's window, per model.

`python studies/template_window.py MODEL… --data-dir LONGBENCH` measures each model with a chat template on LongBench's
`multi_news`. The first table has the number of the template's tokens behind the message, their queries' share of the
attention that the window gives to the ranked entries, and the share of the kept ranked entries that are others once the
text's queries alone vote. The second has sums of perturbations with the text's queries over those with all queries of
the window. Numbers are means over prompts with intervals; of fewer than five prompts the brackets hold the range.

The template's share of the attention takes the layers of a prefill, which no trace holds: its imports are no public
names.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import common
import numpy as np

import perturbkv as pk
from perturbkv.pipeline.sample.prefill import Statistics, prefill
from perturbkv.scoring.layer_view import LayerView
from perturbkv.selection.resolved_config import ResolvedRun

WINDOWS, SELECTIONS, BUDGET = (8, 32), ("attention", "two-stage"), 128
ALL, TEXT = (f"snapkv(window_queries={queries})" for queries in ("all", "text"))
FIRST = ["model", "window", "template's tokens", "n", "their share of attention, %", "kept elsewhere, %"]
SECOND = ["model", "window", "n", "selection", "isolated, ×", "propagated, ×"]


class TemplateShares:
    """A visitor of a prefill that adds up, per window and head, the template's share of attention to the prefix."""

    needs_full_cache = False

    def __init__(self, windows: Sequence[int]) -> None:
        self.by_window: dict[int, list[np.ndarray]] = {window: [] for window in windows}

    def visit(self, statistics: Statistics, view: LayerView) -> None:
        """Store the shares (head,) of a layer."""
        for window, shares in self.by_window.items():
            seen = view.with_window(window)
            mass = seen.attention[..., : seen.prefix].sum(dim=-1).cpu().numpy()
            voting = range(view.entries - mass.shape[1], view.entries)
            shares.append(mass[:, [place in view.template for place in voting]].sum(axis=1) / mass.sum(axis=1))


def template_shares(
    model: Any, prompts: Sequence[pk.Prompt], trace: pk.Trace, windows: Sequence[int]
) -> dict[int, Any]:
    """Return window -> the mean share over heads of each prompt (prompt,)."""
    found: dict[int, list[float]] = {window: [] for window in windows}
    for prompt in prompts:
        shares = TemplateShares(windows)
        prefill(model, prompt, ResolvedRun.from_run(trace.run), pk.Resources(), visitor=shares)
        for window, layers in shares.by_window.items():
            found[window].append(float(np.mean(layers)))
    return {window: np.array(values) for window, values in found.items()}


def changed_shares(trace: pk.Trace, window: int) -> np.ndarray:
    """Return the share of the entries kept before a window that others replace once the text's queries alone vote.

    Of selection `attention`, mean over heads, (prompt,).
    """
    (pair,) = pk.compare_heads(trace.sel(window=window), f"{ALL}:attention", f"{TEXT}:attention")
    sides = [trace.run.configs.index(config) for config in (pair.baseline, pair.treatment)]
    found = []
    for sample in range(len(trace.sample_ids)):
        first, second = (trace.kept_masks(sample, side)[..., :-window] for side in sides)
        found.append(float(((first & ~second).sum(axis=-1) / first.sum(axis=-1)).mean()))
    return np.array(found)


def measure(name: str, asked: argparse.Namespace) -> Iterator[tuple[list[str], list[list[str]]]]:
    """Yield, per window of a model, its row of the first table and its rows of the second."""
    model = pk.load_model(name, device="cpu", dtype="float32")
    if not model.tokenizer.chat_template:
        print(f"{name} has no chat template.", flush=True)
        return
    prompts = common.prompts(asked, model)
    counts = sorted({len(prompt.template_tail) for prompt in prompts})
    end = model.tokenizer.decode([prompts[0].token_ids[place] for place in prompts[0].template_tail])
    print(f"{name}: {len(prompts)} prompts that end in {end!r}", flush=True)
    windows = [window for window in WINDOWS if 0 < counts[0] <= counts[-1] < window]
    if not windows:
        print(f"{name}: no window of {WINDOWS} holds the template's tokens and others.", flush=True)
        return
    configs = pk.grid(BUDGET, window=windows, selection=SELECTIONS, window_queries=("all", "text"))
    trace = pk.measure(model, prompts, configs, settings=common.ONE_STEP, progress=False)
    shares = template_shares(model, prompts, trace, windows)
    for window in windows:
        here, label, count = trace.sel(window=window), Path(name).name, str(len(prompts))
        attention, elsewhere = (percent_text(values) for values in (shares[window], changed_shares(trace, window)))
        sums = []
        for selection in SELECTIONS:
            (pair,) = pk.compare_heads(here, f"{ALL}:{selection}", f"{TEXT}:{selection}")
            ratios = (ratio_text(kind.sum_ratio, kind.sum_ratio_interval) for kind in (pair.isolated, pair.propagated))
            sums.append([label, str(window), count, selection, *ratios])
        tokens = "–".join(map(str, dict.fromkeys((counts[0], counts[-1]))))
        yield [label, str(window), tokens, count, attention, elsewhere], sums


def percent_text(each: np.ndarray) -> str:
    """Return the mean of each prompt's share with its interval: `61 [58, 64]`."""
    interval = pk.stats.intervals.of_mean(each, pk.stats.intervals.share_kind(0))
    return f"{100 * each.mean():.0f}" + (f" [{100 * interval.low:.0f}, {100 * interval.high:.0f}]" if interval else "")


def ratio_text(value: float, interval: Any) -> str:
    """Return a ratio of sums with its interval."""
    return f"{value:.2f}" + (f" [{interval.low:.2f}, {interval.high:.2f}]" if interval else "")


def arguments() -> argparse.ArgumentParser:
    """Return the parser of this study's options."""
    chosen = {"dataset": "multi_news", "samples": 16, "max_tokens": 1500, "chat_template": True}
    return common.options(__doc__ or "", "models", "models to measure", **chosen)


def study(asked: argparse.Namespace) -> None:
    """Measure every model, and write both tables."""
    measured = [rows for name in asked.models or [asked.model] for rows in measure(name, asked)]
    rows = [row for _, several in measured for row in several]
    common.write_tables(asked, [("the window", FIRST, [first for first, _ in measured]), ("the sums", SECOND, rows)])


if __name__ == "__main__":
    common.main(study, arguments())
