"""GPUs, built from their settings."""

from __future__ import annotations

import socket

from fleetplane.domains.blueprint import Domain, Kernel, ServerContext
from fleetplane.domains.gpus.server import GpuDomain
from fleetplane.domains.gpus.settings import DeviceApiSettings, GpuSettings


async def build(wanted: GpuSettings, context: ServerContext, kernel: Kernel) -> Domain:
    return GpuDomain(
        kernel,
        wanted.policy(),
        dialect=context.listener("device-api", DeviceApiSettings).dialect,
        tcp_writes=context.listener("device-api", DeviceApiSettings).tcp_writes,
        generation=context.listener("device-api", DeviceApiSettings).nvsentinel_generation,
        version=context.version,
        node=wanted.node or socket.gethostname(),
    )
