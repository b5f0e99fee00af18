"""A client: it goes on until the server confirms that its job is stored. The standard library is enough for that."""

from __future__ import annotations

import json
import random
import time
import urllib.error
import urllib.request
from collections.abc import Mapping
from http.client import HTTPException
from typing import Any

_PATIENCE = 10.0  # seconds for one answer
_LONGEST = 5.0  # seconds between two tries


class Refused(Exception):
    """The API says that the job cannot be right; asking again changes nothing."""


class Unsure(Exception):
    """Unknown whether the job is stored. Asking again with the same key does no harm."""


def submit(
    address: str, job_type: str, payload: Mapping[str, Any], *, key: str, within: float = 300.0, **options: Any
) -> dict[str, Any]:
    """The job under this key, new or not. ``options``: ``max_attempts`` and the like.

    A connection that breaks and a 5xx say nothing of whether it was stored, so the same request is sent again, with
    the same key and growing pauses, ``within`` so many seconds.
    """
    deadline = time.monotonic() + within
    body = json.dumps({"type": job_type, "payload": payload, **options}).encode()
    headers = {"Content-Type": "application/json", "Idempotency-Key": key}
    pause = 0.05
    while time.monotonic() < deadline:
        request = urllib.request.Request(f"{address}/v1/jobs", body, headers)  # noqa: S310 - the caller's address
        try:
            with urllib.request.urlopen(request, timeout=_PATIENCE) as answer:  # noqa: S310
                job: dict[str, Any] = json.load(answer)
                return job
        except urllib.error.HTTPError as error:
            with error:
                if error.code < 500 and error.code != 429:
                    raise Refused(error.read().decode()) from None
        except (OSError, HTTPException, ValueError):  # no connection, or an answer that ends in its middle
            pass
        time.sleep(random.uniform(pause / 2, pause))
        pause = min(2 * pause, _LONGEST)
    raise Unsure(f"{address} did not confirm within {within:g} s that job {key} is stored")
