"""The agent against a double of the server, over real TLS."""

from __future__ import annotations

import base64
import datetime as dt
import json
import os
import stat
from pathlib import Path

import grpc
import pytest
import structlog
from cryptography import x509
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ed25519
from domains.instances.agent.agent_rig import Rig
from support.instances.instance_server_double import (
    INSTANCE_ID,
    InstanceServerDouble,
    commit,
    file,
    instance_server,
    make_nonce,
    until,
)

from fleetplane.domains.instances.agent import session
from fleetplane.domains.instances.agent.spot import SpotNotice
from fleetplane.gen.nstance.v1 import agent_pb2


async def test_it_registers_and_then_reports_at_once(rig: Rig, server: InstanceServerDouble) -> None:
    async with rig.running():
        await until(lambda: server.raw_reports)
    (request,) = server.registrations
    assert request.hostname == "testling"
    assert request.private_ipv4 == "127.0.0.1"
    assert not (rig.identity / "nonce.jwt").exists()
    report = server.reports[0]
    assert (report.instance_id, report.count, report.config_hash) == (INSTANCE_ID, 1, "sha256:first")
    assert report.metrics.memory_usage > 0
    assert server.callers == {INSTANCE_ID}


async def test_everything_it_keeps_is_readable_by_the_owner_alone(
    rig: Rig, server: InstanceServerDouble
) -> None:
    async with rig.running():
        await until(lambda: server.raw_reports)
    for name in ("identity.key", "identity.pub", "identity.crt", "config.hash"):
        assert stat.S_IMODE((rig.identity / name).stat().st_mode) == 0o600
    assert not list(rig.identity.glob(".*"))
    key = serialization.load_pem_private_key(rig.read("identity.key"), password=None)
    assert isinstance(key, ed25519.Ed25519PrivateKey)
    assert x509.load_pem_x509_certificate(rig.read("identity.crt")).public_key() == key.public_key()


async def test_a_second_start_connects_without_registering(rig: Rig, server: InstanceServerDouble) -> None:
    async with rig.running():
        await until(lambda: len(server.raw_reports) == 1)
    async with rig.running():
        await until(lambda: len(server.raw_reports) == 2)
    assert len(server.registrations) == 1
    assert [report.count for report in server.reports] == [1, 1]


async def test_it_reports_every_interval(rig: Rig, server: InstanceServerDouble) -> None:
    async with rig.running(interval_seconds=0.25):
        await until(lambda: len(server.raw_reports) >= 3)
    assert [report.count for report in server.reports[:3]] == [1, 2, 3]
    assert server.report_streams == 1
    assert server.reports[2].metrics.HasField("cpu_usage")


async def test_without_an_interval_it_does_not_report(rig: Rig, server: InstanceServerDouble) -> None:
    async with rig.running(interval_seconds=0.0):
        await until(lambda: server.files and server.keys)
    assert server.report_streams == 0


