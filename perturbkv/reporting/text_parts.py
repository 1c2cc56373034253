"""What a page says of texts of several tokens: heads by kind of decoded token, and perplexity under every cache."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from perturbkv.analyses.heads.head_comparison import HeadComparison
from perturbkv.analyses.heads.token_kinds import TokenKind, compare_token_kinds, kinds_note
from perturbkv.analyses.measurements import Measurements
from perturbkv.analyses.quality.perplexity import CachePerplexity, perplexity
from perturbkv.errors import TraceError
from perturbkv.escaping import escape_line
from perturbkv.reporting.head_measures import ANALYSIS
from perturbkv.reporting.sides import result_words, with_kind
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
        parts[key] = {"rows": [_kind_row(one) for one in own], "note": escape_line(" ".join(kinds_note(own, 1)))}
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


def _kind_row(one: TokenKind) -> dict[str, Any]:
    """Return the JSON object of a pair at the steps of one kind of token: ratios of sums over heads and samples."""
    return {
        "kind": one.kind,
        "samples": one.samples,
        "steps": one.steps,
        "isolated": with_kind(one.isolated_ratio, one.isolated_ratio_interval),
        "propagated": with_kind(one.propagated_ratio, one.propagated_ratio_interval),
        "rest": with_kind(one.rest_ratio, one.rest_ratio_interval),
    }


def _perplexity_row(one: CachePerplexity) -> dict[str, Any]:
    """Return the JSON object of a configuration's perplexity, alone, over the full cache's and the baseline's."""
    over = None if one.over_baseline is None else with_kind(one.over_baseline, one.over_baseline_interval)
    return {
        "perplexity": with_kind(one.perplexity, one.perplexity_interval),
        "ratio": with_kind(one.ratio, one.ratio_interval),
        "over_baseline": over,
    }
