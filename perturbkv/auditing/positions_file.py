"""Files of kept positions from other programs, and their audit; docs/how-to/audit.md has the layout.

Only the logits of such a file can be compared with the masked reference.
"""

from __future__ import annotations

import re
import zipfile
import zlib
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
import torch
import torch.nn.functional as F
from jaxtyping import Int
from numpy.typing import NDArray
from torch import Tensor

from perturbkv.analyses.audit.audited_runs import AuditedRun, DecodingStep
from perturbkv.analyses.audit.cache_entries import CacheEntries, Integers
from perturbkv.auditing.forward_passes import Situation
from perturbkv.auditing.loss import masks_of
from perturbkv.auditing.reference import decode, decode_greedily, logits_distance, noise_floors, prompt_entries
from perturbkv.auditing.unmeasured import fill_cache, measured_numbers
from perturbkv.configs.audit_settings import KEPT_FILE
from perturbkv.datasets.encode import Prompt
from perturbkv.errors import ConfigError, UnreadableCacheError
from perturbkv.models.adapter import Adapter
from perturbkv.user_files import MIB, parse_json

_READ_ERRORS = (OSError, EOFError, RuntimeError, MemoryError, zipfile.BadZipFile, zlib.error)
"""Exceptions of zipfile and NumPy for damaged, encrypted and oversized files, beside ValueError."""
_NUMBER = "(0|[1-9][0-9]*)"
_KEPT = re.compile(f"layer_{_NUMBER}_head_{_NUMBER}")
"""Names of arrays of kept positions in an .npz file."""
_MORE = ("token_ids", "tokens", "logits")
"""Names in a file beside the kept positions."""


@dataclass(frozen=True, eq=False)
class KeptFile:
    """The kept positions of one prompt, with tokens and logits of the external run where the file has them.

    Attributes:
        name: the path.
        kept: per layer and kept set, positions.
        token_ids: tokens of the prompt; empty where the data set has the prompt.
        tokens: tokens decoded one after the other after the prompt; empty: the greedy ones of the full run.
        logits: (step, vocab) after each of them; None where nothing was decoded.
    """

    name: str
    kept: tuple[tuple[Integers, ...], ...]
    token_ids: tuple[int, ...] = ()
    tokens: tuple[int, ...] = ()
    logits: NDArray[np.float64] | None = None

    def check(self, layers: int, heads: Sequence[int], tokens: int, vocab: int) -> None:
        """Raise UnreadableCacheError for positions, tokens or logits that do not fit the model or the prompt.

        Args:
            layers: layers of the model.
            heads: numbers of kept sets that a layer may have.
            tokens: length of the prompt.
            vocab: size of the model's vocabulary.
        """
        if len(self.kept) != layers:
            self._refuse(f"it has {len(self.kept)} layers, the model {layers}")
        for layer, sets in enumerate(self.kept):
            if len(sets) not in heads or len(sets) != len(self.kept[0]):
                expected = f"{' or '.join(map(str, heads))}, as many in every layer"
                self._refuse(f"layer {layer} has {len(sets)} heads, expected {expected}")
            for head, kept in enumerate(sets):
                where = f"layer {layer}, head {head}"
                if len(kept) and not 0 <= kept.min() <= kept.max() < tokens:
                    self._refuse(f"{where} keeps position {kept.max()} or {kept.min()} of a prompt of {tokens}")
        if self.logits is not None and self.logits.shape[1] != vocab:
            self._refuse(f"its logits have {self.logits.shape[1]} tokens, the model's {vocab}")
        if unknown := [token for token in (*self.token_ids, *self.tokens) if token >= vocab]:
            self._refuse(f"it names the token {unknown[0]}, the model's vocabulary has {vocab}")
        if self.logits is not None and 0 < len(self.tokens) < len(self.logits):
            self._refuse(f"it has logits of {len(self.logits)} steps and tokens of {len(self.tokens)}")

    def _refuse(self, reason: str) -> NoReturn:
        """Raise UnreadableCacheError for this file, with the given reason."""
        raise UnreadableCacheError(f"{self.name}: {reason}")


