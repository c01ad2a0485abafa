"""The operators' side of an instances server in this process: real store, real TLS, no controller.

What a controller and a provider would do is left to the test, which can thus look between any
two steps.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc
import msgspec
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec, ed25519
from google.protobuf.empty_pb2 import Empty

from fleetplane.domains.instances import credentials, ids
from fleetplane.domains.instances.content.files import InstanceSecrets
from fleetplane.domains.instances.credentials import ClientRole, authenticator
from fleetplane.domains.instances.grpc.admin import AdminService
from fleetplane.domains.instances.grpc.authority import AuthorityService
from fleetplane.domains.instances.grpc.operators import OperatorService
from fleetplane.domains.instances.kinds import (
    KINDS,
    DrainState,
    Instance,
    InstanceSpec,
    InstanceStatus,
)
from fleetplane.domains.instances.live.errors import ErrorFeed
from fleetplane.domains.instances.records.groups import Groups
from fleetplane.domains.instances.records.instances import Instances
from fleetplane.domains.instances.records.listener_activity import Activity
from fleetplane.domains.instances.records.reports import InstanceReports
from fleetplane.gen.fleetplane.admin.v1 import authority_pb2, authority_pb2_grpc
from fleetplane.gen.fleetplane.admin.v1 import instances_pb2 as admin_pb2
from fleetplane.gen.fleetplane.admin.v1 import instances_pb2_grpc as admin_grpc
from fleetplane.gen.nstance.v1 import operator_pb2, operator_pb2_grpc
from fleetplane.kernel.access import AccessTable, Grant, Permission, Principal, Role
from fleetplane.kernel.clock import Clock, SystemClock
from fleetplane.kernel.identity import Authority, MasterKey
from fleetplane.kernel.identity.authority import WORKLOAD
from fleetplane.kernel.identity.revocation import Revocations
from fleetplane.kernel.identity.signing import SigningKeys
from fleetplane.kernel.kinds import KERNEL_KINDS
from fleetplane.kernel.objects import LocalObjects
from fleetplane.kernel.reconcile import Explanations
from fleetplane.kernel.reconcile.explanation import Finding
from fleetplane.kernel.store import Store, StoreSettings
from fleetplane.rpc import (
    Authentication,
    CallStatistics,
    GrpcApp,
    ListenerSpec,
    MethodRow,
    MethodTable,
    TlsFiles,
    open_listener,
)

TENANT, OTHER = "acme", "umbrella"
CONFIG_PATH = "shard/local/config.jsonc"
SECONDS = 60.0

_OPERATOR = operator_pb2.DESCRIPTOR.services_by_name["OperatorService"]
_AUTHORITY = authority_pb2.DESCRIPTOR.services_by_name["AuthorityAdmin"]
_ADMIN = admin_pb2.DESCRIPTOR.services_by_name["InstancesAdmin"]
_PERMISSION = Permission("instances.any")
_LOCAL = Principal(name="local", roles=frozenset({Role("local")}))


def document(**changes: Any) -> dict[str, Any]:
    """Two tenants, pools of which one is closed to groups made at run time, and a NAT group."""
    names = ("health", "election", "registration", "operator", "agent")
    places = {f"{name}_addr": f"127.0.0.1:{8990 + index}" for index, name in enumerate(names)}
    return {
        "cluster": {"id": "lab", "secrets": {"provider": "memory"}},
        "shard": {
            "id": "local",
            "infra": {"provider": "mock", "region": "here", "zone": "here-a"},
            "bind": places,
            "advertise": places,
            "subnet_pools": {"open": ["net-1"], "closed": ["net-2"]},
            "dynamic_subnet_pools": ["open"],
        },
        "templates": {
            "worker": {"kind": "wkr", "arch": "amd64", "subnet_pool": "open", "vars": {"Tier": "cheap"}},
            "walled": {"kind": "wal", "arch": "amd64", "subnet_pool": "closed", "tenants": [TENANT]},
        },
        "groups": {
            TENANT: {
                "web": {"template": "worker", "size": 2, "vars": {"Colour": "blue"}},
                "api": {"template": "worker", "size": 1, "instance_type": "m5"},
                "nat": {"template": "worker", "instance_type": "t4"},
            },
            OTHER: {"secret": {"template": "worker", "size": 1}},
        },
        "nat": {
            TENANT: {
                "group": "nat",
                "public_addresses": [{"ipv4": "203.0.113.7"}],
                "instance_type_ladder": ["t4"],
            }
        },
        **changes,
    }


def new_id(prefix: str = "wkr") -> str:
    clock = SystemClock()
    return ids.generate(prefix, clock.now_ns() // 1_000_000, clock.token_bytes(ids.RANDOM_BYTES))


def make_key(kind: str = "p256") -> ec.EllipticCurvePrivateKey | ed25519.Ed25519PrivateKey:
    if kind == "ed25519":
        return ed25519.Ed25519PrivateKey.generate()
    return ec.generate_private_key(ec.SECP256R1())


def private_pem(key: ec.EllipticCurvePrivateKey | ed25519.Ed25519PrivateKey) -> bytes:
    return key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )


class Operator:
    """One operator with a certificate, and its calls."""

    def __init__(self, channel: grpc.aio.Channel) -> None:
        self.channel = channel
        self.stub: Any = operator_pb2_grpc.OperatorServiceStub(channel)

    async def groups(self) -> list[operator_pb2.GroupStatus]:
        return list((await self.stub.ListGroups(Empty(), timeout=SECONDS)).groups)

    async def upsert(self, key: str, **config: Any) -> Any:
        request = operator_pb2.UpsertGroupRequest(key=key, config=operator_pb2.GroupConfig(**config))
        return await self.stub.UpsertGroup(request, timeout=SECONDS)

    async def delete_group(self, key: str) -> None:
        await self.stub.DeleteGroup(operator_pb2.DeleteGroupRequest(key=key), timeout=SECONDS)

    async def refresh(self) -> Any:
        return await self.stub.RefreshConfig(Empty(), timeout=SECONDS)

    async def create(self, instance_id: str = "", **config: Any) -> Any:
        request = operator_pb2.CreateInstanceRequest(
            instance_id=instance_id, config=operator_pb2.InstanceConfig(**config)
        )
        return await self.stub.CreateInstance(request, timeout=SECONDS)

    async def delete(self, name: str) -> str:
        request = operator_pb2.DeleteInstanceRequest(instance_id=name)
        return str((await self.stub.DeleteInstance(request, timeout=SECONDS)).status)

    async def status(self, name: str) -> Any:
        request = operator_pb2.GetInstanceStatusRequest(instance_id=name)
        return await self.stub.GetInstanceStatus(request, timeout=SECONDS)

    async def acknowledge(self, name: str) -> None:
        await self.stub.AcknowledgeDrained(operator_pb2.DrainAckRequest(instance_id=name), timeout=SECONDS)

    async def sleep(self, tenant: str = TENANT, **fields: Any) -> Any:
        request = operator_pb2.SleepTenantRequest(tenant=tenant, **fields)
        return await self.stub.SleepTenant(request, timeout=SECONDS)

    async def wake(self, tenant: str = TENANT, **fields: Any) -> Any:
        request = operator_pb2.WakeTenantRequest(tenant=tenant, **fields)
        return await self.stub.WakeTenant(request, timeout=SECONDS)

    async def tenant(self, tenant: str = TENANT) -> Any:
        request = operator_pb2.GetTenantStatusRequest(tenant=tenant)
        return await self.stub.GetTenantStatus(request, timeout=SECONDS)


@dataclass(slots=True, kw_only=True)
class Rig:
    folder: Path
    store: Store
    objects: LocalObjects
    authority: Authority
    instances: Instances
    groups: Groups
    reports: InstanceReports
    errors: ErrorFeed
    activity: Activity
    explanations: Explanations
    secrets: InstanceSecrets
    nonces: SigningKeys
    service: OperatorService
    address: str
    admin_socket: Path
    stack: AsyncExitStack
    looked: list[tuple[str, str]]
    words: dict[str, str]
    """What the provider says of an instance."""
    revocations: Revocations
    apps: list[GrpcApp] = field(default_factory=list)

    async def configure(self, wanted: Mapping[str, Any] | str) -> None:
        text = wanted if isinstance(wanted, str) else json.dumps(wanted)
        await self.objects.put(CONFIG_PATH, text.encode())

    def identity(
        self,
        folder: Path,
        *,
        tenant: str = TENANT,
        role: ClientRole = ClientRole.OPERATOR,
        kind: str = "p256",
    ) -> Path:
        """A folder with the files that an operator keeps."""
        folder.mkdir(parents=True, exist_ok=True)
        key = make_key(kind)
        issued = credentials.issue(
            self.authority,
            key.public_key(),
            role=role,
            tenant=tenant,
            client="lab",
            life_hours=1,
            serial=SystemClock().now_ns(),
        )
        (folder / "ca.crt").write_bytes(self.authority.certificate_pem)
        (folder / "identity.key").write_bytes(private_pem(key))
        (folder / "identity.crt").write_bytes(issued.leaf_pem)
        return folder

    async def operator(self, tenant: str = TENANT, role: ClientRole = ClientRole.OPERATOR) -> Operator:
        files = self.identity(self.folder / f"{tenant}-{role}", tenant=tenant, role=role)
        trust = grpc.ssl_channel_credentials(
            (files / "ca.crt").read_bytes(),
            (files / "identity.key").read_bytes(),
            (files / "identity.crt").read_bytes(),
        )
        options = (("grpc.use_local_subchannel_pool", 1),)
        channel = await self.stack.enter_async_context(
            grpc.aio.secure_channel(self.address, trust, options=options)
        )
        return Operator(channel)

    async def admin(self) -> Any:
        channel = await self.stack.enter_async_context(grpc.aio.insecure_channel(f"unix:{self.admin_socket}"))
        return admin_grpc.InstancesAdminStub(channel)

    async def authorities(self) -> Any:
        channel = await self.stack.enter_async_context(grpc.aio.insecure_channel(f"unix:{self.admin_socket}"))
        return authority_pb2_grpc.AuthorityAdminStub(channel)

    # What a controller would do.

    async def add(
        self, group: str = "web", *, tenant: str = TENANT, on_demand: bool = False, provider: str = "pm-1"
    ) -> Instance:
        spec = InstanceSpec(
            cluster="lab", shard="local", group=group, template="worker", prefix="wkr", on_demand=on_demand
        )
        status = InstanceStatus(provider_id=provider, registered_at_ns=SystemClock().now_ns())
        return await self.instances.record(tenant, new_id(), spec, status)

    async def change(self, instance: Instance, **fields: Any) -> Instance:
        def step(status: InstanceStatus, _now_ns: int) -> InstanceStatus:
            return msgspec.structs.replace(status, **fields)

        tenant = instance.scope.removeprefix("tenant/")
        done = await self.instances.step(tenant, instance.name, step, action="test")
        assert done is not None
        return done

    async def drain(
        self, instance: Instance, reason: str = "unhealthy", *, in_seconds: float = 60
    ) -> DrainState:
        now_ns = SystemClock().now_ns()
        drain = DrainState(reason=reason, started_at_ns=now_ns, delete_at_ns=now_ns + round(in_seconds * 1e9))
        await self.change(instance, drain=drain)
        return drain


@asynccontextmanager
async def operator_rig(
    folder: Path,
    wanted: Mapping[str, Any] | None = None,
    *,
    clock: Clock | None = None,
    generations: Mapping[str, str] | None = None,
    configured: bool = True,
    tenant_instances: int = 0,
) -> AsyncIterator[Rig]:
    clock = clock or SystemClock()
    async with AsyncExitStack() as stack:
        store = await stack.enter_async_context(
            Store.open(StoreSettings(path=folder / "state.db"), kinds=(*KERNEL_KINDS, *KINDS), clock=clock)
        )
        master = MasterKey.from_file(folder / "master.key", clock)
        authority = await Authority.load_or_create(store, master, clock)
        workloads = await Authority.load_or_create(store, master, clock, purpose=WORKLOAD)
        nonces = await SigningKeys.load_or_create(store, master, clock, purpose="nonce", algorithm="EdDSA")
        objects = LocalObjects(folder / "objects")
        instances = Instances(store)
        groups = Groups(
            store,
            instances,
            objects,
            shard="local",
            drain_on_scale_down=True,
            tenant_instances=tenant_instances,
        )
        looked: list[tuple[str, str]] = []
        words: dict[str, str] = {}
        errors = ErrorFeed(clock)
        activity = Activity(clock)
        reports = InstanceReports(clock)

        async def create(
            tenant: str, group: str, *, name: str, instance_type: str, **fields: Any
        ) -> Instance:
            spec = InstanceSpec(
                cluster="lab",
                shard="local",
                group=group,
                template="worker",
                prefix="wkr",
                on_demand=True,
                instance_type=instance_type,
                vars=dict(fields["vars"]),
            )
            return await instances.record(tenant, name or new_id(), spec, InstanceStatus())

        async def provider_status(instance: Instance) -> str:
            return words.get(instance.name, "running")

        service = OperatorService(
            store=store,
            instances=instances,
            groups=groups,
            reports=reports,
            authority=authority,
            clock=clock,
            look_at=lambda tenant, group: looked.append((tenant, group)),
            create_on_demand=create,
            provider_status=provider_status,
            errors=errors,
            activity=activity,
            event_generation=lambda tenant: (generations or {}).get(tenant, "second"),
        )
        explanations = Explanations()

        async def findings(key: str) -> list[Finding]:
            return explanations.about(key) if key else explanations.all()

        secrets = InstanceSecrets(objects, master)
        place: list[str] = []
        revocations = Revocations(store, clock)
        admin = AdminService(
            store=store,
            groups=groups,
            authority=authority,
            nonces=nonces,
            secrets=secrets,
            findings=findings,
            clock=clock,
            reports=reports,
            operator_address=lambda: place[0],
            revocations=revocations,
            look_at=lambda tenant, group: looked.append((tenant, group)),
        )
        authorities = AuthorityService(store, authority, workloads, nonces, clock)
        apps = [_operator_app(service, revocations, authority, clock), _admin_app(admin, authorities, clock)]
        socket = folder / "admin.sock"
        tls = _tls(authority, folder)
        operator_spec = ListenerSpec(name="operator", addresses=("127.0.0.1:0",), app=apps[0], tls=tls)
        admin_spec = ListenerSpec(name="admin", addresses=(f"unix://{socket}",), app=apps[1], unix_mode=0o600)
        listener = await stack.enter_async_context(open_listener(operator_spec, grace_seconds=2))
        await stack.enter_async_context(open_listener(admin_spec, grace_seconds=2))
        place.append(listener.addresses[0].removeprefix("https://"))
        rig = Rig(
            folder=folder,
            store=store,
            objects=objects,
            authority=authority,
            instances=instances,
            groups=groups,
            reports=reports,
            errors=errors,
            explanations=explanations,
            secrets=secrets,
            nonces=nonces,
            service=service,
            address=place[0],
            admin_socket=socket,
            looked=looked,
            words=words,
            revocations=revocations,
            apps=apps,
            activity=activity,
            stack=await stack.enter_async_context(AsyncExitStack()),
        )
        if configured:
            await rig.configure(wanted or document())
            await groups.refresh()
        async with asyncio.TaskGroup() as tasks:
            running = tasks.create_task(service.run())
            yield rig
            service.close()
            for app in apps:
                await app.drain(2)
            running.cancel()


def _operator_app(
    service: OperatorService, revocations: Revocations, authority: Authority, clock: Clock
) -> GrpcApp:
    app = GrpcApp(
        listener="operator",
        table=MethodTable(_rows(_OPERATOR, "operator", Authentication.CERTIFICATE)),
        access=AccessTable({Role("operator"): [Grant(permission=_PERMISSION)]}),
        authenticators={
            Authentication.CERTIFICATE: authenticator(ClientRole.OPERATOR, revocations, authority)
        },
        clock=clock,
        statistics=CallStatistics(),
    )
    app.add_service(_OPERATOR, service)
    app.seal()
    return app


def _admin_app(service: AdminService, authorities: AuthorityService, clock: Clock) -> GrpcApp:
    rows = (*_rows(_ADMIN, "admin", Authentication.LOCAL), *_rows(_AUTHORITY, "admin", Authentication.LOCAL))
    app = GrpcApp(
        listener="admin",
        table=MethodTable(rows),
        access=AccessTable({Role("local"): [Grant(permission=_PERMISSION)]}),
        authenticators={Authentication.LOCAL: lambda _connection: _LOCAL},
        clock=clock,
        statistics=CallStatistics(),
    )
    app.add_service(_ADMIN, service)
    app.add_service(_AUTHORITY, authorities)
    app.seal()
    return app


def _rows(service: Any, listener: str, authentication: Authentication) -> Iterator[MethodRow]:
    for method in service.methods:
        yield MethodRow(
            path=f"/{service.full_name}/{method.name}",
            listener=listener,
            authentication=authentication,
            permission=_PERMISSION,
        )


def _tls(authority: Authority, folder: Path) -> TlsFiles:
    issued = authority.issue_server(["127.0.0.1", "localhost"])
    assert issued.key_pem is not None
    certificate, key, ca = folder / "server.crt", folder / "server.key", folder / "server-ca.crt"
    certificate.write_bytes(issued.certificate_pem)
    key.write_bytes(issued.key_pem)
    ca.write_bytes(authority.certificate_pem)
    return TlsFiles(certificate=certificate, key=key, client_ca=ca, client_certificate="required")


async def take(stream: Any, count: int) -> list[Any]:
    """The next events of a watch."""
    async with asyncio.timeout(SECONDS):
        return [await stream.read() for _ in range(count)]


async def take_until(stream: Any, condition: Callable[[Any], bool]) -> Any:
    """The first event of a watch that fits."""
    async with asyncio.timeout(SECONDS):
        while not condition(event := await stream.read()):
            pass
    return event


async def quiet(stream: Any, seconds: float = 0.3) -> bool:
    """Whether a watch has nothing more to say for a while."""
    reading = asyncio.ensure_future(stream.read())
    done, _ = await asyncio.wait({reading}, timeout=seconds)
    if not done:
        reading.cancel()
    return not done


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(SECONDS):
        while not condition():
            await asyncio.sleep(0.01)
