"""Rollouts in the resource API."""

from __future__ import annotations

from pathlib import Path

from support.fleet.resources_rig import resources_rig

from fleetplane.fleet.rollouts.records import ROLLOUT, RolloutSpec, RolloutStatus
from fleetplane.fleet.rollouts.rules.policy import Policy
from fleetplane.fleet.rollouts.rules.states import RolloutPhase
from fleetplane.kernel.reconcile import Reason


async def test_a_rollout_is_an_object_for_those_who_may_see_its_tenant(tmp_path: Path) -> None:
    async with resources_rig(tmp_path) as rig:
        spec = RolloutSpec(
            subject="edge.config", to="7", policy=Policy(), actor="alice", started_at_ns=10**18, total=3
        )
        halt = (Reason(code="FAILURES", message="1 of 3 targets failed, 0 may"),)
        status = RolloutStatus(
            phase=RolloutPhase.HALTED,
            wave=1,
            counts={"failed": 1, "pending": 2},
            halt=halt,
            resume_to=RolloutPhase.MOVING,
        )
        await rig.put(ROLLOUT, "tenant/acme", "r1", spec=spec, status=status)

        own = await rig.token("own", "fleet.viewer", tenant="acme")
        body = (await rig.get("/rollouts", own)).json()
        (found,) = body["items"]
        assert found["metadata"]["scope"] == "/tenants/acme"
        assert (found["spec"]["subject"], found["spec"]["to"], found["spec"]["at"]) == (
            "edge.config",
            "7",
            "tenant/acme",
        )
        assert found["status"]["phase"] == "halted"
        assert found["status"]["halted"] == ["1 of 3 targets failed, 0 may"]
        assert found["status"]["counts"] == {"failed": 1, "pending": 2}

        other = await rig.token("other", "fleet.viewer", tenant="else")
        assert (await rig.get("/rollouts", other)).json()["items"] == []
        assert (await rig.get("/rollouts/r1", other)).status_code == 404
