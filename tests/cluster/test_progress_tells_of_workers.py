"""One bar for all workers: how many samples, how fast, how long still, and how many workers are there."""

from __future__ import annotations

import io
import re
import time
from typing import Any

import pytest
from rich.console import Console

from perturbkv.pipeline import progress
from perturbkv.pipeline.progress import bar


@pytest.mark.slow
def test_a_terminal_of_eighty_columns_shows_all_of_it() -> None:
    screen = Console(file=io.StringIO(), force_terminal=True, width=80, color_system=None)
    with bar("samples", console=screen, status=lambda: "7 of 8 workers") as drawn:
        for done in range(990, 1000):
            drawn.update(done, 10_000)
            time.sleep(0.12)
    lines = [line.rstrip() for line in re.split(r"[\r\n]", screen.file.getvalue())]  # type: ignore[attr-defined]
    whole = [line for line in lines if re.search(r"samples .* 99\d/10000 +\d.*/min left \d.* 7 of 8 workers", line)]
    assert whole
    assert max(map(len, whole)) < 90, "signs that move the cursor among them"


def test_a_bar_of_one_process_is_as_it_was() -> None:
    screen = Console(file=io.StringIO(), force_terminal=True, width=80, color_system=None)
    with bar("samples", console=screen) as drawn:
        drawn.update(1, 2)
        time.sleep(0.2)
    shown = screen.file.getvalue()  # type: ignore[attr-defined]
    assert "workers" not in shown
    assert "/min" not in shown


def test_a_notebook_shows_all_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    shown: list[dict[str, str]] = []

    class Handle:
        def update(self, found: dict[str, str], raw: bool) -> None:
            shown.append(found)

    clock: Any = iter(range(0, 1000, 30))
    monkeypatch.setattr(progress.time, "monotonic", lambda: next(clock))
    drawn = progress._NotebookBar(Handle(), "samples", None, 0, lambda: "2 of 2 workers")
    drawn.update(0, 4)
    drawn.update(2, 4)
    said = shown[-1]["text/plain"]
    assert said == "samples: 2 of 4, 0:01:30, about 0:01:30 left, 1.33/min, 2 of 2 workers"
