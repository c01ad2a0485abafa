"""The original controller and test client, byte for byte, against a node that serves them in plain text."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from support.boards.board_node_rig import LOCAL, NodeRig, configured, node_rig
from support.boards.original_board_agent import CALL_TIMEOUT, dial
from support.boards.original_controller import (
    INPUT,
    OUTPUT,
    PULL_UP,
    OriginalClient,
    OriginalController,
    data,
    fields,
    fields_of,
    signed,
)
from support.shared.h2_grpc import GrpcFailed

from fleetplane.domains.boards.agent.gpio.chip import LineDirection
from fleetplane.gen.pi_agent import pi_agent_pb2 as pi

PLAIN = {**LOCAL, "plaintext": "127.0.0.1:0"}
INVALID_ARGUMENT, PERMISSION_DENIED, FAILED_PRECONDITION, UNIMPLEMENTED, UNAVAILABLE = 3, 7, 9, 12, 14


@pytest.fixture
async def node(tmp_path: Path) -> AsyncIterator[NodeRig]:
    async with node_rig(tmp_path, None, config=configured(listen=PLAIN)) as rig:
        yield rig


@pytest.fixture
async def client(node: NodeRig) -> AsyncIterator[OriginalClient]:
    async with dial(node.plain_address) as channel:
        yield OriginalClient(channel)


def test_the_requests_are_what_the_contract_says() -> None:
    assert signed(1, 18) + signed(2, 1) == pi.WriteGPIOPinRequest(pin=18, value=1).SerializeToString()
    assert signed(1, 18) + signed(2, 0) == pi.WriteGPIOPinRequest(pin=18).SerializeToString()
    assert signed(1, -1) == pi.ReadGPIOPinRequest(pin=-1).SerializeToString()
    assert signed(1, 1) + data(2, b"ab") == pi.SPIWriteRequest(channel=1, data=b"ab").SerializeToString()


async def test_the_whole_demonstration_runs(node: NodeRig, client: OriginalClient) -> None:
    assert await client.demo(18) == [
        "health ok",
        "configured True",
        "read 1",
        "read 0",
        "read 1",
        "pwm True",
        "pin 18 direction 2",
    ]
    assert node.copper.wires[18].consumer == "fleetplane"


async def test_the_controller_sets_and_gets_pins(node: NodeRig, client: OriginalClient) -> None:
    controller = OriginalController(client)
    assert await controller.set(23, 1) == 1
    assert await controller.get(23) == 1
    assert node.copper.wires[23].level() == 1
    assert [method for method, _ in client.sent] == [
        "AgentHealth",
        "ConfigureGPIOPin",
        "AgentHealth",
        "WriteGPIOPin",
        "AgentHealth",
        "ReadGPIOPin",
    ]


async def test_health_has_the_original_words_and_real_figures(client: OriginalClient) -> None:
    health = await client.health()
    assert health[1] == b"ok"
    assert health[3] == b"test"
    assert health[4].endswith(b"s")
    assert health[5] == 1


async def test_a_node_without_pins_says_so_and_still_serves(tmp_path: Path) -> None:
    from fleetplane.domains.boards.agent.gpio.drivers import SimulatedBoard

    copper = SimulatedBoard()
    copper.unplug()
    async with (
        node_rig(tmp_path, None, config=configured(listen=PLAIN), copper=copper) as rig,
        dial(rig.plain_address) as channel,
    ):
        client = OriginalClient(channel)
        health = await client.health()
        assert health[1] == b"gpio_unavailable"
        assert 5 not in health
        answer = await client.config(18, OUTPUT)
        assert 1 not in answer
        assert b"No such device" in answer[2]
        with pytest.raises(GrpcFailed) as failed:
            await client.read(18)
        assert failed.value.code in (FAILED_PRECONDITION, UNAVAILABLE)


async def test_configuring_answers_without_success_and_reading_with_a_status(client: OriginalClient) -> None:
    for pin, words in ((2, b"protected"), (14, b"protected"), (99, b"out of range"), (-1, b"out of range")):
        answer = await client.config(pin, OUTPUT)
        assert 1 not in answer
        assert words in answer[2]
    for call, code in (
        (client.read(2), PERMISSION_DENIED),
        (client.read(99), INVALID_ARGUMENT),
        (client.read(5), FAILED_PRECONDITION),
        (client.write(5, 1), FAILED_PRECONDITION),
    ):
        with pytest.raises(GrpcFailed) as failed:
            await call
        assert failed.value.code == code


async def test_values_above_nought_are_high_and_repeated_as_they_came(
    node: NodeRig, client: OriginalClient
) -> None:
    await client.config(18, OUTPUT)
    for value, level in ((7, 1), (0, 0), (1, 1), (-3, 0)):
        answer = await client.write(18, value)
        assert answer.get(2, 0) == value & (1 << 64) - 1
        assert node.copper.wires[18].level() == level


async def test_an_input_is_read_with_its_pull_and_never_written(
    node: NodeRig, client: OriginalClient
) -> None:
    await client.config(17, INPUT, PULL_UP)
    assert (await client.read(17))[2] == 1
    node.copper.drive(17, 0)
    assert (await client.read(17)).get(2, 0) == 0
    with pytest.raises(GrpcFailed) as failed:
        await client.write(17, 1)
    assert failed.value.code == FAILED_PRECONDITION
    unspecified = await client.config(27, 0)
    assert unspecified[1] == 1
    assert node.copper.wires[27].direction is LineDirection.INPUT


async def test_a_thousand_calls_exhaust_nothing(client: OriginalClient) -> None:
    """The original stops at ten in half a minute."""
    await client.config(18, OUTPUT)
    async with asyncio.timeout(240):
        for number in range(1000):
            await client.write(18, number % 2)
    assert (await client.read(18))[2] == 1


async def test_waveforms_work_or_say_why_not(client: OriginalClient) -> None:
    answer = await client.pwm(18, 500, 25)
    assert (answer[1], answer[3], answer[4], answer[5]) == (1, 18, 500, 25)
    for frequency, duty in ((0, 50), (40_001, 50), (100, 101), (100, -1)):
        refused = await client.pwm(18, frequency, duty)
        assert 1 not in refused
        assert b"out of range" in refused[2]
    with_pin = await client.config(19, OUTPUT, frequency=100, duty=50)
    assert with_pin[1] == 1


async def test_the_list_shows_what_pins_show_now(node: NodeRig, client: OriginalClient) -> None:
    await client.config(17, INPUT)
    await client.config(18, OUTPUT)
    await client.write(18, 1)
    node.copper.drive(17, 1)
    listed = await client.pins()
    assert [(one[1], one[2], one.get(4, 0)) for one in listed] == [(17, 1, 1), (18, 2, 1)]


async def test_measurements_are_nested_and_come_every_interval(client: OriginalClient) -> None:
    now = await client.call("GetSystemMetrics", b"")
    cpu, memory = fields_of(now[1])[1], fields_of(fields_of(now[1])[2])
    assert 0.0 <= dict(fields(cpu)).get(1, 0.0) <= 100.0
    assert memory[1] > 2**20
    processes = fields_of(fields_of(now[1])[7])
    assert processes[1] >= processes.get(2, 0) + processes.get(3, 0) > 0
    count = 0
    async with asyncio.timeout(60):
        async for sample in client.metrics(1):
            assert 2 in sample
            count += 1
            if count == 2:
                break


async def test_the_system_is_described_as_it_is(client: OriginalClient) -> None:
    import os
    import platform

    info = await client.call("GetSystemInfo", b"")
    assert info[1].decode() == platform.node()
    assert info[3].decode() == platform.machine()
    assert info[4] == os.cpu_count()
    assert info[7].decode() == platform.release()


async def test_buses_are_reached_within_limits(client: OriginalClient) -> None:
    echoed = await client.call("SPIExchange", data(2, b"\x9f\x00\x01"))
    assert echoed[1] == b"\x9f\x00\x01"
    assert (await client.call("SPIRead", signed(2, 3)))[1] == b"\0\0\0"
    assert (await client.call("SPIWrite", data(2, b"x")))[1] == 1
    address = signed(1, 1) + signed(2, 0x50)
    assert (await client.call("I2CWriteRegister", address + signed(3, 16) + data(4, b"abc")))[1] == 1
    assert (await client.call("I2CReadRegister", address + signed(3, 16) + signed(4, 3)))[1] == b"abc"
    refused = await client.call("I2CWrite", signed(2, 0x50) + data(3, b"x"))  # bus 0 is kept
    assert 1 not in refused
    assert b"not open" in refused[2]
    nobody = await client.call("I2CWrite", signed(1, 1) + signed(2, 0x20) + data(3, b"x"))
    assert 1 not in nobody
    with pytest.raises(GrpcFailed) as failed:
        await client.call("I2CRead", signed(1, 1) + signed(2, 0x20) + signed(3, 1))
    assert failed.value.code == UNAVAILABLE
    with pytest.raises(GrpcFailed) as failed:
        await client.call("SPIRead", signed(2, 5000))
    assert failed.value.code == INVALID_ARGUMENT


async def test_in_plain_text_there_is_nothing_else(client: OriginalClient) -> None:
    for path in ("/NodeAgent/ExecuteCommand", "/NodeAgent/StreamLogs", "/NodeAgent/ControlGPIO"):
        stream = client.channel.open(path, CALL_TIMEOUT)
        await stream.send(b"", end=True)
        with pytest.raises(GrpcFailed) as failed:
            await stream.single()
        assert failed.value.code == UNIMPLEMENTED


async def test_pings_are_answered_however_many(client: OriginalClient) -> None:
    for _ in range(20):
        client.channel.ping()
    await client.health()
    async with asyncio.timeout(60):
        while client.channel.pongs < 20:  # which need not come before the answer
            await asyncio.sleep(0.01)
    assert client.channel.pongs == 20
    assert not client.channel.leaving


async def test_garbage_is_refused_and_the_next_call_works(client: OriginalClient) -> None:
    with pytest.raises(GrpcFailed):
        await client.raw("WriteGPIOPin", b"\xff\xff\xff")
    assert (await client.health())[1] == b"ok"


async def test_pins_are_safe_when_the_agent_stops(tmp_path: Path) -> None:
    config = configured(
        listen=PLAIN, gpio={"driver": "simulated", "pins": [{"pin": 18, "safe_state": "low"}]}
    )
    async with node_rig(tmp_path, None, config=config) as rig, dial(rig.plain_address) as channel:
        client = OriginalClient(channel)
        for pin in (18, 23):
            await client.config(pin, OUTPUT)
            await client.write(pin, 1)
    assert [rig.copper.wires[pin].consumer for pin in (18, 23)] == [None, None]
    assert rig.copper.wires[18].history[-1] == 0
    assert rig.copper.wires[23].direction is LineDirection.INPUT
