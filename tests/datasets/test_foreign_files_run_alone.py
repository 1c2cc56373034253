from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from perturbkv.datasets.external_code import NoEnd, run_file
from perturbkv.datasets.ruler.samples import WordPairs


def test_imports_are_chosen_and_leave_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "one.py").write_text(
        "from __future__ import annotations\nimport numpy as np\nfrom far.away import thing\nimport json\n"
        "print('heard')\nclass Some: ...\n"
        "def late():\n    from far.away import thing as again\n    print(again)\n    return again\n"
    )
    stand_ins = {"far.away": SimpleNamespace(thing=3), "numpy": SimpleNamespace(name="mine")}
    names = run_file(tmp_path / "one.py", stand_ins.get)
    assert (names["thing"], names["np"].name, names["late"](), names["json"].dumps(1)) == (3, "mine", 3, "1")
    assert "far" not in sys.modules
    assert "one" not in sys.modules
    assert capsys.readouterr().out == ""
    assert run_file(tmp_path / "one.py", stand_ins.get)["Some"] is not names["Some"]


@pytest.mark.parametrize("stop", [KeyboardInterrupt, NoEnd])
def test_a_loop_that_catches_everything_can_be_stopped(stop: type[BaseException], tmp_path: Path) -> None:
    caught = "        try:\n            return attempt()\n        except:\n            pass\n"
    (tmp_path / "loop.py").write_text(f"def tries(attempt):\n    while True:\n{caught}")
    tries = run_file(tmp_path / "loop.py", lambda name: None)["tries"]
    asked = iter([ValueError, stop])

    def attempt() -> None:
        raise next(asked)

    with pytest.raises(stop):
        tries(attempt)


def test_a_package_that_is_missing_is_an_import_error(tmp_path: Path) -> None:
    (tmp_path / "one.py").write_text("import no_such_package_at_all")
    with pytest.raises(ImportError, match="no_such_package_at_all"):
        run_file(tmp_path / "one.py", lambda name: None)


words = st.lists(st.text("ab-", min_size=0, max_size=3), max_size=12)


@given(words, words)
def test_pairs_are_every_pair_sorted_and_once(firsts: list[str], seconds: list[str]) -> None:
    pairs, wanted = WordPairs(firsts, seconds), sorted({f"{first}-{second}" for first in firsts for second in seconds})
    assert len(pairs) == len(wanted)
    assert list(pairs) == wanted
    assert pairs[1:-1:2] == wanted[1:-1:2]
    if wanted:
        assert pairs[-1] == wanted[-1]
    with pytest.raises(IndexError):
        _ = pairs[len(wanted)]
