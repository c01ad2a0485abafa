"""The bytes that daemons and the server sign.

A signature is Ed25519 over a payload exactly as it is carried. Payloads of a stream's events have
one layout, all integers little-endian:

    kind u8 | time u64, Unix milliseconds | node id | stream id | inner

where the last three are each a u32 length and so many bytes. `inner` ties the payload to the rest
of its message. Daemons in the field write the short forms, which leave a result's body and the
capabilities open; ours writes the digests:

    event               short form                                    with digest
    Hello, update       (empty)                                       SHA-256(capabilities)
    Heartbeat           (empty)
    CommandResult       command id                                    command id, SHA-256(result)
    CommandProgress     command id, sequence u32, stderr u8, chunk    command id, SHA-256(chunk)

A command's payload has the same layout, a kind of its own and SHA-256(command) as its inner, so
that no daemon's event can pass for a command of the server, nor the other way round.

Nothing that is signed for one purpose is ever taken for another:

    event, command    the layout above: its kind says which, and with two UUIDs it has 93 bytes or more
    challenge         a prefix of its own with everything that the answer is about; daemons in the
                      field sign the nonce alone, which has 32 bytes, fewer than anything else here
    rotation          a message that names the node and the new key, and is none of the others
    worker's call     a prefix of its own with method, target and time

Pure, shared by both sides: knows no clock and no keys but those it is given.

`canonical` gives the bytes of the inner seal: what the server signs of a tool call on behalf of a user. They
are compact JSON with its keys in order, made from the message itself, so that a verifier needs nothing but
what arrived; its numbers are doubles by then on both sides.
"""

from __future__ import annotations

import hashlib
import json
import struct
import uuid
from dataclasses import dataclass
from enum import IntEnum

from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey
from google.protobuf import json_format

from fleetplane.domains.edge.wire.protobuf_types import mapping_of
from fleetplane.gen.aegis.cluster.v1 import cluster_pb2 as pb
from fleetplane.kernel.errors import InvalidArgument


def canonical(call: pb.InvokeTool) -> bytes:
    """The bytes that `call.seal_envelope.signature` is over."""
    seal = call.seal_envelope
    try:
        document = {
            "args": mapping_of(call.args),
            "command_id": call.command_id,
            "security_context_name": seal.security_context_name,
            "tenant_id": seal.tenant_id,
            "tool_name": call.tool_name,
            "user_security_token": seal.user_security_token,
        }
        text = json.dumps(
            document, separators=(",", ":"), sort_keys=True, ensure_ascii=False, allow_nan=False
        )
        return text.encode()
    except (json_format.Error, ValueError) as error:
        raise InvalidArgument(f"the call cannot be signed: {error}", field="args") from error


SIGNATURE_BYTES = 64
PUBLIC_KEY_BYTES = 32
NONCE_BYTES = 32
ID_LIMIT_BYTES = 128
"""Of a node's or a stream's id in a payload; UUIDs take 36."""
ROTATION_PREFIX = b"aegis-edge-rotate"
CHALLENGE_PREFIX = b"fleetplane-edge-challenge\0"
CALL_PREFIX = b"fleetplane-worker-call\0"
DIGEST_BYTES = 32

_HEAD = struct.Struct("<BQ")
_LENGTH = struct.Struct("<I")
_PROGRESS = struct.Struct("<IB")


class EventKind(IntEnum):
    HELLO = 1
    HEARTBEAT = 2
    COMMAND_RESULT = 3
    COMMAND_PROGRESS = 4
    CAPABILITY_UPDATE = 5
    COMMAND = 128
    """Server to daemon."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Canonical:
    """A payload in the layout above, taken apart."""

    kind: EventKind
    timestamp_ms: int
    node_id: str
    stream_id: str
    inner: bytes


# The layout.


def encode(kind: EventKind, timestamp_ms: int, node_id: str, stream_id: str, inner: bytes = b"") -> bytes:
    parts = [_HEAD.pack(kind, timestamp_ms)]
    for part in (node_id.encode(), stream_id.encode(), inner):
        parts += (_LENGTH.pack(len(part)), part)
    return b"".join(parts)


def parse(payload: bytes) -> Canonical | None:
    """The payload taken apart; None if it is not of this layout to the last byte."""
    if len(payload) < _HEAD.size:
        return None
    number, timestamp_ms = _HEAD.unpack_from(payload)
    parts, place = [], _HEAD.size
    for _ in range(3):
        if len(payload) < place + _LENGTH.size:
            return None
        (length,) = _LENGTH.unpack_from(payload, place)
        place += _LENGTH.size
        parts.append(payload[place : place + length])
        place += length
    if place != len(payload) or max(len(parts[0]), len(parts[1])) > ID_LIMIT_BYTES:
        return None
    try:
        return Canonical(
            kind=EventKind(number),
            timestamp_ms=timestamp_ms,
            node_id=parts[0].decode(),
            stream_id=parts[1].decode(),
            inner=parts[2],
        )
    except ValueError:  # an unknown kind, or ids that are no text
        return None


# What ties a payload to its message.


def capabilities_inner(capabilities: bytes) -> bytes:
    return _digest(capabilities)


def result_inner(command_id: str, result: bytes | None = None) -> bytes:
    """Over the serialized result if it is given, else the short form."""
    return command_id.encode() + (b"" if result is None else _digest(result))


def progress_inner(command_id: str, chunk: bytes) -> bytes:
    """Over the serialized chunk."""
    return command_id.encode() + _digest(chunk)


def short_progress_inner(command_id: str, *, sequence: int, stderr: bool, chunk: bytes) -> bytes:
    return command_id.encode() + _PROGRESS.pack(sequence, stderr) + chunk


def place(node_id: str, stream_id: str) -> bytes:
    """What stands between the time and the inner of every payload of one stream."""
    parts = []
    for part in (node_id.encode(), stream_id.encode()):
        parts += [_LENGTH.pack(len(part)), part]
    return b"".join(parts)


def short_progress_time(
    payload: bytes, where: bytes, command_id: str, *, sequence: int, stderr: bool, chunk: bytes
) -> int | None:
    """The time in a payload that vouches for this output in the short form, on the stream of that `place`.

    None if it is any other. The same as taking it apart, for lines that come by the ten thousand.
    """
    inner = command_id.encode() + _PROGRESS.pack(sequence, stderr) + chunk
    if len(payload) < _HEAD.size or payload[_HEAD.size :] != where + _LENGTH.pack(len(inner)) + inner:
        return None
    kind, timestamp_ms = _HEAD.unpack_from(payload)
    return timestamp_ms if kind == EventKind.COMMAND_PROGRESS else None


def covers_capabilities(inner: bytes, capabilities: bytes, *, digest_required: bool = False) -> bool:
    return inner == _digest(capabilities) or (not inner and not digest_required)


def covers_result(inner: bytes, command_id: str, result: bytes, *, digest_required: bool = False) -> bool:
    if inner == result_inner(command_id, result):
        return True
    return inner == command_id.encode() and not digest_required


def covers_progress(
    inner: bytes, command_id: str, *, chunk: bytes, sequence: int = 0, stderr: bool = False
) -> bool:
    """Whether either form vouches for the chunk's bytes as they were carried."""
    if inner == progress_inner(command_id, chunk):
        return True
    return inner == short_progress_inner(command_id, sequence=sequence, stderr=stderr, chunk=chunk)


