from __future__ import annotations

from typing import Any

import pytest
from google.protobuf import json_format
from hypothesis import given
from hypothesis import strategies as st

from fleetplane.domains.gpus import wire
from fleetplane.domains.gpus.kinds import Gpu, GpuSpec, GpuStatus
from fleetplane.domains.gpus.wire import GpuDialect
from fleetplane.gen.fleetplane.device.v1alpha1 import named_pb2
from fleetplane.gen.nvidia.device.v1alpha1 import gpu_pb2, provider_pb2
from fleetplane.gen.nvidia.nvsentinel.v1alpha1 import gpu_pb2 as first_pb2
from fleetplane.kernel.errors import InvalidArgument
from fleetplane.kernel.resources import Condition, Resource


def gpu(
    name: str = "gpu-a",
    *,
    uuid: str | None = None,
    status: GpuStatus | None = None,
    conditions: tuple[Condition, ...] = (),
    revision: int = 1,
) -> Gpu:
    return Resource(
        kind="gpu",
        scope="tenant/default",
        name=name,
        uid="u",
        labels={},
        spec=GpuSpec(uuid=uuid),
        status=status,
        conditions=conditions,
        revision=revision,
        created_revision=1,
        generation=1,
        created_at_ns=0,
        updated_at_ns=0,
    )


def test_the_meta_dialect_sends_the_bytes_of_the_original_server() -> None:
    # Captured from the original server, for a GPU without spec and status.
    assert wire.encode_get(wire.encode_gpu(gpu(), GpuDialect.META)) == bytes.fromhex(
        "0a0b0a070a056770752d612001"
    )


def test_an_empty_list_in_the_meta_dialect_still_carries_the_list() -> None:
    assert wire.encode_list([], 0, GpuDialect.META) == bytes.fromhex("0a00")


def test_the_superset_shows_the_name_in_both_places_and_the_version_in_three() -> None:
    item = wire.encode_gpu(gpu(revision=42), GpuDialect.SUPERSET)
    read = gpu_pb2.ListGpusResponse.FromString(wire.encode_list([item], 43, GpuDialect.SUPERSET))

    assert json_format.MessageToDict(read) == {
        "gpuList": {
            "metadata": {"resourceVersion": "43"},
            "items": [
                {
                    "metadata": {"name": "gpu-a", "resourceVersion": "42"},
                    "resourceVersion": "42",
                    "name": "gpu-a",
                }
            ],
        }
    }


def test_the_name_dialect_reads_as_the_reference_shows_it() -> None:
    item = wire.encode_gpu(
        gpu(
            uuid="GPU-1",
            status=GpuStatus(),
            revision=42,
            conditions=(Condition(type="Ready", status="True", changed_at_ns=1_769_000_000_500_000_000),),
        ),
        GpuDialect.NAME,
    )
    read = named_pb2.NamedListGpusResponse.FromString(wire.encode_list([item], 42, GpuDialect.NAME))

    [shown] = json_format.MessageToDict(read)["gpuList"]["items"]
    assert shown == {
        "name": "gpu-a",
        "spec": {"uuid": "GPU-1"},
        "status": {
            "conditions": [
                {"type": "Ready", "status": "True", "lastTransitionTime": "2026-01-21T12:53:20.500Z"}
            ]
        },
        "resourceVersion": "42",
    }


def test_the_first_generation_has_no_version() -> None:
    item = wire.encode_gpu(gpu(revision=42), GpuDialect.FIRST)
    read = first_pb2.ListGpusResponse.FromString(wire.encode_list([item], 42, GpuDialect.FIRST))

    assert json_format.MessageToDict(read) == {"gpuList": {"items": [{"name": "gpu-a"}]}}


def test_no_spec_differs_from_an_empty_spec_and_no_status_from_an_empty_status() -> None:
    bare = gpu_pb2.Gpu.FromString(wire.encode_gpu(gpu(), GpuDialect.META))
    empty = gpu_pb2.Gpu.FromString(wire.encode_gpu(gpu(uuid="", status=GpuStatus()), GpuDialect.META))

    assert (bare.HasField("spec"), bare.HasField("status")) == (False, False)
    assert (empty.HasField("spec"), empty.HasField("status")) == (True, True)


texts = st.text(max_size=16)  # at most 64 bytes, the narrowest bound
messages = st.builds(
    gpu_pb2.GpuStatus,
    recommended_action=texts,
    conditions=st.lists(
        st.builds(
            gpu_pb2.Condition,
            type=texts,
            status=texts,
            reason=texts,
            message=texts,
        ),
        max_size=5,
    ),
)