async def test_stopping_ends_the_report_stream_in_good_order(
    rig: Rig, server: InstanceServerDouble, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(session, "GOODBYE_SECONDS", 60.0)
    async with rig.running():
        await until(lambda: server.raw_reports)
    await until(lambda: server.report_ends)
    assert server.report_ends == ["client"]


async def test_a_patch_is_written_then_its_hash_then_the_mark(rig: Rig, server: InstanceServerDouble) -> None:
    async with rig.running():
        await until(lambda: server.files and server.raw_reports)
        server.files[0].send(file("app.env"), file("app.json", b"{}"), commit("sha256:second"))
        await until(lambda: len(server.raw_reports) == 2)
    assert (rig.recv / "app.env").read_bytes() == b"KEY=value"
    assert stat.S_IMODE((rig.recv / "app.json").stat().st_mode) == 0o640
    assert rig.config_hash == "sha256:second"
    assert int((rig.recv / "write-files.last").read_text()) > 1_700_000_000_000
    report = server.reports[1]
    assert report.config_hash == "sha256:second"
    assert set(report.files) == {"app.env", "app.json"}
    assert report.files["app.env"].HasField("last_modified")
    assert {entry.name for entry in rig.recv.iterdir()} == {"app.env", "app.json", "write-files.last"}


BAD_FILES = {
    "app.env": b"lower=case",
    "tls.crt": b"no certificate",
    "tls.key": b"no key",
    "tls.pub": b"no key",
    "app.json": b"{",
    "custom.conf": b"anything",
    "noextension": b"anything",
}


@pytest.mark.parametrize("name", BAD_FILES)
async def test_one_bad_file_refuses_the_whole_patch_and_the_stream_goes_on(
    rig: Rig, server: InstanceServerDouble, name: str
) -> None:
    (rig.recv / "good.env").write_text("OLD=1")
    async with rig.running(interval_seconds=0.25):
        await until(lambda: server.files)
        server.files[0].send(file("good.env", b"NEW=1"), file(name, BAD_FILES[name]), commit("sha256:bad"))
        await until(lambda: any(name in report.files for report in server.reports))
        assert (rig.recv / "good.env").read_text() == "OLD=1"
        assert rig.config_hash == "sha256:first"
        assert not (rig.recv / name).exists()
        server.files[0].send(file("good.env", b"NEW=2"), commit("sha256:better"))
        await until(lambda: rig.config_hash == "sha256:better")
    assert (rig.recv / "good.env").read_text() == "NEW=2"
    assert len(server.files) == 1
    error = next(report.files[name].error for report in server.reports if name in report.files)
    assert error == (rig.recv / "errors" / name).read_text() != ""


async def test_a_file_that_became_good_loses_its_error(rig: Rig, server: InstanceServerDouble) -> None:
    async with rig.running(interval_seconds=0.25):
        await until(lambda: server.files)
        server.files[0].send(file("app.json", b"{"), commit("sha256:bad"))
        await until((rig.recv / "errors" / "app.json").exists)
        server.files[0].send(file("app.json", b"{}"), commit("sha256:good"))
        await until(lambda: [one for one in server.reports if one.config_hash == "sha256:good" and one.files])
    said = next(one for one in server.reports if one.config_hash == "sha256:good" and one.files)
    assert said.files["app.json"].HasField("last_modified")


async def test_a_file_outside_the_folder_is_refused(rig: Rig, server: InstanceServerDouble) -> None:
    async with rig.running(interval_seconds=0.25):
        await until(lambda: server.files)
        server.files[0].send(file("../identity/identity.key", b""), commit("sha256:evil"))
        await until(lambda: any(report.files for report in server.reports))
    assert rig.read("identity.key")
    assert rig.config_hash == "sha256:first"


async def test_patches_of_the_first_generation_are_taken(rig: Rig, server: InstanceServerDouble) -> None:
    """Every file carries the hash, and no commit follows."""
    async with rig.running():
        await until(lambda: server.files)
        for name in ("a.env", "b.env"):
            stamped = file(name, b"A=1")
            stamped.config_hash = "sha256:early"
            stamped.last_modified.GetCurrentTime()
            server.files[0].send(stamped)
        await until((rig.recv / "b.env").exists)
        await until(lambda: rig.config_hash == "sha256:early")
    assert (rig.recv / "a.env").read_text() == "A=1"
    assert len(server.files) == 1, "the stream was not given up"


MUDDLES = {
    "a second file of one name": [file("a.env"), file("a.env"), commit("sha256:x")],
    "a commit with a filename": [agent_pb2.FileTransfer(filename="a.env", config_hash="sha256:x")],
    "a commit with content": [agent_pb2.FileTransfer(content=b"A=1", config_hash="sha256:x")],
    "a file without a name": [file(""), commit("sha256:x")],
}


@pytest.mark.parametrize("messages", MUDDLES.values(), ids=MUDDLES.keys())
async def test_a_muddled_patch_costs_the_stream_but_not_the_agent(
    rig: Rig, server: InstanceServerDouble, messages: list[agent_pb2.FileTransfer]
) -> None:
    async with rig.running():
        await until(lambda: server.files)
        server.files[0].send(*messages)
        await until(lambda: len(server.files) == 2)
        assert rig.config_hash == "sha256:first"
        server.files[1].send(file("a.env", b"A=2"), commit("sha256:clean"))
        await until(lambda: rig.config_hash == "sha256:clean")
    assert (rig.recv / "a.env").read_text() == "A=2"
    assert server.report_streams == 1


async def test_half_a_patch_is_forgotten_when_the_stream_ends(rig: Rig, server: InstanceServerDouble) -> None:
    with structlog.testing.capture_logs() as logged:
        async with rig.running():
            await until(lambda: server.files)
            server.files[0].send(file("half.env"))
            server.files[0].end()
            await until(lambda: len(server.files) == 2)
            server.files[1].send(commit("sha256:none"))
            await until(lambda: rig.config_hash == "sha256:none")
    failed = next(entry for entry in logged if entry["event"] == "stream_failed")
    assert "without a commit" in failed["error"]
    assert not (rig.recv / "half.env").exists()


@pytest.mark.parametrize("code", [grpc.StatusCode.INTERNAL, grpc.StatusCode.PERMISSION_DENIED])
async def test_failing_streams_are_opened_again(
    rig: Rig, server: InstanceServerDouble, code: grpc.StatusCode
) -> None:
    async with rig.running() as agent:
        await until(lambda: server.files and server.keys)
        server.files[0].fail(code)
        server.keys[0].fail(code)
        await until(lambda: len(server.files) == 2 and len(server.keys) == 2)
        assert agent.sessions == 1


async def test_streams_that_the_server_ends_are_opened_again(rig: Rig, server: InstanceServerDouble) -> None:
    async with rig.running() as agent:
        await until(lambda: server.files and server.keys and server.raw_reports)
        server.files[0].end()
        server.keys[0].end()
        server.end_reports()
        await until(lambda: len(server.files) == 2 and len(server.keys) == 2 and server.report_streams == 2)
        assert agent.sessions == 1


async def test_it_survives_a_restart_of_the_server(rig: Rig, server: InstanceServerDouble) -> None:
    async with rig.running() as agent:
        await until(lambda: server.raw_reports and server.files)
        await server.stop()
        seen = len(server.raw_reports)
        await server.start()
        await until(lambda: len(server.raw_reports) > seen and server.files and server.keys)
        server.files[0].send(file("after.env"), commit("sha256:after"))
        await until(lambda: rig.config_hash == "sha256:after")
        assert agent.sessions >= 2
    assert len(server.registrations) == 1


async def test_a_nonce_that_comes_while_it_runs_is_used_at_the_next_connection(
    rig: Rig, server: InstanceServerDouble
) -> None:
    async with rig.running():
        await until(lambda: server.raw_reports)
        rig.give_nonce(make_nonce(config_hash="sha256:anew"))
        later = (rig.identity / "identity.crt").stat().st_mtime + 10
        os.utime(rig.identity / "nonce.jwt", (later, later))
        await server.stop()
        await server.start()
        await until(lambda: server.reports[-1].config_hash == "sha256:anew")
    assert len(server.registrations) == 2


async def test_it_may_start_before_the_server(rig: Rig, server: InstanceServerDouble) -> None:
    await server.stop()
    async with rig.running():
        await until((rig.identity / "identity.key").exists)
        await server.start()
        await until(lambda: server.raw_reports)


async def test_keys_are_made_once_and_submitted_as_base64_der(rig: Rig, server: InstanceServerDouble) -> None:
    async with rig.running():
        await until(lambda: server.keys)
        for _ in range(2):
            server.keys[0].send(agent_pb2.KeyGenerationRequest(key_names=["kubelet.server", "etcd"]))
        await until(lambda: len(server.submissions) == 2)
    first, second = server.submissions
    assert first == second
    assert first.instance_id == INSTANCE_ID
    assert [key.filename for key in first.keys] == ["kubelet.server", "etcd"]
    der = base64.b64decode(first.keys[0].public_key_pem, validate=True)
    held = serialization.load_pem_private_key((rig.keys / "kubelet.server.key").read_bytes(), password=None)
    assert serialization.load_der_public_key(der) == held.public_key()
    assert (
        serialization.load_pem_public_key((rig.keys / "kubelet.server.pub").read_bytes()) == held.public_key()
    )
    assert stat.S_IMODE((rig.keys / "kubelet.server.key").stat().st_mode) == 0o640


@pytest.mark.parametrize("name", ["../identity/identity", "/etc/passwd", ".hidden", ""])
async def test_a_key_outside_the_folder_is_not_made_and_the_stream_goes_on(
    rig: Rig, server: InstanceServerDouble, name: str
) -> None:
    async with rig.running():
        await until(lambda: server.keys)
        before = rig.read("identity.key")
        server.keys[0].send(agent_pb2.KeyGenerationRequest(key_names=["innocent", name]))
        server.keys[0].send(agent_pb2.KeyGenerationRequest(key_names=["fine"]))
        await until(lambda: server.submissions)
    assert [key.filename for key in server.submissions[0].keys] == ["fine"]
    assert rig.read("identity.key") == before
    assert {entry.name for entry in rig.keys.iterdir()} == {"fine.key", "fine.pub"}


class ScriptedSpot:
    def __init__(self) -> None:
        self.said: SpotNotice | None = None

    async def notice(self) -> SpotNotice | None:
        return self.said


async def test_a_spot_notice_is_reported_at_once(rig: Rig, server: InstanceServerDouble) -> None:
    spot = ScriptedSpot()
    async with rig.running(interval_seconds=60.0, spot=spot):
        await until(lambda: server.raw_reports)
        spot.said = SpotNotice(action="terminate", deadline_ns=1_800_000_000 * 10**9)
        await until(lambda: len(server.raw_reports) == 2, seconds=60)
    assert not server.reports[0].HasField("termination_notice")
    said = server.reports[1].termination_notice
    assert (said.action, said.deadline.seconds) == ("terminate", 1_800_000_000)


async def test_an_error_is_json_safe_and_short(rig: Rig, server: InstanceServerDouble) -> None:
    async with rig.running(interval_seconds=0.25):
        await until(lambda: server.files)
        server.files[0].send(file("\N{SNOWMAN}" * 80 + ".json", b"{"), commit("sha256:bad"))
        await until(lambda: any(report.files for report in server.reports))
    (name,) = next(report.files for report in server.reports if report.files)
    assert json.dumps(name)
    assert len(name.encode()) < 255


async def test_a_renewed_certificate_is_used_on_a_new_connection(
    rig: Rig, server: InstanceServerDouble
) -> None:
    server.certificate_started_ago = dt.timedelta(hours=20)
    server.certificate_life = dt.timedelta(hours=4)
    async with rig.running() as agent:
        await until(lambda: agent.sessions == 2 and server.files and server.keys and server.raw_reports)
    kept = x509.load_pem_x509_certificate(rig.read("identity.crt"))
    assert kept.not_valid_after_utc > dt.datetime.now(dt.UTC) + dt.timedelta(hours=20)
    assert server.renewals == [rig.read("identity.pub")]
    assert len(server.registrations) == 1


async def test_a_server_that_cannot_renew_is_served_all_the_same(tmp_path: Path) -> None:
    async with instance_server(tmp_path / "server", renews=False) as server:
        rig = Rig(tmp_path, server)
        server.certificate_started_ago = dt.timedelta(hours=20)
        server.certificate_life = dt.timedelta(hours=4)
        with structlog.testing.capture_logs() as logged:
            async with rig.running() as agent:
                await until(lambda: any(entry["event"] == "renewal_unknown" for entry in logged))
                await until(lambda: server.raw_reports)
                assert agent.sessions == 1
