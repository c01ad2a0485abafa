"""Pins through the server when something goes wrong, and what should be so again afterwards."""

from __future__ import annotations

import asyncio
import errno
from contextlib import AsyncExitStack
from pathlib import Path

import pytest
from support.boards.board_gpio_kit import (
    BOSS,
    CODE,
    PIN,
    device,
    level,
    number_of,
    operator,
    refusal,
    registered,
)
from support.boards.board_node_rig import NodeRig, configured, node_rig
from support.boards.boards_rig import BoardsRig, until

from fleetplane.domains.boards.agent.gpio.drivers import SimulatedBoard
from fleetplane.domains.boards.calls.errors import BoardSilent
from fleetplane.domains.boards.pins.driver import CONTROLLER
from fleetplane.domains.boards.pins.kinds import DeviceState, Direction, GpioSpec, device_number, status_of
from fleetplane.gen.pi_controller import pi_controller_pb2 as pi
from fleetplane.kernel.errors import Conflict, FailedPrecondition, PermissionDenied

# What should be so again.


async def test_pins_are_brought_back_after_an_agent_was_restarted(rig: BoardsRig, tmp_path: Path) -> None:
    admin, copper = await operator(rig), SimulatedBoard()
    async with node_rig(tmp_path, rig, copper=copper) as first:
        board = number_of(first)
        await registered(rig, board, first)
        await device(admin, board)
        await device(
            admin,
            board,
            name="button",
            pin_number=5,
            direction=pi.GPIO_DIRECTION_INPUT,
            pull_mode=pi.GPIO_PULL_MODE_UP,
        )
        await admin.WriteGPIO(pi.WriteGPIORequest(id=1, value=1))
        await until(lambda: copper.wires[5].consumer)
    assert copper.wires[PIN].consumer is None, "an agent that ends gives its pins up"
    assert copper.wires[PIN].level() == 0

    async with node_rig(tmp_path, rig, copper=copper):
        await until(lambda: copper.wires[PIN].level() == 1)
        await until(lambda: copper.wires[5].consumer and copper.wires[5].level() == 1)
        await until(lambda: status_of(rig.domain.nodes.devices.require(1)).reason == "")


async def test_a_board_that_is_away_is_told_when_it_comes_back(rig: BoardsRig, tmp_path: Path) -> None:
    admin, copper = await operator(rig), SimulatedBoard()
    async with node_rig(tmp_path, rig, copper=copper) as first:
        board = number_of(first)
        await registered(rig, board, first)
        await device(admin, board)
        await admin.WriteGPIO(pi.WriteGPIORequest(id=1, value=1))

    error = await refusal(admin.WriteGPIO(pi.WriteGPIORequest(id=1, value=0)))
    assert error.code() is CODE.UNAVAILABLE
    assert (await admin.DeleteGPIODevice(pi.DeleteGPIODeviceRequest(id=1))).success, "it is gone for all"
    await until(lambda: rig.domain.nodes.gpio.reconciler.explain(str(board)) is not None)
    kept = rig.domain.nodes.devices.kept(1)
    assert kept is not None, "until the board has given the pin up"
    assert kept.spec.removing

    async with node_rig(tmp_path, rig, copper=copper):
        await until(lambda: rig.domain.nodes.devices.kept(1) is None)
        assert copper.wires[PIN].consumer is None


async def test_a_pin_that_someone_else_changed_is_put_right(rig: BoardsRig, node: NodeRig) -> None:
    from fleetplane.gen.boards import boards_pb2 as pb

    admin = await operator(rig)
    await device(admin, number_of(node))
    await admin.WriteGPIO(pi.WriteGPIORequest(id=1, value=1))
    other = await node.node_of("boards.operator")
    await other.ControlGPIO(pb.GPIORequest(pin=PIN, state=pb.GPIORequest.LOW))
    assert level(node) == 0

    rig.domain.nodes.gpio.reconciler.enqueue(str(number_of(node)))

    await until(lambda: level(node) == 1)


# Faults.


