"""How a board's agent joins a server, and whom it believes on the way."""

from __future__ import annotations

import hashlib
import ssl
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
import pytest
from support.boards.board_node_rig import configured, joined, make_parts
from support.boards.boards_rig import BOSS, BoardsRig, boards_rig
from support.shared.throwaway_ca import ThrowawayCa

from fleetplane.domains.boards.agent import registration as link
from fleetplane.domains.boards.agent.assembly import BoardAgentParts, introduced_now
from fleetplane.domains.boards.agent.gpio.drivers import SimulatedBoard
from fleetplane.domains.boards.agent.membership import BoardIdentityFolder
from fleetplane.domains.boards.agent.registration import Joiner
from fleetplane.domains.boards.core import BoardOptions
from fleetplane.domains.boards.inventory.boards import status_of
from fleetplane.kernel.errors import (
    AlreadyExists,
    FailedPrecondition,
    IntegrityError,
    InvalidArgument,
    PermissionDenied,
    Unavailable,
)
from fleetplane.rpc import ListenerSpec, TlsFiles, open_listener

FAST = BoardOptions(plain=True, heartbeat_seconds=1.0)


@pytest.fixture
async def server(tmp_path: Path) -> AsyncIterator[BoardsRig]:
    async with boards_rig(tmp_path, options=FAST) as made:
        yield made


@pytest.fixture
def parts(tmp_path: Path) -> BoardAgentParts:
    return make_parts(tmp_path / "node", configured(), SimulatedBoard())


def modes(folder: BoardIdentityFolder) -> set[int]:
    return {path.stat().st_mode & 0o777 for path in folder.root.iterdir()}


async def test_a_token_makes_a_member_and_everything_is_the_owners_alone(
    parts: BoardAgentParts, server: BoardsRig
) -> None:
    membership = await joined(parts, server)

    assert (membership.node_id, membership.server, membership.heartbeat_seconds) == (1, server.address, 1)
    identity = parts.folder.credentials()
    assert identity.authority_pem == server.kernel.authority.trust_pem
    assert modes(parts.folder) == {0o600}
    assert parts.folder.root.stat().st_mode & 0o777 == 0o700
    assert status_of(server.board(1)).key_digest
    assert server.board(1).spec.serial_number.startswith("simulated-")


async def test_another_server_learns_nothing_of_the_token(
    parts: BoardAgentParts, server: BoardsRig, tmp_path: Path
) -> None:
    certificate, key = ThrowawayCa().server(tmp_path)
    heard: list[Any] = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        heard.append(scope)

    tls = TlsFiles(certificate=certificate, key=key)
    spec = ListenerSpec(name="false", addresses=("127.0.0.1:0",), app=app, tls=tls)
    async with open_listener(spec, grace_seconds=1) as false:
        address = false.addresses[0].partition("://")[2]
        me = introduced_now(parts, address)
        with pytest.raises(PermissionDenied, match="is not the server") as refused:
            await Joiner(parts.folder, parts.clock).join(await server.token(), address, me)
    assert refused.value.details["cause"] == "fingerprint"
    assert heard == []
    assert parts.folder.load_membership() is None


async def test_who_only_shows_the_authority_but_has_no_certificate_of_it_gets_nothing(
    parts: BoardAgentParts, server: BoardsRig, tmp_path: Path
) -> None:
    """The authority's certificate is public; what counts is a certificate made by it for that name."""
    certificate, key = ThrowawayCa().server(tmp_path)
    certificate.write_bytes(certificate.read_bytes() + server.kernel.authority.certificate_pem)
    heard: list[Any] = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        heard.append(scope)

    spec = ListenerSpec(
        name="false", addresses=("127.0.0.1:0",), app=app, tls=TlsFiles(certificate=certificate, key=key)
    )
    async with open_listener(spec, grace_seconds=1) as false:
        address = false.addresses[0].partition("://")[2]
        with pytest.raises(Unavailable):
            await Joiner(parts.folder, parts.clock).join(
                await server.token(), address, introduced_now(parts, address)
            )
    assert heard == []


async def test_a_board_with_a_server_certificate_cannot_pose_as_the_server(
    parts: BoardAgentParts, server: BoardsRig, tmp_path: Path
) -> None:
    evil = await server.join("evil")
    key, certificate = tmp_path / "evil.key", tmp_path / "evil.crt"
    key.write_bytes(evil.key.pem)
    certificate.write_bytes(evil.certificate)
    heard: list[Any] = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        heard.append(scope)

    spec = ListenerSpec(
        name="false", addresses=("127.0.0.1:0",), app=app, tls=TlsFiles(certificate=certificate, key=key)
    )
    async with open_listener(spec, grace_seconds=1) as false:
        address = false.addresses[0].partition("://")[2]
        with pytest.raises(Unavailable):
            await Joiner(parts.folder, parts.clock).join(
                await server.token(), address, introduced_now(parts, address)
            )
    assert heard == []


