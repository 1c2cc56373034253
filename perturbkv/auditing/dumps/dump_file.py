"""Dumps of an engine's cache: a folder of `dump.json` and one safetensors file per layer (FORMAT-DUMP.md)."""

from __future__ import annotations

import json
import math
import re
import struct
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from operator import methodcaller
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float, Int
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from perturbkv.auditing.dumps.layouts import BLOCK, DIM, HEAD, KV, TOKEN, Layout, Sizes, fits
from perturbkv.cache.external_cache import Layers
from perturbkv.configs.audit_settings import DUMP_HEADER
from perturbkv.devices import dtype_name
from perturbkv.errors import ConfigError, UnreadableCacheError
from perturbkv.models.adapter import Adapter
from perturbkv.user_files import FileKind

FORMAT, VERSION, HEADER = "perturbkv-dump", 1, DUMP_HEADER
REMOVED = -1
"""In a block table, a block that was freed though the request lives on; in positions, no entry."""
_HEADER_FILE = FileKind("a cache dump", ConfigError)
_STORED = ("cache", "keys", "values", "block_ids", "key_scale", "value_scale")
_ROWS = re.compile(r"(keys|values|positions)\.(.+)")


@dataclass(frozen=True)
class Request:
    """A request of an engine, whose entries the cache holds or held.

    Attributes:
        id: the request's name.
        token_ids: tokens whose keys and values were computed, in order: the prompt's, then the decoded ones'.
        blocks: block table: the id of the block of the first tokens, of the next, …; `REMOVED` where a block was freed.
            None where the dump holds rows of the request's own.
        finished: whether the request has ended, so that its blocks may have been given away. It is not compared; other
            requests' blocks that hold its entries are stale.
        logprobs: per token the logarithm of the probability that the engine gave it after those before; None where it
            is not known.
    """

    id: str
    token_ids: tuple[int, ...]
    blocks: tuple[int, ...] | None = None
    finished: bool = False
    logprobs: tuple[float | None, ...] = ()


@dataclass(frozen=True)
class LayerDump:
    """One layer of a dump.

    Attributes:
        block_tensors: as they were stored: `cache`, or `keys` and `values`.
        scales: of keys and of values, each () or (kv_head, 1).
        block_ids: id of each block of `block_tensors`, in order.
        rows: request -> keys, values (kv_head, entry, width) and positions (kv_head, entry), `REMOVED` where there is
            no entry; None where positions are not known.
        earlier_rounding: keys or values that were rounded to fewer bits than their type has, in words.
    """

    block_tensors: tuple[Tensor, ...]
    scales: tuple[Tensor, Tensor]
    block_ids: Int[Tensor, " block"]
    rows: Mapping[str, tuple[Tensor, Tensor, Tensor | None]]
    earlier_rounding: tuple[str, ...] = ()

    @property
    def tensors(self) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
        """The stored tensors with keys, and those with values."""
        blocks = [(self.block_tensors[0], self.block_tensors[-1])] if self.block_tensors else []
        keys, values = zip(*blocks, *(row[:2] for row in self.rows.values()), strict=True)
        return keys, values

    @property
    def largest(self) -> list[tuple[str, Tensor]]:
        """Name of the type of keys, and of values, with its largest number times the scale."""
        dtypes = (tensors[0].dtype for tensors in self.tensors)
        return [
            (dtype_name(dtype), torch.finfo(dtype).max * scale)
            for dtype, scale in zip(dtypes, self.scales, strict=True)
        ]

    def split(
        self, layout: Layout, sizes: Sizes
    ) -> tuple[Float[Tensor, "block token head dim"], Float[Tensor, "block token head dim"]]:
        """Return keys and values of all blocks in float32, scales applied. Raises ConfigError for another shape."""
        keys, values = layout.split(self.block_tensors, sizes)
        return keys.float() * self.scales[0], values.float() * self.scales[1]


