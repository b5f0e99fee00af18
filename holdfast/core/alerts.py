"""Alerts: rules about queues, which of them are breached, and when that is to be sent. Pure.

An alert is a breach of one rule by one queue. It is sent once when it begins and once when it has cleared. The store
keeps the alerts as the document of a paused schedule: its revision decides which process sends.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Iterable, Mapping, Sequence
from datetime import timedelta
from typing import Any

import msgspec
from msgspec.structs import replace

from holdfast.core.errors import Invalid
from holdfast.core.faults import FAULTS_TASK
from holdfast.core.history import HistoryRow
from holdfast.core.models import MICROSECOND, JobState, NewJob, QueueInfo
from holdfast.core.schedule import ALERTS_SCHEDULE, Schedule
from holdfast.core.validation import check_name, check_options, check_span, format_duration, parse_count
from holdfast.core.workers import WorkerInfo, serves_queue

MAX_ALERTS = 100
"""Alerts that are kept at once; further breaches begin when others have ended."""
MAX_DEAD = 50_000
"""Largest threshold of dead jobs: stores count no more at a bounded price."""
MIN_WITHIN, MAX_WITHIN = timedelta(minutes=5), timedelta(hours=6)
SEND_TIME = timedelta(minutes=2)
"""Time after which a message counts as not sent, if its sender has not said more. It doubles with each attempt."""
_LONGEST_PAUSE = timedelta(hours=1)
_CLEARED_FOR = timedelta(days=1)  # longest time for which the message that an alert has cleared is tried
_FORGOTTEN_AFTER = timedelta(days=7)  # alerts of a rule that no process has any more
_LEAST_ENDED = 10  # jobs that must have ended before a share of them means anything
_SHARE = re.compile(r"(100|[1-9]?\d(?:\.\d{1,3})?)%")
_CONDITIONS = ("dead_over", "oldest_over", "unserved_over", "failures_over")
_OPTIONS = ("queue", *_CONDITIONS, "within")


class AlertRule(msgspec.Struct, frozen=True, kw_only=True):
    """A rule: exactly one condition, for one queue or for each. Made by ``parse_rule``.

    dead_over: dead jobs. oldest_over: wait of the oldest ready job. unserved_over: the same, while no living worker
    serves the queue. failures_over: jobs that died ``within`` a span, or a share of all that ended then.
    """

    name: str
    queue: str | None = None
    dead_over: int | None = None
    oldest_over: timedelta | None = None
    unserved_over: timedelta | None = None
    failures_over: int | str | None = None
    within: timedelta = timedelta(minutes=10)

    @property
    def needs_history(self) -> bool:
        """Returns True if the rule is about jobs that ended."""
        return self.failures_over is not None


def parse_rule(name: str, given: Mapping[str, Any]) -> AlertRule:
    """Makes a rule from its options. Raises `Invalid`, naming the option."""
    check_name("rule", name)
    check_options(given, _OPTIONS)
    conditions = [option for option in _CONDITIONS if given.get(option) is not None]
    if len(conditions) != 1:
        raise Invalid("condition", ", ".join(conditions) or None, f"give exactly one of {', '.join(_CONDITIONS)}")
    values: dict[str, Any] = {"name": name}
    if given.get("queue") is not None:
        values["queue"] = check_name("queue", given["queue"])
    (condition,) = conditions
    value = given[condition]
    if condition == "dead_over":
        values[condition] = parse_count(value, condition, least=0, most=MAX_DEAD)
    elif condition == "failures_over":
        values[condition] = _parse_failures(value)
    else:
        values[condition] = check_span(value, condition)
    if given.get("within") is not None:
        if condition != "failures_over":
            raise Invalid("within", given["within"], "leave it out: it belongs to failures_over")
        values["within"] = check_span(given["within"], "within")
        if not MIN_WITHIN <= values["within"] <= MAX_WITHIN:
            raise Invalid("within", given["within"], "give 5m to 6h")
    return AlertRule(**values)


def _parse_failures(value: object) -> int | str:
    if isinstance(value, str) and value.strip().endswith("%"):
        if not _SHARE.fullmatch(value.strip()):
            raise Invalid("failures_over", value, 'give a share from "0%" to "100%", such as "5%"')
        return value.strip()
    return parse_count(value, "failures_over", least=0, most=1_000_000_000)


def format_rule(rule: AlertRule) -> dict[str, Any]:
    """Returns the options of a rule; ``parse_rule`` reads them back."""
    given = {option: getattr(rule, option) for option in _OPTIONS}
    if not rule.needs_history:
        del given["within"]
    return {
        option: format_duration(value) if isinstance(value, timedelta) else value
        for option, value in given.items()
        if value is not None
    }


# ── breaches ──────────────────────────────────────────────────────────────────────────────────────────────────────────
class SystemState(msgspec.Struct, frozen=True):
    """State of a system that rules are about. ``history``: of the minutes from which the longest rule counts."""

    now_us: int
    queues: Sequence[QueueInfo]
    workers: Sequence[WorkerInfo]
    history: Sequence[HistoryRow]


class Breach(msgspec.Struct, frozen=True):
    """A rule that a queue breaches, with the sentence for people."""

    rule: str
    queue: str
    text: str

    @property
    def key(self) -> str:
        """Returns its identity: one rule, one queue."""
        return f"{self.rule}:{self.queue}"


def find_breaches(rules: Iterable[AlertRule], state: SystemState) -> dict[str, Breach]:
    """Returns the breaches by key, in the order of the rules and of the queues."""
    found = {}
    for rule in rules:
        texts = _failing(rule, state) if rule.needs_history else _backed_up(rule, state)
        for queue, text in texts.items():
            if rule.queue in (None, queue):
                breach = Breach(rule.name, queue, text)
                found[breach.key] = breach
    return found


def _backed_up(rule: AlertRule, state: SystemState) -> dict[str, str]:
    """Returns a sentence for each queue with too many dead jobs, or whose ready jobs wait too long."""
    texts = {}
    for queue in state.queues:
        dead, age = queue.states.get(JobState.DEAD, 0), queue.oldest_ready or timedelta()
        if rule.dead_over is not None and dead > rule.dead_over:
            number = f"{'at least ' if JobState.DEAD in queue.at_least else ''}{dead:,}"
            texts[queue.name] = (
                f"queue {queue.name} has {number} dead job{'' if dead == 1 else 's'}, more than {rule.dead_over:,}"
            )
        longest = rule.unserved_over if rule.oldest_over is None else rule.oldest_over
        if longest is None or age <= longest or queue.name == FAULTS_TASK:
            continue
        waited = f"its oldest ready job has waited {_describe_age(age)}, longer than {format_duration(longest)}"
        if rule.oldest_over is not None:
            texts[queue.name] = f"queue {queue.name}{' is paused, and' if queue.paused else ':'} {waited}"
        elif not any(worker.alive and serves_queue(worker, queue.name) for worker in state.workers):
            texts[queue.name] = f"no worker serves queue {queue.name}: {waited}"
    return texts


def _failing(rule: AlertRule, state: SystemState) -> dict[str, str]:
    """Returns a sentence for each queue of which too many jobs died."""
    since_us = state.now_us - rule.within // MICROSECOND
    ended: dict[str, int] = {}
    dead: dict[str, int] = {}
    for row in state.history:
        if row.start_us >= since_us and row.state is not JobState.CANCELLED:
            ended[row.queue] = ended.get(row.queue, 0) + row.number
            if row.state is JobState.DEAD:
                dead[row.queue] = dead.get(row.queue, 0) + row.number
    limit, texts = rule.failures_over, {}
    for queue, number in dead.items():
        if isinstance(limit, str):
            is_over = ended[queue] >= _LEAST_ENDED and number * 100 > float(limit.rstrip("%")) * ended[queue]
            shown = f"more than {limit}"
        else:
            is_over, shown = number > (limit or 0), f"more than {limit:,}"
        if is_over:
            span = format_duration(rule.within)
            texts[queue] = f"queue {queue}: {number:,} of {ended[queue]:,} jobs that ended in {span} died, {shown}"
    return texts


def _describe_age(span: timedelta) -> str:
    """Returns an age in its two largest units: 5m 1s."""
    left, parts = int(span.total_seconds()), []
    for unit, seconds in (("d", 86_400), ("h", 3600), ("m", 60), ("s", 1)):
        number, left = divmod(left, seconds)
        parts.append((number, unit))
    first = next((index for index, (number, _) in enumerate(parts) if number), 3)
    return " ".join(f"{number}{unit}" for number, unit in parts[first : first + 2] if number) or "0s"


# ── alerts ────────────────────────────────────────────────────────────────────────────────────────────────────────────
class Alert(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A breach that has begun, and what became of its latest message."""

    rule: str
    queue: str
    text: str
    since_us: int
    cleared_us: int | None = None
    attempted_us: int
    attempts: int = 1
    is_sent: bool = False
    problem: str = ""
    """Why the latest attempt to send it failed."""
    may_have_arrived: bool = False
    """An attempt ended without an answer: the receiver may have the message."""

    @property
    def key(self) -> str:
        """Returns its identity among the kept alerts."""
        return f"{self.rule}:{self.queue}"

    @property
    def phase(self) -> tuple[int, int | None]:
        """Returns the identity of its latest message."""
        return self.since_us, self.cleared_us


