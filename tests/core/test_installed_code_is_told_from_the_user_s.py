"""Python and its site packages are libraries; a crash names the last line of the user's own code."""

from __future__ import annotations

import importlib
from pathlib import Path

import pytest
import torch

from perturbkv.configs import plugins
from perturbkv.configs.plugins import external_code, is_library_file
from perturbkv.errors import PluginError

FAILS = "def fail():\n    raise ValueError('no room')\n"


def test_python_its_packages_and_this_one_are_libraries():
    assert all(is_library_file(Path(module.__file__)) for module in (importlib, torch, plugins))


def test_a_file_on_the_path_without_metadata_is_the_user_s(tmp_path, monkeypatch):
    (tmp_path / "perturbkv_helper.py").write_text(FAILS)
    monkeypatch.syspath_prepend(tmp_path)
    importlib.import_module("perturbkv_helper")
    assert not is_library_file(tmp_path / "perturbkv_helper.py")


def test_a_crash_inside_a_package_names_the_user_s_last_line(tmp_path):
    (tmp_path / "mine.py").write_text("import json\n\ndef run():\n    json.loads('{')\n")
    module = plugins.load_module(tmp_path / "mine.py")
    named = r"it raises JSONDecodeError: .* \(mine\.py, line 4\)"
    with pytest.raises(PluginError, match=named), external_code("it raises"):
        module.run()


def test_frozen_modules_are_no_user_s():
    with pytest.raises(PluginError, match=rf"\({Path(__file__).name}, line \d+\)"), external_code("it raises"):
        importlib.import_module("no_such_module_here")
