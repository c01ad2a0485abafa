"""The console in a real browser: from a change to the screen, and 10,000 rows with 200 changes a second."""

from __future__ import annotations

import asyncio
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import grpc

from bench import population, servers
from bench.figures import Effort, Row, alone

sys.path.insert(0, str(servers.ROOT / "tests"))

ROWS = 10_000
CHANGES_PER_SECOND = 200
CHANGES = 20
"""Of which each is timed to the screen."""
FLOOD_SECONDS = 10.0
MUST_SHOW_SECONDS = 1.0
MUST_FRAME_MS = 50.0
"""Twenty pictures a second: what still looks smooth in a table."""
MUST_HEAP_MB = 150.0
UPDATE = "/nvidia.device.v1alpha1.ProviderService/UpdateGpuCondition"
WATCH_FRAMES = """(() => {
  window.frameTimes = []; let before = performance.now();
  const step = (now) => {
    window.frameTimes.push(now - before); before = now; window.going = requestAnimationFrame(step);
  };
  window.going = requestAnimationFrame(step);
})()"""
WATCH_HEALTH = """(() => {
  const cell = document.querySelector('.space .row[data-name=gpu-0000]').querySelectorAll('[role=cell]')[1];
  const before = cell.textContent;
  window.shown = new Promise((done) => new MutationObserver((_, watcher) => {
    if (cell.textContent !== before) { watcher.disconnect(); done(Date.now()); }
  }).observe(cell, {subtree: true, childList: true, characterData: true}));
})()"""


async def _opened(page: Any, token: str, count: int) -> None:
    await page.until("document.querySelector('#sign-in')?.hidden === false")
    await page.value(f"document.querySelector('#token').value = {token!r}")
    await page.value("document.querySelector('#by-token button').click()")
    await page.until("document.querySelector('#status').textContent === 'live'")
    await page.value("location.hash = '#/gpus'")
    await page.until(f"document.querySelector('.sentence')?.textContent.includes('{count} ')")


async def _to_screen(page: Any, channel: grpc.aio.Channel, turns: int) -> list[float]:
    """Seconds from the sending of each change until the row shows it."""
    update: Any = channel.unary_unary(UPDATE)
    seconds = []
    for turn in range(turns):
        await page.value(WATCH_HEALTH)
        begun = time.time()
        await update(population.change(0, turn + 1))
        seconds.append(await page.value("window.shown") / 1000 - begun)
    return seconds


async def _flooded(
    page: Any, channel: grpc.aio.Channel, count: int, seconds: float
) -> tuple[list[float], float]:
    """Frames while rows change at the rate, in milliseconds, and megabytes of the page's heap after it."""
    update: Any = channel.unary_unary(UPDATE)
    await page.value(WATCH_FRAMES)
    begun = time.monotonic()
    async with asyncio.TaskGroup() as tasks:
        for number in range(int(seconds * CHANGES_PER_SECOND)):
            await asyncio.sleep(max(0.0, begun + number / CHANGES_PER_SECOND - time.monotonic()))
            tasks.create_task(_sent(update, population.change(number % count, number + 1000)))
    await page.until("window.frameTimes.length > 2")  # of a browser that had no time for pictures until now
    frames = await page.value("(cancelAnimationFrame(window.going), window.frameTimes)")
    await page.call("HeapProfiler.collectGarbage")
    heap = await page.value("performance.memory.usedJSHeapSize")
    return [float(one) for one in frames[1:]], heap / 1e6


async def _sent(update: Any, request: bytes) -> None:
    await update(request)


async def _measured(server: servers.Server, folder: Path, token: str, effort: Effort) -> dict[str, Any]:
    from support.shared.browser_rig import tab

    count = effort.gpus or ROWS
    async with (
        grpc.aio.insecure_channel(server.authority) as channel,
        tab(folder / "browser", f"{_web(folder)}/ui/") as page,
    ):
        await _opened(page, token, count)
        shown = await _to_screen(page, channel, CHANGES if effort.gpus is None else 2)
        frames, heap = await _flooded(page, channel, count, FLOOD_SECONDS if effort.gpus is None else 0.5)
    return {"shown": shown, "frames": frames, "heap": heap, "count": count}


def _web(folder: Path) -> str:
    said = json.loads((folder / "data.ready").read_text())
    return str(said["listeners"]["web"][0])


def _token(data: Path) -> str:
    command = [str(Path(sys.executable).with_name("fleetplane")), "tokens", "create", "bench"]
    command += ["--role", "viewer", "--data-dir", str(data)]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()


def measure(effort: Effort) -> Sequence[Row]:
    count = effort.gpus or ROWS
    with (
        servers.load_core() as core,
        servers.scratch() as folder,
        servers.fleetplane(folder / "data", core, ["gpus.max_gpus=20000"]) as server,
    ):
        population.register(server, count)
        found = asyncio.run(_measured(server, folder, _token(folder / "data"), effort))
    shown, frames = sorted(found["shown"]), sorted(found["frames"])
    slow = frames[max(0, int(len(frames) * 0.99) - 1)]
    return [
        Row(
            figure=f"From a change to the screen, {count} rows",
            ours=f"{statistics.median(shown):.2f} s",
            reference="",
            ratio=None,
            must_reach=f"under {MUST_SHOW_SECONDS:g} s",
            reached=statistics.median(shown) < MUST_SHOW_SECONDS,
            note=f"{shown[0]:.2f} s to {shown[-1]:.2f} s",
        ),
        Row(
            figure=f"Frame of {count} rows, {CHANGES_PER_SECOND} changes a second, 99 of 100",
            ours=f"{slow:.0f} ms",
            reference="",
            ratio=None,
            must_reach=f"under {MUST_FRAME_MS:g} ms",
            reached=slow < MUST_FRAME_MS,
            note=f"median {statistics.median(frames):.0f} ms, longest {frames[-1]:.0f} ms",
        ),
        Row(
            figure=f"Heap of the page, {count} rows",
            ours=f"{found['heap']:.0f} MB",
            reference="",
            ratio=None,
            must_reach=f"under {MUST_HEAP_MB:g} MB",
            reached=found["heap"] < MUST_HEAP_MB,
        ),
    ]


if __name__ == "__main__":
    alone(measure, __doc__)
