"""What an agent is sent next, and that certificates among it do not grow old."""

from __future__ import annotations

import asyncio
from collections.abc import Collection
from pathlib import Path

from cryptography import x509
from support.instances.instances_lab import Lab, document, lab, until
from support.instances.original_agent import OriginalAgent

from fleetplane.domains.instances.rules.delivery import Holding, Sent, next_patch, outdated
from fleetplane.kernel.clock import SystemClock
from fleetplane.kernel.values.times import NS

HOUR = 3600 * NS
LIVES = {"a.crt": 3600.0, "b.crt": 7200.0}


def test_a_certificate_is_sent_anew_after_two_thirds_of_its_life() -> None:
    issued = {"a.crt": 0, "b.crt": 0, "other.crt": 0}
    at = {
        minutes: outdated(LIVES, issued, signing_since_ns=0, now_ns=minutes * 60 * NS)
        for minutes in (39, 40, 80)
    }
    assert at == {39: frozenset(), 40: {"a.crt"}, 80: {"a.crt", "b.crt"}}


def test_a_certificate_of_the_authority_before_is_sent_anew_at_once() -> None:
    issued = {"a.crt": 99, "b.crt": 100}
    assert outdated(LIVES, issued, signing_since_ns=100, now_ns=200) == {"a.crt"}


def test_a_certificate_that_the_agent_does_not_have_is_not_its_age() -> None:
    assert outdated(LIVES, {}, signing_since_ns=100, now_ns=10 * HOUR) == frozenset()


def test_only_what_is_outdated_is_sent_and_only_once_per_report() -> None:
    files = {"a.crt": "", "app.env": ""}
    holding = Holding(at_ns=5 * NS, config_hash="h", files=files, outdated=frozenset({"a.crt"}))
    patch = next_patch(files, "h", holding, None, now_ns=6 * NS)
    assert patch is not None
    assert patch.names == {"a.crt"}

    sent = Sent(at_ns=6 * NS, config_hash="h", names=patch.names)
    assert next_patch(files, "h", holding, sent, now_ns=7 * NS) is None, "no word about it yet"
    later = Holding(at_ns=8 * NS, config_hash="h", files=files, outdated=frozenset({"a.crt"}))
    again = next_patch(files, "h", later, sent, now_ns=60 * NS)
    assert again is not None
    assert again.attempt == 1, "and ever more slowly"
    well = Holding(at_ns=8 * NS, config_hash="h", files=files)
    assert next_patch(files, "h", well, sent, now_ns=60 * NS) is None


class LeapingClock(SystemClock):
    """The machine's clock, some time ahead."""

    ahead_seconds = 0.0

    def now_ns(self) -> int:
        return super().now_ns() + round(self.ahead_seconds * 1e9)


def reported_files(place: Lab, instance: str) -> Collection[str]:
    """What the server knows that the agent holds."""
    heard = place.domain._reports.last(instance)
    return heard.report.files if heard is not None else ()


async def test_an_agents_certificate_file_is_replaced_before_it_runs_out(tmp_path: Path) -> None:
    clock = LeapingClock()
    wanted = document(
        certificates={"kubelet.server": {"kind": "server", "cn": "kubelet", "ttl": 1}},
        shard={
            "health_check_interval": "2h",
            "garbage_collection": {"interval": "1h", "registration_timeout": "9h"},
        },
    )
    async with lab(tmp_path, wanted, clock=clock) as place:
        [request] = await place.created()
        identity = tmp_path / "agent" / "identity"
        agent = OriginalAgent(
            identity,
            place.addresses["registration"],
            place.addresses["agent"],
            place.ca,
            instance_id=request.instance_id,
            report_interval=0.1,
        )
        (identity / "nonce.jwt").write_text(request.nonce)
        process = asyncio.create_task(agent.run())
        try:
            await until(lambda: "kubelet.crt" in agent.received_files)
            first = x509.load_pem_x509_certificate(agent.received_files["kubelet.crt"])
            await until(lambda: "kubelet.crt" in reported_files(place, request.instance_id))
            sent = len(agent.patches)

            clock.ahead_seconds = 41 * 60
            await until(lambda: len(agent.patches) > sent)
            files, _hash = agent.patches[-1]
            assert list(files) == ["kubelet.crt"], "nothing else is old"
            second = x509.load_pem_x509_certificate(agent.received_files["kubelet.crt"])
            assert second.not_valid_after_utc > first.not_valid_after_utc
            assert second.public_key() == first.public_key()
        finally:
            process.cancel()
            await asyncio.wait([process])
