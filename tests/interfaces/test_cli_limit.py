"""holdfast limit: limits from the command line."""

from __future__ import annotations

import asyncio

import pytest

from holdfast import Holdfast
from tests.interfaces.cli import Cli

MAIL = ("limit", "add", "mail", "--queue", "mail")
CRM = ("limit", "add", "crm", "--task", "crm.sync", "--by", "args.tenant", "--concurrency", "1")


def declare(**values: object) -> None:
    """Bring a limit of the code to the store, as a worker does when it starts."""

    async def reconcile() -> None:
        async with Holdfast() as app:
            app.limit("mail", queue="mail", **values)
            await app.limits.reconcile(app.declared_limits)

    asyncio.run(reconcile())


def test_limit_is_added_listed_shown_and_removed(cli: Cli) -> None:
    added = cli.json(*MAIL, "--concurrency", "20", "--rate", "100/15m", "--burst", "7")
    assert (added["queue"], added["task"], added["by"], added["concurrency"], added["rate"], added["burst"]) == (
        "mail",
        None,
        None,
        20,
        "100/15m",
        7,
    )
    assert (added["owner"], added["changed"], added["declared"], added["shares"]) == (None, False, None, {})
    used = [{"value": None, "used": 0, "free_at": None, "paused": False}]
    assert cli.json("limit", "list")["limits"] == [added | {"buckets": used}]
    assert cli.json("limit", "show", "mail") == added | {"buckets": used}
    listed = cli.run("limit", "list")
    assert "queue mail" in listed
    assert "20 at once, 100/15m (burst 7)" in listed
    assert "operator" in listed
    assert "20 at once" in cli.run("limit", "show", "mail")
    assert cli.run("limit", "remove", "mail") == "mail: removed\n"
    assert "no limits" in cli.run("limit", "list")


def test_use_of_a_key_is_shown_for_named_values(cli: Cli) -> None:
    cli.run(*CRM, "--share", "acme=3")
    shown = cli.json("limit", "show", "crm", "acme", '{"b": 1, "a": [2]}', "7")
    assert [each["value"] for each in shown["buckets"]] == ["acme", '{"a":[2],"b":1}', "7"]
    assert cli.json("limit", "show", "crm")["buckets"] == []
    assert "acme" in cli.run("limit", "show", "crm", "acme")
    cli.run(*MAIL, "--concurrency", "1")
    assert "one bucket" in cli.fail("limit", "show", "mail", "acme", code=2)


def test_set_changes_and_takes_away_values(cli: Cli) -> None:
    cli.run(*CRM, "--rate", "10/s", "--share", "acme=3")
    changes = ("limit", "set", "crm", "--concurrency", "5", "--weight", "args.pages", "--share", "globex=2")
    assert "give burst too" in cli.fail(*changes, code=2)
    changed = cli.json(*changes, "--burst", "5")
    assert (changed["concurrency"], changed["rate"], changed["weight"]) == (5, "10/s", "args.pages")
    assert changed["shares"] == {"acme": 3, "globex": 2}
    assert changed["revision"] > 0
    taken = cli.json("limit", "set", "crm", "--rate", "none", "--weight", "none", "--share", "acme=none")
    assert (taken["rate"], taken["burst"], taken["weight"], taken["shares"]) == (None, None, 1, {"globex": 2})
    assert (taken["owner"], taken["changed"]) == (None, False)


