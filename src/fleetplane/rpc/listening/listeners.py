"""Opening listeners: the one module that knows which HTTP server is underneath.

Sockets are opened here and handed over, so that their files, modes and options are ours to
decide. Timeouts that would end long quiet streams are off; what finds dead peers instead is
written in `sockets`. The HTTP server reads its TLS files once, so a listener that is to present
others runs a second one on the same sockets, and lets the first end with its connections.
"""

from __future__ import annotations

import asyncio
import json
import os
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Final, Literal

import h2corn
import structlog

from fleetplane.kernel.errors import SettingsError
from fleetplane.kernel.stalls import Watchdog
from fleetplane.rpc.listening.doors import ListenerMiddleware
from fleetplane.rpc.listening.sockets import CONNECTIONS, BoundSocket, end_connections, open_socket
from fleetplane.rpc.listening.warden import Budget

_log = structlog.get_logger("fleetplane.rpc")

AsgiApp = Callable[[Any, Any, Any], Awaitable[None]]

RUNTIME_THREADS: Final = 1
"""Of the HTTP server, for the whole process. One keeps up with one event loop and leaves a core alone."""
CONCURRENT_STREAMS: Final = 4096
"""Per connection. A gateway that multiplexes a thousand watches over one channel is normal here."""
CONCURRENT_REQUESTS: Final = 16_384
"""At an address, as the gRPC layer has it. The HTTP server refuses more with 503, for next to nothing: each
that it takes costs 7 KB before an application sees it, and they come faster than a loop can look at them."""
HEADER_FIELDS: Final = 128
HEADER_BYTES: Final = 64 * 1024
"""What is parsed at all. The gRPC layer refuses earlier, with a status; this protects the parser."""
STREAM_WINDOW_BYTES: Final = 1024 * 1024
CONNECTION_WINDOW_BYTES: Final = 4 * 1024 * 1024
"""Bytes a client may send ahead of us: one full-sized message per connection, whatever it opens."""
WEBSOCKET_MESSAGE_BYTES: Final = 64 * 1024
"""What a client may say at once; they ask for things, they do not upload."""
WEBSOCKET_PING_SECONDS: Final = 20.0
"""Between pings, and for the answer to one: a client that vanished is noticed within 40 s."""
RESERVE: Final = 64
"""Connections that an address is not to hold for long: what probes come in by when all others are taken."""
START_SECONDS: Final = 60.0
HANDSHAKE_SECONDS: Final = 60.0
"""From accepting a connection to the end of its handshake, as NGINX has it. The HTTP server's own 5 s turned
clients away while either machine stood still; who says nothing at all is what `warden` ends first."""
HANDOVER_SECONDS: Final = 7 * 86_400.0
"""How long connections over TLS may outlive the certificate they were accepted with, after a `renew`."""
RETRY_SECONDS: Final = 1.0
"""Before a listener that failed, for want of descriptors say, is tried again."""
_NEVER: Final = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class TlsFiles:
    certificate: Path
    key: Path
    client_ca: Path | None = None
    client_certificate: Literal["none", "optional", "required"] = "none"
    held: tuple[object, ...] = ()
    """What must not be forgotten for as long as the files may be read, such as memory they lie in."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ListenerSpec:
    name: str
    addresses: tuple[str, ...]
    """`127.0.0.1:0`, `[::1]:0`, `unix:///path`; port 0 picks a free one."""
    app: AsgiApp
    tls: TlsFiles | None = None
    unix_mode: int = 0o660
    http1: bool = False
    connections: int = 0
    """Held at once, shared evenly by the addresses; 0 leaves it to `descriptors`."""
    per_address: int = 0
    """That one peer's address may hold at one of ours; 0: half of what is held there."""
    streams: int = CONCURRENT_STREAMS
    """Of one TCP connection at once."""
    tls13_only: bool = False
    """Refuse requests that come over an older TLS."""
    watchdog: Watchdog | None = None
    """Is notified of handlers that hold the event loop."""
    idle_seconds: float = _NEVER
    """After which a connection without a request, or a request's body that stands still, is given up.

    Streams and WebSockets may be quiet for as long as they like, whatever this says.
    """


