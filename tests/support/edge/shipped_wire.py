"""The bytes of the edge daemons already in the field, written by hand.

Nothing of our own codecs is used, so that a mistake in those cannot hide here: fields are written in
the order of their numbers and defaults are left out, as that daemon's protobuf library does. See
`shipped_daemon` for the daemon that speaks them.
"""

from __future__ import annotations

import hashlib
import struct
import uuid
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from google.protobuf.message import DecodeError
from google.protobuf.struct_pb2 import Struct

HELLO, HEARTBEAT, RESULT, PROGRESS = 1, 2, 3, 4


# Protobuf.


def varint(number: int) -> bytes:
    number &= (1 << 64) - 1  # negative numbers take ten bytes
    out = bytearray()
    while number >= 0x80:
        out.append(number & 0x7F | 0x80)
        number >>= 7
    out.append(number)
    return bytes(out)


def length(number: int, value: bytes | str) -> bytes:
    """A field of bytes, text or a message; left out when empty."""
    raw = value.encode() if isinstance(value, str) else value
    return b"" if not raw else message(number, raw)


def message(number: int, raw: bytes) -> bytes:
    """A field that is there even when it is empty."""
    return varint(number << 3 | 2) + varint(len(raw)) + raw


def scalar(number: int, value: int) -> bytes:
    return b"" if not value else varint(number << 3) + varint(value)


def fields(raw: bytes) -> Iterator[tuple[int, int | bytes]]:
    """The fields of a message. Raises ValueError where that daemon's library would give up."""
    place = 0
    while place < len(raw):
        tag, place = _read_varint(raw, place)
        match tag & 7:
            case 0:
                value, place = _read_varint(raw, place)
                yield tag >> 3, value
            case 2:
                size, place = _read_varint(raw, place)
                if place + size > len(raw):
                    raise ValueError("buffer underflow")
                yield tag >> 3, raw[place : place + size]
                place += size
            case 1 | 5 as kind:
                size = 8 if kind == 1 else 4
                if place + size > len(raw):
                    raise ValueError("buffer underflow")
                yield tag >> 3, raw[place : place + size]
                place += size
            case kind:
                raise ValueError(f"invalid wire type {kind}")


def _read_varint(raw: bytes, place: int) -> tuple[int, int]:
    value = 0
    for shift in range(0, 70, 7):
        if place >= len(raw):
            raise ValueError("buffer underflow")
        byte = raw[place]
        place += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, place
    raise ValueError("invalid varint")


# What is signed.


def canonical(kind: int, node_id: str, stream_id: str, timestamp_ms: int, inner: bytes = b"") -> bytes:
    out = bytes([kind]) + struct.pack("<Q", timestamp_ms)
    for part in (node_id.encode(), stream_id.encode(), inner):
        out += struct.pack("<I", len(part)) + part
    return out


def envelope(key: Ed25519PrivateKey, token: str, payload: bytes) -> bytes:
    return length(1, token) + length(2, key.sign(payload)) + length(3, payload)


@dataclass(frozen=True, slots=True, kw_only=True)
class Sealer:
    """Signs the events of one stream."""

    key: Ed25519PrivateKey
    token: str
    node_id: str
    stream_id: str

    def _sealed(self, kind: int, timestamp_ms: int, inner: bytes = b"") -> bytes:
        payload = canonical(kind, self.node_id, self.stream_id, timestamp_ms, inner)
        return message(1, envelope(self.key, self.token, payload))

    def hello(self, capabilities: bytes, timestamp_ms: int) -> bytes:
        body = self._sealed(HELLO, timestamp_ms) + message(2, capabilities) + length(3, self.stream_id)
        return message(1, body)

    def heartbeat(self, timestamp_ms: int) -> bytes:
        return message(2, self._sealed(HEARTBEAT, timestamp_ms))  # no invocations: the field is not there

    def result(self, command_id: str, result: bytes, timestamp_ms: int) -> bytes:
        sealed = self._sealed(RESULT, timestamp_ms, command_id.encode())
        return message(3, sealed + length(2, command_id) + message(3, result))

    def progress(
        self, command_id: str, chunk: bytes, sequence: int, stderr: bool, timestamp_ms: int
    ) -> bytes:
        inner = command_id.encode() + struct.pack("<IB", sequence, stderr) + chunk
        sealed = self._sealed(PROGRESS, timestamp_ms, inner)
        body = sealed + length(2, command_id) + length(3, chunk) + scalar(4, sequence) + scalar(5, stderr)
        return message(4, body)


# Messages.


