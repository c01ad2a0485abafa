"""How a board gets in: join tokens, certificates, approvals; and how it is kept out."""

from __future__ import annotations

import asyncio
import ssl
from datetime import timedelta
from pathlib import Path
from typing import Any

import grpc
import pytest
from cryptography import x509
from cryptography.hazmat.primitives.asymmetric import rsa
from cryptography.x509.oid import ExtendedKeyUsageOID
from support.boards.boards_rig import BOSS, BoardKey, BoardsRig, boards_rig
from support.shared.throwaway_ca import ThrowawayCa

from fleetplane.domains.boards.access import LISTENER, METHODS
from fleetplane.domains.boards.core import BoardOptions
from fleetplane.domains.boards.inventory.boards import status_of
from fleetplane.domains.boards.kinds import BOARD, SCOPE, ApprovalState, BoardRole, ClusterSpec, TokenPurpose
from fleetplane.domains.boards.rules import BoardFacts
from fleetplane.domains.boards.wire import join_token
from fleetplane.gen.boards import boards_pb2 as pb
from fleetplane.gen.pi_controller import pi_controller_pb2 as pi
from fleetplane.kernel.clock import SystemClock
from fleetplane.kernel.errors import InvalidArgument

CODE = grpc.StatusCode


async def refused(call: Any) -> grpc.StatusCode:
    with pytest.raises(grpc.aio.AioRpcError) as error:
        await call
    code = error.value.code()
    assert isinstance(code, grpc.StatusCode)
    return code


def registration(name: str = "pi-1", **said: Any) -> pb.NodeRegistration:
    return pb.NodeRegistration(**{"name": name, "serial_number": f"serial-of-{name}", **said})


# Join tokens.


async def test_a_token_lets_one_board_in_and_its_certificate_says_which(rig: BoardsRig) -> None:
    key = BoardKey()
    stub = await rig.stranger()
    token = await rig.token(board_name="pi-1")

    answer = await stub.RegisterNode(
        registration(join_token=token, csr_pem=key.csr, capabilities=["gpio"], agent_port=9555)
    )

    leaf = x509.load_pem_x509_certificate(answer.certificate_pem.encode())
    names = leaf.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    usage = leaf.extensions.get_extension_for_class(x509.ExtendedKeyUsage).value
    life = leaf.not_valid_after_utc - leaf.not_valid_before_utc
    assert answer.success
    assert not answer.already_registered
    assert (answer.node_id, answer.status) == (1, pi.NODE_STATUS_READY)
    assert names.get_values_for_type(x509.UniformResourceIdentifier) == [
        "fleetplane://role/boards.agent",
        "fleetplane://boards/node/1",
    ]
    assert names.get_values_for_type(x509.IPAddress) == []
    assert set(usage) == {ExtendedKeyUsageOID.CLIENT_AUTH, ExtendedKeyUsageOID.SERVER_AUTH}
    assert timedelta(days=30) <= life <= timedelta(days=30, minutes=10)
    assert leaf.public_key() == key.key.public_key()
    assert answer.ca_certificate_pem.encode() == rig.kernel.authority.trust_pem
    assert answer.heartbeat_interval_seconds == 30
    assert status_of(rig.board(1)).port == 9555


async def test_the_token_carries_the_authority_that_the_server_shows(rig: BoardsRig) -> None:
    parsed = join_token.parse(await rig.token())
    host, _, port = rig.address.rpartition(":")

    der = ssl.PEM_cert_to_DER_cert(rig.kernel.authority.certificate_pem.decode())
    shown = await asyncio.to_thread(ssl.get_server_certificate, (host, int(port)))

    assert parsed.ca_fingerprint == rig.fingerprint
    assert (
        x509.load_der_x509_certificate(der).subject == x509.load_pem_x509_certificate(shown.encode()).issuer
    )


