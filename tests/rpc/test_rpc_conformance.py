"""One suite of calls by the official client, against our layer and against a plain grpc.aio server.

Each test states what the client observes. It must hold for every target; where our layer means
to differ from grpc.aio, the difference stands in DIFFERENCES with its reason, and nowhere else.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable
from dataclasses import dataclass
from typing import Any

import grpc
import pytest
from support.rpc.probe import SERVICE, Value
from support.rpc.targets import Target

Code = grpc.StatusCode


@dataclass(frozen=True)
class Difference:
    ours: Any
    grpc_aio: Any
    reason: str


DIFFERENCES = {
    "crash text": Difference(
        ours="the server failed at this call; its log says why",
        grpc_aio="Unexpected <class 'ValueError'>: secret internals",
        reason="an exception's text may hold what the caller must not see",
    ),
    "unparsable request": Difference(
        ours=(Code.INVALID_ARGUMENT, "a message of the request cannot be parsed"),
        grpc_aio=None,
        reason="grpc.aio answers UNKNOWN with the parser's own exception text",
    ),
    "too large": Difference(
        ours="message of 4194310 bytes is larger than the limit of 4194304 bytes",
        grpc_aio="SERVER: Received message larger than max (4194310 vs. 4194304)",
        reason="the same two numbers in one style with our other limits",
    ),
    "own-groups": Difference(
        ours=Code.UNKNOWN, grpc_aio=Code.UNKNOWN, reason="several errors have no one code"
    ),
    "own-group": Difference(
        ours=Code.FAILED_PRECONDITION,
        grpc_aio=Code.UNKNOWN,
        reason="an error of ours has its own code, also out of a handler's task group",
    ),
    "own-task": Difference(
        ours=Code.UNKNOWN,
        grpc_aio=Code.DEADLINE_EXCEEDED,
        reason="grpc.aio takes it for the end of the call by its client, and says nothing",
    ),
    "metadata of an unsent answer": Difference(
        ours={"content-length"},
        grpc_aio=set(),
        reason="h2corn states the length of an empty body; Trailers-Only answers have one",
    ),
}


def expected(target: Target, name: str) -> Any:
    difference = DIFFERENCES[name]
    return difference.ours if target.ours else difference.grpc_aio


async def failure(call: Awaitable[Any]) -> grpc.aio.AioRpcError:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await call
    return caught.value


async def collect(call: Any) -> list[bytes]:
    return [message.value async for message in call]


async def stream_failure(call: Any) -> tuple[list[bytes], grpc.aio.AioRpcError]:
    received: list[bytes] = []

    async def read_all() -> None:
        async for message in call:
            received.append(message.value)  # noqa: PERF401  # kept when the stream fails

    return received, await failure(read_all())


def behave(name: str) -> tuple[tuple[str, str], ...]:
    return (("behave", name),)


async def messages(*values: bytes) -> AsyncIterator[Value]:
    for value in values:
        yield Value(value=value)


# Every kind of call


async def test_a_unary_call_returns_its_answer(target: Target) -> None:
    call = target.unary()(Value(value=b"hello"))
    assert (await call).value == b"hello"
    assert await call.code() is Code.OK
    assert await call.details() == ""


async def test_a_server_stream_arrives_whole_and_in_order(target: Target) -> None:
    call = target.down()(Value(value=b"200"))
    assert await collect(call) == [b"%d" % index for index in range(200)]
    assert await call.code() is Code.OK


async def test_an_empty_server_stream_is_fine(target: Target) -> None:
    assert await collect(target.down()(Value(value=b"0"))) == []


async def test_a_handler_may_write_through_its_context(target: Target) -> None:
    assert await collect(target.written()(Value())) == [b"0", b"1", b"2"]


async def test_an_abort_after_writes_keeps_what_was_written(target: Target) -> None:
    received, error = await stream_failure(target.written()(Value(), metadata=behave("abort")))
    assert received == [b"0", b"1", b"2"]
    assert (error.code(), error.details()) == (Code.DATA_LOSS, "written enough")


async def test_a_client_stream_is_read_to_its_end(target: Target) -> None:
    assert (await target.up()(messages(b"ab", b"", b"c" * 70_000))).value == b"70002"


async def test_a_handler_may_read_through_its_context(target: Target) -> None:
    assert (await target.up()(messages(b"ab", b"c"), metadata=behave("read"))).value == b"3"


async def test_an_empty_client_stream_is_fine(target: Target) -> None:
    assert (await target.up()(messages())).value == b"0"


async def test_a_handler_may_answer_before_the_client_has_said_everything(target: Target) -> None:
    call = target.up()(metadata=behave("early"))
    await call.write(Value(value=b"one"))
    assert (await call).value == b"early one"


async def test_both_directions_alternate_on_one_call(target: Target) -> None:
    call = target.both()()
    for index in range(5):
        await call.write(Value(value=b"%d" % index))
        assert (await call.read()).value == b"re:%d" % index
    await call.done_writing()
    assert (await call.read()).value == b"bye"
    assert await call.read() is grpc.aio.EOF
    assert await call.code() is Code.OK


async def test_many_calls_share_a_connection(target: Target) -> None:
    answers = await asyncio.gather(*(target.unary()(Value(value=b"%d" % index)) for index in range(100)))
    assert [answer.value for answer in answers] == [b"%d" % index for index in range(100)]


# Errors


async def test_an_abort_before_the_first_message_carries_code_text_and_metadata(target: Target) -> None:
    error = await failure(target.unary()(Value(), metadata=behave("abort")))
    assert (error.code(), error.details()) == (Code.NOT_FOUND, "no such thing: ü %")
    assert ("why", "because") in tuple(error.trailing_metadata())


async def test_an_abort_before_the_first_message_of_a_stream_is_the_same(target: Target) -> None:
    received, error = await stream_failure(target.down()(Value(), metadata=behave("abort")))
    assert (received, error.code(), error.details()) == ([], Code.NOT_FOUND, "no such thing: ü %")
    stray = {key for key, _ in error.trailing_metadata()} - {"why", "date"}
    if not target.kind.endswith("hypercorn"):
        assert stray == expected(target, "metadata of an unsent answer")


async def test_an_abort_after_messages_keeps_them(target: Target) -> None:
    received, error = await stream_failure(target.down()(Value(value=b"2"), metadata=behave("abort-after")))
    assert (received, error.code()) == ([b"0", b"1"], Code.NOT_FOUND)
    assert ("why", "because") in tuple(error.trailing_metadata())


async def test_an_abort_in_the_middle_of_a_conversation_ends_it(target: Target) -> None:
    call = target.both()()
    await call.write(Value(value=b"x"))
    assert (await call.read()).value == b"re:x"
    await call.write(Value(value=b"abort"))
    error = await failure(call.read())
    assert (error.code(), error.details()) == (Code.ABORTED, "you said so")


async def test_a_crash_is_unknown(target: Target) -> None:
    error = await failure(target.unary()(Value(), metadata=behave("crash")))
    assert (error.code(), error.details()) == (Code.UNKNOWN, expected(target, "crash text"))


async def test_a_crash_after_messages_is_unknown_and_keeps_them(target: Target) -> None:
    received, error = await stream_failure(target.down()(Value(value=b"2"), metadata=behave("crash-after")))
    assert (received, error.code()) == ([b"0", b"1"], Code.UNKNOWN)
    assert error.details() == expected(target, "crash text")


async def test_a_code_set_by_hand_discards_the_answer(target: Target) -> None:
    error = await failure(target.unary()(Value(), metadata=behave("code")))
    assert (error.code(), error.details()) == (Code.FAILED_PRECONDITION, "set by hand")


async def test_a_code_set_by_hand_ends_a_stream(target: Target) -> None:
    received, error = await stream_failure(target.down()(Value(value=b"1"), metadata=behave("code")))
    assert (received, error.code(), error.details()) == ([b"0"], Code.FAILED_PRECONDITION, "set by hand")


async def test_an_unknown_method_is_unimplemented(target: Target) -> None:
    for path in (f"/{SERVICE}/Nope", "/no.Such/Thing"):
        error = await failure(target.raw_unary(path)(b""))
        assert (error.code(), error.details()) == (Code.UNIMPLEMENTED, "Method not found!")


async def test_a_request_that_is_no_message_is_refused(target: Target) -> None:
    error = await failure(target.raw_unary(f"/{SERVICE}/Unary")(b"\xff\xff"))
    if target.ours:
        assert (error.code(), error.details()) == expected(target, "unparsable request")
    else:
        assert error.code() in (Code.UNKNOWN, Code.INTERNAL)


# Metadata


async def test_metadata_travels_both_ways_binary_included(target: Target) -> None:
    sent = (
        ("behave", "metadata"),
        ("x-text", "a value"),
        ("x-twice", "1"),
        ("x-twice", "2"),
        ("x-data-bin", bytes(range(256))),
        ("x-empty-bin", b""),
    )
    call = target.unary()(Value(), metadata=sent)
    initial = tuple(await call.initial_metadata())
    trailing = tuple(await call.trailing_metadata())
    assert {("x-initial", "early"), ("x-initial-bin", b"\x00\xff")} <= set(initial)
    echoed = [pair for pair in trailing if pair[0].startswith("x-")]
    assert echoed == [*sent[1:], ("x-trailing-bin", b"\xfe\x01")]


async def test_initial_metadata_goes_out_before_the_first_message(target: Target) -> None:
    call = target.down()(Value(), metadata=behave("initial"))
    async with asyncio.timeout(60):
        assert ("x-initial", "early") in tuple(await call.initial_metadata())
    target.journal.release.set()
    assert await collect(call) == [b"0", b"1", b"2"]


async def test_the_peer_is_named_by_its_transport(target: Target) -> None:
    call = target.unary()(Value(), metadata=behave("peer"))
    await call
    assert dict(await call.trailing_metadata())["x-peer"] == ("unix" if target.kind == "unix" else "ipv4")


# Messages


@pytest.mark.parametrize("size", [0, 1, 16_379, 65_531, 1_000_000, 4_194_290])
async def test_messages_of_any_permitted_size_pass(target: Target, size: int) -> None:
    assert len((await target.unary()(Value(value=bytes(size)))).value) == size


async def test_a_message_over_the_limit_is_refused_with_both_numbers(target: Target) -> None:
    if target.kind.endswith("hypercorn"):
        pytest.skip("Hypercorn drops the connection when an answer comes before the request's end")
    error = await failure(target.unary()(Value(value=bytes(4_194_305))))
    assert (error.code(), error.details()) == (Code.RESOURCE_EXHAUSTED, expected(target, "too large"))
    assert (await target.unary()(Value(value=b"next"))).value == b"next"


@pytest.mark.parametrize("compression", [grpc.Compression.Gzip, grpc.Compression.Deflate])
async def test_compressed_requests_are_read(target: Target, compression: grpc.Compression) -> None:
    text = b"again and " * 5_000
    assert (await target.unary()(Value(value=text), compression=compression)).value == text
    assert (await target.up()(messages(text, text), compression=compression)).value == b"100000"


async def test_a_compressed_message_is_measured_after_decompression(target: Target) -> None:
    bomb = Value(value=bytes(5_000_000))
    error = await failure(target.unary()(bomb, compression=grpc.Compression.Gzip))
    assert error.code() is Code.RESOURCE_EXHAUSTED


async def test_an_answer_is_compressed_when_the_handler_asks(target: Target) -> None:
    text = b"again and " * 5_000
    assert (await target.unary()(Value(value=text), metadata=behave("gzip"))).value == text


# Deadlines and cancellation


async def test_a_handler_knows_its_deadline(target: Target) -> None:
    call = target.unary()(Value(), timeout=1000, metadata=behave("remaining"))
    await call
    remaining = str(dict(await call.trailing_metadata())["x-remaining"])
    # On its way a deadline is rounded up: a moment over 1,000 seconds is sent as 1,010.
    assert 900 < int(remaining) <= 1010, "but for what it took to get there"


async def test_without_a_deadline_there_is_none(target: Target) -> None:
    call = target.unary()(Value(), metadata=behave("remaining"))
    await call
    remaining = dict(await call.trailing_metadata())["x-remaining"]
    assert remaining == "none" if target.ours else True


DEADLINES_SECONDS = (0.3, 3.0, 30.0)
"""The first is long enough unless the machine is busy, on which a call may end before its handler begins."""


@pytest.mark.parametrize("kind", ["unary", "down", "both"])
async def test_a_deadline_cancels_the_handler_and_its_cleanup_runs(target: Target, kind: str) -> None:
    hold = behave("hold")
    calls: dict[str, Any] = {
        "unary": lambda seconds: target.unary()(Value(), timeout=seconds, metadata=hold),
        "down": lambda seconds: collect(target.down()(Value(), timeout=seconds, metadata=hold)),
        "both": lambda seconds: collect(target.both()(messages(b"x"), timeout=seconds, metadata=hold)),
    }
    for seconds in DEADLINES_SECONDS:
        error = await failure(calls[kind](seconds))
        assert error.code() is Code.DEADLINE_EXCEEDED
        if "holding" in target.journal.entries:
            break
    await target.journal.wait_for("cleaned up")
    await target.journal.wait_for("done callback")
    assert "cancelled" in target.journal.entries


async def test_a_deadline_ends_a_stream_after_messages(target: Target) -> None:
    for seconds in DEADLINES_SECONDS:
        received, error = await stream_failure(
            target.down()(Value(value=b"2"), timeout=seconds, metadata=behave("hold-after"))
        )
        assert error.code() is Code.DEADLINE_EXCEEDED
        if len(received) == 2:
            break
    assert received == [b"0", b"1"]
    await target.journal.wait_for("cleaned up")


@pytest.mark.parametrize("kind", ["unary", "down"])
async def test_a_cancelled_call_cancels_its_handler(target: Target, kind: str) -> None:
    call = (target.unary() if kind == "unary" else target.down())(Value(), metadata=behave("hold"))
    if kind == "unary":
        await asyncio.sleep(0)
    await target.journal.wait_for("holding")
    call.cancel()
    await target.journal.wait_for("cleaned up")
    await target.journal.wait_for("done callback")
    assert "cancelled" in target.journal.entries
    assert (await target.unary()(Value(value=b"next"))).value == b"next"


async def test_a_cancelled_conversation_cancels_its_handler(target: Target) -> None:
    call = target.both()(metadata=behave("hold"))
    await target.journal.wait_for("holding")
    call.cancel()
    await target.journal.wait_for("cleaned up")


async def test_a_closed_channel_cancels_its_handlers(target: Target) -> None:
    channel = target.open_channel()
    call = target.down(channel)(Value(), metadata=behave("hold"))
    await target.journal.wait_for("holding")
    await channel.close()
    assert call.cancelled()
    await target.journal.wait_for("cleaned up")


async def test_a_handler_may_time_out_inside_and_go_on(target: Target) -> None:
    answer = await target.unary()(Value(value=b"x"), metadata=behave("own-timeout"))
    assert answer.value == b"x"
    assert target.journal.entries == ["timed out, cancelled: False"] * 2
    received = await collect(target.down()(Value(value=b"1"), metadata=behave("own-timeout")))
    assert received == [b"0"]


@pytest.mark.parametrize("behaviour", ["own-group", "own-groups", "own-task"])
async def test_a_handler_whose_own_task_fails_or_is_cancelled_ends_with_a_status(
    target: Target, behaviour: str
) -> None:
    # Where the deadline is what the caller is told of, it is waited for.
    ends_by_deadline = expected(target, behaviour) is Code.DEADLINE_EXCEEDED
    error = await failure(
        target.unary()(Value(), timeout=0.2 if ends_by_deadline else 60, metadata=behave(behaviour))
    )
    assert error.code() is expected(target, behaviour)
    assert (await target.unary()(Value(value=b"next"))).value == b"next"
