"""The rows of `perturbkv doctor bench`, in groups that one or a few processes measure."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from importlib.util import find_spec
from typing import Any

import torch

from perturbkv.benchmark import startup
from perturbkv.benchmark.rows import NO_GPU, NO_KVPRESS, Report, Row, Target
from perturbkv.benchmark.subprocesses import in_process, machine
from perturbkv.errors import ConfigError, PerturbkvError
from perturbkv.models.aliases import DEFAULT
from perturbkv.models.loading import open_model

_MOST_REPEATS = 1000
_ANSWERED = {"tokens": 1500, "answer": 64}
"""Tokens of the prompt and the answer of the row `quality-12`."""
_SEVEN_B = {"d_model": 4096, "heads": 32, "kv_heads": 8}


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


Values = dict[str, tuple[float, dict[str, Any]]]
"""Row name -> value and details."""
Group = tuple[str, tuple[str, ...], Callable[[], Values]]
"""Rows that are measured together: the group's name, the rows' names, and the function that measures them."""


def measure(
    settings: Settings, targets: Sequence[Target], finished: Callable[[str], None] = lambda name: None
) -> Report:
    """Return the report on the rows `targets`; call `finished` with the name of each group of rows when it is done.

    A row whose process fails has the reason instead of a value. Raises ConfigError for a device that does not
    exist, and for prompts longer than the model's context.
    """
    names = {target.name for target in targets}
    _check_length(settings, names)
    return run_groups(
        machine(settings.device, settings.dtype), asdict(settings), targets, _groups(settings, names), finished
    )


_OF_PROMPT = {"capture-2", "sweep-24", "sweep-200", "scores-11", "presses-24", "peak-24", "writing-24", "writing-200",
              "generation"}  # fmt: skip
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


def run_groups(
    machine: Mapping[str, str],
    settings: Mapping[str, Any],
    targets: Sequence[Target],
    groups: Iterable[Group],
    finished: Callable[[str], None],
) -> Report:
    """Return the report of the groups with a target, measured in turn; call `finished` with every group's name."""
    names, values, reasons = {target.name for target in targets}, Values(), dict[str, str]()
    for group, rows, work in groups:
        if names & set(rows):
            try:
                values |= work()
            except PerturbkvError as error:
                reasons |= dict.fromkeys(rows, str(error))
        finished(group)
    return Report(machine, settings, tuple(_report_row(target, values, reasons) for target in targets))


def _report_row(target: Target, values: Values, reasons: dict[str, str]) -> Row:
    """Return a target's row with its value, or with the reason why it was not measured."""
    if target.name not in values:
        return Row(target, None, reasons.get(target.name, NO_GPU))
    value, details = values[target.name]
    return Row(target, value, "", details)


def group_count(settings: Settings) -> int:
    """Return the number of groups of rows that `measure` reports."""
    return len(list(_groups(settings, set())))


def _groups(settings: Settings, names: set[str]) -> Iterator[Group]:
    """Yield the groups of rows, GPU rows only on a machine with a GPU; `names` are the rows to measure."""
    yield "times", tuple(_COUNTS), lambda: _times(settings, names)
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
    if torch.cuda.is_available():
        yield "triton", ("triton-time", "triton-rate"), lambda: _triton(settings)
        yield "cuda sweep", ("cuda-24",), lambda: _cuda_sweep(settings)
        yield "cuda decoding", ("cuda-decode",), lambda: _cuda_decoding(settings)


_COUNTS = {"capture-2": 2, "sweep-24": 24, "sweep-200": 200, "scores-11": 11}


def _times(settings: Settings, names: set[str]) -> Values:
    """Return the rows of a traced run's seconds over a plain run's seconds, for several numbers of configurations."""
    counts = {name: count for name, count in _COUNTS.items() if name in names}
    measured = in_process("times", repeats=settings.repeats, counts=list(counts.values()), **settings.model_arguments())
    values: Values = {}
    for name, count in counts.items():
        base = "prefill and 2 decodes" if count == 2 else "prefill"
        values[name] = _ratio(measured["seconds"][str(count)], measured["seconds"][base])
        values[name][1]["phases"] = measured["phases"][str(count)]
    return values


def _ratio(seconds: Sequence[float], base: Sequence[float]) -> tuple[float, dict[str, Any]]:
    """Return the median over turns of seconds / base seconds, and all seconds as details."""
    return median_ratio(seconds, base), {"seconds": list(seconds), "base_seconds": list(base)}


def median_ratio(seconds: Sequence[float], base: Sequence[float]) -> float:
    """Return the median over turns of seconds / base seconds."""
    return statistics.median(one / other for one, other in zip(seconds, base, strict=True))


def _presses(settings: Settings) -> Values:
    """Return the row of the seconds of 24 configurations, over the seconds of kvpress presses."""
    if find_spec("kvpress") is None:
        raise ConfigError(NO_KVPRESS)
    spent = in_process("presses", repeats=settings.repeats, **settings.model_arguments())
    return {"presses-24": _ratio(spent["ours"], spent["presses"])}


def _peaks(settings: Settings) -> Values:
    """Return the row of the peak memory of 24 configurations, over the peak memory of a plain prefill."""
    plain, swept = (in_process("peaks", count=count, **settings.model_arguments())["peak"] for count in (0, 24))
    return {"peak-24": (swept / plain, {"bytes": swept, "base_bytes": plain})}


