"""Ways to spoil a trace file through HDF5: every one leaves a file that HDF5 itself finds in order.

Sums that the file has of its contents are taken away where an edit is nonsense by itself, so that not they alone find
it; where it would make sense in a file that somebody else wrote, they stay.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any

import h5py
import numpy as np

from tests.support.changed import SUMS

Edit = Callable[[h5py.File, np.random.Generator], None]
_RAW = ("head_output", "hidden", "attention_full", "head_output_full", "hidden_full")


def _variable(file: h5py.File, draw: np.random.Generator) -> str:
    names = [name for name in file if not file[name].is_scale]
    return names[int(draw.integers(len(names)))]


def _numbers(file: h5py.File, draw: np.random.Generator, least: int = 1) -> str:
    """A variable of numbers that commands read."""
    names = [
        name
        for name in file
        if not file[name].is_scale and file[name].dtype.kind in "fiu" and file[name].ndim >= least and name not in _RAW
    ]
    return names[int(draw.integers(len(names)))]


def _axis(file: h5py.File, draw: np.random.Generator) -> str:
    names = [name for name in file if file[name].is_scale]
    return names[int(draw.integers(len(names)))]


def _remade(file: h5py.File, name: str, data: Any, axes: list[str] | None = None, **options: Any) -> h5py.Dataset:
    """The variable with other data, everything else as it was."""
    attrs = {key: value for key, value in file[name].attrs.items() if key in ("units", "long_name", SUMS)}
    held = [dim[0].name if len(dim) else None for dim in file[name].dims] if axes is None else axes
    del file[name]
    made = file.create_dataset(name, data=data, **options)
    for key, value in attrs.items():
        made.attrs[key] = value
    for dim, axis in zip(made.dims, held, strict=False):
        if axis is not None and axis in file:
            dim.attach_scale(file[axis])
    return made


def removed(file: h5py.File, draw: np.random.Generator) -> None:
    del file[_variable(file, draw)]


def renamed(file: h5py.File, draw: np.random.Generator) -> None:
    file.move(_variable(file, draw), str(draw.choice(["other", "Theta", "théta", "x" * 3000])))


def another_name(file: h5py.File, draw: np.random.Generator) -> None:
    """Two variables of the same shape under each other's name."""
    names = [name for name in file if not file[name].is_scale and name not in _RAW]
    one = names[int(draw.integers(len(names)))]
    like = [n for n in names if n != one and (file[n].shape, file[n].dtype) == (file[one].shape, file[one].dtype)]
    if like:
        other = like[int(draw.integers(len(like)))]
        file.move(one, "between"), file.move(other, one), file.move("between", other)


def retyped(file: h5py.File, draw: np.random.Generator) -> None:
    name = _numbers(file, draw)
    kinds = ["<f2", "<f4", "<f8", ">f8", "<i4", "<i8", ">i8", "<u8", "i1", "?", "<c16", "S8", "V8"]
    kinds = [kind for kind in kinds if np.dtype(kind) != file[name].dtype]
    held = np.nan_to_num(file[name][()])
    kind = str(draw.choice(kinds))
    _remade(file, name, held.astype(kind) if kind != "V8" else np.zeros(held.shape, "V8"))


def strangely_typed(file: h5py.File, draw: np.random.Generator) -> None:
    name = _numbers(file, draw)
    shape, choice = file[name].shape, int(draw.integers(8))
    if choice == 0:
        data = np.zeros(shape, dtype=[("a", "<f8"), ("b", "<i8")])
        _remade(file, name, data)
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
    name = _numbers(file, draw)
    held = file[name][()]
    _remade(file, name, [held.reshape(-1), held[..., None], held[:1].repeat(3, 0), held[..., :1][:0], held.flat[0]][
        int(draw.integers(5))
    ])  # fmt: skip


def nothing_at_all(file: h5py.File, draw: np.random.Generator) -> None:
    """A variable without any space."""
    name = _variable(file, draw)
    _remade(file, name, h5py.Empty("f8"))


def turned(file: h5py.File, draw: np.random.Generator) -> None:
    """Two axes in each other's place, numbers and scales together."""
    name = _numbers(file, draw, least=3)
    axes = [dim[0].name for dim in file[name].dims]
    one, two = sorted(draw.choice(len(axes), 2, replace=False).tolist())
    axes[one], axes[two] = axes[two], axes[one]
    _remade(file, name, np.swapaxes(file[name][()], one, two), axes)


def other_scales(file: h5py.File, draw: np.random.Generator) -> None:
    """Scales of one length swapped, or taken off; the numbers as they were."""
    name = _numbers(file, draw, least=2)
    dims = file[name].dims
    place = int(draw.integers(len(dims)))
    scale = dims[place][0]
    dims[place].detach_scale(scale)
    if draw.integers(2):
        dims[place].attach_scale(file[_axis(file, draw)])