@dataclass(frozen=True)
class Dump:
    """A cache dump; the tensors of a layer are read when they are asked for.

    Attributes:
        path: its folder.
        layers, kv_heads, head_size: the model's.
        requests: the requests.
        block_size: tokens in a block; 0 in a dump of rows.
        layout: as the engine names it; None: not known.
        dtype: the type that entries are stored in where the tensors do not show it, such as `q8_0`; empty otherwise.
        compute: the type that the engine computes with; empty: not known.
        engine: name and version of the engine.
    """

    path: Path
    layers: int
    kv_heads: int
    head_size: int
    requests: tuple[Request, ...]
    block_size: int = 0
    layout: Layout | None = None
    dtype: str = ""
    compute: str = ""
    engine: str = ""

    @property
    def sizes(self) -> Sizes:
        """The sizes of a block tensor's axes."""
        return {KV: 2, TOKEN: self.block_size, HEAD: self.kv_heads, DIM: self.head_size}

    def rounded_entries(self, adapter: Adapter, token_ids: Sequence[int]) -> Iterator[Layers]:
        """Yield the plain model's entries of tokens, rounded as the engine does, in several ways; none if not known."""
        yield from ()

    def layer(self, index: int) -> LayerDump:
        """Return one layer. Raises UnreadableCacheError for a file that lacks tensors or has others than expected."""
        path = self.path / layer_file(index)
        try:
            with safe_open(path, "pt") as file:
                tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - a method of the file
        except (SafetensorError, OSError, RuntimeError, ValueError, struct.error) as error:
            found = f"expected a complete safetensors file ({str(error)[:200]})"
            raise UnreadableCacheError(f"{path}: {found}") from None
        try:
            return _read_layer(self, tensors)
        except ValueError as error:
            raise UnreadableCacheError(f"{path}: {error}") from None


def of_heads(scale: Tensor, heads: int | Sequence[int] | slice = slice(None)) -> Tensor:
    """Return the scales, or largest numbers, of some heads' entries (kv_head, entry, width); of one (entry, width).

    `scale` is () for all heads, or (kv_head, 1).
    """
    return scale if scale.ndim == 0 else scale[heads].unsqueeze(-1)


def layer_file(index: int) -> str:
    """Return the name of a layer's file."""
    return f"layer-{index}.safetensors"


def read_dump(path: Path) -> Dump:
    """Return a dump, given its folder or its header. Raises ConfigError or UnreadableCacheError for an invalid one."""
    folder = path.parent if path.name == HEADER else path
    header = _HEADER_FILE.read_json(folder / HEADER)
    try:
        dump = _parse_header(folder, header)
    except (KeyError, TypeError, ValueError, ConfigError) as error:
        reason = f"no '{error.args[0]}'" if isinstance(error, KeyError) else str(error)
        raise UnreadableCacheError(f"{folder / HEADER}: {reason}") from None
    for index in range(dump.layers):
        if not (folder / layer_file(index)).is_file():
            raise UnreadableCacheError(f"{folder} has no {layer_file(index)}, of {dump.layers} layers")
    return dump


def _parse_header(folder: Path, header: Any) -> Dump:
    """Return the dump of a header. Raises KeyError, TypeError, ValueError or ConfigError for an invalid one."""
    if not isinstance(header, dict) or header.get("format") != FORMAT:
        raise ValueError(f"expected an object whose format is '{FORMAT}'")
    if header.get("version") != VERSION:
        raise ValueError(f"expected version {VERSION}, got {str(header.get('version'))[:40]}")
    known = {"format", "version", "layers", "kv_heads", "head_size", "requests", "block_size", "layout", "dtype",
             "compute", "engine"}  # fmt: skip
    if unknown := sorted(header.keys() - known):
        raise ValueError(f"the unknown field '{unknown[0]}'; known: {', '.join(sorted(known))}")
    layers, kv_heads, head_size = (_parse_whole_number(header, name, 1) for name in ("layers", "kv_heads", "head_size"))
    block_size = _parse_whole_number(header, "block_size", 1) if "block_size" in header else 0
    requests = header["requests"]
    if not isinstance(requests, list) or not requests:
        raise ValueError("expected at least one request")
    parsed = tuple(_parse_request(request, index, block_size) for index, request in enumerate(requests))
    name, count = Counter(request.id for request in parsed).most_common(1)[0]
    if count > 1:
        raise ValueError(f"{count} requests have the id '{name}'; give each its own")
    layout, texts = header.get("layout"), {name: header.get(name, "") for name in ("dtype", "compute", "engine")}
    for name, text in {"layout": "" if layout is None else layout, **texts}.items():
        if not isinstance(text, str):
            raise ValueError(f"expected a text as {name}, got {str(text)[:40]}")
    named = None if layout is None else Layout.parse(layout)
    return Dump(folder, layers, kv_heads, head_size, parsed, block_size, named, **texts)


