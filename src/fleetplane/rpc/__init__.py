"""gRPC on ASGI: framing, status, metadata, deadlines, service binding and the method table."""

from fleetplane.rpc.listening.listeners import Listener, ListenerSpec, TlsFiles, open_listener
from fleetplane.rpc.methods import Authentication, MethodRow, MethodTable, Needs, Rate, service_rows
from fleetplane.rpc.serving.app import GrpcApp
from fleetplane.rpc.serving.connection import Authenticator, Connection, FixedPrincipal, Shared
from fleetplane.rpc.serving.context import CallContext, CallGate
from fleetplane.rpc.serving.framing import Framed
from fleetplane.rpc.serving.guard import Bound, RpcLimits
from fleetplane.rpc.serving.handlers import ImmediateAnswer
from fleetplane.rpc.statistics import CallStatistics, MethodStatistics

__all__ = [
    "Authentication",
    "Authenticator",
    "Bound",
    "CallContext",
    "CallGate",
    "CallStatistics",
    "Connection",
    "FixedPrincipal",
    "Framed",
    "GrpcApp",
    "ImmediateAnswer",
    "Listener",
    "ListenerSpec",
    "MethodRow",
    "MethodStatistics",
    "MethodTable",
    "Needs",
    "Rate",
    "RpcLimits",
    "Shared",
    "TlsFiles",
    "open_listener",
    "service_rows",
]
