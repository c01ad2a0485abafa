"""Provisioning over REST, against a real sshd: asked for, rehearsed, followed, cancelled, resumed."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
from support.boards.boards_rig import boards_rig, until
from support.boards.boards_web import BoardsWeb, Json, boards_web
from support.boards.ssh_lab import TOKEN, SshLab, ssh_lab

from fleetplane.domains.boards.core import BoardOptions
from fleetplane.domains.boards.provisioning.operations import is_over
from fleetplane.kernel.audit import chain as audit


@pytest.fixture
def lab(tmp_path: Path) -> Iterator[SshLab]:
    with ssh_lab(tmp_path / "board") as lab:
        yield lab


@pytest.fixture
async def web(tmp_path: Path, lab: SshLab) -> AsyncIterator[BoardsWeb]:
    async with (
        boards_rig(
            tmp_path, places=lab.places, options=BoardOptions(plain=True, provisioning=lab.policy)
        ) as rig,
        boards_web(rig) as web,
    ):
        credential = lab.credential()
        body = {
            "username": credential.user,
            "port": credential.port,
            "private_key": credential.private_key,
            "known_hosts": credential.known_hosts,
        }
        await web.put("/credentials/default", body)
        await web.post("/clusters", {"name": "home"})
        for name in ("one", "two"):
            await web.post("/nodes", {"name": name, "ip_address": "127.0.0.1"})
        yield web


async def ended(web: BoardsWeb, operation: str) -> Json:
    operations = web.rig.domain.provisioning.operations
    await until(lambda: is_over(operations.get(operation)), seconds=60)
    found: Json = (await web.get(f"/operations/{operation}"))["data"]
    return found


def order(lab: SshLab, **more: object) -> Json:
    return {"k3s_config": lab.options, **more}


async def test_a_cluster_is_made_followed_and_its_secrets_shown_to_administrators(
    web: BoardsWeb, lab: SshLab
) -> None:
    body = order(lab, master_node_id=1)
    told = await web.post("/clusters/1/provision", body, status=202, role="operator")
    operation = told["operation_id"]
    assert (told["success"], told["state"]) == (True, "queued")
    assert TOKEN not in str(told)

    events = await web.events(f"/operations/{operation}/log", role="viewer")
    lines = [data["text"] for kind, data in events if kind == "line"]
    assert "[1] -- preflight" in lines
    assert TOKEN not in str(events)
    assert events[-1][0] == "end"
    assert (events[-1][1]["state"], events[-1][1]["finished"]) == ("ready", True)

    assert (await web.get("/clusters/1"))["status"] == "active"
    node = (await web.get("/nodes/1"))["data"]
    assert (node["status"], node["role"], node["cluster_id"]) == ("ready", "master", 1)
    for path in ("/clusters/1/cluster-token", "/nodes/1/cluster-token"):
        assert await web.refused("POST", path, role="operator") == 403
        assert (await web.post(path, status=200))["cluster_token"] == TOKEN
    for path in ("/clusters/1/kubeconfig", "/nodes/1/kubeconfig"):
        assert (await web.post(path, status=200))["kubeconfig"] == "kind: Config\n"
    actions = [
        (entry.actor, entry.action)
        async for row in web.rig.store.audit()
        if (entry := audit.read(row)).action.startswith("boards.reveal_")
    ]
    assert actions == [
        ("operator/boss", "boards.reveal_cluster_token"),
        ("operator/boss", "boards.reveal_cluster_token"),
        ("operator/boss", "boards.reveal_kubeconfig"),
        ("operator/boss", "boards.reveal_kubeconfig"),
    ]


async def test_a_rehearsal_shows_the_commands_and_does_nothing(web: BoardsWeb, lab: SshLab) -> None:
    body = order(lab, role="master", cluster_id=1, dry_run=True)
    told = await web.post("/nodes/1/provision", body, status=202)
    commands = "\n".join(step["message"] for step in told["steps"])
    assert "systemctl enable --now k3s" in commands
    assert (told["operation_id"], told["request_id"]) == (None, None)
    assert (await web.get("/operations"))["total"] == 0
    assert lab.calls() == []


async def test_what_fails_stands_still_and_goes_on_where_it_failed(web: BoardsWeb, lab: SshLab) -> None:
    (lab.folder / "broken").touch()
    told = await web.post("/nodes/1/provision", order(lab, role="master", cluster_id=1), status=202)
    failed = await ended(web, told["operation_id"])
    assert failed["state"] == "failed"
    assert "the download failed" in failed["reason"]
    assert (await web.get("/operations?state=failed&node_id=1"))["total"] == 1

    (lab.folder / "broken").unlink()
    again = await web.post(f"/operations/{told['operation_id']}/resume", status=202)
    assert again["operation_id"] == told["operation_id"]
    assert (await ended(web, told["operation_id"]))["state"] == "ready"
    over = await web.post(f"/operations/{told['operation_id']}/cancel", status=200)
    assert over["message"] == "it was over already"


async def test_a_second_order_for_a_board_in_hand_is_a_conflict(web: BoardsWeb, lab: SshLab) -> None:
    first = await web.post("/nodes/1/check", order(lab), status=202)
    answer = await web.call("POST", "/nodes/1/check", order(lab))
    if answer.status_code != 202:  # unless the first was quicker
        assert (answer.status_code, answer.json()["code"]) == (409, "CONFLICT")
    assert (await ended(web, first["operation_id"]))["state"] == "ready"


@pytest.mark.parametrize(
    ("path", "body", "status", "code"),
    [
        ("/nodes/x/provision", {}, 400, "INVALID_ID"),
        ("/nodes/1/provision", {"ssh_config": {"username": "pi", "password": "x"}}, 400, "INVALID_REQUEST"),
        ("/nodes/1/provision", {"k3s_config": {"colour": "red"}}, 400, "INVALID_REQUEST"),
        ("/nodes/1/provision", {"k3s_config": {"tls_san": ["a,b"]}}, 400, "INVALID_REQUEST"),
        ("/nodes/1/provision", {"k3s_config": {"tls_san": 7}}, 400, "INVALID_REQUEST"),
        ("/nodes/9/provision", {}, 404, "NOT_FOUND"),
        ("/nodes/1/provision", {"credential": "none", "role": "master"}, 404, "NOT_FOUND"),
        ("/clusters/1/provision", {}, 400, "INVALID_REQUEST"),
        ("/clusters/1/scale", {"worker_node_ids": []}, 400, "INVALID_REQUEST"),
        ("/clusters/1/scale", {"worker_node_ids": [2]}, 409, "CONFLICT"),
        ("/operations/none/cancel", None, 404, "NOT_FOUND"),
        ("/clusters/1/kubeconfig", None, 404, "NOT_FOUND"),
        ("/nodes/1/cluster-token", None, 409, "CONFLICT"),
    ],
)
async def test_refusals_have_the_codes_that_known_clients_look_for(
    web: BoardsWeb, path: str, body: Json | None, status: int, code: str
) -> None:
    answer = await web.call("POST", path, body)
    told = answer.json()
    assert (answer.status_code, told["code"]) == (status, code), told
    assert told["error"] == told["message"]
    assert (await web.get("/operations"))["total"] == 0


async def test_logins_are_written_and_never_read(web: BoardsWeb) -> None:
    assert (await web.get("/credentials"))["credentials"] == [{"name": "default"}]
    bad = {"username": "pi", "password": "secret-1"}
    assert await web.refused("PUT", "/credentials/other", bad) == 400, "whom to believe is missing"
    answer = await web.call("PUT", "/credentials/other", {**bad, "known_hosts": "h ssh-ed25519 AAAA"})
    assert "secret-1" not in answer.text
    await web.delete("/credentials/other")
    assert await web.refused("DELETE", "/credentials/other") == 404
