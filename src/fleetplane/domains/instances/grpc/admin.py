"""`fleetplane.admin.v1.InstancesAdmin`: administration by the owner of the server's socket.

Reaching the socket is the credential, so it is for a socket that only the server's own user can
open. Here are the first credentials of operators, the switch that stops automation, and answers
that no tenant may have because they are about all of them.
"""

from __future__ import annotations

import re
from collections.abc import Awaitable, Callable, Sequence

import structlog

from fleetplane.domains.instances import credentials, ids, wire
from fleetplane.domains.instances.configuration.ownership import EVERYONE
from fleetplane.domains.instances.configuration.validate import identifier_problem
from fleetplane.domains.instances.content.files import InstanceSecrets
from fleetplane.domains.instances.credentials import OPERATOR_LIFE_HOURS, ClientRole
from fleetplane.domains.instances.grpc.operator_groups import GroupChange, OperatorGroups
from fleetplane.domains.instances.kinds import SECRET, Instance, SecretRecord, tenant_of
from fleetplane.domains.instances.records.drains import RequestedDrains
from fleetplane.domains.instances.records.groups import Groups
from fleetplane.domains.instances.records.instances import Instances
from fleetplane.domains.instances.records.operators import record_nonce, record_operator
from fleetplane.domains.instances.records.reports import InstanceReports
from fleetplane.domains.instances.rules import decide as rules
from fleetplane.gen.fleetplane.admin.v1 import instances_pb2 as admin_pb2
from fleetplane.kernel.clock import Clock
from fleetplane.kernel.errors import InvalidArgument, NotFound
from fleetplane.kernel.freeze import FREEZE, Freeze, freeze, is_over, lift, names
from fleetplane.kernel.identity import Authority
from fleetplane.kernel.identity.revocation import Revocations
from fleetplane.kernel.identity.signing import SigningKeys
from fleetplane.kernel.reconcile.explanation import Finding
from fleetplane.kernel.store import Draft, Store
from fleetplane.kernel.values.timestamps import timestamp
from fleetplane.rpc import CallContext

log = structlog.get_logger(__name__)

NONCE_SECONDS = 3 * 3600.0
IDENTITY_LIFE_LIMIT_SECONDS = 10 * 365 * 86400.0  # as long as the authority itself lives
NONCE_ID_BYTES = 16
OPERATOR_PREFIX = "opr"
SECRET_LIMIT_BYTES = 1024 * 1024
SECRET_NAME_LIMIT = 200

_SCOPE = re.compile(r"(?:tenant/([^/]+)(?:/group/([^/]+))?)?")


