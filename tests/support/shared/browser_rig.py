"""A real browser without a window, driven over its debugging port."""

from __future__ import annotations

import asyncio
import itertools
import json
import shutil
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
import websockets

CHROMIUM = shutil.which("chromium")
START_SECONDS = 60.0
SECONDS = 60.0
MESSAGE_LIMIT_BYTES = 16 * 1024 * 1024
ARGUMENTS = (
    "--headless=new",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-dev-shm-usage",
    "--no-first-run",
    "--disable-extensions",
    "--disable-background-networking",
    "--disable-component-update",
    "--remote-debugging-port=0",
    "--remote-allow-origins=*",
    "about:blank",
)

LEFT = (
    "Cannot find context with specified id",
    "Cannot find default execution context",
    "Execution context was destroyed.",
    "Inspected target navigated or closed",
)
"""What a browser says of a question to a page that another took the place of meanwhile."""

needs_chromium = pytest.mark.skipif(CHROMIUM is None, reason="there is no chromium on this machine")


class PageLeft(AssertionError):
    """The page that was asked is not shown any more."""


class PageThrew(AssertionError):
    """What was asked cannot be told of the page, as of an element that is not there."""


class Tab:
    """One tab: what it shows, and what its console complained of."""

    def __init__(self, socket: websockets.ClientConnection) -> None:
        self._socket = socket
        self._numbers = itertools.count(1)
        self.complaints: list[str] = []

    async def call(self, method: str, **parameters: Any) -> Any:
        number = next(self._numbers)
        await self._socket.send(json.dumps({"id": number, "method": method, "params": parameters}))
        async with asyncio.timeout(SECONDS):
            while True:
                said = json.loads(await self._socket.recv())
                if said.get("id") == number:
                    if said.get("error", {}).get("message") in LEFT:
                        raise PageLeft(said)
                    assert "error" not in said, said
                    return said["result"]
                self._hear(said)

    def _hear(self, said: dict[str, Any]) -> None:
        match said.get("method"):
            case "Log.entryAdded":
                entry = said["params"]["entry"]
                if entry["level"] == "error":
                    self.complaints.append(f"{entry['text']} {entry.get('url', '')}")
            case "Runtime.exceptionThrown":
                self.complaints.append(str(said["params"]["exceptionDetails"]))

    async def value(self, expression: str) -> Any:
        """Of an expression in the page."""
        found = await self.call(
            "Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True
        )
        if "exceptionDetails" in found:
            raise PageThrew(found)
        return found["result"].get("value")

    async def until(self, expression: str) -> None:
        """Wait for something to be so; a page that is still loaded has not all of its elements."""
        threw: list[str] = []
        try:
            async with asyncio.timeout(SECONDS):
                while not await self._holds(expression, threw):
                    await asyncio.sleep(0.05)
        except TimeoutError as error:
            text = await self.value("document.body?.innerText")
            words = f"{expression} never became true; the page says:\n{text}"
            raise AssertionError("\n".join([words, *threw])) from error

    async def _holds(self, expression: str, threw: list[str]) -> bool:
        """`threw` is what the page says of an expression that fails."""
        threw.clear()
        try:
            return bool(await self.value(expression))
        except PageLeft:
            return False
        except PageThrew as error:
            threw.append(str(error))
            return False

    async def press(self, key: str, code: int) -> None:
        for kind in ("keyDown", "keyUp"):
            await self.call(
                "Input.dispatchKeyEvent",
                type=kind,
                key=key,
                code=key,
                windowsVirtualKeyCode=code,
                **({"text": "\r"} if key == "Enter" and kind == "keyDown" else {}),
            )


@asynccontextmanager
async def tab(folder: Path, url: str, *, arguments: Sequence[str] = ()) -> AsyncIterator[Tab]:
    """A browser with its own profile, and one tab of it; `arguments` are further ones of the browser."""
    assert CHROMIUM is not None
    browser = await asyncio.create_subprocess_exec(
        CHROMIUM,
        f"--user-data-dir={folder}",
        *arguments,
        *ARGUMENTS,
        stdout=asyncio.subprocess.DEVNULL,
        stderr=asyncio.subprocess.DEVNULL,
    )
    try:
        port = await _port(folder / "DevToolsActivePort")
        async with httpx.AsyncClient(trust_env=False, timeout=START_SECONDS) as http:
            made = (await http.put(f"http://127.0.0.1:{port}/json/new?about:blank")).json()
        async with websockets.connect(
            made["webSocketDebuggerUrl"],
            max_size=MESSAGE_LIMIT_BYTES,
            proxy=None,
            ping_interval=None,  # answers are not read while a test waits for something else
        ) as socket:
            found = Tab(socket)
            for name in ("Runtime", "Log", "Page"):
                await found.call(f"{name}.enable")
            await found.call("Page.navigate", url=url)
            yield found
    finally:
        if browser.returncode is None:
            browser.kill()
        await browser.wait()


async def _port(file: Path) -> int:
    async with asyncio.timeout(START_SECONDS):
        while True:
            lines = file.read_text().splitlines() if file.exists() else []
            if len(lines) > 1 and lines[0].isdecimal():  # as a whole
                return int(lines[0])
            await asyncio.sleep(0.05)
