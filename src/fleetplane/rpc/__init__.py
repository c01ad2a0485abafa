"""gRPC on ASGI: framing, status, metadata, deadlines, service binding and the method table."""

from fleetplane.rpc.app import GrpcApp
from fleetplane.rpc.connection import Authenticator, Connection, FixedPrincipal
from fleetplane.rpc.context import CallContext
from fleetplane.rpc.framing import Framed
from fleetplane.rpc.handlers import ImmediateAnswer
from fleetplane.rpc.limits import Bound, RpcLimits
from fleetplane.rpc.listeners import Listener, ListenerSpec, TlsFiles, open_listener
from fleetplane.rpc.methods import Authentication, MethodRow, MethodTable, Rate
from fleetplane.rpc.statistics import CallStatistics, MethodStatistics

__all__ = [
    "Authentication",
    "Authenticator",
    "Bound",
    "CallContext",
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
    "Rate",
    "RpcLimits",
    "TlsFiles",
    "open_listener",
]
