"""Models that are cut, overwritten, absurd or too large: each is refused, or measured in finite numbers."""

from __future__ import annotations

import itertools
import json
import os
import random
import shutil
import struct
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any

import gguf
import numpy as np
import torch
from safetensors.torch import load_file, save_file

from perturbkv.errors import PerturbkvError
from perturbkv.storage.trace.trace_file import read_trace
from tests.attack.case import Case, Flaw, Outcome, crashed, refused
from tests.attack.materials import PROMPTS
from tests.support import gguf_files

COUNT = 240
TRACE = ("trace", "--dataset", PROMPTS, "--samples", "1", "--budget", "24", "--window", "8", "--device", "cpu",
         "--output", "out.h5", "--model")  # fmt: skip
CONFIG, WEIGHTS, TOKENIZER = "config.json", "model.safetensors", "tokenizer.json"
INDEX, SHARD = "model.safetensors.index.json", "model-00001-of-00002.safetensors"
UP, EMBEDDING = "model.layers.1.mlp.up_proj.weight", "model.embed_tokens.weight"
DEEP, NAN, INF = "[" * 100_000, float("nan"), float("inf")
TEXTS = ("", "{", "{}", "[]", "null", "5", '"x"', DEEP, "\x00\x01\x02", b"\xff\xfe\xfd")
"""What no file of a model holds."""
NOT_A_SIZE = (0, -1, -(10**20), 10**9, 10**20, 1e308, NAN, INF, "many", "32", [32], {}, 1.5, True)
ODD = (0, -1, 10**20, NAN, INF, None, "nonsense", [], [None], {}, {"a": 1}, 1.5, True)
SIZES = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads",
         "head_dim", "vocab_size", "max_position_embeddings")  # fmt: skip
KEYS = ("rms_norm_eps", "attention_dropout", "initializer_range", "sliding_window", "attn_logit_softcapping",
        "hidden_act", "tie_word_embeddings", "attention_bias", "mlp_bias", "dtype", "model_type", "architectures",
        "rope_parameters", "rope_theta", "rope_scaling", "quantization_config", "layer_types", "eos_token_id",
        "pad_token_id", "bos_token_id", "auto_map", "use_cache", "is_decoder", "pretraining_tp")  # fmt: skip
ROPES = ({"rope_type": "nonsense"}, {"rope_theta": 0}, {"rope_theta": -1e4}, {"rope_theta": NAN}, {"rope_theta": INF},
         {"rope_theta": "1e4"}, {"rope_theta": None}, {"rope_type": "linear"}, {"rope_type": "linear", "factor": 0},
         {"rope_type": "linear", "factor": "x"}, {"rope_type": "yarn", "factor": -2.0}, {"partial_rotary_factor": 99},
         {"rope_type": "llama3", "factor": 8.0},
         {"rope_type": "longrope", "short_factor": [1.0], "long_factor": [1.0]})  # fmt: skip
CONTRADICTIONS = ({"num_key_value_heads": 3}, {"num_key_value_heads": 8}, {"num_attention_heads": 5},
                  {"num_attention_heads": 3, "num_key_value_heads": 2}, {"vocab_size": 100}, {"vocab_size": 10**9},
                  {"hidden_size": 33}, {"hidden_size": 2**20}, {"head_dim": 7}, {"max_position_embeddings": 1},
                  {"max_position_embeddings": 100}, {"num_hidden_layers": 10**6},
                  {"hidden_size": 2**17, "intermediate_size": 2**20, "num_hidden_layers": 500})  # fmt: skip
Spoil = Callable[[Path], object]


def cases(shared: Path, seed: int) -> Iterator[Case]:
    """Yield every spoilt folder, config, GGUF file and name."""
    for kind, table in {**_folders(), **_configs()}.items():
        for name, spoil in table.items():
            yield _case(kind, name, "model", partial(_copy, shared / "model", spoil), not kind.endswith("?"))
    whole = shared / "model.gguf"
    for kind, table in _ggufs(seed).items():
        for name, spoil in table.items():
            yield _case(kind, name, "model.gguf", partial(_copy, whole, spoil), not kind.endswith("?"))
    for name, spoil in OTHER_FILES.items():
        path = "model.gguf" if ".gguf" in name else "model"
        yield _case("other files", name, path, lambda folder, path=path, spoil=spoil: spoil(folder / path))
    for name in (*NAMES, *LARGE):
        yield _case("memory" if name in LARGE else "names", name[:30], name, lambda folder: None, words=())


