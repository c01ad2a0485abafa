"""Sets of boards written and a board provisioned to its end, in a real browser, against a real sshd."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import httpx
import pytest
from support.boards import lab_server
from support.boards.ssh_lab import SshLab, ssh_lab
from support.shared.browser_rig import SECONDS, needs_chromium, tab
from support.shared.cli_runner import COMMAND, execute
from support.shared.server_process import running_server
from support.web.console_axe import looked_at, prepared
from support.web.console_rig import Console

pytestmark = needs_chromium

BOARD = "attic"


def token(folder: Path, name: str, role: str) -> str:
    made = execute("tokens", "create", name, "--role", role, "--data-dir", str(folder))
    assert made.code == 0, made.err
    return made.out.strip()


async def typed(console: Console, **values: str) -> None:
    """Write into fields of the form, by the path that the server calls them by."""
    for path, value in values.items():
        await console.set(f'#dialog [data-field="{path}"]', value)


async def plan(console: Console) -> None:
    await console.page.value("document.querySelector('#dialog form').requestSubmit()")


def refused_at(path: str, words: str) -> str:
    return (
        f"document.activeElement?.dataset.field === {path!r}"
        " && document.activeElement.getAttribute('aria-invalid') === 'true'"
        " && document.getElementById(document.activeElement.getAttribute('aria-describedby'))"
        f"?.textContent.includes({words!r})"
    )


async def copied(console: Console) -> str:
    """What a dialog's command is, which is written on the button where there is no clipboard."""
    button = "[...document.querySelectorAll('#dialog .copy')].at(-1)"
    await console.page.value(f"{button}.click()")
    await console.page.until(f"{button}.title !== ''")
    return str(await console.page.value(f"{button}.title"))


async def ran(command: str, boss: str) -> str:
    """In a shell, as somebody who pasted it."""
    environment = {**os.environ, "FLEETPLANE_TOKEN": boss}
    ours = command.replace("fleetplane ", " ".join(COMMAND) + " ", 1)
    done = await asyncio.to_thread(
        subprocess.run,
        ["/bin/sh", "-c", ours],
        capture_output=True,
        text=True,
        timeout=SECONDS,
        env=environment,
        check=False,
    )
    assert done.returncode == 0, (command, done.stderr)
    return done.stdout


async def a_set_is_made_changed_and_deleted(console: Console, http: httpx.AsyncClient, boss: str) -> None:
    page = console.page
    await console.open("#/fleet/boards", "Boards")
    await console.click(".new-set")
    await console.dialog("New board set")
    await console.says("#dialog .meant", "Every board: 1 now.")
    await typed(console, name="Not A Name", selector=f"name={BOARD}")
    await console.says("#dialog .meant", f"1 board now: {BOARD}.")
    await plan(console)
    await page.until(refused_at("name", "write a-z, 0-9 and -"))
    await looked_at(console, "#dialog")
    await typed(console, name="lamps")
    await console.click("#dialog [data-list=programs]")
    await console.click("#dialog [data-list=programs]")
    await console.click("#dialog [data-list=pins]")
    for place, name in enumerate(("dropped", "blink")):
        await typed(console, **{f"programs[{place}].name": name, f"programs[{place}].command": "blink"})
    await console.click("#dialog [aria-label='Remove 1 of programs']")  # the other is the first then
    await typed(console, **{"programs[0].args": "--rate\n10 a second", "programs[0].environment": "nothing"})
    await typed(console, **{"pins[0].pin": "17", "pins[0].level": "1"})
    await plan(console)
    await page.until(refused_at("programs[0].environment", "is no KEY=VALUE"))
    await typed(console, **{"programs[0].environment": "SITE=north"})
    await plan(console)
    await page.until(refused_at("programs[0].command", "is no absolute path"))
    await typed(console, **{"programs[0].command": "/usr/bin/blink"})
    await plan(console)
    await console.dialog("1 to be made")
    await console.click("#dialog .back")
    await console.dialog("New board set")  # with all that was written
    assert (
        await page.value("document.querySelector('#dialog [data-field=\"programs[0].args\"]').value")
        == "--rate\n10 a second"
    )
    await looked_at(console, "#dialog")  # with programs and pins
    await plan(console)
    await console.dialog("1 to be made")
    await looked_at(console, "#dialog")
    command = await copied(console)
    await console.confirm("Done")
    await console.shut()
    await console.says("[aria-label='Sets of boards'] tbody", "blink /usr/bin/blink --rate 10 a second")
    spec = (await http.get("/apis/v1/board-sets/lamps?scope=/tenants/default")).json()["spec"]
    assert spec["programs"] == [
        {
            "name": "blink",
            "command": "/usr/bin/blink",
            "args": ["--rate", "10 a second"],
            "environment": {"SITE": "north"},
            "workingDir": "",
            "upSeconds": 2.0,
        }
    ]
    assert spec["pins"] == [{"pin": 17, "level": 1}]
    assert await ran(command, boss) == "= board-set/lamps  /tenants/default\n"  # as it is already

    await console.click("tr[data-name=lamps] .change-set")
    await console.dialog("Change board set lamps")
    await typed(console, **{"programs[0].command": "/usr/bin/blink2"})
    await plan(console)
    await console.dialog("1 to be changed")
    await console.says("#dialog .plan", "Disturbs: boards end program blink, and start it anew")
    await console.confirm("Done.")
    await console.shut()
    await console.says("[aria-label='Sets of boards'] tbody", "/usr/bin/blink2")

    await console.click("tr[data-name=lamps] .delete-set")
    await console.dialog("end its programs and release its pins at once")
    await console.says("#dialog", "The server would do it.")
    await looked_at(console, "#dialog")
    await console.set("#dialog input[name=confirmation]", "others")
    await plan(console)
    await console.says("#dialog .outcome", "Write lamps to go on; nothing was done.")
    await console.set("#dialog input[name=confirmation]", "lamps")
    await console.confirm("lamps is deleted.")
    await page.until("document.querySelector('tr[data-name=lamps]') === null")
    await console.click("#dialog .undo")
    await console.says("#dialog .outcome", "lamps is there again")
    await console.shut()
    await page.until("document.querySelector('tr[data-name=lamps]') !== null")


