"""How the documentation is built; docs/reference/write_pages.py writes the reference pages."""

from torchmuster import __version__

project = "torchmuster"
author = "The torchmuster authors"
release = version = __version__
extensions = ["myst_parser"]
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
    "images",
    "reference",
]
