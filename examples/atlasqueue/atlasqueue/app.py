"""The application, without handlers: who submits jobs needs none."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from atlasqueue import canvas, config
from holdfast import Holdfast, Invalid
from holdfast.core.models import NewJob


class AtlasQueue(Holdfast):
    """Holdfast that checks the chain of a job when the job is submitted, by whatever client."""

    def draft_job(self, task: str, payload: Mapping[str, Any] | str, **options: Any) -> NewJob:
        """Returns the job that ``enqueue`` would submit; Invalid names the step of its chain that is wrong."""
        job = super().draft_job(task, payload, **options)
        metadata = job.options.metadata if job.options is not None else None
        for number, step in enumerate(canvas.read_steps(metadata or {})):
            try:
                super().draft_job(*step)
            except Invalid as error:
                field = "type" if error.field == "task" else error.field
                raise Invalid(canvas.step_field(number, field), error.value, error.remedy) from None
        return job


app = AtlasQueue(settings=config.settings())
