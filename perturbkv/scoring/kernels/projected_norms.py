"""ν_{h,i} = ‖V_i W_O^h‖₁ as one Triton kernel that sums V W_O on the fly and never writes it (METHOD: Notation).

The norms are those of CriticalKV's Theorem 2, https://arxiv.org/abs/2502.03805. A program loads a tile of one key/value
head's entries, iterates over tiles of one query head's slice of W_O, and keeps a running sum per entry.
"""

from __future__ import annotations

import functools
from textwrap import shorten
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from jaxtyping import Float
from torch import Tensor

LARGEST_HEAD = 256
"""Largest head size whose tile of values fits into a multiprocessor's shared memory."""

_SMALLEST_DOT = 16
_OPERANDS = {
    # The interpreter's products take bfloat16 for integers; in float32 they are the tensor cores' own, which are exact.
    torch.bfloat16: tl.float32 if triton.knobs.runtime.interpret else tl.bfloat16,
    torch.float16: tl.float16,
    torch.float32: tl.float32,
}


class Tile(NamedTuple):
    """Entries and rows of W_O per step of a program, its warps, and the tiles of W_O on their way or in use."""

    entries: int
    rows: int
    warps: int
    stages: int


# Fixed rather than tuned: the order of a sum, and so its last bits, would change with what a tuner finds. Reckoned from
# Hopper's published rates and the registers and shared memory that the compiler reports.
# - Each byte of W_O that is read meets every entry of the tile. 256 entries ask L2 for 16 bytes per cycle and Hopper
#   multiprocessor, half of what it can give to all of them at once; 128 would ask for all.
# - While a step is summed the tensor cores wait, unless a second program is there to use them. With 64 rows and 8 warps
#   two fit: the projections are 64 of a thread's 128 registers, values and two tiles of W_O 96 KiB of shared memory.
# - A head of 64 has steps half as long, so one tile more is on its way. At 256 half the entries fit: 128 KiB on Hopper,
#   97 KiB where values go on to registers (compute capability 8.0, 8.6, 8.9 and 12.0).
# Head sizes between are padded with zeros, which add nothing to a sum.
_TILES = {64: Tile(256, 64, 8, 3), 128: Tile(256, 64, 8, 2), 256: Tile(128, 64, 8, 2)}
# Exact float32 products use no tensor core, and a thread holds its whole operands: registers of larger tiles spill.
_FLOAT32_TILE = Tile(32, 32, 4, 2)


