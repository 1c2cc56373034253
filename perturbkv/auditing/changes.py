"""What was done to the entries of a head: a rotation, another head's entries, a scale, rounding, a quantisation.

Each test compares entries with the full cache's and returns words, empty where it does not explain the difference.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import product

import torch
from jaxtyping import Float, Int
from torch import Tensor

from perturbkv.analyses.audit.cache_entries import FLOORS, MOST_ROUNDED
from perturbkv.cache.external_cache import STRANGE_DISTANCE, recover_positions

_MOST_TESTED = 32
"""Most entries of a head that are tested for a rotation."""
NEAR = 0.02
"""Largest remaining distance, over the length of an entry, at which a rotation explains it."""
_MOST_KEYS = 0.7
"""Least share of the tested keys that a rotation under rounding explains."""
_MOST_COMPARED = 256
"""Most entries of a head that are compared with all others'."""
_BITS = (8, 4, 2)
_COARSER = (torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2)
_BASES = tuple(10 ** (exponent / 100) for exponent in range(200, 801))
"""Rotary bases that are tried, a fortieth apart."""
_SAME_BASE = 0.002
"""Largest relative difference of two bases that are one."""
_AS_NEAR = 1.02
"""Ratio of the distances that two bases leave up to which the rounder one is taken."""
_CLIPPED = 0.07
"""Share of a limit beyond which a number that is there was cut off: e4m3 rounds by half of an eighth."""
_OUTLYING = 20
"""Ratio of an entry's error to the median one above which it is another change than rounding."""
_ALONG = 0.7
"""Share of a distance that a constant factor makes, above which it explains it; the best levels of 1 bit make 0.6."""
_NEARLY_EQUAL = 1.5
"""Ratio of an entry's distance from its original to that from another up to which these two are one to rounding."""
_EQUAL = 1e-3
"""Relative difference of distances below which they are equal, as those from equal entries are."""
ROTATED_NEARER = 0.6
"""Largest ratio of the distance that a rotation leaves a rounded key to the one without it, that explains the key."""
_FROM_ELSEWHERE = 0.7
"""Largest ratio of the distances from another head's or row's entries and from the own ones', of rounded entries."""
_MOST = 0.5
"""Least share of a head's entries that have another one's value, where values may be rounded."""
_NEARLY_ALL = 0.95
"""Share of a head's entries that an explanation holds for."""
_MUCH_NEARER = 0.2
"""Largest ratio of the distance that a change leaves to the one without it, at which the change explains entries."""


def excess_rotations(
    keys: Float[Tensor, "entry d_key"],
    full: Float[Tensor, "entry d_key"],
    frequencies: Float[Tensor, " frequency"],
    most: int,
    *,
    rounded: bool = False,
    near: float = 0.0,
) -> Int[Tensor, " entry"] | None:
    """Return the number of positions by which each key is rotated too far, between −most and most.

    `full` are the full cache's keys of the same tokens. None where such rotations do not explain every key, where one
    is NaN, and without frequencies; with `rounded` they explain a key that they bring much nearer, else one that they
    bring as `near`, over its length, as what its rounding leaves. Component i pairs
    with i + len(frequencies), as in `perturbkv.cache.entries.rotate_keys`.
    """
    half = len(frequencies)
    if not half:
        return None
    pairs, full_pairs = _complex_pairs(keys, half), _complex_pairs(full, half)
    cross = pairs * full_pairs.conj()
    shifts = torch.arange(-most, most + 1, device=keys.device)
    angles = shifts.double().unsqueeze(-1) * frequencies.to(keys.device).double()
    matched = angles.cos() @ cross.real.T + angles.sin() @ cross.imag.T  # (shift, entry): product with the rotated key
    best = matched.argmax(dim=0)
    rotated = full_pairs * torch.polar(torch.ones_like(angles[best]), angles[best])
    unrotated = torch.linalg.vector_norm(keys[:, 2 * half :].double() - full[:, 2 * half :].double(), dim=-1)
    distance = torch.hypot(torch.linalg.vector_norm(pairs - rotated, dim=-1), unrotated)
    before = torch.hypot(torch.linalg.vector_norm(pairs - full_pairs, dim=-1), unrotated)
    limit = before * ROTATED_NEARER if rounded else max(NEAR, near) * torch.linalg.vector_norm(full.double(), dim=-1)
    return shifts[best] if bool((distance <= limit)[shifts[best] != 0 if rounded else slice(None)].all()) else None


