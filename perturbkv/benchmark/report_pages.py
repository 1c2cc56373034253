"""Rows on a report: the size of its page, its loading time in headless Chromium, and how fast it follows a choice.

The pages show synthetic traces of any size: numbers of plausible spread, kept sets that share most of their entries.
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

from perturbkv import kept_codec
from perturbkv.benchmark.rows import NO_BROWSER, Report, Target
from perturbkv.benchmark.subprocesses import machine
from perturbkv.benchmark.suite import Found, Group, check_repeats, reported
from perturbkv.configs.eviction import EvictionConfig
from perturbkv.configs.run import RunConfig
from perturbkv.errors import ConfigError, PerturbkvError
from perturbkv.reporting.report import report
from perturbkv.schema import DIGEST, KEPT, ROWS, TEXT, VARIABLES, Variable
from perturbkv.selection.grid import configuration
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
    """Return the seconds from opening the file until the first paint and until choices can be made, in new windows.

    Raises ConfigError where there is no browser, PerturbkvError where the page does not load.
    """
    found: dict[str, list[float]] = {"paint": [], "ready": []}
    with _chromium() as browser:
        for _ in range(repeats):
            page = _open(browser, path)
            for name, asked in (("paint", _PAINTED), ("ready", _READY)):
                found[name].append(_wait(page, asked) / 1000)
            page.context.close()
    return found


def change_times(path: Path, repeats: int) -> dict[str, list[float]]:
    """Return the seconds of each change of choice, by the choice and the part on the screen.

    Raises ConfigError where there is no browser, PerturbkvError where the page does not measure its changes.
    """
    found: dict[str, list[float]] = {}
    with _chromium() as browser:
        page = _open(browser, path)
        _wait(page, _WHOLE)
        for part in _PARTS:
            page.evaluate("(id) => document.getElementById(id)?.scrollIntoView()", part)
            for name in ("baseline", "treatment", "budget", "measure", "sample"):
                own = [_change_seconds(page, name) for _ in range(repeats)]
                found[f"{name}, {part} on the screen"] = [one for one in own if one is not None]
        page.context.close()
    return found


@contextmanager
def _chromium() -> Iterator[Any]:
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
        msg = f"the browser failed: {str(error).splitlines()[0]}"
        raise PerturbkvError(msg) from None


def _open(browser: Any, path: Path) -> Any:
    page = browser.new_context(viewport={"width": 1280, "height": 900}).new_page()
    page.goto(path.resolve().as_uri())
    return page


def _change_seconds(page: Any, name: str) -> float | None:
    """Return the seconds of one change; None where there is nothing to choose."""
    before = len(page.evaluate(_CHANGES))
    if not page.evaluate(_CHOOSE, [name, 1]):
        return None
    spent = _poll(page, lambda: (page.evaluate(_CHANGES)[before:] or [None])[0], f"a change of {name}")
    return spent / 1000


def _wait(page: Any, asked: str) -> float:
    return _poll(page, lambda: page.evaluate(asked), asked)


def _poll(page: Any, ask: Callable[[], Any], what: str) -> float:
    """Return the first answer that is not None, asking again and again, as the page's policy forbids waiting in it."""
    end = time.perf_counter() + _LONGEST
    while time.perf_counter() < end:
        if (found := ask()) is not None:
            page.wait_for_timeout(200)  # let what is drawn when nothing else is to be done come to its end
            return float(found)
        page.wait_for_timeout(20)
    msg = f"expected {what} within {_LONGEST:g} seconds, got nothing"
    raise PerturbkvError(msg)


_SHARES = ("sigma_topk", "sigma_stage1", "retained_mass")
_LOST = 10
"""Lost entries per head, as many as `measure` stores."""
_OWN_NOISE = 0.3
"""Standard deviation of a configuration's own preferences, over that of the common ones."""
_MADE_HERE = {*KEPT, DIGEST, *TEXT, *(name for pair in ROWS.values() for name in pair)}


