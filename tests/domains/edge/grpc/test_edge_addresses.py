"""Whose address counts when proxies stand between."""

from __future__ import annotations

import pytest

from fleetplane.domains.edge.grpc.node_cluster import caller_address, networks
from fleetplane.kernel.errors import SettingsError

TRUSTED = networks(["10.0.0.0/8", "192.0.2.1", "2001:db8:1::/48"])


@pytest.mark.parametrize(
    ("peer", "forwarded", "expected"),
    [
        ("203.0.113.5", [], "203.0.113.5"),
        ("203.0.113.5", ["198.51.100.1"], "203.0.113.5"),  # nobody's proxy: its words count for nothing
        ("10.1.1.1", ["198.51.100.1"], "198.51.100.1"),
        ("10.1.1.1", ["6.6.6.6, 198.51.100.1"], "198.51.100.1"),  # what the caller wrote itself is left of it
        ("10.1.1.1", ["6.6.6.6, 198.51.100.1, 10.2.2.2"], "198.51.100.1"),
        ("10.1.1.1", ["198.51.100.1", "192.0.2.1"], "198.51.100.1"),  # in two fields
        ("10.1.1.1", [], "10.1.1.1"),
        ("10.1.1.1", ["unknown"], "10.1.1.1"),
        ("10.1.1.1", ["198.51.100.1:4711"], "198.51.100.1"),
        ("10.1.1.1", ["[2001:db8:2::7]:4711"], "2001:db8:2::/64"),
        ("2001:db8:1::1", ["2001:db8:2:3:aaaa::1"], "2001:db8:2:3::/64"),
        ("::ffff:10.1.1.1", ["198.51.100.1"], "198.51.100.1"),
        ("unix", ["198.51.100.1"], "unix"),
    ],
)
def test_the_first_address_from_the_right_that_is_no_proxy_of_ours_counts(
    peer: str, forwarded: list[str], expected: str
) -> None:
    assert caller_address(peer, forwarded, TRUSTED) == expected


def test_an_endless_chain_is_read_only_so_far() -> None:
    assert caller_address("10.1.1.1", [",".join(["10.1.1.1"] * 10_000)], TRUSTED) == "10.1.1.1"


def test_a_proxy_that_is_no_address_is_a_mistake_in_the_settings() -> None:
    with pytest.raises(SettingsError):
        networks(["not-a-network"])