async def test_of_many_who_present_one_token_one_key_gets_in(rig: BoardsRig) -> None:
    token = await rig.token()
    stub = await rig.stranger()
    calls = [
        stub.RegisterNode(registration(f"pi-{index}", join_token=token, csr_pem=BoardKey().csr))
        for index in range(8)
    ]

    outcomes = await asyncio.gather(*calls, return_exceptions=True)

    winners = [one for one in outcomes if isinstance(one, pb.RegistrationResponse)]
    losers = [one.code() for one in outcomes if isinstance(one, grpc.aio.AioRpcError)]
    assert len(winners) == 1
    assert losers == [CODE.UNAUTHENTICATED] * 7
    assert len(rig.core.boards.all()) == 1


async def test_whoever_lost_the_answer_asks_again_with_the_same_key(rig: BoardsRig) -> None:
    key, token, stub = BoardKey(), await rig.token(), await rig.stranger()
    request = registration(join_token=token, csr_pem=key.csr)

    first = await stub.RegisterNode(request)
    second = await stub.RegisterNode(request)

    assert second.success
    assert second.already_registered
    assert second.node_id == first.node_id
    assert second.certificate_pem != first.certificate_pem


@pytest.mark.parametrize(
    ("wanted", "said", "field"),
    [
        ({"board_name": "pi-2"}, {}, "pi-2"),
        ({"role": BoardRole.MASTER}, {"role": pi.NODE_ROLE_WORKER}, "role"),
        ({"cluster_id": 1}, {"cluster_id": 2}, "cluster"),
    ],
)
async def test_a_token_is_bound_to_what_it_was_made_for(
    rig: BoardsRig, wanted: dict[str, Any], said: dict[str, Any], field: str
) -> None:
    for name in ("one", "two"):
        await rig.core.clusters.create(ClusterSpec(name=name), actor=BOSS)
    token, stub = await rig.token(**wanted), await rig.stranger()
    request = registration(join_token=token, csr_pem=BoardKey().csr, **said)

    with pytest.raises(grpc.aio.AioRpcError) as error:
        await stub.RegisterNode(request)

    assert error.value.code() is CODE.PERMISSION_DENIED
    assert field in (error.value.details() or "")
    assert not rig.core.boards.all()


async def test_a_token_decides_what_the_board_leaves_open(rig: BoardsRig) -> None:
    await rig.core.clusters.create(ClusterSpec(name="one"), actor=BOSS)
    token = await rig.token(board_name="pi-1", role=BoardRole.MASTER, cluster_id=1)
    stub = await rig.stranger()

    await stub.RegisterNode(pb.NodeRegistration(join_token=token, csr_pem=BoardKey().csr))

    spec = rig.board(1).spec
    assert (spec.name, spec.role, spec.cluster_id) == ("pi-1", BoardRole.MASTER, 1)


async def test_tokens_that_are_old_revoked_or_invented_let_nobody_in(rig: BoardsRig) -> None:
    old = await rig.token(life_seconds=0.001)
    revoked = await rig.core.join_tokens.create(actor=BOSS)
    await rig.core.join_tokens.revoke(revoked.token.name, actor=BOSS)
    invented = str(join_token.make(b"x" * 32, rig.fingerprint))
    stub = await rig.stranger()
    await asyncio.sleep(0.01)

    for token in (old, revoked.text, invented, "garbage", ""):
        request = registration(join_token=token, csr_pem=BoardKey().csr)
        assert await refused(stub.RegisterNode(request)) is CODE.UNAUTHENTICATED
    assert not rig.core.boards.all()


async def test_tokens_are_stored_as_digests_only(rig: BoardsRig, tmp_path: Path) -> None:
    text = await rig.token(board_name="pi-1")

    kept = b"".join(path.read_bytes() for path in tmp_path.glob("state.db*"))

    assert join_token.parse(text).secret.encode() not in kept
    assert b"board-join-token" in kept


async def test_without_token_certificate_or_known_key_nobody_registers(rig: BoardsRig) -> None:
    stub = await rig.stranger()

    assert await refused(stub.RegisterNode(registration())) is CODE.UNAUTHENTICATED
    assert await refused(stub.RegisterNode(registration(csr_pem=BoardKey().csr))) is CODE.UNAUTHENTICATED


