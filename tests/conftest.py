"""Before anything of ours is imported: no hub is asked, and every annotated axis is checked while tests run."""

from __future__ import annotations

import os

from jaxtyping import install_import_hook

os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["TQDM_DISABLE"] = "1"

CHECKED = (
    "theory",
    "norms",
    "scores",
    "selection",
    "policies",
    "ragged",
    "cache",
    "capture",
    "prefill",
    "decoding",
    "measure",
)
install_import_hook([f"perturbkv.{name}" for name in CHECKED], "beartype.beartype")
