"""What each command prints at 80 columns is its file in `snapshots`; `make snapshots` writes them anew."""

from __future__ import annotations

import pytest

from tests.support.screens import FOLDER, names, path_of, screen


@pytest.mark.parametrize("name", names())
def test_a_screen_is_its_snapshot(name: str) -> None:
    assert screen(name) == path_of(name).read_text(), "make snapshots writes what is shown now"


def test_no_snapshot_is_of_a_command_that_is_gone() -> None:
    assert {path.name for path in FOLDER.glob("*.txt")} == {path_of(name).name for name in names()}
