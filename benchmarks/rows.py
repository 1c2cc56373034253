"""The rows of the benchmark with their targets; those of a GPU are `perturbkv doctor selfcheck`'s."""

from __future__ import annotations

from collections.abc import Sequence

from perturbkv.errors import UnknownNameError, install_extra
from perturbkv.selfcheck import gpu_rows
from perturbkv.selfcheck.rows import Target

NO_KVPRESS = f"kvpress is not installed; {install_extra('kvpress')}"
NO_RAY = f"Ray is not installed; {install_extra('ray')}"
NO_BROWSER = f"needs Chromium (apt-get install chromium) and Playwright; {install_extra('browser')}"
EXCUSES = (NO_KVPRESS, NO_RAY, NO_BROWSER)
"""Reasons that excuse a row from being measured."""

TARGETS = (
    Target("capture-2", "2 configurations, heads and layers / plain prefill + 2 decodes", 1.1),
    Target("sweep-24", "24 configurations (3 policies × 2 selections × 4 budgets) / plain prefill", 1.25),
    Target("sweep-200", "200 configurations / plain prefill", 2.0),
    Target("steps-8", "24 configurations with 8 steps / plain prefill", 1.6),
    Target("decode-trace", "8 caches compressed every 32 tokens, traced over 128 steps / decoded from", 1.5),
    Target("scores-11", "ten scores of later methods beside SnapKV's / plain prefill", 1.6),
    Target("presses-24", "the same 24 configurations, ours / kvpress' presses, a prefill each", 0.2),
    Target("peak-24", "peak memory, 24 configurations / plain prefill's", 1.3),
    Target("growth", "everything but the prefill, 8,192 tokens / 2,048 tokens", 4.6),
    Target("norms-time", "value norms / head-by-head matmul loop, seconds", 1.0),
    Target("norms-memory", "value norms / head-by-head matmul loop, extra memory", 0.2),
    Target("writing-24", "writing the trace / the run, 24 configurations", 0.02),
    Target("writing-200", "writing the trace / the run, 200 configurations", 0.02),
    Target("kept-coding", "seconds a sample: kept sets coded and written beside a sleep of 1.5 s, 8B shapes", 1.8),
    Target("generation", "peak saved / cache saved, generating from an evicted cache", 0.8, at_least=True),
    Target("quality-12", "12 configurations and the full cache, 64 tokens scored / plain prefill + 64 tokens", 3.0),
    Target("startup-help", "processor seconds of perturbkv -h / import numpy", 3.0),
    Target("startup-figure", "processor seconds of heads on a finished trace / import matplotlib.pyplot", 3.5),
    *gpu_rows.TARGETS,
)
SCALE = (
    Target("scale-workers", "8 worker processes that sleep / one, speed-up over 8", 0.95, at_least=True),
    Target("scale-ray", "8 actors of Ray that sleep / one, speed-up over 8", 0.95, at_least=True),
    Target("coordination-workers", "the coordinating process's CPU, 8 worker processes, ms per sample", 3.0),
    Target("coordination-ray", "the coordinating process's CPU, 8 actors of Ray, ms per sample", 3.0),
    Target("coordinator-memory", "the coordinating process's peak memory, all samples / 10", 1.1),
    Target("merging", "merging 7 shards / writing the same samples once", 2.0),
    Target("merging-memory", "peak memory of merging 7 shards, all samples / 10", 1.1),
    Target("two-workers", "2 workers that measure, a thread each / one, samples per second", 1.6, at_least=True),
)
"""Targets of runs of thousands of samples: workers, coordination and merging."""
REPORT = (
    Target("report-small", "page of 8 samples × 24 configurations × 270 heads, MB", 5.0),
    Target("report-large", "page of 32 samples × 24 configurations × 1,024 heads, MB", 25.0),
    Target("report-paint", "first paint of the smaller one in headless Chromium, s", 1.5),
    Target("report-ready", "until choices can be made in it, s", 1.5),
    Target("report-change", "a change of choice in it until it is painted, median, s", 0.1),
    Target("report-change-most", "the longest of these changes, s", 0.1),
)
"""Targets of a report's page: its size, and how soon it shows a choice."""


def find_targets(names: Sequence[str], targets: Sequence[Target] = TARGETS) -> tuple[Target, ...]:
    """Return the targets with these names, or all targets if `names` is empty. Raises UnknownNameError."""
    known = tuple(target.name for target in targets)
    for name in names:
        if name not in known:
            raise UnknownNameError(name, "benchmark row", known)
    return tuple(target for target in targets if not names or target.name in names)
