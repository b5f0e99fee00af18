"""The long fault suite: ``python -m tests.storm [NAME …] [OPTIONS]``; ``--help`` lists the options."""

from __future__ import annotations

import argparse
import sys

from tests.storm.runner import ROOT, Storm, fingerprint
from tests.storm.scenarios import SCENARIOS
from tests.support.stores import STORES


def main() -> int:
    """Run the storm; 0 if every promise was kept, each time since the code changed."""
    parser = argparse.ArgumentParser(prog="python -m tests.storm", description=__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(SCENARIOS)}; all if none is given")
    parser.add_argument("--store", choices=STORES, help="only what happens to this store")
    parser.add_argument("--counts", type=float, default=1.0, metavar="SCALE", help="multiply every count by this")
    parser.add_argument("--fresh", action="store_true", help="forget what was found before, failures too")
    parser.add_argument("--parallel", type=int, default=1, metavar="N", help="scenarios at a time (most only wait)")
    asked = parser.parse_args()
    if asked.parallel < 1:
        parser.error("give --parallel a number of at least 1")
    if unknown := set(asked.names) - set(SCENARIOS):
        parser.error(f"there is no {sorted(unknown)[0]!r}; there are {', '.join(SCENARIOS)}")
    names = [name for name in asked.names or SCENARIOS if asked.store is None or name.endswith(f"-{asked.store}")]
    state = ROOT / ".state" / "storm.json"
    if asked.fresh:
        state.unlink(missing_ok=True)
    tested = (ROOT / "holdfast", ROOT / "examples" / "js_worker", ROOT / "deploy" / "prometheus")
    testing = (ROOT / "tests" / each for each in ("crash", "storm", "support", "web"))
    storm = Storm(state, asked.counts, fingerprint(*tested, *testing), parallel=asked.parallel)
    kept = storm.run(names)
    print(storm.table(names))
    return 0 if kept else 1


if __name__ == "__main__":
    sys.exit(main())
