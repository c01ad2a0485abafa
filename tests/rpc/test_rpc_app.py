"""What the application decides before, during and after a call, driven without a network."""

from __future__ import annotations

import asyncio
import gzip
from collections.abc import AsyncIterator
from typing import Any

import grpc
import prometheus_client
import pytest
import structlog.testing
from google.rpc import code_pb2, error_details_pb2, status_pb2  # type: ignore[import-untyped]
from grpc_status import rpc_status
from support.rpc.asgi_driver import GRPC_HEADERS, Answer, drive, scope
from support.rpc.probe import SERVICE, Probe, Value, service_descriptor
from support.rpc.targets import ACCESS, LOCAL, USE, make_app, rows

from fleetplane.kernel.access import Permission, Principal
from fleetplane.kernel.clock import SystemClock
from fleetplane.kernel.errors import InvalidArgument, SettingsError, StorageFull, Unauthenticated
from fleetplane.rpc import (
    Authentication,
    Bound,
    CallStatistics,
    Framed,
    GrpcApp,
    MethodRow,
    MethodTable,
    Rate,
    RpcLimits,
)
from fleetplane.rpc.serving.framing import prefix
from fleetplane.rpc.serving.status import decode_binary

UNARY = f"/{SERVICE}/Unary"
DOWN = f"/{SERVICE}/Down"
HELLO = prefix(Value(value=b"hello").SerializeToString())


class Custom(Probe):
    """A probe whose unary and streaming answers are given."""

    def __init__(self, unary: Any = None, down: Any = None) -> None:
        super().__init__()
        if unary is not None:
            self.Unary = unary  # type: ignore[method-assign]
        if down is not None:
            self.Down = down  # type: ignore[method-assign]


def rich(answer: Answer) -> status_pb2.Status:
    return status_pb2.Status.FromString(decode_binary(answer.trailers[b"grpc-status-details-bin"]))


def detail(answer: Answer, kind: Any) -> Any:
    found = kind()
    assert any(item.Unpack(found) for item in rich(answer).details)
    return found


# Errors


async def test_an_error_of_the_tree_becomes_code_reason_field_and_delay() -> None:
    async def unary(request: Value, context: Any) -> Value:
        raise InvalidArgument("too long", field="gpu.name", retry_after_seconds=1.5, details={"limit": "63"})

    answer = await drive(make_app(Custom(unary)), scope(UNARY), HELLO)
    assert answer.trailers_only
    assert (answer.code, answer.message) == (3, "too long")
    info = detail(answer, error_details_pb2.ErrorInfo)
    assert (info.reason, info.domain, dict(info.metadata)) == (
        "INVALID_ARGUMENT",
        "fleetplane",
        {"limit": "63"},
    )
    violation = detail(answer, error_details_pb2.BadRequest).field_violations[0]
    assert (violation.field, violation.description) == ("gpu.name", "too long")
    assert detail(answer, error_details_pb2.RetryInfo).retry_delay.ToMilliseconds() == 1500


async def test_an_error_of_the_tree_carries_its_advice() -> None:
    async def unary(request: Value, context: Any) -> Value:
        raise StorageFull("the disk is full")

    answer = await drive(make_app(Custom(unary)), scope(UNARY), HELLO)
    assert "free space" in detail(answer, error_details_pb2.LocalizedMessage).message


async def test_details_that_would_not_fit_into_trailers_are_cut_to_the_reason() -> None:
    async def unary(request: Value, context: Any) -> Value:
        raise InvalidArgument("x" * 10_000, details={"dump": "y" * 10_000})

    answer = await drive(make_app(Custom(unary)), scope(UNARY), HELLO)
    assert detail(answer, error_details_pb2.ErrorInfo).reason == "INVALID_ARGUMENT"
    assert sum(len(name) + len(value) for name, value in answer.trailers.items()) < 8192


async def test_a_status_made_by_grpcio_status_passes() -> None:
    async def unary(request: Value, context: Any) -> Value:
        await context.abort_with_status(
            rpc_status.to_status(status_pb2.Status(code=code_pb2.ALREADY_EXISTS, message="taken"))
        )
        raise AssertionError

    answer = await drive(make_app(Custom(unary)), scope(UNARY), HELLO)
    assert (answer.code, answer.message, rich(answer).message) == (6, "taken", "taken")


