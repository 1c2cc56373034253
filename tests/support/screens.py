"""What commands print at 80 columns, and how they refuse; `make snapshots` writes both under tests/cli."""

from __future__ import annotations

import contextlib
import io
import json
import os
import shlex
import shutil
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np

from perturbkv.cli import console
from perturbkv.cli.main import main
from perturbkv.storage.trace import trace_file
from perturbkv.trace import FailedSample
from tests.house.test_no_label_is_parsed import COMMANDS, asked_of
from tests.support.asked import instead
from tests.support.commands import every_command
from tests.support.folders import model_folder
from tests.support.graded import graded
from tests.support.measured import MEASURED
from tests.support.swept import swept
from tests.support.traces import write as write_trace
from tests.support.undrawn import undrawn

FOLDER = Path(__file__).resolve().parents[1] / "cli" / "snapshots"
REFUSALS = FOLDER.with_name("refusals.txt")
LISTS = ("list models", "list datasets", "list policies", "list policies adakv", "list trace.h5", "tokens trace.h5")
TINY = "--model model --dataset prompts.jsonl --samples 2 --budget 24 --window 8".split()
"""A run that takes a moment, in the folder of `refused`: prompts of 182 tokens."""


@dataclass(frozen=True)
class Ran:
    """What a command left: exit code, standard output, standard error."""

    code: int
    out: str
    err: str

    def json(self) -> Any:
        return json.loads(self.out)


def run(*words: object) -> Ran:
    """Run the command in this process, as 80 columns would show it."""
    out, err = io.StringIO(), io.StringIO()
    screens = mock.patch.multiple(console, out=console.Console(file=out), err=console.Console(file=err))
    argv = mock.patch.object(sys, "argv", ["perturbkv", *map(str, words)])
    width = mock.patch.dict(os.environ, {"COLUMNS": "80"})
    with width, contextlib.redirect_stdout(out), contextlib.redirect_stderr(err), screens, argv:
        code = _exit_code()
    return Ran(code, out.getvalue(), err.getvalue())


def _exit_code() -> int:
    try:
        main()
    except SystemExit as left:
        return int(left.code or 0)
    return 0


def names() -> list[str]:
    """The names of all screens: a command's help, an analysis, a list; 'perturbkv' alone."""
    helps = [f"{' '.join(words)} -h" for words in every_command()]
    return ["perturbkv", "perturbkv -h", *helps, *COMMANDS, *LISTS]


def screen(name: str) -> str:
    """Return what a command prints on stdout, in a folder of its own."""
    with tempfile.TemporaryDirectory() as folder, contextlib.chdir(folder):
        shutil.copy(MEASURED, "trace.h5")
        if name in COMMANDS:
            trace = asked_of(name)
            with mock.patch.object(trace_file, "read_trace", lambda path: trace), undrawn():
                ran = run(*name.split(), *COMMANDS[name], "trace.h5", "-o", "out", "--format", "png")
        else:
            ran = run(*name.removeprefix("perturbkv").split())
    return "".join(f"{line.rstrip()}\n" for line in ran.out.splitlines())


def path_of(name: str) -> Path:
    """Return the file of a screen."""
    return FOLDER / f"{name.replace(' ', '_')}.txt"


@dataclass(frozen=True)
class Refusal:
    """A command, the file sweep.yaml beside it (if any), and its line on stderr."""

    command: str
    sweep: str
    line: str

    def __str__(self) -> str:
        sweep = "".join(f"| {line}\n" for line in self.sweep.splitlines())
        return f"$ {self.command}\n{sweep}{self.line}\n"


def refusals() -> list[Refusal | str]:
    """Return what the file of refusals holds, in its order; other paragraphs, which explain, as they are."""
    found: list[Refusal | str] = []
    for part in REFUSALS.read_text().strip("\n").split("\n\n"):
        lines = part.splitlines()
        sweep = [line[2:] for line in lines if line.startswith("| ")]
        said = [line for line in lines[1:] if not line.startswith("| ")]
        made = Refusal(lines[0][2:], "\n".join(sweep), "\n".join(said))
        found.append(made if part.startswith("$ ") else f"{part}\n")
    return found


