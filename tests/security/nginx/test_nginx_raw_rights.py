"""Raw NGINX text belongs to administrators: nobody else adds it, removes it, or leads requests around it."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
from support.proxies.proxy_api import Api, Json, Person, rest_api

from fleetplane.domains.proxies.kinds.records import MEMBERSHIP, MembershipSpec, organization_scope
from fleetplane.domains.proxies.kinds.values import AllAgents, Location, OrganizationRole
from fleetplane.domains.proxies.rest.bodies import CreateVirtualHost
from fleetplane.domains.proxies.rules import validation as rules
from fleetplane.domains.proxies.rules.raw_text import host_reason
from fleetplane.domains.proxies.serving import hosts

FORBIDDEN = (403, "FORBIDDEN")
OPEN = {"path": "/", "root": "/var/www/site"}
CLOSED = {"path": "/admin", "root": "/var/www/admin", "custom_directives": {"deny": "all"}}
HOST: Json = {
    "name": "Site",
    "server_name": "a.example.com",
    "listen_port": 8080,
    "locations": [OPEN, CLOSED],
    "custom_directives": {"limit_rate": "1m"},
    "target_agents": {"type": "all"},
}

PLAIN: Json = {**HOST, "custom_directives": {}, "locations": [OPEN]}
AWAY = {"pattern": "^", "replacement": "/", "flag": "last"}


async def furnished(api: Api) -> tuple[Person, str, str, str]:
    """An operator, a workspace with an administrator's host, its path and the version before it."""
    organization, workspace = await api.workspace()
    operator = await api.person(organization, "operator")
    made = await api.admin.post(f"/workspaces/{workspace}/virtual-hosts", HOST)
    return operator, organization, workspace, f"/virtual-hosts/{made['id']}"


WEAKENING: list[Json] = [
    {"locations": [OPEN, {"path": "/admin", "root": "/var/www/admin"}]},
    {"locations": [OPEN, {**CLOSED, "custom_directives": {"deny": "10.0.0.1"}}]},
    {"locations": [OPEN]},
    {"locations": [OPEN, {**CLOSED, "path": "/elsewhere"}, {"path": "/admin", "root": "/var/www/admin"}]},
    {"locations": [OPEN, CLOSED, {"path": "/admin/x", "root": "/var/www/admin"}]},
    {"locations": [OPEN, CLOSED, {"path": "= /admin", "root": "/var/www/admin"}]},
    {"locations": [OPEN, CLOSED, {"path": "~ ^/adm", "root": "/var/www/admin"}]},
    {"locations": [OPEN, {**CLOSED, "rewrite_rules": [AWAY]}]},
    {"custom_directives": {}},
    {"custom_directives": {"limit_rate": "9m"}},
    {"server_name": "b.example.com"},
    {"listen_port": 8081},
    {"target_agents": {"type": "selector", "label_selector": "a=b"}},
]


async def test_an_operator_cannot_remove_or_get_around_what_an_administrator_set(tmp_path: Path) -> None:
    async with rest_api(tmp_path) as api:
        organization, workspace = await api.workspace()
        operator = await api.person(organization, "operator")
        for patch in WEAKENING:
            made = await api.admin.post(f"/workspaces/{workspace}/virtual-hosts", HOST)
            path = f"/virtual-hosts/{made['id']}"
            assert await operator.refused("PATCH", path, patch) == FORBIDDEN, patch
            await api.admin.patch(path, patch)
            await api.admin.delete(path)


async def test_an_operator_cannot_delete_it_or_go_back_to_before_it(tmp_path: Path) -> None:
    async with rest_api(tmp_path) as api:
        organization, workspace = await api.workspace()
        operator = await api.person(organization, "operator")
        below = f"/workspaces/{workspace}"
        host = await api.admin.post(
            f"{below}/virtual-hosts", {**HOST, "custom_directives": {}, "locations": [OPEN]}
        )
        agent = (await api.admin.post(f"{below}/agents/tokens", {"name": "a"}))["agent_id"]
        versions = (await api.admin.get(f"{below}/configs"))["data"]
        before: int = versions[0]["version"]
        path = f"/virtual-hosts/{host['id']}"
        await api.admin.patch(path, {"locations": [OPEN, CLOSED]})

        assert await operator.refused("DELETE", path) == FORBIDDEN
        assert await operator.refused("POST", f"{below}/rollback", {"version": before}) == FORBIDDEN
        assert await operator.refused("POST", f"/agents/{agent}/rollback", {"version": before}) == FORBIDDEN
        await api.admin.post(f"/agents/{agent}/rollback", {"version": before}, status=200)
        assert (await operator.call("DELETE", f"/agents/{agent}/rollback")).status_code == 200
        await api.admin.post(f"{below}/rollback", {"version": before}, status=200)
        await operator.delete(path)


