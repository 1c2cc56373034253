"""The version, the short help, errors for programs, every screen."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import perturbkv as pk
from perturbkv import errors
from perturbkv.cli.commands import FORMER
from perturbkv.cli.options import RARE
from tests.support.asked import refused
from tests.support.commands import command_of, every_command, row_of
from tests.support.screens import FOLDER, path_of, screen
from tests.support.screens import names as screen_names

Run = Callable[..., Any]


def test_the_version_is_the_packages(perturbkv: Run) -> None:
    ran = perturbkv("--version")
    assert (ran.code, ran.out.strip()) == (0, f"perturbkv {pk.__version__}")


@pytest.mark.parametrize("command", [[], ["heads"], ["doctor", "selfcheck"]])
def test_h_is_help(perturbkv: Run, command: list[str]) -> None:
    short, long = perturbkv(*command, "-h"), perturbkv(*command, "--help")
    assert short.code == long.code == 0
    assert short.out == long.out != ""


MOST_LINES = {"trace": 63}
"""`trace` alone shows every option of measuring."""


@pytest.mark.parametrize("words", [(), *every_command()], ids=" ".join)
def test_help_is_one_screen_that_tells_of_every_option(perturbkv: Run, words: tuple[str, ...]) -> None:
    """At most 45 lines of 80 columns; behind each option what it does."""
    screen = perturbkv(*words, "--help").out
    assert len(screen.splitlines()) <= MOST_LINES.get(" ".join(words), 45)
    assert max(map(len, screen.splitlines())) <= 80
    if words:
        assert not any(missing_in(screen, parameter) for parameter in parameters(words))
        assert screen.splitlines()[1].rstrip(". ") == row_of(words).summary


def test_trace_alone_tells_of_all_options_of_measuring() -> None:
    hidden = [one.name for one in command_of(["trace"]).params if one.hidden]
    assert hidden == []
    assert {one.name for one in command_of(["heads"]).params if one.hidden} == set(RARE)


def test_help_names_the_texts_and_prompts_that_it_hides(perturbkv: Run) -> None:
    assert perturbkv("heads", "-h").out.rstrip().endswith("(--text, --prompts, --save, …): perturbkv trace -h")
    assert perturbkv("quality", "-h").out.rstrip().endswith("(--prompts, --save, …): perturbkv trace -h")
    assert perturbkv("generate", "-h").out.rstrip().endswith("More options of measuring: perturbkv trace -h")


def test_the_command_alone_shows_tasks_that_can_be_typed(perturbkv: Run) -> None:
    ran = perturbkv()
    lines = [line.split() for line in ran.out.splitlines() if line.startswith("  perturbkv ")]
    assert (ran.code, len(lines)) == (0, 6)
    for _, name, *words in lines:
        known = {option for one in command_of([name]).params for option in one.opts}
        assert {word for word in words if word.startswith("-")} <= known


def parameters(words: tuple[str, ...]) -> list[Any]:
    """The options and arguments that the help of a command shows."""
    return [one for one in command_of(words).params if not one.hidden]


def missing_in(screen: str, parameter: Any) -> bool:
    """Whether no line begins with the parameter's names and goes on with the beginning of its help."""
    argument = parameter.param_type_name == "argument"
    names = (
        [(parameter.metavar or parameter.name).upper().strip("[].")]
        if argument
        else [name.replace("--no-", "--[no-]") for name in parameter.opts]
    )
    names = [f"--[no-]{name[2:]}" if parameter.secondary_opts else name for name in names]
    about = parameter.help.split()[0]
    return not re.search(rf"^  {re.escape(', '.join(names))}( \S+)? +{re.escape(about)}", screen, re.MULTILINE)


def test_an_option_without_a_line_or_without_words_is_found() -> None:
    (policy,) = [one for one in parameters(("heads",)) if one.name == "policy"]
    line = f"  --policy NAME…          {policy.help}"
    assert not missing_in(line, policy)
    assert missing_in(line.replace("--policy", "--polciy"), policy)
    assert missing_in("  --policy NAME…  [snapkv]", policy)


SWEEPS = {
    "quality": ["0.1", "0.2", "0.4"],
    "correlation": ["0.1", "0.2", "0.4"],
    "layers": ["0.025", "0.05", "0.1", "0.2", "0.4"],
    "bound-tightness": ["0.025", "0.05", "0.1", "0.2", "0.4"],
    "assumption": ["0.025", "0.05", "0.1", "0.2", "0.4"],
}
"""Commands about budgets -> those that are measured when nobody names any."""


@pytest.mark.parametrize("command", [*SWEEPS, "heads"])
def test_help_shows_the_budgets_that_are_measured(perturbkv: Run, model: Path, command: str) -> None:
    screen = " ".join(perturbkv(command, "--help").out.split())
    shown = screen.partition("128, 0.05 [")[2].partition("]")[0].split()
    assert shown == SWEEPS.get(command, ["128"])
    row = {"prompt": "The quick brown fox jumps over the lazy dog. " * 4, "answers": ["a fox"]}
    Path("prompts.jsonl").write_text(json.dumps(row))
    asked = ["--model", model, "--dataset", "prompts.jsonl", "--window", 1, "--dry-run", "--json"]
    planned = perturbkv(command, *asked).json()
    kept = planned["runs"][0]["kept"] if "runs" in planned else planned["kept"]
    assert [str(one) for one in dict.fromkeys(one["config"]["budget"] for one in kept)] == shown


