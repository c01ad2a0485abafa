"""Ways through the pages of the console: what operators do there, and what they then see."""

from __future__ import annotations

import asyncio
import base64
import json
import os
from pathlib import Path
from typing import Any

import httpx
from support.shared.browser_rig import SECONDS
from support.web.console_fleets import BOARD, DAEMONS, EDGE_TENANT, GPUS, PIN, WORKSPACE, Fleets
from support.web.console_rig import Console

PAGES = {
    "machines": "Machines",
    "gpus": "GPUs",
    "groups": "Groups",
    "proxies": "Proxies",
    "boards": "Boards",
    "edge": "Edge",
    "rollouts": "Rollouts",
    "servers": "Servers",
    "audit": "Audit",
    "access": "Access",
}
PICTURES = "CONSOLE_PICTURES"
"""Where `make screenshots` wants pictures of the pages."""
DRAW = Path(__file__).parent / "picture.js"
FIXED = "an answer from the console"


async def machines_are_one_list(console: Console) -> None:
    page = console.page
    await console.open("#/fleet/machines", "Machines")
    for name in ("nginx-0", "nginx-1", BOARD):
        await page.until(f"{console.row(name)} !== null")
    await page.until(
        f"{json.dumps(list(DAEMONS))}.every((name) =>"
        " [...document.querySelectorAll('.space .row a')].some((one) => one.textContent === name))"
    )
    await console.choose("select[name=kind]", "edge")
    await console.rows(len(DAEMONS))
    await console.choose("select[name=state]", "connected")
    await console.rows(len(DAEMONS))
    await console.type("input[name=q]", DAEMONS[1])
    await console.rows(1)
    await page.until(f"location.hash === '#/fleet/machines?kind=edge&state=connected&q={DAEMONS[1]}'")
    await page.value(
        "[...document.querySelectorAll('.filters button')].find((one) =>"
        " one.textContent === 'Save filter').click()"
    )
    await console.dialog("Save this filter")
    await console.set("#dialog input", "one daemon")
    await page.value("document.querySelector('#dialog form').requestSubmit()")
    await console.says(".saved a", "one daemon")
    await console.open("#/fleet/machines", "Machines")
    await page.until("document.querySelectorAll('.space .row').length > 3")
    await console.click(".saved a")
    await console.rows(1)
    await page.until("document.querySelector('select[name=kind]')?.value === 'edge'")


async def five_fleets_are_seen_at_a_glance(console: Console) -> None:
    await console.open("#/", "Overview")
    rows = "[...document.querySelectorAll('.counts li')]"
    shown = f"{rows}.map((one) => one.children[0].textContent).join()"
    await console.page.until(f"{shown} === 'Instances,Proxies,Boards,Edge daemons,GPUs'")
    counted = f"{rows}.map((one) => one.children[1].textContent)"
    await console.page.until(f"{counted}.slice(1).join() === '2,1,{len(DAEMONS)},{GPUS}'")
    await console.click(".counts li:nth-child(4) a")
    await console.page.until("document.querySelector('main h1')?.textContent === 'Edge'")


async def gpus_are_a_grid(console: Console) -> None:
    page = console.page
    await console.open("#/fleet/gpus", "GPUs")
    await page.until(f"document.querySelectorAll('.grid a').length === {GPUS}")
    await console.click(".grid a")
    await page.until("document.querySelector('.conditions li')?.textContent.includes('NVMLReady True')")
    await page.until("document.querySelectorAll('.recent li').length >= 1")
    await console.says(".recent", "NVMLReady became True")
    await console.says(".recent", "by ")  # what the audit log has of it


