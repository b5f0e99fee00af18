"""Settling: how a running job stops running. One statement for a batch's successes, another for everything else.

A settlement waits for nobody's transaction: the statements give up a locked row within moments, and then the rest of
the batch goes on without it. What was sent and never answered is found again when it is asked for the second time.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from operator import attrgetter
from typing import NamedTuple

from holdfast.errors import HoldfastError
from holdfast.job import TERMINAL, JobState, Settled, Settlement
from holdfast.stores.postgres.cursors import END, START, Place
from holdfast.stores.postgres.links import Links, Locked
from holdfast.stores.postgres.rows import settlement_columns, text_or_none
from holdfast.stores.postgres.statements import Query
from holdfast.stores.sql import STATES

_REMEMBERED = 10_000  # jobs of which something is remembered until they are asked for again
_job_id = attrgetter("job_id")


class Settling:
    """The verb, over the store's named statements. ``tell`` hears of queues with something ready, and of what ended."""

    def __init__(
        self,
        links: Links,
        statements: Mapping[str, Query],
        tell: Callable[[Mapping[str, Place], Sequence[str]], None],
    ) -> None:
        self._links = links
        self._sql = statements
        self._tell = tell
        self._doubtful: set[tuple[str, int]] = set()  # leases whose settlement was sent, and its answer lost
        self._locked: set[str] = set()  # jobs that others had in hand when they were to be settled

    async def settle(self, settlements: Sequence[Settlement]) -> list[Settled]:
        """Apply what is still guarded; what neither statement took is told where it stands."""
        ids = [each.job_id for each in settlements]
        if len(set(ids)) < len(ids):
            return await self._settle_in_rounds(settlements)
        answers: dict[str, Settled] = {}
        ordered = sorted(settlements, key=_job_id)  # as all who write several rows lock them
        try:
            locked = await self._settle_free(ordered, answers)
            if len(answers) < len(ordered):
                await self._stand([each for each in ordered if each.job_id not in answers], locked, answers)
        except HoldfastError:
            self._doubt([each for each in ordered if each.job_id in answers])  # nobody hears of these answers
            raise
        if self._doubtful:
            self._doubtful.difference_update((each.job_id, each.claims) for each in ordered)
        return [answers[job_id] for job_id in ids]

    async def _settle_in_rounds(self, settlements: Sequence[Settlement]) -> list[Settled]:
        """Several for one job, as after a crash: each job once a round."""
        answers: dict[int, Settled] = {}
        left = dict(enumerate(settlements))
        while left:
            turn = {each.job_id: place for place, each in reversed(left.items())}  # the first of each job
            places = sorted(turn.values())
            settled = await self.settle([left.pop(place) for place in places])
            answers.update(zip(places, settled, strict=True))
        return [answers[place] for place in range(len(settlements))]

    async def _settle_free(self, ordered: Sequence[Settlement], answers: dict[str, Settled]) -> Collection[str]:
        """Settle all but what others have in hand: the ids of these."""
        locked: set[str] = set()
        if self._locked:  # what was locked the last time is not waited for again
            locked = await self._still_locked([each.job_id for each in ordered if each.job_id in self._locked])
        try:
            await self._settle_both([each for each in ordered if each.job_id not in locked], answers)
        except Locked:
            locked = await self._still_locked([each.job_id for each in ordered if each.job_id not in answers])
            free = [each for each in ordered if each.job_id not in answers and each.job_id not in locked]
            await self._settle_both(free, answers)
        return locked

    async def _still_locked(self, job_ids: Sequence[str]) -> set[str]:
        """Those of these jobs that others have in hand, or that are gone."""
        rows = await self._links.fetch(self._sql["unlocked"], ids=job_ids) if job_ids else []
        locked = set(job_ids).difference(job_id for (job_id,) in rows)
        if len(self._locked) > _REMEMBERED:
            self._locked.clear()
        self._locked.difference_update(job_ids)
        self._locked |= locked
        return locked

    async def _settle_both(self, batch: Sequence[Settlement], answers: dict[str, Settled]) -> None:
        simple = [each for each in batch if each.state is JobState.SUCCEEDED and not each.expired]
        if simple:
            await self._settle_simple(simple, answers)
        if len(simple) < len(batch):
            rest = [each for each in batch if each.state is not JobState.SUCCEEDED or each.expired]
            await self._settle_rest(rest, answers)

    async def _settle_simple(self, batch: list[Settlement], answers: dict[str, Settled]) -> None:
        rows = await self._links.fetch(
            self._sql["settle_succeeded"],
            doubt=lambda: self._doubt(batch),
            ids=[each.job_id for each in batch],
            claims=[each.claims for each in batch],
            results=[text_or_none(each.result) for each in batch],
        )
        if len(rows) < len(batch):
            taken = {job_id for (job_id,) in rows}
            batch = [each for each in batch if each.job_id in taken]
        for each in batch:
            answers[each.job_id] = Settled(each.job_id, each.claims, True, JobState.SUCCEEDED)
        self._tell({}, [each.job_id for each in batch])

    async def _settle_rest(self, batch: list[Settlement], answers: dict[str, Settled]) -> None:
        rows = await self._links.fetch(
            self._sql["settle_rest"], doubt=lambda: self._doubt(batch), **settlement_columns(batch)
        )
        ended: list[str] = []
        firsts: dict[str, Place] = {}
        for turn, code, run_at, queue in rows:
            each, state = batch[turn - 1], STATES[code]
            answers[each.job_id] = Settled(each.job_id, each.claims, True, state, run_at)
            if state in TERMINAL:
                ended.append(each.job_id)
            elif state is JobState.QUEUED:
                firsts[queue] = START  # given back: to where it was
            else:
                firsts.setdefault(queue, END)  # not ready yet; who sleeps until something falls due must know
        self._tell(firsts, ended)

    def _doubt(self, batch: Sequence[Settlement]) -> None:
        if len(self._doubtful) > _REMEMBERED:
            self._doubtful.clear()
        self._doubtful.update((each.job_id, each.claims) for each in batch)

    # ── what was not applied ──────────────────────────────────────────────────────────────────────────────────
    async def _stand(self, refused: Sequence[Settlement], locked: Collection[str], answers: dict[str, Settled]) -> None:
        """What became of the jobs whose settlement was refused now; some were accepted before, unanswered."""
        rows = await self._links.fetch(
            self._sql["fates"], ids=[each.job_id for each in refused], claims=[each.claims for each in refused]
        )
        ended = []
        for turn, *row in rows:
            each, fate = refused[turn - 1], Fate(*row)
            state = accepted_as(each, fate) if (each.job_id, each.claims) in self._doubtful else None
            if state is None:
                waits = each.job_id in locked and fate.is_running(each.claims)
                answers[each.job_id] = Settled(each.job_id, each.claims, False, fate.stands, locked=waits)
                continue
            run_at = fate.run_at if state is JobState.FAILED and fate.claims == each.claims else None
            answers[each.job_id] = Settled(each.job_id, each.claims, True, state, run_at)
            if state in TERMINAL:
                ended.append(each.job_id)
        self._tell({}, ended)


