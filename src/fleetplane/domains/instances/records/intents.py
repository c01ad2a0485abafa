"""The first step of an instance: its record, with id and nonce, before anyone is asked to make it.

Any server takes it. Whether the tenant may have one more, whether the group is still what the caller chose
from, and whether the id is free is decided in the transaction that writes the record. Who then asks the
provider is the controller. The nonce can be signed again to the letter from what the record keeps: when the
answer of the provider was lost, the machine already holds that nonce, and no other would let its agent in.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import msgspec

from fleetplane.domains.instances import credentials, ids
from fleetplane.domains.instances.configuration import InstancesDocument
from fleetplane.domains.instances.credentials import ClientRole
from fleetplane.domains.instances.kinds import (
    INSTANCE,
    DrainState,
    Instance,
    InstanceSpec,
    InstanceStatus,
    tenant_of,
    tenant_scope,
)
from fleetplane.domains.instances.records.groups import GroupBasis, Groups, GroupView
from fleetplane.domains.instances.records.instances import SERVER, Instances
from fleetplane.domains.instances.rules import quotas
from fleetplane.domains.instances.rules.decide import RemovalCause
from fleetplane.kernel.clock import Clock
from fleetplane.kernel.errors import Conflict, InvalidArgument
from fleetplane.kernel.identity.enrolment import digest
from fleetplane.kernel.identity.signing import SigningKeys
from fleetplane.kernel.store import Draft
from fleetplane.kernel.values.times import NS

JTI_BYTES = 16


class GroupChanged(Conflict):
    """The group is not any more what was chosen from."""

    reason = "GROUP_CHANGED"


class Intents:
    def __init__(
        self,
        instances: Instances,
        groups: Groups,
        nonces: SigningKeys,
        clock: Clock,
        *,
        provider_kind: Callable[[InstancesDocument], str],
    ) -> None:
        self._instances = instances
        self._groups = groups
        self._nonces = nonces
        self._clock = clock
        self._provider_kind = provider_kind

    async def record(
        self,
        view: GroupView,
        *,
        name: str = "",
        on_demand: bool = False,
        actor: str = SERVER,
        instance_type: str = "",
        variables: Mapping[str, str] | None = None,
        subnet: str = "",
        serves: str = "",
        public_ipv4: str = "",
        place: str = "",
        replaces: str = "",
        basis: GroupBasis | None = None,
    ) -> Instance:
        """Write down that there shall be one more instance of a group.

        `basis` is what the view was made from; if that is not so any more, `GroupChanged` is raised.
        """
        configuration, group = self._groups.required(), view.group
        now_ns = self._clock.now_ns()
        if not name:
            name = ids.generate(group.prefix, now_ns // 1_000_000, self._clock.token_bytes(ids.RANDOM_BYTES))
        elif ids.decode(name)[0] != group.prefix:
            raise InvalidArgument(f"instance_id must begin with {group.prefix!r}", field="instance_id")
        spec = InstanceSpec(
            cluster=configuration.cluster.id,
            shard=configuration.shard.id,
            group=group.key,
            template=group.template,
            prefix=group.prefix,
            on_demand=on_demand,
            arch=group.arch,
            instance_type=instance_type or group.instance_type,
            subnet=subnet,
            vars=dict(variables or {}),
            infra_hash=view.infra_hash,
            runtime_hash=view.runtime_hash,
            provider=self._provider_kind(configuration),
            serves=serves,
            public_ipv4=public_ipv4,
            place=place,
            replaces=replaces,
        )
        nonce_id = self._clock.token_bytes(JTI_BYTES).hex()
        status = self._with_nonce(name, group.tenant, spec, configuration, nonce_id, now_ns // NS)

        def check(draft: Draft) -> None:
            if basis is not None and self._groups.basis(draft, group.tenant, group.key) != basis:
                raise GroupChanged(f"group {group.key!r} was changed meanwhile")
            if not serves:
                self._check_quota(draft, group.tenant)

        return await self._instances.record(group.tenant, name, spec, status, actor=actor, check=check)

    def _check_quota(self, draft: Draft, tenant: str) -> None:
        limit = self._groups.quota(tenant, self._groups.required_in(draft))
        scope = tenant_scope(tenant)
        if limit is not None and draft.count(INSTANCE, scope) >= limit:  # only then are they looked at
            quotas.check_creation(tenant, quotas.usage(draft.list(INSTANCE, scope)), limit)

    async def give_up(self, instance: Instance) -> None:
        """Let one go that its caller will never know of, and will ask for anew."""
        await self._instances.step(tenant_of(instance), instance.name, _given_up, action="deleting")

    # The nonce.

    def _with_nonce(
        self,
        name: str,
        tenant: str,
        spec: InstanceSpec,
        configuration: InstancesDocument,
        nonce_id: str,
        issued_at_seconds: int,
    ) -> InstanceStatus:
        life_seconds = configuration.shard.garbage_collection.registration_timeout_seconds
        expires_at_seconds = issued_at_seconds + round(life_seconds)
        status = InstanceStatus(
            nonce_id=nonce_id,
            nonce_issued_at_seconds=issued_at_seconds,
            nonce_expires_at_ns=expires_at_seconds * NS,
        )
        return msgspec.structs.replace(status, nonce_digest=digest(self.nonce(name, tenant, spec, status)))

    def nonce(self, name: str, tenant: str, spec: InstanceSpec, status: InstanceStatus) -> str:
        """The instance's nonce: deterministic for as long as the signing key stays the same."""
        expires = status.nonce_expires_at_ns // NS
        began = status.nonce_issued_at_seconds - round(credentials.NONCE_BACKDATE_SECONDS)
        return credentials.sign_nonce(
            self._nonces,
            role=ClientRole.AGENT,
            subject=name,
            life_seconds=max(1.0, expires - status.nonce_issued_at_seconds),
            claims={
                "iat": began,
                "nbf": began,
                "exp": expires,
                "jti": status.nonce_id,
                "cluster_id": spec.cluster,
                "shard": spec.shard,
                "group": spec.group,
                "tenant": tenant,
                "on_demand": spec.on_demand,
                "config_hash": spec.runtime_hash,
            },
        )


def _given_up(status: InstanceStatus, now_ns: int) -> InstanceStatus:
    drain = DrainState(
        reason=RemovalCause.REQUESTED, started_at_ns=now_ns, delete_at_ns=now_ns, replace=False
    )
    return msgspec.structs.replace(status, drain=drain, deleting_at_ns=now_ns)
