"""A bridge from a Celery application to Holdfast: `pip install 'holdfast[celery]'`.

While an application moves, ``.delay()``, ``apply_async(…)`` and ``send_task(…)`` submit to Holdfast the tasks that
are registered there under the same name, and ``revoke`` cancels their jobs. The other tasks and the messages of
workflows go to Celery's broker as before.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime, timedelta
from functools import wraps
from typing import Any
from uuid import UUID

try:
    from celery import Celery
except ModuleNotFoundError as error:
    raise ImportError("holdfast.integrations.celery needs Celery; pip install 'holdfast[celery]'") from error

from holdfast.app import Holdfast
from holdfast.core.errors import ConfigError, Invalid, NotFound
from holdfast.core.ids import parse_id
from holdfast.core.models import JobState, NewJob
from holdfast.core.portal import call_off_loop
from holdfast.core.validation import PEER_OPTIONS

__all__ = ["add_bridge"]

_USAGE = "add_bridge(celery_app, app)"

_WORKFLOWS = {
    "link": "submit the next job with .options(after=job.id)",
    "link_error": 'submit it with .options(after=Dependency(job.id, "failure"))',
    "chord": "submit await app.enqueue_batch(jobs, on_success=body.new_job())",
    "chain": "submit await app.enqueue_many(chain_jobs(…)), or await context.call(…) for results",
    "group_id": "submit await app.enqueue_many([…])",
}
"""Options of a message that belongs to a workflow of Celery, with what replaces the workflow.

Celery sends a workflow message by message, and its workers send the rest. So the bridge takes all of it or nothing.
"""
_CONTINUED = ("retries", "root_id", "parent_id", "reply_to")
"""Options of a message that a worker of Celery sends: a retry, the next step of a workflow, or the body of a chord."""
_GOVERNED = ("time_limit", "soft_time_limit", "serializer", "compression")
"""Options that Celery takes from a task's decorator or the settings; here the task registered in Holdfast has them."""
_REMEDIES = PEER_OPTIONS | dict.fromkeys(
    ("time_limit", "soft_time_limit"), "give the task a timeout here: @app.task(timeout=30)"
)
"""Options of Celery that have no equivalent in a submission, with the remedy."""
_IGNORED = frozenset(
    {
        *("producer", "publisher", "connection", "router", "result_cls", "add_to_parent", "group_index", "retries"),
        *("route_name", "task_type", "replaced_task_nesting", "ignore_result"),
        *("periodic_task_name", "delivery_mode", "immediate", "mandatory", "retry", "retry_policy"),
    }
)
"""Options that concern only how Celery publishes a message and keeps a result."""
_HEADERS = frozenset(
    {"celery_beat_task", "periodic_task_name", "baggage", "traceparent", "tracestate", "b3", "newrelic"}
)
_HEADER_PREFIXES = ("sentry-", "x-datadog-", "x-b3-", "elastic-apm-")
"""Headers of Celery beat and of tracing libraries, not of the caller."""


def add_bridge(celery_app: Celery, app: Holdfast, *, names: Mapping[str, str] | None = None) -> None:
    """Submits tasks of ``celery_app`` to ``app`` from now on, if they are registered in ``app``.

    ``names``: the task of ``app`` for a task of Celery, if their names differ. A submission returns a ``JobHandle``.
    Chains, groups, chords, links and retries stay with Celery.
    """
    if not isinstance(celery_app, Celery):
        raise Invalid("celery_app", celery_app, f"give the application of Celery: {_USAGE}")
    if not isinstance(app, Holdfast):
        raise Invalid("app", app, f"give the application of Holdfast: {_USAGE}")
    renamed = dict(names or {})
    unknown = sorted(name for name in renamed.values() if name not in app.registry)
    if unknown:
        raise ConfigError(f"names: the application has no task {unknown[0]!r}; register it before the bridge")
    if hasattr(celery_app.send_task, "holdfast"):
        raise ConfigError("this application of Celery has a bridge already; call add_bridge() once")
    send_to_celery = celery_app.send_task
    noted: set[tuple[str, str]] = set()

    @wraps(send_to_celery)
    def send_task(
        name: str, args: Sequence[Any] | None = None, kwargs: Mapping[str, Any] | None = None, **options: Any
    ) -> Any:
        here = renamed.get(name, name)
        if here not in app.registry or _stays_in_celery(name, options, noted):
            return send_to_celery(name, args, kwargs, **options)
        options = celery_app.amqp.router.route(dict(options), name, args, kwargs, options.get("task_type"))
        job = _draft_job(celery_app, app, here, args or (), kwargs or {}, options)
        return call_off_loop(lambda: app.sync.submit(job))

    send_task.holdfast = app  # type: ignore[attr-defined]
    celery_app.send_task = send_task
    celery_app.control.revoke = _cancel_jobs(celery_app.control.revoke, app)
    celery_app.AsyncResult = _warn_of_jobs(celery_app.AsyncResult)