def _complex_pairs(keys: Float[Tensor, "entry d_key"], half: int) -> Tensor:
    """Return the rotary components of keys as complex numbers (entry, frequency), from pairs `half` apart."""
    components = keys.double()
    return torch.complex(components[:, :half], components[:, half : 2 * half])


def _deinterleave(keys: Float[Tensor, "entry d_key"]) -> Float[Tensor, "entry d_key"]:
    """Return keys with the components 2i and 2i + 1 moved to i and i + d/2."""
    return keys.reshape(len(keys), -1, 2).transpose(1, 2).flatten(1)


def describe_rotation(
    keys: Float[Tensor, "entry d_key"],
    full: Float[Tensor, "entry d_key"],
    positions: Int[Tensor, " entry"],
    frequencies: Float[Tensor, " frequency"],
    most: int,
    *,
    rounded: bool = False,
    near: float = 0.0,
    varied: bool = True,
) -> str:
    """Return a description of the rotation between the keys and the full cache's; empty if none explains it.

    `keys` are those of a head in the order of its cache, `full` those of the full cache at `positions`; `most` is the
    largest number of positions that is tried. With `rounded` keys may be rounded, too; `near` as in `excess_rotations`.
    With `varied` False only a rule that holds for all keys is described.
    """
    chosen = _spread(len(keys), _MOST_TESTED, keys.device)
    shifts = excess_rotations(keys[chosen], full[chosen], frequencies, most, rounded=rounded, near=near)
    if shifts is None and not rounded:
        shifts = excess_rotations(_deinterleave(keys[chosen]), _deinterleave(full[chosen]), frequencies, most)
        return "rotated with neighbouring components as pairs" if shifts is not None and bool(shifts.any()) else ""
    if shifts is None or not bool(shifts.any()):
        return ""
    if rounded:
        if float((shifts != 0).float().mean()) < _MOST_KEYS:
            return ""
        common = shifts.mode().values
        if float((shifts == common).float().mean()) >= _MOST_KEYS:
            shifts = common.expand_as(shifts)
    told = shifts, positions[chosen], chosen
    words = _rotation_rule(*told) or (_varied_rotation(*told) if varied else "")
    return f"{words}, and rounded" if words and rounded else words


def _spread(count: int, most: int, device: torch.device) -> Int[Tensor, " chosen"]:
    """Return the indices of at most so many of `count` entries, spread evenly from the first to the last."""
    return torch.linspace(0, count - 1, min(count, most), device=device).round().long()


def _rotation_rule(shifts: Tensor, before: Tensor, chosen: Tensor) -> str:
    """Return in words by how much all keys, of the positions `before`, at the places `chosen`, are rotated too far.

    Empty where no rule holds for all.
    """
    if bool((shifts == before).all()):
        return "rotated again, each by its own position"
    if bool((shifts == shifts[0]).all()):
        return f"rotated by {int(shifts[0])} more positions"
    if bool((shifts == chosen - before).all()):
        return "moved to their places inside the cache"
    return ""


def _varied_rotation(shifts: Tensor, before: Tensor, chosen: Tensor) -> str:
    """Return in words by how much keys are rotated that no rule explains: by one number but for some, or by several."""
    moved = shifts != 0
    numbers, places = (torch.unique(each[moved]) for each in (shifts, chosen - before))
    if len(numbers) > 1:
        return "rotated, each by a number of positions of its own"
    due = f", not by the {int(places)} to their places inside the cache" if len(places) == 1 and int(places) else ""
    return f"rotated by {int(numbers)} more positions{due}, but for some"


