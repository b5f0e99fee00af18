"""``story``: users are created while parts of the system fail. Ends with tables, and checks each promise itself."""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from typing import Any

import asyncpg
import httpx
from rich.console import Console

from holdfast import Holdfast, JobFilter, JobState, Settings
from streams.local.processes import Process
from streams.local.report import Figures, print_attempts, print_report
from streams.local.start import running_system
from streams.local.system import SERVICES, System

TIMEOUT = 90.0  # seconds until a chapter gives up: something is wrong then
LEASE = 3  # seconds; holdfast.toml says more, and the story does not wait so long
SETTINGS = {"HOLDFAST_LEASE": f"{LEASE}s", "HOLDFAST_HEARTBEAT": "1s", "HOLDFAST_LOG_FORMAT": "json"}
WORKERS = 2  # of each service
WIDE, NARROW = {"capacity": 1000, "refill": 1000}, {"capacity": 3, "refill": 1}
REFUSED = "eve@refused.example"


class StoryFailed(Exception):
    """The story cannot go on."""


def tell_story() -> int:
    """Runs the story. Returns 0 if every promise was kept."""
    console = Console(highlight=False, width=None if sys.stdout.isatty() else 110)
    began = time.monotonic()
    try:
        console.print("Starting two PostgreSQL, one Redis, the provider, two services, the gateway and four workers …")
        with running_system(workers=WORKERS, settings=SETTINGS) as system:
            console.print(f"All {len(system.processes)} processes are ready after {time.monotonic() - began:.0f} s.")
            is_right = asyncio.run(run_chapters(console, system))
        left = [process.name for process in system.processes if process.is_running]
    except StoryFailed as failure:
        console.print(f"[bold red]The story failed:[/] {failure}")
        return 1
    except KeyboardInterrupt:
        return 130
    verdict = "[bold green]Every promise was kept.[/]" if is_right else "[bold red]A promise was broken.[/]"
    console.print(f"{verdict} It took {time.monotonic() - began:.0f} s. Processes left: {', '.join(left) or 'none'}.")
    return 0 if is_right and not left else 1


async def run_chapters(console: Console, system: System) -> bool:
    """Runs all chapters and prints the report. Returns True if every promise was kept."""
    async with open_story(console, system) as story:
        await create_users(story)
        await kill_worker(story)
        await throttle_provider(story)
        await replay_dead_letter(story)
        await stop_database(story)
        return print_report(console, await story.collect())


