"""Words that a reader meets: states, reasons, replays, and the menu."""

from __future__ import annotations

import re

from holdfast.core.lifecycle import Failed
from holdfast.core.models import JobState, Reason
from holdfast.web.console.wording import describe_reason, describe_state
from tests.console.visitor import Visitor
from tests.web.client import Api


def test_every_state_and_reason_has_a_text() -> None:
    assert all(describe_state(state) for state in JobState)
    texts = [describe_reason(reason) for reason in Reason]
    assert len(set(texts)) == len(texts)
    assert (describe_state("working"), describe_reason("of_later"), describe_reason(None)) == ("", "of_later", "")


def test_reason_is_a_text_and_no_code(open_api: Api, visitor: Visitor) -> None:
    job_id = open_api.submit(max_attempts=1)["id"]
    open_api.run(open_api.end(job_id, Failed(error="it broke")))
    assert open_api.get(f"/v1/jobs/{job_id}")["reason"] == "budget"
    page = visitor.open_page(f"/jobs/{job_id}")
    assert ("Attempt 1: no attempts left" in page, "budget" in page) == (True, False)
    assert "dead, no attempts left" in visitor.open_page(f"/jobs/{job_id}/graph")
    assert '<option value="budget">no attempts left (budget)</option>' in visitor.open_page("/jobs")
    preview = visitor.preview({"action": "replay", "reason": "budget"})
    assert "<dt>reason</dt><dd>no attempts left</dd>" in preview


def _timeline(page: str) -> list[str]:
    found = re.findall(r'<li class="\w+"><span>([^<]*)</span>', page.partition('<ol class="timeline">')[2])
    return [each.partition(":")[0] for each in found]


def test_timeline_shows_each_replay(open_api: Api, visitor: Visitor) -> None:
    job_id = open_api.dead()
    path = f"/jobs/{job_id}"
    assert _timeline(visitor.open_page(path)) == ["Submitted", "Attempt 1", "Dead"]
    visitor.act(f"{path}/replay")
    page = visitor.open_page(path)
    assert _timeline(page) == ["Submitted", "Attempt 1", "Replayed", "Queued"]
    assert "attempts are counted from 1 again" in page
    open_api.run(open_api.end(job_id, Failed(error="it broke", retryable=False)))
    visitor.act(f"{path}/replay")
    open_api.succeed(job_id)
    expected = ["Submitted", "Attempt 1", "Replayed", "Attempt 1", "Replayed", "Succeeded"]
    assert _timeline(visitor.open_page(path)) == expected
