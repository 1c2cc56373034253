"""studies/template_window.py: its shares against transformers' own attention, its sums against a run's."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

import perturbkv as pk
from tests.support.folders import model_folder
from tests.support.scripts import STUDIES, functions, study, tables

END = "</u>A"
"""Of the template, a token per byte."""
PROMPTS, MOST = 3, 200


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = model_folder(tmp_path_factory.mktemp("models") / "chat", positions=512)
    (folder / "chat_template.jinja").write_text(f"<u>{{{{ messages[0]['content'] }}}}{END}")
    return folder


@pytest.fixture(scope="module")
def longbench(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("longbench")
    rows = [
        {"_id": f"n{place}", "input": "", "context": f"{place} The river is wide and slow. " * 6, "answers": ["slow"]}
        for place in range(PROMPTS)
    ]
    (folder / "multi_news.jsonl").write_text("\n".join(map(json.dumps, rows)))
    return folder


@pytest.mark.slow
def test_both_tables_hold_what_was_measured(model: Path, longbench: Path, tmp_path: Path) -> None:
    asked = ["--data-dir", longbench, "--samples", PROMPTS, "--max-tokens", MOST, "-o", tmp_path]
    said = study("template_window", model, *asked)
    assert said.startswith(f"{model}: {PROMPTS} prompts that end in '{END}'\n")
    (_, *first), (_, *second) = tables(said).values()
    assert [row[:4] for row in first] == [["chat", "8", "5", "3"], ["chat", "32", "5", "3"]]
    assert [row[1:4] for row in second] == [
        [window, "3", selection] for window in ("8", "32") for selection in ("attention", "two-stage")
    ]
    loaded = pk.load_model(str(model), device="cpu", dtype="float32")
    prompts = pk.load_prompts(
        "multi_news", loaded, samples=PROMPTS, max_tokens=MOST, data_dir=longbench, chat_template=True
    )
    eager = AutoModelForCausalLM.from_pretrained(model, attn_implementation="eager", dtype=torch.float32)
    sides = pk.grid(128, window=(8, 32), selection=("attention", "two-stage"), window_queries=("all", "text"))
    trace = pk.measure(loaded, prompts, sides, settings=pk.Settings(steps=1), progress=False)
    lost = {name: trace.arrays[f"perturbation_{name}"].sum(axis=(0, 2, 3, 4)) for name in ("isolated", "propagated")}
    labels = trace.run.labels()
    for row in first:
        window, shares = int(row[1]), []
        for prompt in prompts:
            ids = torch.tensor([list(prompt.token_ids)])
            with torch.inference_mode():
                layers = torch.stack(eager(ids, output_attentions=True).attentions)[:, 0]
            mass = layers[..., -window:, :-window].sum(dim=-1)
            shares.append(float((mass[..., -len(END) :].sum(dim=-1) / mass.sum(dim=-1)).mean()))
        assert row[4].split(" [")[0] == f"{100 * np.mean(shares):.0f}"
        places = [
            labels.index(f"snapkv{text}:attention b=128 w={window} query") for text in ("", "(window_queries=text)")
        ]
        elsewhere = []
        for sample in range(PROMPTS):
            heads = np.ndindex(trace.arrays["kept_count"].shape[2:])
            for layer, head in heads:
                kept, other = (set(trace.kept(sample, place, layer, head).tolist()) for place in places)
                elsewhere.append(len(kept - other) / (128 - window))
        assert row[5].split(" [")[0] == f"{100 * np.mean(elsewhere):.0f}"
        assert np.mean(elsewhere) > 0
    for _, window, _, selection, *ratios in second:
        names = (f"snapkv{text}:{selection} b=128 w={window} query" for text in ("(window_queries=text)", ""))
        text, whole = (labels.index(name) for name in names)
        for name, ratio in zip(("isolated", "propagated"), ratios, strict=True):
            assert ratio.split(" [")[0] == f"{lost[name][text] / lost[name][whole]:.2f}"


def test_a_model_without_a_template_and_windows_of_it_alone_are_told(
    model: Path, longbench: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = model_folder(tmp_path / "plain", positions=512)
    asked = ["--data-dir", longbench, "--samples", 1, "--max-tokens", MOST, "-o", tmp_path]
    said = study("template_window", plain, *asked)
    assert said.startswith(f"{plain} has no chat template.\n")
    own = functions("template_window", STUDIES)
    monkeypatch.setitem(own["measure"].__globals__, "WINDOWS", (4, 5))
    chosen = own["arguments"]().parse_args(list(map(str, asked)))
    assert list(own["measure"](str(model), chosen)) == []
