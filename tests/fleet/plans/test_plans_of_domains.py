"""Plans over several domains: one transaction, one version, and an export that applies elsewhere."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from support.fleet.plans_rig import PlansRig, another, group, layer, organization, plans_rig, steps

from fleetplane.domains.boards.kinds import CLUSTER
from fleetplane.domains.boards.server import BLUEPRINT as BOARDS
from fleetplane.domains.edge.server import BLUEPRINT as EDGE
from fleetplane.domains.proxies.kinds.records import (
    CONFIG_VERSION,
    STREAM,
    UPSTREAM,
    VIRTUAL_HOST,
    WORKSPACE,
)
from fleetplane.domains.proxies.server import BLUEPRINT as PROXIES

DOMAINS = (EDGE, PROXIES, BOARDS)
ROLES = ("edge.admin", "proxies.owner", "boards.admin")
PROD = "/tenants/acme/workspaces/prod"


def workspace(name: str = "prod", **spec: Any) -> dict[str, Any]:
    return {"kind": "workspace", "metadata": {"name": name, "scope": "/tenants/acme"}, "spec": spec}


def upstream(name: str = "app", address: str = "127.0.0.1:8080") -> dict[str, Any]:
    spec = {"algorithm": "round_robin", "servers": [{"address": address}]}
    return {"kind": "upstream", "metadata": {"name": name, "scope": PROD}, "spec": spec}


def host(name: str = "demo", server: str = "demo.example", **spec: Any) -> dict[str, Any]:
    made = {"serverName": server, "listenPort": 80, "locations": [{"path": "/", "upstream": "app"}], **spec}
    return {"kind": "virtual-host", "metadata": {"name": name, "scope": PROD}, "spec": made}


def stream(name: str = "db", **spec: Any) -> dict[str, Any]:
    made = {"listenPort": 5432, "routes": [{"names": ["db.example"], "upstream": "app"}], **spec}
    return {"kind": "proxy-stream", "metadata": {"name": name, "scope": PROD}, "spec": made}


def cluster(name: str = "attic", **spec: Any) -> dict[str, Any]:
    return {"kind": "cluster", "metadata": {"name": name, "scope": "/tenants/default"}, "spec": spec}


def everything() -> list[dict[str, Any]]:
    """In an order in which nothing could be written."""
    return [
        host(),
        host("second", "second.example"),
        stream(),
        upstream(),
        workspace(displayName="Production"),
        cluster(version="1.2"),
        group("web"),
        layer({"level": 1}),
    ]


async def exported(rig: PlansRig) -> list[dict[str, Any]]:
    answer = await rig.call("GET", "/export")
    assert answer.status_code == 200, answer.text
    found: list[dict[str, Any]] = answer.json()["objects"]
    return found


async def test_several_domains_are_one_transaction_and_a_workspace_has_one_version_for_it(
    tmp_path: Path,
) -> None:
    async with plans_rig(tmp_path, DOMAINS, roles=ROLES) as rig:
        await organization(rig, "acme")
        plan = await rig.plan(*everything(), owner="site")
        assert [kind for _, kind, _ in steps(plan)][:4] == [
            "workspace",
            "upstream",
            "virtual-host",
            "virtual-host",
        ]
        assert rig.store.list(WORKSPACE) == ()
        done = await rig.apply(plan)
        assert done.status_code == 200, done.text
        (made,) = rig.store.list(WORKSPACE)
        assert made.spec.name == "Production"
        (behind,) = rig.store.list(UPSTREAM)
        assert {one.spec.name for one in rig.store.list(VIRTUAL_HOST)} == {"demo", "second"}
        assert rig.store.list(VIRTUAL_HOST)[0].spec.locations[0].upstream_id == behind.name
        (passed_on,) = rig.store.list(STREAM)
        assert [one.upstream_id for one in passed_on.spec.routes or ()] == [behind.name]
        versions = rig.store.list(CONFIG_VERSION)
        assert [one.spec.cause for one in versions] == ["workspace.create", "config.apply"]
        assert len(versions[-1].spec.virtual_hosts) == 2
        assert [one.spec.name for one in rig.store.list(CLUSTER)] == ["attic"]
        again = await rig.plan(*everything(), owner="site")
        assert again["summary"] == {"create": 0, "change": 0, "nothing": 8, "delete": 0}

        # Half of it wrong: nothing of any domain is done, and the field is named.
        wrong = [group("more"), host("bad", "demo.example")]
        refused = await rig.call("POST", "/plans", {"objects": wrong})
        assert refused.status_code == 409, refused.text
        assert refused.json()["errors"][0]["field"] == "objects[1].spec.server_name"
        assert await rig.names("edge-groups") == ["web"]

        # The workspace's own API, or anybody, changes something that the plan looked at.
        late = await rig.plan(host("third", "third.example"), cluster(version="2"))
        etag = {"if-match": "*"}
        moved = await rig.call("PATCH", "/upstreams/app", {"spec": {"keepaliveConnections": 4}}, headers=etag)
        assert moved.status_code == 200, moved.text
        outdated = await rig.apply(late)
        assert (outdated.status_code, outdated.json()["reason"]) == (409, "PlanOutdated")
        assert rig.store.list(CLUSTER)[0].spec.version == "1.2"

        # Everything is taken away again, those that refer to others first.
        gone = await rig.applied(owner="site", prune=True)
        assert gone["summary"]["delete"] == 8
        assert [one["kind"] for one in await exported(rig)] == ["organization"]


async def test_an_export_applied_to_another_server_gives_the_same_desired_state(tmp_path: Path) -> None:
    async with plans_rig(tmp_path / "one", DOMAINS, roles=ROLES) as rig:
        await organization(rig, "acme")
        await rig.applied(*everything(), owner="site")
        objects = await exported(rig)
        assert {one["kind"] for one in objects} == {
            "cluster",
            "edge-config",
            "edge-group",
            "organization",
            "proxy-stream",
            "upstream",
            "virtual-host",
            "workspace",
        }
    async with plans_rig(tmp_path / "two", DOMAINS, roles=ROLES) as rig:
        done = await rig.applied(*objects)
        assert done["summary"] == {"create": 9, "change": 0, "nothing": 0, "delete": 0}
        assert await exported(rig) == objects


async def test_raw_text_needs_an_administrator_and_what_is_masked_stays(tmp_path: Path) -> None:
    async with plans_rig(tmp_path, DOMAINS, roles=ROLES) as rig:
        await organization(rig, "acme")
        secret = {"proxy_set_header": 'X-Api-Key "hunter2hunter2"'}
        await rig.applied(workspace(), upstream(), host(customDirectives=secret))
        read = await rig.call("GET", "/virtual-hosts/demo")
        assert "hunter2" not in read.text
        body = {**read.json(), "spec": {**read.json()["spec"], "listenPort": 8080}}
        back = await rig.call("PUT", "/virtual-hosts/demo", body, headers={"if-match": read.headers["etag"]})
        assert back.status_code == 200, back.text
        (stored,) = rig.store.list(VIRTUAL_HOST)
        assert (stored.spec.listen_port, stored.spec.custom_directives) == (8080, secret)
        elsewhere = await rig.call("POST", "/plans", {"objects": [{**body, "metadata": {**HOST_TWO}}]})
        assert elsewhere.status_code == 400, elsewhere.text
        operator = await another(rig, "operator", "proxies.operator")
        plain = host("plain", "plain.example")
        assert (await operator.call("PUT", "/virtual-hosts/plain", plain)).status_code == 201
        raw = host("raw", "raw.example", customDirectives={"client_max_body_size": "1m"})
        assert (await operator.call("PUT", "/virtual-hosts/raw", raw)).status_code == 403
        assert (await operator.call("PUT", "/workspaces/new", workspace("new"))).status_code == 403
        held = await rig.call("DELETE", "/upstreams/app")
        assert held.status_code == 409


HOST_TWO = {"name": "two", "scope": PROD}
