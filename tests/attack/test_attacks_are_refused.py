from __future__ import annotations

from pathlib import Path

import pytest

from tests.attack.parts import NAMES, part
from tests.attack.running import attack

SEED, COUNT = 1, 20


@pytest.mark.parametrize("name", NAMES)
def test_each_attack_ends_in_one_line_or_in_the_right_answer(name: str, tmp_path: Path) -> None:
    broken = {case.name: flaw for case in part(name).cases(tmp_path, SEED, COUNT) if (flaw := attack(case))}
    assert not broken