async def faulty(rig: BoardsRig, reason: str) -> pi.GPIODevice:
    """The device once it says that."""
    await until(lambda: status_of(rig.domain.nodes.devices.require(1)).reason == reason)
    admin = await operator(rig)
    found: pi.GPIODevice = await admin.GetGPIODevice(pi.GetGPIODeviceRequest(id=1))
    return found


async def test_a_busy_line_is_refused_explained_and_taken_once_it_is_free(
    rig: BoardsRig, node: NodeRig
) -> None:
    admin, board = await operator(rig), number_of(node)
    node.copper.occupy(PIN, "spi0")
    await device(admin, board, direction=pi.GPIO_DIRECTION_INPUT)

    assert (await faulty(rig, "LINE_BUSY")).status == pi.GPIO_STATUS_ERROR
    error = await refusal(admin.ReadGPIO(pi.ReadGPIORequest(id=1)))
    assert error.code() is CODE.FAILED_PRECONDITION
    assert "spi0" in (error.details() or "")
    explanation = await until(lambda: rig.domain.nodes.gpio.reconciler.explain(str(board)))
    assert [reason.code for reason in explanation.reasons] == ["LINE_BUSY"]
    assert explanation.next_due_ns is not None, "it is tried again without being asked"

    node.copper.occupy(PIN, None)
    rig.domain.nodes.gpio.came(board)
    await until(lambda: status_of(rig.domain.nodes.devices.require(1)).state is DeviceState.ACTIVE)
    assert node.copper.wires[PIN].consumer == "fleetplane"


async def test_a_board_without_a_chip_says_so_and_nothing_else_breaks(rig: BoardsRig, node: NodeRig) -> None:
    admin = await operator(rig)
    await device(admin, number_of(node))
    await admin.WriteGPIO(pi.WriteGPIORequest(id=1, value=1))
    node.copper.unplug()

    error = await refusal(admin.WriteGPIO(pi.WriteGPIORequest(id=1, value=0)))
    assert error.code() is CODE.UNAVAILABLE
    rig.domain.nodes.gpio.came(number_of(node))
    assert (await faulty(rig, "HARDWARE_MISSING")).status == pi.GPIO_STATUS_ERROR

    node.copper.plug()
    await until(lambda: level(node) == 1, seconds=60)
    await until(lambda: status_of(rig.domain.nodes.devices.require(1)).reason == "")


async def test_a_right_that_the_agent_lacks_is_told_apart_from_a_protected_pin(
    rig: BoardsRig, node: NodeRig
) -> None:
    admin = await operator(rig)
    node.copper.fail(PIN, errno.EACCES)
    await device(admin, number_of(node))

    error = await refusal(admin.WriteGPIO(pi.WriteGPIORequest(id=1, value=1)))

    assert error.code() is CODE.PERMISSION_DENIED
    assert "claiming pin" in (error.details() or "")


async def test_a_pin_that_the_node_restricts_is_refused_with_its_words(
    rig: BoardsRig, tmp_path: Path
) -> None:
    admin = await operator(rig)
    async with node_rig(tmp_path, rig, config=configured(gpio={"restricted": [PIN]})) as node:
        await registered(rig, number_of(node), node)
        await device(admin, number_of(node), direction=pi.GPIO_DIRECTION_INPUT)

        found = await faulty(rig, "PERMISSION_DENIED")

        assert found.status == pi.GPIO_STATUS_ERROR
        assert "restricted" in status_of(rig.domain.nodes.devices.require(1)).message


async def test_a_board_that_nobody_has_heard_from_is_unavailable(rig: BoardsRig) -> None:
    admin = await operator(rig)
    board = await admin.CreateNode(pi.CreateNodeRequest(name="paper", ip_address="127.0.0.1"))
    await device(admin, board.id)

    for call in (
        admin.ReadGPIO(pi.ReadGPIORequest(id=1)),
        admin.WriteGPIO(pi.WriteGPIORequest(id=1, value=1)),
    ):
        assert (await refusal(call)).code() is CODE.UNAVAILABLE


