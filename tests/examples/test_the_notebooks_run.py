"""Every notebook under examples/ runs on a tiny model, and stands there with the embedded model's output."""

from __future__ import annotations

import base64
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import nbformat
import pytest

from examples.remake import run
from tests.support.folders import model_folder

pytestmark = pytest.mark.slow

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
SMALL = {
    "colab": "SAMPLES, LENGTH, BUDGETS = 2, 1000, [64, 128]",
    "first_look": "SAMPLES, LENGTH = 2, 1000",
    "own_figure": "SAMPLES, LENGTH, BUDGETS, TRACE = 2, 1000, [0.1, 0.2], 'own.h5'",
    "own_prompts": "MAX_TOKENS, TEXTS = 400, {name: TEXTS[name] for name in list(TEXTS)[:2]}",
}
"""What makes each take seconds; a tiny model's tokens are bytes."""
NOTHING = {"text/plain": "", "text/html": ""}
LINK = re.compile(r"\]\((?!https?:)([^)\s#]+)")
LARGEST = 400 * 1024
OF_A_MACHINE = re.compile(r"(?<![\w.<])/(?:home|root|tmp|usr|var|opt|work|Users|mnt|private)/|[A-Z]:\\")
"""A folder of somebody's machine."""

Notebook = Any


def read(name: str) -> Notebook:
    return nbformat.read(EXAMPLES / f"{name}.ipynb", as_version=4)


def code(book: Notebook) -> list[Any]:
    return [cell for cell in book.cells if cell.cell_type == "code"]


def outputs(book: Notebook) -> Iterator[Any]:
    return (output for cell in code(book) for output in cell.outputs)


def texts(book: Notebook) -> Iterator[str]:
    """Everything that a reader sees as text."""
    for output in outputs(book):
        yield from [output.text] if output.output_type == "stream" else map(str, output.get("data", {}).values())


def noise(book: Notebook) -> list[Any]:
    """What no reader should see: errors, anything on stderr, and what a library draws by itself."""
    return [
        output
        for output in outputs(book)
        if output.output_type == "error"
        or output.get("name") == "stderr"
        or any("widget" in kind for kind in output.get("data", {}))
        or "<progress" in output.get("data", {}).get("text/html", "")
        or "Warning" in "".join(map(str, output.get("data", {}).values()))
    ]


def silent(book: Notebook) -> list[str]:
    """Code cells that end in something to be shown, and show nothing."""
    return [cell.source for cell in code(book) if "parameters" not in cell.metadata.get("tags", ()) and not any(
        output.get("text") or output.get("data", {}).get("text/plain") for output in cell.outputs
    )]  # fmt: skip


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return model_folder(tmp_path_factory.mktemp("models") / "tiny", positions=4096)


def executed(name: str, model: Path, folder: Path) -> Notebook:
    """The notebook with its parameters replaced, run in a fresh kernel that may be as loud as it likes."""
    book = read(name)
    (parameters,) = [cell for cell in code(book) if "parameters" in cell.metadata.get("tags", ())]
    parameters.source += f"\nMODEL = {str(model)!r}\n{SMALL[name]}"
    loud = {key: value for key, value in os.environ.items() if key not in ("TQDM_DISABLE", "HF_HUB_OFFLINE")}
    loud |= {"IPYTHONDIR": str(folder / "ipython"), "PYTHONPATH": str(EXAMPLES.parent)}
    return run(book, folder, env=loud)


def test_every_notebook_is_run_here() -> None:
    assert {path.stem for path in EXAMPLES.glob("*.ipynb")} == set(SMALL)


@pytest.mark.parametrize("name", SMALL)
def test_a_notebook_runs_on_a_tiny_model_and_says_nothing_of_its_own(name: str, tiny: Path, tmp_path: Path) -> None:
    book = executed(name, tiny, tmp_path)
    assert noise(book) == []
    assert silent(book) == []
    assert any("image/png" in output.get("data", {}) for output in outputs(book))
    assert any(output.get("data") == NOTHING for output in outputs(book)), "a bar was there, and is gone"


@pytest.mark.parametrize("name", SMALL)
def test_a_notebook_stands_with_the_embedded_models_output(name: str) -> None:
    book, path = read(name), EXAMPLES / f"{name}.ipynb"
    assert 8 <= len(book.cells) <= 14
    assert path.stat().st_size < LARGEST
    assert noise(book) == []
    assert silent(book) == []
    assert any("smollm2-135m-q4_1" in text for text in texts(book))
    assert not any(OF_A_MACHINE.search(text) for text in texts(book))
    assert not any("execution" in cell.metadata for cell in book.cells), "times of this machine"
    assert set(book.metadata) == {"kernelspec"}
    assert [cell.execution_count for cell in code(book)] == list(range(1, len(code(book)) + 1))


@pytest.mark.parametrize("name", SMALL)
def test_what_a_notebook_links_to_is_there(name: str) -> None:
    links = LINK.findall("\n".join(cell.source for cell in read(name).cells if cell.cell_type == "markdown"))
    assert links
    assert [link for link in links if not (EXAMPLES / link).exists()] == []


@pytest.mark.parametrize("name", SMALL)
def test_a_stored_figure_is_a_small_one(name: str) -> None:
    figures = [output.data["image/png"] for output in outputs(read(name)) if "image/png" in output.get("data", {})]
    assert figures
    for figure in figures:
        width = int.from_bytes(base64.b64decode(figure)[16:20], "big")  # PNG: IHDR begins at byte 16
        assert width <= 1000


@pytest.mark.parametrize(
    "planted",
    [
        nbformat.v4.new_output("stream", name="stderr", text="100%|█████|"),
        nbformat.v4.new_output("error", ename="E", evalue="", traceback=[]),
        nbformat.v4.new_output("display_data", {"application/vnd.jupyter.widget-view+json": {}}),
        nbformat.v4.new_output("display_data", {"text/plain": "samples: 1", "text/html": "<progress>"}),
        nbformat.v4.new_output("display_data", {"text/plain": "live.py:260: UserWarning: install ipywidgets"}),
    ],
)
def test_noise_that_is_planted_is_found(planted: Any) -> None:
    book = read("first_look")
    code(book)[0].outputs.append(planted)
    assert noise(book) == [planted]


def test_a_path_and_a_silent_cell_that_are_planted_are_found() -> None:
    assert OF_A_MACHINE.search("saved to /tmp/x/t.h5")
    assert OF_A_MACHINE.search("(/home/me/t.h5)")
    assert not OF_A_MACHINE.search("cache share, </tmp/>, layer/head")
    book = read("first_look")
    code(book)[-1].outputs = []
    assert silent(book) == [code(book)[-1].source]
