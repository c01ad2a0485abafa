"""Clients of every generation of the device API, by the bytes that they send and read."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
import pytest
from domains.gpus.device_api import DeviceApi, device_api
from google.protobuf.empty_pb2 import Empty
from google.rpc import error_details_pb2, status_pb2  # type: ignore[import-untyped]

from fleetplane.domains.gpus.grpc.generations import SETTING, Generation
from fleetplane.domains.gpus.rules import GpuPolicy
from fleetplane.gen.nvidia.device.v1alpha1 import gpu_pb2, provider_pb2
from fleetplane.gen.nvidia.nvsentinel.v1alpha1 import gpu_pb2 as sentinel_pb2

SENTINEL = "/nvidia.nvsentinel.v1alpha1.GpuService/"
DEVICE = "/nvidia.device.v1alpha1.GpuService/"
READY = gpu_pb2.Condition(type="Ready", status="True")


@pytest.fixture
async def api(tmp_path: Path) -> AsyncIterator[DeviceApi]:
    async with device_api(tmp_path, generation=Generation.AUTO) as running:
        yield running


async def call(api: DeviceApi, path: str, request: bytes, **metadata: str) -> bytes:
    """One unary call with bytes as they are: no generated code stands between."""
    ask: Any = api.channel.unary_unary(path)
    headers = [(name.replace("_", "-"), value) for name, value in metadata.items()]
    return bytes(await ask(request, metadata=headers))


async def refused(api: DeviceApi, path: str, request: bytes, **metadata: str) -> tuple[Any, str, list[str]]:
    """Code, words and named fields of a call that is refused."""
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await call(api, path, request, **metadata)
    error = caught.value
    raw = dict(error.trailing_metadata() or ()).get("grpc-status-details-bin", b"")
    rich = status_pb2.Status.FromString(raw if isinstance(raw, bytes) else b"")
    fields = []
    for detail in rich.details:
        bad = error_details_pb2.BadRequest()
        if detail.Unpack(bad):
            fields += [violation.field for violation in bad.field_violations]
    return error.code(), str(error.details()), fields


def later(name: str, **fields: Any) -> gpu_pb2.Gpu:
    return gpu_pb2.Gpu(metadata=gpu_pb2.ObjectMeta(name=name), **fields)


# A later client, as an informer behaves: list with options, watch from that version, write.

LISTS = {
    "options with version 0, as a reflector asks first": b"\x12\x03\x0a\x010",
    "empty options, as it asks again": b"\x12\x00",
    "a namespace": b"\x0a\x07default",
    "the generation between: options in field 1": b"\x0a\x03\x0a\x010",
    "the generation between, empty": b"\x0a\x00",
}


@pytest.mark.parametrize("name", LISTS)
async def test_a_later_client_reads_what_is_there(api: DeviceApi, name: str) -> None:
    await api.register("gpu-1", spec=gpu_pb2.GpuSpec(uuid="GPU-1"))
    answer = gpu_pb2.ListGpusResponse.FromString(await call(api, SENTINEL + "ListGpus", LISTS[name]))
    [gpu] = answer.gpu_list.items
    namespace = "default" if name == "a namespace" else ""
    assert (gpu.metadata.name, gpu.metadata.namespace, gpu.spec.uuid) == ("gpu-1", namespace, "GPU-1")
    assert gpu.metadata.uid
    assert gpu.metadata.generation == 1
    assert gpu.metadata.creation_timestamp.seconds > 0
    assert answer.gpu_list.metadata.resource_version == gpu.metadata.resource_version
    assert (gpu.resource_version, gpu.name) == (0, ""), "fields that this generation does not have"


GETS = {
    "a namespace": b"\x12\x07default",
    "options": b"\x1a\x00",
    "the generation between: options in field 2": b"\x12\x03\x0a\x010",
    "the generation between, empty": b"\x12\x00",
}


@pytest.mark.parametrize("name", GETS)
async def test_a_later_client_reads_one_gpu(api: DeviceApi, name: str) -> None:
    await api.register("gpu-1")
    answer = await call(api, SENTINEL + "GetGpu", b"\x0a\x05gpu-1" + GETS[name])
    assert gpu_pb2.GetGpuResponse.FromString(answer).gpu.metadata.name == "gpu-1"
    code, _, fields = await refused(api, SENTINEL + "GetGpu", b"\x0a\x05gpu-1\x12\x05other")
    assert (code, fields) == (grpc.StatusCode.NOT_FOUND, ["namespace"])
    code, _, fields = await refused(api, SENTINEL + "GetGpu", b"\x0a\x05gpu")
    assert (code, fields) == (grpc.StatusCode.INVALID_ARGUMENT, ["request"])


async def test_a_namespace_in_which_nothing_is_is_truly_empty(api: DeviceApi) -> None:
    await api.register("gpu-1")
    answer = gpu_pb2.ListGpusResponse.FromString(await call(api, SENTINEL + "ListGpus", b"\x0a\x05other"))
    assert (list(answer.gpu_list.items), answer.gpu_list.metadata.resource_version != "") == ([], True)


async def test_what_cannot_be_told_apart_is_an_error_that_names_the_setting(api: DeviceApi) -> None:
    await api.register("gpu-1")
    for method, request in (("ListGpus", b""), ("GetGpu", b"\x0a\x05gpu-1")):
        code, words, fields = await refused(api, SENTINEL + method, request)
        assert code is grpc.StatusCode.FAILED_PRECONDITION
        assert SETTING in words
        assert fields == [SETTING]
    stream: Any = api.channel.unary_stream(SENTINEL + "WatchGpus")
    with pytest.raises(grpc.aio.AioRpcError, match=SETTING):
        await stream(b"").read()


async def test_a_caller_or_the_setting_can_say_which_it_is(api: DeviceApi, tmp_path: Path) -> None:
    await api.register("gpu-1")
    answer = await call(api, SENTINEL + "ListGpus", b"", x_device_api_dialect="first")
    assert [gpu.name for gpu in sentinel_pb2.ListGpusResponse.FromString(answer).gpu_list.items] == ["gpu-1"]
    answer = await call(api, SENTINEL + "ListGpus", b"", x_device_api_dialect="later")
    assert [one.metadata.name for one in gpu_pb2.ListGpusResponse.FromString(answer).gpu_list.items] == [
        "gpu-1"
    ]
    code, _, fields = await refused(api, SENTINEL + "ListGpus", b"", x_device_api_dialect="name")
    assert (code, fields) == (grpc.StatusCode.INVALID_ARGUMENT, ["x-device-api-dialect"])
    folder = tmp_path / "set"
    folder.mkdir()
    async with device_api(folder, generation=Generation.LATER) as other:
        await other.register("gpu-1")
        answer = await call(other, SENTINEL + "GetGpu", b"\x0a\x05gpu-1")
        assert gpu_pb2.GetGpuResponse.FromString(answer).gpu.metadata.name == "gpu-1"


@pytest.mark.parametrize("options", [b"\x12\x00", b"\x12\x03\x0a\x010", b"\x0a\x00"])
async def test_a_later_informer_that_asks_for_initial_events_is_told_to_list(
    api: DeviceApi, options: bytes
) -> None:
    await api.register("gpu-1")
    stream: Any = api.channel.unary_stream(SENTINEL + "WatchGpus")
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await stream(options).read()
    # Of OUT_OF_RANGE, RESOURCE_EXHAUSTED and INVALID_ARGUMENT its reflector would ask for the same again.
    assert caught.value.code() is grpc.StatusCode.FAILED_PRECONDITION
    assert "list first" in str(caught.value.details())
    watch = stream(options, metadata=[("x-device-api-dialect", "later")])
    event = gpu_pb2.WatchGpusResponse.FromString(await watch.read())
    assert (event.type, event.object.metadata.name) == ("ADDED", "gpu-1")
    watch.cancel()


async def test_an_informer_lists_watches_from_there_and_sees_every_change(api: DeviceApi) -> None:
    await api.register("gpu-1")
    listed = gpu_pb2.ListGpusResponse.FromString(await call(api, SENTINEL + "ListGpus", b"\x12\x00"))
    store = {gpu.metadata.name: gpu for gpu in listed.gpu_list.items}
    options = gpu_pb2.ListOptions(resource_version=listed.gpu_list.metadata.resource_version)
    encoded = options.SerializeToString()
    stream: Any = api.channel.unary_stream(SENTINEL + "WatchGpus")
    watch = stream(b"\x12" + bytes([len(encoded)]) + encoded)

    async def next_event() -> gpu_pb2.WatchGpusResponse:
        return gpu_pb2.WatchGpusResponse.FromString(await watch.read())

    create = sentinel_pb2.CreateGpuRequest(gpu=later("gpu-2", spec=gpu_pb2.GpuSpec(uuid="GPU-2")))
    made = gpu_pb2.Gpu.FromString(await call(api, SENTINEL + "CreateGpu", create.SerializeToString()))
    assert (made.metadata.name, made.metadata.generation) == ("gpu-2", 1)
    event = await next_event()
    assert (event.type, event.object.metadata.uid) == ("ADDED", made.metadata.uid)

    made.status.conditions.append(READY)
    update = sentinel_pb2.UpdateGpuStatusRequest(gpu=made).SerializeToString()
    after = gpu_pb2.Gpu.FromString(await call(api, SENTINEL + "UpdateGpuStatus", update))
    assert after.status.conditions[0].last_transition_time.seconds > 0, "stamped where the writer left it out"
    event = await next_event()
    assert (event.type, event.object) == ("MODIFIED", after)
    code, _, fields = await refused(api, SENTINEL + "UpdateGpuStatus", update)
    assert (code, fields) == (grpc.StatusCode.ABORTED, ["resource_version"]), (
        "it was read at an older version"
    )

    after.spec.uuid = "GPU-2b"
    changed = sentinel_pb2.UpdateGpuRequest(gpu=after).SerializeToString()
    respecified = gpu_pb2.Gpu.FromString(await call(api, SENTINEL + "UpdateGpu", changed))
    assert respecified.metadata.generation == 2
    assert respecified.status == after.status, "the spec only"
    assert (await next_event()).object.spec.uuid == "GPU-2b"

    code, words, _ = await refused(api, SENTINEL + "CreateGpu", create.SerializeToString())
    assert (code, words) == (grpc.StatusCode.ALREADY_EXISTS, 'GPU "gpu-2" already exists')
    delete = sentinel_pb2.DeleteGpuRequest(name="gpu-2").SerializeToString()
    assert Empty.FromString(await call(api, SENTINEL + "DeleteGpu", delete)) == Empty()
    assert (await next_event()).type == "DELETED"
    code, _, fields = await refused(api, SENTINEL + "DeleteGpu", delete)
    assert (code, fields) == (grpc.StatusCode.NOT_FOUND, ["name"])
    assert list(store) == ["gpu-1"]


# The generation that writes through nvidia.device.v1alpha1.GpuService.


@pytest.mark.parametrize("form", ["number", "text"])
async def test_the_writing_generation_of_the_device_package(api: DeviceApi, form: str) -> None:
    create = gpu_pb2.CreateGpuRequest(gpu=later("gpu-1", spec=gpu_pb2.GpuSpec(uuid="GPU-1")))
    first = gpu_pb2.CreateGpuResponse.FromString(
        await call(api, DEVICE + "CreateGpu", create.SerializeToString())
    )
    again = gpu_pb2.CreateGpuResponse.FromString(
        await call(api, DEVICE + "CreateGpu", create.SerializeToString())
    )
    assert (first.created, again.created, again.gpu) == (True, False, first.gpu)
    assert first.gpu.metadata.resource_version == str(first.gpu.resource_version)

    version = first.gpu.resource_version
    status = gpu_pb2.ReplaceGpuStatusRequest(name="gpu-1", status=gpu_pb2.GpuStatus(conditions=[READY]))
    meant = (
        bytes([0x18, version])
        if form == "number"
        else b"\x1a" + bytes([len(str(version))]) + str(version).encode()
    )
    request = status.SerializeToString() + meant
    done = gpu_pb2.ReplaceGpuStatusResponse.FromString(await call(api, DEVICE + "UpdateGpuStatus", request))
    assert done.gpu.status.conditions[0].type == "Ready"
    code, _, _ = await refused(api, DEVICE + "UpdateGpuStatus", request)
    assert code is grpc.StatusCode.ABORTED
    code, words, fields = await refused(api, DEVICE + "UpdateGpuStatus", b"\x0a\x05gpu-1")
    assert (code, words, fields) == (grpc.StatusCode.INVALID_ARGUMENT, "status is required", ["status"])

    update = gpu_pb2.UpdateGpuRequest(gpu=later("gpu-1", spec=gpu_pb2.GpuSpec(uuid="GPU-9")))
    after = gpu_pb2.UpdateGpuResponse.FromString(
        await call(api, DEVICE + "UpdateGpu", update.SerializeToString())
    )
    assert after.gpu.spec.uuid == "GPU-9"
    delete = gpu_pb2.DeleteGpuRequest(name="gpu-1").SerializeToString()
    assert await call(api, DEVICE + "DeleteGpu", delete) == b""
    code, _, _ = await refused(api, DEVICE + "DeleteGpu", delete)
    assert code is grpc.StatusCode.NOT_FOUND


# Fields and pages.


async def test_every_refusal_names_its_field(tmp_path: Path) -> None:
    async with device_api(tmp_path, policy=GpuPolicy(max_gpus=1)) as api:
        await api.register("gpu-1")
        provider = "/nvidia.device.v1alpha1.ProviderService/"
        unknown = provider_pb2.UpdateGpuConditionRequest(name="gone", condition=READY).SerializeToString()
        cases = {
            (DEVICE + "GetGpu", b""): ("INVALID_ARGUMENT", "name"),
            (DEVICE + "GetGpu", b"\x0a\x04gone"): ("NOT_FOUND", "name"),
            (provider + "RegisterGpu", b"\x0a\x05gpu-2"): ("RESOURCE_EXHAUSTED", "name"),
            (provider + "UpdateGpuCondition", unknown): ("NOT_FOUND", "name"),
            (provider + "UpdateGpuCondition", b"\x0a\x05gpu-1"): ("INVALID_ARGUMENT", "condition"),
            (provider + "Heartbeat", b""): ("INVALID_ARGUMENT", "provider_id"),
            (DEVICE + "CreateGpu", b""): ("INVALID_ARGUMENT", "gpu.metadata.name"),
        }
        for (path, request), (expected, field) in cases.items():
            code, _, fields = await refused(api, path, request)
            assert (code.name, fields) == (expected, [field]), path


async def test_a_list_comes_in_pages_that_lose_and_repeat_nothing(api: DeviceApi) -> None:
    names = [f"gpu-{number:03}" for number in range(25)]
    for name in names:
        await api.register(name)
    found: list[str] = []
    versions = set()
    token = ""
    while True:
        options = gpu_pb2.ListOptions(limit=10, continue_token=token)
        answer = await api.consumer.ListGpus(gpu_pb2.ListGpusRequest(opts=options))
        found += [gpu.name for gpu in answer.gpu_list.items]
        versions.add(answer.gpu_list.metadata.resource_version)
        token = answer.gpu_list.metadata.continue_token
        if len(found) == 10:
            await api.register("gpu-000-late")  # told by a watch from the version of the first page
        if not token:
            break
    assert found == names
    assert len(versions) == 1
    watch = api.watch(after=versions.pop())
    assert (await watch.read()).object.name == "gpu-000-late"
    for options, field in (
        (gpu_pb2.ListOptions(limit=-1), "opts.limit"),
        (gpu_pb2.ListOptions(continue_token="nonsense"), "opts.continue_token"),
    ):
        request = gpu_pb2.ListGpusRequest(opts=options).SerializeToString()
        code, _, fields = await refused(api, DEVICE + "ListGpus", request)
        assert (code, fields) == (grpc.StatusCode.INVALID_ARGUMENT, [field])
