"""The bell over NATS: one subject for each lineage, core NATS only, nothing is kept there."""

from __future__ import annotations

import asyncio
import base64
import random
import re
import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import nats.errors
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from nats.aio.client import Client
from nats.aio.msg import Msg

from fleetplane.kernel.errors import SettingsError, Unavailable
from fleetplane.kernel.store.notifiers.notifier import MESSAGE_BYTES, BusKind, Heard, NatsSettings

SUBJECT = "fleetplane.bell."
"""And the lineage: several installations may share a NATS."""
CONNECT_SECONDS = 5
CLOSE_SECONDS = 2.0
ATTEMPTS = 3
"""To complete a connection. If the server says anything before it answers the first question, the client
takes the connection for one that is still being made, sends nothing on it, and tells nobody."""
PENDING_MESSAGES = 64
PENDING_BYTES = 64 * 1024
"""Held until the loop comes to them; of what is beyond, nothing but the fact is heard."""
CREDENTIALS_BYTES = 64 * 1024

_JWT = re.compile(rb"-----BEGIN NATS USER JWT-----\s+([A-Za-z0-9_.=-]+)\s+-----")
_SEED = re.compile(rb"-----BEGIN USER NKEY SEED-----\s+([A-Z2-7]+)\s+-----")
SEED_BYTES = 36
"""Two of a prefix, 32 of the seed, two of a checksum."""


class NatsBus:
    kind = BusKind.NATS

    def __init__(self, settings: NatsSettings) -> None:
        """Reads all files: what is missing or broken is said at the start, and not when it is needed."""
        self._settings = settings
        self._tls = _context(settings) if settings.needs_tls else None
        if settings.credentials_file:
            _credentials(settings.credentials_file)

    def __repr__(self) -> str:
        return f"<NatsBus {', '.join(self._settings.servers)}>"

    @asynccontextmanager
    async def line(self, lineage: str, heard: Heard) -> AsyncIterator[NatsLine]:
        line = await self._connected(heard)
        try:
            await line.listen(f"{SUBJECT}{lineage}")
            yield line
        finally:
            await line.close()

    async def _connected(self, heard: Heard) -> NatsLine:
        """To any of the servers."""
        troubles: dict[str, str] = {}
        servers = list(self._settings.servers)
        random.shuffle(servers)
        for server in servers:
            try:
                return await self._tried(server, heard)
            except (OSError, TimeoutError, nats.errors.Error, SettingsError) as error:
                troubles[server] = self._meaning(error)
        raise Unavailable("; ".join(f"{server}: {trouble}" for server, trouble in troubles.items()))

    async def _tried(self, server: str, heard: Heard) -> NatsLine:
        for _ in range(ATTEMPTS):
            line = NatsLine(_Client(needs_tls=self._tls is not None), heard)
            try:
                async with asyncio.timeout(2 * CONNECT_SECONDS):
                    await line.connect(server, self._options())
            except (OSError, TimeoutError, nats.errors.Error) as error:
                await line.close()
                cause = line.trouble or error
                if isinstance(cause, ConnectionError) and line.asks_who:
                    raise _Refused("the server ended the connection") from error
                raise cause from error
            except BaseException:
                await line.close()
                raise
            if line.is_whole:
                return line
            await line.close()
        if line.asks_who:
            raise _Refused("the connection was not completed")
        raise nats.errors.Error("the connection was not completed")

    def _options(self) -> dict[str, Any]:
        settings = self._settings
        options: dict[str, Any] = {}
        if self._tls is not None:
            options["tls"] = self._tls
        if settings.credentials_file:
            jwt, key = _credentials(settings.credentials_file)  # anew each time: they are renewed
            options["user_jwt_cb"] = lambda: jwt
            options["signature_cb"] = lambda nonce: base64.b64encode(key.sign(nonce.encode()))
        elif settings.user:
            options |= {"user": settings.user, "password": settings.password}
        elif settings.token:
            options["token"] = settings.token
        return options

    def _meaning(self, error: Exception) -> str:
        text = str(error) or type(error).__name__
        if isinstance(error, ssl.SSLCertVerificationError):
            setting = "bus.ca_file" if self._settings.ca_file else "bus.ca_file (not set)"
            return f"{setting}: does not vouch for the server's certificate: {error.verify_message}"
        if isinstance(error, ssl.SSLError):
            return f"bus.cert_file, bus.key_file: TLS failed: {error.reason or text}"
        if isinstance(error, _Refused):
            return f"{self._settings.secret}: refused, as it seems: {text}"
        if "authorization violation" in text.lower() or "authentication" in text.lower():
            return f"{self._settings.secret}: refused by the server"
        if isinstance(error, ConnectionError | TimeoutError) and self._settings.cert_file == "" and self._tls:
            return f"bus.cert_file: not set, and the server may ask for one: {text}"
        return text


class _Refused(nats.errors.Error):
    """A server that asks who is there has gone away: a refusal may be lost on the way."""


