from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import h5py
import numpy as np
import pytest
import xarray as xr
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import perturbkv
from perturbkv.errors import TraceError
from perturbkv.schema import FORMAT_VERSION, TEXT, VARIABLES
from perturbkv.schema import KEPT as KEPT_CODES
from perturbkv.storage.run.writer import ExistingTrace, TraceWriter
from perturbkv.storage.trace.trace_file import describe, read_run, read_trace
from perturbkv.trace import FailedSample
from tests.support.changed import changing
from tests.support.traces import KEPT, run_config, sample_trace, write

FORMAT = (Path(perturbkv.__file__).parent / "storage" / "FORMAT.md").read_text()
GOLDEN = Path(__file__).parent / "golden" / "measured-v5.h5"


@pytest.mark.slow
@settings(max_examples=15, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.integers(1, 3), st.integers(1, 3), st.integers(1, 3), st.booleans(), st.integers(0, 99))
def test_what_is_written_is_read(
    tmp_path: Path, steps: int, layers: int, heads: int, optional: bool, seed: int
) -> None:
    path = tmp_path / f"{steps}{layers}{heads}{optional}{seed}.h5"
    shape = {"steps": steps, "layers": layers, "heads": heads, "optional": optional}
    samples = [sample_trace(f"s{i}", seed=seed + i, keys=4 + i, **shape) for i in range(2)]
    path.unlink(missing_ok=True)
    trace = read_trace(write(path, *samples, steps=steps))
    assert trace.sample_ids == ("s0", "s1")
    for place, sample in enumerate(samples):
        for name, array in sample.arrays.items():
            if name.startswith("kept_") or name in TEXT:
                continue
            found = trace.arrays[name][place]
            if "key" in VARIABLES[name].dims:
                assert np.isnan(found[..., array.shape[-1] :]).all()
                found = found[..., : array.shape[-1]]
            np.testing.assert_array_equal(found, array)
            assert VARIABLES[name].dtype == "str" or found.dtype == np.dtype(VARIABLES[name].dtype)
        assert trace.kept(place, 1, layers - 1, 0).tolist() == [1, 2, 3]


def test_xarray_opens_it(tmp_path: Path) -> None:
    sample = sample_trace("first", layers=3, optional=True)
    path = write(tmp_path / "t.h5", sample, FailedSample("second", "it broke"))
    with xr.open_dataset(path, engine="h5netcdf") as data:
        assert data["theta"].dims == ("sample", "config", "step", "layer", "head")
        assert data["theta"].attrs["units"] == "L1"
        assert data["theta"].attrs["long_name"] == VARIABLES["theta"].long_name
        assert data["sample"].values.tolist() == ["first", "second"]
        assert data["config"].values.tolist() == run_config().labels()
        np.testing.assert_array_equal(data["theta"].sel(sample="first"), sample.arrays["theta"])
        assert np.isnan(data["theta"].sel(sample="second")).all()
        assert data["complete"].values.tolist() == [1, 0]
        assert data["failure"].values.tolist() == ["", "it broke"]
        assert data.attrs["format"] == "perturbkv-trace"


def test_every_variable_has_scales_units_and_a_name(tmp_path: Path) -> None:
    path = write(tmp_path / "t.h5", sample_trace(optional=True))
    with h5py.File(path) as file:
        for name, variable in file.items():
            assert variable.attrs["units"], name
            assert variable.attrs["long_name"], name
            if name in VARIABLES:
                axes = [dim[0].name.lstrip("/") for dim in variable.dims]
                dims = VARIABLES[name].dims
                in_rows = dims in (("kept_byte",), ("prompt_entry",))
                assert axes == (list(dims) if in_rows else ["sample", *dims])