async def test_a_crash_tells_the_log_everything_and_the_caller_nothing() -> None:
    with structlog.testing.capture_logs() as logs:
        answer = await drive(make_app(Probe()), scope(UNARY, [*GRPC_HEADERS, (b"behave", b"crash")]), HELLO)
    assert answer.code == 2
    assert "secret" not in str(answer.events)
    failed = [entry for entry in logs if entry["event"] == "rpc.failed"]
    assert len(failed) == 1
    assert failed[0]["log_level"] == "error"
    assert isinstance(failed[0]["exc_info"], ValueError)


async def test_each_failed_call_leaves_one_event_by_its_kind() -> None:
    app = make_app(Probe())
    with structlog.testing.capture_logs() as logs:
        await drive(app, scope(UNARY, [*GRPC_HEADERS, (b"behave", b"abort")]), HELLO)
        await drive(app, scope(UNARY, [*GRPC_HEADERS, (b"grpc-timeout", b"0n")]), HELLO)
        await drive(app, scope(UNARY), HELLO)
        await drive(app, scope(UNARY), b"", stays=False, ends=False)
    seen = [(entry["code"], entry["log_level"]) for entry in logs if entry["event"] == "rpc.failed"]
    assert seen == [("NOT_FOUND", "info"), ("DEADLINE_EXCEEDED", "warning"), ("CANCELLED", "debug")]


async def test_a_request_that_is_malformed_is_no_error_of_the_server() -> None:
    app = make_app(Probe())
    with structlog.testing.capture_logs() as logs:
        for body in (prefix(b"\xff\xff"), b"\x02" + HELLO[1:], HELLO[:-1]):
            await drive(app, scope(UNARY), body)
    seen = [(entry["code"], entry["log_level"]) for entry in logs if entry["event"] == "rpc.failed"]
    assert seen == [("INVALID_ARGUMENT", "info"), ("INTERNAL", "info"), ("INTERNAL", "info")]


async def test_metadata_a_servicer_may_not_send_fails_the_call_and_not_the_server() -> None:
    async def unary(request: Value, context: Any) -> Value:
        context.set_trailing_metadata((("Bad Key", "x"),))
        return Value()

    answer = await drive(make_app(Custom(unary)), scope(UNARY), HELLO)
    assert answer.code == 2


# Requests that are not what they should be


@pytest.mark.parametrize(
    ("chunks", "code"),
    [
        ((HELLO[:3],), 13),
        ((HELLO[:-1],), 13),
        ((b"\x02" + HELLO[1:],), 13),
        ((b"\x01" + HELLO[1:],), 13),
        ((HELLO, HELLO), 12),
        ((HELLO + HELLO,), 12),
        ((), 12),
        ((b"",), 12),
        ((b"\x00\xff\xff\xff\xff",), 8),
        ((HELLO[:2], HELLO[2:9], HELLO[9:]), 0),
        ((b"\x00\x00\x00\x00\x00",), 0),
    ],
)
async def test_a_unary_request_is_exactly_one_whole_message(chunks: tuple[bytes, ...], code: int) -> None:
    answer = await drive(make_app(Probe()), scope(UNARY), *chunks)
    assert answer.code == code


async def test_a_stream_that_ends_inside_a_message_is_an_internal_error() -> None:
    answer = await drive(make_app(Probe()), scope(f"/{SERVICE}/Up"), HELLO, HELLO[:4])
    assert answer.code == 13


async def test_an_unknown_compression_is_unimplemented_and_says_what_is_known() -> None:
    answer = await drive(make_app(Probe()), scope(UNARY, [*GRPC_HEADERS, (b"grpc-encoding", b"zstd")]), HELLO)
    assert answer.code == 12
    assert answer.headers[b"grpc-accept-encoding"] == b"identity, gzip, deflate"


@pytest.mark.parametrize(
    ("changes", "headers", "status"),
    [
        ({"method": "GET"}, GRPC_HEADERS, 405),
        ({}, [(b"content-type", b"application/json")], 415),
        ({}, [(b"content-type", b"application/grpc-web")], 415),
        ({}, [], 415),
        ({"http_version": "1.1", "extensions": {}}, GRPC_HEADERS[:1], 505),
        ({"path": "/"}, [], 415),
    ],
)
async def test_what_is_no_grpc_is_told_so_in_plain_http(
    changes: dict[str, Any], headers: list[tuple[bytes, bytes]], status: int
) -> None:
    statistics = CallStatistics()
    answer = await drive(make_app(Probe(), statistics=statistics), scope(UNARY, headers) | changes, HELLO)
    assert answer.status == status
    assert answer.headers[b"content-type"].startswith(b"text/plain")
    assert statistics.refused_requests == 1


async def test_a_proxy_that_drops_te_is_named() -> None:
    answer = await drive(make_app(Probe()), scope(UNARY, GRPC_HEADERS[:1]), HELLO)
    assert answer.code == 13
    assert "te: trailers" in answer.message


