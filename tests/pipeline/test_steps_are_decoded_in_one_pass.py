"""The tokens of several steps are known, so that one forward pass decodes them; it measures what one pass each does."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from perturbkv.configs.resources import Resources
from perturbkv.datasets.encode import Prompt
from perturbkv.models.adapter import Adapter
from perturbkv.pipeline.sample import decoding
from perturbkv.pipeline.sample.decoding import STEPS_AT_ONCE, decode_full
from perturbkv.selection.grid import grid
from tests.support.hybrids import hybrid_adapter
from tests.support.models import GATED, exact_adapter, token_ids
from tests.support.resolved import prefill, resolved_run
from tests.support.resolved import trace_sample as trace

N, STEPS = 40, STEPS_AT_ONCE + 3
PROMPT = Prompt("s", token_ids(N, seed=3), 0, question_tokens=6)
CONFIGS = (
    *grid((12, 20), policy=("snapkv", "adakv"), selection=("attention", "two-stage"), window=6),
    *grid(20, policy="quest(page=4)", selection="attention", window=6),
)


def model(family: str) -> Adapter:
    adapter = hybrid_adapter(family) if family == "granitemoehybrid" else exact_adapter(family, 4, 2)
    adapter.tokenizer.eos_token_id = adapter.model.generation_config.eos_token_id = None
    return adapter


@pytest.mark.parametrize("family", ["llama", "gemma3_text", "gpt_oss", GATED, "granitemoehybrid"])
@pytest.mark.parametrize("rows", [1, 3])
def test_the_reference_is_the_models_own_greedy_text_read_at_once(family: str, rows: int) -> None:
    """Read whole and without a cache, the text gives the same logits, and the tokens are their largest."""
    adapter, ids = model(family), list(PROMPT.token_ids)
    context, question = ids[:-6], ids[-6:]
    read = prefill(adapter, context, [*CONFIGS[:1]], Resources(), "s")
    records, tokens, *_ = decode_full(adapter, read, question, STEPS, rows)
    with torch.inference_mode():
        whole = adapter.model(input_ids=torch.tensor([ids + tokens.tolist()]), use_cache=False).logits[0, N - 1 :]
    assert tokens.tolist() == whole[:-1].argmax(dim=-1).tolist()
    assert [record.entries for record in records] == list(range(N + 1, N + 1 + STEPS))
    for record, expected in zip(records, whole[1:], strict=True):
        assert (record.logits[0] - expected).norm() < 1e-4 * expected.norm()
    assert adapter.cache_layer(read.cache, 0).get_seq_length() == N + STEPS


@pytest.mark.slow
@pytest.mark.parametrize("scenario", ["regular", "context-only"])
@pytest.mark.parametrize("family", ["llama", "gemma3_text", "gpt_oss", GATED, "granitemoehybrid"])
def test_one_pass_measures_what_a_pass_for_each_step_does(
    family: str, scenario: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def measured() -> dict[str, Any]:
        configs = CONFIGS[:-1] if family == "granitemoehybrid" else CONFIGS
        run = resolved_run(configs, steps=STEPS, scenario=scenario, save=("outputs",))
        return dict(trace(model(family), PROMPT, run).arrays)

    passes: list[int] = []
    plain = decoding.run_with_cache

    def counted(model: Any, ids: torch.Tensor, *more: Any, **named: Any) -> Any:
        passes.append(ids.shape[1])
        return plain(model, ids, *more, **named)

    monkeypatch.setattr(decoding, "run_with_cache", counted)
    together = measured()
    assert {STEPS_AT_ONCE, STEPS - STEPS_AT_ONCE} < set(passes)
    monkeypatch.setattr(decoding, "STEPS_AT_ONCE", 1)
    passes.clear()
    apart = measured()
    assert set(passes) <= {1, 6}
    near = {"rtol": 2e-3, "atol": 1e-4} if family == "granitemoehybrid" else {"rtol": 1e-6, "atol": 1e-9}
    for name, array in together.items():
        if "floor" not in name:
            np.testing.assert_allclose(array.astype(float), apart[name].astype(float), **near, err_msg=name)
