"""A model's config.json: absurd values, and text that is none."""

from __future__ import annotations

import itertools
import json
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path

from tests.attack.broken_folders import DEEP, replace, update
from tests.attack.spoiling import Spoiled

CONFIG = "config.json"
SIZES = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads",
         "head_dim", "vocab_size", "max_position_embeddings")  # fmt: skip
NUMBERS = ("rms_norm_eps", "attention_dropout", "initializer_range", "sliding_window", "attn_logit_softcapping")
OTHERS = ("hidden_act", "tie_word_embeddings", "attention_bias", "mlp_bias", "dtype", "model_type", "architectures",
          "rope_parameters", "rope_theta", "rope_scaling", "quantization_config", "layer_types", "eos_token_id",
          "pad_token_id", "bos_token_id", "auto_map", "use_cache", "is_decoder", "pretraining_tp")  # fmt: skip
NOT_A_SIZE = (0, -1, -(10**20), 10**9, 10**20, 1e308, float("nan"), float("inf"), "many", "32", [32], {}, 1.5, True)
"""None of these can be the size of the tiny model, or of any."""
ANY = (0, -1, 10**20, float("nan"), float("inf"), None, "nonsense", [], [None], {}, {"a": 1}, 1.5, True)
ROPES: tuple[object, ...] = (
    {"rope_type": "nonsense", "rope_theta": 1e4},
    {"rope_type": "default", "rope_theta": 0},
    {"rope_type": "default", "rope_theta": -1e4},
    {"rope_type": "default", "rope_theta": float("nan")},
    {"rope_type": "default", "rope_theta": float("inf")},
    {"rope_type": "default", "rope_theta": "1e4"},
    {"rope_type": "default"},
    {"rope_type": "linear", "rope_theta": 1e4},
    {"rope_type": "linear", "rope_theta": 1e4, "factor": 0},
    {"rope_type": "linear", "rope_theta": 1e4, "factor": "x"},
    {"rope_type": "yarn", "rope_theta": 1e4, "factor": -2.0},
    {"rope_type": "llama3", "rope_theta": 1e4, "factor": 8.0},
    {"rope_type": "longrope", "rope_theta": 1e4, "short_factor": [1.0], "long_factor": [1.0]},
    {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 99},
)


def kinds() -> Mapping[str, Sequence[Spoiled]]:
    return {
        "sizes": [_set(key, value, never=True) for key, value in itertools.product(SIZES, NOT_A_SIZE)],
        "numbers": [_set(key, value) for key, value in itertools.product(NUMBERS, ANY)],
        "other keys": [_set(key, value) for key, value in itertools.product(OTHERS, ANY)],
        "rotations": [_set("rope_parameters", value) for value in ROPES],
        "sizes that do not go together": _together(),
        "config.json": _texts(),
    }


def _set(key: str, value: object, never: bool = False) -> Spoiled:
    valid = (key, value) in (("tie_word_embeddings", True), ("num_hidden_layers", True))
    spoil = update(CONFIG, **{key: value})
    words = ("model", key)
    large = key == "max_position_embeddings" and value in (10**9,)  # a long context is no error
    return Spoiled(f"{key} = {value!r}", spoil, never and not valid and not large, words=words)


def _together() -> list[Spoiled]:
    asked: list[dict[str, object]] = [
        {"num_key_value_heads": 3},
        {"num_key_value_heads": 8},
        {"num_attention_heads": 5},
        {"num_attention_heads": 3, "num_key_value_heads": 2},
        {"vocab_size": 100},
        {"vocab_size": 10**9},
        {"hidden_size": 33},
        {"hidden_size": 2**20},
        {"head_dim": 7},
        {"max_position_embeddings": 1},
        {"max_position_embeddings": 100},
        {"num_hidden_layers": 10**6},
        {"hidden_size": 2**17, "intermediate_size": 2**20, "num_hidden_layers": 500},
    ]
    return [Spoiled(json.dumps(values), update(CONFIG, **values), words=("model", *values)) for values in asked]


def _texts() -> list[Spoiled]:
    contents = ["", "{", "[]", "null", "5", '"x"', "{}", DEEP, '{"a":' * 50_000, b"\xff\xfe\xfd", "{'model_type': 1}",
                '{"model_type": "llama"} x', "NaN"]  # fmt: skip

    def cut(share: float, folder: Path) -> None:
        content = (folder / CONFIG).read_bytes()
        (folder / CONFIG).write_bytes(content[: int(share * len(content))])

    def missing(folder: Path) -> None:
        (folder / CONFIG).unlink()

    def as_folder(folder: Path) -> None:
        missing(folder)
        (folder / CONFIG).mkdir()

    def own_code(folder: Path) -> None:
        """Code of the model's own that leaves a file where it is run."""
        (folder / "own.py").write_text("open('opened', 'w')\n")
        update(CONFIG, model_type="own", auto_map={"AutoConfig": "own.Own", "AutoModelForCausalLM": "own.Own"})(folder)

    return [
        *(Spoiled(f"{CONFIG} of {content[:12]!r}", replace(CONFIG, content)) for content in contents),
        *(Spoiled(f"{CONFIG} cut at {share}", partial(cut, share)) for share in (0.1, 0.5, 0.99)),
        Spoiled("no config.json", missing),
        Spoiled("config.json is a folder", as_folder),
        Spoiled("code of the model's own", own_code),
    ]
