"""Registration, and what is left on disk when it is interrupted."""

from __future__ import annotations

import datetime as dt
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import grpc
import pytest
import structlog
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec
from domains.instances.agent.agent_rig import Rig
from support.instances.instance_server_double import (
    INSTANCE_ID,
    InstanceServerDouble,
    instance_server,
    make_nonce,
    until,
)
from support.shared.throwaway_ca import ThrowawayCa, key_pem, make_key

from fleetplane.domains.instances.agent.identity.folder import IdentityFolder
from fleetplane.domains.instances.agent.identity.nonce import BadNonce
from fleetplane.domains.instances.agent.identity.registration import RegistrationRefused
from fleetplane.kernel.errors import IntegrityError, SettingsError


class PowerCut(BaseException):
    """The process ends here."""


def cut_before(monkeypatch: pytest.MonkeyPatch, name: str, times: int = 1) -> None:
    """The lights go out just before the identity folder does this."""
    original: Callable[..., Any] = getattr(IdentityFolder, name)
    left = [times]

    def replaced(*arguments: Any, **options: Any) -> Any:
        if left[0]:
            left[0] -= 1
            raise PowerCut
        return original(*arguments, **options)

    monkeypatch.setattr(IdentityFolder, name, replaced)


def unwrap(error: BaseException) -> BaseException:
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error


async def failure(rig: Rig) -> BaseException:
    try:
        await rig.agent().run()
    except BaseException as error:
        return unwrap(error)
    raise AssertionError("it should not have come this far")


@pytest.mark.parametrize("step", ["key", "nonce", "store_config_hash", "store_certificate", "drop_nonce"])
async def test_a_crash_before_any_step_is_answered_by_starting_again(
    rig: Rig, server: InstanceServerDouble, monkeypatch: pytest.MonkeyPatch, step: str
) -> None:
    cut_before(monkeypatch, step)
    with pytest.raises(PowerCut):
        await rig.agent()._registrar.enrol()
    async with rig.running():
        await until(lambda: server.raw_reports)
    assert not (rig.identity / "nonce.jwt").exists()
    assert server.reports[0].config_hash == "sha256:first"
    keys = {request.public_key_pem for request in server.registrations}
    assert len(keys) == 1


async def test_a_crash_after_the_certificate_needs_no_second_registration(
    rig: Rig, server: InstanceServerDouble, monkeypatch: pytest.MonkeyPatch
) -> None:
    cut_before(monkeypatch, "drop_nonce")
    with pytest.raises(PowerCut):
        await rig.agent()._registrar.enrol()
    assert (rig.identity / "nonce.jwt").exists()
    async with rig.running():
        await until(lambda: server.raw_reports)
    assert len(server.registrations) == 1
    assert not (rig.identity / "nonce.jwt").exists()


async def test_the_nonce_outlives_everything_but_the_certificate(
    rig: Rig, server: InstanceServerDouble, monkeypatch: pytest.MonkeyPatch
) -> None:
    for step in ("nonce", "store_config_hash", "store_certificate"):
        cut_before(monkeypatch, step)
        with pytest.raises(PowerCut):
            await rig.agent()._registrar.enrol()
        assert (rig.identity / "nonce.jwt").exists()
        assert not (rig.identity / "identity.crt").exists()


async def test_a_lost_answer_is_asked_for_again_with_the_same_key(
    rig: Rig, server: InstanceServerDouble
) -> None:
    server.lost_answers = 2
    async with rig.running():
        await until(lambda: server.raw_reports)
    assert len(server.registrations) == 3
    assert len({request.public_key_pem for request in server.registrations}) == 1


@pytest.mark.parametrize(
    "code",
    [grpc.StatusCode.FAILED_PRECONDITION, grpc.StatusCode.INTERNAL, grpc.StatusCode.RESOURCE_EXHAUSTED],
)
async def test_what_may_pass_is_tried_again(
    rig: Rig, server: InstanceServerDouble, code: grpc.StatusCode
) -> None:
    server.registration_faults.extend([code, code])
    async with rig.running():
        await until(lambda: server.raw_reports)
    assert len(server.registrations) == 3


@pytest.mark.parametrize("code", [grpc.StatusCode.UNAUTHENTICATED, grpc.StatusCode.INVALID_ARGUMENT])
async def test_a_refusal_ends_the_agent_with_its_words(
    rig: Rig, server: InstanceServerDouble, code: grpc.StatusCode
) -> None:
    server.registration_faults.append(code)
    error = await failure(rig)
    assert isinstance(error, RegistrationRefused)
    assert code.name in error.message
    assert (rig.identity / "nonce.jwt").exists()


@pytest.mark.parametrize(
    ("make", "words"),
    [
        # Made when the test runs: the clock goes on between the first test of a run and the last.
        (lambda: make_nonce(lasts_seconds=-100), "is over"),
        (lambda: make_nonce(starts_in_seconds=900), "begins in"),
        (lambda: make_nonce("abc06awcb4f5hzmfey7qwt7s8a6q0"), "is for abc06awcb4f5hzmfey7qwt7s8a6q0"),
        (lambda: "not.a.token", "no JSON web token"),
        (lambda: "gibberish", "no JSON web token"),
    ],
)
async def test_a_useless_nonce_is_not_sent(
    rig: Rig, server: InstanceServerDouble, make: Callable[[], str], words: str
) -> None:
    rig.give_nonce(make())
    error = await failure(rig)
    assert isinstance(error, BadNonce)
    assert words in error.message
    assert server.registrations == []


