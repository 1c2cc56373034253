"""Tests of figures draw in the package's style, as `perturbkv.figures.draw` does."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from perturbkv.figures import style


@pytest.fixture(autouse=True)
def in_style() -> Iterator[None]:
    with style.use():
        yield
