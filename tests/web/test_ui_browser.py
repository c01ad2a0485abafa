"""The live page in a real browser, on a real listener."""

from __future__ import annotations

import time
from pathlib import Path
from urllib.parse import quote

from support.instances.instances_lab import TENANT
from support.instances.instances_web_rig import OTHER, web
from support.shared.browser_rig import Tab, needs_chromium, tab

from fleetplane.domains.instances.kinds import Instance
from fleetplane.kernel.freeze import freeze
from fleetplane.kernel.values.times import NS

pytestmark = needs_chromium

MARKUP = '<img src=x onerror="document.title=1"><b>bold</b>'


def cell(table: str, row: int, column: int) -> str:
    return f"document.querySelector('#{table}').tBodies[0].rows[{row}]?.cells[{column}].textContent"


def rows(table: str) -> str:
    return f"document.querySelector('#{table}').tBodies[0].rows.length"


def shown_first(made: list[Instance]) -> str:
    """The one in the first row: pages know the second in which each was made, and in one, ids decide."""
    return min(made, key=lambda one: (one.created_at_ns // NS, one.name)).name


async def is_live(page: Tab) -> None:
    await page.until("document.querySelector('#status')?.textContent === 'live'")


async def test_a_person_sees_groups_and_instances_live_and_learns_why(tmp_path: Path) -> None:
    async with web(tmp_path / "server") as site:
        first = shown_first(await site.provisioned(2))
        ada = await site.viewer()
        token = ada.headers["authorization"].removeprefix("Bearer ")
        url = f"{site.http.base_url}/ui/instances#token={quote(token)}"
        async with tab(tmp_path / "browser", url) as page:
            await is_live(page)
            await page.until(f"{rows('instances')} === 2")
            # The token has left the address, and lives no longer than the tab.
            assert await page.value("location.hash") == ""
            assert await page.value("[localStorage.length, document.cookie]") == [0, ""]
            await page.until(f"{cell('groups', 0, 0)} === 'workers'")  # drawn by itself, before or after
            assert await page.value(cell("groups", 0, 2)) == "0"

            await site.change(first, registered_at_ns=time.time_ns(), last_error=MARKUP)
            await page.until(f"{cell('groups', 0, 2)} === '1'")
            await page.until(f"{cell('instances', 0, 2)} === 'registered'")
            # What the server says is text, whatever it looks like.
            await page.until(f"{cell('instances', 0, 5)} === {MARKUP!r}")
            assert await page.value("document.querySelectorAll('main img, main b').length") == 0

            await freeze(site.lab.kernel.store, f"tenant/{TENANT}", reason="audit week", actor="grace")
            await page.until(f"{cell('groups', 0, 7)} === 'audit week (grace)'")
            site.lab.domain._errors.tell(TENANT, "workers", "", MARKUP)
            await page.until(f"{cell('errors', 0, 2)} === {MARKUP!r}")

            # By keyboard alone: to the button, into the dialog, and out of it.
            await page.value("document.querySelector('#instances tbody button').focus()")
            await page.press("Enter", 13)
            await page.until(
                "document.querySelector('#why').open "
                "&& document.querySelector('#reasons').textContent.includes('The last thing tried')"
            )
            assert MARKUP in await page.value("document.querySelector('#reasons').textContent")
            await page.press("Escape", 27)
            await page.until("!document.querySelector('#why').open")
            assert page.complaints == []


async def test_the_page_comes_back_by_itself_and_signs_out_when_its_token_ends(tmp_path: Path) -> None:
    async with web(tmp_path / "server") as site:
        first = shown_first(await site.provisioned(2))
        ada = await site.viewer("ada", tenant="")
        async with tab(tmp_path / "browser", f"{site.http.base_url}/ui/instances") as page:
            # By hand, with a token of no tenant: which one is said in the form.
            await page.until("document.querySelector('#sign-in')?.hidden === false")
            token = ada.headers["authorization"].removeprefix("Bearer ")
            await page.value(f"document.querySelector('#token').value = {token!r}")
            await page.value(f"document.querySelector('#tenant').value = {TENANT!r}")
            await page.value("document.querySelector('#sign-in button').click()")
            await is_live(page)
            await page.until(f"{rows('instances')} === 2")

            # Cut off, it goes on where it was.
            await page.value("window.before = document.querySelector('#instances').tBodies[0].rows[0]")
            await page.value(
                "{ const told = document.querySelector('#status'); new MutationObserver(() => {"
                " if (told.textContent !== 'live') window.wasAway = true; })"
                ".observe(told, {childList: true, characterData: true, subtree: true}); } 0"
            )
            for watch in list(site.lab.domain.rest.feed._watches):
                watch.close()
            await page.until("window.wasAway === true")  # it may be back by now
            await site.change(first, last_error="while it was away")
            await is_live(page)
            await page.until(f"{cell('instances', 0, 5)} === 'while it was away'")
            assert await page.value(
                "window.before === document.querySelector('#instances').tBodies[0].rows[0]"
            )

            await site.lab.kernel.operators.tokens.revoke("ada", actor="test")
            await page.until("document.querySelector('#sign-in').hidden === false")
            assert await page.value("document.querySelector('#view').hidden")
            assert await page.value("sessionStorage.length") == 0
            assert "token" in await page.value("document.querySelector('#refusal').textContent")


async def test_a_token_of_one_tenant_shows_no_other(tmp_path: Path) -> None:
    async with web(tmp_path / "server") as site:
        theirs = (await site.provisioned(1, tenant=OTHER))[0]
        await site.provisioned(2)
        ada = await site.viewer()
        token = ada.headers["authorization"].removeprefix("Bearer ")
        url = f"{site.http.base_url}/ui/instances#token={quote(token)}&tenant={OTHER}"
        async with tab(tmp_path / "browser", url) as page:
            await page.until("document.querySelector('#sign-in')?.hidden === false")
            assert "one tenant" in await page.value("document.querySelector('#refusal').textContent")
            assert theirs.name not in await page.value("document.documentElement.outerHTML")
