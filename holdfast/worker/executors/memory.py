"""Memory use of this process."""

from __future__ import annotations

import os
import resource
import sys
from pathlib import Path


def resident_bytes() -> int:
    """Resident memory now; where the system does not tell, the most there ever was."""
    try:
        pages = Path("/proc/self/statm").read_text(encoding="ascii").split()[1]
        return int(pages) * os.sysconf("SC_PAGE_SIZE")
    except OSError:
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        return peak if sys.platform == "darwin" else peak * 1024
