"""The one check that `pyproject.toml` cannot make: the checkout's links are there."""

import sys
from pathlib import Path

from setuptools import setup

PACKAGE = Path(__file__).parent / "perturbkv"
MISSING = [name for name in ("analyses", "figures", "cli") if not (PACKAGE / name / "__init__.py").is_file()]
if MISSING:
    sys.exit(
        f"error: expected links perturbkv/{{{','.join(MISSING)}}} to the folders beside perturbkv/, got none: this "
        "file system or checkout has no symbolic links; check out where it has (git config core.symlinks true)"
    )
setup()