def test_bytes_of_codes_are_counted_by_a_dimension_that_takes_no_bytes(tmp_path: Path) -> None:
    small, large = (
        write(tmp_path / f"{heads}.h5", sample_trace(heads=heads), sample_trace("other", heads=heads))
        for heads in (1000, 2000)
    )
    with h5py.File(small) as file, h5py.File(large) as other:
        assert file["kept_code"].dims[0][0].name == "/kept_byte"
        assert file["kept_byte"].shape == file["kept_code"].shape == (2 * 2 * 2 * 1000 * KEPT,)
        assert file["kept_byte"].id.get_storage_size() == other["kept_byte"].id.get_storage_size() == 0
    with xr.open_dataset(small, engine="h5netcdf") as data:
        assert data["kept_code"].dims == ("kept_byte",)
        assert "kept_byte" not in data.variables
        assert data["kept_code"].isel(kept_byte=slice(0, KEPT)).values.tolist() == [0, *[1] * (KEPT - 1)]  # gaps


def test_of_variables_along_one_axis_codes_alone_are_deflated(tmp_path: Path) -> None:
    """A number for each sample is too little to gain by it."""
    with h5py.File(write(tmp_path / "t.h5", sample_trace(optional=True))) as file:
        flat = {name for name in VARIABLES if name in file and file[name].ndim == 1 and file[name].dtype.kind != "O"}
        assert {name for name in flat if file[name].compression} == {"kept_code"}
        assert len(flat) > 3


def test_describe_tells_what_is_there_without_reading_it(tmp_path: Path) -> None:
    found = describe(write(tmp_path / "t.h5", sample_trace("a"), FailedSample("b", "broke")))
    assert found.failures == {"b": "broke"}
    assert found.variables["theta"].shape == (2, 2, 1, 2, 2)
    assert found.variables["theta"].nbytes == 2 * 2 * 2 * 2 * 8
    assert found.attrs["model"] == "m"


def test_format_md_and_the_code_name_the_same_variables() -> None:
    rows = re.findall(r"^\| `(\w+)` \| ([\w ]+) \| (\w+) \| (\S+) \| (.+?) \| (MUST|MAY) \|$", FORMAT, re.MULTILINE)
    told = {name: (axes, kind, unit, meaning, must == "MAY") for name, axes, kind, unit, meaning, must in rows}
    real = {}
    for name, spec in VARIABLES.items():
        axes = spec.dims if spec.dims in (("kept_byte",), ("prompt_entry",)) else ("sample", *spec.dims)
        real[name] = (" ".join(axes), spec.dtype, spec.units, spec.long_name, spec.optional)
    assert told == real
    assert f"format version {FORMAT_VERSION}" in FORMAT


