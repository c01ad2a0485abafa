"""An administrator's wildcard host keeps its requests: an operator's closer name would take them away."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.proxies.proxy_api import Json, rest_api

FORBIDDEN = (403, "FORBIDDEN")
OPEN = {"path": "/", "root": "/var/www/site"}
WILD: Json = {
    "name": "Wild",
    "server_name": "*.example.com",
    "listen_port": 8080,
    "locations": [OPEN],
    "custom_directives": {"deny": "all"},
    "target_agents": {"type": "all"},
}
PLAIN: Json = {**WILD, "name": "Plain", "custom_directives": {}}


@pytest.mark.parametrize("name", ["a.example.com", "A.b.Example.com", "*.b.example.com", ".b.example.com"])
async def test_a_closer_name_takes_no_requests_from_an_administrators_wildcard(
    tmp_path: Path, name: str
) -> None:
    async with rest_api(tmp_path) as api:
        organization, workspace = await api.workspace()
        operator = await api.person(organization, "operator")
        hosts = f"/workspaces/{workspace}/virtual-hosts"
        await api.admin.post(hosts, WILD)
        assert await operator.refused("POST", hosts, {**PLAIN, "server_name": name}) == FORBIDDEN
        elsewhere = await operator.post(hosts, {**PLAIN, "server_name": name, "listen_port": 8081})
        other = await operator.post(hosts, {**PLAIN, "server_name": "other.example.org"})
        for identity, patch in (
            (elsewhere["id"], {"listen_port": 8080}),
            (other["id"], {"server_name": f"other.example.org {name}"}),
        ):
            assert await operator.refused("PATCH", f"/virtual-hosts/{identity}", patch) == FORBIDDEN
        await api.admin.post(hosts, {**PLAIN, "name": "Meant", "server_name": name})


async def test_an_operator_adds_hosts_beside_wildcards_without_raw_text_and_beside_the_catch_all(
    tmp_path: Path,
) -> None:
    async with rest_api(tmp_path) as api:
        organization, workspace = await api.workspace()
        operator = await api.person(organization, "operator")
        hosts = f"/workspaces/{workspace}/virtual-hosts"
        await api.admin.post(hosts, {**WILD, "custom_directives": {}})
        await api.admin.post(hosts, {**WILD, "name": "Rest", "server_name": "_"})
        made = await operator.post(hosts, {**PLAIN, "server_name": "a.example.com example.com"})
        await operator.patch(f"/virtual-hosts/{made['id']}", {"name": "Renamed"})
