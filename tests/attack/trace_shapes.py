"""Variables that are missing, or of another type, shape, name or axes."""

from __future__ import annotations

import h5py
import numpy as np

from tests.attack.trace_parts import RAW, any_axis, any_variable, remade, variable_of_numbers


def removed(file: h5py.File, draw: np.random.Generator) -> None:
    del file[any_variable(file, draw)]


def renamed(file: h5py.File, draw: np.random.Generator) -> None:
    file.move(any_variable(file, draw), str(draw.choice(["other", "Theta", "théta", "x" * 3000])))


def another_name(file: h5py.File, draw: np.random.Generator) -> None:
    """Two variables of the same shape under each other's name."""
    names = [name for name in file if not file[name].is_scale and name not in RAW]
    one = names[int(draw.integers(len(names)))]
    like = [n for n in names if n != one and (file[n].shape, file[n].dtype) == (file[one].shape, file[one].dtype)]
    if like:
        other = like[int(draw.integers(len(like)))]
        file.move(one, "between"), file.move(other, one), file.move("between", other)


def retyped(file: h5py.File, draw: np.random.Generator) -> None:
    name = variable_of_numbers(file, draw)
    kinds = ["<f2", "<f4", "<f8", ">f8", "<i4", "<i8", ">i8", "<u8", "i1", "?", "<c16", "S8", "V8"]
    kinds = [kind for kind in kinds if np.dtype(kind) != file[name].dtype]
    held = np.nan_to_num(file[name][()])
    kind = str(draw.choice(kinds))
    remade(file, name, held.astype(kind) if kind != "V8" else np.zeros(held.shape, "V8"))


def strangely_typed(file: h5py.File, draw: np.random.Generator) -> None:
    name = variable_of_numbers(file, draw)
    shape, choice = file[name].shape, int(draw.integers(8))
    if choice == 0:
        data = np.zeros(shape, dtype=[("a", "<f8"), ("b", "<i8")])
        remade(file, name, data)
        return
    dtype = [
        None, h5py.ref_dtype, h5py.regionref_dtype, h5py.string_dtype(), h5py.vlen_dtype(np.float64),
        h5py.enum_dtype({"a": 0, "b": 1}), np.dtype((np.float64, (3,))), h5py.opaque_dtype(np.dtype("M8[s]")),
    ][choice]  # fmt: skip
    axes = [dim[0].name for dim in file[name].dims]
    del file[name]
    made = file.create_dataset(name, shape=shape, dtype=dtype)
    made.attrs["units"], made.attrs["long_name"] = "1", "strange"
    for dim, axis in zip(made.dims, axes, strict=True):
        dim.attach_scale(file[axis])


def odd_floats(file: h5py.File, draw: np.random.Generator) -> None:
    """Numbers of 64 bits whose exponent means something else."""
    name = "theta"
    held, shape = file[name][()], file[name].shape
    kind = h5py.h5t.IEEE_F64LE.copy()
    kind.set_ebias(int(draw.integers(1000, 1023)))
    del file[name]
    space = h5py.h5s.create_simple(shape)
    made = h5py.h5d.create(file.id, name.encode(), kind, space)
    made.write(h5py.h5s.ALL, h5py.h5s.ALL, held, mtype=h5py.h5t.NATIVE_DOUBLE)
    axes = ("sample", "config", "step", "layer", "head")
    for dim, axis in zip(file[name].dims, axes, strict=True):
        dim.attach_scale(file[axis])
    file[name].attrs["units"], file[name].attrs["long_name"] = "L1", "bound"


def reshaped(file: h5py.File, draw: np.random.Generator) -> None:
    name = variable_of_numbers(file, draw)
    held = file[name][()]
    remade(file, name, [held.reshape(-1), held[..., None], held[:1].repeat(3, 0), held[..., :1][:0], held.flat[0]][
        int(draw.integers(5))
    ])  # fmt: skip


def nothing_at_all(file: h5py.File, draw: np.random.Generator) -> None:
    """A variable without any space."""
    name = any_variable(file, draw)
    remade(file, name, h5py.Empty("f8"))


def turned(file: h5py.File, draw: np.random.Generator) -> None:
    """Two axes in each other's place, numbers and scales together."""
    name = variable_of_numbers(file, draw, least=3)
    axes = [dim[0].name for dim in file[name].dims]
    one, two = sorted(draw.choice(len(axes), 2, replace=False).tolist())
    axes[one], axes[two] = axes[two], axes[one]
    remade(file, name, np.swapaxes(file[name][()], one, two), axes)


def other_scales(file: h5py.File, draw: np.random.Generator) -> None:
    """Scales of one length swapped, or taken off; the numbers as they were."""
    name = variable_of_numbers(file, draw, least=2)
    dims = file[name].dims
    place = int(draw.integers(len(dims)))
    scale = dims[place][0]
    dims[place].detach_scale(scale)
    if draw.integers(2):
        dims[place].attach_scale(file[any_axis(file, draw)])


def committed_type(file: h5py.File, draw: np.random.Generator) -> None:
    """A variable whose type lies in the file under a name of its own."""
    name = variable_of_numbers(file, draw)
    file["its_type"] = np.dtype("<f4") if draw.integers(2) else file[name].dtype
    remade(file, name, file[name][()], dtype=file["its_type"])


def other_strings(file: h5py.File, draw: np.random.Generator) -> None:
    """Texts of a fixed length, numbers for texts, bytes that are no text."""
    name = str(draw.choice(["prompt_text", "failure", "config"]))
    choice = int(draw.integers(3))
    if choice == 0:
        file[name][0] = b"\xc3\x28\xff"
    else:
        count = file[name].shape[0]
        axes = None if name != "config" else []
        made = remade(file, name, np.zeros(count, dtype="S4") if choice == 1 else np.zeros(count), axes)
        if name == "config":
            made.make_scale("config")
