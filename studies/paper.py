"""docs/results/paper.md, claim by claim: `python studies/paper.py LONGBENCH` runs its commands and writes its rows.

A step, a folder in `--output`, that is finished is not run again; a killed one goes on. Rows stand in the page as soon
as their step is there. The last table has what would settle a claim on a model of 8 billion parameters, and its cost:
arithmetic comes from the models' shapes, this machine's rate is that of a plain prefill of the embedded model
(docs/bench/cpu.json), as is what a sweep and its answers take over plain use; a GPU's is assumed.
"""

from __future__ import annotations

import argparse
import json
import resource
import shlex
import statistics
import subprocess
import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import paper_answers
import paper_heads
from common import markdown
from paper_verdicts import OPEN, RULES, WORDS, Finding, Row

LIMIT = 20 * 60
"""Processor seconds that a step may take, with one thread: what else the machine does is left out."""
DONE = "step.json"
"""What a finished step leaves in its folder: what was called, and the processor seconds that it took."""
ROOT = Path(__file__).parents[1]
CHATS, PAGE, BENCH = (ROOT / "docs" / name for name in ("paper_chats.jsonl", "results/paper.md", "bench/cpu.json"))
_CALL = "from perturbkv.cli.start import main; main()"


@dataclass(frozen=True)
class Step:
    """Commands and studies that leave one folder, the first of which makes what the others look at.

    In them `{longbench}` stands for LongBench's folder, `{folder}` for the step's own, `{output}` for that of all.
    """

    name: str
    commands: tuple[str, ...]

    def calls(self, longbench: Path, output: Path) -> list[list[str]]:
        """Return the words that perturbkv, or a study, is called with, a list per command, `--output` among them."""
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
            _run_step(step, step.calls(longbench, output), output / step.name)


def _run_step(step: Step, calls: list[list[str]], folder: Path) -> None:
    """Run the calls of a step one after the other, and leave in its folder what was called and how long it took."""
    spent = folder / "spent.json"  # by a run that was killed
    before = json.loads(spent.read_text()) if spent.exists() else 0.0
    begun = _processor_seconds()
    for call in calls:
        sys.stderr.write(f"{step.name}: {' '.join(call)}\n")
        program = [str(ROOT / call[0]), *call[1:]] if is_study(call) else ["-c", _CALL, *call]
        try:
            subprocess.run([sys.executable, *program], check=True)
        finally:
            if folder.exists():
                spent.write_text(json.dumps(before + _processor_seconds() - begun))
    finished = {"calls": calls, "seconds": json.loads(spent.read_text())}
    (folder / DONE).write_text(json.dumps(finished, indent=1))
    spent.unlink()