def _parse_whole_number(fields: Mapping[str, Any], name: str, least: int) -> int:
    """Return the field called `name`, a whole number of at least `least`. Raises KeyError or ValueError otherwise."""
    value = fields[name]
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise ValueError(f"expected a whole number from {least} on as {name}, got {str(value)[:40]}")
    return value


def _parse_request(fields: Any, index: int, block_size: int) -> Request:
    """Return request number `index` of the header. Raises KeyError, TypeError or ValueError for an invalid one."""
    if not isinstance(fields, dict) or not isinstance(fields.get("id"), str) or not fields["id"]:
        raise ValueError(f"expected an object with a text as id in request {index}")
    name = fields["id"]
    known = {"id", "token_ids", "blocks", "finished", "logprobs"}
    if unknown := sorted(fields.keys() - known):
        raise ValueError(f"request '{name}' has the unknown field '{unknown[0]}'; known: {', '.join(sorted(known))}")
    tokens = _parse_whole_numbers(fields["token_ids"], f"token_ids of request '{name}'", 0)
    if not tokens:
        raise ValueError(f"request '{name}' has no tokens")
    blocks = fields.get("blocks")
    table = None if blocks is None else _parse_whole_numbers(blocks, f"blocks of request '{name}'", REMOVED)
    if table is not None and not block_size:
        raise ValueError(f"request '{name}' has blocks, and the dump no block_size")
    finished = fields.get("finished", False)
    if not isinstance(finished, bool):
        raise ValueError(f"expected true or false as finished of request '{name}'")
    logprobs = fields.get("logprobs", [])
    numbers = isinstance(logprobs, list) and all(
        value is None or (isinstance(value, float) or (type(value) is int and abs(value) < 2**31)) for value in logprobs
    )
    if not numbers or len(logprobs) not in (0, len(tokens)):
        found = f"{len(logprobs)} of {len(tokens)} tokens" if numbers else "others"
        raise ValueError(f"expected a list of a number or null per token as logprobs of request '{name}', got {found}")
    return Request(name, tokens, table, finished, tuple(logprobs))


def _parse_whole_numbers(values: Any, what: str, least: int) -> tuple[int, ...]:
    """Return a list of whole numbers from `least` to 2³¹ − 1 as a tuple. Raises ValueError, with `what`, otherwise."""
    if not isinstance(values, list):
        raise ValueError(f"expected a list as {what}")
    for value in values:
        if isinstance(value, bool) or not isinstance(value, int) or not least <= value < 2**31:
            raise ValueError(f"expected whole numbers from {least} on as {what}, got {str(value)[:40]}")
    return tuple(values)


def machine_epsilon(dtype: torch.dtype) -> float:
    """Return ε of a floating-point type; 0 of a type of whole numbers, or of two numbers in a byte."""
    try:
        return torch.finfo(dtype).eps
    except (TypeError, NotImplementedError):
        return 0.0


def _read_layer(dump: Dump, tensors: Mapping[str, Tensor]) -> LayerDump:
    """Return a layer of a dump from the tensors of its file. Raises ValueError where they do not belong together."""
    known = {request.id for request in dump.requests}
    for name in tensors:
        row = _ROWS.fullmatch(name)
        if name not in _STORED and (row is None or row[2] not in known):
            raise ValueError(f"the unknown tensor '{name}'")
    in_blocks = any(request.blocks is not None for request in dump.requests)
    names = ("cache",) if "cache" in tensors else ("keys", "values")
    stored = tuple(tensors[name] for name in names if name in tensors)
    if len(stored) == 1 and names != ("cache",):
        raise ValueError(
            f"'{'keys' if 'keys' in tensors else 'values'}' alone; expected 'keys' and 'values', or 'cache'"
        )
    if "cache" in tensors and tensors.keys() & {"keys", "values"}:
        raise ValueError("both 'cache' and 'keys' or 'values'")
    scales = _read_scale(dump, tensors, "key_scale"), _read_scale(dump, tensors, "value_scale")
    rows = {request.id: _request_rows(dump, tensors, request) for request in dump.requests if request.blocks is None}
    if not stored and in_blocks:
        raise ValueError("no block tensors: 'cache', or 'keys' and 'values'")
    if stored and dump.layout is not None and dump.layout.in_one_tensor != (len(stored) == 1):
        raise ValueError(f"{len(stored)} block tensors, and the layout is '{dump.layout}'")
    if not in_blocks and (beside := sorted(tensors.keys() & _STORED)):
        raise ValueError(
            f"the block tensor '{beside[0]}', but no request has blocks; rows are named keys.ID and values.ID"
        )
    present = {name: row for name, row in rows.items() if row is not None}
    row_tensors = [part for row in present.values() for part in row[:2]]
    for what, given in (("block tensors", stored), ("rows", row_tensors)):
        for tensor in given:
            if not tensor.is_floating_point() or not machine_epsilon(tensor.dtype):
                raise ValueError(f"{what} of type {tensor.dtype}, expected floating-point numbers")
    _check_block_size(dump, stored)
    return LayerDump(stored, scales, _read_block_ids(dump, tensors, stored), present)


