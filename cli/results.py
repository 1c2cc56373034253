"""How a result leaves: what to conclude first, its figures' places and its tables, what they mean once."""

from __future__ import annotations

from typing import TYPE_CHECKING

from perturbkv.cli import console
from perturbkv.cli.study import Study
from perturbkv.display import show

if TYPE_CHECKING:
    from perturbkv.analyses.result import Result


def finish(study: Study, result: Result) -> None:
    """Print a result of a study, or its numbers as JSON, and write these into summary.json."""
    if not study.as_json:
        console.say(result.conclusion(), bold=True)
    study.finish(result.to_dict(), lambda: _rest(result))


def _rest(result: Result) -> None:
    for part in result.tables():
        show(console.out, part)
    console.say(result.notes())