# Certificate requests.


async def test_a_request_must_be_signed_by_its_own_key(rig: BoardsRig) -> None:
    pem = BoardKey().csr
    body = pem.splitlines()
    # A bit of the signature, which stands at the end.
    body[-2] = body[-2][:-8] + ("AAAA" if body[-2][-8:-4] != "AAAA" else "BBBB") + body[-2][-4:]
    stub = await rig.stranger()
    token = await rig.token()

    for csr in ("\n".join(body) + "\n", "", "no request", "x" * 20_000):
        request = registration(join_token=token, csr_pem=csr)
        assert await refused(stub.RegisterNode(request)) is CODE.INVALID_ARGUMENT
    assert not rig.core.boards.all()


async def test_keys_of_other_kinds_are_refused(rig: BoardsRig) -> None:
    weak = BoardKey(rsa.generate_private_key(public_exponent=65537, key_size=2048))  # type: ignore[arg-type]
    stub = await rig.stranger()
    request = registration(join_token=await rig.token(), csr_pem=weak.csr)

    assert await refused(stub.RegisterNode(request)) is CODE.INVALID_ARGUMENT


# Coming again.


async def test_with_its_certificate_a_board_is_updated_and_blanks_keep_what_was(rig: BoardsRig) -> None:
    member = await rig.join("pi-1", serial_number="s1", model="Pi 5", os_version="Debian 12", memory=8 << 30)

    answer = await member.control.RegisterNode(pb.NodeRegistration(os_version="linux", kernel_version="6.6"))

    spec = rig.board(member.number).spec
    assert answer.already_registered
    assert answer.certificate_pem == ""
    assert (answer.node_id, spec.name, spec.model, spec.os_version) == (1, "pi-1", "Pi 5", "Debian 12")
    assert (spec.memory_bytes, spec.kernel_version) == (8 << 30, "6.6")


async def test_a_certificate_renews_itself_for_a_new_key_once(rig: BoardsRig) -> None:
    member = await rig.join("pi-1")
    following, stolen = BoardKey(), BoardKey()

    first = await member.control.RegisterNode(pb.NodeRegistration(csr_pem=following.csr))
    again = await member.control.RegisterNode(pb.NodeRegistration(csr_pem=following.csr))

    assert first.certificate_pem
    assert again.certificate_pem, "the answer may have been lost"
    theft = member.control.RegisterNode(pb.NodeRegistration(csr_pem=stolen.csr))
    assert await refused(theft) is CODE.PERMISSION_DENIED
    renewed = await rig.member(member.number, following, again.certificate_pem.encode())
    await renewed.control.ReportHealth(pb.HealthReport())


async def test_the_number_in_a_request_must_be_that_of_the_certificate(rig: BoardsRig) -> None:
    one = await rig.join("pi-1")
    await rig.join("pi-2")

    assert await refused(one.control.RegisterNode(pb.NodeRegistration(node_id="2"))) is CODE.PERMISSION_DENIED
    assert await refused(one.control.ReportHealth(pb.HealthReport(id=2))) is CODE.PERMISSION_DENIED
    assert await refused(one.original.UpdateNode(pi.UpdateNodeRequest(id=2))) is CODE.PERMISSION_DENIED


async def test_a_board_written_down_before_gets_its_identity_from_a_token(rig: BoardsRig) -> None:
    await rig.core.boards.create(BoardFacts(name="pi-1", mac_address="02:00:00:00:00:01"), actor=BOSS)
    stub = await rig.stranger()

    answer = await stub.RegisterNode(
        pb.NodeRegistration(
            name="pi-1", mac_address="02:00:00:00:00:01", join_token=await rig.token(), csr_pem=BoardKey().csr
        )
    )

    assert answer.success
    assert (answer.node_id, rig.state(1)) == (1, "ready")


