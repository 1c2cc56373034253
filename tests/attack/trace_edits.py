"""Ways to spoil a trace file through HDF5: every one leaves a file that HDF5 itself finds in order."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import Any

import h5py
import numpy as np

from tests.support.changed import SUMS, without_sums

__all__ = ["EDITS", "SUMMED", "without_sums"]

File, Draw, Edit = h5py.File, np.random.Generator, Callable[[h5py.File, np.random.Generator], None]
EDITS: dict[Edit, int] = {}
"""Nonsense by itself -> how often it is tried: without the file's sums every other time."""
SUMMED: dict[Edit, int] = {}
"""What could be another trace, but for the sums."""
RAW = ("head_output", "hidden", "attention_full", "head_output_full", "hidden_full")
AXES = ("sample", "config", "step", "layer", "head")


def edit(count: int, table: dict[Edit, int] = EDITS) -> Callable[[Edit], Edit]:
    """Enter the function into a table, to be tried so often."""
    return lambda function: table.update({function: count}) or function


def one_of(draw: Draw, values: Sequence[Any]) -> Any:
    """Draw one of the values."""
    return values[int(draw.integers(len(values)))]


def any_variable(file: File, draw: Draw) -> str:
    """Draw the name of a variable."""
    return one_of(draw, [name for name in file if not file[name].is_scale])


def numbers(file: File, draw: Draw, least: int = 1) -> str:
    """Draw the name of a variable of numbers that commands read, with so many axes."""
    variables = {name: file[name] for name in file if not file[name].is_scale and name not in RAW}
    return one_of(draw, [name for name, one in variables.items() if one.dtype.kind in "fiu" and one.ndim >= least])


def any_axis(file: File, draw: Draw) -> str:
    """Draw the name of an axis."""
    return one_of(draw, [name for name in file if file[name].is_scale])


def remake(file: File, name: str, make: Callable[[], Any], axes: list[str] | None = None, sums: bool = False) -> None:
    """Make a variable anew; its attributes and axes stay."""
    kept = ("units", "long_name", *([SUMS] if sums else []))
    attributes = {key: file[name].attrs[key] for key in kept if key in file[name].attrs}
    axes = [dim[0].name if len(dim) else "" for dim in file[name].dims] if axes is None else axes
    del file[name]
    make()
    file[name].attrs.update(attributes)
    for dim, axis in zip(file[name].dims, axes, strict=False):
        if axis and axis in file:
            dim.attach_scale(file[axis])


def with_data(file: File, name: str, data: Any, axes: list[str] | None = None, **options: Any) -> None:
    """Make a variable anew with other data, and the sum that it had."""
    remake(file, name, lambda: file.create_dataset(name, data=data, **options), axes, sums=True)


def set_one(file: File, name: str, value: Any, draw: Draw) -> None:
    """Set one number of a variable."""
    values = file[name][()]
    values.flat[int(draw.integers(values.size))] = value
    file[name][...] = values


def change_run(file: File, change: Callable[[dict[str, Any]], object]) -> None:
    """Change the run that the file describes."""
    run = json.loads(file.attrs["run"])
    change(run)
    file.attrs["run"] = json.dumps(run)


# Numbers.
@edit(24)
def nonsense_count(file: File, draw: Draw) -> None:
    name = one_of(draw, ["kept_count", "kept_length", "kept_offset", "stage1_count", "prompt_tokens", "prompt_count",
                         "prompt_offset", "steps_measured"])  # fmt: skip
    set_one(file, name, one_of(draw, [-1, -(2**40), 2**31, 2**62, 2**63 - 1, -(2**63)]), draw)


@edit(10)
def nonsense_position(file: File, draw: Draw) -> None:
    if draw.integers(2):
        set_one(file, "lost_position", one_of(draw, [-5, -(2**31), 2**31 - 1, 100_000]), draw)
    else:
        file["kept_code"][...] = draw.integers(256, size=file["kept_code"].shape, dtype=np.uint8)


@edit(6)
def unsorted_positions(file: File, draw: Draw) -> None:
    begin, length = int(file["kept_offset"][()].flat[-1]), int(file["kept_length"][()].flat[-1])
    file["kept_code"][begin : begin + length] = 0 if draw.integers(2) else 0x80


@edit(4)
def overlapping_positions(file: File, draw: Draw) -> None:
    set_one(file, "kept_offset", int(file["kept_offset"][()].flat[0]) + 1, draw)


