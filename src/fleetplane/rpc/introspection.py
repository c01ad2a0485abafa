"""Health and reflection for every gRPC listener, by their official servicers, unchanged."""

from __future__ import annotations

from collections.abc import Iterator
from typing import cast

import grpc
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection, reflection_pb2, reflection_pb2_grpc

from fleetplane.rpc.app import GrpcApp
from fleetplane.rpc.methods import Authentication, MethodRow

REFLECTION_V1 = "grpc.reflection.v1.ServerReflection"
_METHODS = (
    *(
        f"{health.SERVICE_NAME}/{method.name}"
        for method in health_pb2.DESCRIPTOR.services_by_name["Health"].methods
    ),
    f"{reflection.SERVICE_NAME}/ServerReflectionInfo",
    f"{REFLECTION_V1}/ServerReflectionInfo",
)


def introspection_methods(listener: str) -> Iterator[MethodRow]:
    """The table's rows for health and reflection: anyone who reaches a listener may ask."""
    for method in _METHODS:
        yield MethodRow(
            path=f"/{method}", listener=listener, authentication=Authentication.ANONYMOUS, permission=None
        )


class HealthBoard:
    """One word about the whole server, told on every listener and for every service."""

    def __init__(self) -> None:
        self._servicer = health.aio.HealthServicer()
        self._names: set[str] = {health.OVERALL_HEALTH}

    def add_to(self, app: GrpcApp) -> None:
        self._names.update(app.services())
        health_pb2_grpc.add_HealthServicer_to_server(self._servicer, cast(grpc.aio.Server, app))

    async def serving(self) -> None:
        for name in sorted(self._names):
            await self._servicer.set(name, health_pb2.HealthCheckResponse.SERVING)

    async def draining(self) -> None:
        await self._servicer.enter_graceful_shutdown()


def add_reflection(app: GrpcApp) -> None:
    """Both generations of reflection; their messages are the same on the wire."""
    names = [*app.services(), reflection.SERVICE_NAME]
    servicer = reflection.aio.ReflectionServicer(service_names=names)
    reflection_pb2_grpc.add_ServerReflectionServicer_to_server(servicer, cast(grpc.aio.Server, app))
    handler = grpc.stream_stream_rpc_method_handler(
        servicer.ServerReflectionInfo,
        request_deserializer=reflection_pb2.ServerReflectionRequest.FromString,
        response_serializer=reflection_pb2.ServerReflectionResponse.SerializeToString,
    )
    app.add_generic_rpc_handlers(
        (grpc.method_handlers_generic_handler(REFLECTION_V1, {"ServerReflectionInfo": handler}),)
    )