def _case(
    kind: str, name: str, model: str, spoil: Spoil, never: bool = True, words: tuple[str, ...] = ("model",)
) -> Case:
    """Return a case; `never`: the model can only be refused."""
    if words:
        words = (*words, "sample 'p0'", "chat template", name.partition(" = ")[0])
    expected = refused(*words) if never else partial(_measured_or_refused, words)
    return Case(f"{kind}: {name[:60]}", (*TRACE, model), expected, spoil, kind)


def _copy(model: Path, spoil: Spoil, folder: Path) -> None:
    if model.suffix and not model.exists():
        gguf_files.gguf_file(model)
    (shutil.copy if model.suffix else shutil.copytree)(model, folder / model.name)
    spoil(folder / model.name)


def _measured_or_refused(words: tuple[str, ...], outcome: Outcome, folder: Path) -> Flaw:
    """Expect a trace of finite numbers, one line, or a failed sample with exit code 1."""
    if outcome.code == 1 and outcome.last.startswith("failed: "):
        return crashed(outcome)
    if outcome.code:
        return refused(*words)(outcome, folder)
    try:
        arrays = read_trace(folder / "out.h5").arrays
    except PerturbkvError as error:
        return f"exit code 0, and no trace: {error}"
    names = ("perturbation_isolated", "perturbation_propagated", "hidden_drift_l1")
    infinite = [name for name in names if not np.isfinite(arrays[name]).all()]
    return crashed(outcome) or (f"exit code 0, and {infinite[0]} is not finite" if infinite else None)


# Ways to change files: each takes the model's path last.
def _write(name: str, content: str | bytes, model: Path) -> None:
    (model / name).write_bytes(content.encode() if isinstance(content, str) else content)


def _update(name: str, values: Mapping[str, object], model: Path) -> None:
    """Change entries of a JSON file."""
    path = model / name
    path.write_text(json.dumps({**(json.loads(path.read_text()) if path.exists() else {}), **values}))


def _cut(name: str, end: float, model: Path) -> None:
    """Cut a file after a share of it, or so many bytes."""
    content = (model / name).read_bytes()
    _write(name, content[: int(end * len(content)) if isinstance(end, float) else end], model)


def _overwrite(name: str, at: int, new: bytes, model: Path) -> None:
    content = bytearray((model / name).read_bytes())
    content[at : at + len(new)] = new
    _write(name, bytes(content), model)


def _remove(name: str, model: Path) -> None:
    (model / name).unlink()


def _instead(names: tuple[str, ...], make: Spoil, model: Path) -> None:
    """Put something else where files are."""
    model.mkdir(exist_ok=True)
    for name in names:
        (model / name).unlink(missing_ok=True)
        make(model / name)


def _header(change: Callable[[dict[str, Any]], object], model: Path) -> None:
    """Change the weights' header and leave the tensors."""
    content = (model / WEIGHTS).read_bytes()
    size = int.from_bytes(content[:8], "little")
    header = json.loads(content[8 : 8 + size])
    text = json.dumps(change(header) or header).encode()
    _write(WEIGHTS, struct.pack("<Q", len(text)) + text + content[8 + size :], model)


def _tensors(change: Callable[[dict[str, torch.Tensor]], object], model: Path) -> None:
    tensors = load_file(model / WEIGHTS)
    change(tensors)
    save_file(tensors, model / WEIGHTS, {"format": "pt"})


def _shards(index: object, model: Path) -> None:
    """Divide the weights into shards: an index with these entries, or of this text."""
    names = load_file(model / WEIGHTS)
    (model / WEIGHTS).rename(model / SHARD)
    text = index if isinstance(index, str) else json.dumps({"weight_map": {**dict.fromkeys(names, SHARD), **index}})
    _write(INDEX, text, model)


