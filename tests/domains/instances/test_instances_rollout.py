"""Templates of a group that go out in waves: instances of a cloud that exists only here, in virtual time."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from support.instances.controller_rig import GROUP, Rig, rig, wanted
from support.instances.instances_lab import TENANT

from fleetplane.domains.instances.kinds import GROUP as GROUP_KIND
from fleetplane.domains.instances.kinds import (
    GroupOverride,
    HealthReport,
    Instance,
    group_scope,
    tenant_scope,
)
from fleetplane.domains.instances.records.reports import InstanceReports
from fleetplane.domains.instances.rollout import GroupTemplates
from fleetplane.domains.instances.rules.decide import State, state
from fleetplane.domains.instances.rules.replacing import is_well
from fleetplane.fleet.freeze import Freezes
from fleetplane.fleet.rollouts.driver import key_of
from fleetplane.fleet.rollouts.records import PolicySpec, Rollout, status_of
from fleetplane.fleet.rollouts.rollouts import Rollouts, Start
from fleetplane.fleet.rollouts.rules.policy import OnHalt, Policy
from fleetplane.fleet.rollouts.rules.states import ENDED, RolloutPhase

SCOPE = group_scope(TENANT, GROUP)
SURGE = 4
WAVES = Policy(
    waves=("1", "25%", "rest"),
    max_in_flight=str(SURGE),
    soak_seconds=2.0,
    confirm_seconds=30.0,
    on_halt=OnHalt.ROLL_BACK,
)


def template(size: int, image: str, colour: str = "blue") -> dict[str, Any]:
    config = wanted(size, create_rate_limit="1s", default_drain_timeout="5s")
    config["templates"]["worker"]["args"] = {"Image": image}
    config["templates"]["worker"]["vars"]["Colour"] = colour
    return config


@dataclass
class Fleet:
    """A group, and a server's rollouts; agents of good images register by themselves and report."""

    place: Rig
    templates: GroupTemplates
    rollouts: Rollouts
    bad: str = ""
    """An image whose agents never come."""
    least: int = 10**6
    """The fewest instances that were at work at any time."""
    most: int = 0
    """The most that stood, without those that drain."""
    ever: set[str] = field(default_factory=set)
    """Instances that were ever made from the bad image."""

    async def step(self) -> None:
        rollout = self.running()
        if rollout is not None:
            await self.rollouts.driver.pass_over(key_of(rollout))
        coming = [one.name for one in self.standing(State.PROVISIONED) if not self._is_bad(one)]
        if coming:
            await self.place.register(*coming)
        for one in self.standing(State.REGISTERED):
            view = self.place.groups.view_of(one)
            assert view is not None
            self.place.reports.take(HealthReport(instance=one.name, config_hash=view.runtime_hash))
        self.place.silent |= {one.name for one in self.place.live()}  # what it reports has no hashes
        await self.place.advance(1.0)
        self.least = min(self.least, self.at_work())
        self.most = max(self.most, len(self.standing()))
        self.ever |= {one.name for one in self.place.all() if self._is_bad(one)}

    def _is_bad(self, instance: Instance) -> bool:
        request = self.place.provider.instances.get(instance.name)
        return bool(self.bad) and request is not None and self.image(instance) == self.bad

    def image(self, instance: Instance) -> str:
        """What the cloud was asked for."""
        return IMAGES.get(instance.name, "")

    def standing(self, *states: State) -> list[Instance]:
        wanted = states or (State.PENDING, State.PROVISIONED, State.REGISTERED)
        return [one for one in self.place.all() if state(one) in wanted]

    def at_work(self) -> int:
        policy, now_ns = self.place.groups.policy(), self.place.clock.now_ns()
        return sum(
            is_well(self.templates._member(one), policy, now_ns)
            for one in self.place.all()
            if state(one) is State.REGISTERED
        )

    def running(self) -> Rollout | None:
        found = [one for one in self.rollouts.book.list() if status_of(one).settled != status_of(one).phase]
        return next(iter(found), None)

    async def until_ended(self, *, steps: int = 400) -> Rollout:
        for _ in range(steps):
            await self.step()
            rollout, *_ = self.rollouts.book.list()
            if status_of(rollout).phase in ENDED and self.running() is None:
                return rollout
        raise AssertionError(f"it is {status_of(self.rollouts.book.list()[0])}")

    async def change(self, config: dict[str, Any]) -> None:
        await self.place.configure(config)
        await self.rollouts.follow_policy(f"instances.template|{SCOPE}")


