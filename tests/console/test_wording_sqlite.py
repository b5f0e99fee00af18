"""Words that a reader meets: states, reasons, replays, and the menu."""

from __future__ import annotations

import re
from html.parser import HTMLParser
from typing import Any

import pytest

from holdfast.core.lifecycle import Failed
from holdfast.core.models import JobState, Reason
from holdfast.web.console.wording import describe_reason, describe_state
from tests.console.visitor import Visitor
from tests.console.world import World
from tests.web.client import Api
from tests.web.keyed import Keys


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
    assert open_api.get(f"/v1/jobs/{job_id}")["reason"] == "max_attempts"
    page = visitor.open_page(f"/jobs/{job_id}")
    assert ("Attempt 1: no attempts left" in page, "max_attempts" in page) == (True, False)
    assert "dead, no attempts left" in visitor.open_page(f"/jobs/{job_id}/graph")
    assert '<option value="max_attempts">no attempts left (max_attempts)</option>' in visitor.open_page("/jobs")
    preview = visitor.preview({"action": "replay", "reason": "max_attempts"})
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


def _menu(page: str) -> list[str]:
    return re.findall(r"<li><a [^>]*>(\w+)</a></li>", page.partition("<nav")[2].partition("</nav>")[0])


def test_menu_has_faults_where_they_may_be_used(home: str, keys: Keys) -> None:
    plan: dict[str, Any] = {"faults": [{"kind": "error", "task": "work"}], "span": "10m"}
    with Api(home, keys_file=str(keys.path)) as api, Api(home, keys_file=str(keys.path), allow_faults=True) as other:
        visitor, tester, limited = Visitor(api), Visitor(other), Visitor(other)
        for each in (visitor, tester):
            each.sign_in(keys.spare)
        limited.sign_in(keys.make("read", queues=("mail",)))
        assert [_menu(each.open_page("/jobs"))[-1] for each in (visitor, tester, limited)] == [
            "Batches",
            "Faults",
            "Batches",
        ]
        assert "Injected faults" in visitor.open_page("/faults")
        other._client.headers["x-api-key"] = keys.spare
        other.post("/v1/faults", plan)
        visitor.act("/queues/mail/pause")  # a change, after which all is read anew
        assert _menu(visitor.open_page("/jobs"))[-1] == "Faults"
        visitor.act("/faults/stop")
        assert _menu(visitor.open_page("/jobs"))[-1] == "Batches"
