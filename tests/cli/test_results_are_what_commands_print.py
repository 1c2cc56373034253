"""What a notebook holds is what the command prints, writes and draws; and what all of it is made of."""

from __future__ import annotations

import doctest
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from matplotlib.figure import Figure
from rich.cells import cell_len

import perturbkv as pk
from perturbkv.analyses.needle.retrieval import OUTCOMES
from perturbkv.analyses.result import Result
from perturbkv.trace import Trace
from tests.house.test_no_label_is_parsed import asked_of

Run = Callable[..., Any]
ANALYSES: dict[str, Callable[[Trace], Result]] = {
    "assumption": lambda trace: pk.assumption(trace),
    "bound-tightness": lambda trace: pk.bound_tightness(trace),
    "ablation": lambda trace: pk.ablation(trace),
    "ablation --restrictions": lambda trace: pk.restriction(trace),
    "ablation --bytes": lambda trace: pk.equal_bytes(trace),
    "horizon": lambda trace: pk.horizon(trace),
    "needle": lambda trace: pk.needle(trace),
    "correlation": lambda trace: pk.correlation(trace),
    "budget": lambda trace: pk.safe_budget(trace, max_kl=200.0),
    "budget --cliff": lambda trace: pk.cliff(trace),
}
OPTIONS = {"budget": ["--max-kl", "200"]}
OF_COMMAND = {
    "restriction": "ablation --restrictions",
    "equal_bytes": "ablation --bytes",
    "link": "correlation",
    "cliff": "budget --cliff",
}
"""Module -> its command, where they are not called alike."""
EVERY = pytest.mark.parametrize("command", ANALYSES)


