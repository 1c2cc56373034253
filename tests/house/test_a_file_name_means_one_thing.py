"""Two files share a name only where they are of the same thing: a question, a method's paper, a public word."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
FOLDERS = ("perturbkv", "analyses", "figures", "cli")
SAME = {
    "eviction": "a way to evict, and the commands that ask what it does",
    "sides": "sides of a comparison, and those that a report compares",
    "searching": "searches for the best kept sets, for notebooks and by a run",
    "trace": "a trace, and the command that makes one",
}
"""Further names of several files, and what they are all of."""


def files() -> set[Path]:
    return {path.relative_to(ROOT) for folder in FOLDERS for path in (ROOT / folder).rglob("*.py")}


def questions() -> set[str]:
    """A folder of `analyses` is a question, but for the statistics."""
    return {path.parent.name for path in (ROOT / "analyses").rglob("__init__.py")} - {"analyses", "stats"}


def methods(paths: Iterable[Path]) -> set[str]:
    """Scores, of which some are a policy's own."""
    return {path.stem for path in paths if path.parent.name == "scores"}


def ambiguous(paths: Iterable[Path]) -> dict[str, list[str]]:
    """Names of several files that are of different things."""
    named, all_paths = defaultdict(list), sorted(paths)
    for path in all_paths:
        if path.stem != "__init__":
            named[path.stem].append(str(path))
    fine = {*SAME, *questions(), *methods(all_paths)}
    return {name: places for name, places in named.items() if len(places) > 1 and name not in fine}


def test_no_two_files_of_different_meaning_share_a_name() -> None:
    assert ambiguous(files()) == {}


def test_a_planted_second_meaning_is_found() -> None:
    assert set(ambiguous({*files(), Path("perturbkv/cache/plan.py")})) == {"plan"}


def test_every_excepted_name_is_that_of_several_files() -> None:
    stems = [path.stem for path in files()]
    assert [name for name in SAME if stems.count(name) < 2] == []