def prepare(folder: Path) -> None:
    """Put models, prompts, traces and files that are none into a folder, for commands that are to be refused."""
    text = "The quick brown fox jumps over the lazy dog. " * 4
    dynamic = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}
    factors = {"short_factor": [1.0] * 4, "long_factor": [2.0] * 4, "factor": 4.0}
    switch = {"original_max_position_embeddings": 64}
    longrope = {"rope_type": "longrope", "rope_theta": 1e4, **switch, **factors}
    kinds = ["sliding_attention", "sliding_attention", "full_attention"] * 2
    model_folder(folder / "model", positions=512)
    model_folder(folder / "short", positions=3)
    template = model_folder(folder / "chat", positions=512) / "chat_template.jinja"
    template.write_text("<user>{{ messages[0]['content'] }}</user><assistant>")
    model_folder(folder / "sliding", "mistral", sliding_window=64)
    model_folder(folder / "mixed", "gemma3_text", num_hidden_layers=6, layer_types=kinds)
    model_folder(folder / "dynamic", rope_parameters=dynamic)
    model_folder(folder / "longrope", "phi3", rope_parameters=longrope, eos_token_id=None, **switch)
    for name in ("void", "bart", "there"):
        (folder / name).mkdir()
    files: dict[str, object] = {
        "bart/config.json": {"model_type": "bart", "architectures": ["BartForCausalLM"]},
        "prompts.jsonl": [{"id": f"p{place}", "prompt": f"{place} {text}"} for place in range(6)],
        "broken.jsonl": '{"prompt": "x"}\n{broken',
        "empty.jsonl": [{"prompt": " "}],
        "long.jsonl": [{"prompt": "word " * 300}] * 2,
        "null.jsonl": [{"prompt": "a"}, {"prompt": None}],
        "chat.jsonl": [{"messages": [{"role": "user", "content": "Hello?"}]}],
        "trec.jsonl": [{"context": "c " * 99, "input": "q", "answers": ["a"]}],
        **{
            name: [{"prompt": f"{place} {text}", "answers": ["17"]} for place in range(2)]
            for name in ("first.jsonl", "second.jsonl", "there/first.jsonl")
        },
        "scores.json": {f"{layer}-{head}": 1.0 for layer in (0, 1) for head in range(4)},
        "three.json": {f"{layer}-{head}": 1.0 for layer in range(3) for head in range(4)},
        "heads3.json": {"by": "head", "alpha": [[0.5] * 3] * 2, "layers": [0, 1]},
        "layers3.json": {"by": "layer", "alpha": [0.5] * 3, "layers": [0, 1, 2]},
        "over.json": {"by": "global", "alpha": 1.5},
        "truth.json": {"by": "global", "alpha": True},
        "own.py": "def evict(model, input_ids, attention_mask): ...\n",
        "null.yaml": "# nothing\n",
        **dict.fromkeys(("text.h5", "text.gguf", "text.json", "there.json", "there.csv", "there.html"), "mine"),
    }
    for name, held in files.items():
        rows = held if isinstance(held, list) else [held]
        (folder / name).write_text(held if isinstance(held, str) else "".join(f"{json.dumps(row)}\n" for row in rows))
    (folder / "latin.yaml").write_bytes(b"model: \xe9")
    shutil.copy(MEASURED, folder / "measured.h5")
    (folder / "half.h5").write_bytes(MEASURED.read_bytes()[:9999])
    write_trace(folder / "failed.h5", FailedSample("f", "NaN"))
    swept(np.ones((8, 2, 5))).save(folder / "bare.h5")
    graded("qasper", [1.0, 0.5], [[1.0, 0.5, 0.0]] * 2).save(folder / "graded.h5")
    graded("trec", [1.0, 0.5], [[1.0, 0.5, 0.0]] * 2, model="other").save(folder / "other.h5")
    with contextlib.chdir(folder):
        assert run("trace", *TINY, "--steps", 1, "-o", "t.h5").code == 0


def refused(folder: Path, refusal: Refusal) -> Ran:
    """Run a refusal's command in a prepared folder; `…` are the options of a tiny run, less what it names itself."""
    words = shlex.split(refusal.command)
    if "…" in words:
        place = words.index("…")
        pairs = instead(TINY, *words[place + 1 :])
        words[place:] = map(str, pairs)
    if refusal.sweep:
        (folder / "sweep.yaml").write_text(refusal.sweep)
    with contextlib.chdir(folder):
        return run(*words)


def write() -> Iterator[Path]:
    """Write every screen and refusal; yields the files that changed."""
    FOLDER.mkdir(exist_ok=True)
    wanted = {path_of(name): name for name in names()}
    for path in set(FOLDER.glob("*.txt")) - set(wanted):
        path.unlink()
        yield path
    for path, name in wanted.items():
        text = screen(name)
        if not path.exists() or path.read_text() != text:
            path.write_text(text)
            yield path
    before = REFUSALS.read_text()
    with tempfile.TemporaryDirectory() as folder:
        prepare(Path(folder))
        REFUSALS.write_text("\n".join(str(_anew(Path(folder), one)) for one in refusals()))
    if REFUSALS.read_text() != before:
        yield REFUSALS


def _anew(folder: Path, one: Refusal | str) -> Refusal | str:
    return one if isinstance(one, str) else Refusal(one.command, one.sweep, refused(folder, one).err.strip())


if __name__ == "__main__":
    for changed in write():
        sys.stdout.write(f"{changed.relative_to(FOLDER.parent)}\n")
