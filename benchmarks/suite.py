"""The rows of `python -m benchmarks`, in groups that one or a few processes measure."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from importlib.util import find_spec
from typing import Any

from benchmarks import startup
from benchmarks.rows import NO_KVPRESS
from benchmarks.subprocesses import run_process
from perturbkv.errors import ConfigError
from perturbkv.models.aliases import DEFAULT
from perturbkv.models.loading import open_model
from perturbkv.selfcheck import gpu_rows
from perturbkv.selfcheck.rows import Group, Report, Target, Values, machine, ratio_with_parts, run_groups

_MOST_REPEATS = 1000
_ANSWERED = {"tokens": 1500, "answer": 64}
"""Tokens of the prompt and the answer of the row `quality-12`."""


@dataclass(frozen=True)
class Settings:
    """The options of the benchmark; every time is the median over `repeats` turns."""

    model: str = DEFAULT
    tokens: int = 4096
    repeats: int = 3
    dtype: str = "auto"
    device: str = "cpu"

    def __post_init__(self) -> None:
        check_repeats(self.repeats)
        if self.tokens <= 1024:
            raise ConfigError(f"--tokens must exceed the largest budget, 1024, got {self.tokens}")

    def model_arguments(self) -> dict[str, Any]:
        """Return the arguments common to most processes: model, tokens, dtype and device."""
        return {"model": self.model, "tokens": self.tokens, "dtype": self.dtype, "device": self.device}


def check_repeats(repeats: int) -> None:
    """Raise ConfigError for a number of turns below 1 or above 1000."""
    if not 1 <= repeats <= _MOST_REPEATS:
        raise ConfigError(f"--repeats must lie between 1 and {_MOST_REPEATS:,}, got {repeats}")


def measure(
    settings: Settings, targets: Sequence[Target], finished: Callable[[str], None] = lambda name: None
) -> Report:
    """Return the report on the rows `targets`; call `finished` with the name of each group of rows when it is done.

    A row whose process fails has the reason instead of a value. Raises ConfigError for a device that does not
    exist, and for prompts longer than the model's context.
    """
    names = {target.name for target in targets}
    _check_length(settings, names)
    rows = run_groups(targets, _groups(settings, names), finished)
    return Report(machine(settings.device, settings.dtype), asdict(settings), rows)


_OF_PROMPT = {"capture-2", "sweep-24", "sweep-200", "scores-11", "presses-24", "peak-24", "writing-24", "writing-200",
              "generation", "steps-8", "decode-trace"}  # fmt: skip
"""Rows with a prompt of the settings' tokens; that of `growth` is up to twice as long."""


def _check_length(settings: Settings, names: set[str]) -> None:
    """Raise ConfigError where a row's prompt is longer than the model's context."""
    longest = settings.tokens * 2 if "growth" in names else settings.tokens * bool(names & _OF_PROMPT)
    if longest == 0:
        return
    most = int(open_model(settings.model).config.max_position_embeddings)
    if longest > most:
        raise ConfigError(
            f"expected --tokens of at most {most * settings.tokens // longest:,} with model '{settings.model}', whose "
            f"context has {most:,} tokens, got {settings.tokens:,}, of which a row reads {longest:,}"
        )


def _groups(settings: Settings, names: set[str]) -> Iterator[Group]:
    """Yield the groups of rows, those of a GPU where there is one; `names` are the rows to measure."""
    yield "times", tuple(_COUNTS), lambda: _times(settings, names)
    yield "steps", ("steps-8",), lambda: _steps(settings)
    yield "decoding", ("decode-trace",), lambda: _decoding(settings)
    yield "presses", ("presses-24",), lambda: _presses(settings)
    yield "peaks", ("peak-24",), lambda: _peaks(settings)
    yield "growth", ("growth",), lambda: _growth(settings)
    yield "norms", ("norms-time",), lambda: _norms(settings)
    yield "norms' memory", ("norms-memory",), lambda: _norms_memory(settings)
    yield "writing", ("writing-24", "writing-200"), lambda: _writing(settings, names)
    yield "kept coding", ("kept-coding",), _kept_coding
    yield "generation", ("generation",), lambda: _generation(settings)
    yield "quality", ("quality-12",), lambda: _quality(settings)
    yield "startup", ("startup-help", "startup-figure"), lambda: _startup(settings)
    yield from gpu_rows.groups(settings.repeats)


_COUNTS = {"capture-2": 2, "sweep-24": 24, "sweep-200": 200, "scores-11": 11}


def _times(settings: Settings, names: set[str]) -> Values:
    """Return the rows of a traced run's seconds over a plain run's seconds, for several numbers of configurations."""
    counts = {name: count for name, count in _COUNTS.items() if name in names}
    measured = run_process(
        "time_sweeps", repeats=settings.repeats, counts=list(counts.values()), **settings.model_arguments()
    )
    values: Values = {}
    for name, count in counts.items():
        base = "prefill and 2 decodes" if count == 2 else "prefill"
        values[name] = ratio_with_parts(measured["seconds"][str(count)], measured["seconds"][base])
        values[name][1]["phases"] = measured["phases"][str(count)]
    return values