def test_declared_limit_is_changed_and_reset(cli: Cli) -> None:
    cli.run("migrate")
    declare(concurrency=5)
    assert "declared in code" in cli.fail(*MAIL, "--concurrency", "1", "--replace", code=1)
    changed = cli.json("limit", "set", "mail", "--concurrency", "50")
    assert (changed["owner"], changed["changed"], changed["declared"]["concurrency"]) == ("code", True, 5)
    assert "changed" in cli.run("limit", "list").splitlines()[-1]
    assert "in code" in cli.run("limit", "show", "mail")
    declare(concurrency=6)
    assert cli.json("limit", "show", "mail")["concurrency"] == 50
    assert cli.run("limit", "reset", "mail") == "mail: reset\n"
    removed = cli.invoke("limit", "remove", "mail")
    assert removed.stdout == "mail: removed\n"
    assert "mail: declared in code or settings; a worker that starts with them adds it again" in removed.stderr
    declare(concurrency=6)
    reset = cli.json("limit", "show", "mail")
    assert (reset["concurrency"], reset["changed"]) == (6, False)


def test_reset_of_an_operators_limit_is_refused(cli: Cli) -> None:
    cli.run(*MAIL, "--concurrency", "5")
    assert "an operator made limit mail" in cli.fail("limit", "reset", "mail", code=1)


def test_pause_shows_when_it_ends_and_is_taken_back(cli: Cli) -> None:
    cli.run(*MAIL, "--concurrency", "5")
    cli.run(*CRM)
    assert cli.run("limit", "pause", "mail", "--for", "10m") == "mail: paused for 10m\n"
    assert cli.json("limit", "show", "mail")["buckets"][0]["free_at"] is not None
    paused = cli.json("limit", "pause", "crm", "acme", "--for", "90")
    assert paused == {"limit": "crm", "values": ["acme"], "paused_for": 90.0}
    acme, globex = cli.json("limit", "show", "crm", "acme", "globex")["buckets"]
    assert (acme["free_at"] is None, globex["free_at"]) == (False, None)
    assert "Z (paused)" in cli.run("limit", "show", "mail")
    assert "Z (paused)" in cli.run("limit", "list")
    assert cli.run("limit", "resume", "mail") == "mail: resumed\n"
    assert cli.json("limit", "show", "mail")["buckets"][0]["free_at"] is None
    assert cli.json("limit", "resume", "crm", "acme") == {"limit": "crm", "values": ["acme"], "done": "resumed"}
    assert not cli.json("limit", "show", "crm", "acme")["buckets"][0]["paused"]
    assert "values" in cli.fail("limit", "resume", "crm", code=2)
    assert "values" in cli.fail("limit", "resume", "mail", "acme", code=2)
    assert "there is no limit nope" in cli.fail("limit", "resume", "nope", code=1)
    missing = cli.fail("limit", "pause", "crm", "--for", "90", code=2)
    assert "each value of args.tenant; give values: holdfast limit pause crm VALUE --for 90" in missing
    assert "give values: holdfast limit resume crm VALUE" in cli.fail("limit", "resume", "crm", code=2)
    assert "values" in cli.fail("limit", "pause", "mail", "acme", "--for", "90", code=2)
    assert "for" in cli.fail("limit", "pause", "mail", "--for", "soon", code=2)


def test_existing_name_is_refused_unless_replaced(cli: Cli) -> None:
    cli.run(*MAIL, "--concurrency", "5")
    assert "exists" in cli.fail(*MAIL, "--concurrency", "6", code=1)
    assert cli.json(*MAIL, "--concurrency", "6", "--replace")["concurrency"] == 6


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ((), "concurrency"),
        (("--concurrency", "0"), "concurrency"),
        (("--concurrency", "-5"), "concurrency"),
        (("--concurrency", "many"), "concurrency"),
        (("--rate", "-1/s"), "rate"),
        (("--rate", "0/s"), "rate"),
        (("--rate", "10"), "rate"),
        (("--rate", "10/fortnight"), "rate"),
        (("--burst", "5"), "burst"),
        (("--concurrency", "5", "--weight", "0"), "weight"),
        (("--concurrency", "5", "--weight", "pages"), "weight"),
        (("--concurrency", "5", "--weight", "args"), "weight"),
        (("--concurrency", "5", "--by", "tenant"), "by"),
        (("--concurrency", "5", "--share", "acme=2"), "shares"),
        (("--by", "args.tenant", "--share", "acme"), "share"),
        (("--by", "args.tenant", "--share", "acme=0"), "share"),
        (("--concurrency", "5", "--task", "send"), "task"),
    ],
)
def test_bad_limit_is_refused_with_its_field(cli: Cli, words: tuple[str, ...], message: str) -> None:
    cli.run("migrate")
    assert message in cli.fail(*MAIL, *words, code=2)
    assert cli.json("limit", "list")["limits"] == []