def find_base(
    keys: Float[Tensor, "entry d_key"],
    full: Float[Tensor, "entry d_key"],
    positions: Int[Tensor, " entry"],
    frequencies: Float[Tensor, " frequency"],
    likely: float = 0.0,
) -> float:
    """Return the base that keys were rotated with instead of the model's; 0 if none explains them.

    `full` are the full cache's keys at `positions`. 0, too, where the model's `frequencies` are not the powers of one
    base, as after scaling for long contexts. A `likely` base that explains the keys is returned as it is.
    """
    pairs, model_base = len(frequencies), _model_base(frequencies)
    if not model_base:
        return 0.0
    exponents = -torch.arange(pairs, dtype=torch.float64) / pairs
    model_frequencies, places = frequencies.cpu().double(), positions.cpu().double().unsqueeze(-1)
    own, known = (_complex_pairs(side.cpu(), pairs) for side in (keys, full))
    unturned = float(torch.linalg.vector_norm(full[:, 2 * pairs :].double() - keys[:, 2 * pairs :].double()))

    def distance(base: float) -> float:
        """Return how far the keys are from the full cache's, were these rotated with a base."""
        angle = places * (base**exponents - model_frequencies)
        turned = known * torch.polar(torch.ones_like(angle), angle)
        return math.hypot(float(torch.linalg.vector_norm(turned - own)), unturned)

    most = _MUCH_NEARER * distance(model_base)
    if likely and distance(likely) <= most:
        return likely
    best = min(_BASES, key=distance)
    for step in range(5):  # finer and finer around the best so far
        best = min((best * (1 + 0.005 / 10**step) ** count for count in range(-5, 6)), key=distance)
    round_ones = (float(f"{best:.{digits}g}") for digits in (1, 2, 3))
    best = next((base for base in round_ones if distance(base) <= _AS_NEAR * distance(best)), best)
    return best if distance(best) <= most and abs(best / model_base - 1) > _SAME_BASE else 0.0


def _model_base(frequencies: Float[Tensor, " frequency"]) -> float:
    """Return the base whose powers the frequencies are; 0 without one."""
    pairs = len(frequencies)
    base = float(frequencies[1].double() ** -pairs) if pairs > 1 else 0.0
    exponents = -torch.arange(pairs, dtype=torch.float64) / pairs
    return base if base and torch.allclose(base**exponents, frequencies.cpu().double(), rtol=1e-3) else 0.0


def describe_base(base: float, frequencies: Float[Tensor, " frequency"]) -> str:
    """Return in words that keys were rotated with a base; empty for 0."""
    words = f"rotated with base {float(f'{base:.3g}'):,.0f}, the model's is {_model_base(frequencies):,.0f}"
    return words if base else ""


def excess_angles(
    keys: Float[Tensor, "entry d_key"],
    full: Float[Tensor, "entry d_key"],
    positions: Int[Tensor, " entry"],
    frequencies: Float[Tensor, " frequency"],
    near: float,
) -> Float[Tensor, "entry frequency"] | None:
    """Return by how many radians keys are rotated too far; None where neither positions nor a base explain it.

    `full` are the full cache's keys at `positions`; `near` as in `excess_rotations`.
    """
    shifts = excess_rotations(keys, full, frequencies, 2 * len(full), near=near)
    if shifts is not None:
        return shifts.unsqueeze(-1) * frequencies.to(shifts.device)
    base, pairs = find_base(keys, full, positions, frequencies), len(frequencies)
    wrong = base ** (-torch.arange(pairs, dtype=torch.float64) / pairs) if base else frequencies.double()
    return positions.unsqueeze(-1) * (wrong - frequencies.double().cpu()).float() if base else None


def round_towards_zero(numbers: Tensor, dtype: torch.dtype) -> Tensor:
    """Return numbers rounded to the next number of a floating-point type that is not farther from zero."""
    nearest = numbers.to(dtype)
    bits = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[dtype.itemsize]
    below = (nearest.view(bits) - 1).view(dtype).to(numbers.dtype)  # sign and magnitude: the next towards zero
    rounded = nearest.to(numbers.dtype)
    return torch.where(rounded.abs() > numbers.abs(), below, rounded)


def describe_rounding(entries: Float[Tensor, "entry width"], full: Float[Tensor, "entry width"]) -> str:
    """Return in words the coarser type that the entries went through; empty if none explains the difference."""
    for dtype in _COARSER:
        if torch.finfo(dtype).eps > torch.finfo(entries.dtype).eps and _explains(full.to(dtype).float(), entries, full):
            return f"rounded to {str(dtype).removeprefix('torch.')}"
    return ""


def describe_scale(entries: Float[Tensor, "entry width"], full: Float[Tensor, "entry width"], floor: float) -> str:
    """Return the constant by which all entries of a head were multiplied, in words; empty if there is none.

    `floor` is the noise floor of an entry, relative to its length.
    """
    own, expected = entries.double(), full.double()
    if not bool(own.any()):
        return "multiplied by 0"
    factor = _factor(own, expected)
    rest = torch.linalg.vector_norm(own - factor * expected) / torch.linalg.vector_norm(own)
    if abs(factor - 1) <= FLOORS * floor or not bool(rest <= FLOORS * max(floor, torch.finfo(entries.dtype).eps)):
        return ""
    return f"multiplied by {factor:.4g}"


