"""The size of the code by feature, for CONTRIBUTING: statements without imports and docstrings, and lines of tests.

`make sizes` puts the table into CONTRIBUTING.md. A file counts for the feature with the longest beginning of its path.
"""

from __future__ import annotations

import ast
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from statistics import median

ROOT = Path(__file__).resolve().parents[2]
PAGE, BEGIN, END = ROOT / "CONTRIBUTING.md", "<!-- sizes -->\n", "<!-- end of sizes -->\n"
FEATURES: dict[str, str] = {
    "choices: configurations, budgets, runs": "perturbkv/configs",
    "models": "perturbkv/models tests/loading tests/hub tests/quantised tests/real",
    "prompts and metrics": "perturbkv/datasets tests/datasets",
    "scores, selections, policies": "perturbkv/scoring perturbkv/selection perturbkv/optimum "
    "tests/optimum tests/kvpress",
    "measuring: prefill, caches, decoding": "perturbkv perturbkv/cache perturbkv/pipeline perturbkv/engines "
    "tests/core tests/pipeline tests/oracle tests/cluster",
    "what waits for a GPU": "perturbkv/selfcheck tests/selfcheck tests/rehearsal",
    "traces and runs on disk": "perturbkv/storage tests/store tests/shards",
    "results and their statistics": "analyses tests/analyses",
    "audit": "perturbkv/auditing analyses/audit tests/audit tests/vllm tests/llamacpp tests/packages",
    "figures": "figures tests/figures",
    "report": "perturbkv/reporting tests/report tests/browser",
    "command line and Python": "cli perturbkv/api tests/cli tests/api tests/examples",
    "studies, benchmarks": "studies benchmarks tests/studies tests/benchmarks",
    "checks of the whole": "tests",
}
"""Feature -> beginnings of its files' paths."""


def feature_of(path: str) -> str:
    """Return the feature of a file, given relative to the repository."""
    owners = {start: name for name, starts in FEATURES.items() for start in starts.split()}
    parts = path.split("/")
    starts = ("/".join(parts[:count]) for count in range(len(parts), 0, -1))
    return next(owners[start] for start in starts if start in owners)


def files() -> Iterator[str]:
    """Yield every Python file of package, analyses, figures, command line, studies, benchmarks and tests."""
    for root in ("perturbkv", "analyses", "figures", "cli", "studies", "benchmarks", "tests"):
        for path in sorted((ROOT / root).rglob("*.py")):  # links to folders are not followed
            yield str(path.relative_to(ROOT))


def sizes_of_functions(tree: ast.AST) -> list[int]:
    """Return each function's number of statements, docstrings among them."""
    functions = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]
    return [sum(isinstance(node, ast.stmt) for node in ast.walk(function)) - 1 for function in functions]


def statements(tree: ast.AST) -> int:
    """Return the number of statements that are neither imports nor docstrings."""
    return sum(isinstance(node, ast.stmt) and not _is_import(node) and not _is_text(node) for node in ast.walk(tree))


def _is_import(node: ast.stmt) -> bool:
    return isinstance(node, ast.Import | ast.ImportFrom)


def _is_text(node: ast.stmt) -> bool:
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)


def table() -> str:
    """Return the table of features, and the lines below it."""
    counts: dict[str, Counter[str]] = {name: Counter() for name in FEATURES}
    functions: list[int] = []
    for path in files():
        text, count = (ROOT / path).read_text(), counts[feature_of(path)]
        if path.startswith("tests/"):
            count["test lines"] += text.count("\n")
            continue
        tree = ast.parse(text)
        count.update({"files": 1, "statements": statements(tree)})
        if not path.startswith(("studies/", "benchmarks/")):
            functions += sizes_of_functions(tree)
    columns = ("files", "statements", "test lines")
    rows = [
        " | ".join([f"| {name}", *(f"{count[column]:,}" if count[column] else "–" for column in columns)]) + " |"
        for name, count in counts.items()
    ]
    apart = "studies, benchmarks"
    total = {key: sum(count[key] for name, count in counts.items() if name != apart) for key in columns[:2]}
    tests = sum(count["test lines"] for count in counts.values())
    head = "| feature | files | statements | lines of tests |\n|---|---:|---:|---:|"
    end = (
        f"Studies and benchmarks apart: {total['statements']:,} statements in {total['files']} files; {tests:,} lines "
        f"of tests; the median function has {median(functions):.0f} statements."
    )
    return "\n".join([head, *rows, "", end]) + "\n"


def main() -> None:
    """Put the table into CONTRIBUTING.md."""
    before, _, rest = PAGE.read_text().partition(BEGIN)
    after = rest.partition(END)[2]
    PAGE.write_text(before + BEGIN + table() + END + after)


if __name__ == "__main__":
    main()
