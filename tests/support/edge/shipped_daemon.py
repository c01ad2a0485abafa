"""A stand-in for the edge daemons already in the field, down to their bytes and their habits.

It speaks HTTP/2 by hand (`h2_grpc`) and protobuf by hand (`shipped_wire`); it runs `cmd.run` for real.

    daemon = await ShippedDaemon.enroll("127.0.0.1:50056", enrollment_token)
        AttestNode and ChallengeNode as `aegis edge enroll` sends them. GrpcFailed if refused.
    daemon = ShippedDaemon(address, node_id=..., key=..., token=...)
        One that is enrolled already.
    async with daemon.running(): ...
        The loop of `aegis edge daemon`: connect, serve, wait 1, 2, 5, 15, 60 s (times `wait_scale`),
        read key and token again, connect anew. A stream that got its headers counts as a success
        however it ended, and the waits begin anew.
    await daemon.connect_once()
        One stream to its end; raises GrpcFailed if it was refused before headers.
    await daemon.rotate_key() / await daemon.refresh_token()
        `aegis edge keys rotate` and `token refresh`: RotateEdgeKey with an empty token, on a connection of
        its own. What runs goes on with the former key until it connects anew.

To look at: `streams` (stream ids, one per hello), `headers` (how many of them were answered), `refusals`
(codes and words), `commands` (everything received, in order), `sent` (names of events, in order), `raw`
(their bytes), `waits` (seconds before each new try, not scaled), `broken` (what could not be decoded).
To set: `contexts` (name to allowed commands, None for all), `heartbeat_seconds`, `tags` (sent along, as a
daemon that lies would), `timestamp_ms` (the clock).

Habits that a server has to live with, all kept here:
- no metadata but `user-agent: tonic/0.14.5`; the token is in the envelopes, and empty on RotateEdgeKey
- after Hello nothing more is sent or read until response headers have come
- the first heartbeat comes one interval later, without its second field; none after Drain
- one command at a time: nothing is read while one runs
- each Cancel is answered `cancelled` once it is read, even after the command's own result, even for
  commands it never heard of; the program is not stopped
- output by lines of UTF-8; a byte that is none ends that output's capture; each of stdout and stderr counts
  its chunks from 0; the result repeats all of it
- an InvokeTool without a good inner envelope is `envelope_invalid`; only `cmd.run` works
- PushConfig is ignored, but one that is no Struct ends the stream
- Shutdown ends the stream, and it comes back a second later, no longer drained
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import time
import uuid
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from typing import Any

import h2.events
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from support.edge import shipped_wire as wire
from support.shared.h2_grpc import OK, UNAVAILABLE, GrpcFailed, H2Channel, H2Stream

SERVICE = "/aegis.cluster.v1.NodeClusterService/"
USER_AGENT = "tonic/0.14.5"
BACKOFF_SECONDS = (1, 2, 5, 15, 60)
OUTBOUND = 64
"""Events that wait to be written; whoever has one more waits too."""
DEFAULT_TIMEOUT_SECONDS = 600
CONTEXTS: Mapping[str, Sequence[str] | None] = {
    "zaru-free": None,
    "zaru-pro": None,
    "zaru-business": None,
    "zaru-enterprise": None,
}


class _Stream(H2Stream):
    def __init__(self, channel: H2Channel, number: int) -> None:
        super().__init__(channel, number)
        self.answered = asyncio.Event()

    def finish(self, lost: str | None = None) -> None:
        super().finish(lost)
        self.answered.set()


class _Channel(H2Channel):
    """Cleartext HTTP/2 with the header fields of that daemon's library, and no others."""

    def open(self, path: str) -> H2Stream:
        number = self._h2.get_next_available_stream_id()
        stream = self._streams[number] = _Stream(self, number)
        self._h2.send_headers(
            number,
            [
                (":method", "POST"),
                (":scheme", "http"),
                (":authority", self._authority),
                (":path", path),
                ("te", "trailers"),
                ("content-type", "application/grpc"),
                ("user-agent", USER_AGENT),
            ],
        )
        self._flush()
        return stream

    def _handle(self, event: h2.events.Event) -> None:
        super()._handle(event)
        if isinstance(event, h2.events.ResponseReceived):
            stream = self._streams.get(event.stream_id or -1)
            if isinstance(stream, _Stream):
                stream.answered.set()


