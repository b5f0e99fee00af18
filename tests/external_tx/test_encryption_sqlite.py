"""Texts that are written inside transactions of callers are encrypted too."""

from __future__ import annotations

import asyncio

from holdfast import Context, Holdfast
from holdfast.integrations.cryptography import AesGcmCodec, new_key
from tests.external_tx.test_tx_completion_sqlite import begun
from tests.support.store_bytes import read_store

WORD = "persimmon"


def test_plain_text_of_callers_transactions_is_nowhere_in_the_store(app: Holdfast) -> None:
    app = Holdfast(app.settings.url, codec=AesGcmCodec({"2030-01": new_key()}))

    @app.task("charge")
    async def charge(context: Context, to: str) -> None:
        with begun(app) as connection:
            found = await context.step_in(connection, "ask", lambda: f"{to} asked")
        with begun(app) as connection:
            await context.complete(connection, f"{found} and charged")

    async def work() -> object:
        async with app:
            with begun(app) as connection:
                handle = await charge.options(connection=connection).enqueue(WORD)
            await app.run_worker(drain=True)
            assert [step.result for step in await app.steps(handle.id)] == [f'"{WORD} asked"']
            return (await handle.job()).return_value()

    assert asyncio.run(work()) == f"{WORD} asked and charged"
    assert WORD.encode() not in read_store(app.settings.url)
