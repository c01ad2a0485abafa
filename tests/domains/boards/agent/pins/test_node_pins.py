"""Pins and measurements of a node over mTLS: every action, every refusal, every fault."""

from __future__ import annotations

import errno
import time
from typing import Any

import grpc
import pytest
from support.boards.board_node_rig import NodeRig
from support.boards.boards_rig import until
from support.boards.node_calls import (
    CODE,
    CONFIGURE,
    HIGH,
    INPUT,
    LOW,
    OUTPUT,
    PWM,
    READ,
    RELEASE,
    failing,
    gpio,
)

from fleetplane.domains.boards.agent.gpio.chip import LineDirection
from fleetplane.gen.boards import boards_pb2 as pb
from fleetplane.gen.pi_agent import pi_agent_pb2 as pi


async def test_a_plain_write_claims_an_output_without_a_glitch(rig: NodeRig) -> None:
    node = await rig.node()
    answer = await node.ControlGPIO(gpio(state=HIGH))
    assert (answer.success, answer.pin, answer.state, answer.direction) == (True, 18, HIGH, OUTPUT)
    assert list(rig.copper.wires[18].history) == [1]
    low = await node.ControlGPIO(gpio())
    assert (low.success, low.state) == (True, LOW)


async def test_a_pin_that_was_only_read_may_be_written_next(rig: NodeRig) -> None:
    node = await rig.node()
    rig.copper.drive(18, 1)
    assert (await node.ControlGPIO(gpio(action=READ))).state == HIGH
    assert (await node.ControlGPIO(gpio(state=HIGH))).direction == OUTPUT
    assert list(rig.copper.wires[18].history)[-1] == 1
    await node.ControlGPIO(gpio(19, action=CONFIGURE))
    failure = await failing(node.ControlGPIO(gpio(19, state=HIGH)))
    assert (failure.code, failure.cause) == (CODE.FAILED_PRECONDITION, "input")
    assert (await node.ControlGPIO(gpio(19, state=HIGH, direction=OUTPUT))).success


async def test_every_action_does_what_it_says(rig: NodeRig) -> None:
    node = await rig.node()
    made = await node.ControlGPIO(
        gpio(action=CONFIGURE, direction=INPUT, pull_mode=pi.AGENT_GPIO_PULL_MODE_UP)
    )
    assert (made.direction, made.pull_mode, made.state) == (INPUT, pi.AGENT_GPIO_PULL_MODE_UP, HIGH)
    wave = await node.ControlGPIO(gpio(action=PWM, pwm_frequency=200, pwm_duty_cycle=30))
    assert (wave.pwm_frequency, wave.pwm_duty_cycle, wave.reason) == (200, 30, "SOFTWARE_PWM")
    both = await node.ControlGPIO(
        gpio(19, action=CONFIGURE, direction=OUTPUT, pwm_frequency=100, pwm_duty_cycle=10)
    )
    assert both.pwm_frequency == 100
    await node.ControlGPIO(gpio(action=RELEASE))
    assert rig.copper.wires[18].consumer is None


