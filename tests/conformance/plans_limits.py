"""The functions of limits, for the tests of PostgreSQL's plans: they read no table as a whole."""

from __future__ import annotations

from typing import Any

from tests.conformance.plans import NOW

MAX_ROWS = 5000
"""Of a table, for one call: there are 25,000 jobs and 20,000 partitions."""
_FUNCTIONS = {
    "claim": "select from {schema}.claim_limited({now}, '{{default,queue-2,queue-4,none}}', '{{50,50,50,50}}', 100, "
    "'w', 30000000, false, false, false, false, -1)",
    "isolated": "select from {schema}.claim_limited({now}, '{{default}}', '{{1}}', 1, "
    "'w', 1000, true, true, true, true, -1)",
    "use": "select from {schema}.running_weights()",
    "prune": "select {schema}.prune_limits({now}, 100)",
    "waiting": "select from {schema}.count_unstarted('{{key=1,key=1,late=1,late=1,none}}', 100)",
    "take": "select {schema}.take_tokens({now}, 'key=7', 1)",
}


def calls(schema: str) -> dict[str, tuple[str, list[Any]]]:
    """A statement and its values for each function."""
    begin = "explain (analyze, buffers)"
    return {name: (f"{begin} {call.format(schema=schema, now=NOW)}", []) for name, call in _FUNCTIONS.items()}
