"""Pins through the server, on a real agent over real mTLS, its wires simulated."""

from __future__ import annotations

import asyncio
from itertools import groupby
from typing import Any

import grpc
import pytest
from support.boards.board_gpio_kit import CODE, PIN, device, level, number_of, operator, refusal
from support.boards.board_node_rig import NodeRig
from support.boards.boards_rig import BoardsRig, until

from fleetplane.domains.boards.access import LISTENER
from fleetplane.domains.boards.agent.gpio.chip import LineDirection
from fleetplane.domains.boards.kinds import SCOPE
from fleetplane.domains.boards.pins.kinds import GPIO_DEVICE, status_of
from fleetplane.domains.boards.users import PersonSpec
from fleetplane.fleet.people.door import is_of_people
from fleetplane.gen.pi_controller import pi_controller_pb2 as pi
from fleetplane.gen.pi_controller import pi_controller_pb2_grpc
from fleetplane.kernel.access import Role
from fleetplane.kernel.identity.bindings import Bindings
from fleetplane.server.grpc_apps import keep_to_rights

# Describing.


async def test_a_device_is_created_listed_changed_and_deleted_in_the_original_shapes(
    rig: BoardsRig, node: NodeRig
) -> None:
    admin, board = await operator(rig), number_of(node)
    made = await device(
        admin,
        board,
        description="by the door",
        device_type=pi.GPIO_DEVICE_TYPE_DIGITAL,
        pull_mode=pi.GPIO_PULL_MODE_NONE,
    )

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
        "bulb",
        "by the door",
        pi.GPIO_STATUS_INACTIVE,
    )
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
    assert node.copper.wires[PIN].direction is LineDirection.OUTPUT
    error = await refusal(admin.WriteGPIO(pi.WriteGPIORequest(id=1, value=101)))
    assert error.code() is CODE.INVALID_ARGUMENT


async def test_readings_are_streamed_until_the_caller_leaves(rig: BoardsRig, node: NodeRig) -> None:
    admin = await operator(rig)
    await device(admin, number_of(node), direction=pi.GPIO_DIRECTION_INPUT)
    stream = admin.StreamGPIOReadings(pi.StreamGPIOReadingsRequest(device_id=1, sample_rate=20))
    seen = [await stream.read()]
    node.copper.drive(PIN, 1)
    async with asyncio.timeout(60):
        while seen[-1].value == 0.0:
            seen.append(await stream.read())
    stream.cancel()

    assert [one.id for one in seen] == list(range(1, len(seen) + 1))
    assert {one.device_id for one in seen} == {1}
    assert seen[-1].value == 1.0
    too_fast = admin.StreamGPIOReadings(pi.StreamGPIOReadingsRequest(device_id=1, sample_rate=21))
    assert (await refusal(too_fast.read())).code() is CODE.INVALID_ARGUMENT


async def to_the_end(stream: Any) -> None:
    async with asyncio.timeout(60):
        while True:
            await stream.read()


@pytest.mark.parametrize("way", ["token", "binding", "login"])
async def test_readings_end_when_what_allowed_them_is_taken_away(
    rig: BoardsRig, node: NodeRig, way: str
) -> None:
    await device(await operator(rig), number_of(node), direction=pi.GPIO_DIRECTION_INPUT)
    tokens, bindings = rig.kernel.operators.tokens, Bindings(rig.store)

    async def a_token() -> str:
        roles = {Role("boards.viewer")} if way == "token" else {Role("gpus.viewer")}
        return await tokens.create("watching", roles=frozenset(roles), actor="test")

    if way == "login":
        spec = PersonSpec(username="ann", role="viewer")
        person = await rig.domain.rest.people.create(spec, "a long enough password", actor="test")
        shown = (await rig.domain.rest.logins.open(person, actor="test")).access
    else:
        shown = await a_token()
    given = None
    if way == "binding":
        given = (await bindings.give("token/watching", "viewer", "/tenants/default", actor="test")).name
    stub = pi_controller_pb2_grpc.PiControllerServiceStub(await rig.channel())
    stream = stub.StreamGPIOReadings(
        pi.StreamGPIOReadingsRequest(device_id=1, sample_rate=20),
        metadata=[("authorization", f"Bearer {shown}")],
    )
    assert (await stream.read()).device_id == 1
    app = rig.apps[LISTENER]
    assert app.end_calls_without_right(is_of_people) == 0
    rights = asyncio.ensure_future(keep_to_rights([app], rig.kernel.clock))
    try:
        if given is not None:
            await bindings.take(given, actor="test")
        elif way == "token":
            await tokens.revoke("watching", actor="test")
        else:
            await rig.domain.rest.logins.close(person.name, actor="test")
        with pytest.raises(grpc.aio.AioRpcError) as ended:
            await to_the_end(stream)
        assert ended.value.code() is CODE.UNAUTHENTICATED
    finally:
        rights.cancel()
        await asyncio.gather(rights, return_exceptions=True)


async def test_changes_of_a_level_can_be_watched(rig: BoardsRig, node: NodeRig) -> None:
    admin = await operator(rig)
    await device(admin, number_of(node))
    seen: list[float | None] = []
    with rig.store.watch(GPIO_DEVICE, SCOPE) as watch:
        await admin.WriteGPIO(pi.WriteGPIORequest(id=1, value=1))
        await admin.WriteGPIO(pi.WriteGPIORequest(id=1, value=0))
        async with asyncio.timeout(60):
            while [value for value, _ in groupby(seen)][-2:] != [1.0, 0.0]:  # other changes come between
                batch = await watch.next()
                seen += [status_of(event.resource).value for event in batch.events]


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
