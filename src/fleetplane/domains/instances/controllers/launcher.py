"""Making instances: the record, and then the provider.

The record comes first (`records/intents.py`), so that nothing exists outside that is not written down.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping

import msgspec

from fleetplane.domains.instances.configuration import InstancesDocument, rendering
from fleetplane.domains.instances.configuration.merge import EffectiveGroup
from fleetplane.domains.instances.content.downloads import Downloads
from fleetplane.domains.instances.content.files import FileMaker, ServerAddresses
from fleetplane.domains.instances.content.images import Images
from fleetplane.domains.instances.content.user_data import user_data
from fleetplane.domains.instances.controllers.nat import NatKeeper
from fleetplane.domains.instances.controllers.provider_guard import GuardedProvider
from fleetplane.domains.instances.kinds import Instance, InstanceStatus, tenant_of
from fleetplane.domains.instances.providers.contract import Created, CreateRequest
from fleetplane.domains.instances.records.groups import GroupBasis, Groups, GroupView
from fleetplane.domains.instances.records.instances import SERVER, Instances
from fleetplane.domains.instances.records.intents import Intents
from fleetplane.domains.instances.rules import quotas
from fleetplane.domains.instances.rules.names import named_by_provider
from fleetplane.kernel.clock import Clock
from fleetplane.kernel.errors import (
    FailedPrecondition,
    FleetplaneError,
    ResourceExhausted,
)
from fleetplane.kernel.identity import Authority

JTI_BYTES = 16
SPOT_REPORT_SECONDS = 10.0
"""Between reports of machines that may be taken away: of two minutes' notice at most a twelfth is lost."""
SPREAD_SECONDS = 1.0
"""How old a count of who is in which subnet may be: it only spreads instances, it promises nothing."""


class InstanceLauncher:
    def __init__(
        self,
        *,
        instances: Instances,
        groups: Groups,
        provider: GuardedProvider,
        intents: Intents,
        authority: Authority,
        files: FileMaker,
        addresses: Callable[[], ServerAddresses],
        images: Images,
        downloads: Downloads,
        nat: NatKeeper,
        clock: Clock,
    ) -> None:
        self._instances = instances
        self._groups = groups
        self._provider = provider
        self._intents = intents
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
        self._usage: dict[str, tuple[float, quotas.InstanceUsage]] = {}

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
        basis: GroupBasis | None = None,
    ) -> Instance:
        """One more instance of a group."""
        self._count_creation()
        subnet = await self._subnet(view.group)
        self._nat.require(view.group.tenant, view.group.key, subnet)
        instance = await self._intents.record(
            view,
            name=name,
            on_demand=on_demand,
            actor=actor,
            instance_type=instance_type,
            variables=variables,
            subnet=subnet,
            serves=serves,
            public_ipv4=public_ipv4,
            place=place,
            replaces=replaces,
            basis=basis,
        )
        try:
            return await self.provision(view.group.tenant, instance.name)
        except FleetplaneError:
            if on_demand and not name:
                # Its caller does not know it and will ask for another: this one must not come as well.
                await self._intents.give_up(instance)
            raise

    def _count_creation(self) -> None:
        limit_seconds = self._groups.required().shard.create_rate_limit_seconds
        self._next_creation = self._clock.monotonic() + limit_seconds

    async def provision(self, tenant: str, name: str) -> Instance:
        """Ask the provider for a recorded instance; asking again gives the same one."""
        instance = self._instances.get(tenant, name)
        view = self._groups.view_of(instance)
        if view is None:
            raise FailedPrecondition(f"group {instance.spec.group!r} is gone")
        if not instance.spec.subnet and view.group.subnets:
            instance = await self._placed(instance, view)
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

    async def _placed(self, instance: Instance, view: GroupView) -> Instance:
        """Choose the subnet of one that another server has written down."""
        self._count_creation()
        tenant, subnet = tenant_of(instance), await self._subnet(view.group)
        self._nat.require(tenant, view.group.key, subnet)
        return await self._instances.put_in_subnet(tenant, instance.name, subnet)

    # The request.

    async def _request(self, instance: Instance, view: GroupView) -> CreateRequest:
        configuration, addresses = self._groups.required(), self._addresses()
        await self._images.refresh(self._provider, configuration)
        assert instance.status is not None
        nonce = self._intents.nonce(instance.name, tenant_of(instance), instance.spec, instance.status)
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

    def _report_interval(self, configuration: InstancesDocument, args: Mapping[str, object]) -> float:
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

    def usage(self, tenant: str) -> quotas.InstanceUsage:
        """How many instances the tenant has; counted anew every now and then."""
        now = self._clock.monotonic()
        counted = self._usage.get(tenant)
        if counted is None or now >= counted[0] + SPREAD_SECONDS:
            counted = self._usage[tenant] = (now, quotas.usage(self._instances.all(tenant)))
        return counted[1]

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


def _with_machine(status: InstanceStatus, created: Created) -> InstanceStatus:
    return msgspec.structs.replace(
        named_by_provider(status, created),
        provider_id=created.provider_id,
        provider_status=str(created.status),
        last_error="",
    )
