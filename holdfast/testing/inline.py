"""Inline mode: enqueue runs the job at once. Manual mode: jobs are only stored. Both use a store of the test's own."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from holdfast.app import Holdfast
from holdfast.app.submitter import Submitter
from holdfast.core.errors import HoldfastError
from holdfast.core.models import Job, NewJob, Submitted
from holdfast.testing.job_runner import JobRunner
from holdfast.testing.temporary_stores import TemporaryStore, close_from_outside, temporary_store
from holdfast.testing.transactions import RunJobs, TrackedTransactions, without_delay


@contextmanager
def manual(app: Holdfast, *, url: str | TemporaryStore | None = None) -> Iterator[None]:
    """Inside, jobs are stored and do not run: see ``assert_enqueued`` and ``run_enqueued``.

    ``url``: the test's database, where jobs are part of its transactions; they go to a store of their own there, which
    is removed in the end. A ``TemporaryStore`` is emptied instead. Without ``url`` the store is a private SQLite file.
    """
    runner = JobRunner(app)
    with override_store(app, {}, url=url, middlewares=[runner.remember_error, *app.middlewares]) as store:
        run_jobs = _committed_jobs(runner, store)
        transactions = TrackedTransactions(app, has_url=url is not None, run_jobs=run_jobs, is_inline=False)
        vars(app).update(external_tx=transactions, _job_runner=runner)
        yield


@contextmanager
def inline(app: Holdfast, *, url: str | TemporaryStore | None = None) -> Iterator[None]:
    """Inside, ``enqueue`` runs the job once, delayed or not, before it returns. ``url``: as for ``manual``.

    ``enqueue`` raises the error of the handler: one attempt, no retry. After ``Snooze`` and ``RetryAfter`` the job is
    scheduled. An argument or a result that does not fit raises JobFailed. A job in the transaction of a SQLAlchemy
    session runs when the session commits, and the commit raises its error; on other connections ``run_enqueued`` runs
    it.
    """
    runner = JobRunner(app)
    with override_store(app, {}, url=url, middlewares=[runner.remember_error, *app.middlewares]) as store:
        run_jobs = _committed_jobs(runner, store)
        transactions = TrackedTransactions(app, has_url=url is not None, run_jobs=run_jobs, is_inline=True)
        vars(app).update(
            _submitter=InlineSubmitter(app, runner), external_tx=transactions, _job_runner=runner, is_inline=True
        )
        yield


def _committed_jobs(runner: JobRunner, store: TemporaryStore | None) -> RunJobs:
    """Returns a function that runs committed jobs: copies of them where only an open transaction has them."""

    async def run_committed(jobs: Sequence[NewJob], is_inside: bool) -> Sequence[Job]:
        if is_inside and store is not None:
            return await runner.run_copies(jobs, store.open_copies())
        await runner.run_jobs([job.id for job in jobs])
        return []

    return run_committed


async def run_enqueued(app: Holdfast) -> None:
    """Runs every job that is ready, once, also those that become ready by it; raises the first error of a handler.

    It also runs jobs that only an open transaction has: of sessions that have committed inside it, and of connections
    that tell nothing of their commit.
    """
    runner: JobRunner | None = vars(app).get("_job_runner")
    if runner is None:
        raise HoldfastError(
            "this application is in no mode that runs jobs on demand; wrap the test in testing.manual(app) or "
            "testing.inline(app)"
        )
    ran = await app.external_tx.run_pending() if isinstance(app.external_tx, TrackedTransactions) else ()
    await runner.run_ready(ran)


class InlineSubmitter(Submitter):
    """Submitter that runs the stored jobs before it returns."""

    def __init__(self, app: Holdfast, runner: JobRunner) -> None:
        super().__init__(app.open_store, lambda: app.settings, app.events, app.spans, app._as_stored)
        self._runner = runner

    async def submit(self, job: NewJob) -> Submitted:
        answer = await super().submit(without_delay(job))
        await self._run([answer])
        return answer

    async def submit_all(self, jobs: Sequence[NewJob]) -> list[Submitted]:
        answers = await super().submit_all([without_delay(job) for job in jobs])
        await self._run(answers)
        return answers

    async def _run(self, answers: Sequence[Submitted]) -> None:
        await self._runner.run_jobs([answer.job_id for answer in answers if answer.created])


@contextmanager
def override_store(
    app: Holdfast, changed: Mapping[str, Any], *, url: str | TemporaryStore | None = None, **others: Any
) -> Iterator[TemporaryStore | None]:
    """Inside, ``app`` has a store of the test's own, the settings ``changed``, and these other attributes.

    Afterwards it is restored, and the store is removed, or emptied if it is a ``TemporaryStore``. Yields the temporary
    store; None if there is no ``url``.
    """
    before = dict(vars(app))
    stores = {view: vars(view)["_store"] for view in app.views}
    with ExitStack() as stack:
        temporary = None if url is None else stack.enter_context(_emptied(url))
        own_url = stack.enter_context(_private_url()) if temporary is None else temporary.url
        for view in stores:
            vars(view)["_store"] = None
        settings = app.settings.replace_values(**{"url": own_url, "transport": "none", **changed})
        submitter = Submitter(app.open_store, lambda: settings, app.events, app.spans, app._as_stored)
        vars(app).update({"settings": settings, "_store": None, "_submitter": submitter, "under_test": True, **others})
        kept = None
        if temporary is url and temporary is not None and own_url.startswith("postgres") and "now" not in others:
            kept = temporary.keep_store(app, app.new_store)  # a new one on SQLite or Redis is as quick
        vars(app)["_store"] = kept
        try:
            yield temporary
        finally:
            for each in (app, *app.views):
                if (store := vars(each)["_store"]) not in (None, kept):
                    close_from_outside(store)
                vars(each)["_store"] = stores.get(each)
            vars(app).clear()
            vars(app).update(before)


@contextmanager
def _private_url() -> Iterator[str]:
    with tempfile.TemporaryDirectory(prefix="holdfast-test-") as folder:
        yield f"sqlite:///{Path(folder) / 'jobs.db'}"


@contextmanager
def _emptied(url: str | TemporaryStore) -> Iterator[TemporaryStore]:
    if isinstance(url, TemporaryStore):
        yield url
        url.delete_rows()
    else:
        with temporary_store(url) as made:
            yield made