IMAGES: dict[str, str] = {}
"""By instance: the image that the cloud was asked for."""


def _made(place: Rig) -> GroupTemplates:
    made = GroupTemplates(place.store, place.groups, place.instances, place.reports, place.clock)
    place.groups.hold_by(made.hold)
    place.store.add_hook(made.commit_hook)
    return made


@asynccontextmanager
async def fleet(folder: Path, size: int) -> AsyncIterator[Fleet]:
    """So many instances of the image `one`, under a policy."""
    IMAGES.clear()
    async with rig(folder, template(size, "one")) as place:
        place.provider.on_create = lambda request: IMAGES.update(
            {request.instance_id: str(request.args.get("Image"))}
        )
        templates = _made(place)
        rollouts = Rollouts(place.store, place.clock, [templates], Freezes(place.store, place.clock))
        made = Fleet(place, templates, rollouts)
        for _ in range(10 * size + 60):
            if made.at_work() == size:
                break
            await made.step()
        assert made.at_work() == size
        await rollouts.set_policy("instances.template", "", PolicySpec(policy=WAVES), actor="ada")
        made.least, made.most = 10**6, 0
        yield made


async def test_a_template_change_over_twenty_instances_never_goes_below_the_wanted_capacity(
    tmp_path: Path,
) -> None:
    async with fleet(tmp_path, 20) as made:
        before = set(made.place.names(State.REGISTERED))
        await made.change(template(20, "two"))
        rollout = await made.until_ended()
        assert status_of(rollout).phase is RolloutPhase.DONE
        assert status_of(rollout).counts == {"confirmed": 20}
        assert made.least == 20, "never fewer at work than are wanted"
        assert made.most <= 20 + SURGE, "and never more above that than the surge"
        after = made.standing()
        assert len(after) == 20
        assert not before & {one.name for one in after}
        assert {made.image(one) for one in after} == {"two"}
        assert {one.spec.place for one in after} == before, "each has the place of one that was there"
        for _ in range(10):  # those replaced end their drains, and nothing else happens
            await made.step()
        assert len(made.place.machines()) == 20


async def test_a_bad_template_stops_at_the_surge_and_goes_away_again(tmp_path: Path) -> None:
    async with fleet(tmp_path, 20) as made:
        before = set(made.place.names(State.REGISTERED))
        made.bad = "broken"
        wide = Policy(
            waves=("50%", "rest"), max_in_flight=str(SURGE), confirm_seconds=30.0, on_halt=OnHalt.ROLL_BACK
        )
        await made.rollouts.set_policy("instances.template", "", PolicySpec(policy=wide), actor="ada")
        await made.change(template(20, "broken"))
        rollout = await made.until_ended()
        assert status_of(rollout).phase is RolloutPhase.ROLLED_BACK
        assert "not confirmed within 30 s" in status_of(rollout).halt[0].message
        assert 1 <= len(made.ever) <= SURGE, "no more than the surge was ever made from it"
        assert made.least == 20
        assert made.most <= 20 + SURGE
        for _ in range(40):
            await made.step()
        assert {one.name for one in made.standing()} == before, "those that were there are there"
        assert made.place.machines() == before
        assert made.least == 20
        await made.change(template(20, "broken"))
        assert len(made.rollouts.book.list()) == 1, "what was rolled back is not rolled out again by itself"


async def test_with_max_unavailable_old_ones_do_not_wait_and_no_more_than_that_are_missing(
    tmp_path: Path,
) -> None:
    async with fleet(tmp_path, 8) as made:
        policy = Policy(
            waves=("50%", "rest"),
            max_in_flight="4",
            max_unavailable="25%",
            soak_seconds=2.0,
            confirm_seconds=30.0,
            on_halt=OnHalt.ROLL_BACK,
        )
        await made.rollouts.set_policy("instances.template", "", PolicySpec(policy=policy), actor="ada")
        await made.change(template(8, "two"))
        rollout = await made.until_ended()
        assert status_of(rollout).counts == {"confirmed": 8}
        assert 6 <= made.least < 8, "some were missing at some time, and never more than a quarter"
        assert {made.image(one) for one in made.standing()} == {"two"}
        made.least, made.bad = 10**6, "broken"
        await made.change(template(8, "broken"))
        rollout = await made.until_ended()
        assert status_of(rollout).phase is RolloutPhase.ROLLED_BACK
        assert made.least == 6, "a bad template takes no more"
        for _ in range(60):
            await made.step()
            if made.at_work() == 8 and {made.image(one) for one in made.standing()} == {"two"}:
                break
        assert made.at_work() == 8
        assert {made.image(one) for one in made.standing()} == {"two"}