async def test_an_operator_cannot_bring_settings_back(tmp_path: Path) -> None:
    async with rest_api(tmp_path) as api:
        organization, workspace = await api.workspace()
        operator, below = await api.person(organization, "operator"), f"/workspaces/{workspace}"
        await api.admin.post(f"{below}/virtual-hosts", PLAIN)
        before: int = (await api.admin.get(f"{below}/configs"))["data"][0]["version"]
        await api.admin.call("PUT", f"{below}/settings", {"nginx_directives": {"limit_rate": "1m"}})
        assert await operator.refused("POST", f"{below}/rollback", {"version": before}) == FORBIDDEN


async def test_an_operator_cannot_take_an_agent_away_from_it(tmp_path: Path) -> None:
    """By other labels: a host of the same name, without the raw text, could then be made for the agent."""
    async with rest_api(tmp_path) as api:
        organization, workspace = await api.workspace()
        operator, below = await api.person(organization, "operator"), f"/workspaces/{workspace}"
        body = {"name": "a", "labels": {"env": "production"}}
        agent = (await api.admin.post(f"{below}/agents/tokens", body))["agent_id"]
        selected = {"type": "selector", "label_selector": "env=production"}
        await api.admin.post(f"{below}/virtual-hosts", {**HOST, "target_agents": selected})
        path = f"/agents/{agent}"
        assert await operator.refused("PATCH", path, {"labels": {"env": "test"}}) == FORBIDDEN
        await operator.patch(path, {"labels": {"env": "production", "zone": "b"}})
        await api.admin.patch(path, {"labels": {"env": "test"}})


async def test_a_socket_is_refused_at_its_field_and_makes_no_version(tmp_path: Path) -> None:
    async with rest_api(tmp_path) as api:
        organization, workspace = await api.workspace()
        operator, below = await api.person(organization, "operator"), f"/workspaces/{workspace}"
        for target in ("http://unix:/run/docker.sock:/", "http://UNIX:/x:/", "http://$arg_t"):
            body = {**PLAIN, "locations": [{"path": "/", "proxy_pass": target}]}
            found = await operator.faults("POST", f"{below}/virtual-hosts", body)
            assert found == [("locations.0.proxy_pass", "INVALID_FORMAT")]
        for root in ("/", "/proc"):
            body = {**PLAIN, "locations": [{"path": "/", "root": root}]}
            found = await operator.faults("POST", f"{below}/virtual-hosts", body)
            assert found == [("locations.0.root", "INVALID_FORMAT")]
        assert (await operator.get(f"{below}/configs"))["data"][0]["virtual_hosts"] == 0


async def test_an_operator_may_still_do_the_rest(tmp_path: Path) -> None:
    async with rest_api(tmp_path) as api:
        operator, _, _, path = await furnished(api)
        changed = {"path": "/", "proxy_pass": "http://127.0.0.1:9000"}
        added = {"path": "/other", "root": "/var/www/other"}
        await operator.patch(path, {"name": "New", "server_name": "a.example.com b.example.com"})
        await operator.patch(path, {"locations": [changed, CLOSED, added]})


async def test_the_right_is_decided_where_the_change_is_written(tmp_path: Path) -> None:
    """Demoted after the check of the route and before the write: the write is refused."""
    async with rest_api(tmp_path) as api:
        organization, workspace = await api.workspace()
        person = await api.person(organization, "admin")
        scope = organization_scope(organization)
        host = await person.post(f"/workspaces/{workspace}/virtual-hosts", HOST)

        async with api.workspaces.editing(_scope(api, workspace)):
            late = asyncio.ensure_future(
                person.refused("PATCH", f"/virtual-hosts/{host['id']}", {"custom_directives": {}})
            )
            while not _waiting(api, workspace):
                await asyncio.sleep(0)
            await api.store.transact(
                lambda draft: draft.put(
                    MEMBERSHIP, scope, person.id, spec=MembershipSpec(role=OrganizationRole.OPERATOR)
                ),
                actor="test",
                action="test",
                touches=[MEMBERSHIP.key(scope, person.id)],
            )
        assert await late == FORBIDDEN