def _token_ids(first: int, model: Path) -> None:
    content = json.loads((model / TOKENIZER).read_text())
    content["model"]["vocab"] = {token: first + number for number, token in enumerate(content["model"]["vocab"])}
    _write(TOKENIZER, json.dumps(content), model)


def _pickle(model: Path) -> None:
    """Leave a pickle that makes a file where it is opened."""
    _remove(WEIGHTS, model)
    _write("pytorch_model.bin", b"cos\nsystem\n(S'touch opened'\ntR.", model)


def _own_code(model: Path) -> None:
    """Leave code of the model's own that makes a file where it is run."""
    _write("own.py", "open('opened', 'w')\n", model)
    _update(
        CONFIG, {"model_type": "own", "auto_map": {"AutoConfig": "own.Own", "AutoModelForCausalLM": "own.Own"}}, model
    )


HEADER_ENTRIES = {
    "an unknown dtype": {"dtype": "F33"}, "a dtype that is a number": {"dtype": 5}, "another dtype": {"dtype": "I64"},
    "offsets outside": {"data_offsets": [0, 10**15]}, "offsets backwards": {"data_offsets": [100, 0]},
    "offsets below 0": {"data_offsets": [-8, 0]}, "offsets that overlap": {"data_offsets": [0, 6144]},
    "a huge shape": {"shape": [10**10, 10**10]}, "a shape below 0": {"shape": [-48, -32]},
    "a shape of text": {"shape": "big"}, "no shape": {"shape": None},
}  # fmt: skip
TENSORS: dict[str, Callable[[dict[str, torch.Tensor]], object]] = {
    "one is missing": lambda tensors: tensors.pop(UP),
    "embeddings are missing": lambda tensors: tensors.pop(EMBEDDING),
    "all are missing": lambda tensors: tensors.clear(),
    "one too many": lambda tensors: tensors.update(more=torch.zeros(2)),
    "another name": lambda tensors: tensors.update({"model.layers.1.mlp.down_prj.weight": tensors.pop(UP)}),
    "another shape": lambda tensors: tensors.update({UP: torch.zeros(3, 5)}),
    "transposed": lambda tensors: tensors.update({UP: tensors[UP].T.contiguous()}),
    "empty": lambda tensors: tensors.update({UP: torch.zeros(0)}),
    "a scalar": lambda tensors: tensors.update({UP: torch.tensor(1.0)}),
    "complex": lambda tensors: tensors.update({UP: tensors[UP].to(torch.complex64)}),
    **{str(value): lambda tensors, value=value: tensors[UP].view(-1)[3:4].fill_(value) for value in (NAN, INF, -INF)},
}
DTYPES: dict[str, Callable[[dict[str, torch.Tensor]], object]] = {
    **{str(dtype): lambda tensors, dtype=dtype: tensors.update({UP: tensors[UP].to(dtype)})
       for dtype in (torch.float64, torch.float16, torch.int8, torch.uint8, torch.bool, torch.float8_e4m3fn)},
    "3e38": lambda tensors: tensors[UP].view(-1)[3:4].fill_(3e38),
}  # fmt: skip
SHARDS = (*("", "{", "[]", "null", "5", '{"weight_map": []}', '{"weight_map": {}}', '{"metadata": {}}', DEEP),
          *({UP: value} for value in ("model-00002-of-00002.safetensors", "../../etc/passwd", ".", 5, "",
                  None)))  # fmt: skip
TOKENIZER_CONFIG = {"tokenizer_class": "NoSuchTokenizer", "chat_template": "{% for", "model_max_length": -5,
                    "eos_token": 5, "added_tokens_decoder": {"9999": {"content": "<x>"}}, "auto_map": {"x": "y"},
                    "bos_token": {"content": "<far>"}}  # fmt: skip
GENERATION_CONFIG = {"eos_token_id": ("x", -5), "temperature": ("hot",), "max_length": (-1,), "pad_token_id": (10**20,),
                     "num_beams": (0,), "do_sample": (5,), "bos_token_id": ([1, 2],)}  # fmt: skip