def _check_block_size(dump: Dump, stored: Sequence[Tensor]) -> None:
    """Raise ValueError where the named layout fits the tensors, but in blocks of another size."""
    layout, sizes = dump.layout, dump.sizes
    for tensor, groups in zip(stored, (layout.keys, layout.values) if layout else (), strict=False):
        joined = [(size, group) for size, group in zip(tensor.shape, groups, strict=False) if TOKEN in group]
        for size, group in joined or [(1, ())]:
            tokens = size // math.prod(sizes[axis] for axis in group if axis not in (TOKEN, BLOCK))
            if BLOCK in group or tokens in (0, dump.block_size):
                continue
            if fits(tensor.shape, groups, {**sizes, TOKEN: tokens}):
                raise ValueError(
                    f"block_size {dump.block_size}, but {tokens} {'token' if tokens == 1 else 'tokens'} in a block of "
                    f"the shape {tuple(tensor.shape)}, layout '{layout}'"
                )


def _read_scale(dump: Dump, tensors: Mapping[str, Tensor], name: str) -> Tensor:
    """Return a scale: one number, 1 where it is absent, or one per head as (head, 1). Raises ValueError otherwise."""
    scale = tensors.get(name, torch.ones(())).float()
    if not bool(scale.isfinite().all()) or scale.numel() not in (1, dump.kv_heads):
        raise ValueError(f"{name} of shape {tuple(scale.shape)}, expected one finite number, or one per head")
    return scale.reshape(()) if scale.numel() == 1 else scale.reshape(-1, 1)


