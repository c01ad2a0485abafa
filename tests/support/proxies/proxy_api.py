"""The REST side of the proxies domain in this process, and short words for driving it."""

from __future__ import annotations

import uuid
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
from prometheus_client import CollectorRegistry

from fleetplane.domains.proxies.agents.ports import AgentPresence, CommandPort, NobodyThere, ReportedRecords
from fleetplane.domains.proxies.kinds.records import MEMBERSHIP, MembershipSpec, UserSpec, organization_scope
from fleetplane.domains.proxies.kinds.values import OrganizationRole
from fleetplane.domains.proxies.rest.assembly import ProxyRest, RestOptions
from fleetplane.domains.proxies.server import BLUEPRINT
from fleetplane.domains.proxies.serving.private_keys import Vault
from fleetplane.domains.proxies.serving.workspaces import Workspaces
from fleetplane.domains.proxies.tenancy.quotas import QuotaOptions
from fleetplane.fleet.people.door import Authenticators
from fleetplane.kernel.clock import Clock, SystemClock
from fleetplane.kernel.identity import MasterKey
from fleetplane.kernel.identity.operators import Operators
from fleetplane.kernel.identity.revocation import Revocations
from fleetplane.kernel.kinds import KERNEL_KINDS
from fleetplane.kernel.store import Store, StoreSettings
from fleetplane.web.ops import OpsApp

ADMIN_EMAIL = "user@example.com"
ADMIN_PASSWORD = "secure_password"
Json = dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Floor:
    """As much of the kernel as REST stands on."""

    store: Store
    clock: Clock
    master: MasterKey
    door: Authenticators


@dataclass(slots=True)
class Person:
    """Someone with a token."""

    http: httpx.AsyncClient
    token: str
    id: str = ""

    async def call(
        self, method: str, path: str, body: Any = None, *, headers: dict[str, str] | None = None
    ) -> httpx.Response:
        given = {"authorization": f"Bearer {self.token}", **(headers or {})}
        return await self.http.request(method, f"/v1{path}", json=body, headers=given)

    async def get(self, path: str) -> Json:
        return _good(await self.call("GET", path), 200)

    async def post(self, path: str, body: Any = None, status: int = 201) -> Json:
        return _good(await self.call("POST", path, body), status)

    async def patch(self, path: str, body: Any) -> Json:
        return _good(await self.call("PATCH", path, body), 200)

    async def delete(self, path: str) -> None:
        answer = await self.call("DELETE", path)
        assert (answer.status_code, answer.content) == (204, b""), answer.text

    async def refused(self, method: str, path: str, body: Any = None) -> tuple[int, str]:
        answer = await self.call(method, path, body)
        return answer.status_code, answer.json()["error"]["code"]

    async def faults(self, method: str, path: str, body: Any = None) -> list[tuple[str, str]]:
        """The fields at fault, each with its code."""
        answer = await self.call(method, path, body)
        assert answer.status_code in (409, 422), answer.text
        return [(one["field"], one["code"]) for one in answer.json()["error"]["details"]]


def _good(answer: httpx.Response, status: int) -> Json:
    assert answer.status_code == status, answer.text
    made: Json = answer.json()
    return made


@dataclass(slots=True)
class Api:
    rest: ProxyRest
    store: Store
    workspaces: Workspaces
    vault: Vault
    http: httpx.AsyncClient
    clock: Clock
    admin: Person
    made: dict[str, str] = field(default_factory=dict)

    async def person(self, organization: str | None = None, role: str = "viewer") -> Person:
        """A new user, logged in, perhaps with a role in an organisation."""
        accounts = self.rest._users
        email = f"{uuid.uuid4().hex[:10]}@example.com"
        user = await accounts.create(UserSpec(email=email), "a long password", actor="test")
        if organization is not None:
            scope = organization_scope(organization)
            await self.store.transact(
                lambda draft: draft.put(
                    MEMBERSHIP, scope, user.name, spec=MembershipSpec(role=OrganizationRole(role))
                ),
                actor="test",
                action="test",
                touches=[MEMBERSHIP.key(scope, user.name)],
            )
        pair = await self.rest._logins.open(user, actor="test")
        return Person(self.http, pair.access, user.name)

    async def workspace(self, person: Person | None = None) -> tuple[str, str]:
        """A new organisation and a workspace in it; their ids."""
        owner, slug = person or self.admin, f"s{uuid.uuid4().hex[:10]}"
        organization = await owner.post("/organizations", {"name": "Org", "slug": slug})
        workspace = await owner.post(
            f"/organizations/{organization['id']}/workspaces", {"name": "Ws", "slug": slug}
        )
        return organization["id"], workspace["id"]


@asynccontextmanager
async def rest_api(
    tmp_path: Path,
    *,
    presence: AgentPresence | None = None,
    commander: CommandPort | None = None,
    records: ReportedRecords | None = None,
    requests_per_minute: int = 1_000_000,
    clock: Clock | None = None,
    anyone_may_found: bool = True,
    quotas: QuotaOptions | None = None,
) -> AsyncIterator[Api]:
    clock = clock or SystemClock()
    async with Store.open(
        StoreSettings(path=tmp_path / "p.db"), kinds=(*KERNEL_KINDS, *BLUEPRINT.kinds), clock=clock
    ) as store:
        master = MasterKey.from_file(tmp_path / "master.key", clock)
        door = Authenticators(await Operators.load(store, master, clock), Revocations(store, clock))
        kernel = Floor(store=store, clock=clock, master=master, door=door)
        vault = Vault(store, master)
        workspaces = Workspaces(store, vault)
        nobody = NobodyThere()
        options = RestOptions(
            version="0",
            admin_email=ADMIN_EMAIL,
            admin_password=ADMIN_PASSWORD,
            requests_per_minute=requests_per_minute,
            anyone_may_found=anyone_may_found,
            quotas=quotas or QuotaOptions(),
        )
        rest = await ProxyRest.create(
            kernel,
            options,
            workspaces=workspaces,
            vault=vault,
            presence=presence or nobody,
            commander=commander or nobody,
            records=records or nobody,
        )
        await rest.take_over()
        front = OpsApp(CollectorRegistry(), version="0")
        front.mount(rest.routes)
        transport = httpx.ASGITransport(app=front)
        async with httpx.AsyncClient(transport=transport, base_url="http://test") as http:
            user = rest._users.by_login(ADMIN_EMAIL)
            assert user is not None
            pair = await rest._logins.open(user, actor="test")
            admin = Person(http, pair.access, user.name)
            yield Api(rest, store, workspaces, vault, http, clock, admin)


UPSTREAM: Json = {
    "name": "web-backend",
    "algorithm": "least_connections",
    "servers": [{"address": "10.0.1.30:8080", "weight": 2, "backup": False}],
}
HOST: Json = {"name": "Site", "server_name": "example.com", "listen_port": 80}