@pytest.mark.parametrize(
    "content_type", [b"application/grpc+proto", b"application/grpc;x=y", b"Application/GRPC"]
)
async def test_variants_of_the_content_type_are_fine(content_type: bytes) -> None:
    answer = await drive(
        make_app(Probe()), scope(UNARY, [(b"content-type", content_type), (b"te", b"trailers")]), HELLO
    )
    assert answer.code == 0


@pytest.mark.parametrize(
    "timeout", [b"", b"S", b"5", b"-5S", b"5X", b"123456789S", b"\xff\xff", b"1.5S", b" 5S"]
)
async def test_a_malformed_timeout_is_refused(timeout: bytes) -> None:
    answer = await drive(make_app(Probe()), scope(UNARY, [*GRPC_HEADERS, (b"grpc-timeout", timeout)]), HELLO)
    assert answer.code == 13


@pytest.mark.parametrize(
    ("headers", "bound"),
    [
        ([(b"x-%d" % index, b"v") for index in range(200)], Bound.METADATA_FIELDS),
        ([(b"x-big", b"v" * 20_000)], Bound.METADATA_BYTES),
    ],
)
async def test_metadata_is_bounded_in_number_and_size(
    headers: list[tuple[bytes, bytes]], bound: Bound
) -> None:
    statistics = CallStatistics()
    answer = await drive(
        make_app(Probe(), statistics=statistics), scope(UNARY, GRPC_HEADERS + headers), HELLO
    )
    assert answer.code == 8
    assert statistics.bounds[bound] == 1


async def test_a_request_that_never_completes_is_given_up() -> None:
    limits = RpcLimits(request_seconds=0.1, watch_after_seconds=0.02)
    answer = await drive(make_app(Probe(), limits=limits), scope(UNARY), HELLO[:4], ends=False)
    assert answer.code == 4
    assert "in time" in answer.message


async def test_a_bomb_is_stopped_at_the_limit() -> None:
    statistics = CallStatistics()
    bomb = prefix(gzip.compress(bytes(100_000_000)), compressed=True)
    headers = [*GRPC_HEADERS, (b"grpc-encoding", b"gzip")]
    answer = await drive(make_app(Probe(), statistics=statistics), scope(UNARY, headers), bomb)
    assert answer.code == 8
    assert "4194304" in answer.message
    assert statistics.bounds[Bound.MESSAGE_BYTES] == 1


# Admission


def _row(**changes: Any) -> list[MethodRow]:
    return rows(**changes)


async def test_a_full_method_turns_callers_away_and_says_when_to_return() -> None:
    probe, statistics = Probe(), CallStatistics()
    app = make_app(probe, _row(concurrency=1), statistics=statistics)
    held = asyncio.create_task(drive(app, scope(UNARY, [*GRPC_HEADERS, (b"behave", b"hold")]), HELLO))
    await probe.journal.wait_for("holding")
    refused = await drive(app, scope(UNARY), HELLO)
    probe.journal.release.set()
    assert (refused.code, (await held).code) == (8, 0)
    assert detail(refused, error_details_pb2.RetryInfo).retry_delay.ToMilliseconds() == 250
    assert statistics.bounds[Bound.METHOD_CONCURRENCY] == 1
    assert (await drive(app, scope(UNARY), HELLO)).code == 0


async def test_a_full_server_turns_callers_away() -> None:
    probe, statistics = Probe(), CallStatistics()
    app = make_app(probe, limits=RpcLimits(active_calls=1), statistics=statistics)
    held = asyncio.create_task(drive(app, scope(UNARY, [*GRPC_HEADERS, (b"behave", b"hold")]), HELLO))
    await probe.journal.wait_for("holding")
    assert (await drive(app, scope(DOWN), HELLO)).code == 8
    probe.journal.release.set()
    assert (await held).code == 0
    assert statistics.bounds[Bound.ACTIVE_CALLS] == 1


async def test_a_caller_over_its_rate_is_told_how_long_to_wait() -> None:
    statistics = CallStatistics()
    app = make_app(Probe(), _row(rate=Rate(per_second=0.001, burst=2)), statistics=statistics)
    codes = [(await drive(app, scope(UNARY), HELLO)).code for _ in range(3)]
    assert codes == [0, 0, 8]
    refused = await drive(app, scope(UNARY), HELLO)
    assert detail(refused, error_details_pb2.RetryInfo).retry_delay.ToSeconds() >= 900
    assert statistics.bounds[Bound.RATE] == 2