async def a_group_is_scaled_and_scaled_back(console: Console, tenant: str) -> None:
    page = console.page
    card = (
        "[...document.querySelectorAll('.group')].find((one) =>"
        f" one.textContent.includes('/tenants/{tenant}'))"
    )
    await console.open("#/fleet/groups", "Groups")
    await page.until(f"{card} !== undefined")
    await page.value(f"{card}.querySelector('.scale').click()")
    await console.dialog("Scale workers")
    await console.set("#dialog input[type=number]", "3")
    await console.says("#dialog .words", "1 more instance is created: 2 become 3.")
    await console.confirm("is to have 3")
    await page.until(f"{card}.textContent.includes('of 3 ready')")
    await page.value("document.querySelector('#dialog .undo').click()")
    await console.says("#dialog .outcome", "is to have 2 again")
    await console.shut()
    await page.until(f"{card}.textContent.includes('of 2 ready')")


async def _served(url: str, path: str) -> str:
    async with httpx.AsyncClient(trust_env=False, timeout=SECONDS) as http:
        try:
            return (await http.get(url + path, headers={"host": "demo.localhost"})).text
        except httpx.TransportError:
            return ""


async def until_served(url: str, path: str, words: str, *, there: bool = True) -> None:
    async with asyncio.timeout(SECONDS):
        while (words in await _served(url, path)) is not there:
            await asyncio.sleep(0.1)


async def edit_site(console: Console, path: str) -> None:
    """Give the virtual host a further location with a fixed answer, and look at the plan."""
    await console.page.until("!!document.querySelector('tr[data-name=Site] .edit')")
    await console.click("tr[data-name=Site] .edit")
    await console.dialog("Virtual host Site")
    await console.page.value(
        "[...document.querySelectorAll('#dialog button')].find((one) =>"
        " one.textContent === 'Add a location').click()"
    )
    last = "#dialog .location:last-child"
    await console.set(f"{last} input[name=path]", path)
    await console.set(f"{last} select[name=serves]", "respond")
    await console.set(f"{last} input[name=value]", FIXED)
    await console.page.value("document.querySelector('#dialog form').requestSubmit()")
    await console.dialog("1 to be changed")
    await console.says("#dialog .plan", "spec.locations")
    await console.says("#dialog .plan", "Disturbs: NGINX of 2 agents reloads")


async def a_virtual_host_is_edited_and_served(console: Console, fleets: Fleets) -> None:
    page = console.page
    for url in fleets.nginx:
        await until_served(url, "", "hello from behind NGINX")
    await console.open(f"#/fleet/proxies?workspace={WORKSPACE}", "Proxies")
    await page.until("document.querySelectorAll('[aria-label=Agents] tbody tr').length === 2")
    newest = "document.querySelector('[aria-label=Versions] tbody td')?.textContent"
    await page.until(f"Number({newest}) > 0")
    before = int(await page.value(newest))
    agents = "[...document.querySelectorAll('[aria-label=Agents] tbody tr')]"
    await page.until(f"{agents}.every((one) => one.textContent.includes('serves version {before}'))")
    await edit_site(console, "/console")
    await console.confirm("Done.")
    for url in fleets.nginx:
        await until_served(url, "console", FIXED)
    await console.click("#dialog .undo")
    await console.dialog("Undo: Change Site")
    await console.confirm("Done.")
    await console.shut()
    for url in fleets.nginx:
        await until_served(url, "console", FIXED, there=False)
    # Rolled back to the version that had it, between that of before and that of undoing.
    await page.until(f"Number({newest}) === {before + 2}")
    await console.click(f"[aria-label=Versions] tr[data-name='{before + 1}'] .roll-back")
    await console.dialog(f"Roll demo back to version {before + 1}")
    await console.confirm("Done")
    await console.shut()
    for url in fleets.nginx:
        await until_served(url, "console", FIXED)


async def a_pin_is_driven(console: Console) -> None:
    page = console.page
    switch = f"[data-name='{PIN}'] .switch"
    checked = f"document.querySelector({json.dumps(switch)})?.getAttribute('aria-checked')"
    await console.open("#/fleet/boards", "Boards")
    await page.until(f"{checked} === 'false'")
    await console.says(f"[data-name='{PIN}'] small", "held by nobody")
    for label, state in (("Drive high", "true"), ("Drive low", "false")):
        await console.click(switch)
        await console.dialog(label)
        await console.confirm("Done")
        await page.until(f"{checked} === '{state}'")
        await console.shut()
    await page.until("document.querySelectorAll('.charts figure').length === 3")


