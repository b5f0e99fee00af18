"""The external API: a mail provider of its own, with a rate limit and a log of all calls. A stand-in for the real one.

It keeps everything in memory. ``PUT /behaviour`` makes it slow or fail.
"""

from __future__ import annotations

import asyncio
import time
from itertools import takewhile
from typing import Annotated, Literal

from fastapi import FastAPI, Header, HTTPException
from pydantic import BaseModel, Field

site = FastAPI(title="provider")


class Message(BaseModel):
    """A message to be sent."""

    to: str
    template: str


class Behaviour(BaseModel):
    """Settings of the provider's answers."""

    mode: Literal["ok", "down"] = "ok"
    delay: float = Field(0, ge=0, description="Seconds before each answer.")
    refused_domains: list[str] = Field(["refused.example"], description="Addresses there are answered 422.")
    calls_per_second: int = Field(1000, ge=1, description="More calls in one second are answered 429.")


class Call(BaseModel):
    """An entry of the log."""

    at: float
    key: str
    to: str
    status: int


class Provider(BaseModel):
    """State of the provider."""

    behaviour: Behaviour = Behaviour()
    calls: list[Call] = []
    messages: dict[str, str] = Field({}, description="Id of each accepted message, by idempotency key.")


provider = Provider()


@site.post("/messages", status_code=201)
async def send_message(message: Message, idempotency_key: Annotated[str, Header()]) -> dict[str, str]:
    """Accepts a message. A known idempotency key returns the first message and sends nothing."""
    status = judge(message)
    provider.calls.append(Call(at=time.time(), key=idempotency_key, to=message.to, status=status))
    if status == 201:
        provider.messages.setdefault(idempotency_key, f"message-{len(provider.messages) + 1}")
    await asyncio.sleep(provider.behaviour.delay)
    if status != 201:
        raise HTTPException(status, {429: "too many calls", 422: f"to: {message.to!r} is refused", 503: "down"}[status])
    return {"message_id": provider.messages[idempotency_key]}


def judge(message: Message) -> int:
    """Returns the status with which a message is answered."""
    behaviour, now = provider.behaviour, time.time()
    if behaviour.mode == "down":
        return 503
    recent = takewhile(lambda each: now - each.at < 1, reversed(provider.calls))
    if sum(each.status == 201 for each in recent) >= behaviour.calls_per_second:
        return 429
    return 422 if message.to.partition("@")[2] in behaviour.refused_domains else 201


@site.get("/calls")
async def list_calls() -> list[Call]:
    """Lists all calls, oldest first."""
    return provider.calls


@site.get("/messages")
async def list_messages() -> dict[str, str]:
    """Lists the accepted messages by idempotency key."""
    return provider.messages


@site.put("/behaviour")
async def change_behaviour(behaviour: Behaviour) -> Behaviour:
    """Changes how the provider answers from now on."""
    provider.behaviour = behaviour
    return behaviour


@site.get("/health")
async def check_health() -> dict[str, str]:
    """Answers while the process lives."""
    return {"status": "ok", "service": "provider"}
