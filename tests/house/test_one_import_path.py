"""The package has one import path: in a checkout, where three folders are links, and installed, where they are not."""

from __future__ import annotations

import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
LINKED = ("analyses", "figures", "cli")
WHERE = "import perturbkv.analyses, perturbkv.figures, perturbkv.cli as cli; print(cli.__file__)"


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder that holds the source distribution and the wheel that is built from it, whatever lies in build/."""
    folder = tmp_path_factory.mktemp("dist")
    command = [sys.executable, "-m", "build", "--no-isolation", "-o", str(folder), str(ROOT)]
    subprocess.run(command, check=True, capture_output=True)
    return folder


def imported_from(folder: Path, *options: str, **environment: str) -> Path:
    """The file that a Python started in the folder imports as `perturbkv.cli`."""
    command = [sys.executable, *options, "-c", WHERE]
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=True)
    return Path(done.stdout.strip())


@pytest.mark.slow
def test_the_wheel_has_one_top_level_name_and_all_its_files(built: Path) -> None:
    (wheel,) = built.glob("*.whl")
    names = zipfile.ZipFile(wheel).namelist()
    assert {name.split("/")[0] for name in names if ".dist-info" not in name} == {"perturbkv"}
    inside = ("page/page.html.j2", "page/page.css", "page/main.js", "vendor/d3.min.js", "vendor/LICENCES.txt")
    own = (
        "py.typed",
        "storage/FORMAT.md",
        "auditing/dumps/FORMAT-DUMP.md",
        "figures/perturbkv.mplstyle",
        "cli/main.py",
        "analyses/__init__.py",
    )
    for wanted in (*own, *(f"reporting/{name}" for name in inside)):
        assert f"perturbkv/{wanted}" in names


def test_the_source_distribution_holds_plain_files(built: Path) -> None:
    (source,) = built.glob("*.tar.gz")
    with tarfile.open(source) as archive:
        members = archive.getmembers()
    assert [member.name for member in members if member.issym() or member.islnk()] == []
    for name in LINKED:
        assert any(member.name.endswith(f"/perturbkv/{name}/__init__.py") and member.isfile() for member in members)


@pytest.mark.slow
def test_wheel_and_source_distribution_are_ready_for_an_index(built: Path) -> None:
    command = [sys.executable, "-m", "twine", "check", "--strict", *map(str, sorted(built.iterdir()))]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout
    assert done.stdout.count("PASSED") == 2


def test_python_started_in_the_checkout_imports_everything_from_it() -> None:
    assert imported_from(ROOT) == ROOT / "perturbkv" / "cli" / "__init__.py"


def test_an_installed_package_is_whole(built: Path, tmp_path: Path) -> None:
    (wheel,) = built.glob("*.whl")
    zipfile.ZipFile(wheel).extractall(tmp_path / "site")
    found = imported_from(tmp_path, "-P", PYTHONPATH=str(tmp_path / "site"))
    assert found == tmp_path / "site" / "perturbkv" / "cli" / "__init__.py"


@pytest.mark.parametrize("left", [None, "../analyses"], ids=["no-file", "a-file-that-names-it"])
def test_a_checkout_without_links_is_refused_in_one_line(tmp_path: Path, left: str | None) -> None:
    shutil.copy(ROOT / "setup.py", tmp_path)
    (tmp_path / "perturbkv").mkdir()
    for name in LINKED[1:]:
        (tmp_path / "perturbkv" / name).mkdir()
        (tmp_path / "perturbkv" / name / "__init__.py").touch()
    if left:
        (tmp_path / "perturbkv" / "analyses").write_text(left)
    done = subprocess.run([sys.executable, "setup.py", "--version"], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 1
    assert done.stderr.count("\n") == 1
    assert "perturbkv/{analyses}" in done.stderr
