"""Destinations of the audit log's checkpoints that an intruder on the server cannot rewrite.

A file (on a medium that takes no rewriting, or fetched by somebody), syslog, an object storage, a webhook.
"""

from __future__ import annotations

import asyncio
import os
import socket
from pathlib import Path
from typing import Protocol
from urllib.parse import urlsplit

from fleetplane.kernel.audit.checkpoints import Checkpoint
from fleetplane.kernel.errors import AlreadyExists, Conflict, SettingsError
from fleetplane.kernel.objects import Objects

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
