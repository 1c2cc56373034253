"""results/paper.md: `python docs/scripts/paper.py LONGBENCH --output runs/paper` runs its commands and writes its rows.

A step that is finished is not run again; a killed one goes on. Rows stand in the page as soon as their step is there.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Sequence
from pathlib import Path

import paper_answers
import paper_bounds
import paper_cost
import paper_heads
import paper_open
import paper_steps
from paper_read import Row, Told
from paper_verdicts import OPEN, RULES, WORDS

PAGE = Path(__file__).parents[1] / "results" / "paper.md"
BENCH = Path(__file__).parents[1] / "bench" / "cpu.json"
SECTIONS = {
    "Bounds and Assumption 1": paper_bounds.ROWS,
    "Heads and layers": paper_heads.ROWS,
    "Answers and cost": paper_answers.ROWS,
    "Open questions": paper_open.ROWS,
}
_HEADS = ("in the paper", "what it says", "here", "verdict", "rule", "step", "to settle it")


def main() -> None:
    """Run what is not finished, then write what there is to tell."""
    reads = argparse.ArgumentParser()
    reads.add_argument("longbench", type=Path)
    reads.add_argument("--output", type=Path, default=Path("runs/paper"))
    reads.add_argument("--page", type=Path, default=PAGE)
    reads.add_argument("--read", action="store_true", help="run nothing")
    asked = reads.parse_args()
    longbench, output = (one.resolve() for one in (asked.longbench, asked.output))
    for step in [] if asked.read else paper_steps.STEPS:
        paper_steps.run([step], longbench, output)
        write(asked.page, longbench, output)
    write(asked.page, longbench, output)


def write(page: Path, longbench: Path, output: Path) -> None:
    """Return the page with its generated parts made anew; what stands between them stays."""
    took = {step.name: paper_steps.seconds(step, longbench, output) for step in paper_steps.STEPS}
    done = {name for name, seconds in took.items() if seconds is not None}
    text = page.read_text()
    for title, rows in SECTIONS.items():
        text = replaced(text, title, table(_HEADS, (_cells(row, told(row, output, done)) for row in rows)))
    text = replaced(text, "Words", table(("verdict", "it says"), ((f"**{one}**", said) for one, said in WORDS.items())))
    text = replaced(text, "Rules", table(("rule", "it says"), ((f"*{one}*", said) for one, said in RULES.items())))
    text = replaced(text, "Steps", "\n".join(["```sh", *_steps(took), "```"]))
    heads, *rows = paper_cost.table(BENCH)
    page.write_text(replaced(text, "Cost", table(heads, rows)))


def told(row: Row, output: Path, done: set[str]) -> Told:
    """Return what a row says, as far as its steps are finished."""
    if not {*row.steps} <= done:
        return Told("", OPEN)
    return row.told(output)


def replaced(text: str, part: str, made: str) -> str:
    """Return the page with one generated part made anew. Raises ValueError where the page has no such part."""
    begin, end = (f"<!-- {part}: {side} -->" for side in ("begin", "end"))
    before, found, rest = text.partition(begin)
    _, ended, after = rest.partition(end)
    if not found or not ended:
        raise ValueError(f"expected {begin} … {end} in the page")
    return f"{before}{begin}\n{made}\n{end}{after}"


def table(heads: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return a Markdown table."""
    lines = [heads, ["---"] * len(heads), *rows]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)


def _cells(row: Row, found: Told) -> list[str]:
    steps = ", ".join(f"`{step}`" for step in row.steps)
    return [row.place, row.claim, found.text, f"**{found.verdict}**", f"*{row.rule}*", steps, row.settles]


def _steps(took: dict[str, float | None]) -> Iterable[str]:
    for step in paper_steps.STEPS:
        seconds = took[step.name]
        yield f"# {step.name}: " + ("not finished" if seconds is None else f"{seconds / 60:.0f} min")
        yield from step.shown()


if __name__ == "__main__":
    main()
