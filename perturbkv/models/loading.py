"""Bringing a model in: alias, hub id, local folder, GGUF file, or random weights of an alias' shapes.

Safetensors and GGUF only; remote code is never trusted.

A model of the hub on this machine: configuration and tokenizer when it is opened, weights when they are loaded.

Other libraries' bars and warnings, off while we load a model.

Which model it is: a digest of every file that its numbers depend on. A trace is gone on with by no other.

A tokenizer that needs no files: one token per UTF-8 byte, for models with random weights.
"""

from __future__ import annotations

import hashlib
import logging
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path, PurePosixPath
from typing import Any

import torch
from accelerate import dispatch_model, infer_auto_device_map
from huggingface_hub.utils import are_progress_bars_disabled, disable_progress_bars, enable_progress_bars
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer
from transformers.utils import logging as theirs

from perturbkv import memory
from perturbkv.errors import ConfigError, ModelError, UnknownNameError
from perturbkv.models import gguf, hub, quantisers, sanity, stored_weights, user_cache
from perturbkv.models.adapter import Adapter, Opened, check_projections
from perturbkv.models.aliases import ALIASES, EMBEDDED
from perturbkv.models.families import FAMILIES, check_family, check_layers
from perturbkv.models.hub import HubError
from perturbkv.models.sanity import check_shapes, whole_model
from perturbkv.models.sources import READ, Source, explained, resolve
from perturbkv.models.stored_weights import Stored

_WEIGHTS = "model.safetensors"


def opened_from_hub(source: Source) -> Source:
    """The source with its files here: of a hub's model all but weights, of a GGUF file there the whole.

    Raises ModelError where the hub does not give them.
    """
    if not source.hub_id:
        return source
    with _explained(source):
        repository = hub.find(source.hub_id, source.revision)
        repository.bring({source.gguf_file} if source.gguf_file else filter(_is_setting, repository.names()))
    return replace(source, location=str(repository.folder), repository=repository)


def bring_weights(source: Source) -> None:
    """Have the safetensors of a hub's model here. Raises ModelError where the hub does not give them."""
    if source.repository is not None and source.gguf_file is None:
        with _explained(source):
            source.repository.bring({_WEIGHTS} & source.repository.names() or _parts(source))


def _parts(source: Source) -> set[str]:
    """The names in the index of a model's safetensors. Raises HubError without one, ModelError for a bad one."""
    index = source.path / f"{_WEIGHTS}.index.json"
    if not index.is_file():
        msg = f"it holds neither {_WEIGHTS} nor {index.name}"
        raise HubError(msg)
    return stored_weights.parts(index)


def _is_setting(name: str) -> bool:
    """Whether transformers may read a file for configuration or tokenizer."""
    return "/" not in name and PurePosixPath(name).suffix in READ - {".safetensors", ".bin", ".gguf"}


@contextmanager
def _explained(source: Source) -> Iterator[None]:
    """Turn what the hub does not give into a ModelError: its reason, and what to do where that does not say it."""
    try:
        yield
    except HubError as error:
        instead = f"; '{EMBEDDED}' needs no hub" if source.hub_id == ALIASES[EMBEDDED].hub_id else ""
        other = "; bring it with --model PATH (a folder of safetensors or a .gguf file), or with a filled HF_HOME"
        msg = (
            f"model '{source.name}' needs {source.hub_id} and the hub did not give it: "
            f"{error}{'' if ';' in str(error) else other}{instead}"
        )
        raise ModelError(msg) from error


_lock = threading.Lock()
_inside: list[tuple[int, bool, bool, int]] = []
"""What was before, once for each block that is open: the last one to leave restores the first one's."""


@contextmanager
def quiet() -> Iterator[None]:
    """Nothing of transformers, tqdm or the hub is shown inside the block; behind it all is as it was."""
    of_hub = logging.getLogger("huggingface_hub")
    with _lock:
        now = (theirs.get_verbosity(), theirs.is_progress_bar_enabled(), are_progress_bars_disabled(), of_hub.level)
        _inside.append(_inside[0] if _inside else now)
        theirs.set_verbosity_error()
        theirs.disable_progress_bar()
        disable_progress_bars()
        of_hub.setLevel(logging.ERROR)
    try:
        yield
    finally:
        with _lock:
            verbosity, shown, hub, level = _inside.pop()
            if not _inside:
                _restore(verbosity, shown, hub, level)


