"""The documentation site: the pages of ``docs/`` in groups, with search, made by Sphinx.

``staging.py`` copies the pages into one tree and resolves their links, ``conf.py`` configures Sphinx, and
``python -m tools.site`` does both. ``check.py`` opens the result in a browser. ``docs/navigation.toml`` says which page
is in which group.
"""