@contextlib.asynccontextmanager
async def _connected(address: str) -> AsyncIterator[_Channel]:
    host, _, port = address.rpartition(":")
    try:
        reader, writer = await asyncio.open_connection(host, int(port))
    except OSError as error:
        raise GrpcFailed(UNAVAILABLE, f"no connection to {address}: {error}") from error
    channel = _Channel(address, reader, writer)
    reading = asyncio.ensure_future(channel.read_forever())
    try:
        yield channel
    finally:
        reading.cancel()
        writer.close()  # before anything is waited for: that may be cancelled too
        await asyncio.wait([reading])
        with contextlib.suppress(OSError):
            await writer.wait_closed()


class ShippedDaemon:
    def __init__(
        self,
        address: str,
        *,
        node_id: str,
        key: Ed25519PrivateKey,
        token: str,
        heartbeat_seconds: float = 30.0,
        wait_scale: float = 1.0,
        contexts: Mapping[str, Sequence[str] | None] = CONTEXTS,
        labels: Mapping[str, str] | None = None,
        tags: Sequence[str] = (),
    ) -> None:
        self.address = address
        self.node_id = node_id
        self.key, self.token = key, token
        self.heartbeat_seconds = heartbeat_seconds
        self.wait_scale = wait_scale
        self.contexts = contexts
        self.labels, self.tags = labels, tags
        self.timestamp_ms: Callable[[], int] = lambda: time.time_ns() // 1_000_000
        self.streams: list[str] = []
        self.headers = 0
        self.refusals: list[tuple[int, str]] = []
        self.commands: list[wire.Command | None] = []
        self.sent: list[str] = []
        self.raw: list[bytes] = []
        self.waits: list[float] = []
        self.broken: list[str] = []
        self._sealer: wire.Sealer | None = None
        self._drained = False

    def __repr__(self) -> str:
        return f"<ShippedDaemon {self.node_id} streams={len(self.streams)}>"

    # Joining, and keys.

    @classmethod
    async def enroll(
        cls,
        address: str,
        enrollment_token: str,
        *,
        node_id: str = "",
        key: Ed25519PrivateKey | None = None,
        **options: Any,
    ) -> ShippedDaemon:
        name, held = node_id or str(uuid.uuid4()), key or Ed25519PrivateKey.generate()
        async with _connected(address) as channel:
            attested = dict(
                wire.fields(
                    await channel.unary(
                        f"{SERVICE}AttestNode", wire.attest(name, held.public_key().public_bytes_raw())
                    )
                )
            )
            nonce, challenge_id = attested[1], attested[2]
            assert isinstance(nonce, bytes)
            assert isinstance(challenge_id, bytes)
            asked = wire.challenge(challenge_id.decode(), name, held.sign(nonce), enrollment_token)
            earned = dict(wire.fields(await channel.unary(f"{SERVICE}ChallengeNode", asked)))
        return cls(address, node_id=name, key=held, token=_text(earned[1]), **options)

    async def rotate_key(self) -> None:
        await self._rotate(Ed25519PrivateKey.generate())

    async def refresh_token(self) -> None:
        await self._rotate(self.key)

    async def _rotate(self, new: Ed25519PrivateKey) -> None:
        asked = wire.rotation(self.node_id, self.key, new, secrets.token_bytes(32))
        async with _connected(self.address) as channel:
            answer = dict(wire.fields(await channel.unary(f"{SERVICE}RotateEdgeKey", asked)))
        # On disk; a stream that is open keeps what it was opened with.
        self.key, self.token = new, _text(answer[1])

    # Staying connected.

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator[ShippedDaemon]:
        task = asyncio.ensure_future(self._stay_connected())
        try:
            yield self
        finally:
            task.cancel()
            await asyncio.wait([task])
            if not task.cancelled() and (error := task.exception()) is not None:
                raise error

    async def _stay_connected(self) -> None:
        attempt = 0
        while True:
            try:
                await self.connect_once()
                attempt = 0
            except GrpcFailed as error:
                self.refusals.append((error.code, error.message))
            self.waits.append(BACKOFF_SECONDS[min(attempt, len(BACKOFF_SECONDS) - 1)])
            attempt += 1
            await asyncio.sleep(self.waits[-1] * self.wait_scale)

    async def connect_once(self) -> None:
        """Raises GrpcFailed if there are no headers to be had."""
        async with _connected(self.address) as channel:
            stream = channel.open(f"{SERVICE}ConnectEdge")
            assert isinstance(stream, _Stream)
            self._drained = False
            self._sealer = wire.Sealer(
                key=self.key, token=self.token, node_id=self.node_id, stream_id=str(uuid.uuid4())
            )
            self.streams.append(self._sealer.stream_id)
            outbound: asyncio.Queue[bytes] = asyncio.Queue(OUTBOUND)
            said = wire.capabilities(labels=self.labels, tags=self.tags)
            await self._enqueue(outbound, "hello", self._sealer.hello(said, self.timestamp_ms()))
            writing = asyncio.ensure_future(_write(stream, outbound))
            beating: asyncio.Future[None] | None = None
            try:
                await stream.answered.wait()
                if stream.ended.is_set() and stream.fields.get("grpc-status", str(OK)) != str(OK):
                    stream.check()
                if ":status" not in stream.fields:
                    stream.check()
                self.headers += 1
                beating = asyncio.ensure_future(self._beat(outbound))
                await self._listen(stream, outbound)
            finally:
                for task in filter(None, (writing, beating)):
                    task.cancel()
                await asyncio.wait([task for task in (writing, beating) if task is not None])
                stream.cancel()

    async def _beat(self, outbound: asyncio.Queue[bytes]) -> None:
        assert self._sealer is not None
        while True:
            await asyncio.sleep(self.heartbeat_seconds)
            if self._drained:
                return
            await self._enqueue(outbound, "heartbeat", self._sealer.heartbeat(self.timestamp_ms()))

    async def _listen(self, stream: _Stream, outbound: asyncio.Queue[bytes]) -> None:
        try:
            async for raw in stream:
                command = wire.command(raw)
                self.commands.append(command)
                if isinstance(command, wire.Shutdown):
                    self._drained = True
                    return
                await self._obey(command, outbound)
        except ValueError as error:
            self.broken.append(str(error))
        except GrpcFailed:
            pass  # after headers, any end is an end

    async def _obey(self, command: wire.Command | None, outbound: asyncio.Queue[bytes]) -> None:
        match command:
            case wire.Invoke() if self._drained:
                await self._answer(
                    outbound, command.command_id, wire.error("draining", "edge daemon is draining")
                )
            case wire.Invoke():
                await self._answer(outbound, command.command_id, await self._invoke(command, outbound))
            case wire.Cancel():
                words = wire.error("cancelled", "cancelled by operator")
                await self._answer(outbound, command.command_id, words)
            case wire.Drain():
                self._drained = True

    async def _answer(self, outbound: asyncio.Queue[bytes], command_id: str, result: bytes) -> None:
        assert self._sealer is not None
        event = self._sealer.result(command_id, result, self.timestamp_ms())
        await self._enqueue(outbound, "result", event)

    async def _enqueue(self, outbound: asyncio.Queue[bytes], name: str, event: bytes) -> None:
        await outbound.put(event)
        self.sent.append(name)
        self.raw.append(event)

    # Tools.

    async def _invoke(self, call: wire.Invoke, outbound: asyncio.Queue[bytes]) -> bytes:
        if words := _seal_complaint(call):
            return wire.error("envelope_invalid", words)
        if call.context not in self.contexts:
            words = f"SecurityContext '{call.context}' not present in merged config"
            return wire.error("security_context_not_found", words)
        allowed, command = self.contexts[call.context], call.args.get("command")
        first = command.split()[0] if isinstance(command, str) and command.split() else ""
        if allowed is not None and first not in allowed:
            return wire.error("policy_violation", f'ToolNotAllowed {{ tool_name: "{call.tool}" }}')
        if call.tool == "cmd.run":
            return await self._run(call, outbound)
        if call.tool.startswith(("fs.", "web.", "aegis.schema.")):
            return wire.error("tool_not_locally_supported", f"builtin '{call.tool}' not yet implemented")
        return wire.error("tool_not_found", f"tool '{call.tool}' is not a recognised local builtin")

    async def _run(self, call: wire.Invoke, outbound: asyncio.Queue[bytes]) -> bytes:
        command, given = call.args.get("command"), call.args.get("args")
        if not isinstance(command, str) or not command:
            return wire.error("envelope_invalid", "cmd.run: missing required arg 'command'")
        words = [one for one in given if isinstance(one, str)] if isinstance(given, list) else []
        seconds = min(call.deadline_seconds, DEFAULT_TIMEOUT_SECONDS)
        seconds = seconds if seconds > 0 else DEFAULT_TIMEOUT_SECONDS
        try:
            child = await asyncio.create_subprocess_exec(
                command,
                *words,
                cwd=str(call.args.get("cwd") or "/"),
                stdin=asyncio.subprocess.DEVNULL,
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.PIPE,
            )
        except OSError as error:
            return wire.error("internal", f"spawn '{command}' failed: {error}")
        assert child.stdout is not None
        assert child.stderr is not None
        outputs = asyncio.gather(
            self._lines(call.command_id, child.stdout, outbound, stderr=False),
            self._lines(call.command_id, child.stderr, outbound, stderr=True),
        )
        try:
            async with asyncio.timeout(seconds):
                code = await child.wait()
        except TimeoutError:
            with contextlib.suppress(ProcessLookupError):
                child.kill()
            await child.wait()
            outputs.cancel()
            child._transport.close()  # type: ignore[attr-defined]
            return wire.error("timeout", f"cmd.run '{command}' exceeded {seconds}s deadline")
        except asyncio.CancelledError:
            with contextlib.suppress(ProcessLookupError):
                child.kill()  # the whole stand-in ends, and leaves nothing behind
            await child.wait()
            outputs.cancel()
            child._transport.close()  # type: ignore[attr-defined]
            raise
        stdout, stderr = await outputs
        return wire.result(
            ok=code == 0,
            exit_code=code if code >= 0 else -1,
            stdout=stdout,
            stderr=stderr,
            error_kind="" if code == 0 else "nonzero_exit",
        )

    async def _lines(
        self, command_id: str, reader: asyncio.StreamReader, outbound: asyncio.Queue[bytes], *, stderr: bool
    ) -> bytes:
        assert self._sealer is not None
        held, sequence = b"", 0
        while line := await reader.readline():
            text = line.removesuffix(b"\n").removesuffix(b"\r")
            try:
                text.decode()
            except UnicodeDecodeError:
                while await reader.read(65536):
                    pass  # so that the program is not held up; nothing of it is captured
                break
            chunk = text + b"\n"
            held += chunk
            event = self._sealer.progress(command_id, chunk, sequence, stderr, self.timestamp_ms())
            await self._enqueue(outbound, "progress", event)
            sequence += 1
        return held


async def _write(stream: H2Stream, outbound: asyncio.Queue[bytes]) -> None:
    while True:
        await stream.send(await outbound.get())


def _seal_complaint(call: wire.Invoke) -> str:
    if call.seal is None:
        return "InvokeToolCommand missing inner SealEnvelope"
    token, tenant = call.seal.get(1, b"").decode(), call.seal.get(2, b"").decode()
    if not token.strip():
        return "inner SealEnvelope missing user_security_token"
    if len(token.split(".")) != 3:
        return "inner user_security_token is not a JWT (expected 3 dot segments)"
    if not tenant.strip():
        return "inner SealEnvelope missing tenant_id"
    if call.seal.get(3, b"").decode() != call.context:
        return "inner SealEnvelope security_context_name does not match outer"
    return ""


def _text(value: int | bytes) -> str:
    assert isinstance(value, bytes)
    return value.decode()