def _restore(verbosity: int, shown: bool, hub: bool, level: int) -> None:
    theirs.set_verbosity(verbosity)
    logging.getLogger("huggingface_hub").setLevel(level)
    if shown:
        theirs.enable_progress_bar()
    if not hub:
        enable_progress_bars()


_SETTINGS = (
    "config.json", "generation_config.json", "chat_template.jinja", "chat_template.json", "tokenizer.json",
    "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", "tokenizer.model", "vocab.json",
    "vocab.txt", "merges.txt",
)  # fmt: skip
"""What transformers reads of a folder beside its weights: how they compute, where answers end, how text is encoded."""


def folder_digest(folder: Path, weights: Sequence[Path]) -> str:
    """Of a folder's model, whose weights are these files. Raises OSError for one that cannot be read."""
    settings = [folder / name for name in _SETTINGS if (folder / name).is_file()]
    return joint_digest(file.name.encode() + file_digest(file) for file in (*weights, *settings))


def joint_digest(digests: Iterable[bytes]) -> str:
    """Of several files, in this order."""
    return f"sha256:{hashlib.sha256(b''.join(digests)).hexdigest()[:16]}"


def file_digest(file: Path) -> bytes:
    """Of one file."""
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").digest()


class ByteTokenizer:
    """Bytes as token ids 0 … 255; no chat template, no special tokens."""

    chat_template: str | None = None
    eos_token_id: int | None = None

    def __call__(self, text: str, add_special_tokens: bool = True) -> dict[str, list[int]]:
        """Token ids of `text` under `input_ids`."""
        return {"input_ids": list(text.encode())}

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool = False) -> str:
        """The text of byte ids; ids above 255, which only a model makes, show as replacement characters."""
        return b"".join(bytes([token]) if token < 256 else b"\xff" for token in token_ids).decode(errors="replace")


DEVICE_MAPS = {"none": "the whole model on one device", "auto": "its layers over all GPUs (accelerate)"}
_DEVICES: Mapping[str, Callable[[], int]] = {
    "cpu": lambda: 1,
    "cuda": torch.cuda.device_count,
    "mps": lambda: int(torch.backends.mps.is_available()),
}
"""Kinds of devices that compute -> how many of them there are."""
_RANDOM = "random:"
_CONFIG = "the configuration (config.json)"
_log = logging.getLogger(__name__)


def pick_device(name: str) -> torch.device:
    """`auto` is CUDA where there is one. Raises ConfigError for a device that this machine lacks."""
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError:
        device = torch.device("meta")  # which holds no numbers
    if device.type not in _DEVICES:
        msg = f"expected a device such as cpu, cuda or cuda:1, got '{name}'"
        raise ConfigError(msg)
    if not there(device):
        count = _DEVICES[device.type]()
        msg = f"device '{name}' is not there: this machine has {count} {device.type.upper()} devices; use --device cpu"
        raise ConfigError(msg)
    return device


def there(device: torch.device) -> bool:
    """Whether this machine has a device, which may be a cluster's."""
    return (device.index or 0) < _DEVICES[device.type]()


def pick_dtype(name: str, device: torch.device) -> torch.dtype:
    """`auto` is bfloat16 on CUDA and float32 elsewhere."""
    if name == "auto":
        return torch.bfloat16 if device.type == "cuda" else torch.float32
    if name not in ("float32", "bfloat16", "float16"):
        raise UnknownNameError(name, "dtype", ("auto", "float32", "bfloat16", "float16"))
    return getattr(torch, name)  # type: ignore[no-any-return]


