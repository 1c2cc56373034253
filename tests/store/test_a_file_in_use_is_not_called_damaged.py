"""A trace file that another program has open, or left marked so, is neither called damaged nor replaced."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from perturbkv.errors import TraceUnavailableError
from perturbkv.storage.run.writer import TraceWriter
from perturbkv.storage.trace.trace_file import read_trace
from tests.support.traces import run_config


def test_a_file_that_is_being_written_is_not_called_damaged(path: Path) -> None:
    holds = "import h5py, sys; f = h5py.File(sys.argv[1], 'r+'); print(1, flush=True); input()"
    held = subprocess.Popen(
        [sys.executable, "-c", holds, path],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    with held:
        assert held.stdout is not None
        held.stdout.readline()
        for read in (read_trace, lambda path: TraceWriter(path, run_config(1), ["s0"], {}, overwrite=True)):
            with pytest.raises(TraceUnavailableError, match="another program has open for writing; close it there"):
                read(path)
        held.communicate("\n")


def test_a_file_whose_writer_was_killed_is_not_called_damaged(path: Path) -> None:
    killed = "import h5py, os, sys; held = h5py.File(sys.argv[1], 'r+'); os._exit(9)"
    subprocess.run([sys.executable, "-c", killed, path], check=False)
    for read in (read_trace, lambda path: TraceWriter(path, run_config(1), ["s0"], {}, overwrite=True)):
        with pytest.raises(TraceUnavailableError, match=f"marked as open for writing; .* 'h5clear -s {path}'"):
            read(path)
