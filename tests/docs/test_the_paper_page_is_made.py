"""docs/paper.md: its commands leave what its rows read, a killed run goes on, and what is written by hand stays."""

from __future__ import annotations

import json
import resource
import shlex
import shutil
import subprocess
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.support.folders import model_folder
from tests.support.scripts import DOCS, functions, perturbkv, script

FEWER = {"--samples": "4", "--max-new-tokens": "2", "--heads": "1", "--proven": "1", "--permutations": "8"}
FEWER |= {"--compress-every": "400", "--max-tokens": "400"}
"""What makes a command small, of a model whose tokens are bytes."""
UNDECIDED = {"supports", "contradicts", "undecided", "answered", "not measured"}


@pytest.fixture(scope="module")
def longbench(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("longbench")
    text = "The river is wide and slow. " * 14
    rows = [{"_id": f"n{place}", "input": "", "context": f"{place} {text}", "answers": ["slow"]} for place in range(5)]
    (folder / "multi_news.jsonl").write_text("\n".join(map(json.dumps, rows)))
    chats = [{"prompt": f"{place} {text}", "answers": ["slow"], "id": f"c{place}"} for place in range(5)]
    (folder / "chats.jsonl").write_text("\n".join(map(json.dumps, chats)))
    return folder


@pytest.fixture(scope="module")
def output(tmp_path_factory: pytest.TempPathFactory, longbench: Path) -> Path:
    """What every command of the page leaves, of a tiny model."""
    output = tmp_path_factory.mktemp("paper")
    model = model_folder(output / "tiny", positions=1200)
    for step in functions("paper_steps")["STEPS"]:
        calls = step.calls(longbench, output)
        for call in calls:
            perturbkv(*_small(call, model, longbench))
        (output / step.name / "step.json").write_text(json.dumps({"calls": calls, "seconds": 90.0}))
    return output


def _small(call: list[str], model: Path, longbench: Path) -> list[str]:
    fewer = FEWER | ({"--max-tokens": "200"} if "regret" in call else {})  # a set is proved best
    words = [fewer.get(before, word) for before, word in zip(["", *call], call, strict=False)]
    words = [word.replace(",ruler:vt,ruler:fwe", "") for word in words]
    words = [str(longbench / "chats.jsonl") if word.endswith("paper_chats.jsonl") else word for word in words]
    finished = any(word.endswith(("trace.h5", ".jsonl")) for word in words) and call[0] != "generate"
    return words if finished else [*words, "--model", str(model)]


def _page(longbench: Path, output: Path, page: Path) -> dict[str, list[list[str]]]:
    """The page's rows, by section."""
    shutil.copy(DOCS / "paper.md", page)
    script("paper", longbench, "--output", output, "--page", page, "--read")
    sections: dict[str, list[list[str]]] = {}
    for line in page.read_text().splitlines():
        if line.startswith("## "):
            sections[line[3:]] = []
        elif line.startswith("| ") and sections:
            sections[[*sections][-1]].append([cell.strip() for cell in line.strip("|").split(" | ")])
    return {title: rows[2:] for title, rows in sections.items() if rows}


@pytest.mark.slow
def test_every_row_is_read_from_what_its_command_leaves(longbench: Path, output: Path, tmp_path: Path) -> None:
    sections = _page(longbench, output, tmp_path / "paper.md")
    rows = [row for title in functions("paper")["SECTIONS"] for row in sections[title]]
    assert len(rows) > 40
    for row in rows:
        assert row[2], row
        said = {part.rstrip("0123456789 ") for part in row[3].strip("*").split(", ")}
        assert said <= UNDECIDED, row
        assert "{" not in row[2] and "None" not in row[2], row
    costs = {row[0] for row in sections["What it would cost"]}
    assert {name for row in rows for name in row[5].split(", ")} == costs


def test_of_what_is_not_finished_nothing_is_said(longbench: Path, tmp_path: Path) -> None:
    sections = _page(longbench, tmp_path / "nothing", tmp_path / "paper.md")
    assert {row[3] for row in sections["Bounds and Assumption 1"]} == {"**not measured**"}
    assert {row[2] for row in sections["Bounds and Assumption 1"]} == {""}
    assert "# heads: not finished" in (tmp_path / "paper.md").read_text()
    by_hand = [line for line in (DOCS / "paper.md").read_text().splitlines() if line and line[0] not in "|#`p"]
    assert all(line in (tmp_path / "paper.md").read_text() for line in by_hand)


def test_a_page_without_its_marks_is_refused() -> None:
    with pytest.raises(ValueError, match="expected <!-- Steps: begin --> … <!-- Steps: end --> in the page"):
        functions("paper")["replaced"]("text", "Steps", "rows")


def test_a_killed_run_goes_on_and_a_finished_step_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    steps, called, clock = functions("paper_steps"), [], iter(range(100))

    def run(words: list[str], check: bool) -> None:
        called.append(words[3])
        (tmp_path / "a").mkdir(exist_ok=True)
        if called == ["trace", "heads"]:
            raise subprocess.CalledProcessError(1, words)

    monkeypatch.setattr(subprocess, "run", run)
    monkeypatch.setattr(resource, "getrusage", lambda who: SimpleNamespace(ru_utime=next(clock), ru_stime=0.5))
    made = [steps["Step"]("a", ("trace --data-dir {longbench}", "heads {folder}/trace.h5"))]
    with pytest.raises(subprocess.CalledProcessError):
        steps["run"](made, Path("data"), tmp_path)
    assert steps["seconds"](made[0], Path("data"), tmp_path) is None
    assert json.loads((tmp_path / "a" / "spent.json").read_text()) == 2
    steps["run"](made, Path("data"), tmp_path)
    steps["run"](made, Path("data"), tmp_path)
    assert called == ["trace", "heads"] * 2
    assert steps["seconds"](made[0], Path("data"), tmp_path) == 4
    assert steps["seconds"](made[0], Path("other"), tmp_path) is None


def test_every_step_took_less_than_its_limit_and_all_less_than_two_hours() -> None:
    text = (DOCS / "paper.md").read_text()
    took = [line.rpartition(": ")[2] for line in text.splitlines() if line.startswith("# ") and line.endswith(" min")]
    minutes = [int(one.removesuffix(" min")) for one in took]
    assert len(minutes) == len(functions("paper_steps")["STEPS"])
    assert max(minutes) <= functions("paper_steps")["LIMIT"] / 60
    assert sum(minutes) < 120


def test_commands_stand_in_the_page_as_they_are_run() -> None:
    text = (DOCS / "paper.md").read_text()
    for step in functions("paper_steps")["STEPS"]:
        for command in step.shown():
            assert command in text
            assert shlex.split(command)[0] == "perturbkv"


def _ends(low: float, high: float) -> dict[str, Any]:
    return {"low": low, "high": high, "kind": "interval"}


def test_verdicts_follow_the_interval() -> None:
    read = functions("paper_read")
    of = read["verdict"]
    assert [of(_ends(*ends), 1, -1) for ends in ((0.5, 0.9), (1.1, 1.2), (0.9, 1.1))] == [
        "supports",
        "contradicts",
        "undecided",
    ]
    assert of(_ends(0.6, 0.7), 0.5, 1) == "supports"
    assert of(None, 1, 1) == of({"low": 2.0, "high": 3.0, "kind": "range"}, 1, 1) == "undecided"
    assert read["joined"](["supports", "supports"]) == "supports"
    assert read["joined"]([]) == "undecided"
    assert read["joined"](["undecided", "supports", "undecided"]) == "supports 1, undecided 2"


def test_two_numbers_are_told_apart_where_their_intervals_part() -> None:
    lower = functions("paper_read")["lower"]
    apart, over = (_ends(0.1, 0.2), _ends(0.3, 0.4)), (_ends(0.1, 0.3), _ends(0.3, 0.4))
    assert [lower(*apart), lower(*apart[::-1]), lower(*over)] == ["supports", "contradicts", "undecided"]
    assert lower(None, apart[0]) == lower(apart[0], {**apart[1], "kind": "range"}) == "undecided"


def test_costs_come_from_shapes_and_the_measured_rate() -> None:
    cost = functions("paper_cost")
    shape = cost["Shape"](100.0, 2, 3)
    assert shape.prefill(10) == 2 * 100 * 10 + 2 * 10 * 10 * 3 * 2
    one = cost["Settling"]("a", "b", (10,), 4, 5, answer=6, runs=1, shape=shape)
    assert one.operations(2.0) == 3 * 4 * shape.prefill(10) + 2 * 100 * 4 * 5 * 6
    assert one.read() == 2 * 100 * 4 * 6
