"""Every page of the console with fleets of every domain: nothing keeps people out, and nothing breaks in."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from contextlib import ExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from support.instances.instances_lab import CONFIG_PATH, TENANT
from support.instances.instances_web_rig import OTHER, two_tenants
from support.shared.browser_rig import SECONDS, Tab, needs_chromium, tab
from support.shared.cli_runner import execute
from support.shared.server_process import running_server
from support.web.console_axe import LOOKS, look, looked_at, prepared, shown
from support.web.console_fleets import BOARD, EDGE_TENANT, GPUS, WORKSPACE, demo_fleets
from support.web.console_looks import measured
from support.web.console_rig import Console
from support.web.console_walks import PAGES, until_served

pytestmark = needs_chromium

PASSWORD = "a-password-of-tests"
HOSTILE = Path(__file__).parents[1] / "support" / "web" / "hostile.js"
MARKUP = '"\'><img src=x onerror="hacked=1"><script>hacked=1<svg onload=hacked=1>&lt;\u202eturned'
"""No slash: names that are parts of scopes have none."""
FILLED = {
    "machines": ".space .row",
    "gpus": ".grid a",
    "groups": "article.group",
    "proxies": ".charts.traffic figure",
    "boards": ".charts figure canvas",
    "edge": "[aria-label=Daemons] tbody tr",
    "servers": ".database dd",
    "audit": "[aria-label='Audit log'] tbody tr",
    "access": "[aria-label=Sessions] tbody tr",
}
"""What is on a page once it has been read, where the sentence is there before."""
TABS = {
    "overview": ".tab dl",
    "related": ".tab .related li, .tab p",
    "logs": ".tab .log li",
    "metrics": ".tab figure",
    "history": ".tab .recent li",
    "explain": ".tab .reasons li",
    "yaml": ".tab pre",
}


def token(folder: Path, name: str, *arguments: str) -> str:
    made = execute("tokens", "create", name, *arguments, "--data-dir", str(folder))
    assert made.code == 0, made.err
    return made.out.strip()


async def nothing_keeps_people_out(console: Console) -> None:
    """On every page, every tab of an object and the list of every kind; most dialogs: with boards."""
    page = console.page
    await prepared(console)
    await shown(console, "#/", "Overview", ".counts li")
    await looked_at(console, "html")  # the menu and the header are the same around every page
    for name, title in PAGES.items():
        await shown(console, f"#/fleet/{name}", title, FILLED.get(name, "main h1"))
        await looked_at(console, "main")
    for tab_name, filled in TABS.items():
        place = f"#/proxy-agents/nginx-0?scope={WORKSPACE}&tab={tab_name}"
        await shown(console, place, "nginx-0", filled)
        await looked_at(console, "main")
    edited = f"#/groups/workers?scope=/tenants/{TENANT}&tab=edit"
    await shown(console, edited, "workers", "textarea[name=spec]")
    await looked_at(console, "main")
    await shown(console, f"#/fleet/proxies?workspace={WORKSPACE}", "Proxies", "tr[data-name=Site] .edit")
    await console.click("tr[data-name=Site] .edit")
    await console.dialog("Virtual host Site")
    await looked_at(console, "#dialog")
    await console.shut()
    # Lists of kinds are one page with other columns: each of them one way, all ways in turn.
    kinds: Any = await page.value(
        "fetch('/apis/v1').then((one) => one.json()).then((told) => told.resources.map((one) => one.plural))"
    )
    assert len(kinds) > 25
    for number, plural in enumerate(kinds):
        await shown(console, f"#/{plural}", "", "main .list")
        await looked_at(console, "main", [LOOKS[number % len(LOOKS)]])
    await look(console, *LOOKS[2])
    await page.value("document.querySelector('#density').click()")
    await shown(console, "#/gpus", "GPUs", ".space .row")
    await page.until("document.querySelector('.space .row').offsetHeight === 24")
    await looked_at(console, "main", LOOKS[2:])
    await page.value("document.querySelector('#density').click()")
    await page.until("document.querySelector('.space .row').offsetHeight === 32")
    await page.value("document.querySelector('#menu').click()")
    await looked_at(console, "html", LOOKS[:1])
    await look(console, *LOOKS[3])


@asynccontextmanager
async def hostile(page: Tab, text: str, *, is_long: bool) -> AsyncIterator[None]:
    """Load the page anew with everything named so."""
    given = json.dumps({"text": text, "isLong": is_long})
    source = f"globalThis.hostile = {given};\n{HOSTILE.read_text()}"
    made = await page.call("Page.addScriptToEvaluateOnNewDocument", source=source)
    try:
        yield
    finally:
        await page.call("Page.removeScriptToEvaluateOnNewDocument", identifier=made["identifier"])


async def nothing_breaks_in(console: Console) -> None:
    """Names with markup, quotes and turned writing, and names of ten thousand letters, on every page."""
    page = console.page
    for text, is_long in ((MARKUP, False), ("x" * 10_000, True)):
        async with hostile(page, text, is_long=is_long):
            await console.reload()
            await console.live()
            kinds: Any = await page.value(
                "fetch('/apis/v1').then((one) => one.json()).then((told) =>"
                " told.resources.map((one) => one.plural))"
            )
            places = {
                "#/": ".counts li",
                **{f"#/fleet/{name}": FILLED.get(name, "main h1") for name in PAGES},
                f"#/proxy-agents/nginx-0?scope={WORKSPACE}&tab=yaml": "main h1",
            }
            for place, filled in places.items():
                await look(console, 390 if is_long else 1440, "light")
                await page.value(f"location.hash = {place!r}")
                await page.until(
                    "document.querySelector('main .sentence')?.textContent !== 'Loading.'"
                    f" && document.querySelector({filled!r}) !== null"
                )
                if place == "#/fleet/machines":  # they are there as text
                    mark = "x" * 50 if is_long else "onerror"
                    await page.until(f"document.querySelector('main').textContent.includes({mark!r})")
                await holds(page, place)
            for plural in kinds:
                await page.value(f"location.hash = '#/{plural}'")
                await page.until(
                    f"location.hash === '#/{plural}' && document.querySelector('main .list')"
                    " && document.querySelector('main .sentence').textContent !== 'Loading.'"
                )
                await holds(page, plural)
                first = "document.querySelector('.space .row a')"
                if await page.value(f"{first} !== null && ({first}.click(), true)"):
                    await page.until("document.querySelector('main .detail dl') !== null")
                    await holds(page, f"one of {plural}")
    await console.reload()
    await console.live()


async def holds(page: Tab, place: str) -> None:
    found = await page.value(
        "[window.hacked ?? 0, window.violated ?? '',"
        " document.querySelectorAll('main img, main script, main svg[onload]').length,"
        " document.body.textContent.includes('\\u202e'), document.documentElement.scrollWidth <= innerWidth]"
    )
    assert found == [0, "", 0, False, True], place
    assert [one for one in page.complaints if "status of 4" not in one] == [], place


async def addresses_of_others_show_nothing(console: Console, boss: str, ada: str) -> None:
    """What another tenant has cannot be had by writing its name into the address bar."""
    page = console.page
    given = {"authorization": f"Bearer {boss}"}
    async with httpx.AsyncClient(
        base_url=console.base, headers=given, trust_env=False, timeout=SECONDS
    ) as http:
        instances = (await http.get("/apis/v1/instances")).json()["items"]
    theirs = next(one for one in instances if OTHER in one["metadata"]["scope"])
    await console.sign_out()
    await console.sign_in(ada)
    await console.live()
    scope, name = theirs["metadata"]["scope"], theirs["metadata"]["name"]
    secrets = (theirs["status"]["providerId"] or "no such text", theirs["metadata"]["uid"])
    for place in (
        f"#/instances/{name}?scope={scope}",
        f"#/instances/{name}?scope={scope}&tab=yaml",
        f"#/instances/{theirs['metadata']['uid']}",
        f"#/groups/workers?scope=/tenants/{OTHER}&tab=edit",
    ):
        await page.value(f"location.hash = {place!r}")
        await page.until(
            f"location.hash === {place!r} && /there is no|not found|not known|None of your roles/i"
            ".test(document.querySelector('main .sentence')?.textContent)"
        )
        shown_text = await page.value("document.querySelector('main .tab').textContent")
        assert shown_text == ""
        assert not [one for one in secrets if one in shown_text]
    for place, title in (
        (f"#/fleet/edge?tenant={EDGE_TENANT}", "Edge"),
        (f"#/fleet/proxies?workspace={WORKSPACE}", "Proxies"),
        (f"#/fleet/boards?board={BOARD}", "Boards"),
        (f"#/fleet/machines?q={BOARD}", "Machines"),
    ):
        await console.open(place, title)
        await page.until("/There are no /.test(document.querySelector('main .sentence').textContent)")
        assert await page.value("document.querySelectorAll('main tbody tr, main .space .row').length") == 0
    for place in ("#/fleet/constructor", "#/__proto__/toString?tab=constructor", "#/%E0%A4%A/x"):
        await page.value(f"location.hash = {place!r}")
        await page.until("document.querySelector('main h1')?.textContent === 'Not found'")
    # A link of somebody else asks before it makes this page theirs.
    await page.value("location.hash = '#token=somebody-elses'")
    await console.dialog("Sign in anew?")
    assert "somebody-elses" not in await page.value("location.href")
    await console.click("#dialog .stay")
    assert await page.value("document.querySelector('#caller').textContent") == "token/ada"
    await page.value("location.hash = '#token=somebody-elses'")
    await console.dialog("Sign in anew?")
    await console.click("#dialog .anew")
    await page.until("document.querySelector('#sign-in').hidden === false")
    await page.until("document.querySelector('#refusal').textContent.includes('token')")


@pytest.mark.timeout(900)
async def test_every_page_lets_everybody_in_and_nobody_break_in(tmp_path: Path) -> None:
    folder = tmp_path / "data"
    config = folder / "objects" / CONFIG_PATH
    folder.mkdir(mode=0o700)
    config.parent.mkdir(parents=True)
    wanted = two_tenants()
    wanted["shard"]["garbage_collection"]["registration_timeout"] = "1h"  # nobody registers here
    config.write_text(json.dumps(wanted))
    with ExitStack() as stack:
        server = stack.enter_context(running_server(folder, admin_password=PASSWORD))
        boss = token(folder, "boss", "--role", "owner")
        ada = token(folder, "ada", "--role", "viewer", "--tenant", TENANT)
        async with tab(tmp_path / "browser", f"{server.web}/ui/") as page:
            console = Console(page, server.web)
            await page.until("document.querySelector('#sign-in')?.hidden === false")
            await prepared(console)
            await looked_at(console, "html")
            async with demo_fleets(server, folder, boss, PASSWORD) as fleets:
                await console.sign_in(boss)
                await console.live()
                await console.open("#/gpus", "GPUs")
                await console.rows(GPUS)
                await console.open(f"#/edge-nodes?scope=/tenants/{EDGE_TENANT}", "Edge nodes")
                await page.until("document.querySelectorAll('.space .row').length === 3")
                given = {"authorization": f"Bearer {boss}"}
                async with httpx.AsyncClient(
                    base_url=server.web, headers=given, trust_env=False, timeout=SECONDS
                ) as http:
                    await measured(http)  # pages read figures when they are opened
                for url in fleets.nginx:  # and logs of agents that are there
                    await until_served(url, "", "hello from behind NGINX")
                await nothing_keeps_people_out(console)
                await nothing_breaks_in(console)
                await addresses_of_others_show_nothing(console, boss, ada)
