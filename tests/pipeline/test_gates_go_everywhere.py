"""A gate between attention and projection: measured as it is, left out where told, refused where it is not known."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import perturbkv as pk
from perturbkv import theory
from perturbkv.configs.run import RunConfig
from perturbkv.datasets.encode import Prompt
from perturbkv.errors import ConfigError
from perturbkv.models.adapter import Adapter
from perturbkv.pipeline.run.searching import head_views
from perturbkv.pipeline.sample.prefill import prefill
from perturbkv.pipeline.sample.sample_run import SampleRun
from perturbkv.selection.grid import configuration
from perturbkv.selection.resolved_config import ResolvedRun
from perturbkv.storage.trace.trace_file import read_trace
from tests.oracle import theory as oracle
from tests.oracle.decoder import Decoder
from tests.support.models import GATED, exact_adapter, tiny_adapter, token_ids
from tests.support.resolved import answer, trace_sample

WINDOW = 5
PROMPT = Prompt("s", token_ids(40, seed=4), 0, question_tokens=9)


def config(selection: str = "two-stage", budget: float = 14, policy: str = "snapkv", **more: Any) -> pk.EvictionConfig:
    return configuration(budget, policy=policy, selection=selection, **{"window": WINDOW, **more})


def sample_run(adapter: Adapter, *configs: pk.EvictionConfig) -> SampleRun:
    run = ResolvedRun.from_run(RunConfig("m", "d", configs, steps=2))
    with torch.inference_mode():
        return SampleRun.read(adapter, PROMPT, run, pk.Resources(), rows=2)


@pytest.mark.parametrize(
    ("family", "more"),
    [(GATED, {"gating": "per-head"}), (GATED, {}), ("afmoe", {}), ("beam", {}), ("qwen3_next", {})],
    ids=["per-head", "per-element", "afmoe", "beam", "qwen3_next"],
)
@pytest.mark.parametrize(("dtype", "rounding"), [(torch.float32, 1e-5), (torch.bfloat16, 0.05)], ids=str)
def test_what_the_formulas_project_is_what_the_models_projection_receives(
    family: str, more: dict[str, Any], dtype: torch.dtype, rounding: float
) -> None:
    sample = sample_run(tiny_adapter(family, dtype=dtype, **more), config())
    for index, step in ((index, step) for index in range(2) for step in sample.full.steps):
        layer = sample.layer(index)
        plain = theory.project_outputs(layer.full_step(step).mixed, layer.slices)
        found = theory.project_outputs(layer.full_step(step).mixed, layer.slices_at(step))
        received = theory.project_outputs(step.head_output[index][0], layer.slices)
        assert (found - received).norm() <= rounding * received.norm()
        assert (plain - received).norm() > 0.2 * received.norm(), "without the gate it is something else"


@pytest.mark.parametrize("family", [GATED, "afmoe", "beam", "qwen3_next"])
def test_in_the_first_evicted_layer_what_is_isolated_is_what_is_propagated(family: str) -> None:
    """Its query is the full run's, so that the formulas and the model's own code tell the same distance."""
    configs = (config("attention"), config(), config("two-stage(gate=none)"), config("hindsight"))
    arrays = trace_sample(tiny_adapter(family), PROMPT, RunConfig("m", "d", configs, steps=2)).arrays
    isolated, propagated = (arrays[f"perturbation_{kind}"][:, :1, 0] for kind in ("isolated", "propagated"))
    np.testing.assert_allclose(isolated, propagated, rtol=1e-4)
    assert (arrays["perturbation_isolated"] <= arrays["theta"] * (1 + 1e-9)).all()


def test_value_norms_take_the_gates_mean_size_over_the_window_and_none_where_told() -> None:
    """A loop over heads and entries, with γ from the naive decoder; of signed gates the size counts."""
    adapter = exact_adapter(GATED, 4, 2)
    run = ResolvedRun.from_run(RunConfig("m", "d", (config(), config("value(gate=none)"), config(window=9))))
    with torch.inference_mode():
        norms = prefill(adapter, PROMPT, run, pk.Resources()).statistics.norms
    decoder = Decoder(adapter.model)
    steps = [decoder.step(token) for token in PROMPT.token_ids]
    assert sorted(norms) == [0, WINDOW, 9]
    for layer in range(2):
        values = np.array(decoder.values[layer])
        for window in norms:
            gate = np.ones((4, 8))
            if window:
                gate = np.mean([np.abs(step.gates[layer]) for step in steps[-window:]], axis=0)
            expected = oracle.projected_value_norms(values, decoder.w_o(layer) * gate.reshape(-1), 4)
            np.testing.assert_allclose(norms[window][layer].numpy(), expected, rtol=1e-10)


def kept(adapter: Adapter, *configs: pk.EvictionConfig) -> list[bytes]:
    arrays = trace_sample(adapter, PROMPT, RunConfig("m", "d", configs)).arrays
    codes, starts, sizes = (arrays[name] for name in ("kept_code", "kept_offset", "kept_length"))
    return [
        b"".join(codes[at : at + size].tobytes() for at, size in zip(of_starts.flat, of_sizes.flat, strict=True))
        for of_starts, of_sizes in zip(starts, sizes, strict=True)
    ]


def test_whether_the_gate_is_taken_decides_what_selections_with_value_norms_keep() -> None:
    adapter = tiny_adapter(GATED)
    with_gate, without, other = kept(adapter, config(), config("two-stage(gate=none)"), config("attention"))
    assert with_gate != without and other not in (with_gate, without)
    assert kept(adapter, config("two-stage(gate=window)")) == [with_gate]


def test_a_score_with_value_norms_takes_the_gate_too() -> None:
    adapter, configs = tiny_adapter(GATED), (config("attention", policy="defensive"),)
    run = ResolvedRun.from_run(RunConfig("m", "d", configs))
    with torch.inference_mode():
        statistics = prefill(adapter, PROMPT, run, pk.Resources()).statistics
    own, first = configs[0], run.configs[0].requests[0]
    norms = statistics.norms[own.window][0][:, : len(PROMPT.token_ids) - own.window].double()
    shares = norms.view(2, 2, -1).mean(dim=1)
    shares = shares / shares.sum(dim=0)
    flat = statistics.scored[first][0] / shares
    assert torch.isfinite(flat).all() and (flat.diff(dim=-1).abs() > 0).any()
    assert (flat <= 1 + 1e-9).all(), "what is left is an attention weight"


def test_only_what_is_not_the_default_is_in_the_label() -> None:
    assert config("two-stage(gate=none)").label() == "snapkv:two-stage(gate=none) b=14 w=5 query"
    assert config("two-stage(gate=window)").label() == config().label() == "snapkv:two-stage b=14 w=5 query"
    assert configuration(14, window=WINDOW, gate="none") == config("two-stage(gate=none)")
    told = config("two-stage(gate=none)")
    assert pk.EvictionConfig.from_document(told.to_document()) == told
    assert "gate" not in str(config().to_document())
    with pytest.raises(ConfigError, match="selection 'attention' has no option 'gate'"):
        config("attention(gate=none)")


def test_the_trace_says_how_large_the_gates_are_and_of_a_model_without_nothing(tmp_path: Path) -> None:
    adapter = tiny_adapter(GATED)
    configs = (config("two-stage(gate=none)"), config())
    pk.measure(adapter, [PROMPT], configs, path=tmp_path / "t.h5", settings=pk.Settings(steps=2), progress=False)
    trace, sample = read_trace(tmp_path / "t.h5"), sample_run(adapter, config())
    assert [each.gate_window for each in trace.run.configs] == [0, WINDOW]
    for index, step in np.ndindex(2, len(sample.full.steps)):
        gate = sample.full.steps[step].gates[index][0].double().view(4, 8)
        np.testing.assert_allclose(trace.arrays["gate_size"][0, step, index], gate.abs().mean(dim=-1), rtol=1e-6)
    assert "gate_size" not in trace_sample(tiny_adapter(), PROMPT, RunConfig("m", "d", (config(),))).arrays


def test_a_head_is_searched_with_the_decoding_querys_gate() -> None:
    adapter = exact_adapter(GATED, 4, 2)
    sample = sample_run(adapter, config())
    view = next(head_views(sample, [(1, 2)]))
    step, values = sample.full.steps[0], sample.layer(1).values[1]
    gate, w_o = step.gates[1][0].numpy(), adapter.output_projection(1).numpy()
    expected = (values.numpy()[: step.entries] * gate[16:24]) @ w_o[:, 16:24].T
    np.testing.assert_allclose(view.entries.projected, expected, rtol=1e-9, atol=1e-12)


def test_answers_come_from_evicted_caches_and_everything_kept_answers_as_the_full_cache() -> None:
    found = answer(tiny_adapter(GATED), PROMPT, (config(budget=1.0), config(), config("two-stage(gate=none)")), 6)
    assert found.evicted[0] == found.full and found.held[1] < 1
    assert len(found.evicted) == 3


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        (config(policy="vertical-slash", budget=20), "policy 'vertical-slash', whose prefill is sparse"),
        (config("hindsight", policy="quest(page=4)"), "pages chosen with hindsight"),
        (config("attention", policy="kvzip-plus"), r"score 'kvzip-plus'"),
    ],
)
def test_what_does_not_know_gates_is_refused(wrong: pk.EvictionConfig, words: str) -> None:
    with pytest.raises(ConfigError, match=f"model 'tiny-laguna' has a gate .* {words} is not measured with it"):
        pk.measure(tiny_adapter(GATED), [PROMPT], [wrong], settings=pk.Settings(steps=1), progress=False)


def test_a_model_without_gates_takes_no_option_about_them() -> None:
    words = "'two-stage.*gate=none.*' says what ν takes of a gate .* model 'tiny-llama' has none; leave gate out"
    with pytest.raises(ConfigError, match=words):
        pk.measure(tiny_adapter(), [PROMPT], [config("two-stage(gate=none)")], progress=False)
    with pytest.raises(ConfigError, match=words):
        trace_sample(tiny_adapter(), PROMPT, RunConfig("m", "d", (config("two-stage(gate=none)"),)))
