"""Alerts of an application: ``app.alerts``. Each worker and the API evaluate the rules; one of them sends.

A process that finds a new breach writes it into the store, if no other wrote since it read, and only then sends. What
it has not confirmed after a while, because it failed or died, the next look of any process sends again.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Mapping
from datetime import UTC, datetime, timedelta
from typing import Any, Protocol

from msgspec.structs import replace

from holdfast.app.alert_sinks import NoAnswer, NotSent, send_message
from holdfast.app.sync import Blocker, BlockingMethod, BlockingView
from holdfast.core.alerts import (
    Alert,
    AlertRule,
    SystemState,
    advance_alerts,
    decode_alerts,
    encode_alerts,
    find_breaches,
)
from holdfast.core.clock import Clock
from holdfast.core.errors import HoldfastError
from holdfast.core.events import AlertCleared, AlertFired, AlertNotSent, Events, StoreTrouble
from holdfast.core.history import HistoryInterval
from holdfast.core.models import MICROSECOND, to_datetime, to_microseconds
from holdfast.core.portal import requires_loop
from holdfast.core.schedule import ALERTS_SCHEDULE, Schedule, ScheduleChange
from holdfast.settings.settings import Settings
from holdfast.stores.base import Store

_MAX_COUNTED = 100_000  # jobs of a queue and state
_ROUND_SECONDS = 45.0  # for all messages of one look: less than after which another process would send them
_TRIES = 20  # writes that lose a race before a result is left to the next look


class AlertOwner(Blocker, Protocol):
    """The application whose queues are watched."""

    settings: Settings
    events: Events
    clock: Clock

    async def open_store(self) -> Store: ...


class AlertManager:
    """``app.alerts``: which rules are breached, and a look at them."""

    def __init__(self, app: AlertOwner, settings: Callable[[], Settings] | None = None) -> None:
        """``settings``: those in force; None: of the application."""
        self._app = app
        self._settings = settings or (lambda: app.settings)

    @property
    def sync(self) -> BlockingAlerts:
        """The same methods for blocking callers: ``app.alerts.sync.find_active()``."""
        return BlockingAlerts(self._app, self)

    @requires_loop
    async def find_active(self) -> list[Alert]:
        """Alerts of the rules of these settings that have not cleared, in the order in which they began."""
        rules = self._settings().alerts
        alerts = decode_alerts(await _read_schedule(await self._app.open_store())).values() if rules else ()
        return sorted(
            (each for each in alerts if each.cleared_us is None and each.rule in rules), key=lambda each: each.since_us
        )

    async def send_test(self) -> None:
        """Sends a test message to the receiver of the settings. Raises `NotSent`."""
        settings = self._settings()
        now_us = to_microseconds(datetime.now(UTC))
        text = "this is a test of Holdfast's alerts"
        test = Alert(rule="test", queue="test", text=text, since_us=now_us, attempted_us=now_us)
        await send_message(settings, _message(test, "test"))

    async def evaluate_rules(self) -> list[Alert]:
        """Looks at the rules once, as workers and the API do; returns the alerts whose messages it has sent."""
        settings = self._settings()
        rules = settings.alerts
        if not rules:
            return []
        store = await self._app.open_store()
        known = await _read_schedule(store)
        alerts = decode_alerts(known)
        state = await _read_state(store, rules)
        breaches = find_breaches(rules.values(), state)
        later, to_send = advance_alerts(alerts, breaches, rules, state.now_us, settings.alert_hold_off)
        if later == alerts or not await _write(store, known, later):
            return []  # nothing is new, or another process was faster
        for alert in to_send:
            if alert.attempts == 1:
                self._emit(alert)
        return await self._send(store, settings, to_send)

    def _emit(self, alert: Alert) -> None:
        if alert.cleared_us is None:
            self._app.events.emit(AlertFired(rule=alert.rule, queue=alert.queue, text=alert.text))
        else:
            self._app.events.emit(AlertCleared(rule=alert.rule, queue=alert.queue))

    async def _send(self, store: Store, settings: Settings, to_send: list[Alert]) -> list[Alert]:
        """Sends messages until one fails: the receiver is down, and the rest is sent by a later look."""
        sent: list[Alert] = []
        failed: dict[str, Alert] = {}
        try:
            async with asyncio.timeout(_ROUND_SECONDS):
                for alert in to_send:
                    state = "firing" if alert.cleared_us is None else "cleared"
                    try:
                        await send_message(settings, _message(alert, state))
                    except NotSent as error:
                        failed = {each.key: replace(each, problem=str(error)) for each in to_send[len(sent) :]}
                        if isinstance(error, NoAnswer):
                            failed[alert.key] = replace(failed[alert.key], may_have_arrived=True)
                        self._app.events.emit(AlertNotSent(rule=alert.rule, queue=alert.queue, problem=str(error)))
                        break
                    sent.append(alert)
        except TimeoutError:
            pass
        results = failed | {alert.key: replace(alert, is_sent=True, problem="") for alert in sent}
        await _record_results(store, results)
        return sent


class BlockingAlerts(BlockingView):
    """``app.alerts.sync``: the async methods for blocking callers."""

    __slots__ = ()

    find_active = BlockingMethod(AlertManager.find_active)


async def watch_alerts(app: AlertOwner, settings: Callable[[], Settings], *, service: str) -> None:
    """Evaluates the rules again and again, for a service that runs until it is cancelled."""
    manager = AlertManager(app, settings)
    while True:
        await app.clock.sleep(settings().alert_every.total_seconds() * random.uniform(0.8, 1.0))
        if not settings().alerts or settings().role == "follower":
            continue
        try:
            await manager.evaluate_rules()
        except HoldfastError as error:
            pause = settings().alert_every.total_seconds()
            app.events.emit(StoreTrouble(service=service, error=f"alerts: {error}", retry_in=pause))


def _message(alert: Alert, state: str) -> dict[str, Any]:
    """Returns the document that a receiver gets. ``id`` is the same where a message is sent again."""
    return {
        "id": f"{alert.key}:{alert.since_us}",
        "state": state,
        "rule": alert.rule,
        "queue": alert.queue,
        "text": f"cleared: {alert.text}" if state == "cleared" else alert.text,
        "since": to_datetime(alert.since_us).isoformat(),
        "cleared": None if alert.cleared_us is None else to_datetime(alert.cleared_us).isoformat(),
    }


async def _read_state(store: Store, rules: Mapping[str, AlertRule]) -> SystemState:
    """Reads what the rules need, at a bounded price."""
    now_us = await store.health.server_time_us()
    queues = await store.query.queue_depths(max_count=_MAX_COUNTED)
    workers = await store.query.workers() if any(rule.unserved_over for rule in rules.values()) else []
    longest = max((rule.within for rule in rules.values() if rule.needs_history), default=timedelta(0))
    since_us = now_us - longest // MICROSECOND
    history = await store.query.read_history(since_us, HistoryInterval.MINUTE) if longest else []
    return SystemState(now_us, queues, workers, history)


async def _read_schedule(store: Store) -> Schedule | None:
    return next(iter(await store.schedules.read_schedules(ALERTS_SCHEDULE)), None)


async def _write(store: Store, known: Schedule | None, alerts: Mapping[str, Alert]) -> bool:
    """Writes the alerts if no other process did since ``known`` was read; returns whether it wrote."""
    change = ScheduleChange(encode_alerts(alerts), 0 if known is None else known.revision)
    return await store.schedules.write_schedule(change) is not None


async def _record_results(store: Store, results: Mapping[str, Alert]) -> None:
    """Keeps the results of messages, where an alert still has the same message."""
    for _ in range(_TRIES):
        known = await _read_schedule(store)
        alerts = decode_alerts(known)
        later = {
            key: results[key] if key in results and results[key].phase == alert.phase else alert
            for key, alert in alerts.items()
        }
        if later == alerts or await _write(store, known, later):
            return
