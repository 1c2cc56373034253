"""The rows of `python -m benchmarks report`: size of a page, loading time, and time of a change of choice.

Times are those of headless Chromium. The pages show synthetic traces of any size, with numbers of plausible spread and
kept sets that share most of their entries.
"""

from __future__ import annotations

import shutil
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from benchmarks.rows import NO_BROWSER
from benchmarks.suite import check_repeats
from perturbkv import kept_codec
from perturbkv.configs.eviction import EvictionConfig
from perturbkv.configs.run import RunConfig
from perturbkv.errors import ConfigError, PerturbkvError
from perturbkv.reporting.report import report
from perturbkv.schema import DIGEST, KEPT, OF_COMPRESSIONS, ROWS, TEXT, VARIABLES, Variable
from perturbkv.selection.grid import configuration
from perturbkv.selfcheck.rows import Group, Report, Target, Values, machine, run_groups
from perturbkv.trace import Trace

_ARGUMENTS = (
    "--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-background-networking",
    "--disable-component-update", "--disable-sync",
)  # fmt: skip
_LONGEST = 60.0
"""Timeout in seconds for the page to load."""
_PARTS = ("verdict", "map", "prompt")
"""Parts of the page that are on the screen while its choices change, one after the other."""
_PAINTED = "performance.getEntriesByName('first-contentful-paint')[0]?.startTime"
_READY = "performance.getEntriesByName('ready')[0]?.startTime"
_WHOLE = "document.body.dataset.ready === 'all' || undefined"
_CHANGES = "performance.getEntriesByName('change').map((one) => one.duration)"
_CHOOSE = """([name, place]) => {
  const list = document.querySelector(`#choose select[name=${name}]`);
  if (list === null || list.options.length < 2) return false;
  list.selectedIndex = (list.selectedIndex + place) % list.options.length;
  list.dispatchEvent(new Event("input", { bubbles: true }));
  list.dispatchEvent(new Event("change", { bubbles: true }));
  return true;
}"""


def first_times(path: Path, repeats: int) -> dict[str, list[float]]:
    """Return the seconds from opening a page to its first paint ("paint"), and until it accepts choices ("ready").

    Raises ConfigError where there is no browser, PerturbkvError where the page does not load.
    """
    times: dict[str, list[float]] = {"paint": [], "ready": []}
    with _chromium() as browser:
        for _ in range(repeats):
            page = _open_page(browser, path)
            for name, expression in (("paint", _PAINTED), ("ready", _READY)):
                times[name].append(_wait_for(page, expression) / 1000)
            page.context.close()
    return times


def change_times(path: Path, repeats: int) -> dict[str, list[float]]:
    """Return 'choice, visible part of the page' -> seconds of every change of the choice.

    Raises ConfigError where there is no browser, PerturbkvError where the page does not measure its changes.
    """
    times: dict[str, list[float]] = {}
    with _chromium() as browser:
        page = _open_page(browser, path)
        _wait_for(page, _WHOLE)
        for part in _PARTS:
            page.evaluate("(id) => document.getElementById(id)?.scrollIntoView()", part)
            for name in ("baseline", "treatment", "budget", "measure", "sample"):
                changes = [_change_seconds(page, name) for _ in range(repeats)]
                times[f"{name}, {part} on the screen"] = [one for one in changes if one is not None]
        page.context.close()
    return times


@contextmanager
def _chromium() -> Iterator[Any]:
    """Yield a headless Chromium. Raises ConfigError where it is not installed, PerturbkvError where it fails."""
    path = shutil.which("chromium")
    if path is None or find_spec("playwright") is None:
        raise ConfigError(NO_BROWSER)
    from playwright.sync_api import Error, sync_playwright

    try:
        with sync_playwright() as running:
            browser = running.chromium.launch(executable_path=path, headless=True, args=list(_ARGUMENTS))
            yield browser
            browser.close()
    except Error as error:
        raise PerturbkvError(f"the browser failed: {str(error).splitlines()[0]}") from None


def _open_page(browser: Any, path: Path) -> Any:
    """Return a new window of the browser that shows a file."""
    page = browser.new_context(viewport={"width": 1280, "height": 900}).new_page()
    page.goto(path.resolve().as_uri())
    return page


def _change_seconds(page: Any, name: str) -> float | None:
    """Return the seconds of changing the choice `name`; None if it has a single value."""
    before = len(page.evaluate(_CHANGES))
    if not page.evaluate(_CHOOSE, [name, 1]):
        return None
    spent = _poll(page, lambda: (page.evaluate(_CHANGES)[before:] or [None])[0], f"a change of {name}")
    return spent / 1000


def _wait_for(page: Any, expression: str) -> float:
    """Return the value of a JavaScript expression as soon as it is defined."""
    return _poll(page, lambda: page.evaluate(expression), expression)


