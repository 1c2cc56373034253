"""What is no model at all where one is named, and models that no machine holds."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path

from tests.attack.spoiling import Spoiled

NAMES = ("", " ", ".", "..", "/", "random:", "random:nonsense", "~nobody/model", "a/b/c", "owner/name",
         "owner/" + "n" * 1000, "x" * 100_000, "\x1b[31mred", "a\nb", "%s%n", "model\udcff", "--", "model.gguf",
         "smollm2-135m-q4_1/", "http://localhost:1/model")  # fmt: skip
LARGE = ("random:qwen2.5-32b", "random:llama-3.1-8b")


def kinds() -> Mapping[str, Sequence[Spoiled]]:
    return {
        "places": [
            _place("a text file", lambda path: path.write_text("no model")),
            _place("an empty folder", lambda path: path.mkdir()),
            _place("a pipe", os.mkfifo),
            _place("a link to itself", lambda path: path.symlink_to(path)),
            _place("a link to nothing", lambda path: path.symlink_to("nowhere")),
            _place("a folder called .gguf", lambda path: _called(path, lambda made: made.mkdir())),
            _place("a pipe called .gguf", lambda path: _called(path, os.mkfifo)),
            _place("a link to zeros called .gguf", lambda path: _called(path, _to_zeros)),
            _place("a folder of links to zeros", _zeros),
            _place("a folder of pipes", _pipes),
        ],
        "names": [_place(f"the name {name[:20]!r}", lambda path, name=name: _named(name), ("",)) for name in NAMES]
        + [_place(f"the name {name}", lambda path, name=name: name, (name,)) for name in ("/dev/zero", "/dev/null")],
        "memory": [_place(name, lambda path, name=name: name, (name,)) for name in LARGE],
    }  # fmt: skip


def _place(name: str, spoil: object, words: tuple[str, ...] = ("model",)) -> Spoiled:
    return Spoiled(name, spoil, copied=False, words=words)  # type: ignore[arg-type]


class _Named(str):
    """A name that is given even where it is empty."""

    def __bool__(self) -> bool:
        return True


def _named(name: str) -> str:
    return _Named(name)


def _called(path: Path, make: object) -> Path:
    made = path.with_name("model.gguf")
    make(made)  # type: ignore[operator]
    return Path(made.name)


def _to_zeros(path: Path) -> None:
    path.symlink_to("/dev/zero")


def _zeros(path: Path) -> None:
    path.mkdir()
    for name in ("config.json", "model.safetensors", "tokenizer.json"):
        _to_zeros(path / name)


def _pipes(path: Path) -> None:
    path.mkdir()
    for name in ("config.json", "model.safetensors", "tokenizer.json"):
        os.mkfifo(path / name)
