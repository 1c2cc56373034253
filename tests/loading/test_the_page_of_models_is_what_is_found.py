"""docs/reference/models.md says what the proof finds: every family of the installed transformers is tried again."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest
import transformers

from perturbkv.models.proof.proven_twin import describe

SCRIPT = Path(__file__).resolve().parents[2] / "docs" / "scripts" / "models_page.py"
WRONGLY_ACCEPTED_BY_A_SKETCH = (
    "moshi", "deepseek_v32", "glm_moe_dsa", "doge", "deepseek_v4", "recurrent_gemma", "minimax", "whisper", "plbart",
    "blenderbot-small", "bitnet", "diffllama", "hrm_text",
)  # fmt: skip
"""Families that need more than a recomputed attention on a short text to be found out."""


def script() -> Any:
    spec = importlib.util.spec_from_file_location("models_page", SCRIPT)
    assert spec is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)  # type: ignore[union-attr]
    return module


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_the_page_is_made_anew_as_it_stands() -> None:
    made = script()
    transformers.logging.set_verbosity_error()
    found = dict(made.findings())
    assert made.page(found) == made.PAGE.read_text(encoding="utf-8")


def test_families_that_a_short_text_does_not_tell_are_refused_on_the_page() -> None:
    refused = script().PAGE.read_text(encoding="utf-8").partition("## Refused")[2]
    assert [family for family in WRONGLY_ACCEPTED_BY_A_SKETCH if f"| `{family}` |" not in refused] == []


def test_sparse_layers_of_minimax_m3_are_refused() -> None:
    """Without them the family is measured; they attend to blocks that an indexer chooses."""
    config = transformers.AutoConfig.for_model(
        "minimax_m3_vl_text", layer_types=["full_attention", "minimax_m3_sparse"] * 2, num_hidden_layers=4
    )
    assert describe(config).check in ("keywords", "mask", "cache")
