"""Charts of the console, as a real browser draws them under the policy of our pages."""

from __future__ import annotations

import shutil
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from prometheus_client import CollectorRegistry
from support.shared.browser_rig import Tab, needs_chromium, tab

import fleetplane.web
from fleetplane.rpc import ListenerSpec, open_listener
from fleetplane.web import documents
from fleetplane.web.documents import console_mounts
from fleetplane.web.ops import OpsApp

pytestmark = needs_chromium

FILES = Path(fleetplane.web.__file__).parent / "files"
LIBRARY = FILES / "libraries" / "uPlot.esm.js"
HOME, LEFT = 36, 37
BEGIN = """(async () => {
  window.violations = [];
  addEventListener('securitypolicyviolation', (one) => window.violations.push(one.violatedDirective));
  const { chart, chartOf, renewCharts, shareCursor } = await import('/ui/console/chart.mjs');
  document.querySelector('#sign-in').hidden = true;
  const minutes = (count, value) =>
    Array.from({length: count}, (_, n) => ({at: n * 60000, value: value(n)}));
  const how = {stepMs: 60000, from: 0, to: 60 * 60000};
  // Nothing was heard from the 20th to the 40th minute, and only once between.
  const heat = minutes(61, () => 40).filter((one, n) => n <= 20 || n === 30 || n >= 40);
  const stack = shareCursor(document.createElement('div'));
  stack.className = 'charts';
  stack.append(
    chart('Temperature', ' °C', heat, {...how, threshold: 80}),
    chartOf('Requests', '', [{name: 'all', points: minutes(61, (n) => n)},
      {name: 'errors', points: minutes(61, () => 1)}], how),
    chart('Nothing', '', [], how));
  document.body.replaceChildren(stack);
  window.stack = stack;
  window.renew = () => renewCharts(stack, [
    chart('Temperature', ' °C', heat, {...how, threshold: 80}),
    chart('Requests', '', minutes(61, (n) => n + 100), how)]);
})()"""
LOADED = "performance.getEntriesByType('resource').map((one) => one.name)"
PIXELS = """((number, token) => {
  const canvas = document.querySelectorAll('figure canvas')[number];
  const probe = document.createElement('canvas').getContext('2d');
  probe.fillStyle = getComputedStyle(document.documentElement).getPropertyValue(token).trim();
  probe.fillRect(0, 0, 1, 1);
  const wanted = probe.getImageData(0, 0, 1, 1).data;
  const {data, width, height} = canvas.getContext('2d').getImageData(0, 0, canvas.width, canvas.height);
  const columns = new Set(), rows = new Set();
  for (let y = 0; y < height; y++) for (let x = 0; x < width; x++) {
    const place = 4 * (y * width + x);
    if (data[place + 3] > 100 && [0, 1, 2].every((one) => Math.abs(data[place + one] - wanted[one]) < 24)) {
      columns.add(x); rows.add(y);
    }
  }
  const over = canvas.closest('.plot').querySelector('.u-over').getBoundingClientRect();
  const left = over.left - canvas.getBoundingClientRect().left;
  return {minutes: [...columns].map((x) => 60 * (x - left) / over.width), rows: [...rows], height};
})"""


@asynccontextmanager
async def console(folder: Path) -> AsyncIterator[Tab]:
    """A page of the console on a listener without anything behind it."""
    ops = OpsApp(CollectorRegistry(), version="0")
    ops.mount(console_mounts())
    spec = ListenerSpec(name="web", addresses=("127.0.0.1:0",), app=ops, http1=True)
    async with (
        open_listener(spec, grace_seconds=2) as listener,
        tab(folder / "browser", f"{listener.addresses[0]}/ui/") as page,
    ):
        await page.until("document.querySelector('#sign-in') !== null")
        assert [one for one in await page.value(LOADED) if "/libraries/" in one] == []  # not before a chart
        await page.value(BEGIN)
        yield page


async def drawn(page: Tab, number: int, token: str) -> Any:
    """Minutes and rows at which a chart has pixels of a colour."""
    return await page.value(f"{PIXELS}({number}, {token!r})")


def near(minutes: list[float], minute: float) -> bool:
    return any(abs(one - minute) < 0.7 for one in minutes)


async def forbidden(page: Tab) -> list[str]:
    said = [one for one in page.complaints if "Content Security Policy" in one or "Trusted" in one]
    return [*said, *await page.value("window.violations")]


