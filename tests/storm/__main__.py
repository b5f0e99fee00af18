"""The long fault suite: ``python -m tests.storm [NAME …] [--counts SCALE] [--fresh]``."""

from __future__ import annotations

import argparse
import sys

from tests.storm.runner import ROOT, Storm, fingerprint
from tests.storm.scenarios import SCENARIOS


def main() -> int:
    """Run the storm; 0 if every promise was kept."""
    parser = argparse.ArgumentParser(prog="python -m tests.storm", description=__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(SCENARIOS)}; all if none is given")
    parser.add_argument("--counts", type=float, default=1.0, metavar="SCALE", help="multiply every count by this")
    parser.add_argument("--fresh", action="store_true", help="forget what was found before")
    asked = parser.parse_args()
    if unknown := set(asked.names) - set(SCENARIOS):
        parser.error(f"there is no {sorted(unknown)[0]!r}; there are {', '.join(SCENARIOS)}")
    state = ROOT / ".state" / "storm.json"
    if asked.fresh:
        state.unlink(missing_ok=True)
    names = asked.names or list(SCENARIOS)
    storm = Storm(state, asked.counts, fingerprint(ROOT / "holdfast", ROOT / "tests" / "crash"))
    kept = storm.run(names)
    print(storm.table(names))
    return 0 if kept else 1


if __name__ == "__main__":
    sys.exit(main())
