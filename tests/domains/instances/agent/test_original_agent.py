"""The clients that our server is measured against, measured themselves."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import dataclasses
import time
from collections.abc import AsyncIterator
from pathlib import Path

import grpc
import pytest
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
from support.instances.original_agent import Generation, OriginalAgent, OriginalOperator, ProcessExit
from support.shared.h2_grpc import GrpcFailed
from support.shared.throwaway_ca import ThrowawayCa, key_pem

from fleetplane.gen.fleetplane.instances.v1 import early_pb2
from fleetplane.gen.nstance.v1 import agent_pb2, operator_pb2


def original(
    folder: Path, server: InstanceServerDouble, *, nonce: str | None = "new", **options: object
) -> OriginalAgent:
    identity = folder / "identity"
    identity.mkdir(parents=True, exist_ok=True)
    (identity / "ca.crt").write_bytes(server.ca.pem)
    if nonce is not None:
        (identity / "nonce.jwt").write_text(make_nonce())
    settings: dict[str, object] = {"report_interval": 0.1, "files_pause": 0.05, "reports_pause": 0.05}
    return OriginalAgent(
        identity,
        server.address("registration"),
        server.address("agent"),
        instance_id=INSTANCE_ID,
        **(settings | options),  # type: ignore[arg-type]
    )


@contextlib.asynccontextmanager
async def running(agent: OriginalAgent) -> AsyncIterator[asyncio.Task[None]]:
    task = asyncio.create_task(agent.run())
    try:
        yield task
    finally:
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError, ProcessExit):
            await task


@pytest.mark.parametrize("kind", ["p256", "ed25519"])
async def test_it_lives_through_registration_files_keys_and_reports(tmp_path: Path, kind: str) -> None:
    ca = ThrowawayCa(kind=kind)
    async with instance_server(tmp_path / "server", ca=ca, server_key=kind) as server:
        agent = original(tmp_path, server)
        async with running(agent):
            await until(lambda: server.files and server.keys and server.raw_reports)
            server.files[0].send(file("app.env"), commit("sha256:second"))
            server.keys[0].send(agent_pb2.KeyGenerationRequest(key_names=["kubelet.server"]))
            await until(lambda: server.submissions)
            await until(lambda: server.reports[-1].config_hash == "sha256:second")
        assert agent.tls_version == "TLSv1.3"
        assert agent.received_files == {"app.env": b"KEY=value"}
        assert agent.key_requests == [["kubelet.server"]]
        assert "app.env" in server.reports[-1].files
        der = base64.b64decode(server.submissions[0].keys[0].public_key_pem, validate=True)
        assert isinstance(serialization.load_der_public_key(der), ed25519.Ed25519PublicKey)
        assert isinstance(agent.certificate.public_key(), ed25519.Ed25519PublicKey)
        assert server.callers == {INSTANCE_ID}
        assert agent.exit_reason is None


@pytest.mark.parametrize("generation", ["first", "second"])
async def test_each_generation_has_its_own_field_numbers(
    tmp_path: Path, server: InstanceServerDouble, generation: Generation
) -> None:
    agent = original(tmp_path, server, generation=generation)
    async with running(agent):
        await until(lambda: server.raw_reports)
    raw = server.raw_reports[0]
    if generation == "first":
        early = early_pb2.EarlyHealthReport.FromString(raw)
        assert (early.instance_id, early.config_hash, early.count) == (INSTANCE_ID, "sha256:first", 1)
        assert early.fifteen_minutes.disk_used == 55.0
    else:
        report = agent_pb2.HealthReportRequest.FromString(raw)
        assert (report.instance_id, report.config_hash, report.count) == (INSTANCE_ID, "sha256:first", 1)
        assert report.metrics.HasField("cpu_usage")


async def test_its_first_report_comes_one_interval_after_the_start(
    tmp_path: Path, server: InstanceServerDouble
) -> None:
    agent = original(tmp_path, server, report_interval=0.5)
    began = time.monotonic()
    async with running(agent):
        await until(lambda: server.raw_reports)
    assert time.monotonic() - began >= 0.5


@pytest.mark.parametrize("name", ["files", "keys"])
async def test_its_process_ends_at_an_error_of_either_stream_that_comes_down(
    tmp_path: Path, server: InstanceServerDouble, name: str
) -> None:
    agent = original(tmp_path, server)
    async with running(agent) as task:
        await until(lambda: server.files and server.keys)
        getattr(server, name)[0].fail(grpc.StatusCode.INTERNAL)
        with pytest.raises(ProcessExit):
            await task
    assert agent.exit_reason == "code 13: as the test wished"


async def test_only_files_and_reports_are_opened_again_after_a_clean_end(
    tmp_path: Path, server: InstanceServerDouble
) -> None:
    agent = original(tmp_path, server)
    async with running(agent):
        await until(lambda: server.files and server.keys and server.raw_reports)
        server.files[0].end()
        server.keys[0].end()
        server.end_reports()
        await until(lambda: len(server.files) == 2 and server.report_streams == 2)
        server.files[1].send(file("late.env"), commit("sha256:late"))
        await until(lambda: agent.config_hash == "sha256:late")
    assert agent.opened["keys"] == 1
    assert agent.exit_reason is None


@pytest.mark.parametrize(
    "messages",
    [
        [file("a.env"), file("a.env")],
        [agent_pb2.FileTransfer(filename="a.env", config_hash="sha256:x")],
        [file("")],
    ],
)
async def test_a_muddled_patch_ends_its_process(
    tmp_path: Path, server: InstanceServerDouble, messages: list[agent_pb2.FileTransfer]
) -> None:
    agent = original(tmp_path, server)
    async with running(agent) as task:
        await until(lambda: server.files)
        server.files[0].send(*messages)
        with pytest.raises(ProcessExit):
            await task


async def test_a_stream_that_ends_inside_a_patch_ends_its_process(
    tmp_path: Path, server: InstanceServerDouble
) -> None:
    agent = original(tmp_path, server)
    async with running(agent) as task:
        await until(lambda: server.files)
        server.files[0].send(file("a.env"))
        server.files[0].end()
        with pytest.raises(ProcessExit, match="middle of a patch"):
            await task


async def test_one_bad_file_refuses_its_patch_and_is_reported(
    tmp_path: Path, server: InstanceServerDouble
) -> None:
    agent = original(tmp_path, server)
    async with running(agent):
        await until(lambda: server.files)
        server.files[0].send(file("fine.env"), file("custom.conf"), commit("sha256:bad"))
        await until(lambda: any("custom.conf" in report.files for report in server.reports))
    assert agent.received_files == {}
    assert agent.config_hash == "sha256:first"
    assert set(agent.refused) == {"custom.conf"}


async def test_a_refused_registration_ends_its_process_and_keeps_the_nonce(
    tmp_path: Path, server: InstanceServerDouble
) -> None:
    server.registration_faults.append(grpc.StatusCode.UNAUTHENTICATED)
    agent = original(tmp_path, server)
    with pytest.raises(ProcessExit):
        await agent.run()
    assert agent.exit_reason == "code 16: as the test wished"
    assert (agent.identity_dir / "nonce.jwt").exists()


async def test_a_server_that_goes_away_ends_its_process(tmp_path: Path, server: InstanceServerDouble) -> None:
    agent = original(tmp_path, server)
    async with running(agent) as task:
        await until(lambda: server.files and server.keys)
        await server.stop()
        with pytest.raises(ProcessExit):
            await task
        await server.start()


async def test_a_termination_notice_travels_in_the_next_report(
    tmp_path: Path, server: InstanceServerDouble
) -> None:
    agent = original(tmp_path, server)
    async with running(agent):
        await until(lambda: server.raw_reports)
        agent.termination_notice = agent_pb2.TerminationNotice(action="terminate")
        await until(lambda: server.reports[-1].termination_notice.action == "terminate")


async def test_a_large_file_crosses_every_window(tmp_path: Path, server: InstanceServerDouble) -> None:
    agent = original(tmp_path, server)
    content = b"A=" + b"x" * 3_000_000
    async with running(agent):
        await until(lambda: server.files)
        server.files[0].send(file("big.env", content), commit("sha256:big"))
        await until(lambda: agent.patches)
    assert agent.received_files == {"big.env": content}


async def test_either_agent_can_take_the_place_of_the_other(
    tmp_path: Path, server: InstanceServerDouble
) -> None:
    rig = Rig(tmp_path, server)

    async def take(name: str) -> None:
        await until(lambda: server.files and server.keys and server.raw_reports)
        server.files[-1].send(file(f"{name}.env"), commit(f"sha256:{name}"))
        server.keys[-1].send(agent_pb2.KeyGenerationRequest(key_names=["kubelet"]))
        await until(lambda: server.reports[-1].config_hash == f"sha256:{name}" and server.submissions)
        server.files.clear()
        server.keys.clear()
        server.raw_reports.clear()
        submitted.append(server.submissions.pop())

    submitted: list[agent_pb2.PublicKeysRequest] = []
    async with rig.running():
        await take("ours")
    stand_in = original(tmp_path, server, keys_dir=rig.keys, recv_dir=rig.recv, nonce=None)
    async with running(stand_in):
        await take("theirs")
        assert set(stand_in.received_files) == {"ours.env", "theirs.env"}
    async with rig.running():
        await take("again")
    assert len(server.registrations) == 1
    assert submitted[0] == submitted[1] == submitted[2]


async def test_ours_takes_over_what_the_original_registered(
    tmp_path: Path, server: InstanceServerDouble
) -> None:
    first = original(tmp_path / "machine", server)
    await first.register()
    rig = Rig(tmp_path, server)
    rig.settings = dataclasses.replace(rig.settings, identity_dir=first.identity_dir)
    async with rig.running():
        await until(lambda: server.raw_reports)
    assert len(server.registrations) == 1


def operator_identity(folder: Path, ca: ThrowawayCa) -> Path:
    key = ed25519.Ed25519PrivateKey.generate()
    (folder / "ca.crt").write_bytes(ca.pem)
    (folder / "identity.key").write_bytes(key_pem(key))
    (folder / "identity.crt").write_bytes(ca.client(key.public_key(), "test", role="operator"))
    return folder


async def test_an_operator_calls_and_watches_by_name(tmp_path: Path, server: InstanceServerDouble) -> None:
    server.groups = [
        operator_pb2.GroupEvent(group=operator_pb2.GroupStatus(key=f"group-{number}", size=number))
        for number in range(3)
    ]
    async with OriginalOperator(
        operator_identity(tmp_path, server.ca), server.address("operator")
    ) as operator:
        listed = await operator.call("ListGroups")
        watched = [event.group.key async for event in operator.watch("WatchGroups")]
        with pytest.raises(GrpcFailed) as refused:
            await operator.call("GetInstanceStatus", operator_pb2.GetInstanceStatusRequest(instance_id="x"))
    assert [group.key for group in listed.groups] == watched == ["group-0", "group-1", "group-2"]
    assert refused.value.code == 5
    assert refused.value.message == "no instance x: nenhuma à vista"


async def test_an_operator_registers_with_a_nonce(tmp_path: Path, server: InstanceServerDouble) -> None:
    (tmp_path / "ca.crt").write_bytes(server.ca.pem)
    await OriginalOperator.register(tmp_path, server.address("registration"), make_nonce("test"))
    async with OriginalOperator(tmp_path, server.address("operator")) as operator:
        await operator.call("ListGroups")
    assert server.callers == {"test"}


async def test_a_certificate_of_another_authority_is_turned_away(
    tmp_path: Path, server: InstanceServerDouble
) -> None:
    folder = operator_identity(tmp_path, ThrowawayCa(name="somebody else"))
    (folder / "ca.crt").write_bytes(server.ca.pem)
    with pytest.raises(GrpcFailed):
        async with OriginalOperator(folder, server.address("operator")) as operator:
            await operator.call("ListGroups")
