"""Loading of models: alias, hub id, local folder, GGUF file, or random weights with an alias' shapes.

Safetensors and GGUF only; remote code is never trusted. Configuration and tokenizer are read when a model is opened,
weights when they are loaded, with the progress bars and warnings of other libraries off. A model's revision is the
hub's commit or a digest of every file that its numbers depend on; a trace is only resumed with the same one.
"""

from __future__ import annotations

import hashlib
import logging
import math
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import PurePosixPath
from typing import Any

import torch
from accelerate import dispatch_model, infer_auto_device_map
from huggingface_hub.utils import are_progress_bars_disabled, disable_progress_bars, enable_progress_bars
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer
from transformers.utils import logging as transformers_logging

from perturbkv import memory
from perturbkv.errors import ConfigError, ModelError, UnknownNameError
from perturbkv.models import gguf, hub, quantisers, stored_weights, user_cache
from perturbkv.models.adapter import Adapter, OpenArguments
from perturbkv.models.aliases import ALIASES
from perturbkv.models.interface import default_implementation
from perturbkv.models.sanity import check_config, check_shapes, load_whole_model
from perturbkv.models.sources import (
    RANDOM,
    READ_SUFFIXES,
    Source,
    check_random,
    explain_errors,
    explain_hub_errors,
    resolve,
)
from perturbkv.models.stored_weights import WeightStorage
from perturbkv.user_files import sha256

_WEIGHTS = "model.safetensors"
_SETTING_PATTERNS = [f"*{suffix}" for suffix in sorted(READ_SUFFIXES - {".safetensors", ".bin", ".gguf"})]
"""Names of the hub's files that may belong to configuration or tokenizer."""


def download_settings(source: Source) -> Source:
    """Return a hub source located on disk, after downloading its GGUF file, or all its files except weights.

    Another source is returned as it is. Raises ModelError where the hub does not deliver the files.
    """
    if not source.hub_id:
        return source
    with explain_hub_errors(source):
        if source.gguf_file:
            folder = hub.download_file(source.hub_id, source.gguf_file, source.revision)
            for _ in PurePosixPath(source.gguf_file).parts:
                folder = folder.parent
        else:
            folder = hub.download_folder(source.hub_id, _SETTING_PATTERNS, source.revision)
    return replace(source, location=str(folder), commit=folder.name)


def download_weights(source: Source) -> None:
    """Download the safetensors of a source of the hub. Raises ModelError where the hub does not deliver them."""
    if source.commit and source.gguf_file is None:
        index = source.path / f"{_WEIGHTS}.index.json"
        with explain_hub_errors(source):
            for name in sorted(stored_weights.index_files(index)) if index.is_file() else [_WEIGHTS]:
                hub.download_file(source.hub_id, name, source.commit)


_lock = threading.Lock()
_open_settings: list[tuple[int, bool, bool, int]] = []
"""The settings before `quiet`, once per open block: the last block to end restores those before the first."""


@contextmanager
def quiet() -> Iterator[None]:
    """Silence transformers, tqdm and the hub within the block, and restore their settings afterwards."""
    hub_log = logging.getLogger("huggingface_hub")
    with _lock:
        now = (
            transformers_logging.get_verbosity(),
            transformers_logging.is_progress_bar_enabled(),
            are_progress_bars_disabled(),
            hub_log.level,
        )
        _open_settings.append(_open_settings[0] if _open_settings else now)
        transformers_logging.set_verbosity_error()
        transformers_logging.disable_progress_bar()
        disable_progress_bars()
        hub_log.setLevel(logging.ERROR)
    try:
        yield
    finally:
        with _lock:
            verbosity, progress_shown, hub_progress_hidden, hub_level = _open_settings.pop()
            if not _open_settings:
                transformers_logging.set_verbosity(verbosity)
                hub_log.setLevel(hub_level)
                if progress_shown:
                    transformers_logging.enable_progress_bar()
                if not hub_progress_hidden:
                    enable_progress_bars()


_SETTINGS = (
    "config.json", "generation_config.json", "chat_template.jinja", "chat_template.json", "tokenizer.json",
    "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", "tokenizer.model", "vocab.json",
    "vocab.txt", "merges.txt",
)  # fmt: skip
"""Files that transformers reads besides the weights: for computation, ends of answers and text encoding."""


def _joint_digest(digests: Iterable[bytes]) -> str:
    """Return one digest of several files' digests, in order, which serves as a model's revision."""
    return f"sha256:{hashlib.sha256(b''.join(digests)).hexdigest()[:16]}"


