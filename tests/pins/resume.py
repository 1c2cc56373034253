"""A trace that was killed and gone on with, in shards, by several processes, or grown, beside the undisturbed one."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

from tests.pins.running import below, left, prompts, run, tiny_model, variables

BY = """
import signal
signal.signal(signal.SIGINT, signal.default_int_handler)  # which a shell's background has switched off
from perturbkv.cli.main import main
main()
"""
PLUG_IN = '''
import os
import signal
from dataclasses import dataclass
from pathlib import Path

import perturbkv as pk


@dataclass(frozen=True)
class Ending(pk.Score):
    """Attention of the last query, and the end of the process at the third sample while a file asks for it."""

    needs = ("attention",)

    def score(self, layer):
        asked = Path(__file__).with_name("asked")
        if asked.exists() and layer.sample == "p2":
            os.kill(os.getpid(), int(asked.read_text()))
        return layer.attention[:, -1, : layer.prefix]
'''


def record(folder: Path) -> dict[str, Any]:
    """Interrupt a run by a kill, by Ctrl-C and by SIGTERM, go on, and hold each against the run at once."""
    model, data = tiny_model(folder / "model"), prompts(folder / "prompts.jsonl", 4, answers=["seven"])
    score = folder / "ending.py"
    score.write_text(PLUG_IN)
    common: list[Any] = ["trace", "--model", model, "--dataset", data, "--budget", 40, "--window", 8, "--steps", 2,
                         "--policy", f"{score}:Ending", "--selection", "attention", "--json"]  # fmt: skip
    two = [*common, "--selection", "two-stage"]
    found: dict[str, Any] = {"whole/code": run(*two, "-o", folder / "whole").code}
    whole = _held(folder / "whole", folder)
    found |= below("whole", whole)
    for name, signal in (("killed", 9), ("interrupted", 2), ("terminated", 15)):
        where, asked = folder / name, folder / "asked"
        asked.write_text(str(signal))
        found[f"{name}/first code"] = _process(*two, "-o", where)
        found[f"{name}/first left"] = sorted(path.name for path in where.iterdir())
        asked.unlink()
        ran = run(*two, "-o", where)
        found[f"{name}/code"] = ran.code
        found |= below(name, _beside(_held(where, folder), whole))
    for place in (1, 2):
        ran = run(*two, "-o", folder / "shards", "--shard", f"{place}/2")
        found[f"shards/code {place}"] = ran.code
    found["merge/code"] = run("merge", folder / "shards", "--json").code
    found |= below("merge", _beside(_held(folder / "shards", folder), whole))
    found["workers/code"] = run(*two, "-o", folder / "workers", "--engine", "workers", "--workers", 2).code
    found |= below("workers", _beside(_held(folder / "workers", folder), whole))
    found["grown/first code"] = run(*common, "-o", folder / "grown").code
    found["grown/code"] = run(*two, "-o", folder / "grown").code
    found |= below("grown", _beside(_held(folder / "grown", folder), whole))
    found["another/code"] = run(*two, "--seed", 3, "-o", folder / "whole").code
    shutil.copytree(folder / "shards", folder / "again")
    found["merge again/code"] = run("merge", folder / "again", "--json").code
    return found | _answers(folder, model, data, score)


def _answers(folder: Path, model: Path, data: Path, score: Path) -> dict[str, Any]:
    """The same of a file of answers."""
    asked: list[Any] = ["generate", "--model", model, "--dataset", data, "--budget", 40, "--window", 8, "--json",
                        "--policy", f"{score}:Ending", "--selection", "attention", "--max-new-tokens", 4]  # fmt: skip
    found: dict[str, Any] = {"answers/code": run(*asked, "-o", folder / "answers").code}
    whole = left(folder, folder / "answers")
    (folder / "asked").write_text("9")
    found["answers killed/first code"] = _process(*asked, "-o", folder / "resumed")
    (folder / "asked").unlink()
    found["answers killed/code"] = run(*asked, "-o", folder / "resumed").code
    return found | below("answers", whole) | below("answers killed", _beside(left(folder, folder / "resumed"), whole))


def _process(*arguments: object) -> int:
    """Run the command line in a process of its own; its exit code."""
    return subprocess.run([sys.executable, "-c", BY, *map(str, arguments)], capture_output=True).returncode


def _held(where: Path, folder: Path) -> dict[str, Any]:
    return variables(next(where.glob("*.h5")), folder) if list(where.glob("*.h5")) else {}


def _beside(held: dict[str, Any], whole: dict[str, Any]) -> dict[str, Any]:
    """Only what is not as in the undisturbed run, and how many are."""
    other = {name: held.get(name, "missing") for name in {**held, **whole} if held.get(name) != whole.get(name)}
    return {"equal": len(whole) - len(set(other) & set(whole)), **other}
