from __future__ import annotations

import io
import json
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from datetime import datetime
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest

from perturbkv.cli import console, planned_run
from perturbkv.pipeline import progress
from perturbkv.pipeline.progress import bar
from perturbkv.pipeline.run import footprint
from perturbkv.pipeline.sample.one_sample import trace as run_trace
from perturbkv.storage.trace.trace_file import read_trace
from perturbkv.trace import Trace
from tests.support.asked import instead
from tests.support.folders import model_folder
from tests.support.gguf_files import gguf_file
from tests.support.screens import run

Run = Callable[..., Any]


def test_heads_leaves_trace_figure_summary_and_table(perturbkv: Run, tiny: list[object], tmp_path: Path) -> None:
    ran = perturbkv("heads", *tiny, "-o", "out", "--format", "png", "--format", "pdf")
    assert ran.code == 0, ran.err
    assert {path.name for path in (tmp_path / "out").iterdir()} == {
        "trace.h5",
        "heads.png",
        "heads.pdf",
        "summary.json",
    }
    summary = json.loads((tmp_path / "out" / "summary.json").read_text())
    (comparison,) = summary["analyses"]["heads"]["comparisons"]
    trace = read_trace(tmp_path / "out" / "trace.h5")
    mean = np.nanmean(trace.arrays["perturbation_isolated"][:, 1], axis=1).mean()
    assert comparison["isolated"]["treatment_mean"] == pytest.approx(mean)
    assert f"{comparison['isolated']['improved']}" in ran.out


def side(config: dict[str, Any]) -> str:
    return f"{config['policy']}:{config['selection']}"


@pytest.mark.slow
def test_policies_can_be_compared(perturbkv: Run, tiny: list[object]) -> None:
    ran = perturbkv("heads", *tiny, "--compare", "streaming-llm,snapkv:two-stage", "-o", "out", "--json")
    assert ran.code == 0, ran.err
    assert side(ran.json()["comparisons"][0]["baseline"]) == "streaming-llm:position"
    ran = perturbkv("heads", *tiny, "--compare", "attention,random,random:attention,h2o", "-o", "more", "--json")
    assert ran.code == 0, ran.err
    names = [side(one["treatment"]) for one in ran.json()["comparisons"]]
    assert names == ["snapkv:random", "random:attention", "h2o:attention"]


@pytest.mark.slow
def test_trace_writes_where_it_is_told_and_info_reads_it(perturbkv: Run, tiny: list[object]) -> None:
    made = perturbkv("trace", *tiny, "--selection", "value", "--save", "outputs", "--steps", 2, "-o", "t.h5", "--json")
    assert made.code == 0, made.err
    assert made.json()["samples"] == ["p0", "p1"]
    told = perturbkv("list", "t.h5", "--json").json()
    assert told["variables"]["head_output"]["shape"] == [2, 1, 2, 2, 4, 8]
    assert "head_output" in perturbkv("list", "t.h5").out


def test_the_default_folder_names_time_model_and_dataset(perturbkv: Run, tiny: list[object], tmp_path: Path) -> None:
    assert perturbkv("heads", *tiny).code == 0
    (folder,) = (tmp_path / "runs").iterdir()
    assert folder.name.endswith("-tiny-prompts")


