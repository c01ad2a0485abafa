"""The console in a real browser, on a real server with fleets of every domain that can be had quickly."""

from __future__ import annotations

import asyncio
import json
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import httpx
import pytest
from support.instances.instances_lab import CONFIG_PATH, TENANT
from support.instances.instances_web_rig import OTHER, two_tenants
from support.shared.browser_rig import SECONDS, needs_chromium, tab
from support.shared.cli_runner import execute
from support.shared.rough_network import rough_network
from support.shared.server_process import running_server
from support.web import console_looks, console_walks
from support.web.console_fleets import DAEMONS, GPUS, Fleets, demo_fleets
from support.web.console_rig import Console

import fleetplane.web

pytestmark = needs_chromium

LIBRARY = Path(fleetplane.web.__file__).parent / "files" / "libraries" / "uPlot.esm.js"
PASSWORD = "a-password-of-tests"
TITLES = {"gpus": "GPUs", "dns-zones": "DNS zones"}
PROVIDER = (
    "--set",
    "oidc.issuer=http://127.0.0.1:9",
    "--set",
    "oidc.client_id=console",
    "--set",
    "oidc.name=Staff",
)
"""Nobody is sent there: the page only offers it."""


def token(folder: Path, name: str, *arguments: str) -> str:
    made = execute("tokens", "create", name, *arguments, "--data-dir", str(folder))
    assert made.code == 0, made.err
    return made.out.strip()


async def people_sign_in_and_out(console: Console, boss: str, folder: Path) -> None:
    """By password, and by a link that is good once; no script ever holds what lets somebody in."""
    page = console.page
    await page.until("document.querySelector('.provider')?.textContent === 'Sign in with Staff'")
    way = await page.value("document.querySelector('.provider').getAttribute('href')")
    assert way == "/apis/v1/people/oidc/login"
    async with httpx.AsyncClient(trust_env=False, timeout=SECONDS) as http:
        given = {"authorization": f"Bearer {boss}"}
        people = f"{console.base}/apis/v1/people"
        account = {"name": "grace", "password": "a good password"}
        made = await http.post(f"{people}/accounts", json=account, headers=given)
        assert made.status_code == 201, made.text
        bound = {"subject": "account/grace", "role": "admin", "scope": "/"}
        assert (await http.post(f"{people}/bindings", json=bound, headers=given)).status_code == 201
    await console.sign_in_as("grace", "a bad password")
    await page.until("document.querySelector('#refusal').textContent.includes('password is wrong')")
    await console.sign_in_as("grace", "a good password")
    await console.live()
    await page.until("document.querySelector('#caller').textContent === 'account/grace'")
    held = "JSON.stringify([document.cookie, {...localStorage}, {...sessionStorage}])"
    assert await page.value(held) == '["",{},{}]'
    await console.reload()
    await page.until("document.querySelector('#caller')?.textContent === 'account/grace'")
    await console.live()
    await console.sign_out()
    await console.reload()
    await page.until("document.querySelector('#sign-in')?.hidden === false")

    made_link = await asyncio.to_thread(execute, "open", "--data-dir", str(folder))
    assert made_link.code == 0, made_link.err
    code = made_link.out.strip().partition("#")[2]
    for who in ("operator/local", ""):
        await page.value(f"location.hash = {code!r}")
        await page.until("location.hash === ''")
        if who:
            await page.until(f"document.querySelector('#caller').textContent === {who!r}")
            await console.live()
            await console.sign_out()
        else:
            await page.until("document.querySelector('#refusal').textContent.includes('used before')")


async def freeze(base: str, token: str, scope: str, reason: str) -> None:
    """As another client does it."""
    async with httpx.AsyncClient(trust_env=False, timeout=SECONDS) as http:
        answer = await http.post(
            f"{base}/v1/fleet/freezes",
            json={"scope": scope, "domains": ["instances"], "reason": reason},
            headers={"authorization": f"Bearer {token}"},
        )
    assert answer.status_code < 300, answer.text


async def tables(base: str, token: str) -> dict[str, Any]:
    """What the API lists, by kind."""
    headers = {"authorization": f"Bearer {token}"}
    async with httpx.AsyncClient(
        base_url=f"{base}/apis/v1", headers=headers, trust_env=False, timeout=SECONDS
    ) as http:
        kinds = (await http.get("")).json()["resources"]
        return {
            one["plural"]: (await http.get(f"/table/{one['plural']}")).json()["rows"]
            for one in kinds
            if "list" in one["may"]
        }


