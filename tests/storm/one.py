"""``python -m tests.storm.one NAME SCALE``: runs one scenario and prints its result as JSON."""

from __future__ import annotations

import json
import sys

from tests.storm.runner import run_scenario
from tests.storm.scenarios import SCENARIOS

if __name__ == "__main__":
    name, scale = sys.argv[1:]
    result = run_scenario(name, SCENARIOS[name], float(scale))
    print(json.dumps(result, default=str))