class ByteTokenizer:
    """A tokenizer for models with random weights: UTF-8 bytes as token ids 0 … 255, without a chat template.

    It has no special tokens.
    """

    chat_template: str | None = None
    eos_token_id: int | None = None

    def __call__(self, text: str, add_special_tokens: bool = True) -> dict[str, list[int]]:
        """Return the token ids of `text` under `input_ids`."""
        return {"input_ids": list(text.encode())}

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool = False) -> str:
        """Return the text of byte ids; ids above 255, which models may generate, become replacement characters."""
        return b"".join(bytes([token]) if token < 256 else b"\xff" for token in token_ids).decode(errors="replace")


DEVICE_MAPS = {"none": "the whole model on one device", "auto": "its layers over all GPUs (accelerate)"}
_DEVICES: Mapping[str, Callable[[], int]] = {
    "cpu": lambda: 1,
    "cuda": torch.cuda.device_count,
    "mps": lambda: int(torch.backends.mps.is_available()),
}
"""Device types that can compute -> number of such devices."""
_CONFIG = "the configuration (config.json)"
_log = logging.getLogger(__name__)


def pick_device(name: str) -> torch.device:
    """Return the device of a name; `auto` is CUDA if available. Raises ConfigError for an unavailable device."""
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError:
        device = torch.device("meta")  # which holds no numbers
    if device.type not in _DEVICES:
        raise ConfigError(f"expected a device such as cpu, cuda or cuda:1, got '{name}'")
    if not device_exists(device):
        count = _DEVICES[device.type]()
        raise ConfigError(
            f"device '{name}' is not there: this machine has {count} {device.type.upper()} devices; use --device cpu"
        )
    return device


def device_exists(device: torch.device) -> bool:
    """Return whether this machine has the device; a cluster's device may be on another machine."""
    return (device.index or 0) < _DEVICES[device.type]()


def pick_dtype(name: str, device: torch.device) -> torch.dtype:
    """Return the dtype of a name; `auto` is bfloat16 on CUDA, else float32. Raises UnknownNameError."""
    if name == "auto":
        return torch.bfloat16 if device.type == "cuda" else torch.float32
    if name not in ("float32", "bfloat16", "float16"):
        raise UnknownNameError(name, "dtype", ("auto", "float32", "bfloat16", "float16"))
    return getattr(torch, name)  # type: ignore[no-any-return]


@dataclass(frozen=True)
class ModelFiles:
    """A model before its weights are loaded: enough to encode prompts, name the run and estimate memory.

    `source` is None where there are no files: for random weights and for a user's model. `whole_config` is the
    configuration of all that the model reads, images among it. `open_arguments` is None for a user's model, and
    `loaded_parameters` the number of weights of a model that is loaded.
    """

    name: str
    source: Source | None
    whole_config: Any
    tokenizer: Any
    revision: str
    stored: WeightStorage
    random_weights: bool = False
    open_arguments: OpenArguments | None = None
    loaded_parameters: int | None = None

    @classmethod
    def from_adapter(cls, model: Adapter) -> ModelFiles:
        """Return the description of an already loaded model, without a source."""
        return cls(
            model.name, None, model.model.config, model.tokenizer, model.revision, model.stored, model.random_weights,
            model.open_arguments, model.parameters,
        )  # fmt: skip

    @property
    def config(self) -> Any:
        """Transformers' configuration of the decoder."""
        return self.whole_config.get_text_config(decoder=True)

    @cached_property
    def _skeleton(self) -> Any:
        """The model on the meta device, without weights. Raises ModelError if its configuration defines no model."""
        with explain_errors(self.source or Source(self.name, self.name), _CONFIG), torch.device("meta"):
            kernel = _kernel(self.whole_config)
            return AutoModelForCausalLM.from_config(
                self.whole_config, trust_remote_code=False, attn_implementation=kernel
            )

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Return weight name -> shape, tied weights under every name. Raises ModelError as `parameters` does."""
        return {name: tuple(weight.shape) for name, weight in self._skeleton.named_parameters(remove_duplicate=False)}

    def parameters(self) -> int:
        """Return the number of weights. Raises ModelError where the configuration does not define a model."""
        if self.loaded_parameters is not None:
            return self.loaded_parameters
        return sum(weight.numel() for weight in self._skeleton.parameters())

    def weights_bytes(self, dtype: torch.dtype) -> int:
        """Return the bytes of the loaded weights; quantised hub weights are counted in `dtype`."""
        return self.stored.nbytes or self.parameters() * dtype.itemsize


@quiet()
def open_model(name: str, seed: int = 0, revision: str = "") -> ModelFiles:
    """Return a model's files without weights: its configuration and tokenizer, already read.

    `name` is an alias, a hub id, a hub's GGUF file (`owner/name:file.gguf`), a folder, a GGUF file, or
    `random:<alias>`, whose weights `seed` draws; `revision` is a branch, tag or commit of the hub's.

    Raises ModelError or UnknownNameError, whose message says what is missing and what to do.
    """
    if name.startswith(RANDOM):
        if revision:
            raise ModelError(
                f"a revision pins a model of the hub, and the weights of '{name}' are drawn; leave out --revision"
            )
        return ModelFiles(
            name, None, _random_config(name), ByteTokenizer(), f"random weights, seed {seed}", WeightStorage("random"),
            True, OpenArguments(name, seed, ""),
        )  # fmt: skip
    source = download_settings(resolve(name, revision))
    arguments = OpenArguments(name, seed, source.commit or revision)
    if source.gguf_file is not None:
        return replace(_open_gguf(source), open_arguments=arguments)
    config, tokenizer = _read_settings(source)
    stored = stored_weights.safetensors_storage(source, config)
    return ModelFiles(name, source, config, tokenizer, _revision(source), stored, open_arguments=arguments)


def _open_gguf(source: Source) -> ModelFiles:
    """Return the files of a GGUF model, from its cached conversion if conversion works."""
    tensors = gguf.read_header(source.path)
    digest = sha256(source.path)
    location, tokenizer = source, None
    if source.path.stat().st_size <= gguf.LARGEST:
        try:
            folder = gguf.convert(source, tensors, digest)
            location, tokenizer = Source(source.name, str(folder)), gguf.read_tokenizer(folder)
        except user_cache.NotCachedError as error:
            _log.warning("%s is read as it is, which takes longer: %s", source.gguf_file, error)
    config, tokenizer = _read_settings(location, tokenizer)
    return ModelFiles(
        source.name, location, config, tokenizer, _joint_digest([digest]), stored_weights.gguf_storage(tensors)
    )


@quiet()
def read_config(name: str, revision: str = "") -> tuple[Any, bool]:
    """Return transformers' configuration of a model, checked, and whether its tokenizer can be read.

    Its weights are not read. Raises ModelError or UnknownNameError, as `open_model`.
    """
    if name.startswith(RANDOM):
        return _random_config(name), True
    source = download_settings(resolve(name, revision))
    if source.gguf_file is not None:
        return open_model(name, revision=revision).whole_config, True
    config = _read_config(source)
    try:
        _read_tokenizer(source)
    except ModelError:
        return config, False
    return config, True


def _read_config(source: Source) -> Any:
    """Return a source's checked configuration."""
    with explain_errors(source, _CONFIG):
        config = AutoConfig.from_pretrained(source.location, **source.arguments)
    check_config(config, source.name)
    return config