async def a_command_runs_on_three_daemons(console: Console, http: httpx.AsyncClient) -> None:
    page = console.page
    await console.open(f"#/fleet/edge?tenant={EDGE_TENANT}", "Edge")
    await page.until(f"document.querySelectorAll('[aria-label=Daemons] tbody tr').length === {len(DAEMONS)}")
    group = {"name": "builders", "selector": "os=linux"}
    made = await http.post("/v1/edge/groups", json=group, headers={"x-aegis-tenant": EDGE_TENANT})
    assert made.status_code == 201, made.text
    await console.says("[aria-label=Groups] tbody", "os=linux")
    await console.click("[aria-label='Run a command on the group builders']")
    await console.says(".preview", "3 daemons: build-1, build-2, build-3")
    await console.set("input[name=target]", "nobody=here")
    await console.click(".preview-button")
    await console.says("main .error", "'nobody=here' is no term")
    await console.set("input[name=target]", "tags=none")
    await console.click(".preview-button")
    await console.says(".preview", "0 daemons")
    await console.set("input[name=target]", "all")
    await console.click(".preview-button")
    for name in DAEMONS:
        await console.says(".preview", name)
    await console.set("input[name=command]", "echo 'from the console'")
    await console.click(".run-button")
    await console.dialog("echo from the console on 3 daemons")
    await page.value("document.querySelector('#dialog form').requestSubmit()")
    await page.until(f"document.querySelectorAll('.run [data-outcome=ok]').length === {len(DAEMONS)}")
    await console.says(".totals", "Over: 3 targets, 3 ok.")
    await console.click(".run button")
    await console.says(".output", "from the console")
    await console.click(".enrol")
    await console.dialog("Enrol a daemon")
    await console.set("#dialog input", "build-4")
    await page.value("document.querySelector('#dialog form').requestSubmit()")
    await console.says("#dialog .line", "fleetplane agent edge enroll -")
    await console.shut()


async def a_rollout_is_halted(console: Console, http: httpx.AsyncClient) -> None:
    """A policy of another client makes the next change a rollout; a person halts it, and rolls it back."""
    page = console.page
    workspace = await workspace_id(http)
    policy = {
        "waves": ["1", "rest"],
        "soak_seconds": 3000,
        "max_soak_seconds": 3600,
        "unhealthy_seconds": 3600,  # a busy machine alarms agents, and makes them slow
        "confirm_seconds": 3600,
    }
    set_policy = {"subject": "proxies.config", "scope": workspace, "policy": policy}
    answer = await http.put("/v1/fleet/rollout-policies", json=set_policy)
    assert answer.status_code < 300, answer.text
    await console.open(f"#/fleet/proxies?workspace={WORKSPACE}", "Proxies")
    await edit_site(console, "/slowly")
    await console.confirm("Done.")
    await console.shut()
    await console.open("#/fleet/rollouts", "Rollouts")
    await console.click("[aria-label=Rollouts] tbody a")
    await page.until("document.querySelector('.orders [data-order=pause]') !== null")
    await page.until(
        "[...document.querySelectorAll('.grids .cell')].filter((one) =>"
        " one.textContent.includes('confirmed')).length === 1"
    )
    for order, label, phase in (("pause", "Halt", "paused"), ("resume", "Resume", "soaking")):
        await console.click(f".orders [data-order={order}]")
        await console.dialog(label)
        await console.confirm("Done.")
        await console.shut()
        await console.says("[aria-label=Rollouts] tbody tr", phase)
    await console.click(".orders [data-order=undo]")
    await console.dialog("Roll back")
    name = await page.value("document.querySelector('[aria-label=Rollouts] tbody a').textContent")
    await console.set("#dialog input[name=confirmation]", name)
    await console.confirm("Done.")
    await console.shut()
    await console.says("[aria-label=Rollouts] tbody tr", "rolled_back")


