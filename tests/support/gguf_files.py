"""A tiny Llama as a GGUF file: quantised matrices, byte-level tokens, so that converting it takes a moment."""

from __future__ import annotations

from pathlib import Path

import gguf
import numpy as np
from tokenizers.pre_tokenizers import ByteLevel

LAYERS, HEADS, KV_HEADS, D_HEAD, D_MLP = 2, 2, 1, 32, 96
D_MODEL = HEADS * D_HEAD
MERGES = ["t h", "th e", "Ġ the", "i n", "e r", "a n"]
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
TOKENS = [*SPECIAL, *sorted(ByteLevel.alphabet()), *(merge.replace(" ", "") for merge in MERGES)]
TEMPLATE = "{% for message in messages %}<|im_start|>{{ message['content'] }}<|im_end|>{% endfor %}"


def gguf_file(
    path: Path, seed: int = 0, without: str = "", poisoned: str = "", extra: str = "", layers: int = LAYERS
) -> Path:
    """Write the model: Q4_1 matrices, Q8_0 embeddings, F32 norms.

    One tensor may be left out, hold a NaN, or be one too many; `layers` is what the file says of itself.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    writer = gguf.GGUFWriter(path, "llama")
    _describe(writer, layers)
    if extra:
        writer.add_tensor(extra, np.ones(D_MODEL, np.float32))
    for name, shape, kind in _tensors():
        if name == without:
            continue
        values = np.random.default_rng([seed, len(name)]).normal(0, 0.3, shape).astype(np.float32)
        if name == poisoned:
            values[..., 3] = np.nan
        quantised = gguf.quants.quantize(values, kind)
        writer.add_tensor(name, quantised, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _describe(writer: gguf.GGUFWriter, layers: int) -> None:
    writer.add_name("tiny")
    writer.add_context_length(512)
    writer.add_embedding_length(D_MODEL)
    writer.add_block_count(layers)
    writer.add_feed_forward_length(D_MLP)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_rope_dimension_count(D_HEAD)
    writer.add_rope_freq_base(1e4)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_vocab_size(len(TOKENS))
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(TOKENS)
    writer.add_token_types([3] * len(SPECIAL) + [1] * (len(TOKENS) - len(SPECIAL)))
    writer.add_token_merges(MERGES)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_unk_token_id(0)
    writer.add_pad_token_id(2)
    writer.add_add_bos_token(False)
    writer.add_chat_template(TEMPLATE)


def _tensors() -> list[tuple[str, tuple[int, ...], gguf.GGMLQuantizationType]]:
    q4, q8, f32 = (gguf.GGMLQuantizationType[name] for name in ("Q4_1", "Q8_0", "F32"))
    kv = KV_HEADS * D_HEAD
    inside = {
        "attn_norm": ((D_MODEL,), f32), "attn_q": ((D_MODEL, D_MODEL), q4), "attn_k": ((kv, D_MODEL), q4),
        "attn_v": ((kv, D_MODEL), q4), "attn_output": ((D_MODEL, D_MODEL), q4), "ffn_norm": ((D_MODEL,), f32),
        "ffn_gate": ((D_MLP, D_MODEL), q4), "ffn_up": ((D_MLP, D_MODEL), q4), "ffn_down": ((D_MODEL, D_MLP), q4),
    }  # fmt: skip
    layers = [(f"blk.{layer}.{name}.weight", *rest) for layer in range(LAYERS) for name, rest in inside.items()]
    return [("token_embd.weight", (len(TOKENS), D_MODEL), q8), ("output_norm.weight", (D_MODEL,), f32), *layers]