def test_limit_of_a_registered_task_names_its_arguments(cli: Cli) -> None:
    target = cli.write_jobs()
    words = ("limit", "add", "send", "--task", "mail.send", "--concurrency", "1")
    assert "did you mean copies" in cli.fail("--app", target, *words, "--weight", "args.copis", code=2)
    cli.run("--app", target, *words, "--weight", "args.copies")
    assert "takes to, copies" in cli.fail("--app", target, "limit", "set", "send", "--weight", "args.cc", code=2)


def limit_findings(cli: Cli, *words: str) -> list[dict[str, str]]:
    return [each for each in cli.json(*words, "doctor")["findings"] if each["name"] == "limits"]


def test_doctor_names_changed_limits(cli: Cli) -> None:
    cli.run("enqueue", "work", "--queue", "mail")
    assert limit_findings(cli) == []
    declare(concurrency=5)
    (kept,) = limit_findings(cli)
    assert (kept["level"], kept["text"]) == ("ok", "1 limit, 1 declared, 0 changed by operators")
    cli.run("limit", "set", "mail", "--concurrency", "50", "--rate", "10/s")
    counted, changed = limit_findings(cli)
    assert counted["text"] == "1 limit, 1 declared, 1 changed by operators"
    assert (changed["level"], changed["text"]) == (
        "warning",
        "limit mail has 50 at once, 10/s (burst 1); it is declared with 5 at once",
    )
    assert "holdfast limit reset mail" in changed["remedy"]


def test_doctor_names_declared_limits_without_effect(cli: Cli) -> None:
    cli.run("enqueue", "work", "--queue", "mail")
    declared = """
from holdfast import Holdfast
app = Holdfast()
app.limit("mail", queue="mail", concurrency=5)
"""
    target = cli.write_jobs(declared)
    (missing,) = limit_findings(cli, "--app", target)
    assert missing["text"] == "limit mail is declared, and not in the store"
    cli.run("limit", "add", "mail", "--queue", "mail", "--concurrency", "50")
    _, hidden = limit_findings(cli, "--app", target)
    assert (hidden["level"], hidden["text"]) == (
        "warning",
        "limit mail is declared, and has no effect: an operator made one of its name",
    )
    assert " limit remove mail" in hidden["remedy"]
    cli.run("limit", "remove", "mail")
    declare(concurrency=5)
    (kept,) = limit_findings(cli, "--app", target)
    assert kept["level"] == "ok"
    _, other = limit_findings(cli, "--app", cli.write_jobs(declared.replace("=5", "=6")))
    assert other["text"] == "limit mail is declared otherwise here: queue mail, 6 at once"
    _, gone, _ = limit_findings(cli, "--app", cli.write_jobs(declared.replace('"mail", q', '"other", q')))
    assert gone["text"] == "limit mail is in force, and this application declares it no more"
    assert " limit remove mail" in gone["remedy"]
    report = cli.json("--app", cli.write_jobs("def (:"), "doctor", code=1)["findings"]
    assert [each["level"] for each in report if each["name"] == "limits"] == ["ok"]  # not "declares it no more"
    bad = (
        declared
        + """
app.limit("send", task="send", by="args.too", concurrency=1)
@app.task("send")
async def send(to: str) -> None: ...
"""
    )
    (wrong,) = [
        each
        for each in cli.json("--app", cli.write_jobs(bad), "doctor", code=1)["findings"]
        if each["level"] == "error"
    ]
    assert wrong["text"].startswith("limit send: by: 'args.too' is not valid")
    (cli.folder / "holdfast.toml").write_text('[limits.partner]\ntask = "fetch"\nconcurrency = 1\n', encoding="utf-8")
    assert "limit partner is declared, and not in the store" in [each["text"] for each in limit_findings(cli)]