def _processor_seconds() -> float:
    """Return the processor seconds of all commands that this process ran and that have ended."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def seconds(step: Step, longbench: Path, output: Path) -> float | None:
    """Return the processor seconds of a step that is finished and was called the same; None of any other."""
    path = output / step.name / DONE
    finished = json.loads(path.read_text()) if path.exists() else {}
    return float(finished["seconds"]) if finished.get("calls") == step.calls(longbench, output) else None


_TEXTS = "--dataset multi_news --data-dir {longbench} --max-tokens 1500"
_NEWS, _SIXTEEN = f"{_TEXTS} --samples 40", f"{_TEXTS} --samples 16"
_SHARES = "--window 32 --budget 0.1 --budget 0.2 --budget 0.4"
"""What a window of 32, the paper's, leaves room for: the shortest of the 40 prompts has 654 tokens."""
_TRACE = "{folder}/trace.h5"
_CHAIN = "attention,two-stage,two-stage-uniform,attention-unpooled"
_SYSTEMS = ",".join(f"{one}:{way}" for one in ("snapkv", "pyramidkv", "adakv") for way in ("attention", "two-stage"))
_ASKED = f"--budget 128 --budget 256 --compare {_SYSTEMS},streaming-llm:position"
_LATER = "--preset paper-v2 --window 32 --budget 128 --budget 256 --compare attention,two-stage"
_NUMBERS = "quality --steps 1 --dataset needle,ruler:niah_single_1 --length 1000 --samples 16 --max-new-tokens 24"
_PAGES = "quest:attention,quest:two-stage(alpha=0),quest:hindsight-attention"
_SPARSE = ",".join(
    f"{one}:{way}"
    for one in ("vertical-slash", "vertical-slash(sums=free)")
    for way in ("attention", "two-stage(alpha=0)")
)
_ANSWERED = "{output}/quality"
STEPS = (
    Step("heads", (f"heads --steps 1 {_NEWS} --policy snapkv --policy adakv --compare {_CHAIN}",)),
    Step("heads-v2", (f"heads --steps 1 {_NEWS} --preset paper-v2 {_SHARES} --compare attention,two-stage",)),
    Step(
        "context-only",
        (f"heads --steps 1 {_NEWS} --scenario context-only --preset paper-v2 {_SHARES} --compare attention,two-stage",),
    ),
    Step(
        "shares",
        (
            f"bound-tightness --steps 1 {_NEWS} {_SHARES} --compare attention,two-stage,two-stage-uniform,random",
            f"assumption {_TRACE}",
            f"layers {_TRACE} --per-sample",
        ),
    ),
    Step("summaries", (f"quality --steps 1 {_SIXTEEN} --max-new-tokens 96 {_ASKED},snapkv:two-stage(alpha=0)",)),
    Step("quality", (f"{_NUMBERS} {_ASKED}",)),
    Step("summaries-v2", (f"quality --steps 1 {_SIXTEEN} --max-new-tokens 96 {_LATER}",)),
    Step("quality-v2", (f"{_NUMBERS} {_LATER}",)),
    Step(
        "savings",
        (
            "quality --steps 1 --dataset ruler:niah_single_1 --length 1000 --samples 20 --compare attention,two-stage "
            "--budget 0.05 --budget 0.1 --budget 0.2 --budget 0.4 --budget 0.6",
            "studies/savings.py {folder}/ruler-niah_single_1/trace.h5 --by score --by kl",
        ),
    ),
    Step("link", ("correlation {output}/summaries/multi_news/trace.h5 --output {folder}/news",
                  f"correlation {_ANSWERED}/ruler-niah_single_1/trace.h5 {_ANSWERED}/needle/trace.h5")),
    Step("chats", ("generate --dataset {chats} --samples 8 --budget 64 --compress-over 256 --max-new-tokens 320 "
                   "--divergence --output {folder}", "quality {folder}/generation.jsonl --divergence")),
    Step("measures", (f"studies/measures.py {_TEXTS} --samples 8 --budget 128",)),
    Step("alpha", (f"studies/alpha.py {_SIXTEEN}",)),
    Step("regret", (f"studies/regret.py {_TEXTS} --samples 8 --heads 16 --proven 1",)),
    Step("split", (f"studies/split.py {_SIXTEEN} --budget 128",)),
    Step("first-layer", (f"patching {_NEWS} --baseline-in 0 --permutations 0 --greedy 0",)),
    Step("swap", (f"patching {_SIXTEEN} --permutations 8 --greedy 0",)),
    Step("pages", (f"heads --steps 1 {_SIXTEEN} --compare {_PAGES}",)),
    Step("lines", (f"heads --steps 1 {_TEXTS} --samples 8 --compare {_SPARSE}",)),
    Step("cliff", (f"budget --cliff --steps 1 {_SIXTEEN}",)),
    Step("stability", (f"studies/stability.py {{output}}/heads/trace.h5 {_ANSWERED}/needle/trace.h5 --budget 128 "
                       "--selection snapkv:two-stage --baseline snapkv:attention",)),
)  # fmt: skip

FLOPS, USED, BANDWIDTH, READ = 989e12, 0.4, 3.35e12, 0.5
"""Of one H100 in bfloat16, by its specification, and the shares of it that a prefill and decoding are assumed to use:
operations a second, and bytes a second."""
_HOUR, _BYTES = 3_600, 2
Measured = dict[str, Any]


@dataclass(frozen=True)
class Shape:
    """A model's numbers in the matrices that every token passes, its layers, and all heads' width."""

    weights: float
    layers: int
    width: int

    def prefill(self, tokens: float) -> float:
        """Return a prefill's floating-point operations: two a weight and token, and causal attention's two products."""
        return 2 * self.weights * tokens + 2 * tokens**2 * self.width * self.layers