def _growth(settings: Settings) -> Values:
    """Return the row of the growth of time, without prefill, from the tokens to four times the tokens."""
    lengths = [settings.tokens // 2, settings.tokens * 2]
    arguments = {**settings.model_arguments(), "lengths": lengths, "repeats": settings.repeats, "count": 24}
    arguments.pop("tokens")
    short, long = in_process("growth", **arguments)["seconds"].values()
    return {"growth": _ratio(long, short)}


def _norms_shapes(settings: Settings) -> dict[str, Any]:
    """Return the shape arguments of the processes that compute value norms on the settings' device."""
    return {**_SEVEN_B, "entries": 8192, "dtype": "float32", "device": settings.device}


def _norms(settings: Settings) -> Values:
    """Return the row of the seconds of value norms, over the seconds of a loop over heads."""
    spent = in_process("norms", repeats=settings.repeats, **_norms_shapes(settings))
    value, details = _ratio(spent["seconds"]["ours"], spent["seconds"]["loop"])
    return {"norms-time": (value, {**details, "rate": spent["rate"], "matmul_rate": spent["matmul_rate"]})}


def _norms_memory(settings: Settings) -> Values:
    """Return the row of the extra memory of value norms, over the extra memory of a loop over heads."""
    ours, loop = (
        in_process("norms_peak", which=which, exact_peak=True, **_norms_shapes(settings))["extra"]
        for which in ("ours", "loop")
    )
    return {"norms-memory": (ours / loop, {"extra_bytes": ours, "base_extra_bytes": loop})}


def _writing(settings: Settings, names: set[str]) -> Values:
    """Return the rows of the seconds of writing a trace over those of measuring it."""
    values: Values = {}
    for name, count in (("writing-24", 24), ("writing-200", 200)):
        if name in names:
            spent = in_process("writing", count=count, repeats=settings.repeats, **settings.model_arguments())
            parts = zip(spent["run"], spent["journal"], spent["file"], strict=True)
            values[name] = (statistics.median((journal + file) / run for run, journal, file in parts), spent)
    return values


def _kept_coding() -> Values:
    """Return the row of the seconds of a sample whose kept sets are coded and written beside the next prefill."""
    spent = in_process("kept_coding", samples=20, prefill=1.5, layers=32, sets=32, tokens=32768)
    return {"kept-coding": (statistics.median(spent["seconds"]), spent)}


def _generation(settings: Settings) -> Values:
    """Return the row of the peak memory saved by an evicted cache, over the bytes saved in the cache itself."""
    full, evicted = (
        in_process("generating", evicted=evicted, exact_peak=True, **settings.model_arguments())
        for evicted in (False, True)
    )
    saved = {name: full[name] - evicted[name] for name in full}
    return {"generation": (saved["peak"] / saved["cache"], {"full": full, "evicted": evicted})}


def _quality(settings: Settings) -> Values:
    """Return the row of the seconds of 12 scored configurations, over the seconds of a plain answer."""
    arguments = {**settings.model_arguments(), **_ANSWERED, "repeats": settings.repeats}
    spent = in_process("scoring", **arguments)
    value, details = _ratio(spent["seconds"]["scored"], spent["seconds"]["plain"])
    return {"quality-12": (value, {**details, "phases": spent["phases"], "batches": spent["batches"]})}


def _startup(settings: Settings) -> Values:
    """Return the rows of processor seconds of commands, over those of an import."""
    spent = startup.startup_seconds(settings.model, settings.repeats)
    return {f"startup-{name}": _ratio(one["command"], one["import"]) for name, one in spent.items()}


def _triton(settings: Settings) -> Values:
    """Return the rows of value norms in Triton: seconds over a loop's, and throughput over a matrix product's."""
    shapes: dict[str, Any] = {**_SEVEN_B, "entries": 32768, "dtype": "bfloat16", "device": "cuda"}
    spent = in_process("norms", repeats=max(20, settings.repeats), **shapes)
    value, details = _ratio(spent["seconds"]["ours"], spent["seconds"]["loop"])
    rate = statistics.median(spent["rate"])
    return {
        "triton-time": (value, details),
        "triton-rate": (rate / spent["matmul_rate"], {"rate": rate, "matmul_rate": spent["matmul_rate"]}),
    }


def _cuda_sweep(settings: Settings) -> Values:
    """Return the row of the seconds of 24 configurations of a 7B model, over the seconds of a plain prefill."""
    measured = in_process(
        "times", model="random:mistral-7b", tokens=8192, repeats=max(5, settings.repeats), dtype="bfloat16",
        device="cuda", counts=[24],
    )  # fmt: skip
    value, details = _ratio(measured["seconds"]["24"], measured["seconds"]["prefill"])
    return {"cuda-24": (value, {**details, "phases": measured["phases"]["24"]})}


def _cuda_decoding(settings: Settings) -> Values:
    """Return the row of the seconds of decoding from an evicted cache, over the seconds from a full cache."""
    spent = in_process(
        "decoding", model="random:mistral-7b", tokens=32768, budget=1024, batch=4, steps=16,
        repeats=settings.repeats, dtype="bfloat16", device="cuda",
    )  # fmt: skip
    return {"cuda-decode": _ratio(spent["evicted"], spent["full"])}
