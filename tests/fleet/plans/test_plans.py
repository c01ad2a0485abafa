"""Plans: what would be done, one transaction, and refusals."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

from support.fleet.plans_rig import ACME, OTHER, another, group, layer, plans_rig, steps

from fleetplane.domains.edge.nodes.config_layers import CONFIG_LAYER
from fleetplane.domains.edge.nodes.groups import EDGE_GROUP
from fleetplane.fleet.plans.decisions import OWNER_LABEL
from fleetplane.fleet.plans.records import PLAN


async def test_a_plan_tells_object_by_object_what_it_would_do_and_changes_nothing(tmp_path: Path) -> None:
    async with plans_rig(tmp_path) as rig:
        await rig.applied(group("same"), layer({"level": 1}))
        await rig.rig.node("acme", "n1")
        before = rig.store.list(EDGE_GROUP), rig.store.list(CONFIG_LAYER)
        plan = await rig.plan(group("new"), group("same"), layer({"level": 2}))

        assert steps(plan) == [
            ("create", "edge-group", "new"),
            ("nothing", "edge-group", "same"),
            ("change", "edge-config", "tenant"),
        ]
        assert plan["summary"] == {"create": 1, "change": 1, "nothing": 1, "delete": 0}
        (changed,) = plan["steps"][2]["changes"]
        assert changed == {"field": "spec.config.level", "old": 1, "new": 2}
        assert plan["steps"][2]["disturbs"] == ["1 daemons are sent a new configuration"]
        assert (rig.store.list(EDGE_GROUP), rig.store.list(CONFIG_LAYER)) == before
        assert plan["state"] == "open"


async def test_an_applied_plan_is_one_transaction_and_applied_again_answers_the_same(tmp_path: Path) -> None:
    async with plans_rig(tmp_path) as rig:
        plan = await rig.plan(group("a"), group("b"), layer({"x": 1}))
        async with rig.store.watch(EDGE_GROUP) as watch:
            first = await rig.apply(plan)
            batch = await anext(aiter(watch))
        assert first.status_code == 200, first.text
        assert {event.resource.spec.name for event in batch.events} == {"a", "b"}
        revision = rig.store.revision
        again = await rig.apply(plan)
        assert (again.status_code, again.json()) == (200, first.json())
        assert rig.store.revision == revision
        assert first.json()["state"] == "applied"
        assert (await rig.call("GET", f"/plans/{plan['id']}")).json() == first.json()
        assert steps(await rig.plan(group("a"), group("b"), layer({"x": 1}))) == [
            ("nothing", "edge-group", "a"),
            ("nothing", "edge-group", "b"),
            ("nothing", "edge-config", "tenant"),
        ]


async def test_a_plan_is_refused_with_the_list_of_what_moved(tmp_path: Path) -> None:
    async with plans_rig(tmp_path) as rig:
        await rig.applied(group("a"), group("b"))
        plan = await rig.plan(group("a", pinnedMembers=[]), group("b", selector={"os": "linux"}), group("c"))
        await rig.call(
            "PATCH", "/edge-groups/a", {"spec": {"selector": {"os": "darwin"}}}, headers={"if-match": "*"}
        )
        await rig.call("DELETE", "/edge-groups/b")
        refused = await rig.apply(plan)
        assert (refused.status_code, refused.json()["reason"]) == (409, "PlanOutdated")
        told = [one["detail"] for one in refused.json()["errors"]]
        assert told == [f"edge-group/a in {ACME} was changed", f"edge-group/b in {ACME} was deleted"]
        assert await rig.names("edge-groups") == ["a"]

        created = await rig.plan(group("d"))
        await rig.call("PUT", "/edge-groups/d", group("d", selector={"os": "linux"}))
        assert (await rig.apply(created)).json()["reason"] == "PlanOutdated"


async def test_what_fails_half_way_leaves_nothing(tmp_path: Path) -> None:
    async with plans_rig(tmp_path) as rig:
        body = {"objects": [group("good"), group("bad", pinnedMembers=["no-uuid"])]}
        refused = await rig.call("POST", "/plans", body)
        assert refused.status_code == 400
        assert refused.json()["field"] == "objects[1].spec.pinned_members"
        assert rig.store.list(PLAN) == ()
        plan = await rig.plan(group("good", ACME), group("good", OTHER))
        limited = await another(rig, "limited", "edge.admin", tenant="acme")
        assert (await limited.call("POST", "/plans", {"objects": [group("x", OTHER)]})).status_code == 404
        assert (await limited.apply(plan)).status_code == 404
        assert rig.store.list(EDGE_GROUP) == ()


async def test_permissions_are_checked_again_when_a_plan_is_applied(tmp_path: Path) -> None:
    async with plans_rig(tmp_path) as rig:
        writer = await another(rig, "soon-gone", "edge.admin", tenant="acme")
        plan = await writer.plan(group("a"))
        tokens = rig.rig.kernel.operators.tokens
        await tokens.revoke("soon-gone", actor="tester")
        again = await another(rig, "soon-gone-2", "aegis.edge.hosts.read", tenant="acme")
        assert (await writer.apply(plan)).status_code == 401
        assert (await again.apply(plan)).status_code == 404
        assert (await again.call("POST", "/plans", {"objects": [group("a")]})).status_code == 403
        assert rig.store.list(EDGE_GROUP) == ()


async def test_of_concurrent_applies_one_wins_and_the_other_is_refused(tmp_path: Path) -> None:
    async with plans_rig(tmp_path) as rig:
        await rig.applied(layer({"v": 0}))
        plans = [await rig.plan(layer({"v": number})) for number in (1, 2)]
        answers = await asyncio.gather(*(rig.apply(plan) for plan in plans))
        assert sorted(one.status_code for one in answers) == [200, 409]
        won = plans[[one.status_code for one in answers].index(200)]
        (stored,) = rig.store.list(CONFIG_LAYER)
        assert stored.spec.content == b'{"v":%d}' % won["steps"][0]["changes"][0]["new"]
        same = await rig.plan(layer({"v": 9}))
        both = await asyncio.gather(rig.apply(same), rig.apply(same))
        assert [one.status_code for one in both] == [200, 200]
        assert both[0].json() == both[1].json()


async def test_pruning_deletes_what_the_owner_no_longer_names_and_nothing_else(tmp_path: Path) -> None:
    async with plans_rig(tmp_path) as rig:
        await rig.applied(group("by-hand"))
        await rig.applied(group("theirs"), owner="them")
        await rig.applied(group("kept"), group("dropped"), group("kept", OTHER), owner="us")
        plan = await rig.plan(group("kept"), owner="us", prune=True, scope=ACME)
        assert steps(plan) == [("delete", "edge-group", "dropped"), ("nothing", "edge-group", "kept")]
        assert plan["steps"][0]["pruned"] is True
        assert (await rig.apply(plan)).status_code == 200
        assert await rig.names("edge-groups", ACME) == ["by-hand", "kept", "theirs"]
        assert await rig.names("edge-groups", OTHER) == ["kept"]
        all_gone = await rig.applied(owner="us", prune=True)
        assert all_gone["summary"]["delete"] == 2
        assert await rig.names("edge-groups") == ["by-hand", "theirs"]


async def test_what_belongs_to_another_owner_is_left_unless_it_is_taken_over(tmp_path: Path) -> None:
    async with plans_rig(tmp_path) as rig:
        await rig.applied(group("theirs"), owner="them")
        refused = await rig.call("POST", "/plans", {"objects": [group("theirs")], "owner": "us"})
        assert (refused.status_code, refused.json()["reason"]) == (409, "Conflict")
        taken = await rig.plan(group("theirs"), owner="us", takeOver=True)
        assert "belongs to them" in taken["steps"][0]["warnings"][0]
        (change,) = taken["steps"][0]["changes"]
        assert (change["old"], change["new"]) == ("them", "us")
        assert change["field"] == f'metadata.labels["{OWNER_LABEL}"]'


async def test_plans_expire_and_belong_to_who_made_them(tmp_path: Path) -> None:
    async with plans_rig(tmp_path) as rig:
        plan = await rig.plan(group("a"), expiresIn="1ns")
        expired = await rig.apply(plan)
        assert (expired.status_code, expired.json()["reason"]) == (409, "PlanExpired")
        other = await another(rig, "other", "edge.admin")
        mine = await rig.plan(group("a"))
        path = f"/plans/{mine['id']}"
        for method, at in (("GET", path), ("DELETE", path), ("POST", f"{path}/apply")):
            assert (await other.call(method, at)).status_code == 404
        assert (await other.call("GET", "/plans")).json()["items"] == []
        assert await rig.rig.api.plans.sweep() == 1
        listed = (await rig.call("GET", "/plans")).json()["items"]
        assert [one["id"] for one in listed] == [mine["id"]]
        assert (await rig.call("DELETE", path)).status_code == 204
        assert (await rig.apply(mine)).status_code == 404
        assert await rig.store.secret_names("plans/") == []


async def test_values_of_a_plan_are_stored_sealed(tmp_path: Path) -> None:
    async with plans_rig(tmp_path) as rig:
        await rig.plan(layer({"password": "hunter2hunter2"}))
    stored = b"".join(path.read_bytes() for path in tmp_path.rglob("*") if path.is_file())
    assert b"hunter2hunter2" not in stored


async def test_a_plan_is_bounded_and_what_is_asked_of_it_is_checked(tmp_path: Path) -> None:
    async with plans_rig(tmp_path) as rig:
        many = [group(f"g{number}") for number in range(1001)]
        cases: list[tuple[dict[str, Any], str]] = [
            ({"objects": many}, "objects"),
            ({"objects": []}, "objects"),
            ({"objects": [group("a"), group("a")]}, "objects[1]"),
            ({"objects": [{"kind": "edge-group", "spec": {}}]}, "objects[0].metadata.name"),
            ({"prune": True}, "owner"),
            ({"objects": [group("a")], "expiresIn": "48h"}, "expiresIn"),
            ({"objects": [group("a")], "scope": "acme"}, "scope"),
        ]
        for body, field in cases:
            refused = await rig.call("POST", "/plans", body)
            assert (refused.status_code, refused.json()["field"]) == (400, field), refused.text
        once = {"idempotency-key": "k1"}
        made = await rig.call("POST", "/plans", {"objects": [group("a")]}, headers=once)
        again = await rig.call("POST", "/plans", {"objects": [group("a")]}, headers=once)
        assert made.json() == again.json()
        assert len(rig.store.list(PLAN)) == 1
