from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.attack.arena import Arena, arena, can_mount
from tests.attack.chaos import COUNTS, Try, flaw, tries

SEED = 1
SHORT = {**dict.fromkeys(COUNTS, 1), "no room in files": 0}


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Arena]:
    with arena(tmp_path_factory.mktemp("chaos")) as made:
        yield made


@pytest.mark.parametrize("one", list(tries(SEED, SHORT)), ids=lambda one: one.kind)
def test_whatever_happens_the_same_command_goes_on_to_the_same_file(one: Try, place: Arena) -> None:
    if one.kind == "full disk" and not can_mount():
        return  # a limit on files, which needs no rights, is tried beside it
    assert flaw(one, place) is None
