"""Signatures of edge daemons, taken from the wire and presented for another purpose."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import grpc
import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from support.edge.edge_identity_rig import TENANT, code_of, identity_rig, new_key, public
from support.edge.edge_signer import Identity, Signer
from support.edge.edge_streams_rig import Daemon, streams_rig

from fleetplane.domains.edge.streams.assembly import StreamOptions
from fleetplane.domains.edge.streams.verification import SealPolicy
from fleetplane.domains.edge.wire import envelope
from fleetplane.domains.edge.wire.envelope import EventKind
from fleetplane.gen.aegis.cluster.v1 import cluster_pb2 as pb
from fleetplane.gen.fleetplane.edge.v1 import tolerant_pb2

Code = grpc.StatusCode
STRICT_OR_NOT = pytest.mark.parametrize("strict", [True, False], ids=["strict", "not strict"])


def _options(strict: bool) -> StreamOptions:
    return StreamOptions(seal=SealPolicy(strict=strict))


class _Captured:
    """Stands in for a key: signs nothing, and shows the one signature that was overheard."""

    def __init__(self, signature: bytes) -> None:
        self._signature = signature

    def sign(self, _payload: bytes) -> bytes:
        return self._signature


@STRICT_OR_NOT
async def test_the_answer_to_a_challenge_opens_no_stream(tmp_path: Path, strict: bool) -> None:
    async with streams_rig(tmp_path, options=_options(strict)) as rig:
        victim = await rig.enrol()
        nonce = b"n" * envelope.NONCE_BYTES
        overheard = victim.key.sign(nonce)  # with its token and nonce, all in clear text on h2c
        thief = await rig.client(victim)
        hello = thief.sign.hello(key=_Captured(overheard))
        hello.envelope.payload = nonce
        assert (await thief.refusal(hello=hello))[0] is Code.UNAUTHENTICATED
        assert len(rig.side.presences) == 0


@STRICT_OR_NOT
async def test_what_was_signed_once_reports_nothing_on_an_open_stream(tmp_path: Path, strict: bool) -> None:
    async with streams_rig(tmp_path, options=_options(strict)) as rig:
        daemon = await rig.daemon()
        await daemon.open()
        nonce = b"n" * envelope.NONCE_BYTES
        beat = daemon.sign.heartbeat()
        beat.envelope.payload, beat.envelope.signature = nonce, daemon.identity.key.sign(nonce)
        await daemon.send(heartbeat=beat)
        assert await daemon.ended() is Code.UNAUTHENTICATED


@pytest.mark.parametrize("kind", ["heartbeat", "command_progress", "command_result", "capability_update"])
async def test_an_event_is_not_taken_for_one_of_another_kind(tmp_path: Path, kind: str) -> None:
    async with streams_rig(tmp_path) as rig:
        daemon = await rig.daemon()
        await daemon.open_legacy()
        command = "cccccccc-1111-4222-8333-dddddddddddd"
        overheard: dict[str, Any] = {
            "heartbeat": daemon.sign.heartbeat(),
            "command_progress": daemon.sign.line(command, b"", sequence=0),
            "command_result": daemon.sign.result(command, b"", digest=False),
            "capability_update": daemon.sign.update(pb.EdgeCapabilities()),
        }
        taken: Any = overheard.pop(kind).envelope
        other = next(iter(overheard))
        forged = overheard[other]
        forged.envelope.CopyFrom(taken)
        await daemon.send(**{other: forged})
        assert await daemon.ended() is Code.UNAUTHENTICATED


@STRICT_OR_NOT
async def test_what_was_said_on_one_stream_is_nothing_on_the_next(tmp_path: Path, strict: bool) -> None:
    async with streams_rig(tmp_path, options=_options(strict)) as rig:
        daemon = await rig.daemon()
        await daemon.open_legacy()
        hello = daemon.sign.hello()
        beat, result = daemon.sign.heartbeat(), daemon.sign.result("c" * 36, b"\x08\x01", digest=False)
        daemon.leave()
        assert (await daemon.refusal(hello=_renamed(hello)))[0] is Code.UNAUTHENTICATED
        for event in ({"heartbeat": beat}, {"command_result": result}):
            again = await rig.client(daemon.identity)
            await again.open_legacy()
            await again.send(**event)
            assert await again.ended() is Code.UNAUTHENTICATED


def _renamed(hello: tolerant_pb2.Hello) -> tolerant_pb2.Hello:
    hello.stream_id = "aaaaaaaa-bbbb-4ccc-8ddd-eeeeeeeeeeee"
    return hello


async def test_a_signed_nonce_or_proof_is_no_wish_for_a_key(tmp_path: Path) -> None:
    async with identity_rig(tmp_path) as rig:
        machine, thief = await rig.enrolled(), new_key()
        bound = envelope.challenge_message(
            machine.node_id,
            "c" * 36,
            public_key=public(machine.key),
            nonce=public(thief),
            enrollment_token="t",
        )
        proof = machine.node_id.encode() + public(machine.key)
        attempts: list[tuple[bytes, Ed25519PrivateKey]] = [
            (public(thief), thief),  # a nonce that a server in the middle chose
            (bound, thief),
            (proof, machine.key),  # how the present key proved itself when it was new
        ]
        for payload, new in attempts:
            wish = machine.wish(new, form=0, nonce=b"", inner=payload)
            assert await code_of(machine.rotate(wish)) is Code.INVALID_ARGUMENT, payload
        found = rig.side.nodes.get(TENANT, machine.node_id)
        assert (found.spec.public_key, found.spec.key_version) == (public(machine.key), 1)


async def test_an_answer_to_one_challenge_does_not_answer_another(tmp_path: Path) -> None:
    async with identity_rig(tmp_path) as rig:
        machine, token = rig.machine(), await rig.invite()
        first, second = await machine.attest(), await machine.attest()
        for signed in (first.challenge_nonce, _bound(machine, first, token), _bound(machine, second, "else")):
            asked = machine.answer(second, token, challenge_signature=machine.key.sign(signed))
            assert await code_of(machine.respond(asked)) is Code.UNAUTHENTICATED
        good = machine.key.sign(_bound(machine, second, token))
        assert (
            await machine.respond(machine.answer(second, token, challenge_signature=good))
        ).node_security_token


def _bound(machine: Any, challenge: pb.AttestNodeResponse, token: str) -> bytes:
    return envelope.challenge_message(
        machine.node_id,
        challenge.challenge_id,
        public_key=public(machine.key),
        nonce=challenge.challenge_nonce,
        enrollment_token=token,
    )


async def test_an_event_passes_for_no_command_and_a_command_for_no_event(tmp_path: Path) -> None:
    async with streams_rig(tmp_path) as rig:
        daemon = await rig.daemon()
        await daemon.open()
        forged = Signer(identity=_with_key(daemon, rig.key), clock=rig.clock, stream_id=daemon.sign.stream_id)
        await daemon.send(heartbeat=forged.heartbeat(kind=EventKind.COMMAND))
        assert await daemon.ended() is Code.UNAUTHENTICATED


def _with_key(daemon: Daemon, key: Any) -> Identity:
    me = daemon.identity
    return Identity(node_id=me.node_id, tenant=me.tenant, key=key, token=me.token, token_id=me.token_id)
