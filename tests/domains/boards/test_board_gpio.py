"""Pins through the server, on a real agent over real mTLS, its wires simulated."""

from __future__ import annotations

import asyncio
import errno
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import grpc
import pytest
from board_node_rig import NodeRig, configured, node_rig
from boards_rig import BoardsRig, until

from fleetplane.domains.boards.access import OPERATOR
from fleetplane.domains.boards.agent.gpio.port import Direction
from fleetplane.domains.boards.agent.gpio.simulated import SimulatedBoard
from fleetplane.domains.boards.gpio_kinds import GPIO_DEVICE, DeviceState, status_of
from fleetplane.domains.boards.kinds import SCOPE
from fleetplane.domains.boards.node_link import Asked
from fleetplane.domains.boards.registry import status_of as board_status
from fleetplane.gen.pi_controller import pi_controller_pb2 as pi
from fleetplane.kernel.errors import Conflict, FailedPrecondition, PermissionDenied

CODE = grpc.StatusCode
PIN = 17
BOSS = Asked(actor="operator/boss", role=OPERATOR)


class Operator:
    """The original service, with an operator's token on each call."""

    def __init__(self, stub: Any, metadata: list[tuple[str, str]]) -> None:
        self._stub = stub
        self._metadata = metadata

    def __getattr__(self, name: str) -> Any:
        method = getattr(self._stub, name)
        return lambda request, **more: method(request, metadata=self._metadata, **more)


async def operator(rig: BoardsRig, role: str = "boards.admin") -> Operator:
    return Operator(*await rig.operator(role))


async def refusal(call: Any) -> grpc.aio.AioRpcError:
    with pytest.raises(grpc.aio.AioRpcError) as error:
        await call
    return error.value


@pytest.fixture
async def node(rig: BoardsRig, tmp_path: Path) -> AsyncIterator[NodeRig]:
    async with node_rig(tmp_path, rig) as made:
        await registered(rig, number_of(made), made)
        yield made


def number_of(node: NodeRig) -> int:
    assert node.membership is not None
    return node.membership.node_id


async def registered(rig: BoardsRig, board: int, node: NodeRig) -> None:
    """Until the server knows where this run of the agent listens."""
    await until(lambda: board_status(rig.board(board)).port == node.ports.agent_port)


async def device(admin: Operator, board: int, **said: Any) -> pi.GPIODevice:
    wanted = {"name": "lamp", "pin_number": PIN, "direction": pi.GPIO_DIRECTION_OUTPUT, **said}
    made: pi.GPIODevice = await admin.CreateGPIODevice(pi.CreateGPIODeviceRequest(node_id=board, **wanted))
    return made


def level(node: NodeRig, pin: int = PIN) -> int:
    return node.copper.wires[pin].level()


# Describing.


async def test_a_device_is_created_listed_changed_and_deleted_in_the_original_shapes(
    rig: BoardsRig, node: NodeRig
) -> None:
    admin, board = await operator(rig), number_of(node)
    made = await device(
        admin, board, description="by the door", device_type=pi.GPIO_DEVICE_TYPE_DIGITAL,
        pull_mode=pi.GPIO_PULL_MODE_NONE,
    )  # fmt: skip

    assert (made.id, made.name, made.pin_number, made.node_id) == (1, "lamp", PIN, board)
    assert made.status == pi.GPIO_STATUS_ACTIVE
    assert made.direction == pi.GPIO_DIRECTION_OUTPUT
    listed = await admin.ListGPIODevices(pi.ListGPIODevicesRequest(node_id=board))
    assert [one.id for one in listed.gpio_devices] == [1]
    assert listed.total_count == 1
    empty = await admin.ListGPIODevices(pi.ListGPIODevicesRequest(status=pi.GPIO_STATUS_ERROR))
    assert empty.total_count == 0

    changed = await admin.UpdateGPIODevice(
        pi.UpdateGPIODeviceRequest(id=1, name="bulb", status=pi.GPIO_STATUS_INACTIVE)
    )
    assert (changed.name, changed.description, changed.status) == (
        "bulb", "by the door", pi.GPIO_STATUS_INACTIVE,
    )  # fmt: skip
    assert (await admin.GetGPIODevice(pi.GetGPIODeviceRequest(id=1))).name == "bulb"
    found = await admin.GetNode(pi.GetNodeRequest(id=board))
    assert [one.name for one in found.gpio_devices] == ["bulb"]

    assert (await admin.DeleteGPIODevice(pi.DeleteGPIODeviceRequest(id=1))).success
    assert (await refusal(admin.GetGPIODevice(pi.GetGPIODeviceRequest(id=1)))).code() is CODE.NOT_FOUND
    again = await device(admin, board)
    assert again.id == 2, "numbers are never used again, pins are"


async def test_a_pin_is_that_of_one_device(rig: BoardsRig, node: NodeRig) -> None:
    admin = await operator(rig)
    await device(admin, number_of(node))

    error = await refusal(device(admin, number_of(node), name="another"))

    assert error.code() is CODE.ALREADY_EXISTS
    assert "device 1" in (error.details() or "")


