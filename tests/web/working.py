"""A worker over HTTP, as a test wants it: claims, and says what became of its jobs."""

from __future__ import annotations

from typing import Any

from tests.web.client import Api

ERROR = {"type": "ConnectionError", "message": "refused", "traceback": "at send (mail.js:7:3)"}


class Worker:
    """Asks through an ``Api``; ``lease``: seconds, of every claim and beat."""

    def __init__(self, api: Api, name: str = "js-1", **given: Any) -> None:
        self.api = api
        self.name = name
        self._options = given

    def _ask(self, path: str, **given: Any) -> dict[str, Any]:
        answer: dict[str, Any] = self.api.post(path, {"worker": self.name, **given})
        return answer

    def answer(self, **given: Any) -> dict[str, Any]:
        """What a claim is answered."""
        return self._ask("/v1/claims", **{"limit": 10, **self._options, **given})

    def claim(self, **given: Any) -> list[dict[str, Any]]:
        """The jobs of a claim."""
        jobs: list[dict[str, Any]] = self.answer(**given)["jobs"]
        return jobs

    def one(self, **given: Any) -> dict[str, Any]:
        """The only job there is."""
        (job,) = self.claim(**given)
        return job

    def settle(self, job: dict[str, Any], outcome: str, **given: Any) -> tuple[str, str | None]:
        """Settle one job; the verdict, and where the job stands."""
        (settled,) = self.settle_all([{"token": job["token"], "outcome": outcome, **given}])
        return settled["verdict"], settled["state"]

    def settle_all(self, settlements: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """Settle; what became of each."""
        settled: list[dict[str, Any]] = self._ask("/v1/claims/settle", settlements=settlements)["jobs"]
        return settled

    def extend(self, *jobs: dict[str, Any], **given: Any) -> dict[str, Any]:
        """Beat; the whole answer."""
        leases = [job["token"] for job in jobs]
        kept = {name: value for name, value in self._options.items() if name == "lease"}
        return self._ask("/v1/claims/extend", leases=leases, **{**kept, **given})

    def verdicts(self, *jobs: dict[str, Any]) -> list[str]:
        """Beat; what became of each lease."""
        return [each["verdict"] for each in self.extend(*jobs)["leases"]]

    def say(self, job: dict[str, Any], *lines: dict[str, Any]) -> dict[str, Any]:
        """Log lines of a job; what became of them."""
        return self._ask("/v1/claims/lines", token=job["token"], lines=list(lines))

    def leave(self, *jobs: dict[str, Any]) -> int:
        """Stop; how many jobs were given back."""
        released: int = self._ask("/v1/claims/leave", leases=[job["token"] for job in jobs])["released"]
        return released
