"""Commands that generate, or decode on: what they leave, what they print, how they are resumed."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from perturbkv.storage.trace.trace_file import read_run, read_trace

Run = Callable[..., Any]


@pytest.fixture
def small(model: Path) -> list[object]:
    """Needle prompts of 150 byte tokens and more for the tiny model."""
    return ["--model", model, "--budget", 40, "--window", 8]


GRID = ["--lengths", "300,340", "--depths", "0,1", "--haystack", "noise", "--steps", 2, "--max-new-tokens", 5]


@pytest.mark.slow
def test_needle_in_context_only_compares_methods_whose_options_have_commas(perturbkv: Run, small: list[object]) -> None:
    methods = "snapkv(pool=average, kernel=5):attention,two-stage(alpha=0.5, score=pooled)"
    ran = perturbkv("needle", *small, *GRID, "--scenario", "context-only", "--compare", methods, "-o", "out", "--json")
    assert ran.code == 0, ran.err
    assert ran.json()["scenario"] == "context-only"
    assert (read_trace(Path("out/trace.h5")).arrays["question_tokens"] > 50).all()
    labels = read_run(Path("out/trace.h5")).labels()
    assert len(labels) == 2, labels
    assert ("kernel=5" in labels[0], "alpha=0.5" in labels[1]) == (True, True), labels


def test_generate_writes_a_line_per_sample_and_goes_on(perturbkv: Run, tiny: list[object]) -> None:
    options = [*tiny, "--max-new-tokens", 6, "-o", "out"]
    ran = perturbkv("generate", *options)
    assert ran.code == 0, ran.err
    path = Path("out/generation.jsonl")
    header, *rows = map(json.loads, path.read_text().split("\n")[:-1])
    assert header["run"]["generate"] == 6
    assert (header["made_with"]["seed"], header["made_with"]["random_weights"]) == (0, False)
    assert [row["sample"] for row in rows] == ["p0", "p1"]
    assert [label.partition(" ")[0] for label in rows[0]["evicted"]] == ["snapkv:attention", "snapkv:two-stage"]
    assert all(len(made["tokens"]) <= 6 for row in rows for made in row["evicted"].values())
    assert [made["held_share"] for made in rows[0]["evicted"].values()] == [pytest.approx(2 * 24 / 182)] * 2
    assert ran.out.count("0.26") == 4
    whole = path.read_text()
    path.write_text("\n".join(whole.splitlines()[:2]) + '\n{"sample": "p1", "unfini')
    again = perturbkv("generate", *options)
    assert again.code == 0, again.err
    assert "1 sample of 2" in again.err
    assert path.read_text() == whole
    del header["run"]["cache"]
    path.write_text("\n".join([json.dumps(header), *whole.splitlines()[1:2], ""]))  # of before there was the choice
    older = perturbkv("generate", *options)
    assert "1 sample of 2" in older.err
    assert path.read_text().splitlines()[1:] == whole.splitlines()[1:]
    old = {"policy": "snapkv", "budget": 24, "window": 8, "alpha": 0.25, "split": "prefix", "pool": "max", "kernel": 7,
           "granularity": "query"}  # fmt: skip
    header["run"]["configs"] = [{**old, "selection": name} for name in ("attention", "two-stage")]
    path.write_text("\n".join([json.dumps(header), *whole.splitlines()[1:]]))  # answers under a name of then
    assert perturbkv("generate", *options).code == 2
    path.write_text(whole)
    other = perturbkv("generate", *tiny, "--max-new-tokens", 7, "-o", "out")
    assert other.code == 2
    assert "--overwrite" in other.err
    assert path.read_text() == whole


@pytest.mark.slow
def test_long_generation_records_every_compression(perturbkv: Run, tiny: list[object]) -> None:
    ran = perturbkv("generate", *tiny, "--policy", "adakv", "--max-new-tokens", 40, "--compress-every", 36, "-o", "out")
    assert "36 entries" in " ".join(ran.out.split())
    assert ran.code == 0, ran.err
    assert "compressions, Σ L / Σ ‖o_h‖₁" in ran.out
    _, row, _ = map(json.loads, Path("out/generation.jsonl").read_text().split("\n")[:-1])
    one = row["compressions"][0]
    assert (one["entries_before"], one["entries_after"]) == (37.0, 24.0)
    assert len(one["perturbation"]) == 2
    assert len(one["perturbation"][0]) == 4
    assert 0 < one["relative"] == pytest.approx(sum(map(sum, one["perturbation"])) / sum(map(sum, one["output_norm"])))


@pytest.mark.slow
def test_head_scores_are_measured_written_and_used(perturbkv: Run, model: Path, tiny: list[object]) -> None:
    measure = ("trace", "--head-scores", "scores.json", "--model", model, "--samples", 2, "--length", 300)
    refused = perturbkv(*measure)
    assert (refused.code, Path("scores.json").exists()) == (2, False)
    assert "2 prompts" in refused.err
    with mock.patch("perturbkv.pipeline.answers.answer_heads.is_right", return_value=True):
        ran = perturbkv(*measure)
    assert ran.code == 0, ran.err
    assert "2 of 2" in ran.out
    scores = json.loads(Path("scores.json").read_text())
    assert set(scores) == {f"{layer}-{head}" for layer in range(2) for head in range(4)}
    ran = perturbkv("trace", *tiny, "--policy", "headkv", "--head-scores", "scores.json", "-o", "t.h5")
    assert ran.code == 0, ran.err
    trace = read_trace(Path("t.h5"))
    assert trace.run.head_scores == tuple(tuple(scores[f"{la}-{h}"] for h in range(4)) for la in range(2))
    counts = trace.arrays["kept_count"][0, 0]
    assert counts.sum() == 24 * 8
    assert counts.min() < counts.max()
    best = max(scores, key=lambda name: scores[name])
    layer, head = map(int, best.split("-"))
    assert counts[layer, head] == counts.max()


@pytest.mark.slow
def test_info_reports_the_padding_of_ragged_caches(perturbkv: Run, tiny: list[object]) -> None:
    perturbkv("trace", *tiny, "--policy", "adakv", "-o", "t.h5")
    arrays = read_trace(Path("t.h5")).arrays
    held, padding = int(arrays["cache_bytes"].sum()), int(arrays["cache_padding_bytes"].sum())
    entries = int(arrays["kept_count"].sum()) * 2 * 8 * 4  # keys and values, head size 8, float32
    assert held == entries + padding
    assert 0 < padding <= entries / 8
    ran = perturbkv("list", "t.h5")
    assert f"{held:,} " in ran.out and f"{padding:,}" in ran.out
    rectangular = perturbkv("trace", *tiny, "--policy", "pyramidkv", "--cache", "rectangular", "-o", "r.h5")
    assert rectangular.code == 0, rectangular.err
    assert read_trace(Path("r.h5")).arrays["cache_padding_bytes"].sum() == 0