def _texts(name: str, texts: tuple[str | bytes, ...] = TEXTS) -> dict[str, Spoil]:
    return {f"{name} of {text[:12]!r}": partial(_write, name, text) for text in texts}


def _folders() -> Mapping[str, Mapping[str, Spoil]]:
    """Return kind -> name -> what spoils a folder; after a kind with "?" finite numbers are right too."""

    def entry(values: dict[str, Any], header: dict[str, Any]) -> None:
        header[UP] = {**header[UP], **values}

    junk = ((8, 0), (8, 0x5B), (12, 0xFF), (30, 0x22), (60, 0x00))
    return {
        "weights cut": {str(end): partial(_cut, WEIGHTS, end)
                        for end in (0, 1, 7, 8, 9, 100, 0.01, 0.3, 0.5, 0.9, 0.99, -1, -2, -50, -1000)},
        "weights header": {
            **{f"{size} bytes": partial(_overwrite, WEIGHTS, 0, struct.pack("<Q", size))
               for size in (0, 1, 2, 1000, 10**6, 10**8 + 1, 2**31, 2**63, 2**64 - 1)},
            **{f"byte {at} is {byte}": partial(_overwrite, WEIGHTS, at, bytes([byte])) for at, byte in junk},
            **{name: partial(_header, partial(entry, values)) for name, values in HEADER_ENTRIES.items()},
            "a list": partial(_header, lambda header: [header]),
            "a deep one": partial(_write, WEIGHTS, struct.pack("<Q", len(DEEP)) + DEEP.encode()),
        },
        "tensors": {name: partial(_tensors, change) for name, change in TENSORS.items()},
        "tensors?": {name: partial(_tensors, change) for name, change in DTYPES.items()},
        "shards": {
            **{f"index {str(index)[:40]!r}": partial(_shards, index) for index in SHARDS},
            "no weights": partial(_remove, WEIGHTS),
            "weights that are a folder": partial(_instead, (WEIGHTS,), Path.mkdir),
            "pickled weights": _pickle,
        },
        "shards?": {"an index of what no shard has": partial(_shards, MappingProxyType({"more": SHARD}))},
        "tokenizer": {
            **_texts(TOKENIZER), "none": lambda model: [_remove(n, model) for n in (TOKENIZER,
                    "tokenizer_config.json")],
            **{f"cut at {end}": partial(_cut, TOKENIZER, end) for end in (0.1, 0.5, 0.99)},
            **{f"ids from {first}": partial(_token_ids, first) for first in (200, 260, 10**6, 2**32 - 300)},
            **{f"model = {value!r}": partial(_update, TOKENIZER, {"model": value})
               for value in (None, {}, [], "BPE", {"type": "No"}, {"type": "BPE", "vocab": {}, "merges": []})},
        },
        "tokenizer config?": {
            **_texts("tokenizer_config.json"),
            **{f"{key} = {value!r}": partial(_update, "tokenizer_config.json", {key: value})
               for key, value in TOKENIZER_CONFIG.items()},
        },
        "generation config?": {
            **_texts("generation_config.json", TEXTS),
            **{f"{key} = {value!r}": partial(_update, "generation_config.json", {key: value})
               for key, values in GENERATION_CONFIG.items() for value in values},
        },
    }  # fmt: skip