async def every_kind_has_a_page(console: Console, boss: str) -> None:
    page = console.page
    listed = await tables(console.base, boss)
    assert len(listed) >= 20
    assert {"boards", "edge-nodes", "gpus", "instances", "virtual-hosts"} <= set(listed)
    for plural in listed:
        title = TITLES.get(plural) or plural.capitalize().replace("-", " ")
        await console.open(f"#/{plural}", title)
        if plural == "audit-entries":  # which go on, and push those of before out of sight
            await page.until("document.querySelectorAll('.space .row').length >= 5")
            continue
        for row in listed[plural][:5]:
            await page.until(f"{console.row(row['object']['name'])} !== null")
        assert await page.value("document.documentElement.scrollWidth <= innerWidth")
    assert [one for one in page.complaints if "401" not in one] == []  # of those that were refused


async def another_clients_change_appears(console: Console, boss: str, reason: str) -> None:
    page = console.page
    await console.open("#/freezes", "Freezes")
    await page.value("window.before = document.querySelector('main h1')")
    await freeze(console.base, boss, f"tenant/{TENANT}/group/{reason}", reason)
    await page.until(
        f"[...document.querySelectorAll('.space .row')].some((row) => row.textContent.includes({reason!r}))"
    )
    assert await page.value("window.before === document.querySelector('main h1')")  # nothing was reloaded


async def a_person_works_by_keyboard(console: Console) -> None:
    page = console.page
    await console.open("#/gpus", "GPUs")
    await console.rows(GPUS)
    name = await page.value("document.querySelector('.space .row[aria-rowindex=\"3\"]').dataset.name")
    await console.key("j")
    await console.key("j")
    await page.until("document.querySelector('.row.chosen')?.getAttribute('aria-rowindex') === '3'")
    await console.key("Enter")
    await page.until(f"document.querySelector('main h1').textContent === {name!r}")
    await page.until("document.querySelector('.tab').textContent.includes('Conditions')")
    await console.part("YAML")
    await page.until(f"document.querySelector('pre')?.textContent.includes('name: {name}')")
    await console.part("Explain")
    await page.until("document.querySelector('.reasons li') !== null")
    await console.part("Related")
    await page.until("document.querySelector('.related a')?.textContent === 'nvml-provider'")
    await console.key("Escape")
    await console.rows(GPUS)
    await console.key("/")
    await page.until("document.activeElement.name === 'q'")
    await console.type("input[name=q]", name)
    await console.rows(1)
    assert await page.value("location.hash") == f"#/gpus?q={name}"
    await console.type("input[name=labels]", "provider!=nvml-provider")
    await console.rows(0)
    await console.type("input[name=labels]", "what~ever")
    await page.until("document.querySelector('.list .error').textContent.includes('what~ever')")
    await a_selector_is_completed(console)
    await page.value("document.activeElement.blur()")
    await find(console, "fre")
    await page.until("document.querySelector('.found a')?.textContent === 'Freezes'")
    await console.key("Enter")
    await page.until("document.querySelector('main h1').textContent === 'Freezes'")
    await find(console, "scale workers")
    await page.until("document.querySelector('.found a')?.textContent === 'scale Group workers'")
    await console.key("Enter")
    await console.dialog("Set how many instances")
    await console.shut()
    await console.key("?")
    await console.dialog("next and previous row")
    await console.shut()
    await console.open("#/fleet/groups", "Groups")
    await page.until("document.querySelectorAll('article.group').length === 2")
    for place in (0, 1):
        await console.key("j")
        await page.until(
            f"document.querySelectorAll('article.group')[{place}].contains(document.activeElement)"
        )
    await console.key("Enter")
    await page.until("document.querySelector('main h1').textContent === 'workers'")
    await console.open("#/releases", "Releases")
    await console.says(".empty", "To get the first: fleetplane releases add WHEEL --server")


async def find(console: Console, words: str) -> None:
    """With Ctrl K."""
    page = console.page
    await page.call("Input.dispatchKeyEvent", type="keyDown", key="k", windowsVirtualKeyCode=75, modifiers=2)
    await page.until("document.querySelector('#dialog').open")
    await console.type("#dialog input", words)


