"""What a page says of texts of several tokens: heads by kind of token, perplexity, and what of a text was missed."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from perturbkv.analyses.heads.head_comparison import HeadComparison
from perturbkv.analyses.heads.token_kinds import compare_token_kinds, kinds_note
from perturbkv.analyses.json_values import json_value
from perturbkv.analyses.measurements import Measurements, measured_steps
from perturbkv.analyses.quality.perplexity import CachePerplexity, perplexity
from perturbkv.errors import TraceError
from perturbkv.escaping import escape_line
from perturbkv.reporting.head_measures import ANALYSIS
from perturbkv.reporting.page_blocks import Blocks, deflate
from perturbkv.reporting.prompt_texts import token_text
from perturbkv.reporting.sides import result_words, with_kind
from perturbkv.schema import PLACES
from perturbkv.trace import Trace


def kinds_part(trace: Trace, comparisons: Mapping[str, HeadComparison]) -> dict[str, Any]:
    """Return the JSON field `kinds`: pair -> its rows by kind of decoded token, and a note on kinds that make its sign.

    Args:
        trace: what was compared.
        comparisons: pair -> its comparison.

    Empty where all decoded tokens are of one kind, or of unknown kinds.
    """
    found = compare_token_kinds(Measurements(trace, ANALYSIS), tuple(comparisons.values()))
    if len({one.kind for one in found}) < 2:
        return {}
    parts = {}
    for key, pair in comparisons.items():
        own = [one for one in found if (one.baseline, one.treatment) == (pair.baseline, pair.treatment)]
        parts[key] = {
            "rows": [
                {
                    "kind": one.kind,
                    "samples": one.samples,
                    "steps": one.steps,
                    "isolated": with_kind(one.isolated_ratio, one.isolated_ratio_interval),
                    "propagated": with_kind(one.propagated_ratio, one.propagated_ratio_interval),
                    "rest": with_kind(one.rest_ratio, one.rest_ratio_interval),
                }
                for one in own
            ],
            "note": escape_line(" ".join(kinds_note(own, 1))),
        }
    return {"kinds": parts}


def perplexity_part(trace: Trace) -> dict[str, Any]:
    """Return the JSON field `perplexity` on the text under every cache; empty without log p of a token that counts."""
    try:
        found = perplexity(trace)
    except TraceError:
        return {}
    part = {
        **result_words(found),
        "full": with_kind(found.full, found.full_interval),
        "configs": [_perplexity_row(one) for one in found.configs],
    }
    return {"perplexity": part}


def missed_part(trace: Trace, blocks: Blocks) -> dict[str, Any]:
    """Return the JSON field `missed` on the texts that were read while caches were compressed again; else empty.

    The block of each complete sample is stored while there is room, and None stands for one without.
    """
    if "missed_attention" not in trace.arrays:
        return {}
    samples = enumerate(zip(np.flatnonzero(trace.ok).tolist(), measured_steps(trace).tolist(), strict=True))
    read = [blocks.offer(f"read{number}", _read_text(trace, sample, steps)) for number, (sample, steps) in samples]
    return {"missed": {"places": PLACES, "blocks": read}}


def _read_text(trace: Trace, sample: int, steps: int) -> bytes:
    """Return the compressed block of the text that a sample's steps read, and of what its caches lacked of it.

    Means are over layers and heads. Without the tokens' text, their ids are the pieces.
    """
    names = ("missed_attention", "held_entries", "perturbation_carried", "gone_attention")
    missed, held, carried, gone = (np.asarray(trace.arrays[name][sample])[:, :steps] for name in names)
    has_text = "token_text" in trace.arrays and any(trace.arrays["token_text"][sample])
    pieces = trace.arrays["token_text" if has_text else "token_id"][sample][:steps].tolist()
    document = {
        "has_text": has_text,
        "pieces": [token_text(str(piece)) for piece in pieces],
        "missed": _rounded(missed),
        "held": _rounded(held.mean(axis=(2, 3))),
        "compressions": [np.flatnonzero(row).tolist() for row in ~np.isnan(carried).all(axis=(2, 3))],
        "gone": _rounded(gone.mean(axis=(1, 2, 3), dtype=np.float64)),
    }
    return deflate(json.dumps(json_value(document), ensure_ascii=False, separators=(",", ":")).encode())


def _rounded(table: NDArray[Any]) -> list[list[float]]:
    """Return a matrix of numbers with six digits each."""
    return [[float(f"{number:.6g}") for number in row] for row in table.tolist()]


def _perplexity_row(one: CachePerplexity) -> dict[str, Any]:
    """Return the JSON object of a configuration's perplexity, alone, over the full cache's and the baseline's."""
    over = None if one.over_baseline is None else with_kind(one.over_baseline, one.over_baseline_interval)
    return {
        "perplexity": with_kind(one.perplexity, one.perplexity_interval),
        "ratio": with_kind(one.ratio, one.ratio_interval),
        "over_baseline": over,
    }
