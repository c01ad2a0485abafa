"""The servicer that conformance is tried on, and its service descriptor.

What a call does is chosen by its `behave` metadata, so one service with a method of each
kind covers every behaviour. What the server side saw is written into a journal.
"""

from __future__ import annotations

import asyncio
import functools
from collections.abc import AsyncIterator, Mapping
from typing import Any

import grpc
from google.protobuf import descriptor_pb2, descriptor_pool, wrappers_pb2
from google.protobuf.descriptor import ServiceDescriptor
from google.protobuf.message import DecodeError

from fleetplane.kernel.errors import FailedPrecondition
from fleetplane.rpc import Framed, ImmediateAnswer

SERVICE = "probe.Probe"
METHODS = ("Unary", "Down", "Written", "Up", "Both")
Value = wrappers_pb2.BytesValue


@functools.cache  # a pool takes a file once
def service_descriptor() -> ServiceDescriptor:
    file = descriptor_pb2.FileDescriptorProto(
        name="probe.proto", package="probe", syntax="proto3", dependency=["google/protobuf/wrappers.proto"]
    )
    service = file.service.add(name="Probe")
    for name in METHODS:
        service.method.add(
            name=name,
            input_type=".google.protobuf.BytesValue",
            output_type=".google.protobuf.BytesValue",
            client_streaming=name in ("Up", "Both"),
            server_streaming=name in ("Down", "Written", "Both"),
        )
    pool = descriptor_pool.Default()
    pool.AddSerializedFile(file.SerializeToString())
    return pool.FindServiceByName(SERVICE)


class Journal:
    """What happened on the server's side, awaitable."""

    def __init__(self) -> None:
        self.entries: list[str] = []
        self._changed = asyncio.Event()
        self.release = asyncio.Event()
        """Lets handlers that hold on go on."""

    def note(self, entry: str) -> None:
        self.entries.append(entry)
        self._changed.set()

    async def wait_for(self, entry: str, count: int = 1, seconds: float = 60.0) -> None:
        async with asyncio.timeout(seconds):
            while self.entries.count(entry) < count:
                self._changed.clear()
                await self._changed.wait()


