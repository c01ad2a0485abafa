"""The package-less messages have the wire of the original ones wherever both mean the same."""

from __future__ import annotations

from typing import Any

import pytest
from google.protobuf.message import Message
from google.protobuf.timestamp_pb2 import Timestamp

from fleetplane.gen.boards import boards_pb2 as boards
from fleetplane.gen.pi_agent import pi_agent_pb2 as pi_agent
from fleetplane.gen.pi_controller import pi_controller_pb2 as pi_controller

NOON = Timestamp(seconds=1_800_000_000, nanos=5)

CLUSTER = pi_controller.Cluster(
    id=3,
    name="lab",
    status=pi_controller.CLUSTER_STATUS_ACTIVE,
    nodes=[pi_controller.Node(id=9, cluster_id=3)],
)
COUNTERS: dict[str, Any] = {
    "bytes_sent": 1,
    "bytes_recv": 2**40,
    "packets_sent": 3,
    "packets_recv": 4,
    "err_in": 5,
    "err_out": 6,
    "drop_in": 7,
    "drop_out": 8,
}
MACHINE: dict[str, Any] = {
    "name": "raspberry-pi-dca632010203",
    "ip_address": "10.0.0.7",
    "mac_address": "dc:a6:32:01:02:03",
    "role": pi_controller.NODE_ROLE_WORKER,
    "architecture": "arm64",
    "model": "raspberry-pi",
    "serial_number": "10000000abcdef01",
    "cpu_cores": 4,
    "memory": 4 << 30,
}

EQUALITIES: list[tuple[str, Message, Message]] = [
    (
        "an interface",
        boards.NetworkInterface(name="eth0", **COUNTERS),
        pi_agent.NetworkMetrics(interface="eth0", **COUNTERS),
    ),
    (
        "driving a pin high",
        boards.GPIORequest(pin=18, state=boards.GPIORequest.HIGH),
        pi_agent.WriteGPIOPinRequest(pin=18, value=1),
    ),
    ("driving a pin low", boards.GPIORequest(pin=18), pi_agent.WriteGPIOPinRequest(pin=18, value=0)),
    (
        "pull and PWM of a pin",
        boards.GPIORequest(
            pin=18, pull_mode=pi_agent.AGENT_GPIO_PULL_MODE_UP, pwm_frequency=1000, pwm_duty_cycle=40
        ),
        pi_agent.ConfigureGPIOPinRequest(
            pin=18, pull_mode=pi_agent.AGENT_GPIO_PULL_MODE_UP, pwm_frequency=1000, pwm_duty_cycle=40
        ),
    ),
    (
        "the answer to PWM",
        boards.GPIOResponse(
            success=True, message="m", pin=18, pwm_frequency=1000, pwm_duty_cycle=40, timestamp=NOON
        ),
        pi_agent.SetGPIOPWMResponse(
            success=True, message="m", pin=18, frequency=1000, duty_cycle=40, configured_at=NOON
        ),
    ),
    (
        "the answer to a configuration",
        boards.GPIOResponse(success=True, message="done"),
        pi_agent.ConfigureGPIOPinResponse(success=True, message="done"),
    ),
    (
        "a node's health",
        boards.HealthStatus(
            status="ok", timestamp=NOON, version="1", uptime="2s", gpio_available=True, capabilities=["gpio"]
        ),
        pi_agent.AgentHealthResponse(
            status="ok", timestamp=NOON, version="1", uptime="2s", gpio_available=True, capabilities=["gpio"]
        ),
    ),
    (
        "a registration",
        boards.NodeRegistration(cluster_id=0, **MACHINE),
        pi_controller.CreateNodeRequest(cluster_id=0, **MACHINE),
    ),
    (
        "the outcome of a registration",
        boards.RegistrationResponse(success=True, message="m"),
        pi_controller.ProvisionNodeResponse(success=True, message="m"),
    ),
    (
        "clusters",
        boards.ClusterStateResponse(clusters=[CLUSTER], total_count=1),
        pi_controller.ListClustersResponse(clusters=[CLUSTER], total_count=1),
    ),
    (
        "asking for provisioning",
        boards.ProvisioningRequest(node_id=7, cluster_id=3),
        pi_controller.ProvisionNodeRequest(id=7, cluster_id=3),
    ),
    (
        "the answer to provisioning",
        boards.ProvisioningResponse(success=True, message="m"),
        pi_controller.ProvisionNodeResponse(success=True, message="m"),
    ),
    (
        "a report of health",
        boards.HealthReport(
            id=7, status=pi_controller.NODE_STATUS_READY, os_version="12", kernel_version="6.6"
        ),
        pi_controller.UpdateNodeRequest(
            id=7, status=pi_controller.NODE_STATUS_READY, os_version="12", kernel_version="6.6"
        ),
    ),
    ("nothing", boards.Empty(), pi_agent.AgentHealthRequest()),
]


