"""What numbers are after they were stored in a format and read back: one function per format.

All take entries as rows and components as columns, compute in float32 and return the type that they were given.
Nothing waits for the device. Numbers beyond 16-bit floats give NaN or infinity in every format with 16-bit scales.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence

import numpy as np
import torch
from jaxtyping import Float
from numpy.typing import NDArray
from scipy.linalg import hadamard
from scipy.optimize import root
from scipy.special import erfc, ndtri
from torch import Tensor

from perturbkv.configs.number_formats import BLOCK, NumberFormat
from perturbkv.devices import copy_to_device, to_device

Rows = Float[Tensor, "row column"]


def read_back(numbers: Rows, counts: Sequence[int], number_format: NumberFormat, group: int, seed: int) -> Rows:
    """Return numbers as a format gives them back.

    Args:
        numbers: the entries of all kept sets, one set after the other.
        counts: number of entries of each set.
        number_format: the format.
        group: of integers, the numbers that share a scale and a minimum.
        seed: of the map of `rotated`, another for keys than for values.
    """
    bits, scaled = number_format.bits, number_format.scaled
    match number_format.kind:
        case "integer" if scaled == "channel":
            return as_integers(numbers, [length for count in counts for length in group_lengths(count, group)], bits)
        case "integer":
            return as_integers(numbers.mT, group_lengths(numbers.shape[1], group), bits).mT
        case "fp8":
            return as_fp8(numbers, counts if scaled == "head" else [len(numbers)])
        case "rotated":
            return as_rotated(numbers, bits, seed)
        case "q8_0":
            return as_q8_0(numbers)
        case "q4_0":
            return as_q4_0(numbers)
    return numbers


def as_integers(numbers: Rows, groups: Sequence[int], bits: int) -> Rows:
    """Return numbers as integers of `bits` bits; each group of a column's rows shares a scale and a minimum.

    Asymmetric, from minimum to maximum, rounded to nearest; scale and minimum are rounded to 16-bit floats before they
    are used. `groups` are the numbers of rows of consecutive groups. A group of one value, or of a range too small for
    a 16-bit scale, becomes its minimum.
    """
    lengths = to_device(list(groups), numbers.device)
    group = torch.arange(len(groups), device=numbers.device).repeat_interleave(lengths, output_size=len(numbers))
    begins, index = lengths.cumsum(0) - lengths, torch.arange(max(groups), device=numbers.device)
    places = begins.unsqueeze(-1) + torch.minimum(index, lengths.unsqueeze(-1) - 1)  # of rows, the last one repeated
    by_group, largest_code = numbers.to(torch.float32)[places], 2**bits - 1
    least, most = by_group.amin(dim=1), by_group.amax(dim=1)
    scale, low = (_in_16_bits(kind)[group] for kind in ((most - least) / largest_code, least))
    codes = ((numbers.to(torch.float32) - low) / scale.where(scale > 0, 1)).round().clamp(0, largest_code)
    return (codes * scale + low).to(numbers.dtype)


def as_fp8(numbers: Rows, counts: Sequence[int]) -> Rows:
    """Return numbers as float8 e4m3, each set of `counts` rows with a scale in float32: its largest number becomes 448.

    Numbers that the scale's rounding puts above 448 saturate.
    """
    lengths, largest_code = to_device(list(counts), numbers.device), torch.finfo(torch.float8_e4m3fn).max
    of_set = torch.arange(len(counts), device=numbers.device).repeat_interleave(lengths, output_size=len(numbers))
    data = numbers.to(torch.float32)
    largest = data.new_zeros(len(counts)).scatter_reduce(0, of_set, data.abs().amax(dim=1), "amax")
    scale = (largest / largest_code).where(largest > 0, 1)[of_set].unsqueeze(-1)
    codes = (data / scale).clamp(-largest_code, largest_code).to(torch.float8_e4m3fn)
    return (codes.to(torch.float32) * scale).to(numbers.dtype)


def as_rotated(numbers: Rows, bits: int, seed: int) -> Rows:
    """Return vectors in TurboQuant's MSE-optimal form (https://arxiv.org/abs/2504.19874, algorithm 1).

    A vector's norm is a 16-bit float; its direction is rotated by a fixed map, and each component, nearly normal with
    variance 1 / width, becomes the nearest of 2^bits levels.
    """
    data, width, device = numbers.to(torch.float32), numbers.shape[1], numbers.device
    norm = torch.linalg.vector_norm(data, dim=1, keepdim=True)
    tables = rotation_map(width, seed), normal_levels(bits) / math.sqrt(width)
    rotation, levels = (copy_to_device(torch.from_numpy(table), device, torch.float32) for table in tables)
    codes = torch.bucketize(data / norm.where(norm > 0, 1) @ rotation.mT, (levels[1:] + levels[:-1]) / 2)
    return (levels[codes] @ rotation * _in_16_bits(norm)).to(numbers.dtype)


@functools.cache
def rotation_map(width: int, seed: int) -> NDArray[np.float64]:
    """Return the fixed orthogonal map of a seed, (width, width): Hadamard after random signs for a power of two.

    Else it is the orthogonal factor of a matrix of normal numbers, whose law is the uniform one.
    """
    draw = np.random.default_rng(seed)
    if width & (width - 1):
        matrix, upper = np.linalg.qr(draw.standard_normal((width, width)))
        return np.asarray(matrix * np.sign(np.diag(upper)))
    return np.asarray(hadamard(width) * draw.choice([-1, 1], width) / math.sqrt(width))


@functools.cache
def normal_levels(bits: int) -> NDArray[np.float64]:
    """Return the 2^bits levels with the least mean squared error of a standard normal number (Lloyd–Max), ascending.

    Each is the mean of the numbers that are nearest to it. By symmetry only the positive ones are solved for, from
    Panter and Dite's approximation.
    """
    positive = 2 ** (bits - 1)
    quantiles = 0.5 + (np.arange(positive) + 0.5) / (2 * positive)

    def offset_from_means(levels: NDArray[np.float64]) -> NDArray[np.float64]:
        ends = np.concatenate([[0], (levels[1:] + levels[:-1]) / 2, [np.inf]])
        density, mass = np.exp(-(ends**2) / 2) * math.sqrt(2 / math.pi), erfc(ends / math.sqrt(2))
        return np.asarray(np.diff(density) / np.diff(mass) - levels)

    levels = root(offset_from_means, math.sqrt(3) * ndtri(quantiles), tol=1e-13).x
    return np.concatenate([-levels[::-1], levels])


def as_q8_0(numbers: Rows) -> Rows:
    """Return numbers in llama.cpp's Q8_0: blocks of 32 components with a 16-bit scale, the largest code 127.

    Halves are rounded away from zero, as `quantize_row_q8_0_ref` does. The width is a multiple of 32.
    """
    blocks = numbers.to(torch.float32).reshape(len(numbers), -1, BLOCK)
    scale = blocks.abs().amax(dim=-1, keepdim=True) / 127
    exact = blocks * _inverse(scale)
    codes = exact.trunc() + (2 * exact.frac()).trunc()
    return (codes * _in_16_bits(scale)).flatten(1).to(numbers.dtype)


def as_q4_0(numbers: Rows) -> Rows:
    """Return numbers in llama.cpp's Q4_0: blocks of 32 components with a 16-bit scale and codes −8 … 7.

    The number of largest magnitude, the first of several, has the code −8; the others are rounded down after 8.5 is
    added, as `quantize_row_q4_0_ref` does where it is compiled without fused products. The width is a multiple of 32.
    """
    blocks = numbers.to(torch.float32).reshape(len(numbers), -1, BLOCK)
    scale = blocks.gather(-1, blocks.abs().argmax(dim=-1, keepdim=True)) / -8
    codes = (blocks * _inverse(scale) + 8.5).trunc().clamp(0, 15)
    return ((codes - 8) * _in_16_bits(scale)).flatten(1).to(numbers.dtype)


def group_lengths(count: int, group: int) -> list[int]:
    """Return the sizes of the groups that `count` numbers are split into: `group` each, the last the remainder."""
    remainder = count % group
    return [group] * (count // group) + [remainder] * (remainder > 0)


def _in_16_bits(numbers: Tensor) -> Tensor:
    """Return float32 numbers rounded to 16-bit floats."""
    return numbers.to(torch.float16).to(torch.float32)


def _inverse(scale: Tensor) -> Tensor:
    """Return 1 / scale, and 0 for a scale of 0."""
    return (1 / scale).where(scale != 0, 0)