class AdminService:
    def __init__(
        self,
        *,
        store: Store,
        groups: Groups,
        authority: Authority,
        nonces: SigningKeys,
        secrets: InstanceSecrets,
        findings: Callable[[str], Awaitable[Sequence[Finding]]],
        clock: Clock,
        revocations: Revocations,
        reports: InstanceReports | None = None,
        operator_address: Callable[[], str] | None = None,
        look_at: Callable[[str, str], None] = lambda _tenant, _group: None,
        accept: Callable[[], Awaitable[None]] | None = None,
    ) -> None:
        """`operator_address` says where operators find this server; as configured, if nobody says.

        `accept` records the objects of the storage as they are, with each refresh."""
        self._store = store
        self._instances = Instances(store)
        self._groups = groups
        self._authority = authority
        self._nonces = nonces
        self._secrets = secrets
        self._findings = findings
        self._clock = clock
        self._revocations = revocations
        self._reports = reports
        self._operator_address = operator_address or self._configured_address
        self._shown = OperatorGroups(store, groups)
        self._drains = RequestedDrains(self._instances, groups, clock)
        self._look_at = look_at
        self._accept = accept

    def _configured_address(self) -> str:
        configuration = self._groups.configuration
        return configuration.shard.advertise.operator_addr if configuration is not None else ""

    # Credentials.

    async def CreateOperatorNonce(
        self, request: admin_pb2.CreateOperatorNonceRequest, context: CallContext
    ) -> admin_pb2.CreateOperatorNonceResponse:
        tenant = _tenant(request.tenant)
        configuration = self._groups.required()
        seconds = _seconds(request.expiry_seconds, "expiry_seconds") or NONCE_SECONDS
        nonce_id = self._clock.token_bytes(NONCE_ID_BYTES).hex()
        nonce = credentials.sign_nonce(
            self._nonces,
            role=ClientRole.OPERATOR,
            subject=configuration.cluster.id,
            life_seconds=seconds,
            claims={
                "cluster_id": configuration.cluster.id,
                "shard": configuration.shard.id,
                "tenant": tenant,
                "jti": nonce_id,
            },
        )
        await record_nonce(self._store, tenant, nonce_id, life_seconds=seconds, actor=context.principal.name)
        log.info("instances.operator_nonce", tenant=tenant, actor=context.principal.name, seconds=seconds)
        expires_at = timestamp(self._clock.now_ns() + round(seconds * 1e9))
        return admin_pb2.CreateOperatorNonceResponse(nonce_jwt=nonce, expires_at=expires_at)

    async def CreateOperatorIdentity(
        self, request: admin_pb2.CreateOperatorIdentityRequest, context: CallContext
    ) -> admin_pb2.CreateOperatorIdentityResponse:
        tenant = _tenant(request.tenant)
        key = credentials.load_public_key(request.public_key_pem, field="public_key_pem")
        client = _client(request.operator_id) or ids.generate(
            OPERATOR_PREFIX, self._clock.now_ns() // 1_000_000, self._clock.token_bytes(ids.RANDOM_BYTES)
        )
        seconds = _seconds(request.life_seconds, "life_seconds") or self._operator_life_hours() * 3600
        issued = credentials.issue(
            self._authority,
            key,
            role=ClientRole.OPERATOR,
            tenant=tenant,
            client=client,
            life_hours=seconds / 3600,
            serial=self._clock.now_ns(),
        )
        # By the operator's id alone: one that is made anew for every command leaves one record.
        await record_operator(
            self._store,
            tenant,
            client,
            client=client,
            key=key,
            issued=issued,
            action="instances.create_operator",
            actor=context.principal.name,
        )
        answer = admin_pb2.CreateOperatorIdentityResponse(
            operator_id=client,
            certificate_pem=issued.leaf_pem,
            authority_pem=self._authority.trust_pem,
            operator_address=self._operator_address(),
        )
        answer.expires_at.FromDatetime(issued.not_after)
        return answer

    async def RevokeClient(
        self, request: admin_pb2.RevokeClientRequest, context: CallContext
    ) -> admin_pb2.RevokeClientResponse:
        principal = _principal(request.role, request.tenant, request.client)
        await self._revocations.revoke(
            principal=principal, reason=request.reason, actor=context.principal.name
        )
        log.warning("instances.client_revoked", principal=principal, actor=context.principal.name)
        return admin_pb2.RevokeClientResponse()

    async def ReinstateClient(
        self, request: admin_pb2.ReinstateClientRequest, context: CallContext
    ) -> admin_pb2.ReinstateClientResponse:
        principal = _principal(request.role, request.tenant, request.client)
        lifted = await self._revocations.lift(principal=principal, actor=context.principal.name)
        return admin_pb2.ReinstateClientResponse(reinstated=lifted)

    def _operator_life_hours(self) -> float:
        if self._groups.configuration is None:  # the first operator may be the one who brings it
            return OPERATOR_LIFE_HOURS
        return self._groups.certificate_hours(ClientRole.OPERATOR)

    # Instances.

    async def ListInstances(
        self, request: admin_pb2.ListInstancesRequest, _context: CallContext
    ) -> admin_pb2.ListInstancesResponse:
        found = self._instances.all(_tenant(request.tenant) if request.tenant else None)
        wanted = [entry for entry in found if request.group in ("", entry.spec.group)]
        return admin_pb2.ListInstancesResponse(instances=[self._entry(instance) for instance in wanted])

    async def DrainInstance(
        self, request: admin_pb2.DrainInstanceRequest, context: CallContext
    ) -> admin_pb2.DrainInstanceResponse:
        instance = self._instances.get(_tenant(request.tenant), request.instance_id)
        seconds = request.timeout_seconds if request.HasField("timeout_seconds") else None
        done = await self._drains.drain(instance, seconds=seconds, actor=context.principal.name)
        return admin_pb2.DrainInstanceResponse(instance=self._entry(done))

    def _entry(self, instance: Instance) -> admin_pb2.InstanceEntry:
        status = instance.status
        assert status is not None
        heard = self._reports.last(instance.name) if self._reports is not None else None
        drain = status.drain
        return admin_pb2.InstanceEntry(
            instance_id=instance.name,
            tenant=tenant_of(instance),
            group=instance.spec.group,
            state=rules.state(instance),
            provider_id=status.provider_id,
            provider_status=status.provider_status,
            on_demand=instance.spec.on_demand,
            created_at=timestamp(instance.created_at_ns),
            last_seen=timestamp(heard.at_ns if heard is not None else None),
            agent_version=status.agent_version,
            reason=drain.reason if drain is not None else "",
            delete_at=timestamp(drain.delete_at_ns if drain is not None else None),
            last_error=status.last_error,
            certificate_expires_at=timestamp(status.certificate_expires_at_ns),
        )

    # Groups.

    async def ChangeGroup(
        self, request: admin_pb2.ChangeGroupRequest, context: CallContext
    ) -> admin_pb2.GroupSettings:
        tenant = _tenant(request.tenant)
        change = GroupChange(
            vars=wire.variables(request.vars, field="vars"),
            remove_vars=frozenset(request.remove_vars),
            args=wire.arguments(request.args),
            remove_args=frozenset(request.remove_args),
            size=wire.group_size(request.size, "size") if request.HasField("size") else None,
            instance_type=(
                wire.bounded(request.instance_type, "instance_type")
                if request.HasField("instance_type")
                else None
            ),
        )
        done = await self._shown.change(tenant, request.key, change, actor=context.principal.name)
        self._look_at(tenant, request.key)
        return admin_pb2.GroupSettings(
            tenant=tenant,
            key=request.key,
            template=done.template,
            size=done.size,
            instance_type=done.instance_type,
            subnet_pool=done.subnet_pool,
            vars=done.vars,
            args=done.args,
        )

    # Freezes.

    async def Freeze(self, request: admin_pb2.FreezeRequest, context: CallContext) -> admin_pb2.FreezeEntry:
        expires_at_ns = request.expires_at.ToNanoseconds() if request.HasField("expires_at") else None
        (made,) = await freeze(
            self._store,
            _scope(request.scope),
            reason=request.reason,
            actor=context.principal.name,
            expires_at_ns=expires_at_ns,
        )
        return _freeze_entry(made)

    async def Lift(self, request: admin_pb2.LiftRequest, context: CallContext) -> admin_pb2.LiftResponse:
        done = await lift(self._store, _scope(request.scope), actor=context.principal.name)
        return admin_pb2.LiftResponse(lifted=done)

    async def ListFreezes(
        self, _request: admin_pb2.ListFreezesRequest, _context: CallContext
    ) -> admin_pb2.ListFreezesResponse:
        now_ns = self._clock.now_ns()
        holding = [
            found
            for found in self._store.list(FREEZE)
            if names(found, "instances") and not is_over(found, now_ns)
        ]
        return admin_pb2.ListFreezesResponse(freezes=[_freeze_entry(found) for found in holding])

    # Answers.

    async def Explain(
        self, request: admin_pb2.ExplainRequest, _context: CallContext
    ) -> admin_pb2.ExplainResponse:
        found = await self._findings(request.key)
        if request.key and not found:
            raise NotFound(
                f"no controller knows of {request.key[:200]!r}", hint="groups are asked about as tenant/group"
            )
        return admin_pb2.ExplainResponse(findings=[_finding(entry) for entry in found])

    # The configuration.

    async def RefreshConfiguration(
        self, _request: admin_pb2.RefreshConfigurationRequest, _context: CallContext
    ) -> admin_pb2.RefreshConfigurationResponse:
        before = set(self._groups.views())
        if self._accept is not None:
            await self._accept()
        done = await self._groups.refresh()
        for group in before | set(self._groups.views()) | self._instances.groups():
            self._look_at(*group)
        loaded = self._groups.loaded
        return admin_pb2.RefreshConfigurationResponse(
            updated=done.updated,
            prev_etag=done.before,
            etag=done.after,
            warnings=[str(problem) for problem in (loaded.warnings if loaded is not None else ())],
        )

    # Secrets.

    async def PutSecret(
        self, request: admin_pb2.PutSecretRequest, context: CallContext
    ) -> admin_pb2.PutSecretResponse:
        name = request.name
        if not name or len(name) > SECRET_NAME_LIMIT or not name.isprintable():
            raise InvalidArgument(f"name must be 1 to {SECRET_NAME_LIMIT} printable characters", field="name")
        if not 0 < len(request.content) <= SECRET_LIMIT_BYTES:
            raise InvalidArgument(f"content must be 1 to {SECRET_LIMIT_BYTES} bytes", field="content")
        for tenant in request.tenants:
            if tenant != EVERYONE and (problem := identifier_problem(tenant)):
                raise InvalidArgument(f"tenants: {tenant[:64]!r} {problem}", field="tenants")
        tenants = tuple(sorted(set(request.tenants)))
        await self._record_secret(name, len(request.content), tenants, actor=context.principal.name)
        await self._secrets.put(name, request.content)
        log.info("instances.secret_put", name=name, actor=context.principal.name)
        return admin_pb2.PutSecretResponse()

    async def _record_secret(
        self, name: str, size_bytes: int, tenants: tuple[str, ...], *, actor: str
    ) -> None:
        """Before it is put: the storage is elsewhere, and no secret changes without a trace.

        Whom it is for stays as it was if nobody is named.
        """

        def change(draft: Draft) -> None:
            before = draft.get(SECRET, "", name)
            kept = tenants or (before.spec.tenants if before is not None else ())
            spec = SecretRecord(put_by=actor, put_at_ns=draft.now_ns, size_bytes=size_bytes, tenants=kept)
            draft.put(SECRET, "", name, spec=spec)

        await self._store.transact(
            change, actor=actor, action="instances.put_secret", touches=[SECRET.key("", name)]
        )