@pytest.mark.parametrize("pin", [0, 1, 2, 3, 14, 15])
async def test_protected_pins_are_refused_before_any_board_is_asked(rig: BoardsRig, pin: int) -> None:
    admin = await operator(rig)
    board = (await rig.join("pi")).number

    error = await refusal(device(admin, board, pin_number=pin))

    assert error.code() is CODE.PERMISSION_DENIED
    assert "protected" in (error.details() or "")


@pytest.mark.parametrize(
    ("said", "field"),
    [
        ({"pin_number": 28}, "pin_number"),
        ({"pin_number": -1}, "pin_number"),
        ({"name": ""}, "name"),
        ({"name": "x" * 64}, "name"),
        ({"device_type": pi.GPIO_DEVICE_TYPE_PWM, "direction": pi.GPIO_DIRECTION_INPUT}, "direction"),
        ({"config": pi.GPIOConfig(frequency=40_001)}, "frequency"),
        ({"config": pi.GPIOConfig(duty_cycle=101)}, "duty_cycle"),
        ({"direction": 9}, "direction"),
    ],
)
async def test_what_makes_no_sense_is_refused_by_name(
    rig: BoardsRig, said: dict[str, Any], field: str
) -> None:
    admin = await operator(rig)
    board = (await rig.join("pi")).number

    error = await refusal(device(admin, board, **said))

    assert error.code() is CODE.INVALID_ARGUMENT
    assert field in (error.details() or "")


async def test_viewers_look_and_operators_write(rig: BoardsRig, node: NodeRig) -> None:
    admin, worker, viewer = [
        await operator(rig, f"boards.{role}") for role in ("admin", "operator", "viewer")
    ]
    await device(worker, number_of(node))

    await worker.WriteGPIO(pi.WriteGPIORequest(id=1, value=1))
    assert (await viewer.ReadGPIO(pi.ReadGPIORequest(id=1))).value == 1.0
    for call in (
        viewer.WriteGPIO(pi.WriteGPIORequest(id=1, value=0)),
        device(viewer, number_of(node), pin_number=5),
        worker.DeleteGPIODevice(pi.DeleteGPIODeviceRequest(id=1)),
    ):
        assert (await refusal(call)).code() is CODE.PERMISSION_DENIED
    assert (await admin.DeleteGPIODevice(pi.DeleteGPIODeviceRequest(id=1))).success


async def test_a_board_with_devices_is_not_forgotten(rig: BoardsRig) -> None:
    admin = await operator(rig)
    board = (await rig.join("pi")).number
    await device(admin, board)

    error = await refusal(admin.DeleteNode(pi.DeleteNodeRequest(id=board)))

    assert error.code() is CODE.FAILED_PRECONDITION
    await admin.DeleteGPIODevice(pi.DeleteGPIODeviceRequest(id=1))
    assert (await admin.DeleteNode(pi.DeleteNodeRequest(id=board))).success


# Levels.


async def test_a_level_is_driven_read_back_and_kept_as_a_reading(rig: BoardsRig, node: NodeRig) -> None:
    admin = await operator(rig)
    await device(admin, number_of(node))

    written = await admin.WriteGPIO(pi.WriteGPIORequest(id=1, value=1))

    assert (written.device_id, written.pin, written.value) == (1, PIN, 1)
    assert level(node) == 1
    read = await admin.ReadGPIO(pi.ReadGPIORequest(id=1))
    assert (read.device_id, read.pin, read.value) == (1, PIN, 1.0)
    await admin.WriteGPIO(pi.WriteGPIORequest(id=1, value=0))
    assert rig.kernel.telemetry is not None
    await rig.kernel.telemetry.flush()
    now_ns = rig.kernel.clock.now_ns()
    kept = await rig.domain.nodes.driver.readings(1, from_ns=0, to_ns=now_ns, limit=10)
    assert [sample.value for sample in kept] == [0.0, 1.0, 1.0], "newest first"


async def test_claiming_high_shows_no_low_on_the_way(rig: BoardsRig, node: NodeRig) -> None:
    admin = await operator(rig)
    node.copper.drive(PIN, 1)
    await device(admin, number_of(node))

    await admin.WriteGPIO(pi.WriteGPIORequest(id=1, value=1))

    assert 0 not in list(node.copper.wires[PIN].history)


async def test_an_input_is_configured_with_its_pull_and_read(rig: BoardsRig, node: NodeRig) -> None:
    admin = await operator(rig)
    await device(admin, number_of(node), direction=pi.GPIO_DIRECTION_INPUT, pull_mode=pi.GPIO_PULL_MODE_UP)

    assert (await admin.ReadGPIO(pi.ReadGPIORequest(id=1))).value == 1.0
    node.copper.drive(PIN, 0)
    assert (await admin.ReadGPIO(pi.ReadGPIORequest(id=1))).value == 0.0
    error = await refusal(admin.WriteGPIO(pi.WriteGPIORequest(id=1, value=1)))
    assert error.code() is CODE.FAILED_PRECONDITION