def capabilities(
    *,
    os: str = "linux",
    arch: str = "x86_64",
    local_tools: Sequence[str] = ("shell", "sh"),
    mount_points: Sequence[str] = ("/", "/home", "/etc", "/var/log"),
    labels: Mapping[str, str] | None = None,
    tags: Sequence[str] = (),
) -> bytes:
    out = length(1, os) + length(2, arch)
    out += b"".join(message(3, tool.encode()) for tool in local_tools)
    out += b"".join(message(4, mount.encode()) for mount in mount_points)
    out += b"".join(message(5, length(1, key) + length(2, value)) for key, value in (labels or {}).items())
    return out + b"".join(message(6, tag.encode()) for tag in tags)


def result(
    *,
    ok: bool,
    exit_code: int = 0,
    stdout: bytes = b"",
    stderr: bytes = b"",
    error_kind: str = "",
    error_message: str = "",
) -> bytes:
    return (
        scalar(1, ok)
        + scalar(2, exit_code)
        + length(3, stdout)
        + length(4, stderr)
        + length(6, error_kind)
        + length(7, error_message)
    )


def error(kind: str, words: str) -> bytes:
    return result(ok=False, error_kind=kind, error_message=words)


def attest(node_id: str, public_key: bytes) -> bytes:
    return length(1, node_id) + scalar(2, 4) + length(3, public_key) + message(4, b"")


def challenge(challenge_id: str, node_id: str, signature: bytes, enrollment_token: str) -> bytes:
    return (
        length(1, challenge_id)
        + length(2, node_id)
        + length(3, signature)
        + message(4, enrollment_token.encode())
    )


def rotation_digest(node_id: str, public_key: bytes, nonce: bytes) -> bytes:
    return hashlib.sha256(b"aegis-edge-rotate" + uuid.UUID(node_id).bytes + public_key + nonce).digest()


def rotation(node_id: str, old: Ed25519PrivateKey, new: Ed25519PrivateKey, nonce: bytes) -> bytes:
    """The token in its envelope is empty."""
    public = new.public_key().public_bytes_raw()
    inner = length(1, node_id) + length(2, public) + length(3, nonce)
    signed = new.sign(rotation_digest(node_id, public, nonce))
    return message(1, envelope(old, "", inner)) + length(2, public) + length(3, signed)


# Commands.


@dataclass(frozen=True, slots=True, kw_only=True)
class Invoke:
    command_id: str = ""
    context: str = ""
    tool: str = ""
    args: Mapping[str, Any] = field(default_factory=dict)
    deadline_seconds: int = 0
    seal: Mapping[int, bytes] | None = None
    """The inner envelope's fields by number; None if there is none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Cancel:
    command_id: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class PushConfig:
    delta: Mapping[str, Any] = field(default_factory=dict)


class Drain: ...


class Shutdown: ...


Command = Invoke | Cancel | PushConfig | Drain | Shutdown


def command(raw: bytes) -> Command | None:
    """What is in a command; the last arm counts. Raises ValueError as that daemon's library gives up."""
    found: Command | None = None
    for number, value in fields(raw):
        if number in (1, 2, 3, 4, 5) and not isinstance(value, bytes):
            raise ValueError("invalid wire type")
        match number, value:
            case 1, bytes():
                found = _invoke(value)
            case 2, bytes():
                found = Cancel(command_id=_text(dict(fields(value)).get(1, b"")))
            case 3, bytes():
                found = PushConfig(delta=_struct(b"".join(_all(value, 1))))
            case 4, bytes():
                list(fields(value))
                found = Drain()
            case 5, bytes():
                list(fields(value))
                found = Shutdown()
    return found


def _invoke(raw: bytes) -> Invoke:
    held = dict(fields(raw))
    seal = held.get(3)
    deadline = dict(fields(_bytes(held.get(6, b"")))).get(1, 0)
    return Invoke(
        command_id=_text(held.get(1, b"")),
        context=_text(held.get(2, b"")),
        tool=_text(held.get(4, b"")),
        args=_struct(_bytes(held.get(5, b""))),
        deadline_seconds=deadline if isinstance(deadline, int) else 0,
        seal=None if seal is None else {number: _bytes(value) for number, value in fields(_bytes(seal))},
    )


def _all(raw: bytes, wanted: int) -> list[bytes]:
    return [_bytes(value) for number, value in fields(raw) if number == wanted]


def _bytes(value: int | bytes) -> bytes:
    if not isinstance(value, bytes):
        raise ValueError("invalid wire type")
    return value


def _text(value: int | bytes) -> str:
    return _bytes(value).decode()


def _struct(raw: bytes) -> dict[str, Any]:
    from google.protobuf import json_format

    try:
        found: dict[str, Any] = json_format.MessageToDict(Struct.FromString(raw))
    except DecodeError as problem:
        raise ValueError(str(problem)) from problem
    return found