def advance_alerts(
    known: Mapping[str, Alert], breaches: Mapping[str, Breach], rules: Iterable[str], now_us: int, hold_off: timedelta
) -> tuple[dict[str, Alert], list[Alert]]:
    """Returns the alerts from now on, and those of them whose message this process is to send.

    ``rules``: names of its rules. Alerts of other rules stay as they are: another process may have those.
    """
    own, alerts, to_send = set(rules), {}, []
    for key, alert in known.items():
        if alert.rule in own:
            later = _advance(alert, breaches.get(key), now_us, hold_off)
        else:
            later = alert if now_us - alert.attempted_us < _FORGOTTEN_AFTER // MICROSECOND else None
        if later is not None:
            alerts[key] = later
            if (later.phase, later.attempts) != (alert.phase, alert.attempts):
                to_send.append(later)
    for key, breach in breaches.items():
        if key not in alerts and len(alerts) < MAX_ALERTS:
            alert = Alert(rule=breach.rule, queue=breach.queue, text=breach.text, since_us=now_us, attempted_us=now_us)
            alerts[key] = alert
            to_send.append(alert)
    return alerts, to_send


def _advance(alert: Alert, breach: Breach | None, now_us: int, hold_off: timedelta) -> Alert | None:
    """Returns the alert after another look; None: it is over, and a new breach begins another."""
    if alert.cleared_us is None and breach is None:
        if not alert.is_sent and not alert.may_have_arrived:
            if alert.problem:
                return None
            if now_us - alert.attempted_us < SEND_TIME // MICROSECOND:
                return alert  # its sender may be under way: its receiver hears of the end as well
        return replace(alert, cleared_us=now_us, attempted_us=now_us, attempts=1, is_sent=False, problem="")
    if alert.cleared_us is not None:
        longest = hold_off if alert.is_sent or breach is not None else max(hold_off, _CLEARED_FOR)
        if now_us - alert.cleared_us >= longest // MICROSECOND:
            return None
    pause = min(_LONGEST_PAUSE, SEND_TIME * 2 ** min(alert.attempts - 1, 10))
    if alert.is_sent or now_us - alert.attempted_us < pause // MICROSECOND:
        return alert
    return replace(alert, attempted_us=now_us, attempts=alert.attempts + 1, problem="")


def encode_alerts(alerts: Mapping[str, Alert]) -> Schedule:
    """Returns the schedule, paused and without a tick, whose document has these alerts."""
    payload = msgspec.json.encode(list(alerts.values())).decode()
    job = NewJob(id="", task=ALERTS_SCHEDULE, queue=ALERTS_SCHEDULE, payload=payload)
    return Schedule(id=ALERTS_SCHEDULE, name=ALERTS_SCHEDULE, job=job, at_us=0, paused=True)


def decode_alerts(known: Schedule | None) -> dict[str, Alert]:
    """Returns the kept alerts by key; none, with a warning, if another program has spoiled them."""
    if known is None:
        return {}
    try:
        alerts = msgspec.json.decode(known.job.payload, type=list[Alert])
    except msgspec.DecodeError as error:
        text = "the stored alerts cannot be read, and are forgotten: %s; what is breached is sent again"
        logging.getLogger(__name__).warning(text, error)
        return {}
    return {alert.key: alert for alert in alerts}
