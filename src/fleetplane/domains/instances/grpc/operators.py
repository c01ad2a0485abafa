"""`nstance.v1.OperatorService`: how an operator manages groups and instances of its tenant.

The tenant is always the one in the caller's certificate. What belongs to another tenant is not
found, exactly like what does not exist: an operator cannot learn that it does.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping
from typing import Protocol

import msgspec
import structlog
from google.protobuf.empty_pb2 import Empty

from fleetplane.domains.instances import credentials, ids, wire
from fleetplane.domains.instances.credentials import ClientRole
from fleetplane.domains.instances.grpc.operator_groups import OperatorGroups, check_key
from fleetplane.domains.instances.grpc.operator_watches import OperatorWatches
from fleetplane.domains.instances.kinds import DrainState, Instance, InstanceStatus
from fleetplane.domains.instances.live.errors import ErrorFeed
from fleetplane.domains.instances.records import listener_activity as listeners
from fleetplane.domains.instances.records.groups import Groups
from fleetplane.domains.instances.records.instances import Instances
from fleetplane.domains.instances.records.listener_activity import Activity
from fleetplane.domains.instances.records.operators import record_operator
from fleetplane.domains.instances.records.reports import InstanceReports
from fleetplane.domains.instances.records.tenants import SleepResult, Tenants, asleep
from fleetplane.domains.instances.rules import decide as rules
from fleetplane.domains.instances.rules import refusals
from fleetplane.gen.nstance.v1 import operator_pb2
from fleetplane.kernel.clock import Clock
from fleetplane.kernel.errors import (
    AlreadyExists,
    Conflict,
    FailedPrecondition,
    FleetplaneError,
    InvalidArgument,
    PermissionDenied,
    Unavailable,
)
from fleetplane.kernel.identity import Authority
from fleetplane.kernel.store import Store
from fleetplane.kernel.values.timestamps import timestamp
from fleetplane.rpc import CallContext

log = structlog.get_logger(__name__)

PROVIDER_SECONDS = 5.0
"""Within which the provider must say how an instance is."""

_RESULTS = {
    SleepResult.SLEPT: operator_pb2.SleepTenantResponse.RESULT_SLEPT,
    SleepResult.ALREADY_ASLEEP: operator_pb2.SleepTenantResponse.RESULT_ALREADY_ASLEEP,
    SleepResult.BUSY: operator_pb2.SleepTenantResponse.RESULT_BUSY,
}
_AWAKE = operator_pb2.TENANT_SLEEP_STATUS_AWAKE
_ASLEEP = operator_pb2.TENANT_SLEEP_STATUS_ASLEEP


class CreateOnDemand(Protocol):
    """Make one instance for a caller, beside what its group's size asks for."""

    def __call__(
        self,
        tenant: str,
        group: str,
        *,
        name: str,
        template: str,
        instance_type: str,
        subnet_pool: str,
        vars: Mapping[str, str],  # noqa: A002  # the protocol's word
        actor: str,
    ) -> Awaitable[Instance]: ...


