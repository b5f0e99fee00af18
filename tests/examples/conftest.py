"""The package of the queuectl example is found as if it were installed."""

from __future__ import annotations

import sys

from tests.examples.queuectl_support import EXAMPLE

sys.path.insert(0, str(EXAMPLE))
