"""Plant mutants one by one and run the tests that reach their lines: `python -m tests.mutants --suite COMMIT`.

The mutants are drawn in the checkout's code. The tests are those of the checkout, or of another commit (`--suite`),
whose tests folder is laid over a copy of the code. Which tests reach a line is measured once per suite, with the
contexts of coverage.
"""

from __future__ import annotations

import argparse
import ast
import json
import os
import random
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
ROOMS = (
    "perturbkv/theory.py",
    "perturbkv/scoring",
    "perturbkv/selection",
    "perturbkv/cache",
    "perturbkv/pipeline",
    "perturbkv/storage",
    "analyses/stats",
)
LEFT_OUT = ("tests/browser", "tests/cluster", "tests/kvpress", "tests/quantised", "tests/real", "tests/mutants")
QUICK = ("oracle", "core", "analyses", "store", "pipeline")
_COMPARE = {ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt, ast.Eq: ast.NotEq, ast.NotEq: ast.Eq}
_ARITHMETIC = {ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.Div, ast.Div: ast.Mult, ast.FloorDiv: ast.Mult}
_BOOLEAN = {ast.And: ast.Or, ast.Or: ast.And}


@dataclass(frozen=True)
class Mutant:
    """A change of one line.

    Attributes:
        path: of the file, from the root.
        line: where it stands, from 1.
        before: the expression.
        after: the changed one.
        column, end_line, end_column: where the expression stands, in characters.
    """

    path: str
    line: int
    before: str
    after: str
    column: int
    end_line: int
    end_column: int

    def text(self, source: str) -> str:
        """Return the file's text with the change in it."""
        lines = source.splitlines(keepends=True)
        start = sum(map(len, lines[: self.line - 1])) + self.column
        end = sum(map(len, lines[: self.end_line - 1])) + self.end_column
        return f"{source[:start]}({self.after}){source[end:]}"


def mutants(path: Path) -> Iterator[Mutant]:
    """Yield every change of a file: comparisons, arithmetic, and/or, conditions and whole numbers, one at a time."""
    source = path.read_text()
    lines = source.splitlines()
    for node in ast.walk(ast.parse(source)):
        after = _changed(node)
        if after is not None and isinstance(node, ast.expr):
            first, last = (
                len(lines[row - 1].encode()[:column].decode())
                for row, column in ((node.lineno, node.col_offset), (node.end_lineno or 0, node.end_col_offset or 0))
            )
            before, name = ast.unparse(node), str(path.relative_to(ROOT))
            yield Mutant(name, node.lineno, before, after, first, node.end_lineno or 0, last)


def _changed(node: ast.AST) -> str | None:
    """Return the changed expression; None where the node is not one to change."""
    match node:
        case ast.Compare(ops=[operator]) if type(operator) in _COMPARE:
            changed: ast.expr = ast.Compare(node.left, [_COMPARE[type(operator)]()], node.comparators)
        case ast.BinOp(op=operator) if type(operator) in _ARITHMETIC and not _is_text(node):
            changed = ast.BinOp(node.left, _ARITHMETIC[type(operator)](), node.right)
        case ast.BoolOp(op=operator):
            changed = ast.BoolOp(_BOOLEAN[type(operator)](), node.values)
        case ast.UnaryOp(op=ast.Not()):
            changed = node.operand
        case ast.Constant(value=int(number)) if not isinstance(number, bool):
            changed = ast.Constant(number + 1)
        case _:
            return None
    return ast.unparse(changed)


def _is_text(node: ast.BinOp) -> bool:
    sides = (node.left, node.right)
    return any(isinstance(side, ast.JoinedStr) or _is_str(side) for side in sides)


def _is_str(node: ast.expr) -> bool:
    return isinstance(node, ast.Constant) and isinstance(node.value, str)


def draw(seed: int, count: int) -> list[Mutant]:
    """Return as many mutants of each room, drawn by seed."""
    chance, drawn = random.Random(seed), []
    for index, room in enumerate(ROOMS):
        files = sorted((ROOT / room).rglob("*.py")) if (ROOT / room).is_dir() else [ROOT / room]
        every = [mutant for path in files for mutant in mutants(path)]
        share = count // len(ROOMS) + (index < count % len(ROOMS))
        drawn += chance.sample(every, min(share, len(every)))
    return drawn


def tree(folder: Path, suite: str | None) -> Path:
    """Return a copy of the checkout's committed code, with the tests of another commit where one is named."""
    if folder.exists():
        shutil.rmtree(folder)
    folder.mkdir(parents=True)
    _unpack("HEAD", folder)
    if suite:
        shutil.rmtree(folder / "tests")
        _unpack(suite, folder, "tests")
    return folder


