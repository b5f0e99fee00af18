"""Changes of one job, queue or worker. Each is a form that is sent, and ends in a redirect."""

from __future__ import annotations

from typing import Any
from urllib.parse import quote

from holdfast.core.validation import parse_count, parse_duration
from holdfast.tasks.codec import decode_object
from holdfast.web.console import ROOT
from holdfast.web.console.job_pages import check_reference
from holdfast.web.console.visit import Handler, PageRoute, Visit
from holdfast.web.messages import ApiResponse


async def cancel_job(visit: Visit) -> ApiResponse:
    """Cancels a job, or asks it to stop."""
    job_id = check_reference(visit.path["job"])
    job = await visit.call_operation("cancel_job", job_id=job_id)
    return visit.redirect_to(f"jobs/{job['id']}", "cancelled")


async def replay_job(visit: Visit) -> ApiResponse:
    """Queues a job again, also a succeeded one if the form says so, and with another payload if it has one."""
    body: dict[str, Any] = _edited_payload(visit)
    if visit.form_value("force"):
        body["force"] = True
    if step := visit.form_value("from_step"):
        body["from_step"] = step
    job = await visit.call_operation("replay_job", body=body, job_id=check_reference(visit.path["job"]))
    return visit.redirect_to(f"jobs/{job['id']}", "replayed")


async def copy_job(visit: Visit) -> ApiResponse:
    """Submits a copy of a job that has ended."""
    reference = check_reference(visit.path["job"])
    job = await visit.call_operation("fork_job", body=_edited_payload(visit), job_id=reference)
    return visit.redirect_to(f"jobs/{job['id']}", "copied")


def _edited_payload(visit: Visit) -> dict[str, Any]:
    """Returns the payload of the form as a field of a body; nothing if the form has none."""
    text = visit.form_value("payload")
    limit = visit.console.app.settings.payload_limit
    return {"payload": decode_object(text, limit, "payload")} if text else {}


async def edit_job(visit: Visit) -> ApiResponse:
    """Changes a job that has not started: the values that were changed in the form."""
    visit.make_context("edit_job", {})  # its scope comes first
    job = await visit.call_operation("show_job", job_id=check_reference(visit.path["job"]))
    wanted = _edited_payload(visit)
    if queue := visit.form_value("queue"):
        wanted["queue"] = queue
    if priority := visit.form_value("priority"):
        wanted["priority"] = parse_count(priority, "priority", least=-100, most=100)
    body = visit.changed_values(wanted, job)
    if run := visit.form_value("run"):
        body |= {"run_at": run} if run[4:5] == "-" else {"delay": parse_duration(run, "run").total_seconds()}
    if body:
        await visit.call_operation("edit_job", body=body, job_id=job["id"])
    return visit.redirect_to(f"jobs/{job['id']}", "edited" if body else "unchanged")


async def delete_job(visit: Visit) -> ApiResponse:
    """Deletes a job that is not running, in the state that the page showed."""
    shown = [pair for pair in visit.form if pair[0] == "state"]
    await visit.call_operation("delete_job", shown, job_id=check_reference(visit.path["job"]))
    return visit.redirect_to("jobs", "deleted")


async def stop_worker(visit: Visit) -> ApiResponse:
    """Asks a worker to stop, or to empty its queues first."""
    drain = bool(visit.form_value("drain"))
    body = {"workers": [visit.path["worker"]], "drain": drain}
    await visit.call_operation("stop_workers", body=body)
    return visit.redirect_to("workers", "draining" if drain else "stopping")


async def stop_faults(visit: Visit) -> ApiResponse:
    """Switches faults off."""
    await visit.call_operation("stop_faults")
    return visit.redirect_to("faults", "faults_stopped")


def simple_action(operation: str, name: str, target: str, notice: str) -> Handler:
    """Returns the handler of an action without options; it goes back to the overview if the form is of that page.

    ``name``: of the part of the path.
    """

    async def run_action(visit: Visit) -> ApiResponse:
        value = visit.path[name]
        await visit.call_operation(operation, (), {}, **{name: value})
        is_of_overview = visit.form_value("back") == "overview"
        return visit.redirect_to("" if is_of_overview else target.format(quote(value)), notice)

    return run_action


ROUTES = (
    PageRoute("POST", f"{ROOT}/jobs/{{job}}/cancel", cancel_job),
    PageRoute("POST", f"{ROOT}/jobs/{{job}}/replay", replay_job),
    PageRoute("POST", f"{ROOT}/jobs/{{job}}/copy", copy_job),
    PageRoute("POST", f"{ROOT}/jobs/{{job}}/edit", edit_job),
    PageRoute("POST", f"{ROOT}/jobs/{{job}}/delete", delete_job),
    PageRoute(
        "POST", f"{ROOT}/queues/{{queue}}/pause", simple_action("pause_queue", "queue", "queues", "queue_paused")
    ),
    PageRoute(
        "POST", f"{ROOT}/queues/{{queue}}/resume", simple_action("resume_queue", "queue", "queues", "queue_resumed")
    ),
    PageRoute("POST", f"{ROOT}/workers/{{worker}}/stop", stop_worker),
    PageRoute("POST", f"{ROOT}/faults/stop", stop_faults),
)
