"""Words that a reader meets: states, reasons, replays, and the menu."""

from __future__ import annotations

import re
from html.parser import HTMLParser

import pytest

from holdfast.core.lifecycle import Failed
from holdfast.core.models import JobState, Reason
from holdfast.web.console.wording import describe_reason, describe_state
from tests.console.visitor import Visitor
from tests.console.world import World
from tests.web.client import Api


class _Texts(HTMLParser):
    """The texts of a page, and those of its elements with a help text."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.texts: list[str] = []
        self.helped: dict[str, str] = {}
        self._help = ""
        self.feed(page)

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        self._help = dict(attributes).get("title") or ""

    def handle_data(self, data: str) -> None:
        if text := data.strip():
            self.texts.append(text)
            if self._help:
                self.helped[text] = self._help


def test_every_state_and_reason_has_a_text() -> None:
    assert all(describe_state(state) for state in JobState)
    texts = [describe_reason(reason) for reason in Reason]
    assert len(set(texts)) == len(texts)
    assert (describe_state("working"), describe_reason("of_later"), describe_reason(None)) == ("", "of_later", "")


@pytest.mark.parametrize("path", ["", "/queues", "/errors", "/errors/{error}", "/jobs", "/batches/{batch}"])
def test_pages_name_states_by_one_word(visitor: Visitor, world: World, path: str) -> None:
    page = _Texts(visitor.open_page(path.format(error=world.error, batch=world.batch)))
    words = {text.lower() for text in page.texts}
    assert not words & {"ready", "retrying", "oldest ready"}
    named = {text.lower(): text for text in page.helped if describe_state(text.lower())}
    assert named, "no state has a help text"
    for state, text in named.items():
        assert page.helped[text] == describe_state(state)


def test_meaning_of_states_stands_below_their_numbers(visitor: Visitor, world: World) -> None:
    for path in ("", "/queues"):
        text = "Queued: ready for a worker. Scheduled: waits for its time. Failed: an attempt failed, and it waits"
        assert text in visitor.open_page(path)


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