async def workspace_id(http: httpx.AsyncClient) -> str:
    """Of the workspace of the demonstration."""
    organizations: Any = (await http.get("/v1/organizations")).json()["data"]
    owner = next(one["id"] for one in organizations if one["slug"] == "demo")
    return str((await http.get(f"/v1/organizations/{owner}/workspaces")).json()["data"][0]["id"])


async def what_agents_measure_is_drawn(console: Console) -> None:
    page = console.page
    await console.open("#/gpus", "GPUs")
    await page.until("!!document.querySelector('.space .row a')")
    place = await page.value("document.querySelector('.space .row a').getAttribute('href')")
    await page.value(f"location.hash = {place + ('&' if '?' in place else '?') + 'tab=metrics'!r}")
    drawn = "[...document.querySelectorAll('.tab figure')]"
    await page.until(f"{drawn}.some((one) => one.textContent.includes('Temperature'))")


async def the_server_itself_is_looked_at(console: Console) -> None:
    page = console.page
    await what_agents_measure_is_drawn(console)
    await console.open("#/fleet/servers", "Servers")
    await console.says("[aria-label=Servers] tbody", "gpus, instances, proxies, boards, edge")
    await console.says("[aria-label=Streams] tbody", "edge")
    await console.says("[aria-label=Controllers] tbody", "instances/groups")
    await console.says(".database", "waiting to be written")
    await console.open("#/fleet/audit", "Audit")
    await page.until("document.querySelectorAll('[aria-label=\"Audit log\"] tbody tr').length > 20")
    await console.says(".verify", "fleetplane audit verify")
    await console.type("input[name=actor]", "token/boss")
    rows = "[...document.querySelectorAll('[aria-label=\"Audit log\"] tbody tr')]"
    await page.until(f"{rows}.length > 0 && {rows}.every((one) => one.textContent.includes('token/boss'))")
    await page.until("location.hash === '#/fleet/audit?actor=token%2Fboss'")
    await console.type("input[name=actor]", "user/")
    await console.type("input[name=action]", "virtual_host.create")
    await page.until(f"{rows}.length === 1")
    await console.click(".values")
    await console.says("#dialog .plan", "server_name: nothing → demo.localhost")
    await console.shut()
    await console.open("#/fleet/access", "Access")
    await console.says("[aria-label=People] tbody", "grace")
    await console.says("[aria-label=Tokens] tbody", "boss")
    await console.says("[aria-label=Sessions] tbody", "token/boss")
    await console.says(".provider-words", "sign in with Staff")
    await console.says("[aria-label='Enrolment tokens'] tbody", BOARD)
    await console.says("[aria-label='Enrolment tokens'] tbody", "build-4")
    await console.click("button.give")
    await console.dialog("Give a role")
    await console.set("#dialog input[name=subject]", "account/grace")
    await console.set("#dialog input[name=scope]", "/tenants/lab")
    await console.confirm("Done")
    await console.says("[aria-label=Roles] tbody", "/tenants/lab")
    await page.value("document.querySelector('#dialog .undo').click()")
    await console.says("#dialog .outcome", "Undone.")
    await page.until(
        "!document.querySelector('[aria-label=Roles] tbody').textContent.includes('/tenants/lab')"
    )
    await console.shut()


async def pictures(console: Console) -> None:
    """Pictures of the pages, where `make screenshots` asked for some: pixels, and SVG for documents."""
    wanted = os.environ.get(PICTURES)
    if not wanted:
        return
    folder = Path(wanted)
    folder.mkdir(parents=True, exist_ok=True)
    page = console.page
    await page.call(
        "Emulation.setDeviceMetricsOverride", width=1280, height=720, deviceScaleFactor=1, mobile=False
    )
    for name, title in {"": "Overview", **PAGES}.items():
        await console.open(f"#/fleet/{name}" if name else "#/", title)
        await console.page.until("[...document.querySelectorAll('main li, main td, main .row')].length > 0")
        made = await page.call("Page.captureScreenshot", format="png")
        (folder / f"{title.lower()}.png").write_bytes(base64.b64decode(made["data"]))
        (folder / f"{title.lower()}.svg").write_text(await page.value(DRAW.read_text()))