@edit(6)
def token_outside_the_text(file: File, draw: Draw) -> None:
    set_one(file, "prompt_start", one_of(draw, [-1, 10**6, 2**31 - 1]), draw)


@edit(10)
def contradicting_flags(file: File, draw: Draw) -> None:
    flags = [("complete", 0), ("complete", 7), ("failure", "it broke"), ("evicted", 200), ("top1_agreement", 200)]
    name, value = one_of(draw, flags)
    file[name][0] = value


@edit(10)
def not_a_number(file: File, draw: Draw) -> None:
    name = one_of(draw, ["theta", "perturbation_isolated", "output_norm", "noise_floor", "logit_kl", "retained_mass",
                         "hidden_norm", "sigma_stage1", "perturbation_propagated"])  # fmt: skip
    set_one(file, name, float("nan"), draw)


@edit(16, SUMMED)
def other_numbers(file: File, draw: Draw) -> None:
    name = numbers(file, draw)
    set_one(file, name, file[name][()].flat[0] + 1, draw)


@edit(3, SUMMED)
def other_text(file: File, draw: Draw) -> None:
    text = file["prompt_text"].asstr()[0]
    file["prompt_text"][0] = f"{text[:10]}X{text[11:]}"


# Variables that are missing, or of another type, shape, name or axes.
@edit(8, SUMMED)
def removed(file: File, draw: Draw) -> None:
    del file[any_variable(file, draw)]


@edit(6, SUMMED)
def renamed(file: File, draw: Draw) -> None:
    file.move(any_variable(file, draw), one_of(draw, ["other", "Theta", "théta", "x" * 3000]))


@edit(8, SUMMED)
def names_swapped(file: File, draw: Draw) -> None:
    names = [name for name in file if not file[name].is_scale and name not in RAW]
    one = one_of(draw, names)
    like = [n for n in names if n != one and (file[n].shape, file[n].dtype) == (file[one].shape, file[one].dtype)]
    if like:
        other = one_of(draw, like)
        for source, target in ((one, "between"), (other, one), ("between", other)):
            file.move(source, target)


@edit(26)
def retyped(file: File, draw: Draw) -> None:
    name = numbers(file, draw)
    types = ["<f2", "<f4", "<f8", ">f8", "<i4", "<i8", ">i8", "<u8", "i1", "?", "<c16", "S8", "V8"]
    dtype = one_of(draw, [dtype for dtype in types if np.dtype(dtype) != file[name].dtype])
    values = np.nan_to_num(file[name][()])
    with_data(file, name, np.zeros(values.shape, "V8") if dtype == "V8" else values.astype(dtype))


@edit(16)
def strange_type(file: File, draw: Draw) -> None:
    name = numbers(file, draw)
    dtype = one_of(draw, [
        np.dtype([("a", "<f8"), ("b", "<i8")]), h5py.ref_dtype, h5py.regionref_dtype, h5py.string_dtype(),
        h5py.vlen_dtype(np.float64), h5py.enum_dtype({"a": 0, "b": 1}), np.dtype((np.float64, (3,))),
        h5py.opaque_dtype(np.dtype("M8[s]")),
    ])  # fmt: skip
    shape = file[name].shape
    remake(file, name, lambda: file.create_dataset(name, shape=shape, dtype=dtype))


@edit(4)
def strange_exponent(file: File, draw: Draw) -> None:
    values, dtype = file["theta"][()], h5py.h5t.IEEE_F64LE.copy()
    dtype.set_ebias(int(draw.integers(1000, 1023)))

    def make() -> None:
        made = h5py.h5d.create(file.id, b"theta", dtype, h5py.h5s.create_simple(values.shape))
        made.write(h5py.h5s.ALL, h5py.h5s.ALL, values, mtype=h5py.h5t.NATIVE_DOUBLE)

    remake(file, "theta", make)


@edit(6)
def committed_type(file: File, draw: Draw) -> None:
    name = numbers(file, draw)
    file["its_type"] = np.dtype("<f4") if draw.integers(2) else file[name].dtype
    with_data(file, name, file[name][()], dtype=file["its_type"])


@edit(12)
def reshaped(file: File, draw: Draw) -> None:
    name = numbers(file, draw)
    x = file[name][()]
    with_data(file, name, one_of(draw, [x.reshape(-1), x[..., None], x[:1].repeat(3, 0), x[..., :1][:0], x.flat[0]]))


