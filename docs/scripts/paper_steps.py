"""The commands behind docs/results/paper.md, a folder each: `make paper` runs them, and goes on where it was killed."""

from __future__ import annotations

import json
import resource
import shlex
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

LIMIT = 20 * 60
"""Processor seconds that a step may take, with one thread: what else the machine does is left out."""
DONE = "step.json"
"""What a finished step leaves in its folder: what was called, and the processor seconds that it took."""
ROOT = Path(__file__).parents[2]
CHATS = ROOT / "docs" / "paper_chats.jsonl"
_CALL = "from perturbkv.cli.start import main; main()"


@dataclass(frozen=True)
class Step:
    """Commands and studies that leave one folder, the first of which makes what the others look at.

    In them `{longbench}` stands for LongBench's folder, `{folder}` for the step's own, `{output}` for that of all.
    """

    name: str
    commands: tuple[str, ...]

    def calls(self, longbench: Path, output: Path) -> list[list[str]]:
        """Return what perturbkv, or a study, is called with, where results go among it."""
        folder = output / self.name
        places = {"longbench": longbench, "folder": folder, "output": output, "chats": CHATS}
        filled = [[word.format(**places) for word in command.split()] for command in self.commands]
        return [words if "--output" in words else [*words, "--output", str(folder)] for words in filled]

    def shown(self) -> list[str]:
        """Return the commands as a reader types them, in a folder of their own."""
        calls = self.calls(Path("LONGBENCH"), Path())
        return [
            shlex.join(["python" if is_study(call) else "perturbkv", *call]).replace(
                str(CHATS), "docs/paper_chats.jsonl"
            )
            for call in calls
        ]


def is_study(call: Sequence[str]) -> bool:
    """Return whether a call is of a script of studies/, not of perturbkv."""
    return call[0].startswith("studies/")


def run(steps: Sequence[Step], longbench: Path, output: Path) -> None:
    """Run the steps that are not finished, one after the other; what was killed goes on with the same call."""
    for step in steps:
        if seconds(step, longbench, output) is None:
            _run(step, step.calls(longbench, output), output / step.name)


def _run(step: Step, calls: list[list[str]], folder: Path) -> None:
    spent = folder / "spent.json"  # by a run that was killed
    before = json.loads(spent.read_text()) if spent.exists() else 0.0
    begun = _processor()
    for call in calls:
        sys.stderr.write(f"{step.name}: {' '.join(call)}\n")
        program = [str(ROOT / call[0]), *call[1:]] if is_study(call) else ["-c", _CALL, *call]
        try:
            subprocess.run([sys.executable, *program], check=True)
        finally:
            if folder.exists():
                spent.write_text(json.dumps(before + _processor() - begun))
    told = {"calls": calls, "seconds": json.loads(spent.read_text())}
    (folder / DONE).write_text(json.dumps(told, indent=1))
    spent.unlink()


