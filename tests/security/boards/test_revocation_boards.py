"""Revocation reaches boards, which accept callers themselves: what a revoked operator still tries."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import grpc
import msgspec
import pytest
import structlog
from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from support.boards.board_node_rig import NodeRig, node_rig
from support.boards.boards_rig import BOSS, BoardKey, BoardsRig, boards_rig, until
from support.boards.node_calls import CODE, HIGH, failing, gpio

from fleetplane.domains.boards.agent.grpc.access import RevokedCallers
from fleetplane.domains.boards.agent.membership import BoardIdentityFolder
from fleetplane.domains.boards.core import BoardOptions
from fleetplane.gen.boards import boards_pb2 as pb
from fleetplane.gen.boards import boards_pb2_grpc
from fleetplane.gen.pi_controller import pi_controller_pb2 as pi
from fleetplane.gen.pi_controller import pi_controller_pb2_grpc
from fleetplane.kernel.errors import Unauthenticated
from fleetplane.kernel.identity.revocation_lists import UptakeState
from fleetplane.kernel.revocation_list import RevocationList, SignedList, opened, packed, signed_bytes

ROLE = "fleetplane://role/boards.operator"


@pytest.fixture
async def server(tmp_path: Path) -> AsyncIterator[BoardsRig]:
    async with boards_rig(tmp_path, options=BoardOptions(plain=True, heartbeat_seconds=1.0)) as made:
        yield made


@pytest.fixture
async def node(server: BoardsRig, tmp_path: Path) -> AsyncIterator[NodeRig]:
    async with node_rig(tmp_path, server) as rig:
        yield rig


class Ann:
    """An operator with a certificate that the boards' authority issued on request."""

    def __init__(self, server: BoardsRig, key: BoardKey, number: int, pem: bytes) -> None:
        self.server, self.key, self.number, self.pem = server, key, number, pem

    async def at(self, node: NodeRig) -> Any:
        return boards_pb2_grpc.NodeAgentStub(await node.channel(self.key.pem, self.pem))

    async def at_server(self) -> Any:
        channel = await self.server.channel(self.key, self.pem)
        return pi_controller_pb2_grpc.PiControllerServiceStub(channel)


async def certified(server: BoardsRig, **said: Any) -> Ann:
    stub, metadata = await server.operator()
    key = BoardKey()
    asked = await stub.CreateCertificateRequest(
        pi.CreateCertificateRequestRequest(
            common_name="ann", type=pi.CERTIFICATE_TYPE_CLIENT, csr_pem=key.csr, sans=[ROLE], **said
        ),
        metadata=metadata,
    )
    made = await stub.ProcessCertificateRequest(
        pi.ProcessCertificateRequestRequest(id=asked.id, approve=True), metadata=metadata
    )
    kept = server.core.certificates.get(made.id)
    assert kept is not None
    return Ann(server, key, made.id, kept.spec.pem.encode())


def states(server: BoardsRig) -> dict[str, UptakeState]:
    return {one.agent: one.state for one in server.core.revocation_lists.uptake()}


def apart(node: NodeRig, folder: Path) -> RevokedCallers:
    """What the node knows, in a folder of its own: each file has a single writer, and the node is running."""
    own = BoardIdentityFolder(folder / "apart")
    own.make()
    for name in (own.key_file.name, own.certificate_file.name, own.authority_file.name):
        (own.root / name).write_bytes((node.folder.root / name).read_bytes())
    return RevokedCallers(own, structlog.get_logger())


async def to_its_end(stream: Any) -> None:
    async for _ in stream:
        pass


async def test_a_revoked_operator_drives_no_pin_once_the_board_has_heard(
    server: BoardsRig, node: NodeRig
) -> None:
    ann = await certified(server)
    board = await ann.at(node)
    await board.ControlGPIO(gpio(state=HIGH))
    following = asyncio.ensure_future(
        to_its_end(board.StreamLogs(pb.LogFilter(sources=["agent"], follow=True)))
    )
    await board.ControlGPIO(gpio(state=HIGH))  # on the same connection, so the stream is open by now

    await server.core.certificates.revoke(ann.number, reason="left the company", actor=BOSS)
    await until(lambda: states(server) == {"board/1": UptakeState.CURRENT})

    failure = await failing(board.ControlGPIO(gpio(state=HIGH)))
    assert (failure.code, failure.cause) == (CODE.UNAUTHENTICATED, "revoked")
    with pytest.raises(grpc.aio.AioRpcError):  # what was open with it is closed, too
        await asyncio.wait_for(following, 60)
    other = await certified(server)
    await (await other.at(node)).HealthCheck(pb.Empty())


