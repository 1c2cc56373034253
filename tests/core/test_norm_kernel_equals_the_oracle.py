from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from perturbkv.errors import ConfigError, UnknownNameError
from perturbkv.scoring import value_norms

triton = pytest.importorskip("triton", reason="Triton is for Linux on x86-64")
from perturbkv.scoring.kernels import projected_norms  # noqa: E402
from tests.oracle import theory as naive  # noqa: E402

ROOT = Path(__file__).resolve().parents[2]
CPU, CUDA = torch.device("cpu"), torch.device("cuda")
DEVICE = CPU if os.environ["TRITON_INTERPRET"] == "1" else CUDA  # TRITON_INTERPRET=0: the compiled kernel, on a GPU
TOLERANCES = {torch.bfloat16: 1e-3, torch.float16: 1e-3, torch.float32: 1e-5}
HEAD_SIZES = (64, 80, 96, 128, 256)
SHAPES = {  # query heads, key/value heads, entries, d_model: tiles of both are left uneven and crossed
    "one entry, multi-head": (2, 2, 1, 70),
    "grouped by 3": (6, 2, 7, 33),
    "grouped by 4": (8, 2, 33, 130),
    "multi-query": (4, 1, 129, 64),
    "two tiles": (2, 1, 257, 65),
}
GENERATOR = torch.Generator().manual_seed(0)


