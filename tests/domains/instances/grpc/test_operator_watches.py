"""What operators are told as it happens, over TLS, with the official client."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any, cast

import grpc
import pytest
from google.protobuf.empty_pb2 import Empty
from support.instances.operator_rig import (
    OTHER,
    SECONDS,
    TENANT,
    Operator,
    Rig,
    document,
    operator_rig,
    quiet,
    take,
    take_until,
    until,
)

from fleetplane.domains.instances.grpc.operator_watches import WATCHES_LIMIT
from fleetplane.gen.nstance.v1 import operator_pb2
from fleetplane.kernel.errors import Unavailable
from fleetplane.rpc import CallContext

Code = grpc.StatusCode
UPSERT, DELETE = operator_pb2.GroupEvent.TYPE_UPSERT, operator_pb2.GroupEvent.TYPE_DELETE


@pytest.fixture
async def rig(tmp_path: Path) -> AsyncIterator[Rig]:
    async with operator_rig(tmp_path) as rig:
        yield rig


@pytest.fixture
async def operator(rig: Rig) -> Operator:
    return await rig.operator()


async def watch_groups(operator: Operator, snapshot: int = 2) -> tuple[Any, list[Any]]:
    stream = operator.stub.WatchGroups(Empty())
    return stream, await take(stream, snapshot)


async def watch_instances(rig: Rig, operator: Operator) -> Any:
    stream = operator.stub.WatchInstances(Empty())
    await stream.wait_for_connection()
    open_before = rig.service.open_watches
    await until(lambda: rig.service.open_watches >= max(1, open_before))
    return stream


async def ending(stream: Any) -> grpc.StatusCode:
    """How a stream ends, once everything in it is read."""
    async with asyncio.timeout(SECONDS):
        try:
            while await stream.read() is not grpc.aio.EOF:
                pass
        except grpc.aio.AioRpcError as error:
            return error.code()
    return Code.OK


# Groups.


async def test_every_group_is_told_first_by_name(operator: Operator) -> None:
    stream, told = await watch_groups(operator)
    assert [(event.type, event.group.key) for event in told] == [(UPSERT, "api"), (UPSERT, "web")]
    assert [event.group for event in told] == await operator.groups()
    assert await quiet(stream)


async def test_changes_by_operators_are_told(operator: Operator) -> None:
    stream, _ = await watch_groups(operator)
    await operator.upsert("web", size=9)
    (event,) = await take(stream, 1)
    assert (event.type, event.group.key, event.group.size) == (UPSERT, "web", 9)
    await operator.delete_group("web")
    (event,) = await take(stream, 1)
    assert (event.type, event.group.size) == (UPSERT, 2)


async def test_the_end_of_a_group_is_told_with_its_key_and_tenant(operator: Operator) -> None:
    stream, _ = await watch_groups(operator)
    await operator.upsert("new", template="worker", size=1)
    await take_until(stream, lambda event: event.group.key == "new")
    await operator.delete_group("new")
    (event,) = await take(stream, 1)
    assert event.type == DELETE
    assert event.group == operator_pb2.GroupStatus(key="new", tenant=TENANT)


async def test_changes_of_the_configuration_are_told(rig: Rig, operator: Operator) -> None:
    stream, _ = await watch_groups(operator)
    changed = document()
    changed["groups"][TENANT].pop("api")
    changed["groups"][TENANT]["web"]["size"] = 4
    changed["groups"][TENANT]["nat"]["vars"] = {"Not": "yours"}
    await rig.configure(changed)
    await operator.refresh()
    told = await take(stream, 2)
    assert [(event.type, event.group.key, event.group.size) for event in told] == [
        (DELETE, "api", 0),
        (UPSERT, "web", 4),
    ]
    assert await quiet(stream)


async def test_instances_that_come_and_go_are_told_as_changes_of_their_group(
    rig: Rig, operator: Operator
) -> None:
    stream, _ = await watch_groups(operator)
    instance = await rig.add(provider="")
    await rig.change(instance, provider_id="pm-4")
    event = await take_until(stream, lambda event: event.group.actual_size == 1)
    assert list(event.group.provider_ids) == ["pm-4"]
    assert event.group.etag == (await operator.groups())[1].etag
    await rig.change(instance, deleting_at_ns=1)
    await take_until(stream, lambda event: event.group.actual_size == 0)


async def test_what_changes_nothing_that_is_shown_is_not_told(rig: Rig, operator: Operator) -> None:
    instance = await rig.add()
    stream, _ = await watch_groups(operator)
    await rig.change(instance, agent_version="2.0")
    await rig.add(on_demand=True)
    await rig.add("secret", tenant=OTHER)
    assert await quiet(stream)


async def test_every_watcher_is_told_everything(rig: Rig) -> None:
    operators = [await rig.operator() for _ in range(3)]
    streams = [(await watch_groups(operator))[0] for operator in operators]
    await operators[0].upsert("web", size=8)
    for stream in streams:
        assert (await take(stream, 1))[0].group.size == 8


async def test_a_watcher_ends_up_with_what_is_whatever_happened_meanwhile(
    rig: Rig, operator: Operator
) -> None:
    stream, told = await watch_groups(operator)
    state = {event.group.key: event.group for event in told}
    for size in range(3, 30):
        await operator.upsert("web", size=size)
        await operator.upsert(f"g{size % 5}", template="worker", size=size)
        if size % 3 == 0:
            await operator.delete_group(f"g{size % 5}")
    await operator.upsert("zz-last", template="worker", size=1)
    while "zz-last" not in state:
        (event,) = await take(stream, 1)
        if event.type == DELETE:
            state.pop(event.group.key)
        else:
            state[event.group.key] = event.group
    assert sorted(state.values(), key=lambda group: group.key) == await operator.groups()


@pytest.mark.parametrize(("generation", "upsert", "delete"), [("first", 0, 1), ("second", 1, 2)])
async def test_the_numbers_of_group_events_follow_the_tenants_generation(
    tmp_path: Path, generation: str, upsert: int, delete: int
) -> None:
    async with operator_rig(tmp_path, generations={TENANT: generation}) as rig:
        operator = await rig.operator()
        stream, told = await watch_groups(operator)
        assert [event.type for event in told] == [upsert, upsert]
        await operator.upsert("new", template="worker", size=1)
        assert (await take(stream, 1))[0].type == upsert
        await operator.delete_group("new")
        assert (await take(stream, 1))[0].type == delete
        other, told = await watch_groups(await rig.operator(OTHER), 1)
        assert [event.type for event in told] == [1]
        other.cancel()


# Instances.


async def test_a_drain_a_deletion_and_the_end_are_told_in_order(rig: Rig, operator: Operator) -> None:
    stream = await watch_instances(rig, operator)
    instance = await rig.add(provider="pm-4")
    drain = await rig.drain(instance, "spot-terminating")
    (event,) = await take(stream, 1)
    assert (event.instance_id, event.tenant, event.group) == (instance.name, TENANT, "web")
    assert (event.status, event.reason) == ("pending_deletion", "spot-terminating")
    assert event.provider_instance_id == "pm-4"
    assert event.delete_at.ToNanoseconds() == drain.delete_at_ns
    await operator.acknowledge(instance.name)
    await rig.change(instance, deleting_at_ns=1)
    await rig.change(instance, deleted_at_ns=1)
    await rig.instances.purge(TENANT, instance.name)
    told = await take(stream, 2)
    assert [(event.status, event.reason) for event in told] == [
        ("deleting", "spot-terminating"),
        ("deleted", "spot-terminating"),
    ]
    assert await quiet(stream)


async def test_those_on_their_way_out_are_told_first_with_their_reason(rig: Rig, operator: Operator) -> None:
    draining, deleting, deleted, _serving = [await rig.add(provider=f"pm-{n}") for n in range(4)]
    await rig.drain(draining, "config-drift")
    await rig.drain(deleting, "forced-expiry")
    await rig.change(deleting, deleting_at_ns=1)
    await rig.change(deleted, deleted_at_ns=1)
    stream = operator.stub.WatchInstances(Empty())
    told = await take(stream, 2)
    assert {(event.instance_id, event.status, event.reason) for event in told} == {
        (draining.name, "pending_deletion", "config-drift"),
        (deleting.name, "deleting", "forced-expiry"),
    }
    await rig.change(deleted, agent_version="x")
    await rig.instances.purge(TENANT, deleted.name)
    assert await quiet(stream)


async def test_a_machine_without_a_providers_id_is_mentioned_only_when_it_is_gone(
    rig: Rig, operator: Operator
) -> None:
    stream = await watch_instances(rig, operator)
    instance = await rig.add(provider="")
    await rig.drain(instance)
    await rig.change(instance, deleting_at_ns=1)
    await rig.change(instance, deleted_at_ns=1)
    (event,) = await take(stream, 1)
    assert (event.instance_id, event.status) == (instance.name, "deleted")


async def test_an_instance_that_is_forgotten_unseen_is_told_as_deleted(rig: Rig, operator: Operator) -> None:
    instance = await rig.add()
    stream = await watch_instances(rig, operator)
    await rig.instances.purge(TENANT, instance.name)
    assert (await take(stream, 1))[0].status == "deleted"


async def test_what_is_asked_for_by_name_is_told_as_requested(rig: Rig, operator: Operator) -> None:
    instance = await rig.add()
    stream = await watch_instances(rig, operator)
    await operator.delete(instance.name)
    (event,) = await take(stream, 1)
    assert (event.status, event.reason) == ("deleting", "requested")


async def test_every_watcher_of_instances_is_told_and_no_other_tenants(rig: Rig) -> None:
    streams = [await watch_instances(rig, await rig.operator()) for _ in range(3)]
    stranger = await watch_instances(rig, await rig.operator(OTHER))
    instance = await rig.add()
    await rig.drain(instance)
    for stream in streams:
        assert (await take(stream, 1))[0].instance_id == instance.name
    assert await quiet(stranger)


# Errors.


async def test_errors_are_told_to_every_listener_of_their_tenant(rig: Rig) -> None:
    streams = [(await rig.operator()).stub.WatchErrors(Empty()) for _ in range(2)]
    stranger = (await rig.operator(OTHER)).stub.WatchErrors(Empty())
    await until(lambda: rig.service.open_watches == 3)
    rig.errors.tell(TENANT, "web", "wkr1", "the cloud is full")
    for stream in streams:
        (event,) = await take(stream, 1)
        assert (event.group, event.instance_id, event.error) == ("web", "wkr1", "the cloud is full")
        assert event.timestamp.seconds > 0
    assert await quiet(stranger)


async def test_errors_of_before_are_not_told(rig: Rig, operator: Operator) -> None:
    rig.errors.tell(TENANT, "web", "", "old")
    stream = operator.stub.WatchErrors(Empty())
    await until(lambda: rig.service.open_watches == 1)
    rig.errors.tell(TENANT, "web", "", "new")
    assert (await take(stream, 1))[0].error == "new"


async def test_a_configuration_that_was_refused_is_told_as_an_error(rig: Rig, operator: Operator) -> None:
    stream = operator.stub.WatchErrors(Empty())
    await until(lambda: rig.service.open_watches == 1)
    await rig.configure("{")
    with pytest.raises(grpc.aio.AioRpcError):
        await operator.refresh()
    assert "at 1:2" in (await take(stream, 1))[0].error


# Bounds and endings.


@pytest.mark.parametrize("method", ["WatchGroups", "WatchInstances", "WatchErrors"])
async def test_watches_end_promptly_with_unavailable_when_the_server_stops(
    rig: Rig, operator: Operator, method: str
) -> None:
    stream = getattr(operator.stub, method)(Empty())
    await until(lambda: rig.service.open_watches == 1)
    rig.service.close()
    assert await ending(stream) is Code.UNAVAILABLE
    assert rig.service.open_watches == 0
    assert await ending(getattr(operator.stub, method)(Empty())) is Code.UNAVAILABLE


@pytest.mark.parametrize("method", ["WatchGroups", "WatchInstances", "WatchErrors"])
async def test_a_watcher_that_leaves_is_forgotten(rig: Rig, operator: Operator, method: str) -> None:
    stream = getattr(operator.stub, method)(Empty())
    await until(lambda: rig.service.open_watches == 1)
    stream.cancel()
    await until(lambda: rig.service.open_watches == 0)


class SlowHeaders:
    """A caller whose headers are long on their way."""

    def __init__(self) -> None:
        self.asked, self.sent = asyncio.Event(), asyncio.Event()

    async def send_initial_metadata(self, _metadata: Any) -> None:
        self.asked.set()
        await self.sent.wait()


async def test_what_happens_to_an_instance_while_headers_are_sent_is_told(rig: Rig) -> None:
    instance, caller = await rig.add(), SlowHeaders()
    events = rig.service._watches.instances(TENANT, cast("CallContext", caller))
    async with asyncio.timeout(SECONDS):
        first = asyncio.ensure_future(anext(events))
        await caller.asked.wait()
        await rig.instances.purge(TENANT, instance.name)
        caller.sent.set()
        event = await first
        await events.aclose()  # type: ignore[attr-defined]
    assert (event.instance_id, event.status) == (instance.name, "deleted")


@pytest.mark.parametrize("method", ["groups", "instances", "errors"])
async def test_a_watch_whose_headers_are_sent_while_the_server_stops_ends_too(rig: Rig, method: str) -> None:
    caller = SlowHeaders()
    events = getattr(rig.service._watches, method)(TENANT, caller)
    async with asyncio.timeout(SECONDS):
        first = asyncio.ensure_future(anext(events))
        await caller.asked.wait()
        rig.service.close()
        caller.sent.set()
        with pytest.raises(Unavailable):
            await first
    assert rig.service.open_watches == 0


async def test_one_tenant_cannot_open_watches_without_end(rig: Rig, operator: Operator) -> None:
    streams = [operator.stub.WatchErrors(Empty()) for _ in range(WATCHES_LIMIT)]
    await until(lambda: rig.service.open_watches == WATCHES_LIMIT)
    one_more = operator.stub.WatchGroups(Empty())
    assert await ending(one_more) is Code.RESOURCE_EXHAUSTED
    stranger, _ = await watch_groups(await rig.operator(OTHER), 1)
    for stream in (*streams, stranger):
        stream.cancel()
