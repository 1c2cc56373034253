"""What every study shares: its options, the trace that it measures, its table, and the files that it leaves.

A study is one script on `import perturbkv as pk`. `python studies/NAME.py` measures its prompts and leaves a trace, a
JSON document and a picture; a killed one goes on where it was. `python studies/NAME.py TRACE` reads a finished trace.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.figure import Figure

import perturbkv as pk

SHORT = {"dataset": "needle", "samples": 4, "length": [300], "max_tokens": None}
"""Options of `--short`, which `make studies` gives: enough to see a study work, too little to conclude from."""


def options(text: str, **defaults: Any) -> argparse.ArgumentParser:
    """Return a parser of the options that studies share; `defaults` are those of this study.

    Budgets are tokens (128) or shares of the prompt (0.1), as in `pk.grid`.
    """
    parser = argparse.ArgumentParser(description=text, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("trace", nargs="*", help="finished traces, instead of measuring one")
    parser.add_argument("--model", default="smollm2-135m-q4_1", help="[%(default)s]")
    parser.add_argument("--dataset", default="needle", help="as `perturbkv list datasets` names them [%(default)s]")
    parser.add_argument("--data-dir", help="folder with LongBench's files")
    parser.add_argument("--samples", type=int, default=8, help="number of prompts [%(default)s]")
    parser.add_argument("--length", type=int, action="append", help="tokens of a made prompt; may be repeated")
    parser.add_argument("--max-tokens", type=int, help="longer prompts are cut in the middle")
    parser.add_argument("--no-chat-template", dest="chat_template", action="store_false", default=None)
    parser.add_argument("--budget", action="append", help="entries per head, or a share; may be repeated")
    parser.add_argument("--seed", type=int, default=0, help="of everything random [%(default)s]")
    parser.add_argument("--short", action="store_true", help="four short prompts, to see it work")
    parser.add_argument("--output", "-o", type=Path, help="folder of trace, JSON document and picture")
    parser.set_defaults(**defaults)
    return parser


def prompts(asked: argparse.Namespace, model: Any) -> Any:
    """Return the prompts that were asked for, encoded for the model."""
    chosen = {**vars(asked), **(SHORT if asked.short else {})}
    return pk.load_prompts(
        chosen["dataset"], model, samples=chosen["samples"], seed=asked.seed, data_dir=asked.data_dir,
        lengths=chosen["length"] or (), max_tokens=chosen["max_tokens"], chat_template=asked.chat_template,
    )  # fmt: skip


def measured(asked: argparse.Namespace, configs: Iterable[pk.EvictionConfig], **settings: Any) -> pk.Trace:
    """Return the finished trace that was named, or measure the configurations into `trace.h5` of the output folder.

    `settings` are those of `pk.Settings`.
    """
    if asked.trace:
        if len(asked.trace) > 1:
            raise pk.PerturbkvError(f"expected one trace, got {len(asked.trace)}")
        return pk.read_trace(asked.trace[0])
    model = pk.load_model(asked.model, seed=asked.seed)
    return pk.measure(
        model, prompts(asked, model), configs, settings=pk.Settings(**settings), path=asked.output / "trace.h5"
    )


def save(asked: argparse.Namespace, document: Mapping[str, Any], figure: Figure | None = None) -> None:
    """Write the JSON document and the picture of a study into its output folder, and say where they are."""
    name = Path(sys.argv[0]).stem
    asked.output.mkdir(parents=True, exist_ok=True)
    paths = [asked.output / f"{name}.json"]
    paths[0].write_text(json.dumps(document, indent=1, default=_plain, allow_nan=False) + "\n")
    if figure is not None:
        paths.append(asked.output / f"{name}.png")
        figure.savefig(paths[-1], dpi=200)
    print("wrote", ", ".join(map(str, paths)))


def show(title: str, rows: Sequence[Mapping[str, Any]]) -> None:
    """Print a table with a line per row."""
    print(f"\n{title}")
    print(pd.DataFrame(rows).to_string(index=False, float_format=lambda value: f"{value:.3g}", na_rep="–"))


def between(value: float, interval: Sequence[float] | None, digits: int = 2) -> str:
    """Return a number with its interval: `0.83 [0.80, 0.86]`; without one where too few samples allow none."""
    if interval is None or np.isnan(value):
        return f"{value:.{digits}f}"
    return f"{value:.{digits}f} [{interval[0]:.{digits}f}, {interval[1]:.{digits}f}]"


def finite(value: float) -> float | None:
    """Return a number as JSON has it: None where it is not finite."""
    return float(value) if np.isfinite(value) else None


def main(study: Callable[[argparse.Namespace], None], parser: argparse.ArgumentParser) -> None:
    """Run a study. What a user gets wrong is one line and exit code 2."""
    asked = parser.parse_args()
    asked.output = asked.output or Path("runs") / "studies" / Path(sys.argv[0]).stem
    try:
        study(asked)
    except pk.PerturbkvError as error:
        print(f"error: {error}", file=sys.stderr)
        raise SystemExit(2) from None


def _plain(value: Any) -> Any:
    """Return a NumPy number or array as JSON's own, NaN as null."""
    if isinstance(value, np.ndarray):
        return [_plain(one) for one in value]
    if isinstance(value, np.generic):
        value = value.item()
    return finite(value) if isinstance(value, float) else value
