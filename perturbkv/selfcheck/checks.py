"""The result of a check, and the checks of the Triton kernel and of --device-map auto.

The kernel's norms are compared with those of a float64 loop, at every head size and dtype; a model whose layers are
spread over all GPUs with the same model on one device.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from perturbkv.configs.eviction import EvictionConfig
from perturbkv.configs.run import RunConfig
from perturbkv.datasets.encode import Prompt
from perturbkv.models.adapter import Adapter
from perturbkv.models.loading import load_model
from perturbkv.pipeline.sample.one_sample import trace_sample
from perturbkv.scoring.value_norms import projected_value_norms
from perturbkv.selection.resolved_config import ResolvedRun
from perturbkv.trace import SampleTrace


@dataclass(frozen=True)
class Check:
    """A comparison of a measurement with a reference.

    Attributes:
        name: the check's name.
        distance: the largest relative distance; None where it could not be measured.
        bound: the largest allowed distance.
        rule: the bound in words.
        reason: why it was not measured.
        needed: False where the checked feature does not exist on a CPU and another check covers its replacement.
    """

    name: str
    distance: float | None
    bound: float
    rule: str
    reason: str = ""
    needed: bool = True

    @property
    def equal(self) -> bool:
        """True if the distance was measured and is within the bound; False for NaN."""
        return self.distance is not None and self.distance <= self.bound

    def to_dict(self) -> dict[str, Any]:
        """Return the check as a JSON object; a distance that is not finite is text."""
        distance = self.distance
        finite = distance is None or abs(distance) < float("inf")
        return {**asdict(self), "distance": distance if finite else str(distance), "equal": self.equal}


def run_check(name: str, rule: str, work: Callable[[], list[Check]]) -> list[Check]:
    """Return the checks of `work`; if it fails, one of this name and rule with the reason, so that others still run."""
    try:
        return work()
    except Exception as error:  # whatever a driver or kernel raises costs its own check alone
        reason = " ".join(str(error).split()) or type(error).__name__
        return [Check(name, None, 0.0, rule, reason[:200])]


HEAD_SIZES = (64, 80, 96, 128, 256)
BOUNDS = {torch.float32: 1e-5, torch.bfloat16: 1e-3, torch.float16: 1e-3}
SHAPES = {"one entry": (2, 2, 1, 130), "grouped by 3": (6, 2, 35, 130), "multi-query, two tiles": (4, 1, 257, 130)}
"""Query heads, key/value heads, entries, d_model: uneven and crossed tiles; one d_model needs one compilation."""
_RULE = "relative error of every norm; sums are in float32, and half precision's products are exact there"


def check_kernel(device: torch.device) -> list[Check]:
    """Return a check of the Triton kernel's value norms per head size and dtype, by the largest relative error.

    Raises ConfigError where the device does not run the kernel.
    """
    return [
        Check(
            f"Triton norms, {str(dtype).removeprefix('torch.')}, heads of {d_value}",
            max(_worst_error(*shape, d_value, dtype, device) for shape in SHAPES.values()),
            bound,
            _RULE,
        )
        for dtype, bound in BOUNDS.items()
        for d_value in HEAD_SIZES
    ]


def _worst_error(
    heads: int, kv_heads: int, entries: int, d_model: int, d_value: int, dtype: torch.dtype, device: torch.device
) -> float:
    """Return the largest relative error of the Triton kernel's value norms for one shape and dtype."""
    generator = torch.Generator().manual_seed(d_value + entries)
    value = torch.randn(kv_heads, entries, d_value, generator=generator).to(device, dtype)
    w_o = torch.randn(d_model, heads * d_value, generator=generator).to(device, dtype)
    expected = loop_norms(value.double().cpu(), w_o.double().cpu())
    norms = projected_value_norms(value, w_o, kernel="triton").double().cpu()
    return float(((norms - expected).abs() / expected).max())


def loop_norms(value: Tensor, w_o: Tensor) -> Tensor:
    """Return value norms ν (METHOD: Notation), computed head by head: the L1 norm of each row of V times W_O^h."""
    d_value = value.shape[-1]
    heads = w_o.shape[1] // d_value
    slices = [w_o[:, head * d_value : (head + 1) * d_value].T for head in range(heads)]
    group = heads // len(value)
    return torch.stack([(value[head // group] @ part).abs().sum(dim=-1) for head, part in enumerate(slices)])


_VARIABLES = ("theta", "perturbation_isolated", "retained_mass", "hidden_drift_l1", "kept_count")
_PLACEMENT_RULE = "largest difference over the largest value, in float32"


def check_placement(model: str, device: torch.device, tokens: int) -> list[Check]:
    """Return checks of a model spread by `--device-map auto` against the same model on one device."""
    distributed = load_model(model, "float32", device_map="auto")
    plain = load_model(model, "float32", "cpu")  # random weights with a device map are drawn on the CPU too
    single = Adapter(plain.model.to(device), plain.tokenizer, plain.name, plain.revision, True)
    arrays, expected = (_trace_random_prompt(adapter, tokens).arrays for adapter in (distributed, single))
    devices = len({parameter.device for parameter in distributed.model.parameters()})
    distances = {name: relative_distance(arrays[name], expected[name]) for name in _VARIABLES}
    return [
        Check(f"--device-map auto over {devices}: {name}", distance, 1e-4, _PLACEMENT_RULE)
        for name, distance in distances.items()
    ]


def random_prompt(tokens: int) -> Prompt:
    """Return a prompt of random tokens."""
    return Prompt("selfcheck", tuple(np.random.default_rng(0).integers(0, 256, tokens).tolist()), 0)


def _trace_random_prompt(adapter: Adapter, tokens: int) -> SampleTrace:
    """Return the measurements of a prompt of random tokens."""
    configs = tuple(EvictionConfig(tokens // 4, selection=name) for name in ("attention", "two-stage"))
    run = RunConfig(model=adapter.name, dataset="random tokens", configs=configs)
    return trace_sample(adapter, random_prompt(tokens), ResolvedRun.from_run(run))


def relative_distance(measured: np.ndarray, expected: np.ndarray) -> float:
    """Return the largest absolute difference over the largest absolute expected value.

    Infinity if a measured value is not finite.
    """
    first, second = measured.astype(np.float64), expected.astype(np.float64)
    distance = float(np.abs(first - second).max() / max(np.abs(second).max(), np.finfo(np.float64).tiny))
    return distance if np.isfinite(first).all() else float("inf")
