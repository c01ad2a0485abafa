"""What keeps people out of a page, as axe finds it: dark and light, on a phone and on a wide screen."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from support.web.console_rig import Console

AXE = Path(__file__).parents[3] / ".make" / "clients" / "node_modules" / "axe-core" / "axe.min.js"
LOOKS = ((390, "dark"), (390, "light"), (1440, "dark"), (1440, "light"))
RULES = "{runOnly: ['wcag2a', 'wcag2aa', 'wcag21aa', 'wcag22aa'], resultTypes: ['violations']}"


async def prepared(console: Console) -> None:
    """Axe itself; it goes with the page."""
    assert AXE.exists(), "`make test` installs axe-core with what tests need"
    await console.page.value(AXE.read_text() + "; 0")


async def shown(console: Console, place: str, title: str, filled: str) -> None:
    """Open a page and wait until it has what it is about."""
    await console.page.value(f"location.hash = {place!r}")
    await console.page.until(
        f"location.hash === {place!r}"
        f" && document.querySelector('main h1')?.textContent.includes({title!r})"
        " && document.querySelector('.sentence').textContent !== 'Loading.'"
        f" && document.querySelector({filled!r}) !== null"
    )


async def look(console: Console, width: int, scheme: str) -> None:
    page = console.page
    await page.call(
        "Emulation.setDeviceMetricsOverride", width=width, height=800, deviceScaleFactor=1, mobile=False
    )
    features = {"prefers-color-scheme": scheme, "prefers-reduced-motion": "reduce"}
    await page.call(
        "Emulation.setEmulatedMedia", features=[{"name": name, "value": features[name]} for name in features]
    )


async def looked_at(console: Console, around: str, looks: Sequence[tuple[int, str]] = LOOKS) -> None:
    """No findings, and nothing scrolls sideways."""
    page = console.page
    for width, scheme in looks:
        await look(console, width, scheme)
        found = await page.value(
            f"axe.run({around!r}, {RULES}).then((found) =>"
            " found.violations.map((one) => [one.id, one.nodes.map((node) => node.html.slice(0, 200))]))"
        )
        assert found == [], (await page.value("location.hash"), around, width, scheme)
        assert await page.value("document.documentElement.scrollWidth <= innerWidth"), (
            await page.value("location.hash"),
            width,
        )
