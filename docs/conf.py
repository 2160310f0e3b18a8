"""How the documentation is built. The reference pages are written from the code at each build."""

import sys
from pathlib import Path

from torchmuster import __version__

sys.path.insert(0, str(Path(__file__).parent))
import reference_pages

reference_pages.write_pages()

project = "torchmuster"
author = "The torchmuster authors"
project_copyright = author
release = version = __version__
extensions = ["myst_parser", "sphinx.ext.autodoc"]
autodoc_default_options = {"members": True}
autodoc_member_order = "bysource"
autodoc_typehints = "signature"
source_suffix = {".md": "markdown"}
myst_enable_extensions = ["colon_fence", "deflist"]
myst_heading_anchors = 3
html_theme = "furo"
html_title = f"torchmuster {version}"
nitpicky = False
# Nothing is fetched from elsewhere to build or to read these pages.
html_static_path: list[str] = []


# A shell script that a command prints is full of quotes and # signs.
suppress_warnings = ["misc.highlighting_failure"]
exclude_patterns = [
    "generated/*-table.md",
    "images",
    "dev",
]
