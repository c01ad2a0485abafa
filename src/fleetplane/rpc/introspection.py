"""Health and reflection for every gRPC listener, by their official servicers, unchanged."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any, cast

import grpc
from google.protobuf import descriptor_pool
from google.protobuf.descriptor import FileDescriptor
from google.protobuf.descriptor_pb2 import FileDescriptorProto
from google.protobuf.descriptor_pool import DescriptorPool
from google.rpc import error_details_pb2  # type: ignore[import-untyped]
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection, reflection_pb2, reflection_pb2_grpc

from fleetplane.rpc.methods import Authentication, MethodRow, Needs
from fleetplane.rpc.serving.app import GrpcApp

READS = "fleetplane.reads"
"""The name under which a server says that it answers reads, though it may refuse everything else."""
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
            path=f"/{method}",
            listener=listener,
            authentication=Authentication.ANONYMOUS,
            permission=None,
            # Clients that balance by health keep a watch open for as long as they live.
            endless=not method.endswith("/Check"),
            needs=Needs.NOTHING,
        )


class _Health(health.aio.HealthServicer):
    may_serve: Callable[[], bool] = staticmethod(lambda: True)

    async def Check(  # noqa: N802  # the protocol's
        self, request: health_pb2.HealthCheckRequest, context: Any
    ) -> health_pb2.HealthCheckResponse:
        found: health_pb2.HealthCheckResponse = await super().Check(request, context)
        if found.status == health_pb2.HealthCheckResponse.SERVING and not self.may_serve():
            return health_pb2.HealthCheckResponse(status=health_pb2.HealthCheckResponse.NOT_SERVING)
        return found


class HealthBoard:
    """The health status of the whole server, served on every listener and for every service."""

    def __init__(self) -> None:
        self._servicer = _Health()
        self._names: set[str] = {health.OVERALL_HEALTH, READS}
        self._anywhere: set[str] = {READS}
        self._reads: bool | None = None

    def serves_while(self, may_serve: Callable[[], bool]) -> None:
        """Say that nothing is served, whatever is set, as soon as this does not hold."""
        self._servicer.may_serve = may_serve

    def add_to(self, app: GrpcApp) -> None:
        self._names.update(app.services())
        health_pb2_grpc.add_HealthServicer_to_server(self._servicer, cast("grpc.aio.Server", app))

    def add_anywhere(self, app: GrpcApp) -> None:
        """Of an application that is sealed: learn what it serves on every server."""
        self._anywhere.update(app.services_anywhere())

    async def serving(self) -> None:
        for name in sorted(self._names):
            await self._servicer.set(name, health_pb2.HealthCheckResponse.SERVING)

    async def standing_by(self, *, reads: bool) -> None:
        """Not everything is served here, but what every server serves is, while this one is up to date."""
        if self._reads is reads:
            return
        self._reads = reads
        for name in sorted(self._names):
            serves = reads and name in self._anywhere
            status = health_pb2.HealthCheckResponse
            await self._servicer.set(name, status.SERVING if serves else status.NOT_SERVING)

    async def draining(self) -> None:
        await self._servicer.enter_graceful_shutdown()


def add_reflection(app: GrpcApp) -> None:
    """Both generations of reflection; their messages are the same on the wire."""
    names = [*app.services(), reflection.SERVICE_NAME, REFLECTION_V1]
    servicer = reflection.aio.ReflectionServicer(service_names=names, pool=published_pool(names))
    reflection_pb2_grpc.add_ServerReflectionServicer_to_server(servicer, cast("grpc.aio.Server", app))
    handler = grpc.stream_stream_rpc_method_handler(
        servicer.ServerReflectionInfo,
        request_deserializer=reflection_pb2.ServerReflectionRequest.FromString,
        response_serializer=reflection_pb2.ServerReflectionResponse.SerializeToString,
    )
    app.add_generic_rpc_handlers(
        (grpc.method_handlers_generic_handler(REFLECTION_V1, {"ServerReflectionInfo": handler}),)
    )


def published_pool(services: Iterable[str]) -> DescriptorPool:
    """The descriptors that reflection shows: ours, with the JSON names that clients print.

    Python's generated code leaves the JSON names out, and clients then print the fields' own
    names, so they are filled in on copies. The second generation of reflection has no
    generated code in Python; its description is that of the first under another package.
    """
    pool = DescriptorPool()
    added: set[str] = set()
    for service in services:
        if service == REFLECTION_V1:
            pool.Add(_renamed(FileDescriptorProto.FromString(reflection_pb2.DESCRIPTOR.serialized_pb)))
        else:
            _publish(descriptor_pool.Default().FindFileContainingSymbol(service), pool, added)
    # No service mentions what rich errors carry, but clients that print errors ask for it.
    _publish(error_details_pb2.DESCRIPTOR, pool, added)
    return pool


def _publish(file: FileDescriptor, pool: DescriptorPool, added: set[str]) -> None:
    if file.name in added:
        return
    added.add(file.name)
    for dependency in file.dependencies:
        _publish(dependency, pool, added)
    pool.Add(_with_json_names(FileDescriptorProto.FromString(file.serialized_pb)))


def _with_json_names(file: FileDescriptorProto) -> FileDescriptorProto:
    pending = list(file.message_type)
    while pending:
        message = pending.pop()
        pending += message.nested_type
        for field in message.field:
            head, *tail = field.name.split("_")
            field.json_name = field.json_name or head + "".join(part[:1].upper() + part[1:] for part in tail)
    return file


def _renamed(file: FileDescriptorProto) -> FileDescriptorProto:
    """The first generation's file as the second's."""
    old, new = f".{file.package}.", ".grpc.reflection.v1."
    file.package, file.name = "grpc.reflection.v1", "grpc/reflection/v1/reflection.proto"
    for message in file.message_type:
        for field in message.field:
            if field.type_name:  # setting it on a scalar, even to nothing, would make it invalid
                field.type_name = field.type_name.replace(old, new)
    for service in file.service:
        for method in service.method:
            method.input_type = method.input_type.replace(old, new)
            method.output_type = method.output_type.replace(old, new)
    return _with_json_names(file)
