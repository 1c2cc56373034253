"""`quality`: a trace per data set from one model, tables and figure of all of them, and what it refuses beforehand."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from perturbkv.pipeline.run.plan import Plan
from perturbkv.storage.trace.trace_file import read_run
from tests.support.asked import refused
from tests.support.graded import graded

Run = Callable[..., Any]
TABLES = {"quality.tex", "quality.md", "quality.csv"}


def prompts(path: Path, count: int, *, answered: bool = True) -> Path:
    """Prompts of 185 tokens, others in each file; the model's answers are no numbers, so that they all score 0."""
    text = "The quick brown fox jumps over the lazy dog. " * 4
    answers = {"answers": ["17"]} if answered else {}
    path.write_text(
        "\n".join(json.dumps({"id": f"p{i}", "prompt": f"{path.stem[i]} {text}", **answers}) for i in range(count))
    )
    return path


@pytest.fixture
def two(perturbkv: Run) -> str:
    """Two data sets in the folder where commands run."""
    prompts(Path("first.jsonl"), 2)
    prompts(Path("second.jsonl"), 3)
    return "first.jsonl,second.jsonl"


@pytest.fixture
def small(model: Path) -> list[object]:
    options = ["--window", 8, "--max-new-tokens", 3, "--format", "png"]
    return ["--model", model, *options, "--budget", 0.4, "--compare", "attention,two-stage"]


