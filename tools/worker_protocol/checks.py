"""What a worker has to do, one check for each part of the protocol (docs/worker-protocol.md)."""

from __future__ import annotations

import asyncio
import json
import signal
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, NamedTuple

from holdfast.core.errors import ConfigError, HoldfastError
from holdfast.core.models import Job, JobFilter, JobState, Reason, Settlement
from tools.worker_protocol.course import CONCURRENCY, LEASE, Broken, Course
from tools.worker_protocol.recorder import Exchange

Check = Callable[[Course], Awaitable[None]]

_ENDED = (JobState.SUCCEEDED, JobState.DEAD, JobState.CANCELLED)
_UNAVAILABLE = 3.0  # seconds the API answers 503
_HURRIED = 60  # requests in that time that are too many
_VALUES: tuple[Any, ...] = (None, True, 0, -1.5, "ünï ☃ 𝄞", "", [], {}, {"a": [None, {"b": "c"}]}, [1, [2, [3]]])


def _expect(holds: bool, complaint: str) -> None:
    if not holds:
        raise Broken(complaint)


async def _ended(course: Course, job_id: str, state: JobState) -> Job:
    """The job once it has ended; Broken unless so."""
    job = await course.reached(job_id, *_ENDED)
    _expect(job.state is state, f"expected the job {state}, got {job.state} ({job.reason}: {job.error})")
    return job


async def starts(course: Course) -> None:
    """It claims, and says who it is."""
    await course.start()


async def echoes(course: Course) -> None:
    """Results come back as they are, whatever JSON they are."""
    for value in _VALUES:
        job = await _ended(course, await course.submit("echo", {"value": value}), JobState.SUCCEEDED)
        result = None if job.result is None else json.loads(job.result)
        _expect(result == value and type(result) is type(value), f"expected {value!r} back, got {result!r}")
        _expect(job.attempts == 1, f"expected 1 attempt of an echo, got {job.attempts}")


async def fails_and_tries_again(course: Course) -> None:
    """An error that a handler throws fails the attempt, with its message; the next one succeeds."""
    job = await _ended(course, await course.submit("flaky"), JobState.SUCCEEDED)
    problem = f"expected 2 attempts and the result 2, got {job.attempts} and {job.result}"
    _expect((job.attempts, job.result) == (2, "2"), problem)
    (attempt,) = await course.app.attempts(job.id)
    _expect(attempt.reason == Reason.ERROR, f"expected reason error of the first attempt, got {attempt.reason}")
    words = "the first attempt fails"
    _expect(words in (attempt.error or ""), f"expected an error with {words!r}, got {attempt.error!r}")


async def says_when(course: Course) -> None:
    """``delay`` of a failed job goes before its policy."""
    job = await _ended(course, await course.submit("later", retry="fixed:3600"), JobState.SUCCEEDED)
    _expect(job.attempts == 2, f"expected 2 attempts, got {job.attempts}")


async def snoozes(course: Course) -> None:
    """``snoozed`` costs no attempt."""
    job = await _ended(course, await course.submit("snooze"), JobState.SUCCEEDED)
    problem = f"expected 1 attempt in 2 claims, got {job.attempts} in {job.claims}"
    _expect((job.attempts, job.claims) == (1, 2), problem)


async def gives_up(course: Course) -> None:
    """``dead`` ends the job at once."""
    job = await _ended(course, await course.submit("dead"), JobState.DEAD)
    problem = f"expected 1 attempt and reason non_retryable, got {job.attempts} and {job.reason}"
    _expect((job.attempts, job.reason) == (1, "non_retryable"), problem)


async def names_its_types(course: Course) -> None:
    """A job it has no handler for is none of its own: it is settled for it, or by it as dead."""
    job = await _ended(course, await course.submit("unknown", max_attempts=2), JobState.DEAD)
    reason = (await course.app.attempts(job.id))[0].reason
    _expect(reason == Reason.NO_HANDLER, f"expected reason no_handler, got {reason}")


async def extends(course: Course) -> None:
    """A job that takes longer than a lease stays its own."""
    job = await _ended(course, await course.submit("sleep", {"seconds": 9}), JobState.SUCCEEDED)
    _expect(job.claims == 1, f"expected 1 claim, got {job.claims}: its lease was not extended")
    _expect(job.result in ("9", "9.0"), f"expected the result 9, got {job.result}")