async def test_anonymous_callers_are_limited_by_address() -> None:
    app = make_app(
        Probe(), _row(authentication=Authentication.ANONYMOUS, rate=Rate(per_second=0.001, burst=1))
    )
    here, there = ("10.0.0.1", 1), ("10.0.0.2", 1)
    codes = [(await drive(app, scope(UNARY, client=client), HELLO)).code for client in (here, here, there)]
    assert codes == [0, 8, 0]


async def test_without_identity_or_permission_the_handler_never_runs() -> None:
    stranger = Principal(name="stranger", roles=frozenset())

    def refuse(_: object) -> Principal:
        raise Unauthenticated("show a token")

    for authenticate, code in ((refuse, 16), (lambda _: stranger, 7), (lambda _: LOCAL, 0)):
        app = GrpcApp(
            listener="probe",
            table=MethodTable(rows()),
            access=ACCESS,
            authenticators={Authentication.LOCAL: authenticate},
            clock=SystemClock(),
            statistics=CallStatistics(),
        )
        app.add_service(service_descriptor(), Probe())
        app.seal()
        assert (await drive(app, scope(UNARY), HELLO)).code == code


async def test_a_principal_admitted_once_opens_nothing_for_the_next() -> None:
    callers = iter((LOCAL, Principal(name="stranger", roles=frozenset()), LOCAL))
    app = GrpcApp(
        listener="probe",
        table=MethodTable(rows()),
        access=ACCESS,
        authenticators={Authentication.LOCAL: lambda _: next(callers)},
        clock=SystemClock(),
        statistics=CallStatistics(),
    )
    app.add_service(service_descriptor(), Probe())
    app.seal()
    assert [(await drive(app, scope(UNARY), HELLO)).code for _ in range(3)] == [0, 7, 0]


# Before serving


async def test_a_method_without_a_row_and_a_row_without_a_method_both_stop_the_start() -> None:
    stray = MethodRow(
        path="/probe.Probe/Gone", listener="probe", authentication=Authentication.LOCAL, permission=USE
    )
    with pytest.raises(SettingsError) as caught:
        make_app(Probe(), [*rows()[1:], stray])
    assert "method /probe.Probe/Unary on listener probe has no row" in str(caught.value)
    assert "row /probe.Probe/Gone on listener probe has no method" in str(caught.value)


async def test_a_row_whose_authentication_nobody_does_stops_the_start() -> None:
    with pytest.raises(SettingsError, match="no authenticator for token"):
        make_app(Probe(), rows(authentication=Authentication.TOKEN))


async def test_a_permission_that_no_role_grants_stops_the_start() -> None:
    with pytest.raises(SettingsError, match=r"no role grants probe\.dream"):
        make_app(
            Probe(),
            [
                MethodRow(
                    path=row.path,
                    listener=row.listener,
                    authentication=row.authentication,
                    permission=Permission("probe.dream"),
                )
                for row in rows()
            ],
        )


async def test_a_servicer_that_lacks_a_method_stops_the_start() -> None:
    with pytest.raises(SettingsError, match="has no method Unary"):
        make_app(object())


async def test_nothing_is_served_before_the_seal() -> None:
    answer = await drive(make_app(Probe(), seal=False), scope(UNARY), HELLO)
    assert answer.code == 12


# Answers that exist already


async def test_framed_and_plain_bytes_go_out_as_they_are() -> None:
    payload = Value(value=b"made before").SerializeToString()
    framed = Framed(payload)

    async def unary(request: Value, context: Any) -> Any:
        return framed if request.value == b"framed" else payload

    async def down(request: Value, context: Any) -> AsyncIterator[Any]:
        yield Framed.join([framed, framed])
        yield payload

    statistics = CallStatistics()
    app = make_app(Custom(unary, down), statistics=statistics)
    for wanted in (b"framed", b"bytes"):
        request = prefix(Value(value=wanted).SerializeToString())
        assert (await drive(app, scope(UNARY), request)).body == prefix(payload)
    assert (await drive(app, scope(DOWN), HELLO)).body == prefix(payload) * 3
    assert statistics.method("probe", DOWN).sent == 3


async def test_an_answer_is_compressed_only_for_clients_that_can_read_it() -> None:
    for accepted, flag in ((b"identity, gzip", 1), (b"identity", 0)):
        headers = [*GRPC_HEADERS, (b"behave", b"gzip"), (b"grpc-accept-encoding", accepted)]
        answer = await drive(make_app(Probe()), scope(UNARY, headers), HELLO)
        assert answer.body[0] == flag
        assert (b"grpc-encoding" in answer.headers) == bool(flag)