class Fate(NamedTuple):
    """What became of a job, and of its attempt under one lease."""

    state: int | None  # of the job; None: it is gone
    claims: int | None
    run_at: int | None
    left: int | None  # the state in which the attempt left it; None: there is no record, as of success
    reason: str | None  # of the attempt
    error: str | None

    @property
    def stands(self) -> JobState | None:
        return None if self.state is None else STATES[self.state]

    def is_running(self, claims: int) -> bool:
        """Whether it still runs under this lease, or ran when the lease ended."""
        return self.claims == claims and self.stands is JobState.RUNNING


def accepted_as(settlement: Settlement, fate: Fate) -> JobState | None:
    """Where a settlement whose answer was lost left its job, whatever others did since; None: it was not applied.

    Attempts leave a record, but for those that succeeded or were given back: of these nothing is known but that the
    lease has ended, and with a record of somebody else's if it was lost.
    """
    if fate.left is not None:
        ours = (settlement.reason, text_or_none(settlement.error)) == (fate.reason, fate.error)
        return STATES[fate.left] if ours and not settlement.refund else None
    if fate.claims is None or fate.claims < settlement.claims or fate.is_running(settlement.claims):
        return None
    if settlement.state is not JobState.SUCCEEDED and not settlement.refund:
        return None
    asked_to_stop = settlement.refund and fate.claims == settlement.claims and fate.stands is JobState.CANCELLED
    return JobState.CANCELLED if asked_to_stop else settlement.state
