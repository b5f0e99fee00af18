"""The packages of the examples are found as if they were installed."""

from __future__ import annotations

import sys

from tests.examples import atlas_support, queuectl_support

sys.path[:0] = [str(queuectl_support.EXAMPLE), str(atlas_support.EXAMPLE)]
