"""Creates the tables of a service: Holdfast's and its own, in the service's own database."""

from __future__ import annotations

from importlib.resources import files

import asyncpg

from holdfast import Holdfast


async def migrate(app: Holdfast) -> None:
    """Creates missing tables; harmless when they are there."""
    async with app:
        await app.migrate()
    connection = await asyncpg.connect(app.settings.url)
    try:
        statements = files(f"streams.{app.settings.api_service}") / "tables.sql"
        await connection.execute(statements.read_text(encoding="utf-8"))
    finally:
        await connection.close()
