"""A file that a user names is a regular one of a size that can be meant, in UTF-8; JSON is JSON. Else one line."""

from __future__ import annotations

import json
import os
import socket
import threading
import tracemalloc
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pytest

import perturbkv as pk
from perturbkv.errors import ConfigError, PerturbkvError
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
        ("9" * 5_000, "a whole number of 5,000 digits"),
        ("[NaN]", "NaN is no number"),
        ("-Infinity", "-Infinity is no number"),
        ("[1e999]", "1e999 is beyond every number"),
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
