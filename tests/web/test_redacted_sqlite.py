"""What the setting ``redacted`` names is in no answer, no listing and no log line; handlers get all of it."""

from __future__ import annotations

import io
import json
from datetime import timedelta
from pathlib import Path
from typing import Any

from holdfast import Holdfast
from holdfast.core.events import JobDead
from holdfast.core.job_logs import LogBatch, NewLine
from holdfast.telemetry.logs import configure_logs
from tests.interfaces.cli import Cli
from tests.web.client import Api
from tests.web.keyed import Keys, ask, refused

CANARY = "persimmon-lighthouse-quarrel-zither"
OTHER = "junipertruss-monsoon-wicket-yodel"


def test_over_http_and_on_the_command_line(tmp_path: Path) -> None:
    url, paths = f"sqlite:///{tmp_path}/jobs.db", "payload.card.number,result.token,metadata.user"
    with Api(url, redacted=paths) as api:
        given = {"payload": {"card": {"number": CANARY, "name": "Ada"}}, "metadata": {"user": OTHER, "plan": "x"}}
        answers = [json.dumps(api.submit(key="one", **given))]
        job_id = api.dead(error=f"no such card: {CANARY}", **given)
        done = api.submit(**given)["id"]
        api.succeed(done, json.dumps({"token": OTHER, "count": 1}))
        paths_shown = ("/v1/jobs", f"/v1/jobs/{job_id}", f"/v1/jobs/{job_id}/why", "/v1/queues/default/dead")
        answers += [json.dumps(api.get(path)) for path in (*paths_shown, f"/v1/queues/default/dead/{job_id}")]
        answers.append(json.dumps(api.post(f"/v1/jobs/{job_id}/replay", {})))
        answers.append(json.dumps(api.post("/v1/jobs/key:one/cancel")))
        shown = api.get(f"/v1/jobs/{done}")
        assert shown["payload"] == {"card": {"number": "[redacted]", "name": "Ada"}}
        assert shown["result"] == {"token": "[redacted]", "count": 1}
        assert shown["metadata"] == {"user": "[redacted]", "plan": "x"}
        assert CANARY in api.run(api.claim(job_id)).payload
    (tmp_path / "holdfast.toml").write_text(f'url = "{url}"\nredacted = "{paths}"\n')
    cli = Cli(tmp_path)
    words = ("--config", str(tmp_path / "holdfast.toml"))
    for command in (["show", job_id], ["show", done], ["list"], ["why", job_id], ["watch", done]):
        answers += [cli.run(*command, *words), cli.run(*command, *words, "--json")]
    for answer in answers:
        assert CANARY not in answer, answer
        assert OTHER not in answer, answer


def test_in_what_jobs_log(tmp_path: Path) -> None:
    url, paths = f"sqlite:///{tmp_path}/jobs.db", "payload.card,lines.token"
    with Api(url, redacted=paths) as api:
        job_id = api.submit(payload={"card": CANARY})["id"]
        job = api.run(api.claim(job_id))
        fields = json.dumps({"token": OTHER, "card": CANARY, "n": 1})
        given = NewLine(number=1, ago=timedelta(0), level="info", text=f"paid by {CANARY}", fields=fields)
        api.run(api.run(api.app.open_store()).queueing.append_logs([LogBatch(job.lease, [given])]))
        (line,) = api.get(f"/v1/jobs/{job_id}/lines")["lines"]
        hidden = "[redacted]"
        assert (line["text"], line["fields"]) == (f"paid by {hidden}", {"token": hidden, "card": hidden, "n": 1})
    (tmp_path / "holdfast.toml").write_text(f'url = "{url}"\nredacted = "{paths}"\n')
    for words in (["show", job_id], ["show", job_id, "--json"]):
        shown = Cli(tmp_path).run(*words, "--config", str(tmp_path / "holdfast.toml"))
        assert "paid by [redacted]" in shown
        assert CANARY not in shown
        assert OTHER not in shown


def test_what_errors_say_is_not_guessed_by_choosing_jobs(tmp_path: Path) -> None:
    keys = Keys(tmp_path)
    asked: list[tuple[str, str, Any]] = [
        ("GET", "/v1/jobs?error=c", None),
        ("GET", "/v1/queues/default/dead?error=c", None),
        *[("POST", f"/v1/jobs/{deed}", {"filter": {"error": "c"}}) for deed in ("cancel", "replay", "delete")],
        ("POST", "/v1/jobs/replay", {"filter": {"error": "c"}, "dry_run": True}),
        ("POST", "/v1/queues/default/dead/replay", {"filter": {"error": "c"}}),
    ]
    with Api(f"sqlite:///{tmp_path}/jobs.db") as api:
        api.dead(error=CANARY)
    with Api(f"sqlite:///{tmp_path}/jobs.db", keys_file=str(keys.path), redacted="payload.card") as api:
        for method, path, body in asked:
            assert "redacted" in refused(ask(api, keys.spare, method, path, body), 403, "forbidden")["detail"]
    with Api(f"sqlite:///{tmp_path}/jobs.db", keys_file=str(keys.path)) as api:
        operator, both = keys.make("operate"), keys.make("operate", "read")
        for method, path, body in asked[2:]:
            assert "scope read" in refused(ask(api, operator, method, path, body), 403, "forbidden")["detail"]
        assert ask(api, both, *asked[-2]).json()["count"] == 0
        assert [job["error"] for job in ask(api, both, "GET", f"/v1/jobs?error={CANARY}").json()["jobs"]] == [CANARY]


def test_in_log_lines() -> None:
    app, stream = Holdfast("sqlite:///unopened.db", redacted="error", log_format="json"), io.StringIO()
    finish = configure_logs(app.settings, app.events, stream=stream)
    app.events.emit(JobDead(job_id="x", task="t", attempt=1, reason="max_attempts", error=CANARY, seconds=1.0))
    finish()
    assert json.loads(stream.getvalue())["error"] == "[redacted]"