def lost_attribute(file: h5py.File, draw: np.random.Generator) -> None:
    item = file[_variable(file, draw)] if draw.integers(2) else file[_axis(file, draw)]
    names = [name for name in item.attrs if name != SUMS]
    del item.attrs[names[int(draw.integers(len(names)))]]


def _strange_values() -> list[Any]:
    return [
        7, 2.5, b"\xff\xfe", "", "x" * 100_000, np.arange(5), h5py.Empty("S1"), np.array(["a", "b"], dtype="S1"), True,
        np.zeros(2, dtype=[("a", "i4")]), float("nan"), 2**62, -1,
    ]  # fmt: skip


def strange_attribute(file: h5py.File, draw: np.random.Generator) -> None:
    """An attribute of a variable, a scale or the file that is of another kind."""
    items = [file, file[_variable(file, draw)], file[_axis(file, draw)]]
    item = items[int(draw.integers(3))]
    names = [name for name in item.attrs if name not in (SUMS, "_NCProperties")]
    values = [value for value in _strange_values()]
    name = names[int(draw.integers(len(names)))]
    del item.attrs[name]
    item.attrs[name] = values[int(draw.integers(len(values)))]


def reference_attribute(file: h5py.File, draw: np.random.Generator) -> None:
    """An attribute that refers to the file itself, or to what is no more."""
    item = [file, file[_variable(file, draw)]][int(draw.integers(2))]
    name = "run" if item == file else "units"
    gone = file.create_dataset("gone", data=1)
    reference = [file.ref, gone.ref, file["theta"].regionref[:1]][int(draw.integers(3))]
    del item.attrs[name], file["gone"]
    item.attrs[name] = reference


def root_attribute(file: h5py.File, draw: np.random.Generator) -> None:
    """No such format or version."""
    if draw.integers(3) == 0:
        file.attrs["format"] = [3, "", "other", b"\xff", np.arange(3)][int(draw.integers(5))]
        return
    values = ["3", "three", -1, 0, 1, 2, 4, 99, 2**62, 3.5, float("nan"), np.array([3, 3]), h5py.Empty("i8"), b"\xff"]
    file.attrs["format_version"] = values[int(draw.integers(len(values)))]


def no_root_attribute(file: h5py.File, draw: np.random.Generator) -> None:
    del file.attrs[str(draw.choice(["format", "format_version", "run"]))]


def broken_run(file: h5py.File, draw: np.random.Generator) -> None:
    """No JSON, or JSON of something else."""
    texts: list[Any] = [
        "", "{", "null", "[]", "3", '"run"', "{}", "[" * 200_000, '{"a":' * 100_000, "NaN", b"\xed\xa0\x80",
        '{"configs": null}', '{"configs": []}', '{"configs": [3]}', '{"configs": {"a": 1}}', "1" * 10_000,
    ]  # fmt: skip
    file.attrs["run"] = texts[int(draw.integers(len(texts)))]


_NEEDED = {"model", "dataset", "configs", "save", "budget", "policy", "policy_options", "selection_options"}


def another_run(file: h5py.File, draw: np.random.Generator) -> None:
    """One entry of the run of another kind, missing, or unknown."""
    run = json.loads(file.attrs["run"])
    where = run if draw.integers(2) else run["configs"][0]
    name = str(draw.choice(sorted(where.keys() - {"max_tokens"})))
    others: list[Any] = [None, [], -1.5, float("nan"), "x", True, [[1]], {"a": {"b": []}}]
    others = [value for value in others if type(value) is not type(where[name])]
    choice = int(draw.integers(len(others) + 2))
    if choice == len(others):
        where["unknown"] = 1
    elif choice > len(others):
        del where[str(draw.choice(sorted(where.keys() & _NEEDED)))]
    else:
        where[name] = others[choice]
    file.attrs["run"] = json.dumps(run)


def deep_run(file: h5py.File, draw: np.random.Generator) -> None:
    """A choice inside a choice inside a choice …"""
    run = json.loads(file.attrs["run"])
    deep: Any = {"choice": "a", "options": {}}
    for _ in range(int(draw.choice([30, 400]))):
        deep = {"choice": "a", "options": {"b": deep}}
    run["configs"][0]["policy_options"] = {"pool": deep}
    file.attrs["run"] = json.dumps(run)


def other_configs(file: h5py.File, draw: np.random.Generator) -> None:
    """The run's configurations turned, fewer, or one of them twice."""
    run = json.loads(file.attrs["run"])
    configs = run["configs"]
    run["configs"] = [configs[::-1], configs[:1], [configs[0]] * len(configs)][int(draw.integers(3))]
    file.attrs["run"] = json.dumps(run)