def sweep(sides: int = 8, budgets: tuple[float, ...] = (0.1, 0.2, 0.4)) -> tuple[EvictionConfig, ...]:
    """Return `sides` × `budgets` configurations: two policies with four selections each, or the first of these."""
    names = ("attention", "two-stage", "attention-unpooled", "two-stage-uniform")
    both = [(policy, name) for policy in ("snapkv", "adakv") for name in names][:sides]
    return tuple(configuration(budget, policy=policy, selection=name) for budget in budgets for policy, name in both)


def made_trace(
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
    """Return a synthetic trace of this size, of a sweep of 24 or of `configs`, with prompts and each head's losses.

    `kept`: with the positions of kept sets, else with their digests alone.
    """
    draw, configs = np.random.default_rng(seed), configs or sweep()
    sizes = {"sample": samples, "config": len(configs), "step": steps, "layer": layers, "head": heads}
    sizes["lost_entry"] = _LOST
    arrays: dict[str, NDArray[Any]] = {
        name: _numbers(name, variable, tuple(sizes[axis] for axis in variable.axes), draw)
        for name, variable in VARIABLES.items()
        if _is_drawn(name, variable, sizes)
    }
    arrays |= {"prompt_tokens": np.full(samples, tokens), "steps_measured": np.full(samples, steps)}
    arrays["question_tokens"] = np.zeros(samples, dtype=np.int64)
    arrays["evicted"] = np.ones((samples, len(configs)), dtype=np.uint8)
    shape = (samples, len(configs), layers, heads)
    arrays |= _kept(shape, configs, tokens, draw) if kept else _digests(shape, configs, tokens, draw)
    arrays |= _texts(samples, tokens)
    run = RunConfig(model="made", dataset="made", configs=configs, samples=samples, steps=steps)
    return Trace(run, tuple(f"p{place}" for place in range(samples)), arrays)


def _is_drawn(name: str, variable: Variable, sizes: Mapping[str, int]) -> bool:
    others = name in _MADE_HERE or variable.in_rows or variable.dtype == "str"
    return not others and set(variable.dims) <= sizes.keys()


def _numbers(name: str, variable: Variable, shape: tuple[int, ...], draw: np.random.Generator) -> NDArray[Any]:
    if np.dtype(variable.dtype).kind != "f":
        return draw.integers(0, 2, shape).astype(variable.dtype)
    if name in _SHARES:
        return draw.beta(4, 1.5, size=shape)
    unit = 1e-6 if "noise_floor" in name else 1.0
    return (unit * draw.lognormal(sigma=1.3, size=shape)).astype(variable.dtype)


def _kept(
    shape: tuple[int, ...], configs: tuple[EvictionConfig, ...], tokens: int, draw: np.random.Generator
) -> dict[str, NDArray[Any]]:
    """Return kept sets of the entries with the largest random scores, which configurations nearly share.

    In the first layer the first two configurations have equal scores: heads of equal sets are tied.
    """
    counts, rows, lengths = [_count(one, tokens) for one in configs], [], []
    for _ in range(shape[0]):
        liked = draw.normal(size=(shape[2] * shape[3], tokens)).astype(np.float32)
        for place, count in enumerate(counts):
            own = liked + np.float32(_OWN_NOISE) * draw.normal(size=liked.shape).astype(np.float32)
            own[: shape[3]] = liked[: shape[3]] if place < 2 else own[: shape[3]]
            least = np.partition(own, tokens - count, axis=1)[:, tokens - count, np.newaxis]
            masks = np.packbits(own >= least, axis=1)
            code, length = kept_codec.encode_masks(masks, np.bitwise_count(masks).sum(axis=1).astype(np.int64))
            rows.append(code)
            lengths.append(length)
    each = np.concatenate(lengths)
    return {
        "kept_code": np.concatenate(rows),
        "kept_length": each.reshape(shape),
        "kept_offset": (np.cumsum(each) - each).reshape(shape),
        "kept_count": np.broadcast_to(np.array(counts)[:, np.newaxis, np.newaxis], shape).copy(),
    }


def _digests(
    shape: tuple[int, ...], configs: tuple[EvictionConfig, ...], tokens: int, draw: np.random.Generator
) -> dict[str, NDArray[Any]]:
    """Return random digests, so that no two sets are equal."""
    counts = np.array([_count(one, tokens) for one in configs])[:, np.newaxis, np.newaxis]
    return {DIGEST: draw.integers(1, 2**62, shape), "kept_count": np.broadcast_to(counts, shape).copy()}


def _count(config: EvictionConfig, tokens: int) -> int:
    """Return the number of entries that a budget keeps."""
    return max(1, int(config.budget.value * tokens))


def _texts(samples: int, tokens: int) -> dict[str, NDArray[Any]]:
    """Return prompts of words of four characters each."""
    text = "".join(f" {place % 9000 + 1000}" for place in range(tokens))
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
_MILLION = 1e6


@dataclass(frozen=True)
class Settings:
    """The benchmark's options: `tokens` of each prompt, and `repeats` of everything that is timed."""

    tokens: int = 1500
    repeats: int = 5

    def __post_init__(self) -> None:
        check_repeats(self.repeats)
        if not 100 <= self.tokens <= _MOST_TOKENS:
            msg = f"--tokens must lie between 100 and {_MOST_TOKENS:,}, got {self.tokens}"
            raise ConfigError(msg)


def measure(
    settings: Settings, targets: Sequence[Target], finished: Callable[[str], None] = lambda name: None
) -> Report:
    """Measure the rows of these targets; `finished` gets each group's name.

    Without a browser its rows have that as their reason.
    """
    with tempfile.TemporaryDirectory(prefix="perturbkv-report-") as folder:
        groups = list(_groups(_Rows(settings, Path(folder))))
        return reported(machine("cpu", "auto"), asdict(settings), targets, groups, finished)


def groups(settings: Settings) -> int:
    """Return the number of groups that `measure` goes through."""
    return len(list(_groups(_Rows(settings, Path()))))


def _groups(rows: _Rows) -> Iterator[Group]:
    yield "small page", ("report-small",), rows.small
    yield "first paint", ("report-paint", "report-ready"), rows.first_times
    yield "changes", ("report-change", "report-change-most"), rows.changes
    yield "large page", ("report-large",), rows.large


class _Rows:
    """The rows of one run, which share the page that is opened."""

    def __init__(self, settings: Settings, folder: Path) -> None:
        self._settings, self._folder = settings, folder

    def small(self) -> Found:
        """Return the megabytes of the page that is opened."""
        return {"report-small": self._size("small", _SMALL)}

    def large(self) -> Found:
        """Return the megabytes of a page of many more heads and samples."""
        return {"report-large": self._size("large", _LARGE)}

    def first_times(self) -> Found:
        """Return the medians of the seconds until first paint and until ready."""
        found = first_times(self._page("small", _SMALL), self._settings.repeats)
        return {f"report-{name}": (statistics.median(times), {"seconds": times}) for name, times in found.items()}

    def changes(self) -> Found:
        """Return the median and the maximum of all changes, in seconds."""
        found = change_times(self._page("small", _SMALL), self._settings.repeats)
        times = [one for own in found.values() for one in own]
        if not times:
            msg = "expected a page with something to choose, got none"
            raise ConfigError(msg)
        return {
            "report-change": (statistics.median(times), {"seconds": found}),
            "report-change-most": (max(times), {"changes": len(times)}),
        }

    def _size(self, name: str, shape: dict[str, int]) -> tuple[float, dict[str, float]]:
        start = time.perf_counter()
        size = self._page(name, shape).stat().st_size
        return size / _MILLION, {"bytes": size, "seconds": time.perf_counter() - start, **shape}

    def _page(self, name: str, shape: dict[str, int]) -> Path:
        """Return the page's file, made when it is first needed."""
        path = self._folder / f"{name}.html"
        if not path.exists():
            report(made_trace(shape["samples"], shape["layers"], shape["heads"], self._settings.tokens), path)
        return path
