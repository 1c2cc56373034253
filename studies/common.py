"""What every study shares: its options, the trace that it measures, its table, and the files that it leaves.

A study is one script on `import perturbkv as pk`. `python studies/NAME.py` measures its prompts and leaves a trace, a
JSON document and a picture; a killed one goes on where it was. `python studies/NAME.py TRACE` reads a finished trace.
"""

from __future__ import annotations

import argparse
import dataclasses
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
    parser.add_argument("--dtype", default="auto", help="auto, float32, bfloat16, float16 [%(default)s]")
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


def load_model(asked: argparse.Namespace) -> Any:
    """Return the model that was asked for."""
    return pk.load_model(asked.model, dtype=asked.dtype, seed=asked.seed)


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
    model = load_model(asked)
    return pk.measure(
        model, prompts(asked, model), configs, settings=pk.Settings(**settings), path=asked.output / "trace.h5"
    )


def save(asked: argparse.Namespace, document: Mapping[str, Any], figure: Figure | None = None) -> None:
    """Write the JSON document and the picture of a study into its output folder, and say where they are."""
    name = Path(sys.argv[0]).stem
    asked.output.mkdir(parents=True, exist_ok=True)
    paths = [asked.output / f"{name}.json"]
    paths[0].write_text(json.dumps(plain(document), indent=1, allow_nan=False) + "\n")
    if figure is not None:
        paths.append(asked.output / f"{name}.png")
        figure.savefig(paths[-1], dpi=200)
    print("wrote", ", ".join(map(str, paths)))


def show(title: str, rows: Sequence[Mapping[str, Any]]) -> None:
    """Print a table with a line per row."""
    print(f"\n{title}")
    print(pd.DataFrame(rows).to_string(index=False, float_format=lambda value: f"{value:.3g}", na_rep="–"))


def between(value: float, interval: Any, digits: int = 2) -> str:
    """Return a number with its interval: `0.83 [0.80, 0.86]`; the range of few samples in round brackets."""
    if interval is None or np.isnan(value):
        return "–" if np.isnan(value) else f"{value:.{digits}f}"
    ends = f"{interval.low:.{digits}f}, {interval.high:.{digits}f}"
    return f"{value:.{digits}f} " + (f"[{ends}]" if interval.kind == "interval" else f"({ends})")


def side(interval: Any, at: float) -> int:
    """Return 1 for an interval above `at`, −1 for one below; 0 where it holds `at`, or too few samples allow none."""
    known = interval is not None and interval.kind == "interval"
    return int(interval.low > at) - int(interval.high < at) if known else 0


def error_bars(values: Sequence[float], ends: Sequence[Any]) -> list[list[float]]:
    """Return the lengths to the lower and to the upper ends of intervals, as `Axes.errorbar` takes them; 0 for none."""
    pairs = list(zip(values, ends, strict=True))
    low = [0.0 if end is None else max(0.0, value - end.low) for value, end in pairs]
    high = [0.0 if end is None else max(0.0, end.high - value) for value, end in pairs]
    return [low, high]


def finite(value: float) -> float | None:
    """Return a number as JSON has it: None where it is not finite."""
    return float(value) if np.isfinite(value) else None


def plain(value: Any) -> Any:
    """Return what JSON can hold: arrays as lists, NaN as None, a configuration as its label and choices.

    Intervals, estimates and other dataclasses become their fields.
    """
    if isinstance(value, np.ndarray | np.generic):
        return plain(value.tolist())
    if isinstance(value, pk.EvictionConfig):
        return plain({"label": value.label(), **value.to_document()})
    if dataclasses.is_dataclass(value):
        return plain(vars(value))
    if isinstance(value, Mapping):
        return {str(key): plain(one) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return [plain(one) for one in value]
    return finite(value) if isinstance(value, float) else value


def main(study: Callable[[argparse.Namespace], None], parser: argparse.ArgumentParser) -> None:
    """Run a study. What a user gets wrong is one line and exit code 2."""
    asked = parser.parse_args()
    asked.output = asked.output or Path("runs") / "studies" / Path(sys.argv[0]).stem
    try:
        study(asked)
    except pk.PerturbkvError as error:
        print(f"error: {error}", file=sys.stderr)
        raise SystemExit(2) from None
