"""The official health and reflection servicers run unchanged."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection, reflection_pb2, reflection_pb2_grpc
from support.rpc.probe import SERVICE, Probe
from support.rpc.targets import make_app, rows

from fleetplane.rpc import Authentication, ListenerSpec, MethodRow, open_listener
from fleetplane.rpc.introspection import published_pool

V1 = "grpc.reflection.v1.ServerReflection"
Health = health_pb2.HealthCheckResponse


@pytest.fixture
async def served() -> AsyncIterator[tuple[grpc.aio.Channel, health.aio.HealthServicer]]:
    paths = (
        f"/{health.SERVICE_NAME}/Check",
        f"/{health.SERVICE_NAME}/Watch",
        f"/{health.SERVICE_NAME}/List",
        f"/{reflection.SERVICE_NAME}/ServerReflectionInfo",
        f"/{V1}/ServerReflectionInfo",
    )
    known = {method.name for method in health_pb2.DESCRIPTOR.services_by_name["Health"].methods}
    table = [
        MethodRow(path=path, listener="probe", authentication=Authentication.ANONYMOUS, permission=None)
        for path in paths
        if not path.startswith(f"/{health.SERVICE_NAME}") or path.rpartition("/")[2] in known
    ]
    app = make_app(Probe(), rows() + table, seal=False)
    as_server: Any = app
    servicer = health.aio.HealthServicer()
    health_pb2_grpc.add_HealthServicer_to_server(servicer, as_server)
    names = (*app.services(), reflection.SERVICE_NAME)
    reflector = reflection.aio.ReflectionServicer(service_names=names)
    reflection_pb2_grpc.add_ServerReflectionServicer_to_server(reflector, as_server)
    method = grpc.stream_stream_rpc_method_handler(
        reflector.ServerReflectionInfo,
        request_deserializer=reflection_pb2.ServerReflectionRequest.FromString,
        response_serializer=reflection_pb2.ServerReflectionResponse.SerializeToString,
    )
    handler = grpc.method_handlers_generic_handler(V1, {"ServerReflectionInfo": method})
    app.add_generic_rpc_handlers((handler,))
    app.seal()
    async with open_listener(
        ListenerSpec(name="probe", addresses=("127.0.0.1:0",), app=app), grace_seconds=0.1
    ) as listener:
        async with grpc.aio.insecure_channel(listener.addresses[0].removeprefix("http://")) as channel:
            yield channel, servicer
        await app.drain(0.0)


async def test_health_can_be_asked(served: tuple[grpc.aio.Channel, health.aio.HealthServicer]) -> None:
    channel, servicer = served
    stub: Any = health_pb2_grpc.HealthStub(channel)
    await servicer.set(SERVICE, Health.SERVING)
    assert (await stub.Check(health_pb2.HealthCheckRequest(service=SERVICE))).status == Health.SERVING
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await stub.Check(health_pb2.HealthCheckRequest(service="nobody"))
    assert caught.value.code() is grpc.StatusCode.NOT_FOUND


async def test_health_can_be_watched(served: tuple[grpc.aio.Channel, health.aio.HealthServicer]) -> None:
    channel, servicer = served
    stub: Any = health_pb2_grpc.HealthStub(channel)
    watch = stub.Watch(health_pb2.HealthCheckRequest(service=SERVICE))
    assert (await watch.read()).status == Health.SERVICE_UNKNOWN
    await servicer.set(SERVICE, Health.SERVING)
    assert (await watch.read()).status == Health.SERVING
    await servicer.enter_graceful_shutdown()
    assert (await watch.read()).status == Health.NOT_SERVING
    watch.cancel()


@pytest.mark.parametrize("generation", [reflection.SERVICE_NAME, V1])
async def test_reflection_answers_in_both_generations(
    served: tuple[grpc.aio.Channel, health.aio.HealthServicer], generation: str
) -> None:
    channel, _ = served
    call: Any = channel.stream_stream(
        f"/{generation}/ServerReflectionInfo",
        request_serializer=reflection_pb2.ServerReflectionRequest.SerializeToString,
        response_deserializer=reflection_pb2.ServerReflectionResponse.FromString,
    )()
    await call.write(reflection_pb2.ServerReflectionRequest(list_services=""))
    listed = {service.name for service in (await call.read()).list_services_response.service}
    assert {SERVICE, health.SERVICE_NAME, reflection.SERVICE_NAME} <= listed
    await call.write(reflection_pb2.ServerReflectionRequest(file_containing_symbol=SERVICE))
    files = (await call.read()).file_descriptor_response.file_descriptor_proto
    assert any(b"probe.proto" in file for file in files)
    await call.done_writing()
    assert await call.read() is grpc.aio.EOF


@pytest.mark.parametrize("detail", ["ErrorInfo", "BadRequest", "RetryInfo", "LocalizedMessage"])
def test_the_details_of_rich_errors_can_be_looked_up_too(detail: str) -> None:
    pool = published_pool([SERVICE])
    assert pool.FindFileContainingSymbol(f"google.rpc.{detail}").name == "google/rpc/error_details.proto"
