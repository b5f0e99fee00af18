"""The codec, and the JSON object that stands for an encrypted text."""

from __future__ import annotations

import base64
import json
from collections.abc import Callable

import pytest
from msgspec.structs import replace

from holdfast import ConfigError, Holdfast
from holdfast.core.encryption import (
    decrypt_text,
    describe_encrypted,
    encrypt_text,
    is_encrypted,
    job_context,
    key_id_of,
    require_decrypted,
    result_context,
    schedule_context,
    signal_context,
    step_context,
    unique_context,
)
from holdfast.core.errors import DecryptionFailed, HoldfastError
from holdfast.core.ids import new_id
from holdfast.core.models import NewJob, Step
from holdfast.integrations.cryptography import AesGcmCodec, new_key
from holdfast.stores.encrypted_store import TextCipher

KEY = base64.b64encode(bytes(range(32))).decode()  # the same in every process: names of tests contain it
CODEC = AesGcmCodec({"2030-01": KEY})
TEXT = '{"to":"ada","n":123456789012345678901234567890,"ü":"\\u0000"}'
CONTEXT = job_context("a", "mail.send")


def test_text_comes_back_as_it_was_and_never_twice_the_same() -> None:
    texts = [encrypt_text(CODEC, TEXT, CONTEXT) for _ in range(2)]
    assert texts[0] != texts[1]
    assert [decrypt_text(CODEC, text, CONTEXT, "it") for text in texts] == [TEXT, TEXT]
    assert [key_id_of(text) for text in texts] == ["2030-01", "2030-01"]
    assert encrypt_text(CODEC, texts[0], CONTEXT) == texts[0]
    assert decrypt_text(CODEC, TEXT, CONTEXT, "it") == TEXT


def test_other_programs_may_write_the_object_in_their_own_form() -> None:
    text = json.dumps(json.loads(encrypt_text(CODEC, TEXT, CONTEXT)), indent=2)
    assert decrypt_text(CODEC, text, CONTEXT, "it") == TEXT


def test_readable_arguments_are_exact_copies_and_not_what_is_decrypted() -> None:
    text = encrypt_text(CODEC, TEXT, CONTEXT, readable=["n", "absent"])
    assert text.endswith(',"n":123456789012345678901234567890}')
    assert "ada" not in text
    assert decrypt_text(CODEC, text.replace("123", "999"), CONTEXT, "it") == TEXT


@pytest.mark.parametrize(
    "context",
    [
        job_context("b", "mail.send"),
        job_context("a", "mail.drop"),
        result_context("a"),
        unique_context("a", "mail.send"),
        schedule_context("a", "mail.send"),
        step_context("a", "mail.send"),
        signal_context("a"),
    ],
)
def test_text_is_decrypted_in_its_own_place_only(context: bytes) -> None:
    with pytest.raises(DecryptionFailed, match="moved from another job, task or step"):
        decrypt_text(CODEC, encrypt_text(CODEC, TEXT, CONTEXT), context, "it")


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        (lambda text: text.replace('"data":"', '"data":"AAAA'), "was changed"),
        (lambda text: text.replace("2030-01", "2030-02"), "does not have"),
        (lambda text: text[:-3] + "}}", "damaged"),
        (lambda text: '{"$encrypted":{"key":"2030-01","data":""}}', "was changed"),
        (lambda text: '{"$encrypted":{"key":"2030-01"}}', "damaged"),
        (lambda text: '{"$encrypted":{"key":"\x1b[31m","data":"AAAA"}}', "damaged"),
        (lambda text: '{"$encrypted":', "damaged"),
    ],
)
def test_changed_and_foreign_texts_are_errors_that_name_the_problem(change: Callable[[str], str], problem: str) -> None:
    text = change(encrypt_text(CODEC, TEXT, CONTEXT))
    assert is_encrypted(text)
    with pytest.raises(DecryptionFailed, match=problem):
        decrypt_text(CODEC, text, CONTEXT, "the payload")
    with pytest.raises(DecryptionFailed, match="could not decrypt"):
        require_decrypted(text, "the payload")
    assert describe_encrypted(text).startswith("[encrypted")


@pytest.mark.parametrize("text", ["null", '"$encrypted"', '{"a":{"$encrypted":{}}}', '{"$encrypte":1}', "[]", "", "{"])
def test_other_texts_are_not_taken_for_encrypted_ones(text: str) -> None:
    assert (is_encrypted(text), key_id_of(text)) == (False, None)


def test_payload_for_a_replaced_job_is_bound_to_the_unique_key() -> None:
    app = Holdfast("sqlite:///none.db", codec=AesGcmCodec({"2030-01": KEY}, unique_secret=KEY))
    assert app.codec is not None
    unique = {"during": "active", "by": ["task", "queue"], "on_conflict": "replace"}
    first, second = [app.draft_job("mail.send", {"n": n}, unique=unique) for n in (1, 2)]
    cipher = TextCipher(app.codec, ())
    assert first.unique is not None
    context = unique_context(first.unique.key, "mail.send")
    assert decrypt_text(CODEC, cipher.encrypt_job(second).payload, context, "it") == '{"n":2}'


def test_steps_of_a_fork_are_encrypted_for_it() -> None:
    job = NewJob(id=new_id(), task="order", payload="{}", first_steps=(Step("ask", 1, True, 1, 0, '"yes"'),))
    (step,) = TextCipher(CODEC, ()).encrypt_job(job).first_steps
    assert decrypt_text(CODEC, step.result or "", step_context(job.id, "ask"), "it") == '"yes"'
    assert replace(step, result='"yes"') == job.first_steps[0]


@pytest.mark.parametrize("key", ["", "short", "A" * 44, b"0" * 31, "é" * 32, None])
def test_key_that_is_none_is_refused_and_not_shown(key: str) -> None:
    with pytest.raises(ConfigError, match=r"codec: key '2030-01' is not valid; give 32 random bytes") as refused:
        AesGcmCodec({"2030-01": key})
    assert not key or str(key) not in str(refused.value)


@pytest.mark.parametrize("text", ["", "2030-01", f"a:{KEY},a:{KEY}", f"{KEY}", f"not an id:{KEY}", f"{KEY}:a"])
def test_keys_in_text_are_refused_without_being_shown(text: str) -> None:
    with pytest.raises(ConfigError) as refused:
        AesGcmCodec.from_text(text)
    assert KEY not in str(refused.value)


def test_codec_does_not_show_its_keys() -> None:
    codec = AesGcmCodec.from_text(f"2030-02:{new_key()}, 2030-01:{KEY}")
    assert (repr(codec), codec.key_id) == ("<AesGcmCodec 2030-02, 2030-01>", "2030-02")


def test_text_of_a_key_that_could_not_be_read_is_refused() -> None:
    class Renamed(AesGcmCodec):
        key_id = "keys/2030"

    with pytest.raises(HoldfastError, match=r"the codec could not encrypt \(ConfigError\)"):
        encrypt_text(Renamed({"2030-01": KEY}), TEXT, CONTEXT)


@pytest.mark.parametrize("readable", ["clinic", ["$encrypted"], [1]])
def test_readable_arguments_are_a_list_of_names(readable: list[str]) -> None:
    with pytest.raises(ConfigError, match=r"readable: .* is not valid; give a list of names"):
        Holdfast("sqlite:///none.db", readable=readable)
