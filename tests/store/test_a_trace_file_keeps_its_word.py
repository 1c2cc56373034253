from __future__ import annotations

import re
import shutil
from pathlib import Path

import h5py
import numpy as np
import pytest
import xarray as xr
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import perturbkv
from perturbkv.errors import TraceError
from perturbkv.schema import KEPT as KEPT_CODES
from perturbkv.schema import TEXT, VARIABLES
from perturbkv.storage.layout import FORMAT_VERSION
from perturbkv.storage.trace_file import describe, read_trace
from perturbkv.storage.writer import TraceWriter
from perturbkv.trace import FailedSample
from tests.support.changed import changing
from tests.support.traces import KEPT, run_config, sample_trace, write

FORMAT = (Path(perturbkv.__file__).parent / "storage" / "FORMAT.md").read_text()
GOLDEN = Path(__file__).parent / "golden" / "trace-v1.h5"
GOLDEN_2 = GOLDEN.with_name("measured-v2.h5")
GOLDEN_3 = GOLDEN.with_name("measured-v3.h5")
GOLDEN_4 = GOLDEN.with_name("measured-v4.h5")


GOLDEN_THETA = [40.52332799, 34.65600929, 39.2767747, 39.47052015, 31.53859482, 22.91896914, 23.67227235]


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
            if name == "attention_full":
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
        (spoil_version, "got format 5"),
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


def test_the_golden_file_of_version_1_is_read_for_ever() -> None:
    trace = read_trace(GOLDEN)
    assert trace.sample_ids == ("first", "second", "broken")
    assert trace.failures == {"broken": "planted failure"}
    assert trace.run.labels() == [f"snapkv:{name} b=64 w=32 query" for name in ("attention", "two-stage")]
    assert trace.arrays["theta"].shape == (3, 2, 1, 2, 2)
    np.testing.assert_array_equal(trace.arrays["theta"][0, 1, 0], [[104, 105], [106, 107]])
    np.testing.assert_array_equal(trace.arrays["theta"][1, 1, 0], [[1104, 1105], [1106, 1107]])
    assert np.isnan(trace.arrays["theta"][2]).all()
    assert trace.arrays["prompt_tokens"].tolist() == [70, 71, 0]
    assert trace.kept(1, 0, 1, 1).tolist() == [0, 1, 2]
    assert trace.ok.tolist() == [True, True, False]
    with xr.open_dataset(GOLDEN, engine="h5netcdf") as data:
        assert float(data["theta"].sel(sample="second", step=0, layer=1, head=0)[1]) == 1106
    with h5py.File(GOLDEN) as file:
        assert file["complete"][()].tolist() == [1, 1, 0]
        assert file["theta"].dims[3][0].name == "/layer"


def test_the_golden_file_of_version_2_is_read_for_ever() -> None:
    trace = read_trace(GOLDEN_2)
    assert trace.sample_ids == ("ends", "goes-on", "broken")
    assert trace.failures == {"broken": "planted failure"}
    assert trace.attrs["format_version"] == "2"
    assert trace.run.labels() == [
        "snapkv:attention b=16 w=8 kv",
        "snapkv:two-stage b=16 w=8 query",
    ]
    assert trace.arrays["token_id"].tolist() == [[54, 226, -1, -1], [174, 249, 208, 151], [0] * 4]
    assert trace.arrays["steps_measured"].tolist() == [2, 4, 0]
    assert trace.measured.tolist() == [[True, True, False, False], [True] * 4, [False] * 4]
    np.testing.assert_allclose(trace.arrays["held_share"][:2], [[1 / 3, 2 / 3]] * 2)
    for name, variable in VARIABLES.items():
        if name in trace.arrays and "step" in variable.dims and variable.dtype == "float64":
            steps = np.moveaxis(trace.arrays[name], 1 + variable.dims.index("step"), 1)
            told = np.isfinite(steps).reshape(*trace.measured.shape, -1)
            assert (told == trace.measured[..., np.newaxis]).all(), name
    cosine = trace.arrays["perturbation_propagated_cosine"]
    np.testing.assert_allclose(cosine[0, 0, 1, 0], [0.4909954088546, 0.1381714663649, 0.0678412376854, 0.0236704429297])
    floors = [trace.arrays[name][:2] for name in VARIABLES if "noise_floor" in name]
    assert len(floors) == 13
    assert all(np.nanmin(floor) > 0 for floor in floors)
    assert np.nanmin(trace.arrays["noise_floor_cosine"]) == 2.0**-47
    assert np.nanmin(trace.arrays["logit_kl_noise_floor"]) == 2.0**-23
    assert trace.kept(0, 0, 0, 0).tolist() == [11, *range(22, 29), *range(40, 48)]
    assert trace.same_kept(0, 1).shape == (2, 2, 4)
    with xr.open_dataset(GOLDEN_2, engine="h5netcdf") as data:
        assert int(data["steps_measured"].sel(sample="ends")) == 2
        assert data["perturbation_isolated_l2"].attrs["units"] == "L2"


