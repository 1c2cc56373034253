"""Prints the table of the Triton kernel in docs/explanation/gpu.md: `python -m tests.rehearsal.ahead_of_time`.

Triton compiles the kernel for GPUs that are not there, with the tile and the arguments of a launch. Registers and
spills are read from the log of ptxas, NVIDIA's assembler, which comes with Triton.
"""

from __future__ import annotations

import contextlib
import io
import os
import re
import sys
import tempfile
from importlib.util import find_spec
from typing import Any, NamedTuple
from unittest import mock

import torch

MODELS = {64: (2048, 32, 8), 96: (3072, 32, 32), 128: (4096, 32, 8), 256: (3584, 16, 8)}
"""Head size -> d_model, query heads, key/value heads: Llama 3.2 1B, Phi-3 mini, Llama 3.1 8B, Gemma 2 9B."""
DTYPES = (torch.bfloat16, torch.float16, torch.float32)
SHARED = {80: 164 * 1024, 90: 228 * 1024}
"""Compute capability -> bytes of shared memory of a multiprocessor, by the CUDA programming guide's table."""
_REGISTERS = 65_536
_RESERVED = 1024  # bytes of shared memory that CUDA takes for each program


class Compiled(NamedTuple):
    """What a program of the compiled kernel takes: registers a thread, bytes spilled and shared; and its assembly."""

    registers: int
    spilled: int
    shared: int
    warps: int
    ptx: str

    @property
    def tensor_cores(self) -> bool:
        """Whether tensor cores multiply."""
        return "wgmma" in self.ptx or "mma.sync" in self.ptx

    def programs(self, capability: int) -> int:
        """How many programs a multiprocessor has room for; a thread gets registers in eights."""
        by_registers = _REGISTERS // (-(-self.registers // 8) * 8 * self.warps * 32)
        return min(by_registers, SHARED[capability] // (self.shared + _RESERVED))


class _Driver:
    """A driver of a GPU that is not there, which says what Triton compiles for."""

    def __init__(self, capability: int) -> None:
        self.capability = capability

    def get_current_device(self) -> int:
        return self.capability

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_current_target(self) -> Any:
        from triton.backends.compiler import GPUTarget

        return GPUTarget("cuda", self.capability, 32)


def compiled(capability: int, dtype: torch.dtype, d_head: int) -> Compiled:
    """Compile what is launched on a GPU of a compute capability, once a process; no kernel runs in it afterwards."""
    from triton import knobs
    from triton.runtime import driver

    from perturbkv.scoring.kernels import projected_norms

    d_model, heads, kv_heads = MODELS[d_head]
    value, w_o = torch.empty(kv_heads, 1024, d_head, dtype=dtype), torch.empty(d_model, heads * d_head, dtype=dtype)
    kernel, made = projected_norms._project_and_sum, []
    run = kernel.run

    def compile_only(*given: Any, **options: Any) -> None:
        made.append(run(*given, **options | {"warmup": True}))

    driver.set_active(_Driver(capability))
    with (
        tempfile.TemporaryDirectory() as folder,
        mock.patch.object(knobs.cache, "dir", folder),
        mock.patch.object(knobs.nvidia, "dump_ptxas_log", True),
        mock.patch.object(kernel, "run", compile_only),
        contextlib.redirect_stdout(io.StringIO()) as log,
    ):
        projected_norms.projected_value_norms(value, w_o)
    (found,) = made
    registers, spilled = (
        int(re.findall(words, log.getvalue())[0]) for words in (r"Used (\d+) registers", r"(\d+) bytes spill stores")
    )
    return Compiled(registers, spilled, found.metadata.shared, found.metadata.num_warps, found.asm["ptx"])


def main() -> None:
    """Print the table, each cell for every compute capability."""
    if find_spec("triton") is None:
        sys.exit("the kernel is compiled by Triton, which is not installed: pip install 'triton>=3.6'")
    os.environ["TRITON_INTERPRET"] = "0"
    lines = ["| dtype | head size | registers a thread | bytes spilled | shared memory, KiB | programs at once |"]
    lines.append("|---" * 6 + "|")
    for dtype in DTYPES:
        for d_head in MODELS:
            made = {capability: compiled(capability, dtype, d_head) for capability in SHARED}
            columns = (
                [one.registers for one in made.values()],
                [one.spilled for one in made.values()],
                [one.shared // 1024 for one in made.values()],
                [one.programs(capability) for capability, one in made.items()],
            )
            cells = (str(dtype).removeprefix("torch."), str(d_head), *(" / ".join(map(str, one)) for one in columns))
            lines.append("| " + " | ".join(cells) + " |")
    sys.stdout.write("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