class Story:
    """The client's view of the system (its gateway), and the operator's (databases, processes)."""

    def __init__(self, console: Console, system: System, http: httpx.AsyncClient, apps: dict[str, Holdfast]) -> None:
        self.console = console
        self.system = system
        self.apps = apps
        self.accepted: dict[str, list[str]] = {name: [] for name in SERVICES}
        self._http = http
        self._users = 0

    def tell(self, title: str, text: str) -> None:
        """Prints what happens."""
        self.console.print(f"[bold]{title}[/]  {text}")

    async def call(
        self, site: str, method: str, path: str, body: Any = None, *, expected: int = 200, key: str | None = None
    ) -> Any:
        """Sends a request to an application and returns its answer; StoryFailed for another status."""
        headers = {} if key is None else {"Idempotency-Key": key}
        response = await self._http.request(method, self.system.urls[site] + path, json=body, headers=headers)
        if response.status_code != expected:
            raise StoryFailed(f"{method} {site}{path} answered {response.status_code}: {response.text[:300]}")
        return response.json()

    async def create_user(self, email: str | None = None) -> str:
        """Creates a user through the gateway; returns the id of the job."""
        self._users += 1
        user = {"email": email or f"user{self._users}@example.com", "name": f"User {self._users}"}
        answer = await self.call("gateway", "POST", "/users", user, expected=202, key=user["email"])
        self.accepted["users"].append(answer["job_id"])
        return str(answer["job_id"])

    async def send_notification(self, number: int) -> str:
        """Submits a job to the service `notifications` itself, as another program would."""
        payload = {"email": f"reader{number}@example.com", "template": "news"}
        job = {"type": "notification.send", "payload": payload, "idempotency_key": f"news-{number}"}
        answer = await self.call("notifications", "POST", "/jobs", job, expected=202)
        self.accepted["notifications"].append(answer["job_id"])
        return str(answer["job_id"])

    async def job(self, job_id: str) -> dict[str, Any]:
        """Returns a job as the gateway shows it."""
        answer: dict[str, Any] = await self.call("gateway", "GET", f"/jobs/{job_id}")
        return answer

    async def all_completed(self, job_ids: Sequence[str]) -> None:
        """Waits until these jobs, and the welcome messages of those that create users, are completed."""
        for job_id in job_ids:
            job = await self.until(lambda job_id=job_id: self._completed(job_id), f"the completion of job {job_id}")
            welcome = job["result"].get("welcome_job_id")
            if welcome:
                await self.until(lambda welcome=welcome: self._completed(welcome), f"the completion of job {welcome}")

    async def _completed(self, job_id: str) -> dict[str, Any] | None:
        job = await self.job(job_id)
        if job["status"] == "failed":
            raise StoryFailed(f"job {job_id} failed after {job['attempt_count']} attempts: {job['error']}")
        return job if job["status"] == "completed" else None

    async def until(self, find: Callable[[], Awaitable[Any]], what: str) -> Any:
        """Looks again and again until there is something; StoryFailed if it takes too long."""
        deadline = time.monotonic() + TIMEOUT
        while not (found := await find()):
            if time.monotonic() > deadline:
                raise StoryFailed(f"{what} has not come within {TIMEOUT:.0f} s")
            await asyncio.sleep(0.1)
        return found

    async def collect(self) -> Figures:
        """Reads the figures that are compared, from each database and from the provider's log."""
        counts = {name: await self._count(app) for name, app in self.apps.items()}
        return Figures(
            accepted={name: len(set(job_ids)) for name, job_ids in self.accepted.items()},
            states=counts,
            users=await self._rows("users", "select count(*) from users where status = 'active'"),
            accounts=await self._rows("users", "select count(*) from accounts"),
            deliveries=await self._rows("notifications", "select count(*) from deliveries"),
            messages=len(await self.call("provider", "GET", "/messages")),
            calls=await self.call("provider", "GET", "/calls"),
        )

    async def _count(self, app: Holdfast) -> dict[str, int]:
        return {state: await app.count(JobFilter(states=(state,))) for state in JobState}

    async def _rows(self, service: str, query: str) -> int:
        connection = await asyncpg.connect(self.system.databases[service].url)
        try:
            return int(await connection.fetchval(query))
        finally:
            await connection.close()


@asynccontextmanager
async def open_story(console: Console, system: System) -> AsyncIterator[Story]:
    """Opens a client, and both services' jobs for an operator."""
    apps = {}
    for name in SERVICES:
        own = system.service_settings(name)
        urls = {"url": own["HOLDFAST_URL"], "transport_url": own["HOLDFAST_TRANSPORT_URL"]}
        apps[name] = Holdfast(settings=Settings.load(path=own["HOLDFAST_CONFIG"], **urls))
    async with apps["users"], apps["notifications"], httpx.AsyncClient(timeout=30) as http:
        yield Story(console, system, http, apps)


# ── chapters ──────────────────────────────────────────────────────────────────────────────────────────────────────────
async def create_users(story: Story) -> None:
    """Users are created while nothing fails."""
    await story.call("notifications", "PUT", "/limit", WIDE)
    jobs = [await story.create_user() for _ in range(10)]
    first = await story.job(jobs[0])
    await story.all_completed(jobs)
    story.tell("1. Users", f"10 users accepted at once (the first was {first['status']}), created, and welcomed.")


async def kill_worker(story: Story) -> None:
    """A worker is killed with SIGKILL while its jobs wait for the provider."""
    await story.call("provider", "PUT", "/behaviour", {"delay": 1.5})
    jobs = [await story.create_user() for _ in range(6)]
    worker, held = await story.until(lambda: find_busy_worker(story), "a worker with jobs in hand")
    worker.kill()
    killed = time.monotonic()
    await story.call("provider", "PUT", "/behaviour", {})
    await story.all_completed(jobs)
    seconds = time.monotonic() - killed
    text = (
        f"kill -9 {worker.pid} ({worker.name}) with {held} jobs in hand; another worker completed them {seconds:.1f} s"
    )
    story.tell("2. A worker is killed", f"{text} later (lease {LEASE} s). A new worker starts.")
    worker.start()