async def keeps_to_timeouts(course: Course) -> None:
    """``timeout`` of a job is the worker's to enforce."""
    job = await _ended(course, await course.submit("sleep", {"seconds": 600}, timeout=1, max_attempts=2), JobState.DEAD)
    reason = (await course.app.attempts(job.id))[0].reason  # that of the last is the budget
    _expect(reason == Reason.TIMEOUT, f"expected reason timeout, got {reason}")


async def hears_cancellations(course: Course) -> None:
    """An operator's cancellation stops the job that runs."""
    job_id = await course.submit("sleep", {"seconds": 600})
    await course.reached(job_id, JobState.RUNNING)
    await course.app.cancel_one(job_id)
    await _ended(course, job_id, JobState.CANCELLED)


async def lets_go(course: Course) -> None:
    """A lease that is lost is not settled; the next one of the same job is."""
    job_id = await course.submit("sleep", {"seconds": LEASE})
    job = await course.reached(job_id, JobState.RUNNING)
    stolen = Settlement(job_id=job.id, claims=job.claims, state=JobState.QUEUED, reason=Reason.RELEASED, refund=True)
    await (await course.app.open_store()).queueing.settle([stolen])
    ended = await _ended(course, job_id, JobState.SUCCEEDED)
    _expect(ended.claims == job.claims + 1, f"expected {job.claims + 1} claims, got {ended.claims}")
    _expect(not begun_when_lost(course.recorder.given), "it settled a job whose lease it knew to be lost")


def begun_when_lost(requests: Sequence[Exchange]) -> set[str]:
    """The tokens that were settled for the first time after ``extend`` had answered that they are lost."""
    lost: set[str] = set()
    settled: set[str] = set()
    begun: set[str] = set()
    for given in requests:
        if given.what == "extend" and given.status == 200:
            verdicts = zip(given.asked["leases"], given.answered["leases"], strict=True)
            lost |= {token for token, problem in verdicts if problem["verdict"] == "lost"}
        if given.what == "settle":
            tokens = {each.get("token") for each in given.asked.get("settlements", [])}
            begun |= tokens & lost - settled
            settled |= tokens
    return begun


async def stays_within_its_slots(course: Course) -> None:
    """It claims no more than it can start at once."""
    ids = [await course.submit("sleep", {"seconds": 0.5}) for _ in range(3 * CONCURRENCY)]
    most = 0

    async def over() -> bool:
        nonlocal most
        most = max(most, await course.app.count(JobFilter(states=(JobState.RUNNING,))))
        return all([(await course.app.get(job_id)).state in _ENDED for job_id in ids])

    await course.until(over, f"{len(ids)} jobs of half a second did not end")
    _expect(most <= CONCURRENCY, f"expected at most {CONCURRENCY} jobs in hand, got {most}")


async def dates_its_leases(course: Course) -> None:
    """A lease runs from ``sent + waited`` of its claim: a job starts after a long wait, but not after a long freeze."""
    await asyncio.sleep(LEASE)
    job = await _ended(course, await course.submit("echo", {"value": 4}), JobState.SUCCEEDED)
    _expect(job.claims == 1, f"expected 1 claim of a job that it had waited for, got {job.claims}")
    course.recorder.freeze = lambda: course.signal_group(signal.SIGSTOP)
    try:
        job_id = await course.submit("echo", {"value": 5})
        first = await course.reached(job_id, JobState.RUNNING)
        await asyncio.sleep(LEASE)
        await course.reached(job_id, JobState.FAILED, JobState.QUEUED)
    finally:
        course.recorder.freeze = None
        course.signal_group(signal.SIGCONT)
    await _ended(course, job_id, JobState.SUCCEEDED)
    outcomes = outcomes_of(course.recorder.given, job_id, first.claims) - {"released"}
    _expect(not outcomes, f"it ran a job whose lease had ended while it was frozen: {', '.join(sorted(outcomes))}")