def _unpack(commit: str, folder: Path, *parts: str) -> None:
    archive = subprocess.run(["git", "-C", ROOT, "archive", commit, *parts], check=True, capture_output=True).stdout
    subprocess.run(["tar", "-x", "-C", folder], input=archive, check=True)


def pytest(folder: Path, *arguments: str, limit: float | None = None) -> int | None:
    """Return pytest's exit code in a copy of the code; None where it ran past the limit."""
    environment = {**os.environ, "PYTHONPATH": str(folder), "OMP_NUM_THREADS": "1", "PYTHONDONTWRITEBYTECODE": "1"}
    command = [sys.executable, "-m", "pytest", "-q", "--no-header", "-p", "no:cacheprovider", *arguments]
    streams = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    try:
        return subprocess.run(command, cwd=folder, env=environment, timeout=limit, check=False, **streams).returncode
    except subprocess.TimeoutExpired:
        return None


def reach(folder: Path, data: Path) -> dict[str, dict[int, set[str]]]:
    """Return file -> line -> the tests that run it, measured with coverage where `data` does not hold it yet."""
    from coverage import CoverageData

    if not data.exists():
        left_out = [word for name in LEFT_OUT for word in ("--ignore", name)]
        pytest(folder, "-n", "2", "--cov=perturbkv", "--cov=analyses", "--cov-context=test", "--cov-report=", *left_out)
        shutil.move(folder / ".coverage", data)
    measured = CoverageData(str(data))
    measured.read()
    found: dict[str, dict[int, set[str]]] = {}
    for path in measured.measured_files():
        name, lines = path.partition(f"{folder}/")[2], measured.contexts_by_lineno(path)
        found[name] = {line: {one.partition("|")[0] for one in tests if one} for line, tests in lines.items()}
    return found


def outcome(mutant: Mutant, folder: Path, tests: set[str], limit: float) -> str:
    """Return caught, missed, unreached or slow (the tests ran past the limit, which counts as caught)."""
    if not tests:
        return "unreached"
    path = folder / mutant.path
    source = path.read_text()
    path.write_text(mutant.text(source))
    try:
        code = pytest(folder, "-x", *sorted(tests, key=_quick_ones_first), limit=limit)
    finally:
        path.write_text(source)
    return "slow" if code is None else "missed" if code == 0 else "caught"


def _quick_ones_first(test: str) -> tuple[int, str]:
    """Return a sort key: tests of formulas and analyses before those that run commands and models."""
    folder = test.split("/")[1]
    return (QUICK.index(folder) if folder in QUICK else len(QUICK)), test


def main() -> None:
    """Print a line per mutant, then the counts; write both as JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--count", type=int, default=60)
    parser.add_argument("--limit", type=float, default=120, help="seconds per mutant")
    parser.add_argument("--suite", help="commit whose tests are run; left out: the checkout's")
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--output", type=Path, default=ROOT / "build" / "mutants")
    asked = parser.parse_args()
    name = asked.suite or "HEAD"
    folders = [tree(asked.output / f"{name}-{job}", asked.suite) for job in range(asked.jobs)]
    lines = reach(folders[0], asked.output / f"{name}.coverage")
    drawn, free = draw(asked.seed, asked.count), list(folders)

    def judge(mutant: Mutant) -> dict[str, object]:
        folder, start = free.pop(), time.monotonic()
        of_file = lines.get(mutant.path, {})
        found = of_file.get(mutant.line)
        at_import = found is not None and not found  # a line that runs when its module is imported has its file's tests
        tests = set().union(*of_file.values()) if at_import else found or set()
        result = outcome(mutant, folder, tests, asked.limit)
        free.append(folder)
        seconds = round(time.monotonic() - start, 1)
        place = f"{mutant.path}:{mutant.line}"
        change = f"{mutant.before} -> {mutant.after}"
        sys.stdout.write(f"{result:10} {seconds:6} s {len(tests):5} tests {place}  {change}\n")
        return {**vars(mutant), "outcome": result, "seconds": seconds, "tests": len(tests)}

    with ThreadPoolExecutor(asked.jobs) as pool:
        judged = list(pool.map(judge, drawn))
    (asked.output / f"{name}.json").write_text(json.dumps(judged, indent=1))
    for kind in ("caught", "slow", "missed", "unreached"):
        sys.stdout.write(f"{kind} {sum(one['outcome'] == kind for one in judged)}\n")


if __name__ == "__main__":
    main()
