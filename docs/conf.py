"""Sphinx' settings."""

from __future__ import annotations

from importlib.metadata import version as version_of

project = "celery-lease"
author = "The celery-lease authors"
copyright = "The celery-lease authors"
release = version = version_of("celery-lease")

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
exclude_patterns = ["_build"]
myst_enable_extensions = ["colon_fence", "deflist"]
myst_heading_anchors = 3
autodoc_typehints = "description"
html_theme = "furo"
html_title = "celery-lease"
