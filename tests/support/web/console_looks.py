"""What operators look into with the console: requests, logs, figures, history, and text with its lines."""

from __future__ import annotations

import asyncio

import httpx
from support.shared.browser_rig import SECONDS
from support.web.console_fleets import BOARD, WORKSPACE, Fleets, board_number
from support.web.console_rig import Console
from support.web.console_walks import until_served, workspace_id

SEEN = "seen-in-the-console"


async def a_certificate_has_an_end(console: Console, http: httpx.AsyncClient) -> None:
    """Another client has one made; the page tells how long it is good."""
    await console.open(f"#/fleet/proxies?workspace={WORKSPACE}", "Proxies")
    path = f"/v1/workspaces/{await workspace_id(http)}/certificates"
    made = await http.post(path, json={"domain": "demo.localhost", "provider": "selfsigned"})
    assert made.status_code < 300, made.text
    await console.says("[aria-label=Certificates] tbody", "expires in ")


async def requests_are_charts_and_lines(console: Console, fleets: Fleets) -> None:
    """What NGINX served is counted, charted and written down, and an agent's log is followed."""
    page = console.page
    await console.open(f"#/fleet/proxies?workspace={WORKSPACE}", "Proxies")
    await page.until("document.querySelectorAll('.charts.traffic figure').length === 4")
    await console.choose("select[name=tail-agent]", "nginx-1")
    await console.choose(".logs select[name=source]", "access")
    await console.set(".logs input[name=contains]", SEEN)
    await console.click(".logs .follow")
    await console.says(".logs .follow", "Pause")
    await until_served(fleets.nginx[1], SEEN, "hello from behind NGINX")
    await console.says(".logs .log", SEEN)
    await console.click(".logs .follow")
    await console.says(".logs .follow", "Follow")
    agent = await _counted(console, "nginx-1")
    # The last line lies over the others where their values are the same.
    await console.charted(".charts.traffic", 4, "--accent", "--bad", "--good")
    await console.says("[aria-label=Addresses]", "127.0.0.1")
    await console.says("[aria-label=Paths]", "/")
    await console.says("[aria-label='Traffic by virtual host'] tbody", "Site")
    await console.says("[aria-label='Traffic by location'] tbody", "Site /")
    await console.says("[aria-label='Traffic by upstream'] tbody", "backend")
    await console.set("select[name=traffic-agent]", agent)
    rows = "[...document.querySelectorAll('[aria-label=\"Traffic by agent\"] tbody tr')]"
    await page.until(f"{rows}.length === 1 && {rows}[0].textContent.includes('nginx-1')")
    await console.set("input[name=status]", "2xx")
    await page.value("document.querySelector('form.stored').requestSubmit()")
    await page.until(
        "[...document.querySelectorAll('[aria-label=\"Access log\"] li')].some((one) =>"
        f" one.textContent.includes({SEEN!r}))"
    )


async def _counted(console: Console, name: str) -> str:
    """The id of an agent, once its requests are counted: until then, figures are read again and again."""
    page = console.page
    reads = "Number(document.querySelector('.charts.traffic').dataset.reads ?? 0)"
    option = (
        "[...document.querySelector('select[name=traffic-agent]').options]"
        f".find((one) => one.textContent === {name!r})?.value"
    )
    counted = "document.querySelector('.traffic-words').textContent.includes('99 of 100')"
    async with asyncio.timeout(SECONDS):
        while True:
            before = await page.value(reads)
            await page.value(
                "document.querySelector('select[name=range]').dispatchEvent(new Event('change'))"
            )
            await page.until(f"{reads} > {before}")
            if await page.value(f"{counted} && !!{option}"):
                return str(await page.value(option))
            await asyncio.sleep(0.2)


async def a_host_is_tried_on_an_agent(console: Console) -> None:
    """By the NGINX of the chosen agent, with its own words where it refuses."""
    await console.click("tr[data-name=Site] .edit")
    await console.dialog("Virtual host Site")
    await console.choose("#dialog select[name=try-agent]", "nginx-1")
    await _tried(console, "NGINX of nginx-1 accepts it.")
    await console.set("#dialog input[name=listenPort]", "0")
    await _tried(console, "listen_port: Must be between 1 and 65535")
    await console.shut()


