"""Signed checkpoints of the audit chain, and the places outside the server where they are kept.

A checkpoint names an entry and its hash, and so everything before it. It shows later whether the chain still
has that entry, even after an intruder with the server, its database and its master key has rewritten the
chain. The signing key is derived from the master key; its public half is no secret. Destinations are a
file (on a medium that takes no rewriting, or fetched regularly), syslog, an object storage, and a webhook.
"""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Protocol
from urllib.parse import urlsplit

import msgspec
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat

from fleetplane.kernel.audit.chain import Head
from fleetplane.kernel.errors import AlreadyExists, Conflict, IntegrityError, InvalidArgument, SettingsError
from fleetplane.kernel.objects import Objects

PURPOSE = b"fleetplane audit checkpoint 1\0"
"""What is signed begins with it, so that the signature is good for nothing else."""
LINE_LIMIT = 4096


class Checkpoint(msgspec.Struct, frozen=True, kw_only=True):
    lineage: str
    seq: int
    hash: str
    """Of that entry, in hexadecimal."""
    revision: int
    at_ns: int


class CheckpointLine(msgspec.Struct, frozen=True, kw_only=True):
    """A checkpoint as it is kept: one line of JSON."""

    checkpoint: Checkpoint
    key: str
    signature: str


_ENCODER = msgspec.json.Encoder()
_LINES = msgspec.json.Decoder(CheckpointLine)


class CheckpointSigner:
    def __init__(self, seed: bytes) -> None:
        self._private = Ed25519PrivateKey.from_private_bytes(seed)
        self.public = self._private.public_key().public_bytes(Encoding.Raw, PublicFormat.Raw)

    def __repr__(self) -> str:
        return f"<CheckpointSigner {self.public.hex()[:16]}>"

    def sign(self, lineage: str, head: Head, at_ns: int) -> bytes:
        """One line, without its end."""
        made = Checkpoint(
            lineage=lineage, seq=head.seq, hash=head.hash.hex(), revision=head.revision, at_ns=at_ns
        )
        signature = self._private.sign(PURPOSE + _ENCODER.encode(made))
        return _ENCODER.encode(
            CheckpointLine(checkpoint=made, key=self.public.hex(), signature=signature.hex())
        )


def read(line: bytes | str, public: bytes) -> Checkpoint:
    """What a line says, if this key signed it."""
    try:
        if len(line) > LINE_LIMIT:
            raise ValueError("too long")
        found = _LINES.decode(line)
        signature = bytes.fromhex(found.signature)
        Ed25519PublicKey.from_public_bytes(public).verify(
            signature, PURPOSE + _ENCODER.encode(found.checkpoint)
        )
    except (msgspec.MsgspecError, UnicodeError, ValueError) as error:
        raise IntegrityError(f"a checkpoint cannot be read: {error}") from error
    except InvalidSignature as error:
        raise IntegrityError(
            f"the checkpoint of entry {found.checkpoint.seq} was not signed by this server's key"
        ) from error
    return found.checkpoint


def read_all(lines: Iterable[bytes], public: bytes) -> Iterator[Checkpoint]:
    """The checkpoints that a caller kept and gives back, one a line."""
    for index, line in enumerate(lines):
        try:
            if line.strip():
                yield read(line.strip(), public)
        except IntegrityError as error:
            raise InvalidArgument(error.message, field=f"anchors.{index}") from error


SEND_SECONDS = 10.0
SYSLOG_PRIORITY = 13 * 8 + 5
"""Log audit, notice."""
SYSLOG_SOCKET = "/dev/log"
PORTS = 65_536


class Anchor(Protocol):
    name: str
    """For logs and metrics: without anything secret."""

    async def send(self, checkpoint: Checkpoint, line: bytes, /) -> None:
        """Raises `OSError` or one of our errors if it is not sure to have arrived."""


class FileAnchor:
    """Appended to, one line each."""

    def __init__(self, path: Path) -> None:
        self.name = f"file:{path}"
        self._path = path

    async def send(self, _checkpoint: Checkpoint, line: bytes, /) -> None:
        await asyncio.to_thread(self._append, line)

    def _append(self, line: bytes) -> None:
        flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC
        descriptor = os.open(self._path, flags, 0o600)
        try:
            os.write(descriptor, line + b"\n")
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


class SyslogAnchor:
    """The machine's own syslog, or one elsewhere over UDP. Nobody acknowledges there."""

    def __init__(self, place: str) -> None:
        self.name = f"syslog:{place}"
        host, _, port = place.rpartition(":")
        if place and not (host and port.isdecimal() and 0 < int(port) < PORTS):
            raise SettingsError(f"audit.anchors: syslog:{place} is not syslog:host:port")
        self._address = (host.strip("[]"), int(port)) if place else None

    async def send(self, _checkpoint: Checkpoint, line: bytes, /) -> None:
        await asyncio.to_thread(self._write, b"<%d>fleetplane-audit: %s" % (SYSLOG_PRIORITY, line))

    def _write(self, message: bytes) -> None:
        if self._address is None:
            with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as local:
                local.settimeout(SEND_SECONDS)
                local.sendto(message, SYSLOG_SOCKET)
            return
        family, kind, protocol, _, address = socket.getaddrinfo(*self._address, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind, protocol) as remote:
            remote.settimeout(SEND_SECONDS)
            remote.sendto(message, address)


class ObjectAnchor:
    """An object for each, which is never written over."""

    def __init__(self, objects: Objects) -> None:
        self.name = "objects:"
        self._objects = objects

    async def send(self, checkpoint: Checkpoint, line: bytes, /) -> None:
        path = f"audit/{checkpoint.lineage}/{checkpoint.seq:012d}.json"
        try:
            await self._objects.put(path, line + b"\n", if_absent=True)
        except (AlreadyExists, Conflict):
            return  # sent before, and not acknowledged


class WebhookAnchor:
    """A POST with the line as its body; anything but 2xx is tried again with the next."""

    def __init__(self, address: str) -> None:
        parts = urlsplit(address)
        self.name = f"{parts.scheme}://{parts.hostname}"  # the rest may be a secret
        self._address = address

    async def send(self, _checkpoint: Checkpoint, line: bytes, /) -> None:
        import httpx

        try:
            async with (
                httpx.AsyncClient(timeout=SEND_SECONDS, trust_env=False) as client,
                client.stream(
                    "POST", self._address, content=line, headers={"content-type": "application/json"}
                ) as answer,  # whose body says nothing that we ask for, and may have no end
            ):
                status = answer.status_code
        except httpx.HTTPError as error:
            raise OSError(type(error).__name__) from error
        if not httpx.codes.is_success(status):
            raise OSError(f"answered with {status}")