async def a_selector_is_completed(console: Console) -> None:
    """Keys, what may follow them, and values, by arrow keys and Enter."""
    page = console.page
    await console.open("#/gpus", "GPUs")
    await console.rows(GPUS)
    await page.value("document.querySelector('input[name=labels]').focus()")
    offered = "[...document.querySelectorAll('.offers [role=option]')].map((one) => one.textContent).join()"
    for text, offers, takes, becomes in (
        ("prov", "provider", 1, "provider"),
        ("provider", "provider=,provider!=,provider in (,provider notin (", 2, "provider!="),
        ("provider=", "provider=nvml-provider", 1, "provider=nvml-provider"),
    ):
        await console.type("input[name=labels]", text)
        await page.until(f"{offered} === {offers!r}")
        for _ in range(takes):
            await console.key("ArrowDown")
        await console.key("Enter")
        await page.until(f"document.querySelector('input[name=labels]').value === {becomes!r}")
    await console.rows(GPUS)
    await page.until("location.hash === '#/gpus?labels=provider%3Dnvml-provider'")


async def a_group_is_scaled(console: Console) -> None:
    page = console.page
    await console.open(f"#/groups/workers?scope=/tenants/{TENANT}", "workers")
    await console.click("[data-action=scale]")
    await page.until("document.querySelector('#dialog').open")
    assert "Set how many instances" in await page.value("document.querySelector('#dialog').textContent")
    size = "document.querySelector('#dialog input[type=number]')"
    await page.value(f"{size}.value = '-4'")
    await page.value("document.querySelector('#dialog form').requestSubmit()")
    await page.until("document.querySelector('.outcome .error')?.textContent.length > 5")
    await page.value(f"{size}.value = '3'")
    await page.value("document.querySelector('#dialog form').requestSubmit()")
    await page.until("document.querySelector('.outcome').textContent === 'Done.'")
    await page.value("document.querySelector('#dialog').close()")
    await console.open(f"#/groups?scope=/tenants/{TENANT}", "Groups")
    await page.until(f"{console.row('workers')}?.textContent.includes('0/3')")
    await console.open(f"#/instances?scope=/tenants/{TENANT}", "Instances")
    await page.until("document.querySelectorAll('.space .row').length >= 3")


async def every_fleet_has_a_page(console: Console, fleets: Fleets, boss: str) -> None:
    given = {"authorization": f"Bearer {boss}"}
    async with httpx.AsyncClient(
        base_url=console.base, headers=given, trust_env=False, timeout=SECONDS
    ) as http:
        await console_walks.five_fleets_are_seen_at_a_glance(console)
        await console_walks.machines_are_one_list(console)
        await console_walks.gpus_are_a_grid(console)
        await console_walks.a_group_is_scaled_and_scaled_back(console, TENANT)
        await console_looks.a_group_is_configured(console, TENANT)
        await console_walks.a_virtual_host_is_edited_and_served(console, fleets)
        await console_looks.a_certificate_has_an_end(console, http)
        await console_looks.requests_are_charts_and_lines(console, fleets)
        await console_looks.a_host_is_tried_on_an_agent(console)
        await console_looks.a_machine_is_looked_into(console, http)
        await console_looks.a_board_is_worked_with(console, http)
        await console_walks.a_pin_is_driven(console)
        await console_walks.a_command_runs_on_three_daemons(console, http)
        await console_walks.a_rollout_is_halted(console, http)
        await console_walks.the_server_itself_is_looked_at(console)
        await console_walks.pictures(console)
    assert [one for one in console.page.complaints if "Content Security Policy" in one] == []


async def lists_of_ten_thousand_rows_are_windowed(console: Console) -> None:
    page = console.page
    await page.value("""(async () => {
        const { listPage } = await import('/ui/console/list.mjs');
        const { nothing, replaceComputed } = await import('/ui/console/model.mjs');
        const world = nothing(), row = (n) => ({cells: [`lamp-${String(n).padStart(5, '0')}`],
          object: {resource: 'lamps', name: `lamp-${String(n).padStart(5, '0')}`, scope: '/', uid: `u${n}`}});
        replaceComputed(world, 'lamps', Array.from({length: 10000}, (_, n) => row(n)), 0);
        const kind = {name: 'lamp', plural: 'lamps', shortNames: [], summary: '', domains: [], verbs: [],
          may: [], scopes: [], actions: [], relates: [], search: [],
          columns: [{title: 'NAME', type: 'text', wide: false}]};
        const app = {world, kinds: [kind], go() {}, replace() {}, isWatched: () => false,
          isLoaded: () => true, isRefused: () => false, otherPages: async () => []};
        window.many = listPage(app, kind, {});
        document.querySelector('main').replaceChildren(window.many.node);
        window.many.update(Date.now());
    })()""")
    assert await page.value("document.querySelector('.sentence').textContent") == (
        "10000 lamps; none needs attention."
    )
    await page.value("document.querySelector('.table').scrollTop = 1e9")
    await page.until("document.querySelector('.space').lastElementChild?.dataset.name === 'lamp-09999'")
    assert await page.value("document.querySelectorAll('.space .row').length") < 100
    await page.value("window.many.close()")


