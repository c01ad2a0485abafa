"""Agents and operators of instances at a server that stands by have everything they have elsewhere."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import grpc
import pytest
from google.protobuf.empty_pb2 import Empty
from grpc_health.v1 import health_pb2, health_pb2_grpc
from support.instances.agent_at_standby import Place, agent_at_standby
from support.shared.cli_runner import execute
from support.shared.postgres_server import PostgresServer

from fleetplane.gen.nstance.v1 import operator_pb2, operator_pb2_grpc

SECONDS = 60.0


@pytest.mark.timeout(600)
def test_an_agent_at_a_standby_gets_its_files_and_is_heard_by_all(
    tmp_path: Path, postgres: PostgresServer
) -> None:
    with agent_at_standby(tmp_path, postgres) as place:
        environment_file = place.received("worker.env")
        place.received("worker.crt")
        assert "blue" in environment_file.read_text()
        place.all_know_that_it_is_well()
        place.until(lambda: _was_heard(place.data))
        place.configure("green")
        place.until(lambda: "green" in environment_file.read_text())
        operators_are_served_as_elsewhere(place, tmp_path / "identity")


def _was_heard(data: Path) -> bool:
    """Whether the active server knows of a report, all of which went to the other one."""
    listed = execute("instances", "list", "--data-dir", str(data), "-o", "json")
    assert listed.code == 0, listed.err
    return any(item["last_seen"] for item in json.loads(listed.out))


def operators_are_served_as_elsewhere(place: Place, identity: Path) -> None:
    """An operator who has enrolled at the standby, and speaks the protocol of the original."""
    at_standby = ("--data-dir", str(place.standby_data))
    made = execute("instances", "operator-identity", "--output-dir", str(identity), *at_standby)
    assert made.code == 0, made.err
    names = ("ca.crt", "identity.key", "identity.crt")
    trust = grpc.ssl_channel_credentials(*((identity / name).read_bytes() for name in names))
    with (
        grpc.secure_channel(place.operator, trust) as standby,
        grpc.secure_channel(place.active_operator, trust) as active,
    ):
        here, there = (operator_pb2_grpc.OperatorServiceStub(one) for one in (standby, active))
        (instance,) = (one for one in listed(at_standby) if one["state"] == "registered")
        status = operator_pb2.GetInstanceStatusRequest(instance_id=instance["instance_id"])
        asked = {"ListGroups": Empty(), "GetConfigStatus": Empty(), "GetInstanceStatus": status}
        for method, request in asked.items():
            answers = [getattr(one, method)(request, timeout=SECONDS) for one in (here, there)]
            if method == "GetInstanceStatus":  # the agent goes on reporting between the two
                for one in answers:
                    one.ClearField("last_seen")
            assert len({one.SerializeToString() for one in answers}) == 1, method
        health: Any = health_pb2_grpc.HealthStub(standby)
        asked_for = health_pb2.HealthCheckRequest(service="nstance.v1.OperatorService")
        assert health.Check(asked_for, timeout=SECONDS).status == health_pb2.HealthCheckResponse.SERVING
        endings = here.WatchInstances(Empty(), timeout=SECONDS)
        endings.initial_metadata()
        group = next(iter(here.ListGroups(Empty(), timeout=SECONDS).groups)).key
        created = here.CreateInstance(
            operator_pb2.CreateInstanceRequest(config=operator_pb2.InstanceConfig(group=group)),
            timeout=SECONDS,
        )
        assert created.status == "running"
        gone = operator_pb2.DeleteInstanceRequest(instance_id=created.instance_id)
        assert there.DeleteInstance(gone, timeout=SECONDS).status == "deleting"
        event = next(endings)
        assert (event.instance_id, event.status) == (created.instance_id, "deleting")


def listed(at: tuple[str, str]) -> list[dict[str, str]]:
    found = execute("instances", "list", *at, "-o", "json")
    assert found.code == 0, found.err
    items: list[dict[str, str]] = json.loads(found.out)
    return items