def other_labels(file: h5py.File, draw: np.random.Generator) -> None:
    labels = list(file["config"].asstr()[()])
    made = [labels[::-1], [labels[0]] * len(labels), ["other", *labels[1:]], ["", *labels[1:]]][int(draw.integers(4))]
    file["config"][...] = made


def other_ids(file: h5py.File, draw: np.random.Generator) -> None:
    """Sample ids twice, no text, or of another kind."""
    ids = list(file["sample"].asstr()[()])
    choice = int(draw.integers(3))
    if choice == 0:
        file["sample"][...] = [ids[0]] * len(ids)
    elif choice == 1:
        file["sample"][0] = b"\xff\xfe\xfd"
    else:
        del file["sample"]
        file.create_dataset("sample", data=np.arange(len(ids))).make_scale("sample")


def other_places(file: h5py.File, draw: np.random.Generator) -> None:
    """A coordinate that counts otherwise."""
    axis = str(draw.choice(["step", "layer", "head"]))
    held = file[axis][()]
    file[axis][...] = [held[::-1], held + 1, held * 0, held - 2**62][int(draw.integers(4))]


def longer_axis(file: h5py.File, draw: np.random.Generator) -> None:
    """A coordinate that is longer than its variables."""
    axis = str(draw.choice(["sample", "config", "step", "layer", "head"]))
    held = file[axis].asstr()[()] if axis in ("sample", "config") else file[axis][()]
    more = [f"more {place}" for place in range(3)] if axis in ("sample", "config") else np.arange(3) + len(held)
    del file[axis]
    data = np.concatenate([held, more])
    file.create_dataset(axis, data=data, dtype=h5py.string_dtype() if held.dtype == object else None).make_scale(axis)


def _set(file: h5py.File, name: str, value: Any, draw: np.random.Generator) -> None:
    """One number of a variable."""
    held = file[name][()]
    held.flat[int(draw.integers(held.size))] = value
    file[name][...] = held


def nonsense_count(file: h5py.File, draw: np.random.Generator) -> None:
    names = ["kept_count", "kept_offset", "stage1_count", "prompt_tokens", "prompt_count", "prompt_offset",
             "steps_measured"]  # fmt: skip
    name = str(draw.choice(names))
    _set(file, name, int(draw.choice([-1, -(2**40), 2**31, 2**62, 2**63 - 1, -(2**63)])), draw)


def nonsense_position(file: h5py.File, draw: np.random.Generator) -> None:
    """Kept or lost positions outside the prompt."""
    name = str(draw.choice(["kept_position", "lost_position"]))
    _set(file, name, int(draw.choice([-5, -(2**31), 2**31 - 1, 100_000])), draw)


def unsorted_positions(file: h5py.File, draw: np.random.Generator) -> None:
    """Kept positions of one head turned, or one of them twice."""
    begin, count = int(file["kept_offset"][()].flat[-1]), int(file["kept_count"][()].flat[-1])
    held = file["kept_position"][begin : begin + count]
    file["kept_position"][begin : begin + count] = held[::-1] if draw.integers(2) else held[:1].repeat(count)


def overlapping_places(file: h5py.File, draw: np.random.Generator) -> None:
    """A head whose kept positions reach into the next one's."""
    _set(file, "kept_offset", int(file["kept_offset"][()].flat[0]) + 1, draw)


def text_out_of_place(file: h5py.File, draw: np.random.Generator) -> None:
    """Tokens that begin before the one before them, or past the end of the text."""
    _set(file, "prompt_start", int(draw.choice([-1, 10**6, 2**31 - 1])), draw)


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
    _set(file, str(draw.choice(names)), float("nan"), draw)


def other_numbers(file: h5py.File, draw: np.random.Generator) -> None:
    """What might have been measured, and was not."""
    name = _numbers(file, draw)
    _set(file, name, file[name][()].flat[0] + 1, draw)


def other_text(file: h5py.File, draw: np.random.Generator) -> None:
    """A prompt that is as long as it was."""
    held = file["prompt_text"].asstr()[0]
    file["prompt_text"][0] = f"{held[:10]}X{held[11:]}"


def another_model(file: h5py.File, draw: np.random.Generator) -> None:
    run = json.loads(file.attrs["run"])
    name = str(draw.choice(["model", "seed", "dataset", "max_tokens", "device", "revision"]))
    run[name] = 17 if name in ("seed", "max_tokens") else "another"
    file.attrs["run"] = json.dumps(run, sort_keys=True)