def _poll(page: Any, function: Callable[[], Any], what: str) -> float:
    """Return the first result that is not None, by polling, as the page's policy forbids waiting inside it.

    Raises PerturbkvError, which names `what` was awaited, where none comes within a minute.
    """
    end = time.perf_counter() + _LONGEST
    while time.perf_counter() < end:
        if (result := function()) is not None:
            page.wait_for_timeout(200)  # until what the page draws when idle is drawn
            return float(result)
        page.wait_for_timeout(20)
    raise PerturbkvError(f"expected {what} within {_LONGEST:g} seconds, got nothing")


_SHARES = ("sigma_topk", "sigma_stage1", "retained_mass")
_LOST = 10
"""Lost entries per head, as many as `measure` stores."""
_OWN_NOISE = 0.3
"""Standard deviation of the scores of one configuration, over that of the scores that all share."""
_COMPUTED = {*KEPT, DIGEST, *TEXT, *OF_COMPRESSIONS, *(name for pair in ROWS.values() for name in pair), "own_entries"}


def sweep(sides: int = 8, budgets: tuple[float, ...] = (0.1, 0.2, 0.4)) -> tuple[EvictionConfig, ...]:
    """Return `sides` configurations per budget: combinations of two policies with four selections."""
    names = ("attention", "two-stage", "attention-unpooled", "two-stage-uniform")
    both = [(policy, name) for policy in ("snapkv", "adakv") for name in names][:sides]
    return tuple(configuration(budget, policy=policy, selection=name) for budget in budgets for policy, name in both)


def synthetic_trace(
    samples: int,
    layers: int,
    heads: int,
    tokens: int,
    *,
    configs: tuple[EvictionConfig, ...] = (),
    steps: int = 1,
    kept: bool = True,
    seed: int = 0,
) -> Trace:
    """Return a synthetic trace of this size, for `configs` or a sweep of 24 configurations.

    With `kept` it has the positions of kept sets, else their digests alone.
    """
    draw, configs = np.random.default_rng(seed), configs or sweep()
    sizes = {
        "sample": samples,
        "config": len(configs),
        "step": steps,
        "layer": layers,
        "decoder_layer": layers,
        "head": heads,
    }
    sizes["lost_entry"] = _LOST
    arrays: dict[str, NDArray[Any]] = {
        name: _random_values(name, variable, tuple(sizes[axis] for axis in variable.axes), draw)
        for name, variable in VARIABLES.items()
        if _is_drawn(name, variable, sizes)
    }
    arrays |= {"prompt_tokens": np.full(samples, tokens), "steps_measured": np.full(samples, steps)}
    arrays["question_tokens"] = np.zeros(samples, dtype=np.int64)
    arrays["evicted"] = np.ones((samples, len(configs)), dtype=np.uint8)
    shape = (samples, len(configs), layers, heads)
    arrays |= _random_kept_sets(shape, configs, tokens, draw) if kept else _random_digests(shape, configs, tokens, draw)
    arrays |= _prompt_texts(samples, tokens)
    run = RunConfig(model="made", dataset="made", configs=configs, samples=samples, steps=steps)
    return Trace(run, tuple(f"p{number}" for number in range(samples)), arrays)


def _is_drawn(name: str, variable: Variable, sizes: Mapping[str, int]) -> bool:
    """Return whether a synthetic trace fills a variable with random numbers; effects are for `--save effect` alone."""
    others = name in _COMPUTED or variable.save == "effect" or variable.is_concatenated or variable.dtype == "str"
    return not others and set(variable.dims) <= sizes.keys()


def _random_values(name: str, variable: Variable, shape: tuple[int, ...], draw: np.random.Generator) -> NDArray[Any]:
    """Return random values of a variable with a plausible spread."""
    if np.dtype(variable.dtype).kind != "f":
        return draw.integers(0, 2, shape).astype(variable.dtype)
    if name in _SHARES:
        return draw.beta(4, 1.5, size=shape)
    unit = 1e-6 if "noise_floor" in name else 1.0
    return (unit * draw.lognormal(sigma=1.3, size=shape)).astype(variable.dtype)


def _random_kept_sets(
    shape: tuple[int, ...], configs: tuple[EvictionConfig, ...], tokens: int, draw: np.random.Generator
) -> dict[str, NDArray[Any]]:
    """Return kept-set variables (sample, config, layer, head), of that `shape`, that differ little by configuration.

    In the first layer the first two configurations have equal scores: heads of equal sets are tied.
    """
    samples, _, layers, heads = shape
    counts, rows, lengths = [_kept_count(one, tokens) for one in configs], [], []
    for _ in range(samples):
        common = draw.normal(size=(layers * heads, tokens)).astype(np.float32)
        for config, count in enumerate(counts):
            own = common + np.float32(_OWN_NOISE) * draw.normal(size=common.shape).astype(np.float32)
            if config < 2:
                own[:heads] = common[:heads]
            least = np.partition(own, tokens - count, axis=1)[:, tokens - count, np.newaxis]
            masks = np.packbits(own >= least, axis=1)
            code, length = kept_codec.encode_masks(masks, np.bitwise_count(masks).sum(axis=1).astype(np.int64))
            rows.append(code)
            lengths.append(length)
    code_lengths = np.concatenate(lengths)
    return {
        "kept_code": np.concatenate(rows),
        "kept_length": code_lengths.reshape(shape),
        "kept_offset": (np.cumsum(code_lengths) - code_lengths).reshape(shape),
        "kept_count": np.broadcast_to(np.array(counts)[:, np.newaxis, np.newaxis], shape).copy(),
    }


