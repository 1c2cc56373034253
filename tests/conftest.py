"""Before anything of ours is imported: no hub is asked, and every annotated axis is checked while tests run."""

from __future__ import annotations

import os
from functools import cache

import typer.main
from jaxtyping import install_import_hook

os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["TQDM_DISABLE"] = "1"
os.environ.setdefault("TRITON_INTERPRET", "1")  # before a kernel is decorated; with 0 kernels are compiled for a GPU

os.fsync = lambda descriptor: None  # what a test leaves need not survive a power cut
typer.main.get_command = cache(typer.main.get_command)  # all options of all commands: made once, not for every command

CHECKED = (  # not kernels: Triton compiles a function's source in its module's names, which a checking wrapper hides
    "theory",
    "scoring.value_norms",
    "scoring.window_attention",
    "selection",
    "cache",
    "pipeline.sample",
    "pipeline.variants.presses",
    "pipeline.answers.generation",
    "pipeline.answers.recompression",
    "pipeline.answers.answer_heads",
)
install_import_hook([f"perturbkv.{name}" for name in CHECKED], "beartype.beartype")

from perturbkv.cli import run_time  # noqa: E402

run_time._PROBE_S = 0.0  # a run's time is estimated from a single product of matrices
