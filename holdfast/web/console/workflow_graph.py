"""A workflow as a graph: the jobs and steps below a job as SVG, and the same as a table with the time of each."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from datetime import UTC, datetime
from typing import Any

from holdfast.core.batches import BATCH_TASK
from holdfast.views import workflows
from holdfast.views.formatting import count_noun, format_span
from holdfast.web.console import ROOT
from holdfast.web.console.job_pages import check_reference
from holdfast.web.console.rendering import clip_line
from holdfast.web.console.visit import PageRoute, Visit
from holdfast.web.console.wording import describe_reason
from holdfast.web.messages import ApiResponse

_WIDTH, _HEAD, _LINE = 216, 48, 16  # of a box; its steps and waits have a line each
_GAP_X, _GAP_Y, _MARGIN = 56, 12, 8
_LETTERS = 29  # of a line in a box
_MAX_LINES = 8
_MAX_INDENT = 6
_PLURALS = {"member": "members", "child": "children"}
_MAX_ROWS = 500  # steps in the table

Node = Mapping[str, Any]


async def show_graph(visit: Visit) -> ApiResponse:
    """Returns the page of the workflow below a job."""
    reference = check_reference(visit.path["job"])
    tree = await visit.call_operation("show_tree", job_id=reference)
    nodes = tree["jobs"]
    return visit.render_page(
        "graph.html",
        root=nodes[0],
        graph=draw_graph(nodes),
        rows=list_rows(nodes, datetime.now(UTC)),
        states=Counter(node["state"] for node in nodes),
        is_complete=tree["complete"] or len(nodes) < workflows.MAX_TREE,
        hidden_steps=max(0, sum(len(node["steps"]) for node in nodes) - _MAX_ROWS),
    )


# ── the picture ───────────────────────────────────────────────────────────────────────────────────────────────────────
def draw_graph(nodes: Sequence[Node]) -> dict[str, Any]:
    """Returns boxes and lines with their places. What a job waits for stands to the left of it."""
    edges = list(_edges(nodes))
    columns = _columns(nodes, edges)
    lines = {node["id"]: _lines(node) for node in nodes}
    heights = {node_id: _HEAD + _LINE * len(texts) for node_id, texts in lines.items()}
    tops = _tops(nodes, heights)
    boxes = [
        {
            "id": node["id"],
            "state": node["state"],
            "title": clip_line(node["task"], _LETTERS - 2),
            "detail": clip_line(_describe(node), _LETTERS),
            "lines": [{"text": text, "y": _HEAD + _LINE * place + 4} for place, text in enumerate(lines[node["id"]])],
            "x": _MARGIN + columns[node["id"]] * (_WIDTH + _GAP_X),
            "y": tops[node["id"]],
            "width": _WIDTH,
            "height": heights[node["id"]],
        }
        for node in nodes
    ]
    places = {box["id"]: box for box in boxes}
    return {
        "boxes": boxes,
        "edges": [{"kind": kind, "path": _path(places[start], places[end])} for start, end, kind in edges],
        "width": max(box["x"] for box in boxes) + _WIDTH + _MARGIN,
        "height": max(box["y"] + box["height"] for box in boxes) + _MARGIN,
    }


def _edges(nodes: Sequence[Node]) -> Iterator[tuple[str, str, str]]:
    """Yields the jobs that follow each other: from a parent to its child, and from a job to the one that waits."""
    known = {node["id"] for node in nodes}
    for node in nodes:
        if node["child"]:
            yield node["parent"], node["id"], "child"
        if node["task"] != BATCH_TASK:  # that of a batch are its jobs
            for each in node["dependencies"]:
                if not each["child"] and each["job_id"] in known:
                    yield each["job_id"], node["id"], each["state"]


def _columns(nodes: Sequence[Node], edges: Sequence[tuple[str, str, str]]) -> dict[str, int]:
    """Returns the column of each job: one behind the last of those before it."""
    columns = {node["id"]: 0 for node in nodes}
    for _ in nodes:
        before = dict(columns)
        for start, end, _kind in edges:
            columns[end] = min(max(columns[end], columns[start] + 1), len(nodes))
        if columns == before:
            break
    return columns


def _tops(nodes: Sequence[Node], heights: Mapping[str, int]) -> dict[str, int]:
    """Returns the upper ends of the boxes: those below a job have a band of their own."""
    below: dict[str | None, list[str]] = {}
    for node in nodes:
        below.setdefault(node["parent"], []).append(node["id"])
    bands: dict[str, int] = {}
    for node in reversed(nodes):  # each stands behind its parent
        inner = below.get(node["id"], [])
        band = sum(bands[each] for each in inner) + _GAP_Y * (len(inner) - 1)
        bands[node["id"]] = max(heights[node["id"]], band)
    tops = {nodes[0]["id"]: _MARGIN}
    for node in nodes:
        top = tops[node["id"]]
        for each in below.get(node["id"], []):
            tops[each] = top
            top += bands[each] + _GAP_Y
    return tops


def _path(start: Mapping[str, Any], end: Mapping[str, Any]) -> str:
    x, y = start["x"] + start["width"], start["y"] + _HEAD // 2
    to_x, to_y = end["x"], end["y"] + _HEAD // 2
    return f"M{x} {y}C{x + _GAP_X // 2} {y} {to_x - _GAP_X // 2} {to_y} {to_x} {to_y}"


def _lines(node: Node) -> list[str]:
    """Returns the steps and the waits of a job as lines of its box."""
    steps = [f"• {step['name']}" for step in node["steps"]]
    if len(steps) > _MAX_LINES:
        steps = [*steps[: _MAX_LINES - 1], f"• {len(steps) - _MAX_LINES + 1} more steps"]
    return [clip_line(text, _LETTERS) for text in [*steps, *(f"waits for {text}" for text in _waits(node))]]


def _describe(node: Node) -> str:
    """Text for the state of a job: "dead, no attempts left, 3 attempts"."""
    reason = describe_reason(node["reason"]) if node["reason"] != node["state"] else ""
    parts = [node["state"], *([reason] if reason else [])]
    return ", ".join([*parts, *([f"{node['attempts']} attempts"] if node["attempts"] > 1 else [])])


def _waits(node: Node) -> list[str]:
    """Texts for what a job waits for now."""
    if node["ended_at"]:
        return []
    is_open = [each["child"] or node["task"] == BATCH_TASK for each in node["dependencies"] if each["state"] == "open"]
    children, others = sum(is_open), len(is_open) - sum(is_open)
    texts = [f"signal {node['receiver']['topic']}"] if node["receiver"] else []
    kind = "member" if node["task"] == BATCH_TASK else "child"
    texts += [f"{children:,} {kind if children == 1 else _PLURALS[kind]}"] if children else []
    return texts + ([f"{count_noun(others, 'job')} before it"] if others else [])


# ── the table ─────────────────────────────────────────────────────────────────────────────────────────────────────────
def list_rows(nodes: Sequence[Node], now: datetime) -> list[dict[str, Any]]:
    """Returns a row for each job, depth first, each with its steps behind it, and where the time went."""
    below: dict[str | None, list[Node]] = {}
    for node in nodes:
        below.setdefault(node["parent"], []).append(node)
    first = min(_instant(node["created_at"], now) for node in nodes)
    last = max(_instant(node["ended_at"], now) for node in nodes)
    rows: list[dict[str, Any]] = []
    pending = [(0, nodes[0])]
    tasks = {node["id"]: node["task"] for node in nodes}
    left = _MAX_ROWS
    while pending:
        depth, node = pending.pop()
        steps = node["steps"][:left]
        left -= len(steps)
        parent = tasks.get(node["parent"], "")
        rows.append({**_row(node, steps, (first, last), now), "depth": min(depth, _MAX_INDENT), "parent": parent})
        pending += [(depth + 1, each) for each in reversed(below.get(node["id"], []))]
    return rows


def _row(
    node: Node, steps: Sequence[Mapping[str, Any]], whole: tuple[datetime, datetime], now: datetime
) -> dict[str, Any]:
    created = _instant(node["created_at"], now)
    ended = _instant(node["ended_at"], now)
    started = _instant(node["started_at"], ended)
    relation = "" if node["parent"] is None else "started by" if node["child"] else "after"
    return {
        "id": node["id"],
        "task": node["task"],
        "state": node["state"],
        "detail": _describe(node),
        "waits": _waits(node),
        "relation": relation,
        "before": format_span((started - created).total_seconds()),
        "latest": format_span((ended - started).total_seconds()) if node["started_at"] else None,
        "bar": _bar(node["state"], created, started, ended, whole),
        "steps": [_step_row(step, created, now) for step in steps],
    }


def _step_row(step: Mapping[str, Any], created: datetime, now: datetime) -> dict[str, str]:
    return {"name": step["name"], "at": format_span((_instant(step["ended_at"], now) - created).total_seconds())}


def _bar(
    state: str, created: datetime, started: datetime, ended: datetime, whole: tuple[datetime, datetime]
) -> list[dict[str, Any]]:
    """Returns the parts of a bar over the whole time: until the latest attempt began, and since then."""
    seconds = max((whole[1] - whole[0]).total_seconds(), 1e-6)
    parts = []
    for kind, start, end in (("scheduled", created, started), (state, started, ended)):
        at, width = ((start - whole[0]).total_seconds(), (end - start).total_seconds())
        if width > 0:
            shown = max(100 * width / seconds, 0.5)
            parts.append({"state": kind, "at": round(100 * at / seconds, 2), "width": round(shown, 2)})
    return parts


def _instant(text: str | None, otherwise: datetime) -> datetime:
    return otherwise if text is None else datetime.fromisoformat(text)


ROUTES = (PageRoute("GET", f"{ROOT}/jobs/{{job}}/graph", show_graph),)
