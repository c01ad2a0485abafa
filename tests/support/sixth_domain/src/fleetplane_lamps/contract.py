"""The protobuf contract `lamps.v1`. A larger domain has a `.proto` file, compiled when it is built."""

from __future__ import annotations

from typing import Any

from google.protobuf import descriptor_pb2, descriptor_pool, message_factory

PACKAGE = "lamps.v1"
_FIELD = descriptor_pb2.FieldDescriptorProto


def _file() -> descriptor_pb2.FileDescriptorProto:
    made = descriptor_pb2.FileDescriptorProto(name="lamps/v1/lamps.proto", package=PACKAGE, syntax="proto3")
    report = made.message_type.add(name="ReportRequest")
    report.field.add(name="name", number=1, type=_FIELD.TYPE_STRING, label=_FIELD.LABEL_OPTIONAL)
    report.field.add(name="lit", number=2, type=_FIELD.TYPE_BOOL, label=_FIELD.LABEL_OPTIONAL)
    made.message_type.add(name="ReportResponse")
    made.service.add(name="Lamps").method.add(
        name="Report", input_type=f".{PACKAGE}.ReportRequest", output_type=f".{PACKAGE}.ReportResponse"
    )
    return made


_pool = descriptor_pool.Default()
_pool.Add(_file())
SERVICE = _pool.FindServiceByName(f"{PACKAGE}.Lamps")
ReportRequest: Any = message_factory.GetMessageClass(SERVICE.methods_by_name["Report"].input_type)
ReportResponse: Any = message_factory.GetMessageClass(SERVICE.methods_by_name["Report"].output_type)
