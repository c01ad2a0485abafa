"""What boards promise, point by point: the server's side, over gRPC, REST and WebSocket."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import asyncssh
import grpc
import pytest
from support.boards.boards_processes import BoardProcess, Certified, Place, refused
from support.boards.boards_processes import until as processes_until
from support.boards.boards_rig import BOSS, boards_rig, until
from support.boards.ssh_lab import ssh_lab
from support.shared.server_process import run_server
from websockets.sync.client import ClientConnection, connect

from fleetplane.domains.boards.core import BoardOptions
from fleetplane.domains.boards.ports import ProvisioningAnswer, ProvisioningState
from fleetplane.domains.boards.provisioning.engine import told
from fleetplane.domains.boards.provisioning.operations import is_over
from fleetplane.domains.boards.rules import BoardFacts
from fleetplane.gen.boards import boards_pb2 as pb
from fleetplane.gen.boards import boards_pb2_grpc
from fleetplane.gen.pi_controller import pi_controller_pb2 as pi
from fleetplane.gen.pi_controller import pi_controller_pb2_grpc

ROOT = Path(__file__).resolve().parents[3]


def test_8_certificates_decide_everywhere_and_plain_text_stays_on_this_machine(
    place: Place, board: BoardProcess, controller: Certified, tmp_path: Path
) -> None:
    outside = grpc.ssl_channel_credentials(controller.trust)
    with grpc.secure_channel(place.address, outside) as channel:
        control: Any = boards_pb2_grpc.ControlPlaneStub(channel)
        with refused(grpc.StatusCode.UNAUTHENTICATED):
            control.ReportHealth(pb.HealthReport(id=board.number))
        with refused(grpc.StatusCode.UNAUTHENTICATED):
            pi_controller_pb2_grpc.PiControllerServiceStub(channel).ListNodes(pi.ListNodesRequest())
    with board.channel(None) as channel, refused(grpc.StatusCode.UNAVAILABLE):
        boards_pb2_grpc.NodeAgentStub(channel).HealthCheck(pb.Empty())

    member = place.certified("left-behind", purpose="board")
    with board.channel(member) as channel, refused(grpc.StatusCode.PERMISSION_DENIED):
        boards_pb2_grpc.NodeAgentStub(channel).HealthCheck(pb.Empty())  # a board is nobody's master
    with member.channel(place.address) as channel:
        control = boards_pb2_grpc.ControlPlaneStub(channel)
        control.ReportHealth(pb.HealthReport(status=pi.NODE_STATUS_READY))
        with refused(grpc.StatusCode.PERMISSION_DENIED):
            control.ReportHealth(pb.HealthReport(id=board.number))  # the certificate says who it is
        place.did("DELETE", f"/nodes/{member.number}")
        with refused(grpc.StatusCode.UNAUTHENTICATED, grpc.StatusCode.UNAVAILABLE):
            control.ReportHealth(pb.HealthReport(status=pi.NODE_STATUS_READY))

    everywhere = ["--only", "boards", "--set", "listeners.boards-plain.addresses=0.0.0.0:0"]
    refusing = run_server(tmp_path / "data", everywhere)
    assert refusing.returncode != 0
    assert "allow_remote" in refusing.stderr


def test_9_nobody_gets_in_by_default_registers_himself_or_is_refused_for_a_word(place: Place) -> None:
    for name, password in (("admin", "admin123"), ("admin", "admin"), ("pi", "raspberry")):
        login = {"username": name, "password": password}
        assert place.ask("POST", "/auth/login", login, token="").status == 401
    stranger = {"username": "eve", "password": "correct horse battery", "role": "admin"}
    assert place.ask("POST", "/auth/register", stranger, token="").status in (401, 403)
    viewer = place.role("boards.viewer")
    assert place.ask("POST", "/auth/register", stranger, token=viewer).status == 403

    origin = place.ask("GET", "/nodes", headers={"origin": "https://evil.example"}, token=viewer)
    assert origin.status == 200
    assert "access-control-allow-origin" not in {name.lower() for name in origin.headers}

    described = {"name": "selection", "description": "select; drop -- update script's"}
    number = place.did("POST", "/clusters", described)["id"]
    assert place.did("GET", f"/clusters/{number}")["description"] == described["description"]
    assert place.ask("GET", "/nodes?name=select%20script;--'").json["total"] == 0


async def test_10_provisioning_trusts_no_unknown_host_goes_on_where_it_failed_and_quotes(
    tmp_path: Path,
) -> None:
    with ssh_lab(tmp_path / "ssh") as lab:
        lab.write("controllers", "cpuset cpu io pids\n")  # as on a fresh board: no memory controller yet
        options = BoardOptions(plain=True, provisioning=lab.policy)
        async with boards_rig(tmp_path, places=lab.places, options=options) as rig:
            member, control = await rig.join("p", ip_address="127.0.0.1"), (await rig.controller()).control
            await rig.core.boards.update(member.number, BoardFacts(ip_address="127.0.0.1"), actor=BOSS)
            credentials = rig.domain.provisioning.credentials
            stranger = asyncssh.generate_private_key("ssh-ed25519").export_public_key().decode()
            wrong = lab.credential(known_hosts=f"[127.0.0.1]:{lab.port} {stranger}")
            await credentials.put("lab", wrong, actor=BOSS)
            odd = "node-label=team=$(reboot); `reboot` 'x"
            order = pb.ProvisioningRequest(
                node_id=member.number,
                role=pi.NODE_ROLE_MASTER,
                credential_ref="lab",
                request_id="r1",
                k3s_config={**lab.options, "extra_args": odd},
            )

            operations = rig.domain.provisioning.operations

            async def ended() -> ProvisioningAnswer:
                asked = await control.RequestProvisioning(order)
                name = asked.operation_id  # known at once: the answer does not wait for the end
                await until(lambda: is_over(operations.get(name)), seconds=60)
                return told(operations.get(name), "")

            failed = await ended()
            assert failed.state is ProvisioningState.FAILED
            assert "key of 127.0.0.1 is not one that is known" in failed.reason
            assert lab.calls() == [], "nothing was run on it"

            await credentials.put("lab", lab.credential(), actor=BOSS)
            again = await ended()
            assert (again.operation_id, again.state) == (failed.operation_id, ProvisioningState.READY)
            assert f"--{odd}" in lab.read("arguments").splitlines()
            assert "cgroup_enable=memory" in lab.read("cmdline.txt")
            assert lab.calls().count("reboot") == 1, "for the memory controller, and not by the label"


def test_11_both_dialects_of_the_socket_tell_what_really_happens(place: Place, board: BoardProcess) -> None:
    web = place.server.web.replace("http://", "ws://")
    body = {"name": "lamp", "node_id": board.number, "pin_number": 23, "direction": "output"}
    device = place.did("POST", "/gpio", body)["data"]["id"]
    place.did("POST", f"/gpio/{device}/write", {"value": 0})
    cluster = place.did("POST", "/clusters", {"name": "watched"})["id"]
    auth = {"authorization": f"Bearer {place.token}"}
    with (
        connect(f"{web}/ws?v=events", additional_headers=auth, proxy=None, open_timeout=60) as events,
        connect(f"{web}/ws", additional_headers=auth, proxy=None, open_timeout=60) as envelope,
    ):
        assert json.loads(envelope.recv(timeout=60))["type"] == "pong"
        for topic in ("gpio", "nodes", "clusters"):
            envelope.send(json.dumps({"type": "subscribe", "payload": {"topic": topic}}))
        envelope.send(json.dumps({"type": "ping", "request_id": "7"}))
        assert heard(envelope, "pong")["request_id"] == "7"

        place.did("POST", f"/gpio/{device}/write", {"value": 1})
        heard(events, "gpio.state.changed", state="high")
        heard(envelope, "gpio_reading", value=1)
        place.did("POST", f"/clusters/{cluster}/nodes", {"node_id": board.number})
        heard(events, "cluster.node.added", cluster_id=cluster)
        heard(envelope, "cluster_status", nodes_total=1)
        place.did("DELETE", f"/clusters/{cluster}/nodes/{board.number}")
        heard(events, "cluster.node.removed", node_id=board.number)
        member = place.certified("seen-coming", purpose="board")
        heard(events, "node.discovered", node_id=member.number)
        place.did("PUT", f"/nodes/{member.number}", {"status": "maintenance"})
        heard(events, "node.status.changed", node_id=member.number, status="maintenance")
        heard(envelope, "node_status", name="seen-coming")

        wanted = {"topic": "logs", "node_id": board.number, "sources": ["file:app"]}
        events.send(json.dumps({"type": "subscribe", "data": wanted}))
        said = processes_until(lambda: logged(place, events), "its log is told")
        assert said["data"]["message"] == "a line for the socket"


def logged(place: Place, events: ClientConnection) -> Any:
    """Another line, since nobody says from when on a log is followed; what is heard of it soon."""
    with (place.folder / "app.log").open("a") as log:
        log.write("a line for the socket\n")
    with contextlib.suppress(TimeoutError):
        return heard(events, "system.log.created", seconds=0.5)


def heard(socket: ClientConnection, type_: str, *, seconds: float = 60.0, **told: Any) -> Any:
    """The next of that type that tells this; the others are of what was before, and other tests' doings."""
    for _ in range(1000):
        said = json.loads(socket.recv(timeout=seconds))
        if said["type"] == type_ and told.items() <= (said.get("data") or said.get("payload") or {}).items():
            return said
    raise AssertionError(f"no {type_}")