def test_an_error_is_a_document_too_where_json_is_asked_for(perturbkv: Run) -> None:
    ran = perturbkv("heads", "nothere.h5", "--json")
    assert ran.code == 2
    assert ran.json()["error"]["type"] == "TraceError"
    assert ran.err.strip() == f"error: {ran.json()['error']['message']}"
    assert perturbkv("heads", "nothere.h5").out == ""
    typo = perturbkv("heads", "--polciy", "snapkv", "--json")
    assert (typo.code, typo.json()["error"]["exit_code"]) == (2, 2)


@pytest.mark.parametrize(
    "words",
    [
        ["heads", "--json", "--polciy", "snapkv"],
        ["heads", "--json", "--budget"],
        ["haeds", "nothere.h5", "--json"],
        ["doctor", "selfchek", "--json"],
    ],
)
def test_a_line_that_cannot_be_read_whole_has_asked_for_json_all_the_same(perturbkv: Run, words: list[str]) -> None:
    ran = perturbkv(*words)
    assert (ran.code, ran.json()["error"]["exit_code"]) == (2, 2)


@pytest.mark.parametrize(
    ("name", "options"),
    [
        (
            "adakv",
            {
                "floor": 0.2,
                "safeguard": "mixture",
                "by": "own",
                "pool": "max",
                "kernel": 7,
                "window_queries": "all",
                "positions": "kept",
                "keep": "best",
            },
        ),
        ("snapkv", {"pool": "max", "kernel": 7, "window_queries": "all", "positions": "kept", "keep": "best"}),
        ("query", {"block": 1, "block_score": "sum"}),
        (
            "two-stage",
            {"alpha": 0.25, "split": "prefix", "score": "accumulated", "epsilon": 0.0, "norm": "l1", "gate": "window"},
        ),
    ],
)
def test_a_policy_tells_its_options(perturbkv: Run, name: str, options: dict[str, Any]) -> None:
    document = perturbkv("list", "policies", name, "--json").json()
    assert {option: one["default"] for option, one in document["options"].items()} == options
    shown = perturbkv("list", "policies", name)
    assert shown.code == 0
    assert all(len(line) <= 80 for line in shown.out.splitlines())
    assert all(option in shown.out for option in options)
    assert perturbkv("list", "policies", "adavk").code == 2


SCORE = """
from dataclasses import dataclass
import perturbkv as pk

@dataclass(frozen=True)
class P(pk.Score):
    {doc}
    tau: float = pk.option(1.0, "exponent")

    def score(self, layer):
        return layer.attention[..., : layer.prefix].amax(dim=1)
"""


@pytest.mark.parametrize(
    ("doc", "first"),
    [('"""The largest attention.\n\n    More."""', "my.py:P: The largest attention."), ("", "my.py:P")],
)
def test_a_score_of_a_file_says_what_its_docstring_says(perturbkv: Run, doc: str, first: str) -> None:
    Path("my.py").write_text(SCORE.format(doc=doc))
    shown = perturbkv("list", "policies", "my.py:P")
    assert shown.code == 0, shown.err
    assert shown.out.splitlines()[0] == first


def test_a_choice_with_options_is_described(perturbkv: Run) -> None:
    Path("my.py").write_text(SCORE.format(doc=""))
    shown = " ".join(perturbkv("list", "policies", "adakv(my.py:P)").out.split())
    assert shown.startswith("adakv(by=my.py:P): snapkv's score; a layer's heads compete for its budget")
    assert "`perturbkv list policies 'my.py:P'`" in shown
    assert "two-stage(alpha=0.5)" in perturbkv("list", "policies", "two-stage(alpha=0.5)").out


def test_what_can_be_chosen_is_listed_once_and_what_cannot_is_not(
    perturbkv: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(errors.UnknownNameError, "_MANY", 10**6)
    known = perturbkv("list", "policies", "nope").err.partition("known: ")[2].strip().split(", ")
    assert len(known) == len(set(known))
    assert {"random", "two-stage", "kv"} <= set(known)
    assert "given" not in known
    assert not re.search(r"^given\b", perturbkv("list", "policies").out, re.MULTILINE)
    assert "given" not in perturbkv("trace", "--selection", "nope").err


def test_options_are_written_behind_their_policy(perturbkv: Run) -> None:
    asked = ["--policy", "adakv(floor=0.1)", "--policy", "snapkv", "--model", "random:smollm2-135m", "--samples", 1]
    kept = perturbkv("trace", *asked, "--length", 200, "--budget", 64, "--dry-run", "--json").json()["kept"]
    assert [one["config"]["policy"] for one in kept] == ["adakv(floor=0.1)"] * 2 + ["snapkv"] * 2
    assert kept[0]["config"]["policy_options"] == {"floor": 0.1, "safeguard": "mixture", "pool": "max", "kernel": 7}


@pytest.mark.parametrize("name", screen_names())
def test_a_screen_is_its_snapshot(name: str) -> None:
    assert screen(name) == path_of(name).read_text(), "make snapshots writes what is shown now"


def test_no_snapshot_is_of_a_command_that_is_gone() -> None:
    assert {path.name for path in FOLDER.glob("*.txt")} == {path_of(name).name for name in screen_names()}


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
