"""Whoever has a network of IPv6 addresses is one stranger, not 2^64 of them."""

from __future__ import annotations

from prometheus_client import CollectorRegistry

from fleetplane.kernel.networks import network_of
from fleetplane.rpc.listening.warden import Budget, Rules, SeenConnection
from fleetplane.web.metrics_page import PER_ADDRESS, MetricsAnswer, MetricsPage

PORT = 8080


def seen(number: int, host: str) -> SeenConnection:
    return SeenConnection(
        descriptor=number, inode=1000 + number, port=PORT, peer=(host, number), received_bytes=0
    )


def rules(*, connections: int, per_address: int) -> Rules:
    return Rules({PORT: Budget(listener="web", connections=connections, per_address=per_address)})


def test_a_network_has_the_share_of_one_address() -> None:
    crowd = [seen(number, f"2001:db8:1:2:{number:x}::1") for number in range(1, 41)]
    others = [seen(100 + number, f"2001:db8:1:{number + 3:x}::1") for number in range(5)]
    cuts = rules(connections=100, per_address=10).decide([*others, *crowd], {}, now=1.0)
    assert len(cuts) == 30
    assert {cut.reason for cut in cuts} == {"address"}
    assert not {cut.seen.descriptor for cut in cuts} & {one.descriptor for one in others}


def test_a_full_listener_takes_from_the_network_that_holds_most() -> None:
    crowd = [seen(number, f"2001:db8:1:2::{number:x}") for number in range(1, 41)]
    others = [seen(100 + number, f"192.0.2.{number}") for number in range(5)]
    cuts = rules(connections=20, per_address=40).decide([*others, *crowd], {}, now=1.0)
    assert len(cuts) == 25
    assert not {cut.seen.descriptor for cut in cuts} & {one.descriptor for one in others}


async def test_metrics_under_way_are_bounded_by_network() -> None:
    page = MetricsPage(CollectorRegistry())
    statuses: list[int] = []

    async def ask(number: int) -> None:
        async def tell(answer: MetricsAnswer) -> None:
            statuses.append(answer.status)
            if answer.status == 200 and number < 2 * PER_ADDRESS:
                await ask(number + 1)  # while this one is still under way

        await page.answer(f"2001:db8::{number:x}", "", "", tell)

    await ask(1)
    assert statuses == [200] * PER_ADDRESS + [429]


def test_what_counts_as_one_address() -> None:
    assert network_of("192.0.2.1") == "192.0.2.1" == network_of("::ffff:192.0.2.1")
    assert network_of("2001:db8:1:2:3::4") == network_of("2001:db8:1:2::") == "2001:db8:1:2::/64"
    assert network_of("fe80::1%eth0") == "fe80::/64"
    assert network_of("::1") == "::1"
    assert network_of("") == ""
    assert network_of("unix:/run/x") == "unix:/run/x"