def _configs() -> Mapping[str, Mapping[str, Spoil]]:
    """Return the same for config.json."""

    def change(**values: object) -> Spoil:
        return partial(_update, CONFIG, values)

    fine = (("num_hidden_layers", True), ("max_position_embeddings", 10**9))  # one layer; a long context is no error
    sizes = [(key, value) for key, value in itertools.product(SIZES, NOT_A_SIZE) if (key, value) not in fine]
    default = {"rope_type": "default", "rope_theta": 1e4}
    return {
        "sizes": {f"{key} = {value!r}": change(**{key: value}) for key, value in sizes},
        "sizes?": {f"{key} = {value!r}": change(**{key: value}) for key, value in fine},
        "other keys?": {f"{key} = {value!r}": change(**{key: value}) for key, value in itertools.product(KEYS, ODD)},
        "rotations?": {f"rope_parameters = {rope}": change(rope_parameters={**default, **rope}) for rope in ROPES},
        "contradictions": {f"{next(iter(values))} = {values}": change(**values) for values in CONTRADICTIONS},
        "config": {
            **_texts(CONFIG, (*TEXTS, '{"a":' * 50_000, "{'model_type': 1}", '{"model_type": "llama"} x', "NaN")),
            **{f"cut at {end}": partial(_cut, CONFIG, end) for end in (0.1, 0.5, 0.99)},
            "none": partial(_remove, CONFIG), "a folder": partial(_instead, (CONFIG,), Path.mkdir),
            "code of its own": _own_code,
        },
    }  # fmt: skip


def _numbers(name: str, at: int, code: str, numbers: tuple[int, ...]) -> dict[str, tuple[int, bytes]]:
    return {f"{name} {number}": (at, struct.pack(code, number)) for number in numbers}


TENSOR = b"blk.1.ffn_up.weight"
GGUF_HEADER = {
    "magic GGUX": (0, b"GGUX"), "magic GGML": (0, b"GGML"), "no magic": (0, bytes(4)),
    "the other byte order": (4, struct.pack(">I", 3)), **_numbers("version", 4, "<I", (0, 1, 99, 2**31, 2**32 - 1)),
    **_numbers("tensors", 8, "<Q", (0, 1, 19, 21, 10**6, 2**32, 2**63, 2**64 - 1)),
    **_numbers("pairs", 16, "<Q", (0, 1, 5, 10**6, 2**32, 2**63, 2**64 - 1)),
    **_numbers("bytes of a key", 24, "<Q", (0, 2**31, 2**63, 2**64 - 1)),
}  # fmt: skip
GGUF_TENSOR = {
    **_numbers("axes", 0, "<I", (0, 1, 3, 5, 2**32 - 1)),
    **_numbers("width", 4, "<Q", (0, 1, 63, 10**9, 2**63, 2**64 - 1)),
    **_numbers("height", 12, "<Q", (0, 1, 97, 10**9, 2**63, 2**64 - 1)),
    **_numbers("type", 20, "<I", (0, 4, 8, 31, 99, 2**32 - 1)),
    **_numbers("offset", 24, "<Q", (1, 10**9, 2**63, 2**64 - 1)), "another name": (-19, b"blk.1.ffn_xx.weight"),
    "a name twice": (-19, b"blk.0.ffn_up.weight"), "a name that is no text": (-19, b"\xff" * 19),
}  # fmt: skip
"""Bytes behind a matrix's name: its number of axes, two lengths, type, offset."""
GGUF_NEVER = {"embedding_length": (0, 1, 32, 2**32 - 1), "block_count": (0, 1, 3, 10**6, 2**32 - 1),
              "feed_forward_length": (0, 1, 2**32 - 1)}  # fmt: skip
GGUF_KEYS: dict[str, tuple[Any, ...]] = {
    "context_length": (0, 1, 100, 2**32 - 1), "head_count": (0, 3, 64, 2**32 - 1),
    "head_count_kv": (0, 2, 3, 2**32 - 1),
    "rope_dimension_count": (0, 7, 2**32 - 1), "rope_freq_base": (0.0, -1.0, NAN, INF), "vocab_size": (0, 5, 2**32 - 1),
    "layer_norm_rms_eps": (-1.0, NAN, INF), "tokenizer_model": ("", "nonsense"), "tokenizer_pre": ("", "nonsense"),
    "token_list": ([], ["a"], gguf_files.TOKENS[:50]), "token_merges": ([], ["nothing to merge"], ["a"]),
    "token_types": ([], [1]), "bos_token_id": (10**6, 2**32 - 1), "eos_token_id": (10**6, 2**32 - 1),
    "chat_template": ("{% for", "{{ nothing.at.all }}", ""), "custom_alignment": (1, 64, 2**16),
}  # fmt: skip
GGUF_STORED = {"rope_dimension_count": "rope.dimension_count", "rope_freq_base": "rope.freq_base",
               "tokenizer_model": "ggml.model", "tokenizer_pre": "ggml.pre", "token_list": "ggml.tokens",
               "token_merges": "ggml.merges", "token_types": "ggml.token_type", "head_count": ".head_count",
               "custom_alignment": "alignment", "layer_norm_rms_eps": "layer_norm_rms_epsilon"}  # fmt: skip
