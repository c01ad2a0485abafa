"""Whether a command is the server's: by the key that was pinned when this machine was enrolled.

The outer proof ties a command's bytes to this node, this stream and this moment. The inner one says
for whom a tool is called, with what. Without a pinned key, as with servers that have none to show,
only the shape can be judged. Pure but for the clock.
"""

from __future__ import annotations

from typing import Final

from google.protobuf.message import DecodeError

from fleetplane.domains.edge.wire import envelope
from fleetplane.domains.edge.wire import envelope as userseal
from fleetplane.gen.aegis.cluster.v1 import cluster_pb2 as pb
from fleetplane.kernel.clock import Clock
from fleetplane.kernel.errors import InvalidArgument, Unauthenticated

SKEW_SECONDS: Final = 600.0
"""Between the server's clock and ours; commands are bound to a stream that is minutes or days old."""
DISORDER_SECONDS: Final = 5.0
"""By which a command may seem older than the one before it."""
_PROOF_FIELD: Final = 16


class NotTheServer(Unauthenticated):
    """The peer cannot prove that it is this daemon's server."""

    reason = "NOT_THE_SERVER"
    hint = "if the server's key was changed on purpose, enrol this machine anew"


class ServerCheck:
    """Judges the commands of one stream, in the order they come."""

    def __init__(
        self, *, server_key: bytes, tolerate_unsigned: bool, node_id: str, stream_id: str, clock: Clock
    ) -> None:
        self._server_key = server_key
        self._tolerate_unsigned = tolerate_unsigned
        self._node_id = node_id
        self._stream_id = stream_id
        self._clock = clock
        self._newest_ms = 0

    def __repr__(self) -> str:
        return f"<ServerCheck pinned={bool(self._server_key)} tolerant={self._tolerate_unsigned}>"

    def command(self, raw: bytes) -> pb.EdgeCommand:
        """The command, once its proof is verified."""
        try:
            command = pb.EdgeCommand.FromString(raw)
            bare, proofs = without_field(raw, _PROOF_FIELD)
        except (DecodeError, ValueError) as error:
            raise NotTheServer(f"the server sent what cannot be read: {error}") from error
        if self._server_key and (proofs or not self._tolerate_unsigned):
            if proofs != 1:
                raise NotTheServer("a command came without the server's proof")
            self._check(command.envelope, bare)
        return command

    def _check(self, proof: pb.SealNodeEnvelope, bare: bytes) -> None:
        if not envelope.verify(self._server_key, proof.signature, proof.payload):
            raise NotTheServer("a command's proof is not by the server's key")
        if not envelope.covers_command(proof.payload, self._node_id, self._stream_id, bare):
            raise NotTheServer("a command's proof is of another command, node or stream")
        signed = envelope.parse(proof.payload)
        assert signed is not None  # covers_command has read it
        now_ms = self._clock.now_ns() // 1_000_000
        if abs(now_ms - signed.timestamp_ms) > SKEW_SECONDS * 1000:
            raise NotTheServer("a command's proof is not of now; is one of the clocks wrong?")
        if signed.timestamp_ms < self._newest_ms - DISORDER_SECONDS * 1000:
            raise NotTheServer("a command's proof is older than the one before it")
        self._newest_ms = max(self._newest_ms, signed.timestamp_ms)


def call_complaint(call: pb.InvokeTool, *, tenant: str, server_key: bytes, tolerate_unsigned: bool) -> str:
    """What is wrong with the inner envelope of a tool call; nothing if it is good."""
    seal = call.seal_envelope
    if not call.HasField("seal_envelope"):
        return "the call has no inner envelope"
    if not seal.user_security_token.strip():
        return "user_security_token is missing"
    if len(seal.user_security_token.split(".")) != 3:
        return "user_security_token is no token of three segments"
    if not seal.tenant_id.strip():
        return "tenant_id is missing"
    if seal.security_context_name != call.security_context_name:
        return "security_context_name is not that of the call"
    if tenant and seal.tenant_id != tenant:
        return "tenant_id is not the tenant of this machine"
    if not server_key or (tolerate_unsigned and not seal.signature):
        return ""
    try:
        signed = userseal.canonical(call)
    except InvalidArgument as error:
        return error.message
    return "" if envelope.verify(server_key, seal.signature, signed) else "the signature is wrong"


def without_field(raw: bytes, number: int) -> tuple[bytes, int]:
    """A message's bytes without one of its fields, and how often that was there."""
    kept, found, place = bytearray(), 0, 0
    while place < len(raw):
        start = place
        tag, place = _varint(raw, place)
        place = _skip(raw, place, tag & 7)
        if tag >> 3 == number:
            found += 1
        else:
            kept += raw[start:place]
    return bytes(kept), found


def _skip(raw: bytes, place: int, wire_type: int) -> int:
    match wire_type:
        case 0:
            _, place = _varint(raw, place)
        case 1:
            place += 8
        case 2:
            length, place = _varint(raw, place)
            place += length
        case 5:
            place += 4
        case _:
            raise ValueError(f"wire type {wire_type}")
    if place > len(raw):
        raise ValueError("the message is cut off")
    return place


def _varint(raw: bytes, place: int) -> tuple[int, int]:
    value = 0
    for shift in range(0, 70, 7):
        if place >= len(raw):
            raise ValueError("the message is cut off")
        byte = raw[place]
        place += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, place
    raise ValueError("a number has more than ten bytes")
