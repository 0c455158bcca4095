"""The site: `make docs` builds it into site/ with Sphinx.

Sphinx, MyST and Furo rather than MkDocs Material: they are maintained (MkDocs Material is in maintenance mode),
autodoc imports the very names that users import, and the site requests nothing from other hosts.

Pages are plain Markdown that also reads well on GitHub. Two things are made from the code while building, see
generate/reference.py: `<!-- commands -->` becomes the reference of the command line, `<!-- api: NAME, … -->` that of
public names.
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

from generate.reference import fill_reference
from sphinx.application import Sphinx

import testtime

project = "testtime"
author = "The testtime developers"
copyright = "The testtime developers. MIT licence"
version = release = testtime.__version__

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
exclude_patterns = ["generate", "notebooks"]
nitpicky = False
default_role = "code"  # docstrings have `names` in single backticks
suppress_warnings = ["config.cache"]

myst_heading_anchors = 4  # as on GitHub
myst_enable_extensions = ["attrs_inline"]

autodoc_member_order = "bysource"
autodoc_typehints = "signature"
autodoc_default_options = {
    "members": True,
    "inherited-members": "Adapter,Stateful,Module,Exception,ABC,tuple,dict,Generic",
    "no-value": True,
}
python_maximum_signature_line_length = 88
python_use_unqualified_type_names = True
napoleon_numpy_docstring = False
napoleon_use_ivar = True

html_theme = "furo"
html_title = "testtime"
html_static_path = ["static"]
html_css_files = ["site.css"]
html_favicon = "static/icon.svg"
html_copy_source = False
html_show_sphinx = False
templates_path: list[str] = []
pygments_style, pygments_dark_style = "friendly", "github-dark"


def _fill_reference(app: Sphinx, page: str, source: list[str]) -> None:
    if page.startswith("reference/"):
        source[0] = fill_reference(source[0])


def _name_settings(app: Sphinx, kind: str, name: str, value: object, options: object, lines: list[str]) -> None:
    lines[:] = ["Keyword Args:" if line.startswith("Settings (defaults") else line for line in lines]


def setup(app: Sphinx) -> None:
    app.connect("source-read", _fill_reference)
    app.connect("autodoc-process-docstring", _name_settings, priority=400)  # before napoleon reads the sections