class Listener:
    """A running listener."""

    def __init__(self, spec: ListenerSpec, sockets: list[BoundSocket], *, grace_seconds: float) -> None:
        self.name = spec.name
        scheme = "https" if spec.tls else "http"
        self.addresses = [bound.address(scheme) for bound in sockets]
        """Such as `http://127.0.0.1:50051`, `https://127.0.0.1:8992` or `unix:///run/device.sock`."""
        tls13_only = spec.tls13_only and spec.tls is not None
        self.door = ListenerMiddleware(
            spec.app,
            name=spec.name,
            watchdog=spec.watchdog,
            tls13_only=tls13_only,
            counts_bodies=spec.http1,
            per_address=spec.per_address,
        )
        self._spec = replace(spec, app=self.door)
        self._sockets = sockets
        self._ports = frozenset(bound.port for bound in sockets if bound.port is not None)
        self._grace_seconds = grace_seconds
        self._runs: list[_Run] = []
        """The last one accepts; those before it go on for the connections that they accepted."""
        self._stopping = False

    async def start(self) -> None:
        await self._run(self._spec)
        _log.info("listener.opened", listener=self.name, addresses=self.addresses)

    async def renew(self, tls: TlsFiles) -> None:
        """Present another certificate, and trust others, from the next connection on.

        If that cannot be done, everything stays as it is.
        """
        await self._run(replace(self._spec, tls=tls))
        _log.info("listener.renewed", listener=self.name, addresses=self.addresses)

    async def _run(self, spec: ListenerSpec) -> None:
        """Run the HTTP server as the spec says, and let the one before it end.

        One for each address: connections of one cannot use up what another may hold.
        """
        started: list[_Run] = []
        try:
            for bound in self._sockets:
                run = _Run(spec, h2corn.Server(spec.app, self._config(spec, bound)))
                with _banner_withheld():
                    run.task = asyncio.create_task(run.serve(), name=f"listener-{self.name}")
                    await _started(spec, run.server, run.task)
                started.append(run)
        except BaseException:
            for run in started:
                run.stop()
            raise
        self._spec = spec
        for earlier in self._runs:
            earlier.stop()
            earlier.task.add_done_callback(partial(self._forget, earlier))
        self._runs += started
        if self._stopping:  # while we were starting
            for run in started:
                run.stop()

    def tend(self) -> dict[int, Budget]:
        """What each TCP port of this listener may hold, for a `warden`."""
        held = _held_at_each(self._spec, self._sockets)
        connections = held - min(RESERVE, held // 4)
        return {
            port: Budget(
                listener=self.name,
                connections=connections,
                per_address=self._spec.per_address or max(1, connections // 2),
                tls=self._spec.tls is not None,
                http1=self._spec.http1,
            )
            for port in self._ports
        }

    def _forget(self, ended: _Run, task: asyncio.Task[None]) -> None:
        """Its last connection is gone, and with it the need for its certificate."""
        if self._stopping or ended not in self._runs:
            return
        self._runs.remove(ended)
        if not task.cancelled() and (error := task.exception()) is not None:
            _log.warning("listener.handover_exceeded", listener=self.name, reason=str(error))

    def _config(self, spec: ListenerSpec, bound: BoundSocket) -> h2corn.Config:
        # An HTTP server that is replaced goes on until its streams have ended. One that is stopped has
        # its streams ended for it, by the application; what is left after the grace is cut in `stopped`.
        lasting = HANDOVER_SECONDS if spec.tls is not None else self._grace_seconds
        streams = CONCURRENT_STREAMS if bound.port is None else spec.streams
        each = replace(spec, connections=_held_at_each(spec, self._sockets), streams=streams)
        return _checked_config(each, [bound], max(lasting, self._grace_seconds))

    def stop_accepting(self) -> None:
        """Take no new connections. Streams that are open go on until they end or the grace is over."""
        self._stopping = True
        for bound in self._sockets:
            bound.close()
        for run in self._runs:
            run.stop()

    async def stopped(self) -> None:
        """Wait for what is open to end, for as long as the grace says, then cut it off."""
        serving = [run.task for run in self._runs]
        if not serving:
            return
        _, late = await asyncio.wait(serving, timeout=self._grace_seconds)
        if late:
            _log.warning("listener.grace_exceeded", listener=self.name, reason="connections were cut off")
            end_connections(self._ports)
        for task in serving:
            try:
                await task
            except RuntimeError as error:
                _log.warning("listener.grace_exceeded", listener=self.name, reason=str(error))

    def __repr__(self) -> str:
        return f"<Listener {self.name} {' '.join(self.addresses)}>"


class _Run:
    """One HTTP server on the listener's sockets, from its start until its last connection has ended."""

    task: asyncio.Task[None]

    def __init__(self, spec: ListenerSpec, server: h2corn.Server) -> None:
        self.server = server
        self._spec = spec
        self._stopping = asyncio.Event()

    async def serve(self) -> None:
        """Serve until stopped; a server that fails is started again after a pause."""
        while True:
            try:
                await self.server.serve()
                return
            except (OSError, RuntimeError) as error:
                if self._stopping.is_set():
                    raise
                _log.error(
                    "listener.failed", listener=self._spec.name, error=str(error), retry_seconds=RETRY_SECONDS
                )
            with suppress(TimeoutError):
                async with asyncio.timeout(RETRY_SECONDS):
                    await self._stopping.wait()
                return

    def stop(self) -> None:
        if not self._stopping.is_set():
            self._stopping.set()
            self.server.shutdown()


@asynccontextmanager
async def open_listener(spec: ListenerSpec, *, grace_seconds: float) -> AsyncIterator[Listener]:
    """Listen from entry to exit. On exit, open streams have `grace_seconds` to end."""
    sockets = _open_all(spec)
    try:
        listener = Listener(spec, sockets, grace_seconds=grace_seconds)
        await listener.start()
        try:
            yield listener
        finally:
            listener.stop_accepting()
            await listener.stopped()
    finally:
        for bound in sockets:
            bound.close()
    _log.info("listener.closed", listener=spec.name)


def _held_at_each(spec: ListenerSpec, sockets: Sequence[BoundSocket]) -> int:
    return max(1, (spec.connections or CONNECTIONS) // max(1, len(sockets)))


def _open_all(spec: ListenerSpec) -> list[BoundSocket]:
    sockets: list[BoundSocket] = []
    try:
        for address in spec.addresses:
            if spec.tls is not None and address.startswith("unix:"):
                raise SettingsError(f"listener {spec.name}: TLS is for TCP addresses, not {address}")
            sockets.append(open_socket(address, unix_mode=spec.unix_mode))
    except BaseException:
        for bound in sockets:
            bound.close()
        raise
    return sockets


async def _started(spec: ListenerSpec, server: h2corn.Server, serving: asyncio.Task[None]) -> None:
    # serve() publishes itself in its first step; before that nothing can be waited for.
    await asyncio.sleep(0)
    try:
        async with asyncio.timeout(START_SECONDS):
            await server.wait_started()
    except BaseException as error:
        serving.cancel()
        await asyncio.wait((serving,))
        if isinstance(error, ValueError | OSError | RuntimeError):
            raise SettingsError(f"listener {spec.name} does not start: {error}") from error
        raise


def _checked_config(spec: ListenerSpec, sockets: list[BoundSocket], grace_seconds: float) -> h2corn.Config:
    try:
        return server_config(spec, sockets, grace_seconds=grace_seconds)
    except ValueError as error:
        raise SettingsError(f"listener {spec.name} cannot be configured so: {error}") from error


def server_config(spec: ListenerSpec, sockets: list[BoundSocket], *, grace_seconds: float) -> h2corn.Config:
    """Every setting of the HTTP server that is not its default, with the reason where it is not plain."""
    tls = spec.tls
    return h2corn.Config(
        bind=tuple(f"fd://{bound.socket.fileno()}" for bound in sockets),
        certfile=tls.certificate if tls else None,
        keyfile=tls.key if tls else None,
        ca_certs=tls.client_ca if tls else None,
        cert_reqs=tls.client_certificate if tls else "none",
        grpc=True,
        http1=spec.http1,
        lifespan="off",
        loop_threads=1,
        runtime_threads=RUNTIME_THREADS,
        access_log=False,
        log_format="json",
        max_concurrent_streams=spec.streams,
        limit_concurrency=CONCURRENT_REQUESTS,
        limit_connections=spec.connections or CONNECTIONS,
        limit_request_fields=HEADER_FIELDS,
        h2_max_header_list_size=HEADER_BYTES,
        h2_max_header_block_size=HEADER_BYTES,
        h2_initial_stream_window_size=STREAM_WINDOW_BYTES,
        h2_initial_connection_window_size=CONNECTION_WINDOW_BYTES,
        websocket_max_message_size=WEBSOCKET_MESSAGE_BYTES,
        websocket_ping_interval=WEBSOCKET_PING_SECONDS,
        websocket_ping_timeout=WEBSOCKET_PING_SECONDS,
        timeout_handshake=HANDSHAKE_SECONDS,
        timeout_graceful_shutdown=grace_seconds,
        timeout_keep_alive=spec.idle_seconds,
        timeout_request_body_idle=spec.idle_seconds,
        # A watch may be quiet for days: that is no fault.
        h2_timeout_response_stall=_NEVER,
        # Counted from the first pending byte however fast the rest flows, so it would end busy
        # watches over slow links too. A reader that stands still meets DEAD_PEER_SECONDS instead.
        h2_timeout_write=_NEVER,
    )


@contextmanager
def _banner_withheld() -> Iterator[None]:
    """Keep the HTTP server's start-up lines out of our log.

    It writes them to the process's standard error, in JSON as configured, with no setting to
    turn them off. While it starts, standard error is an anonymous file; what others wrote there
    meanwhile is passed on afterwards.
    """
    if not _STANDARD_ERROR.set_aside():  # there is none, and nothing to keep clean
        yield
        return
    try:
        yield
    finally:
        _STANDARD_ERROR.give_back()


class _StandardError:
    """The process's standard error, which listeners that start at the same time set aside together.

    The first of them sets it aside and the last gives it back: each by itself would keep, in place of
    the real one, the file of another that started before it.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        """Of the count and both descriptors: listeners may start in several threads."""
        self._starting = 0
        self._real = self._held = -1

    def set_aside(self) -> bool:
        """Put a file in its place; False if the process has none."""
        with self._lock:
            if self._starting == 0:
                try:
                    self._real = os.dup(2)
                except OSError:
                    return False
                self._held = os.memfd_create("stderr")
                os.dup2(self._held, 2)
            self._starting += 1
            return True

    def give_back(self) -> None:
        """Once nobody starts any more, put it back and pass on what others wrote meanwhile."""
        with self._lock:
            self._starting -= 1
            if self._starting:
                return
            os.dup2(self._real, 2)
            os.lseek(self._held, 0, os.SEEK_SET)
            with os.fdopen(self._held, "rb") as lines, os.fdopen(self._real, "wb") as out:
                out.writelines(line for line in lines if not _is_banner(line))


_STANDARD_ERROR: Final = _StandardError()


def _is_banner(line: bytes) -> bool:
    try:
        record = json.loads(line)
    except ValueError:
        return False
    return isinstance(record, dict) and record.get("event") in ("starting", "listening", "http1_enabled")
