"""What objects look like in a notebook: nothing drawn beside them, figures without pyplot, a bar that goes again."""

from __future__ import annotations

import re
import subprocess
import sys
import warnings
from collections.abc import Iterator
from typing import Any
from unittest import mock

import pytest

import perturbkv as pk
from perturbkv.display import Table, as_text
from perturbkv.figures import style
from perturbkv.models.adapter import Adapter
from perturbkv.pipeline import progress
from tests.support.folders import model_folder

TEXT = "The quick brown fox jumps over the lazy dog. " * 3


class Page:
    """What IPython would show: every state of one output, the last one stays."""

    def __init__(self) -> None:
        self.shown: list[dict[str, str]] = []

    def display(self, data: dict[str, str], *, raw: bool, display_id: bool) -> Page:
        assert raw
        assert display_id
        self.update(data, raw=True)
        return self

    def update(self, data: dict[str, str], *, raw: bool) -> None:
        self.shown.append(data)


@pytest.fixture
def page() -> Iterator[Page]:
    """As in a notebook: rich says so, and IPython draws into this page."""
    page, ipython = Page(), mock.MagicMock()
    ipython.display = page.display
    with (
        mock.patch("rich.console._is_jupyter", return_value=True),
        mock.patch.dict(sys.modules, {"IPython": mock.MagicMock(), "IPython.display": ipython}),
    ):
        yield page


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Adapter:
    return pk.load_model(str(model_folder(tmp_path_factory.mktemp("api") / "tiny", positions=512)))


def test_a_bar_in_a_notebook_says_how_far_it_is_and_leaves_nothing(page: Page) -> None:
    with (
        mock.patch.object(progress.time, "monotonic", side_effect=[0.0, 0.0, 0.0, 30.0, 60.0]),
        progress.bar("samples") as bar,
    ):
        bar.update(0, 6)
        bar.update(1, 6)
        bar.advance()
    told = [one["text/plain"] for one in page.shown]
    assert [re.findall(r"[\d:]*\d", text) for text in told] == [
        [],
        ["0", "0:00:00"],
        ["0", "6", "0:00:00"],
        ["1", "6", "0:00:30", "0:02:30"],
        ["2", "6", "0:01:00", "0:02:00"],
        [],
    ]
    assert page.shown[-2]["text/html"] == f'<progress value="2" max="6"></progress> {told[-2]}'
    assert page.shown[-1] == {"text/plain": "", "text/html": ""}


def test_time_left_counts_from_what_was_there_before(page: Page) -> None:
    with (
        mock.patch.object(progress.time, "monotonic", side_effect=[0.0, 0.0, 0.0, 10.0]),
        progress.bar("samples") as bar,
    ):
        bar.update(6, 8)
        bar.update(7, 8)
    assert re.findall(r"[\d:]*\d", page.shown[-2]["text/plain"]) == ["7", "8", "0:00:10", "0:00:10"]


def test_a_bar_goes_when_the_work_fails_and_none_comes_where_none_is_wanted(page: Page) -> None:
    with pytest.raises(ZeroDivisionError), progress.bar("samples", 3):
        raise ZeroDivisionError
    assert page.shown[-1] == {"text/plain": "", "text/html": ""}
    page.shown.clear()
    with progress.bar("samples", 3, shown=False) as bar:
        bar.advance()
    assert page.shown == []


def test_text_of_a_table_is_text_in_a_notebook_too(page: Page) -> None:
    """rich prints into the notebook, whatever the console's file, unless it is told not to."""
    with mock.patch("rich.jupyter.display") as printed:
        said = as_text([Table("title", ("x", "#y"), [("a", "1")]), "line"])
    assert "title" in said
    assert "line" in said
    assert not printed.called


def test_a_figure_shows_itself_without_pyplot() -> None:
    with style.use():
        drawn = style.figure(174, 60)
    image: Any = drawn
    content = image._repr_png_()
    assert content.startswith(b"\x89PNG")
    assert int.from_bytes(content[16:20], "big") == int(174 / 25.4 * 100)


@pytest.mark.slow
def test_no_hint_of_tqdm_reaches_a_notebook_without_widgets() -> None:
    """tqdm warns when it is first imported where this module of ipykernel is loaded."""
    script = """
import sys
import ipykernel.zmqshell
sys.modules["ipywidgets"] = None
import perturbkv as pk
pk.load_model
"""
    ran = subprocess.run([sys.executable, "-W", "always", "-c", script], capture_output=True, text=True, check=True)
    assert "IProgress" not in ran.stderr


def test_a_warning_of_ones_own_is_still_shown() -> None:
    with pytest.warns(UserWarning, match="IProgress not found"):
        assert pk.grid
        warnings.warn("IProgress not found", UserWarning, stacklevel=1)


def test_prompts_show_themselves(model: Adapter) -> None:
    prompts = pk.load_prompts("needle", model, samples=2, lengths=[200], haystack="noise")
    first, *rest = repr(prompts).splitlines()
    assert first.startswith("needle: 2 prompts")
    assert rest == [f"  {prompt}" for prompt in prompts]
    assert repr(prompts[:1]).startswith("needle: 1 prompt, ")
    page = prompts._repr_html_()
    assert page.count("<tr>") == 3
    assert prompts[1].answers[0] in page


def test_answers_show_what_was_written_beside_what_was_expected(model: Adapter) -> None:
    prompts = pk.load_prompts("needle", model, samples=2, lengths=[200], haystack="noise")
    configs = pk.grid(24, selection=("attention", "two-stage"), window=8)
    answers = pk.generate(model, prompts, configs, max_new_tokens=4, progress=False)
    assert [len(one.evicted) for one in answers] == [2, 2]
    said, page = repr(answers), answers._repr_html_()
    for prompt in prompts:
        assert f"  expected: {prompt.answers[0]}" in said.splitlines()
        assert f">{prompt.answers[0]}</td>" in page
    frame = answers.to_frame()
    assert list(frame["config"][:3]) == ["full cache", *(config.label() for config in configs)]
    assert frame["text"][1] == model.tokenizer.decode(answers[0].evicted[0])
    assert frame["held_share"].tolist() == [1.0, *answers[0].held, 1.0, *answers[1].held]
    assert frame["score"].tolist() == [0.0] * 6, "random weights find no number"
    assert answers[1:].rows == answers.rows[1:]
    assert answers[1:] == pk.generate(model, prompts[1:], configs, max_new_tokens=4, progress=False)


def test_answers_without_a_metric_show_no_score(model: Adapter) -> None:
    mine = pk.Prompt.from_text(TEXT, model, "Who?")
    answers = pk.generate(model, mine, pk.grid(24, window=8), max_new_tokens=2, progress=False)
    assert "0 to 1" not in answers._repr_html_()
    assert answers.to_frame()["score"].isna().all()
