"""Who may be an agent: the decision alone."""

from __future__ import annotations

import pytest

from fleetplane.domains.proxies.agents.machines import Approach, Holder, MachineVerdict, verdict
from fleetplane.domains.proxies.kinds.records import AgentTokenStatus

NS = 1_000_000_000
NOW = 1000 * NS
FIRST = "ipv4:192.0.2.1:1"
V = MachineVerdict


def approach(peer: str = "ipv4:192.0.2.2:2", *, key: str = "", hostname: str = "web-01") -> Approach:
    return Approach(hostname=hostname, address="192.0.2.2", peer=peer, key=key)


def bound(key: str = "", *, approved: str = "", until: int = NOW + NS) -> AgentTokenStatus:
    return AgentTokenStatus(activated_at_ns=1, key=key, approved=approved, approved_until_ns=until)


def holder(peer: str = FIRST, *, silent_seconds: float = 0) -> Holder:
    return Holder(peer=peer, last_seen_ns=NOW - round(silent_seconds * NS))


@pytest.mark.parametrize(
    ("comes", "binding", "open_", "expected"),
    [
        (approach(), None, None, V.WELCOME),
        (approach(), bound(), None, V.WELCOME),
        (approach(), bound(), holder(), V.CONTENDS),
        (approach(), bound(), holder(silent_seconds=44), V.CONTENDS),
        (approach(), bound(), holder(silent_seconds=45), V.WELCOME),
        (approach(FIRST), bound(), holder(FIRST), V.WELCOME),
        (approach(""), bound(), holder(""), V.CONTENDS),
        (approach(key="k"), bound(), None, V.WELCOME),
        (approach(key="k"), bound(), holder(), V.CONTENDS),
        (approach(key="k"), bound("k"), holder(), V.WELCOME),
        (approach(key="other"), bound("k"), None, V.CONTENDS),
        (approach(), bound("k"), None, V.CONTENDS),
        (approach(), bound("k"), holder(silent_seconds=999), V.CONTENDS),
        (approach(FIRST), bound("k"), holder(FIRST), V.CONTENDS),
    ],
)
def test_who_may_be_the_agent(
    comes: Approach, binding: AgentTokenStatus | None, open_: Holder | None, expected: MachineVerdict
) -> None:
    assert verdict(comes, binding, open_, heartbeat_seconds=30, now_ns=NOW) is expected


def test_an_approval_is_for_one_machine_and_for_a_while() -> None:
    wanted = approach(key="new")
    approved = bound("old", approved=wanted.identity)
    lapsed = bound("old", approved=wanted.identity, until=NOW)
    assert verdict(wanted, approved, holder(), heartbeat_seconds=30, now_ns=NOW) is V.TAKES_OVER
    assert verdict(wanted, lapsed, holder(), heartbeat_seconds=30, now_ns=NOW) is V.CONTENDS
    another = approach(key="another")
    assert verdict(another, approved, holder(), heartbeat_seconds=30, now_ns=NOW) is V.CONTENDS


def test_machines_without_a_key_are_told_apart_by_name_and_address() -> None:
    assert approach().identity == approach("elsewhere").identity
    assert approach().identity != approach(hostname="web-02").identity
    assert approach(key="k", hostname="a").identity == approach(key="k", hostname="b").identity