async def _tried(console: Console, words: str) -> None:
    """Ask an agent, again where it took longer than the server waits for it."""
    verdict, told = "document.querySelector('#dialog .verdict').textContent", ""
    try:
        async with asyncio.timeout(SECONDS):
            while words not in told:
                await console.click("#dialog .validate")
                await console.page.until(f"!{verdict}.startsWith('Asking')")
                told = await console.page.value(verdict)
    except TimeoutError as error:
        raise AssertionError(f"it never said {words!r} but {told!r}") from error


async def measured(http: httpx.AsyncClient) -> None:
    """A board's figures are there: pages read them when they are opened, and then once a minute."""
    number = board_number((await http.get("/api/v1/nodes")).json())
    async with asyncio.timeout(SECONDS):
        for series in ("cpu_usage", "memory_usage", "disk_usage"):
            path = f"/api/v1/nodes/{number}/metrics?series={series}"
            while not (await http.get(path)).json()["points"]:
                await asyncio.sleep(0.2)


async def a_machine_is_looked_into(console: Console, http: httpx.AsyncClient) -> None:
    """Its log, what it measured, what happened to it: each a tab with an address."""
    page = console.page
    where = f"#/proxy-agents/nginx-0?scope={WORKSPACE}"
    await console.open(f"{where}&tab=logs&level=notice", "nginx-0")
    await console.says(".tab .log", "start worker process")
    await console.part("Metrics")
    await page.until("document.querySelectorAll('.tab figure').length === 4")
    await console.part("History")
    await console.says(".tab .recent", "agent.register by agent/")
    await console.says(".tab [role=status]", "entries of the audit log are about it")
    await measured(http)
    await console.open(f"#/boards/{BOARD}?tab=metrics", BOARD)
    await console.charted(".tab", 3)


async def a_group_is_configured(console: Console, tenant: str) -> None:
    """What the server refuses is shown at its line; then the plan, before anything changes."""
    page = console.page
    await console.open("#/fleet/groups", "Groups")
    link = f"[...document.querySelectorAll('.configure')].find((one) => one.href.includes('{tenant}'))"
    await page.until(f"!!{link}")
    await page.value(f"{link}.click()")
    await page.until("document.querySelector('textarea[name=spec]')?.value.includes('\"size\": 2')")
    for text, verdict in (
        ('{\n  "size": 2,\n}', "Line 3: expected a text in double quotes"),
        ('{\n  "template": "worker",\n  "size": -4\n}', "Line 3: size: must be from 0 to 100000, not -4"),
        ('{\n  "size": 2,\n  "colour": "red"\n}', "Line 3: colour: This field is not known"),
    ):
        await console.set("textarea[name=spec]", text)
        await console.says("#spec-verdict", verdict)
        await page.until("document.querySelector('.numbers').children[2].className === 'wrong'")
    await console.set("textarea[name=spec]", '{\n  "size": 4,\n  "template": "worker"\n}')
    await console.says("#spec-verdict", "The server would take this.")
    await console.click(".show-plan")
    await console.dialog("1 to be changed")
    await console.says("#dialog .plan", "spec.size: 2 → 4")
    await console.says("#dialog .plan", "Disturbs: 2 instances are made")
    await console.shut()


async def a_board_is_worked_with(console: Console, http: httpx.AsyncClient) -> None:
    """Figures as charts, its log followed, a program that it refuses in its own words, a check of it."""
    await console.open("#/fleet/boards", "Boards")
    await console.charted(".charts", 3)
    await console.choose(".logs select[name=source]", "agent")
    await console.click(".logs .follow")
    await console.says(".logs .log", "listener.opened")
    await console.click(".logs .follow")
    spec = {"selector": "name=nobody", "programs": [{"name": "blink", "command": "/usr/bin/blink"}]}
    made = await http.put(
        "/apis/v1/board-sets/lamps?scope=/tenants/default",
        json={"kind": "board-set", "metadata": {"name": "lamps", "scope": "/tenants/default"}, "spec": spec},
    )
    assert made.status_code == 201, made.text
    await console.says("[aria-label='Sets of boards'] tbody", "blink /usr/bin/blink")
    await console.set("input[name=program]", "uptime")
    await console.click(".run-program")
    await console.dialog("Run a program")
    await console.confirm("Begun")
    await console.shut()
    await console.says(".program-outcome", "this node runs no commands")
    await console.says("[aria-label='Programs run'] tbody", "uptime")
    await console.click("[data-order=check]")
    await console.dialog("Check it")
    await console.click("#dialog .show-steps")
    await console.says("#dialog .steps-planned", "there is no SSH credential named")
    await console.shut()
