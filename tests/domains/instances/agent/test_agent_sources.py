"""What the agent reads of its machine and of the cloud, and how it minds its certificate."""

from __future__ import annotations

import asyncio
import contextlib
import datetime as dt
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import grpc
import pytest
import structlog
from support.instances.instance_server_double import INSTANCE_ID
from support.shared.throwaway_ca import ThrowawayCa

from fleetplane.domains.instances.agent.identity.folder import IdentityFolder
from fleetplane.domains.instances.agent.identity.renewal import CertificateKeeper, RenewalTrust, Renewed
from fleetplane.domains.instances.agent.machine import MachineSampler
from fleetplane.domains.instances.agent.spot import (
    AwsSpot,
    GoogleSpot,
    MetadataAnswer,
    SpotNotice,
    detect_spot,
)
from fleetplane.kernel.errors import Unavailable
from fleetplane.node.certificates import Life
from fleetplane.sim.clock import VirtualClock


def write(root: Path, files: dict[str, str]) -> None:
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)


# The machine


def test_usage_is_what_passed_between_two_looks(tmp_path: Path) -> None:
    write(tmp_path, {"proc/stat": "cpu 100 0 100 800 0 0 0 0 50 0\ncpu0 100 0 100 800 0 0 0 0\nintr 5\n"})
    machine = MachineSampler(root=tmp_path)
    first = machine.look()
    assert first.cpu_percent is None
    assert first.core_percents == ()
    write(tmp_path, {"proc/stat": "cpu 130 0 120 850 0 0 0 0 90 0\ncpu0 130 0 120 850 0 0 0 0\nintr 9\n"})
    second = machine.look()
    assert second.cpu_percent == pytest.approx(50.0)
    assert second.core_percents == pytest.approx((50.0,))


def test_every_figure_is_read_from_its_file(tmp_path: Path) -> None:
    counters = {
        "rx_bytes": "1",
        "tx_bytes": "2",
        "rx_packets": "3",
        "tx_packets": "4",
        "rx_dropped": "5",
        "tx_dropped": "6",
    }
    write(
        tmp_path,
        {
            "proc/meminfo": "MemTotal:  1000 kB\nMemFree:  100 kB\nMemAvailable: 250 kB\n",
            "proc/uptime": "3661.25 7000.00\n",
            "proc/sys/net/netfilter/nf_conntrack_count": "7\n",
            "proc/sys/net/netfilter/nf_conntrack_max": "262144\n",
        }
        | {f"sys/class/net/eth0/statistics/{name}": value for name, value in counters.items()},
    )
    reading = MachineSampler(interface="eth0", root=tmp_path).look()
    assert reading.memory_percent == pytest.approx(75.0)
    assert reading.uptime_seconds == pytest.approx(3661.25)
    assert (reading.conntrack_count, reading.conntrack_max) == (7, 262144)
    assert reading.interface_counters["tx_dropped"] == 6


def test_a_machine_that_says_nothing_is_read_all_the_same(tmp_path: Path) -> None:
    reading = MachineSampler(interface="eth9", ebpf_counters="/sys/fs/bpf/x", root=tmp_path).look()
    assert reading.cpu_percent is None
    assert reading.memory_percent is None
    assert "eth9" in reading.interface_error
    assert "not read" in reading.ebpf_error


# The cloud


class ScriptedMetadata:
    def __init__(self, **answers: MetadataAnswer) -> None:
        self.answers = answers
        self.asked: list[tuple[str, str, Mapping[str, str]]] = []

    def __call__(self, method: str, url: str, headers: Mapping[str, str]) -> MetadataAnswer:
        self.asked.append((method, url, headers))
        return self.answers[url.rpartition("/")[2].replace("-", "_")]


TOKEN = MetadataAnswer(status=200, body=b"secret-token")


async def test_amazon_is_asked_with_a_token_and_answers_with_a_time() -> None:
    body = b'{"action": "terminate", "time": "2026-11-15T22:00:00Z"}'
    metadata = ScriptedMetadata(token=TOKEN, instance_action=MetadataAnswer(status=200, body=body))
    at = int(dt.datetime(2026, 11, 15, 22, tzinfo=dt.UTC).timestamp())
    source = AwsSpot(metadata)
    assert await source.notice() == SpotNotice(action="terminate", deadline_ns=at * 10**9)
    assert await source.notice() is not None
    assert [method for method, _, _ in metadata.asked] == ["PUT", "GET", "GET"]
    assert metadata.asked[1][2] == {"X-aws-ec2-metadata-token": "secret-token"}


