"""Edge daemons, built from their settings."""

from __future__ import annotations

from pathlib import Path

from fleetplane.domains.blueprint import Domain, Kernel, ServerContext
from fleetplane.domains.edge.grpc.relay import RelayOptions
from fleetplane.domains.edge.identity.policy import IdentityPolicy, ServerRole
from fleetplane.domains.edge.server import EdgeDomain, EdgeOptions
from fleetplane.domains.edge.settings import EdgeSettings
from fleetplane.domains.edge.streams.assembly import StreamOptions
from fleetplane.domains.edge.streams.tool_calls import DispatchPolicy
from fleetplane.domains.edge.streams.verification import SealPolicy
from fleetplane.domains.edge.workers.forwarding import check_entry


async def build(wanted: EdgeSettings, context: ServerContext, kernel: Kernel) -> Domain:
    identity = IdentityPolicy(
        role=ServerRole(wanted.role),
        node_token_seconds=wanted.node_token_days * 86_400.0,
        enrollment_seconds=wanted.enrollment_token_seconds,
        overlap_seconds=wanted.overlap_seconds,
        attests_per_minute=wanted.attests_per_minute,
        trusted_proxies=wanted.trusted_proxies,
        forward_to=tuple(check_entry(entry) for entry in wanted.forward_to),
        skew_seconds=wanted.skew_seconds,
    )
    streams = StreamOptions(
        stale_seconds=wanted.stale_seconds,
        seal=SealPolicy(
            skew_seconds=wanted.skew_seconds,
            strict=wanted.strict,
            first_generation=wanted.first_generation,
            output_checked=wanted.output_checked,
        ),
        dispatch=DispatchPolicy(in_flight=wanted.in_flight),
    )
    options = EdgeOptions(
        version=context.version,
        public_endpoint=wanted.public_endpoint,
        issuer=wanted.issuer,
        identity=identity,
        streams=streams,
        deadline_seconds=wanted.deadline_seconds,
        shipped_shapes=wanted.shipped_shapes,
        relay=None
        if not wanted.relay_coordinator_endpoint
        else RelayOptions(
            endpoint=wanted.relay_coordinator_endpoint,
            token_file=Path(wanted.relay_coordinator_token_file),
            ca_file=Path(wanted.relay_coordinator_ca_file) if wanted.relay_coordinator_ca_file else None,
        ),
    )
    return await EdgeDomain.create(kernel, options)
