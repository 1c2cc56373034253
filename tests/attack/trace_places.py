"""Numbers that lie elsewhere, or nowhere, or that nobody can unpack."""

from __future__ import annotations

import h5py
import numpy as np

from tests.attack.trace_parts import any_variable, variable_of_numbers


def soft_link(file: h5py.File, draw: np.random.Generator) -> None:
    name = any_variable(file, draw)
    target = ["/" + name, "/nowhere", "/theta_hat_relax", "/", "/sample"][int(draw.integers(5))]
    del file[name]
    file[name] = h5py.SoftLink(target)


def external_link(file: h5py.File, draw: np.random.Generator) -> None:
    name = any_variable(file, draw)
    target = [("/etc/passwd", "/"), ("t.h5", "/theta_hat"), ("nowhere.h5", "/theta"), ("whole.h5", f"/{name}")]
    del file[name]
    file[name] = h5py.ExternalLink(*target[int(draw.integers(4))])


def cyclic_link(file: h5py.File, draw: np.random.Generator) -> None:
    """A group that holds itself, beside the variables or in the place of one."""
    name = "loop" if draw.integers(2) else any_variable(file, draw)
    if name in file:
        del file[name]
    group = file.create_group(name)
    group["again"], group["root"] = group, file["/"]


def second_link(file: h5py.File, draw: np.random.Generator) -> None:
    """One variable under another's name too."""
    del file["theta"]
    file["theta"] = file[str(draw.choice(["theta_hat", "noise_floor", "sample", "kept_code", "failure"]))]


def external_storage(file: h5py.File, draw: np.random.Generator) -> None:
    """Numbers that lie in another file."""
    name = variable_of_numbers(file, draw)
    shape, dtype = file[name].shape, file[name].dtype
    where = [("/etc/passwd", 0, h5py.h5f.UNLIMITED), ("t.h5", 64, h5py.h5f.UNLIMITED), ("nowhere", 0, 10**9)]
    attrs, axes = dict(file[name].attrs), [dim[0].name for dim in file[name].dims]
    del file[name]
    made = file.create_dataset(name, shape=shape, dtype=dtype, external=[where[int(draw.integers(3))]])
    made.attrs["units"], made.attrs["long_name"] = attrs["units"], attrs["long_name"]
    for dim, axis in zip(made.dims, axes, strict=True):
        dim.attach_scale(file[axis])


def virtual(file: h5py.File, draw: np.random.Generator) -> None:
    """Numbers that another dataset or file lends."""
    name = variable_of_numbers(file, draw)
    shape, dtype = file[name].shape, file[name].dtype
    attrs, axes = dict(file[name].attrs), [dim[0].name for dim in file[name].dims]
    layout = h5py.VirtualLayout(shape, dtype)
    layout[...] = h5py.VirtualSource(str(draw.choice([".", "whole.h5", "nowhere.h5"])), name, shape)
    del file[name]
    made = file.create_virtual_dataset(name, layout, fillvalue=0)
    made.attrs["units"], made.attrs["long_name"] = attrs["units"], attrs["long_name"]
    for dim, axis in zip(made.dims, axes, strict=True):
        dim.attach_scale(file[axis])


def huge(file: h5py.File, draw: np.random.Generator) -> None:
    """7 TiB that were never written, of one variable."""
    name = variable_of_numbers(file, draw)
    shape = (1, *file[name].shape[1:])
    rows = 7 * 2**40 // (int(np.prod(shape)) * file[name].dtype.itemsize)
    attrs, axes = dict(file[name].attrs), [dim[0].name for dim in file[name].dims]
    del file[name]
    made = file.create_dataset(name, shape=(rows, *shape[1:]), dtype="<f8", chunks=shape, fillvalue=0.5)
    made.attrs["units"], made.attrs["long_name"] = attrs["units"], attrs["long_name"]
    for dim, axis in zip(made.dims, axes, strict=True):
        dim.attach_scale(file[axis])


