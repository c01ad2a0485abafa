"""Instances, built from their settings."""

from __future__ import annotations

from fleetplane.domains.blueprint import Domain, Kernel, ServerContext
from fleetplane.domains.instances.records.groups import SilencePolicy
from fleetplane.domains.instances.server import InstanceDomain, InstanceOptions
from fleetplane.domains.instances.settings import InstanceSettings
from fleetplane.kernel.identity.authority import WORKLOAD, Authority
from fleetplane.kernel.identity.signing import SigningKeys


async def build(wanted: InstanceSettings, context: ServerContext, kernel: Kernel) -> Domain:
    workloads = await Authority.load_or_create(kernel.store, kernel.master, kernel.clock, purpose=WORKLOAD)
    nonces = await SigningKeys.load_or_create(
        kernel.store, kernel.master, kernel.clock, purpose="registration-nonce", algorithm="EdDSA"
    )
    options = InstanceOptions(
        shard=wanted.shard,
        state_directory=context.state_directory / "instances",
        environment=context.environment,
        provider=wanted.provider,
        drain_on_scale_down=wanted.drain_on_scale_down,
        first_generation_tenants=frozenset(wanted.first_generation_tenants),
        silence=SilencePolicy(
            silence_share=wanted.silence_share,
            silence_window_seconds=wanted.silence_window_seconds,
            silence_hold_seconds=wanted.silence_hold_seconds,
        ),
        machine=wanted.machine,
        userdata_hosts=frozenset(wanted.userdata_hosts),
        advertise_listeners=wanted.advertise == "listeners",
        version=context.version,
        tenant_instances=wanted.tenant_instances,
        agent_command=wanted.agent_command,
        agent_variables=frozenset(wanted.agent_variables),
        reserved_names=context.own_names,
    )
    return InstanceDomain(kernel, wanted.open(context.state_directory), nonces, workloads, options)
