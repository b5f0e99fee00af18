"""FastAPI applications that behave like Holdfast's own API: limited bodies, errors as problem documents (RFC 9457)."""

from __future__ import annotations

import logging

from fastapi import FastAPI
from pydantic import BaseModel, ConfigDict
from starlette.routing import BaseRoute, Route

from holdfast.core.events import Event, RequestFailed
from holdfast.integrations.fastapi import Lifespan, add_holdfast_api
from holdfast.web.asgi import Api

log = logging.getLogger(__name__)
DOCS = ("/docs", "/docs/{asset}")
"""Holdfast's page describes the application; FastAPI's own loads scripts, which the headers of responses forbid."""


class StrictBody(BaseModel):
    """Base of bodies: no unknown fields, no conversion of types, no infinite numbers."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)


def create_site(api: Api, title: str, lifespan: Lifespan) -> FastAPI:
    """Returns an application without routes of its own."""
    routes: list[BaseRoute] = [Route(path, api) for path in DOCS]
    site = FastAPI(title=title, lifespan=lifespan, docs_url=None, redoc_url=None, routes=routes)
    add_holdfast_api(site, api)
    api.app.events.subscribe(log_failure, RequestFailed)
    return site


def log_failure(event: Event) -> None:
    """Writes the cause of an answer 500 to the log."""
    if isinstance(event, RequestFailed):
        log.error("request %s failed: %s %s\n%s", event.request_id, event.method, event.path, event.error)