def outcomes_of(requests: Sequence[Exchange], job_id: str, claims: int) -> set[str]:
    """The outcomes that were sent for this claim of a job."""
    claimed = [job for given in requests if given.what == "claims" for job in given.answered.get("jobs", [])]
    tokens = {job["token"] for job in claimed if (job["id"], job["claims"]) == (job_id, claims)}
    settled = [each for given in requests if given.what == "settle" for each in given.asked.get("settlements", [])]
    return {each["outcome"] for each in settled if each["token"] in tokens}


async def settles_again(course: Course) -> None:
    """A settlement whose answer was lost is sent again; ``repeated`` is as good as ``accepted``."""
    course.recorder.swallow, before = True, len(course.recorder.given)
    await _ended(course, await course.submit("echo", {"value": 1}), JobState.SUCCEEDED)

    async def repeated() -> bool:
        problem = [given.answered.get("jobs", []) for given in course.recorder.given[before:] if given.what == "settle"]
        return any(job.get("verdict") == "repeated" for jobs in problem for job in jobs)

    await course.until(repeated, "it did not settle again")
    await _ended(course, await course.submit("echo", {"value": 2}), JobState.SUCCEEDED)


async def outlasts_absences(course: Course) -> None:
    """While the API is away it tries again, with pauses; then it goes on by itself."""
    before = len(course.recorder.given)
    course.recorder.away = True
    await asyncio.sleep(_UNAVAILABLE)
    course.recorder.away = False
    tries = len(course.recorder.given) - before
    _expect(tries <= _HURRIED, f"expected at most {_HURRIED} requests in {_UNAVAILABLE:g} s, got {tries}")
    await _ended(course, await course.submit("echo", {"value": 3}), JobState.SUCCEEDED)


async def follows_commands(course: Course) -> None:
    """``stop`` of an operator ends it."""
    (worker,) = await course.app.workers()
    await course.app.stop_workers([worker.heartbeat.worker])
    await course.ended()


async def gives_back(course: Course) -> None:
    """SIGTERM: what does not end within its grace is given back, and costs no attempt."""
    await course.start()
    job_id = await course.submit("sleep", {"seconds": 600})
    await course.reached(job_id, JobState.RUNNING)
    course.signal(signal.SIGTERM)
    await course.ended()
    job = await course.app.get(job_id)
    _expect(job.state is JobState.QUEUED, f"expected its job queued again, got {job.state}")
    _expect(job.attempts == 0, f"expected no attempt of its job, got {job.attempts}")


class Named(NamedTuple):
    """A check under its name."""

    name: str
    check: Check


CHECKS: tuple[tuple[Named, ...], ...] = (
    (Named("starts and is listed", starts),),
    (
        Named("returns results", echoes),
        Named("fails and tries again", fails_and_tries_again),
        Named("says when to try again", says_when),
        Named("snoozes", snoozes),
        Named("gives up what cannot succeed", gives_up),
        Named("names its types", names_its_types),
    ),
    (
        Named("extends its leases", extends),
        Named("keeps to timeouts", keeps_to_timeouts),
        Named("hears cancellations", hears_cancellations),
        Named("lets go of what it has lost", lets_go),
    ),
    (Named("stays within its slots", stays_within_its_slots),),
    (Named("starts nothing whose lease has ended", dates_its_leases),),
    (Named("settles again after a lost answer", settles_again),),
    (Named("outlasts absences of the API", outlasts_absences),),
    (Named("follows the command to stop", follows_commands),),
    (Named("gives back what it has at SIGTERM", gives_back),),
)
"""What is in one group goes on at once."""


class Verdict(NamedTuple):
    """What a check came to; ``complaint``: None where it is kept."""

    name: str
    complaint: str | None


async def judge(course: Course) -> list[Verdict]:
    """Every check. Where there is no worker, the rest is not tried."""
    verdicts: list[Verdict] = []
    for group in CHECKS:
        if verdicts and verdicts[0].complaint is not None:
            verdicts += [Verdict(name, "not tried") for name, _ in group]
        else:
            verdicts += await asyncio.gather(*(_judged(course, each) for each in group))
    return verdicts


async def _judged(course: Course, named: Named) -> Verdict:
    try:
        await named.check(course)
    except ConfigError:
        raise
    except (Broken, HoldfastError, ValueError) as error:
        return Verdict(named.name, str(error))
    return Verdict(named.name, None)