# The end


async def test_draining_refuses_new_calls_and_lets_running_ones_finish() -> None:
    probe = Probe()
    app = make_app(probe)
    held = asyncio.create_task(drive(app, scope(UNARY, [*GRPC_HEADERS, (b"behave", b"hold")]), HELLO))
    await probe.journal.wait_for("holding")
    draining = asyncio.create_task(app.drain(60.0))
    await asyncio.sleep(0)
    assert (await drive(app, scope(UNARY), HELLO)).code == 14
    probe.journal.release.set()
    await draining
    assert (await held).code == 0


async def test_draining_ends_what_does_not_finish_with_unavailable() -> None:
    probe, statistics = Probe(), CallStatistics()
    app = make_app(probe, statistics=statistics)
    held = [
        asyncio.create_task(drive(app, scope(path, [*GRPC_HEADERS, (b"behave", b"hold")]), HELLO))
        for path in (UNARY, DOWN)
    ]
    await probe.journal.wait_for("holding", 2)
    await app.drain(0.0)
    assert [(await task).code for task in held] == [14, 14]
    assert probe.journal.entries.count("cleaned up") == 2
    assert statistics.bounds[Bound.DRAIN_SECONDS] == 2


async def test_a_revoked_identity_loses_its_open_streams_and_nobody_elses() -> None:
    others = Principal(name="other", roles=LOCAL.roles)
    callers = iter((LOCAL, LOCAL, others))
    app = GrpcApp(
        listener="probe",
        table=MethodTable(rows()),
        access=ACCESS,
        authenticators={Authentication.LOCAL: lambda _: next(callers)},
        clock=SystemClock(),
        statistics=CallStatistics(),
    )
    probe = Probe()
    app.add_service(service_descriptor(), probe)
    app.seal()
    held = [
        asyncio.create_task(drive(app, scope(path, [*GRPC_HEADERS, (b"behave", b"hold")]), HELLO))
        for path in (UNARY, DOWN, UNARY)
    ]
    await probe.journal.wait_for("holding", 3)
    assert app.end_calls_of("local") == 2
    await probe.journal.wait_for("cleaned up", 2)
    probe.journal.release.set()
    assert [(await task).code for task in held] == [16, 16, 0]


async def test_a_client_that_leaves_is_noticed_on_a_server_that_only_says_so() -> None:
    probe, statistics = Probe(), CallStatistics()
    app = make_app(probe, statistics=statistics, watch_departures=True)
    answer = await drive(app, scope(UNARY, [*GRPC_HEADERS, (b"behave", b"hold")]), HELLO, stays=False)
    assert answer.events == []
    assert probe.journal.entries == ["holding", "cancelled", "cleaned up", "done callback"]
    assert statistics.method("probe", UNARY).finished == {1: 1}


async def test_numbers_come_out_as_metrics() -> None:
    statistics = CallStatistics()
    app = make_app(Probe(), statistics=statistics)
    await drive(app, scope(UNARY), HELLO)
    await drive(app, scope(UNARY, [*GRPC_HEADERS, (b"behave", b"abort")]), HELLO)
    await drive(app, scope("/stranger.Made/Up"), HELLO)
    registry = prometheus_client.CollectorRegistry()
    registry.register(statistics.collector())
    text = prometheus_client.generate_latest(registry).decode()
    label = f'listener="probe",method="{UNARY}"'
    assert f"fleetplane_rpc_started_total{{{label}}} 2.0" in text
    assert f'fleetplane_rpc_finished_total{{code="NOT_FOUND",{label}}} 1.0' in text
    assert f'fleetplane_rpc_seconds_bucket{{le="+Inf",{label}}} 2.0' in text
    assert f"fleetplane_rpc_active{{{label}}} 0.0" in text
    assert "fleetplane_rpc_unknown_methods_total 1.0" in text
    assert 'fleetplane_rpc_bound_hits_total{bound="rate"} 0.0' in text
    assert "stranger" not in text


async def test_the_context_is_a_grpc_context_and_knows_its_caller() -> None:
    seen: list[Any] = []

    async def unary(request: Value, context: Any) -> Value:
        seen.extend((isinstance(context, grpc.aio.ServicerContext), context.principal, context.listener))
        seen.extend((context.connection.peer, context.connection.transport, context.peer_identities()))
        return Value()

    await drive(make_app(Custom(unary)), scope(UNARY), HELLO)
    assert seen == [True, LOCAL, "probe", "ipv4:127.0.0.1:4711", "tcp", None]
