"""Backs a store up, again and again, until it is killed: ``copier FOLDER``."""

from __future__ import annotations

import itertools
import os
import sys
from pathlib import Path

from holdfast import Holdfast
from tests.crash.ledger import append

LEDGER = Path(os.environ["CRASH_LEDGER"])

if __name__ == "__main__":
    app = Holdfast()
    for number in itertools.count():
        copy = Path(sys.argv[1]) / f"copy-{os.getpid()}-{number}.db"
        append(LEDGER, what="copying", path=str(copy))
        app.sync.backup(str(copy))
        append(LEDGER, what="copied", path=str(copy))
