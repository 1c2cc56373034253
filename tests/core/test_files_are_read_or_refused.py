"""Files of users, runs and texts from elsewhere are read, or refused in a line."""

from __future__ import annotations

import io
import json
import os
import pickle
import re
import socket
import threading
import tracemalloc
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

import perturbkv as pk
from perturbkv.configs.choice import Choice, parse
from perturbkv.configs.run import RunConfig
from perturbkv.display import Table, as_html, as_text, print_part
from perturbkv.errors import MOST_CHARACTERS, ConfigError, MissingPackageError, PerturbkvError, UnknownNameError
from perturbkv.escaping import escape_control_characters, escape_line
from perturbkv.selection.grid import configuration
from perturbkv.user_files import FileKind, parse_json

KIND = FileKind("a list", ConfigError, max_bytes=2**20, hint="choose another")


def refused(path: Path, *words: str) -> None:
    with pytest.raises(ConfigError, match=f"^expected a list at {path}, got .*; choose another$") as raised:
        KIND.read_json(path)
    assert all(word in str(raised.value) for word in words)


def test_a_pipe_a_device_and_a_folder_are_refused_without_reading(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    refused(tmp_path / "pipe", "a named pipe, not a regular file")
    for name, at in (("zero", "/dev/zero"), ("itself", "itself"), ("gone", "nowhere")):
        (tmp_path / name).symlink_to(at)
    refused(tmp_path / "zero", "a device")
    refused(tmp_path / "itself", "Too many levels of symbolic links")
    refused(tmp_path / "gone", "got nothing")
    refused(tmp_path, "a folder")


@pytest.mark.parametrize("read", [pk.read_trace, pk.read_answers])
@pytest.mark.parametrize(("name", "got"), [("\0", "embedded null byte"), ("x" * 300, "File name too long")])
def test_a_name_that_no_file_can_have_is_one_line(read: Callable[[str], object], name: str, got: str) -> None:
    with pytest.raises(PerturbkvError, match=f"^expected a .* at .*, got '{got}'"):
        read(name)


def test_a_socket_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)  # a socket's whole address has 108 bytes
    with socket.socket(socket.AF_UNIX) as made:
        made.bind("s")
        refused(tmp_path / "s", "a socket")


@pytest.mark.parametrize("place", ["/dev/fd/{}", "/proc/self/fd/{}"])
def test_a_pipe_that_the_shell_opened_is_read(place: str) -> None:
    for content, size in ((b"[1, 2]", 1), (b" " * 2**18, 5)):
        reading, writing = os.pipe()
        sender = threading.Thread(target=fill, args=(writing, content * size))
        sender.start()
        path = Path(place.format(reading))
        if size == 1:
            assert KIND.read_json(path) == [1, 2]
        else:
            refused(path, "more than 1 MiB")
        os.close(reading)
        sender.join()


def fill(descriptor: int, content: bytes) -> None:
    with suppress(BrokenPipeError), os.fdopen(descriptor, "wb") as stream:
        stream.write(content)


def test_a_file_that_cannot_be_meant_is_not_read(tmp_path: Path) -> None:
    path = tmp_path / "large"
    path.touch()
    os.truncate(path, 2**20)
    refused(path, "no JSON")
    os.truncate(path, 2**40)
    refused(path, "1,099,511,627,776 bytes, more than 1 MiB")


def test_reading_takes_memory_for_what_a_file_holds_and_not_for_the_most_it_may(tmp_path: Path) -> None:
    path = tmp_path / "list"
    path.write_bytes(b"[1, 2]")
    tracemalloc.start()
    assert FileKind("a list", ConfigError, 2**31).read_json(path) == [1, 2]
    _, most = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert most < 2**22


def test_text_has_newlines_alone_and_no_mark_before_it(tmp_path: Path) -> None:
    path = tmp_path / "text"
    path.write_bytes("\ufeffa\r\nb\rc\n\u2028é".encode())
    assert KIND.read_text(path) == "a\nb\nc\n\u2028é"
    path.write_bytes(b"a\nb\n\xe9")
    with pytest.raises(ConfigError, match=r"no UTF-8 text \(line 3: "):
        KIND.read_text(path)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("[" * 100_000, "too deep"),
        ('{"a":' * 100_000, "too deep"),
        ("[NaN]", "NaN is no number"),
        ("-Infinity", "-Infinity is no number"),
        ("[1,]", "column"),
        ('[{"a": {"b": 1, "c": 2, "b": 1}}]', "the key 'b' is there twice"),
        ("[1,\n\n}", "line 3, column 1"),
        ("", "column 1"),
        ('"a\x01"', "control character"),
    ],
)
def test_what_is_no_json_is_told_in_a_few_words(text: str, said: str) -> None:
    with pytest.raises(ValueError, match=".") as raised:
        parse_json(text)
    assert said in str(raised.value)
    assert len(str(raised.value)) < 100


def test_what_is_json_is_read_as_python_reads_it() -> None:
    text = '{"a": [1, -2.5e-3, true, null, "\\ud83d\\ude00"], "b": 123456789012345678901234567890, "c": 0.1}'
    assert parse_json(text) == json.loads(text)


RUN = RunConfig("m", "d", (configuration(64, selection="two-stage(alpha=0.5)"),), save=("outputs",), max_tokens=900)


def nested(depth: int) -> Any:
    deep: Any = {"choice": "a", "options": {}}
    for _ in range(depth):
        deep = {"choice": "a", "options": {"b": deep}}
    return deep


