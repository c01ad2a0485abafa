"""Making instances: an id, a record, a nonce, and then the provider.

The record comes first, so that nothing exists outside that is not written down. The nonce can be
signed again to the letter from what the record keeps: when the answer of the provider was lost,
the machine already holds that nonce, and no other would let its agent in.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping

import msgspec

from fleetplane.domains.instances import credentials, ids
from fleetplane.domains.instances.configuration import Configuration, rendering
from fleetplane.domains.instances.configuration.merge import EffectiveGroup
from fleetplane.domains.instances.content.downloads import Downloads
from fleetplane.domains.instances.content.files import Addresses, FileMaker
from fleetplane.domains.instances.content.images import Images
from fleetplane.domains.instances.content.user_data import user_data
from fleetplane.domains.instances.controllers.nat import NatKeeper
from fleetplane.domains.instances.controllers.provider_guard import GuardedProvider
from fleetplane.domains.instances.credentials import ClientRole
from fleetplane.domains.instances.kinds import Drain, Instance, InstanceSpec, InstanceStatus, tenant_of
from fleetplane.domains.instances.providers.contract import Created, CreateRequest
from fleetplane.domains.instances.records.groups import Groups, GroupView
from fleetplane.domains.instances.records.instances import SERVER, Instances
from fleetplane.domains.instances.rules import quotas
from fleetplane.domains.instances.rules.decide import Cause
from fleetplane.domains.instances.rules.names import named_by_provider
from fleetplane.kernel.clock import Clock
from fleetplane.kernel.errors import (
    FailedPrecondition,
    FleetplaneError,
    InvalidArgument,
    ResourceExhausted,
)
from fleetplane.kernel.identity import Authority
from fleetplane.kernel.identity.enrolment import digest
from fleetplane.kernel.identity.signing import SigningKeys
from fleetplane.kernel.values.times import NS

JTI_BYTES = 16
SPOT_REPORT_SECONDS = 10.0
"""Between reports of machines that may be taken away: of two minutes' notice at most a twelfth is lost."""
SPREAD_SECONDS = 1.0
"""How old a count of who is in which subnet may be: it only spreads instances, it promises nothing."""