@pytest.mark.timeout(900)
async def test_operators_see_and_steer_every_fleet_and_tenants_only_their_own(tmp_path: Path) -> None:
    assert LIBRARY.exists(), "the library that draws charts is missing; run: tools/setup.sh console"
    folder = tmp_path / "data"
    config = folder / "objects" / CONFIG_PATH
    folder.mkdir(mode=0o700)
    config.parent.mkdir(parents=True)
    wanted = two_tenants()
    wanted["shard"]["garbage_collection"]["registration_timeout"] = "1h"  # nobody registers here
    config.write_text(json.dumps(wanted))
    with ExitStack() as stack:
        server = stack.enter_context(running_server(folder, *PROVIDER, admin_password=PASSWORD))
        boss = token(folder, "boss", "--role", "owner")
        ada = token(folder, "ada", "--role", "viewer", "--tenant", TENANT)
        async with rough_network(server.web.removeprefix("http://")) as network:
            base = f"http://{network.address}"
            async with tab(tmp_path / "browser", f"{base}/ui/") as page:
                console = Console(page, base)
                await console.sign_in("no-such-token")
                await page.until("document.querySelector('#refusal').textContent.includes('token')")
                await people_sign_in_and_out(console, boss, folder)
                await console.sign_in(boss)
                await console.live()
                async with demo_fleets(server, folder, boss, PASSWORD) as fleets:
                    await console.open("#/gpus", "GPUs")
                    await console.rows(GPUS)  # they came while the page was open
                    await every_kind_has_a_page(console, boss)
                    await another_clients_change_appears(console, boss, "maintenance")
                    await a_person_works_by_keyboard(console)
                    await every_fleet_has_a_page(console, fleets, boss)
                    await a_group_is_scaled(console)

                # What was heard of daemons that are gone is old, and says so.
                await console.open("#/edge-nodes", "Edge nodes")
                await page.until(
                    f"document.querySelectorAll('.space .row.stale').length === {len(DAEMONS)}"
                    " && document.querySelector('.space .row.stale').textContent.includes(', as of ')"
                )

                # The server is killed and started again under an open page.
                await console.open("#/freezes", "Freezes")
                server.process.kill()
                server.process.wait(60)
                await page.until("!document.querySelector('#banner').hidden")
                await console.says("#banner", "What is shown is as of ")
                assert await page.value("document.body.dataset.state") == "cut"
                server = stack.enter_context(running_server(folder, *PROVIDER, admin_password=PASSWORD))
                network.upstream = server.web.removeprefix("http://")
                await page.until("document.querySelector('#banner').hidden")
                await console.live()
                await another_clients_change_appears(console, boss, "restarted")
                await lists_of_ten_thousand_rows_are_windowed(console)

                # Somebody of one tenant sees nothing of the others.
                instances = (await tables(base, boss))["instances"]
                theirs = [row for row in instances if OTHER in row["object"]["scope"]]
                assert theirs
                await console.sign_out()
                await console.sign_in(ada)
                await console.live()
                await console.open("#/instances", "Instances")
                for row in instances:
                    if TENANT in row["object"]["scope"]:
                        await page.until(f"{console.row(row['object']['name'])} !== null")
                text = await page.value("document.documentElement.outerHTML")
                assert OTHER not in text
                assert not [one for one in theirs if one["object"]["name"] in text]

                # Who may not do a thing reads why.
                await console.open(f"#/groups/workers?scope=/tenants/{TENANT}&tab=edit", "workers")
                await console.says(
                    ".why-not", f"None of your roles includes this: you are viewer at /tenants/{TENANT}."
                )
                assert await page.value("document.querySelector('textarea[name=spec]').readOnly")

                # Whose token ends is signed out.
                done = await asyncio.to_thread(execute, "tokens", "revoke", "ada", "--data-dir", str(folder))
                assert done.code == 0, done.err
                await page.until("document.querySelector('#sign-in').hidden === false")
                assert await page.value("document.querySelector('main').childElementCount") == 0