def soft_link(file: h5py.File, draw: np.random.Generator) -> None:
    name = _variable(file, draw)
    target = ["/" + name, "/nowhere", "/theta_hat_relax", "/", "/sample"][int(draw.integers(5))]
    del file[name]
    file[name] = h5py.SoftLink(target)


def external_link(file: h5py.File, draw: np.random.Generator) -> None:
    name = _variable(file, draw)
    target = [("/etc/passwd", "/"), ("t.h5", "/theta_hat"), ("nowhere.h5", "/theta"), ("whole.h5", f"/{name}")]
    del file[name]
    file[name] = h5py.ExternalLink(*target[int(draw.integers(4))])


def cyclic_link(file: h5py.File, draw: np.random.Generator) -> None:
    """A group that holds itself, beside the variables or in the place of one."""
    name = "loop" if draw.integers(2) else _variable(file, draw)
    if name in file:
        del file[name]
    group = file.create_group(name)
    group["again"], group["root"] = group, file["/"]


def second_link(file: h5py.File, draw: np.random.Generator) -> None:
    """One variable under another's name too."""
    del file["theta"]
    file["theta"] = file[str(draw.choice(["theta_hat", "noise_floor", "sample", "kept_position", "failure"]))]


def external_storage(file: h5py.File, draw: np.random.Generator) -> None:
    """Numbers that lie in another file."""
    name = _numbers(file, draw)
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
    name = _numbers(file, draw)
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
    name = _numbers(file, draw)
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
    axis = str(draw.choice(["sample", "head", "layer", "d_head", "key", "kept_entry"]))
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
    name = str(draw.choice(["prompt_tokens", "kept_position", "cut_tokens"]))
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
    name = _numbers(file, draw)
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
        _variable(file, draw) if draw.integers(3) else str(draw.choice(["layer", "head", "step", "config", "sample"]))
    )
    del file[name]
    if draw.integers(2):
        file.create_group(name)
    else:
        file[name] = np.dtype("<f8")


def committed_type(file: h5py.File, draw: np.random.Generator) -> None:
    """A variable whose type lies in the file under a name of its own."""
    name = _numbers(file, draw)
    file["its_type"] = np.dtype("<f4") if draw.integers(2) else file[name].dtype
    _remade(file, name, file[name][()], dtype=file["its_type"])


def other_strings(file: h5py.File, draw: np.random.Generator) -> None:
    """Texts of a fixed length, numbers for texts, bytes that are no text."""
    name = str(draw.choice(["prompt_text", "failure", "config"]))
    choice = int(draw.integers(3))
    if choice == 0:
        file[name][0] = b"\xc3\x28\xff"
    else:
        count = file[name].shape[0]
        axes = None if name != "config" else []
        made = _remade(file, name, np.zeros(count, dtype="S4") if choice == 1 else np.zeros(count), axes)
        if name == "config":
            made.make_scale("config")


def strangers(file: h5py.File, draw: np.random.Generator) -> None:
    """What a reader passes over: more variables, groups, types and attributes."""
    choice = int(draw.integers(4))
    if choice == 0:
        file.create_dataset("mine", data=np.arange(3))
    elif choice == 1:
        file.create_group("mine/deeper/still")
    elif choice == 2:
        file["mine"] = np.dtype("<f8")
    else:
        file["theta"].attrs["note"] = "x" * 60_000


def many_attributes(file: h5py.File, draw: np.random.Generator) -> None:
    for place in range(2000):
        file["theta"].attrs[f"note {place}"] = place


ALONE: Mapping[Edit, int] = {
    strange_attribute: 25, lost_attribute: 10, reference_attribute: 6, root_attribute: 20, no_root_attribute: 4,
    broken_run: 24, another_run: 40, deep_run: 4, other_configs: 6, other_labels: 6, other_ids: 6, other_places: 8,
    longer_axis: 8, nonsense_count: 24, nonsense_position: 10, unsorted_positions: 6, overlapping_places: 4,
    text_out_of_place: 6, flags_at_odds: 10, no_numbers: 10, soft_link: 12, external_link: 12, cyclic_link: 6,
    second_link: 5, external_storage: 12, virtual: 8, huge: 8, huge_everywhere: 12, huge_chunks: 5,
    unreadable_filter: 8, group_instead: 12, committed_type: 6, other_strings: 10, strangers: 8, many_attributes: 2,
    retyped: 26, strangely_typed: 16, odd_floats: 4, reshaped: 12, nothing_at_all: 5, turned: 10, other_scales: 12,
}  # fmt: skip
"""Nonsense by itself -> how often it is tried: without the file's sums every other time."""
SUMMED: Mapping[Edit, int] = {
    removed: 8,
    renamed: 6,
    another_name: 8,
    other_numbers: 16,
    other_text: 3,
    another_model: 6,
}
"""What could be another trace, but for the sums."""
