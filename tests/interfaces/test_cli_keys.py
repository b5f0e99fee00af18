"""``holdfast keys``: made, listed, rotated and revoked; shown once."""

from __future__ import annotations

import pytest

from tests.interfaces.cli import Cli


def test_a_key_is_shown_once_and_listed_without_its_secret(cli: Cli) -> None:
    token = cli.run("keys", "create", "shop", "--scope", "submit", "--queue", "mail*", "--file", "keys.toml").strip()
    key_id, secret = token.split("_")[1:]
    assert token == f"hf_{key_id}_{secret}"
    listed = cli.run("keys", "list", "--file", "keys.toml")
    assert all(word in listed for word in (key_id, "shop", "submit", "mail*", "active"))
    assert secret not in listed
    [key] = cli.json("keys", "list", "--file", "keys.toml")["keys"]
    assert (key["id"], key["scopes"], key["queues"], key["expires_at"]) == (key_id, ["submit"], ["mail*"], None)
    rotated = cli.run("keys", "rotate", key_id, "--file", "keys.toml").strip()
    assert rotated.startswith(f"hf_{key_id}_")
    assert rotated != token
    assert cli.json("keys", "list", "--file", "keys.toml")["keys"][0]["former_until"] is not None
    assert cli.run("keys", "revoke", key_id, "--file", "keys.toml") == f"{key_id}: revoked\n"
    assert cli.json("keys", "list", "--file", "keys.toml")["keys"][0]["state"] == "revoked"
    assert "revoked" in cli.fail("keys", "rotate", key_id, "--file", "keys.toml", code=1)


def test_rotation_overlap_is_reported(cli: Cli) -> None:
    key_id = cli.run("keys", "create", "shop", "--scope", "read", "--file", "keys.toml").split("_")[1]
    assert "old secret" not in cli.run("keys", "list", "--file", "keys.toml")
    assert "the old secret is good until 2" in cli.invoke("keys", "rotate", key_id, "--file", "keys.toml").stderr
    assert "active, the old secret until 2" in cli.run("keys", "list", "--file", "keys.toml")
    words = ("rotate", key_id, "--overlap", "0s", "--file", "keys.toml")
    assert "the old secret is good no more" in cli.invoke("keys", *words).stderr


def test_leaked_key_is_revoked_by_its_token_without_echo(cli: Cli) -> None:
    token = cli.run("keys", "create", "shop", "--scope", "read", "--file", "keys.toml").strip()
    key_id, secret = token.split("_")[1:]
    assert key_id in cli.fail("keys", "revoke", "shop", "--file", "keys.toml", code=1)
    for wrong in (secret, f"hf_{key_id}{secret}", f"HF_{key_id}_{secret}"):
        assert secret not in cli.fail("keys", "revoke", wrong, "--file", "keys.toml", code=1)
    assert secret not in cli.fail("keys", "revoke", f"hf_aaaaaaaa_{secret}", "--file", "keys.toml", code=1)
    assert cli.run("keys", "revoke", token, "--file", "keys.toml") == f"{key_id}: revoked\n"


@pytest.mark.parametrize(
    ("words", "code", "message"),
    [
        (("create", "x", "--scope", "write"), 2, "submit, read, operate, work and admin"),
        (("create", "x"), 2, "scope"),
        (("create", "x", "--scope", "read", "--queue", "a/b"), 2, "queue"),
        (("create", "x", "--scope", "read", "--expires", "yesterday"), 2, "expires"),
        (("create", "x", "--scope", "read", "--expires", "0s"), 2, "expires"),
        (("create", "x", "--scope", "read", "--expires", "tomorrow"), 2, "or an instant"),
        (("create", "x", "--scope", "read", "--expires", "2020-01-01T00:00:00Z"), 2, "to come"),
        (("create", "x", "--scope", "submit,read"), 2, "--scope once for each"),
        (("create", "x", "--scope", "submitt"), 2, "did you mean submit?"),
        (("revoke", "aaaaaaaa"), 1, "there is no key"),
        (("list",), 78, "holdfast keys create"),
    ],
    ids=str,
)
def test_impossible_key_operation_is_reported(cli: Cli, words: tuple[str, ...], code: int, message: str) -> None:
    assert message in cli.fail("keys", *words, "--file", "keys.toml", code=code)


def test_the_setting_names_the_file(cli: Cli) -> None:
    assert "keys_file" in cli.fail("keys", "list", code=78)
    cli.run("config", "set", "keys_file", "kept.toml")
    cli.run("keys", "create", "x", "--scope", "read")
    assert (cli.folder / "kept.toml").stat().st_mode & 0o777 == 0o600
    assert "there is no key" in cli.fail("keys", "revoke", "aaaaaaaa", code=1)
