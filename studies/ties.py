"""The table of ties: do verdicts in half precision hold in float32? `python docs/scripts/ties.py FLOAT32.h5 BF16.h5 …`.

Every trace is of `perturbkv trace`, measured with --dtype float32 and then with others, all else alike; of each dataset
one is in float32. In bash:

    for dtype in float32 bfloat16; do
      more="--samples 8 --dtype $dtype"
      perturbkv trace $more -o runs/ties/needle-$dtype.h5
      perturbkv trace $more -d multi_news --data-dir FOLDER --max-tokens 800 -o runs/ties/news-$dtype.h5
    done
    python docs/scripts/ties.py runs/ties/*.h5
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from pathlib import Path

from perturbkv.analyses.heads.half_precision import Agreement, Ties, compare
from perturbkv.analyses.stats.intervals import OptionalInterval
from perturbkv.analyses.verdicts import DISTANCES
from perturbkv.errors import TraceError
from perturbkv.storage.trace.trace_file import read_trace
from perturbkv.trace import Trace

HEAD = ["dataset", "dtype", "measure", "samples", "heads decided", "float32's verdict", "opposite", "tied in float32"]
OLD = "each value against 3 floors"


def main() -> None:
    """Print a row per dataset, dtype and measure."""
    lines = [HEAD, ["---"] * len(HEAD)]
    for exact, rounded in matched(read_trace(Path(name)) for name in sys.argv[1:]):
        lines += [row(exact, rounded, ties) for ties in compare(exact, rounded, "attention", "two-stage")]
    print("\n".join(f"| {' | '.join(line)} |" for line in lines))


def matched(traces: Iterable[Trace]) -> Iterator[tuple[Trace, Trace]]:
    """Return each trace of another dtype with its dataset's float32 trace. Raises TraceError where there is none."""
    held = list(traces)
    exact = {trace.run.dataset: trace for trace in held if trace.run.dtype == "float32"}
    for trace in held:
        if trace.run.dtype == "float32":
            continue
        if trace.run.dataset not in exact:
            raise TraceError(f"expected a float32 trace of {trace.run.dataset} beside {trace.source}, got none")
        yield exact[trace.run.dataset], trace


def row(exact: Trace, rounded: Trace, ties: Ties) -> list[str]:
    """Return the numbers of METHOD's rule, and beside the share that of the rule of comparison."""
    left_out = f" (+ {ties.left_out} with another token)" if ties.left_out else ""
    found = ties.by_difference
    return [
        Path(rounded.run.dataset).stem,
        rounded.run.dtype,
        f"{ties.kind} {DISTANCES[ties.distance]}",
        f"{ties.samples}{left_out}",
        f"{found.decided:,} of {ties.heads:,}",
        f"{share(found, ties.share_interval)}; {OLD}: {share(ties.alone)}",
        f"{found.opposite:,}; {ties.alone.opposite:,}",
        f"{found.tied:,}; {ties.alone.tied:,}",
    ]


def share(found: Agreement, interval: OptionalInterval = None) -> str:
    """Return '97.2 % [95.0, 98.8]'; of fewer than five samples the brackets hold their range."""
    ends = f" [{100 * interval.low:.1f}, {100 * interval.high:.1f}]" if interval else ""
    return f"{100 * found.share:.1f} %{ends}" if found.decided else "–"


if __name__ == "__main__":
    main()