@pytest.mark.parametrize(
    ("ours", "theirs"), [row[1:] for row in EQUALITIES], ids=[row[0] for row in EQUALITIES]
)
def test_shared_fields_are_the_same_bytes(ours: Message, theirs: Message) -> None:
    there, back = type(theirs)(), type(ours)()
    there.ParseFromString(ours.SerializeToString())
    back.ParseFromString(theirs.SerializeToString())

    assert ours.SerializeToString(deterministic=True) == theirs.SerializeToString(deterministic=True)
    assert there == theirs
    assert back == ours


def test_flat_metrics_have_the_published_numbers() -> None:
    flat = boards.SystemMetrics(cpu_usage=1.0, memory_usage=2.0, temperature=3.0, disk_usage=4.0)

    # Field n, wire type 1 (64 bit): n << 3 | 1.
    assert flat.SerializeToString(deterministic=True)[0::9] == bytes([0x09, 0x11, 0x19, 0x21])
    assert boards.SystemMetrics.DESCRIPTOR.fields_by_name["interfaces"].number == 5


def test_flat_metrics_read_as_nested_ones_are_silently_empty() -> None:
    flat = boards.SystemMetrics(cpu_usage=15.2, memory_usage=40.0, temperature=51.0, disk_usage=70.0)
    nested = pi_agent.SystemMetrics()

    nested.ParseFromString(flat.SerializeToString())

    assert nested.ListFields() == []


def test_a_pin_s_state_has_no_presence_and_so_absent_means_low_and_write() -> None:
    request = boards.GPIORequest.FromString(boards.GPIORequest(pin=4).SerializeToString())

    assert request.state == boards.GPIORequest.LOW
    assert request.action == boards.GPIORequest.UNSPECIFIED


def test_the_documented_services_have_no_package() -> None:
    services = boards.DESCRIPTOR.services_by_name

    assert {service.full_name for service in services.values()} == {"NodeAgent", "ControlPlane"}
    assert [method.name for method in services["ControlPlane"].methods] == [
        "RegisterNode",
        "SyncClusterState",
        "RequestProvisioning",
        "ReportHealth",
    ]


def test_no_level_or_state_is_a_name_of_the_whole_world() -> None:
    assert list(boards.DESCRIPTOR.enum_types_by_name) == []


def test_the_original_controller_s_methods_are_all_there() -> None:
    service = pi_controller.DESCRIPTOR.services_by_name["PiControllerService"]

    assert len(service.methods) == 37
    assert service.methods_by_name["StreamAgentMetrics"].client_streaming
    assert service.methods_by_name["StreamGPIOReadings"].server_streaming


def test_the_original_agent_s_methods_are_all_there() -> None:
    service = pi_agent.DESCRIPTOR.services_by_name["PiAgentService"]

    assert len(service.methods) == 16
    assert service.methods_by_name["StreamSystemMetrics"].server_streaming