# Coming back without the certificate.


async def come_back(rig: BoardsRig, key: BoardKey, token: str = "") -> pb.RegistrationResponse:
    stub = await rig.stranger()
    request = registration(serial_number="s1", join_token=token, csr_pem=key.csr)
    answer = await stub.RegisterNode(request)
    assert isinstance(answer, pb.RegistrationResponse)
    return answer


async def test_known_hardware_with_another_key_waits_for_approval(rig: BoardsRig) -> None:
    member = await rig.join("pi-1", serial_number="s1")
    key, token = BoardKey(), await rig.token()

    waiting = await come_back(rig, key, token)

    assert not waiting.success
    assert (waiting.reason, waiting.certificate_pem, waiting.node_id) == ("PENDING_APPROVAL", "", 0)
    await member.control.ReportHealth(pb.HealthReport())  # its own key is as good as before

    (approval,) = rig.core.approvals.all()
    await rig.core.approvals.approve(approval.name, actor=BOSS)
    let_in = await come_back(rig, key, token)

    assert let_in.success
    assert let_in.node_id == member.number
    assert rig.core.approvals.all() == ()
    assert await refused(member.control.ReportHealth(pb.HealthReport())) is CODE.UNAUTHENTICATED
    replaced = await rig.member(member.number, key, let_in.certificate_pem.encode())
    await replaced.control.ReportHealth(pb.HealthReport())


async def test_a_rejected_key_is_told_so(rig: BoardsRig) -> None:
    await rig.join("pi-1", serial_number="s1")
    key, token = BoardKey(), await rig.token()
    await come_back(rig, key, token)
    (approval,) = rig.core.approvals.all()

    await rig.core.approvals.reject(approval.name, actor=BOSS)

    assert (await come_back(rig, key, token)).reason == "REJECTED"
    assert approval.status is not None
    assert approval.status.state is ApprovalState.PENDING


async def test_a_token_made_to_replace_a_board_needs_no_second_approval(rig: BoardsRig) -> None:
    member = await rig.join("pi-1", serial_number="s1")

    let_in = await come_back(rig, BoardKey(), await rig.token(replaces=member.number))

    assert let_in.success
    assert let_in.node_id == member.number
    assert await refused(member.control.ReportHealth(pb.HealthReport())) is CODE.UNAUTHENTICATED


async def test_the_board_s_own_key_without_a_certificate_waits_too_and_needs_no_token(rig: BoardsRig) -> None:
    member = await rig.join("pi-1", serial_number="s1")

    waiting = await come_back(rig, member.key)
    (approval,) = rig.core.approvals.all()
    await rig.core.approvals.approve(approval.name, actor=BOSS)
    let_in = await come_back(rig, member.key)

    assert waiting.reason == "PENDING_APPROVAL"
    assert let_in.success


async def test_too_many_keys_that_want_one_board_s_place_are_refused(rig: BoardsRig) -> None:
    await rig.join("pi-1", serial_number="s1")
    for _ in range(8):
        await come_back(rig, BoardKey(), await rig.token())

    with pytest.raises(grpc.aio.AioRpcError) as error:
        await come_back(rig, BoardKey(), await rig.token())

    assert error.value.code() is CODE.RESOURCE_EXHAUSTED


# Being kept out.


async def test_a_revoked_certificate_is_refused_everywhere(rig: BoardsRig) -> None:
    member = await rig.join("pi-1")

    await rig.kernel.revocations.revoke(serial=rig.serial_of(member), reason="lost", actor=BOSS)

    assert await refused(member.control.ReportHealth(pb.HealthReport())) is CODE.UNAUTHENTICATED
    assert await refused(member.control.RegisterNode(pb.NodeRegistration())) is CODE.UNAUTHENTICATED
    assert await refused(member.original.Health(pi.HealthRequest())) is CODE.UNAUTHENTICATED


