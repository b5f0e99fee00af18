"""The graph of a workflow: its jobs, steps, waits and times, as a picture and as a table."""

from __future__ import annotations

import random
import re
from datetime import UTC, datetime, timedelta
from itertools import pairwise
from typing import Any

import msgspec
import pytest

from holdfast.core.ids import new_id
from holdfast.core.lifecycle import Failed, Suspended, decide
from holdfast.core.models import NewJob, Reason
from holdfast.core.retry import Retry
from holdfast.core.steps import NewStep
from holdfast.core.waits import SignalWait
from holdfast.views import workflows
from holdfast.web.console import workflow_graph
from tests.console.visitor import Visitor
from tests.console.world import World
from tests.web.client import Api
from tests.web.keyed import Keys


class Workflow(msgspec.Struct, frozen=True):
    """Ids: a parent with steps, its two children, and a job that waits for the parent and for another one."""

    parent: str
    first: str
    second: str
    after: str


async def _start(api: Api, parent_id: str, children: list[NewJob]) -> None:
    """Lets a job take two steps, start its children and wait for a signal too."""
    parent = await api.claim(parent_id)
    store = await api.app.open_store()
    steps = [NewStep(parent.lease, name, number, True, "1") for number, name in enumerate(("reserve", "charge"), 1)]
    assert await store.workflow.save_steps(steps) == [True, True]
    assert await store.workflow.start_children(parent.lease, children, "worker-1") is not None
    settlement = decide(parent, Suspended(Reason.CHILDREN), Retry.fixed(1), random.Random(0))
    await store.queueing.settle([settlement])


@pytest.fixture
def workflow(open_api: Api) -> Workflow:
    parent = open_api.submit(task="order.ship")["id"]
    children = [NewJob(id=new_id(), task=f"child.{n}", payload="{}", queue=queue) for n, queue in enumerate(("a", "b"))]
    open_api.run(_start(open_api, parent, children))
    after = open_api.submit(task="order.report", after=[parent, children[0].id])["id"]
    return Workflow(parent, children[0].id, children[1].id, after)


def _boxes(page: str) -> dict[str, tuple[int, int, int]]:
    """Column, top and height of each box by the id of its job."""
    place = r'tabindex="-1" transform="translate\((\d+) (\d+)\)">\s*<rect class="box" width="\d+" height="(\d+)"'
    pattern = rf'<a href="/console/jobs/([0-9a-f-]{{36}})" {place}'
    return {job: (int(x), int(y), int(height)) for job, x, y, height in re.findall(pattern, page)}


def _row(page: str, job_id: str) -> str:
    """The row of a job in the table, with those of its steps."""
    return page.partition(f'<tr id="node-{job_id}">')[2].partition('<tr id="node-')[0]


def test_jobs_stand_behind_those_that_they_follow(visitor: Visitor, workflow: Workflow) -> None:
    page = visitor.open_page(f"/jobs/{workflow.parent}/graph")
    boxes = _boxes(page)
    assert boxes.keys() == {workflow.parent, workflow.first, workflow.second, workflow.after}
    column = {job: x for job, (x, _, _) in boxes.items()}
    assert column[workflow.parent] < column[workflow.first] == column[workflow.second] < column[workflow.after]
    assert [page.count(f'<path class="edge {kind}"') for kind in ("child", "open")] == [2, 2]
    assert "order.report" in page.partition("<table>")[2]


def test_boxes_do_not_overlap(open_api: Api, visitor: Visitor, workflow: Workflow) -> None:
    for number in range(5):
        job = open_api.submit(after=[workflow.after])["id"]
        open_api.submit(after=[job, workflow.first] if number % 2 else [job])
    boxes = sorted(_boxes(visitor.open_page(f"/jobs/{workflow.parent}/graph")).values())
    assert len(boxes) == 14
    for (x, y, height), (next_x, next_y, _) in pairwise(boxes):
        assert x != next_x or y + height < next_y


def test_table_has_steps_waits_and_attempts(open_api: Api, visitor: Visitor, workflow: Workflow) -> None:
    open_api.run(open_api.end(workflow.second, Failed(error="it broke", retryable=False)))
    page = visitor.open_page(f"/jobs/{workflow.parent}/graph")
    parent = _row(page, workflow.parent)
    for text in ("step reserve", "step charge", "waits for 1 child", "waiting, waits for its children"):
        assert text in parent
    assert "started by order.ship" in _row(page, workflow.second)
    assert "dead, the handler raised an error" in _row(page, workflow.second)
    assert "waits for 2 jobs before it" in _row(page, workflow.after)
    picture = page.partition("<svg")[2].partition("</svg>")[0]
    for text in ("• reserve", "waits for 1 child", "order.ship"):
        assert text in picture


