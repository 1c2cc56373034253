"""Write docs/reference/models.md: what the proof says of every family of causal language models of transformers.

Each family's twin is tried, a tiny model of its default configuration. Where that does not run as it stands, or has no
attention at all, `COMPLETED` gives it the values that its models have.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import transformers
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from perturbkv.errors import ModelError
from perturbkv.models.proof.proven_twin import Finding, describe

PAGE = Path(__file__).resolve().parents[1] / "reference" / "models.md"
_ROPE = {"rope_type": "default", "rope_theta": 1e4}
_YARN = {"rope_type": "yarn", "factor": 40, "beta_fast": 32, "beta_slow": 1, "mscale": 1.0, "mscale_all_dim": 1.0,
         "original_max_position_embeddings": 4096, "rope_theta": 1e4}  # fmt: skip
COMPLETED: Mapping[str, dict[str, Any]] = {
    "bamba": {"attn_layer_indices": [9, 18, 27]},
    "bert": {"is_decoder": True},
    "bert-generation": {"is_decoder": True},
    "cohere_compass_text": {"rope_parameters": {"full_attention": _ROPE, "sliding_attention": _ROPE}},
    "deepseek_v2": {"n_group": 8, "topk_group": 3, "num_experts_per_tok": 6, "topk_method": "group_limited_greedy",
                    "n_routed_experts": 160, "first_k_dense_replace": 1, "rope_parameters": _YARN},
    "dots1": {"n_routed_experts": 128, "n_shared_experts": 2, "num_experts_per_tok": 6, "moe_intermediate_size": 1408,
              "first_k_dense_replace": 1},
    "granitemoehybrid": {"layer_types": (["mamba"] * 5 + ["attention"] + ["mamba"] * 4) * 4, "num_hidden_layers": 40,
                         "hidden_size": 1536, "num_attention_heads": 12, "num_key_value_heads": 4,
                         "mamba_n_heads": 48, "mamba_d_head": 64, "num_local_experts": 64, "num_experts_per_tok": 6},
    "hunyuan_v1_dense": {"head_dim": 128, "num_key_value_heads": 8},
    "hunyuan_v1_moe": {"head_dim": 128, "num_experts": 64, "moe_topk": [8] * 32, "num_key_value_heads": 8},
    "lfm2_moe": {"num_hidden_layers": 24,
                 "layer_types": ["conv", "conv", "full_attention", "conv", "conv", "conv"] * 4},
    "ministral": {"head_dim": 128, "num_key_value_heads": 8, "num_hidden_layers": 36, "sliding_window": 32768,
                  "layer_types": ["full_attention", *["sliding_attention"] * 3] * 9},
    "nemotron": {"head_dim": 128, "num_key_value_heads": 8},
    "reformer": {"is_decoder": True},
    "roberta": {"is_decoder": True},
    "roformer": {"is_decoder": True},
}  # fmt: skip
"""Family -> values beside its default configuration."""
_HEAD = """# Models, family by family

What the proof ({how}) says of all {count} families of causal language models in transformers {version}. Of each
family a tiny model is tried, with all its parameters drawn at random. It has the options of the family's default
configuration, or of its published models where the default has no attention or does not run.
`perturbkv list models FOLDER` says the same of a model's folder. A model of yours is proven again, with its own
weights, whenever it is loaded.

Measured are the layers of kind *full*, or, where a model has none, *sliding* and *chunked* ones, up to the window or
chunk. All others keep what they hold. Of a layer with *latents* the cache holds one for each token, of which the layer
makes the keys and values that attention reads. Made by `python docs/scripts/models_page.py`.
"""


def findings() -> Iterator[tuple[str, Finding]]:
    """Yield each family and what the proof finds of it."""
    for family in sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES):
        yield family, finding(family)


def finding(family: str) -> Finding:
    """Return what the proof finds of a family; a configuration that does not stand is refused by `configuration`."""
    try:
        return describe(CONFIG_MAPPING[family](**COMPLETED.get(family, {})))
    except Exception as error:  # a configuration raises what it likes at its own defaults
        words = str(error) if isinstance(error, ModelError) else f"{type(error).__name__}: {error}"
        return Finding(check="configuration", seen=words)


def page(found: Mapping[str, Finding]) -> str:
    """Return the page of all families' findings."""
    measured = {family: one for family, one in found.items() if not one.check}
    refused = {family: one for family, one in found.items() if one.check}
    how = "[choices](../how-to/choices.md)"
    lines = [_HEAD.format(how=how, count=len(found), version=transformers.__version__)]
    lines += [
        f"## Measured: {len(measured)}\n",
        "| family | layers | gate | soft cap | sinks |",
        "|---|---|---|---|---|",
    ]
    lines += [
        f"| `{family}` | {', '.join(one.kinds)} | {_mark(one.gate)} | {_mark(one.cap)} | {_mark(one.sinks)} |"
        for family, one in measured.items()
    ]
    lines += [f"\n## Refused: {len(refused)}\n", "| family | check | what was seen |", "|---|---|---|"]
    lines += [f"| `{family}` | {one.check} | {_short(one.seen)} |" for family, one in refused.items()]
    return "\n".join(lines) + "\n"


def _mark(has: bool) -> str:
    """Return a cell that says whether a family has something."""
    return "yes" if has else ""


def _short(seen: str) -> str:
    """Return what was seen in one line without numbers that rounding changes, at most 160 characters."""
    words = " ".join(seen.split()).replace("|", "/").replace("<", "‹").replace(">", "›").partition(" (logits off")[0]
    return words if len(words) <= 160 else f"{words[:159]}…"


def main() -> None:
    """Write the page."""
    transformers.logging.set_verbosity_error()
    PAGE.write_text(page(dict(findings())), encoding="utf-8")


if __name__ == "__main__":
    main()
