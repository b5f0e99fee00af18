"""Configuration of Sphinx for the documentation site."""

import tomllib
from pathlib import Path

from tools.site.staging import EXTRA

_HERE = Path(__file__).parent

project = "Holdfast"
release = tomllib.loads((_HERE.parents[1] / "pyproject.toml").read_text(encoding="utf-8"))["project"]["version"]
copyright = "Holdfast contributors"
extensions = ["myst_parser", "sphinx_copybutton"]
exclude_patterns = [EXTRA]

html_theme = "furo"
html_title = f"Holdfast {release}"
html_static_path = [str(_HERE / "static")]
html_css_files = ["site.css"]
html_show_sphinx = False
html_show_search_summary = False  # made of fetched pages, which browsers refuse to `file://`
html_last_updated_fmt = None  # two builds of one revision are equal
html_theme_options = {"top_of_page_buttons": ["view"], "navigation_with_keys": True}

myst_heading_anchors = 4
myst_links_external_new_tab = False
suppress_warnings = ["misc.highlighting_failure"]  # an example may leave parts out by "…"

copybutton_prompt_text = "$ "
copybutton_only_copy_prompt_lines = True