@dataclass(frozen=True)
class ModelFiles:
    """A model before its weights are loaded: enough to encode prompts, name the run and estimate memory.

    `source` is None where there are no files: weights are drawn, or the model was given. `opened` is None where it was
    given.
    """

    name: str
    source: Source | None
    config: Any
    tokenizer: Any
    revision: str
    stored: Stored
    random_weights: bool = False
    opened: Opened | None = None

    @classmethod
    def of(cls, model: Adapter) -> ModelFiles:
        """What is known of a model whose weights are loaded already."""
        return cls(
            model.name, None, model.config, model.tokenizer, model.revision, model.stored, model.random_weights,
            model.opened,
        )  # fmt: skip

    @cached_property
    def _skeleton(self) -> Any:
        """The model without numbers. Raises ModelError where none can be made of its configuration."""
        with explained(self.source or Source(self.name, self.name), _CONFIG), torch.device("meta"):
            return AutoModelForCausalLM.from_config(self.config)

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Weight -> shape, tied ones under all of their names. Raises ModelError as `parameters` does."""
        return {name: tuple(weight.shape) for name, weight in self._skeleton.named_parameters(remove_duplicate=False)}

    def parameters(self) -> int:
        """How many weights the model has. Raises ModelError where no model can be made of its configuration."""
        return sum(weight.numel() for weight in self._skeleton.parameters())

    def weights_bytes(self, dtype: torch.dtype) -> int:
        """What its weights take on a device, quantised ones of the hub as if they were floats."""
        return self.stored.nbytes or self.parameters() * dtype.itemsize


@quiet()
def open_model(name: str, seed: int = 0, revision: str = "") -> ModelFiles:
    """Find a model and read its configuration and tokenizer.

    `name` is an alias, a hub id, a hub's GGUF file (`owner/name:file.gguf`), a folder, a GGUF file, or
    `random:<alias>`, whose weights `seed` draws; `revision` is a branch, tag or commit of the hub's.

    Raises ModelError or UnknownNameError, each saying what was wanted and how to bring it.
    """
    if name.startswith(_RANDOM):
        if revision:
            msg = f"a revision pins a model of the hub, and the weights of '{name}' are drawn; leave out --revision"
            raise ModelError(msg)
        drawn, again = f"random weights, seed {seed}", Opened(name, seed, "")
        return ModelFiles(name, None, _random_config(name), ByteTokenizer(), drawn, Stored("random"), True, again)
    source = opened_from_hub(resolve(name, revision))
    again = Opened(name, seed, revision if source.repository is None else source.repository.commit)
    if source.gguf_file is not None:
        return replace(_open_gguf(source), opened=again)
    config, tokenizer = _read(source)
    stored = stored_weights.of_safetensors(source, config)
    return ModelFiles(name, source, config, tokenizer, _revision(source), stored, opened=again)


def _open_gguf(source: Source) -> ModelFiles:
    """A GGUF file, read from the user's cache, where it is converted now if it is not there yet."""
    tensors = gguf.read_header(source.path)
    digest = file_digest(source.path)
    place, tokenizer = source, None
    if source.path.stat().st_size <= gguf.LARGEST:
        try:
            folder = gguf.converted(source, tensors, digest)
            place, tokenizer = Source(source.name, str(folder)), gguf.read_tokenizer(folder)
        except user_cache.NotKeptError as error:
            _log.warning("%s is read as it is, which takes longer: %s", source.gguf_file, error)
    config, tokenizer = _read(place, tokenizer)
    return ModelFiles(source.name, place, config, tokenizer, joint_digest([digest]), stored_weights.of_gguf(tensors))


def _read(source: Source, tokenizer: Any = None) -> tuple[Any, Any]:
    """Configuration and tokenizer, that of a GGUF file from itself: saved and loaded again it would be another."""
    with explained(source, _CONFIG):
        config = AutoConfig.from_pretrained(source.location, **source.arguments)
    check_family(config, source.name)
    sanity.check(config, source.name)
    check_layers(config, source.name)
    quantisers.check_installed(config, source.name)
    with explained(source, "the tokenizer (tokenizer.json)"):
        return config, tokenizer or AutoTokenizer.from_pretrained(source.location, **source.arguments)


@quiet()
@memory.told("a smaller model or --dtype takes less")
def load_weights(
    files: ModelFiles, dtype: torch.dtype, device: torch.device, seed: int = 0, device_map: str = "none"
) -> Adapter:
    """The model itself, ready to measure; `device_map` is a key of `DEVICE_MAPS`.

    Raises ModelError where its weights cannot be read, are not whole, or do not fit the GPUs that `auto` spreads them
    over, and NoMemoryError where they do not fit `device`, before anything is read.
    """
    spread = device_map == "auto"
    if not spread:
        check_room(files, dtype, device)
    if files.source is None:
        model = _random_model(files.config, dtype, torch.device("cpu") if spread else device, seed).eval()
    else:
        bring_weights(files.source)
        if not files.stored.quantised:
            check_shapes(files.name, files.shapes(), stored_weights.shapes(files.source))
        model = _read_weights(files.source, files.config, dtype, _placed(files, device, spread))
    model = _settled(model, files.name, device, spread)
    found = Adapter(
        model, files.tokenizer, files.name, files.revision, files.random_weights, files.stored, files.opened
    )
    check_projections(found)
    return found


