"""Access lists: one place for rules and users that many hosts refer to."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from support.proxies.proxy_api import HOST, rest_api

from fleetplane.domains.proxies import wire
from fleetplane.domains.proxies.kinds.records import AGENT, AgentSpec
from fleetplane.domains.proxies.kinds.unique import register
from fleetplane.domains.proxies.typed_options import host_options
from fleetplane.kernel.store import Draft


async def test_hosts_follow_the_lists_that_they_refer_to(tmp_path: Path) -> None:
    async with rest_api(tmp_path) as api:
        organization, workspace = await api.workspace()
        _, other = await api.workspace()
        operator = await api.person(organization, "operator")
        below = f"/workspaces/{workspace}"
        office = {
            "name": "Office",
            "rules": [{"action": "allow", "network": "192.0.2.0/24"}],
            "banned": ["198.51.100.7"],
            "users": [{"name": "ann", "password": "p"}],
        }
        made = await operator.post(f"{below}/access-lists", office)
        assert made["users"] == [{"name": "ann"}]
        theirs = await api.admin.post(f"/workspaces/{other}/access-lists", office)
        body = {**HOST, "access": {"list_ids": [theirs["id"]]}}
        assert await operator.faults("POST", f"{below}/virtual-hosts", body) == [
            ("access.list_ids.0", "UNKNOWN_REFERENCE")
        ]
        assert (await operator.call("GET", f"/access-lists/{theirs['id']}")).status_code in (403, 404)
        own = [{"action": "allow", "network": "10.0.0.1"}]
        location = {"path": "/", "proxy_pass": "http://127.0.0.1:9"}
        body = {**HOST, "access": {"list_ids": [made["id"]], "rules": own}, "locations": [location]}
        host = await operator.post(f"{below}/virtual-hosts", body)
        assert ("access", "IN_USE") in await operator.faults("DELETE", f"/access-lists/{made['id']}")

        scope = f"org/{organization}/ws/{workspace}"
        await api.store.transact(
            lambda draft: _enrolled(draft, scope),
            actor="test",
            action="test",
            touches=[AGENT.key(scope, "a1")],
        )

        def sent() -> tuple[Sequence[tuple[str, str]], list[str], list[str]]:
            agent = api.store.get(AGENT, scope, "a1")
            assert agent is not None
            update = wire.config_update(api.workspaces.desired(agent), {})
            access = host_options(update.virtual_hosts[0].options).access
            assert access
            assert not access.list_ids
            rules = [(rule.action, rule.network) for rule in access.rules or ()]
            return rules, list(access.banned or ()), [user.name for user in access.users or ()]

        both = [("allow", "192.0.2.0/24"), ("allow", "10.0.0.1")]
        assert sent() == (both, ["198.51.100.7"], ["ann"])
        await operator.patch(f"/access-lists/{made['id']}", {"rules": [{"action": "deny", "network": "all"}]})
        assert sent()[0] == [("deny", "all"), ("allow", "10.0.0.1")]
        bad = {"rules": [{"action": "deny", "network": "all;"}]}
        assert await operator.faults("PATCH", f"/access-lists/{made['id']}", bad) == [
            ("rules.0.network", "INVALID_FORMAT")
        ]

        path = "/agents/a1/configs/{}/rendered"
        newest = (await operator.get(f"{below}/configs"))["data"][0]["version"]
        whole = await api.admin.get(path.format(newest))
        name = f"conf.d/host-{host['id']}.conf"
        assert {"nginx.conf", name} <= whole["files"].keys()
        assert "$6$" not in str(whole), "users are in a file of their own"
        told = await api.admin.get(f"{path.format(newest)}?against={newest - 1}&virtual_host_id={host['id']}")
        assert "-        allow 192.0.2.0/24;" in told["files"][name]
        assert "+        deny all;" in told["files"][name]
        one = await api.admin.get(f"{path.format(newest)}?file=nginx.conf")
        assert one["files"] == {"nginx.conf": whole["files"]["nginx.conf"]}
        assert (await operator.call("GET", path.format(newest))).status_code == 403, "raw text is in it"

        versions = (await operator.get(f"{below}/configs"))["data"]
        before = next(one["version"] for one in versions if one["cause"] == "virtual_host.create")
        await operator.post(f"{below}/rollback", {"version": before}, 200)
        assert sent()[0] == both, "going back brings the list back, too"
        exported = await api.admin.get(f"{below}/export")
        outcome = await api.admin.call("POST", f"{below}/import", exported)
        assert outcome.status_code == 200, outcome.text
        assert sent() == (both, ["198.51.100.7"], ["ann"])
        await operator.delete(f"/virtual-hosts/{host['id']}")
        await operator.delete(f"/access-lists/{made['id']}")


def _enrolled(draft: Draft, scope: str) -> None:
    draft.put(AGENT, scope, "a1", spec=AgentSpec(name="a1"))
    register(draft, AGENT, scope, "a1")
