"""Batches as they are drafted: a job without a handler, its members, and the jobs that its end starts."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from msgspec.structs import replace

from holdfast.app.handle import JobHandle, check_drafts
from holdfast.core.batches import BATCH_TASK
from holdfast.core.dependencies import Condition, Dependency
from holdfast.core.errors import Invalid
from holdfast.core.ids import check_id, derive_id, new_id, parse_id
from holdfast.core.models import NO_OPTIONS, NewJob, Options
from holdfast.core.validation import check_metadata, check_name, check_tags

MAX_MEMBERS = 10_000
"""Members of a batch at its submission; its members may add any number later."""

Batch = str | NewJob | JobHandle[Any]
"""A batch: its id, handle or draft."""

Callbacks = NewJob | Iterable[NewJob]
"""Drafted jobs that the end of a batch starts."""


def draft_batch(
    jobs: Iterable[NewJob],
    callbacks: Sequence[tuple[Condition, Callbacks]],
    *,
    id: str | None,
    batch: Batch | None,
    queue: str | None,
    tags: Sequence[str],
    metadata: dict[str, object] | None,
) -> list[NewJob]:
    """Returns a batch and its members and callbacks, in this order.

    With an ``id`` given, the ids of the others derive from it, unless they have one: the same submission is harmless.
    """
    members = _check_members(jobs)
    batch_id = new_id() if id is None else check_id(id)
    options = Options(
        tags=check_tags(tags) if tags else (),
        metadata=check_metadata(metadata) if metadata else None,
        batch=None if batch is None else parse_batch(batch),
    )
    new = NewJob(
        id=batch_id,
        has_client_id=id is not None,
        task=BATCH_TASK,
        payload="{}",
        queue=members[0].queue if queue is None else check_name("queue", queue),
        options=options if options != NO_OPTIONS else None,
        is_batch=True,
    )
    named = {
        f"{number}": replace(job, options=replace(job.options or NO_OPTIONS, batch=batch_id))
        for number, job in enumerate(members)
    }
    for condition, given in callbacks:
        dependency = Dependency(batch_id, condition)
        named |= {
            f"{condition} {number}": replace(job, after=(*job.after, dependency))
            for number, job in enumerate(_check_callbacks(condition, given))
        }
    for job in (new, *named.values()):
        check_waits(job)
    return [new, *_with_ids(named, batch_id, derive_all=id is not None)]


def _check_members(jobs: object) -> list[NewJob]:
    if not isinstance(jobs, Iterable):
        raise Invalid("jobs", jobs, "give a list of drafted jobs: [task.new_job(…)]")
    members = [*jobs]
    if not members:
        raise Invalid("jobs", "none", "give at least one: a batch ends with its last job", "were given")
    if len(members) > MAX_MEMBERS:
        remedy = f"give up to {MAX_MEMBERS:,}; a job of the batch may add further ones: options(batch=context.batch_id)"
        raise Invalid("jobs", len(members), remedy)
    check_drafts(members)
    for number, job in enumerate(members):
        if job.is_batch or job.batch is not None:
            raise Invalid(f"jobs[{number}].batch", job.batch, "give jobs that are in no batch yet")
    return members


def _check_callbacks(condition: Condition, given: Callbacks) -> list[NewJob]:
    drafts = [*given] if isinstance(given, Iterable) else [given]
    check_drafts(drafts, f"on_{condition}")
    return drafts


def check_waits(job: NewJob) -> None:
    """Raises Invalid for a member of a batch that waits for its end: neither would ever end."""
    if job.batch is not None and any(each.job_id == job.batch for each in job.after):
        raise Invalid("after", job.batch, "leave it out: it is the batch of this job, and ends after it")
    if job.batch == job.id:
        raise Invalid("batch", job.batch, "leave it out: a batch is no member of itself")


def _with_ids(named: Mapping[str, NewJob], batch_id: str, *, derive_all: bool) -> list[NewJob]:
    """Returns the jobs with ids that derive from the batch's and their names in it, unless clients gave them.

    Without ``derive_all`` only a draft that is given again, say on success and on failure, gets another id.
    """
    ids: dict[str, str] = {}
    taken: set[str] = set()
    found: list[NewJob] = []
    for name, job in named.items():
        unique = None if job.unique is None else job.unique.key
        keys = [job.key, unique, job.id if job.has_client_id else None]
        shared = [each for each in keys if each is not None and each in taken]
        if shared and job.batch != batch_id and not job.is_batch:  # the store would take it for the other one
            remedy = "give each callback an id and a key of its own"
            raise Invalid(f"on_{name.split()[0]}", shared[0], remedy, "is that of another job of the batch")
        taken.update(each for each in (job.id, *keys) if each is not None)
        derives = not job.has_client_id and (derive_all or job.id in ids)
        job_id = derive_id(batch_id, name) if derives else job.id
        ids.setdefault(job.id, job_id)
        after = tuple(replace(each, job_id=ids.get(each.job_id, each.job_id)) for each in job.after)
        found.append(replace(job, id=job_id, has_client_id=job.has_client_id or derive_all, after=after))
    return found


def parse_batch(batch: Batch) -> str:
    """Returns the id of a batch. Raises Invalid for what names no job."""
    reference: object = batch.id if isinstance(batch, NewJob | JobHandle) else batch
    batch_id = parse_id(reference) if isinstance(reference, str) else None
    if batch_id is None:
        raise Invalid("batch", reference, "give a batch: its id or handle")
    return batch_id