def spoil_half(path: Path) -> None:
    content = path.read_bytes()
    path.write_bytes(content[: len(content) // 2])


def spoil_version(path: Path) -> None:
    with h5py.File(path, "r+") as file:
        file.attrs["format_version"] = FORMAT_VERSION + 1


def spoil_format(path: Path) -> None:
    with h5py.File(path, "r+") as file:
        file.attrs["format"] = "other"


@pytest.mark.parametrize(
    ("spoil", "words"),
    [
        (spoil_half, "truncated"),
        (lambda path: path.write_text("no trace at all"), "no HDF5"),
        (lambda path: path.write_bytes(b""), "no HDF5"),
        (spoil_version, f"got format {FORMAT_VERSION + 1}"),
        (spoil_format, "another HDF5 file"),
        (lambda path: path.unlink(), "got nothing"),
    ],
)
def test_a_file_that_is_no_trace_is_told_in_one_line(tmp_path: Path, spoil, words: str) -> None:  # type: ignore[no-untyped-def]
    path = write(tmp_path / "t.h5", sample_trace())
    spoil(path)
    with pytest.raises(TraceError, match=words) as told:
        read_trace(path)
    assert "\n" not in str(told.value)


def test_a_missing_variable_is_told_by_who_needs_it(tmp_path: Path) -> None:
    path = write(tmp_path / "t.h5", sample_trace())
    with changing(path) as file:
        del file["theta"]
    trace = read_trace(path)
    with pytest.raises(TraceError, match=r"heads needs the variable 'theta', which .*t\.h5 lacks; .* perturbkv trace"):
        trace.get("theta", "heads")


@pytest.mark.parametrize("version", range(1, FORMAT_VERSION))
@pytest.mark.parametrize("read", [read_trace, describe, read_run, ExistingTrace])
def test_a_trace_of_a_version_that_is_no_longer_read_says_so_and_what_to_do(
    tmp_path: Path, read: Callable[[Path], object], version: int
) -> None:
    path = write(tmp_path / "t.h5", sample_trace())
    with h5py.File(path, "r+") as file:
        file.attrs["format_version"], file.attrs["run"] = version, "what an earlier format had there"
    with pytest.raises(
        TraceError, match=f"expected a trace of format {FORMAT_VERSION} at .*, got format {version}; measure it again"
    ) as told:
        read(path)
    assert "\n" not in str(told.value)


def test_a_trace_of_a_version_that_is_no_longer_read_is_replaced_where_that_is_asked_for(tmp_path: Path) -> None:
    path = write(tmp_path / "t.h5", sample_trace())
    with h5py.File(path, "r+") as file:
        file.attrs["format_version"] = 3
    with pytest.raises(TraceError, match="got format 3; measure it again: .* with --overwrite"):
        TraceWriter(path, run_config(1), ["s0"], {})
    writer = TraceWriter(path, run_config(1), ["s0"], {}, overwrite=True)
    writer.append(sample_trace())
    assert read_trace(writer.finish()).sample_ids == ("s0",)


def test_the_golden_file_of_version_5_is_read_for_ever() -> None:
    trace = read_trace(GOLDEN)
    assert trace.attrs["format_version"] == "5"
    assert trace.run.labels()[:3] == [
        "snapkv:two-stage b=10 w=4 query", "adakv:two-stage b=10 w=4 query", "snapkv:two-stage b=10 w=4 kv",
    ]  # fmt: skip
    assert trace.arrays["prompt_tokens"].tolist() == [48, 301, 0]
    masks, gaps = trace.arrays["kept_length"][:2, 4].reshape(2, -1), trace.arrays["kept_length"][1, 0]
    assert (masks == [[6], [38]]).all()
    assert (gaps < 38).all()
    assert trace.kept(0, 0, 0, 0).tolist() == [4, 5, 15, 21, 24, 28, 44, 45, 46, 47]
    assert trace.kept(1, 2, 1, 3).tolist() == [20, 27, 55, 119, 178, 181, 297, 298, 299, 300]
    assert trace.kept(1, 4, 0, 0).tolist()[:12] == [0, 2, 3, 4, 7, 11, 12, 13, 14, 15, 16, 17]
    np.testing.assert_allclose(trace.arrays["theta"][0, :2, 0, 0, 0], [33.3663547, 30.58813818], rtol=1e-7)
    with xr.open_dataset(GOLDEN, engine="h5netcdf") as data:
        assert data["kept_code"].dims == ("kept_byte",)


def test_large_variables_are_read_when_they_are_asked_for(tmp_path: Path) -> None:
    path = write(tmp_path / "t.h5", sample_trace())
    trace, replaced = read_trace(path), read_trace(path)
    assert "kept_code" in trace.arrays
    assert set(trace.arrays) == {name for name, one in VARIABLES.items() if not one.optional or name in KEPT_CODES}
    assert trace.kept(0, 0, 0, 0).tolist() == [0, 1, 2]
    path.unlink()
    write(path, sample_trace(layers=3))
    assert trace.kept(0, 0, 0, 0).tolist() == [0, 1, 2]  # read before
    assert replaced.arrays["theta"].shape == (1, 2, 1, 2, 2)  # small: read at once
    with pytest.raises(TraceError, match="got one written since; open it again"):
        replaced.kept(0, 0, 0, 0)
