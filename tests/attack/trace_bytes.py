"""Ways to spoil a trace file that know nothing of what its bytes mean."""

from __future__ import annotations

import io
from collections.abc import Callable, Mapping

import h5py
import numpy as np

Spoil = Callable[[bytes, np.random.Generator], bytes]


def _places(content: bytes) -> list[tuple[int, int]]:
    """Where the numbers lie: first and last byte of each chunk or block of them."""
    found: list[tuple[int, int]] = []
    with h5py.File(io.BytesIO(content)) as file:
        for variable in file.values():
            if variable.chunks:
                chunks = [variable.id.get_chunk_info(number) for number in range(variable.id.get_num_chunks())]
                found += [(chunk.byte_offset, chunk.byte_offset + chunk.size) for chunk in chunks]
            elif variable.id.get_offset() is not None:
                begin = variable.id.get_offset()
                found.append((begin, begin + variable.id.get_storage_size()))
    return found


def _flipped(content: bytes, places: list[int], draw: np.random.Generator) -> bytes:
    made = bytearray(content)
    for place in places:
        made[place] ^= 1 << int(draw.integers(8))
    return bytes(made)


def one_bit(content: bytes, draw: np.random.Generator) -> bytes:
    return _flipped(content, [int(draw.integers(len(content)))], draw)


def many_bits(content: bytes, draw: np.random.Generator) -> bytes:
    return _flipped(content, draw.integers(len(content), size=int(draw.integers(2, 200))).tolist(), draw)


def a_bit_of_the_numbers(content: bytes, draw: np.random.Generator) -> bytes:
    begin, end = _places(content)[int(draw.integers(len(_places(content))))]
    return _flipped(content, [int(draw.integers(begin, end))], draw)


def a_byte_between_the_numbers(content: bytes, draw: np.random.Generator) -> bytes:
    """A byte of HDF5's own: headers, indices, attributes, texts."""
    own = np.ones(len(content), dtype=bool)
    for begin, end in _places(content):
        own[begin:end] = False
    made = bytearray(content)
    made[int(draw.choice(np.flatnonzero(own)))] = int(draw.integers(256))
    return bytes(made)


def a_letter(content: bytes, draw: np.random.Generator) -> bytes:
    """Another letter in something that a person could read."""
    shown = np.frombuffer(content, dtype=np.uint8)
    letters = (shown >= ord("0")) & (shown <= ord("z"))
    runs = np.flatnonzero(np.convolve(letters, np.ones(6), mode="same") >= 6)
    made = bytearray(content)
    made[int(draw.choice(runs))] = ord("0") + int(draw.integers(10))
    return bytes(made)


def cut(content: bytes, draw: np.random.Generator) -> bytes:
    return content[: int(draw.integers(len(content)))]


def cut_a_little(content: bytes, draw: np.random.Generator) -> bytes:
    return content[: -int(draw.integers(1, 64))]


def longer(content: bytes, draw: np.random.Generator) -> bytes:
    return content + draw.bytes(int(draw.integers(1, 5000)))


def _block(content: bytes, draw: np.random.Generator) -> tuple[int, int]:
    size = int(2 ** draw.uniform(2, 13))
    begin = int(draw.integers(len(content) - size))
    return begin, begin + size


def zeroed(content: bytes, draw: np.random.Generator) -> bytes:
    begin, end = _block(content, draw)
    return content[:begin] + bytes(end - begin) + content[end:]


def numbers_zeroed(content: bytes, draw: np.random.Generator) -> bytes:
    """A whole chunk of zeros, whose sum is zero too."""
    places = _places(content)
    begin, end = places[int(draw.integers(len(places)))]
    return content[:begin] + bytes(end - begin) + content[end:]


def duplicated(content: bytes, draw: np.random.Generator) -> bytes:
    """A block in another's place."""
    begin, end = _block(content, draw)
    to = int(draw.integers(len(content) - (end - begin)))
    return content[:to] + content[begin:end] + content[to + end - begin :]


def swapped(content: bytes, draw: np.random.Generator) -> bytes:
    (begin, end), made = _block(content, draw), bytearray(content)
    to = int(draw.integers(len(content) - (end - begin)))
    made[begin:end], made[to : to + end - begin] = content[to : to + end - begin], content[begin:end]
    return bytes(made)


def numbers_swapped(content: bytes, draw: np.random.Generator) -> bytes:
    """Two whole chunks of one length, each with the sum that belongs to it."""
    places, made = _places(content), bytearray(content)
    lengths = [end - begin for begin, end in places]
    pairs = [(one, two) for one in range(len(places)) for two in range(one) if lengths[one] == lengths[two]]
    one, two = (places[place] for place in pairs[int(draw.integers(len(pairs)))])
    made[slice(*one)], made[slice(*two)] = content[slice(*two)], content[slice(*one)]
    return bytes(made)


def shifted(content: bytes, draw: np.random.Generator) -> bytes:
    """A byte more or less somewhere."""
    place = int(draw.integers(len(content)))
    return content[:place] + (draw.bytes(1) + content[place:] if draw.integers(2) else content[place + 1 :])


def random_bytes(content: bytes, draw: np.random.Generator) -> bytes:
    """HDF5's signature and nothing of HDF5 behind it."""
    return content[: int(draw.choice([8, 48, 96]))] + draw.bytes(len(content) // 2)


SPOILS: Mapping[Spoil, int] = {
    one_bit: 110, many_bits: 40, a_bit_of_the_numbers: 50, a_byte_between_the_numbers: 100, a_letter: 40, cut: 25,
    cut_a_little: 10, longer: 10, zeroed: 40, numbers_zeroed: 25, duplicated: 20, swapped: 25, numbers_swapped: 20,
    shifted: 10, random_bytes: 5,
}  # fmt: skip
"""Each of them -> how often it is tried."""
