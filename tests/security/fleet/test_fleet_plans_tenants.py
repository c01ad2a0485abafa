"""Plans of one tenant neither touch, nor name, nor tell what is another's."""

from __future__ import annotations

from pathlib import Path

from support.fleet.plans_rig import ACME, OTHER, another, group, layer, plans_rig, steps


async def test_an_owners_name_on_another_tenants_objects_does_not_concern_who_prunes(tmp_path: Path) -> None:
    async with plans_rig(tmp_path) as rig:
        ours = await another(rig, "ours", "edge.admin", tenant="acme")
        theirs = await another(rig, "theirs", "edge.admin", tenant="other")
        await ours.applied(group("old", ACME), owner="ci")
        await theirs.applied(group("trap", OTHER), owner="ci")
        plan = await ours.plan(group("new", ACME), owner="ci", prune=True)
        assert steps(plan) == [("delete", "edge-group", "old"), ("create", "edge-group", "new")]
        assert (await ours.apply(plan)).status_code == 200
        assert await rig.names("edge-groups", OTHER) == ["trap"]


async def test_a_plan_is_not_told_to_a_namesake_of_its_maker(tmp_path: Path) -> None:
    async with plans_rig(tmp_path) as rig:
        maker = await another(rig, "ci", "edge.admin", tenant="acme")
        done = await maker.applied(layer({"level": "of acme"}))
        plan = await maker.plan(layer({"level": "of acme, too"}))
        assert (await maker.call("GET", f"/plans/{plan['id']}")).status_code == 200
        await rig.rig.kernel.operators.tokens.revoke("ci", actor="tester")
        namesake = await another(rig, "ci", "edge.admin", tenant="other")
        for one in (done, plan):
            assert (await namesake.call("GET", f"/plans/{one['id']}")).status_code == 404
            assert (await namesake.apply(one)).status_code == 404