"""How the keys of these end in the file; those of the others as they are called here."""


def _ggufs(seed: int) -> Mapping[str, Mapping[str, Spoil]]:
    """Return the same for a GGUF file."""

    def after_name(at: int, new: bytes, model: Path) -> None:
        _overwrite("", model.read_bytes().index(TENSOR) + len(TENSOR) + at, new, model)

    draw = random.Random(f"gguf/{seed}")
    ends = (0, 1, 3, 4, 6, 8, 12, 16, 20, 24, 30, 40, 100, 1000, 3000, 0.3, 0.5, 0.8, 0.99, -1, -100, -5000)
    flips = [(draw.randrange(8000), draw.randrange(256)) for _ in range(60)]
    return {
        "gguf cut": {str(end): partial(_cut, "", end) for end in ends},
        "gguf header": {name: partial(_overwrite, "", *change) for name, change in GGUF_HEADER.items()},
        "gguf tensor": {name: partial(after_name, *change) for name, change in GGUF_TENSOR.items()},
        "gguf keys": {f"{key} = {value!r}": partial(_say, key, value) for key,
            values in GGUF_NEVER.items() for value in values},
        "gguf keys?": {f"{key} = {value!r}": partial(_say, key, value) for key,
            values in GGUF_KEYS.items() for value in values},
        "gguf bytes?": {f"byte {at} is {byte}": partial(_overwrite, "", at, bytes([byte])) for at, byte in flips},
    }  # fmt: skip


def _say(key: str, value: object, model: Path) -> None:
    """Write the file anew with another value of a key, put in the writer's way since the last one counts."""
    add, stored = getattr(gguf.GGUFWriter, f"add_{key}"), GGUF_STORED.get(key, key)

    class Writer(gguf.GGUFWriter):
        def write_header_to_file(self, *args: Any) -> None:
            for pairs in self.kv_data:
                for name in [name for name in pairs if name.endswith(stored)]:
                    del pairs[name]
            add(self, value)
            super().write_header_to_file(*args)

    usual, gguf_files.gguf.GGUFWriter = gguf_files.gguf.GGUFWriter, Writer  # type: ignore[misc]
    try:
        gguf_files.gguf_file(model)
    finally:
        gguf_files.gguf.GGUFWriter = usual  # type: ignore[misc]


def _zeros(path: Path) -> None:
    path.symlink_to("/dev/zero")


FOLDER_FILES = (CONFIG, WEIGHTS, TOKENIZER)
OTHER_FILES: dict[str, Spoil] = {
    "a text file": lambda path: path.write_text("no model"), "an empty folder": Path.mkdir, "a pipe": os.mkfifo,
    "a link to itself": lambda path: path.symlink_to(path), "a link to nothing": lambda path: path.symlink_to("no"),
    "a folder called .gguf": Path.mkdir, "a pipe called .gguf": os.mkfifo, "a link to zeros called .gguf": _zeros,
    "a folder of links to zeros": partial(_instead, FOLDER_FILES, _zeros),
    "a folder of pipes": partial(_instead, FOLDER_FILES, os.mkfifo),
}  # fmt: skip
NAMES = ("", " ", ".", "..", "/", "random:", "random:nonsense", "~nobody/model", "a/b/c", "owner/name",
         "owner/" + "n" * 1000, "x" * 100_000, "\x1b[31mred", "a\nb", "%s%n", "model\udcff", "--", "model.gguf",
         "smollm2-135m-q4_1/", "http://localhost:1/model", "/dev/zero", "/dev/null")  # fmt: skip
LARGE = ("random:qwen2.5-32b", "random:llama-3.1-8b")
"""More than this machine's memory."""
