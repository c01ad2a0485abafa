"""Both halves of the proxies domain on one store: agents over gRPC, people over REST, in this process."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
from prometheus_client import CollectorRegistry
from support.instances.agents_rig import Rig, agents_rig
from support.proxies.proxy_api import ADMIN_EMAIL, ADMIN_PASSWORD, Floor, Person

from fleetplane.domains.proxies.agents.ports import NobodyThere
from fleetplane.domains.proxies.kinds.records import MEMBERSHIP, MembershipSpec
from fleetplane.domains.proxies.kinds.values import OrganizationRole
from fleetplane.domains.proxies.rest.assembly import ProxyRest, RestOptions
from fleetplane.domains.proxies.serving.private_keys import Vault
from fleetplane.domains.proxies.serving.workspaces import Workspaces
from fleetplane.fleet.people.door import Authenticators
from fleetplane.kernel.clock import SystemClock
from fleetplane.kernel.identity import MasterKey
from fleetplane.kernel.identity.operators import Operators
from fleetplane.kernel.identity.revocation import Revocations
from fleetplane.web.ops import OpsApp


@asynccontextmanager
async def fleet_api(folder: Path, **options: Any) -> AsyncIterator[tuple[Rig, Person, ProxyRest]]:
    """The agents' rig, and an administrator who may do everything."""
    async with agents_rig(folder, **options) as rig:
        clock = SystemClock()
        master = MasterKey(b"k" * 32, clock)
        vault = Vault(rig.store, master)
        door = Authenticators(await Operators.load(rig.store, master, clock), Revocations(rig.store, clock))
        rest = await ProxyRest.create(
            Floor(store=rig.store, clock=clock, master=master, door=door),
            RestOptions(version="0", admin_email=ADMIN_EMAIL, admin_password=ADMIN_PASSWORD),
            workspaces=Workspaces(rig.store, vault),
            vault=vault,
            presence=rig.side.presences,
            commander=rig.side.commander,
            records=NobodyThere(),
            deployer=rig.side.controller,
        )
        await rest.take_over()
        front = OpsApp(CollectorRegistry(), version="0")
        front.mount(rest.routes)
        transport = httpx.ASGITransport(app=front)
        async with httpx.AsyncClient(transport=transport, base_url="http://test") as http:
            user = rest._users.by_login(ADMIN_EMAIL)
            assert user is not None
            scope = rig.scope.partition("/ws/")[0]
            await rig.store.transact(
                lambda draft: draft.put(
                    MEMBERSHIP, scope, user.name, spec=MembershipSpec(role=OrganizationRole.OWNER)
                ),
                actor="test",
                action="test",
                touches=[MEMBERSHIP.key(scope, user.name)],
            )
            pair = await rest._logins.open(user, actor="test")
            yield rig, Person(http, pair.access, user.name), rest
