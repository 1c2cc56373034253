"""What a host waits for and how many kernels it starts on a GPU that is not there; planted faults are seen."""

from __future__ import annotations

import functools
from typing import Any
from unittest import mock

import pytest
import torch

import perturbkv as pk
from perturbkv.configs.resources import CHUNK_BYTES, Resources
from perturbkv.pipeline.answers import compression
from perturbkv.selection.policies import adakv
from tests.rehearsal.models import WITH_COMPILER, counted, rehearsal
from tests.rehearsal.pretend_gpu import Rehearsal
from tests.rehearsal.test_samples_on_gpus_that_are_not_there import PROMPT, TWO, answered, traced
from tests.support.resolved import resolved_run, trace_sample

pytestmark = WITH_COMPILER
MANY = pk.grid(
    (20, 24, 28, 32), policy=("snapkv", "adakv", "pyramidkv"), selection=("attention", "two-stage"), window=8
)
COPIES = "pipeline/sample/measure.py"
"""Where finished numbers come to the host, an array at a time, after all work of a sample."""
MOST_WAITS = {"pipeline/sample/prefill.py": 1, "pipeline/sample/capture.py": 2, "cache/entries.py": 1,
              "pipeline/sample/assembly.py": 1}  # fmt: skip
"""File -> waits of a sample: its tokens go there, activations are finite, lengths of caches, decoded tokens."""
MOST_LAUNCHES = {"two": 790, "many": 1830}
"""Configurations -> kernels of a layer: 770 and 1,783 of TWO and of MANY when this was written."""


@functools.cache
def of_sample(layers: int, which: str, dtype: torch.dtype = torch.float32, chunk_bytes: int = CHUNK_BYTES) -> Rehearsal:
    run = resolved_run(TWO if which == "two" else MANY)
    return counted(lambda model: trace_sample(model, PROMPT, run, Resources(chunk_bytes=chunk_bytes)), layers, dtype)


def waits(layers: int, which: str) -> dict[str, int]:
    """File -> waits, without those of `COPIES`."""
    found: dict[str, int] = {}
    for place, count in of_sample(layers, which).waits.items():
        file = place.partition(":")[0]
        found[file] = found.get(file, 0) + count
    found.pop(COPIES)
    return found


@pytest.mark.slow
@pytest.mark.parametrize("which", ["two", "many"])
@pytest.mark.parametrize("layers", [1, 3])
def test_no_layer_and_no_configuration_is_waited_for(layers: int, which: str) -> None:
    assert waits(layers, which) == MOST_WAITS


def grown(**choices: Any) -> tuple[list[pk.EvictionConfig], list[pk.EvictionConfig]]:
    """One configuration, and five of its kind."""
    one = pk.grid(48, window=8, **{"selection": "attention", **choices})
    return one, [*one, *pk.grid((40, 44, 52, 56), window=8, **{"selection": "attention", **choices})]


KINDS: dict[str, dict[str, Any]] = {
    **{name: {"policy": name} for name in ("adakv", "defensive-layer", "h2o", "kvzip", "lava", "quest", "dropkv")},
    "in few bits": {"precision": "quantise(bits=4)"},
    "in formats by layer": {"precision": "keys=rotated-3, values=fp8; layers 0: keys=fp8-tensor, values=4-channel"},
    "corrected": {"correction": "corrected"},
    "in-cache": {"policy": "adakv(positions=in-cache)"},
    "random": {"policy": "random", "selection": "random"},
    "shared by layers": {"granularity": "head", "selection": "two-stage"},
    "united": {"granularity": "model(reduce=union)", "selection": "two-stage"},
}


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_no_kind_of_eviction_waits_for_a_layer_or_a_configuration(kind: str) -> None:
    one, five = grown(**KINDS[kind])
    alone, deep, many = (
        counted(traced(configs, steps=2), layers) for configs, layers in ((one, 1), (one, 3), (five, 1))
    )
    assert deep.waits == alone.waits
    more = many.waits - alone.waits
    assert more.total() <= 4, more  # as groups of kept sets and batches are more
    assert all(place.startswith(COPIES) for place in more), more