@pytest.mark.slow
def test_runs_of_one_second_have_folders_of_their_own(
    perturbkv: Run, tiny: list[object], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Stopped(datetime):
        @classmethod
        def now(cls, tz: object = None) -> Stopped:
            return cls(2026, 1, 1)

    monkeypatch.setattr(planned_run, "datetime", Stopped)
    for _ in range(3):
        ran = perturbkv("heads", *tiny)
        assert ran.code == 0, ran.err
    first = "20260101-000000-tiny-prompts"
    assert {folder.name for folder in (tmp_path / "runs").iterdir()} == {first, f"{first}-2", f"{first}-3"}


def test_dry_run_tells_and_runs_nothing(perturbkv: Run, tiny: list[object], tmp_path: Path) -> None:
    told = perturbkv("heads", *tiny, "--max-tokens", 100, "--dry-run", "--json").json()
    assert (told["samples"], told["tokens_max"], told["cut_samples"]) == (2, 100, 2)
    assert told["full_cache_mib"] == pytest.approx(2 * 2 * 2 * 8 * 100 * 4 / 2**20)
    assert told["evicted_caches_mib"] == pytest.approx(2 * 2 * 4 * 8 * 24 * 4 * 2 / 2**20)
    assert "24" in perturbkv("heads", *tiny, "--dry-run").out
    assert list(tmp_path.iterdir()) == []


def test_dry_run_says_what_would_fit(perturbkv: Run, tiny: list[object], monkeypatch: pytest.MonkeyPatch) -> None:
    told = perturbkv("heads", *tiny, "--dry-run", "--json").json()
    stays = told["weights_mib"] + told["full_cache_mib"] + told["statistics_mib"]
    assert told["memory_mib"] == pytest.approx(stays + max(told[f"{s}_mib"] for s in ("prefill", "layer", "decoding")))
    monkeypatch.setattr(footprint, "free_memory", lambda planned: int(told["memory_mib"] * 2**20) - 1)
    shown = " ".join(perturbkv("heads", *tiny, "--dry-run").out.split())
    assert "no; each of these alone would: " in shown and "--dtype bfloat16" in shown


def test_cut_and_untouched_prompts_are_reported(perturbkv: Run, tiny: list[object]) -> None:
    ran = perturbkv("trace", *tiny, "--max-tokens", 100, "-b", "1.0", "-o", "t.h5")
    assert "2 of 2" in ran.err and "100 tokens" in ran.err
    assert "nothing is evicted in 2 of 2 samples: budget 1.0, prompts have 100 tokens" in ran.err.splitlines()


@pytest.mark.slow
@pytest.mark.drawn
def test_random_weights_are_said_everywhere(perturbkv: Run, data: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from perturbkv.models import aliases

    shapes = {**aliases.ALIASES["smollm2-135m"].shapes, "num_hidden_layers": 1}
    monkeypatch.setitem(aliases.ALIASES, "small", aliases.Alias("owner/small", "llama", shapes))
    ran = perturbkv("heads", "--model", "random:small", "--dataset", data, "--samples", 1, "-o", "out")
    assert ran.code == 0, ran.err
    assert "random weights" in ran.out
    assert "random weights" in ran.err
    assert "random weights" in Path("out/heads.svg").read_text()
    with h5py.File("out/trace.h5") as file:
        assert file.attrs["random_weights"] == "true"


def test_a_gguf_file_is_converted_once_and_doctor_says_where_it_is(
    perturbkv: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PERTURBKV_CACHE", str(tmp_path / "cache"))
    model = gguf_file(tmp_path / "tiny.gguf")
    command = ("trace", "-m", model, "--samples", 1, "--length", 300, "--budget", 64, "--window", 8, "--dry-run")
    first, second = perturbkv(*command), perturbkv(*command)
    assert (first.code, second.code) == (0, 0)
    assert first.err.count("tiny.gguf") == 1
    assert "converting" not in second.err
    found = perturbkv("doctor", "--json").json()["converted models"]
    assert found.startswith(f"{tmp_path / 'cache'} (1 model, ")


def test_doctor_shows_its_findings_whole(perturbkv: Run) -> None:
    table = perturbkv("doctor")
    assert table.code == 0 and "…" not in table.out


def test_an_alias_can_be_pasted_back(perturbkv: Run, data: Path) -> None:
    from perturbkv.models.aliases import ALIASES, DEFAULT

    told = perturbkv("list", "models", "--json").json()["models"]
    assert [row["alias"] for row in told] == list(ALIASES)
    assert [row["alias"] for row in told if row["default"]] == [DEFAULT]
    assert f"{DEFAULT} (default)" in perturbkv("list", "models").out


def test_a_folder_without_a_tokenizer_is_told_as_one(perturbkv: Run, tmp_path: Path) -> None:
    folder = model_folder(tmp_path / "model")
    assert "(llama) is measured; kinds of layers: full" in " ".join(perturbkv("list", "models", folder).out.split())
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (folder / name).unlink()
    told = perturbkv("list", "models", folder)
    assert told.code == 0 and "(llama) is measured once it has a tokenizer" in " ".join(told.out.split())
    assert perturbkv("list", "models", folder, "--json").json()["tokenizer"] is False


def test_no_progress_bar_where_stderr_is_no_terminal(perturbkv: Run, tiny: list[object]) -> None:
    ran = perturbkv("trace", *tiny, "-o", "t.h5")
    assert "samples" not in ran.err
    for terminal in (False, True):
        screen = console.Console(file=io.StringIO(), force_terminal=terminal)
        with bar("samples", 3, console=screen) as drawn:
            drawn.advance()
        assert ("samples" in screen.file.getvalue()) == terminal


def test_a_long_sample_is_told_in_lines_where_stderr_is_no_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    screen = console.Console(file=io.StringIO(), force_terminal=False, width=80)
    monkeypatch.setattr(progress, "LINE_S", 0.05)
    with progress.bar("samples", console=screen) as drawn, progress.phase("prefill"):
        drawn.update(2, 8)
        time.sleep(0.4)
    lines = screen.file.getvalue().splitlines()  # type: ignore[attr-defined]
    assert 2 <= len(lines) <= 8
    assert set(lines) == {"samples: 2 of 8 done after 0:00:00 (prefill)"}


@pytest.mark.slow
def test_a_killed_command_is_resumed(perturbkv: Run, tiny: list[object], tmp_path: Path) -> None:
    options = [*map(str, instead(tiny, "--samples", 6)), "-o", str(tmp_path / "t.h5")]
    command = [sys.executable, "-c", "from perturbkv.cli.main import main; main()", "trace", *options]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    journal = tmp_path / "t.h5.journal"
    while process.poll() is None and len(list(journal.glob("*.npz"))) < 2:
        time.sleep(0.002)
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert perturbkv("trace", *options).code == 0
    whole = perturbkv("trace", *options[:-1], str(tmp_path / "whole.h5"))
    assert whole.code == 0
    found, expected = read_trace(tmp_path / "t.h5"), read_trace(tmp_path / "whole.h5")
    for name, array in expected.arrays.items():
        np.testing.assert_array_equal(found.arrays[name], array)


@pytest.mark.slow
def test_what_is_added_to_a_finished_trace_is_all_that_is_measured(
    perturbkv: Run, tiny: list[object], monkeypatch: pytest.MonkeyPatch
) -> None:
    measured: list[list[str]] = []

    def watched(adapter, prompts, run, resources, finished, wanted):  # type: ignore[no-untyped-def]
        for prompt in prompts:
            measured.append([config.label() for config in wanted.get(prompt.sample_id, run.configs)])
        return run_trace(adapter, prompts, run, resources, finished, wanted)

    assert perturbkv("trace", *tiny, "-o", "t.h5").code == 0
    monkeypatch.setattr("perturbkv.engines.engine_choice.trace", watched)
    more = [*instead(tiny, "--samples", 3), "--budget", 60]
    ran = perturbkv("trace", *more, "-o", "t.h5")
    assert ran.code == 0, ran.err
    assert "2 of 4" in ran.err
    assert [len(labels) for labels in measured] == [2, 2, 4]
    assert all("b=60" in label for labels in measured[:2] for label in labels)
    assert perturbkv("trace", *more, "-o", "whole.h5").code == 0
    found, expected = read_trace(Path("t.h5")), read_trace(Path("whole.h5"))
    assert found.run == expected.run
    for name, array in expected.arrays.items():
        if name == "prompt_text":
            assert found.arrays[name].tolist() == array.tolist()
        elif name not in ("kept_offset", "kept_code", "cache_bytes", "cache_padding_bytes"):
            if "noise_floor" in name:  # rounding itself, which other batches have of the same size
                assert np.all(array > 0) and np.all(found.arrays[name] > 0), name
                assert 0.5 < np.median(found.arrays[name] / array) < 2, name
            else:
                np.testing.assert_allclose(found.arrays[name], array, rtol=1e-3, atol=1e-5, err_msg=name)
    for place in np.ndindex(3, 4, 2, 4):
        np.testing.assert_array_equal(found.kept(*place), expected.kept(*place))
    before = Path("t.h5").read_bytes()
    assert "3 of 3" in perturbkv("trace", *more, "-o", "t.h5").err
    assert Path("t.h5").read_bytes() == before


@pytest.fixture(scope="module")
def plain(model: Path, data: Path, tmp_path_factory: pytest.TempPathFactory) -> Trace:
    """Two decode steps: a single one holds no copies, of which --max-memory could divide any."""
    path = tmp_path_factory.mktemp("plain") / "plain.h5"
    options = ["--model", model, "--dataset", data, "--samples", 2, "--budget", 24, "--window", 8, "--steps", 2]
    assert run("trace", *options, "-o", path).code == 0
    return read_trace(path)


@pytest.mark.slow
@pytest.mark.parametrize(
    "option",
    [["--max-memory", "20KiB"], ["--norm-kernel", "triton"], ["--device-map", "auto"], ["--chunk-mib", "1"]],
    ids=lambda option: option[0],
)
def test_how_the_machine_is_used_changes_no_number(
    perturbkv: Run, tiny: list[object], plain: Trace, option: list[str], tmp_path: Path
) -> None:
    tiny = [*tiny, "--steps", 2]
    ran = perturbkv("trace", *tiny, *option, "-o", "other.h5")
    assert ran.code == 0, ran.err
    other = read_trace(tmp_path / "other.h5")
    assert plain.run == other.run
    for name in ("theta", "perturbation_isolated", "retained_mass", "kept_count"):
        np.testing.assert_allclose(other.arrays[name], plain.arrays[name], rtol=1e-5, atol=1e-12, err_msg=name)
    if option[0] == "--max-memory":
        assert perturbkv("trace", *tiny, *option, "--dry-run", "--json").json()["batches"] == 2
    else:
        assert other.attrs["norm_kernel"] == (option[1] if option[0] == "--norm-kernel" else "auto")


def test_both_positions_of_streaming_llm_are_one_run(perturbkv: Run, tiny: list[object]) -> None:
    """Eviction alone costs both the same; moving keys is told apart, and is in what is isolated and propagated."""
    inside = ["--selection", "streaming-llm", "--selection", "streaming-llm(positions=in-cache)"]
    ran = perturbkv("trace", *tiny, *inside, "-o", "t.h5")
    assert ran.code == 0, ran.err
    made = read_trace(Path("t.h5"))
    assert [config.positions for config in made.run.configs] == ["kept", "in-cache"]
    assert made.run.labels()[1].startswith("streaming-llm(positions=in-cache)")
    alone, change, *losses = (
        made.arrays[f"perturbation_{kind}"] for kind in ("eviction", "change", "isolated", "propagated")
    )
    assert np.array_equal(alone[:, 0], alone[:, 1])
    assert not change[:, 0].any() and change[:, 1].any()
    assert all(not np.array_equal(loss[:, 0], loss[:, 1]) for loss in losses)
