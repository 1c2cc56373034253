"""--style draws for a screen, a paper or a talk; a paper's captions stand beside its figures."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from perturbkv.analyses.horizon import horizon
from tests.house.test_no_label_is_parsed import SWEPT, asked_of, made
from tests.support.asked import refused
from tests.support.undrawn import undrawn

Run = Callable[..., Any]
CLIFF = ("budget", "--cliff", "t.h5", "--format", "pdf")


@pytest.fixture
def trace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return made(SWEPT).save(tmp_path / "t.h5")


@pytest.mark.slow
@pytest.mark.usefixtures("trace")
def test_a_papers_caption_stands_beside_its_figure_and_replaces_itself_alone(perturbkv: Run, tmp_path: Path) -> None:
    told = perturbkv(*CLIFF, "--style", "paper", "--columns", 1, "--json").json()
    names = [Path(figure).name for figure in told["figures"]]
    assert names == ["budget-cliff.pdf", "budget-cliff.caption.txt", "budget-cliff.caption.tex"]
    caption = tmp_path / "budget-cliff.caption.tex"
    assert caption.read_text().startswith("% Caption by perturbkv: trace ")
    assert perturbkv(*CLIFF, "--style", "paper").code == 0
    caption.write_text("my own words")
    refused(perturbkv(*CLIFF, "--style", "paper"), "budget-cliff.caption", "--overwrite")
    assert caption.read_text() == "my own words"


@pytest.mark.usefixtures("trace")
def test_a_screens_figure_has_no_caption_beside_it(perturbkv: Run) -> None:
    told = perturbkv(*CLIFF, "--json").json()
    assert [Path(figure).name for figure in told["figures"]] == ["budget-cliff.pdf"]


@pytest.mark.slow
@pytest.mark.usefixtures("trace")
def test_a_screens_figure_leaves_no_caption_of_the_papers_figure_it_replaces(perturbkv: Run, tmp_path: Path) -> None:
    captions = [tmp_path / f"budget-cliff.caption.{suffix}" for suffix in ("txt", "tex")]
    with undrawn():
        assert perturbkv(*CLIFF, "--style", "paper").code == 0
        assert perturbkv(*CLIFF[:-1], "png", "--style", "screen").code == 0
        assert all(path.exists() for path in captions)  # the paper's PDF is still there
        (tmp_path / "budget-cliff.png").unlink()
        assert perturbkv(*CLIFF, "--style", "screen", "--overwrite").code == 0
        assert not any(path.exists() for path in captions)
        for path in captions:
            path.write_text("my own words")
        assert perturbkv(*CLIFF, "--style", "screen", "--overwrite").code == 0
    assert [path.read_text() for path in captions] == ["my own words"] * 2


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (("--style", "papr"), ["unknown style 'papr'; known: paper, "]),
        (("--style", "talk", "--columns", "1"), ["--columns 1 is 84 mm", "339 mm", "leave out --columns"]),
    ],
)
@pytest.mark.usefixtures("trace")
def test_a_bad_style_is_one_line_and_leaves_nothing(
    perturbkv: Run, tmp_path: Path, options: tuple[str, ...], said: list[str]
) -> None:
    refused(perturbkv(*CLIFF, *options), *said)
    assert [path.name for path in tmp_path.iterdir()] == ["t.h5"]


@pytest.mark.slow
def test_a_figure_too_wide_for_a_column_says_what_to_type(
    perturbkv: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    trace = asked_of("horizon")
    assert len(horizon.horizon(trace).configs) > 6
    trace.save(tmp_path / "t.h5")
    ran = perturbkv("horizon", "t.h5", "--style", "paper", "--columns", 1, "--format", "png")
    refused(ran, "--columns 1 is too narrow for figure horizon", "mm; write --columns 2")
