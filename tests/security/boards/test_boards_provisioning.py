"""Provisioning as a way to root: what an operator, a board or a neighbour on the board tries."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import asyncssh
import pytest
from support.boards.boards_rig import BOSS, BoardsRig, boards_rig, until
from support.boards.boards_web import BoardsWeb, Json, boards_web
from support.boards.ssh_lab import SshLab, ssh_lab

from fleetplane.domains.boards.core import BoardOptions
from fleetplane.domains.boards.provisioning import policy
from fleetplane.domains.boards.provisioning.operations import is_over
from fleetplane.gen.boards import boards_pb2 as pb
from fleetplane.kernel.errors import SettingsError


@pytest.fixture
def lab(tmp_path: Path) -> Iterator[SshLab]:
    with ssh_lab(tmp_path / "board") as lab:
        yield lab


@pytest.fixture
async def web(tmp_path: Path, lab: SshLab) -> AsyncIterator[BoardsWeb]:
    options = BoardOptions(plain=True, provisioning=lab.policy)
    async with boards_rig(tmp_path, places=lab.places, options=options) as rig, boards_web(rig) as web:
        await rig.domain.provisioning.credentials.put("default", lab.credential(), actor=BOSS)
        await web.post("/clusters", {"name": "home"})
        yield web


async def ended(web: BoardsWeb, told: Json) -> Json:
    operations = web.rig.domain.provisioning.operations
    await until(lambda: is_over(operations.get(told["operation_id"])), seconds=60)
    found: Json = (await web.get(f"/operations/{told['operation_id']}"))["data"]
    return found


async def written_down(web: BoardsWeb) -> int:
    made = await web.post("/nodes", {"name": "one", "ip_address": "127.0.0.1"})
    return int(made["data"]["id"])


TRIED = (
    ("data_dir", "/"),
    ("data_dir", "/etc"),
    ("data_dir", "/var/lib/rancher/../../../etc"),
    ("data_dir", "//etc"),
    ("data_dir", "/home/pi"),
    ("write_kubeconfig", "/etc/shadow"),
    ("private_registry", "/root/.ssh/id_ed25519"),
    ("default_local_storage", "/boot"),
    ("installer", "https://attacker.example/x.sh"),
    ("installer", "file:///home/pi/x.sh"),
    ("server_url", "https://attacker.example:6443"),
    ("kubelet_args", "image-credential-provider-bin-dir=/tmp"),
    ("kube_api_args", "audit-log-path=/etc/cron.d/x"),
    ("extra_args", "data-dir=/etc"),
    ("extra_args", "config=/tmp/x.yaml"),
)


async def test_an_operator_cannot_name_what_the_owner_did_not_allow(web: BoardsWeb, lab: SshLab) -> None:
    number = await written_down(web)
    for path in ("provision", "deprovision"):
        for option, value in TRIED:
            if path == "deprovision" and option == "installer":
                continue  # nothing is installed then
            body: Json = {"k3s_config": {**lab.options, option: value}}
            if path == "provision":
                body["role"] = "master"
            answer = await web.call("POST", f"/nodes/{number}/{path}", body, role="operator")
            assert answer.status_code in (400, 403), (path, option, value, answer.text)
            assert answer.json()["field"] == f"k3s_config.{option}"
    assert (await web.get("/operations"))["total"] == 0
    assert lab.calls() == []


async def test_nothing_at_all_is_installed_before_the_owner_allowed_an_installer(tmp_path: Path) -> None:
    async with boards_rig(tmp_path) as rig, boards_web(rig) as web:
        number = await written_down(web)
        answer = await web.call("POST", f"/nodes/{number}/provision", {"role": "master"})
        assert answer.status_code == 403
        assert "boards.k3s_installers" in answer.text


async def test_an_installer_that_is_not_the_one_that_was_allowed_is_not_run(
    web: BoardsWeb, lab: SshLab
) -> None:
    number = await written_down(web)
    lab.write("installer.sh", lab.read("installer.sh") + "\ntouch $LAB/owned\n")

    told = await web.post(
        f"/nodes/{number}/provision", {"k3s_config": lab.options, "role": "master"}, status=202
    )
    failed = await ended(web, told)

    assert failed["state"] == "failed"
    assert "SHA-256 differs" in failed["reason"]
    assert not (lab.folder / "owned").exists()
    assert not (lab.folder / "arguments").exists(), "not even begun"


async def test_the_installer_lies_where_no_other_user_of_the_board_can_put_one(
    web: BoardsWeb, lab: SshLab
) -> None:
    number = await written_down(web)
    body = {"k3s_config": lab.options, "role": "master"}
    assert (await ended(web, await web.post(f"/nodes/{number}/provision", body, status=202)))[
        "state"
    ] == "ready"

    place = Path(lab.read("installer-was").strip())
    assert place.name == "install.sh"
    assert not place.parent.exists(), "it is gone with the command that ran it"
    rehearsed = await web.post(f"/nodes/{number}/provision", {**body, "dry_run": True}, status=202)
    commands = "\n".join(step["message"] for step in rehearsed["steps"])
    assert "mktemp -d" in commands
    assert "/tmp/" not in commands.replace(str(lab.folder), "")


async def joined(rig: BoardsRig, *keys: str) -> int:
    return (await rig.join("pi", ip_address="127.0.0.1", ssh_host_keys=keys)).number


async def test_a_boards_own_word_does_not_decide_where_ssh_goes(web: BoardsWeb, lab: SshLab) -> None:
    number = await joined(web.rig)
    body: Json = {"k3s_config": lab.options, "role": "master"}

    answer = await web.call("POST", f"/nodes/{number}/provision", body, role="operator")
    assert answer.status_code == 409
    assert "nobody has confirmed" in answer.text
    assert lab.calls() == []

    body["addresses"] = {str(number): "127.0.0.1"}
    told = await web.post(f"/nodes/{number}/provision", body, status=202, role="operator")
    assert (await ended(web, told))["state"] == "ready"


async def test_a_board_that_moves_its_address_after_it_was_confirmed_moves_nothing(
    web: BoardsWeb, lab: SshLab
) -> None:
    member = await web.rig.join("pi", ip_address="127.0.0.1")
    await web.put(f"/nodes/{member.number}", {"ip_address": "127.0.0.1"})
    await member.control.RegisterNode(pb.NodeRegistration(ip_address="127.0.0.66"))
    assert web.rig.board(member.number).spec.ip_address == "127.0.0.66"

    body = {"k3s_config": lab.options, "role": "master"}
    told = await web.post(f"/nodes/{member.number}/provision", body, status=202)
    assert (await ended(web, told))["state"] == "ready", "at the address that was confirmed"


async def test_another_machine_than_the_one_that_joined_is_not_logged_in_to(
    web: BoardsWeb, lab: SshLab
) -> None:
    other = asyncssh.generate_private_key("ssh-ed25519").export_public_key().decode()
    number = await joined(web.rig, " ".join(other.split()[:2]))
    body = {"k3s_config": lab.options, "role": "master", "addresses": {str(number): "127.0.0.1"}}

    failed = await ended(web, await web.post(f"/nodes/{number}/provision", body, status=202))

    assert failed["state"] == "failed"
    assert "nothing was sent" in failed["reason"], "although the credential knows the key of that address"
    assert lab.calls() == []


async def test_the_keys_that_a_board_joined_with_are_not_changed_by_what_it_says_later(
    web: BoardsWeb, lab: SshLab
) -> None:
    line = " ".join(lab.host_key.split()[:2])
    member = await web.rig.join("pi", ip_address="127.0.0.1", ssh_host_keys=[line])
    other = "ssh-ed25519 " + "A" * 68
    await member.control.RegisterNode(pb.NodeRegistration(ssh_host_keys=[other]))
    assert web.rig.board(member.number).spec.ssh_host_keys == (line,)

    body = {
        "k3s_config": lab.options,
        "role": "master",
        "addresses": {str(member.number): "127.0.0.1"},
    }
    told = await web.post(f"/nodes/{member.number}/provision", body, status=202)
    assert (await ended(web, told))["state"] == "ready"


async def test_a_worker_does_not_join_wherever_an_editor_of_clusters_points(
    web: BoardsWeb, lab: SshLab
) -> None:
    number = await written_down(web)
    await web.put("/clusters/1", {"master_endpoint": "https://attacker.example:6443"}, role="operator")
    body = {"k3s_config": lab.options, "role": "worker", "cluster_id": 1}

    answer = await web.call("POST", f"/nodes/{number}/provision", body, role="operator")

    assert answer.status_code == 403
    assert "boards.k3s_servers" in answer.text


@pytest.mark.parametrize(
    "wrong",
    [
        {"installers": ["https://get.k3s.io"]},
        {"installers": ["http://get.k3s.io#sha256=" + "a" * 64]},
        {"paths": ["/"]},
        {"paths": ["/etc"]},
        {"paths": ["/var/lib/../.."]},
        {"servers": ["http://10.0.0.1"]},
        {"arguments": ["max-pods"]},
        {"arguments": ["shell:x"]},
    ],
)
def test_an_owners_list_that_would_allow_too_much_stops_the_start(wrong: dict[str, list[str]]) -> None:
    lists: dict[str, list[str]] = {"installers": [], "paths": [], "servers": [], "arguments": []}
    with pytest.raises(SettingsError):
        policy.from_settings(**{**lists, **wrong})