def _scope(api: Api, workspace: str) -> str:
    from fleetplane.domains.proxies.kinds.records import ID_CLAIM, WORKSPACE

    found = api.store.claimed_by(WORKSPACE, "", ID_CLAIM, workspace)
    assert found is not None
    return found


def _waiting(api: Api, workspace: str) -> bool:
    lock: Any = api.workspaces._locks[_scope(api, workspace)]
    return bool(lock._waiters)


async def test_only_an_administrator_has_a_text_tested(tmp_path: Path) -> None:
    async with rest_api(tmp_path) as api:
        operator, _, workspace, _ = await furnished(api)
        agent = (await api.admin.post(f"/workspaces/{workspace}/agents/tokens", {"name": "a"}))["agent_id"]
        path = f"/workspaces/{workspace}/config/validate?agent_id={agent}"
        evil = {"config_content": 'http { server { ssl_certificate_key "engine:/proc/7/fd/3:x"; } }'}
        assert await operator.refused("POST", path, evil) == FORBIDDEN
        answer = await api.admin.post(path, evil, status=200)
        assert answer["valid"] is False
        assert "ssl_certificate_key" in answer["message"], "refused without asking the agent, which is away"


def test_a_regular_expression_moved_before_a_raw_one_takes_its_requests() -> None:
    raw = Location(path="~ ^/a", root="/var/www", custom_directives={"deny": "all"})
    other = Location(path="~ .", root="/var/www")

    def host(*locations: Location) -> Any:
        return CreateVirtualHost(
            name="h", server_name="a", listen_port=80, locations=locations, target_agents=AllAgents()
        ).spec()

    assert not host_reason(host(raw, other), host(raw, other))
    assert host_reason(host(raw, other), host(other, raw))
    assert host_reason(host(raw), host(raw, Location(path="^~ /a/b", root="/var/www")))
    assert not host_reason(host(raw), host(raw, Location(path="/b", root="/var/www")))


async def test_what_was_accepted_before_the_rules_were_is_not_sent_to_any_agent(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Versions from before are kept, and agents of other programs check nothing themselves."""
    async with rest_api(tmp_path) as api:
        organization, workspace = await api.workspace()
        operator, below = await api.person(organization, "operator"), f"/workspaces/{workspace}"
        agent = (await api.admin.post(f"{below}/agents/tokens", {"name": "a"}))["agent_id"]
        good = await api.admin.post(f"{below}/virtual-hosts", PLAIN)
        with monkeypatch.context() as earlier:
            earlier.setattr(rules, "accept_host", lambda *_: None)
            earlier.setattr(hosts, "settings_problems", lambda _: [])
            proc = {**PLAIN, "server_name": "b.test", "locations": [{"path": "/", "root": "/proc"}]}
            bad = await api.admin.post(f"{below}/virtual-hosts", proc)
            old = {"nginx_directives": {"perl_modules": "/x", "gzip": "on"}, "env_vars": {"LD_PRELOAD": "/x"}}
            await api.admin.call("PUT", f"{below}/settings", old)
        version = (await api.admin.get(f"{below}/configs"))["data"][0]["version"]
        await operator.patch(f"/virtual-hosts/{good['id']}", {"name": "Later"})
        await operator.post(f"/agents/{agent}/rollback", {"version": version}, status=200)
        newest = (await api.admin.get(f"{below}/configs"))["data"][0]["version"]
        shown = await api.admin.get(f"/agents/{agent}/configs/{newest}")
        assert list(shown["virtual_hosts"]) == [good["id"]]
        assert set(shown["refused"]) == {
            f"virtual_host/{bad['id']}",
            "settings.nginx_directives.perl_modules",
            "settings.env_vars.LD_PRELOAD",
        }
        assert shown["settings"] == {"nginx_directives": {"gzip": "on"}, "env_vars": {}}