class OperatorService:
    def __init__(
        self,
        *,
        store: Store,
        instances: Instances,
        groups: Groups,
        reports: InstanceReports,
        authority: Authority,
        clock: Clock,
        look_at: Callable[[str, str], None],
        create_on_demand: CreateOnDemand,
        provider_status: Callable[[Instance], Awaitable[str]],
        errors: ErrorFeed,
        activity: Activity,
        event_generation: Callable[[str], str],
    ) -> None:
        self._store = store
        self._instances = instances
        self._groups = groups
        self._reports = reports
        self._authority = authority
        self._clock = clock
        self._look_at = look_at
        self._create = create_on_demand
        self._provider_status = provider_status
        self._errors = errors
        self._activity = activity
        self._shown = OperatorGroups(store, groups)
        self._tenants = Tenants(store)
        self._watches = OperatorWatches(
            store=store,
            shown=self._shown,
            groups=groups,
            errors=errors,
            clock=clock,
            event_generation=event_generation,
        )

    @property
    def open_watches(self) -> int:
        return self._watches.open_watches

    async def run(self) -> None:
        """Keep watchers of groups informed, until cancelled."""
        await self._watches.run()

    def close(self) -> None:
        """End every watch now."""
        self._watches.close()

    # Configuration.

    async def GetConfigStatus(
        self, _request: Empty, _context: CallContext
    ) -> operator_pb2.ConfigStatusResponse:
        self._groups.required()
        loaded = self._groups.loaded
        assert loaded is not None
        return operator_pb2.ConfigStatusResponse(
            etag=loaded.etag, last_modified=timestamp(loaded.modified_at_ns), size=loaded.size
        )

    async def RefreshConfig(
        self, _request: Empty, context: CallContext
    ) -> operator_pb2.RefreshConfigResponse:
        tenant, _ = credentials.client_of(context.principal)
        before = set(self._groups.views())
        try:
            done = await self._groups.refresh()
        except InvalidArgument as error:
            log.warning("instances.bad_configuration", tenant=tenant, error=error.message)
            told = refusals.for_tenant(error, tenant, self._groups.configuration)
            self._errors.tell(tenant, "", "", told.message)
            raise told from None
        except FleetplaneError as error:
            # Whatever the storage calls it, the caller asked for nothing wrong.
            log.warning("instances.bad_configuration", tenant=tenant, error=error.message)
            raise FleetplaneError(refusals.UNREADABLE, hint=refusals.WHO_KNOWS) from None
        for group in before | set(self._groups.views()) | self._instances.groups():
            self._look_at(*group)
        return operator_pb2.RefreshConfigResponse(
            updated=done.updated, prev_etag=done.before, etag=done.after
        )

    # Groups.

    async def ListGroups(self, _request: Empty, context: CallContext) -> operator_pb2.ListGroupsResponse:
        tenant, _ = credentials.client_of(context.principal)
        self._groups.required()
        return operator_pb2.ListGroupsResponse(groups=self._shown.statuses(tenant).values())

    async def UpsertGroup(
        self, request: operator_pb2.UpsertGroupRequest, context: CallContext
    ) -> operator_pb2.GroupStatus:
        tenant, _ = credentials.client_of(context.principal)
        check_key(request.key)
        if not request.HasField("config"):
            raise InvalidArgument("config is required", field="config")
        wanted = wire.group_override(request.config)
        status = await self._shown.upsert(tenant, request.key, wanted, actor=context.principal.name)
        self._look_at(tenant, request.key)
        return status

    async def DeleteGroup(self, request: operator_pb2.DeleteGroupRequest, context: CallContext) -> Empty:
        tenant, _ = credentials.client_of(context.principal)
        await self._shown.remove(tenant, request.key, actor=context.principal.name)
        self._look_at(tenant, request.key)
        return Empty()

    # Instances.

    async def CreateInstance(
        self, request: operator_pb2.CreateInstanceRequest, context: CallContext
    ) -> operator_pb2.CreateInstanceResponse:
        tenant, _ = credentials.client_of(context.principal)
        config = request.config
        if not request.HasField("config") or not config.group:
            raise InvalidArgument("config.group is required", field="config.group")
        self._shown.view(tenant, config.group)
        instance = self._already_created(tenant, request.instance_id)
        if instance is None:
            instance = await self._created(tenant, request, context.principal.name)
            self._look_at_all(tenant)  # it has woken, if it slept
        return operator_pb2.CreateInstanceResponse(
            instance_id=instance.name, status=wire.status_word(instance)
        )

    async def _created(
        self, tenant: str, request: operator_pb2.CreateInstanceRequest, actor: str
    ) -> Instance:
        config = request.config
        try:
            return await self._create(
                tenant,
                config.group,
                name=request.instance_id,
                template=config.template,
                instance_type=wire.bounded(config.instance_type, "config.instance_type"),
                subnet_pool=config.subnet_pool,
                vars=wire.variables(config.vars),
                actor=actor,
            )
        except (AlreadyExists, Conflict):  # the same call came to another server, too
            if (found := self._already_created(tenant, request.instance_id)) is None:
                raise
            return found

    def _already_created(self, tenant: str, name: str) -> Instance | None:
        """What an earlier, unanswered call with the same id has made."""
        if not name:
            return None
        ids.validate(name)
        found = self._instances.find(tenant, name)
        if found is None and self._instances.tenant_of(name) is not None:
            # Another tenant's. To a provider the same id is the same machine, so it must not go on.
            raise InvalidArgument("instance_id cannot be used", field="instance_id")
        return found

    async def DeleteInstance(
        self, request: operator_pb2.DeleteInstanceRequest, context: CallContext
    ) -> operator_pb2.DeleteInstanceResponse:
        tenant, _ = credentials.client_of(context.principal)
        found = self._instances.find(tenant, _instance_id(request.instance_id))
        if found is None:  # or another tenant's, which must look the same
            return operator_pb2.DeleteInstanceResponse(status="unknown")
        if rules.state(found) is rules.State.DELETED:
            return operator_pb2.DeleteInstanceResponse(status="deleted")
        done = await self._instances.step(
            tenant, found.name, _deleting, action="delete", actor=context.principal.name
        )
        self._look_at(tenant, found.spec.group)
        gone = done is None or rules.state(done) is rules.State.DELETED
        return operator_pb2.DeleteInstanceResponse(status="deleted" if gone else "deleting")

    async def GetInstanceStatus(
        self, request: operator_pb2.GetInstanceStatusRequest, context: CallContext
    ) -> operator_pb2.InstanceStatusResponse:
        tenant, _ = credentials.client_of(context.principal)
        instance = self._instances.get(tenant, _instance_id(request.instance_id))
        assert instance.status is not None
        heard = self._reports.last(instance.name)
        seen_ns = heard.at_ns if heard is not None else instance.status.registered_at_ns
        answer = wire.instance_status(instance, seen_ns)
        if rules.state(instance) in (rules.State.PROVISIONED, rules.State.REGISTERED, rules.State.DRAINING):
            try:
                async with asyncio.timeout(PROVIDER_SECONDS):
                    answer.status = await self._provider_status(instance) or answer.status
            except TimeoutError as error:
                raise Unavailable(f"the provider did not answer within {PROVIDER_SECONDS:g} s") from error
        return answer

    async def AcknowledgeDrained(self, request: operator_pb2.DrainAckRequest, context: CallContext) -> Empty:
        tenant, _ = credentials.client_of(context.principal)
        name = _instance_id(request.instance_id)
        self._instances.get(tenant, name)
        done = await self._instances.acknowledge(tenant, name, actor=context.principal.name)
        self._look_at(tenant, done.spec.group)
        return Empty()

    # The operator's own certificate.

    async def RenewCertificate(
        self, request: operator_pb2.RenewCertificateRequest, context: CallContext
    ) -> operator_pb2.RenewCertificateResponse:
        if not credentials.has_certificate(context.principal):
            raise PermissionDenied(
                "a certificate is renewed by its holder; a token does not become one",
                hint="an operator enrols with a nonce: fleetplane instances operator-identity",
            )
        tenant, client = credentials.client_of(context.principal)
        key = credentials.load_public_key(request.public_key_pem, field="public_key_pem")
        issued = credentials.issue(
            self._authority,
            key,
            role=ClientRole.OPERATOR,
            tenant=tenant,
            client=client,
            life_hours=self._groups.certificate_hours(ClientRole.OPERATOR),
            serial=self._clock.now_ns(),
        )
        await record_operator(
            self._store,
            tenant,
            f"{client}/{credentials.key_digest(key)[:16]}",
            client=client,
            key=key,
            issued=issued,
            action="instances.renew",
            actor=context.principal.name,
        )
        answer = operator_pb2.RenewCertificateResponse(
            client_certificate_pem=issued.leaf_pem, authority_pem=self._authority.trust_pem
        )
        answer.expires_at.FromDatetime(issued.not_after)
        return answer

    # Sleep.

    async def SleepTenant(
        self, request: operator_pb2.SleepTenantRequest, context: CallContext
    ) -> operator_pb2.SleepTenantResponse:
        tenant = _own_tenant(request.tenant, context)
        self._groups.required()
        wake_at_ns = request.wake_at.ToNanoseconds() if request.HasField("wake_at") else None
        # An instance made on demand keeps its tenant awake whatever `if_not_busy` says.
        slept = await self._tenants.sleep(tenant, wake_at_ns, actor=context.principal.name)
        if slept.result is not SleepResult.BUSY:
            self._look_at_all(tenant)
        return operator_pb2.SleepTenantResponse(
            result=_RESULTS[slept.result],
            status=_AWAKE if slept.result is SleepResult.BUSY else _ASLEEP,
            wake_at=timestamp(slept.wake_at_ns),
        )

    async def WakeTenant(
        self, request: operator_pb2.WakeTenantRequest, context: CallContext
    ) -> operator_pb2.WakeTenantResponse:
        tenant = _own_tenant(request.tenant, context)
        self._groups.required()
        if request.HasField("listener"):
            raise FailedPrecondition(
                "no listener can be woken by itself: none is configured", field="listener"
            )
        slept = await self._tenants.wake(tenant, actor=context.principal.name)
        self._look_at_all(tenant)
        results = operator_pb2.WakeTenantResponse
        return operator_pb2.WakeTenantResponse(
            result=results.RESULT_WOKE if slept else results.RESULT_ALREADY_AWAKE, status=_AWAKE
        )

    async def GetTenantStatus(
        self, request: operator_pb2.GetTenantStatusRequest, context: CallContext
    ) -> operator_pb2.GetTenantStatusResponse:
        tenant = _own_tenant(request.tenant, context)
        sleep = self._tenants.get(tenant)
        sleeping = asleep(sleep, self._clock.now_ns())
        return operator_pb2.GetTenantStatusResponse(
            status=_ASLEEP if sleeping else _AWAKE,
            wake_at=timestamp(sleep.wake_at_ns) if sleeping else None,
            listeners=self._listeners(tenant),
        )

    def _listeners(self, tenant: str) -> Iterator[operator_pb2.ListenerActivity]:
        """Where the tenant is reached, whether an instance is there, and since when it is idle."""
        configuration = self._groups.configuration
        if configuration is None:
            return
        groups = [view.group for (owner, _), view in self._groups.views().items() if owner == tenant]
        serving = {
            instance.spec.group
            for instance in self._instances.all(tenant)
            if rules.state(instance) is rules.State.REGISTERED
        }
        for listener in listeners.listeners(configuration, groups):
            yield operator_pb2.ListenerActivity(
                listener=listener.name,
                available=not serving.isdisjoint(listener.groups),
                idle_since=timestamp(self._activity.idle_since_ns(tenant, listener)),
            )

    def _look_at_all(self, tenant: str) -> None:
        for group in self._groups.views().keys() | self._instances.groups():
            if group[0] == tenant:
                self._look_at(*group)

    # Watching.

    def WatchGroups(self, _request: Empty, context: CallContext) -> AsyncIterator[operator_pb2.GroupEvent]:
        return self._watches.groups(credentials.client_of(context.principal)[0], context)

    def WatchInstances(
        self, _request: Empty, context: CallContext
    ) -> AsyncIterator[operator_pb2.InstanceEvent]:
        return self._watches.instances(credentials.client_of(context.principal)[0], context)

    def WatchErrors(self, _request: Empty, context: CallContext) -> AsyncIterator[operator_pb2.ErrorEvent]:
        return self._watches.errors(credentials.client_of(context.principal)[0], context)


def _deleting(status: InstanceStatus, now_ns: int) -> InstanceStatus:
    """Somebody asked for it to go: it is neither drained first nor kept for a replacement."""
    if status.deleting_at_ns is not None or status.deleted_at_ns is not None:
        return status
    drain = status.drain or DrainState(
        reason=rules.RemovalCause.REQUESTED, started_at_ns=now_ns, delete_at_ns=now_ns, replace=False
    )
    return msgspec.structs.replace(status, drain=drain, deleting_at_ns=now_ns)


def _instance_id(text: str) -> str:
    if not text:
        raise InvalidArgument("instance_id is required", field="instance_id")
    return wire.bounded(text, "instance_id")  # one that is no id at all is simply not known


def _own_tenant(said: str, context: CallContext) -> str:
    """The caller's tenant, which the message must repeat."""
    tenant, _ = credentials.client_of(context.principal)
    if not said:
        raise InvalidArgument("tenant is required", field="tenant")
    if said != tenant:
        # Says nothing about whether there is such a tenant.
        raise PermissionDenied("tenant does not match operator certificate")
    return tenant
