"""``python -m tools.site [--pictures FOLDER]``: builds the documentation site in ``build/site``.

Every warning of Sphinx is an error: a link that leads nowhere, a page outside the navigation.
"""

from __future__ import annotations

import argparse
import shutil
import sys
from pathlib import Path

from sphinx.cmd.build import build_main

from tools.site.staging import EXTRA, ROOT, stage


def main() -> int:
    """Builds the site; returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m tools.site", description="Builds the documentation site.")
    parser.add_argument("--pictures", type=Path, help="folder of the console's pictures, made by `make screenshots`")
    parser.add_argument("--target", type=Path, default=ROOT / "build" / "site", help="folder of the site")
    arguments = parser.parse_args()
    source = arguments.target.with_name("site-source")
    for folder in (source, arguments.target):
        shutil.rmtree(folder, ignore_errors=True)
    stage(source, arguments.pictures)
    options = ["--fail-on-warning", "--keep-going", "--quiet", "--conf-dir", str(Path(__file__).parent)]
    options += ["-D", f"html_extra_path={source / EXTRA}"]
    doctrees = str(arguments.target.with_name("site-doctrees"))
    status = build_main([*options, "-d", doctrees, str(source), str(arguments.target)])
    if status == 0:
        print(f"open {arguments.target / 'index.html'}")
    return status


if __name__ == "__main__":
    sys.exit(main())