def describe_clipping(entries: Float[Tensor, "entry width"], full: Float[Tensor, "entry width"]) -> str:
    """Return in words the limit at which larger numbers of a head were cut off; empty if there is none.

    At least two numbers are beyond it by more than 8 bits round, all of these are at the limit, and most others are
    there up to 8 bits.
    """
    own, expected = entries.float() * full.sign(), full.abs().float()
    limit = float(own.abs().amax()) if own.numel() else 0.0
    beyond = expected > limit * (1 + _CLIPPED)
    coarse = (own - expected).abs() > _CLIPPED * expected.clamp(min=limit * _CLIPPED)
    at_limit = bool((own[beyond] >= limit * (1 - _CLIPPED)).all())
    if int(beyond.sum()) < 2 or not at_limit or float(coarse[~beyond].float().mean()) > 1 - _NEARLY_ALL:
        return ""
    return f"clipped at {limit:.4g}"


def describe_rounded_scale(entries: Float[Tensor, "entry width"], full: Float[Tensor, "entry width"]) -> str:
    """Return the constant by which entries that are rounded were multiplied, in words; empty if there is none.

    It makes most of their distance, where rounding goes in all directions, or towards zero by less.
    """
    own, expected = entries.double(), full.double()
    factor = _factor(own, expected)
    along = abs(factor - 1) * torch.linalg.vector_norm(expected)
    if not bool(along > _ALONG * torch.linalg.vector_norm(own - expected)):
        return ""
    return f"multiplied by {factor:.3g}, and rounded"


def _factor(own: Tensor, expected: Tensor) -> float:
    """Return the constant that brings all vectors nearest to their others."""
    return float((own * expected).sum() / expected.square().sum().clamp(min=torch.finfo(torch.float64).tiny))


def describe_quantisation(
    entries: Float[Tensor, "entry width"],
    full: Float[Tensor, "entry width"],
    head: Float[Tensor, "position width"],
    *,
    exactly: bool = False,
) -> str:
    """Return a description of the quantisation from `full` to `entries`; empty if none explains the difference.

    Scales are taken per entry, per channel and per head, over the kept entries and over all of the full cache's entries
    of the `head`, from the largest magnitude or from the range. `exactly` as of `_explains`.
    """
    kept, every = full.float(), head.float()
    scales = (("per entry", (-1,), kept), ("per channel", (0,), every), ("per channel", (0,), kept),
              ("per head", (0, 1), every), ("per head", (0, 1), kept))  # fmt: skip
    for bits, (scale, dims, scaled) in product(_BITS, scales):
        low, high = scaled.amin(dim=dims, keepdim=True), scaled.amax(dim=dims, keepdim=True)
        largest = torch.maximum(high, -low)
        for step, zero in (
            (largest / (2 ** (bits - 1) - 1), torch.zeros_like(low)),  # symmetric
            (largest / 2 ** (bits - 1), torch.zeros_like(low)),  # symmetric, with the lowest whole number in use
            ((high - low) / (2**bits - 1), low),  # from the range
        ):
            safe = step.clamp(min=torch.finfo(torch.float32).tiny)
            if _explains(((kept - zero) / safe).round() * safe + zero, entries, full, exactly=exactly):
                return f"quantised to {bits} bits {scale}"
    return ""


def are_rounded(
    entries: Sequence[Tensor],
    head: Sequence[Tensor],
    positions: Int[Tensor, " entry"],
    kind: int,
    floor: float,
) -> bool:
    """Return whether the keys (`kind` 0) or values (1) of entries are what rounding alone leaves, whichever it is.

    Nearly every entry, key and value together, is nearer to its own original than to any other, and the rest nearly
    are; its key or value is off by at most `MOST_ROUNDED`; and of those that differ by more than the noise `floor` none
    stands out, as a single change is no rounding.

    Args:
        entries: keys and values (entry, width).
        head: keys and values (position, width) of the full cache.
        positions: (entry,) of the originals in the full cache.
        kind: what is asked about.
        floor: noise floor of that kind, over the root mean square norm of the head's.
    """
    units = [_root_mean_square(known) for known in head]
    errors = torch.linalg.vector_norm(entries[kind].float() - head[kind][positions].float(), dim=-1) / units[kind]
    changed = errors[errors > FLOORS * floor]
    if len(changed) < 2 or float(changed.amax()) > min(MOST_ROUNDED, _OUTLYING * float(changed.median())):
        return False
    chosen = _spread(len(positions), _MOST_COMPARED, errors.device)
    together = torch.hypot(
        *(
            torch.cdist(own[chosen].float(), known.float()) / unit
            for own, known, unit in zip(entries, head, units, strict=True)
        )
    )
    own, best = together.gather(1, positions[chosen].unsqueeze(-1)).squeeze(-1), together.amin(dim=-1)
    nearest = own <= best * (1 + _EQUAL) + _EQUAL
    return bool((own <= _NEARLY_EQUAL * best + _EQUAL).all()) and float(nearest.float().mean()) > _NEARLY_ALL