# Commands.


def command_payload(timestamp_ms: int, node_id: str, stream_id: str, command: bytes) -> bytes:
    """What the server signs of a command, serialized without its envelope."""
    return encode(EventKind.COMMAND, timestamp_ms, node_id, stream_id, _digest(command))


def covers_command(payload: bytes, node_id: str, stream_id: str, command: bytes) -> bool:
    """Whether a payload is of exactly this command on this stream. Its time is the caller's to judge."""
    found = parse(payload)
    return found is not None and payload == command_payload(found.timestamp_ms, node_id, stream_id, command)


# Joining.


def challenge_message(
    node_id: str, challenge_id: str, *, public_key: bytes, nonce: bytes, enrollment_token: str
) -> bytes:
    """What a daemon of ours signs to answer a challenge: this one, for this node, key and token."""
    parts = [CHALLENGE_PREFIX]
    for part in (
        node_id.encode(),
        challenge_id.encode(),
        public_key,
        nonce,
        _digest(enrollment_token.encode()),
    ):
        parts += (_LENGTH.pack(len(part)), part)
    return b"".join(parts)


def answers_challenge(
    signature: bytes,
    node_id: str,
    challenge_id: str,
    *,
    public_key: bytes,
    nonce: bytes,
    enrollment_token: str,
) -> bool:
    """Whether a challenge was answered: in full, or by the nonce alone as daemons in the field do."""
    message = challenge_message(
        node_id, challenge_id, public_key=public_key, nonce=nonce, enrollment_token=enrollment_token
    )
    return verify(public_key, signature, message) or verify(public_key, signature, nonce)


# Workers' calls.


def call_message(method: str, *, target: str, node_id: str, issued_at_ns: int, payload: bytes) -> bytes:
    """What a worker signs of a call: this method of this server, about now, with this content."""
    parts = [CALL_PREFIX, struct.pack("<Q", issued_at_ns)]
    for part in (method.encode(), target.encode(), node_id.encode(), _digest(payload)):
        parts += (_LENGTH.pack(len(part)), part)
    return b"".join(parts)


# Key rotation.


def rotation_digest(node_id: str, new_public_key: bytes, nonce: bytes) -> bytes:
    """The message that daemons in the field sign with the new key."""
    return _digest(ROTATION_PREFIX + uuid.UUID(node_id).bytes + new_public_key + nonce)


def rotation_messages(node_id: str, new_public_key: bytes, nonce: bytes) -> tuple[bytes, ...]:
    """All byte strings of which one must be signed by the new key: the id comes as text or as 16 bytes."""
    messages = (node_id.encode() + new_public_key, uuid.UUID(node_id).bytes + new_public_key)
    if len(nonce) == NONCE_BYTES:
        return (rotation_digest(node_id, new_public_key, nonce), *messages)
    return messages


def has_purpose(payload: bytes) -> bool:
    """Whether a payload says by itself what it was signed for: an event, a command, a challenge, a call."""
    return parse(payload) is not None or payload.startswith((CHALLENGE_PREFIX, CALL_PREFIX))


# Signatures.


def sign(key: Ed25519PrivateKey, payload: bytes) -> bytes:
    return key.sign(payload)


def verify(public_key: bytes, signature: bytes, payload: bytes) -> bool:
    if len(signature) != SIGNATURE_BYTES or len(public_key) != PUBLIC_KEY_BYTES:
        return False
    try:
        Ed25519PublicKey.from_public_bytes(public_key).verify(signature, payload)
    except (InvalidSignature, ValueError):
        return False
    return True


def _digest(content: bytes) -> bytes:
    return hashlib.sha256(content).digest()
