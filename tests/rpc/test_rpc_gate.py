"""The gate before calls: nothing is answered past it, by whichever way, and it costs nobody else anything."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from grpc_health.v1 import health_pb2
from support.rpc.asgi_driver import GRPC_HEADERS, drive, scope
from support.rpc.probe import METHODS, SERVICE, ImmediateProbe, Value
from support.rpc.targets import make_app, rows

from fleetplane.kernel.errors import SettingsError, Unavailable
from fleetplane.rpc import MethodRow, Needs, RpcLimits, service_rows
from fleetplane.rpc.methods import Authentication
from fleetplane.rpc.serving.framing import prefix

UNARY = f"/{SERVICE}/Unary"
HELLO = prefix(Value(value=b"hello").SerializeToString())
UNAVAILABLE = 14


class Gate:
    """Opened and closed by a test; keeps who has asked."""

    def __init__(self, *, is_open: bool = False) -> None:
        self.open = is_open
        self.asked: list[Needs] = []
        self.let_pass = asyncio.Event()
        self.refusal: Exception | None = None
        self.entered: list[Needs] = []

    def is_open(self, needs: Needs) -> bool:
        return self.open or needs is Needs.NOTHING

    async def passed(self, needs: Needs) -> None:
        self.asked.append(needs)
        await self.let_pass.wait()
        if self.refusal is not None:
            raise self.refusal

    @contextmanager
    def inside(self, needs: Needs) -> Iterator[None]:
        self.entered.append(needs)
        yield


def table(needs: Needs, authentication: Authentication = Authentication.LOCAL) -> list[MethodRow]:
    return rows(needs=needs, authentication=authentication)


async def test_a_call_waits_at_the_gate_also_where_its_answer_lies_ready() -> None:
    gate, probe = Gate(), ImmediateProbe()
    app = make_app(probe, table(Needs.STORE), gate=gate)
    call = asyncio.create_task(drive(app, scope(UNARY), HELLO))
    while not gate.asked:
        await asyncio.sleep(0)
    assert (gate.asked, probe.at_once, call.done()) == ([Needs.STORE], 0, False)
    gate.let_pass.set()
    answer = await call
    assert (answer.code, answer.body, probe.at_once) == (0, HELLO, 0)
    gate.open = True
    assert (await drive(app, scope(UNARY), HELLO)).body == HELLO
    assert (probe.at_once, len(gate.asked)) == (1, 1), "an open gate is no detour"


async def test_what_the_gate_refuses_is_told_to_the_caller() -> None:
    gate = Gate()
    gate.refusal = Unavailable("this server stands by; one is active")
    gate.let_pass.set()
    app = make_app(ImmediateProbe(), table(Needs.ACTIVE), gate=gate)
    for method in METHODS:
        answer = await drive(app, scope(f"/{SERVICE}/{method}"), HELLO)
        assert (answer.code, answer.message) == (UNAVAILABLE, "this server stands by; one is active")
    assert gate.asked == [Needs.ACTIVE] * len(METHODS)


async def test_what_is_about_the_process_itself_is_answered_whatever_the_gate_says() -> None:
    gate = Gate()
    app = make_app(ImmediateProbe(), table(Needs.NOTHING), gate=gate)
    assert (await drive(app, scope(UNARY), HELLO)).code == 0
    assert gate.asked == []


async def test_callers_are_recognised_behind_the_gate() -> None:
    gate = Gate()
    app = make_app(ImmediateProbe(), table(Needs.STORE, authentication=Authentication.CERTIFICATE), gate=gate)
    call = asyncio.create_task(drive(app, scope(UNARY), HELLO))
    while not gate.asked:
        await asyncio.sleep(0)
    gate.let_pass.set()
    assert (await call).code == 16, "who was let in by what was true before is not let in"


async def test_a_caller_does_not_wait_at_the_gate_beyond_its_deadline_nor_beyond_the_room_there_is() -> None:
    gate = Gate()
    app = make_app(ImmediateProbe(), table(Needs.STORE), gate=gate, limits=RpcLimits(active_calls=1))
    first = asyncio.create_task(drive(app, scope(UNARY), HELLO))
    while not gate.asked:
        await asyncio.sleep(0)
    refused = await drive(app, scope(UNARY), HELLO)
    assert (refused.code, len(gate.asked)) == (8, 1)
    gate.let_pass.set()
    assert (await first).code == 0
    gate.let_pass.clear()
    late = await drive(app, scope(UNARY, [*GRPC_HEADERS, (b"grpc-timeout", b"1m")]), HELLO)
    assert late.code == 4


async def test_what_waits_at_the_gate_is_ended_with_the_server() -> None:
    gate = Gate()
    app = make_app(ImmediateProbe(), table(Needs.STORE), gate=gate)
    call = asyncio.create_task(drive(app, scope(UNARY), HELLO))
    while not gate.asked:
        await asyncio.sleep(0)
    await app.drain(0.0)
    assert (await call).code == UNAVAILABLE


def test_a_read_that_a_service_does_not_have_stops_the_server() -> None:
    service: Any = health_pb2.DESCRIPTOR.services_by_name["Health"]
    with pytest.raises(SettingsError, match="has no method Chek"):
        list(
            service_rows(
                service, None, listener="l", authentication=Authentication.LOCAL, reads=("Chek", "Check")
            )
        )


def test_a_listener_is_open_everywhere_if_one_of_its_methods_is_answered_everywhere() -> None:
    for needs, anywhere in ((Needs.STORE, True), (Needs.WRITES, True), (Needs.ACTIVE, False)):
        app = make_app(ImmediateProbe(), table(needs))
        assert app.is_served_anywhere is anywhere
        assert (SERVICE in app.services_anywhere()) is anywhere
    assert not make_app(ImmediateProbe(), table(Needs.NOTHING)).is_served_anywhere


async def test_a_call_that_may_write_is_answered_where_it_may() -> None:
    for needs in (Needs.STORE, Needs.WRITES):
        gate = Gate()
        gate.let_pass.set()
        assert (
            await drive(make_app(ImmediateProbe(), table(needs), gate=gate), scope(UNARY), HELLO)
        ).code == 0
        assert gate.entered == [needs]