def check_room(files: ModelFiles, dtype: torch.dtype, device: torch.device, beside: int = 0) -> None:
    """Raise NoMemoryError where a device does not hold the weights and `beside` bytes; nothing is known of quantised
    ones that are not here yet.
    """
    if files.stored.nbytes or getattr(files.config, "quantization_config", None) is None:
        what = f"model '{files.name}' and its caches need" if beside else f"the weights of model '{files.name}' need"
        memory.check(files.weights_bytes(dtype) + beside, device, what, "a smaller model or --dtype takes less")


def _placed(files: ModelFiles, device: torch.device, spread: bool) -> dict[str, Any]:
    """Where quantised weights are put while they are read: their layout depends on it, so that none is moved later."""
    quantised = getattr(files.config, "quantization_config", None) is not None
    if spread and quantised:
        return {"device_map": "auto"}
    return {"device_map": {"": device}} if quantised and device.type != "cpu" else {}


def _read_weights(source: Source, config: Any, dtype: torch.dtype, placed: Mapping[str, Any]) -> Any:
    model = whole_model(
        source,
        dtype=dtype,
        attn_implementation=FAMILIES[config.model_type].kernel,
        use_safetensors=True if source.gguf_file is None else None,
        **placed,
    )
    if source.gguf_file is not None:
        gguf.check_used(gguf.read_header(source.path), model, source.name)
    return model


def load_model(
    name: str, dtype: str = "auto", device: str = "auto", seed: int = 0, device_map: str = "none", revision: str = ""
) -> Adapter:
    """`open_model` and `load_weights` in one. Raises what they raise, and ConfigError for dtype and device."""
    place = pick_device(device)
    precision = pick_dtype(dtype, place)
    return load_weights(open_model(name, seed, revision), precision, place, seed, device_map)


def _aligned(model: Any) -> Any:
    """The model with its weights where torch itself would have put them.

    Mapped from a file they lie at any byte, and on a CPU a product with one vector is then rounded differently: the
    same weights would give other numbers from another file.
    """
    for parameter in model.parameters():
        plain = type(parameter) is torch.nn.Parameter  # others hold their numbers in tensors inside
        if plain and parameter.device.type == "cpu" and parameter.data_ptr() % gguf.ALIGNMENT:
            parameter.data = parameter.data.clone()
    return model


def _settled(model: Any, name: str, device: torch.device, spread: bool) -> Any:
    """The model where it computes. Raises ModelError where it does not fit there."""
    if places := getattr(model, "hf_device_map", None):  # put there while it was read
        _check_places(places, name)
        return _aligned(model)
    return _spread(model, name) if spread else _aligned(model.to(device))


def _spread(model: Any, name: str) -> Any:
    """The model with its layers over all GPUs, each whole on one of them; on the CPU where there is none."""
    places = infer_auto_device_map(model, no_split_module_classes=model._no_split_modules, dtype=model.dtype)
    _check_places(places, name)
    return dispatch_model(model, places)


def _check_places(places: Mapping[str, Any], name: str) -> None:
    """Raise ModelError where a part of a model would not lie where it computes."""
    outside = {str(place) for place in places.values()} & ({"disk", "cpu"} if torch.cuda.is_available() else {"disk"})
    if outside:
        msg = (
            f"model '{name}' does not fit: accelerate would put parts of it on {' and '.join(sorted(outside))}; "
            "use a smaller --dtype, more GPUs, or --device cpu"
        )
        raise ModelError(msg)


def _random_config(name: str) -> Any:
    alias = name.removeprefix(_RANDOM)
    if alias not in ALIASES:
        raise UnknownNameError(name, "model", [_RANDOM + known for known in ALIASES])
    return AutoConfig.for_model(ALIASES[alias].family, **ALIASES[alias].shapes)


def _random_model(config: Any, dtype: torch.dtype, device: torch.device, seed: int) -> Any:
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []), torch.device(device):
        torch.manual_seed(seed)
        kernel = FAMILIES[config.model_type].kernel
        return AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation=kernel)


def _revision(source: Source) -> str:
    """The hub's commit, or a digest of the local files."""
    if source.repository is not None:
        return source.repository.commit
    with explained(source, "what tells it from others"):
        return folder_digest(source.path, stored_weights.files(source.path))