class _Client(Client):
    """The client, without two of its habits."""

    def __init__(self, *, needs_tls: bool) -> None:
        super().__init__()
        self._needs_tls = needs_tls

    def _connect_command(self) -> bytes:
        """What is said first, and with it passwords."""
        if self._needs_tls and not self._server_info.get("tls_required"):
            raise nats.errors.Error(
                "bus.url, bus.ca_file: the server does not speak TLS, and was told nothing"
            )
        # Headers of messages, which nobody here needs: one that cannot be read would end the reading.
        self._server_info.pop("headers", None)
        return super()._connect_command()


class NatsLine:
    def __init__(self, client: Client, heard: Heard) -> None:
        self._client = client
        self._heard = heard
        self._subject = ""
        self._lost = asyncio.Event()
        self.trouble: Exception | None = None
        """The last that the client told of."""

    def __repr__(self) -> str:
        return f"<NatsLine {self._subject}>"

    async def connect(self, server: str, options: dict[str, Any]) -> None:
        await self._client.connect(
            servers=[server.replace("tls://", "nats://", 1)],
            name="fleetplane",
            error_cb=self._told,
            closed_cb=self._closed,
            allow_reconnect=False,  # whoever asked for a line asks for another
            connect_timeout=CONNECT_SECONDS,
            reconnect_time_wait=0,
            max_reconnect_attempts=1,
            **options,
        )

    @property
    def asks_who(self) -> bool:
        """Whether the server wants to know who is there."""
        return bool(self._client._server_info.get("auth_required"))

    @property
    def is_whole(self) -> bool:
        """Whether the client both sends and reads: it says of neither that it has stopped."""
        reading = self._client._reading_task
        return self._client.is_connected and reading is not None and not reading.done()

    async def listen(self, subject: str) -> None:
        self._subject = subject
        await self._client.subscribe(
            subject,
            cb=self._message,
            pending_msgs_limit=PENDING_MESSAGES,
            pending_bytes_limit=PENDING_BYTES,
        )
        # The client's question overtakes what it has not written yet; the second one comes after it.
        await self.check()
        await self.check()

    async def _message(self, found: Msg) -> None:
        self._heard(found.data[: MESSAGE_BYTES + 1])

    async def _told(self, error: Exception) -> None:
        self.trouble = error
        if isinstance(error, nats.errors.SlowConsumerError):
            self._heard(None)

    async def _closed(self) -> None:
        self._lost.set()

    async def ring(self, message: bytes) -> None:
        if not self.is_whole:
            raise Unavailable("NATS: the connection is dead")
        try:
            await self._client.publish(self._subject, message)
            await self._client.flush()  # one message is under way at a time: later ones are one
        except (OSError, nats.errors.Error) as error:
            raise Unavailable(f"NATS: {error}") from error

    async def check(self) -> None:
        if not self.is_whole:
            raise Unavailable("NATS: the connection is dead")
        try:
            await self._client.flush()
        except (OSError, nats.errors.Error) as error:
            raise Unavailable(f"NATS: {error}") from error

    async def lost(self) -> str:
        await self._lost.wait()
        return f"the connection to NATS was lost: {self.trouble or 'it was closed'}"

    async def close(self) -> None:
        with suppress(OSError, TimeoutError, nats.errors.Error):
            async with asyncio.timeout(CLOSE_SECONDS):
                await self._client.close()


def _context(settings: NatsSettings) -> ssl.SSLContext:
    try:
        context = ssl.create_default_context(cafile=settings.ca_file or None)
    except (OSError, ssl.SSLError) as error:
        raise SettingsError(f"bus.ca_file: cannot use {settings.ca_file}: {error}") from error
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    if settings.cert_file:
        try:
            context.load_cert_chain(settings.cert_file, settings.key_file)
        except (OSError, ssl.SSLError) as error:
            raise SettingsError(
                f"bus.cert_file, bus.key_file: cannot use {settings.cert_file}, {settings.key_file}: {error}"
            ) from error
    return context


def _credentials(path: str) -> tuple[bytes, Ed25519PrivateKey]:
    """A user's token and key, as NATS's own tools write them."""
    try:
        text = Path(path).read_bytes()[:CREDENTIALS_BYTES]
    except OSError as error:
        raise SettingsError(f"bus.credentials_file: cannot read {path}: {error.strerror}") from error
    jwt, seed = _JWT.search(text), _SEED.search(text)
    if jwt is None or seed is None:
        raise SettingsError(f"bus.credentials_file: {path} does not hold a user's token and seed of NATS")
    try:
        raw = base64.b32decode(seed[1] + b"=" * (-len(seed[1]) % 8))
    except ValueError:
        raw = b""
    if len(raw) != SEED_BYTES:
        raise SettingsError(f"bus.credentials_file: {path} has a seed that cannot be read")
    return jwt[1], Ed25519PrivateKey.from_private_bytes(raw[2:34])