def test_doctor_names_limits_that_nothing_uses(cli: Cli) -> None:
    target = cli.write_jobs()
    cli.run("enqueue", "work", "--queue", "mail")
    for name, *scope in (("a", "--queue", "mial"), ("b", "--task", "mail.sent"), ("c", "--task", "mail.send")):
        cli.run("limit", "add", name, *scope, "--concurrency", "1")
    _, queue, task = limit_findings(cli, "--app", target)
    assert queue["text"] == "limit a: queue mial has no job and no worker; did you mean mail?"
    assert task["text"] == "limit b: this application has no task mail.sent; did you mean mail.send?"
    assert len(limit_findings(cli)) == 2  # without an application no task is known


def test_submission_beyond_the_depth_exits_75(cli: Cli) -> None:
    assert cli.json(*MAIL, "--depth", "2")["depth"] == 2
    assert "depth 2" in cli.run("limit", "list")
    for _ in range(2):
        cli.run("enqueue", "work", "--queue", "mail")
    assert "queue mail is full" in cli.fail("enqueue", "work", "--queue", "mail", code=75)
    assert "depth" in cli.fail("limit", "add", "api", "--rate", "1/s", "--depth", "2", code=2)
    assert "depth" in cli.fail("limit", "set", "mail", "--depth", "0", code=2)


def test_submission_beyond_the_depth_of_its_key_exits_75(cli: Cli) -> None:
    cli.run("limit", "add", "quota", "--task", "crm.sync", "--by", "args.tenant", "--depth", "1")
    acme, globex = ('{"tenant": "acme"}', '{"tenant": "globex"}')
    cli.run("enqueue", "crm.sync", acme)
    refused = cli.fail("enqueue", "crm.sync", acme, code=75)
    assert "limit quota is full for acme: 1 of 1 jobs wait" in refused
    cli.run("enqueue", "crm.sync", globex)
    cli.run("limit", "set", "quota", "--depth", "2")
    cli.run("enqueue", "crm.sync", acme)


def test_set_without_a_value_is_refused(cli: Cli) -> None:
    cli.run(*MAIL, "--concurrency", "5")
    assert "give a value to change" in cli.fail("limit", "set", "mail", code=2)


def test_limit_of_handlers_keeps_to_its_rate(cli: Cli) -> None:
    cli.run("limit", "add", "api", "--rate", "10/s")
    assert "concurrency: 3 is not valid; limit api is of handlers" in cli.fail(
        "limit", "set", "api", "--concurrency", "3", code=2
    )
    assert "rate: None is not valid; limit api is of handlers" in cli.fail(
        "limit", "set", "api", "--rate", "none", code=2
    )


def test_limit_of_an_unknown_task_is_added_with_a_warning(cli: Cli) -> None:
    added = cli.invoke("--app", cli.write_jobs(), "limit", "add", "a", "--task", "mail.sent", "--concurrency", "1")
    assert added.exit_code == 0
    assert "warning: the application has no task mail.sent; did you mean mail.send?" in added.stderr


@pytest.mark.parametrize(
    "words", [("show", "other"), ("set", "other", "--rate", "1/s"), ("reset", "other"), ("remove", "mail", "other")]
)
def test_unknown_limit_exits_1(cli: Cli, words: tuple[str, ...]) -> None:
    cli.run(*MAIL, "--concurrency", "5")
    assert "there is no limit other" in cli.fail("limit", *words, code=1)
    assert len(cli.json("limit", "list")["limits"]) == 1