async def test_a_board_is_looked_at_again_after_a_write_that_may_or_may_not_have_been_done(
    rig: BoardsRig, node: NodeRig, monkeypatch: pytest.MonkeyPatch
) -> None:
    nodes, number = rig.domain.nodes, number_of(node)
    spec = GpioSpec(name="lamp", board=number, pin=PIN, direction=Direction.OUTPUT)
    made = device_number(await nodes.devices.create(spec, actor="operator/boss"))
    looked_at: list[int] = []
    monkeypatch.setattr(nodes.gpio, "came", looked_at.append)

    async def silent(*_given: object, **_named: object) -> None:
        raise BoardSilent("no answer")

    monkeypatch.setattr(nodes.pins, "apply", silent)
    with pytest.raises(BoardSilent):
        await nodes.driver.write(made, 1, holder="operator/boss", asked=CONTROLLER)
    assert nodes.driver.doubtful.qsize() == 1
    looked_at.clear()
    await until(lambda: number in looked_at)
    assert nodes.driver.doubtful.empty()


async def test_another_board_at_the_address_is_not_believed(rig: BoardsRig, node: NodeRig) -> None:
    """Where a board listens is only what it said; who it is, its certificate says."""
    from fleetplane.gen.boards import boards_pb2 as pb

    admin = await operator(rig)
    liar = await rig.join("liar")
    await liar.control.RegisterNode(
        pb.NodeRegistration(name="liar", ip_address="127.0.0.1", agent_port=node.ports.agent_port)
    )
    await device(admin, liar.number)

    error = await refusal(admin.WriteGPIO(pi.WriteGPIORequest(id=1, value=1)))

    assert error.code() is CODE.UNAVAILABLE
    assert level(node) == 0


async def test_a_revoked_board_is_not_called(rig: BoardsRig, node: NodeRig) -> None:
    admin, board = await operator(rig), number_of(node)
    await device(admin, board)
    await rig.kernel.revocations.revoke(principal=f"board/{board}", reason="stolen", actor="operator/boss")

    error = await refusal(admin.WriteGPIO(pi.WriteGPIORequest(id=1, value=1)))

    assert error.code() is CODE.PERMISSION_DENIED
    assert "stolen" in (error.details() or "")
    assert level(node) == 0


# Reservations.


async def test_a_reserved_pin_is_written_by_its_holder_alone(rig: BoardsRig, node: NodeRig) -> None:
    admin, nodes = await operator(rig), rig.domain.nodes
    await device(admin, number_of(node))
    reserved = await nodes.driver.reserve(1, "robot", seconds=60, asked=BOSS)
    lease = status_of(reserved).lease
    assert lease is not None

    error = await refusal(admin.WriteGPIO(pi.WriteGPIORequest(id=1, value=1)))
    assert error.code() is CODE.ABORTED
    assert "robot" in (error.details() or "")
    assert (await admin.ReadGPIO(pi.ReadGPIORequest(id=1))).value == 0.0, "reading is free"
    with pytest.raises(Conflict):
        await nodes.driver.reserve(1, "rival", seconds=60, asked=BOSS)
    with pytest.raises(PermissionDenied):
        await nodes.devices.release(1, "rival", actor="operator/boss")

    await nodes.driver.write(1, 1, holder="robot", asked=BOSS)
    assert level(node) == 1
    renewed = await nodes.driver.reserve(1, "robot", seconds=120, asked=BOSS)
    again = status_of(renewed).lease
    assert again is not None
    assert again.id == lease.id, "the same holder extends"
    assert [one.name for one in nodes.devices.reserved()] == ["1"]


async def test_what_was_written_under_a_reservation_ends_with_it(rig: BoardsRig, node: NodeRig) -> None:
    admin, nodes = await operator(rig), rig.domain.nodes
    await device(admin, number_of(node))
    await nodes.driver.reserve(1, "robot", seconds=3600, asked=BOSS)
    await nodes.driver.write(1, 1, holder="robot", asked=BOSS)
    assert level(node) == 1

    await nodes.driver.reserve(1, "robot", seconds=0.1, asked=BOSS)
    await until(lambda: level(node) == 0)

    await until(lambda: status_of(nodes.devices.require(1)).lease is None)
    await until(lambda: not status_of(nodes.devices.require(1)).held)
    assert nodes.devices.require(1).spec.level is None
    await admin.WriteGPIO(pi.WriteGPIORequest(id=1, value=1))
    assert level(node) == 1, "and then anyone may write"


