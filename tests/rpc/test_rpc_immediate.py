"""The short way of unary calls: the same to every observer as the ordinary way, or not taken."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from itertools import pairwise
from typing import Any

import pytest
import structlog.testing
from hypothesis import example, given, settings
from hypothesis import strategies as st
from support.rpc.asgi_driver import GRPC_HEADERS, Answer, drive, scope
from support.rpc.probe import SERVICE, ImmediateProbe, Probe, Value, service_descriptor
from support.rpc.targets import ACCESS, LOCAL, make_app, rows

from fleetplane.kernel.access import Principal
from fleetplane.kernel.clock import SystemClock
from fleetplane.kernel.errors import SettingsError
from fleetplane.rpc import (
    Authentication,
    Authenticator,
    Bound,
    CallStatistics,
    FixedPrincipal,
    Framed,
    GrpcApp,
    MethodTable,
    Rate,
    RpcLimits,
)
from fleetplane.rpc.serving.framing import compress, prefix
from fleetplane.rpc.statistics import MethodStatistics

UNARY = f"/{SERVICE}/Unary"
MESSAGE = Value(value=b"hello").SerializeToString()
HELLO = prefix(MESSAGE)
LIMITS = RpcLimits(max_request_bytes=64, metadata_fields=8, metadata_bytes=256)


def counted(statistics: CallStatistics) -> dict[str, Any]:
    """Everything that is counted about a method but the time it took."""
    found = statistics.method("probe", UNARY)
    kept = {name: getattr(found, name) for name in MethodStatistics.__slots__ if name != "seconds"}
    return {**kept, "buckets": sum(kept["buckets"]), "bounds": dict(statistics.bounds)}


# The same to every observer


_HEADERS = st.lists(
    st.sampled_from(
        [
            (b"content-type", b"application/grpc"),
            (b"content-type", b"application/grpc+proto"),
            (b"content-type", b"text/html"),
            (b"te", b"trailers"),
            (b"te", b"gzip"),
            (b"grpc-encoding", b"identity"),
            (b"grpc-encoding", b"gzip"),
            (b"grpc-encoding", b"br"),
            (b"grpc-timeout", b"20S"),
            (b"grpc-timeout", b"0S"),
            (b"grpc-timeout", b"soon"),
            (b"behave", b"abort"),
            (b"behave", b"crash"),
            (b"behave", b"metadata"),
            (b"x-note", b"n" * 99),
        ]
    ),
    max_size=7,
)
_MESSAGES = st.one_of(
    st.sampled_from(
        [HELLO, prefix(b""), prefix(b"\xff"), HELLO * 2, b"", b"\x00", b"\x02" + HELLO[1:], HELLO[:-1]]
    ),
    st.just(prefix(compress(MESSAGE, b"gzip"), compressed=True)),
    st.integers(50, 80).map(lambda size: prefix(Value(value=bytes(size)).SerializeToString())),
)


_NOTE = (b"x-note", b"n" * 100)
_CHUNKS = st.tuples(_MESSAGES, st.lists(st.integers(0, 90), max_size=3)).map(lambda drawn: _cut(*drawn))


def _cut(body: bytes, cuts: list[int]) -> list[bytes]:
    edges = sorted({0, len(body), *(cut for cut in cuts if cut < len(body))})
    return [body[start:end] for start, end in pairwise(edges)]


@settings(max_examples=400, deadline=None)
@example(added=[(b"x-note", b"")] * 7, plain=True, chunks=[HELLO], changes={})
@example(added=[_NOTE] * 3, plain=True, chunks=[HELLO], changes={})
@example(added=[(b"grpc-encoding", b"br")], plain=True, chunks=[HELLO], changes={})
@example(added=[], plain=True, chunks=[HELLO, HELLO], changes={})
@example(added=[], plain=True, chunks=[HELLO, b"", HELLO], changes={})
@given(
    added=_HEADERS,
    plain=st.booleans(),
    chunks=_CHUNKS,
    changes=st.sampled_from([{}, {"method": "GET"}, {"extensions": {}}, {"http_version": "1.1"}]),
)
def test_whatever_is_asked_the_answer_and_the_numbers_are_those_of_the_ordinary_way(
    added: list[tuple[bytes, bytes]], plain: bool, chunks: list[bytes], changes: dict[str, Any]
) -> None:
    headers = [*(GRPC_HEADERS if plain else ()), *added]

    async def observe(probe: Probe) -> tuple[Any, ...]:
        statistics = CallStatistics()
        app = make_app(probe, limits=LIMITS, statistics=statistics)
        with structlog.testing.capture_logs() as logs:
            answer = await drive(app, scope(UNARY, headers, **changes), *chunks)
        for entry in logs:
            entry.pop("seconds", None)
            entry["exc_info"] = repr(entry.get("exc_info"))
        return answer.events, counted(statistics), logs

    assert asyncio.run(observe(ImmediateProbe())) == asyncio.run(observe(Probe()))


async def test_a_plain_call_goes_the_short_way() -> None:
    probe, statistics = ImmediateProbe(), CallStatistics()
    answer = await drive(make_app(probe, statistics=statistics), scope(UNARY), HELLO)
    assert (answer.code, answer.body, probe.at_once) == (0, HELLO, 1)
    assert statistics.method("probe", UNARY).finished == {0: 1}


async def test_a_servicer_that_cannot_answer_at_once_is_asked_the_ordinary_way() -> None:
    probe = ImmediateProbe()
    answer = await drive(make_app(probe), scope(UNARY, [*GRPC_HEADERS, (b"behave", b"peer")]), HELLO)
    assert (answer.body, answer.trailers[b"x-peer"], probe.at_once) == (HELLO, b"ipv4", 0)


async def test_a_crash_on_the_short_way_is_reported_once_and_not_tried_again() -> None:
    def crash(_request: bytes, _fields: Mapping[bytes, bytes]) -> None:
        raise ValueError("short of breath")

    probe, statistics = ImmediateProbe(), CallStatistics()
    probe.immediate = {"Unary": crash}
    app = make_app(probe, statistics=statistics)
    with structlog.testing.capture_logs() as logs:
        answer = await drive(app, scope(UNARY), HELLO)
    assert (answer.code, answer.message) == (2, "the server failed at this call; its log says why")
    assert [(entry["event"], str(entry["exc_info"])) for entry in logs] == [("rpc.failed", "short of breath")]
    assert statistics.method("probe", UNARY).finished == {2: 1}


# Not taken


def made(probe: Probe, authenticate: Authenticator) -> GrpcApp:
    app = GrpcApp(
        listener="probe",
        table=MethodTable(rows()),
        access=ACCESS,
        authenticators={Authentication.LOCAL: authenticate},
        clock=SystemClock(),
        statistics=CallStatistics(),
    )
    app.add_service(service_descriptor(), probe)
    app.seal()
    return app


async def test_callers_that_must_be_told_apart_are_each_asked_who_they_are() -> None:
    probe = ImmediateProbe()
    callers = iter((LOCAL, Principal(name="other", roles=frozenset())))
    app = made(probe, lambda _: next(callers))
    assert [(await drive(app, scope(UNARY), HELLO)).code for _ in range(2)] == [0, 7]
    assert probe.at_once == 0


async def test_a_principal_without_the_permission_is_denied() -> None:
    probe = ImmediateProbe()
    app = made(probe, FixedPrincipal(Principal(name="other", roles=frozenset())))
    assert (await drive(app, scope(UNARY), HELLO)).code == 7
    assert probe.at_once == 0


@pytest.mark.parametrize(
    "limited", [{"rate": Rate(per_second=0.001, burst=1)}, {"concurrency": 1}], ids=["rate", "concurrency"]
)
async def test_a_method_with_a_limit_of_its_own_keeps_it(limited: dict[str, Any]) -> None:
    probe = ImmediateProbe()
    app = make_app(probe, rows(**limited))
    codes = [(await drive(app, scope(UNARY), HELLO)).code for _ in range(2)]
    assert codes == ([0, 8] if "rate" in limited else [0, 0])
    assert probe.at_once == 0


async def test_a_full_server_turns_callers_away_as_ever() -> None:
    probe, statistics = ImmediateProbe(), CallStatistics()
    app = make_app(probe, limits=RpcLimits(active_calls=1), statistics=statistics)
    held = asyncio.create_task(drive(app, scope(UNARY, [*GRPC_HEADERS, (b"behave", b"hold")]), HELLO))
    await probe.journal.wait_for("holding")
    assert (await drive(app, scope(UNARY), HELLO)).code == 8
    assert statistics.bounds[Bound.ACTIVE_CALLS] == 1
    probe.journal.release.set()
    assert (await held).code == 0


async def test_a_draining_server_takes_no_calls_the_short_way_either() -> None:
    probe = ImmediateProbe()
    app = make_app(probe)
    await app.drain(0.0)
    assert (await drive(app, scope(UNARY), HELLO)).code == 14
    assert probe.at_once == 0


def test_a_short_way_is_for_unary_methods_that_exist() -> None:
    for name in ("Down", "Up", "Both", "Nothing"):
        probe = ImmediateProbe()
        probe.immediate = {name: lambda _request, _fields: None}
        with pytest.raises(SettingsError, match=name):
            make_app(probe)


# Waiting in the middle


class Transport:
    """An ASGI server that makes the application wait, or fails it, at one step of its choice."""

    def __init__(self, at: int, then: Callable[[], Awaitable[object]], last: bytes = b"") -> None:
        self.answer = Answer()
        self._at = at
        self._then = then
        self._step = -1
        self._events = [
            {"type": "http.request", "body": HELLO, "more_body": True},
            {"type": "http.request", "body": last, "more_body": False},
        ]

    async def _pause(self) -> None:
        self._step += 1
        if self._step == self._at:
            await self._then()

    async def receive(self) -> dict[str, Any]:
        await self._pause()
        return self._events.pop(0)

    async def send(self, event: dict[str, Any]) -> None:
        await self._pause()
        self.answer.events.append(event)


STEPS = pytest.mark.parametrize("at", range(5), ids=["first", "last", "headers", "body", "trailers"])


@STEPS
async def test_a_call_that_has_to_wait_goes_on_from_where_it_was(at: int) -> None:
    probe, statistics, gate = ImmediateProbe(), CallStatistics(), asyncio.Event()
    app = make_app(probe, statistics=statistics)
    transport = Transport(at, gate.wait)
    call = asyncio.create_task(app(scope(UNARY), transport.receive, transport.send))
    await _until(lambda: statistics.method("probe", UNARY).active == 1)
    # It is a call like any other by now: a stopping server waits for it.
    draining = asyncio.create_task(app.drain(60.0))
    await asyncio.sleep(0)
    assert not draining.done()
    gate.set()
    await asyncio.gather(call, draining)
    ordinary = await drive(make_app(Probe()), scope(UNARY), HELLO)
    assert transport.answer.events == ordinary.events
    assert probe.at_once == (at > 1)
    counts = statistics.method("probe", UNARY)
    assert (counts.started, counts.received, counts.sent, counts.finished, counts.active) == (
        1,
        1,
        1,
        {0: 1},
        0,
    )


class StandingClock(SystemClock):
    """No time passes on the way to the step at which a call waits, however long the machine takes."""

    def monotonic(self) -> float:
        return 1000.0


@STEPS
async def test_the_deadline_ends_a_call_that_waits_too_long(at: int) -> None:
    finished = []
    for probe in (ImmediateProbe(), Probe()):
        statistics = CallStatistics()
        transport = Transport(at, asyncio.Event().wait)
        app = make_app(probe, statistics=statistics, clock=StandingClock())
        await app(scope(UNARY, [*GRPC_HEADERS, (b"grpc-timeout", b"20m")]), transport.receive, transport.send)
        finished.append((transport.answer.events, counted(statistics)))
    assert finished[0] == finished[1]


@STEPS
@pytest.mark.parametrize("at_once", [True, False])
async def test_a_client_that_leaves_in_the_middle_is_counted_and_told_of_as_ever(
    at: int, at_once: bool
) -> None:
    async def leave() -> None:
        if not at_once:
            await asyncio.sleep(0)
        raise OSError("gone")

    finished = []
    for probe in (ImmediateProbe(), Probe()):
        statistics = CallStatistics()
        transport = Transport(at, leave)
        app = make_app(probe, statistics=statistics)
        with structlog.testing.capture_logs() as logs:
            returned = await asyncio.gather(
                app(scope(UNARY), transport.receive, transport.send), return_exceptions=True
            )
        told = [(entry["event"], entry["code"], entry["message"]) for entry in logs]
        finished.append((transport.answer.events, repr(returned), counted(statistics), told))
    assert finished[0] == finished[1]


async def test_a_client_that_leaves_before_its_request_is_complete_is_not_answered() -> None:
    for probe in (ImmediateProbe(), Probe()):
        statistics = CallStatistics()
        app = make_app(probe, statistics=statistics)
        answer = await drive(app, scope(UNARY), HELLO, ends=False, stays=False)
        assert answer.events == []
        assert statistics.method("probe", UNARY).finished == {1: 1}


async def test_what_comes_with_the_end_of_the_request_belongs_to_it() -> None:
    for probe in (ImmediateProbe(), Probe()):
        transport = Transport(-1, asyncio.Event().wait, last=HELLO)
        await make_app(probe)(scope(UNARY), transport.receive, transport.send)
        assert (transport.answer.code, transport.answer.body) == (12, b"")


async def test_an_answer_is_not_asked_for_again_when_its_sending_has_to_wait() -> None:
    answers = iter([Framed(b"first"), Framed(b"second")])
    probe, gate = ImmediateProbe(), asyncio.Event()
    probe.immediate = {"Unary": lambda _request, _fields: next(answers)}
    transport = Transport(2, gate.wait)
    call = asyncio.create_task(make_app(probe)(scope(UNARY), transport.receive, transport.send))
    await asyncio.sleep(0)
    gate.set()
    await call
    assert transport.answer.body == prefix(b"first")


async def _until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(60):
        while not condition():  # plain integers announce nothing
            await asyncio.sleep(0)
