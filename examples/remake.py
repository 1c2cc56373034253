"""Run the notebooks again and store their outputs: `make examples`, or `python examples/remake.py [NAME …]`."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import nbclient
import nbformat

FOLDER = Path(__file__).resolve().parent


def run(book: Any, folder: Path, **options: Any) -> Any:
    """Return the notebook with fresh outputs, without times and without the version of Python.

    `options` are passed to the kernel. Raises CellExecutionError where a cell fails.
    """
    resources = {"metadata": {"path": str(folder)}}
    nbclient.NotebookClient(book, timeout=600, record_timing=False, resources=resources).execute(**options)
    book.metadata.pop("language_info", None)
    for cell in book.cells:
        cell.metadata.pop("execution", None)
    return book


def main() -> None:
    """Run each notebook in turn; one that fails stays unchanged."""
    for name in sys.argv[1:] or sorted(path.stem for path in FOLDER.glob("*.ipynb")):
        path = FOLDER / f"{name}.ipynb"
        nbformat.write(run(nbformat.read(path, as_version=4), FOLDER), path)


if __name__ == "__main__":
    main()
