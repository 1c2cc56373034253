"""Rotations and products are those of the model, in full precision."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from transformers.models.gpt_oss.modeling_gpt_oss import apply_rotary_pos_emb as apply_to_halves
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb
from transformers.models.phi3.modeling_phi3 import apply_rotary_pos_emb as apply_partly

import perturbkv as pk
from perturbkv.configs.resources import Resources
from perturbkv.datasets.encode import Prompt
from perturbkv.errors import ModelError
from perturbkv.models.adapter import Adapter
from perturbkv.pipeline.sample import measure, replay
from perturbkv.pipeline.sample.capture import Observer, capture
from perturbkv.pipeline.sample.prefill import Rotations
from perturbkv.selection.grid import configuration
from tests.audit import planted
from tests.support.models import FAMILIES, tiny_adapter, token_ids
from tests.support.resolved import answer, prefill, resolved_run, trace_sample

YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 128}
DYNAMIC = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}
KINDS: dict[str, dict[str, Any]] = {
    **{family: {"family": family} for family in FAMILIES},
    "yarn": {"family": "llama", "rope_parameters": YARN},
    "partial": {
        "family": "phi3",
        "partial_rotary_factor": 0.5,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5},
    },
}


def made(kind: str) -> Adapter:
    return tiny_adapter(**KINDS[kind])


def turned(adapter: Adapter, vectors: torch.Tensor, positions: range) -> torch.Tensor:
    """(head, position, d_head) as transformers turns them."""
    cosine, sine = adapter.rotary(vectors, torch.tensor([list(positions)]), *adapter.rotary_kind)
    apply = {"phi3": apply_partly, "gpt_oss": apply_to_halves}.get(adapter.config.model_type, apply_rotary_pos_emb)
    return apply(vectors.unsqueeze(0), vectors.unsqueeze(0), cosine, sine)[0][0]


def drawn(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("kind", KINDS)
def test_turning_back_undoes_the_models_rotation(kind: str) -> None:
    adapter, vectors, positions = made(kind), drawn(4, 50, 8), range(30, 80)
    there = turned(adapter, vectors, positions)
    assert Rotations(adapter)(positions, adapter.device).cosine.shape == (50, 4 if kind == "partial" else 8)
    assert (there - vectors).abs().max() > 0.5
    torch.testing.assert_close(
        Rotations(adapter)(positions, adapter.device).unrotate(there), vectors, rtol=1e-5, atol=2e-6
    )


@pytest.mark.parametrize("kind", KINDS)
def test_the_mean_rotation_turns_a_vector_to_the_mean_of_where_the_model_turns_it(kind: str) -> None:
    adapter, vectors, positions = made(kind), drawn(4, 1, 8), range(60, 99)
    mean = Rotations(adapter)(positions, adapter.device).mean(8)
    everywhere = turned(adapter, vectors.expand(-1, len(positions), -1), positions)
    torch.testing.assert_close(vectors[:, 0].double() @ mean.T, everywhere.double().mean(dim=1), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("kind", KINDS)
def test_scores_are_shown_the_queries_that_the_projection_gave(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Turned back from what attention gets."""
    adapter, ids, shown, heard = made(kind), token_ids(40), [], list[torch.Tensor]()
    monkeypatch.setattr(
        "perturbkv.scoring.scores.expected_attention.ExpectedAttention.score",
        lambda score, layer: shown.append(layer.unrotated) or torch.zeros(4, 35, dtype=torch.float64),
    )
    with capture(adapter, Observer(attention_input=lambda layer, hidden: heard.append(hidden[0]))):
        prefill(adapter, ids, [configuration(12, policy="expected-attention", window=5)], Resources(), "s")
    attention, hidden = adapter.attentions[0], heard[0].clone()
    rows = attention.qkv_proj(hidden)[..., :32] if hasattr(attention, "qkv_proj") else attention.q_proj(hidden)
    if hasattr(attention, "q_norm"):  # of each head, or of all together
        rows = attention.q_norm(rows.view(40, -1, attention.q_norm.weight.numel()))
    queries = rows.reshape(40, 4, 8).detach()
    rounding = 1e-5 * float(queries.abs().max())
    torch.testing.assert_close(shown[0], queries.transpose(0, 1), rtol=1e-5, atol=rounding)


def test_asking_for_later_positions_changes_nothing_of_the_model() -> None:
    """Dynamic frequencies grow with the positions asked for, and would stay so."""
    adapter = tiny_adapter(positions=32, rope_parameters=DYNAMIC)
    before = adapter.rotary.inv_freq.clone()
    later = Rotations(adapter)(range(60, 100), adapter.device)
    assert torch.equal(adapter.rotary.inv_freq, before)
    grown = adapter.rotary(drawn(1, 1), torch.tensor([list(range(60, 100))]))[0][0]
    assert not torch.equal(adapter.rotary.inv_freq, before), "the model's own module changes when it is asked"
    torch.testing.assert_close(later.cosine, grown)


def test_replays_and_audits_stay_on_one_side_of_a_change_of_rotations() -> None:
    """LongRoPE: keys that were cached below the switch are not asked with factors from above."""
    factors = {"short_factor": [1.0] * 4, "long_factor": [2.0] * 4, "factor": 4.0}
    asked = {"rope_type": "longrope", "rope_theta": 1e4, "original_max_position_embeddings": 32, **factors}
    adapter = tiny_adapter("phi3", rope_parameters=asked, original_max_position_embeddings=32)
    replay.check_positions_left(adapter, 40, 20, "s")
    with pytest.raises(ModelError, match=r"sample 's' is read to 30 tokens and goes on to 50, .*LongRoPE"):
        replay.check_positions_left(adapter, 30, 20, "s")
    audited = Prompt("s", token_ids(32), 0)
    with pytest.raises(ModelError, match=r"sample 's' is read to 32 tokens and goes on to 34, .*LongRoPE"):
        pk.audit(adapter, audited, planted.right, situations=["single"], steps=2, losses=False, progress=False)


MATMUL = torch.backends.cuda.matmul


@pytest.fixture(params=["tf32", "none"])
def allowed(request: pytest.FixtureRequest) -> Iterator[str]:
    before = MATMUL.fp32_precision
    MATMUL.fp32_precision = request.param
    yield request.param
    MATMUL.fp32_precision = before


def test_a_sample_and_an_answer_are_measured_without_tf32(allowed: str, monkeypatch: pytest.MonkeyPatch) -> None:
    seen, plain = set(), measure.layer_reference

    def watched(*asked: Any) -> Any:
        seen.add((MATMUL.fp32_precision, torch.backends.mkldnn.matmul.fp32_precision))
        return plain(*asked)

    monkeypatch.setattr(measure, "layer_reference", watched)
    adapter, prompt, configs = tiny_adapter(), pk.Prompt("p", token_ids(40), 0), pk.grid(16, window=4)
    trace_sample(adapter, prompt, resolved_run(configs))
    assert seen == {("ieee", "ieee")}
    assert MATMUL.fp32_precision == allowed
    adapter.model.register_forward_hook(lambda *asked: seen.add(MATMUL.fp32_precision))
    answer(adapter, prompt, configs, 2)
    assert seen == {("ieee", "ieee"), "ieee"}
    assert MATMUL.fp32_precision == allowed


def test_the_older_setting_of_torch_stays_readable() -> None:
    torch.set_float32_matmul_precision("high")
    try:
        trace_sample(tiny_adapter(), pk.Prompt("p", token_ids(40), 0), resolved_run(pk.grid(16, window=4)))
        assert torch.get_float32_matmul_precision() == "high"
    finally:
        torch.set_float32_matmul_precision("highest")
