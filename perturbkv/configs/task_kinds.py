"""Kinds of tasks and their datasets, by which tables and averages are grouped."""

from __future__ import annotations

from collections.abc import Mapping

LONGBENCH: Mapping[str, tuple[str, ...]] = {
    "single-document QA": ("narrativeqa", "qasper", "multifieldqa_en", "multifieldqa_zh"),
    "multi-document QA": ("hotpotqa", "2wikimqa", "musique", "dureader"),
    "summarisation": ("gov_report", "qmsum", "multi_news", "vcsum"),
    "few-shot": ("trec", "triviaqa", "samsum", "lsht"),
    "synthetic": ("passage_count", "passage_retrieval_en", "passage_retrieval_zh"),
    "code": ("lcc", "repobench-p"),
}
"""Kind -> data sets of LongBench (Bai et al., 2023, table 1), in its order."""
RULER: Mapping[str, tuple[str, ...]] = {
    "retrieval": (
        *(f"niah_single_{number}" for number in (1, 2, 3)),
        *(f"niah_multikey_{number}" for number in (1, 2, 3)),
        "niah_multivalue",
        "niah_multiquery",
    ),
    "multi-hop tracing": ("vt",),
    "aggregation": ("cwe", "fwe"),
    "question answering": ("qa_squad", "qa_hotpot"),
}
"""Kind -> tasks of RULER (Hsieh et al., 2024, section 3), by their own names."""
RULER_PREFIX = "ruler:"
NEEDLE, OTHERS = "needle", "others"
KINDS = (*LONGBENCH, *RULER, NEEDLE, OTHERS)
"""Every kind, in the order of tables."""


def kind_of(dataset: str) -> str:
    """Return the task kind of a dataset name: a member of `KINDS`, `others` if unknown."""
    if dataset == NEEDLE:
        return NEEDLE
    known, name = (
        (RULER, dataset.removeprefix(RULER_PREFIX)) if dataset.startswith(RULER_PREFIX) else (LONGBENCH, dataset)
    )
    return next((kind for kind, names in known.items() if name in names), OTHERS)