async def find_busy_worker(story: Story) -> tuple[Process, int] | None:
    """Returns a worker of `notifications` that runs jobs, and how many."""
    processes = {process.pid: process for process in story.system.workers["notifications"]}
    app = story.apps["notifications"]
    for info in await app.workers():
        filter_ = JobFilter(states=(JobState.RUNNING,), worker=info.heartbeat.worker)
        held = await app.count(filter_)
        if held and info.heartbeat.pid in processes:
            return processes[info.heartbeat.pid], held
    return None


async def throttle_provider(story: Story) -> None:
    """More messages than the token bucket allows: the excess is retried after 1, 5 … s; then the limit is raised.

    Meanwhile the provider itself answers 429 to more calls than the bucket lets through: it counts those of the last
    second, so the calls before are to be older.
    """
    await asyncio.sleep(1.1)
    await story.call("provider", "PUT", "/behaviour", {"calls_per_second": 5})
    await story.call("notifications", "PUT", "/limit", NARROW)
    jobs = [await story.create_user() for _ in range(10)]
    app = story.apps["notifications"]

    async def throttled_twice() -> list[Any]:
        page = await app.find(JobFilter(states=(JobState.FAILED,), error="rate limited"), limit=100)
        return [job for job in page.jobs if job.attempts >= 2]

    waiting = await story.until(throttled_twice, "a job that was rate limited twice")
    await story.call("provider", "PUT", "/behaviour", {})
    await story.call("notifications", "PUT", "/limit", WIDE)
    await story.all_completed(jobs)
    story.tell("3. Throttling", "10 users with a bucket of 3, refilled by 1 per second. One of the excess messages:")
    print_attempts(story.console, await app.get(waiting[0].id), await app.attempts(waiting[0].id))
    story.tell("", "The limit was raised while they waited: all 10 are welcomed.")


async def replay_dead_letter(story: Story) -> None:
    """A message that the provider refuses is a dead letter at once; replayed after the cause is gone, it succeeds."""
    job_id = await story.create_user(REFUSED)

    async def find_dead_letter() -> dict[str, Any] | None:
        listed = await story.call("gateway", "GET", "/dlq/notifications")
        return next((each for each in listed["jobs"] if each["payload"]["email"] == REFUSED), None)

    dead = await story.until(find_dead_letter, "a dead letter")
    story.tell(
        "4. A permanent failure", f"dead after {dead['attempt_count']} attempt: {provider_answer(dead['error'])}"
    )
    await story.call("provider", "PUT", "/behaviour", {"refused_domains": []})
    await story.call("gateway", "POST", f"/dlq/notifications/{dead['job_id']}/replay", expected=202)
    await story.all_completed([job_id])
    left = len((await story.call("gateway", "GET", "/dlq/notifications"))["jobs"])
    story.tell("", f"The provider accepts the address now; replayed, it is delivered. {left} dead letters are left.")


def provider_answer(error: str) -> str:
    """Returns the status and the text with which the provider answered, from the error of a job."""
    return "the provider answered " + error.partition(" answered ")[2]


async def stop_database(story: Story) -> None:
    """The database of `users` is stopped; `notifications` and the gateway go on."""
    database = story.system.databases["users"]
    waiting = await story.create_user()
    await asyncio.to_thread(database.stop)
    story.tell("5. A database is stopped", f"{database.name} is down.")
    await story.call("gateway", "POST", "/users", {"email": "late@example.com", "name": "Late"}, expected=503)
    sent = [await story.send_notification(number) for number in range(5)]

    async def delivered() -> bool:
        page = await story.apps["notifications"].find(JobFilter(states=(JobState.SUCCEEDED,)), limit=500)
        return set(sent) <= {job.id for job in page.jobs}

    await story.until(delivered, "the notifications, without the other service's database")
    story.tell("", "POST /users answers 503; meanwhile `notifications` delivered 5 messages.")
    await asyncio.to_thread(database.start_ready)
    jobs = [waiting]

    async def accepted_again() -> bool:
        with suppress(StoryFailed):
            jobs.append(await story.create_user("late@example.com"))
        return len(jobs) > 1

    await story.until(accepted_again, "an accepted user")
    await story.all_completed(jobs)
    story.tell("", "It is back: the waiting user and a new one are created and welcomed.")