@triton.jit(do_not_specialize=["keys", "group"])  # type: ignore[untyped-decorator]
def _project_and_sum(  # type: ignore[no-untyped-def]
    value_ptr, w_o_ptr, norms_ptr, keys, group, value_head, value_key, value_d, w_o_model, w_o_d,
    D_MODEL: tl.constexpr, D_HEAD: tl.constexpr, D_PADDED: tl.constexpr,
    ENTRIES: tl.constexpr, ROWS: tl.constexpr, OPERAND: tl.constexpr,
):  # fmt: skip
    """Write ‖V_i W_O^h‖₁ of a tile of entries for one query head, summed over tiles of rows of W_O: a Triton kernel."""
    # Entries run fastest: programs that are there together share one head's slice of W_O, which stays in L2.
    head = tl.program_id(1)
    first = tl.program_id(0).to(tl.int64) * ENTRIES  # a cache may hold more than 2³¹ elements
    entry, row, column = tl.arange(0, ENTRIES), tl.arange(0, ROWS), tl.arange(0, D_PADDED)
    exists, inside = entry < keys - first, column < D_HEAD

    value_ptr += (head // group).to(tl.int64) * value_head + first * value_key
    pointers = value_ptr + entry[:, None] * value_key + column[None, :] * value_d
    value = tl.load(pointers, mask=exists[:, None] & inside[None, :], other=0.0).to(OPERAND)

    w_o_ptr += (head * D_HEAD).to(tl.int64) * w_o_d
    pointers = w_o_ptr + row[None, :] * w_o_model + column[:, None] * w_o_d
    total = tl.zeros((ENTRIES,), dtype=tl.float32)
    for start in range(0, D_MODEL, ROWS):
        mask = (row[None, :] < D_MODEL - start) & inside[:, None]
        w_o = tl.load(pointers, mask=mask, other=0.0).to(OPERAND)
        total += tl.sum(tl.abs(tl.dot(value, w_o, input_precision="ieee")), axis=1)
        pointers += ROWS * w_o_model
    tl.store(norms_ptr + head.to(tl.int64) * keys + first + entry, total, mask=exists)


def projected_value_norms(
    value: Float[Tensor, "kv_head key d_value"], w_o: Float[Tensor, "d_model head_d_value"]
) -> Float[Tensor, "head key"]:
    """Return the projected value norms ν_{h,i} = ‖V_i W_O^h‖₁ in float32, with products in the inputs' precision.

    `w_o` is `o_proj.weight`. Both are on one device and of one dtype, bfloat16, float16 or float32, with heads of at
    most `LARGEST_HEAD` (see `unmet_requirement`); any strides are supported. No memory is used besides inputs and
    result. The result has no gradient.
    """
    kv_heads, keys, d_value = value.shape
    heads = w_o.shape[1] // d_value
    norms = torch.empty(heads, keys, dtype=torch.float32, device=value.device)
    tile, padded = _tile(value.dtype, d_value)
    if keys:
        # Triton launches on the current device, not on the tensors'; −1 changes nothing.
        with torch.cuda.device(value.device if value.is_cuda else -1):
            _project_and_sum[triton.cdiv(keys, tile.entries), heads](
                value, w_o, norms, keys, heads // kv_heads, *value.stride(), *w_o.stride(),
                D_MODEL=len(w_o), D_HEAD=d_value, D_PADDED=padded, ENTRIES=tile.entries, ROWS=tile.rows,
                OPERAND=_OPERANDS[value.dtype], num_warps=tile.warps, num_stages=tile.stages,
                enable_fp_fusion=True,  # Triton 3.9 warns where it is not said
            )  # fmt: skip
    return norms


def unmet_requirement(value: Tensor, w_o: Tensor) -> str:
    """Return the first requirement of the kernel that these tensors violate, as text; empty if they are suitable."""
    if (value.dtype, value.device) != (w_o.dtype, w_o.device) or value.dtype not in _OPERANDS:
        wanted = ", ".join(str(dtype) for dtype in _OPERANDS)
        got = " and ".join(f"{tensor.dtype} on {tensor.device}" for tensor in (value, w_o))
        return f"values and W_O on one device and of one dtype out of {wanted}, got {got}"
    if value.shape[-1] > LARGEST_HEAD:
        return f"heads of at most {LARGEST_HEAD}, got {value.shape[-1]}"
    return ""


@functools.cache
def triton_unavailable_reason(device: torch.device) -> str:
    """Return the reason why the kernel cannot run on a device, such as a missing C compiler; empty if it can.

    The kernel is run once, on one entry of the largest head, whose tile needs most shared memory.
    """
    try:
        w_o = torch.ones(LARGEST_HEAD, LARGEST_HEAD, dtype=torch.bfloat16, device=device)
        projected_value_norms(w_o[:1].unsqueeze(0), w_o).cpu()
    except Exception as error:  # Triton's own, and whatever compiler, assembler and driver raise
        return shorten(f"{type(error).__name__}: {error}", 200)
    return ""


def _tile(dtype: torch.dtype, d_value: int) -> tuple[Tile, int]:
    """Return the tile for a dtype and head size, and the head size padded to a size that `tl.dot` accepts."""
    padded = max(_SMALLEST_DOT, 1 << (d_value - 1).bit_length())
    return _FLOAT32_TILE if dtype == torch.float32 else _TILES[max(padded, min(_TILES))], padded
