"""The command as a shell starts it: an interpreter of its own, with any environment, and streams of any kind."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from tests.attack.running import LIMIT_S, PATIENCE, Outcome

_COMMAND = (sys.executable, "-c", "from perturbkv.cli.main import main; main()")


@dataclass(frozen=True)
class Screen:
    """What a command is started with: variables of its environment, and in a shell's words where its streams go.

    Where there is a pipe, the exit code is that of the command before it.
    """

    environment: Mapping[str, str] = field(default_factory=dict)
    streams: str = ""

    @property
    def encoding(self) -> str:
        """In which it reads what a command writes."""
        return self.environment.get("PYTHONIOENCODING", "").partition(":")[0] or "utf-8"

    def run(self, argv: tuple[str, ...], folder: Path) -> Outcome:
        """The command's outcome; what it leaves in the folder is not looked at."""
        start = time.monotonic()
        script = f'"$@" {self.streams}\nexit ${{PIPESTATUS[0]}}'
        try:
            ran = subprocess.run(
                ["bash", "-c", script, "bash", *_COMMAND, *argv], cwd=folder, capture_output=True, check=False,
                env={**os.environ, "COLUMNS": "80", **self.environment}, timeout=PATIENCE * LIMIT_S,
            )  # fmt: skip
        except subprocess.TimeoutExpired:
            return Outcome(-9, "", "", LIMIT_S, True, ())
        out, err = (stream.decode(self.encoding, errors="replace") for stream in (ran.stdout, ran.stderr))
        return Outcome(ran.returncode, out, err, time.monotonic() - start, False, ())
