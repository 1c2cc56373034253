"""docs/scripts/report_pictures.py takes every picture that docs/how-to/report.md shows."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

from tests.browser.reports import measured

DOCS = Path(__file__).resolve().parents[2] / "docs"


def test_every_picture_of_its_page_is_taken(tmp_path: Path) -> None:
    trace = measured().save(tmp_path / "trace.h5")
    subprocess.run([sys.executable, DOCS / "scripts" / "report_pictures.py", trace, tmp_path], check=True, timeout=120)
    taken = {path.name for path in tmp_path.glob("*.png")}
    assert taken == set(re.findall(r"figures/(report-[\w-]+\.png)", (DOCS / "how-to" / "report.md").read_text()))
    assert all(path.read_bytes()[:8] == b"\x89PNG\r\n\x1a\n" for path in tmp_path.glob("*.png"))