async def test_files_alone_are_sent_to_the_instances_that_are_there(tmp_path: Path) -> None:
    async with fleet(tmp_path, 3) as made:
        before = set(made.place.names(State.REGISTERED))
        await made.change(template(3, "one", colour="green"))
        rollout = await made.until_ended()
        assert status_of(rollout).counts == {"confirmed": 3}
        assert {one.name for one in made.standing()} == before
        views = [made.place.groups.view_of(one) for one in made.standing()]
        assert [view.group.vars["Colour"] for view in views if view is not None] == ["green"] * 3


async def test_a_group_is_held_through_a_restart_with_another_document_and_lost_ones_are_made_as_before(
    tmp_path: Path,
) -> None:
    async with fleet(tmp_path, 3) as made:
        await made.rollouts.set_policy(
            "instances.template", "", PolicySpec(policy=WAVES, automatic=False), actor="ada"
        )
        await made.templates._hold_all()  # as its task does when it hears of the policy
        made.place.groups._loaded = None  # a server that starts knows of no document
        await made.place.configure(template(3, "two"))
        assert made.templates.waiting(SCOPE) == made.templates.newest(SCOPE)
        lost = made.place.names(State.REGISTERED)[0]
        made.place.provider.vanish(lost)
        for _ in range(60):
            await made.step()
            if lost not in {one.name for one in made.standing()} and made.at_work() == 3:
                break
        assert made.at_work() == 3
        assert {made.image(one) for one in made.standing()} == {"one"}
        await made.rollouts.remove_policy("instances.template", "", actor="ada")
        await made.place.configure(template(3, "three"))
        assert made.templates.waiting(SCOPE) == "", "without a policy a change goes to all"


async def test_a_change_of_the_group_at_run_time_waits_too_but_not_its_size(tmp_path: Path) -> None:
    async with fleet(tmp_path, 2) as made:
        manual = PolicySpec(policy=WAVES, automatic=False)
        await made.rollouts.set_policy("instances.template", SCOPE, manual, actor="ada")
        override = GroupOverride(template="", size=3, instance_type="large")
        key = GROUP_KIND.key(tenant_scope(TENANT), GROUP)
        await made.place.store.transact(
            lambda draft: draft.put(GROUP_KIND, key.scope, key.name, spec=override),
            actor="ada",
            action="test",
            touches=[key],
        )
        assert made.templates.waiting(SCOPE) == made.templates.newest(SCOPE)
        for _ in range(60):
            await made.step()
            if made.at_work() == 3:
                break
        assert {one.spec.instance_type for one in made.standing()} == {""}
        start = Start(
            subject="instances.template", scope=f"{TENANT}/{GROUP}", to="newest", policy=None, actor="ada"
        )
        await made.rollouts.start(start)
        rollout = await made.until_ended()
        assert status_of(rollout).counts == {"confirmed": 3}
        assert {one.spec.instance_type for one in made.standing()} == {"large"}


async def test_after_a_start_of_the_server_instances_have_their_time_to_report(tmp_path: Path) -> None:
    async with fleet(tmp_path, 2) as made:
        place = made.place
        silent = InstanceReports(place.clock)  # those of a server that has heard of nobody yet
        after = GroupTemplates(place.store, place.groups, place.instances, silent, place.clock)
        assert [fact.healthy for fact in after.targets(SCOPE).values()] == [True, True]
        assert [fact.version for fact in after.targets(SCOPE).values()] == ["", ""], "nobody knows yet"
        for _ in range(32):  # a report is due every ten seconds, and three may be missing
            await made.step()
        assert [fact.healthy for fact in made.templates.targets(SCOPE).values()] == [True, True]
        assert [fact.healthy for fact in after.targets(SCOPE).values()] == [False, False]