async def test_no_notice_is_a_404_and_a_token_that_ran_out_is_replaced() -> None:
    metadata = ScriptedMetadata(token=TOKEN, instance_action=MetadataAnswer(status=404, body=b""))
    source = AwsSpot(metadata)
    assert await source.notice() is None
    metadata.answers["instance_action"] = MetadataAnswer(status=401, body=b"")
    with pytest.raises(Unavailable):
        await source.notice()
    metadata.answers["instance_action"] = MetadataAnswer(status=200, body=b"gibberish")
    assert await source.notice() == SpotNotice(action="terminate")
    assert [method for method, _, _ in metadata.asked].count("PUT") == 2


async def test_google_raises_a_flag() -> None:
    metadata = ScriptedMetadata(preempted=MetadataAnswer(status=200, body=b"FALSE"))
    now_ns = 1_000_000_000
    source = GoogleSpot(metadata, now_ns=lambda: now_ns)
    assert await source.notice() is None
    metadata.answers["preempted"] = MetadataAnswer(status=200, body=b"TRUE\n")
    expected = SpotNotice(action="terminate", deadline_ns=31_000_000_000)
    assert await source.notice() == expected
    now_ns += 5_000_000_000
    assert await source.notice() == expected, "thirty seconds from when it was raised"
    assert metadata.asked[0][2] == {"Metadata-Flavor": "Google"}


def test_the_firmware_says_which_cloud_it_is(tmp_path: Path) -> None:
    assert detect_spot(tmp_path) is None
    write(tmp_path, {"sys/class/dmi/id/sys_vendor": "Amazon EC2\n"})
    assert isinstance(detect_spot(tmp_path), AwsSpot)
    write(
        tmp_path,
        {
            "sys/class/dmi/id/sys_vendor": "Google\n",
            "sys/class/dmi/id/product_name": "Google Compute Engine\n",
        },
    )
    assert isinstance(detect_spot(tmp_path), GoogleSpot)


# The certificate


class ScriptedRenewal:
    def __init__(self, ca: ThrowawayCa, folder: IdentityFolder, failures: int) -> None:
        self.ca, self.folder, self.failures = ca, folder, failures
        self.asked = 0

    async def renew(self, channel: grpc.aio.Channel, public_key_pem: bytes) -> Renewed:
        self.asked += 1
        if self.asked <= self.failures:
            raise Unavailable("not now")
        return Renewed(certificate_pem=self.ca.client(self.folder.key().public_key(), INSTANCE_ID))

    async def trust(self, channel: grpc.aio.Channel, holding: str) -> RenewalTrust:
        return RenewalTrust(authority_pem=self.ca.pem, renew=False)


def keeper(folder: Path, clock: VirtualClock, ca: ThrowawayCa, failures: int | None) -> CertificateKeeper:
    (folder / "ca.crt").write_bytes(ca.pem)
    identity = IdentityFolder(folder, mode=0o600)
    renewal = None if failures is None else ScriptedRenewal(ca, identity, failures)
    return CertificateKeeper(
        folder=identity, instance_id=INSTANCE_ID, clock=clock, log=structlog.get_logger(), renewal=renewal
    )


async def advance(clock: VirtualClock, hours: float) -> None:
    for _ in range(int(hours * 60)):
        await clock.advance(60.0)


@pytest.fixture
def no_channel() -> Any:
    return None


async def test_without_a_way_to_renew_the_log_grows_louder(tmp_path: Path, no_channel: Any) -> None:
    clock = VirtualClock()
    begun = clock.now_ns() / 1e9
    life = Life(start=begun, end=begun + 30 * 3600)
    with structlog.testing.capture_logs() as logged:
        waiting = asyncio.ensure_future(
            keeper(tmp_path, clock, ThrowawayCa(), None).until_renewed(no_channel, life)
        )
        await advance(clock, 19.9)
        assert logged == []
        await advance(clock, 12)
        waiting.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await waiting
    assert [(entry["event"], entry["log_level"]) for entry in logged] == [
        ("certificate_due", "warning"),
        ("certificate_ends_soon", "warning"),
        ("certificate_over", "error"),
    ]


async def test_a_due_certificate_is_renewed_after_failures(tmp_path: Path, no_channel: Any) -> None:
    clock = VirtualClock()
    begun = clock.now_ns() / 1e9
    life = Life(start=begun - 29 * 3600, end=begun + 3600 * 10)
    kept = keeper(tmp_path, clock, ThrowawayCa(), 2)
    waiting = asyncio.ensure_future(kept.until_renewed(no_channel, life))
    deadline = asyncio.get_running_loop().time() + 60
    while not waiting.done() and asyncio.get_running_loop().time() < deadline:
        await asyncio.sleep(0.005)
        if clock.sleepers:
            await clock.advance(30.0)
    await waiting
    assert isinstance(kept.renewal, ScriptedRenewal)
    assert kept.renewal.asked == 3
    assert (tmp_path / "identity.crt").exists()