def read_positions(path: Path) -> KeptFile:
    """Return the kept positions, and any tokens and logits, in a file.

    Raises ConfigError where it does not exist, UnreadableCacheError where it does not follow docs/how-to/audit.md.
    """
    KEPT_FILE.check(path)
    try:
        if path.suffix == ".json":
            content = parse_json(KEPT_FILE.read_text(path))
            _check_known(content, ("kept", *_MORE))
            content = {**content, "kept": tuple(tuple(map(_parse_positions, sets)) for sets in content["kept"])}
        else:
            content = _read_npz(path)
        return KeptFile(
            name=str(path),
            kept=content["kept"],
            token_ids=_parse_tokens("token_ids", content),
            tokens=_parse_tokens("tokens", content),
            logits=_parse_logits(content.get("logits")),
        )
    except (ValueError, KeyError, TypeError, OverflowError) as error:
        found = f"{type(error).__name__}: {error}"
        raise UnreadableCacheError(
            f"{path} does not hold kept positions as docs/how-to/audit.md lays them out: {found}"
        ) from None


def _parse_tokens(name: str, content: Mapping[str, Any]) -> tuple[int, ...]:
    """Return the token ids stored under a name; empty if absent. Raises ValueError for any other value."""
    ids = _parse_row(content.get(name, ()), f"as {name}")
    if ids.size and ids.min() < 0:
        raise ValueError(f"expected token ids as {name}, got {ids.min()}")
    return tuple(map(int, ids))


def _parse_row(values: Any, what: str) -> NDArray[Any]:
    """Return values as a 1D array of whole numbers; `what` names them in messages. Raises ValueError otherwise."""
    row = np.asarray(values)
    booleans = isinstance(values, list) and any(isinstance(value, bool) for value in values)
    if row.ndim != 1 or booleans or (row.size and row.dtype.kind not in "iu"):
        kind = "true or false" if booleans else f"an array of shape {row.shape} and type {row.dtype}"
        raise ValueError(f"expected a row of whole numbers {what}, got {kind}")
    return row


def _parse_logits(values: Any) -> NDArray[np.float64] | None:
    """Return finite logits (step, vocab); None for None. Raises ValueError or TypeError for other values."""
    if values is None:
        return None
    logits = np.asarray(values)
    if logits.ndim != 2 or logits.dtype.kind not in "iuf" or not np.isfinite(logits).all():
        got = f"an array of shape {logits.shape} and type {logits.dtype}"
        raise ValueError(f"expected finite logits (step, vocab), got {got}; leave out those with infinities or NaN")
    return logits.astype(np.float64)


def _read_npz(path: Path) -> Mapping[str, Any]:
    """Return the arrays of an .npz file, with `layer_0_head_0` and so on collected as positions under `kept`.

    Raises ValueError for any other file, for one too large when unpacked, and where there are no positions, or those of
    a layer or head are missing.
    """
    try:
        with zipfile.ZipFile(path) as packed:
            size = sum(member.file_size for member in packed.infolist())
        if size > KEPT_FILE.max_bytes:
            raise ValueError(f"it unpacks to {size:,} bytes, more than {KEPT_FILE.max_bytes // MIB:,} MiB")
        with np.load(path, allow_pickle=False) as file:
            if twice := [name for name, count in Counter(file.files).items() if count > 1]:
                raise ValueError(f"the array '{twice[0]}' is there twice")
            arrays = {name: file[name] for name in file.files}
    except _READ_ERRORS as error:
        raise ValueError(f"no .npz file of numbers ({error})") from None
    names = {tuple(map(int, match.groups())): name for name in arrays if (match := _KEPT.fullmatch(name))}
    _check_known([name for name in arrays if name not in names.values()], _MORE, "layer_0_head_0, …")
    heads = Counter(layer for layer, _ in names)
    kept = [
        [_parse_positions(arrays[names[layer, head]]) for head in range(heads[layer])] for layer in range(len(heads))
    ]
    if not kept or not all(kept):
        raise ValueError("expected layer_0_head_0 and every layer and head behind it")
    return {**arrays, "kept": tuple(map(tuple, kept))}


def _check_known(names: Iterable[str], known: Sequence[str], positions: str = "") -> None:
    """Raise ValueError for a name in a file that is not `known`; `positions` says how kept positions are named, too."""
    if unknown := [name for name in names if name not in known]:
        raise ValueError(f"unknown name '{unknown[0]:.40}'; known: {', '.join(filter(None, (positions, *known)))}")