@pytest.mark.skipif(
    shutil.which("h2load") is None or len(os.sched_getaffinity(0)) < 2,
    reason="the benchmarks need h2load and two cores",
)
def test_12_the_product_s_numbers_hold_with_boards_that_report_and_log() -> None:
    """The same script measures five hundred; here it is twenty, and no time counts."""
    command = [sys.executable, str(ROOT / "bench" / "run.py"), "--quick", "--only", "boards_fleet"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=280, check=False)
    assert done.returncode == 0, done.stderr
    verdicts = {
        row.split("|")[1].split(",")[0].strip(): row.rstrip(" |").endswith("not reached")
        for row in done.stdout.splitlines()
        if row.rstrip(" |").endswith("reached")
    }
    assert list(verdicts) == [
        "20 boards join",
        "20 boards reporting every 2 s",
        "And their logs followed over REST",
        "Lines missing without a word",
        "A pin driven over REST",
        "REST",
        "From a pin driven to its event on a WebSocket",
        "Memory of the server",
    ]
    promised = ("Lines missing without a word", "Memory of the server")
    assert {name: verdicts[name] for name in promised} == dict.fromkeys(promised, False), done.stdout
    lost = next(line for line in done.stdout.splitlines() if line.startswith("Lines missing without a word"))
    assert " 0 lines made" not in lost
    assert " 0 told to be dropped" not in lost, "some were to be dropped, to see that it is told"
