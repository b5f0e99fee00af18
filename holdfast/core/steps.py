"""Steps of workflows: what the handler of a job has done, kept with the job."""

from __future__ import annotations

import msgspec

from holdfast.core.errors import Invalid
from holdfast.core.models import Lease
from holdfast.core.validation import is_printable_line

MAX_STEPS = 10_000
"""Steps of one job."""
MAX_RESULTS = 64 * 1024 * 1024
"""Characters of the results of all steps of a job: each attempt but the first reads them."""
MAX_NAME = 200
"""Characters of a step's name."""


def check_step_name(name: object, field: str = "step") -> str:
    """Returns the name of a step, or the topic of a signal; raises Invalid for one that neither can have."""
    if not isinstance(name, str) or not is_printable_line(name) or len(name) > MAX_NAME or "#" in name:
        raise Invalid(field, name, f"give one line of text of up to {MAX_NAME} characters, without #")
    return name


class NewStep(msgspec.Struct, frozen=True, gc=False):
    """A step that has ended, to be stored.

    name: unique among the steps of its job. number: position of its call, from 1; 0: not a step, but a saved value of
    the job (state, progress), which replaces the one of that name. is_ordered: the code fixes its position among such
    calls, which a replay checks: the handler itself called it, alone, not a task that it started. result: JSON text;
    None for None. worker: whose lease it is; None: not compared.
    """

    lease: Lease
    name: str
    number: int
    is_ordered: bool
    result: str | None = None
    worker: str | None = None


class StepReceipt(msgspec.Struct, frozen=True, gc=False):
    """Answer to a step in a caller's transaction. has_lease: the job's lease is still valid. is_recorded: the step was
    inserted; it stays if the caller commits."""

    has_lease: bool
    is_recorded: bool = False


STATE = "#state"
"""Name of the value that ``context.state`` saves."""
CHILDREN = "#children"
"""Name of the value with the calls of the children for which the job waits, or has waited last: name and number."""
PROGRESS = "#progress"
"""Name of the value that ``context.progress`` saves."""


class Progress(msgspec.Struct, frozen=True):
    """Progress of a job. ``total``: None if it is not known."""

    done: float
    total: float | None = None
    message: str = ""