def _steps(settings: Settings) -> Values:
    """Return the row of the seconds of 24 configurations measured at 8 steps, over the seconds of a plain prefill."""
    spent = run_process("time_steps", repeats=settings.repeats, steps=8, **settings.model_arguments())
    value, details = ratio_with_parts(spent["seconds"]["traced"], spent["seconds"]["plain"])
    return {"steps-8": (value, {**details, "phases": spent["phases"]})}


def _decoding(settings: Settings) -> Values:
    """Return the row of tracing caches that are compressed while they are decoded from, over decoding from them."""
    spent = run_process("time_decoding", repeats=settings.repeats, steps=128, every=32, **settings.model_arguments())
    value, details = ratio_with_parts(spent["seconds"]["traced"], spent["seconds"]["decoded"])
    return {"decode-trace": (value, {**details, "phases": spent["phases"]})}


def _presses(settings: Settings) -> Values:
    """Return the row of the seconds of 24 configurations, over the seconds of kvpress presses."""
    if find_spec("kvpress") is None:
        raise ConfigError(NO_KVPRESS)
    spent = run_process("time_presses", repeats=settings.repeats, **settings.model_arguments())
    return {"presses-24": ratio_with_parts(spent["ours"], spent["presses"])}


def _peaks(settings: Settings) -> Values:
    """Return the row of the peak memory of 24 configurations, over the peak memory of a plain prefill."""
    plain, swept = (run_process("peaks", count=count, **settings.model_arguments())["peak"] for count in (0, 24))
    return {"peak-24": (swept / plain, {"bytes": swept, "base_bytes": plain})}


def _growth(settings: Settings) -> Values:
    """Return the row of the growth of time, without prefill, from the tokens to four times the tokens."""
    lengths = [settings.tokens // 2, settings.tokens * 2]
    arguments = {**settings.model_arguments(), "lengths": lengths, "repeats": settings.repeats, "count": 24}
    arguments.pop("tokens")
    short, long = run_process("time_growth", **arguments)["seconds"].values()
    return {"growth": ratio_with_parts(long, short)}


def _norms_shapes(settings: Settings) -> dict[str, Any]:
    """Return the shape arguments of the processes that compute value norms on the settings' device."""
    return {**gpu_rows.SEVEN_B, "entries": 8192, "dtype": "float32", "device": settings.device}


def _norms(settings: Settings) -> Values:
    """Return the row of the seconds of value norms, over the seconds of a loop over heads."""
    spent = run_process("time_norms", repeats=settings.repeats, **_norms_shapes(settings))
    value, details = ratio_with_parts(spent["seconds"]["ours"], spent["seconds"]["loop"])
    return {"norms-time": (value, {**details, "rate": spent["rate"], "matmul_rate": spent["matmul_rate"]})}


def _norms_memory(settings: Settings) -> Values:
    """Return the row of the extra memory of value norms, over the extra memory of a loop over heads."""
    ours, loop = (
        run_process("norms_peak", which=which, exact_peak=True, **_norms_shapes(settings))["extra"]
        for which in ("ours", "loop")
    )
    return {"norms-memory": (ours / loop, {"extra_bytes": ours, "base_extra_bytes": loop})}


def _writing(settings: Settings, names: set[str]) -> Values:
    """Return the rows of the seconds of writing a trace over those of measuring it."""
    values: Values = {}
    for name, count in (("writing-24", 24), ("writing-200", 200)):
        if name in names:
            spent = run_process("time_writing", count=count, repeats=settings.repeats, **settings.model_arguments())
            parts = zip(spent["run"], spent["journal"], spent["file"], strict=True)
            values[name] = (statistics.median((journal + file) / run for run, journal, file in parts), spent)
    return values


def _kept_coding() -> Values:
    """Return the row of the seconds of a sample whose kept sets are coded and written beside the next prefill."""
    spent = run_process("time_kept_coding", samples=20, prefill=1.5, layers=32, sets=32, tokens=32768)
    return {"kept-coding": (statistics.median(spent["seconds"]), spent)}


def _generation(settings: Settings) -> Values:
    """Return the row of the peak memory saved by an evicted cache, over the bytes saved in the cache itself."""
    full, evicted = (
        run_process("generation_memory", evicted=evicted, exact_peak=True, **settings.model_arguments())
        for evicted in (False, True)
    )
    saved = {name: full[name] - evicted[name] for name in full}
    return {"generation": (saved["peak"] / saved["cache"], {"full": full, "evicted": evicted})}


def _quality(settings: Settings) -> Values:
    """Return the row of the seconds of 12 scored configurations, over the seconds of a plain answer."""
    arguments = {**settings.model_arguments(), **_ANSWERED, "repeats": settings.repeats}
    spent = run_process("time_scoring", **arguments)
    value, details = ratio_with_parts(spent["seconds"]["scored"], spent["seconds"]["plain"])
    return {"quality-12": (value, {**details, "phases": spent["phases"], "batches": spent["batches"]})}


def _startup(settings: Settings) -> Values:
    """Return the rows of processor seconds of commands, over those of an import."""
    spent = startup.startup_seconds(settings.model, settings.repeats)
    return {f"startup-{name}": ratio_with_parts(one["command"], one["import"]) for name, one in spent.items()}