@pytest.mark.parametrize(
    ("said", "code", "cause"),
    [
        ({"pin": 2, "state": HIGH}, CODE.PERMISSION_DENIED, "protected"),
        ({"pin": 14, "action": READ}, CODE.PERMISSION_DENIED, "protected"),
        ({"pin": 28, "state": HIGH}, CODE.INVALID_ARGUMENT, "range"),
        ({"pin": -1, "action": READ}, CODE.INVALID_ARGUMENT, "range"),
        ({"pin": 18, "action": PWM}, CODE.INVALID_ARGUMENT, "range"),
        ({"pin": 18, "action": PWM, "pwm_frequency": 50_000}, CODE.INVALID_ARGUMENT, "range"),
        ({"pin": 18, "action": PWM, "pwm_frequency": 20_000}, CODE.FAILED_PRECONDITION, "software-limit"),
        ({"pin": 18, "action": 9}, CODE.INVALID_ARGUMENT, ""),
        ({"pin": 18, "state": 2}, CODE.INVALID_ARGUMENT, ""),
        ({"pin": 18, "state": HIGH, "direction": INPUT}, CODE.INVALID_ARGUMENT, ""),
        ({"pin": 18, "state": HIGH, "pull_mode": 2}, CODE.INVALID_ARGUMENT, ""),
        ({"pin": 18, "state": HIGH, "direction": 7}, CODE.INVALID_ARGUMENT, ""),
        ({"pin": 18, "state": HIGH, "lease_id": "x" * 200}, CODE.INVALID_ARGUMENT, "range"),
        ({"pin": 18, "state": HIGH, "request_id": "x" * 200}, CODE.INVALID_ARGUMENT, ""),
        ({"pin": 2, "state": HIGH, "dry_run": True}, CODE.PERMISSION_DENIED, "protected"),
        ({"pin": 18, "action": PWM, "dry_run": True}, CODE.INVALID_ARGUMENT, "range"),
    ],
)
async def test_what_is_refused_says_why(
    rig: NodeRig, said: dict[str, Any], code: grpc.StatusCode, cause: str
) -> None:
    failure = await failing((await rig.node()).ControlGPIO(pb.GPIORequest(**said)))
    assert (failure.code, failure.cause) == (code, cause)
    assert failure.words
    assert all(wire.consumer is None for wire in rig.copper.wires)


async def test_every_fault_of_the_hardware_reaches_the_caller_as_what_it_is(rig: NodeRig) -> None:
    node, pi_node = await rig.node(), await rig.pi()
    rig.copper.occupy(18, "another program")
    busy = await failing(node.ControlGPIO(gpio(state=HIGH)))
    assert (busy.code, busy.cause, busy.reason) == (CODE.FAILED_PRECONDITION, "busy", "LINE_BUSY")
    assert "another program" in busy.words
    alias = await pi_node.ConfigureGPIOPin(pi.ConfigureGPIOPinRequest(pin=18, direction=OUTPUT))
    assert not alias.success
    assert "another program" in alias.message

    rig.copper.fail(19, errno.EACCES)
    denied = await failing(node.ControlGPIO(gpio(19, state=HIGH)))
    assert (denied.code, denied.cause) == (CODE.PERMISSION_DENIED, "os")

    rig.copper.fail(20, errno.EIO)
    broken = await failing(node.ControlGPIO(gpio(20, state=HIGH)))
    assert (broken.code, broken.cause) == (CODE.UNAVAILABLE, "io")

    await node.ControlGPIO(gpio(21, state=HIGH))
    rig.copper.unplug()
    missing = await failing(node.ControlGPIO(gpio(21)))
    assert (missing.code, missing.cause) == (CODE.UNAVAILABLE, "missing")
    health = await node.HealthCheck(pb.Empty())
    assert (health.status, health.gpio_available) == ("DEGRADED", False)
    assert [check.status for check in health.checks if check.name == "gpio"] == ["DEGRADED"]

    rig.copper.plug()
    assert (await node.ControlGPIO(gpio(22, state=HIGH))).success


async def test_a_lease_keeps_others_out_until_it_ends(rig: NodeRig) -> None:
    node, other = await rig.node(), await rig.node_of("boards.operator")
    long, short = ([("fleetplane-lease-seconds", seconds)] for seconds in ("3600", "0.3"))
    await node.ControlGPIO(gpio(state=HIGH, lease_id="mine"), metadata=long)

    failure = await failing(other.ControlGPIO(gpio()))
    assert (failure.code, failure.cause) == (CODE.ABORTED, "leased")
    assert (await other.ControlGPIO(gpio(action=READ))).state == HIGH

    await node.ControlGPIO(gpio(19, state=HIGH, lease_id="mine too"), metadata=short)
    await until(
        lambda: rig.copper.wires[19].direction is LineDirection.INPUT
    )  # safe, when nobody answers for it
    assert (await other.ControlGPIO(gpio(19, state=HIGH))).success
    events = [entry["event"] for entry in rig.audited()]
    assert {"lease_granted", "lease_conflict", "lease_expired", "safe_state_applied"} <= set(events)