@edit(5)
def empty(file: File, draw: Draw) -> None:
    with_data(file, any_variable(file, draw), h5py.Empty("f8"))


@edit(10)
def transposed(file: File, draw: Draw) -> None:
    name = numbers(file, draw, least=3)
    axes = [dim[0].name for dim in file[name].dims]
    one, two = sorted(draw.choice(len(axes), 2, replace=False).tolist())
    axes[one], axes[two] = axes[two], axes[one]
    with_data(file, name, np.swapaxes(file[name][()], one, two), axes)


@edit(12)
def other_scales(file: File, draw: Draw) -> None:
    dim = one_of(draw, list(file[numbers(file, draw, least=2)].dims))
    dim.detach_scale(dim[0])
    if draw.integers(2):
        dim.attach_scale(file[any_axis(file, draw)])


@edit(10)
def other_strings(file: File, draw: Draw) -> None:
    name, choice = one_of(draw, ["prompt_text", "failure", "config"]), int(draw.integers(3))
    if choice == 0:
        file[name][0] = b"\xc3\x28\xff"
        return
    with_data(
        file, name, np.zeros(file[name].shape[0], "S4" if choice == 1 else "f8"), [] if name == "config" else None
    )
    if name == "config":
        file[name].make_scale(name)


# Numbers that lie elsewhere, or nowhere, or that nobody can unpack.
@edit(12)
def soft_link(file: File, draw: Draw) -> None:
    name = any_variable(file, draw)
    del file[name]
    file[name] = h5py.SoftLink(one_of(draw, ["/" + name, "/nowhere", "/theta_hat_relax", "/", "/sample"]))


@edit(12)
def external_link(file: File, draw: Draw) -> None:
    name = any_variable(file, draw)
    targets = [("/etc/passwd", "/"), ("t.h5", "/theta_hat"), ("nowhere.h5", "/theta"), ("whole.h5", f"/{name}")]
    del file[name]
    file[name] = h5py.ExternalLink(*one_of(draw, targets))


@edit(6)
def cyclic_link(file: File, draw: Draw) -> None:
    name = "loop" if draw.integers(2) else any_variable(file, draw)
    if name in file:
        del file[name]
    group = file.create_group(name)
    group["again"], group["root"] = group, file["/"]


@edit(5)
def second_link(file: File, draw: Draw) -> None:
    del file["theta"]
    file["theta"] = file[one_of(draw, ["theta_hat", "noise_floor", "sample", "kept_code", "failure"])]


@edit(12)
def external_storage(file: File, draw: Draw) -> None:
    name, rest = numbers(file, draw), h5py.h5f.UNLIMITED
    where = one_of(draw, [("/etc/passwd", 0, rest), ("t.h5", 64, rest), ("nowhere", 0, 10**9)])
    shape, dtype = file[name].shape, file[name].dtype
    remake(file, name, lambda: file.create_dataset(name, shape=shape, dtype=dtype, external=[where]))


@edit(8)
def virtual(file: File, draw: Draw) -> None:
    name = numbers(file, draw)
    layout = h5py.VirtualLayout(file[name].shape, file[name].dtype)
    layout[...] = h5py.VirtualSource(one_of(draw, [".", "whole.h5", "nowhere.h5"]), name, file[name].shape)
    remake(file, name, lambda: file.create_virtual_dataset(name, layout, fillvalue=0))