@pytest.mark.slow
def test_a_compression_while_decoding_waits_for_a_row_and_for_what_it_measured() -> None:
    one, five = grown(policy="adakv")

    def compressed(configs: list[pk.EvictionConfig], layers: int) -> tuple[int, int]:
        counts = counted(answered(configs, 9, compress_over=4), layers)
        return sum(n for place, n in counts.waits.items() if "compression.py" in place), len(configs)

    with mock.patch.object(
        compression.Compressor, "compress", autospec=True, side_effect=compression.Compressor.compress
    ) as event:
        for configs, layers in ((one, 1), (one, 3), (five, 3)):
            event.reset_mock()
            waits_, rows = compressed(configs, layers)
            assert 0 < waits_ <= event.call_count * (rows + 1)


@pytest.mark.slow
def test_caches_in_sixteen_bits_and_small_blocks_wait_for_no_more() -> None:
    plain = of_sample(1, "two").waits
    assert of_sample(3, "two", torch.bfloat16).waits == plain
    assert of_sample(1, "two", chunk_bytes=2**12).waits == plain
    assert of_sample(1, "two", chunk_bytes=2**12).launches.total() > of_sample(1, "two").launches.total()


def test_finished_numbers_come_an_array_at_a_time() -> None:
    def copies(layers: int, which: str) -> int:
        return sum(count for place, count in of_sample(layers, which).waits.items() if place.startswith(COPIES))

    assert copies(1, "two") == copies(3, "two")
    assert max(copies(layers, which) for layers in (1, 3) for which in ("two", "many")) < 60


@pytest.mark.parametrize("which", ["two", "many"])
def test_the_kernels_of_a_layer_are_bounded(which: str) -> None:
    of_layer = (of_sample(3, which).launches.total() - of_sample(1, which).launches.total()) / 2
    assert of_layer <= MOST_LAUNCHES[which]


def sample(change: Any) -> Rehearsal:
    """Counts of a sample in which adakv's budgets go through `change`."""
    plain = adakv.AdaKV.allocate
    with mock.patch.object(adakv.AdaKV, "allocate", lambda *args: change(plain(*args))):
        return counted(lambda model: trace_sample(model, PROMPT, resolved_run(TWO)))


@pytest.mark.slow
def test_a_planted_read_is_counted_at_its_line() -> None:
    extra = sample(lambda counts: counts + 0 * int(counts.sum().item())).waits - sample(lambda counts: counts).waits
    assert any(place.endswith("aten._local_scalar_dense.default") for place in extra)


@pytest.mark.parametrize(
    ("change", "error", "words"),
    [
        (lambda counts: counts[torch.zeros(2, dtype=torch.int64)] + torch.ones(2).long(), RuntimeError, "one device"),
        (lambda counts: counts + torch.tensor(counts.numpy()), TypeError, "Use Tensor.cpu()"),
        (lambda counts: counts.gather(0, torch.zeros(2, dtype=torch.int64)), RuntimeError, "one device"),
    ],
    ids=["an operand", "numpy", "an index"],
)
def test_a_planted_mixture_of_devices_is_refused(change: Any, error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        sample(change)


def test_what_cuda_refuses_is_refused() -> None:
    with rehearsal(2):
        first, second = torch.ones(2, device="cuda:0"), torch.ones(2, device="cuda:1")
        with pytest.raises(RuntimeError, match="one device"):
            first + second
        with pytest.raises(RuntimeError, match="one device"):
            torch.rand(2, device="cuda:0", generator=torch.Generator())
        with pytest.raises(RuntimeError, match="one device"):
            torch.cat([first, second])
        assert (first + second.to("cuda:0")).tolist() == [2, 2]
        assert float(first.sum() + torch.tensor(1.0)) == 3  # a number of the CPU may come along
        with pytest.raises(RuntimeError, match="nobody waits for"):
            first.to("cpu", non_blocking=True)
