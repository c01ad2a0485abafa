"""The local provider with the agent that ships, from its first breath to its deletion."""

from __future__ import annotations

import os
from pathlib import Path

from support.instances.instance_server_double import InstanceServerDouble, instance_server, make_nonce, until

from fleetplane.domains.instances.providers import registry
from fleetplane.domains.instances.providers.conformance import new_instance_id
from fleetplane.domains.instances.providers.contract import CreateRequest, ProviderContext, ProviderStatus
from fleetplane.domains.instances.providers.local.provider import LocalProvider
from fleetplane.kernel.clock import SystemClock

BOOT_SECONDS = 60.0  # an interpreter, gRPC and cryptography on a busy machine


def make_local(state: Path) -> LocalProvider:
    context = ProviderContext(
        clock=SystemClock(), state_directory=state, environment={"PATH": os.environ["PATH"]}
    )
    provider = registry.load("local", {}, context=context)
    assert isinstance(provider, LocalProvider)
    return provider


def request_for(server: InstanceServerDouble) -> CreateRequest:
    instance_id = new_instance_id("web")
    return CreateRequest(
        cluster="test",
        shard="one",
        tenant="default",
        group="web",
        prefix="web",
        instance_id=instance_id,
        nonce=make_nonce(instance_id),
        ca_certificate=server.ca.pem.decode(),
        registration_address=server.address("registration"),
        agent_address=server.address("agent"),
        report_interval_seconds=0.5,
    )


async def test_a_real_agent_registers_reports_and_survives_its_provider(tmp_path: Path) -> None:
    async with instance_server(tmp_path / "server") as server:
        first = make_local(tmp_path / "state")
        await first.start()
        wanted = request_for(server)
        try:
            await first.create_instance(wanted)
            await until(lambda: server.raw_reports, seconds=BOOT_SECONDS)
        except BaseException:
            await first.close(kill=True)  # it is nobody's child, and would stay
            raise
        await first.close()

        # A new provider, as after a restart of the server, finds the same agent still reporting.
        second = make_local(tmp_path / "state")
        await second.start()
        try:
            seen = len(server.raw_reports)
            await until(lambda: len(server.raw_reports) > seen, seconds=BOOT_SECONDS)
            status = await second.get_instance_status(wanted.instance_id, "")
            assert status.status is ProviderStatus.RUNNING
            (registration,) = server.registrations
            assert (registration.hostname, registration.private_ipv4) == (wanted.instance_id, "127.0.0.1")
            assert {report.instance_id for report in server.reports} == {wanted.instance_id}

            await second.delete_instance(wanted.instance_id, "")
            # It was asked to end, not cut off: the report stream is closed by the agent itself.
            await until(lambda: server.report_ends)
            assert server.report_ends == ["client"]
            assert list((tmp_path / "state" / "local").iterdir()) == []
        finally:
            await second.close(kill=True)