def test_long_list_of_steps_is_cut_in_a_box(open_api: Api, visitor: Visitor) -> None:
    job_id = open_api.submit()["id"]

    async def take_steps() -> None:
        job = await open_api.claim(job_id)
        store = await open_api.app.open_store()
        await store.workflow.save_steps([NewStep(job.lease, f"step-{n}", n, True) for n in range(1, 21)])

    open_api.run(take_steps())
    page = visitor.open_page(f"/jobs/{job_id}/graph")
    picture = page.partition("<svg")[2].partition("</svg>")[0]
    assert ("• step-7<" in picture, "• step-8<" in picture, "• 13 more steps" in picture) == (True, False, True)
    assert page.count('<tr class="step">') == 20


def test_wait_for_a_signal_is_named(open_api: Api, visitor: Visitor) -> None:
    job_id = open_api.submit()["id"]

    async def wait() -> None:
        job = await open_api.claim(job_id)
        store = await open_api.app.open_store()
        step = NewStep(job.lease, "wait_for approved:42", 1, True)
        await store.workflow.receive_signal(SignalWait(step, "approved:42", timedelta(hours=1)))
        await store.queueing.settle([decide(job, Suspended(Reason.SIGNAL), Retry.fixed(1), random.Random(0))])

    open_api.run(wait())
    page = visitor.open_page(f"/jobs/{job_id}/graph")
    assert "waits for signal approved:42" in page
    assert f'href="/console/jobs/{job_id}/graph"' in visitor.open_page(f"/jobs/{job_id}")


def test_batch_has_its_jobs_and_callbacks(open_api: Api, visitor: Visitor, world: World) -> None:
    page = visitor.open_page(f"/jobs/{world.batch}/graph")
    waits = open_api.get(f"/v1/jobs/{world.batch}/waits")
    related = {each["job_id"] for each in (*waits["dependencies"], *waits["dependents"])}
    assert _boxes(page).keys() == {world.batch, *related}
    assert "1 succeeded" in page


def test_jobs_of_foreign_queues_are_left_out(open_api: Api, keys: Keys, workflow: Workflow) -> None:
    visitor = Visitor(open_api)
    visitor.sign_in(keys.make("read", queues=("default", "a")))
    page = visitor.open_page(f"/jobs/{workflow.parent}/graph")
    assert (workflow.first in page, workflow.second in page) == (True, False)
    limited = Visitor(open_api)
    limited.sign_in(keys.make("read", queues=("b",)))
    limited.open_page(f"/jobs/{workflow.parent}/graph", 404)


def test_large_workflow_says_that_it_is_cut(
    visitor: Visitor, workflow: Workflow, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(workflows, "MAX_TREE", 3)
    monkeypatch.setattr(workflow_graph, "_MAX_ROWS", 1)
    page = visitor.open_page(f"/jobs/{workflow.parent}/graph")
    assert len(_boxes(page)) == 3
    assert "the graph shows the first 3" in page
    assert ("1 more steps are not shown." in page, page.count('<tr class="step">')) == (True, 1)


def _node(job_id: str, parent: str | None, **given: Any) -> dict[str, Any]:
    node = {"id": job_id, "parent": parent, "child": False, "task": "work", "state": "succeeded", "reason": None}
    times = dict.fromkeys(("created_at", "started_at", "ended_at"))
    return {**node, **times, "attempts": 1, "receiver": None, "dependencies": [], "steps": [], **given}


def test_bars_show_where_the_time_went() -> None:
    at = [datetime(2030, 1, 1, 0, 0, second, tzinfo=UTC) for second in range(11)]
    texts = [each.isoformat() for each in at]
    rows = workflow_graph.list_rows(
        [
            _node("a", None, created_at=texts[0], started_at=texts[2], ended_at=texts[5]),
            _node("b", "a", created_at=texts[5], started_at=texts[6], state="running"),
        ],
        at[10],
    )
    assert [(row["before"], row["latest"]) for row in rows] == [("2s", "3s"), ("1s", "4s")]
    parts = [[(part["state"], part["at"], part["width"]) for part in row["bar"]] for row in rows]
    assert parts[0] == [("scheduled", 0.0, 20.0), ("succeeded", 20.0, 30.0)]
    assert parts[1] == [("scheduled", 50.0, 10.0), ("running", 60.0, 40.0)]


def test_chain_of_two_hundred_jobs_is_drawn() -> None:
    nodes = [_node("0", None)]
    for number in range(1, 200):
        waited = {"job_id": str(number - 1), "on": "success", "state": "met", "child": False}
        nodes.append(_node(str(number), str(number - 1), dependencies=[waited]))
    graph = workflow_graph.draw_graph(nodes)
    assert (len(graph["boxes"]), len(graph["edges"])) == (200, 199)
    assert [box["y"] for box in graph["boxes"]] == [8] * 200
