"""Release checks: equal bytes of two builds, contents, an SBOM, and each extra in a clean environment.

``python -m tools.release`` does all of it on the files in ``dist/`` that it has built.
"""
