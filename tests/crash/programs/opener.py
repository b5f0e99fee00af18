"""Opens a store at the test's word (a line on stdin), which may mean to create or migrate it, and submits a job."""

from __future__ import annotations

import os
import sys
from pathlib import Path

from holdfast import Holdfast
from tests.crash.ledger import append

LEDGER = Path(os.environ["CRASH_LEDGER"])

if __name__ == "__main__":
    app = Holdfast(sys.argv[1])
    append(LEDGER, what="here")
    sys.stdin.readline()
    try:
        append(LEDGER, what="ack", jobs=[app.sync.enqueue("crash.note", {}).id], url=sys.argv[1])
    except Exception as error:
        append(LEDGER, what="error", text=f"{type(error).__name__}: {error}")
