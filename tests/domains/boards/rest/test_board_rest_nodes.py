"""REST over pins, programs, logs and figures, with a real agent at the other end."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from support.boards.board_node_rig import NodeRig, configured, node_rig
from support.boards.boards_rig import BoardsRig, until
from support.boards.boards_web import BoardsWeb, Json

from fleetplane.domains.boards.inventory.boards import status_of

PIN = 17


@pytest.fixture
async def node(rig: BoardsRig, tmp_path: Path) -> AsyncIterator[NodeRig]:
    (tmp_path / "app.log").write_text("".join(f"line {number}\n" for number in range(5)))
    config = configured(
        logs={"files": {"app": str(tmp_path / "app.log")}}, commands={"diagnostics": True, "run_as": "nobody"}
    )
    async with node_rig(tmp_path, rig, config=config) as made:
        await until(lambda: status_of(rig.board(1)).port == made.ports.agent_port)
        yield made


async def device(web: BoardsWeb, **more: Any) -> Json:
    body = {"name": "lamp", "node_id": 1, "pin_number": PIN, "direction": "output", **more}
    made: Json = (await web.post("/gpio", body, role="operator"))["data"]
    return made


# Pins.


async def test_a_pin_is_taken_written_read_and_given_up(web: BoardsWeb, node: NodeRig) -> None:
    made = await device(web)
    assert (made["id"], made["status"], made["value"], made["device_type"]) == (1, "active", None, "digital")
    told = await web.post("/gpio/1/write", {"value": 1}, status=200, role="operator")
    assert (told["device_id"], told["pin"], told["value"]) == (1, PIN, 1)
    assert node.copper.wires[PIN].level() == 1, "the copper itself"
    assert (await web.post("/gpio/1/read", status=200, role="viewer"))["value"] == 1
    shown = await web.get("/nodes/1/gpio", role="viewer")
    assert (shown["count"], shown["node_id"], shown["gpio_devices"][0]["value"]) == (1, 1, 1)
    assert [one["id"] for one in (await web.get("/gpio?node_id=1&status=active"))["data"]] == [1]
    assert (await web.get("/gpio?device_type=pwm"))["total"] == 0
    assert await web.refused("DELETE", "/nodes/1") == 409, "a board with pins is not forgotten"

    assert web.rig.kernel.telemetry is not None
    await web.rig.kernel.telemetry.flush()  # otherwise written when the store of figures comes to it
    readings = (await web.get("/gpio/1/readings"))["readings"]
    assert {one["value"] for one in readings} == {1.0}
    await web.delete("/gpio/1")
    await until(lambda: web.rig.domain.nodes.devices.kept(1) is None)
    assert await web.refused("GET", "/gpio/1") == 404


@pytest.mark.parametrize(
    ("more", "status"),
    [
        ({"pin_number": 2}, 403),
        ({"pin_number": 99}, 400),
        ({"node_id": 9}, 404),
        ({"direction": "sideways"}, 400),
        ({"name": ""}, 400),
        ({"config": {"frequency": "fast"}}, 400),
    ],
)
async def test_a_pin_that_cannot_be_is_refused(web: BoardsWeb, more: Json, status: int) -> None:
    await web.post("/nodes", {"name": "pi-1"})
    body = {"name": "lamp", "node_id": 1, "pin_number": PIN, **more}
    assert await web.refused("POST", "/gpio", body) == status


async def test_two_devices_cannot_share_a_pin_and_an_input_is_not_written(web: BoardsWeb) -> None:
    await web.post("/nodes", {"name": "pi-1"})
    await device(web, direction="input")
    assert await web.refused("POST", "/gpio", {"name": "x", "node_id": 1, "pin_number": PIN}) == 409
    assert await web.refused("POST", "/gpio/1/write", {"value": 1}) == 409
    await web.put("/gpio/1", {"status": "inactive", "pull_mode": "up"})
    shown = (await web.get("/gpio/1"))["data"]
    assert (shown["status"], shown["pull_mode"]) == ("inactive", "up")
    assert await web.refused("POST", "/gpio/1/read") == 409
    assert await web.refused("PUT", "/gpio/1", {"status": "error"}) == 400


async def test_a_board_that_is_not_there_is_said_so(web: BoardsWeb) -> None:
    await web.post("/nodes", {"name": "pi-1"})
    await device(web)
    for method, path, body in (
        ("POST", "/gpio/1/write", {"value": 1}),
        ("GET", "/nodes/1/system", None),
        ("GET", "/nodes/1/health", None),
    ):
        assert await web.refused(method, path, body) == 503


async def test_a_reservation_keeps_others_out_and_is_its_holders_alone(web: BoardsWeb, node: NodeRig) -> None:
    await device(web)
    ann, bob = web.token("operator", name="ann"), web.token("operator", name="bob")
    body = {"client_id": "panel", "ttl": 60_000_000_000}
    told = await web.post("/gpio/1/reserve", body, status=200, token=ann)
    assert (told["gpio_id"], told["client_id"], told["reserved_by"]) == (1, "panel", "operator/ann#panel")
    held = (await web.get("/gpio/reservations", role="viewer"))["reservations"]
    assert [(one["pin_id"], one["pin_number"], one["reserved_by"]) for one in held] == [
        (1, PIN, "operator/ann#panel")
    ]
    assert held[0]["expires_at"] is not None

    write = {"value": 1}
    assert await web.refused("POST", "/gpio/1/write", write, token=bob) == 409
    stolen = {"value": 1, "client_id": "panel"}
    assert await web.refused("POST", "/gpio/1/write", stolen, token=bob) == 409, "a name is no proof"
    other = {"value": 1, "client_id": "another"}
    assert await web.refused("POST", "/gpio/1/write", other, token=ann) == 409
    await web.post("/gpio/1/write", write, status=200, token=ann)
    await web.post("/gpio/1/write", {"value": 0, "client_id": "panel"}, status=200, token=ann)
    assert await web.refused("POST", "/gpio/1/reserve", {"client_id": "panel"}, token=bob) == 409
    assert await web.refused("POST", "/gpio/1/release", {"client_id": "panel"}, token=bob) == 403
    await web.post("/gpio/1/release", {"client_id": "panel"}, status=200, token=ann)
    await web.post("/gpio/1/write", write, status=200, token=bob)
    assert await web.refused("POST", "/gpio/1/release", token=ann) == 409
    cleaned = await web.post("/gpio/reservations/cleanup", status=200)
    assert cleaned["cleaned_count"] == 0
    assert node.copper.wires[PIN].level() == 1


# Programs.


async def test_an_allowed_program_runs_and_is_answered_for(web: BoardsWeb, node: NodeRig) -> None:
    body = {"command": "uptime"}
    assert await web.refused("POST", "/nodes/1/exec", body, role="viewer") == 403
    told = await web.post("/nodes/1/exec", body, status=200, role="operator")
    assert (told["state"], told["success"], told["exit_code"]) == ("ok", True, 0)
    assert "load average" in told["stdout"]
    shown = (await web.get(f"/commands/{told['command_id']}", role="viewer"))["data"]
    assert (shown["command"], shown["requested_by"], shown["open"]) == ("uptime", "operator/boss", 0)
    assert shown["outcomes"][0]["node_id"] == 1
    assert any("uptime" in str(line) for line in node.audited())


async def test_what_a_board_does_not_allow_is_refused_there(web: BoardsWeb, node: NodeRig) -> None:
    told = await web.post("/nodes/1/exec", {"command": "rm", "args": ["-rf", "/"]}, status=200)
    assert (told["state"], told["success"]) == ("failed", False)
    assert "allow list" in told["message"]


async def test_a_selection_is_followed_board_by_board(web: BoardsWeb, node: NodeRig) -> None:
    await web.post("/nodes", {"name": "away"})
    started = await web.post("/exec", {"command": "uptime", "target": {"all": True}}, status=202)
    assert started["node_ids"] == [1, 2]
    events = await web.events(f"/commands/{started['command_id']}/events")
    outcomes = {data["node_id"]: data["state"] for kind, data in events if kind == "outcome"}
    assert outcomes == {1: "ok", 2: "undeliverable"}
    assert events[-1][0] == "end"
    assert events[-1][1]["outcomes_by_state"] == {"ok": 1, "undeliverable": 1}
    assert (await web.get("/commands"))["total"] == 1


async def test_a_command_that_waits_is_taken_back(web: BoardsWeb) -> None:
    await web.post("/nodes", {"name": "away"})
    body = {"command": "uptime", "target": {"node_ids": [1]}, "deliver_within_seconds": 600}
    started = await web.post("/exec", body, status=202)
    told = await web.post(f"/commands/{started['command_id']}/cancel", status=200)
    assert told["data"]["outcomes_by_state"] == {"cancelled": 1}


@pytest.mark.parametrize(
    ("body", "status"),
    [
        ({"command": "x", "target": {}}, 400),
        ({"command": "x", "target": {"node_ids": [9]}}, 404),
        ({"command": "x", "target": {"labels": {"room": "none"}}}, 400),
        ({"command": "", "target": {"all": True}}, 400),
        ({"command": "x", "target": {"all": True}, "timeout_seconds": 10**6}, 400),
        ({"command": "x", "target": {"all": True}, "deliver_within_seconds": -1}, 400),
        ({"target": {"all": True}}, 400),
    ],
)
async def test_a_command_that_means_nothing_is_refused(web: BoardsWeb, body: Json, status: int) -> None:
    await web.post("/nodes", {"name": "pi-1"})
    assert await web.refused("POST", "/exec", body) == status
    assert (await web.get("/commands"))["total"] == 0
    assert await web.refused("GET", "/commands/none") == 404


# Figures and logs.


async def test_a_board_tells_how_it_is_now_and_was(web: BoardsWeb, node: NodeRig) -> None:
    now = (await web.get("/nodes/1/system", role="viewer"))["data"]
    assert now["node_id"] == 1
    assert 0 <= now["cpu"]["usage_percent"] <= 100
    assert now["memory"]["total_bytes"] > 0
    assert isinstance(now["processes"]["total"], int)
    assert "power" in now["unavailable"] or now["power"] is not None
    health = (await web.get("/nodes/1/health", role="viewer"))["data"]
    assert health["status"] in ("OK", "DEGRADED")
    assert health["gpio_available"] is True

    async with asyncio.timeout(60):  # until its first report has come, and is written
        while "cpu_usage" not in (latest := (await web.get("/nodes/1/metrics", role="viewer"))["data"]):
            await asyncio.sleep(0.05)
    assert latest["memory_usage"]["value"] > 0
    over = await web.get("/nodes/1/metrics?series=memory_usage&step=60")
    assert (over["series"], over["step_seconds"]) == ("memory_usage", 60)
    assert over["points"][-1]["max"] > 0
    fleet = await web.get("/metrics")
    assert (fleet["total"], fleet["data"][0]["node_id"]) == (1, 1)
    for query in (
        "series=",
        "series=x&step=0",
        "series=x&from=yesterday",
        "series=x&from=2030-01-01T00:00:00Z",
    ):
        assert await web.refused("GET", f"/nodes/1/metrics?{query}") == 400


async def test_logs_come_with_marks_to_go_on_from(web: BoardsWeb, node: NodeRig) -> None:
    path = "/nodes/1/logs?source=file:app&tail=3"
    answer = await web.call("GET", path, role="viewer")
    assert answer.headers["content-type"] == "text/event-stream"
    events = await web.events(path)
    assert [data["message"] for kind, data in events if kind == "entry"] == ["line 2", "line 3", "line 4"]
    assert events[-1][0] == "end"
    cursor = events[0][1]["cursor"]
    resumed = await web.call("GET", "/nodes/1/logs?source=file:app", headers={"last-event-id": cursor})
    assert "line 3" in resumed.text
    assert "line 2" not in resumed.text
    found = await web.events("/nodes/1/logs?source=file:app&contains=LINE%204")
    assert [data["message"] for kind, data in found if kind == "entry"] == ["line 4"]


async def test_a_log_that_nobody_has_is_told_in_the_stream(web: BoardsWeb, node: NodeRig) -> None:
    events = await web.events("/nodes/1/logs?source=file:passwd")
    assert [kind for kind, _ in events] == ["error"]
    assert events[0][1]["status"] == 400
    for query in ("level=loud", "tail=x", "since=now", "follow=maybe"):
        assert await web.refused("GET", f"/nodes/1/logs?{query}") == 400
    assert await web.refused("GET", "/nodes/9/logs") == 404


# Certificates.


async def test_the_authority_speaks_json(web: BoardsWeb) -> None:
    from support.boards.boards_rig import BoardKey

    await web.rig.join("pi-1")
    info = await web.get("/ca/info", role="viewer")
    assert (info["type"], info["backend"], info["status"]) == ("root", "local", "active")
    assert (await web.get("/ca/certificate"))["certificate_pem"].startswith("-----BEGIN CERTIFICATE")
    stats = await web.get("/ca/stats")
    assert (stats["total_certificates"], stats["active_certificates"]) == (1, 1)
    (found,) = (await web.get("/ca/certificates?node_id=1&status=active&type=client"))["certificates"]
    assert (found["key_usage"], found["ext_key_usage"]) == ("digital_signature", "client_auth,server_auth")
    assert json.loads(found["sans"])["dns"] == ["board-1.boards.fleetplane.internal"]
    assert (await web.get(f"/ca/certificates/serial/{found['serial_number']}"))["id"] == found["id"]
    checked = await web.post(
        "/ca/certificates/validate", {"certificate_pem": found["certificate_pem"]}, status=200, role="viewer"
    )
    assert (checked["valid"], checked["errors"]) == (True, [])

    revoked = await web.post(f"/ca/certificates/{found['id']}/revoke", {"reason": "lost"}, status=200)
    assert revoked["certificate"]["status"] == "revoked"
    body = {
        "csr_pem": BoardKey().csr,
        "common_name": "tool",
        "type": "client",
        "validity_period": "12h",
        "sans": ["fleetplane://role/boards.viewer"],
        "ext_key_usage": ["client_auth", "server_auth"],
    }
    asked = await web.post("/ca/requests", body, role="operator")
    assert (asked["status"], asked["key_usage"], asked["ext_key_usage"]) == (
        "pending",
        "",
        "[client_auth,server_auth]",
    )
    assert json.loads(asked["sans"]) == body["sans"]
    assert (
        await web.refused("POST", f"/ca/requests/{asked['id']}/process", {"approve": True}, role="operator")
        == 403
    )
    issued = await web.post(f"/ca/requests/{asked['id']}/process", {"approve": True}, status=200)
    assert (issued["status"], issued["certificate"]["common_name"]) == ("approved", "tool")
    assert (await web.get("/ca/requests?status=approved"))["total"] == 1
    renewed = await web.post(f"/ca/certificates/{issued['certificate']['id']}/renew", status=200)
    assert renewed["id"] != issued["certificate"]["id"]
    assert await web.refused("POST", "/ca/certificates", {"common_name": "x", "type": "client"}) == 409
    assert (await web.post("/ca/initialize", status=200))["success"] is True
    cleaned = await web.post("/ca/cleanup", status=200)
    assert (cleaned["success"], cleaned["cleaned_count"]) == (True, 0)
    assert await web.refused("GET", "/ca/certificates/99") == 404
    assert await web.refused("GET", "/ca/certificates/serial/xyz") == 400


async def test_an_address_that_an_operator_puts_is_where_the_board_is_called(
    web: BoardsWeb, node: NodeRig
) -> None:
    shown = (await web.get("/nodes/1"))["data"]
    await web.put("/nodes/1", {"ip_address": shown["ip_address"], "name": shown["name"]})
    assert status_of(web.rig.board(1)).address == "127.0.0.1", "written back unchanged"

    await web.put("/nodes/1", {"ip_address": "127.0.0.2"})

    assert (await web.get("/nodes/1"))["data"]["agent"]["address"] == "127.0.0.2"
    made = await web.put("/nodes/1", {"ip_address": "127.0.0.1"})
    assert made["data"]["agent"]["address"] == "127.0.0.1"
