"""Promises of the protocol that are kept between an original agent, an original operator and our server."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
from support.instances.instances_lab import TENANT, Lab, document, lab, until
from support.instances.original_agent import OriginalAgent, OriginalOperator, ProcessExit

from fleetplane.domains.instances.kinds import Instance
from fleetplane.domains.instances.providers.contract import CreateRequest, ProviderStatus
from fleetplane.domains.instances.records.groups import SilencePolicy
from fleetplane.domains.instances.records.listener_activity import Activity, listeners
from fleetplane.domains.instances.rules import decide as rules
from fleetplane.domains.instances.rules import delivery
from fleetplane.kernel.clock import Backoff, SystemClock
from fleetplane.sim.clock import VirtualClock


def agent_of(place: Lab, request: CreateRequest, **changes: Any) -> OriginalAgent:
    folder = place.folder / request.instance_id / "identity"
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "nonce.jwt").write_text(request.nonce)
    (folder / "ca.crt").write_text(request.ca_certificate)
    pace = {"report_interval": 0.1, "files_pause": 0.1, "reports_pause": 0.1, **changes}
    return OriginalAgent(
        folder, request.registration_address, request.agent_address, instance_id=request.instance_id, **pace
    )


@asynccontextmanager
async def alive(agent: OriginalAgent) -> AsyncIterator[OriginalAgent]:
    process = asyncio.create_task(agent.run())
    try:
        yield agent
    finally:
        process.cancel()
        with suppress(asyncio.CancelledError, ProcessExit):
            await process


@asynccontextmanager
async def operator(place: Lab) -> AsyncIterator[OriginalOperator]:
    folder = place.folder / "operator"
    folder.mkdir()
    (folder / "ca.crt").write_bytes(place.ca.read_bytes())
    await OriginalOperator.register(folder, place.addresses["registration"], place.operator_nonce())
    async with OriginalOperator(folder, place.addresses["operator"]) as client:
        yield client


async def one_watches(place: Lab) -> None:
    """Until the server has somebody who watches: errors of before are told to nobody."""
    await until(lambda: place.domain._operators.open_watches == 1)


async def watched(client: OriginalOperator, method: str, seen: list[Any]) -> None:
    async for event in client.watch(method):
        seen.append(event)  # noqa: PERF401  # one by one, as they come: the test looks meanwhile


def named(place: Lab, name: str) -> Instance:
    [found] = [instance for instance in place.instances() if instance.name == name]
    return found


async def test_keys_and_files_are_delivered_before_the_first_report(tmp_path: Path) -> None:
    async with lab(tmp_path, document()) as place:
        [request] = await place.created()
        async with alive(agent_of(place, request, report_interval=600.0)) as agent:
            await until(lambda: {"app.env", "kubelet.crt"} <= agent.received_files.keys())
            assert agent.reports_sent == 0


@pytest.mark.parametrize("generation", ["first", "second"])
async def test_what_an_original_agent_measures_is_kept(tmp_path: Path, generation: str) -> None:
    async with lab(tmp_path, document()) as place:
        [request] = await place.created()
        async with alive(agent_of(place, request, generation=generation)):
            mine = named(place, request.instance_id)
            await until(lambda: bool(place.domain.figures.latest([mine])))
            values = place.domain.figures.latest([mine])[request.instance_id].values
            assert values == {"cpuPercent": 12.5, "memoryPercent": 40.0}


async def test_another_hash_brings_every_file_and_one_commit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # A report from before a patch is no reason to repeat it, however long it was on its way.
    monkeypatch.setattr(delivery, "RETRY", Backoff(first_seconds=3600.0, ceiling_seconds=3600.0))
    async with lab(tmp_path, document()) as place:
        [request] = await place.created()
        async with alive(agent_of(place, request)) as agent, operator(place) as client:
            await until(lambda: {"app.env", "kubelet.crt"} <= agent.received_files.keys())
            before, patches = agent.config_hash, len(agent.patches)
            changed = document()
            changed["templates"]["worker"]["vars"]["Colour"] = "red"
            await place.configure(changed)
            await client.call("RefreshConfig")
            await until(lambda: agent.config_hash != before)

            files, committed = agent.patches[patches]
            assert files.keys() == {"app.env", "kubelet.crt"}, "not only the one that differs"
            assert committed == agent.config_hash
            reported = agent.reports_sent
            await until(lambda: agent.reports_sent > reported + 3)
            assert len(agent.patches) == patches + 1, "it is sent once"


async def test_a_drain_that_nobody_acknowledges_ends_at_its_time(tmp_path: Path) -> None:
    # The only one of its group is held otherwise, for a quarter of an hour.
    never = SilencePolicy(silence_share=1.0)
    async with lab(tmp_path, document(), silence=never) as place, operator(place) as client:
        events: list[Any] = []
        watching = asyncio.create_task(watched(client, "WatchInstances", events))
        try:
            await one_watches(place)
            [request] = await place.created()
            await agent_of(place, request).register()  # and never reports
            await until(lambda: bool(events), seconds=60)
            notice = events[0]
            assert (notice.status, notice.instance_id) == ("pending_deletion", request.instance_id)
            await until(lambda: request.instance_id not in place.provider.instances, seconds=60)
            now_ns = SystemClock().now_ns()
            assert now_ns >= notice.delete_at.ToNanoseconds(), "not a moment earlier"
            gone = named(place, request.instance_id).status
            assert gone is not None
            assert gone.drain is not None
            assert gone.drain.acked_at_ns is None
        finally:
            watching.cancel()
            await asyncio.wait([watching])


async def test_a_lost_agent_makes_the_server_ask_the_provider_at_once(tmp_path: Path) -> None:
    # Reports are due every hour: only the end of the stream can tell within this test's time.
    async with lab(tmp_path, document(shard={"health_check_interval": "1h"})) as place:
        [request] = await place.created()
        async with alive(agent_of(place, request)) as agent:
            await until(lambda: agent.reports_sent > 0 and place.domain._reports.received > 0)
            place.provider.set_status(request.instance_id, ProviderStatus.STOPPED)
        await place.created(2, seconds=60)
        lost = named(place, request.instance_id).status
        assert lost is not None
        assert lost.drain is not None
        assert lost.drain.reason == rules.RemovalCause.PROVIDER_LOST


async def test_operators_are_warned_of_a_certificate_that_its_agent_does_not_renew(tmp_path: Path) -> None:
    class Later(SystemClock):
        ahead_seconds = 0.0

        def now_ns(self) -> int:
            return super().now_ns() + round(self.ahead_seconds * 1e9)

    clock = Later()
    wanted = document(
        certificates={
            "agent": {"kind": "client", "ttl": 1},
            "kubelet.server": {"kind": "server", "cn": "kubelet"},
        },
        shard={
            "health_check_interval": "2h",
            "garbage_collection": {"interval": "1h", "registration_timeout": "9h"},
        },
    )
    async with lab(tmp_path, wanted, clock=clock) as place, operator(place) as client:
        errors: list[Any] = []
        watching = asyncio.create_task(watched(client, "WatchErrors", errors))
        try:
            await one_watches(place)
            [request] = await place.created()
            async with alive(agent_of(place, request)):
                await until(lambda: place.domain._reports.received > 2)
                assert errors == []
                clock.ahead_seconds = 55 * 60
                await until(lambda: bool(errors))
                assert errors[0].instance_id == request.instance_id
                assert "runs out in 0.1 hours" in errors[0].error
                heard = place.domain._reports.received
                await until(lambda: place.domain._reports.received > heard + 5)
                assert len(errors) == 1, "once a day is enough"
        finally:
            watching.cancel()
            await asyncio.wait([watching])


# Listeners


def with_listeners() -> dict[str, Any]:
    wanted = document(
        tunnels={"edge": {"image": "x@sha256:" + "0" * 64, "readiness_url": "http://127.0.0.1:1/ready"}},
        load_balancers={
            "edge": {
                "provider": "tunnel",
                "listeners": [
                    {"target_port": 8080, "proxy_port": 18080},
                    {"target_port": 9090, "proxy_port": 19090},
                ],
            },
        },
    )
    wanted["groups"][TENANT]["workers"]["load_balancers"] = ["edge"]
    return wanted


async def test_a_listener_is_idle_since_its_last_connection(tmp_path: Path) -> None:
    async with lab(tmp_path, with_listeners()) as place:
        configuration, [view] = place.domain._groups.required(), place.domain._groups.views().values()
        found = listeners(configuration, [view.group])
    assert [(one.name, one.target_port) for one in found] == [("edge:8080", 8080), ("edge:9090", 9090)]
    clock = VirtualClock()
    activity = Activity(clock)
    started = clock.now_ns()
    assert activity.idle_since_ns(TENANT, found[0]) == started
    await clock.advance(10)
    activity.compare(TENANT, "workers", {8080: 5}, {8080: 6, 9090: 0})
    used = clock.now_ns()
    await clock.advance(10)
    activity.compare(TENANT, "workers", {8080: 6}, {8080: 6})

    assert [activity.idle_since_ns(TENANT, one) for one in found] == [used, started]
    assert activity.idle_since_ns("other", found[0]) == started
    activity.keep(set())
    assert activity.idle_since_ns(TENANT, found[0]) == started
