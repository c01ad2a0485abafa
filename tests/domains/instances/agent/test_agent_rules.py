"""The agent's decisions, which need neither disk nor network."""

from __future__ import annotations

import itertools
from unittest.mock import AsyncMock, Mock

import pytest
from grpc import aio
from hypothesis import given
from hypothesis import strategies as st
from support.instances.instance_server_double import INSTANCE_ID, make_nonce
from support.shared.throwaway_ca import ThrowawayCa, key_pem, make_key

from fleetplane.domains.instances.agent import session
from fleetplane.domains.instances.agent.files.patch import (
    PATCH_FILES_LIMIT,
    PatchBroken,
    PatchReader,
    PatchState,
    Transfer,
)
from fleetplane.domains.instances.agent.identity.nonce import BadNonce, read_nonce
from fleetplane.domains.instances.agent.identity.steps import (
    HeldCertificateState,
    IdentityStep,
    NonceState,
    next_step,
    nonce_state,
)
from fleetplane.domains.instances.rules import files as file_rules
from fleetplane.node.certificates import public_pem

# Files


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("app.env", b""),
        ("app.env", b"# comment\n\nKEY=value\n  PADDED=1\nEMPTY=\nA_1=b=c"),
        ("ca.crt", ThrowawayCa().pem),
        ("a.key", key_pem(make_key("ed25519"))),
        ("a.key", key_pem(make_key("p256"))),
        ("a.pub", public_pem(make_key("ed25519"))),
        ("two.dots.json", b"[1, null]"),
    ],
)
def test_a_file_that_keeps_to_its_extension_is_taken(name: str, content: bytes) -> None:
    assert file_rules.file_complaint(name, content) is None


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("app.env", b"KEY"),
        ("app.env", b"key=value"),
        ("app.env", b"A B=1"),
        ("app.env", b"=1"),
        ("app.env", b"\xff=1"),
        ("ca.crt", b""),
        ("ca.crt", key_pem(make_key("p256"))),
        ("a.key", public_pem(make_key("p256"))),
        ("a.key", b"-----BEGIN PRIVATE KEY-----\nAAAA\n-----END PRIVATE KEY-----\n"),
        ("a.pub", key_pem(make_key("p256"))),
        ("a.json", b""),
        ("a.json", b"[" * 100_000),
        ("custom.conf", b"x"),
        ("script.sh", b"x"),
        ("env", b"A=1"),
        ("A.ENV", b"A=1"),
    ],
)
def test_a_file_that_its_reader_could_not_parse_is_refused(name: str, content: bytes) -> None:
    assert file_rules.file_complaint(name, content)


@pytest.mark.parametrize(
    "name",
    [
        "",
        ".",
        "..",
        ".env",
        "a/b.env",
        "../a.env",
        "/a.env",
        "a\\b.env",
        "a\0.env",
        "a\n.env",
        "write-files.last",
        "x" * 300 + ".env",
    ],
)
def test_a_name_that_is_no_plain_file_name_is_refused(name: str) -> None:
    assert file_rules.name_complaint(name)


# Patches

FILE_A, FILE_B = Transfer(filename="a.env", content=b"A=1"), Transfer(filename="b.env", dated=True)
COMMIT = Transfer(config_hash="h")
MUDDLED = Transfer(filename="c.env", config_hash="h")


def test_files_and_a_commit_make_a_patch() -> None:
    reader = PatchReader()
    assert reader.take(FILE_A) is None
    assert reader.take(FILE_B) is None
    patch = reader.take(COMMIT)
    assert patch is not None
    assert patch.files == {"a.env": b"A=1", "b.env": b""}
    assert reader.state is PatchState.EMPTY
    reader.end()


def test_a_file_of_the_first_generation_is_a_patch_of_its_own() -> None:
    reader = PatchReader()
    for name in ("a.env", "b.env", "a.env"):
        patch = reader.take(Transfer(filename=name, content=b"A=1", dated=True, config_hash="h"))
        assert patch is not None
        assert (patch.files, patch.config_hash) == ({name: b"A=1"}, "h")
    assert reader.take(FILE_A) is None
    with pytest.raises(PatchBroken, match="hash of its own"):
        reader.take(Transfer(filename="b.env", content=b"B=1", dated=True, config_hash="h"))


def test_a_commit_alone_moves_the_hash() -> None:
    patch = PatchReader().take(COMMIT)
    assert patch is not None
    assert (patch.files, patch.config_hash) == ({}, "h")


@given(st.lists(st.sampled_from([FILE_A, FILE_B, COMMIT, MUDDLED, Transfer()]), max_size=12))
def test_a_patch_never_holds_what_came_before_a_break(messages: list[Transfer]) -> None:
    reader = PatchReader()
    since: list[str] = []
    for message in messages:
        legal = message is COMMIT or (message in (FILE_A, FILE_B) and message.filename not in since)
        if not legal:
            with pytest.raises(PatchBroken):
                reader.take(message)
            since = []
        elif (patch := reader.take(message)) is not None:
            assert list(patch.files) == since
            since = []
        else:
            since.append(message.filename)
    if since:
        with pytest.raises(PatchBroken):
            reader.end()
    else:
        reader.end()


def test_a_patch_without_end_is_given_up() -> None:
    reader = PatchReader()
    for number in range(PATCH_FILES_LIMIT):
        reader.take(Transfer(filename=f"{number}.env"))
    with pytest.raises(PatchBroken, match="at most"):
        reader.take(Transfer(filename="straw.env"))
    assert reader.state is PatchState.EMPTY


# Enrolment


def test_every_state_of_the_identity_folder_has_a_step() -> None:
    steps = {pair: next_step(*pair) for pair in itertools.product(NonceState, HeldCertificateState)}
    assert {pair for pair, step in steps.items() if step is IdentityStep.CONNECT} == {
        (NonceState.ABSENT, HeldCertificateState.USABLE)
    }
    assert {pair for pair, step in steps.items() if step is IdentityStep.DROP_NONCE} == {
        (NonceState.LEFT_OVER, HeldCertificateState.USABLE)
    }
    assert all(
        step is IdentityStep.REGISTER for (nonce, _), step in steps.items() if nonce is NonceState.WAITING
    )


def test_a_nonce_is_left_over_when_its_certificate_is_newer() -> None:
    assert nonce_state(None, 5) is NonceState.ABSENT
    assert nonce_state(5, None) is NonceState.WAITING
    assert nonce_state(5, 5) is NonceState.LEFT_OVER
    assert nonce_state(6, 5) is NonceState.WAITING


def test_a_nonce_is_read_without_its_key() -> None:
    import time

    nonce = read_nonce(f"  {make_nonce()}\n".encode(), now=time.time())
    assert (nonce.subject, nonce.config_hash) == (INSTANCE_ID, "sha256:first")
    with pytest.raises(BadNonce, match="over since"):
        read_nonce(make_nonce().encode(), now=time.time() + 400)
    with pytest.raises(BadNonce, match="begins in"):
        read_nonce(make_nonce().encode(), now=time.time() - 400)


@given(st.binary(max_size=200))
def test_no_bytes_at_all_upset_the_nonce_reader(raw: bytes) -> None:
    with pytest.raises(BadNonce):
        read_nonce(raw, now=0.0)


async def test_a_stream_that_breaks_off_during_the_goodbye_has_ended() -> None:
    call = Mock(done_writing=AsyncMock(side_effect=aio.InternalError("x")))
    await session._say_goodbye(call)
    call.cancel.assert_called_once_with()
