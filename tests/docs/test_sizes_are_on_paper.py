"""The page on GPUs holds what its script prints, and the script's operations are those of the plain model."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoModelForCausalLM

from perturbkv.configs.resources import Shape
from perturbkv.models.loading import open_model
from tests.support.scripts import DOCS, functions, script


@pytest.mark.slow
def test_the_page_holds_the_scripts_tables() -> None:
    page = (DOCS / "explanation" / "gpu.md").read_text()
    assert all(line in page for line in script("sizes").splitlines())


@pytest.mark.slow
def test_operations_are_those_of_the_plain_model() -> None:
    """Counted on tensors without numbers; the counter takes causal attention for whole, twice what is needed."""
    sizes, tokens = functions("sizes"), 8192
    files = open_model(sizes["MODEL"])
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(files.config, dtype=torch.bfloat16, attn_implementation="sdpa")
        with FlopCounterMode(display=False) as counter, torch.inference_mode():
            model(input_ids=torch.zeros(1, tokens, dtype=torch.int64), use_cache=True, logits_to_keep=1)
    linear = sizes["linear_weights"](sizes["planned"](tokens))
    projections, attention = sizes["prefill_operations"](Shape.from_config(files.config, 2, 0), linear, tokens)
    logits = 2 * files.config.vocab_size * files.config.hidden_size
    norms = linear - sum(module.weight.numel() for module in model.model.modules() if isinstance(module, nn.Linear))
    assert counter.get_total_flops() == projections - 2 * norms * tokens + 2 * attention + logits
