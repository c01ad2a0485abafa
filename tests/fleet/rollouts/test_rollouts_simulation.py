"""Rollouts over simulated agents in virtual time: large ones, and servers that stop between any two steps."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import pytest
from support.fleet.declared_actions import carried_out
from support.fleet.simulated_subject import Killed, SimulatedAgent, SimulatedSubject

from fleetplane.fleet.freeze import Freezable, Freezes, FreezeSwitch
from fleetplane.fleet.rollouts import views
from fleetplane.fleet.rollouts.driver import key_of
from fleetplane.fleet.rollouts.gates import GateSources
from fleetplane.fleet.rollouts.records import KINDS, PolicySpec, Rollout, status_of
from fleetplane.fleet.rollouts.resource import ROLLOUTS, RolloutCollector, RolloutExplainer
from fleetplane.fleet.rollouts.rollouts import Rollouts, RolloutVerb, Start
from fleetplane.fleet.rollouts.rules.policy import Gate, OnHalt, Policy
from fleetplane.fleet.rollouts.rules.states import ENDED, OUTCOMES, RolloutPhase
from fleetplane.fleet.rollouts.settings import RolloutSettings
from fleetplane.kernel.errors import FailedPrecondition, InvalidArgument, NotFound
from fleetplane.kernel.freeze import FREEZE
from fleetplane.kernel.reconcile import LEASE
from fleetplane.kernel.store import Store, StoreSettings
from fleetplane.kernel.values.times import NS
from fleetplane.sim.clock import VirtualClock

SCOPE = "tenant/a"
START = Start(subject="sim.version", scope="tenant/a", to="newest", policy=None, actor="alice")
QUICK = Policy(waves=("2", "rest"), soak_seconds=0.0, confirm_seconds=60.0)


class Site:
    """A store, agents, and as many servers after one another as the test wants."""

    def __init__(self, store: Store, clock: VirtualClock, subject: SimulatedSubject) -> None:
        self.store = store
        self.clock = clock
        self.subject = subject
        self.servers = 0
        self.rollouts = self.another_server()

    def another_server(self) -> Rollouts:
        """The one before is gone, with everything that it knew."""
        self.servers += 1
        self.rollouts = Rollouts(self.store, self.clock, [self.subject], Freezes(self.store, self.clock))
        self.rollouts.take_over()
        return self.rollouts

    async def start(self, policy: Policy | None = QUICK, **more: object) -> Rollout:
        wanted = Start(subject="sim.version", scope=SCOPE, to="newest", policy=policy, actor="alice", **more)  # type: ignore[arg-type]
        return await self.rollouts.start(wanted)

    def now(self, rollout: Rollout) -> Rollout:
        return self.rollouts.book.get(rollout.name)

    async def step(self, rollout: Rollout) -> RolloutPhase:
        """One pass; then as much time goes by as the pass said, or a second."""
        result = await self.rollouts.driver.pass_over(key_of(rollout))
        await self.clock.advance(min(1.0, result.requeue_after_seconds or 1.0))
        return status_of(self.now(rollout)).phase

    async def until(self, rollout: Rollout, *phases: RolloutPhase, passes: int = 500) -> None:
        for _ in range(passes):
            if await self.step(rollout) in phases:
                return
        raise AssertionError(f"it is {views.whole(self.rollouts, self.now(rollout))}")

    async def order(self, rollout: Rollout, verb: str, **more: object) -> None:
        """Through the declared action where there is one of that name, as people do."""
        if verb in {action.name for action in ROLLOUTS.actions}:
            await carried_out(ROLLOUTS, self, self.store, self.clock, rollout.name, verb, more)
        else:
            await self.rollouts.order(rollout, RolloutVerb(verb=verb, actor="alice", **more))  # type: ignore[arg-type]

    def counts(self, rollout: Rollout) -> dict[str, int]:
        return status_of(self.now(rollout)).counts


@pytest.fixture
async def site(tmp_path: Path) -> AsyncIterator[Site]:
    clock = VirtualClock()
    settings = StoreSettings(path=tmp_path / "fleetplane.db")
    async with Store.open(settings, kinds=(*KINDS, FREEZE, LEASE), clock=clock) as store:
        agents = {f"agent-{at:04d}": SimulatedAgent() for at in range(6)}
        yield Site(store, clock, SimulatedSubject(clock, agents))


async def test_two_thousand_agents_over_five_waves_and_a_server_that_stops_at_every_step(site: Site) -> None:
    chance = random.Random(17)  # the same fleet every time
    agents = {f"agent-{at:04d}": SimulatedAgent() for at in range(2000)}
    names = list(agents)
    for name in chance.sample(names, 60):
        agents[name].refuses = "2"
    away = chance.sample([name for name in names if not agents[name].refuses], 100)
    for name in away:
        agents[name].online = False
    for agent in agents.values():
        agent.applies_seconds = chance.uniform(0.5, 8.0)
    site.subject.agents = agents
    policy = Policy(
        waves=("20", "5%", "20%", "50%", "rest"),
        max_in_flight="50%",
        max_failures="4%",
        max_offline="20%",
        soak_seconds=30.0,
        deliver_seconds=1200.0,
    )
    rollout = await site.start(policy)
    waves_seen = set()
    for turn in range(2000):
        site.subject.kills = 1 if turn % 3 == 0 else 0  # before anything was asked, and after
        try:
            phase = await site.step(rollout)
        except Killed:
            phase = status_of(site.now(rollout)).phase
        site.another_server()
        waves_seen.add(status_of(site.now(rollout)).wave)
        if status_of(site.now(rollout)).wave == 4:
            for name in away[:40]:
                agents[name].online = True
        if turn % 20 == 19:
            await site.clock.advance(61.0)  # nobody is given up by a server that has only just started
        if phase in ENDED:
            break
    assert phase is RolloutPhase.DONE, views.whole(site.rollouts, site.now(rollout))
    assert waves_seen >= {1, 2, 3, 4, 5}
    found = views.whole(site.rollouts, site.now(rollout))
    states = Counter(target.state for target in found.targets)
    assert states == {"confirmed": 1880, "failed": 60, "not_delivered": 60}
    assert len(found.targets) == found.total == 2000
    assert sum(agent.version == "2" for agent in agents.values()) == 1880
    assert site.servers > 50
    site.subject.kills = 0
    await site.step(rollout)
    assert site.subject.everyone == "2", "those who return get it"


async def test_every_server_goes_on_where_the_last_one_was_also_on_the_way_back(site: Site) -> None:
    for agent in list(site.subject.agents.values())[2:]:
        agent.refuses = "2"
    rollout = await site.start(Policy(waves=("2", "rest"), soak_seconds=5.0, on_halt=OnHalt.ROLL_BACK))
    for turn in range(200):
        site.subject.kills = turn % 2
        with suppress(Killed):
            phase = await site.step(rollout)
        site.another_server()
        if phase in ENDED:
            break
    assert phase is RolloutPhase.ROLLED_BACK
    assert site.counts(rollout) == {"rolled_back": 6}
    assert {agent.wanted for agent in site.subject.agents.values()} == {"1"}


async def test_a_gate_that_is_breached_halts_after_the_canary_and_rolls_back(site: Site) -> None:
    gate = Gate(name="errors", query="error_rate", max=0.01, halts=True)
    policy = Policy(waves=("1", "rest"), gates=(gate,), on_halt=OnHalt.ROLL_BACK)
    site.subject.error_rate = 0.5
    rollout = await site.start(policy)
    await site.until(rollout, RolloutPhase.ROLLED_BACK)
    assert site.counts(rollout) == {"never_started": 5, "rolled_back": 1}
    assert sum("2" in agent.ever for agent in site.subject.agents.values()) == 1
    found = views.whole(site.rollouts, site.now(rollout))
    assert found.halt[0].message == "gate errors: error_rate is 0.5, more than 0.01"
    assert [one.after for one in found.history][-3:] == ["halted", "rolling_back", "rolled_back"]


async def test_it_is_explained_why_a_rollout_waits_has_halted_and_which_targets_failed(site: Site) -> None:
    def told(rollout: Rollout) -> dict[str, str]:
        explainer = RolloutExplainer(site.rollouts, site.clock)
        assert explainer.locate("", rollout.name) == explainer.locate("tenant/a", rollout.name) == SCOPE
        with pytest.raises(NotFound):
            explainer.locate("tenant/b", rollout.name)
        found = explainer.explain(SCOPE, rollout.name)
        return {one.code: one.message for each in found for one in each.explanation.reasons}

    waiting = await site.start(Policy(waves=("1", "rest"), approvals=(1,)))
    await site.rollouts.driver.reconciler._pass(key_of(waiting))  # which keeps what the pass said
    assert told(waiting)["APPROVAL"] == "wave 1 waits for an approval"
    await site.order(waiting, "abort", reason="not today")
    await site.step(waiting)
    assert told(waiting)["ABORTED"].endswith("not today")

    site.subject.agents["agent-0000"].refuses = "2"
    halted = await site.start()
    await site.until(halted, RolloutPhase.HALTED)
    assert told(halted)["TARGET"] == "agent-0000: refused"
    assert told(halted)[status_of(site.now(halted)).halt[0].code]


async def test_a_gate_that_cannot_be_evaluated_is_never_passed(site: Site) -> None:
    settings = RolloutSettings(
        prometheus_url="http://127.0.0.1:1", prometheus_scopes=("*",), gate_timeout_seconds=30.0
    )
    freezes = Freezes(site.store, site.clock)
    site.rollouts = Rollouts(site.store, site.clock, [site.subject], freezes, GateSources(settings))
    gate = Gate(name="up", query="prometheus up", min=1.0)
    rollout = await site.start(
        Policy(waves=("1", "rest"), gates=(gate,), soak_seconds=1.0, max_soak_seconds=5.0)
    )
    await site.until(rollout, RolloutPhase.HALTED)
    (reason,) = status_of(site.now(rollout)).halt
    assert reason.message.startswith("gate up: there is no data for prometheus up (ConnectError")
    assert site.counts(rollout) == {"confirmed": 1, "pending": 5}
    shown = views.planned(await site.rollouts.plan(replace(START, policy=Policy(gates=(gate,)))))
    assert (shown.gates[0].passed, shown.gates[0].value) == (False, None)


async def test_a_freeze_holds_it_and_lifting_it_lets_it_go_on(site: Site) -> None:
    switch = FreezeSwitch(
        site.store, site.clock, {"sim": Freezable(stops="agents", scopes=("tenant/{tenant}",))}
    )
    await switch.freeze(SCOPE, domains=["sim"], reason="incident", actor="bob", expires_at_ns=None)
    rollout = await site.start()
    for _ in range(5):
        await site.step(rollout)
    assert all(agent.wanted == "1" for agent in site.subject.agents.values())
    result = await site.rollouts.driver.pass_over(key_of(rollout))
    assert result.explanation[0].message == "frozen at tenant/a by bob: incident"
    await switch.lift(SCOPE, domains=["sim"], actor="bob")
    await site.until(rollout, RolloutPhase.DONE)


async def test_orders_of_people_are_kept_with_who_gave_them(site: Site) -> None:
    rollout = await site.start(Policy(waves=("1", "rest"), soak_seconds=0.0, approvals=(2,)))
    await site.until(rollout, RolloutPhase.WAITING)
    await site.order(rollout, "pause", reason="lunch")
    assert (await site.step(rollout)) is RolloutPhase.PAUSED
    await site.order(rollout, "resume")
    await site.order(rollout, "skip", targets=["agent-0003"])
    await site.order(rollout, "approve")
    await site.until(rollout, RolloutPhase.DONE)
    assert site.counts(rollout) == {"confirmed": 5, "skipped": 1}
    history = status_of(site.now(rollout)).history
    assert [(one.actor, one.reason) for one in history if one.after is RolloutPhase.PAUSED] == [
        ("alice", "lunch")
    ]
    await site.order(rollout, "undo")
    await site.until(rollout, RolloutPhase.ROLLED_BACK)
    assert site.counts(rollout) == {"rolled_back": 5, "skipped": 1}
    assert site.subject.everyone == "1", "whoever comes new gets it too"
    with pytest.raises(NotFound):
        await site.order(rollout, "skip", targets=["nobody"])
    with pytest.raises(InvalidArgument):
        await site.order(rollout, "explode")


async def test_an_order_to_abort_leaves_what_is_not_reached_as_it_is(site: Site) -> None:
    rollout = await site.start(Policy(waves=("1", "rest"), soak_seconds=0.0, approvals=(2,)))
    await site.until(rollout, RolloutPhase.WAITING)
    await site.order(rollout, "abort", reason="wrong version")
    await site.until(rollout, RolloutPhase.ABORTED)
    assert site.counts(rollout)["confirmed"] == 1
    assert sum(one.version == "2" for one in site.subject.agents.values()) == 1


async def test_what_failed_is_tried_again(site: Site) -> None:
    site.subject.agents["agent-0000"].refuses = "2"
    rollout = await site.start()
    await site.until(rollout, RolloutPhase.HALTED)
    site.subject.agents["agent-0000"].refuses = ""
    await site.order(rollout, "retry")
    await site.until(rollout, RolloutPhase.DONE)
    assert site.subject.retried == ["agent-0000"]
    assert site.counts(rollout) == {"confirmed": 6}


async def test_a_newer_rollout_supersedes_only_if_it_says_so(site: Site) -> None:
    first = await site.start()
    await site.step(first)
    site.subject.latest = "3"
    with pytest.raises(FailedPrecondition) as caught:
        await site.start()
    assert caught.value.details["rollout"] == first.name
    second = await site.start(supersede=True)
    assert status_of(site.now(first)).phase is RolloutPhase.SUPERSEDED
    assert all(state in {*OUTCOMES} for state in site.counts(first))
    await site.until(second, RolloutPhase.DONE)
    assert {agent.version for agent in site.subject.agents.values()} == {"3"}
    with pytest.raises(FailedPrecondition, match="came after it"):
        await site.order(first, "undo")


async def test_nothing_to_move_and_a_gate_that_cannot_be_measured_are_refused(site: Site) -> None:
    with pytest.raises(InvalidArgument) as caught:
        await site.start(Policy(gates=(Gate(name="g", query="happiness", max=1.0),)))
    assert caught.value.field == "gates[0].query"
    site.subject.latest = "1"
    with pytest.raises(FailedPrecondition, match="all 6 targets have version 1"):
        await site.start()


async def test_a_dry_run_tells_waves_and_targets_and_starts_nothing(site: Site) -> None:
    site.subject.agents["agent-0001"].online = False
    site.subject.agents["agent-0005"] = SimulatedAgent(version="2", wanted="2")
    site.subject.agents["agent-0004"].labels["ring"] = "first"
    policy = Policy(waves=("label ring=first", "50%", "rest"))
    wanted = Start(subject="sim.version", scope=SCOPE, to="newest", policy=policy, actor="alice")
    found = await site.rollouts.plan(wanted)
    assert [list(one.targets) for one in found.waves] == [
        ["agent-0004"],
        ["agent-0000", "agent-0001", "agent-0002"],
        ["agent-0003"],
    ]
    assert (list(found.waves[1].offline), found.already) == (["agent-0001"], 1)
    assert site.rollouts.book.list() == []


async def test_a_dry_run_rehearses_gates_on_the_last_hour(site: Site) -> None:
    site.subject.error_rate = 0.02
    gates = (
        Gate(name="errors", query="error_rate", max=0.01),
        Gate(name="low", query="error_rate", max=0.05),
        Gate(name="more", query="error_rate", max_increase=0.01),
    )
    wanted = Start(subject="sim.version", scope=SCOPE, to="newest", policy=Policy(gates=gates), actor="alice")
    shown = views.planned(await site.rollouts.plan(wanted))
    assert [(one.name, one.value, one.baseline, one.passed) for one in shown.gates] == [
        ("errors", 0.02, None, False),
        ("low", 0.02, None, True),
        ("more", 0.02, 0.02, True),
    ]
    assert shown.gates[0].message == "gate errors: error_rate is 0.02, more than 0.01"
    earlier, current, *_ = reversed(site.subject.measured)
    assert (current.from_ns - earlier.from_ns, current.to_ns) == (3600 * NS, site.clock.now_ns())
    assert site.rollouts.book.list() == []
    site.subject.error_rate = None
    shown = views.planned(await site.rollouts.plan(wanted))
    assert not any(one.passed for one in shown.gates), "without data no gate is passed"


async def test_a_policy_starts_a_rollout_for_each_new_version_and_none_twice(site: Site) -> None:
    rollouts = site.rollouts
    await rollouts.set_policy("sim.version", "", PolicySpec(policy=QUICK), actor="alice")
    await rollouts.follow_policy("sim.version|tenant/a")
    await rollouts.follow_policy("sim.version|tenant/a")
    (first,) = rollouts.book.list()
    assert (first.spec.to, first.spec.automatic) == ("2", True)
    site.subject.latest = "3"
    result = await rollouts.follow_policy("sim.version|tenant/a")
    assert "waits for the end of rollout" in result.explanation[0].message
    await site.order(first, "undo")
    await site.until(first, RolloutPhase.ROLLED_BACK)
    await rollouts.follow_policy("sim.version|tenant/a")
    assert [one.spec.to for one in rollouts.book.list()] == ["3", "2"]
    await rollouts.remove_policy("sim.version", "", actor="alice")
    with pytest.raises(NotFound):
        await rollouts.remove_policy("sim.version", "", actor="alice")


async def test_old_rollouts_are_forgotten_but_for_the_last(site: Site) -> None:
    for version in ("2", "3"):
        site.subject.latest = version
        rollout = await site.start()
        await site.until(rollout, RolloutPhase.DONE)
        await site.step(rollout)
    await site.clock.advance(91 * 86_400)
    assert await site.rollouts.book.sweep(site.clock.now_ns()) == 1
    assert [one.spec.to for one in site.rollouts.book.list()] == ["3"]


async def test_metrics_tell_what_is_open_and_what_became_of_targets(site: Site) -> None:
    rollout = await site.start()
    collector = RolloutCollector(site.rollouts)
    open_now = {sample.labels["phase"]: sample.value for sample in next(iter(collector.collect())).samples}
    assert open_now["planned"] == 1
    await site.until(rollout, RolloutPhase.DONE)
    samples = {
        sample.labels["outcome"]: sample.value
        for metric in collector.collect()
        for sample in metric.samples
        if sample.name == "fleetplane_rollout_targets_total"
    }
    assert samples["confirmed"] == 6
    assert set(samples) == set(OUTCOMES)
