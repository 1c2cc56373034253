"""Attributes, the run, and the labels of a trace that say something else."""

from __future__ import annotations

import json
from typing import Any

import h5py
import numpy as np

from tests.attack.trace_parts import any_axis, any_variable
from tests.support.changed import SUMS


def lost_attribute(file: h5py.File, draw: np.random.Generator) -> None:
    item = file[any_variable(file, draw)] if draw.integers(2) else file[any_axis(file, draw)]
    names = [name for name in item.attrs if name != SUMS]
    del item.attrs[names[int(draw.integers(len(names)))]]


def _strange_values() -> list[Any]:
    return [
        7, 2.5, b"\xff\xfe", "", "x" * 100_000, np.arange(5), h5py.Empty("S1"), np.array(["a", "b"], dtype="S1"), True,
        np.zeros(2, dtype=[("a", "i4")]), float("nan"), 2**62, -1,
    ]  # fmt: skip


def strange_attribute(file: h5py.File, draw: np.random.Generator) -> None:
    """An attribute of a variable, a scale or the file that is of another kind."""
    items = [file, file[any_variable(file, draw)], file[any_axis(file, draw)]]
    item = items[int(draw.integers(3))]
    names = [name for name in item.attrs if name != SUMS] if item != file else ["format", "format_version", "run"]
    values = [value for value in _strange_values()]
    name = names[int(draw.integers(len(names)))]
    del item.attrs[name]
    item.attrs[name] = values[int(draw.integers(len(values)))]


def reference_attribute(file: h5py.File, draw: np.random.Generator) -> None:
    """An attribute that refers to the file itself, or to what is no more."""
    item = [file, file[any_variable(file, draw)]][int(draw.integers(2))]
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


def another_model(file: h5py.File, draw: np.random.Generator) -> None:
    run = json.loads(file.attrs["run"])
    name = str(draw.choice(["model", "seed", "dataset", "max_tokens", "device", "revision"]))
    run[name] = 17 if name in ("seed", "max_tokens") else "another"
    file.attrs["run"] = json.dumps(run, sort_keys=True)


def many_attributes(file: h5py.File, draw: np.random.Generator) -> None:
    for place in range(2000):
        file["theta"].attrs[f"note {place}"] = place


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