async def test_a_revoked_name_is_refused_whatever_certificate_it_shows(
    server: BoardsRig, node: NodeRig
) -> None:
    ann = await certified(server)
    await server.kernel.revocations.revoke(principal="operator/ann", reason="gone", actor=BOSS)
    await until(lambda: states(server) == {"board/1": UptakeState.CURRENT})
    failure = await failing((await ann.at(node)).HealthCheck(pb.Empty()))
    assert (failure.code, failure.cause) == (CODE.UNAUTHENTICATED, "revoked")


async def test_the_list_holds_after_a_restart_of_the_board_without_its_server(
    server: BoardsRig, node: NodeRig
) -> None:
    ann = await certified(server)
    await server.core.certificates.revoke(ann.number, reason="lost", actor=BOSS)
    await until(lambda: states(server) == {"board/1": UptakeState.CURRENT})

    fresh = RevokedCallers(node.folder, structlog.get_logger())
    fresh.load()
    serial = f"{x509.load_pem_x509_certificate(ann.pem).serial_number:x}"
    with pytest.raises(Unauthenticated):
        fresh.check(principal="operator/ann", serial=serial, is_server=False)


async def test_uptake_is_seen_per_agent_also_of_those_who_are_away_or_cannot(
    server: BoardsRig, node: NodeRig
) -> None:
    away = await server.join("away")
    plain = pi_controller_pb2_grpc.PiControllerServiceStub(await server.plain_channel())
    await plain.CreateNode(pi.CreateNodeRequest(name="original", ip_address="127.0.0.9"))
    await until(lambda: states(server).get("board/1") is UptakeState.CURRENT)
    assert states(server) == {
        "board/1": UptakeState.CURRENT,
        f"board/{away.number}": UptakeState.UNHEARD,
        "board/3": UptakeState.UNABLE,
    }

    await away.control.ReportHealth(pb.HealthReport(source="agent", sequence=1))
    assert states(server)[f"board/{away.number}"] is UptakeState.BEHIND


def signed(number: int, key: ec.EllipticCurvePrivateKey, **more: Any) -> bytes:
    content = msgspec.msgpack.encode(RevocationList(number=number, issued_at_ns=0, **more))
    return packed(
        SignedList(content=content, signature=key.sign(signed_bytes(content), ec.ECDSA(hashes.SHA256())))
    )


async def test_an_older_forged_or_damaged_list_changes_nothing(
    server: BoardsRig, node: NodeRig, tmp_path: Path
) -> None:
    lists = server.core.revocation_lists
    older = lists.current()
    ann = await certified(server)
    await server.core.certificates.revoke(ann.number, reason="lost", actor=BOSS)
    revoked = apart(node, tmp_path)
    assert revoked.take(lists.current())
    held = revoked.number

    forged = signed(held + 1, ec.generate_private_key(ec.SECP256R1()))
    own = server.kernel.authority
    other_purpose = msgspec.msgpack.encode(RevocationList(number=held + 2, issued_at_ns=0))
    replayed = packed(
        SignedList(content=other_purpose, signature=own.sign(b"fleetplane/other\0" + other_purpose))
    )
    damaged = bytearray(lists.current())
    damaged[-1] ^= 1
    for attempt in (older, forged, replayed, bytes(damaged), b"", b"x" * 100):
        assert not revoked.take(attempt)
        assert revoked.number == held
    serial = f"{x509.load_pem_x509_certificate(ann.pem).serial_number:x}"
    with pytest.raises(Unauthenticated):
        revoked.check(principal="operator/ann", serial=serial, is_server=False)


async def test_a_board_whose_list_was_tampered_with_lets_in_its_server_alone(
    server: BoardsRig, node: NodeRig, tmp_path: Path
) -> None:
    revoked = apart(node, tmp_path)
    assert revoked.take(server.core.revocation_lists.current())
    revoked.folder.revocations.write_bytes(b"nobody was revoked")
    revoked = RevokedCallers(revoked.folder, structlog.get_logger())
    revoked.load()
    with pytest.raises(Unauthenticated):
        revoked.check(principal="operator/ann", serial="1", is_server=False)
    revoked.check(principal="board-controller/main", serial="2", is_server=True)
    assert revoked.take(server.core.revocation_lists.current())
    revoked.check(principal="operator/ann", serial="1", is_server=False)