async def test_without_nonce_and_certificate_it_says_so(rig: Rig, server: InstanceServerDouble) -> None:
    (rig.identity / "nonce.jwt").unlink()
    error = await failure(rig)
    assert isinstance(error, BadNonce)
    assert "no certificate" in error.message


async def test_without_an_authority_it_says_which_file_is_missing(rig: Rig) -> None:
    (rig.identity / "ca.crt").unlink()
    error = await failure(rig)
    assert isinstance(error, SettingsError)
    assert "ca.crt" in error.message


async def test_a_server_of_another_authority_learns_nothing(rig: Rig, server: InstanceServerDouble) -> None:
    (rig.identity / "ca.crt").write_bytes(ThrowawayCa(name="somebody else").pem)
    rig.give_nonce(make_nonce(lasts_seconds=-59.0))  # within the leeway for a second more
    error = await failure(rig)
    assert isinstance(error, BadNonce)
    assert server.registrations == []


async def test_a_new_nonce_is_used_although_the_certificate_still_works(
    rig: Rig, server: InstanceServerDouble
) -> None:
    async with rig.running():
        await until(lambda: server.raw_reports)
    rig.give_nonce(make_nonce(config_hash="sha256:anew"))
    later = (rig.identity / "identity.crt").stat().st_mtime + 10
    os.utime(rig.identity / "nonce.jwt", (later, later))
    async with rig.running():
        await until(lambda: len(server.raw_reports) == 2)
    assert len(server.registrations) == 2
    assert rig.config_hash == "sha256:anew"


async def test_a_certificate_that_ran_out_is_replaced_when_there_is_a_nonce(
    rig: Rig, server: InstanceServerDouble
) -> None:
    server.certificate_started_ago = dt.timedelta(hours=2)
    server.certificate_life = dt.timedelta(hours=-1)
    await rig.agent()._registrar.enrol()
    server.certificate_life = dt.timedelta(hours=1)
    error = await failure(rig)
    assert isinstance(error, BadNonce)
    assert "it ended on" in error.message
    rig.give_nonce()
    async with rig.running():
        await until(lambda: server.raw_reports)


async def test_a_certificate_for_somebody_else_is_not_kept(
    rig: Rig, server: InstanceServerDouble, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = make_key("ed25519").public_key()
    issue = server.ca.client
    monkeypatch.setattr(server.ca, "client", lambda _key, name, **rest: issue(other, name, **rest))
    error = await failure(rig)
    assert isinstance(error, IntegrityError)
    assert "another key" in error.message
    assert not (rig.identity / "identity.crt").exists()
    assert (rig.identity / "nonce.jwt").exists()


async def test_an_identity_on_p256_is_kept_and_works(rig: Rig, server: InstanceServerDouble) -> None:
    (rig.identity / "identity.key").write_bytes(key_pem(make_key("p256")))
    async with rig.running():
        await until(lambda: server.raw_reports)
    key = serialization.load_pem_public_key(server.registrations[0].public_key_pem)
    assert isinstance(key, ec.EllipticCurvePublicKey)
    assert server.callers == {INSTANCE_ID}


async def test_an_authority_on_ed25519_is_trusted(tmp_path: Path) -> None:
    ca = ThrowawayCa(kind="ed25519")
    async with instance_server(tmp_path / "server", ca=ca) as server, Rig(tmp_path, server).running():
        await until(lambda: server.raw_reports)


async def test_a_server_whose_key_is_ed25519_is_reached_through_the_relay(tmp_path: Path) -> None:
    ca = ThrowawayCa(kind="ed25519")
    async with instance_server(tmp_path / "server", ca=ca, server_key="ed25519") as server:
        rig = Rig(tmp_path, server)
        async with rig.running() as agent:
            await until(lambda: server.raw_reports and server.files)
            assert agent.is_connected
            assert agent._transport.relayed
            assert server.callers == {INSTANCE_ID}
            await server.stop()
            await until(lambda: not agent.is_connected)
            before = len(server.raw_reports)
            await server.start()
            await until(lambda: len(server.raw_reports) > before)
        async with rig.running():  # from its folder alone, with the certificate
            before = len(server.raw_reports)
            await until(lambda: len(server.raw_reports) > before)
    assert len(server.registrations) == 1


@pytest.mark.parametrize("fault", ["authority", "host"])
async def test_the_relay_trusts_nobody_else_and_no_other_host(tmp_path: Path, fault: str) -> None:
    ca = ThrowawayCa(kind="ed25519")
    server = InstanceServerDouble(tmp_path / "server", ca=ca, server_key="ed25519")
    if fault == "host":
        server._certificate, server._key = ca.server(tmp_path / "server", kind="ed25519", host="127.0.0.9")
    await server.start()
    rig = Rig(tmp_path, server)
    if fault == "authority":
        (rig.identity / "ca.crt").write_bytes(ThrowawayCa(kind="ed25519", name="other").pem)
    with structlog.testing.capture_logs() as logged:
        async with rig.running():
            await until(lambda: any(entry["event"] == "relay_failed" for entry in logged))
    await server.stop()
    assert server.registrations == []
    failed = next(entry for entry in logged if entry["event"] == "relay_failed")
    assert "CERTIFICATE_VERIFY_FAILED" in failed["error"]