async def test_an_inactive_device_is_neither_read_nor_written(rig: BoardsRig, node: NodeRig) -> None:
    admin = await operator(rig)
    await device(admin, number_of(node))
    await admin.WriteGPIO(pi.WriteGPIORequest(id=1, value=1))
    await admin.UpdateGPIODevice(pi.UpdateGPIODeviceRequest(id=1, status=pi.GPIO_STATUS_INACTIVE))

    for call in (
        admin.ReadGPIO(pi.ReadGPIORequest(id=1)),
        admin.WriteGPIO(pi.WriteGPIORequest(id=1, value=1)),
    ):
        assert (await refusal(call)).code() is CODE.FAILED_PRECONDITION
    await until(lambda: node.copper.wires[PIN].consumer is None)


async def test_a_waveform_is_written_as_its_duty_cycle(rig: BoardsRig, node: NodeRig) -> None:
    admin = await operator(rig)
    await device(
        admin, number_of(node), device_type=pi.GPIO_DEVICE_TYPE_PWM, config=pi.GPIOConfig(frequency=50)
    )

    written = await admin.WriteGPIO(pi.WriteGPIORequest(id=1, value=30))

    assert written.value == 30
    assert (await admin.ReadGPIO(pi.ReadGPIORequest(id=1))).value == 30.0
    assert node.copper.wires[PIN].direction is Direction.OUTPUT
    error = await refusal(admin.WriteGPIO(pi.WriteGPIORequest(id=1, value=101)))
    assert error.code() is CODE.INVALID_ARGUMENT


async def test_readings_are_streamed_until_the_caller_leaves(rig: BoardsRig, node: NodeRig) -> None:
    admin = await operator(rig)
    await device(admin, number_of(node), direction=pi.GPIO_DIRECTION_INPUT)
    stream = admin.StreamGPIOReadings(pi.StreamGPIOReadingsRequest(device_id=1, sample_rate=20))
    seen = [await stream.read()]
    node.copper.drive(PIN, 1)
    async with asyncio.timeout(10):
        while seen[-1].value == 0.0:
            seen.append(await stream.read())
    stream.cancel()

    assert [one.id for one in seen] == list(range(1, len(seen) + 1))
    assert {one.device_id for one in seen} == {1}
    assert seen[-1].value == 1.0
    too_fast = admin.StreamGPIOReadings(pi.StreamGPIOReadingsRequest(device_id=1, sample_rate=21))
    assert (await refusal(too_fast.read())).code() is CODE.INVALID_ARGUMENT


async def test_changes_of_a_level_can_be_watched(rig: BoardsRig, node: NodeRig) -> None:
    admin = await operator(rig)
    await device(admin, number_of(node))
    seen: list[float | None] = []
    with rig.store.watch(GPIO_DEVICE, SCOPE) as watch:
        await admin.WriteGPIO(pi.WriteGPIORequest(id=1, value=1))
        await admin.WriteGPIO(pi.WriteGPIORequest(id=1, value=0))
        async with asyncio.timeout(10):
            while seen[-2:] != [1.0, 0.0]:
                batch = await watch.next()
                seen += [status_of(event.resource).value for event in batch.events]

    assert seen[-2:] == [1.0, 0.0]


async def test_an_input_that_is_sampled_shows_what_happens_outside(rig: BoardsRig, node: NodeRig) -> None:
    admin = await operator(rig)
    await device(
        admin, number_of(node), direction=pi.GPIO_DIRECTION_INPUT, config=pi.GPIOConfig(sample_rate=10)
    )
    await until(lambda: status_of(rig.domain.nodes.devices.require(1)).held)

    node.copper.drive(PIN, 1)

    await until(lambda: status_of(rig.domain.nodes.devices.require(1)).value == 1.0)


async def test_who_asked_stands_in_the_boards_own_audit(rig: BoardsRig, node: NodeRig) -> None:
    admin = await operator(rig)
    await device(admin, number_of(node))

    await admin.WriteGPIO(pi.WriteGPIORequest(id=1, value=1))

    written = [entry for entry in node.audited() if entry.get("event") == "pin_write"]
    assert written
    assert "operator/boss" in str(written[-1])


# What should be so again.


async def test_pins_are_brought_back_after_an_agent_was_restarted(rig: BoardsRig, tmp_path: Path) -> None:
    admin, copper = await operator(rig), SimulatedBoard()
    async with node_rig(tmp_path, rig, copper=copper) as first:
        board = number_of(first)
        await registered(rig, board, first)
        await device(admin, board)
        await device(admin, board, name="button", pin_number=5, direction=pi.GPIO_DIRECTION_INPUT,
                     pull_mode=pi.GPIO_PULL_MODE_UP)  # fmt: skip
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
    await until(lambda: level(node) == 1, seconds=30)
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
    await nodes.driver.reserve(1, "robot", seconds=2, asked=BOSS)
    await nodes.driver.write(1, 1, holder="robot", asked=BOSS)
    assert level(node) == 1

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
    await nodes.driver.reserve(1, "robot", seconds=1.5, asked=BOSS)
    await nodes.driver.write(1, 1, holder="robot", asked=BOSS)
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