def _read_settings(source: Source, tokenizer: Any = None) -> tuple[Any, Any]:
    """Return a source's checked configuration and its tokenizer; a tokenizer passed in is returned instead of read."""
    config = _read_config(source)
    quantisers.check_installed(config, source.name)
    return config, tokenizer or _read_tokenizer(source)


def _read_tokenizer(source: Source) -> Any:
    """Return a source's tokenizer. Raises ModelError.

    Where its files are missing, transformers makes for some families one that knows its special tokens alone.
    """
    with explain_errors(source, "the tokenizer (tokenizer.json)"):
        tokenizer = AutoTokenizer.from_pretrained(source.location, **source.arguments)
        if set(tokenizer.get_vocab()) <= set(tokenizer.all_special_tokens):
            raise ValueError("there is none, or its vocabulary has no token but special ones")
    return tokenizer


@quiet()
@memory.translate_allocation_errors("a smaller model or --dtype takes less")
def load_weights(
    files: ModelFiles, dtype: torch.dtype, device: torch.device, seed: int = 0, device_map: str = "none"
) -> Adapter:
    """Return the model with its weights, ready to measure; `device_map` is a key of `DEVICE_MAPS`.

    Raises ModelError where its weights cannot be read, are not whole, or do not fit the GPUs that `auto` spreads them
    over, and NoMemoryError where they do not fit `device`, before anything is read.
    """
    spread = device_map == "auto"
    if not spread:
        check_memory(files, dtype, device)
    if files.source is None:
        place, kernel = torch.device("cpu") if spread else device, _kernel(files.whole_config)
        with torch.random.fork_rng(devices=[place] if place.type == "cuda" else []), place:
            torch.manual_seed(seed)
            model = AutoModelForCausalLM.from_config(files.whole_config, dtype=dtype, attn_implementation=kernel).eval()
    else:
        download_weights(files.source)
        if not files.stored.quantised:
            check_shapes(files.name, files.shapes(), stored_weights.shapes(files.source))
        quantised = getattr(files.whole_config, "quantization_config", None) is not None
        placed = {"device_map": "auto" if spread else {"": device}}  # the layout of quantised weights depends on it
        model = _read_weights(
            files.source, files.whole_config, dtype, placed if quantised and (spread or device.type != "cpu") else {}
        )
    model = _move_to_device(model, files.name, device, spread)
    return Adapter(
        model, files.tokenizer, files.name, files.revision, files.random_weights, files.stored, files.open_arguments
    )


