"""Streams over REST, in versions and in exports."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from support.proxies.proxy_api import HOST, UPSTREAM, rest_api

from fleetplane.domains.proxies.kinds.records import STREAM


async def test_streams_are_made_changed_restored_exported_and_deleted(tmp_path: Path) -> None:
    async with rest_api(tmp_path) as api:
        organization, workspace = await api.workspace()
        _, other = await api.workspace()
        operator = await api.person(organization, "operator")
        viewer = await api.person(organization, "viewer")
        below = f"/workspaces/{workspace}"
        group = (await operator.post(f"{below}/upstreams", UPSTREAM))["id"]
        body: dict[str, Any] = {"name": "db", "listen_port": 5432, "upstream_id": group}
        assert await viewer.refused("POST", f"{below}/streams", body) == (403, "FORBIDDEN")
        made = await operator.post(f"{below}/streams", {**body, "limits": {"connections": 3}})
        place = f"/streams/{made['id']}"
        assert made | {"protocol": "tcp", "limits": {"connections": 3}} == made
        version = (await operator.get(f"{below}/configs"))["data"][0]["version"]

        # Refused by name, and nothing of another workspace.
        assert await operator.faults("POST", f"{below}/streams", {**body, "name": "x"}) == [
            ("listen_port", "NOT_UNIQUE")
        ]
        again = {**body, "listen_port": 5433}
        assert (await operator.refused("POST", f"{below}/streams", again))[0] == 409
        host = {**HOST, "listen_port": 5432}
        assert await operator.faults("POST", f"{below}/virtual-hosts", host) == [
            ("listen_port", "NOT_UNIQUE")
        ]
        theirs = {**body, "name": "x"}
        assert await api.admin.faults("POST", f"/workspaces/{other}/streams", theirs) == [
            ("upstream_id", "UNKNOWN_REFERENCE")
        ]
        assert await operator.faults("DELETE", f"/upstreams/{group}") == [("upstream_id", "IN_USE")]
        sticky = {"balancing": {"method": "sticky_cookie"}, "servers": [{"address": "a:1"}]}
        assert ("balancing", "INCOMPATIBLE") in await operator.faults("PATCH", f"/upstreams/{group}", sticky)

        changed = await operator.patch(place, {"limits": None, "listen_port": 6432})
        assert ("limits" in changed, changed["listen_port"]) == (False, 6432)
        assert [one["id"] for one in (await viewer.get(f"{below}/streams"))["data"]] == [made["id"]]
        compared = await operator.get(f"{below}/configs/diff?from={version}&to={version + 1}")
        assert [(one["section"], one["id"]) for one in compared["differences"]] == [("streams", made["id"])]

        exported = await operator.get(f"{below}/export")
        assert [one["name"] for one in exported["streams"]] == ["db"]
        outcome = await api.admin.post(f"/workspaces/{other}/import", exported, status=200)
        assert outcome["created"] == 2
        brought = (await api.admin.get(f"/workspaces/{other}/streams"))["data"][0]
        assert (brought["listen_port"], brought["upstream_id"] != group) == (6432, True)

        await operator.delete(place)
        assert (await operator.call("GET", place)).status_code == 404
        await operator.post(f"{below}/rollback", {"version": version}, status=200)
        assert (await operator.get(place))["listen_port"] == 5432
        assert api.store.count(STREAM, f"org/{organization}/ws/{workspace}") == 1