def _random_digests(
    shape: tuple[int, ...], configs: tuple[EvictionConfig, ...], tokens: int, draw: np.random.Generator
) -> dict[str, NDArray[Any]]:
    """Return digest variables with random values, all of them distinct."""
    counts = np.array([_kept_count(one, tokens) for one in configs])[:, np.newaxis, np.newaxis]
    return {DIGEST: draw.integers(1, 2**62, shape), "kept_count": np.broadcast_to(counts, shape).copy()}


def _kept_count(config: EvictionConfig, tokens: int) -> int:
    """Return the number of entries that a configuration's budget, a share, keeps of a prompt; at least 1."""
    return max(1, int(config.budget.value * tokens))


def _prompt_texts(samples: int, tokens: int) -> dict[str, NDArray[Any]]:
    """Return the variables of prompt texts, in words of four digits."""
    text = "".join(f" {index % 9000 + 1000}" for index in range(tokens))
    return {
        "prompt_count": np.full(samples, tokens),
        "prompt_offset": np.arange(samples) * tokens,
        "prompt_token": np.tile(np.arange(tokens, dtype=np.int32), samples),
        "prompt_start": np.tile(np.arange(tokens, dtype=np.int32) * 5, samples),
        "prompt_text": np.array([text] * samples, dtype=object),
    }


_SMALL = {"samples": 8, "layers": 30, "heads": 9}
_LARGE = {"samples": 32, "layers": 32, "heads": 32}
_MOST_TOKENS = 100_000


@dataclass(frozen=True)
class Settings:
    """The options of the benchmark: `tokens` of each prompt, and `repeats` of everything that is timed."""

    tokens: int = 1500
    repeats: int = 5

    def __post_init__(self) -> None:
        check_repeats(self.repeats)
        if not 100 <= self.tokens <= _MOST_TOKENS:
            raise ConfigError(f"--tokens must lie between 100 and {_MOST_TOKENS:,}, got {self.tokens}")


def measure(
    settings: Settings, targets: Sequence[Target], finished: Callable[[str], None] = lambda name: None
) -> Report:
    """Return the report on the rows `targets`; call `finished` with the name of each group of rows when it is done.

    Without a browser its rows have that as the reason instead of a value.
    """
    with tempfile.TemporaryDirectory(prefix="perturbkv-report-") as folder:
        groups = list(_groups(_Rows(settings, Path(folder))))
        return Report(machine("cpu", "auto"), asdict(settings), run_groups(targets, groups, finished))


def _groups(rows: _Rows) -> Iterator[Group]:
    """Yield the groups of rows."""
    yield "small page", ("report-small",), rows.small_page
    yield "first paint", ("report-paint", "report-ready"), rows.first_times
    yield "changes", ("report-change", "report-change-most"), rows.changes
    yield "large page", ("report-large",), rows.large_page


class _Rows:
    """The rows of one run of the benchmark, which share the small page."""

    def __init__(self, settings: Settings, folder: Path) -> None:
        self._settings, self._folder = settings, folder

    def small_page(self) -> Values:
        """Return the row of the small page's megabytes."""
        return {"report-small": self._measure_size("small", _SMALL)}

    def large_page(self) -> Values:
        """Return the row of the large page's megabytes, with many more heads and samples than the small page."""
        return {"report-large": self._measure_size("large", _LARGE)}

    def first_times(self) -> Values:
        """Return the rows of the median seconds until first paint, and until choices are accepted."""
        measured = first_times(self._page("small", _SMALL), self._settings.repeats)
        return {f"report-{name}": (statistics.median(times), {"seconds": times}) for name, times in measured.items()}

    def changes(self) -> Values:
        """Return the rows of the median and the maximum seconds over all changes of choice."""
        changes = change_times(self._page("small", _SMALL), self._settings.repeats)
        times = [one for values in changes.values() for one in values]
        if not times:
            raise ConfigError("expected a page with something to choose, got none")
        return {
            "report-change": (statistics.median(times), {"seconds": changes}),
            "report-change-most": (max(times), {"changes": len(times)}),
        }

    def _measure_size(self, name: str, shape: dict[str, int]) -> tuple[float, dict[str, float]]:
        """Return a page's megabytes, and details: its bytes and the seconds to write it."""
        start = time.perf_counter()
        size = self._page(name, shape).stat().st_size
        return size / 1e6, {"bytes": size, "seconds": time.perf_counter() - start, **shape}

    def _page(self, name: str, shape: dict[str, int]) -> Path:
        """Return the path of a page's file, which the first call writes."""
        path = self._folder / f"{name}.html"
        if not path.exists():
            report(synthetic_trace(shape["samples"], shape["layers"], shape["heads"], self._settings.tokens), path)
        return path