def normal(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(*shape, generator=GENERATOR).to(DEVICE, dtype)


def oracle(value: torch.Tensor, w_o: torch.Tensor) -> torch.Tensor:
    """METHOD, Notation: row i of V times W_O^h, its absolute components summed, in float64 from the rounded inputs."""
    d_head = value.shape[-1]
    heads = w_o.shape[1] // d_head
    rows = []
    for head in range(heads):
        w_o_head = w_o[:, head * d_head : (head + 1) * d_head].double().T
        rows.append((value[head // (heads // len(value))].double() @ w_o_head).abs().sum(dim=-1))
    return torch.stack(rows)


def by_kernel(value: torch.Tensor, w_o: torch.Tensor) -> torch.Tensor:
    return value_norms.projected_value_norms(value, w_o, kernel="triton")


def surrounded(tensor: torch.Tensor) -> torch.Tensor:
    """The same numbers as a view into a larger tensor that is NaN everywhere else."""
    around = torch.full([length + 3 for length in tensor.shape], torch.nan, dtype=tensor.dtype, device=tensor.device)
    inside = around[tuple(slice(1, length + 1) for length in tensor.shape)]
    return inside.copy_(tensor)


VIEWS = {
    "surrounded": surrounded,
    "transposed": lambda tensor: tensor.mT.contiguous().mT,
    "every other": lambda tensor: torch.stack([tensor, torch.full_like(tensor, torch.nan)], dim=-1)[..., 0],
    "key before head": lambda tensor: tensor.movedim(0, -2).contiguous().movedim(-2, 0),
}


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
@pytest.mark.parametrize("d_head", HEAD_SIZES)
@pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
def test_the_kernel_equals_the_oracle(dtype: torch.dtype, d_head: int, shape: tuple[int, int, int, int]) -> None:
    heads, kv_heads, keys, d_model = shape
    value, w_o = normal(kv_heads, keys, d_head, dtype=dtype), normal(d_model, heads * d_head, dtype=dtype)
    found = by_kernel(value, w_o)
    assert (found.dtype, found.shape) == (torch.float32, (heads, keys))
    torch.testing.assert_close(found.double(), oracle(value, w_o), rtol=TOLERANCES[dtype], atol=0)


@pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
@pytest.mark.parametrize("view", VIEWS.values(), ids=VIEWS)
def test_views_are_read_as_they_are(view: object, dtype: torch.dtype) -> None:
    assert callable(view)
    value, w_o = normal(2, 35, 80, dtype=dtype), normal(70, 6 * 80, dtype=dtype)
    expected, value, w_o = oracle(value, w_o), view(value), view(w_o)
    assert not value.is_contiguous()
    torch.testing.assert_close(by_kernel(value, w_o).double(), expected, rtol=TOLERANCES[dtype], atol=0)


def test_a_share_of_the_heads_takes_its_columns_alone() -> None:
    value, w_o = normal(3, 20, 64), normal(70, 6 * 64)
    whole, part = by_kernel(value, w_o), by_kernel(value[1:], w_o[:, 2 * 64 :])
    assert torch.equal(part, whole[2:])


def test_heads_smaller_than_a_tensor_cores_step_are_padded() -> None:
    value, w_o = normal(1, 5, 6), normal(10, 12)
    torch.testing.assert_close(by_kernel(value, w_o).double(), oracle(value, w_o), rtol=1e-5, atol=0)


def test_no_entries_have_no_norms() -> None:
    assert by_kernel(normal(2, 0, 64), normal(10, 4 * 64)).shape == (4, 0)


@pytest.mark.parametrize("dtype", [*TOLERANCES, torch.float64], ids=str)
@pytest.mark.parametrize("chunk_bytes", [1, 2**20])
def test_the_chunked_product_equals_the_same_oracle(chunk_bytes: int, dtype: torch.dtype) -> None:
    value, w_o = normal(2, 33, 80, dtype=dtype), normal(70, 6 * 80, dtype=dtype)
    found = value_norms.projected_value_norms(value, w_o, chunk_bytes, "chunked")
    assert found.dtype == torch.promote_types(dtype, torch.float32)
    torch.testing.assert_close(found.double(), oracle(value, w_o), rtol=1e-5, atol=0)


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
@pytest.mark.parametrize("dtype", [*TOLERANCES, torch.float64], ids=str)
@pytest.mark.parametrize("chunk_bytes", [1, 2**20])
def test_euclidean_norms_equal_a_float64_loop(
    chunk_bytes: int, dtype: torch.dtype, shape: tuple[int, int, int, int]
) -> None:
    heads, kv_heads, keys, d_model = shape
    value, w_o = normal(kv_heads, keys, 6, dtype=dtype), normal(d_model, heads * 6, dtype=dtype)
    expected = naive.projected_value_norms(value.double().cpu().numpy(), w_o.double().cpu().numpy(), heads, True)
    found = value_norms.euclidean_value_norms(value, w_o, chunk_bytes)
    assert found.dtype == torch.promote_types(dtype, torch.float32)
    relative = 1e-12 if dtype == torch.float64 else 2**-23
    np.testing.assert_allclose(found.double().cpu().numpy(), expected, rtol=relative)


def test_a_value_that_the_projection_all_but_removes_keeps_its_norm() -> None:
    """The product of weights squares what is small: of a value of length 1 that is projected to 1e-6, 1e-12 is left."""
    w_o = torch.diag(torch.tensor([1.0, 1e-6], dtype=torch.float64))
    found = value_norms.euclidean_value_norms(torch.tensor([[[0.0, 1.0], [0.0, 0.0]]], dtype=torch.float64), w_o)
    assert found[0].tolist() == [pytest.approx(1e-6, rel=1e-9), 0.0]


TRITON, CHUNKED = torch.full((1, 5), -1.0), torch.full((1, 5), -2.0)


@pytest.fixture
def marked(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each path returns its mark, whatever it is given."""
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    monkeypatch.setattr(projected_norms, "projected_value_norms", lambda value, w_o: TRITON)
    monkeypatch.setattr(value_norms, "_chunked_norms", lambda value, w_o, chunk_bytes: CHUNKED)


@pytest.fixture
def anywhere(marked: None, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """CUDA runs the kernel, and tensors are made of a shape and a device alone, so that it needs not be there."""
    monkeypatch.setattr(projected_norms, "triton_unavailable_reason", lambda device: "")
    with FakeTensorMode():
        yield


def layer(device: torch.device, dtype: torch.dtype = torch.float32, d_head: int = 64) -> tuple[torch.Tensor, ...]:
    value = torch.empty(1, 5, d_head, dtype=dtype, device=device)
    return value, torch.empty(10, d_head, dtype=dtype, device=device)


@pytest.mark.usefixtures("marked")
def test_auto_is_chunked_on_the_cpu() -> None:
    value, w_o = layer(CPU)
    assert value_norms.projected_value_norms(value, w_o) is CHUNKED
    assert value_norms.projected_value_norms(value, w_o, kernel="triton") is TRITON


@pytest.mark.usefixtures("anywhere")
@pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
def test_auto_is_triton_on_cuda_where_it_runs(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    value, w_o = layer(CUDA, dtype)
    assert value_norms.projected_value_norms(value, w_o) is TRITON
    assert value_norms.projected_value_norms(value, w_o, kernel="chunked") is CHUNKED
    monkeypatch.setattr(projected_norms, "triton_unavailable_reason", lambda device: "no C compiler")
    assert value_norms.projected_value_norms(value, w_o) is CHUNKED


@pytest.mark.usefixtures("anywhere")
@pytest.mark.parametrize("unsuited", ["float64", "two dtypes", "two devices", "a head of 512"])
def test_what_does_not_suit_the_kernel_is_chunked_by_auto_and_an_error_by_name(unsuited: str) -> None:
    value, w_o = {
        "float64": layer(CUDA, torch.float64),
        "two dtypes": (layer(CUDA, torch.bfloat16)[0], layer(CUDA)[1]),
        "two devices": (layer(CUDA)[0], layer(CPU)[1]),
        "a head of 512": layer(CUDA, d_head=512),
    }[unsuited]
    assert value_norms.projected_value_norms(value, w_o) is CHUNKED
    with pytest.raises(ConfigError, match="expected .* got .*; choose auto or chunked") as caught:
        value_norms.projected_value_norms(value, w_o, kernel="triton")
    assert "\n" not in str(caught.value)


def test_an_unknown_kernel_is_answered_with_the_known_ones() -> None:
    with pytest.raises(UnknownNameError, match="unknown norm kernel 'tritn'; known: triton"):
        value_norms.check_kernel("tritn", CPU)
    with pytest.raises(UnknownNameError):
        value_norms.projected_value_norms(normal(1, 5, 64), normal(10, 64), kernel="tritn")


def test_a_cpu_only_interprets_the_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    value_norms.check_kernel("triton", CPU)
    monkeypatch.delenv("TRITON_INTERPRET")
    value_norms.check_kernel("auto", CPU)
    with pytest.raises(ConfigError, match="got 'cpu': .*TRITON_INTERPRET=1; choose auto or chunked"):
        value_norms.check_kernel("triton", CPU)
    with pytest.raises(ConfigError):
        by_kernel(torch.ones(1, 5, 64), torch.ones(10, 64))


def test_other_devices_and_a_missing_triton_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match="got 'mps': it is written for CUDA"):
        value_norms.check_kernel("triton", torch.device("mps"))
    monkeypatch.setattr(value_norms, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match="got 'cuda': Triton is not installed"):
        value_norms.check_kernel("triton", CUDA)
    for kernel in ("auto", "chunked"):
        value_norms.check_kernel(kernel, CUDA)


def test_what_keeps_the_kernel_from_running_is_told_in_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    tried = projected_norms.triton_unavailable_reason.__wrapped__
    assert tried(DEVICE) == ""

    def fail(value: torch.Tensor, w_o: torch.Tensor) -> torch.Tensor:
        raise RuntimeError("no C compiler\n" + "and more " * 100)

    monkeypatch.setattr(projected_norms, "projected_value_norms", fail)
    monkeypatch.setattr(projected_norms, "triton_unavailable_reason", lambda device: tried(DEVICE))
    with pytest.raises(
        ConfigError, match="got 'cuda': RuntimeError: no C compiler and .*choose auto or chun"
    ) as caught:
        value_norms.check_kernel("triton", CUDA)
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 400


COMPILED = """
import torch
from tests.rehearsal.ahead_of_time import compiled

for capability, most in {90: 227 * 1024, 89: 99 * 1024, 80: 163 * 1024}.items():
    for d_head, dtype in ((128, torch.bfloat16), (256, torch.float16), (96, torch.float32)):
        made = compiled(capability, dtype, d_head)
        assert made.shared <= most, (capability, d_head, made.shared)
        assert made.spilled == 0, (capability, d_head, made.spilled)
        assert made.tensor_cores == (dtype != torch.float32), (capability, d_head, dtype)
"""


def without_interpreter(*arguments: str) -> str:
    environment = os.environ | {"TRITON_INTERPRET": "0", "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-W", "error", *arguments]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.slow
def test_the_kernel_compiles_for_gpus_that_are_not_here() -> None:
    without_interpreter("-c", COMPILED)


@pytest.mark.slow
def test_the_page_has_the_table_of_the_compiled_kernel() -> None:
    page = (ROOT / "docs/explanation/gpu.md").read_text()
    if f"Triton {triton.__version__} for compute" not in " ".join(page.split()):
        pytest.skip("the page's table is another Triton's")
    assert without_interpreter("-m", "tests.rehearsal.ahead_of_time") in page
