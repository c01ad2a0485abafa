"""Pins of boards, written through the resource API: what they should be, and what they should drive."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
from support.fleet.plans_rig import PlansRig, another, plans_rig, steps

from fleetplane.domains.boards.kinds import BOARD, SCOPE, BoardSpec, BoardState, BoardStatus
from fleetplane.domains.boards.pins.kinds import GPIO_DEVICE, PinHold, status_of
from fleetplane.domains.boards.server import BLUEPRINT as BOARDS
from fleetplane.kernel.store import Draft

TENANT = "/tenants/default"
ANY = {"if-match": "*"}
LED = "/pins/attic.17"


def pin(name: str = "attic.17", scope: str = TENANT, **spec: Any) -> dict[str, Any]:
    return {"kind": "pin", "metadata": {"name": name, "scope": scope}, "spec": spec}


async def board(rig: PlansRig, number: int, name: str) -> None:
    def change(draft: Draft) -> None:
        draft.claim(BOARD, SCOPE, "name", name, str(number))
        status = BoardStatus(state=BoardState.READY)
        draft.put(BOARD, SCOPE, str(number), spec=BoardSpec(name=name), status=status)

    touches = [BOARD.key(SCOPE, str(number))]
    await rig.store.transact(change, actor="tester", action="board", touches=touches)


async def test_a_pin_is_described_driven_planned_exported_and_given_up(tmp_path: Path) -> None:
    async with plans_rig(tmp_path, (BOARDS,), roles=("boards.admin",)) as rig:
        await board(rig, 1, "attic")
        wanted = pin(direction="output", displayName="lamp", level=1)
        plan = await rig.plan(wanted, pin("attic.4"))
        assert steps(plan) == [("create", "pin", "attic.17"), ("create", "pin", "attic.4")]
        assert plan["steps"][0]["disturbs"] == ["the board drives the pin to 1"]
        assert (await rig.apply(plan)).status_code == 200
        lamp, button = rig.store.list(GPIO_DEVICE)
        assert (lamp.spec.name, lamp.spec.level, button.spec.direction) == ("lamp", 1, "input")
        read = await rig.call("GET", LED)
        spec = read.json()["spec"]
        assert (spec["board"], spec["pin"], spec["level"]) == ("attic", 17, 1)
        again = await rig.call("PUT", LED, read.json(), headers=ANY)
        assert again.json()["metadata"]["revision"] == read.json()["metadata"]["revision"]

        seen = {"if-match": read.headers["etag"]}
        dark = await rig.call("PATCH", LED, {"spec": {"level": 0}}, headers=seen)
        assert (dark.status_code, dark.json()["spec"]["level"]) == (200, 0), dark.text
        assert dark.json()["status"]["applied"] is False
        assert (await rig.call("PATCH", LED, {"spec": {"level": 1}}, headers=seen)).status_code == 412
        listening = await rig.call("PATCH", LED, {"spec": {"direction": "input", "level": None}}, headers=ANY)
        assert listening.json()["spec"]["level"] is None

        # Nothing of a machine that has to enrol first is in an export, unless it is named.
        assert (await rig.call("GET", "/export")).json()["objects"] == []
        objects = (await rig.call("GET", "/export", kinds="pins")).json()["objects"]
        for name in ("attic.17", "attic.4"):
            assert (await rig.call("DELETE", f"/pins/{name}")).status_code == 204
        assert not rig.store.list(GPIO_DEVICE)
        assert (await rig.applied(*objects))["summary"]["create"] == 2
        assert (await rig.call("GET", "/export", kinds="pins")).json()["objects"] == objects


async def test_what_must_not_be_written_is_refused(tmp_path: Path) -> None:
    async with plans_rig(tmp_path, (BOARDS,), roles=("boards.admin",)) as rig:
        await board(rig, 1, "attic")
        for body, status, field in (
            (pin(level=1), 409, None),  # an input
            (pin(direction="output", level=2), 400, "value"),
            (pin(direction="sideways"), 400, "direction"),
            (pin("attic.99"), 400, "pin_number"),
            (pin("attic.0"), 403, None),  # protected
            (pin("attic"), 400, "name"),
            (pin("cellar.17"), 404, "name"),
            (pin(scope="/tenants/default/clusters/none"), 404, None),
            (pin(board="cellar"), 400, "board"),
            (pin(pin=4), 400, "pin"),
            (pin(config={"frequency": -1}), 400, "config.frequency"),
            (pin(config={"frequenzy": 1}), 400, "config.frequenzy"),
        ):
            answer = await rig.call("PUT", f"/pins/{body['metadata']['name']}", body)
            assert answer.status_code == status, (body, answer.text)
            told = answer.json()["field"].removeprefix("spec.")
            assert field is None or told == field, (body, answer.text)
        assert not rig.store.list(GPIO_DEVICE)

        await rig.applied(pin(direction="output", level=0))
        operator = await another(rig, "op", "boards.operator")
        assert (await operator.call("DELETE", LED)).status_code == 403
        (lamp,) = rig.store.list(GPIO_DEVICE)
        lease = PinHold(id="1", holder="somebody", taken_at_ns=1)
        held = msgspec.structs.replace(status_of(lamp), lease=lease)
        await rig.rig.put(GPIO_DEVICE, SCOPE, lamp.name, spec=lamp.spec, status=held)
        refused = await rig.call("PATCH", LED, {"spec": {"level": 1}}, headers=ANY)
        assert (refused.status_code, refused.json()["reason"]) == (409, "Conflict")
        stranger = await another(rig, "stranger", "boards.admin", tenant="acme")
        assert (await stranger.call("PUT", LED, pin(), headers=ANY)).status_code == 404
        assert (await stranger.call("DELETE", LED, scope=TENANT)).status_code == 404
