"""Texts that are written inside transactions of callers on PostgreSQL are encrypted too."""

from __future__ import annotations

import asyncio

from holdfast import Context, Holdfast, Unique
from holdfast.integrations.cryptography import AesGcmCodec, new_key
from tests.external_tx.kinds import by_asyncpg
from tests.external_tx.support import Place
from tests.support.store_bytes import read_store

WORD = "persimmon"


def test_plain_text_of_callers_transactions_is_nowhere_in_the_database(place: Place) -> None:
    app = Holdfast(place.url, codec=AesGcmCodec({"2030-01": new_key()}, unique_secret=new_key()))

    @app.task("charge")
    async def charge(context: Context, to: str) -> None:
        async with by_asyncpg(place.url) as held:
            found = await context.step_in(held.connection, "ask", lambda: f"{to} asked")
        async with by_asyncpg(place.url) as held:
            await context.complete(held.connection, f"{found} and charged")

    @app.task("search", unique=Unique("active", by=["task", "queue", "args.word"], on_conflict="replace"))
    async def search(word: str, page: int) -> str:
        return f"{word} on page {page}"

    async def work() -> list[object]:
        async with app:
            async with by_asyncpg(place.url) as held:
                charged = await charge.options(connection=held.connection).enqueue(WORD)
                first = await search.options(connection=held.connection).enqueue(WORD, 1)
                second = await search.options(connection=held.connection, after=charged).enqueue(f"{WORD} later", 1)
            async with by_asyncpg(place.url) as held:
                replacing = await search.options(connection=held.connection).enqueue(WORD, 2)
            assert (replacing.id, replacing.changed) == (first.id, True)
            await app.run_worker(drain=True)
            return [await handle.result(timeout=0) for handle in (charged, first, second)]

    results = asyncio.run(work())
    assert results == [f"{WORD} asked and charged", f"{WORD} on page 2", f"{WORD} later on page 1"]
    assert WORD.encode() not in read_store(place.url)
