"""Actions and explanations through `/apis/v1`, each on the running domain that they belong to."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest_asyncio
from support.fleet.resources_rig import ResourcesRig, resources_rig
from support.fleet.started_domains import started_domains
from support.instances.instances_lab import TENANT

from fleetplane.domains.edge.kinds import EDGE_NODE
from fleetplane.domains.edge.server import BLUEPRINT as EDGE
from fleetplane.domains.instances.kinds import GROUP, INSTANCE, InstanceSpec, InstanceStatus
from fleetplane.domains.instances.server import BLUEPRINT as INSTANCES
from fleetplane.domains.proxies.kinds import records
from fleetplane.domains.proxies.server import BLUEPRINT as PROXIES
from fleetplane.kernel.freeze import FREEZE


@pytest_asyncio.fixture
async def rig(tmp_path: Path) -> AsyncIterator[ResourcesRig]:
    async with resources_rig(tmp_path, (EDGE, INSTANCES, PROXIES), started=started_domains(tmp_path)) as made:
        yield made


async def test_a_group_is_scaled_by_whoever_may_operate_it(rig: ResourcesRig) -> None:
    operator = await rig.token("op", "operator", tenant=TENANT)
    viewer = await rig.token("eye", "viewer", tenant=TENANT)
    stranger = await rig.token("other", "operator", tenant="other")
    path = f"/scopes/tenants/{TENANT}/groups/workers"
    before = (await rig.get(path, viewer)).json()
    assert (before["spec"]["size"], before["status"]["wanted"]) == (2, 2)

    assert (await rig.post(f"{path}/actions/scale", viewer, {"size": 3})).status_code == 403
    assert (await rig.post(f"{path}/actions/scale", stranger, {"size": 3})).status_code == 404
    assert (await rig.post("/groups/workers/actions/scale", stranger, {"size": 3})).status_code == 404
    for body in ({"size": -1}, {"size": 10**9}, {"size": "3"}, {"sise": 3}, {}):
        refused = await rig.post(f"{path}/actions/scale", operator, body)
        assert (refused.status_code, refused.json()["reason"]) == (400, "InvalidArgument"), body
    assert not rig.store.list(GROUP)

    done = await rig.post(f"{path}/actions/scale", operator, {"size": 3})
    assert (done.status_code, done.json()["begun"]) == (200, None), done.text
    assert done.json()["object"]["name"] == "workers"
    assert rig.store.get(GROUP, f"tenant/{TENANT}", "workers").spec.size == 3  # type: ignore[union-attr]
    assert (await rig.get(path, viewer)).json()["spec"]["size"] == 3


async def test_an_action_with_a_key_is_carried_out_once_and_not_for_another_scope(rig: ResourcesRig) -> None:
    operator = await rig.token("op", "operator")
    key = {"idempotency-key": "once"}
    path = f"/scopes/tenants/{TENANT}/groups/workers/actions/scale"
    first = await rig.post(path, operator, {"size": 3}, **key)
    again = await rig.post(path, operator, {"size": 3}, **key)
    assert (again.json(), again.headers["idempotency-replayed"]) == (first.json(), "true")
    elsewhere = await rig.post(
        "/scopes/tenants/other/groups/workers/actions/scale", operator, {"size": 3}, **key
    )
    assert elsewhere.status_code == 404


async def test_an_instance_is_drained(rig: ResourcesRig) -> None:
    await rig.put(
        INSTANCE,
        f"tenant/{TENANT}",
        "wkr01",
        spec=InstanceSpec(cluster="c", shard="local", group="workers", template="worker", prefix="wkr"),
        status=InstanceStatus(provider_id="i-1", registered_at_ns=10**18),
    )
    operator = await rig.token("op", "operator", tenant=TENANT)
    done = await rig.post("/instances/wkr01/actions/drain", operator, {"timeout": "30s"})
    assert done.status_code == 200, done.text
    shown = (await rig.get("/instances/wkr01", operator)).json()
    assert (shown["status"]["state"], shown["status"]["drainReason"]) == ("draining", "requested")
    bad = await rig.post("/instances/wkr01/actions/drain", operator, {"timeout": "a while"})
    assert bad.status_code == 400


async def test_a_daemon_is_drained_frozen_revoked_and_explained(rig: ResourcesRig) -> None:
    await rig.node("acme", "n1")
    admin = await rig.token("a", "edge.admin", "fleet.operator", tenant="acme")
    assert (await rig.post("/edge-nodes/n1/actions/drain", admin)).status_code == 200
    assert rig.store.get(EDGE_NODE, "tenant/acme", "n1").spec.desired == "draining"  # type: ignore[union-attr]

    frozen = await rig.post("/edge-nodes/n1/actions/freeze", admin, {"reason": "looking"})
    assert frozen.status_code == 200, frozen.text
    assert [one.scope for one in rig.store.list(FREEZE)] == ["tenant/acme/daemon/n1"]
    why = (await rig.get("/edge-nodes/n1/explain", admin)).json()
    assert why["frozen"]["reason"] == "looking"
    assert why["object"] == {**why["object"], "resource": "edge-nodes", "name": "n1"}
    assert why["findings"][0]["reasons"][0]["code"] == "FROZEN"
    (freeze,) = (await rig.get("/freezes", admin)).json()["items"]
    assert freeze["metadata"]["scope"] == "/tenants/acme"
    lifted = await rig.post(f"/freezes/{freeze['metadata']['uid']}/actions/lift", admin)
    assert lifted.status_code == 200
    assert not rig.store.list(FREEZE)
    assert (await rig.post("/edge-nodes/n1/actions/lift", admin)).status_code == 404

    assert (await rig.post("/edge-nodes/n1/actions/revoke", admin)).status_code == 200
    assert (await rig.get("/edge-nodes/n1", admin)).json()["status"]["state"] == "revoked"
    other = await rig.token("o", "edge.admin", tenant="other")
    for action in ("drain", "revoke", "run"):
        body = {"tool": "x"} if action == "run" else None
        answer = await rig.post(f"/edge-nodes/n1/actions/{action}", other, body)
        assert answer.status_code == 404
    assert (await rig.get("/edge-nodes/n1/explain", other)).status_code == 404


async def test_what_nobody_can_be_reached_for_is_refused_by_the_domain_itself(rig: ResourcesRig) -> None:
    await rig.node("acme", "n1")
    await rig.put(
        records.ORGANIZATION,
        records.organization_scope("o"),
        "o",
        spec=records.OrganizationSpec(name="Acme", slug="acme"),
    )
    place = records.workspace_scope("o", "w")
    await rig.put(records.WORKSPACE, place, "w", spec=records.WorkspaceSpec(name="Prod", slug="prod"))
    await rig.put(records.AGENT, place, "a", spec=records.AgentSpec(name="web-1"))
    operator = await rig.token("op", "operator", "edge.admin")
    calls: list[tuple[str, Any]] = [
        ("/edge-nodes/n1/actions/run", {"tool": "fs.read", "args": {"path": "/etc/hostname"}}),
        ("/proxy-agents/web-1/actions/reload", None),
    ]
    for path, body in calls:
        answer = await rig.post(path, operator, body)
        assert (answer.status_code, answer.json()["reason"]) == (503, "Unavailable"), answer.text
    assert (await rig.post("/proxy-agents/web-1/actions/dance", operator)).status_code == 404


async def test_a_token_is_shown_without_its_value_and_revoked(rig: ResourcesRig) -> None:
    secret = await rig.token("robot", "edge.admin", tenant="acme")
    admin = await rig.token("root", "admin")
    shown = await rig.get("/tokens", admin)
    assert [one["metadata"]["name"] for one in shown.json()["items"]] == ["root", "robot"]
    assert secret not in shown.text
    assert shown.json()["items"][1]["spec"]["token"] == {"set": True}
    assert (await rig.get("/tokens", secret)).status_code == 403
    assert (await rig.post("/tokens/robot/actions/revoke", admin)).status_code == 200
    assert (await rig.get("/edge-nodes", secret)).status_code == 401
    (server,) = (await rig.get("/servers", admin)).json()["items"]
    assert server["status"]["writable"] is True


async def test_the_audit_log_is_read_newest_first_by_auditors_only(rig: ResourcesRig) -> None:
    auditor = await rig.token("eye", "fleet.auditor")
    for number in range(5):
        await rig.node("acme", f"n{number}")
    first = (await rig.get("/audit-entries", auditor, limit=2)).json()
    rest = (await rig.get("/audit-entries", auditor, **{"continue": first["continue"]})).json()
    numbers = [int(one["metadata"]["name"]) for one in (*first["items"], *rest["items"])]
    assert numbers == list(range(numbers[0], 0, -1))
    newest = first["items"][0]["spec"]
    assert (newest["actor"], newest["action"]) == ("tester", "put")
    assert newest["changes"][0]["name"] == "n4"
    one = await rig.get(f"/audit-entries/{numbers[1]}", auditor)
    assert one.json() == first["items"][1]
    assert (await rig.get("/audit-entries/0", auditor)).status_code == 404
    assert (await rig.get("/audit-entries", auditor, sort="spec.at")).status_code == 400
    found = (await rig.get("/audit-entries", auditor, fields="spec.actor=tester")).json()
    assert {one["spec"]["actor"] for one in found["items"]} == {"tester"}
    assert (await rig.get("/audit-entries", await rig.token("v", "viewer"))).status_code == 403
    tenant = await rig.token("ta", "admin", tenant="acme")
    assert (await rig.get("/audit-entries", tenant)).json()["items"] == []