def _cancel_jobs(revoke_in_celery: Callable[..., Any], app: Holdfast) -> Callable[..., Any]:
    """Returns ``control.revoke`` that cancels jobs, and passes the other ids on. As in Celery, one that runs is
    stopped only with ``terminate=True``."""

    def cancel(job_id: str, terminate: bool) -> bool:
        try:
            state = app.sync.get(job_id).state
        except NotFound:
            return False
        if terminate or state is not JobState.RUNNING:
            app.sync.cancel(job_id)
        return True

    @wraps(revoke_in_celery)
    def cancel_or_revoke(
        task_id: str | Sequence[str], destination: Any = None, terminate: bool = False, *args: Any, **kwargs: Any
    ) -> Any:
        ids = [task_id] if isinstance(task_id, str) else list(task_id)
        others = call_off_loop(lambda: [each for each in ids if parse_id(each) is None or not cancel(each, terminate)])
        if not others:
            return None
        return revoke_in_celery(
            others[0] if isinstance(task_id, str) else others, destination, terminate, *args, **kwargs
        )

    return cancel_or_revoke


def _warn_of_jobs(result_class: type[Any]) -> type[Any]:
    """Returns a class of results that logs one warning if it is asked for the id of a job: Celery has no such state.

    Holdfast's ids are UUIDs of version 7, Celery's of version 4. So no id has to be remembered or looked up.
    """
    warned: list[str] = []

    class AsyncResult(result_class):  # type: ignore[misc]  # Celery has no types
        def __init__(self, id: str, *args: Any, **kwargs: Any) -> None:
            super().__init__(id, *args, **kwargs)
            if not warned and _is_job_id(id):
                warned.append(id)
                text = (
                    "AsyncResult: %s looks like the id of a bridged job, which stays PENDING in Celery; "
                    "ask Holdfast: app.handle(id).sync.state(), .sync.result()"
                )
                logging.getLogger(__name__).warning(text, id)

    return AsyncResult


def _is_job_id(id: object) -> bool:
    try:
        return UUID(str(id)).version == 7
    except ValueError:
        return False


def _stays_in_celery(name: str, options: Mapping[str, Any], noted: set[tuple[str, str]]) -> bool:
    """Returns True for a message of a workflow, with one warning for each task and kind, and for a retry."""
    workflow = next((option for option in _WORKFLOWS if options.get(option)), None)
    if workflow is not None and (name, workflow) not in noted:
        noted.add((name, workflow))
        text = "task %s: messages with %s stay in Celery; to move them, %s"
        logging.getLogger(__name__).warning(text, name, workflow, _WORKFLOWS[workflow])
    return workflow is not None or any(options.get(option) for option in _CONTINUED)


def _draft_job(
    celery_app: Celery,
    app: Holdfast,
    name: str,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    options: dict[str, Any],
) -> NewJob:
    task = app.registry.get(name)
    assert task is not None  # noqa: S101 - the caller has looked it up
    payload = task.encode(args, dict(kwargs), app.settings.payload_limit)
    return app.draft_job(name, payload, **_translate_options(celery_app, options))


def _translate_options(celery_app: Celery, options: dict[str, Any]) -> dict[str, Any]:
    """Returns the options of a job; Invalid for an option that would be lost."""
    options = {**options, "headers": _callers_headers(options.get("headers") or {})}
    given = {name: value for name, value in options.items() if value not in (None, [], (), {}) and name not in _IGNORED}
    for name in _GOVERNED:
        if name in given and given[name] == getattr(options.get("task_type"), name, None):
            del given[name]
    if given.get("serializer") == "json":
        del given["serializer"]
    queue = _queue_name(celery_app, given.pop("queue", None))
    if queue is not None:  # it is named: routes have these beside it
        given = {name: value for name, value in given.items() if name not in ("exchange", "routing_key")}
    eta, countdown, expires = given.pop("eta", None), given.pop("countdown", None), given.pop("expires", None)
    translated = {
        "delay": None if eta is not None else 0 if isinstance(countdown, int | float) and countdown < 0 else countdown,
        "run_at": None if eta is None else _as_aware(celery_app, eta),
        "expires": expires if isinstance(expires, int | float | timedelta | None) else _as_aware(celery_app, expires),
        "queue": queue,
        "id": given.pop("task_id", None),
    }
    if translated["id"] is not None and parse_id(str(translated["id"])) is None:
        raise Invalid("task_id", translated["id"], "give a UUID, or leave it out")
    priority = given.pop("priority", None)
    if priority is not None:
        # In Redis, Celery serves low numbers first; in every other broker high ones.
        is_redis = celery_app.connection_for_write().transport_cls in ("redis", "rediss", "sentinel")
        translated["priority"] = -priority if is_redis else priority
    for name, value in given.items():
        remedy = _REMEDIES.get(name, "leave it out, or send this task to Celery: do not register it in Holdfast yet")
        raise Invalid(name, value, remedy, "has no equivalent in Holdfast")
    return translated


def _callers_headers(headers: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the headers without those of beat and of tracing, which Sentry repeats in a header named ``headers``."""
    flat = {**headers, **(headers.get("headers") or {})}
    flat.pop("headers", None)
    return {
        name: value
        for name, value in flat.items()
        if name.lower() not in _HEADERS and not name.lower().startswith(_HEADER_PREFIXES)
    }


def _as_aware(celery_app: Celery, instant: datetime | str) -> datetime:
    """Returns an instant with an offset: as in Celery, one without is in the application's time zone."""
    parsed = datetime.fromisoformat(instant) if isinstance(instant, str) else instant
    return parsed if parsed.tzinfo else parsed.replace(tzinfo=celery_app.timezone)


def _queue_name(celery_app: Celery, queue: Any) -> str | None:
    """Returns the name of a queue, which Celery also has as an object; None for its default queue."""
    name = getattr(queue, "name", queue)
    return None if name in (None, celery_app.conf.task_default_queue) else str(name)
