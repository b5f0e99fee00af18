"""``python -m examples.demo``: run it, look at the table, mind the exit code."""

import argparse
import asyncio
import sys

from examples.demo.show import show


def main() -> int:
    """Parse the arguments and run the demo; 0 if every figure is right."""
    parser = argparse.ArgumentParser(prog="python -m examples.demo", description=__doc__)
    parser.add_argument("--files", type=_count, metavar="N", help="measure only N files of the standard library")
    parser.add_argument("--processes", type=_count, metavar="N", default=2, help="worker processes (default: 2)")
    parser.add_argument("--keep", action="store_true", help="keep the directory with the database, to look at it")
    arguments = parser.parse_args()
    try:
        return asyncio.run(show(files=arguments.files, processes=arguments.processes, keep=arguments.keep))
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130


def _count(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError("give a whole number from 1")
    return number


if __name__ == "__main__":
    sys.exit(main())
