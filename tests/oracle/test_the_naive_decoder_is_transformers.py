from __future__ import annotations

import numpy as np
import pytest
import torch

from tests.oracle.decoder import Decoder
from tests.support.models import FAMILIES, GATED, HEADS, exact_adapter, tiny_model, token_ids


@pytest.mark.parametrize("family", [*FAMILIES, GATED])
@pytest.mark.parametrize("heads", HEADS.values(), ids=HEADS)
def test_logits_equal_those_of_transformers_in_float64(family: str, heads: tuple[int, int]) -> None:
    model = exact_adapter(family, *heads).model
    ids = token_ids(12)
    with torch.no_grad():
        expected = model(torch.tensor([ids])).logits[0].numpy()
    decoder = Decoder(model)
    logits = np.stack([decoder.step(token).logits for token in ids])
    np.testing.assert_allclose(logits, expected, rtol=0, atol=1e-10 * np.abs(expected).max())


def test_a_head_of_which_a_part_is_rotary_is_transformers_too() -> None:
    part = {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5}
    model, ids = exact_adapter("phi3", 4, 2, rope_parameters=part).model, token_ids(12)
    own = tiny_model("phi3", 4, 2, dtype=torch.float64, rope_parameters=part)
    with torch.no_grad():
        expected, plain = (made(torch.tensor([ids])).logits[0].numpy() for made in (model, own))
    decoder = Decoder(model)
    logits = np.stack([decoder.step(token).logits for token in ids])
    np.testing.assert_allclose(logits, expected, rtol=0, atol=1e-10 * np.abs(expected).max())
    np.testing.assert_allclose(plain, expected, rtol=0, atol=1e-4 * np.abs(expected).max())


def test_the_exact_model_is_transformers_own_to_float32() -> None:
    ids = torch.tensor([token_ids(12)])
    with torch.no_grad():
        own, exact = tiny_model(dtype=torch.float64)(ids).logits, exact_adapter("llama", 4, 2).model(ids).logits
    torch.testing.assert_close(own, exact, rtol=1e-5, atol=1e-5)