def huge_everywhere(file: h5py.File, draw: np.random.Generator) -> None:
    """An axis that is as long as no disk holds, in its coordinate and in every variable along it."""
    axis = str(draw.choice(["sample", "head", "layer", "d_head", "key", "kept_byte"]))
    length = int(draw.choice([10**7, 2**33, 2**40]))
    text = h5py.string_dtype()
    for name in [name for name in file if not file[name].is_scale]:
        axes = [dim[0].name.lstrip("/") for dim in file[name].dims]
        if axis not in axes:
            continue
        shape = tuple(length if one == axis else size for one, size in zip(axes, file[name].shape, strict=True))
        dtype = text if file[name].dtype == object else file[name].dtype
        attrs = {key: file[name].attrs[key] for key in ("units", "long_name")}
        del file[name]
        made = file.create_dataset(name, shape=shape, dtype=dtype, chunks=tuple(min(size, 16) for size in shape))
        made.attrs.update(attrs)
    del file[axis]
    kind = text if axis == "sample" else "<i8"
    file.create_dataset(axis, shape=(length,), dtype=kind, chunks=(1024,)).make_scale(axis)
    for name in [name for name in file if not file[name].is_scale]:
        for place, dim in enumerate(file[name].dims):
            if file[name].shape[place] == length:
                dim.attach_scale(file[axis])


def huge_chunks(file: h5py.File, draw: np.random.Generator) -> None:
    """A variable whose one chunk takes gibibytes in memory."""
    name = str(draw.choice(["prompt_tokens", "kept_code", "cut_tokens"]))
    held = file[name][()]
    axes = [dim[0].name for dim in file[name].dims]
    made = {"data": held, "chunks": (2**29 - 1,), "maxshape": (None,), "compression": "gzip"}
    attrs = dict(file[name].attrs)
    del file[name]
    variable = file.create_dataset(name, shape=held.shape, dtype=held.dtype, **{**made, "data": None})
    variable.attrs["units"], variable.attrs["long_name"] = attrs["units"], attrs["long_name"]
    for dim, axis in zip(variable.dims, axes, strict=True):
        dim.attach_scale(file[axis])
    raw = np.concatenate([held, np.zeros(16, dtype=held.dtype)]).tobytes()
    variable.id.write_direct_chunk((0,), raw)


def unreadable_filter(file: h5py.File, draw: np.random.Generator) -> None:
    """Filters that nobody registered, or that change numbers."""
    name = variable_of_numbers(file, draw)
    held = file[name][()]
    axes = [dim[0].name for dim in file[name].dims]
    attrs = dict(file[name].attrs)
    del file[name]
    plan = h5py.h5p.create(h5py.h5p.DATASET_CREATE)
    plan.set_chunk(held.shape)
    if draw.integers(2):
        plan.set_filter(int(draw.choice([32015, 32001, 500])), h5py.h5z.FLAG_OPTIONAL, (3,))
    else:
        plan.set_scaleoffset(h5py.h5z.SO_INT if held.dtype.kind in "iu" else h5py.h5z.SO_FLOAT_DSCALE, 2)
    kind, space = h5py.h5t.py_create(held.dtype), h5py.h5s.create_simple(held.shape)
    made = h5py.h5d.create(file.id, name.encode(), kind, space, plan)
    made.write_direct_chunk((0,) * held.ndim, held.tobytes())
    variable = file[name]
    variable.attrs["units"], variable.attrs["long_name"] = attrs["units"], attrs["long_name"]
    for dim, axis in zip(variable.dims, axes, strict=True):
        dim.attach_scale(file[axis])


def group_instead(file: h5py.File, draw: np.random.Generator) -> None:
    """A group, or a type, where a variable or an axis should be."""
    name = (
        any_variable(file, draw)
        if draw.integers(3)
        else str(draw.choice(["layer", "head", "step", "config", "sample"]))
    )
    del file[name]
    if draw.integers(2):
        file.create_group(name)
    else:
        file[name] = np.dtype("<f8")
