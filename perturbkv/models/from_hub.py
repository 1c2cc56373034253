"""A model of the hub on this machine: configuration and tokenizer when it is opened, weights when they are loaded."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import PurePosixPath

from perturbkv.errors import ModelError
from perturbkv.models import hub, stored_weights
from perturbkv.models.aliases import ALIASES, EMBEDDED
from perturbkv.models.hub_part import HubError
from perturbkv.models.sources import READ, Source

_WEIGHTS = "model.safetensors"


def opened(source: Source) -> Source:
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