def check_memory(files: ModelFiles, dtype: torch.dtype, device: torch.device, extra_bytes: int = 0) -> None:
    """Raise NoMemoryError where a device cannot hold a model's weights and `extra_bytes` more.

    The size of quantised weights that are not downloaded yet is unknown; these are not checked.
    """
    if files.stored.nbytes or getattr(files.whole_config, "quantization_config", None) is None:
        name = f"model '{files.name}'"
        what = f"{name} and its caches need" if extra_bytes else f"the weights of {name} need"
        if files.source is not None and files.source.gguf_file is not None:  # its largest tensor in float32, twice
            extra_bytes = max(extra_bytes, 2 * 4 * max(math.prod(shape) for shape in files.shapes().values()))
        memory.check(files.weights_bytes(dtype) + extra_bytes, device, what, "a smaller model or --dtype takes less")


def _read_weights(source: Source, config: Any, dtype: torch.dtype, device_arguments: Mapping[str, Any]) -> Any:
    """Return a source's model with its weights. Raises ModelError for missing, unused or non-finite weights."""
    model = load_whole_model(
        source,
        dtype=dtype,
        attn_implementation=_kernel(config),
        use_safetensors=True if source.gguf_file is None else None,
        **device_arguments,
    )
    if source.gguf_file is not None:
        gguf.check_all_used(gguf.read_header(source.path), model, source.name)
    return model


def load_model(
    name: str, dtype: str = "auto", device: str = "auto", seed: int = 0, device_map: str = "none", revision: str = ""
) -> Adapter:
    """Open a model and load its weights.

    Raises as `open_model` and `load_weights`, and ConfigError for dtype and device.
    """
    chosen_device = pick_device(device)
    chosen_dtype = pick_dtype(dtype, chosen_device)
    return load_weights(open_model(name, seed, revision), chosen_dtype, chosen_device, seed, device_map)


def _align_weights(model: Any) -> Any:
    """Return the model with its misaligned CPU weights copied to torch's own memory alignment.

    Memory-mapped weights may begin at any byte, and on a CPU a matrix-vector product then rounds differently: the same
    weights would give other numbers from another file.
    """
    for parameter in model.parameters():
        plain = type(parameter) is torch.nn.Parameter  # others hold their numbers in tensors inside
        if plain and parameter.device.type == "cpu" and parameter.data_ptr() % gguf.ALIGNMENT:
            parameter.data = parameter.data.clone()
    return model


def _move_to_device(model: Any, name: str, device: torch.device, spread: bool) -> Any:
    """Return the model on `device` or, with `spread`, with its layers distributed over all GPUs, none split.

    Without GPUs a spread model is on the CPU. Raises ModelError where it does not fit.
    """
    if device_map := getattr(model, "hf_device_map", None):  # of a model that was read onto its devices
        _check_devices(device_map, name)
        return _align_weights(model)
    if not spread:
        return _align_weights(model.to(device))
    device_map = infer_auto_device_map(model, no_split_module_classes=model._no_split_modules, dtype=model.dtype)
    _check_devices(device_map, name)
    return dispatch_model(model, device_map)


def _check_devices(device_map: Mapping[str, Any], name: str) -> None:
    """Raise ModelError if a device map puts a part of the model on disk, or on the CPU while others are on GPUs."""
    outside = {*map(str, device_map.values())} & ({"disk", "cpu"} if torch.cuda.is_available() else {"disk"})
    if outside:
        raise ModelError(
            f"model '{name}' does not fit: accelerate would put parts of it on {' and '.join(sorted(outside))}; "
            "use a smaller --dtype, more GPUs, or --device cpu"
        )


def _kernel(config: Any) -> str:
    """Return the attention implementation of a family, named to transformers, as a configuration may name a kernel."""
    return default_implementation(AutoModelForCausalLM._model_mapping[type(config)])


def _random_config(name: str) -> Any:
    """Return transformers' configuration of `random:<alias>`. Raises UnknownNameError for an unknown alias."""
    alias = check_random(name)
    return AutoConfig.for_model(ALIASES[alias].family, **ALIASES[alias].shapes)


def _revision(source: Source) -> str:
    """Return the revision of a source of safetensors: the hub's commit, or a digest of the local files."""
    if source.commit:
        return source.commit
    with explain_errors(source, "a file"):
        settings = [path for name in _SETTINGS if (path := source.path / name).is_file()]
        files = [*stored_weights.files(source.path), *settings]
        return _joint_digest(file.name.encode() + sha256(file) for file in files)
