"""`perturbkv export --card`: a folder of traces becomes a data set that hubs read, and its page runs."""

from __future__ import annotations

import dataclasses
import os
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

import perturbkv as pk
from perturbkv.reporting.data_card import sweep_document
from perturbkv.schema import TEXT
from tests.support.asked import instead, refused
from tests.support.pages import shell
from tests.support.payloads import small_trace

Run = Callable[..., Any]


def complete(path: str) -> Path:
    """A finished trace at this path, none of whose samples failed."""
    return small_trace().sel(sample=["s0", "s1"]).save(path)


def without_text(trace: pk.Trace) -> pk.Trace:
    """The trace as `--no-text` leaves it."""
    lean = {name: array for name, array in trace.arrays.items() if name not in TEXT}
    return dataclasses.replace(trace, arrays=lean)


PAGE = (Path(__file__).resolve().parents[2] / "docs" / "how-to" / "publish_traces.md").read_text()


def configs(readme: Path) -> dict[str, str]:
    """Name -> path of the configurations of a card."""
    document = yaml.safe_load(readme.read_text().split("---\n")[1])
    return {one["config_name"]: one["data_files"][0]["path"] for one in document["configs"]}


@pytest.mark.slow
def test_every_block_of_the_page_runs(perturbkv: Run, model: Path, tmp_path: Path) -> None:
    (script,) = re.findall(r"^```sh\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)
    (python,) = re.findall(r"^```python\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)
    ran = shell(
        script.replace("--dataset needle", f"--dataset needle --model {model}"), tmp_path, {"perturbkv": perturbkv}
    )
    assert [one.code for one in ran] == [0, 0], ran[-1].err
    exec(python, {})
    card = Path("published/README.md")
    assert configs(card) == {"needle": "needle.parquet", "needle-tokens": "needle.tokens.parquet"}
    text = card.read_text()
    assert "license: cc-by-4.0" in text
    os.chdir(card.parent)
    for block in re.findall(r"^```python\n(import .*?)^```$", text, re.MULTILINE | re.DOTALL):
        exec(block, {})


KV_BLOCKS = ["--policy", "knorm", "--selection", "attention", "--granularity", "kv(block=2)", "--protect-first", 2]
FEW_BITS = ["--precision", "quantise(bits=4)", "--max-tokens", 60, "--alpha", 0.5, "--no-chat-template"]
POSITIONS = ["--policy", "streaming-llm", "--selection", "position", "--cache", "rectangular", "--steps", 2]
TWO_BY_TWO = ["--policy", "snapkv", "--policy", "adakv(floor=0.1)", "--selection", "attention", "--selection", "value"]


@pytest.mark.parametrize(
    "options",
    [
        TWO_BY_TWO,
        KV_BLOCKS,
        ["--dataset", "needle", "--length", 200, "--length", 250, "--depth", 0.5, "--seed", 4],
        pytest.param(POSITIONS, marks=pytest.mark.slow),
        pytest.param(FEW_BITS, marks=pytest.mark.slow),
        pytest.param(["--selection", "attention", "--selection", "random", "--seed", 3], marks=pytest.mark.slow),
        pytest.param(["--policy", "pyramidkv", "--budget", "0.3", "--dtype", "bfloat16"], marks=pytest.mark.slow),
    ],
)
def test_the_sweep_of_a_card_plans_the_same_run(perturbkv: Run, model: Path, data: Path, options: list[object]) -> None:
    asked = instead(["--model", model, "--dataset", data, "--samples", 2, "--window", 8, "--budget", 24], *options)
    assert perturbkv("trace", *asked, "-o", "a/t.h5").code == 0
    assert perturbkv("export", "a", "--card").code == 0
    first = pk.read_trace("a/t.h5")
    ((_, shown),) = re.findall(r"^(`{3,})yaml\n(.*?)^\1$", Path("a/README.md").read_text(), re.MULTILINE | re.DOTALL)
    sweep = sweep_document(first.run)
    without_folders = {"model": model.name, "dataset": Path(first.run.dataset).name}
    assert yaml.safe_load(shown) == sweep | without_folders
    Path("sweep.yaml").write_text(yaml.safe_dump(sweep))
    before = Path("a/t.h5").read_bytes()
    ran = perturbkv("trace", "--config", "sweep.yaml", "-o", "a/t.h5")  # another run is refused, this one is there
    assert ran.code == 0, ran.err
    assert Path("a/t.h5").read_bytes() == before


def test_a_card_is_replaced_only_when_asked_and_nothing_is_written_before(perturbkv: Run) -> None:
    complete("a/t.h5")
    Path("a/README.md").write_text("mine")
    refused(perturbkv("export", "a", "--card"), "expected no file at a/README.md, got one; --overwrite replaces it")
    ours = "expected a data card of ours at a/README.md, got another file; move it away"
    refused(perturbkv("export", "a", "--card", "--overwrite"), ours)
    assert sorted(path.name for path in Path("a").iterdir()) == ["README.md", "t.h5"]
    assert Path("a/README.md").read_text() == "mine"
    Path("a/README.md").unlink()
    assert perturbkv("export", "a", "--card").code == 0
    assert perturbkv("export", "a", "--card", "--overwrite", "--license", "MIT").code == 0
    assert "\nlicense: mit\n" in Path("a/README.md").read_text()


@pytest.mark.slow
def test_texts_of_an_earlier_trace_are_not_published(perturbkv: Run) -> None:
    made = complete("a/t.h5")
    assert perturbkv("export", "a").code == 0
    made.unlink()
    without_text(small_trace().sel(sample=["s0", "s1"])).save(made)
    Path("a/other.tokens.csv").write_text("not,ours")
    for path in ("a/t.csv", "a/t.parquet"):
        Path(path).unlink()
    for words in ((), ("--card",), ("-o", "a/t.csv")):
        refused(perturbkv("export", "a", *words), "expected no a/t.tokens.csv beside a trace without text, got prompts")
        assert {path.name for path in Path("a").iterdir()} == {
            "t.h5", "t.tokens.csv", "t.tokens.parquet", "other.tokens.csv"
        }  # fmt: skip
    ran = perturbkv("export", "a", "--card", "--overwrite")
    assert ran.code == 0, ran.err
    assert "a/t.tokens.parquet: removed, as the trace holds no text" in ran.out + ran.err
    assert {path.name for path in Path("a").iterdir()} == {"README.md", "t.h5", "t.parquet", "other.tokens.csv"}
    assert "Tokens of the prompts" not in Path("a/README.md").read_text()


def test_a_file_that_is_no_table_of_tokens_is_left_alone(perturbkv: Run) -> None:
    without_text(small_trace().sel(sample=["s0", "s1"])).save("a/t.h5")
    for suffix in ("csv", "parquet"):
        Path(f"a/t.tokens.{suffix}").write_text("mine")
    assert perturbkv("export", "a", "--overwrite").code == 0
    assert {Path(f"a/t.tokens.{suffix}").read_text() for suffix in ("csv", "parquet")} == {"mine"}


def test_without_what_the_card_needs_no_table_is_written(perturbkv: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    complete("a/t.h5")
    monkeypatch.setitem(sys.modules, "yaml", None)
    assert perturbkv("export", "a", "--card").code != 0
    assert [path.name for path in Path("a").iterdir()] == ["t.h5"]


@pytest.mark.slow
def test_tables_of_several_folders_share_a_card(perturbkv: Run) -> None:
    for name in ("x/needle/trace.h5", "x/qasper/trace.h5"):
        complete(name)
    told = perturbkv("export", "x/needle/trace.h5", "x/qasper/trace.h5", "--card", "--json").json()
    assert told["card"] == "x/README.md"
    tables = {f"{name}-trace": f"{name}/trace.parquet" for name in ("needle", "qasper")}
    tokens = {f"{name}-tokens": path.replace("trace.", "trace.tokens.") for name, path in tables.items()}
    assert configs(Path("x/README.md")) == {**tables, **tokens}
    assert set(told["files"]) == {f"x/{path}" for path in (*tables.values(), *tokens.values())}


@pytest.mark.parametrize(
    ("words", "error"),
    [
        (["t.h5", "--license", "mit"], "--license is the card's; add --card"),
        (["t.h5", "--card", "--license", "My Own"], "unknown licence 'My Own'; nearest of"),
        (["t.h5", "--card", "-o", "t.csv"], "--card describes .parquet tables, got t.csv; name it t.parquet"),
        (["t.h5", "--card", "-o", "a.parquet", "-o", "b.parquet"], "one table of a trace, got 2; give --output once"),
        (["t.h5", "u.h5", "-o", "t.csv"], "--output names the tables of one trace, got 2 traces"),
        (["t.h5", "t.hdf5"], "expected a table per trace, got t.csv for two of them"),
        (["empty", "--card"], "in the folder empty, got none; name the traces themselves"),
        (["a[1].h5", "--card"], "which hubs take for patterns, got a[1].parquet"),
    ],
)
def test_what_cannot_be_published_is_one_line(perturbkv: Run, words: list[str], error: str) -> None:
    Path("empty").mkdir()
    for name in ("t.h5", "u.h5", "t.hdf5", "a[1].h5"):
        Path(name).touch()  # refused before a trace is read
    before = sorted(Path().iterdir())
    refused(perturbkv("export", *words), error)
    assert sorted(Path().iterdir()) == before


@pytest.mark.slow
def test_the_hubs_library_loads_every_configuration(
    perturbkv: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from datasets import get_dataset_config_names, load_dataset

    for name in ("x/needle/trace.h5", "x/qasper.h5"):
        complete(name)
    assert perturbkv("export", "x", "--card").code == 0
    names = get_dataset_config_names(str(tmp_path / "x"))
    assert sorted(names) == ["needle-trace", "needle-trace-tokens", "qasper", "qasper-tokens"]
    for name in names:
        rows = load_dataset(str(tmp_path / "x"), name, split="train", cache_dir=str(tmp_path / "cache"))
        if not name.endswith("-tokens"):
            assert len(rows) == len(pk.read_trace("x/qasper.h5").to_frame())
            assert "perturbation_isolated" in rows.column_names