async def test_giving_a_reservation_back_frees_the_pin_for_the_next_writer(
    rig: BoardsRig, node: NodeRig
) -> None:
    admin, nodes = await operator(rig), rig.domain.nodes
    await device(admin, number_of(node))
    await nodes.driver.reserve(1, "robot", seconds=3600, asked=BOSS)
    await nodes.driver.write(1, 1, holder="robot", asked=BOSS)

    await nodes.devices.release(1, "robot", actor="operator/boss")
    await admin.WriteGPIO(pi.WriteGPIORequest(id=1, value=1))

    assert level(node) == 1
    assert nodes.devices.require(1).spec.lease_id == ""
    with pytest.raises(FailedPrecondition):
        await nodes.devices.release(1, "robot", actor="operator/boss")


async def test_a_board_makes_a_leased_pin_safe_when_the_server_is_gone(rig: BoardsRig, node: NodeRig) -> None:
    admin, nodes = await operator(rig), rig.domain.nodes
    await device(admin, number_of(node))
    async with asyncio.timeout(60):
        while not nodes.devices.require(1).spec.lease_id:  # it may end before something is written under it
            await nodes.driver.reserve(1, "robot", seconds=1.5, asked=BOSS)
            await nodes.driver.write(1, 1, holder="robot", asked=BOSS)
    assert 1 in node.copper.wires[PIN].history
    # Whatever the server would do about it, it does not get through any more.
    await rig.kernel.revocations.revoke(
        principal=f"board/{number_of(node)}", reason="cut off", actor="operator/boss"
    )

    await until(lambda: level(node) == 0)


async def test_a_reservation_without_an_end_is_only_a_lock(rig: BoardsRig, node: NodeRig) -> None:
    admin, nodes = await operator(rig), rig.domain.nodes
    await device(admin, number_of(node))
    await nodes.driver.reserve(1, "robot", seconds=None, asked=BOSS)
    await nodes.driver.write(1, 1, holder="robot", asked=BOSS)

    await nodes.devices.release(1, "robot", actor="operator/boss")

    assert nodes.devices.require(1).spec.level == 1
    assert level(node) == 1


# Lost boards.


async def test_a_board_lost_in_the_middle_costs_its_callers_an_error_and_nobody_else_anything(
    rig: BoardsRig, tmp_path: Path
) -> None:
    admin = await operator(rig)
    async with AsyncExitStack() as stack:
        kept = await stack.enter_async_context(node_rig(tmp_path / "kept", rig))
        await registered(rig, number_of(kept), kept)
        await device(admin, number_of(kept))
        async with node_rig(tmp_path / "lost", rig, config=configured(node={"name": "pi-2"})) as lost:
            assert number_of(lost) != number_of(kept)
            await registered(rig, number_of(lost), lost)
            await device(admin, number_of(lost), name="far")
            await admin.WriteGPIO(pi.WriteGPIORequest(id=2, value=1))
        errors = await asyncio.gather(
            *(refusal(admin.WriteGPIO(pi.WriteGPIORequest(id=2, value=n % 2))) for n in range(20))
        )
        assert {error.code() for error in errors} == {CODE.UNAVAILABLE}
        await admin.WriteGPIO(pi.WriteGPIORequest(id=1, value=1))
        assert level(kept) == 1
        assert rig.domain.nodes.devices.require(2).spec.level == 1, "what was wanted before is wanted still"


async def test_a_thousand_writes_in_a_row_exhaust_nothing(rig: BoardsRig, node: NodeRig) -> None:
    admin = await operator(rig)
    await device(admin, number_of(node))

    for number in range(1000):
        await admin.WriteGPIO(pi.WriteGPIORequest(id=1, value=number % 2))

    assert level(node) == 1
