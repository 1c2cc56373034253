"""Float32 is multiplied in float32, whatever the process allows."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

import perturbkv as pk
from perturbkv.pipeline.sample import measure
from tests.support.models import tiny_adapter, token_ids
from tests.support.resolved import answer, resolved_run, trace_sample

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