class Launcher:
    def __init__(
        self,
        *,
        instances: Instances,
        groups: Groups,
        provider: GuardedProvider,
        nonces: SigningKeys,
        authority: Authority,
        files: FileMaker,
        addresses: Callable[[], Addresses],
        images: Images,
        downloads: Downloads,
        nat: NatKeeper,
        clock: Clock,
    ) -> None:
        self._instances = instances
        self._groups = groups
        self._provider = provider
        self._nonces = nonces
        self._authority = authority
        self._files = files
        self._addresses = addresses
        self._images = images
        self._downloads = downloads
        self._nat = nat
        self._clock = clock
        self._next_creation = clock.monotonic()
        self._spread: dict[str, tuple[float, Counter[str]]] = {}
        """By tenant, of which there are as many as the configuration has."""
        self._usage: dict[str, tuple[float, quotas.Usage]] = {}

    def wait_seconds(self) -> float:
        """How long the rate limit still forbids a creation."""
        return self._next_creation - self._clock.monotonic()

    async def create(
        self,
        view: GroupView,
        *,
        name: str = "",
        on_demand: bool = False,
        actor: str = SERVER,
        instance_type: str = "",
        variables: Mapping[str, str] | None = None,
        serves: str = "",
        public_ipv4: str = "",
        place: str = "",
        replaces: str = "",
    ) -> Instance:
        """One more instance of a group."""
        configuration, group = self._groups.required(), view.group
        if not serves:
            self._take_place(group.tenant)
        limit_seconds = configuration.shard.create_rate_limit_seconds
        self._next_creation = self._clock.monotonic() + limit_seconds
        now_ns, named = self._clock.now_ns(), bool(name)
        if name:
            if ids.decode(name)[0] != group.prefix:
                raise InvalidArgument(f"instance_id must begin with {group.prefix!r}", field="instance_id")
        else:
            name = ids.generate(group.prefix, now_ns // 1_000_000, self._clock.token_bytes(ids.RANDOM_BYTES))
        subnet = await self._subnet(group)
        self._nat.require(group.tenant, group.key, subnet)
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
            provider=self._provider.kind,
            serves=serves,
            public_ipv4=public_ipv4,
            place=place,
            replaces=replaces,
        )
        status = self._with_nonce(
            name,
            group.tenant,
            spec,
            configuration,
            nonce_id=self._clock.token_bytes(JTI_BYTES).hex(),
            issued_at_seconds=now_ns // NS,
        )
        instance = await self._instances.record(group.tenant, name, spec, status, actor=actor)
        try:
            return await self.provision(group.tenant, instance.name)
        except FleetplaneError:
            if on_demand and not named:
                # Its caller does not know it and will ask for another: this one must not come as well.
                await self._instances.step(group.tenant, name, _given_up, action="deleting")
            raise

    async def provision(self, tenant: str, name: str) -> Instance:
        """Ask the provider for a recorded instance; asking again gives the same one."""
        instance = self._instances.get(tenant, name)
        view = self._groups.view_of(instance)
        if view is None:
            raise FailedPrecondition(f"group {instance.spec.group!r} is gone")
        try:
            created = await self._provider.create_instance(await self._request(instance, view))
        except FleetplaneError as error:
            await self._instances.note_error(tenant, name, error.message)
            raise

        def provisioned(status: InstanceStatus, _now_ns: int) -> InstanceStatus:
            return _with_machine(status, created)

        done = await self._instances.step(tenant, name, provisioned, action="provisioned")
        if done is None:
            raise FailedPrecondition(f"instance {name!r} was given up while it was being made")
        return done

    # The nonce.

    def _with_nonce(
        self,
        name: str,
        tenant: str,
        spec: InstanceSpec,
        configuration: Configuration,
        *,
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
        nonce = self._nonce(name, tenant, spec, status)
        return msgspec.structs.replace(status, nonce_digest=digest(nonce))

    def _nonce(self, name: str, tenant: str, spec: InstanceSpec, status: InstanceStatus) -> str:
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

    # The request.

    async def _request(self, instance: Instance, view: GroupView) -> CreateRequest:
        configuration, addresses = self._groups.required(), self._addresses()
        await self._images.refresh(self._provider, configuration)
        assert instance.status is not None
        nonce = self._nonce(instance.name, tenant_of(instance), instance.spec, instance.status)
        data = self._files.data(configuration, view.group, instance)
        args = {key: rendering.render_json(value, data) for key, value in view.group.args.items()}
        interval = self._report_interval(configuration, args)
        script = await user_data(
            view.group.userdata, self._downloads, data, nonce=nonce, report_interval_seconds=interval
        )
        return CreateRequest(
            cluster=instance.spec.cluster,
            shard=instance.spec.shard,
            tenant=tenant_of(instance),
            group=instance.spec.group,
            template=instance.spec.template,
            prefix=instance.spec.prefix,
            instance_id=instance.name,
            instance_type=instance.spec.instance_type,
            subnet=instance.spec.subnet,
            user_data=script,
            nonce=nonce,
            ca_certificate=self._authority.trust_pem.decode(),
            args=args,
            registration_address=addresses.registration,
            agent_address=addresses.agent,
            report_interval_seconds=interval,
        )

    def _report_interval(self, configuration: Configuration, args: Mapping[str, object]) -> float:
        """Shorter for machines that may be taken away: the notice of it comes with a report."""
        if not self._provider.is_spot(args):
            return 0.0
        return min(SPOT_REPORT_SECONDS, configuration.shard.health_check_interval_seconds)

    async def _subnet(self, group: EffectiveGroup) -> str:
        """The least used subnet of the group's pool that still has room."""
        if not group.subnets:
            return ""
        used = self._used(group.tenant)
        for subnet in sorted(group.subnets, key=lambda subnet: used[subnet]):
            if await self._provider.check_subnet_capacity(subnet):
                used[subnet] += 1
                return subnet
        raise ResourceExhausted(f"no subnet of pool {group.subnet_pool!r} has room")

    def usage(self, tenant: str) -> quotas.Usage:
        """How many instances the tenant has; counted anew every now and then."""
        now = self._clock.monotonic()
        counted = self._usage.get(tenant)
        if counted is None or now >= counted[0] + SPREAD_SECONDS:
            counted = self._usage[tenant] = (now, quotas.usage(self._instances.all(tenant)))
        return counted[1]

    def _take_place(self, tenant: str) -> None:
        """Refuse one more instance than the tenant may have."""
        limit, used = self._groups.quota(tenant), self.usage(tenant)
        if limit is not None and used.total + 1 >= limit:
            self._usage.pop(tenant, None)  # this close, an old count will not do
            used = self.usage(tenant)
        quotas.check_creation(tenant, used, limit)
        taken = quotas.Usage(standing=used.standing + 1, total=used.total + 1)
        self._usage[tenant] = (self._usage[tenant][0], taken)

    def _used(self, tenant: str) -> Counter[str]:
        """How many live instances are in each subnet; counted anew every now and then."""
        now = self._clock.monotonic()
        counted = self._spread.get(tenant)
        if counted is None or now >= counted[0] + SPREAD_SECONDS:
            live = (
                instance.spec.subnet
                for instance in self._instances.all(tenant)
                if instance.status is None or instance.status.deleting_at_ns is None
            )
            counted = self._spread[tenant] = (now, Counter(live))
        return counted[1]


def _given_up(status: InstanceStatus, now_ns: int) -> InstanceStatus:
    drain = Drain(reason=Cause.REQUESTED, started_at_ns=now_ns, delete_at_ns=now_ns, replace=False)
    return msgspec.structs.replace(status, drain=drain, deleting_at_ns=now_ns)


def _with_machine(status: InstanceStatus, created: Created) -> InstanceStatus:
    return msgspec.structs.replace(
        named_by_provider(status, created),
        provider_id=created.provider_id,
        provider_status=str(created.status),
        last_error="",
    )
