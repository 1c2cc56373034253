from __future__ import annotations

import subprocess
import sys
import zipfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def test_the_wheel_has_one_top_level_name_and_all_its_files(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "--no-build-isolation", "-w", str(tmp_path)]
    subprocess.run([*command, str(ROOT)], check=True, capture_output=True)
    (wheel,) = tmp_path.glob("*.whl")
    names = zipfile.ZipFile(wheel).namelist()
    assert {name.split("/")[0] for name in names if ".dist-info" not in name} == {"perturbkv"}
    inside = ("page/page.html.j2", "page/page.css", "page/main.js", "vendor/d3.min.js", "vendor/LICENCES.txt")
    own = ("py.typed", "storage/FORMAT.md", "figures/perturbkv.mplstyle", "cli/main.py", "analyses/heads.py")
    for wanted in (*own, *(f"reporting/{name}" for name in inside)):
        assert f"perturbkv/{wanted}" in names