async def a_board_is_provisioned(console: Console, lab: SshLab) -> None:
    """Looked at, cancelled in the midst, failed, gone on with where it failed, and ready; then removed."""
    page = console.page
    options = "\n".join(f"{name}={value}" for name, value in lab.options.items())
    await order(console, "check", "127.0.0.1", "")
    await console.shut()
    await console.says(".provisioning-words", "check: ready, 1 of 1 steps are over.")

    (lab.folder / "slow").touch()
    await order(console, "provision", "127.0.0.1", options)
    await console.shut()
    running = "[aria-label=Steps] tr[data-name$='/install']"
    await page.until(f"document.querySelector({running!r})?.textContent.includes('installing')")
    await console.says("[aria-label='Output of provisioning']", "begun")  # while it runs
    await console.click(".cancel")
    await console.dialog("Cancel provision")
    await page.value("document.querySelector('#dialog form').requestSubmit()")
    await console.says(".provisioning-words", "provision: cancelled")
    await console.shut()
    (lab.folder / "slow").unlink()

    (lab.folder / "broken").touch()
    await order(console, "provision", "127.0.0.1", options)
    await console.shut()
    await console.says(".provisioning-words", "provision: failed")
    await console.says(".provisioning-words", "the download failed")
    (lab.folder / "broken").unlink()
    await console.click(".resume")
    await console.dialog("It goes on at the step that failed.")
    await page.value("document.querySelector('#dialog form').requestSubmit()")
    await console.says(".provisioning-words", "provision: ready")
    await console.shut()
    steps = "[...document.querySelectorAll('[aria-label=Steps] tbody tr')]"
    await page.until(f"{steps}.length > 5 && {steps}.every((one) => one.textContent.includes('ready'))")
    assert "server" in lab.read("arguments")
    await page.until("document.querySelectorAll('[aria-label=Operations] tbody tr').length === 3")
    await console.says(".facts", f"{BOARD} is ready")


async def order(console: Console, verb: str, address: str, options: str) -> None:
    """Ask what it would do, then have it done."""
    page = console.page
    await console.click(f"[data-order={verb}]")
    await console.dialog(BOARD)
    await console.set("#dialog input[name=address]", address)
    await console.set("#dialog textarea[name=k3s_config]", options)
    if verb == "provision":
        await console.choose("#dialog select[name=role]", "master")
        await console.choose("#dialog select[name=cluster_id]", "1")
        await console.set("#dialog input[name=confirmation]", BOARD)
    await console.click("#dialog .show-steps")
    await page.until("document.querySelectorAll('#dialog .steps-planned li').length > 0")
    if verb == "check":
        await looked_at(console, "#dialog")
    await page.value("document.querySelector('#dialog form').requestSubmit()")
    await console.says("#dialog .outcome", "Begun")


