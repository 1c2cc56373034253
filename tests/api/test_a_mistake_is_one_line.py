"""A mistake is one line, and nothing is written that nobody asked for."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import perturbkv as pk
from perturbkv.configs.resources import Resources
from perturbkv.errors import ConfigError, DatasetError, ModelError, PerturbkvError, UnknownNameError
from perturbkv.models.adapter import Adapter
from tests.support.notebook import CONFIGS, prompt


@pytest.mark.slow
def test_a_script_says_nothing_of_its_own(folder: Path, data: Path) -> None:
    """Neither do the libraries that it stands on, whose bars pytest's own environment switches off."""
    script = f"""
import perturbkv as pk
model = pk.load_model({str(folder)!r})
prompts = pk.load_prompts({str(data)!r}, model, samples=1)
pk.measure(model, prompts, pk.grid(24, window=8), progress=False)
"""
    loud = {name: text for name, text in os.environ.items() if name not in ("TQDM_DISABLE",)}
    ran = subprocess.run([sys.executable, "-c", script], env=loud, capture_output=True, text=True, check=True)
    assert (ran.stdout, ran.stderr) == ("", "")


def test_what_was_loud_is_loud_again(folder: Path) -> None:
    from transformers.utils import logging as theirs

    before = theirs.get_verbosity(), theirs.is_progress_bar_enabled()
    pk.load_model(str(folder))
    assert (theirs.get_verbosity(), theirs.is_progress_bar_enabled()) == before


def test_nothing_is_written_where_no_bar_is_wanted(
    model: Adapter, data: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    pk.measure(model, pk.load_prompts(str(data), model, samples=1), CONFIGS[:1], progress=False)
    assert capfd.readouterr() == ("", "")


@pytest.mark.parametrize(
    ("call", "error", "said"),
    [
        (lambda model: pk.measure(model, [], CONFIGS), DatasetError, "at least one prompt"),
        (lambda model: pk.measure(model, [replace(prompt(model), sample_id="a")] * 2, CONFIGS), DatasetError,
         "'a' twice"),
        (lambda model: pk.measure(model, [prompt(model)], []), ConfigError, "at least one eviction"),
        (lambda model: pk.measure(model, [prompt(model)], CONFIGS, workers=pk.Workers("rae")), UnknownNameError,
         "known: ray"),
        (lambda model: pk.measure(model, [prompt(model)], CONFIGS, settings=pk.Settings(scenario="x")), PerturbkvError,
         "regular"),
        (lambda model: pk.load_model(model.model), ModelError, "tokenizer="),
        (lambda model: pk.load_model(3), ModelError, "got int"),
        (lambda model: pk.measure(model, ["text"], CONFIGS), ConfigError, "got str"),
        (lambda model: pk.measure(model, [prompt(model)], ["snapkv"]), ConfigError, "got str"),
        (lambda model: pk.measure(model.model, [prompt(model)], CONFIGS), ModelError, "load_model"),
        (lambda model: pk.measure(model, [prompt(model)], CONFIGS, path="/proc/none/t.h5"), PerturbkvError, "place"),
        (lambda model: pk.measure(model, [prompt(model)], CONFIGS, path="/tmp"), PerturbkvError, "folder"),
        (lambda model: pk.measure(model, [prompt(model)], pk.grid(24, policy="headkv", window=8),
                                  settings=pk.Settings(head_scores=[[1.0]])), ConfigError,
         "2 layers × 4 heads, got 1 × 1"),
        (lambda model: pk.Prompt.from_text("a b c", model, max_tokens=-4), ConfigError, "at least 2"),
        (lambda model: pk.measure(model, [prompt(model)], CONFIGS, resources=Resources(max_bytes=1024)), ConfigError,
         r"^max_bytes \(--max-memory\) allows 1 KiB"),
        (lambda model: pk.Settings(save=("all",)), UnknownNameError, "^unknown save 'all'; known: outputs, effect"),
        (lambda model: pk.grid(24, selection="a(" * 99), ConfigError, "inside each other"),
        (lambda model: pk.load_model(model.model, tokenizer=model.tokenizer, dtype="float16"), ConfigError, "dtype"),
        (lambda model: pk.load_model("random:smollm2-135m", tokenizer=model.tokenizer), ConfigError, "tokenizer"),
        (lambda model: pk.generate(model, [prompt(model)], pk.grid(24, selection="hindsight", window=8)), ConfigError,
         "next query"),
        (lambda model: pk.generate(model, prompt(model), CONFIGS[0], max_new_tokens=0), ConfigError,
         "max_new_tokens .* at least 1, got 0"),
        (lambda model: pk.generate(model, prompt(model), CONFIGS[0], compress_over=24), ConfigError,
         "24 needs a budget in tokens below it, got budget 24"),
        (lambda model: pk.generate(model, prompt(model), pk.grid(0.5, window=8), compress_over=90), ConfigError,
         "90 needs a budget in tokens below it, got budget 0.5"),
        (lambda model: pk.generate(model, prompt(model), CONFIGS, resources=Resources(max_bytes=1024)), ConfigError,
         r"^max_bytes \(--max-memory\) allows 1 KiB"),
    ],
)  # fmt: skip
def test_a_mistake_is_one_line(model: Adapter, call: Any, error: type[Exception], said: str) -> None:
    with pytest.raises(error, match=said) as found:
        call(model)
    assert "\n" not in str(found.value)


@pytest.mark.parametrize(
    ("call", "said"),
    [
        (
            lambda model: pk.measure(
                model, [prompt(model)], CONFIGS, settings=pk.Settings(steps=10**20), progress=False
            ),
            "steps|positions",
        ),
        (lambda model: pk.measure(model, [prompt(model)], map(pk.EvictionConfig, range(40, 10_041))), "configurations"),
        (lambda model: pk.load_prompts("needle", model, lengths=[9_999_999]), "at most 2,000,000"),
        (lambda model: pk.load_prompts("needle", model, lengths=[99_999]), "positions"),
        (lambda model: pk.load_prompts("needle", model, lengths=[float("nan")]), "finite"),
        (lambda model: pk.load_prompts("needle", model, samples=10**9), "at most 100,000"),
        (lambda model: pk.load_prompts("needle", model, seed=10**20), "seed"),
        (lambda model: pk.grid(float("inf")), "finite"),
        (lambda model: pk.grid(64, alpha=float("nan")), "alpha"),
        (lambda model: pk.grid(64, policy="snapkv(kernel=nan)"), "kernel"),
        (lambda model: pk.load_model("random:smollm2-135m", device="meta"), "device"),
    ],
)
def test_numbers_that_are_none_are_refused_by_a_script_as_by_the_commands(model: Adapter, call: Any, said: str) -> None:
    with pytest.raises(PerturbkvError, match=said):
        call(model)
