"""The table of bad requests on every store, and whether it is complete; see ``bad_inputs.py``."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.web.bad_inputs import BAD, ELSEWHERE, NOWHERE, ROWS, job
from tests.web.client import Api, check_form


async def _complaints(api: Api, path: str, body: bytes, headers: dict[str, str], expected: set[int]) -> list[str]:
    answer = await api.raw("POST", path, content=body, headers=headers)
    try:
        check_form(answer)
        assert answer.status_code in expected
        assert answer.json()["remedy"]
    except AssertionError as error:
        return [f"{path} {body[:80]!r}: {answer.status_code} {answer.text[:200]} {error}"]
    return []


@pytest.mark.timeout(400)
def test_every_row_is_refused_whole_on_every_store(api: Api) -> None:
    async def ask() -> list[str]:
        found: list[str] = []
        for bad in BAD:
            batch = b'{"jobs": [%s, %s]}' % (job(), bad.body)
            found += await _complaints(api, "/v1/jobs", bad.body, bad.headers, {bad.status})
            found += await _complaints(api, "/v1/jobs/batch", batch, bad.headers, {bad.status, 422})
        return found

    assert api.run(ask(), seconds=200) == []
    assert api.count() == 0


def test_every_row_has_a_case_a_test_or_a_reason() -> None:
    here = {int(bad.id[1:3]) for bad in BAD if bad.id[1:3].isdigit()}
    assert here | set(ELSEWHERE) | set(NOWHERE) >= ROWS
    assert not (here | set(ELSEWHERE)) & set(NOWHERE)
    assert len({bad.id for bad in BAD}) == len(BAD)
    for name, test in ELSEWHERE.values():
        assert test in (Path(__file__).parent / name).read_text(encoding="utf-8"), (name, test)


def test_what_is_refused_says_it_in_words_for_people(api: Api) -> None:
    problem: dict[str, Any] = api.refused("POST", "/v1/jobs", 422, content=job(priority=101), headers=BAD[0].headers)
    assert (problem["field"], problem["value"]) == ("priority", "101")
