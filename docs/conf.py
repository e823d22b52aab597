"""How Sphinx builds the site: `make docs`, from a bare checkout, with warnings as errors."""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from sphinx.application import Sphinx

DOCS = Path(__file__).parent.resolve()
sys.path.insert(0, str(DOCS))

from inventories import mapping  # noqa: E402

import fpipe  # noqa: E402

# Cells of tutorials show what they return, and not what takes long.
os.environ["FPIPE_PROGRESS"] = "0"

project = "fpipe"
author = "The fpipe authors"
project_copyright = author
version = release = fpipe.__version__

extensions = [
    "myst_nb",
    "sphinx.ext.autodoc",
    "sphinx.ext.intersphinx",
    "sphinx.ext.napoleon",
    "sphinx.ext.viewcode",
]
exclude_patterns = ["_build"]
html_theme = "furo"
html_title = f"fpipe {release}"
html_static_path = ["_static"]
html_css_files = ["site.css"]
html_copy_source = False
pygments_style, pygments_dark_style = "friendly", "github-dark"

# Text in backquotes is a name of fpipe where there is one, and code otherwise.
default_role = "py:obj"
autodoc_member_order = "bysource"
autodoc_typehints = "signature"
autodoc_typehints_format = "short"
autodoc_preserve_defaults = True
napoleon_use_ivar = True
napoleon_numpy_docstring = False
python_use_unqualified_type_names = True
python_maximum_signature_line_length = 88
maximum_signature_line_length = 88

myst_enable_extensions = ["colon_fence", "dollarmath", "attrs_inline"]
myst_heading_anchors = 4
nb_execution_mode = "cache"
nb_execution_cache_path = str(DOCS.parent / "build" / "notebooks")
nb_execution_raise_on_error = True
nb_execution_timeout = 300
nb_merge_streams = True

intersphinx_mapping = mapping(DOCS.parent / "build" / "inventories")
intersphinx_timeout = 5


def skip_fields(
    app: Sphinx, what: str, name: str, value: Any, skip: bool, options: Any
) -> bool | None:
    """Leave out the fields of named tuples and dataclasses: their class describes them."""
    return True if type(value).__name__ in ("_tuplegetter", "member_descriptor") else None


LINK = re.compile(r"\[([^\]]*)\]\((\.\./[^)]*)\)")


def name_files(app: Sphinx, page: str, text: list[str]) -> None:
    """Name files of the repository that are no pages, in place of links to them.

    Examples are offered to be downloaded.
    """

    def named(match: re.Match[str]) -> str:
        shown, link = match.groups()
        target = (DOCS / page).parent.joinpath(link).resolve()
        if target.is_relative_to(DOCS) or target.is_relative_to(DOCS.parent / "examples"):
            return match[0]
        path = str(target.relative_to(DOCS.parent))
        return f"`{path}`" if shown.strip("`") == path else f"{shown} (`{path}`)"

    text[0] = LINK.sub(named, text[0])


def setup(app: Sphinx) -> None:
    """Called by Sphinx."""
    app.connect("source-read", name_files)
    app.connect("autodoc-skip-member", skip_fields)
