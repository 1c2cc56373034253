"""The data card of exported traces: valid YAML and Markdown whatever is named, and a sweep that is the same run."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path, PurePosixPath
from typing import Any

import pytest
import yaml

from perturbkv.errors import ConfigError, UnknownNameError
from perturbkv.reporting.data_card import MARK, Table, check_file_name, data_card, is_card
from perturbkv.schema import VARIABLES
from perturbkv.trace import Trace
from tests.support.payloads import small_trace

HOSTILE = (
    "---",
    "a\n---\nlicense: mit\n",
    "x | y | z",
    "`code` **bold** <script>alert(1)</script>",
    "[link](javascript:alert(1)) ![image](http://x/y.png)",
    "'\"}: {- & * # !!python/object:os.system",
    "```\n# Heading\n```",
    "\u202eabc\x1b[2J\u2028",
    "$x$ &lt;b&gt; ~~s~~",
)


def table(trace: Trace, path: str = "t.parquet", **more: Any) -> Table:
    return Table(trace, PurePosixPath(path), 16, **more)


def named(name: str) -> Trace:
    made = small_trace()
    run = dataclasses.replace(made.run, model=name, dataset=name, revision=name)
    return dataclasses.replace(made, run=run, attrs={**made.attrs, "device": name, "torch_version": name})


def front_matter(card: str) -> dict[str, Any]:
    found = re.match(r"---\n(.*?)\n---\n", card, re.DOTALL)
    assert found
    return dict(yaml.safe_load(found[1]))


def outside_code(card: str) -> list[str]:
    """The lines of the card behind its YAML that stand in no block of code."""
    lines, fence = [], ""
    for line in card.split("\n---\n", 1)[1].split("\n"):
        mark = re.match(r"`{3,}", line)
        if fence:
            fence = "" if line == fence else fence
        elif mark:
            fence = mark[0]
        else:
            lines.append(line)
    assert not fence
    return lines


@pytest.mark.parametrize("name", HOSTILE)
def test_no_name_breaks_yaml_or_markdown(name: str) -> None:
    plain, card = data_card([table(named("m"))]), data_card([table(named(name))])
    expected = front_matter(plain)
    assert front_matter(card) == {**expected, "pretty_name": front_matter(card)["pretty_name"]}
    lines, usual = outside_code(card), outside_code(plain)
    assert len(lines) == len(usual)
    for line, other in zip(lines, usual, strict=True):
        assert line.startswith("| ") == other.startswith("| ")
        assert len(re.findall(r"(?<!\\)\|", line)) == len(re.findall(r"(?<!\\)\|", other)), line
        assert line.startswith("#") == other.startswith("#")
    text = "\n".join(lines)
    assert "<script" not in text.replace("\\<", "")
    assert not re.search(r"(?<!\\)\]\((?!https://arxiv)", text)
    assert not re.search("[\x00-\x08\x0b-\x1f\u202e\u2028]", card)


@pytest.mark.parametrize("name", HOSTILE)
def test_the_sweep_in_the_card_is_the_runs_whatever_is_named(name: str) -> None:
    (block,) = re.findall(r"^(`{3,})yaml\n(.*?)^\1$", data_card([table(named(name))]), re.DOTALL | re.MULTILINE)
    assert yaml.safe_load(block[1])["model"] == name.rpartition("/")[2]


@pytest.mark.parametrize("folder", ["/home/ada/secret", "ada/secret", "secret"])
def test_a_card_names_no_folder(folder: str) -> None:
    made = small_trace(model=f"{folder}/m", dataset=f"{folder}/x.jsonl")
    card = data_card([table(dataclasses.replace(made, source="/home/ada/secret/t.h5"))])
    assert front_matter(card)["pretty_name"] == "KV cache eviction: m on x.jsonl"
    assert "/home" not in card
    assert "secret" not in card


def test_every_column_and_every_stored_variable_has_its_unit_and_meaning() -> None:
    trace = small_trace()
    card = data_card([table(trace, source=PurePosixPath("t.h5"))]).replace("\\", "")
    for name in trace.arrays:
        variable = VARIABLES[name]
        (line,) = re.findall(rf"^\| {name} \|.*$", card, re.MULTILINE)
        assert f"| {variable.units} |" in line
        assert variable.long_name.replace("||", "") in line.replace("||", "")
    columns = card.partition("## Columns")[2]
    for name in trace.to_frame().columns:
        (line,) = re.findall(rf"^\| {name} \|.*$", columns, re.MULTILINE)
        assert not line.endswith("|  |"), line


def test_each_table_is_a_configuration_of_its_own() -> None:
    trace, tokens = small_trace(), PurePosixPath("b c/t.tokens.parquet")
    paths = ["a/t.parquet", "b c/t.parquet", "b-c/t.parquet", "a-t-2.parquet"]
    card = data_card([table(trace, path, tokens=tokens if path == "b c/t.parquet" else None) for path in paths])
    configs = front_matter(card)["configs"]
    names = [one["config_name"] for one in configs]
    assert len(set(names)) == len(names) == 5
    assert all(re.fullmatch(r"[A-Za-z0-9_.\-]+", name) for name in names)
    assert [one["data_files"][0]["path"] for one in configs] == [*paths, str(tokens)]
    assert [one.get("default", False) for one in configs] == [True, False, False, False, False]
    assert "prompts' whole text" in card


@pytest.mark.parametrize(
    ("rows", "size"), [(999, "n<1K"), (1000, "1K<n<10K"), (123_456, "100K<n<1M"), (10**9, "1B<n<10B"), (10**12, "n>1T")]
)
def test_the_size_is_the_hubs_word_for_the_number_of_rows(rows: int, size: str) -> None:
    assert front_matter(data_card([dataclasses.replace(table(small_trace()), rows=rows)]))["size_categories"] == [size]


def test_a_licence_nobody_stated_is_unknown_and_said_to_be() -> None:
    card = data_card([table(small_trace())])
    assert front_matter(card)["license"] == "unknown"
    assert "licence is not stated" in card
    stated = data_card([table(small_trace())], "cc-by-4.0")
    assert front_matter(stated)["license"] == "cc-by-4.0"
    assert "The tables: cc-by-4.0." in stated
    assert front_matter(data_card([table(small_trace())], "CC-BY-4.0"))["license"] == "cc-by-4.0"
    with pytest.raises(UnknownNameError, match=r"unknown licence 'cc-by-40'; nearest of \d+ known: cc-by-4.0, .*other"):
        data_card([table(small_trace())], "cc-by-40")


@pytest.mark.parametrize(
    ("run", "said"),
    [
        ({"dataset": "prompts"}, "its prompts came from Python"),
        ({"plugins": {"mine": "0" * 16}}, "mine came from Python or from an installed package"),
    ],
)
def test_a_run_that_no_sweep_measures_again_says_so(run: dict[str, Any], said: str) -> None:
    card = data_card([table(small_trace(**run))])
    assert said in card
    assert "yaml\n" not in card and "--config" not in card


def test_a_sweep_that_takes_a_file_names_it() -> None:
    card = data_card([table(small_trace(plugins={"my_score.py:Mine": "0" * 16}))])
    assert "my_score.py, which the trace does not hold" in card.replace("\\", "")
    assert "--config sweep.yaml" in card


def test_a_card_of_ours_is_told_from_another_file(tmp_path: Path) -> None:
    path = tmp_path / "README.md"
    path.write_text(data_card([table(small_trace())]))
    assert is_card(path)
    path.write_text(path.read_text().replace(f"{MARK}\n", ""))
    assert not is_card(path)


@pytest.mark.parametrize("name", ["a[1].parquet", "a*.parquet", "a?.parquet", "{a}.parquet", "a\u202eb.parquet"])
def test_a_file_that_hubs_take_for_a_pattern_is_refused(name: str) -> None:
    with pytest.raises(ConfigError, match="expected a file name without"):
        check_file_name(Path(name))


def test_the_hubs_own_library_reads_the_card() -> None:
    from huggingface_hub import DatasetCard

    card = DatasetCard(data_card([table(named(HOSTILE[1]))], "cc-by-4.0"))
    assert card.data.license == "cc-by-4.0"
    assert card.data.configs[0]["data_files"][0]["path"] == "t.parquet"