class Probe:
    def __init__(self) -> None:
        self.journal = Journal()

    async def Unary(self, request: Value, context: Any) -> Any:
        behave = _behave(context)
        if behave == "none":
            return None
        await self._before(behave, context)
        return Value(value=request.value)

    async def Up(self, requests: AsyncIterator[Value], context: Any) -> Any:
        behave = _behave(context)
        total = 0
        if behave == "read":
            while (message := await context.read()) is not grpc.aio.EOF:
                total += len(message.value)
        elif behave == "early":
            first = await anext(aiter(requests))
            return Value(value=b"early " + first.value)
        else:
            await self._before(behave, context)
            async for message in requests:
                total += len(message.value)
        return Value(value=str(total).encode())

    async def Written(self, request: Value, context: Any) -> None:
        """The other style of streaming: a coroutine that writes through its context."""
        for index in range(3):
            await context.write(Value(value=b"%d" % index))
        if _behave(context) == "abort":
            await context.abort(grpc.StatusCode.DATA_LOSS, "written enough")

    async def Down(self, request: Value, context: Any) -> AsyncIterator[Value]:
        behave = _behave(context)
        if not behave.endswith("-after"):
            await self._before(behave, context)
        count = int(request.value or b"3")
        for index in range(count):
            yield Value(value=b"%d" % index)
        if behave.endswith("-after"):
            await self._before(behave.removesuffix("-after"), context)
        if behave == "flood":
            try:
                while True:
                    yield Value(value=bytes(64 * 1024))
                    self.journal.note("flooded")
            finally:
                self.journal.note("flood ended")

    async def Both(self, requests: AsyncIterator[Value], context: Any) -> AsyncIterator[Value]:
        behave = _behave(context)
        await self._before(behave, context)
        async for message in requests:
            if message.value == b"abort":
                await context.abort(grpc.StatusCode.ABORTED, "you said so")
            yield Value(value=b"re:" + message.value)
        yield Value(value=b"bye")

    async def _before(self, behave: str, context: Any) -> None:
        action = getattr(self, "_do_" + behave.replace("-", "_"), None)
        if action is not None:
            await action(context)

    async def _do_abort(self, context: Any) -> None:
        await context.abort(grpc.StatusCode.NOT_FOUND, "no such thing: ü %", (("why", "because"),))

    async def _do_crash(self, context: Any) -> None:
        raise ValueError("secret internals")

    async def _do_own_timeout(self, context: Any) -> None:
        for _ in range(2):
            try:
                async with asyncio.timeout(0.01):
                    await self.journal.release.wait()
            except TimeoutError:
                await asyncio.sleep(0)
                self.journal.note(f"timed out, cancelled: {context.cancelled()}")

    async def _do_own_group(self, context: Any) -> None:
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._fail())
            await self.journal.release.wait()

    async def _do_own_groups(self, context: Any) -> None:
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._fail())
            tasks.create_task(self._do_own_group(context))

    async def _fail(self) -> None:
        raise FailedPrecondition("a child failed")

    async def _do_own_task(self, context: Any) -> None:
        task = asyncio.ensure_future(self.journal.release.wait())
        asyncio.get_running_loop().call_soon(task.cancel)
        await task

    async def _do_code(self, context: Any) -> None:
        context.set_code(grpc.StatusCode.FAILED_PRECONDITION)
        context.set_details("set by hand")

    async def _do_metadata(self, context: Any) -> None:
        pairs = [pair for pair in context.invocation_metadata() if pair[0].startswith("x-")]
        await context.send_initial_metadata((("x-initial", "early"), ("x-initial-bin", b"\x00\xff")))
        context.set_trailing_metadata((*pairs, ("x-trailing-bin", b"\xfe\x01")))

    async def _do_initial(self, context: Any) -> None:
        await context.send_initial_metadata((("x-initial", "early"),))
        await self.journal.release.wait()

    async def _do_gzip(self, context: Any) -> None:
        context.set_compression(grpc.Compression.Gzip)

    async def _do_remaining(self, context: Any) -> None:
        remaining = context.time_remaining()
        context.set_trailing_metadata((("x-remaining", "none" if remaining is None else f"{remaining:.0f}"),))

    async def _do_peer(self, context: Any) -> None:
        context.set_trailing_metadata((("x-peer", context.peer().partition(":")[0]),))

    async def _do_hold(self, context: Any) -> None:
        context.add_done_callback(lambda _: self.journal.note("done callback"))
        self.journal.note("holding")
        try:
            await self.journal.release.wait()
        except asyncio.CancelledError:
            self.journal.note("cancelled")
            raise
        finally:
            # Cleanup that itself waits must be left in peace.
            await asyncio.sleep(0.02)
            self.journal.note("cleaned up")


class ImmediateProbe(Probe):
    """The same, with a short way for unary calls that need not wait: the echo, and the crash."""

    def __init__(self) -> None:
        super().__init__()
        self.at_once = 0
        """Calls that the short way had an answer for."""
        self.immediate: Mapping[str, ImmediateAnswer] = {"Unary": self._at_once}

    def _at_once(self, request: bytes, fields: Mapping[bytes, bytes]) -> Framed | None:
        behave = fields.get(b"behave", b"echo")
        if behave not in (b"echo", b"crash"):
            return None
        try:
            value = Value.FromString(request)
        except DecodeError:
            return None
        self.at_once += 1
        if behave == b"crash":
            raise ValueError("secret internals")
        return Framed(Value(value=value.value).SerializeToString())


def _behave(context: Any) -> str:
    return str(dict(context.invocation_metadata()).get("behave", "echo"))