def _read_block_ids(dump: Dump, tensors: Mapping[str, Tensor], stored: Sequence[Tensor]) -> Int[Tensor, " block"]:
    """Return the ids of the stored blocks: 0, 1, … where none are given, and none without blocks.

    Raises ValueError for block tensors of a size that is no multiple of a block's, for ids that are not one of each
    block, and where a live request's table names a block that is not there.
    """
    if not stored:
        return torch.zeros(0, dtype=torch.int64)
    size = dump.block_size
    per_block = size * dump.kv_heads * dump.head_size * (2 if len(stored) == 1 else 1)
    count, rest = divmod(stored[0].numel(), per_block)
    if rest or not count or any(tensor.numel() != stored[0].numel() for tensor in stored):
        shapes = " and ".join(str(tuple(tensor.shape)) for tensor in stored)
        raise ValueError(
            f"block tensors of shape {shapes}, expected {per_block:,} numbers for each block of {size} tokens"
        )
    ids = tensors.get("block_ids", torch.arange(count))
    known = set(ids.flatten().tolist())
    is_list = not ids.is_floating_point() and not ids.is_complex() and tuple(ids.shape) == (count,)
    if not is_list or len(known) != count or not 0 <= int(ids.min()) <= int(ids.max()) < 2**31:
        raise ValueError(f"block_ids of shape {tuple(ids.shape)}, expected the distinct ids of {count} blocks")
    for request in dump.requests:
        used = () if request.finished else (request.blocks or ())[: -(-len(request.token_ids) // size)]
        if missing := [block for block in used if block not in known and block != REMOVED]:
            raise ValueError(
                f"no block {missing[0]}, which the table of request '{request.id}' names; {count} blocks of {size} "
                "tokens are there"
            )
    return ids.long()


def _request_rows(
    dump: Dump, tensors: Mapping[str, Tensor], request: Request
) -> tuple[Tensor, Tensor, Tensor | None] | None:
    """Return the rows of a request: keys, values and positions, as in `LayerDump`.

    None for a request that has ended and has none. Raises ValueError for missing ones or other shapes.
    """
    keys, values = (tensors.get(f"{kind}.{request.id}") for kind in ("keys", "values"))
    if keys is None or values is None:
        if request.finished:
            return None
        raise ValueError(f"no '{'values' if keys is not None else 'keys'}.{request.id}'")
    heads, size = dump.kv_heads, dump.head_size
    if keys.ndim != 3 or keys.shape != values.shape or (len(keys), keys.shape[2]) != (heads, size):
        raise ValueError(
            f"keys {tuple(keys.shape)} and values {tuple(values.shape)} of request '{request.id}', expected "
            f"({heads}, entries, {size}) for both"
        )
    positions = tensors.get(f"positions.{request.id}")
    if positions is None:
        return keys, values, None
    expanded = positions.expand(heads, -1) if positions.ndim == 1 else positions
    if positions.is_floating_point() or expanded.shape != keys.shape[:2]:
        raise ValueError(
            f"positions {tuple(positions.shape)} of request '{request.id}', expected {tuple(keys.shape[:2])}"
        )
    if bool((expanded < REMOVED).any()) or bool((expanded >= len(request.token_ids)).any()):
        raise ValueError(f"positions of request '{request.id}' outside of its {len(request.token_ids)} tokens")
    return keys, values, expanded.long()


def write_dump(
    folder: str | Path,
    requests: Sequence[Request | Mapping[str, Any]],
    layers: Iterable[Mapping[str, Tensor]],
    *,
    kv_heads: int,
    head_size: int,
    block_size: int = 0,
    layout: str = "",
    dtype: str = "",
    compute: str = "",
    engine: str = "",
) -> Path:
    """Write a dump of an engine's cache, layer by layer, and return its folder.

    Args:
        folder: a new or empty folder.
        requests: per request id, token ids, and its block table where the cache has blocks; lists, tensors or arrays.
        layers: per layer name -> tensor: `cache`, or `keys` and `values`, as the engine stores blocks, with `block_ids`
            where not all blocks are there and `key_scale`, `value_scale` where stored numbers are multiplied by them;
            or `keys.ID`, `values.ID` (kv_head, entry, width) and `positions.ID` of each request. Taken one at a time.
        kv_heads: key/value heads of a layer.
        head_size: components of a head.
        block_size: tokens in a block of the tensors, the same in all layers and requests; 0 without blocks.
        layout: axes of the block tensors, or a name of `layouts.NAMED`; empty: not known.
        dtype: the stored type where the tensors do not show it.
        compute: the type that the engine computes with, such as `bfloat16`.
        engine: name and version of the engine.

    Raises ConfigError for a folder that is not empty and for invalid arguments, UnreadableCacheError for tensors that
    do not belong together.

    Example:
        >>> import tempfile, torch
        >>> keys, values = torch.zeros(2, 4, 16, 2, 8)  # block, token, head, dim
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     path = write_dump(
        ...         folder, [{"id": "a", "token_ids": [5, 6, 7], "blocks": [2]}], [{"keys": keys, "values": values}],
        ...         kv_heads=2, head_size=8, block_size=16, layout="block token head dim",
        ...     )
        ...     read_dump(path).requests[0].blocks
        (2,)
    """
    path = Path(folder)
    path.mkdir(parents=True, exist_ok=True)
    if any(path.iterdir()):
        raise ConfigError(f"expected a new or empty folder for a dump, got {path}")
    count = 0
    for count, tensors in enumerate(layers, start=1):  # noqa: B007 - counted
        stored: dict[str, Tensor] = {}
        for name, tensor in tensors.items():
            own = tensor.detach().cpu().contiguous()
            shared = any(own.data_ptr() == other.data_ptr() for other in stored.values())  # refused by safetensors
            stored[name] = own.clone() if shared else own
        save_file(stored, path / layer_file(count - 1))
    header: dict[str, Any] = {
        "format": FORMAT,
        "version": VERSION,
        "layers": count,
        "kv_heads": kv_heads,
        "head_size": head_size,
    }
    optional = {"block_size": block_size, "layout": layout, "dtype": dtype, "compute": compute, "engine": engine}
    header |= {name: value for name, value in optional.items() if value}
    header["requests"] = [
        {one.name: value for one in fields(request) if (value := getattr(request, one.name)) != one.default}
        if isinstance(request, Request)
        else dict(request)
        for request in requests
    ]
    header_text = json.dumps(header, default=methodcaller("tolist"))  # of tensors and arrays
    (path / HEADER).write_text(f"{header_text}\n", encoding="utf-8")
    dump = read_dump(path)
    for index in range(dump.layers):
        dump.layer(index)
    return path
