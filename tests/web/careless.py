"""A worker that does not keep the protocol: takes whatever there is, never extends, settles everything alike."""

from __future__ import annotations

import os
import signal

import httpx

signal.signal(signal.SIGTERM, signal.SIG_IGN)
KEY = {"authorization": f"Bearer {os.environ['HOLDFAST_API_KEY']}"}

with httpx.Client(base_url=os.environ["HOLDFAST_API_URL"], headers=KEY, timeout=30) as client:
    while True:
        answer = client.post("/v1/claims", json={"worker": "careless", "limit": 100, "wait": 1})
        for job in answer.json().get("jobs", []):
            settlement = {"token": job["token"], "outcome": "succeeded", "result": "done"}
            client.post("/v1/claims/settle", json={"worker": "careless", "settlements": [settlement]})
