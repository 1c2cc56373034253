"""studies/triattention.py: its centres are the means of a model's queries before rotation."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np

import perturbkv as pk
from tests.oracle.decoder import Decoder
from tests.support.folders import model_folder
from tests.support.scripts import functions, study


def test_centres_are_means_over_the_tokens_of_all_prompts_and_are_read(tmp_path: Path) -> None:
    data = tmp_path / "prompts.jsonl"
    data.write_text("\n".join(json.dumps({"prompt": text * 3}) for text in ("The river is wide. ", "A boat. ")))
    folder = model_folder(tmp_path / "tiny", positions=512)
    asked = ["--model", folder, "--dataset", data, "--samples", 2, "--dtype", "float32", "-o", tmp_path / "out"]
    said = study("triattention", *asked)
    path = tmp_path / "out" / "centres.json"
    centres = json.loads(path.read_text())
    model = pk.load_model(str(folder), dtype="float32")
    prompts = pk.load_prompts(str(data), model, samples=2)
    tokens = sum(len(prompt.token_ids) for prompt in prompts)
    assert f"{len(model.layers) * model.heads} heads of {folder}, 2 prompts, {tokens} tokens" in said
    rows = []
    for prompt in prompts:
        decoder = Decoder(model.model)
        for place, token in enumerate(prompt.token_ids):
            query = decoder.step(token).query
            rows.append([[decoder.rotate(row, -place, 0) for row in heads] for heads in query])
    queries = np.array(rows)  # token, layer, head, d_key
    half = queries.shape[-1] // 2
    for layer in range(len(model.layers)):
        for head in range(model.heads):
            own = queries[:, layer, head]
            found = centres[f"{layer}-{head}"]
            np.testing.assert_allclose(found["mean"], own.mean(axis=0), rtol=1e-3, atol=1e-5)
            sizes = np.hypot(own[:, :half], own[:, half:]).mean(axis=0)
            np.testing.assert_allclose(found["size"], sizes, rtol=1e-3, atol=1e-5)
    (chosen,) = pk.grid(20, policy=f"triattention(file={path})", selection="attention", window=8)
    trace = pk.measure(model, prompts, [chosen], settings=pk.Settings(steps=1), progress=False)
    assert not trace.failures


def test_concentration_is_one_where_all_queries_are_one() -> None:
    share = functions("triattention", Path(__file__).parents[2] / "studies")["concentration"]
    assert share({"0-0": {"mean": [3.0, 0.0, 4.0, 1.0], "size": [5.0, 1.0]}}) == 1.0
    assert share({"0-0": {"mean": [3.0, 0.0, 4.0, 1.0], "size": [10.0, 1.0]}}) == 0.75
