"""What is told of versions on their way is what happened to them; what can pass is tried again."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from support.instances.agents_rig import FakeAgent, Rig, agents_rig, until

from fleetplane.domains.proxies.agents.controller import AHEAD_LIMIT, AgentPolicy
from fleetplane.domains.proxies.kinds.records import (
    CONFIG_VERSION,
    Deployment,
    DeploymentSpec,
    DeploymentStatus,
)
from fleetplane.domains.proxies.kinds.values import DeploymentState
from fleetplane.domains.proxies.rules import deployment
from fleetplane.domains.proxies.rules.deployment import (
    DeploymentWait,
    RetryPolicy,
    Send,
    ServedVersion,
    Settled,
    WantedVersion,
    decide,
)
from fleetplane.domains.proxies.wire import VersionProgress
from fleetplane.gen.nxmesh.agent.v1 import agent_pb2 as pb
from fleetplane.kernel.resources import Resource
from fleetplane.sim.clock import VirtualClock

S = DeploymentState
NS = 10**9
FULL_DISK = "[Errno 28] No space left on device"
BUSY_PORT = "[emerg] bind() to 0.0.0.0:80 failed (98: Address already in use)"
NO_NAME = 'host not found in upstream "nowhere.example:80" in conf.d/upstream-u1.conf:3'
QUICK = AgentPolicy(
    reconnect_seconds=0.2,
    first_report_seconds=60.0,
    debounce_seconds=0.0,
    retry=RetryPolicy(first_seconds=0.1, ceiling_seconds=0.4, gap_seconds=0.0),
    ahead_gap_seconds=0.0,
)
SLOW = AgentPolicy(
    reconnect_seconds=0.2,
    first_report_seconds=60.0,
    debounce_seconds=0.0,
    retry=RetryPolicy(first_seconds=3600, ceiling_seconds=3600, gap_seconds=0.0),
)


@pytest.fixture
async def rig(tmp_path: Path) -> AsyncIterator[Rig]:
    async with agents_rig(tmp_path, policy=QUICK) as made:
        yield made


async def connected(rig: Rig, name: str, version: int = 0) -> FakeAgent:
    agent = await rig.agent(name)
    await agent.open()
    await agent.health(version)
    return agent


def last(rig: Rig, agent: FakeAgent) -> Deployment:
    return rig.deployments(agent.agent_id)[-1]


# Decisions.


def ended(
    state: S, error: str = "", *, attempt: int = 1, applied: int | None = None, **aside: str
) -> Deployment:
    return Resource(
        kind="",
        scope="",
        name="",
        uid="",
        labels={},
        conditions=(),
        revision=0,
        created_revision=0,
        generation=1,
        created_at_ns=0,
        updated_at_ns=0,
        spec=DeploymentSpec(version=7, config_id="c", checksum="sum", sent_at_ns=90 * NS, attempt=attempt),
        status=DeploymentStatus(
            state=state,
            error=error,
            changed_at_ns=100 * NS,
            applied_at_ns=applied,
            set_aside={f"virtual_host/{name}": words for name, words in aside.items()},
        ),
    )


@pytest.mark.parametrize(
    ("known", "version", "now", "stirred", "asked", "expected"),
    [
        (ended(S.FAILED, FULL_DISK), 6, 104, 0, False, "RETRYING"),
        (ended(S.FAILED, FULL_DISK), 6, 105, 0, False, Send()),
        (ended(S.ROLLED_BACK, BUSY_PORT, attempt=3), 6, 119, 0, False, "RETRYING"),
        (ended(S.ROLLED_BACK, BUSY_PORT, attempt=3), 6, 120, 0, False, Send()),
        (ended(S.FAILED, NO_NAME, attempt=99), 6, 399, 0, False, "RETRYING"),
        (ended(S.FAILED, NO_NAME, attempt=99), 6, 400, 0, False, Send()),
        (ended(S.FAILED, NO_NAME, attempt=99), 6, 101, 101, False, "RETRYING"),
        (ended(S.FAILED, NO_NAME, attempt=99), 6, 102, 101, False, Send()),
        (ended(S.FAILED, 'unknown directive "x"'), 6, 9999, 9998, False, "REFUSED"),
        (ended(S.FAILED, 'unknown directive "x"'), 6, 101, 0, True, Send()),
        (ended(S.SUPERSEDED, "superseded by version 8"), 6, 101, 0, False, Send()),
        (ended(S.SUCCESS, h1=NO_NAME), 7, 104, 0, False, "SET_ASIDE"),
        (ended(S.SUCCESS, h1=NO_NAME), 7, 105, 0, False, Send()),
        (ended(S.SUCCESS, h1="unknown directive"), 7, 9999, 0, False, "SET_ASIDE"),
        (ended(S.SUCCESS, h1="unknown directive"), 7, 101, 0, True, Send()),
        (ended(S.SUCCESS), 7, 101, 0, True, Settled(confirm=False)),
        (ended(S.FAILED, deployment.TIMED_OUT), 7, 101, 0, False, Settled(confirm=True)),
        (ended(S.APPLYING, applied=50 * NS), 7, 101, 0, False, "APPLYING"),
        (ended(S.APPLYING, applied=50 * NS), 7, 161, 0, False, Settled(confirm=True)),
    ],
)
def test_what_ended_is_tried_again_if_that_can_help(
    known: Deployment, version: int, now: int, stirred: int, asked: bool, expected: object
) -> None:
    decision = decide(
        WantedVersion(version=7, config_id="c", checksum="sum"),
        ServedVersion(version=version, checksum="sum", at_ns=99 * NS),
        known,
        session_since_ns=0,
        apply_seconds=60,
        now_ns=now * NS,
        stirred_ns=stirred * NS,
        asked=asked,
    )
    assert (decision.code if isinstance(decision, DeploymentWait) else decision) == expected


@pytest.mark.parametrize(
    ("made", "now", "expected"),
    [
        ([], 10.0, 0.0),
        ([10.0], 10.0, 0.5),
        ([10.0], 11.0, 0.0),
        ([10.0, 10.4, 10.8], 10.9, 0.4),
        ([10.0, 14.8], 14.9, 0.1),
        ([10.0, 15.0], 15.0, 0.0),
    ],
)
def test_changes_are_gathered_for_a_bounded_time(made: list[float], now: float, expected: float) -> None:
    hold = deployment.hold_seconds(
        [round(at * NS) for at in made], quiet_seconds=0.5, longest_seconds=5.0, now_ns=round(now * NS)
    )
    assert hold == pytest.approx(expected)


def test_a_version_that_was_in_service_is_not_said_to_have_failed_when_it_is_overtaken() -> None:
    word = VersionProgress(
        config_id="c", version=7, state=S.FAILED, error="superseded by version 8", applied_at_ns=None
    )
    aside = {"upstream/u": "x"}
    served = DeploymentStatus(state=S.PENDING, changed_at_ns=5, applied_at_ns=3, set_aside=aside)
    after = deployment.advanced(served, word, sent_at_ns=5, now_ns=9)
    assert after is not None
    assert (after.state, after.error, after.applied_at_ns, after.set_aside) == (
        S.SUCCESS,
        "",
        3,
        aside,
    )
    never = deployment.advanced(
        DeploymentStatus(state=S.PENDING, changed_at_ns=5), word, sent_at_ns=5, now_ns=9
    )
    assert never is not None
    assert (never.state, never.error) == (S.SUPERSEDED, "superseded by version 8")


def test_parts_of_a_version_in_service_may_go_and_come_back() -> None:
    served = DeploymentStatus(state=S.SUCCESS, changed_at_ns=5, applied_at_ns=3)

    def said(**aside: str) -> VersionProgress:
        return VersionProgress(
            config_id="c", version=7, state=S.SUCCESS, error="", applied_at_ns=None, set_aside=aside
        )

    assert deployment.advanced(served, said(), sent_at_ns=1, now_ns=9) is None
    partly = deployment.advanced(served, said(u="host not found in upstream"), sent_at_ns=1, now_ns=9)
    assert partly is not None
    assert (partly.state, partly.set_aside) == (S.SUCCESS, {"u": "host not found in upstream"})
    whole = deployment.advanced(partly, said(), sent_at_ns=1, now_ns=10)
    assert whole is not None
    assert whole.set_aside == {}


# Trying again.


@pytest.mark.parametrize("error", [FULL_DISK, BUSY_PORT, NO_NAME])
async def test_what_failed_for_a_passing_reason_is_sent_again_later_each_time(rig: Rig, error: str) -> None:
    agent = await connected(rig, "web-01")
    for attempt in (1, 2, 3):
        update = await agent.next("config_update")
        assert (update.version, last(rig, agent).spec.attempt) == (1, attempt)
        await agent.status(update, "PENDING", "FAILED", error=error)
    update = await agent.next("config_update")
    await agent.status(update, "SUCCESS")
    await until(lambda: rig.deployment_states(agent.agent_id) == {1: S.SUCCESS})


async def test_an_alert_that_ends_and_a_retry_that_is_asked_for_do_not_wait(tmp_path: Path) -> None:
    async with agents_rig(tmp_path, policy=SLOW) as rig:
        agent = await connected(rig, "web-01")
        await agent.health(0, alerts=[pb.Alert(id="disk_full", severity="warning", message="full")])
        await until(lambda: rig.alerts(agent.agent_id))
        await agent.status(await agent.next("config_update"), "FAILED", error=FULL_DISK)
        await until(lambda: rig.deployment_states(agent.agent_id) == {1: S.FAILED})
        await agent.health(0)  # the disk has room again
        update = await agent.next("config_update")

        await agent.status(update, "FAILED", error='unknown directive "x"')
        await until(lambda: rig.deployment_states(agent.agent_id) == {1: S.FAILED})
        assert rig.side.controller.retry(rig.stored(agent.agent_id))
        assert (await agent.next("config_update")).version == 1
        agent.leave()
        await until(lambda: not rig.side.controller.retry(rig.stored(agent.agent_id)))


async def test_parts_that_were_set_aside_are_tried_again_and_their_return_is_noted(rig: Rig) -> None:
    agent = await connected(rig, "web-01")
    update = await agent.next("config_update")
    said = {"virtual_host/h-1": NO_NAME, "nonsense": "is not kept"}
    status = pb.ConfigStatus(
        config_id=update.config_id, version=1, status="SUCCESS", error_message="1 set aside", set_aside=said
    )
    await agent.send(config_status=status)
    await until(lambda: rig.deployment_states(agent.agent_id) == {1: S.SUCCESS})
    kept = last(rig, agent).status
    assert kept is not None
    assert kept.set_aside == {"virtual_host/h-1": NO_NAME}
    await agent.health(1)

    update = await agent.next("config_update")
    assert update.version == 1
    await agent.health(1)  # it serves what it served: that says nothing of this try
    await agent.status(update, "PENDING", "SUCCESS")
    await until(lambda: (now := last(rig, agent).status) and now.state is S.SUCCESS and not now.set_aside)


# In service, and then the next.


async def test_a_version_that_a_report_shows_in_service_stays_a_success_when_the_next_follows(
    rig: Rig,
) -> None:
    """Some agents say nothing of versions but what their health reports say."""
    agent = await connected(rig, "web-01")
    await agent.next("config_update")
    await rig.host("example.com")
    second = await agent.next("config_update")
    await agent.health(1)
    await until(lambda: rig.deployment_states(agent.agent_id)[1] == S.SUCCESS)
    await agent.status(second, "SUCCESS")
    await until(lambda: rig.deployment_states(agent.agent_id) == {1: S.SUCCESS, 2: S.SUCCESS})


async def test_a_steady_stream_of_changes_goes_out_in_bounded_time_and_few_versions(tmp_path: Path) -> None:
    policy = AgentPolicy(
        first_report_seconds=3600,
        debounce_seconds=0.3,
        debounce_limit_seconds=1.0,
        heartbeat_seconds=3600,  # this clock goes on while the disk and the stream take their time
        apply_seconds=3600,
    )
    clock, changes = VirtualClock(), 0
    async with agents_rig(tmp_path, policy=policy, clock=clock) as rig:
        agent = await connected(rig, "web-01", version=1)
        await until(lambda: rig.side.presences.serving(agent.agent_id))
        seen: list[int] = []

        async def serve() -> None:
            while True:
                update = await agent.next("config_update")
                seen.append(update.version)
                await agent.status(update, "PENDING", "VALIDATING", "APPLYING", "SUCCESS")
                await agent.health(update.version)

        async def change() -> None:
            """One more, sooner than any pause that would let the last ones go."""
            nonlocal changes
            await rig.host(f"h{changes}.example")
            changes += 1
            await asyncio.sleep(0.002)
            await clock.advance(0.1)

        async with asyncio.TaskGroup() as tasks, asyncio.timeout(60):
            serving = tasks.create_task(serve())
            while not seen:
                await change()  # the first of them do not wait for the last
            for _ in range(20):
                await change()
            while rig.deployment_states(agent.agent_id).get(changes + 1) != S.SUCCESS:
                await clock.advance(0.1)
                await asyncio.sleep(0.005)
            serving.cancel()
    assert len(seen) <= changes * 0.1 + 2, "one a second, and one at the end"
    assert seen == sorted(set(seen))


# After a backup was restored.


async def test_versions_go_on_above_the_highest_that_an_agent_reports(rig: Rig) -> None:
    await rig.host("example.com")
    agents = [await connected(rig, f"web-{number}", version=2) for number in range(2)]
    await agents[0].health(57, checksum="of a version that the restored store never saw")
    update = await agents[0].next("config_update")
    assert (update.version, len(update.virtual_hosts)) == (58, 1)
    made = rig.store.list(CONFIG_VERSION, rig.scope)[-1].spec
    assert (made.version, made.cause, made.subject) == (58, "agent.ahead", agents[0].agent_id)
    await rig.host("other.example")
    assert (await agents[0].next("config_update")).version == 59


async def test_a_version_that_was_never_sent_is_not_taken_by_its_number_alone(rig: Rig) -> None:
    agent = await connected(rig, "web-01")
    await agent.status(await agent.next("config_update"), "SUCCESS")
    await agent.health(1)
    await until(lambda: rig.deployment_states(agent.agent_id) == {1: S.SUCCESS})
    agent.leave()
    await until(lambda: rig.side.presences.get(agent.agent_id) is None)
    await rig.host("example.com")  # its version 2 is another than the one that a lost store sent
    await agent.open()
    await agent.health(2)
    assert (await agent.next("config_update")).version == 2
    agent.leave()
    await agent.open()
    await agent.health(2, checksum=last(rig, agent).spec.checksum)
    await until(lambda: rig.deployment_states(agent.agent_id)[2] == S.SUCCESS)


async def test_agents_are_told_which_store_the_server_has(rig: Rig) -> None:
    agent = await rig.agent("web-01")
    welcome = await agent.open()
    assert rig.store.lineage
    assert welcome.lineage == rig.store.lineage


async def test_an_agent_that_claims_to_be_far_ahead_is_not_believed(rig: Rig) -> None:
    agent = await connected(rig, "web-01", version=AHEAD_LIMIT + 2)
    await until(
        lambda: (
            (e := rig.side.controller.reconciler.explain(agent.agent_id))
            and "FAR_AHEAD" in [one.code for one in e.reasons]
        )
    )
    assert rig.store.list(CONFIG_VERSION, rig.scope)[-1].spec.version == 1


async def test_one_agent_cannot_make_versions_for_everybody_without_pause(tmp_path: Path) -> None:
    async with agents_rig(tmp_path, policy=AgentPolicy(first_report_seconds=1.0)) as rig:
        agent = await connected(rig, "web-01", version=5)
        await until(lambda: rig.store.list(CONFIG_VERSION, rig.scope)[-1].spec.version == 6)
        await agent.health(500)
        await until(
            lambda: (
                (e := rig.side.controller.reconciler.explain(agent.agent_id))
                and any("500" in one.message for one in e.reasons)
            )
        )
        assert rig.store.list(CONFIG_VERSION, rig.scope)[-1].spec.version == 6
