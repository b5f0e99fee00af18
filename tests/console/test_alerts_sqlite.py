"""Alerts on the overview."""

from __future__ import annotations

from pathlib import Path

from holdfast import Holdfast
from tests.console.visitor import Visitor
from tests.web.client import Api
from tests.web.keyed import Keys


async def look(app: Holdfast) -> None:
    await app.alerts.evaluate_rules()


def test_overview_shows_alerts_of_the_queues_of_the_key(home: str, keys: Keys, tmp_path: Path) -> None:
    rules = {"late": {"oldest_over": "0s"}}
    with Api(home, keys_file=str(keys.path), alerts=rules, alert_command="false") as api:
        for queue in ("mail", "secret"):
            api.run(api.app.submit(api.app.draft_job("work", {}, queue=queue)))
        api.run(look(api.app))
        visitor = Visitor(api)
        visitor.sign_in(keys.spare)
        page = visitor.open_page()
        assert "alert late since" in page
        assert "queue secret: its oldest ready job has waited" in page
        assert "it is not sent yet: alert_command false ended with 1" in page
        limited = Visitor(api)
        limited.sign_in(keys.make("read", queues=("mail",)))
        page = limited.open_page()
        assert "queue mail: its oldest ready job has waited" in page
        assert "secret" not in page