@pytest.mark.parametrize("seconds", ["0", "-1", "nan", "inf", "soon", "100000"])
async def test_a_lease_for_no_time_or_for_ever_is_none(rig: NodeRig, seconds: str) -> None:
    node = await rig.node()
    call = node.ControlGPIO(gpio(state=HIGH, lease_id="x"), metadata=[("fleetplane-lease-seconds", seconds)])
    assert (await failing(call)).code is CODE.INVALID_ARGUMENT


async def test_a_rehearsal_touches_nothing(rig: NodeRig) -> None:
    node = await rig.node()
    answer = await node.ControlGPIO(gpio(state=HIGH, dry_run=True))
    assert (answer.success, answer.reason) == (True, "DRY_RUN")
    assert rig.copper.wires[18].consumer is None


async def test_a_request_with_an_id_is_done_once(rig: NodeRig) -> None:
    node = await rig.node()
    first = await node.ControlGPIO(gpio(state=HIGH, request_id="r1"))
    await node.ControlGPIO(gpio(state=LOW))
    again = await node.ControlGPIO(gpio(state=HIGH, request_id="r1"))
    assert again == first
    assert rig.copper.wires[18].level() == 0
    other = await failing(node.ControlGPIO(gpio(19, state=HIGH, request_id="r1")))
    assert other.code is CODE.INVALID_ARGUMENT
    refused = await failing(node.ControlGPIO(gpio(2, state=HIGH, request_id="r2")))
    assert refused.code is CODE.PERMISSION_DENIED
    assert (await node.ControlGPIO(gpio(3 + 20, state=HIGH, request_id="r2"))).success  # nothing was done


async def test_measurements_answer_at_once_flat_and_in_detail(rig: NodeRig) -> None:
    node = await rig.node()
    await node.GetSystemMetrics(pb.Empty())
    took = []
    for _ in range(20):
        started = time.perf_counter()
        metrics = await node.GetSystemMetrics(pb.Empty())
        took.append(time.perf_counter() - started)
    assert min(took) < 0.15, "nothing is measured for the one who asks"
    assert 0 <= metrics.cpu_usage <= 100
    assert 0 < metrics.memory_usage <= 100
    assert metrics.detail.memory.total_bytes > 0
    assert metrics.detail.processes.sleeping + metrics.detail.processes.running > 0
    assert "temperature" in metrics.unavailable or metrics.temperature
    nested = await (await rig.pi()).GetSystemMetrics(pi.GetSystemMetricsRequest())
    assert nested.metrics.memory.total_bytes == metrics.detail.memory.total_bytes
    # One read as the other shows nothing at all, so they must never be mixed up.
    assert not pi.GetSystemMetricsResponse.FromString(metrics.SerializeToString()).metrics.HasField("memory")


async def test_a_servers_order_that_a_newer_one_overtook_is_refused(rig: NodeRig) -> None:
    server, operator = await rig.node(), await rig.node_of("boards.operator")

    async def order(node: Any, place: str, **said: Any) -> Any:
        return await node.ControlGPIO(gpio(**said), metadata=[("fleetplane-order", place)])

    await order(server, "l/7", state=HIGH)
    assert (await order(server, "l/9", state=LOW, dry_run=True)).reason == "DRY_RUN"
    for said in ({"state": LOW}, {"action": RELEASE}, {"action": PWM, "pwm_frequency": 9}):
        failure = await failing(order(server, "l/6", **said))
        assert (failure.code, failure.cause) == (CODE.ABORTED, "older")
    assert list(rig.copper.wires[18].history) == [1]
    assert (await order(server, "l/6", action=READ)).state == HIGH
    await order(server, "l/7", action=RELEASE)
    assert (await failing(order(server, "l/6", state=LOW))).cause == "older"  # also once it is given up
    await order(server, "restored/1", state=LOW)
    assert (await failing(order(server, "not a place", state=LOW))).code is CODE.INVALID_ARGUMENT
    await order(operator, "l/1", state=HIGH)  # only servers have an order among themselves
    await order(operator, "not a place", state=LOW)
