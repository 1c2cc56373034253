"""Every analysis on finished traces: the golden ones pass through, what is missing is told, nothing is lost."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.csv
import pyarrow.parquet
import pytest

from perturbkv.configs.eviction import EvictionConfig
from perturbkv.storage.trace.trace_file import read_trace
from perturbkv.trace import FailedSample
from tests.support.asked import refused
from tests.support.changed import changing
from tests.support.measured import MEASURED
from tests.support.traces import sample_trace, write

Run = Callable[..., Any]
ANALYSES = {
    "heads": ["heads"],
    "layers": [  # a group's two products are two series
        "layers-1-two-stage",
        "layers-2-two-stage",
        "layers-samples-1-two-stage",
        "layers-samples-2-two-stage",
        "layers-budgets",
    ],
    "assumption": ["assumption"],
    "bound-tightness": ["bound-tightness", "bound-tightness-heads"],
    "ablation": ["ablation"],
}
OPTIONS = {"layers": ["--per-sample", "--budgets"], "heads": ["--compare", "attention,value"]}


@pytest.fixture
def measured(tmp_path: Path) -> Path:
    return Path(shutil.copy(MEASURED, tmp_path / "measured.h5"))


def configuration_of(document: dict[str, Any]) -> EvictionConfig:
    """The configuration that a JSON object describes; its label is beside its choices."""
    return EvictionConfig.from_document({name: value for name, value in document.items() if name != "label"})


def made_up(path: Path) -> Path:
    """A trace without what MAY be absent, whose numbers are random."""
    samples = (sample_trace(name, seed=seed) for seed, name in enumerate(("first", "second")))
    return write(path, *samples, FailedSample("broken", "planted failure"))


@pytest.mark.parametrize("command", ANALYSES)
def test_the_measured_golden_trace_passes_through(perturbkv: Run, measured: Path, command: str) -> None:
    ran = perturbkv(command, measured, *OPTIONS.get(command, []), "-o", "out", "--format", "png", "--columns", 1)
    assert ran.code == 1, ran.err  # a sample of it failed
    assert "planted failure" in ran.err
    numbers = json.loads(Path("out/summary.json").read_text())["analyses"][command]
    assert len(numbers["figures"]) == len(list(Path("out").glob("*.png"))) > 0
    if command != "heads":
        assert {Path(path).stem for path in numbers["figures"]} == set(ANALYSES[command])


def test_many_pairs_are_one_figure_named_after_them_and_one_table(perturbkv: Run, measured: Path) -> None:
    ran = perturbkv("heads", measured, "--compare", "attention,two-stage,value", "-o", "out", "--format", "png")
    assert [path.name for path in Path("out").glob("*.png")] == ["heads-attention-two-stage-value.png"]
    assert ran.out.count("against attention") == 1
    rows = [line.split()[0] for line in ran.out.splitlines() if "isolated" in line and "%" in line]
    comparisons = json.loads(Path("out/summary.json").read_text())["analyses"]["heads"]["comparisons"]
    assert len(rows) == len(comparisons) > 2
    assert set(rows) == {"two-stage", "value"}


@pytest.mark.parametrize("command", [*ANALYSES, "list", "export"])
def test_a_trace_of_random_numbers_passes_through(perturbkv: Run, tmp_path: Path, command: str) -> None:
    trace = made_up(tmp_path / "made.h5")
    ran = perturbkv(command, trace)
    assert ran.code == (0 if command == "list" else 1), ran.err
    if command == "bound-tightness":  # its numbers are random: the check of the bounds must say so
        assert "error: " in ran.err and "L ≤ θ" in ran.err and "'first'" in ran.err
    else:
        assert "planted failure" in ran.out + ran.err
        assert "error:" not in ran.err


@pytest.mark.slow
def test_analyses_of_one_trace_share_a_summary_and_another_trace_starts_anew(
    perturbkv: Run, measured: Path, tmp_path: Path
) -> None:
    for command in ("assumption", "ablation"):
        perturbkv(command, measured, "-o", "out", "--format", "png")
    summary = json.loads(Path("out/summary.json").read_text())
    assert set(summary["analyses"]) == {"assumption", "ablation"}
    assert summary["trace_digest"] == read_trace(measured).digest
    other = [made_up(tmp_path / "made.h5"), "-o", "out", "--format", "png"]
    ran = perturbkv("heads", *other)
    assert ran.code == 2
    assert json.loads(Path("out/summary.json").read_text()) == summary
    perturbkv("heads", *other, "--overwrite")
    assert set(json.loads(Path("out/summary.json").read_text())["analyses"]) == {"heads"}


def test_json_is_the_summary_of_the_analysis(perturbkv: Run, measured: Path) -> None:
    told = perturbkv("bound-tightness", measured, "-o", "out", "--json").json()
    stored = json.loads(Path("out/summary.json").read_text())
    assert told["analysis"] == "bound-tightness"
    assert told["configurations"] == stored["analyses"]["bound-tightness"]["configurations"]
    assert told["violations"] == 0
    assert told["inequalities_checked"]["L ≤ θ"] == 360


def test_a_summary_holds_configurations_as_objects_and_types_as_types(perturbkv: Run, measured: Path) -> None:
    run = read_trace(measured).run
    told = perturbkv("layers", measured, "--budgets", "-o", "out", "--json").json()
    assert told["run"]["seed"] == run.seed
    assert told["run"]["random_weights"] is run.random_weights
    assert [configuration_of(one) for one in told["run"]["configs"]] == list(run.configs)
    for drift in told["drifts"]:
        assert configuration_of(drift["baseline"]) in run.configs
        assert (drift["baseline"]["selection"], drift["treatment"]["selection"]) == (
            "attention(alpha=0.75)",
            "two-stage(alpha=0.75)",
        )
    first = told["budgets"]["curves"][0]
    assert first["budgets"] == [one["budget"] for one in first["configs"]] == [16, 80]
    told = perturbkv("list", measured, "--json").json()
    assert told["run"]["configs"][0]["label"] == run.labels()[0]
    assert told["attrs"]["random_weights"] is True
    assert told["attrs"]["format_version"] == 5


def test_each_distance_has_its_own_files_and_its_own_key(perturbkv: Run, measured: Path) -> None:
    for distance in ("l1", "l2"):
        ran = perturbkv("layers", measured, "--distance", distance, "-o", "out", "--format", "png")
        assert ran.code == 1, ran.err  # a sample of it failed
    assert {path.name for path in Path("out").glob("*.png")} == {
        f"layers{distance}-{place}-two-stage.png" for distance in ("", "-l2") for place in (1, 2)
    }
    assert set(json.loads(Path("out/summary.json").read_text())["analyses"]) == {"layers", "layers-l2"}
    assert "no noise" in " ".join(ran.out.split())


@pytest.mark.parametrize(
    ("command", "variable"),
    [
        ("heads", "noise_floor"),
        ("layers", "hidden_drift_l1"),
        ("assumption", "sigma_topk"),
        ("bound-tightness", "theta_hat_relax"),
        ("ablation", "perturbation_isolated"),
    ],
)
def test_a_variable_that_is_not_there_is_named_with_what_records_it(
    perturbkv: Run, measured: Path, command: str, variable: str
) -> None:
    with changing(measured) as file:
        del file[variable]
    options = ["--compare", "attention,value"] if command == "heads" else []
    ran = perturbkv(command, measured, *options)
    needs = "heads" if command == "ablation" else command  # ablation compares head by head
    refused(ran, f"error: {needs} ", f"'{variable}'", "perturbkv trace --model tiny --dataset random")


def test_export_holds_a_row_per_head_in_both_formats(perturbkv: Run, measured: Path) -> None:
    ran = perturbkv("export", measured)
    assert ran.code == 1, ran.err
    trace = read_trace(measured)
    table = pyarrow.parquet.read_table(measured.with_suffix(".parquet"))
    text = pyarrow.csv.read_csv(measured.with_suffix(".csv"))
    assert table.num_rows == text.num_rows == 3 * 15 * 1 * 2 * 4
    assert table.column_names == text.column_names
    row = {name: table[name][200].as_py() for name in table.column_names}
    sample, config = trace.sample_ids.index(row["sample"]), trace.config_index(row["config"])
    where = (sample, config, row["step"], row["layer"], row["head"])
    assert row["theta"] == trace.arrays["theta"][where]
    assert row["noise_floor"] == trace.arrays["noise_floor"][sample, row["step"], row["layer"], row["head"]]
    assert row["logit_kl"] == trace.arrays["logit_kl"][sample, config, row["step"]]
    assert row["prompt_tokens"] == 96
    assert (row["selection"], row["budget"]) == (
        trace.run.configs[config].selection.name,
        str(trace.run.configs[config].budget),
    )
    for name in ("theta", "hidden_drift_l1", "kept_count"):
        np.testing.assert_array_equal(table[name].to_numpy(), text[name].to_numpy())
    assert table.schema.field("logit_kl").metadata[b"units"] == b"nat"
    assert table.schema.metadata[b"trace_digest"].decode() == trace.digest
    assert {"kept_code", "kept_offset", "kept_length"}.isdisjoint(table.column_names)


def test_export_replaces_nothing_unasked(perturbkv: Run, measured: Path) -> None:
    Path("t.csv").write_text("mine")
    ran = perturbkv("export", measured, "-o", "t.csv")
    assert ran.code == 2
    assert Path("t.csv").read_text() == "mine"
    assert perturbkv("export", measured, "-o", "t.csv", "--overwrite").code == 1
    assert len(Path("t.csv").read_text().splitlines()) == 361
