"""From servicers to handlers: one object per method with everything a call of it needs.

Reads protobuf service descriptors and the handler objects that generated code registers.
Decides nothing about a call.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import grpc
from google.protobuf import message_factory
from google.protobuf.descriptor import MethodDescriptor, ServiceDescriptor

from fleetplane.kernel.errors import SettingsError
from fleetplane.rpc.serving.framing import Framed

ImmediateAnswer = Callable[[bytes, Mapping[bytes, bytes]], Framed | None]
"""Answers a unary call from its request's bytes and its header fields without waiting for anything;
None if it cannot. What it answers, or raises, is what the method's coroutine would."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Handler:
    """One method of a servicer, with its codecs. `None` as a codec means: bytes as they are."""

    path: str
    behaviour: Callable[[Any, Any], Any]
    request_streaming: bool
    response_streaming: bool
    deserialize: Callable[[bytes], Any] | None
    serialize: Callable[[Any], bytes] | None
    immediate: ImmediateAnswer | None = None
    """The short way beside `behaviour`, where the servicer offers one."""

    @property
    def service(self) -> str:
        return self.path[1:].partition("/")[0]


def handlers_of_descriptor(
    descriptor: ServiceDescriptor, servicer: object, *, raw_requests: Collection[str] = ()
) -> Iterable[Handler]:
    """Bind each method of a service to the servicer's attribute of the same name.

    Methods named in `raw_requests` get their requests as bytes: for messages whose shape
    depends on what is in them. A servicer that has an attribute `immediate`, from names of unary
    methods to functions, offers these as short ways to the same answers.
    """
    immediate: Mapping[str, ImmediateAnswer] = getattr(servicer, "immediate", {})
    unary = {method.name for method in descriptor.methods if not _is_streaming(method)}
    if immediate.keys() - unary:
        raise SettingsError(
            f"{type(servicer).__name__} has a short way for {', '.join(sorted(immediate.keys() - unary))}; "
            f"only unary methods of {descriptor.full_name} can have one"
        )
    for method in descriptor.methods:
        behaviour = getattr(servicer, method.name, None)
        if behaviour is None:
            raise SettingsError(
                f"{type(servicer).__name__} has no method {method.name} of {descriptor.full_name}"
            )
        yield Handler(
            path=f"/{descriptor.full_name}/{method.name}",
            behaviour=behaviour,
            request_streaming=method.client_streaming,
            response_streaming=method.server_streaming,
            deserialize=(
                None
                if method.name in raw_requests
                else message_factory.GetMessageClass(method.input_type).FromString
            ),
            serialize=message_factory.GetMessageClass(method.output_type).SerializeToString,
            immediate=immediate.get(method.name),
        )


def _is_streaming(method: MethodDescriptor) -> bool:
    return method.client_streaming or method.server_streaming


def handler_of_grpc(path: str, handler: grpc.RpcMethodHandler[Any, Any]) -> Handler:
    """Adopt what generated code registers on a grpc server."""
    match handler.request_streaming, handler.response_streaming:
        case False, False:
            behaviour = handler.unary_unary
        case False, True:
            behaviour = handler.unary_stream
        case True, False:
            behaviour = handler.stream_unary
        case _:
            behaviour = handler.stream_stream
    assert behaviour is not None
    return Handler(
        path=path,
        behaviour=behaviour,
        request_streaming=handler.request_streaming,
        response_streaming=handler.response_streaming,
        deserialize=handler.request_deserializer,
        serialize=handler.response_serializer,
    )


def handlers_of_service(
    service: str, methods: Mapping[str, grpc.RpcMethodHandler[Any, Any]]
) -> Iterable[Handler]:
    for name, handler in methods.items():
        yield handler_of_grpc(f"/{service}/{name}", handler)


class _Details(grpc.HandlerCallDetails):
    """The question a generic handler answers: does it serve this path?"""

    def __init__(self, path: str) -> None:
        self.method = path
        self.invocation_metadata = ()


def handler_from_generic(path: str, generic: Iterable[grpc.GenericRpcHandler]) -> Handler | None:
    for candidate in generic:
        found = candidate.service(_Details(path))
        if found is not None:
            return handler_of_grpc(path, found)
    return None
