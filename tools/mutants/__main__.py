"""Mutation tests of guards: ``python -m tools.mutants [TEXT …] [OPTIONS]``; goes on where it was interrupted."""

from __future__ import annotations

import argparse
import sys

from tools.mutants.runner import ROOT, Run, all_mutants, changed_mutants, record_reach


def main() -> int:
    """Runs mutants; 0 if each one that ran was killed or is in the list of equivalents."""
    parser = argparse.ArgumentParser(prog="python -m tools.mutants", description=__doc__)
    parser.add_argument("texts", nargs="*", metavar="TEXT", help="only mutants with one of these in their name")
    parser.add_argument("--changed", metavar="BASE", help="only guards on lines that differ from this commit")
    parser.add_argument("--minutes", type=float, default=180.0, help="stop after so many; 0 prints the results so far")
    parser.add_argument("--parallel", type=int, default=2, metavar="N", help="mutants at a time")
    parser.add_argument("--again", action="store_true", help="run survivors again, after tests were added")
    asked = parser.parse_args()
    mutants = [each for each in all_mutants() if not asked.texts or any(text in each.name for text in asked.texts)]
    if asked.changed:
        mutants = list(changed_mutants(mutants, ROOT, asked.changed))
    if asked.minutes:
        record_reach(parallel=asked.parallel)
    run = Run()
    run.run(mutants, parallel=asked.parallel, seconds=60 * asked.minutes, again=asked.again)
    print(run.table(mutants))
    survivors = run.survivors(mutants)
    for each in survivors:
        print(f"{run.result_of(each).verdict}: {each.name}")
    return 1 if survivors else 0


if __name__ == "__main__":
    sys.exit(main())
