"""The device API over the wire, by the official client."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import grpc
import pytest
from domains.gpus.device_api import DeviceApi, device_api, take, told

from fleetplane.domains.gpus.registry import Gpus
from fleetplane.domains.gpus.rules import GpuPolicy, TransitionTimes
from fleetplane.domains.gpus.wire import GpuDialect
from fleetplane.gen.fleetplane.device.v1alpha1 import named_pb2
from fleetplane.gen.nvidia.device.v1alpha1 import gpu_pb2, provider_pb2
from fleetplane.gen.nvidia.nvsentinel.v1alpha1 import gpu_pb2 as first_pb2

NAME_DIALECT = (("x-device-api-dialect", "name"),)


@pytest.fixture
async def api(tmp_path: Path) -> AsyncIterator[DeviceApi]:
    async with device_api(tmp_path) as running:
        yield running


async def refusal(call: Awaitable[Any]) -> tuple[grpc.StatusCode, str]:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await call
    return caught.value.code(), caught.value.details() or ""


# Registering


async def test_the_first_registration_creates_and_repeating_it_changes_nothing(api: DeviceApi) -> None:
    first = await api.register("gpu-1", spec=gpu_pb2.GpuSpec(uuid="GPU-1"), provider_id="nvml")
    again = await api.register("gpu-1", spec=gpu_pb2.GpuSpec(uuid="GPU-other"), provider_id="other")

    assert (first.created, first.resource_version) == (True, 1)
    assert (again.created, again.resource_version) == (False, 1)
    assert (await api.get("gpu-1")).spec.uuid == "GPU-1"


async def test_registering_an_existing_gpu_returns_its_own_version_not_the_newest(api: DeviceApi) -> None:
    await api.register("gpu-1")
    await api.register("gpu-2")

    assert (await api.register("gpu-1")).resource_version == 1


async def test_an_initial_status_is_taken_verbatim(api: DeviceApi) -> None:
    status = gpu_pb2.GpuStatus(
        conditions=[gpu_pb2.Condition(type="Ready", status="True")], recommended_action="none"
    )
    await api.register("gpu-1", initial_status=status)

    assert (await api.get("gpu-1")).status == status


async def test_sixty_four_concurrent_registrations_of_one_name_create_it_once(api: DeviceApi) -> None:
    answers = await asyncio.gather(*(api.register("gpu-1") for _ in range(64)))

    assert sum(answer.created for answer in answers) == 1
    assert {answer.resource_version for answer in answers} == {1}


async def test_unregistering_says_whether_there_was_anything(api: DeviceApi) -> None:
    await api.register("gpu-1")
    request = provider_pb2.UnregisterGpuRequest(name="gpu-1")

    assert (await api.provider.UnregisterGpu(request)).deleted is True
    assert (await api.provider.UnregisterGpu(request)).deleted is False
    assert await refusal(api.get("gpu-1")) == (grpc.StatusCode.NOT_FOUND, "gpu not found")


async def test_a_version_is_never_used_twice(api: DeviceApi) -> None:
    await api.register("gpu-1")
    await api.provider.UnregisterGpu(provider_pb2.UnregisterGpuRequest(name="gpu-1"))

    assert (await api.register("gpu-1")).resource_version == 3


async def test_more_gpus_than_allowed_are_refused(tmp_path: Path) -> None:
    async with device_api(tmp_path, policy=GpuPolicy(max_gpus=2)) as api:
        await api.register("gpu-1")
        await api.register("gpu-2")

        assert await refusal(api.register("gpu-3")) == (
            grpc.StatusCode.RESOURCE_EXHAUSTED,
            "2 GPUs are registered already",
        )
        assert (await api.register("gpu-1")).created is False


# Reporting


async def test_a_whole_status_replaces_the_one_before_and_none_clears_it(api: DeviceApi) -> None:
    await api.register("gpu-1")
    await api.set_condition("gpu-1", "Old", "True")
    status = gpu_pb2.GpuStatus(conditions=[gpu_pb2.Condition(type="New", status="False")])

    answer = await api.provider.UpdateGpuStatus(
        provider_pb2.UpdateGpuStatusRequest(name="gpu-1", status=status)
    )
    assert answer.resource_version == 3
    assert (await api.get("gpu-1")).status == status

    await api.provider.UpdateGpuStatus(provider_pb2.UpdateGpuStatusRequest(name="gpu-1"))
    assert not (await api.get("gpu-1")).HasField("status")


async def test_a_provider_recommends_beside_a_condition_and_takes_back_its_own_only(api: DeviceApi) -> None:
    await api.register("gpu-1")
    await api.register("gpu-2")

    async def report(provider: str, action: str | None, name: str = "gpu-1") -> str:
        condition = gpu_pb2.Condition(type=provider, status="False")
        await api.provider.UpdateGpuCondition(
            provider_pb2.UpdateGpuConditionRequest(
                name=name, condition=condition, provider_id=provider, recommended_action=action
            )
        )
        return (await api.get(name)).status.recommended_action

    assert await report("nvml", "RESET_GPU") == "RESET_GPU"
    assert await report("nvml", None) == "RESET_GPU", "who says nothing changes nothing"
    assert await report("other", "") == "RESET_GPU"
    assert await report("nvml", "") == ""
    status = gpu_pb2.GpuStatus(recommended_action="RESTART_VM")
    await api.provider.UpdateGpuStatus(
        provider_pb2.UpdateGpuStatusRequest(name="gpu-2", status=status, provider_id="other")
    )
    assert await report("nvml", "", "gpu-2") == "RESTART_VM"
    assert await report("other", "", "gpu-2") == ""


async def test_two_providers_conditions_stand_side_by_side(api: DeviceApi) -> None:
    await api.register("gpu-1")
    await api.set_condition("gpu-1", "NVMLReady", "True", provider="nvml")
    await api.set_condition("gpu-1", "DCGMHealth", "True", provider="dcgm")
    await api.set_condition("gpu-1", "NVMLReady", "False", provider="nvml", message="gone")

    conditions = (await api.get("gpu-1")).status.conditions
    assert [(c.type, c.status, c.message) for c in conditions] == [
        ("NVMLReady", "False", "gone"),
        ("DCGMHealth", "True", ""),
    ]


async def test_every_update_gets_a_new_version_even_if_nothing_differs(api: DeviceApi) -> None:
    await api.register("gpu-1")
    versions = [(await api.set_condition("gpu-1", "Ready", "True")).resource_version for _ in range(3)]

    assert versions == [2, 3, 4]


@pytest.mark.parametrize(
    ("times", "moved"), [(TransitionTimes.STRICT, False), (TransitionTimes.EVERY_WRITE, True)]
)
async def test_an_unchanged_status_moves_its_time_only_in_the_original_way(
    tmp_path: Path, times: TransitionTimes, moved: bool
) -> None:
    async with device_api(tmp_path, policy=GpuPolicy(transition_times=times)) as api:
        await api.register("gpu-1")
        await api.set_condition("gpu-1", "Ready", "True")
        before = (await api.get("gpu-1")).status.conditions[0].last_transition_time
        await api.set_condition("gpu-1", "Ready", "True")
        after = (await api.get("gpu-1")).status.conditions[0].last_transition_time

        assert (before != after) is moved


Refused = Callable[[DeviceApi], Awaitable[Any]]


@pytest.mark.parametrize(
    ("call", "code", "message"),
    [
        (lambda api: api.get(""), "INVALID_ARGUMENT", "name is required"),
        (lambda api: api.get("gone"), "NOT_FOUND", "gpu not found"),
        (lambda api: api.register(""), "INVALID_ARGUMENT", "name is required"),
        (
            lambda api: api.register("a\0b"),
            "INVALID_ARGUMENT",
            "name must not contain a NUL character",
        ),
        (
            lambda api: api.heartbeat("p\0"),
            "INVALID_ARGUMENT",
            "provider_id must not contain a NUL character",
        ),
        (
            lambda api: api.register("gpu-1", provider_id="p\0"),
            "INVALID_ARGUMENT",
            "provider_id must not contain a NUL character",
        ),
        (
            lambda api: api.provider.UnregisterGpu(provider_pb2.UnregisterGpuRequest()),
            "INVALID_ARGUMENT",
            "name is required",
        ),
        (
            lambda api: api.provider.UpdateGpuStatus(provider_pb2.UpdateGpuStatusRequest()),
            "INVALID_ARGUMENT",
            "name is required",
        ),
        (
            lambda api: api.provider.UpdateGpuStatus(provider_pb2.UpdateGpuStatusRequest(name="gone")),
            "NOT_FOUND",
            "gpu not found",
        ),
        (
            lambda api: api.provider.UpdateGpuCondition(provider_pb2.UpdateGpuConditionRequest()),
            "INVALID_ARGUMENT",
            "name is required",
        ),
        (
            lambda api: api.provider.UpdateGpuCondition(provider_pb2.UpdateGpuConditionRequest(name="gone")),
            "INVALID_ARGUMENT",
            "condition is required",
        ),
        (lambda api: api.set_condition("gone", "", "True"), "INVALID_ARGUMENT", "condition type is required"),
        (lambda api: api.set_condition("gone", "Ready", "True"), "NOT_FOUND", "gpu not found"),
        (lambda api: api.heartbeat(""), "INVALID_ARGUMENT", "provider_id is required"),
        (
            lambda api: api.set_condition("gone", "Ready", "True", message="x" * 5_000_000),
            "RESOURCE_EXHAUSTED",
            "4194304",
        ),
    ],
)
async def test_each_refusal_has_the_code_and_words_clients_know(
    api: DeviceApi, call: Refused, code: str, message: str
) -> None:
    got, details = await refusal(call(api))

    assert got.name == code
    assert message in details


# Reading


async def test_an_empty_list_is_a_list_at_version_zero(api: DeviceApi) -> None:
    response = await api.consumer.ListGpus(gpu_pb2.ListGpusRequest())

    assert response.HasField("gpu_list")
    assert response.gpu_list.metadata.resource_version == "0"


async def test_a_list_is_in_name_order_and_carries_its_version(api: DeviceApi) -> None:
    for name in ("gpu-b", "gpu-a", "gpu-c"):
        await api.register(name)
    listed = await api.list()

    assert [gpu.name for gpu in listed.items] == ["gpu-a", "gpu-b", "gpu-c"]
    assert listed.metadata.resource_version == "3"


async def test_names_may_be_any_text(api: DeviceApi) -> None:
    names = ["GPU-A", "gpu-a", "with space", "sla/sh", "new\nline", "ünï"]
    for name in names:
        await api.register(name)

    assert sorted(gpu.metadata.name for gpu in (await api.list()).items) == sorted(names)
    assert (await api.get("new\nline")).name == "new\nline"


async def test_a_read_that_comes_after_a_write_was_accepted_sees_it(api: DeviceApi) -> None:
    await api.register("gpu-1")
    await api.set_condition("gpu-1", "Ready", "True")
    for status in ("False", "True") * 20:
        write = asyncio.ensure_future(api.set_condition("gpu-1", "Ready", status))
        # The write is accepted once it is pending in the store, well before it is acknowledged.
        while not (write.done() or api.store.unsettled(_kind(), "tenant/default", "gpu-1")):
            await asyncio.sleep(0)
        got, listed = await asyncio.gather(api.get("gpu-1"), api.list())

        assert got.status.conditions[0].status == status
        assert listed.items[0].status.conditions[0].status == status
        await write


def _kind() -> Any:
    from fleetplane.domains.gpus.kinds import GPU

    return GPU


async def test_readers_and_writers_at_once_never_see_a_torn_or_older_state(api: DeviceApi) -> None:
    await api.register("gpu-1")

    async def write(writer: int) -> None:
        for turn in range(20):
            await api.set_condition("gpu-1", f"T{writer}", "True", message=str(turn))

    async def read() -> None:
        newest = 0
        for _ in range(50):
            gpu = await api.get("gpu-1")
            assert gpu.resource_version >= newest
            newest = gpu.resource_version

    await asyncio.gather(*(write(n) for n in range(5)), *(read() for _ in range(10)))

    assert {c.type: c.message for c in (await api.get("gpu-1")).status.conditions} == {
        f"T{n}": "19" for n in range(5)
    }


# Watching


async def begun(api: DeviceApi) -> None:
    """Until the server watches for somebody: its first answer comes before that."""
    async with asyncio.timeout(60):
        while not api.store.statistics().watchers:
            await asyncio.sleep(0.01)


async def test_a_watch_on_nothing_tells_the_whole_life_of_a_gpu(api: DeviceApi) -> None:
    stream = api.watch()
    await begun(api)
    await api.register("gpu-1")
    await api.set_condition("gpu-1", "Ready", "True")
    await api.provider.UnregisterGpu(provider_pb2.UnregisterGpuRequest(name="gpu-1"))

    events = await take(stream, 3)
    assert told(events) == [("ADDED", "gpu-1", 1), ("MODIFIED", "gpu-1", 2), ("DELETED", "gpu-1", 3)]
    assert events[2].object.status.conditions[0].status == "True"


async def test_a_watch_begins_with_everything_present_in_version_order(api: DeviceApi) -> None:
    """So that whoever is cut off within it goes on after the last version that it got."""
    for name in ("gpu-b", "gpu-a"):
        await api.register(name)
    stream = api.watch()

    assert told(await take(stream, 2)) == [("ADDED", "gpu-b", 1), ("ADDED", "gpu-a", 2)]
    await api.register("gpu-c")
    assert told(await take(stream, 1)) == [("ADDED", "gpu-c", 3)]


async def test_a_watch_cut_off_within_one_transaction_resumes_with_the_rest_of_it(api: DeviceApi) -> None:
    names = [f"gpu-{n:02d}" for n in range(20)]
    for name in names:
        await api.register(name)
        await api.set_condition(name, "NVMLReady", "True", provider="nvml")
    before = str(api.store.revision)
    await Gpus(api.store, GpuPolicy()).silence("nvml", message="not heard")

    whole = told(await take(api.watch(after=before), 20))
    for received in (1, 5, 19):
        seen = whole[:received]
        rest = told(await take(api.watch(after=str(seen[-1][2])), 20 - received))
        assert seen + rest == whole


async def test_a_watch_cut_off_within_its_beginning_resumes_with_the_rest(api: DeviceApi) -> None:
    for name in ("gpu-c", "gpu-b", "gpu-a"):
        await api.register(name)
    await api.set_condition("gpu-c", "Ready", "True")
    seen = told(await take(api.watch(), 2))
    rest = told(await take(api.watch(after=str(seen[-1][2])), 1))
    assert {name for _, name, _ in seen + rest} == {"gpu-a", "gpu-b", "gpu-c"}


async def test_a_watch_resumes_after_a_version_and_misses_nothing(api: DeviceApi) -> None:
    await api.register("gpu-1")
    version = (await api.list()).metadata.resource_version
    await api.register("gpu-2")
    await api.set_condition("gpu-1", "Ready", "True")

    assert told(await take(api.watch(after=version), 2)) == [("ADDED", "gpu-2", 2), ("MODIFIED", "gpu-1", 3)]


async def test_resuming_after_a_version_that_is_gone_or_not_yet_there_is_out_of_range(tmp_path: Path) -> None:
    async with device_api(tmp_path) as api:
        for _ in range(4):
            await api.register("gpu-1")
            await api.set_condition("gpu-1", "Ready", "True")
        await api.store.compact(api.store.revision)

        assert (await refusal(api.watch(after="1").read()))[0] is grpc.StatusCode.OUT_OF_RANGE
        assert (await refusal(api.watch(after="999").read()))[0] is grpc.StatusCode.OUT_OF_RANGE
        assert (await refusal(api.watch(after="soon").read())) == (
            grpc.StatusCode.INVALID_ARGUMENT,
            'invalid resource_version "soon": must be numeric',
        )


async def test_a_slow_watcher_is_coalesced_and_ends_with_the_last_state(tmp_path: Path) -> None:
    rounds = 3000
    async with device_api(tmp_path, settings={"ring_events": 64, "coalesce_after_events": 16}) as api:
        await api.register("gpu-1")
        # A stream that nobody reads: its events pile up in flow control, then in nothing at all.
        stream = api.watch()
        await take(stream, 1)
        padding = "x" * 8_000
        for batch in range(0, rounds, 100):
            await asyncio.gather(
                *(
                    api.set_condition("gpu-1", "Ready", "True", message=f"{batch + n} {padding}")
                    for n in range(100)
                )
            )
        newest = (await api.get("gpu-1")).resource_version
        seen = [0]
        while seen[-1] < newest:
            [event] = await take(stream, 1)
            assert event.object.resource_version > seen[-1]
            seen.append(event.object.resource_version)

        assert len(seen) < rounds
        assert api.store.statistics().coalesced_events + api.store.statistics().refills > 0


async def test_draining_ends_watches_promptly_and_says_where_to_go_on(api: DeviceApi) -> None:
    await api.register("gpu-1")
    streams = [api.watch() for _ in range(5)]
    for stream in streams:
        await take(stream, 1)
    api.domain.drain()

    for stream in streams:
        async with asyncio.timeout(60):
            code, details = await refusal(stream.read())
        assert code is grpc.StatusCode.UNAVAILABLE
        assert "watch again from resource_version 1" in details


async def test_a_cancelled_watch_leaves_nothing_behind(api: DeviceApi) -> None:
    stream = api.watch()
    await begun(api)
    stream.cancel()

    async with asyncio.timeout(60):
        while api.store.statistics().watchers:
            await asyncio.sleep(0.01)
    assert api.store.statistics().watchers == 0


# Dialects


async def test_a_caller_may_ask_for_the_name_dialect(api: DeviceApi) -> None:
    await api.register("gpu-1", spec=gpu_pb2.GpuSpec(uuid="GPU-1"))
    path = "/nvidia.device.v1alpha1.GpuService/"
    get: Any = api.channel.unary_unary(
        path + "GetGpu", response_deserializer=named_pb2.NamedGetGpuResponse.FromString
    )
    listing: Any = api.channel.unary_unary(
        path + "ListGpus", response_deserializer=named_pb2.NamedListGpusResponse.FromString
    )
    watch: Any = api.channel.unary_stream(
        path + "WatchGpus", response_deserializer=named_pb2.NamedWatchGpusResponse.FromString
    )
    expected = named_pb2.NamedGpu(name="gpu-1", spec=gpu_pb2.GpuSpec(uuid="GPU-1"), resource_version=1)

    request = gpu_pb2.GetGpuRequest(name="gpu-1").SerializeToString()
    assert (await get(request, metadata=NAME_DIALECT)).gpu == expected
    assert list((await listing(b"", metadata=NAME_DIALECT)).gpu_list.items) == [expected]
    event = await watch(b"", metadata=NAME_DIALECT).read()
    assert (event.type, event.object) == ("ADDED", expected)


async def test_a_listener_may_speak_the_original_to_the_byte(tmp_path: Path) -> None:
    async with device_api(tmp_path, dialect=GpuDialect.META) as api:
        listing: Any = api.channel.unary_unary("/nvidia.device.v1alpha1.GpuService/ListGpus")
        assert await listing(b"") == bytes.fromhex("0a00")
        await api.register("gpu-a")
        get: Any = api.channel.unary_unary("/nvidia.device.v1alpha1.GpuService/GetGpu")
        assert await get(gpu_pb2.GetGpuRequest(name="gpu-a").SerializeToString()) == bytes.fromhex(
            "0a0b0a070a056770752d612001"
        )


async def test_an_unknown_dialect_is_refused_by_name(api: DeviceApi) -> None:
    call = api.consumer.ListGpus(gpu_pb2.ListGpusRequest(), metadata=(("x-device-api-dialect", "klingon"),))

    assert await refusal(call) == (
        grpc.StatusCode.INVALID_ARGUMENT,
        "unknown dialect 'klingon'; known are superset, meta, name",
    )


async def test_the_first_generation_reads_the_same_gpus(api: DeviceApi) -> None:
    await api.register("gpu-1", spec=gpu_pb2.GpuSpec(uuid="GPU-1"))
    expected = first_pb2.Gpu(name="gpu-1", spec=first_pb2.GpuSpec(uuid="GPU-1"))

    assert (await api.first.GetGpu(first_pb2.GetGpuRequest(name="gpu-1"))).gpu == expected
    assert list((await api.first.ListGpus(first_pb2.ListGpusRequest())).gpu_list.items) == [expected]
    event = await api.first.WatchGpus(first_pb2.WatchGpusRequest()).read()
    assert (event.type, event.object) == ("ADDED", expected)