def _parse_positions(values: Any) -> Integers:
    """Return a head's kept positions, ascending. Raises ValueError unless they are distinct whole numbers."""
    positions = _parse_row(values, "per head")
    if len(np.unique(positions)) != len(positions):
        raise ValueError("a head keeps a position twice")
    return np.sort(positions).astype(np.int64)


def select_prompt(file: KeptFile, prompts: Sequence[Prompt]) -> Prompt:
    """Return the prompt in the file, if any, else the only prompt in `prompts`.

    Raises ConfigError where the file holds none and `prompts` are several.
    """
    if file.token_ids:
        return Prompt("file", file.token_ids, 0)
    if len(prompts) != 1:
        raise ConfigError(
            f"expected one prompt for {file.name}, which holds no token_ids, got {len(prompts)}; give --samples 1, or "
            "put token_ids into the file"
        )
    return prompts[0]


def audit_file(adapter: Adapter, ids: Int[Tensor, " token"], file: KeptFile, sample: str) -> AuditedRun:
    """Return the audited run of a file: its kept sets, and the distance of its logits from the masked reference's.

    Keys and values are taken to be the full cache's. Raises UnreadableCacheError where the positions do not fit this
    model and prompt.
    """
    layers, tokens = len(adapter.layers), len(ids)
    file.check(layers, (adapter.kv_heads, adapter.heads), tokens, int(adapter.config.vocab_size))
    shape = (layers, len(file.kept[0]))
    counts = np.zeros(shape, dtype=np.int64)
    entries = CacheEntries(
        kept_sets=file.kept, tokens=tokens, kv_heads=adapter.kv_heads, padded=counts, strangers=counts, zeros=counts,
        duplicates=counts, first_duplicate=counts - 1, hidden=counts, first_hidden=counts - 1, unordered=(),
        distances=np.zeros((2, *shape)), floors=np.zeros((2, layers)), altered=(),
        evicted=sum(tokens - len(kept) for sets in file.kept for kept in sets),
    )  # fmt: skip
    steps = () if file.logits is None or not len(file.logits) else _compare_logits(adapter, ids, file, file.logits)
    numbers = measured_numbers(adapter)
    return AuditedRun(sample, "single", 0, tokens, 0, entries=entries, steps=steps, numbers=numbers)


def _compare_logits(
    adapter: Adapter, ids: Int[Tensor, " token"], file: KeptFile, logits: NDArray[np.float64]
) -> tuple[DecodingStep, ...]:
    """Return the distances of a file's logits (step, vocab) from the masked reference's, in noise floors.

    Those of heads and layers are NaN.
    """
    if file.tokens:
        decoded, read = torch.tensor(file.tokens[: len(logits)], device=adapter.device), None
    else:
        decoded, read = decode_greedily(adapter, ids, len(logits))
    single = Situation("single", ids.unsqueeze(0), torch.ones_like(ids).unsqueeze(0), torch.split(decoded, 1))
    prompts = prompt_entries(adapter, single, read)
    first = [mask.to(adapter.device).unsqueeze(0) for mask in masks_of(file.kept, len(ids))]
    kept = [
        [F.pad(mask, (0, step), value=True) for mask in first] for step in range(len(decoded))
    ]  # what is attended to
    passes = list(decode(adapter, fill_cache(adapter, prompts.readings[0]), single, kept))
    noise = float(noise_floors(adapter, passes, prompts, single, kept).logits)
    steps = []
    for step, (row, masked) in enumerate(zip(logits, passes, strict=True)):
        external, expected = torch.as_tensor(row, device=adapter.device), masked.logits[0]
        steps.append(
            DecodingStep(
                step=step, tokens=1, head_floors=np.full((len(adapter.layers), adapter.heads), np.nan),
                hidden=np.full(len(adapter.layers), np.nan),
                logits=float(logits_distance(external.unsqueeze(0), expected)) / noise,
                same_token=bool(external.argmax() == expected[-1].argmax()), behind=0.0,
            )
        )  # fmt: skip
    return tuple(steps)