@given(texts.filter(bool), messages, st.integers(1, 2**62))
def test_what_a_provider_reports_is_what_a_consumer_reads(
    name: str, status: gpu_pb2.GpuStatus, revision: int
) -> None:
    for entry in status.conditions[:2]:
        entry.last_transition_time.FromNanoseconds(revision // 2)
    report = wire.report(status, writer="nvml")
    stored = gpu(
        name,
        status=GpuStatus(recommended_action=report.recommended_action),
        conditions=report.conditions,
        revision=revision,
    )

    for dialect, kind in (
        (GpuDialect.SUPERSET, gpu_pb2.Gpu),
        (GpuDialect.META, gpu_pb2.Gpu),
        (GpuDialect.NAME, named_pb2.NamedGpu),
        (GpuDialect.FIRST, first_pb2.Gpu),
    ):
        read: Any = kind.FromString(wire.encode_gpu(stored, dialect))
        assert read.status.SerializeToString() == status.SerializeToString()
        assert name == (read.metadata.name if dialect is GpuDialect.META else read.name)


@given(st.lists(st.binary(max_size=300), max_size=5), st.integers(0, 2**62))
def test_stitched_answers_equal_those_that_protobuf_builds(names: list[bytes], version: int) -> None:
    gpus = [gpu(name.hex() or "x", revision=version + 1) for name in names]
    items = [wire.encode_gpu(one, GpuDialect.SUPERSET) for one in gpus]
    built = gpu_pb2.ListGpusResponse(
        gpu_list=gpu_pb2.GpuList(
            metadata=gpu_pb2.ListMeta(resource_version=str(version)),
            items=[gpu_pb2.Gpu.FromString(item) for item in items],
        )
    )
    event = gpu_pb2.WatchGpusResponse(type="ADDED", object=gpu_pb2.Gpu(name="x"))

    assert wire.encode_list(items, version, GpuDialect.SUPERSET) == built.SerializeToString()
    assert wire.encode_event("ADDED", gpu_pb2.Gpu(name="x").SerializeToString()) == event.SerializeToString()


@pytest.mark.parametrize(
    ("call", "field", "message"),
    [
        (lambda: wire.gpu_name(""), "name", "name is required"),
        (lambda: wire.gpu_name("a\0"), "name", "NUL"),
        (lambda: wire.gpu_name("é" * 300), "name", "longer than 512 bytes"),
        (lambda: wire.required_provider_id(""), "provider_id", "provider_id is required"),
        (
            lambda: wire.resource_version("x7"),
            "opts.resource_version",
            'invalid resource_version "x7": must be numeric',
        ),
        (lambda: wire.resource_version("-1"), "opts.resource_version", "must be numeric"),
        (lambda: wire.resource_version("9" * 40), "opts.resource_version", "must be numeric"),
        (lambda: wire.resource_version("٣"), "opts.resource_version", "must be numeric"),
        (
            lambda: wire.required_condition(provider_pb2.UpdateGpuConditionRequest(), writer=""),
            "condition",
            "condition is required",
        ),
        (
            lambda: wire.required_condition(
                provider_pb2.UpdateGpuConditionRequest(condition=gpu_pb2.Condition(status="True")), writer=""
            ),
            "condition.type",
            "condition type is required",
        ),
        (
            lambda: wire.report(
                gpu_pb2.GpuStatus(conditions=[gpu_pb2.Condition(), gpu_pb2.Condition(reason="r" * 2000)]),
                writer="",
            ),
            "status.conditions[1].reason",
            "longer than 1024 bytes",
        ),
        (lambda: wire.dialect("klingon"), "x-device-api-dialect", "known are superset, meta, name"),
        (lambda: wire.dialect("first"), "x-device-api-dialect", "unknown dialect"),
    ],
)
def test_bad_input_is_refused_naming_the_field_and_the_reason(call, field: str, message: str) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(InvalidArgument) as caught:
        call()

    assert caught.value.field == field
    assert message in caught.value.message


@pytest.mark.parametrize(("seconds", "nanos"), [(2**62, 0), (-(2**62), 0), (0, -1), (0, 2_000_000_000)])
def test_a_time_out_of_range_is_refused(seconds: int, nanos: int) -> None:
    message = gpu_pb2.Condition(type="T")
    message.last_transition_time.seconds, message.last_transition_time.nanos = seconds, nanos

    with pytest.raises(InvalidArgument, match="last_transition_time is out of range"):
        wire.condition(message, writer="")


@pytest.mark.parametrize(("text", "expected"), [("", None), ("0", None), ("17", 17)])
def test_no_version_or_zero_means_a_fresh_start(text: str, expected: int | None) -> None:
    assert wire.resource_version(text) == expected
