"""Former commands and options: one line that names what replaced them, and exit code 2; what never was is unknown."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from perturbkv.cli.commands import FORMER
from tests.support.asked import refused

Run = Callable[..., Any]


@pytest.mark.parametrize("former", FORMER)
def test_what_is_gone_names_what_replaced_it(perturbkv: Run, former: str) -> None:
    for more in ([], ["trace.h5"], ["--nothing"]):
        refused(perturbkv(*former.split(), *more), f"got the former one `{former}`; {FORMER[former]}")


@pytest.mark.parametrize(("former", "listed"), [("doctor card", "doctor"), ("heads --card", "heads")])
def test_a_row_is_all_that_a_former_command_or_option_needs(
    perturbkv: Run, monkeypatch: pytest.MonkeyPatch, former: str, listed: str
) -> None:
    assert "former" not in perturbkv(*former.split()).err
    monkeypatch.setitem(FORMER, former, "type: another")
    refused(perturbkv(*former.split()), f"that `perturbkv {listed} -h` lists, got the former one `{former}`; type: a")


def test_a_row_says_nothing_of_what_exists(perturbkv: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    for former in ("list policies", "list policies --json", "doctor"):
        monkeypatch.setitem(FORMER, former, "type: another")
    assert perturbkv("list", "policies", "--json").code == 0
    assert "former" not in perturbkv("doctor", "nothing").err


def test_a_former_command_is_told_as_json(perturbkv: Run) -> None:
    ran = perturbkv("question", "alpha", "trace.h5", "--json")
    assert (ran.code, ran.json()["error"]["exit_code"]) == (2, 2)
    assert "studies/alpha.py" in ran.json()["error"]["message"]