async def test_what_is_no_token_or_no_server_is_told(parts: BoardAgentParts, server: BoardsRig) -> None:
    joiner, me = Joiner(parts.folder, parts.clock), introduced_now(parts, server.address)
    with pytest.raises(InvalidArgument, match="no join token"):
        await joiner.join("hello", server.address, me)
    with pytest.raises(Unavailable, match="does not answer"):
        await joiner.join(await server.token(), "127.0.0.1:1", me)
    with pytest.raises(InvalidArgument, match="HOST:PORT"):
        await joiner.join(await server.token(), "host:port:more", me)
    used = await server.token()
    await joiner.join(used, server.address, me)
    with pytest.raises(AlreadyExists, match="member 1"):
        await joiner.join(used, server.address, me)
    other = make_parts(
        parts.folder.root.parent / "other", configured(node={"name": "pi-2"}), SimulatedBoard()
    )
    with pytest.raises(link.RefusedByServer, match="UNAUTHENTICATED"):
        await Joiner(other.folder, other.clock).join(
            used, server.address, introduced_now(other, server.address)
        )


async def test_a_lost_answer_is_asked_for_again_with_the_same_key(
    parts: BoardAgentParts, server: BoardsRig
) -> None:
    token, joiner = await server.token(), Joiner(parts.folder, parts.clock)
    me = introduced_now(parts, server.address)
    first = await joiner.join(token, server.address, me)
    for lost in (parts.folder.membership, parts.folder.certificate_file, parts.folder.authority_file):
        lost.unlink()
    assert (await joiner.join(token, server.address, me)).node_id == first.node_id


async def test_a_board_with_another_key_waits_for_approval(parts: BoardAgentParts, server: BoardsRig) -> None:
    await joined(parts, server)
    parts.folder.forget()
    joiner, me = Joiner(parts.folder, parts.clock), introduced_now(parts, server.address)
    told: list[str] = []
    token = await server.token()
    with pytest.raises(FailedPrecondition, match="not admitted"):
        await joiner.join(token, server.address, me, told=told.append)
    (pending,) = server.core.approvals.all()
    await server.core.approvals.approve(pending.name, actor=BOSS)
    assert (await joiner.join(token, server.address, me)).node_id == 1


async def test_a_certificate_that_is_not_for_us_is_not_kept(
    parts: BoardAgentParts, server: BoardsRig
) -> None:
    await joined(parts, server)
    other = await server.join("pi-2")
    trust, before = server.kernel.authority.trust_pem, parts.folder.certificate_file.read_bytes()
    with pytest.raises(IntegrityError, match="another key"):
        parts.folder.store_certificate(other.certificate, trust, node_id=2)
    with pytest.raises(IntegrityError, match="not for node 7"):
        parts.folder.store_certificate(before, trust, node_id=7)
    with pytest.raises(IntegrityError, match="not from the authority"):
        parts.folder.store_certificate(before, ThrowawayCa().pem, node_id=1)
    with pytest.raises(IntegrityError, match="only others"):
        parts.folder.trust(ThrowawayCa().pem)
    with pytest.raises(IntegrityError, match="no certificate"):
        parts.folder.store_certificate(b"x", trust, node_id=1)
    assert parts.folder.certificate_file.read_bytes() == before


async def test_two_agents_do_not_share_a_folder(parts: BoardAgentParts) -> None:
    with parts.folder.alone(), pytest.raises(Unavailable, match="another agent"), parts.folder.alone():
        pass


@pytest.mark.parametrize(
    ("written", "meant"),
    [
        ("host:1234", ("host", 1234)),
        ("host", ("host", 9090)),
        ("[::1]:5", ("::1", 5)),
        ("::1", ("::1", 9090)),
        ("10.0.0.1:80", ("10.0.0.1", 80)),
    ],
)
def test_addresses_are_read_as_people_write_them(written: str, meant: tuple[str, int]) -> None:
    assert link.endpoint(written) == meant


async def test_the_fingerprint_is_of_the_authority_that_is_shown(server: BoardsRig) -> None:
    der = ssl.PEM_cert_to_DER_cert(server.kernel.authority.certificate_pem.decode())
    fingerprint = hashlib.sha256(der).hexdigest()
    assert fingerprint == server.fingerprint
    pem = await link.authority_behind(server.address, fingerprint)
    assert ssl.PEM_cert_to_DER_cert(pem.decode()) == der


def test_calls_that_will_never_work_are_told_from_those_that_may() -> None:
    def failed(code: grpc.StatusCode) -> grpc.aio.AioRpcError:
        return grpc.aio.AioRpcError(code, grpc.aio.Metadata(), grpc.aio.Metadata(), details="why")

    assert isinstance(link.translated(failed(grpc.StatusCode.UNAUTHENTICATED)), link.RefusedByServer)
    assert isinstance(link.translated(failed(grpc.StatusCode.UNAVAILABLE)), link.OutOfReach)
