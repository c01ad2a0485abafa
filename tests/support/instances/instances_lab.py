"""A whole instances server in this process, with a provider that does as it is told."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fleetplane import settings
from fleetplane.domains.blueprint import Kernel, prepare_both, run_both
from fleetplane.domains.fleetwide import BLUEPRINT as FLEETWIDE
from fleetplane.domains.instances import credentials
from fleetplane.domains.instances.credentials import ClientRole
from fleetplane.domains.instances.kinds import INSTANCE, Instance
from fleetplane.domains.instances.providers.contract import CreateRequest, ProviderContext
from fleetplane.domains.instances.providers.mock.provider import MockProvider
from fleetplane.domains.instances.records.groups import SilencePolicy
from fleetplane.domains.instances.server import BLUEPRINT, InstanceDomain, InstanceOptions
from fleetplane.kernel.clock import Clock, SystemClock
from fleetplane.kernel.identity import Authority, MasterKey
from fleetplane.kernel.identity.authority import WORKLOAD
from fleetplane.kernel.identity.operators import Operators
from fleetplane.kernel.identity.revocation import Revocations
from fleetplane.kernel.identity.signing import SigningKeys
from fleetplane.kernel.kinds import KERNEL_KINDS
from fleetplane.kernel.objects import LocalObjects
from fleetplane.kernel.store import Store, StoreSettings
from fleetplane.rpc import CallStatistics, Listener, ListenerSpec, open_listener
from fleetplane.rpc.introspection import HealthBoard
from fleetplane.server import endpoints
from fleetplane.server.front import Presenting
from fleetplane.server.grpc_apps import compose, cut_off

TENANT = "acme"
CONFIG_PATH = "shard/local/config.jsonc"


def document(size: int = 1, **changes: Any) -> dict[str, Any]:
    """A small configuration: one group of workers with an env file and a certificate."""
    places = {
        f"{name}_addr": f"127.0.0.1:{port}"
        for name, port in (
            ("health", 8990),
            ("election", 8991),
            ("registration", 8992),
            ("operator", 8993),
            ("agent", 8994),
        )
    }
    shard = {
        "id": "local",
        "infra": {"provider": "mock", "region": "here", "zone": "here-a"},
        "bind": places,
        "advertise": places,
        "health_check_interval": "1s",
        "default_drain_timeout": "2s",
        "garbage_collection": {
            "interval": "1s",
            "registration_timeout": "10m",
            "deleted_record_retention": "1h",
        },
        **changes.pop("shard", {}),
    }
    return {
        "cluster": {"id": "lab", "secrets": {"provider": "memory"}},
        "shard": shard,
        "certificates": {
            "kubelet.server": {"kind": "server", "cn": "kubelet", "dns": ["{{ .Instance.ID }}"]},
        },
        "templates": {
            "worker": {
                "kind": "wkr",
                "arch": "amd64",
                "vars": {"Colour": "blue"},
                "files": {
                    "app.env": {
                        "kind": "env",
                        "template": {"ID": "{{ .Instance.ID }}", "COLOUR": "{{ .Vars.Colour }}"},
                    },
                    "kubelet.crt": {
                        "kind": "certificate",
                        "template": "kubelet.server",
                        "key": {"source": "agent", "name": "kubelet.server.pub"},
                    },
                },
            }
        },
        "groups": {TENANT: {"workers": {"template": "worker", "size": size}}},
        **changes,
    }


@dataclass(slots=True)
class Lab:
    domain: InstanceDomain
    kernel: Kernel
    objects: LocalObjects
    provider: MockProvider
    nonces: SigningKeys
    addresses: Mapping[str, str]
    folder: Path
    workloads: Authority
    listeners: Sequence[Listener]
    requests: dict[str, CreateRequest] = field(default_factory=dict)

    @property
    def ca(self) -> Path:
        path = self.folder / "ca.crt"
        path.write_bytes(self.kernel.authority.trust_pem)
        return path

    @asynccontextmanager
    async def presenting_anew(self) -> AsyncIterator[None]:
        """Until a step of the authority that is taken within has reached every listener.

        Who connects meanwhile may be turned away and has to come again, which not every client here does.
        """
        before = {one.name: one._spec.tls for one in self.listeners if one._spec.tls is not None}
        yield
        await until(
            lambda: all(one._spec.tls is not before[one.name] for one in self.listeners if one.name in before)
        )

    def instances(self) -> list[Instance]:
        return list(self.kernel.store.list(INSTANCE, f"tenant/{TENANT}"))

    async def configure(self, wanted: dict[str, Any]) -> None:
        await self.objects.put(CONFIG_PATH, json.dumps(wanted).encode())

    def operator_nonce(self, *, tenant: str = TENANT, cluster: str = "lab", life_seconds: float = 60) -> str:
        return credentials.sign_nonce(
            self.nonces,
            role=ClientRole.OPERATOR,
            subject=cluster,
            life_seconds=life_seconds,
            claims={"cluster_id": cluster, "tenant": tenant, "config_hash": "none"},
        )

    async def created(self, count: int = 1, *, seconds: float = 60) -> list[CreateRequest]:
        """The requests of the first instances, once so many were made."""
        await until(lambda: len(self.requests) >= count, seconds=seconds)
        return list(self.requests.values())


async def until(condition: Callable[[], bool], *, seconds: float = 60) -> None:
    async with asyncio.timeout(seconds):
        while not condition():
            await asyncio.sleep(0.01)


@asynccontextmanager
async def lab(
    folder: Path,
    wanted: dict[str, Any] | None = None,
    *,
    clock: Clock | None = None,
    provider: MockProvider | None = None,
    first_generation_tenants: frozenset[str] = frozenset(),
    silence: SilencePolicy | None = None,
) -> AsyncIterator[Lab]:
    clock = clock or SystemClock()
    loaded = settings.load(
        config=None,
        environment={},
        flags={
            "data_dir": str(folder),
            "listeners.registration.addresses": "127.0.0.1:0",
            "listeners.operator.addresses": "127.0.0.1:0",
            "listeners.agent.addresses": "127.0.0.1:0",
        },
    )
    objects = LocalObjects(folder / "objects")
    if wanted is not None:
        await objects.put(CONFIG_PATH, json.dumps(wanted).encode())
    async with AsyncExitStack() as stack:
        store_settings = StoreSettings(path=folder / "state.db")
        kinds = tuple(dict.fromkeys((*KERNEL_KINDS, *BLUEPRINT.kinds, *FLEETWIDE.kinds)))
        store = await stack.enter_async_context(Store.open(store_settings, kinds=kinds, clock=clock))
        master = MasterKey.from_file(folder / "master.key", clock)
        authority = await Authority.load_or_create(store, master, clock)
        calls = CallStatistics()
        revocations = Revocations(store, clock)
        kernel = Kernel(
            store=store,
            clock=clock,
            calls=calls,
            master=master,
            authority=authority,
            revocations=revocations,
            operators=await Operators.load(store, master, clock),
        )
        nonces = await SigningKeys.load_or_create(store, master, clock, purpose="nonce", algorithm="EdDSA")
        workloads = await Authority.load_or_create(store, master, clock, purpose=WORKLOAD)
        requests: dict[str, CreateRequest] = {}
        mock = provider or MockProvider(ProviderContext(clock=clock, state_directory=folder / "mock"))
        mock.on_create = lambda request: requests.update({request.instance_id: request})
        options = InstanceOptions(
            shard="local",
            state_directory=folder / "instances",
            environment={},
            advertise_listeners=True,
            first_generation_tenants=first_generation_tenants,
            silence=silence,
        )
        domain = InstanceDomain(kernel, objects, nonces, workloads, options, provider=mock)
        await prepare_both(domain)
        apps = compose([BLUEPRINT], [domain], calls, clock, HealthBoard())
        revocations.subscribe(lambda revoked: cut_off(apps.values(), revoked))

        def wanted_listeners() -> list[ListenerSpec]:
            return endpoints.grpc(loaded, apps, [domain], authority)

        presenting = Presenting(authority, wanted_listeners, apps.values(), clock)
        listeners = [
            await stack.enter_async_context(open_listener(spec, grace_seconds=2))
            for spec in wanted_listeners()
        ]
        bound = {listener.name: listener.addresses for listener in listeners}
        presenting.opened(listeners)
        domain.opened(bound)
        async with asyncio.TaskGroup() as tasks:
            running = [tasks.create_task(run_both(domain)), tasks.create_task(presenting.run())]
            yield Lab(
                domain=domain,
                kernel=kernel,
                objects=objects,
                provider=mock,
                nonces=nonces,
                folder=folder,
                addresses={name: places[0].removeprefix("https://") for name, places in bound.items()},
                workloads=workloads,
                listeners=listeners,
                requests=requests,
            )
            domain.drain()
            async with asyncio.TaskGroup() as draining:
                for app in apps.values():
                    draining.create_task(app.drain(2))
            for task in running:
                task.cancel()