def test_a_run_reads_what_it_wrote() -> None:
    assert RunConfig.from_json(RUN.to_json()) == RUN


@pytest.mark.parametrize(
    "text",
    ["", "{", "null", "[]", "3", '"run"', "{}", "NaN", "[" * 100_000, '{"configs": [3]}', '{"configs": {"a": 1}}'],
    ids=lambda text: text[:20],
)
def test_what_is_no_run_is_refused(text: str) -> None:
    with pytest.raises(PerturbkvError, match="expected a run configuration as JSON") as told:
        RunConfig.from_json(text)
    assert not re.search("NoneType|object is not|argument", str(told.value))  # Python's own words


@pytest.mark.parametrize("depth", [16, 300])
def test_choices_inside_each_other_without_end_are_refused(depth: int) -> None:
    document = json.loads(RUN.to_json())
    document["configs"][0]["policy_options"] = {"pool": nested(depth)}
    with pytest.raises(PerturbkvError, match="at most 16 choices inside each other"):
        RunConfig.from_json(json.dumps(document))


def test_a_run_of_before_the_option_looked_at_l1_norms() -> None:
    for selection in ("two-stage(alpha=0.5)", "value", "hindsight", "attention"):
        run = RunConfig("m", "d", (configuration(64, selection=selection),))
        document = json.loads(run.to_json())
        known = document["configs"][0]["selection_options"].pop("norm", None)
        assert (known == "l1") is (selection != "attention")
        found = RunConfig.from_json(json.dumps(document))
        assert found == run
        assert (found.labels(), found.configs[0].flat()) == (run.labels(), run.configs[0].flat())


def test_a_configuration_whose_options_are_nobodys_is_refused() -> None:
    document = json.loads(RunConfig("m", "d", (configuration(64),)).to_json())
    flat: dict[str, Any] = {"budget": 64, "policy": "snapkv", "selection": "two-stage", "window": 8, "alpha": 0.25,
                            "pool": "max", "kernel": 7, "granularity": "query"}  # fmt: skip
    with pytest.raises(ConfigError, match="expected a run configuration as JSON, got one without 'policy_options'"):
        RunConfig.from_json(json.dumps({**document, "configs": [flat]}))


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("\x1b]0;owned\x07", r"\x1b]0;owned\x07"),
        ("\x1b[2J", r"\x1b[2J"),
        ("good\rbad", r"good\rbad"),
        ("a\b\0\x7f\x9b", r"a\x08\x00\x7f\x9b"),
        ("\u202egnp.exe\u2066", r"\u202egnp.exe\u2066"),
        ("a\u2028b\ufeff", r"a\u2028b\ufeff"),
        ("\ud800", r"\ud800"),
        ("\U000e0041", r"\U000e0041"),
    ],
)
def test_what_would_be_obeyed_or_unseen_is_written_out(text: str, shown: str) -> None:
    assert escape_control_characters(text) == escape_line(text) == shown
    assert str(PerturbkvError(text)) == str(UnknownNameError(text, "model", ()))[15 : 15 + len(shown)] == shown


def test_an_error_is_one_line_of_bounded_length() -> None:
    assert str(PerturbkvError("two\nlines")) == "two lines"
    assert str(MissingPackageError("psutil\x1b[2J")).startswith(r"expected the package psutil\x1b[2J, got none")
    text = str(UnknownNameError("x" * 5000, "model", ["snapkv"]))
    assert (len(text), text[:20], text[-13:]) == (MOST_CHARACTERS + 3, "unknown model 'xxxxx", "known: snapkv")
    assert pickle.loads(pickle.dumps(PerturbkvError("a\x1b"))).args == ("a\x1b",)


def test_letters_of_all_scripts_stay_as_they_are() -> None:
    text = "é 漢字 עברית می\u200cخواهم 👩\u200d🔬 ‘θ̂’ \u00a0 [/INST] :smile: $x$ \\n"
    assert escape_control_characters(text) == escape_line(text) == text


def test_a_name_is_one_line_and_a_text_keeps_its_own() -> None:
    assert escape_control_characters("a\n\tb") == "a\n\tb"
    assert escape_line("a\n\tb") == r"a\n\tb"


def test_tables_and_lines_show_foreign_words_as_they_are_written() -> None:
    word = "[/INST] [bold]x[/bold] :smile: \x1b[2J"
    drawn = as_text([Table(word, (word, "#n", "m"), [(word, word, word)]), word], width=300)
    assert drawn.count(r"[/INST] [bold]x[/bold] :smile: \x1b[2J") == 6
    assert "\x1b" not in drawn + as_html([Table(word, (word,), [(word,)]), word])


def test_colours_are_ours_alone() -> None:
    console = Console(file=io.StringIO(), force_terminal=True, color_system="standard", width=80)
    print_part(console, "\x1b[31mred")
    assert console.file.getvalue() == "\\x1b[31mred\n"  # type: ignore[attr-defined]


@pytest.mark.parametrize("text", ["a\x1b[2J", "a(b=\u202e)", "a(b='x\x07')", "a(b\u2066=1)"])
def test_a_name_with_unseen_characters_is_no_choice(text: str) -> None:
    with pytest.raises(ConfigError, match="of visible characters, got"):
        parse(text)
    with pytest.raises(ConfigError, match="of visible characters, got"):
        Choice("a", {"b": "line\nbreak"})


def test_an_unknown_name_is_told_where_nothing_is_known() -> None:
    assert str(UnknownNameError("x", "name", [])) == "unknown name 'x'; known: "
