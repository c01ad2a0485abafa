"""What an operator does with the console, in a real browser."""

from __future__ import annotations

import json
from typing import Any

from support.shared.browser_rig import Tab

HAS_PIXELS = """((canvas, tokens) => {
  const probe = document.createElement('canvas').getContext('2d');
  const colours = tokens.map((token) => {
    probe.fillStyle = getComputedStyle(document.documentElement).getPropertyValue(token).trim();
    probe.fillRect(0, 0, 1, 1);
    return probe.getImageData(0, 0, 1, 1).data;
  });
  const { data } = canvas.getContext('2d').getImageData(0, 0, canvas.width, canvas.height);
  for (let place = 0; place < data.length; place += 4)
    if (data[place + 3] > 100 && colours.some((colour) =>
      [0, 1, 2].every((one) => Math.abs(data[place + one] - colour[one]) < 16))) return true;
  return false;
})"""
KEYS = {"j": 74, "k": 75, "/": 191, "?": 191, "Enter": 13, "Escape": 27, "ArrowDown": 40}


class Console:
    """What an operator does with the page."""

    def __init__(self, page: Tab, base: str) -> None:
        self.page = page
        self.base = base

    async def sign_in(self, token: str) -> None:
        await self.page.until("document.querySelector('#sign-in')?.hidden === false")
        await self.page.value(f"document.querySelector('#token').value = {token!r}")
        await self.page.value("document.querySelector('#by-token button').click()")

    async def sign_in_as(self, name: str, password: str) -> None:
        await self.page.until("document.querySelector('#sign-in')?.hidden === false")
        await self.page.value(f"document.querySelector('#name').value = {name!r}")
        await self.page.value(f"document.querySelector('#password').value = {password!r}")
        await self.page.value("document.querySelector('#by-password button').click()")

    async def sign_out(self) -> None:
        await self.page.value("document.querySelector('#sign-out').click()")
        await self.page.until("document.querySelector('#sign-in').hidden === false")

    async def reload(self) -> None:
        """Load the page anew; the one of before answers until the other is there."""
        await self.page.value("window.isOld = true")
        await self.page.call("Page.reload")
        await self.page.until("window.isOld !== true")

    async def live(self) -> None:
        await self.page.until("document.querySelector('#status').textContent === 'live'")

    async def open(self, place: str, title: str) -> None:
        await self.page.value(f"location.hash = {place!r}")
        await self.page.until(
            f"document.querySelector('main h1')?.textContent === {title!r}"
            " && document.querySelector('.sentence').textContent !== 'Loading.'"
        )

    async def says(self, selector: str, words: str) -> None:
        """Wait until an element holds these words."""
        await self.page.until(f"document.querySelector({selector!r})?.textContent.includes({words!r})")

    async def _do(self, element: str, what: str) -> None:
        """Do something to an element, `one`, once it is there: found and done in one turn of the page."""
        await self.page.until(
            f"(() => {{ const one = {element}; if (!one) return false; {what}; return true; }})()"
        )

    async def click(self, selector: str) -> None:
        await self._do(f"document.querySelector({selector!r})", "one.click()")

    async def set(self, selector: str, value: str) -> None:
        """Give a field or a choice a value, as somebody who writes it."""
        await self._do(
            f"document.querySelector({selector!r})",
            f"one.value = {json.dumps(value)}; for (const kind of ['input', 'change'])"
            " one.dispatchEvent(new Event(kind, {bubbles: true}))",
        )

    async def choose(self, selector: str, value: str) -> None:
        """Of a choice that the page offers once it knows of it."""
        options = f"[...(document.querySelector({selector!r})?.options ?? [])]"
        await self.page.until(f"{options}.some((one) => one.value === {value!r})")
        await self.set(selector, value)

    async def dialog(self, words: str) -> None:
        await self.page.until(
            "document.querySelector('#dialog').open"
            f" && document.querySelector('#dialog').textContent.includes({words!r})"
        )

    async def confirm(self, words: str) -> None:
        """Do what the dialog says, once it has asked the server, and wait for what it tells then."""
        await self.page.until("!!document.querySelector('#dialog form')")
        await self.page.value("document.querySelector('#dialog form').requestSubmit()")
        await self.says("#dialog .outcome", words)

    async def shut(self) -> None:
        await self.page.value("document.querySelector('#dialog').close()")

    def row(self, name: str) -> str:
        return f"document.querySelector('.space .row[data-name={json.dumps(name)}]')"

    async def rows(self, count: int) -> None:
        await self.page.until(f"document.querySelectorAll('.space .row').length === {count}")

    async def charted(self, around: str, count: int, *colours: str) -> None:
        """Wait until charts have drawn something: more than a grid, in one of the colours of lines."""
        canvases = f"[...document.querySelectorAll({around + ' figure canvas'!r})]"
        drawn = f"{HAS_PIXELS}(one, {json.dumps(colours or ['--accent'])})"
        await self.page.until(f"{canvases}.filter((one) => {drawn}).length >= {count}")

    async def type(self, field: str, text: str) -> None:
        await self._do(
            f"document.querySelector({field!r})",
            f"one.value = {text!r}; one.dispatchEvent(new Event('input', {{bubbles: true}}))",
        )

    async def part(self, title: str) -> None:
        links = "[...document.querySelectorAll('.tabs a')]"
        await self._do(f"{links}.find((one) => one.textContent === {title!r})", "one.click()")

    async def key(self, key: str, modifiers: int = 0) -> None:
        for kind in ("keyDown", "keyUp"):
            more: dict[str, Any] = {"text": "\r"} if key == "Enter" and kind == "keyDown" else {}
            await self.page.call(
                "Input.dispatchKeyEvent",
                type=kind,
                key=key,
                windowsVirtualKeyCode=KEYS[key],
                modifiers=modifiers,
                **more,
            )