async def test_a_list_that_would_be_too_long_lets_in_the_server_alone(
    server: BoardsRig, node: NodeRig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("fleetplane.kernel.identity.revocation_lists.ENTRIES_LIMIT", 1)
    for serial in (1, 2):
        await server.kernel.revocations.revoke(serial=serial, reason="x", actor=BOSS)
    revoked = apart(node, tmp_path)
    assert revoked.take(server.core.revocation_lists.current())
    with pytest.raises(Unauthenticated):
        revoked.check(principal="operator/ann", serial="3", is_server=False)


async def test_numbers_continue_above_what_agents_hold_when_the_server_went_back(server: BoardsRig) -> None:
    lists = server.core.revocation_lists
    ahead = lists.number + 1000
    news = lists.heard("board/1", ahead)
    assert news is not None
    assert opened(news, [member.certificate for member in server.kernel.authority.members]).number > ahead
    absurd = 2**62
    lists.heard("board/1", absurd)
    assert lists.number < absurd, "one agent cannot use up the numbers"


async def test_an_agent_that_names_ever_greater_numbers_does_not_have_lists_made_anew(
    server: BoardsRig,
) -> None:
    """Each new list goes to every agent, and until then all of them are shown as behind."""
    lists = server.core.revocation_lists
    lists.heard("board/1", lists.number + 1000)
    made = lists.number
    for _ in range(50):
        assert lists.heard("board/1", lists.number + 1) == lists.current()
    assert lists.number == made
    assert lists.heard("board/2", made) is None
    await server.kernel.revocations.revoke(serial=7, reason="x", actor=BOSS)
    assert lists.number > made, "what was revoked is told all the same"


@pytest.fixture
def silent_port() -> Iterator[int]:
    """Of somebody who takes connections and says nothing: whoever asks there waits."""
    with socket.create_server(("127.0.0.1", 0)) as silent:
        yield silent.getsockname()[1]


async def test_a_stream_at_the_server_ends_when_its_certificate_is_revoked(
    server: BoardsRig, silent_port: int
) -> None:
    ann = await certified(server)
    stub, metadata = await server.operator()
    await server.join("pi", ip_address="127.0.0.1", agent_port=silent_port)
    device = pi.CreateGPIODeviceRequest(
        name="lamp",
        node_id=1,
        pin_number=17,
        direction=pi.GPIO_DIRECTION_INPUT,
        device_type=pi.GPIO_DEVICE_TYPE_DIGITAL,
    )
    made = await stub.CreateGPIODevice(device, metadata=metadata)
    stream = (await ann.at_server()).StreamGPIOReadings(pi.StreamGPIOReadingsRequest(device_id=made.id))
    method = "/pi_controller.PiControllerService/StreamGPIOReadings"
    await until(lambda: server.kernel.calls.method("boards", method).active)

    await server.core.certificates.revoke(ann.number, reason="gone", actor=BOSS)

    with pytest.raises(grpc.aio.AioRpcError) as ending:
        await asyncio.wait_for(to_its_end(stream), 60)
    assert ending.value.code() is CODE.UNAUTHENTICATED


# Short lives, renewed.


async def test_an_operators_certificate_lives_for_a_day_at_most(server: BoardsRig) -> None:
    leaf = x509.load_pem_x509_certificate((await certified(server)).pem)
    assert (leaf.not_valid_after_utc - leaf.not_valid_before_utc).total_seconds() <= 86_400 + 3600
    for period in ("25h", "720h", "9528h"):
        with pytest.raises(grpc.aio.AioRpcError) as refusal:
            await certified(server, validity_period=period)
        assert refusal.value.code() is CODE.INVALID_ARGUMENT


async def test_an_operator_renews_her_own_certificate_and_no_others(server: BoardsRig) -> None:
    ann, bob = await certified(server), await certified(server)
    own = await (await ann.at_server()).RenewCertificate(pi.RenewCertificateRequest())
    assert own.id not in (ann.number, bob.number)
    with pytest.raises(grpc.aio.AioRpcError) as refusal:
        await (await ann.at_server()).RenewCertificate(pi.RenewCertificateRequest(id=bob.number))
    assert refusal.value.code() is CODE.PERMISSION_DENIED


async def test_revoking_one_certificate_revokes_what_was_renewed_from_it(server: BoardsRig) -> None:
    ann = await certified(server)
    call = (await ann.at_server()).RenewCertificate(pi.RenewCertificateRequest())
    await call
    renewed = dict(await call.trailing_metadata())["fleetplane-certificate-bin"]
    await server.core.certificates.revoke(ann.number, reason="stolen", actor=BOSS)

    thief = Ann(server, ann.key, 0, renewed)
    with pytest.raises(grpc.aio.AioRpcError) as refusal:
        await (await thief.at_server()).RenewCertificate(pi.RenewCertificateRequest())
    assert refusal.value.code() is CODE.UNAUTHENTICATED