def _processor() -> float:
    """Return the seconds of all commands that have ended, in a step and for it."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def seconds(step: Step, longbench: Path, output: Path) -> float | None:
    """Return the processor seconds of a step that is finished and was called the same; None of any other."""
    path = output / step.name / DONE
    told = json.loads(path.read_text()) if path.exists() else {}
    return float(told["seconds"]) if told.get("calls") == step.calls(longbench, output) else None


_TEXTS = "--dataset multi_news --data-dir {longbench} --max-tokens 1500"
_NEWS, _SIXTEEN = f"{_TEXTS} --samples 40", f"{_TEXTS} --samples 16"
_SHARES = "--window 32 --budget 0.1 --budget 0.2 --budget 0.4"
"""What a window of 32, the paper's, leaves room for: the shortest of the 40 prompts has 654 tokens."""
_TRACE = "{folder}/trace.h5"
_CHAIN = "attention,two-stage,two-stage-uniform,attention-unpooled"
_SYSTEMS = ",".join(f"{one}:{way}" for one in ("snapkv", "pyramidkv", "adakv") for way in ("attention", "two-stage"))
_ASKED = f"--budget 128 --budget 256 --compare {_SYSTEMS},streaming-llm:position"
_LATER = "--preset paper-v2 --window 32 --budget 128 --budget 256 --compare attention,two-stage"
_PAGES = "quest:attention,quest:two-stage(alpha=0),quest:hindsight-attention"
_SPARSE = ",".join(
    f"{one}:{way}"
    for one in ("vertical-slash", "vertical-slash(sums=free)")
    for way in ("attention", "two-stage(alpha=0)")
)
_ANSWERED = "{output}/quality"
STEPS = (
    Step("heads", (f"heads {_NEWS} --policy snapkv --policy adakv --compare {_CHAIN}",)),
    Step("heads-v2", (f"heads {_NEWS} --preset paper-v2 {_SHARES} --compare attention,two-stage",)),
    Step(
        "context-only",
        (f"heads {_NEWS} --scenario context-only --preset paper-v2 {_SHARES} --compare attention,two-stage",),
    ),
    Step(
        "shares",
        (
            f"bound-tightness {_NEWS} {_SHARES} --compare attention,two-stage,two-stage-uniform,random",
            f"assumption {_TRACE}",
            f"layers {_TRACE} --per-sample",
        ),
    ),
    Step("summaries", (f"quality {_SIXTEEN} --max-new-tokens 96 {_ASKED},snapkv:two-stage(alpha=0)",)),
    Step("quality", (f"quality --dataset needle,ruler:niah_single_1 --length 1000 --samples 16 --max-new-tokens 24 "
                     f"{_ASKED}",)),
    Step("summaries-v2", (f"quality {_SIXTEEN} --max-new-tokens 96 {_LATER}",)),
    Step("quality-v2", (f"quality --dataset needle,ruler:niah_single_1 --length 1000 --samples 16 --max-new-tokens 24 "
                        f"{_LATER}",)),
    Step(
        "savings",
        (
            "quality --dataset ruler:niah_single_1 --length 1000 --samples 20 --compare attention,two-stage "
            "--budget 0.05 --budget 0.1 --budget 0.2 --budget 0.4 --budget 0.6",
            "studies/savings.py {folder}/ruler-niah_single_1/trace.h5 --by score --by kl",
        ),
    ),
    Step("link", ("correlation {output}/summaries/multi_news/trace.h5 --output {folder}/news",
                  f"correlation {_ANSWERED}/ruler-niah_single_1/trace.h5 {_ANSWERED}/needle/trace.h5")),
    Step("chats", ("generate --dataset {chats} --samples 8 --budget 64 --compress-every 256 --max-new-tokens 320 "
                   "--divergence --output {folder}", "quality {folder}/generation.jsonl --divergence")),
    Step("measures", (f"studies/measures.py {_TEXTS} --samples 8 --budget 128",)),
    Step("alpha", (f"studies/alpha.py {_SIXTEEN}",)),
    Step("regret", (f"studies/regret.py {_TEXTS} --samples 8 --heads 16 --proven 1",)),
    Step("split", (f"studies/split.py {_SIXTEEN} --budget 128",)),
    Step("first-layer", (f"patching {_NEWS} --baseline-in 0 --permutations 0 --greedy 0",)),
    Step("swap", (f"patching {_SIXTEEN} --permutations 8 --greedy 0",)),
    Step("pages", (f"heads {_SIXTEEN} --compare {_PAGES}",)),
    Step("lines", (f"heads {_TEXTS} --samples 8 --compare {_SPARSE}",)),
    Step("cliff", (f"budget --cliff {_SIXTEEN}",)),
    Step("stability", (f"studies/stability.py {{output}}/heads/trace.h5 {_ANSWERED}/needle/trace.h5 --budget 128 "
                       "--selection snapkv:two-stage --baseline snapkv:attention",)),
)  # fmt: skip
