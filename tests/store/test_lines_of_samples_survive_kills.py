from __future__ import annotations

import json
from pathlib import Path

import pytest

from perturbkv.errors import ConfigError, OutputError
from perturbkv.storage.json_lines import open_sample_lines

QUESTION = {"run": {"model": "m"}, "heads": 2}


def written(path: Path, *names: str) -> None:
    with open_sample_lines(path, QUESTION) as lines:
        for name in names:
            lines.add({"sample": name, "value": 1.5})


def test_what_was_found_is_there_again(tmp_path: Path) -> None:
    path = tmp_path / "found.jsonl"
    written(path, "b", "a")
    with open_sample_lines(path, QUESTION) as lines:
        assert lines.finished == {"a", "b"}
        assert [row["sample"] for row in lines.select(["a", "c", "b"])] == ["a", "b"]
        lines.add({"sample": "c"})
    assert [json.loads(line) for line in path.read_text().splitlines()][0] == QUESTION
    assert len(path.read_text().splitlines()) == 4


def test_a_line_that_a_kill_left_unfinished_is_found_again(tmp_path: Path) -> None:
    path = tmp_path / "found.jsonl"
    written(path, "a")
    path.write_text(path.read_text() + '{"sample": "b", "val')
    with open_sample_lines(path, QUESTION) as lines:
        assert lines.finished == {"a"}
        lines.add({"sample": "b"})
    with open_sample_lines(path, QUESTION) as lines:
        assert lines.finished == {"a", "b"}


@pytest.mark.parametrize("held", ['{"run": {}}\n', "", '{"sample": "a"}\n'])
def test_a_file_of_another_question_is_refused_and_stays(tmp_path: Path, held: str) -> None:
    path = tmp_path / "found.jsonl"
    path.write_text(held)
    with pytest.raises(ConfigError, match="of another question"), open_sample_lines(path, QUESTION):
        pass
    assert path.read_text() == held
    with open_sample_lines(path, QUESTION, overwrite=True) as lines:
        assert lines.rows == []


def test_a_broken_line_in_the_middle_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "found.jsonl"
    written(path, "a")
    path.write_text(path.read_text() + 'oops\n{"sample": "b"}\n')
    with pytest.raises(ConfigError, match="a line 3 that is no JSON object"), open_sample_lines(path, QUESTION):
        pass


def test_two_processes_do_not_write_one_file(tmp_path: Path) -> None:
    path = tmp_path / "found.jsonl"
    with open_sample_lines(path, QUESTION), pytest.raises(OutputError), open_sample_lines(path, QUESTION):
        pass


def test_without_a_path_nothing_is_written(tmp_path: Path) -> None:
    with open_sample_lines(None, QUESTION) as lines:
        lines.add({"sample": "a"})
    assert lines.finished == {"a"} and not list(tmp_path.iterdir())
