"""What belongs to an installation is found as Python finds it; a crash names the last line of the user's own code."""

from __future__ import annotations

import importlib
from pathlib import Path

import pytest
import torch

from perturbkv.configs import plugins
from perturbkv.configs.plugins import external_code, is_library_file
from perturbkv.errors import PluginError

FAILS = "def fail():\n    raise ValueError('no room')\n"


@pytest.fixture(autouse=True)
def _forget() -> None:
    plugins._installed_names.cache_clear()


def _install(site: Path, name: str, *, listed: bool = True, code: str = FAILS, source: Path | None = None) -> Path:
    """Return the file of a package `name` in `source`, by default `site`, whose metadata is in `site`."""
    package = (source or site) / name
    package.mkdir(parents=True)
    (package / "__init__.py").write_text(code)
    info = site / f"{name}-1.0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name.replace('_', '-')}\nVersion: 1.0\n")
    (info / "RECORD").write_text(f"{name}/__init__.py,,\n" if listed else f"_editable_{name}.pth,,\n")
    return package / "__init__.py"


def test_a_package_that_a_path_names_is_installed(tmp_path, monkeypatch):
    file = _install(tmp_path, "perturbkv_named_by_path")
    monkeypatch.syspath_prepend(tmp_path)
    importlib.import_module("perturbkv_named_by_path")
    assert is_library_file(file)
    assert is_library_file(Path(torch.__file__)) and is_library_file(Path(plugins.__file__))


def test_a_package_that_is_installed_editably_is_installed(tmp_path, monkeypatch):
    site, checkout = tmp_path / "site", tmp_path / "checkout"
    file = _install(site, "perturbkv_editable", listed=False, source=checkout)
    monkeypatch.syspath_prepend(site)
    monkeypatch.syspath_prepend(checkout)
    importlib.import_module("perturbkv_editable")
    assert is_library_file(file)
    assert not is_library_file(checkout / "my_cache.py")


def test_a_file_on_the_path_without_metadata_is_the_user_s(tmp_path, monkeypatch):
    (tmp_path / "perturbkv_helper.py").write_text(FAILS)
    monkeypatch.syspath_prepend(tmp_path)
    importlib.import_module("perturbkv_helper")
    assert not is_library_file(tmp_path / "perturbkv_helper.py")


def test_a_crash_inside_a_package_names_the_user_s_last_line_and_the_package_s(tmp_path, monkeypatch):
    _install(tmp_path / "site", "perturbkv_that_fails")
    monkeypatch.syspath_prepend(tmp_path / "site")
    (tmp_path / "mine.py").write_text("import perturbkv_that_fails\n\ndef run():\n    perturbkv_that_fails.fail()\n")
    module = plugins.load_module(tmp_path / "mine.py")
    named = r"it raises ValueError: no room \(mine\.py, line 4; in perturbkv_that_fails/__init__\.py, line 2\)"
    with pytest.raises(PluginError, match=named), external_code("it raises"):
        module.run()


def test_a_crash_inside_a_framework_names_the_user_s_line_alone(tmp_path):
    (tmp_path / "mine.py").write_text("import torch\n\ndef run():\n    torch.nn.Linear(2, 3)(torch.ones(5))\n")
    module = plugins.load_module(tmp_path / "mine.py")
    with pytest.raises(PluginError, match=r"\(mine\.py, line 4\)$"), external_code("it raises"):
        module.run()


def test_frozen_modules_are_no_user_s():
    with pytest.raises(PluginError, match=rf"\({Path(__file__).name}, line \d+\)"), external_code("it raises"):
        importlib.import_module("no_such_module_here")
