"""Numbers that no run measures, and numbers that this one did not."""

from __future__ import annotations

import h5py
import numpy as np

from tests.attack.trace_parts import set_one, variable_of_numbers


def nonsense_count(file: h5py.File, draw: np.random.Generator) -> None:
    names = ["kept_count", "kept_length", "kept_offset", "stage1_count", "prompt_tokens", "prompt_count",
             "prompt_offset", "steps_measured"]  # fmt: skip
    name = str(draw.choice(names))
    set_one(file, name, int(draw.choice([-1, -(2**40), 2**31, 2**62, 2**63 - 1, -(2**63)])), draw)


def nonsense_position(file: h5py.File, draw: np.random.Generator) -> None:
    """Kept or lost positions outside the prompt."""
    if draw.integers(2):
        set_one(file, "lost_position", int(draw.choice([-5, -(2**31), 2**31 - 1, 100_000])), draw)
    else:
        file["kept_code"][...] = draw.integers(256, size=file["kept_code"].shape, dtype=np.uint8)


def unsorted_positions(file: h5py.File, draw: np.random.Generator) -> None:
    """Kept positions of one head twice, or a code that no writer makes of them."""
    begin, length = int(file["kept_offset"][()].flat[-1]), int(file["kept_length"][()].flat[-1])
    file["kept_code"][begin : begin + length] = 0 if draw.integers(2) else 0x80


def overlapping_places(file: h5py.File, draw: np.random.Generator) -> None:
    """A head whose kept positions reach into the next one's."""
    set_one(file, "kept_offset", int(file["kept_offset"][()].flat[0]) + 1, draw)


def text_out_of_place(file: h5py.File, draw: np.random.Generator) -> None:
    """Tokens that begin before the one before them, or past the end of the text."""
    set_one(file, "prompt_start", int(draw.choice([-1, 10**6, 2**31 - 1])), draw)


def flags_at_odds(file: h5py.File, draw: np.random.Generator) -> None:
    """A sample complete and failed, or neither."""
    choice = int(draw.integers(4))
    if choice == 0:
        file["complete"][0] = 0
    elif choice == 1:
        file["complete"][0] = 7
    elif choice == 2:
        file["failure"][0] = "it broke"
    else:
        file["evicted" if draw.integers(2) else "top1_agreement"][0] = 200


def no_numbers(file: h5py.File, draw: np.random.Generator) -> None:
    """NaN where a number was measured."""
    names = ["theta", "perturbation_isolated", "output_norm", "noise_floor", "logit_kl", "retained_mass", "hidden_norm",
             "sigma_stage1", "perturbation_propagated"]  # fmt: skip
    set_one(file, str(draw.choice(names)), float("nan"), draw)


def other_numbers(file: h5py.File, draw: np.random.Generator) -> None:
    """What might have been measured, and was not."""
    name = variable_of_numbers(file, draw)
    set_one(file, name, file[name][()].flat[0] + 1, draw)


def other_text(file: h5py.File, draw: np.random.Generator) -> None:
    """A prompt that is as long as it was."""
    held = file["prompt_text"].asstr()[0]
    file["prompt_text"][0] = f"{held[:10]}X{held[11:]}"
