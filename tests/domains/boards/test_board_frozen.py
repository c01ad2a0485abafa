"""Frozen boards: pins are looked at and not driven, people and safety go on, and it is said."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from support.boards.board_gpio_kit import BOSS, device, level, number_of, operator
from support.boards.board_node_rig import NodeRig
from support.boards.boards_rig import BoardsRig, until

from fleetplane.domains.boards.kinds import SCOPE, board_scope
from fleetplane.domains.boards.pins.kinds import GPIO_DEVICE, status_of
from fleetplane.gen.pi_controller import pi_controller_pb2 as pi
from fleetplane.kernel.errors import NotFound
from fleetplane.kernel.freeze import freeze, lift


def codes(rig: BoardsRig, kind: str, name: str) -> Sequence[str]:
    explainer = rig.domain.explainers[kind]
    scope = explainer.locate("", name)
    return [one.code for found in explainer.explain(scope, name) for one in found.explanation.reasons]


async def stop(rig: BoardsRig, scope: str) -> None:
    await freeze(rig.kernel.store, scope, reason="works", actor="ada", domains=("boards",))


async def test_a_frozen_pin_is_not_brought_back_until_the_freeze_is_lifted(
    rig: BoardsRig, node: NodeRig
) -> None:
    admin, board = await operator(rig), number_of(node)
    made = await device(admin, board)
    await admin.WriteGPIO(pi.WriteGPIORequest(id=made.id, value=1))
    await stop(rig, board_scope(board))
    # Somebody wants it as an input: what is wanted is taken, and the board is left as it is.
    wanted = pi.UpdateGPIODeviceRequest(id=made.id, direction=pi.GPIO_DIRECTION_INPUT)
    await admin.UpdateGPIODevice(wanted)

    await until(lambda: "FROZEN" in codes(rig, "pin", str(made.id)))
    assert level(node) == 1
    stored = rig.kernel.store.get(GPIO_DEVICE, SCOPE, str(made.id))
    assert stored is not None
    assert status_of(stored).applied_generation != stored.generation

    assert await lift(rig.kernel.store, board_scope(board), actor="ada", domains=("boards",))
    await until(lambda: codes(rig, "pin", str(made.id)) == [])
    stored = rig.kernel.store.get(GPIO_DEVICE, SCOPE, str(made.id))
    assert stored is not None
    assert status_of(stored).applied_generation == stored.generation


async def test_people_write_and_reservations_end_while_frozen(rig: BoardsRig, node: NodeRig) -> None:
    admin, board = await operator(rig), number_of(node)
    made = await device(admin, board)
    await stop(rig, SCOPE)

    await admin.WriteGPIO(pi.WriteGPIORequest(id=made.id, value=1))
    assert level(node) == 1
    driver = rig.domain.nodes.driver
    await driver.reserve(made.id, BOSS.actor, seconds=3600, asked=BOSS)
    await driver.write(made.id, 1, holder=BOSS.actor, asked=BOSS)
    await driver.reserve(made.id, BOSS.actor, seconds=0.1, asked=BOSS)  # a dead man's switch

    def given_up() -> bool:
        stored = rig.kernel.store.get(GPIO_DEVICE, SCOPE, str(made.id))
        return stored is not None and not status_of(stored).held and not status_of(stored).owed_lease_id

    await until(given_up)


async def test_a_freeze_of_another_board_stops_nothing(rig: BoardsRig, node: NodeRig) -> None:
    admin, board = await operator(rig), number_of(node)
    await stop(rig, board_scope(board + 1))
    await freeze(rig.kernel.store, reason="elsewhere", actor="ada")  # instances alone

    made = await device(admin, board, direction=pi.GPIO_DIRECTION_INPUT)
    await until(lambda: codes(rig, "pin", str(made.id)) == [])


async def test_boards_and_pins_say_why_they_are_not_as_they_should_be(rig: BoardsRig, node: NodeRig) -> None:
    admin, board = await operator(rig), number_of(node)
    made = await device(admin, board)
    assert codes(rig, "pin", str(made.id)) == ["NOT_WRITTEN"]
    entered = await admin.CreateNode(pi.CreateNodeRequest(name="boxed"))
    assert "NEVER_REGISTERED" in codes(rig, "board", str(entered.id))
    await until(lambda: codes(rig, "board", str(board)) == [])


@pytest.mark.parametrize("name", ["0", "99", "x", "1 ", "-1", "9" * 500, "١", "1/1"])
@pytest.mark.parametrize("kind", ["board", "pin"])
async def test_names_of_nothing_are_not_found(rig: BoardsRig, kind: str, name: str) -> None:
    with pytest.raises(NotFound):
        rig.domain.explainers[kind].locate("", name)
