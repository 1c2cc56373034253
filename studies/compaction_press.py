"""A press of kvpress that merges what it evicts, against dropping it and against SnapKV, at equal bytes.

`MergingPress` adds the value of each evicted entry to that of the kept entry whose key is most like its own, weighted
by their likeness and by its norm over the sum of both; keys stay. It has no numbers beside entries, so that it keeps as
many as the press inside it, `SnapKVPress`. Of kvpress 0.5.5 it alone merges entries of a prompt: `CAMPress` merges
while it decodes, which `--policy kvpress:…` refuses.

Bytes are those of what its cache holds in memory, a number 16 bits.

## How it is decided

Written before anything but a `needle` prompt was measured. Prompts, window, steps, numbers and words are those of
`compaction.py`, at 5 and 20 % of the bytes. Claimed: `MergingPress` is better than the press inside it, which drops
what it merges; and than SnapKV here (`attention`). A claim *holds* where it is better at both shares, is *reversed*
where it is worse at both, and *depends* otherwise. kvpress needs an environment of its own (docs/how-to/kvpress.md),
with lm-eval for the prompts.

    python studies/compaction_press.py --dataset multi_news --data-dir LONGBENCH --samples 12 --max-tokens 700
    python studies/compaction_press.py TRACE
"""

from __future__ import annotations

import argparse

import common
from compaction import STEPS, WINDOW, Numbers, tables
from compaction_best import SHARES, verdict

import perturbkv as pk

INSIDE = f"SnapKVPress(window_size={WINDOW})"
CLAIMS = (("MergingPress", "SnapKVPress"), ("MergingPress", "attention"))
"""Treatment and baseline: the treatment is claimed to be better."""


def configurations(asked: argparse.Namespace) -> list[pk.EvictionConfig]:
    """Return SnapKV and both presses at every share."""
    budgets = asked.budget or (["0.2"] if asked.short else SHARES)
    found = list(pk.grid(budgets, selection="attention", granularity="kv", window=WINDOW))
    for press in (INSIDE, f"MergingPress({INSIDE})"):
        found += pk.grid(budgets, policy=f"kvpress:{press}")
    return found


def study(asked: argparse.Namespace) -> None:
    """Measure or read the trace; print the tables and write the document."""
    trace = common.read_or_measure(asked, [] if asked.trace else configurations(asked), steps=STEPS)
    numbers = Numbers(trace, CLAIMS)
    names = ("attention", "SnapKVPress", "MergingPress")
    levels = [numbers.level(name, budget) for budget in numbers.budgets for name in names]
    rows = [numbers.compare(*claim, budget) for claim in CLAIMS for budget in numbers.budgets]
    for title, heads, lines in tables(levels, rows, int(trace.ok.sum()), verdict):
        print(f"\n{title}\n\n{common.markdown(heads, lines)}")
    common.save(asked, {**common.trace_summary(trace), "levels": levels, "claims": rows})


if __name__ == "__main__":
    common.main(study, common.options(__doc__ or ""))
