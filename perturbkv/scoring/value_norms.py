"""Projected value norms ν = ‖V_i W_O^h‖₁, and ‖V_i W_O^h‖₂, without ever storing V W_O (METHOD: Notation)."""

from __future__ import annotations

import os
from importlib.util import find_spec

import torch
from jaxtyping import Float
from torch import Tensor

from perturbkv.configs.resources import CHUNK_BYTES
from perturbkv.devices import working_bytes
from perturbkv.errors import ConfigError, UnknownNameError
from perturbkv.theory import WORK, head_slices

NORM_KERNELS = {
    "auto": "triton where the device runs it and the dtype suits it, else chunked",
    "triton": "one kernel that sums the projections where they are made, on CUDA; bfloat16, float16 and float32",
    "chunked": "matrix products of bounded size, on any device and in any dtype",
}
_INSTEAD = "choose auto or chunked"


def projected_value_norms(
    value: Float[Tensor, "kv_head key d_value"],
    w_o: Float[Tensor, "d_model head_d_value"],
    chunk_bytes: int = CHUNK_BYTES,
    kernel: str = "auto",
) -> Float[Tensor, "head key"]:
    """Return the projected value norms ν_{h,i} = ‖V_i W_O^h‖₁ in float32 (float64 for a float64 model).

    `w_o` is `o_proj.weight`, `kernel` one of `NORM_KERNELS`. The Triton kernel needs no memory besides inputs and
    result. The chunked product needs at most `chunk_bytes`, or one entry's projections where those are larger; one
    product serves all query heads of a key/value head.

    Raises UnknownNameError for an unknown kernel, ConfigError where `triton` is requested and cannot work.
    """
    check_kernel(kernel, value.device)
    if not _use_triton(kernel, value, w_o):
        return _chunked_norms(value, w_o, chunk_bytes)
    from perturbkv.scoring.kernels import projected_norms

    return projected_norms.projected_value_norms(value, w_o)


def euclidean_value_norms(
    value: Float[Tensor, "kv_head key d_value"],
    w_o: Float[Tensor, "d_model head_d_value"],
    chunk_bytes: int = CHUNK_BYTES,
) -> Float[Tensor, "head key"]:
    """Return the projected value norms ‖V_i W_O^h‖₂ in float32 (float64 for a float64 model).

    They come from V_i (W_O^h W_O^hᵀ) V_iᵀ in float64. Each head's product of weights is d_value × d_value: an entry
    costs d_value² instead of d_value · d_model. Working memory stays under `chunk_bytes`, or under one entry's where
    that is larger.
    """
    kv_heads, keys, d_value = value.shape
    heads = w_o.shape[1] // d_value
    slices = head_slices(w_o, heads)
    gram = (slices @ slices.mT).view(kv_heads, -1, d_value, d_value)
    norms = torch.empty(
        kv_heads, heads // kv_heads, keys, dtype=torch.promote_types(value.dtype, torch.float32), device=value.device
    )
    tile = _tile_entries(3 * heads * d_value * WORK.itemsize, keys, value.device, chunk_bytes)
    for start in range(0, keys, tile):
        rows = value[:, None, start : start + tile].to(WORK)
        norms[..., start : start + tile] = ((rows @ gram) * rows).sum(dim=-1).clamp(min=0).sqrt()
    return norms.flatten(0, 1)


def check_kernel(kernel: str, device: torch.device) -> None:
    """Raise UnknownNameError for a kernel not in `NORM_KERNELS`, ConfigError if `triton` cannot run on `device`."""
    if kernel not in NORM_KERNELS:
        raise UnknownNameError(kernel, "norm kernel", NORM_KERNELS)
    if kernel == "triton" and (why := triton_unavailable_reason(device)):
        raise ConfigError(f"expected a device that runs the norm kernel 'triton', got '{device}': {why}; {_INSTEAD}")


def triton_unavailable_reason(device: torch.device) -> str:
    """Return the reason why the Triton kernel cannot run on a device, empty if it can; `auto` uses it on CUDA only."""
    if find_spec("triton") is None:
        return "Triton is not installed"
    if device.type == "cpu":
        return "" if os.environ.get("TRITON_INTERPRET") == "1" else "a CPU interprets it only under TRITON_INTERPRET=1"
    if device.type != "cuda":
        return "it is written for CUDA"
    from perturbkv.scoring.kernels import projected_norms

    return projected_norms.triton_unavailable_reason(device)


def _use_triton(kernel: str, value: Tensor, w_o: Tensor) -> bool:
    """Return whether to use the Triton kernel. Raises ConfigError if it is requested for unsuitable tensors."""
    if kernel == "chunked" or (kernel == "auto" and (not value.is_cuda or triton_unavailable_reason(value.device))):
        return False
    from perturbkv.scoring.kernels import projected_norms

    requirement = projected_norms.unmet_requirement(value, w_o)
    if kernel == "triton" and requirement:
        raise ConfigError(f"norm kernel 'triton' expected {requirement}; {_INSTEAD}")
    return not requirement


def _chunked_norms(
    value: Float[Tensor, "kv_head key d_value"], w_o: Float[Tensor, "d_model head_d_value"], chunk_bytes: int
) -> Float[Tensor, "head key"]:
    """Return the projected value norms ‖V_i W_O^h‖₁ from matrix products of at most `chunk_bytes`."""
    kv_heads, keys, d_value = value.shape
    dtype = torch.promote_types(value.dtype, torch.float32)
    group = w_o.shape[1] // (kv_heads * d_value)
    norms = torch.empty(kv_heads, group, keys, dtype=dtype, device=value.device)
    tile = _tile_entries(group * w_o.shape[0] * dtype.itemsize, keys, value.device, chunk_bytes)
    buffer = torch.empty(tile, group * w_o.shape[0], dtype=dtype, device=value.device)  # one for all: no new pages
    for kv_head in range(kv_heads):
        columns = w_o[:, kv_head * group * d_value : (kv_head + 1) * group * d_value].to(dtype)
        per_head = columns.view(-1, group, d_value).permute(2, 1, 0).reshape(d_value, -1)
        for start in range(0, keys, tile):
            rows = value[kv_head, start : start + tile].to(dtype)
            projected = torch.mm(rows, per_head, out=buffer[: len(rows)]).view(len(rows), group, -1)
            norms[kv_head, :, start : start + tile] = projected.abs_().sum(dim=-1).T
    return norms.flatten(0, 1)


def _tile_entries(entry_bytes: int, keys: int, device: torch.device, chunk_bytes: int) -> int:
    """Return the number of entries, each of `entry_bytes` working memory, that fits `chunk_bytes`; at least 1."""
    return max(1, min(keys, working_bytes(device, chunk_bytes) // entry_bytes))
