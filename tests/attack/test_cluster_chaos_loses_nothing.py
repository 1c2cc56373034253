from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.attack.cluster_chaos import KINDS, Accident, accidents, possible
from tests.attack.life import Life
from tests.attack.undisturbed import life

SEED = 1
SHORT = {name: 1 for name, kind in KINDS.items() if kind.in_suite and possible(name)}


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Life]:
    with life(tmp_path_factory.mktemp("chaos")) as made:
        yield made


@pytest.mark.parametrize("one", list(accidents(SEED, SHORT)), ids=lambda one: one.kind)
def test_whatever_befalls_a_run_in_many_processes_it_goes_on_to_the_same_file(one: Accident, place: Life) -> None:
    assert one.flaw(place) is None
