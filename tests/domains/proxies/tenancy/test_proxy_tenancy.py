"""Two organisations, every route, crossed; and every role against every route."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from support.proxies.proxy_api import HOST, UPSTREAM, Api, Person, rest_api

from fleetplane.domains.proxies.access import ADMINISTER, OPERATE, OWN, RAW, READ, SYSTEM
from fleetplane.domains.proxies.kinds.values import OrganizationRole
from fleetplane.kernel.access import Permission
from fleetplane.web.rest.routes import Route

NEEDS = {
    READ: OrganizationRole.VIEWER,
    OPERATE: OrganizationRole.OPERATOR,
    RAW: OrganizationRole.ADMIN,
    ADMINISTER: OrganizationRole.ADMIN,
    OWN: OrganizationRole.OWNER,
}


async def furnished(api: Api, owner: Person) -> dict[str, str]:
    """One of everything; the path parameters that name them."""
    organization, workspace = await api.workspace(owner)
    below = f"/workspaces/{workspace}"
    agent = await owner.post(f"{below}/agents/tokens", {"name": "a"})
    upstream = await owner.post(f"{below}/upstreams", UPSTREAM)
    listed = await owner.post(f"{below}/access-lists", {"name": "Office"})
    given = {"zone": "secret.example.com", "provider": "hetzner", "credentials": {"auth_token": "x"}}
    zone = await owner.post(f"{below}/dns-zones", given)
    passed_on = {"name": "db", "listen_port": 5432, "upstream_id": upstream["id"]}
    stream = await owner.post(f"{below}/streams", passed_on)
    host = await owner.post(f"{below}/virtual-hosts", HOST)
    certificate = await owner.post(f"{below}/certificates", {"domain": "secret.example.com"})
    token = await owner.post("/api-tokens", {"organization_id": organization, "name": "ci"})
    policy = {"deliver_within_seconds": 600}
    waiting = {"target": {"names": [agent["agent_id"]]}, "command": "reload", "policy": policy}
    run = (await owner.call("POST", f"{below}/runs", waiting)).json()
    return {
        "organization_id": organization,
        "workspace_id": workspace,
        "agent_id": agent["agent_id"],
        "upstream_id": upstream["id"],
        "access_list_id": listed["id"],
        "dns_zone_id": zone["id"],
        "stream_id": stream["id"],
        "virtual_host_id": host["id"],
        "certificate_id": certificate["id"],
        "api_token_id": token["id"],
        "user_id": owner.id,
        "version": "1",
        "run_id": run["id"],
    }


def filled(route: Route, names: dict[str, str]) -> str:
    return re.sub(r"\{(\w+)\}", lambda match: names[match[1]], route.path)


def permission(route: Route) -> Permission:
    assert route.permission is not None
    return route.permission


async def test_strangers_are_told_not_found_by_every_route_and_learn_no_name(tmp_path: Path) -> None:
    async with rest_api(tmp_path) as api:
        names = await furnished(api, await api.person())
        stranger = await api.person()
        await furnished(api, stranger)
        crossed = [
            route for route in api.rest.table.routes if "{" in route.path and route.permission != SYSTEM
        ]
        assert len(crossed) > 40
        for route in crossed:
            answer = await stranger.call(route.method, filled(route, names), {})
            assert (answer.status_code, answer.json()["error"]["code"]) == (404, "NOT_FOUND"), route.name
            assert "secret" not in answer.text, route.name
            missing = filled(route, dict.fromkeys(names, "00000000-0000-4000-8000-000000000000"))
            nothing = await stranger.call(route.method, missing, {})
            assert nothing.json()["error"]["message"] == answer.json()["error"]["message"], route.name


async def test_lists_and_references_never_cross_an_organisation(tmp_path: Path) -> None:
    async with rest_api(tmp_path) as api:
        one, other = await api.person(), await api.person()
        mine, theirs = await furnished(api, one), await furnished(api, other)

        assert [row["id"] for row in (await one.get("/organizations"))["data"]] == [mine["organization_id"]]
        assert [row["id"] for row in (await one.get("/api-tokens"))["data"]] == [mine["api_token_id"]]
        path = f"/workspaces/{mine['workspace_id']}/virtual-hosts"
        for location, field in (
            ({"path": "/", "upstream_id": theirs["upstream_id"]}, "locations.0.upstream_id"),
        ):
            body = {**HOST, "server_name": "x.example.com", "locations": [location]}
            assert await one.faults("POST", path, body) == [(field, "UNKNOWN_REFERENCE")]
        body = {
            **HOST,
            "server_name": "y.example.com",
            "listen_port": 443,
            "ssl_enabled": True,
            "ssl_certificate_id": theirs["certificate_id"],
        }
        assert await one.faults("POST", path, body) == [("ssl_certificate_id", "UNKNOWN_REFERENCE")]
        body = {
            **HOST,
            "server_name": "z.example.com",
            "target_agents": {"type": "agents", "agent_ids": [theirs["agent_id"]]},
        }
        assert await one.faults("POST", path, body) == [("target_agents.agent_ids.0", "UNKNOWN_REFERENCE")]
        token = {"organization_id": theirs["organization_id"], "name": "mine now"}
        assert await one.refused("POST", "/api-tokens", token) == (404, "NOT_FOUND")


async def test_every_route_is_forbidden_to_the_role_below_the_one_it_needs(tmp_path: Path) -> None:
    async with rest_api(tmp_path) as api:
        names = await furnished(api, api.admin)
        organization = names["organization_id"]
        people: dict[OrganizationRole, Person] = {
            role: await api.person(organization, role) for role in OrganizationRole
        }
        ranks = list(OrganizationRole)
        for route in api.rest.table.routes:
            if "{" not in route.path or route.permission == SYSTEM:
                continue
            needed = NEEDS[permission(route)]
            below = ranks[: ranks.index(needed)]
            for role in below:
                code = await people[role].refused(route.method, filled(route, names), {})
                assert code == (403, "FORBIDDEN"), (route.name, role)
            if route.method == "GET" and re.search(r"/(observed|takeover)\b", route.path):
                # This agent observes nothing.
                code = await people[needed].refused("GET", filled(route, names))
                assert code == (409, "CONFLICT"), route.name
            elif route.method == "GET" and not route.path.endswith(("/status", "/events")):
                query = "?from=1" if route.path.endswith("/diff") else ""
                answer = await people[needed].call("GET", filled(route, names) + query)
                assert answer.status_code == 200, (route.name, answer.text)


async def test_routes_of_the_system_are_for_its_administrators(tmp_path: Path) -> None:
    async with rest_api(tmp_path) as api:
        owner = await api.person()
        names = await furnished(api, owner)
        system = [route for route in api.rest.table.routes if route.permission == SYSTEM]
        assert system
        for route in system:
            assert await owner.refused(route.method, filled(route, names), {}) == (403, "FORBIDDEN")


async def test_every_route_but_login_and_refresh_needs_a_token(tmp_path: Path) -> None:
    async with rest_api(tmp_path) as api:
        names: dict[str, Any] = await furnished(api, api.admin)
        public = [route.path for route in api.rest.table.routes if route.public]
        assert public == ["/auth/login", "/auth/refresh"]
        for route in api.rest.table.routes:
            if not route.public:
                answer = await api.http.request(route.method, "/v1" + filled(route, names), json={})
                assert answer.status_code == 401, route.name
                assert answer.json()["error"]["code"] == "UNAUTHORIZED"
                assert answer.headers["www-authenticate"] == "Bearer"


async def test_an_operator_may_keep_raw_directives_but_not_add_them(tmp_path: Path) -> None:
    async with rest_api(tmp_path) as api:
        organization, workspace = await api.workspace()
        operator = await api.person(organization, "operator")
        path = f"/workspaces/{workspace}/virtual-hosts"
        raw = {**HOST, "custom_directives": {"client_max_body_size": "10m"}}

        assert await operator.refused("POST", path, raw) == (403, "FORBIDDEN")
        made = await api.admin.post(path, raw)
        assert (await operator.patch(f"/virtual-hosts/{made['id']}", {"name": "New"}))["name"] == "New"
        more = {"custom_directives": {"client_max_body_size": "20m"}}
        assert await operator.refused("PATCH", f"/virtual-hosts/{made['id']}", more) == (403, "FORBIDDEN")


async def test_the_last_owner_stays_and_nobody_decides_about_their_betters(tmp_path: Path) -> None:
    async with rest_api(tmp_path) as api:
        organization, _ = await api.workspace()
        admin = await api.person(organization, "admin")
        path = f"/organizations/{organization}/members"
        owner = f"{path}/{api.admin.id}"

        assert await api.admin.refused("DELETE", owner) == (409, "CONFLICT")
        assert await api.admin.refused("PATCH", owner, {"role": "admin"}) == (409, "CONFLICT")
        assert await admin.refused("DELETE", owner) == (403, "FORBIDDEN")
        assert await admin.refused("PATCH", f"{path}/{admin.id}", {"role": "owner"}) == (403, "FORBIDDEN")
        await api.admin.patch(f"{path}/{admin.id}", {"role": "owner"})
        await admin.delete(owner)
        assert await api.admin.refused("GET", f"/organizations/{organization}") == (404, "NOT_FOUND")