@edit(8)
def huge(file: File, draw: Draw) -> None:
    """Give a variable 7 TiB that were never written."""
    name = numbers(file, draw)
    chunk = (1, *file[name].shape[1:])
    shape = (7 * 2**40 // (int(np.prod(chunk)) * file[name].dtype.itemsize), *chunk[1:])
    remake(file, name, lambda: file.create_dataset(name, shape=shape, dtype="<f8", chunks=chunk, fillvalue=0.5))


@edit(12)
def huge_everywhere(file: File, draw: Draw) -> None:
    """Make an axis as long as no disk holds, in its coordinate and in every variable along it."""
    axis, length = (
        one_of(draw, ["sample", "head", "layer", "d_head", "key", "kept_byte"]),
        one_of(draw, [10**7, 2**33, 2**40]),
    )
    text = h5py.string_dtype()
    variables = {name: [dim[0].name.lstrip("/") for dim in file[name].dims] for name in file if not file[name].is_scale}
    along = {name: axes for name, axes in variables.items() if axis in axes}
    del file[axis]
    file.create_dataset(axis, shape=(length,), dtype=text if axis == "sample" else "<i8", chunks=(1024,)).make_scale(
        axis
    )
    for name, axes in along.items():
        shape = tuple(length if one == axis else size for one, size in zip(axes, file[name].shape, strict=True))
        dtype, chunks = text if file[name].dtype == object else file[name].dtype, tuple(min(size, 16) for size in shape)
        remake(file, name, lambda: file.create_dataset(name, shape=shape, dtype=dtype, chunks=chunks), axes)  # noqa: B023


@edit(5)
def huge_chunk(file: File, draw: Draw) -> None:
    """Give a variable one chunk that takes gibibytes in memory."""
    name = one_of(draw, ["prompt_tokens", "kept_code", "cut_tokens"])
    values, options = file[name][()], {"chunks": (2**29 - 1,), "maxshape": (None,), "compression": "gzip"}
    remake(file, name, lambda: file.create_dataset(name, shape=values.shape, dtype=values.dtype, **options))
    file[name].id.write_direct_chunk((0,), values.tobytes() + bytes(16 * values.dtype.itemsize))


@edit(8)
def unknown_filter(file: File, draw: Draw) -> None:
    """Use filters that nobody registered, or that change numbers."""
    name = numbers(file, draw)
    values, plan = file[name][()], h5py.h5p.create(h5py.h5p.DATASET_CREATE)
    plan.set_chunk(values.shape)
    if draw.integers(2):
        plan.set_filter(one_of(draw, [32015, 32001, 500]), h5py.h5z.FLAG_OPTIONAL, (3,))
    else:
        plan.set_scaleoffset(h5py.h5z.SO_INT if values.dtype.kind in "iu" else h5py.h5z.SO_FLOAT_DSCALE, 2)

    def make() -> None:
        dtype, space = h5py.h5t.py_create(values.dtype), h5py.h5s.create_simple(values.shape)
        h5py.h5d.create(file.id, name.encode(), dtype, space, plan).write_direct_chunk(
            (0,) * values.ndim, values.tobytes()
        )

    remake(file, name, make)


@edit(12)
def group_instead(file: File, draw: Draw) -> None:
    name = any_variable(file, draw) if draw.integers(3) else one_of(draw, AXES)
    del file[name]
    if draw.integers(2):
        file.create_group(name)
    else:
        file[name] = np.dtype("<f8")


# Attributes, axes, and the run that the file describes.
@edit(10)
def lost_attribute(file: File, draw: Draw) -> None:
    item = file[any_variable(file, draw) if draw.integers(2) else any_axis(file, draw)]
    del item.attrs[one_of(draw, [name for name in item.attrs if name != SUMS])]


@edit(25)
def strange_attribute(file: File, draw: Draw) -> None:
    item = one_of(draw, [file, file[any_variable(file, draw)], file[any_axis(file, draw)]])
    names = ["format", "format_version", "run"] if item == file else [name for name in item.attrs if name != SUMS]
    values = [7, 2.5, b"\xff\xfe", "", "x" * 100_000, np.arange(5), h5py.Empty("S1"), np.array(["a", "b"], "S1"), True,
              np.zeros(2, dtype=[("a", "i4")]), float("nan"), 2**62, -1]  # fmt: skip
    name = one_of(draw, names)
    del item.attrs[name]
    item.attrs[name] = one_of(draw, values)


@edit(6)
def reference_attribute(file: File, draw: Draw) -> None:
    """Let an attribute refer to the file itself, or to what is no more."""
    item = one_of(draw, [file, file[any_variable(file, draw)]])
    name, gone = "run" if item == file else "units", file.create_dataset("gone", data=1)
    reference = one_of(draw, [file.ref, gone.ref, file["theta"].regionref[:1]])
    del item.attrs[name], file["gone"]
    item.attrs[name] = reference


@edit(20)
def other_format(file: File, draw: Draw) -> None:
    versions = ["3", "three", -1, 0, 1, 2, 4, 99, 2**62, 3.5, float("nan"), np.array([3, 3]), h5py.Empty("i8"), b"\xff"]
    name = one_of(draw, ["format", "format_version", "format_version"])
    file.attrs[name] = one_of(draw, versions if "_" in name else [3, "", "other", b"\xff", np.arange(3)])


@edit(4)
def no_format(file: File, draw: Draw) -> None:
    del file.attrs[one_of(draw, ["format", "format_version", "run"])]


@edit(24)
def broken_run(file: File, draw: Draw) -> None:
    file.attrs["run"] = one_of(draw, [
        "", "{", "null", "[]", "3", '"run"', "{}", "[" * 200_000, '{"a":' * 100_000, "NaN", b"\xed\xa0\x80",
        "1" * 10_000,
        '{"configs": null}', '{"configs": []}', '{"configs": [3]}', '{"configs": {"a": 1}}',
    ])  # fmt: skip


@edit(40)
def odd_entry_of_the_run(file: File, draw: Draw) -> None:
    """Give an entry of the run another type, remove one, or add an unknown one."""
    needed = {"model", "dataset", "configs", "save", "budget", "policy", "policy_options", "selection_options"}

    def change(run: dict[str, Any]) -> None:
        entries = run if draw.integers(2) else run["configs"][0]
        name = one_of(draw, sorted(entries.keys() - {"max_tokens"}))
        values = [None, [], -1.5, float("nan"), "x", True, [[1]], {"a": {"b": []}}]
        values = [value for value in values if type(value) is not type(entries[name])]
        choice = int(draw.integers(len(values) + 2))
        if choice < len(values):
            entries[name] = values[choice]
        elif choice == len(values):
            entries["unknown"] = 1
        else:
            del entries[one_of(draw, sorted(entries.keys() & needed))]

    change_run(file, change)


@edit(4)
def deep_run(file: File, draw: Draw) -> None:
    deep: Any = {"choice": "a", "options": {}}
    for _ in range(one_of(draw, [30, 400])):
        deep = {"choice": "a", "options": {"b": deep}}
    change_run(file, lambda run: run["configs"][0].update(policy_options={"pool": deep}))


@edit(6)
def other_configs(file: File, draw: Draw) -> None:
    change_run(file, lambda run: run.update(configs=one_of(draw, [
        run["configs"][::-1], run["configs"][:1], [run["configs"][0]] * len(run["configs"]),
    ])))  # fmt: skip


@edit(6, SUMMED)
def another_run(file: File, draw: Draw) -> None:
    name = one_of(draw, ["model", "seed", "dataset", "max_tokens", "device", "revision"])
    change_run(file, lambda run: run.update({name: 17 if name in ("seed", "max_tokens") else "another"}))


@edit(6)
def other_labels(file: File, draw: Draw) -> None:
    labels = list(file["config"].asstr()[()])
    file["config"][...] = one_of(
        draw, [labels[::-1], labels[:1] * len(labels), ["other", *labels[1:]], ["", *labels[1:]]]
    )


@edit(6)
def other_ids(file: File, draw: Draw) -> None:
    ids, choice = list(file["sample"].asstr()[()]), int(draw.integers(3))
    if choice == 0:
        file["sample"][...] = [ids[0]] * len(ids)
    elif choice == 1:
        file["sample"][0] = b"\xff\xfe\xfd"
    else:
        del file["sample"]
        file.create_dataset("sample", data=np.arange(len(ids))).make_scale("sample")


@edit(8)
def other_coordinate(file: File, draw: Draw) -> None:
    axis = one_of(draw, ["step", "layer", "head"])
    values = file[axis][()]
    file[axis][...] = one_of(draw, [values[::-1], values + 1, values * 0, values - 2**62])


@edit(8)
def longer_axis(file: File, draw: Draw) -> None:
    axis = one_of(draw, AXES)
    text = axis in ("sample", "config")
    values = file[axis].asstr()[()] if text else file[axis][()]
    more = [f"more {number}" for number in range(3)] if text else np.arange(3) + len(values)
    del file[axis]
    data, dtype = np.concatenate([values, more]), h5py.string_dtype() if text else None
    file.create_dataset(axis, data=data, dtype=dtype).make_scale(axis)


@edit(2)
def many_attributes(file: File, draw: Draw) -> None:
    for number in range(2000):
        file["theta"].attrs[f"note {number}"] = number


@edit(8)
def unknown_items(file: File, draw: Draw) -> None:
    """Add what a reader passes over."""
    choice = int(draw.integers(4))
    if choice < 3:
        file[("mine", "mine/deeper/still", "mine")[choice]] = (np.arange(3), np.arange(1), np.dtype("<f8"))[choice]
    else:
        file["theta"].attrs["note"] = "x" * 60_000