def freeze_scope(tenant: str, group: str) -> str:
    """The scope of a freeze: everywhere, a tenant, or one of its groups."""
    if not tenant:
        return ""
    return f"tenant/{tenant}/group/{group}" if group else f"tenant/{tenant}"


def _scope(text: str) -> str:
    matched = _SCOPE.fullmatch(text)
    names = [name for name in matched.groups() if name is not None] if matched is not None else []
    if matched is None or any(identifier_problem(name) for name in names):
        raise InvalidArgument(
            f"{text[:200]!r} is no scope",
            field="scope",
            hint="write tenant/acme, tenant/acme/group/web or nothing",
        )
    return text


def _principal(role: str, tenant: str, client: str) -> str:
    if role not in tuple(ClientRole):
        raise InvalidArgument(f"role must be one of {', '.join(ClientRole)}", field="role")
    if not client:
        raise InvalidArgument("client is required", field="client")
    return credentials.principal_name(ClientRole(role), _tenant(tenant), client)


def _tenant(text: str) -> str:
    problem = identifier_problem(text) if text else "is required"
    if problem is not None:
        raise InvalidArgument(f"tenant {text[:64]!r} {problem}", field="tenant")
    return text


def _client(text: str) -> str:
    if len(text) > 64 or "/" in text or not (text == "" or text.isprintable()):
        raise InvalidArgument(
            "operator_id must be up to 64 printable characters, no slash", field="operator_id"
        )
    return text


def _seconds(value: float, field: str) -> float:
    if not 0 <= value <= IDENTITY_LIFE_LIMIT_SECONDS:
        raise InvalidArgument(f"{field} must be between 0 and {IDENTITY_LIFE_LIMIT_SECONDS:.0f}", field=field)
    return value


def _freeze_entry(found: Freeze) -> admin_pb2.FreezeEntry:
    return admin_pb2.FreezeEntry(
        scope=found.scope,
        reason=found.spec.reason,
        actor=found.spec.actor,
        frozen_at=timestamp(found.spec.frozen_at_ns),
        expires_at=timestamp(found.spec.expires_at_ns),
    )


def _finding(found: Finding) -> admin_pb2.Finding:
    explanation = found.explanation
    return admin_pb2.Finding(
        controller=found.controller,
        key=explanation.key,
        at=timestamp(explanation.at_ns),
        next_due=timestamp(explanation.next_due_ns),
        failures=explanation.failures,
        last_error=explanation.last_error,
        reasons=[
            admin_pb2.Reason(code=reason.code, message=reason.message, subject=reason.subject)
            for reason in explanation.reasons
        ],
    )
