"""The site: `make docs` builds docs/_build/html, with every warning an error and nothing fetched.

`scripts/reference_pages.py` writes pages of the commands, the policies and the notebooks when a build begins; the
Python reference comes from docstrings.
"""

from __future__ import annotations

import sys
from pathlib import Path

from sphinx.application import Sphinx

import perturbkv

DOCS = Path(__file__).resolve().parent
sys.path.insert(0, str(DOCS / "scripts"))

project = "perturbkv"
author = "the perturbkv developers"
version = release = perturbkv.__version__
extensions = [
    "myst_nb",
    "sphinx.ext.autodoc",
    "sphinx.ext.autosummary",
    "sphinx.ext.napoleon",
    "sphinx_copybutton",
]
exclude_patterns = ["_build", "scripts", "bench", "specification", "raggedness"]

# Notebooks stand in `examples/` with the embedded model's output; tests run them.
nb_execution_mode = "off"
myst_enable_extensions = ["colon_fence"]
myst_heading_anchors = 4

autosummary_generate = True
autodoc_member_order = "bysource"
autodoc_typehints = "description"
autodoc_typehints_description_target = "documented_params"
autodoc_inherit_docstrings = False
napoleon_numpy_docstring = False
python_use_unqualified_type_names = True

smartquotes = False  # `--option` and quotes stay as they are typed

html_theme = "pydata_sphinx_theme"
html_title = f"perturbkv {release}"
html_static_path = ["_static"]
html_css_files = ["site.css"]
html_show_sourcelink = False
html_theme_options = {
    "navbar_align": "left",
    "navigation_with_keys": False,
    "show_nav_level": 1,
    "secondary_sidebar_items": ["page-toc"],
    "footer_start": ["copyright"],
    "footer_end": [],
}
html_sidebars = {"index": []}
copyright = "the perturbkv developers, MIT licence"  # noqa: A001 (the name that Sphinx reads)


def setup(app: Sphinx) -> None:
    """Write the pages that are made from the code before Sphinx looks for pages."""
    import reference_pages

    app.connect("config-inited", lambda app, config: reference_pages.write())
