"""Groups of instances, written through the resource API beside their configuration."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
from support.fleet.plans_rig import another, plans_rig, steps
from support.fleet.started_domains import started_domains
from support.instances.instances_lab import TENANT, document

from fleetplane.domains.instances.configuration import InstancesDocument, check
from fleetplane.domains.instances.desired import override_of
from fleetplane.domains.instances.kinds import GROUP, GroupOverride
from fleetplane.domains.instances.resources import GroupSpecView
from fleetplane.domains.instances.server import BLUEPRINT as INSTANCES
from fleetplane.fleet.plans.decisions import OWNER_LABEL
from fleetplane.fleet.resources.declaration import Secret

SCOPE = f"/tenants/{TENANT}"
ANY = {"if-match": "*"}


def group(name: str, **spec: Any) -> dict[str, Any]:
    return {"kind": "group", "metadata": {"name": name, "scope": SCOPE}, "spec": spec}


def configuration() -> InstancesDocument:
    return check(msgspec.json.encode(document(2)), name="config.jsonc", providers=("mock",)).configuration


def test_what_a_group_inherits_is_not_set_and_what_is_not_named_stays() -> None:
    known = configuration()
    shown = GroupSpecView(size=2, template="worker", vars={"Colour": Secret(set=True)})
    assert override_of(known, TENANT, "workers", shown, GroupOverride()) == GroupOverride(size=2)
    before = GroupOverride(size=3, vars={"A": "1", "B": "2"}, args={"x": "y"})
    given = GroupSpecView(size=4, instance_type="large", vars={"A": "9", "B": Secret(set=False)})
    assert override_of(known, TENANT, "workers", given, before) == GroupOverride(
        size=4, instance_type="large", vars={"A": "9"}, args={"x": "y"}
    )
    made = GroupSpecView(size=1, template="worker")
    assert override_of(known, TENANT, "mine", made, GroupOverride()) == GroupOverride(
        size=1, template="worker"
    )


async def test_groups_are_made_changed_planned_pruned_and_taken_back(tmp_path: Path) -> None:
    started = {"instances": started_domains(tmp_path)["instances"]}
    roles = ("operator", "viewer")
    async with plans_rig(tmp_path / "a", (INSTANCES,), roles=roles, started=started) as rig:
        # A configured group: shown, changed, given back, taken back.
        read = await rig.call("GET", "/groups/workers")
        assert read.json()["spec"]["size"] == 2
        assert (await rig.call("GET", "/export")).json()["objects"] == []
        seen = {"if-match": read.headers["etag"]}
        larger = {"spec": {"size": 3, "vars": {"Shape": "round"}}}
        tried = await rig.call("PATCH", "/groups/workers", larger, headers=seen, dryRun="1")
        assert (tried.status_code, tried.json()["spec"]["size"]) == (200, 3), tried.text
        assert not rig.store.list(GROUP)
        done = await rig.call("PATCH", "/groups/workers", larger, headers=seen)
        assert done.status_code == 200, done.text
        assert done.json()["status"]["wanted"] == 3
        assert done.json()["spec"]["vars"] == {"Colour": {"set": True}, "Shape": {"set": True}}
        assert "round" not in done.text
        (stored,) = rig.store.list(GROUP)
        assert stored.spec == GroupOverride(size=3, vars={"Shape": "round"})
        assert (await rig.call("PATCH", "/groups/workers", larger, headers=seen)).status_code == 412
        back = (await rig.call("GET", "/groups/workers")).json()
        again = await rig.call("PUT", "/groups/workers", back, headers=ANY)
        assert (again.status_code, rig.store.list(GROUP)) == (200, (stored,)), again.text
        assert (await rig.call("DELETE", "/groups/workers")).status_code == 204
        assert (await rig.call("GET", "/groups/workers")).json()["spec"]["size"] == 2
        assert (await rig.call("DELETE", "/groups/workers")).json()["reason"] == "FailedPrecondition"

        # Groups of one's own: what the plan would do, who it belongs to, and that it is refused when moved.
        wanted = [group("mine", size=2, template="worker"), group("workers", size=1)]
        plan = await rig.plan(*wanted, owner="site")
        assert steps(plan) == [("create", "group", "mine"), ("change", "group", "workers")]
        assert [one["disturbs"] for one in plan["steps"]] == [
            ["2 instances are made"],
            ["1 instances are drained and deleted"],
        ]
        await rig.call("PATCH", "/groups/workers", {"spec": {"vars": {"Hidden": "1"}}}, headers=ANY)
        assert (await rig.apply(plan)).json()["reason"] == "PlanOutdated"
        await rig.applied(*wanted, owner="site")
        assert {one.labels[OWNER_LABEL] for one in rig.store.list(GROUP)} == {"site"}
        assert (await rig.plan(*wanted, owner="site"))["summary"]["nothing"] == 2
        kept = (await rig.call("GET", "/export")).json()["objects"]
        assert [one["metadata"]["name"] for one in kept] == ["mine", "workers"]
        gone = await rig.applied(owner="site", prune=True)
        assert gone["summary"]["delete"] == 2
        assert not rig.store.list(GROUP)
        assert (await rig.applied(*kept))["summary"] == {"create": 1, "change": 1, "nothing": 0, "delete": 0}
        assert (await rig.call("GET", "/export")).json()["objects"] == kept


async def test_what_the_configuration_does_not_allow_is_refused_with_its_field(tmp_path: Path) -> None:
    started = {"instances": started_domains(tmp_path)["instances"]}
    roles = ("operator", "viewer")
    async with plans_rig(tmp_path / "a", (INSTANCES,), roles=roles, started=started) as rig:
        for body, field in (
            (group("new", size=1), "spec.template"),
            (group("new", size=1, template="wroker"), "template"),
            (group("new", size=-1, template="worker"), "spec.size"),
            (group("new", size=10**9, template="worker"), "spec.size"),
            (group("new", size=1, template="worker", subnetPool="none"), "spec.subnet_pool"),
            (group("new", size=1, template="worker", loadBalancers=["lb"]), "loadBalancers"),
            (group("new", size=1, template="worker", colour="red"), "spec.colour"),
            (group("no/slash", size=1, template="worker"), None),
            (group("workers", size=1, template="other"), "template"),
            (group("workers", size=1, vars={"Colour": {"set": False}}), "vars.Colour"),
        ):
            answer = await rig.call("POST", "/plans", {"objects": [body]})
            assert answer.status_code in (400, 404, 409, 412), answer.text
            told = answer.json()["field"].removeprefix("objects[0].")
            assert field is None or told.removeprefix("spec.") == field.removeprefix("spec."), answer.text
        twice = await rig.call("POST", "/plans", {"objects": [group("workers", size=1)] * 2})
        assert twice.status_code == 400
        assert not rig.store.list(GROUP)

        stranger = await another(rig, "stranger", "operator", "viewer", tenant="other")
        viewer = await another(rig, "eye", "viewer", tenant=TENANT)
        body = group("workers", size=9)
        assert (await stranger.call("PUT", "/groups/workers", body, headers=ANY)).status_code == 404
        assert (await viewer.call("PUT", "/groups/workers", body, headers=ANY)).status_code == 403
        theirs = {**group("mine", size=1, template="worker")}
        theirs["metadata"] = {"name": "mine", "scope": "/tenants/other"}
        # A template names the tenants that it is for.
        own = await stranger.call("PUT", "/groups/mine", theirs)
        assert (own.status_code, own.json()["field"]) == (404, "template"), own.text
        assert not rig.store.list(GROUP)