@pytest.fixture(scope="module")
def paths(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("made")
    return {name: asked_of(name).save(folder / f"{name.replace(' ', '')}.h5") for name in ANALYSES}


@pytest.fixture
def path(paths: dict[str, Path], command: str) -> Path:
    return paths[command]


@pytest.fixture(scope="module")
def results(paths: dict[str, Path]) -> dict[str, Result]:
    return {name: analyse(pk.read_trace(paths[name])) for name, analyse in ANALYSES.items()}


@pytest.mark.slow
@EVERY
def test_numbers_are_those_of_the_command(perturbkv: Run, path: Path, results: dict[str, Result], command: str) -> None:
    told = perturbkv(*command.split(), path, *OPTIONS.get(command, []), "-o", "out", "--json", "--format", "png").json()
    expected = json.loads(json.dumps(results[command].to_dict(), allow_nan=False))
    assert {name: told[name] for name in expected} == expected


@EVERY
def test_a_result_shows_itself_within_80_columns_and_as_html(results: dict[str, Result], command: str) -> None:
    result = results[command]
    lines = repr(result).splitlines()
    assert max(map(cell_len, lines)) <= 80
    assert " ".join(repr(result).split()).startswith(" ".join(result.conclusion().split()))
    page = result._repr_html_()
    assert page.startswith("<p>")
    assert page.count("<table>") == sum(not isinstance(part, str) for part in result.body()) > 0


@EVERY
def test_a_result_plots_itself_at_both_widths(results: dict[str, Result], command: str) -> None:
    plots = [name for name in dir(results[command]) if name.startswith("plot")]
    for name in plots:
        for width in (84, 174):
            figure = getattr(results[command], name)(width_mm=width)
            assert isinstance(figure, Figure)
            assert figure.get_figwidth() * 25.4 == pytest.approx(width)


@EVERY
def test_a_frame_holds_plain_values_and_names_its_configurations(results: dict[str, Result], command: str) -> None:
    frame = results[command].to_frame(results[command].ROWS)
    assert {"config", "policy", "selection", "budget"} <= set(frame.columns)
    kinds = {type(value) for row in results[command].records() for value in row.values()}
    assert kinds <= {str, int, float, type(None)}
    assert len(frame) == len(results[command].records()) > 0


@EVERY
def test_a_frame_has_a_row_per_line_of_the_table(results: dict[str, Result], command: str) -> None:
    result = results[command]
    if result.ROWS:
        frame, lines = result.to_frame(), [line for line in result.lines() if line.records]
        assert len(frame) == len(lines) > 0
        assert {result.FIRST, "n"} < set(frame.columns)


def test_sigma_by_head_adds_up_to_its_shares(results: dict[str, Result]) -> None:
    frame = results["assumption"].to_frame("heads")
    for told in results["assumption"].to_dict()["configurations"]:
        for reading in ("sigma_topk", "sigma_stage1", "retained_mass"):
            rows = frame[(frame.config == told["config"]["label"]) & (frame.reading == reading)]
            share = 1 - rows.samples_at_most_half.sum() / rows.samples.sum()
            assert share == pytest.approx(told[reading]["share_above_half"])
            np.testing.assert_array_equal(rows.sigma, np.ravel(told[reading]["sigma"]))


def test_ratios_by_head_are_those_of_the_numbers(results: dict[str, Result]) -> None:
    frame = results["bound-tightness"].to_frame("heads")
    for told in results["bound-tightness"].to_dict()["configurations"]:
        rows = frame[frame.config == told["config"]["label"]]
        assert rows.sigma_at_most_half.mean() == pytest.approx(told["sigma_at_most_half_share"])
        for ratio, found in told["ratios"].items():
            shown = rows[rows.ratio == ratio][["least", "median", "largest"]].to_numpy()
            np.testing.assert_array_equal(shown, np.reshape(found["by_head"], (-1, 3)))


def test_perturbation_by_head_adds_up_to_the_ratios_of_the_ablation(results: dict[str, Result]) -> None:
    frame = results["ablation"].to_frame("heads")
    frame["alpha"] = frame.alpha.astype(object).where(frame.alpha.notna(), None)
    sums = frame.groupby(["part", "baseline", "config", "kind"], sort=False)[["baseline_mean", "treatment_mean"]].sum()
    for setting in results["ablation"].to_dict()["settings"]:
        for part in ("rows", "brings"):
            for row in setting[part]:
                for kind in ("isolated", "propagated"):
                    found = sums.loc[(part, row["baseline"]["label"], row["treatment"]["label"], kind)]
                    assert found.treatment_mean / found.baseline_mean == pytest.approx(row[kind]["sum_ratio"])


def test_steps_are_those_of_the_curves(results: dict[str, Result]) -> None:
    frame = results["horizon"].to_frame("steps")
    for told in results["horizon"].to_dict()["configs"]:
        rows = frame[frame.config == told["config"]["label"]]
        for curve in told["curves"]:
            np.testing.assert_array_equal(rows[curve["kind"]], curve["relative"])
            assert rows[curve["kind"]].iloc[0] == pytest.approx(curve["first"])  # of three steps a third is one
            assert rows[curve["kind"]].iloc[-1] == pytest.approx(curve["last"])
        np.testing.assert_array_equal(rows.kl, told["kl"])


def test_what_each_sample_found_adds_up_to_the_shares(results: dict[str, Result]) -> None:
    frame, told = results["needle"].to_frame("samples"), results["needle"].to_dict()
    for method in (told["full"], *told["methods"]):
        label = method["config"]["label"] if method["config"] else "full cache"
        rows = frame[frame.config == label]
        for outcome in OUTCOMES:
            assert rows[outcome].mean() == pytest.approx(method[outcome])
        cells = rows.groupby(["depth", "length"]).score.mean()
        grid = pd.DataFrame(method["grid"], index=told["depths"], columns=told["lengths"])
        for (depth, length), share in cells.items():
            assert share == pytest.approx(grid.loc[depth, length])
    link = told["correlation"]["budgets"][0]
    rows = frame[frame.config == link["configs"][0]["label"]]
    np.testing.assert_array_equal(rows.propagated, np.array(link["measured"]["propagated"])[:, 0])


def test_answers_of_the_frame_add_up_to_those_lost(results: dict[str, Result]) -> None:
    frame, told = results["correlation"].to_frame("samples"), results["correlation"].to_dict()
    for setting in told["settings"]:
        rows = frame[frame.setting == setting["name"]]
        assert (len(rows), rows.lost_answer.sum()) == (setting["answers"], setting["lost"])


EXAMPLES = "assumption bound_tightness ablation restriction equal_bytes horizon needle correlation quality cliff"


@pytest.mark.parametrize("name", EXAMPLES.split())
def test_the_examples_in_docstrings_run(name: str) -> None:
    where = sys.modules[getattr(pk, name).__module__]
    ran = doctest.testmod(where, extraglobs={"trace": asked_of(OF_COMMAND.get(name, name))})
    assert ran.attempted > 0
    assert ran.failed == 0


@pytest.mark.slow
def test_analyses_are_public_without_torch() -> None:
    """A finished trace is read and analysed where torch is not even imported."""
    source = (
        "import sys, perturbkv as pk\n"
        "names = 'assumption bound_tightness ablation restriction equal_bytes horizon needle correlation quality '\n"
        "names += 'safe_budget cliff'\n"
        "for name in names.split():\n"
        "    getattr(pk, name)\n"
        "assert 'torch' not in sys.modules and 'matplotlib' not in sys.modules"
    )
    assert subprocess.run([sys.executable, "-c", source], check=False).returncode == 0
