"""Services that report to any of several servers."""

from __future__ import annotations

import asyncio

from support.shared import virtual_loop
from support.shared.virtual_servers import VirtualServer, until, virtual_servers

from fleetplane.domains.boards.inventory.last_seen import (
    AGAIN_NS,
    BOARD_SERVICE,
    SERVICES_LIMIT,
    ServiceReport,
    ServiceReports,
)
from fleetplane.kernel.kinds import KERNEL_KINDS
from fleetplane.kernel.resources import Condition


async def _hear(
    server: VirtualServer, service: str, at_ns: int, status: str = "ok", message: str = ""
) -> None:
    said = Condition(type=service, status=status, message=message)
    report = ServiceReport(reporter="controller", service=service, conditions=(said,), at_ns=at_ns)
    with server.store.writing_here():
        await ServiceReports(server.store).heard(report)


def _told(server: VirtualServer) -> list[tuple[str, str, int]]:
    found = ServiceReports(server.store).all()
    return [(one.service, one.conditions[0].status, one.at_ns) for one in found]


def test_every_server_tells_what_any_of_them_heard() -> None:
    async def scene() -> None:
        async with virtual_servers((*KERNEL_KINDS, BOARD_SERVICE)) as servers:
            a, b = [await servers.start(name) for name in "ab"]
            await _hear(b, "dns", 1)
            await until(lambda: _told(a) == [("dns", "ok", 1)])
            revision = a.store.revision
            await _hear(a, "dns", 2, message="took 3 ms")  # nothing new
            assert a.store.revision == revision
            await _hear(a, "dns", 3, "late")
            await until(lambda: _told(b) == [("dns", "late", 3)])
            await _hear(b, "dns", 2)  # one that was overtaken
            assert _told(b) == [("dns", "late", 3)]
            await _hear(b, "dns", 3 + AGAIN_NS, "late")
            await until(lambda: _told(a) == [("dns", "late", 3 + AGAIN_NS)])

    virtual_loop.run(scene())


def test_the_oldest_of_too_many_services_is_forgotten() -> None:
    async def scene() -> None:
        async with virtual_servers((*KERNEL_KINDS, BOARD_SERVICE)) as servers:
            a, b = [await servers.start(name) for name in "ab"]
            for number in range(SERVICES_LIMIT):
                await _hear(a, f"s{number}", number)
            await until(lambda: len(_told(b)) == SERVICES_LIMIT)
            await _hear(b, "one more", SERVICES_LIMIT)
            await until(lambda: ("one more", "ok", SERVICES_LIMIT) in _told(a))
            assert len(_told(a)) == SERVICES_LIMIT
            assert "s0" not in {service for service, _, _ in _told(a)}
            await asyncio.gather(*(_hear(one, "same", 10**6) for one in (a, b)))
            await until(lambda: _told(a) == _told(b))

    virtual_loop.run(scene())