def are_of_others(
    values: Float[Tensor, "entry width"], head: Float[Tensor, "position width"], positions: Int[Tensor, " entry"]
) -> bool:
    """Return whether most values that may be rounded are near others of a head than those at `positions`."""
    chosen = _spread(len(positions), _MOST_COMPARED, values.device)
    distances = torch.cdist(values[chosen].float(), head.float()) / _root_mean_square(head)
    own, best = distances.gather(1, positions[chosen].unsqueeze(-1)).squeeze(-1), distances.amin(dim=-1)
    others = (own > STRANGE_DISTANCE) & (best <= STRANGE_DISTANCE) & (best <= _FROM_ELSEWHERE * own)
    return float(others.float().mean()) > _MOST


def _root_mean_square(vectors: Float[Tensor, "position width"]) -> Tensor:
    """Return the root mean square norm of vectors, above 0."""
    return vectors.float().square().sum(dim=-1).mean().sqrt().clamp(min=torch.finfo(torch.float32).tiny)


def _explains(candidate: Tensor, entries: Tensor, full: Tensor, *, exactly: bool = False) -> bool:
    """Return whether nearly all entries are much nearer to their candidate than the full cache's entry is.

    All are (entry, width); what their type rounds is allowed. With `exactly` all have to be, and without that.
    """
    distance = torch.linalg.vector_norm(entries.float() - candidate, dim=-1)
    full_distance = torch.linalg.vector_norm(full.float() - candidate, dim=-1)
    if exactly:
        return bool((distance <= _MUCH_NEARER * full_distance).all())
    rounding = 2 * torch.finfo(entries.dtype).eps * torch.linalg.vector_norm(entries.float(), dim=-1)
    return bool((distance <= torch.maximum(_MUCH_NEARER * full_distance, rounding)).float().mean() > _NEARLY_ALL)


def describe_head(
    entries: Float[Tensor, "entry width"], full: Float[Tensor, "kv_head position width"], own: int, name: str = "head"
) -> str:
    """Return the head of the full cache, other than `own`, that holds all `entries`, rounded or not; empty if none.

    In words, in which a head is called `name`.
    """
    cast = entries.to(full.dtype)
    others = [(head, known) for head, known in enumerate(full) if head != own]
    exact = (f"of {name} {head}" for head, known in others if are_among(cast, known))
    rounded = (f"of {name} {head}, and rounded" for head, known in others if are_rounded_from(cast, known, full[own]))
    return next(exact, "") or next(rounded, "")


def are_rounded_from(
    entries: Float[Tensor, "entry width"], known: Float[Tensor, "position width"], own: Float[Tensor, "position width"]
) -> bool:
    """Return whether nearly all entries are near one of `known`, and much farther from all of their `own`."""
    unit = _root_mean_square(known)
    chosen = _spread(len(entries), _MOST_COMPARED, entries.device)
    near, far = (torch.cdist(entries[chosen].float(), head.float()).amin(dim=-1) / unit for head in (known, own))
    return bool(((near <= STRANGE_DISTANCE) & (near <= _FROM_ELSEWHERE * far)).float().mean() > _NEARLY_ALL)


def are_among(entries: Float[Tensor, "entry width"], full: Float[Tensor, "position width"]) -> bool:
    """Return whether every entry is bit-equal to one of the full cache's."""
    cached, known = entries[None, None], full[None, None]  # with a row and a head
    (kept,) = recover_positions([(cached, cached)], [(known, known)])
    return not bool(kept.key_distance[0].any())