@pytest.fixture
def loads(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The data sets for whose plans a model was loaded."""
    seen: list[str] = []
    usual = Plan.model

    def model(planned: Plan) -> Any:
        if planned.loaded is None:
            seen.append(planned.run.dataset)
        return usual(planned)

    monkeypatch.setattr(Plan, "model", model)
    return seen


@pytest.mark.slow
def test_each_data_set_has_a_trace_and_all_have_tables(
    perturbkv: Run, two: str, small: list[object], loads: list[str]
) -> None:
    ran = perturbkv("quality", *small, "--dataset", two, "-o", "out")
    assert ran.code == 0, ran.err
    assert loads == ["first.jsonl"]  # one model for both
    assert {path.name for path in Path("out").iterdir()} == {
        "first", "second", "quality.png", "summary.json", *TABLES,
    }  # fmt: skip
    told = json.loads(Path("out/summary.json").read_text())
    assert [one["run"]["dataset"] for one in told["traces"]] == ["first.jsonl", "second.jsonl"]
    own = told["analyses"]["quality"]
    assert [one["name"] for one in own["datasets"]] == ["first", "second"]
    assert own["tables"] == [f"out/quality.{suffix}" for suffix in ("tex", "md", "csv")]
    for name, samples in (("first", 2), ("second", 3)):
        run = read_run(Path(f"out/{name}/trace.h5"))
        assert (run.samples, run.generate) == (samples, 3)
        assert [one.selection.name for one in run.configs] == ["attention", "two-stage"]
    again = perturbkv("quality", "out/first/trace.h5", "out/second/trace.h5", "-o", "b", "--json")
    assert again.code == 0, again.err
    document = again.json()
    for key in ("datasets", "kinds", "average", "configs"):
        assert document[key] == own[key]
    assert Path("b/quality.csv").read_text() == Path("out/quality.csv").read_text()


@pytest.mark.slow
def test_a_finished_run_loads_nothing_and_another_data_set_joins_it(
    perturbkv: Run, two: str, small: list[object], loads: list[str]
) -> None:
    assert perturbkv("quality", *small, "--dataset", "first.jsonl", "-o", "out").code == 0
    assert perturbkv("quality", *small, "--dataset", two, "-o", "out").code == 0
    assert len(loads) == 2
    assert perturbkv("quality", *small, "--dataset", two, "-o", "out").code == 0
    assert len(loads) == 2
    assert len(json.loads(Path("out/summary.json").read_text())["traces"]) == 2
    alone = perturbkv("quality", *small, "--dataset", "second.jsonl", "-o", "out")
    assert alone.code == 2
    assert "out/first/trace.h5, out/second/trace.h5" in " ".join(alone.err.split())
    assert len(json.loads(Path("out/summary.json").read_text())["traces"]) == 2


def test_what_is_asked_when_nobody_says(perturbkv: Run, model: Path, two: str) -> None:
    asked = ["--model", model, "--window", 8, "--dataset", two, "--dry-run", "--json"]
    runs = perturbkv("quality", *asked).json()["runs"]
    assert [one["dataset"] for one in runs] == ["first.jsonl", "second.jsonl"]
    kept = [one["config"] for one in runs[0]["kept"]]
    assert len(kept) == 15
    assert {one["budget"] for one in kept} == {0.1, 0.2, 0.4}
    assert {(one["policy"], one["selection"].partition("(")[0]) for one in kept} == {
        ("snapkv", "attention"), ("snapkv", "two-stage"), ("adakv", "attention"), ("adakv", "two-stage"),
        ("snapkv", "random"),
    }  # fmt: skip
    shown = perturbkv("quality", *asked[:-1])
    assert shown.out.count("dry run") == 2
    assert not Path("runs").exists()


@pytest.mark.slow
def test_budgets_that_a_short_data_set_takes_from_all_tables_are_told_before_the_run(
    perturbkv: Run, model: Path, two: str
) -> None:
    Path("short.jsonl").write_text(json.dumps({"prompt": "The quick brown fox jumps over it. " * 2, "answers": ["a"]}))
    asked = ["quality", "--model", model, "--window", 8, "--dry-run", "--dataset"]
    told = perturbkv(*asked, f"{two},short.jsonl").err
    assert told.count("b=0.1 ") == told.count("short.jsonl") == 1 and "b=0.2 " not in told
    assert "b=0.1 " not in perturbkv(*asked, two).err
    assert "b=0.1 " not in perturbkv(*asked, "short.jsonl").err


def test_rows_of_several_data_sets_in_one_file_are_told_whose_answers_may_be_longer(
    perturbkv: Run, model: Path
) -> None:
    text = "The quick brown fox jumps over the lazy dog. " * 2
    row = {"context": text, "input": "Who?", "answers": ["a fox"]}
    Path("mixed.jsonl").write_text("\n".join(json.dumps({**row, "dataset": name}) for name in ("hotpotqa", "musique")))
    asked = ["quality", "--model", model, "--window", 8, "--budget", 0.4, "--dataset", "mixed.jsonl", "--dry-run"]
    assert "mixed.jsonl" not in perturbkv(*asked).err  # 32 tokens each
    Path("mixed.jsonl").write_text(
        "\n".join(json.dumps({**row, "dataset": name}) for name in ("hotpotqa", "triviaqa", "qasper"))
    )
    told = perturbkv(*asked, "--no-chat-template").err
    assert "128 tokens" in told and "hotpotqa's 32, triviaqa's 32" in told
    assert "triviaqa" not in perturbkv(*asked, "--no-chat-template", "--max-new-tokens", 9).err
    needle = ["quality", "--model", model, "--window", 8, "--length", 300, "--samples", 1, "--dry-run"]
    assert perturbkv(*needle).code == 0  # which names no length


def test_an_option_that_matters_to_one_of_the_data_sets_is_taken(perturbkv: Run, small: list[object], two: str) -> None:
    asked = [*small, "--dataset", f"{two},needle", "--length", 300, "--depth", 0.5, "--samples", 2, "--dry-run"]
    ran = perturbkv("quality", *asked)
    assert ran.code == 0, ran.err


@pytest.mark.slow
@pytest.mark.parametrize("suffix", ["tex", "md", "csv"])
def test_a_table_of_somebody_else_stays(
    perturbkv: Run, two: str, small: list[object], loads: list[str], suffix: str
) -> None:
    Path("out").mkdir()
    mine = Path(f"out/quality.{suffix}")
    mine.write_text("mine")
    command = ["quality", *small, "--dataset", two, "-o", "out"]
    ran = perturbkv(*command)
    refused(ran, str(mine))
    assert (mine.read_text(), loads) == ("mine", [])
    assert perturbkv(*command, "--overwrite").code == 0
    assert mine.read_text() != "mine"
    assert perturbkv(*command).code == 0, "our own is replaced unasked"


def test_failed_samples_are_told_and_a_data_set_without_any_other_is_left_out(perturbkv: Run) -> None:
    full, rows = [1.0, 0.5], [[1.0, 0.5, 0.0], [0.5, 0.5, 0.0]]
    graded("qasper", full, rows, failures={"bad": "NaN in 'bad'"}).save("a.h5")
    whole = graded("trec", full, rows)
    replace(whole, failures={"s0": "NaN in 's0'", "s1": "NaN in 's1'"}).save("b.h5")
    ran = perturbkv("quality", "a.h5", "b.h5", "-o", "out", "--json")
    assert (ran.code, "NaN in 'bad'" in ran.err) == (1, True), ran.err
    assert "b.h5" in ran.err
    assert [(one["name"], one["failed"]) for one in ran.json()["datasets"]] == [("qasper", 1)]
    graded("lcc", full, rows).save("c.h5")
    assert perturbkv("quality", "c.h5", "b.h5", "-o", "other").code == 1
    assert perturbkv("quality", "c.h5", "-o", "whole").code == 0
    none = perturbkv("quality", "b.h5", "-o", "none")
    assert (none.code, "b.h5" in none.err) == (1, True), none.err


def test_an_interrupted_run_says_how_to_go_on(
    perturbkv: Run, two: str, small: list[object], monkeypatch: pytest.MonkeyPatch
) -> None:
    def stop(self: Any, planned: Plan, missing: Any, finished: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("perturbkv.engines.engine_choice.LocalEngine.measure", stop)
    ran = perturbkv("quality", *small, "--dataset", two, "-o", "out")
    assert ran.code == 130
    assert "0 of 2" in ran.err and "--output out" in ran.err


def test_a_notebook_says_what_the_command_says(perturbkv: Run) -> None:
    import perturbkv as pk

    full, rows = [1.0, 0.5, 0.25], [[1.0, 0.5, 0.0], [0.5, 0.5, 0.0], [0.0, 0.25, 0.0]]
    for name in ("qasper", "trec"):
        graded(name, full, rows).save(f"{name}.h5")
    ran = perturbkv("quality", "qasper.h5", "trec.h5", "-o", "out", "--format", "png")
    result = pk.quality([pk.read_trace("qasper.h5"), pk.read_trace("trec.h5")])
    said = " ".join(ran.out.split())
    assert said.startswith(" ".join(result.conclusion().split()))
    assert " ".join(result.notes().split()) in said
    for suffix, text in (("tex", result.to_latex()), ("md", result.to_markdown()), ("csv", result.to_csv())):
        assert Path(f"out/quality.{suffix}").read_text() == text
    assert result._repr_html_().count("<table>") == len(result.body())
    assert set(result.to_frame("samples").columns) >= {
        "dataset",
        "sample",
        "config",
        "score",
        "full",
        "propagated",
        "kl",
    }
