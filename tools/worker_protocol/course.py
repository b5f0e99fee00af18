"""What the worker under test runs on: a private API with an empty SQLite file and a key, and the worker's process."""

from __future__ import annotations

import asyncio
import contextlib
import os
import shlex
import signal
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

from holdfast.app import Holdfast
from holdfast.core.errors import ConfigError
from holdfast.core.models import TERMINAL, Job, JobState
from holdfast.web.asgi import Api
from holdfast.web.keys import new_key
from holdfast.web.keys_file import change_keys
from holdfast.web.server import serve_in_loop
from tools.worker_protocol.recorder import Recorder

LEASE, GRACE, CONCURRENCY = 4, 2, 4
"""Variables of the worker's environment: seconds, seconds, jobs."""


class Broken(Exception):
    """What the worker did not do as the protocol has it."""


class Course:
    """Made by ``laid_out``."""

    def __init__(
        self, app: Holdfast, recorder: Recorder, command: str, environment: dict[str, str], patience: float
    ) -> None:
        self.app = app
        self.recorder = recorder
        self._command = shlex.split(command)
        self._environment = environment
        self._patience = patience
        self._process: asyncio.subprocess.Process | None = None
        self.output = bytearray()
        self._reading: asyncio.Task[None] | None = None

    # ── the worker ────────────────────────────────────────────────────────────────────────────────────────────
    async def start(self) -> None:
        """Start the worker, and wait until it is listed."""
        try:
            self._process = await asyncio.create_subprocess_exec(
                *self._command,
                env={**os.environ, **self._environment},
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.STDOUT,
                start_new_session=True,
            )
        except OSError as error:
            raise ConfigError(f"command: {self._command[0]!r} cannot be started: {error.strerror}") from None
        self._reading = asyncio.create_task(self._read(self._process))

        async def listed() -> bool:
            return bool(await self.app.workers())

        await self.until(listed, "it did not claim anything")

    async def _read(self, process: asyncio.subprocess.Process) -> None:
        assert process.stdout is not None  # noqa: S101 - it was piped
        while part := await process.stdout.read(4096):
            self.output += part
            del self.output[:-20_000]

    def signal(self, number: signal.Signals) -> None:
        """Signal the worker."""
        if self._process is not None and self._process.returncode is None:
            self._process.send_signal(number)

    def signal_group(self, number: signal.Signals) -> None:
        """Signal every process of the worker."""
        if self._process is not None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, number)

    async def ended(self) -> None:
        """Return when the worker has ended by itself, in order."""
        if self._process is None:
            raise Broken("it was not there")
        try:
            code = await asyncio.wait_for(self._process.wait(), self._patience)
        except TimeoutError:
            await self.kill()
            raise Broken(f"it had not ended after {self._patience:g} s, with a grace of {GRACE} s") from None
        if code:
            raise Broken(f"expected exit code 0, got {code}")
        if left := await self.app.workers():
            raise Broken(f"it ended and did not leave: {left[0].heartbeat.worker} is still listed")

    async def kill(self) -> None:
        """Whatever is left of the worker."""
        self.signal_group(signal.SIGKILL)
        if self._process is not None:
            await self._process.wait()
        if self._reading is not None:
            self._reading.cancel()

    @property
    def is_there(self) -> bool:
        """Whether the worker runs."""
        return self._process is not None and self._process.returncode is None

    # ── jobs ──────────────────────────────────────────────────────────────────────────────────────────────────
    async def submit(self, task: str, payload: dict[str, Any] | None = None, **options: Any) -> str:
        """The id of a new job."""
        given = {"retry": "fixed:0.2", "max_attempts": 3, **options}
        return (await self.app.enqueue(f"conformance.{task}", payload or {}, **given)).id

    async def reached(self, job_id: str, *states: JobState) -> Job:
        """The job in one of these states."""

        async def there() -> bool:
            return (await self.app.get(job_id)).state in {*states, *TERMINAL}

        await self.until(there, "its job came to nothing")
        job = await self.app.get(job_id)
        if job.state not in states:
            reason = f" ({job.reason}: {job.error})" if job.error else ""
            raise Broken(f"expected the job {' or '.join(states)}, got {job.state}{reason}")
        return job

    async def until(self, condition: Callable[[], Awaitable[bool]], what: str) -> None:
        """Wait for this, as long as the worker is there; Broken says what did not happen."""
        try:
            async with asyncio.timeout(self._patience):
                while not await condition():
                    if not self.is_there:
                        raise Broken("the worker is not there any more")
                    await asyncio.sleep(0.05)
        except TimeoutError:
            raise Broken(f"{what} within {self._patience:g} s") from None


@contextlib.asynccontextmanager
async def laid_out(folder: Path, command: str, patience: float) -> AsyncIterator[Course]:
    """A course in an empty folder; what is left of the worker is killed in the end. ``patience``: seconds to wait for
    what should happen soon."""
    keys = folder / "keys.toml"
    key_id, key, token = new_key("conformance", ("work",), (), None)
    change_keys(keys, lambda present: {**present, key_id: key})
    app = Holdfast(
        f"sqlite:///{folder}/conformance.db",
        api_port=0,
        keys_file=str(keys),
        lease=f"{LEASE}s",
        sweep="200ms",
        poll="200ms",
        defer_for="0s",
    )
    recorder = Recorder(Api(app))
    async with serve_in_loop(app, app.settings, site=recorder) as served:
        environment = {
            "HOLDFAST_API_URL": served.address,
            "HOLDFAST_API_KEY": token,
            "HOLDFAST_LEASE": str(LEASE),
            "HOLDFAST_GRACE": str(GRACE),
            "HOLDFAST_CONCURRENCY": str(CONCURRENCY),
        }
        course = Course(app, recorder, command, environment, patience)
        try:
            yield course
        finally:
            await course.kill()