async def every_other_dialog_lets_everybody_in(console: Console) -> None:
    """Finding, the help, an action, giving a role, a new account and a new token."""
    page = console.page
    # The form that let somebody in may hold the focus for a moment after it was hidden.
    await page.value(
        "document.querySelector('#name')"
        ".dispatchEvent(new KeyboardEvent('keydown', {key: '?', bubbles: true}))"
    )
    await console.dialog("next and previous row")
    await console.shut()
    await console.key("?")
    await console.dialog("next and previous row")
    await looked_at(console, "#dialog")
    await console.shut()
    await page.value("document.querySelector('#find').click()")
    await console.type("#dialog input", "b")
    await page.until("document.querySelectorAll('.found a').length > 1")
    await looked_at(console, "#dialog")
    await console.shut()
    await console.open(f"#/boards/{BOARD}?scope=/tenants/default", BOARD)
    await console.click("[data-action=run]")
    await console.dialog("This is done to one object")
    await looked_at(console, "#dialog")
    await console.shut()
    await console.open("#/fleet/access", "Access")
    for button, words in (
        (".give", "Give a role"),
        (".new-account", "New account"),
        (".new-token", "New token"),
    ):
        await console.click(f"button{button}")
        await console.dialog(words)
        await looked_at(console, "#dialog")
        await console.shut()


async def what_is_written_stays(console: Console, http: httpx.AsyncClient) -> None:
    """When the server refuses it because a role was taken away meanwhile, and when the session has ended."""
    page = console.page
    people = "/apis/v1/people"
    account = {"name": "grace", "password": "a good password"}
    assert (await http.post(f"{people}/accounts", json=account)).status_code == 201
    bound = []
    for role in ("viewer", "operator"):
        made = await http.post(
            f"{people}/bindings", json={"subject": "account/grace", "role": role, "scope": "/"}
        )
        assert made.status_code == 201, made.text
        bound.append(made.json()["id"])
    await console.sign_in_as("grace", "a good password")
    await console.live()
    await console.open("#/fleet/boards", "Boards")
    await console.click("tr[data-name=lamps] .change-set")
    await console.dialog("Change board set lamps")
    await typed(console, description="written before the role was taken away")
    assert (await http.delete(f"{people}/bindings/{bound[1]}")).status_code < 300
    await plan(console)
    kept = "document.querySelector('#dialog [data-field=description]')?.value"
    await console.says("#dialog form [role=alert].error", "operate")
    assert await page.value(kept) == "written before the role was taken away"

    sessions: Any = (await http.get(f"{people}/sessions")).json()["items"]
    for one in sessions:
        if one["name"] == "grace":
            assert (await http.delete(f"{people}/sessions/{one['id']}")).status_code < 300
    await page.until("document.querySelector('#sign-in').hidden === false")
    assert await page.value("document.querySelector('#dialog').open") is False
    assert "written before" not in await page.value("document.documentElement.outerHTML")
    await console.sign_in_as("grace", "a good password")
    await console.live()
    await console.dialog("Change board set lamps")
    assert await page.value(kept) == "written before the role was taken away"
    # Somebody else does not see it.
    for one in (await http.get(f"{people}/sessions")).json()["items"]:
        if one["name"] == "grace":
            assert (await http.delete(f"{people}/sessions/{one['id']}")).status_code < 300
    await page.until("document.querySelector('#sign-in').hidden === false")


@pytest.mark.timeout(600)
async def test_sets_of_boards_are_written_and_boards_are_provisioned_in_a_browser(tmp_path: Path) -> None:
    folder = tmp_path / "data"
    with ssh_lab(tmp_path / "board") as lab:
        allowed = lab.policy
        settings = {
            "boards.k3s_installers": ",".join(f"{one.url}#sha256={one.sha256}" for one in allowed.installers),
            "boards.k3s_paths": ",".join(allowed.paths),
        }
        arguments = [part for name, value in settings.items() for part in ("--set", f"{name}={value}")]
        prefix = (sys.executable, str(lab_server.__file__), str(lab.folder))
        with running_server(folder, "--only", "boards", *arguments, prefix=prefix) as server:
            boss = token(folder, "boss", "owner")
            given = {"authorization": f"Bearer {boss}"}
            async with (
                httpx.AsyncClient(
                    base_url=server.web, headers=given, trust_env=False, timeout=SECONDS
                ) as http,
                tab(tmp_path / "browser", f"{server.web}/ui/") as page,
            ):
                credential = lab.credential()
                kept = {
                    "username": credential.user,
                    "port": credential.port,
                    "private_key": credential.private_key,
                    "known_hosts": credential.known_hosts,
                }
                (await http.put("/api/v1/credentials/default", json=kept)).raise_for_status()
                (await http.post("/api/v1/clusters", json={"name": "home"})).raise_for_status()
                (await http.post("/api/v1/nodes", json={"name": BOARD})).raise_for_status()
                console = Console(page, server.web)
                await console.sign_in(boss)
                await console.live()
                await prepared(console)
                await every_other_dialog_lets_everybody_in(console)
                await a_set_is_made_changed_and_deleted(console, http, boss)
                await a_board_is_provisioned(console, lab)
                await console.sign_out()
                await what_is_written_stays(console, http)
                await console.sign_in(boss)
                await console.live()
                assert await page.value("document.querySelector('#dialog').open") is False
                # But for what was refused on purpose.
                assert [one for one in page.complaints if "status of 4" not in one] == []
