"""alerts: what is breached, and the test of a receiver."""

from __future__ import annotations

import asyncio
import sys

import pytest

from holdfast import Holdfast
from tests.interfaces.cli import Cli
from tests.support.receiver import Receiver


def write_settings(cli: Cli, text: str) -> None:
    (cli.folder / "holdfast.toml").write_text(text)


def evaluate_rules() -> None:
    """Looks at the rules once, as a worker does."""

    async def look() -> None:
        async with Holdfast() as app:
            await app.alerts.evaluate_rules()

    asyncio.run(look())


def test_alerts_are_listed_and_doctor_names_them(cli: Cli) -> None:
    cli.run("migrate")
    assert "there are no rules: write [alerts.NAME] in the settings" in cli.run("alerts", "list")
    write_settings(cli, '[alerts.any-dead]\ndead_over = 0\n[alerts.late]\nqueue = "mail"\noldest_over = "10m"\n')
    cli.dead()  # breached, and not looked at yet
    assert "no alert is active; 2 rules, which workers and the API look at every 1m" in cli.run("alerts", "list")
    write_settings(cli, 'alert_command = "false"\n[alerts.any-dead]\ndead_over = 0\n')
    evaluate_rules()
    (alert,) = cli.json("alerts", "list")["alerts"]
    assert (alert["rule"], alert["queue"], alert["sent"]) == ("any-dead", "default", False)
    assert alert["problem"] == "alert_command false ended with 1"
    assert "queue default has 1 dead job, more than 0" in cli.run("alerts", "list")
    (finding,) = [each for each in cli.json("doctor")["findings"] if each["name"] == "alerts"]
    assert (finding["level"], "it is not sent yet: alert_command false" in finding["text"]) == ("warning", True)
    assert "holdfast list --queue default; its dead jobs: holdfast dlq list --queue default" in finding["remedy"]
    assert "holdfast alerts test" in finding["remedy"]


def test_receiver_is_tested(cli: Cli) -> None:
    assert "neither is set" in cli.fail("alerts", "test", code=78)
    receiver = Receiver()
    try:
        write_settings(cli, f'alert_webhook = "{receiver.url}?token=s3cret"\n')
        host = receiver.url.removesuffix("/hook")
        assert cli.run("alerts", "test") == f"alert_webhook {host}/*** has taken the test alert\n"
        assert receiver.paths == ["/hook?token=s3cret"]
        assert (receiver.states(), receiver.messages[0]["queue"]) == (["test"], "test")
        receiver.answer = 403
        assert "alert_webhook answered 403" in cli.fail("alerts", "test", code=1)
        assert "s3cret" not in cli.run("config", "list")
    finally:
        receiver.close()
    write_settings(
        cli, f'alert_command = ["{sys.executable}", "-c", "import sys; sys.exit(len(sys.stdin.read()) < 9)"]'
    )
    assert cli.json("alerts", "test") == {"sent_to": f"alert_command {sys.executable}"}
    assert not (cli.folder / "holdfast.db").exists(), "no store is needed"


@pytest.mark.parametrize("host", ["hooks..example.com", f"{'h' * 64}.example.com"])
def test_receiver_that_cannot_be_looked_up_is_refused(cli: Cli, host: str) -> None:
    write_settings(cli, f'alert_webhook = "https://{host}/s3cret"\n')
    refused = cli.fail("alerts", "list", code=78)
    assert "write the URL of a receiver" in refused
    assert "s3cret" not in refused