async def test_charts_are_drawn_with_gaps_thresholds_and_one_cursor(tmp_path: Path) -> None:
    assert LIBRARY.exists(), "the library is missing; run: tools/setup.sh console"
    async with console(tmp_path) as page:
        await page.until("document.querySelectorAll('figure canvas').length === 2")
        captions = await page.value(
            "[...document.querySelectorAll('figcaption')].map((one) => one.textContent)"
        )
        assert captions == [
            "Temperature: now 40.0 °C, 40.0 to 40.0 °C",
            "Requests: all now 60.0, 0.0 to 60.0; errors now 1.0, 1.0 to 1.0",
            "Nothing: nothing measured yet",
        ]

        # The line, where something was measured, and a dot where that was alone.
        line = await drawn(page, 0, "--accent")
        assert all(near(line["minutes"], minute) for minute in (1, 10, 19, 30, 41, 50, 59))
        assert not any(near(line["minutes"], minute) for minute in (22, 25, 28, 32, 35, 38))
        threshold = await drawn(page, 0, "--bad")
        assert len(threshold["rows"]) <= 2
        assert max(threshold["rows"]) < min(line["rows"])  # 80 is above 40
        assert near(threshold["minutes"], 5) or near(threshold["minutes"], 6)  # it is dashed
        assert (await drawn(page, 1, "--bad"))["rows"]  # the second series

        # Pointing at one of them tells the values of both; so do keys.
        over = await page.value(
            "(({left, top, width, height}) => [left + width / 4, top + height / 2])"
            "(document.querySelector('.u-over').getBoundingClientRect())"
        )
        await page.call("Input.dispatchMouseEvent", type="mouseMoved", x=1, y=1)
        await page.call("Input.dispatchMouseEvent", type="mouseMoved", x=over[0], y=over[1])
        told = "[...document.querySelectorAll('.at')].map((one) => one.textContent.replace(/^.*?: /, ''))"
        await page.until(f"{told}.join() === '40.0 °C,all 15.0, errors 1.0'")
        places = "[...document.querySelectorAll('.u-cursor-x')].map((one) => one.style.transform)"
        assert len(set(await page.value(places))) == 1
        await page.call("Input.dispatchMouseEvent", type="mouseMoved", x=1, y=1)
        await page.until(f"{told}.join('') === ''")
        await page.value("document.querySelector('.plot').focus()")
        await page.press("Home", HOME)
        await page.until(f"{told}.join() === '40.0 °C,all 0.0, errors 1.0'")
        await page.value("document.activeElement.blur()")
        await page.until(f"{told}.join('') === ''")
        await page.value("document.querySelectorAll('.plot')[1].focus()")
        for _ in range(2):
            await page.press("ArrowLeft", LEFT)
        await page.until(f"{told}[1] === 'all 59.0, errors 1.0'")
        assert await page.value("document.activeElement.getAttribute('aria-valuenow')") == str(59 * 60_000)
        assert "all 59.0" in await page.value("document.activeElement.getAttribute('aria-valuetext')")

        # What is read again takes the place of what was there, under who looks at it.
        await page.value("window.renew()")
        await page.until(f"{told}.join() === '40.0 °C,159'")
        assert await page.value("document.activeElement === document.querySelectorAll('.plot')[1]")
        await page.press("ArrowLeft", LEFT)
        await page.until(f"{told}.join() === '40.0 °C,158'")

        # Colours and sizes follow what is around; what is taken away leaves nothing behind.
        for scheme in ("dark", "light"):
            media = [{"name": "prefers-color-scheme", "value": scheme}]
            await page.call("Emulation.setEmulatedMedia", features=media)
            await page.until(f"{PIXELS}(0, '--accent').rows.length > 0")
        for width in (480, 250):  # in a column of its own, so that it is as wide as the element
            await page.value(f"window.stack.style.width = '{width}px'")
            await page.until(f"document.querySelector('canvas').width === {width}")
            await page.until(f"{PIXELS}(0, '--accent').rows.length > 0")
        left = (
            "import('/ui/libraries/uPlot.esm.js').then((one) =>"
            " one.default.sync(window.stack.dataset.cursor).plots.length)"
        )
        assert await page.value(left) == 2
        await page.value("window.stack.replaceChildren()")
        await page.until(f"{left}.then((count) => count === 0)")

        assert await forbidden(page) == []
        await page.value(
            "document.body.setAttribute('style', 'color: red')"
        )  # what the policy forbids is seen
        await page.until("window.violations.length === 1")


async def test_numbers_take_the_place_of_charts_where_the_library_is_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.copytree(FILES, tmp_path / "files", ignore=shutil.ignore_patterns("libraries"))
    monkeypatch.setattr(documents, "files", lambda _package: tmp_path)
    async with console(tmp_path) as page:
        await page.until("document.querySelectorAll('figure table').length === 2")
        words = await page.value("document.querySelector('figure .empty').textContent")
        assert words.startswith("This server was built without the library that draws charts;")
        cells = "[...document.querySelectorAll('figure')[1].querySelectorAll('tbody tr')]"
        newest = await page.value(
            f"{cells}.slice(0, 2).map((row) => [...row.cells].slice(1).map((c) => c.textContent))"
        )
        assert newest == [["60.0", "1.0"], ["59.0", "1.0"]]
        assert await page.value(f"{cells}.length") == 60
        assert await page.value("document.querySelectorAll('canvas').length") == 0
        assert await forbidden(page) == []