async def test_a_deleted_board_s_certificate_is_refused_and_its_name_is_free(rig: BoardsRig) -> None:
    member = await rig.join("pi-1", serial_number="s1")
    stub, metadata = await rig.operator()

    await stub.DeleteNode(pi.DeleteNodeRequest(id=member.number), metadata=metadata)

    assert await refused(member.control.ReportHealth(pb.HealthReport())) is CODE.UNAUTHENTICATED
    again = await rig.join("pi-1", serial_number="s1")
    assert again.number == member.number + 1


async def test_a_certificate_is_refused_as_soon_as_its_board_is_gone(rig: BoardsRig) -> None:
    member = await rig.join("pi-1")

    await rig.core.boards.delete(member.number, actor=BOSS)  # and nobody has revoked anything yet

    assert await refused(member.original.Health(pi.HealthRequest())) is CODE.UNAUTHENTICATED
    assert await refused(member.control.RegisterNode(pb.NodeRegistration())) is CODE.UNAUTHENTICATED


async def test_every_method_but_registration_needs_a_certificate_or_a_token(rig: BoardsRig) -> None:
    channel: Any = await rig.channel()
    paths = [
        row.path for row in METHODS if row.listener == LISTENER and not row.path.endswith("/RegisterNode")
    ]

    codes = {path: await refused(channel.unary_unary(path)(b"")) for path in paths}

    assert len(codes) == 40
    assert set(codes.values()) == {CODE.UNAUTHENTICATED}


async def test_certificates_of_ours_that_are_not_for_boards_open_nothing(rig: BoardsRig) -> None:
    for uris in (["fleetplane://role/agent"], ["fleetplane://boards/node/1"], []):
        other = await rig.certified(uris)
        code = await refused(other.original.Health(pi.HealthRequest()))
        assert code is CODE.PERMISSION_DENIED
    unnamed = await rig.certified(["fleetplane://role/boards.agent"])
    assert await refused(unnamed.original.Health(pi.HealthRequest())) is CODE.UNAUTHENTICATED


async def test_a_certificate_of_another_authority_does_not_even_connect(
    rig: BoardsRig, tmp_path: Path
) -> None:
    key = BoardKey()
    foreign = ThrowawayCa().client(key.key.public_key(), "board-1")
    member = await rig.member(1, key, foreign)

    assert await refused(member.original.Health(pi.HealthRequest())) is CODE.UNAVAILABLE


async def test_an_expired_certificate_is_refused_on_a_connection_that_outlived_it(tmp_path: Path) -> None:
    class Later(SystemClock):
        days = 0

        def now_ns(self) -> int:
            return super().now_ns() + self.days * 86_400 * 10**9

    clock = Later()
    async with boards_rig(tmp_path, clock=clock, options=BoardOptions(certificate_days=1)) as rig:
        member = await rig.join("pi-1")
        await member.control.ReportHealth(pb.HealthReport())
        clock.days = 2

        with pytest.raises(grpc.aio.AioRpcError) as error:
            await member.control.ReportHealth(pb.HealthReport())
        assert error.value.code() is CODE.UNAUTHENTICATED
        assert "expired" in (error.value.details() or "")


# Other servers.


async def test_a_controller_s_token_makes_no_board(rig: BoardsRig) -> None:
    second = await rig.controller("second")

    assert rig.store.list(BOARD, SCOPE) == ()
    answer = await second.control.SyncClusterState(pb.ClusterStateRequest())
    assert answer.full
    renewed = await second.control.RegisterNode(pb.NodeRegistration(csr_pem=BoardKey().csr))
    assert renewed.certificate_pem
    # It may report for services by name; a report about a board's agent is not its to make.
    assert await refused(second.control.ReportHealth(pb.HealthReport())) is CODE.INVALID_ARGUMENT
    assert rig.store.list(BOARD, SCOPE) == ()


async def test_a_controller_s_token_must_name_it(rig: BoardsRig) -> None:
    with pytest.raises(InvalidArgument):
        await rig.token(purpose=TokenPurpose.CONTROLLER)