EMBEDDED = Shape(106.2e6, 30, 576)
LLAMA = Shape(6.98e9, 32, 4096)
QWEN = Shape(31.2e9, 64, 5120)
LONG = tuple(range(8_000, 128_001, 8_000))


@dataclass(frozen=True)
class Settling:
    """A command on a large model.

    Attributes:
        name: as rows of the page refer to it.
        command: what to type.
        lengths: tokens of the prompts; `samples` of each.
        rows: caches that each decoded token passes.
        answer: tokens that are decoded.
        runs: plain prefills of each prompt beside the sweep's own.
        searched: seconds of this machine's processors at most, whatever the model.
        shape: of the model.
    """

    name: str
    command: str
    lengths: tuple[int, ...]
    samples: int
    rows: int
    answer: int = 1
    runs: float = 0
    searched: float = 0
    shape: Shape = LLAMA

    @property
    def prompts(self) -> int:
        """Number of prompts of all lengths."""
        return self.samples * len(self.lengths)

    def operations(self, sweep: float) -> float:
        """Return the operations of all prefills and of what is decoded; `sweep`: a sweep's cost in plain prefills."""
        prefills = (sweep + self.runs) * self.samples * sum(map(self.shape.prefill, self.lengths))
        return prefills + 2 * self.shape.weights * self.prompts * self.rows * self.answer

    def bytes_read(self) -> float:
        """Return the bytes of weights that decoding reads: once for all rows of a token."""
        return _BYTES * self.shape.weights * self.prompts * self.answer


def cost_rows(bench: Path) -> Iterator[tuple[str, ...]]:
    """Yield the heads of the table of costs, then a row per command on a large model.

    `bench`: the file with this machine's measured times.
    """
    rows = {row["name"]: row for row in json.loads(bench.read_text())["rows"]}
    sweep = rows["sweep-24"]["value"]
    assert sweep is not None
    yield ("", "command", "prompts", "PFLOP", "one H100, assumed", "two cores, as measured")
    for one in SETTLING:
        work = one.operations(sweep)
        gpu = work / (FLOPS * USED) + one.bytes_read() / (BANDWIDTH * READ) + one.searched
        cores = work / rate(rows) + one.searched
        prompts = f"{one.prompts:,} of {_tokens_text(one.lengths)} tokens"
        answers = f", {one.answer} decoded with {one.rows} caches"
        yield one.name, f"`{one.command}`", prompts + answers, f"{work / 1e15:,.1f}", _time_text(gpu), _time_text(cores)


def rate(rows: Measured) -> float:
    """Return this machine's operations per second in a plain prefill of 4,096 tokens; `rows`: name -> measured row."""
    return EMBEDDED.prefill(4096) / float(statistics.median(rows["sweep-24"]["details"]["base_seconds"]))


def _tokens_text(lengths: tuple[int, ...]) -> str:
    """Return the lengths of prompts as text: '3,619', or '8,000 to 128,000'."""
    return f"{lengths[0]:,}" if len(lengths) == 1 else f"{lengths[0]:,} to {lengths[-1]:,}"


def _time_text(seconds: float) -> str:
    """Return a time in minutes, hours or days: '12 min', at least one minute."""
    if seconds < _HOUR:
        return f"{max(1.0, seconds / 60):.0f} min"
    hours = seconds / _HOUR
    return f"{hours:.0f} h" if hours < 100 else f"{hours / 24:,.0f} days"


_QASPER = "-m llama-3.1-8b -d qasper --samples 200"
_MANY = "snapkv:attention,snapkv:two-stage,pyramidkv:attention,…"
SETTLING = (
    Settling("heads", f"heads {_QASPER} --policy snapkv --policy adakv -b 128 -b 0.1 …", (3_619,), 200, 24),
    Settling("swap", "patching -m llama-3.1-8b -d qasper --samples 32", (3_619,), 32, 600),
    Settling(
        "regret", "studies/regret.py --model llama-3.1-8b --dataset qasper", (3_619,), 8, 7, searched=8 * (64 + 8) * 60
    ),
    Settling(
        "alpha", "studies/alpha.py --model llama-3.1-8b --dataset qasper --samples 200", (3_619,), 200, 24, runs=1.2
    ),
    Settling("sparse", f"heads {_QASPER} --compare 'quest:attention,quest:two-stage(alpha=0)'", (3_619,), 200, 4),
    Settling("link", f"correlation {_QASPER} --max-new-tokens 64", (3_619,), 200, 24, answer=64),
    Settling("needle", "needle -m llama-3.1-8b --lengths 8000,…,128000 --depths 0,0.1,…,1", LONG, 11, 6, answer=12),
    Settling("chats", "generate -m llama-3.1-8b -d chats.jsonl -b 64 --compress-over 256", (36,), 805, 3, answer=567),
    Settling("tables", f"quality -m llama-3.1-8b -d DATASETS --compare {_MANY}", (6_711,), 3_750, 28, answer=128),
    Settling("larger", "quality -m qwen2.5-32b -d DATASETS …", (6_711,), 3_750, 9, answer=128, shape=QWEN),
)

