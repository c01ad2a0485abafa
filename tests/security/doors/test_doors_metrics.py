"""What a stranger can do with `/metrics`: read it where that is meant, and cost next to nothing."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from prometheus_client import CollectorRegistry
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector
from support.shared.server_process import running_server

from fleetplane.sim.clock import VirtualClock
from fleetplane.web.metrics_page import IN_ALL, PER_ADDRESS, MetricsAnswer, MetricsPage

SIZE_LIMIT_BYTES = 60_000
ANSWER_SECONDS = 60.0
WAIT_SECONDS = 60.0


class Counted(Collector):
    def __init__(self, clock: VirtualClock | None = None, seconds: float = 0.0) -> None:
        self.collected = 0
        self._clock = clock
        self._seconds = seconds

    def collect(self) -> Iterator[Metric]:
        self.collected += 1
        if self._clock is not None:
            self._clock.stall(self._seconds)
        yield GaugeMetricFamily("collected", "How often", self.collected)


def page_of(collector: Counted, clock: VirtualClock, **options: object) -> MetricsPage:
    registry = CollectorRegistry(auto_describe=False)
    registry.register(collector)
    collector.collected = 0
    return MetricsPage(registry, clock=clock, **options)  # type: ignore[arg-type]


async def test_a_thousand_questions_within_a_second_are_collected_once() -> None:
    clock = VirtualClock()
    counted = Counted()
    page = page_of(counted, clock)
    texts = {await page.text(accept) for _ in range(250) for accept in ("", "application/openmetrics-text")}
    assert counted.collected == 1
    assert len(texts) == 2, "the same numbers for everyone, in two formats"
    clock.stall(1.1)
    await page.text("")
    assert counted.collected == 2


async def test_numbers_that_take_long_to_collect_are_kept_longer() -> None:
    clock = VirtualClock()
    counted = Counted(clock, seconds=0.5)
    page = page_of(counted, clock)
    clock.stall(0)
    await page.text("")
    clock.stall(9)
    await page.text("")
    assert counted.collected == 1
    clock.stall(2)
    await page.text("")
    assert counted.collected == 2


async def test_answers_under_way_are_bounded_by_address_and_in_all() -> None:
    page = page_of(Counted(), VirtualClock())
    statuses: list[int] = []
    go = asyncio.Event()

    async def slow(answer: MetricsAnswer) -> None:
        statuses.append(answer.status)
        if answer.status == 200:
            await go.wait()  # a client that does not read

    async with asyncio.TaskGroup() as tasks:
        for _ in range(PER_ADDRESS + 3):
            tasks.create_task(page.answer("192.0.2.1", "", "", slow))
        for number in range(IN_ALL):
            tasks.create_task(page.answer(f"192.0.2.{2 + number}", "", "", slow))
        async with asyncio.timeout(ANSWER_SECONDS):
            while len(statuses) < PER_ADDRESS + 3 + IN_ALL:
                await asyncio.sleep(0.001)
        assert statuses.count(200) == IN_ALL
        assert statuses.count(429) == 3 + PER_ADDRESS
        go.set()
    await page.answer("192.0.2.1", "", "", slow)
    assert statuses[-1] == 200, "whoever has been answered may ask again"


@pytest.mark.parametrize(
    ("token", "needs", "shown", "expected"),
    [
        ("", False, "", 200),
        ("", True, "", 401),
        ("", True, "Bearer ", 401),
        ("s3cret", True, "", 401),
        ("s3cret", True, "Bearer wrong", 401),
        ("s3cret", True, "Basic s3cret", 401),
        ("s3cret", True, "Bearer s3cret", 200),
        ("s3cret", False, "", 401),
        ("s3cret", False, "bearer s3cret", 200),
    ],
)
async def test_who_may_read_the_numbers(token: str, needs: bool, shown: str, expected: int) -> None:
    page = page_of(Counted(), VirtualClock(), token=token, needs_token=needs)
    told: list[MetricsAnswer] = []

    async def tell(answer: MetricsAnswer) -> None:
        told.append(answer)

    await page.answer("192.0.2.1", "", shown, tell)
    assert [answer.status for answer in told] == [expected]


def test_a_server_at_rest_tells_little_and_to_no_page_of_another_name(tmp_path: Path) -> None:
    with running_server(tmp_path) as server:
        port = server.web.rpartition(":")[2]
        for host, status in (
            ("evil.example", 421),
            (f"evil.example:{port}", 421),
            ("127.0.0.1.evil.example", 421),
            (f"localhost:{port}", 200),
            (f"[::1]:{port}", 200),
        ):
            assert httpx.get(server.web + "/metrics", headers={"host": host}).status_code == status, host
        assert len(httpx.get(server.web + "/metrics").content) < SIZE_LIMIT_BYTES
        assert server.stop() == 0


def test_a_page_that_others_can_reach_needs_its_token(tmp_path: Path) -> None:
    arguments = ("--only", "gpus", "--set", "listeners.web.addresses=0.0.0.0:0")
    environment = {"FLEETPLANE_METRICS__TOKEN": "s3cret"}
    with running_server(tmp_path, *arguments, environment=environment) as server:
        port = server.web.rpartition(":")[2]
        url = f"https://127.0.0.1:{port}"
        with httpx.Client(verify=False) as client:  # who it is, is not what this is about
            assert client.get(url + "/healthz").status_code == 200
            refused = client.get(url + "/metrics")
            assert (refused.status_code, refused.headers["www-authenticate"]) == (
                401,
                'Bearer realm="metrics"',
            )
            allowed = client.get(url + "/metrics", headers={"authorization": "Bearer s3cret"})
            assert "fleetplane_store_revision" in allowed.text
        assert server.stop() == 0


def test_twenty_kilobytes_of_questions_hold_up_nobody(tmp_path: Path) -> None:
    """The attack that stalled everybody: many requests at once, from clients that read nothing."""
    with running_server(tmp_path) as server, contextlib.ExitStack() as stack:
        host, _, port = server.web.removeprefix("http://").rpartition(":")
        request = b"GET /metrics HTTP/1.1\r\nhost: x\r\n\r\n"
        done = threading.Event()

        def attack() -> None:
            while not done.is_set():
                with contextlib.suppress(OSError), socket.create_connection((host, int(port)), 5) as peer:
                    peer.sendall(request * 50)
                    done.wait(0.5)

        threads = [threading.Thread(target=attack) for _ in range(60)]
        for thread in threads:
            stack.callback(thread.join, ANSWER_SECONDS)
            thread.start()
        stack.callback(done.set)
        began = time.monotonic()
        for _ in range(10):  # each took seven seconds when every question was answered on the event loop
            assert httpx.get(server.web + "/healthz", timeout=WAIT_SECONDS).text == "ok\n"
        assert time.monotonic() - began < WAIT_SECONDS
