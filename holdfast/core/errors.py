"""Every error Holdfast raises, and its exit code and HTTP status. ``code``: its stable name over HTTP.

HoldfastError                exit 1    HTTP 500   an internal error of Holdfast
├── Invalid                  exit 2    HTTP 422   a refused value: names the field, the value, the remedy
│   └── TooLarge             exit 2    HTTP 413   over a size limit
├── TooBroad                 exit 1    HTTP 422   the search of a filter exceeded its time
├── ConfigError              exit 78   HTTP 500   an unusable setting, URL, module or file
│   └── StoreMismatch        exit 78   HTTP 500   another program's file or database, or a newer schema
├── NotFound                 exit 1    HTTP 404   no such job, queue, worker
├── Conflict                 exit 1    HTTP 409   the state does not allow it
│   └── LeaseLost            exit 1    HTTP 409   the lease has expired or was superseded; nothing was written
├── Unavailable              exit 75   HTTP 503   the store is away or full, a name or port is taken; try again
│   ├── Busy                 exit 75   HTTP 503   too many searches by a filter at once
│   └── StoreReplaced        exit 75   HTTP 503   files of an open store were replaced; restart the program
├── QueueFull                exit 75   HTTP 429   as many jobs wait as a limit allows
├── RateLimited              exit 1    HTTP 429   a limit has too few tokens for a handler
├── DecryptionFailed         exit 1    HTTP 409   an encrypted text, without its key or changed
├── WaitTimeout              exit 75   HTTP 500   jobs of a tag have not ended in time (also a TimeoutError)
├── ForkedConnection         exit 1    HTTP 500   a store opened before fork() was used after it
├── AuditBroken              exit 1    HTTP 500   an audit file is damaged (`telemetry/audit_file.py`)
└── JobOutcome               exit 1    HTTP 200   raised by JobHandle.result()
    ├── JobFailed                                 the job is dead
    ├── JobCancelled                              the job was cancelled
    └── ResultTimeout                             the job has not ended in time (also a TimeoutError)

The exceptions with which a handler ends its attempt are in `lifecycle.py`.
"""

from __future__ import annotations

from collections.abc import Sequence

_SHOWN = 64


def quote_value(value: object) -> str:
    """Returns ``value`` for an error message: quoted, one line, at most 64 characters."""
    text = repr(value)
    return text if len(text) <= _SHOWN else text[: _SHOWN - 1] + "…"


class HoldfastError(Exception):
    """Base of every error of this module.

    ``stored``: if jobs were stored before the error was found, the ids of all jobs that were sent in order, and None
    for each job that is not known to be stored.
    """

    exit_code = 1
    http_status = 500
    code = "internal"
    stored: Sequence[str | None] = ()


class Invalid(HoldfastError):
    """A value that is refused. Nothing was stored or changed, except jobs in ``stored``."""

    exit_code = 2
    http_status = 422
    code = "invalid"

    def __init__(
        self, field: str, value: object, remedy: str, problem: str = "is not valid", *, code: str | None = None
    ) -> None:
        super().__init__(f"{field}: {quote_value(value)} {problem}; {remedy}")
        self.field = field
        self.value = value
        self.remedy = remedy
        if code is not None:
            self.code = code


class TooLarge(Invalid):
    """A value over its size limit."""

    http_status = 413
    code = "too_large"


class TooBroad(HoldfastError):
    """The search of a filter exceeded its time. Nothing was changed."""

    http_status = 422
    code = "too_broad"
    remedy = "narrow the filter: dead and cancelled jobs are found by their status at once; of others ask for fewer"

    def __init__(self, seconds: float) -> None:
        super().__init__(f"what the filter says was not found within {seconds:g} s")


class ConfigError(HoldfastError):
    """An unusable setting, URL, module or file."""

    exit_code = 78
    code = "configuration"


class StoreMismatch(ConfigError):
    """The file or database belongs to another program, is damaged, or was made by a newer Holdfast."""


class NotFound(HoldfastError):
    """There is no such job, queue or worker."""

    http_status = 404
    code = "not_found"


def missing_job(reference: str) -> NotFound:
    """Returns the error for a job that is not there, or not for this caller: the text is the same."""
    return NotFound(
        f"there is no job {reference}: it was deleted, its retention is over, or its transaction has not committed (or "
        "was rolled back)"
    )


class InvalidId(Invalid, NotFound):
    """Text that is no job's id. It is also a `NotFound`, since no job can have it."""


class Conflict(HoldfastError):
    """The state of the job, schedule or limit does not allow the operation."""

    http_status = 409
    code = "conflict"


class LeaseLost(Conflict):
    """The lease was superseded or has expired: the write changed nothing."""

    code = "lease_lost"


class Unavailable(HoldfastError):
    """The store cannot be reached, is busy or full, or a name or port of a worker is taken. Try again later.

    ``outcome``: what is known about the effect of the call, without the location of the store.
    """

    exit_code = 75
    http_status = 503
    code = "unavailable"
    affects_all = True
    """True if every other call fails for the same cause now."""

    def __init__(self, message: str, *, outcome: str = "") -> None:
        super().__init__(message)
        self.outcome = outcome


class Busy(Unavailable):
    """Too many searches by a filter are under way. Nothing was changed."""

    affects_all = False


class StoreReplaced(Unavailable):
    """The files of an open store were removed or replaced. A worker or an API ends with this error; start it again."""


class QueueFull(HoldfastError):
    """A limit allows no more unstarted jobs. Trying again later is right, without the jobs in ``stored``.

    ``bounded``: what is full, as `LimitTable.find_depths` names it.
    """

    exit_code = 75
    http_status = 429
    code = "queue_full"

    def __init__(self, message: str, bounded: str = "") -> None:
        super().__init__(message)
        self.bounded = bounded


class RateLimited(HoldfastError):
    """A handler asked for more tokens than a limit has. The attempt fails, and is retried as others are."""

    http_status = 429
    code = "rate_limited"


class DecryptionFailed(HoldfastError):
    """A payload, result, step or signal is encrypted, and this program lacks its key, or it was changed or moved."""

    http_status = 409
    code = "decryption_failed"


class WaitTimeout(HoldfastError, TimeoutError):
    """Jobs of a tag had not ended when the wait for them was over. They go on."""

    exit_code = 75


class ForkedConnection(HoldfastError):
    """A store opened before ``fork()`` was used in the child. Open it again in the child."""


class JobOutcome(HoldfastError):
    """A job did not end in success; ``job_id`` names it."""

    http_status = 200

    def __init__(self, job_id: str, message: str) -> None:
        super().__init__(message)
        self.job_id = job_id


class JobFailed(JobOutcome):
    """The job is dead: its last error is the message."""


class JobCancelled(JobOutcome):
    """The job was cancelled before it succeeded."""


class ResultTimeout(JobOutcome, TimeoutError):
    """The job had not ended when the wait for its result was over. The job goes on."""

    exit_code = 75
