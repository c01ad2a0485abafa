"""Export, wipe, apply: the same desired state in every domain, here and on another server."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from support.fleet.plans_rig import PlansRig, another, group, layer, plans_rig
from support.fleet.started_domains import started_domains
from support.instances.instances_lab import TENANT as INSTANCES_TENANT

from fleetplane.domains.boards.kinds import BOARD, SCOPE, BoardSpec, BoardState, BoardStatus
from fleetplane.domains.boards.server import BLUEPRINT as BOARDS
from fleetplane.domains.edge.server import BLUEPRINT as EDGE
from fleetplane.domains.gpus.server import BLUEPRINT as GPUS
from fleetplane.domains.instances.server import BLUEPRINT as INSTANCES
from fleetplane.domains.proxies.kinds.records import CONFIG_VERSION, WORKSPACE
from fleetplane.domains.proxies.server import BLUEPRINT as PROXIES
from fleetplane.fleet.rollouts.records import ROLLOUT_POLICY
from fleetplane.kernel.freeze import FREEZE
from fleetplane.kernel.store import Draft

DOMAINS = (GPUS, EDGE, INSTANCES, PROXIES, BOARDS)
ACME, PROD, DEFAULT = "/tenants/acme", "/tenants/acme/workspaces/prod", "/tenants/default"
LAB = f"/tenants/{INSTANCES_TENANT}"


def made(kind: str, name: str, scope: str, **spec: Any) -> dict[str, Any]:
    return {"kind": kind, "metadata": {"name": name, "scope": scope}, "spec": spec}


def freeze(at: str, domain: str, scope: str, **spec: Any) -> dict[str, Any]:
    name = f"{at.replace('/', '.') or 'everywhere'}:{domain}"
    return made("freeze", name, scope, at=at, domains=[domain], reason="moving", **spec)


def rollout_policy(at: str, subject: str, scope: str, **spec: Any) -> dict[str, Any]:
    name = f"{at.replace('/', '.') or 'everywhere'}:{subject}"
    policy = {
        "waves": ["label canary", "10%", "rest"],
        "maxFailures": "2%",
        "onHalt": "roll_back",
        "gates": [{"name": "health", "query": "healthy", "min": 1.0}],
        "windows": [{"cron": "0 9 * * mon-thu", "durationSeconds": 25200, "timeZone": "Europe/Berlin"}],
    }
    return made(
        "rollout-policy",
        name,
        scope,
        subject=subject,
        at=at,
        policy={**policy, **spec.pop("policy", {})},
        **spec,
    )


def everything() -> list[dict[str, Any]]:
    """Something of every kind that can be written, in an order in which nothing could be."""
    return [
        made(
            "virtual-host",
            "shop",
            PROD,
            serverName="shop.example",
            listenPort=443,
            sslEnabled=True,
            certificate="shop.example",
            access={"accessLists": ["office"]},
            locations=[{"path": "/", "upstream": "app"}],
        ),
        made("upstream", "app", PROD, algorithm="round_robin", servers=[{"address": "127.0.0.1:8080"}]),
        made(
            "proxy-stream",
            "db",
            PROD,
            listenPort=5432,
            routes=[{"names": ["db.example"], "upstream": "app"}],
        ),
        made("workspace-settings", "global", PROD, nginxDirectives={"gzip": "on"}),
        made("certificate", "shop.example", PROD, provider="selfsigned"),
        made("access-list", "office", PROD, rules=[{"action": "deny", "network": "all"}]),
        made("workspace", "prod", ACME, displayName="Production"),
        made("organization", "acme", ACME, displayName="Acme Inc."),
        made("pin", "attic.17", DEFAULT, direction="output", level=1),
        made("cluster", "roof", DEFAULT, version="1.2"),
        made(
            "board-set",
            "sensors",
            DEFAULT,
            selector="room=attic",
            programs=[{"name": "sensor", "command": "/usr/bin/sleep", "args": ["9"], "upSeconds": 5.0}],
            pins=[{"pin": 17, "level": 1}],
        ),
        made("group", "mine", LAB, template="worker", size=1, instanceType="large"),
        made("group", "workers", LAB, size=3),
        made("provider-settings", "providers", "/", heartbeatSeconds=5.0, ignoredXids=[13, 45]),
        group("web", selector={"os": "linux"}),
        layer({"level": 1}),
        freeze(f"tenant/{INSTANCES_TENANT}/group/mine", "instances", LAB),
        freeze("", "*", "/", expiresAt="2034-01-02T03:04:05Z"),
        rollout_policy(f"tenant/{INSTANCES_TENANT}", "instances.template", LAB, manual=True),
    ]


@asynccontextmanager
async def server(folder: Path) -> AsyncIterator[PlansRig]:
    """Every domain as it runs, with one board that has enrolled."""
    folder.mkdir()
    roles = ("owner", "admin", "operator", "viewer")
    async with plans_rig(folder, DOMAINS, roles=roles, started=started_domains(folder)) as rig:

        def enrol(draft: Draft) -> None:
            draft.claim(BOARD, SCOPE, "name", "attic", "1")
            draft.put(
                BOARD, SCOPE, "1", spec=BoardSpec(name="attic"), status=BoardStatus(state=BoardState.READY)
            )

        touches = [BOARD.key(SCOPE, "1")]
        await rig.store.transact(enrol, actor="tester", action="enrol", touches=touches)
        yield rig


async def exported(rig: PlansRig) -> list[dict[str, Any]]:
    """Everything, and what is exported only if it is named: its machine has enrolled."""
    objects: list[dict[str, Any]] = []
    for path in ("/export", "/export?kinds=pins"):
        answer = await rig.call("GET", path)
        assert answer.status_code == 200, answer.text
        objects += answer.json()["objects"]
    return objects


def writable(rig: PlansRig) -> list[str]:
    entries = rig.rig.api.catalogue.entries
    return [one.resource.name for one in entries if any(member.resource.write for member in one.members)]


async def test_export_wipe_and_apply_give_the_same_desired_state_in_every_domain(tmp_path: Path) -> None:
    async with server(tmp_path / "one") as rig:
        kinds = writable(rig)
        assert await exported(rig) == []
        plan = await rig.plan(*everything(), owner="site")
        assert (await rig.apply(plan)).status_code == 200
        objects = await exported(rig)
        # Whoever makes another kind writable adds one to the objects above.
        assert {one["kind"] for one in objects} == set(kinds)
        assert len(objects) == len(everything())

        gone = await rig.applied(owner="site", prune=True)
        assert gone["summary"]["delete"] == len(objects)
        assert await exported(rig) == []
        assert not rig.store.list(FREEZE)
        back = await rig.applied(*objects)
        assert (back["summary"]["nothing"], back["summary"]["delete"]) == (0, 0)
        assert await exported(rig) == objects
        assert (await rig.plan(*objects))["summary"]["nothing"] == len(objects)
    async with server(tmp_path / "two") as other:
        await other.applied(*objects)
        assert await exported(other) == objects
        assert (await other.plan(*objects))["summary"]["nothing"] == len(objects)


async def test_a_freeze_is_written_where_it_holds_by_whoever_may_freeze_there(tmp_path: Path) -> None:
    async with server(tmp_path / "one") as rig:
        holder = await another(rig, "holder", "operator", "viewer", tenant=INSTANCES_TENANT)
        own = freeze(f"tenant/{INSTANCES_TENANT}", "instances", LAB)
        path = f"/freezes/{own['metadata']['name']}"
        assert (await holder.call("PUT", path, own, dryRun="1")).status_code == 201
        assert not rig.store.list(FREEZE)
        first = await holder.call("PUT", path, own)
        assert first.status_code == 201, first.text
        assert (await holder.call("PUT", path, own, headers={"if-match": "*"})).json() == first.json()
        assert first.json()["status"]["frozenBy"] == "token/holder"
        for body, status in (
            (freeze("tenant/other", "instances", LAB), 400),  # holds elsewhere than it lies
            (freeze("", "instances", "/"), 403),
            (freeze("tenant/other", "instances", "/tenants/other"), 404),
            (freeze(f"tenant/{INSTANCES_TENANT}", "nothing", LAB), 400),
            (freeze(f"tenant/{INSTANCES_TENANT}/somewhere", "instances", LAB), 400),
            (freeze(f"tenant/{INSTANCES_TENANT}", "edge", LAB, expiresAt="2001-01-01T00:00:00Z"), 400),
            (freeze(f"tenant/{INSTANCES_TENANT}", "edge", LAB, expiresAt="soon"), 400),
            (freeze(f"tenant/{INSTANCES_TENANT}", "edge", LAB, until="later"), 400),
        ):
            refused = await holder.call("PUT", f"/freezes/{body['metadata']['name']}", body)
            assert refused.status_code == status, (body, refused.text)
        two = {**own, "spec": {**own["spec"], "domains": ["edge", "instances"]}}
        assert (await holder.call("PUT", path, two, headers={"if-match": "*"})).status_code == 400
        assert len(rig.store.list(FREEZE)) == 1
        longer = {"spec": {"expiresAt": "2034-01-02T03:04:05Z"}}
        stale = {"if-match": first.headers["etag"]}
        assert (await holder.call("PATCH", path, longer, headers=stale)).status_code == 200
        assert (await holder.call("PATCH", path, longer, headers=stale)).status_code == 412
        assert (await holder.call("DELETE", path)).status_code == 204
        assert not rig.store.list(FREEZE)


async def test_a_rollout_policy_is_written_where_it_holds_by_whoever_may_roll_out_there(
    tmp_path: Path,
) -> None:
    async with server(tmp_path / "one") as rig:
        holder = await another(rig, "holder", "operator", "viewer", tenant=INSTANCES_TENANT)
        own = rollout_policy(f"tenant/{INSTANCES_TENANT}", "edge.config", LAB)
        path = f"/rollout-policies/{own['metadata']['name']}"
        first = await holder.call("PUT", path, own)
        assert first.status_code == 201, first.text
        assert first.json()["status"] == {"setBy": "token/holder", "at": f"tenant/{INSTANCES_TENANT}"}
        (stored,) = rig.store.list(ROLLOUT_POLICY)
        assert stored.spec.policy.gates[0].query == "healthy"
        assert stored.spec.policy.windows[0].time_zone == "Europe/Berlin"
        assert (await holder.call("PUT", path, own, headers={"if-match": "*"})).json() == first.json()
        for body, status in (
            (rollout_policy("tenant/other", "edge.config", LAB), 400),  # holds elsewhere than it lies
            (rollout_policy("", "edge.config", "/"), 403),
            (rollout_policy(f"tenant/{INSTANCES_TENANT}", "edge.nothing", LAB), 400),
            (rollout_policy(f"tenant/{INSTANCES_TENANT}/", "edge.config", LAB), 400),
            (rollout_policy(f"tenant/{INSTANCES_TENANT}", "edge.config", LAB, policy={"waves": ["1"]}), 400),
            (
                rollout_policy(
                    f"tenant/{INSTANCES_TENANT}",
                    "edge.config",
                    LAB,
                    policy={"gates": [{"name": "up", "query": "prometheus up", "min": 1}]},
                ),
                400,
            ),
        ):
            name = body["metadata"]["name"]
            refused = await holder.call(
                "PUT", f"/rollout-policies/{name}", body, headers={"if-match": "*"} if name in path else {}
            )
            assert refused.status_code == status, (body, refused.text)
        assert len(rig.store.list(ROLLOUT_POLICY)) == 1
        once = rollout_policy(f"tenant/{INSTANCES_TENANT}", "edge.config", LAB, once=True)
        kept = await holder.call("PUT", path, once, headers={"if-match": "*"})
        assert "lasting policy" in kept.text, (
            "a policy for one change does not take the place of one that lasts"
        )
        manual = {"spec": {"manual": True}}
        stale = {"if-match": first.headers["etag"]}
        assert (await holder.call("PATCH", path, manual, headers=stale)).status_code == 200
        (stored,) = rig.store.list(ROLLOUT_POLICY)
        assert not stored.spec.automatic
        assert (await holder.call("DELETE", path)).status_code == 204
        assert not rig.store.list(ROLLOUT_POLICY)


async def test_a_policy_holds_for_the_changes_that_are_applied_with_it(tmp_path: Path) -> None:
    async with server(tmp_path / "one") as rig:
        old = made("upstream", "app", PROD, algorithm="round_robin", servers=[{"address": "127.0.0.1:8080"}])
        await rig.applied(
            made("organization", "acme", ACME, displayName="Acme"), made("workspace", "prod", ACME), old
        )
        (workspace,) = rig.store.list(WORKSPACE)
        before = rig.store.list(CONFIG_VERSION)[-1].spec
        new = made("upstream", "app", PROD, algorithm="round_robin", servers=[{"address": "127.0.0.1:9090"}])
        policy: dict[str, Any] = {"gates": [], "windows": []}
        await rig.applied(rollout_policy(workspace.scope, "proxies.config", "/", policy=policy), new)
        after = rig.store.list(CONFIG_VERSION)[-1].spec
        assert after.version > before.version
        assert (before.held, after.held) == (None, before.version)