SECTIONS = {
    "Bounds and Assumption 1": paper_heads.BOUNDS,
    "Heads and layers": paper_heads.HEADS,
    "Answers and cost": paper_answers.ANSWERS,
    "Open questions": paper_answers.OPEN_QUESTIONS,
}
_HEADS = ("in the paper", "what it says", "here", "verdict", "rule", "step", "to settle it")


def main() -> None:
    """Run the steps that are not finished, and write the page after each."""
    reads = argparse.ArgumentParser()
    reads.add_argument("longbench", type=Path)
    reads.add_argument("--output", type=Path, default=Path("runs/paper"))
    reads.add_argument("--page", type=Path, default=PAGE)
    reads.add_argument("--read", action="store_true", help="run nothing")
    asked = reads.parse_args()
    longbench, output = (one.resolve() for one in (asked.longbench, asked.output))
    for step in [] if asked.read else STEPS:
        run([step], longbench, output)
        write(asked.page, longbench, output)
    write(asked.page, longbench, output)


def write(page: Path, longbench: Path, output: Path) -> None:
    """Write the page with its generated parts made anew; what stands between them stays."""
    took = {step.name: seconds(step, longbench, output) for step in STEPS}
    done = {name for name, spent in took.items() if spent is not None}
    heads, *costs = cost_rows(BENCH)
    parts = {
        **{title: markdown(_HEADS, (_cells(row, finding_of(row, output, done)) for row in rows))
           for title, rows in SECTIONS.items()},
        "Words": markdown(("verdict", "it says"), ((f"**{one}**", said) for one, said in WORDS.items())),
        "Rules": markdown(("rule", "it says"), ((f"*{one}*", said) for one, said in RULES.items())),
        "Steps": "\n".join(["```sh", *_step_lines(took), "```"]),
        "Cost": markdown(heads, costs),
    }  # fmt: skip
    text = page.read_text()
    for part, made in parts.items():
        text = replace_part(text, part, made)
    page.write_text(text)


def finding_of(row: Row, output: Path, done: set[str]) -> Finding:
    """Return a row's finding; OPEN without a text while not all of its steps are `done`."""
    if not {*row.steps} <= done:
        return Finding("", OPEN)
    return row.find(output)


def replace_part(text: str, part: str, made: str) -> str:
    """Return the page with one generated part made anew. Raises ValueError where the page has no such part."""
    begin, end = (f"<!-- {part}: {side} -->" for side in ("begin", "end"))
    before, found, rest = text.partition(begin)
    _, ended, after = rest.partition(end)
    if not found or not ended:
        raise ValueError(f"expected {begin} … {end} in the page")
    return f"{before}{begin}\n{made}\n{end}{after}"


def _cells(row: Row, found: Finding) -> list[str]:
    """Return the cells of a row of the page, under `_HEADS`."""
    steps = ", ".join(f"`{step}`" for step in row.steps)
    return [row.place, row.claim, found.text, f"**{found.verdict}**", f"*{row.rule}*", steps, row.settles]


def _step_lines(took: dict[str, float | None]) -> Iterable[str]:
    """Yield each step's commands as shell lines, below a comment with its minutes; `took`: step -> seconds."""
    for step in STEPS:
        spent = took[step.name]
        yield f"# {step.name}: " + ("not finished" if spent is None else f"{spent / 60:.0f} min")
        yield from step.shown()


if __name__ == "__main__":
    main()