def test_the_golden_file_of_version_3_is_read_for_ever() -> None:
    trace = read_trace(GOLDEN_3)
    assert trace.attrs["format_version"] == "3"
    assert trace.run.labels() == [
        "snapkv(pool=average, kernel=5):attention b=16 w=8 query",
        "snapkv(pool=average, kernel=5):two-stage b=16 w=8 query",
        "adakv(floor=0.5):attention b=16 w=8 query",
        "adakv(floor=0.5):two-stage b=16 w=8 query",
        "snapkv:two-stage(alpha=0.5) b=16 w=8 kv(product=mean-of-products)",
        "snapkv:random(seed=3) b=0.5 w=8 query",
        "streaming-llm(sinks=2, positions=in-cache):position b=0.5 w=8 query",
    ]
    first, *_, drawn, streaming = trace.run.configs
    assert first.selection["alpha"] == 0.25, "what nobody said is stored too"
    assert dict(drawn.policy.options) == {}, "nothing pools what is drawn"
    assert dict(streaming.policy.options) == {"sinks": 2, "positions": "in-cache"}
    assert trace.kept(0, 6, 0, 0).tolist() == [0, 1, *range(26, 48)]
    assert trace.arrays["token_id"].tolist() == [[54], [174], [0]]
    np.testing.assert_allclose(trace.arrays["theta"][0, :, 0, 0, 0], GOLDEN_THETA, rtol=1e-7)


def test_the_golden_file_of_version_4_is_read_for_ever() -> None:
    trace = read_trace(GOLDEN_4)
    assert trace.attrs["format_version"] == "4"
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
    with xr.open_dataset(GOLDEN_4, engine="h5netcdf") as data:
        assert data["kept_code"].dims == ("kept_byte",)


def test_a_trace_of_version_1_that_is_extended_tells_which_of_its_samples_are_older(tmp_path: Path) -> None:
    path = Path(shutil.copy(GOLDEN, tmp_path / "grown.h5"))
    names = ["first", "second", "broken", "third"]
    writer = TraceWriter(path, run_config(4), names, {"model": "m"})
    assert set(writer.missing()) == {"broken", "third"}
    for name in writer.missing():
        writer.append(sample_trace(name, optional=True))
    trace, old = read_trace(writer.finish()), read_trace(GOLDEN)
    assert trace.attrs["format_version"] == str(FORMAT_VERSION)
    assert trace.arrays["steps_measured"].tolist() == [1, 1, 1, 1]
    assert trace.measured.tolist() == [[True]] * 4
    for name in old.arrays:
        if not name.startswith("kept_"):
            np.testing.assert_array_equal(trace.arrays[name][:2], old.arrays[name][:2])
    assert np.isnan(trace.arrays["noise_floor_l2"][:2]).all()
    assert np.isfinite(trace.arrays["noise_floor_l2"][2:]).all()


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
