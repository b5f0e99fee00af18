"""Heartbeats and deregistration of workers over HTTP."""

from __future__ import annotations

from typing import Annotated, Any

import msgspec
from msgspec import Meta

from holdfast.core.lifecycle import Released
from holdfast.core.workers import LeaseStatus
from holdfast.views.documents import ID, Counted
from holdfast.web.claims import CommandName, heartbeat_of, lease_for
from holdfast.web.fields import BodySchema
from holdfast.web.lease_tokens import LEASE, LEASES, STATUS_FIELDS, WORKER, parse_worker, read_leases, worker_of
from holdfast.web.messages import ApiResponse, json_response
from holdfast.web.remote_workers import RemoteEnding
from holdfast.web.routing import Operation, RequestContext, ResponseSpec


class LeaseAnswer(msgspec.Struct, frozen=True, kw_only=True):
    """Outcome of one lease."""

    id: Annotated[str, Meta(description="Of the job.", examples=[ID])]
    verdict: Annotated[
        LeaseStatus,
        Meta(
            description="`held`: it is the worker's for another `lease`. `cancel`: that too, but an operator wants the "
            "job stopped: stop it and settle it as `cancelled`. `locked`: it is the worker's, but was not extended: "
            "another transaction holds the job; extend it again soon. `lost`: the lease has ended, and "
            "another worker may have the job: stop it, and do not settle it."
        ),
    ]


class HeartbeatAnswer(msgspec.Struct, frozen=True, kw_only=True):
    """The leases in the order of the request, and a command for the worker."""

    leases: list[LeaseAnswer]
    lease: Annotated[float, Meta(description="Seconds for which what is held is the worker's now.")]
    command: CommandName


class DeregisterAnswer(msgspec.Struct, frozen=True):
    """The worker is forgotten."""

    released: Annotated[Counted, Meta(description="Jobs it had claimed, and that others can take now.")]


EXTEND = BodySchema(
    name="ExtendRequest",
    doc="The jobs that a worker has claimed. A worker that has nothing says so, and stays listed.",
    fields=(WORKER, LEASES, LEASE, *STATUS_FIELDS),
)
DEREGISTER = BodySchema(
    name="DeregisterRequest",
    doc="A worker that stops, and the jobs it gives back: what it does not name stays its own until the lease ends.",
    fields=(WORKER, LEASES),
)


async def extend(call: RequestContext) -> ApiResponse:
    """Extends the worker's leases and returns a command for it."""
    worker, span = worker_of(call), lease_for(call)
    await call.remote_workers.start_sweeper()
    store = await call.app.open_store()
    records = await read_leases(store, worker, call.body["leases"])
    leases = [record.lease for record in records if record.has_lease]
    reply = await call.remote_workers.heartbeat(heartbeat_of(call, parse_worker(call)), leases, span)
    verdicts = dict(zip(leases, reply.statuses, strict=True))
    kept = [LeaseAnswer(id=each.lease.job_id, verdict=verdicts.get(each.lease, LeaseStatus.LOST)) for each in records]
    return json_response(200, HeartbeatAnswer(leases=kept, lease=span.total_seconds(), command=reply.command))


async def deregister(call: RequestContext) -> ApiResponse:
    """Releases the worker's jobs and deregisters it."""
    worker = worker_of(call)
    store = await call.app.open_store()
    records = await read_leases(store, worker, call.body["leases"])
    endings = [RemoteEnding(each.job, Released()) for each in records if each.has_lease and each.job is not None]
    answers = await call.remote_workers.settle(worker, endings)
    released = [answer.job_id for answer in answers if answer.accepted]
    call.changed += released
    await store.queueing.deregister(worker)
    call.remote_workers.remove_worker(worker)
    return json_response(200, DeregisterAnswer(len(released)))


_KEPT: dict[str, Any] = {"leases": [{"id": ID, "verdict": "held"}], "lease": 30.0, "command": "none"}
OPERATIONS = (
    Operation(
        name="extend_leases",
        method="POST",
        path="/v1/claims/extend",
        scope="work",
        group="Work",
        summary="Extend the leases of jobs, and hear of cancellations and commands",
        doc="At least every third of a lease. It is also what keeps a worker in the list of workers.",
        handler=extend,
        quiet=True,
        body=EXTEND,
        batch=True,
        answers={200: ResponseSpec(HeartbeatAnswer, "What became of each lease, in their order.", _KEPT)},
    ),
    Operation(
        name="deregister_worker",
        method="POST",
        path="/v1/claims/leave",
        scope="work",
        group="Work",
        summary="Give jobs back and stop",
        handler=deregister,
        body=DEREGISTER,
        batch=True,
        answers={200: ResponseSpec(DeregisterAnswer, "How many jobs were given back.", {"released": 1})},
    ),
)
