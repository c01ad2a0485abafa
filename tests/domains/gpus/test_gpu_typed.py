"""The generation of clients whose objects say their kind, by the bytes that its Go client sends and reads."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
import pytest
from domains.gpus.device_api import DeviceApi, device_api

from fleetplane.domains.gpus.grpc.generations import Generation
from fleetplane.gen.fleetplane.device.v1alpha1 import typed_pb2 as typed
from fleetplane.gen.nvidia.device.v1alpha1 import gpu_pb2
from fleetplane.gen.nvidia.nvsentinel.v1alpha1 import gpu_pb2 as sentinel_pb2

SENTINEL = "/nvidia.nvsentinel.v1alpha1.GpuService/"
MERGE = "application/merge-patch+json"
STRATEGIC = "application/strategic-merge-patch+json"
JSON_PATCH = "application/json-patch+json"
KIND = typed.TypeMeta(kind="GPU", api_version="device.nvidia.com/v1alpha1")

# The Go client fills every optional field, so that an empty namespace stands beside the options.
LIST = bytes.fromhex("0a00 120a 0a00 1000 1800 2a00 3200")
GET = b"\x0a\x05gpu-1" + bytes.fromhex("1200 1a02 0a00")


@pytest.fixture
async def api(tmp_path: Path) -> AsyncIterator[DeviceApi]:
    async with device_api(tmp_path, generation=Generation.AUTO) as running:
        await running.register("gpu-1", spec=gpu_pb2.GpuSpec(uuid="GPU-1"))
        yield running


async def call(api: DeviceApi, method: str, request: bytes, **metadata: str) -> bytes:
    ask: Any = api.channel.unary_unary(SENTINEL + method)
    headers = [(name.replace("_", "-"), value) for name, value in metadata.items()]
    return bytes(await ask(request, metadata=headers))


async def refused(api: DeviceApi, method: str, request: bytes) -> tuple[grpc.StatusCode, str]:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await call(api, method, request)
    return caught.value.code(), str(caught.value.details())


def write(gpu: typed.TypedGpu) -> bytes:
    return typed.TypedWriteGpuRequest(gpu=gpu).SerializeToString() + b"\x12\x00"


def new(name: str, **fields: Any) -> typed.TypedGpu:
    meta = typed.TypedObjectMeta(name=name, resource_version="", namespace="", uid="", generation=0)
    # The Go client sends a spec and a status with every object.
    return typed.TypedGpu(type_meta=KIND, object_meta=meta, **({"status": typed.TypedGpuStatus()} | fields))


async def patched(api: DeviceApi, kind: str, patch: object, *subresources: str) -> typed.TypedGpu:
    return typed.TypedGpu.FromString(await call(api, "PatchGpu", patch_request(kind, patch, *subresources)))


def patch_request(kind: str, patch: object, *subresources: str) -> bytes:
    data = patch if isinstance(patch, bytes) else json.dumps(patch).encode()
    return sentinel_pb2.PatchGpuRequest(
        name="gpu-1", namespace="", patch_type=kind, data=data, subresources=subresources
    ).SerializeToString()


async def test_a_typed_client_reads_its_own_numbers(api: DeviceApi) -> None:
    await api.set_condition("gpu-1", "Ready", "False", reason="XidError", message="79")
    listed = typed_list(await call(api, "ListGpus", LIST))
    [gpu] = listed.items
    assert (listed.type_meta.kind, gpu.type_meta) == ("GPUList", KIND)
    assert listed.list_meta.resource_version == gpu.object_meta.resource_version != ""
    assert (gpu.object_meta.name, gpu.object_meta.namespace, gpu.spec.uuid) == ("gpu-1", "", "GPU-1")
    [ready] = gpu.status.conditions
    assert (ready.type, ready.status, ready.reason, ready.message) == ("Ready", "False", "XidError", "79")
    assert ready.last_transition_time.seconds > 0
    answer = await call(api, "GetGpu", GET)
    assert answer[0] == 0x0A
    assert typed.TypedGpu.FromString(answer[2:] if answer[1] < 0x80 else answer[3:]) == gpu


def typed_list(answer: bytes) -> typed.TypedGpuList:
    """The list in field 1 of an answer."""
    return typed.TypedGpuList.FromString(typed_field(answer, 1))


def typed_field(message: bytes, number: int) -> bytes:
    """The bytes of a length-delimited field, read without our generated code."""
    at = 0
    while at < len(message):
        tag, at = message[at], at + 1
        size = shift = 0
        while True:
            byte, at = message[at], at + 1
            size |= (byte & 0x7F) << shift
            shift += 7
            if byte < 0x80:
                break
        if tag == number << 3 | 2:
            return message[at : at + size]
        at += size
    return b""


async def test_the_setting_or_the_caller_may_say_typed(tmp_path: Path, api: DeviceApi) -> None:
    answer = await call(api, "ListGpus", b"", x_device_api_dialect="typed")
    assert typed_list(answer).items[0].object_meta.name == "gpu-1"
    folder = tmp_path / "set"
    folder.mkdir()
    async with device_api(folder, generation=Generation.TYPED) as other:
        await other.register("gpu-1")
        for request in (b"", b"\x12\x00"):  # generated clients that leave out what is empty
            assert typed_list(await call(other, "ListGpus", request)).items[0].object_meta.name == "gpu-1"


async def next_event(stream: Any) -> tuple[str, typed.TypedGpu]:
    raw = bytes(await stream.read())
    return typed_field(raw, 1).decode(), typed.TypedGpu.FromString(typed_field(raw, 2))


def watch(api: DeviceApi, **options: Any) -> Any:
    stream: Any = api.channel.unary_stream(SENTINEL + "WatchGpus")
    asked = typed.TypedListGpusRequest(namespace="", opts=typed.TypedListOptions(watch=True, **options))
    return stream(asked.SerializeToString())


async def test_initial_events_end_with_a_bookmark_and_changes_follow(api: DeviceApi) -> None:
    await api.register("gpu-2")
    stream = watch(
        api, allow_watch_bookmarks=True, send_initial_events=True, resource_version_match="NotOlderThan"
    )
    first, second = await next_event(stream), await next_event(stream)
    assert [first[0], second[0]] == ["ADDED", "ADDED"]
    kind, mark = await next_event(stream)
    assert (kind, mark.type_meta, mark.object_meta.name) == ("BOOKMARK", KIND, "")
    assert dict(mark.object_meta.annotations) == {"k8s.io/initial-events-end": "true"}
    version = mark.object_meta.resource_version
    assert int(version) >= int(second[1].object_meta.resource_version)
    await api.set_condition("gpu-1", "Ready", "True")
    kind, gpu = await next_event(stream)
    assert (kind, gpu.object_meta.name) == ("MODIFIED", "gpu-1")
    stream.cancel()

    # An informer that was cut off begins anew from what it saw last, and needs all of it again.
    again = watch(
        api, send_initial_events=True, resource_version_match="NotOlderThan", resource_version=version
    )
    assert [(await next_event(again))[0] for _ in range(3)] == ["ADDED", "ADDED", "BOOKMARK"]
    again.cancel()
    resumed = watch(api, resource_version=version)
    assert (await next_event(resumed))[1].object_meta.name == "gpu-1"
    resumed.cancel()


async def test_a_watch_of_so_many_seconds_ends_without_an_error(api: DeviceApi) -> None:
    stream = watch(api, timeout_seconds=1)
    assert (await next_event(stream))[0] == "ADDED"
    assert await stream.read() is grpc.aio.EOF
    assert await stream.code() is grpc.StatusCode.OK


async def test_options_that_cannot_be_kept_are_refused(api: DeviceApi) -> None:
    for options, words in (
        ({"send_initial_events": True}, "NotOlderThan"),
        ({"label_selector": "a=b"}, "labels"),
    ):
        with pytest.raises(grpc.aio.AioRpcError, match=words) as caught:
            await watch(api, **options).read()
        assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT


async def test_a_typed_client_writes_its_own_numbers(api: DeviceApi) -> None:
    made = typed.TypedGpu.FromString(
        await call(api, "CreateGpu", write(new("gpu-2", spec=typed.TypedGpuSpec(uuid="GPU-2"))))
    )
    assert (made.object_meta.name, made.spec.uuid, made.HasField("status")) == ("gpu-2", "GPU-2", False)
    made.status.conditions.add(type="Ready", status="True", reason="Fine", message="ok")
    after = typed.TypedGpu.FromString(await call(api, "UpdateGpuStatus", write(made)))
    assert after.status.conditions[0].reason == "Fine"
    assert (await refused(api, "UpdateGpuStatus", write(made)))[0] is grpc.StatusCode.ABORTED
    after.spec.uuid = "GPU-2b"
    again = typed.TypedGpu.FromString(await call(api, "UpdateGpu", write(after)))
    assert (again.spec.uuid, again.object_meta.generation) == ("GPU-2b", 2)
    again.object_meta.labels["a"] = "b"
    code, words = await refused(api, "UpdateGpu", write(again))
    assert (code, "labels" in words) == (grpc.StatusCode.INVALID_ARGUMENT, True)

    delete = sentinel_pb2.DeleteGpuRequest(name="gpu-2", namespace="")
    delete.opts.preconditions.uid = "another"
    assert (await refused(api, "DeleteGpu", delete.SerializeToString()))[0] is grpc.StatusCode.ABORTED
    delete.opts.preconditions.uid = again.object_meta.uid
    delete.opts.preconditions.resource_version = after.object_meta.resource_version
    assert (await refused(api, "DeleteGpu", delete.SerializeToString()))[0] is grpc.StatusCode.ABORTED
    delete.opts.preconditions.resource_version = again.object_meta.resource_version
    assert await call(api, "DeleteGpu", delete.SerializeToString()) == b""


async def test_a_later_write_is_not_taken_for_a_typed_one(api: DeviceApi) -> None:
    """A GPU named GPU, at a version: what a typed object has its kind in."""
    meta = gpu_pb2.ObjectMeta(name="GPU")
    create = sentinel_pb2.CreateGpuRequest(gpu=gpu_pb2.Gpu(metadata=meta)).SerializeToString()
    made = gpu_pb2.Gpu.FromString(await call(api, "CreateGpu", create))
    assert made.metadata.name == "GPU"
    update = sentinel_pb2.UpdateGpuRequest(gpu=made).SerializeToString()
    assert gpu_pb2.Gpu.FromString(await call(api, "UpdateGpu", update)).metadata.name == "GPU"


# Patches.


async def test_the_connectors_patch_sets_its_conditions_and_leaves_the_others(api: DeviceApi) -> None:
    await api.set_condition("gpu-1", "NVMLReady", "True", provider="nvml")
    reported = {"type": "GpuXidError", "status": "True", "reason": "Xid", "message": "79"}
    patch = {
        "status": {
            "conditions": [reported | {"lastTransitionTime": "2026-03-01T10:00:00Z"}],
            "recommendedAction": "RESTART_VM",
        }
    }
    gpu = await patched(api, STRATEGIC, patch, "status")
    assert [one.type for one in gpu.status.conditions] == ["NVMLReady", "GpuXidError"]
    assert gpu.status.conditions[1].last_transition_time.ToJsonString() == "2026-03-01T10:00:00Z"
    assert gpu.status.recommended_action == "RESTART_VM"
    kept = api.domain.stored_gpus()[0].conditions
    assert [one.writer for one in kept] == ["nvml", ""], "a condition left as it is stays its provider's"
    removed = {"status": {"conditions": [{"type": "GpuXidError", "$patch": "delete"}]}}
    gpu = await patched(api, STRATEGIC, removed, "status")
    assert [one.type for one in gpu.status.conditions] == ["NVMLReady"]


async def test_a_merge_patch_replaces_conditions_and_keeps_spec_and_status_apart(api: DeviceApi) -> None:
    await api.set_condition("gpu-1", "Ready", "True")
    both = {"spec": {"uuid": "GPU-9"}, "status": {"conditions": [{"type": "A", "status": "False"}]}}
    gpu = await patched(api, MERGE, both)
    assert (gpu.spec.uuid, [one.type for one in gpu.status.conditions]) == ("GPU-9", ["Ready"])
    assert gpu.object_meta.generation == 2
    both["spec"] = {"uuid": "GPU-1"}
    gpu = await patched(api, MERGE, both, "status")
    assert (gpu.spec.uuid, [one.type for one in gpu.status.conditions]) == ("GPU-9", ["A"])
    assert gpu.status.conditions[0].last_transition_time.seconds > 0


async def test_a_json_patch_is_applied_in_order(api: DeviceApi) -> None:
    condition = {"type": "A", "status": "True"}
    operations = [
        {"op": "test", "path": "/metadata/name", "value": "gpu-1"},
        {"op": "add", "path": "/status/conditions/-", "value": condition},
        {"op": "copy", "from": "/status/conditions/0", "path": "/status/conditions/0"},
        {"op": "replace", "path": "/status/conditions/0/type", "value": "B"},
        {"op": "move", "from": "/status/conditions/0", "path": "/status/conditions/1"},
        {"op": "replace", "path": "/status/recommendedAction", "value": "RESET"},
    ]
    gpu = await patched(api, JSON_PATCH, operations, "status")
    assert [one.type for one in gpu.status.conditions] == ["A", "B"]
    assert gpu.status.recommended_action == "RESET"
    gpu = await patched(api, JSON_PATCH, [{"op": "remove", "path": "/status/conditions/0"}], "status")
    assert [one.type for one in gpu.status.conditions] == ["B"]


NESTED = b'{"status":' * 20_000
REFUSED: list[tuple[str, Any, grpc.StatusCode, str]] = [
    ("application/apply-patch+yaml", {}, grpc.StatusCode.INVALID_ARGUMENT, "unsupported media type:"),
    (MERGE, b"{", grpc.StatusCode.INVALID_ARGUMENT, "unprocessable content:"),
    (MERGE, NESTED, grpc.StatusCode.INVALID_ARGUMENT, "larger than"),
    (MERGE, NESTED[:60_000], grpc.StatusCode.INVALID_ARGUMENT, "unprocessable content:"),
    (MERGE, [], grpc.StatusCode.INVALID_ARGUMENT, "unprocessable content:"),
    (STRATEGIC, [], grpc.StatusCode.INVALID_ARGUMENT, "unprocessable content:"),
    (STRATEGIC, {"status": {"conditions": [1]}}, grpc.StatusCode.INVALID_ARGUMENT, "unprocessable content:"),
    (MERGE, {"status": {"conditions": [{}]}}, grpc.StatusCode.INVALID_ARGUMENT, "unprocessable content:"),
    (MERGE, {"metadata": {"uid": "another"}}, grpc.StatusCode.INVALID_ARGUMENT, "uid"),
    (MERGE, {"metadata": {"name": "another"}}, grpc.StatusCode.INVALID_ARGUMENT, "name"),
    (MERGE, {"metadata": {"labels": {"a": "b"}}}, grpc.StatusCode.INVALID_ARGUMENT, "labels"),
    (MERGE, {"metadata": {"resourceVersion": "9999"}}, grpc.StatusCode.ABORTED, "resource_version"),
    (JSON_PATCH, {}, grpc.StatusCode.INVALID_ARGUMENT, "of a GPU"),
    (JSON_PATCH, [{"op": "test", "path": "/kind", "value": 1}], grpc.StatusCode.INVALID_ARGUMENT, "test"),
    (JSON_PATCH, [{"op": "remove", "path": "/x"}], grpc.StatusCode.INVALID_ARGUMENT, "unprocessable"),
    (JSON_PATCH, [1], grpc.StatusCode.INVALID_ARGUMENT, "unprocessable"),
    (JSON_PATCH, [{"op": "grow", "path": ""}], grpc.StatusCode.INVALID_ARGUMENT, "unprocessable"),
    (
        JSON_PATCH,
        [{"op": "copy", "from": "", "path": f"/{number}"} for number in range(64)],
        grpc.StatusCode.INVALID_ARGUMENT,
        "copied",
    ),
    (JSON_PATCH, [{"op": "remove", "path": ""}], grpc.StatusCode.INVALID_ARGUMENT, "unprocessable"),
    (
        JSON_PATCH,
        [{"op": "add", "path": "/status/conditions/9", "value": {}}],
        grpc.StatusCode.INVALID_ARGUMENT,
        "no place",
    ),
]


async def test_a_patch_that_cannot_be_applied_says_why_and_changes_nothing(api: DeviceApi) -> None:
    before = api.domain.stored_gpus()
    for kind, patch, code, words in REFUSED:
        told = await refused(api, "PatchGpu", patch_request(kind, patch, "status"))
        assert told[0] is code, (kind, patch, told)
        assert words in told[1], (kind, patch, told)
    gone = sentinel_pb2.PatchGpuRequest(name="gone", patch_type=MERGE, data=b"{}").SerializeToString()
    assert (await refused(api, "PatchGpu", gone))[0] is grpc.StatusCode.NOT_FOUND
    assert api.domain.stored_gpus() == before
